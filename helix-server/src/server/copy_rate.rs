//! Applies the largest rate of copies again when it changes in the configuration file.

use std::sync::{Arc, Weak};

use helix_tls::RELOAD_INTERVAL;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::config::CopyRateFile;
use crate::node::Node;

/// Reads the file at the interval of the certificates' files, until the guard is dropped.
pub(super) fn watch(node: &Arc<Node>, file: CopyRateFile) -> DropGuard {
    let stop = CancellationToken::new();
    let polling = poll(Arc::downgrade(node), file);
    tokio::spawn(stop.clone().run_until_cancelled_owned(polling));
    stop.drop_guard()
}

async fn poll(node: Weak<Node>, file: CopyRateFile) {
    let mut tick = interval(RELOAD_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last_problem = String::new();
    loop {
        tick.tick().await;
        let to_read = file.clone();
        // A stalled disk must not stall the runtime.
        #[expect(clippy::disallowed_methods, reason = "raft/blocking.rs is for logs")]
        let reading = tokio::task::spawn_blocking(move || to_read.read());
        // The runtime is shutting down.
        let Ok(read) = reading.await else { return };
        let Some(node) = node.upgrade() else { return };
        match read {
            Ok(copy_rate_max) => {
                last_problem.clear();
                if node.copy_pace().rate_max != copy_rate_max {
                    node.set_copy_rate_max(copy_rate_max);
                    tracing::info!(copy_rate_max, "changed the largest rate of copies");
                }
            }
            Err(problem) if problem != last_problem => {
                tracing::warn!("the rate of copies stays as it is: {problem}");
                last_problem = problem;
            }
            Err(_) => {}
        }
    }
}
