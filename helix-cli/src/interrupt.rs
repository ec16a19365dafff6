//! Ends commands that are asked to stop: by Ctrl-C, SIGTERM or the end of the terminal.
//!
//! A command stops at its next await point. A thread of its own ends the process if it does not,
//! because its output is blocked: `helix consume orders --follow | less`.

use std::sync::OnceLock;
use std::time::Duration;

use helix_server::signals::{StopBounds, StopSignals};

use crate::exit::Exit;

/// Time for a command that can be cancelled at any await point.
pub(crate) const CANCEL_MAX: Duration = Duration::from_secs(1);

/// Time for a member of a consumer group that commits and leaves.
pub(crate) const LEAVE_MAX: Duration = Duration::from_secs(10);

/// Time for a command that waits for acks, or stops nodes and removes their data.
pub(crate) const CLEAN_UP_MAX: Duration = Duration::from_secs(35);

/// Time after a second signal.
const HURRIED_MAX: Duration = Duration::from_secs(1);

/// The signals, once [`watch`] has been called.
static SIGNALS: OnceLock<StopSignals> = OnceLock::new();

/// Starts to watch for signals. A command that is interrupted ends within `stop_max`, and within a
/// second of another signal.
pub(crate) fn watch(stop_max: Duration) {
    let bounds = StopBounds { stop_max, hurried_max: HURRIED_MAX };
    let signals = StopSignals::watch(bounds, |_| std::process::exit(Exit::Interrupted as i32));
    // Without a watch, a signal ends the process at once.
    if let Ok(signals) = signals {
        // Ignored: a process runs one command.
        let _ = SIGNALS.set(signals);
    }
}

/// Resolves when the command is interrupted.
pub(crate) async fn interrupted() {
    match SIGNALS.get() {
        Some(signals) => signals.stopped().await,
        None => std::future::pending().await,
    }
}

/// Resolves when the command is interrupted a second time.
pub(crate) async fn interrupted_again() {
    match SIGNALS.get() {
        Some(signals) => signals.hurried().await,
        None => std::future::pending().await,
    }
}
