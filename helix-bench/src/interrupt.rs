//! Requests to stop, by Ctrl-C or SIGTERM.
//!
//! A run that is asked to stop ends its phase and reports what it has measured. A second request
//! ends the process at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;

use anyhow::{Context, Result};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;

use crate::exit;

static IS_REQUESTED: AtomicBool = AtomicBool::new(false);
static REQUESTED: Notify = Notify::const_new();

/// Starts to watch for requests. Returns once a request can no longer end the process.
///
/// # Errors
/// The thread or its runtime could not be started.
pub(crate) fn watch() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("start a runtime")?;
    let (is_watched, watched) = channel();
    let watch = async move {
        let (mut interrupted, mut terminated) =
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        // Ignored: the receiver may be gone.
        let _ = is_watched.send(());
        for is_last in [false, true] {
            tokio::select! {
                _ = interrupted.recv() => {}
                _ = terminated.recv() => {}
            }
            if is_last {
                std::process::exit(exit::INTERRUPTED.into());
            }
            IS_REQUESTED.store(true, Ordering::Relaxed);
            REQUESTED.notify_waiters();
        }
        std::io::Result::Ok(())
    };
    let thread = thread::Builder::new().name("signals".to_owned());
    thread.spawn(move || runtime.block_on(watch)).context("start a thread")?;
    watched.recv().context("watch for signals")
}

/// Reports whether a stop was requested.
pub(crate) fn is_requested() -> bool {
    IS_REQUESTED.load(Ordering::Relaxed)
}

/// Resolves when a stop is requested.
pub(crate) async fn requested() {
    // Registers before the check, so that no request is missed.
    let notified = REQUESTED.notified();
    if !is_requested() {
        notified.await;
    }
}
