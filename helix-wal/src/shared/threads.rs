//! Runs the writer and the keeper on a thread each: step, then wait.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, failed};
use crate::shared::Shared;
use crate::shared::busy_poll::BusyPoll;
use crate::shared::signal::WalThread;
use crate::sync::Builder;
use crate::types::NextStep;

/// Runs `step` on a new thread until it is done.
///
/// The thread drops what `step` owns when it ends or panics, which fails all waiting requests.
pub(crate) fn spawn(
    shared: &Arc<Shared>,
    role: WalThread,
    mut step: impl FnMut(Duration) -> NextStep + Send + 'static,
) -> Result<(), Error> {
    let inner = Arc::clone(shared);
    let may_poll = shared.options.busy_poll && may_poll(role, cpus());
    let mut idle = BusyPoll::new(may_poll, shared.lock().signal(role).raised());
    let name = match role {
        WalThread::Writer => "wal-writer",
        WalThread::Keeper => "wal-keeper",
    };
    let run = move || {
        let clock = inner.clock();
        loop {
            match step(clock()) {
                NextStep::Done => break,
                NextStep::Now => {}
                next @ (NextStep::After(_) | NextStep::Idle) => {
                    let began = clock();
                    idle.poll(next, clock);
                    let woken = inner.wait(role, next);
                    let wait = woken.oldest.map(|since| since.saturating_sub(began));
                    idle.record_wait(wait, woken.group_time);
                }
            }
        }
    };
    let thread = Builder::new().name(name.to_owned()).spawn(run);
    let thread = thread.map_err(|e| failed("spawn", name, &e))?;
    shared.lock().threads.push((thread.thread().id(), thread));
    Ok(())
}

/// Returns whether a thread may busy-poll.
fn may_poll(role: WalThread, cpus: usize) -> bool {
    match role {
        // With one CPU, polling would delay the callers.
        WalThread::Writer => cpus > 1,
        // No caller waits for the keeper.
        WalThread::Keeper => false,
    }
}

/// Returns the number of CPUs that this process may use, by affinity and quota.
fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn only_writer_with_several_cpus_polls() {
        assert!(may_poll(WalThread::Writer, 2));
        assert!(!may_poll(WalThread::Writer, 1));
        assert!(!may_poll(WalThread::Keeper, 2));
    }
}
