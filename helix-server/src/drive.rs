//! Who runs a log's writer and keeper: threads of their own, or in a simulation tasks of the
//! runtime, which then owns their order and their time.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use helix_wal::{Keeper, Next, Wal, Writer};
use tokio::sync::Notify;
use tokio::time::Instant;

pub(crate) enum Drive {
    Threads,
    /// `pace` says before each step of the writer how long the disk will take for it.
    Tasks {
        pace: Box<dyn Fn() -> Duration + Send>,
    },
}

impl fmt::Debug for Drive {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Threads => "threads",
            Self::Tasks { .. } => "tasks",
        })
    }
}

pub(crate) fn start(
    drive: Drive,
    wal: &Wal,
    mut writer: Writer,
    mut keeper: Keeper,
) -> Result<(), helix_wal::Error> {
    match drive {
        Drive::Threads => {
            writer.spawn()?;
            keeper.spawn()?;
        }
        Drive::Tasks { pace } => {
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

/// `false` when there will be no more steps.
async fn wait(next: Next, wake: &Notify) -> bool {
    match next {
        Next::Now => tokio::task::yield_now().await,
        // Ignored: woken or not, the next step finds out what there is to do.
        Next::After(time) => drop(tokio::time::timeout(time, wake.notified()).await),
        Next::Idle => wake.notified().await,
        Next::Done => return false,
    }
    true
}
