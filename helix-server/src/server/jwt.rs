//! Reads the keys of JWTs again when their file changes.

use std::sync::Arc;

use helix_tls::RELOAD_INTERVAL;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::access::jwt::JwtVerifier;
use crate::config::JwksFile;

/// Reads the file at the interval of the certificates' files, until the guard is dropped.
pub(super) fn watch(verifier: Arc<JwtVerifier>, file: JwksFile) -> DropGuard {
    let stop = CancellationToken::new();
    tokio::spawn(stop.clone().run_until_cancelled_owned(poll(verifier, file)));
    stop.drop_guard()
}

async fn poll(verifier: Arc<JwtVerifier>, file: JwksFile) {
    let mut tick = interval(RELOAD_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let (verifier, file) = (verifier.clone(), file.clone());
        // A stalled disk must not stall the runtime.
        #[expect(clippy::disallowed_methods, reason = "raft/blocking.rs is for logs")]
        let reading = tokio::task::spawn_blocking(move || verifier.reload(file.read()));
        // Ignored: the runtime is shutting down.
        let _ = reading.await;
    }
}
