//! A real server process for tests, on a free port; it is killed when the test ends.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use helix_client::{Client, Config};
use tokio::process::{Child, Command};

use crate::trio::free_port;

/// Returns a free address on loopback. No client takes its port while the server is down.
pub(crate) fn free_address() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()))
}

/// The server's command line for a data directory.
pub(crate) fn arguments(address: SocketAddr, directory: &Path) -> Vec<String> {
    let directory = directory.display();
    vec![
        "--node-id=1".to_owned(),
        format!("--listen-addr={address}"),
        // The default port derives from the address and may not be free.
        "--admin-addr=off".to_owned(),
        "--topic=default:4".to_owned(),
        format!("--data-dir={directory}"),
    ]
}

pub(crate) fn start(arguments: &[String]) -> Child {
    start_with(arguments, Stdio::null())
}

/// Starts it with this standard error.
pub(crate) fn start_with(arguments: &[String], stderr: Stdio) -> Child {
    Command::new(env!("CARGO_BIN_EXE_helix-server"))
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(stderr)
        .kill_on_drop(true)
        .spawn()
        .expect("the server's binary can be run")
}

/// Kills with SIGKILL and waits for the end.
pub(crate) async fn kill(mut server: Child) {
    server.start_kill().unwrap();
    server.wait().await.unwrap();
}

/// A client that retries across restarts.
pub(crate) fn patient_client(address: SocketAddr, seed: u64) -> Client {
    let mut config = Config::new([address.to_string()]);
    config.request_timeout = Duration::from_secs(60);
    config.attempt_timeout = Duration::from_secs(5);
    config.connect_timeout = Duration::from_secs(1);
    config.backoff_max = Duration::from_millis(100);
    config.seed = Some(seed);
    Client::new(config).unwrap()
}

/// Returns the seed of `HELIX_SEED` or the default, and prints it for reproduction.
pub(crate) fn seed(default: u64) -> u64 {
    let seed = std::env::var("HELIX_SEED").ok().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or(default);
    println!("seed {seed} (set HELIX_SEED to repeat or vary)");
    seed
}
