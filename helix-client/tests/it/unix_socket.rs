//! Unix domain sockets on which no node listens.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use helix_client::{Client, Config, Error};

async fn failure(path: &Path) -> Error {
    // Long enough for an attempt, even if the process stalls.
    let request_timeout = Duration::from_secs(2);
    let config = Config::new([format!("unix:{}", path.display())]);
    Client::connect(Config { request_timeout, ..config }).await.unwrap_err()
}

#[tokio::test]
async fn the_error_names_the_socket_and_its_problem() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("helix.sock");
    let shown = format!("unix:{}", path.display());
    let missing = failure(&path).await;
    // The listener leaves its file behind, as a killed process does.
    drop(UnixListener::bind(&path).unwrap());
    let ended = failure(&path).await;
    for (error, problem) in [(missing, "no node listens there"), (ended, "has ended")] {
        assert!(error.message.contains(&shown) && error.message.contains(problem), "{error}");
        assert!(error.retryable && !error.may_have_applied, "{error}");
    }
}

#[tokio::test]
async fn malformed_socket_addresses_are_rejected() {
    for address in ["unix:helix.sock", "unix:", "unix:/run/"] {
        let error = Client::new(Config::new([address])).unwrap_err();
        assert!(error.message.contains("unix:PATH") && !error.retryable, "{error}");
    }
}
