//! Runs the writer and the keeper of a log: on threads of their own, or as tasks in a simulation.
//! The runtime of a simulation then controls their order and their time.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use helix_wal::{Keeper, NextStep, Wal, Writer};
use tokio::sync::Notify;
use tokio::time::Instant;

/// Execution of the writer and the keeper of a log.
pub(crate) enum LogThreads {
    /// On two threads of their own.
    Dedicated,
    /// As tasks of the runtime.
    Tasks {
        /// Returns the time that the simulated disk takes for the writer's next step.
        pace: Box<dyn Fn() -> Duration + Send>,
    },
}

impl fmt::Debug for LogThreads {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Dedicated => "dedicated",
            Self::Tasks { .. } => "tasks",
        })
    }
}

/// Starts the writer and the keeper.
pub(crate) fn start(
    threads: LogThreads,
    wal: &Wal,
    mut writer: Writer,
    mut keeper: Keeper,
) -> Result<(), helix_wal::Error> {
    match threads {
        LogThreads::Dedicated => {
            writer.spawn()?;
            keeper.spawn()?;
        }
        LogThreads::Tasks { pace } => {
            let (wake_writer, wake_keeper) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
            let (writer_woken, keeper_woken) = (wake_writer.clone(), wake_keeper.clone());
            wal.set_wakers(
                Box::new(move || wake_writer.notify_one()),
                Box::new(move || wake_keeper.notify_one()),
            );
            let start = Instant::now();
            wal.set_clock(Box::new(move || start.elapsed()));
            tokio::spawn(async move {
                while wait(writer.step(start.elapsed()), &writer_woken).await {
                    let pace = pace();
                    if !pace.is_zero() {
                        tokio::time::sleep(pace).await;
                    }
                }
            });
            tokio::spawn(async move {
                while wait(keeper.step(start.elapsed()), &keeper_woken).await {}
            });
        }
    }
    Ok(())
}

/// Waits until the next step is due; returns `false` when there will be no more steps.
async fn wait(next: NextStep, wake: &Notify) -> bool {
    match next {
        NextStep::Now => tokio::task::yield_now().await,
        // Ignored: woken or timed out, the next step checks for work.
        NextStep::After(time) => drop(tokio::time::timeout(time, wake.notified()).await),
        NextStep::Idle => wake.notified().await,
        NextStep::Done => return false,
    }
    true
}
