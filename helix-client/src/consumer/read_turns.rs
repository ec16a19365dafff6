//! Turns of partitions, because a node serves a limited number of them at the same time.

use std::sync::atomic::{AtomicUsize, Ordering};

use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::sleep;

/// Maximum number of partitions that one call or subscription reads at the same time. A node with
/// the default memory limit serves 32,768 to all its clients.
pub(super) const PARTITIONS_READ_MAX: usize = 20_000;

/// Length of a turn while other partitions wait for theirs.
pub(super) const TURN: Duration = Duration::from_secs(1);

/// The partitions that one call or subscription reads at the same time.
#[derive(Debug)]
pub(super) struct ReadTurns {
    partitions: Semaphore,
    /// Number of turns to give up, because other partitions wait.
    wanted: AtomicUsize,
}

impl Default for ReadTurns {
    fn default() -> Self {
        Self { partitions: Semaphore::new(PARTITIONS_READ_MAX), wanted: AtomicUsize::new(0) }
    }
}

impl ReadTurns {
    /// Waits for a turn of this many partitions, in the order of the calls. Dropping the permit
    /// gives the turn up.
    pub(super) async fn take(&self, partitions: usize) -> Option<SemaphorePermit<'_>> {
        let count = u32::try_from(partitions.min(PARTITIONS_READ_MAX)).unwrap_or(u32::MAX);
        if let Ok(permit) = self.partitions.try_acquire_many(count) {
            return Some(permit);
        }
        let acquired = self.partitions.acquire_many(count);
        tokio::pin!(acquired);
        loop {
            // A turn that was given up may have had too few partitions, so one more has to be given
            // up.
            self.wanted.fetch_add(1, Ordering::Relaxed);
            tokio::select! {
                // An error would mean that the semaphore is closed, which it never is.
                permit = &mut acquired => return permit.ok(),
                () = sleep(TURN) => {}
            }
        }
    }

    /// Returns true if other partitions wait for their turn.
    pub(super) fn is_awaited(&self) -> bool {
        self.wanted.load(Ordering::Relaxed) > 0
    }

    /// Returns true if the caller has to give up its turn for partitions that wait.
    pub(super) fn give_up_turn(&self) -> bool {
        let less = |wanted: usize| wanted.checked_sub(1);
        self.wanted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::time::timeout;

    use super::*;

    async fn awaited(turns: &ReadTurns) {
        let awaited = async {
            while !turns.is_awaited() {
                tokio::task::yield_now().await;
            }
        };
        timeout(Duration::from_secs(30), awaited).await.expect("in time");
    }

    #[tokio::test]
    async fn turns_end_only_for_partitions_that_wait() {
        let turns = Arc::new(ReadTurns::default());
        let first = turns.take(PARTITIONS_READ_MAX - 1).await;
        let small = turns.take(1).await;
        assert!(!turns.is_awaited() && !turns.give_up_turn());
        let waiting = tokio::spawn({
            let turns = turns.clone();
            async move { turns.take(2).await.is_some() }
        });
        awaited(&turns).await;
        assert!(turns.give_up_turn() && !turns.give_up_turn());
        // One partition is not enough for the two that wait.
        drop(small);
        awaited(&turns).await;
        assert!(!waiting.is_finished() && turns.give_up_turn());
        drop(first);
        assert!(waiting.await.unwrap());
    }
}
