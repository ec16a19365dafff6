//! Gives the writer and the keeper a thread each: step by the log's clock, and wait on a condition.

use std::sync::Arc;
use std::time::Duration;

use crate::Error;
use crate::error::failed;
use crate::idle::Idle;
use crate::shared::{Role, Shared};
use crate::sync::Builder;
use crate::wal::Next;

/// Steps until done. What `step` owns is dropped when it ends or panics, and fails what waits.
pub(crate) fn spawn(
    shared: &Arc<Shared>,
    role: Role,
    mut step: impl FnMut(Duration) -> Next + Send + 'static,
) -> Result<(), Error> {
    let inner = Arc::clone(shared);
    let limit = awake(role, processors(), shared.options.idle_poll);
    let mut idle = Idle::new(limit, shared.lock().signal(role).raised());
    let name = match role {
        Role::Writer => "wal-writer",
        Role::Keeper => "wal-keeper",
    };
    let run = move || {
        let clock = inner.clock();
        loop {
            match step(clock()) {
                Next::Done => break,
                Next::Now => {}
                next @ (Next::After(_) | Next::Idle) => {
                    let began = clock();
                    idle.look_out(next, clock);
                    let wanted = inner.wait(role, next);
                    idle.note(wanted.map(|since| since.saturating_sub(began)));
                }
            }
        }
    };
    let thread = Builder::new().name(name.to_owned()).spawn(run);
    let thread = thread.map_err(|e| failed("spawn", name, &e))?;
    shared.lock().threads.push((thread.thread().id(), thread));
    Ok(())
}

/// How long a thread waits awake at most.
fn awake(role: Role, processors: usize, idle_poll: Duration) -> Duration {
    match role {
        Role::Writer if processors > 1 => idle_poll,
        // Whoever brings work needs the only processor; and nobody waits for the keeper.
        Role::Writer | Role::Keeper => Duration::ZERO,
    }
}

/// Those that this process may use at once, by its affinity and its quota.
fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn only_a_writer_beside_other_processors_waits_awake() {
        let limit = Duration::from_micros(500);
        assert_eq!(awake(Role::Writer, 2, limit), limit);
        assert_eq!(awake(Role::Writer, 1, limit), Duration::ZERO);
        assert_eq!(awake(Role::Keeper, 2, limit), Duration::ZERO);
    }
}
