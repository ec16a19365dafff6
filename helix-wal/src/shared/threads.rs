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
    let limit = poll_limit(role, cpus(), shared.options.idle_poll);
    let mut idle = BusyPoll::new(limit, shared.lock().signal(role).raised());
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
                    let wanted = inner.wait(role, next);
                    idle.record_wait(wanted.map(|since| since.saturating_sub(began)));
                }
            }
        }
    };
    let thread = Builder::new().name(name.to_owned()).spawn(run);
    let thread = thread.map_err(|e| failed("spawn", name, &e))?;
    shared.lock().threads.push((thread.thread().id(), thread));
    Ok(())
}

/// Returns the maximum time that a thread busy-polls.
fn poll_limit(role: WalThread, cpus: usize, idle_poll: Duration) -> Duration {
    match role {
        WalThread::Writer if cpus > 1 => idle_poll,
        // With one CPU, polling would delay the callers. No caller waits for the keeper.
        WalThread::Writer | WalThread::Keeper => Duration::ZERO,
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
        let limit = Duration::from_micros(500);
        assert_eq!(poll_limit(WalThread::Writer, 2, limit), limit);
        assert_eq!(poll_limit(WalThread::Writer, 1, limit), Duration::ZERO);
        assert_eq!(poll_limit(WalThread::Keeper, 2, limit), Duration::ZERO);
    }
}
