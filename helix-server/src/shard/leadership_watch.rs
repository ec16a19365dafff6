//! Watches for lost leadership and isolation from the majority.
//! Requests stop waiting for an outcome once this replica can no longer learn it.

use std::sync::Weak;
use std::sync::atomic::Ordering;

use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::Shard;

/// Runs until the shard is gone or openraft has stopped.
pub(super) async fn run(shard: Weak<Shard>) {
    let Some((mut leadership, interval)) = shard
        .upgrade()
        .map(|shard| (shard.replica.watch_leadership(), shard.hub.timing().check_interval()))
    else {
        return;
    };
    let mut tick = tokio::time::interval(interval);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut leader_in = None;
    let mut since = (0, Instant::now());
    loop {
        let is_running = tokio::select! {
            biased;
            _ = tick.tick() => true,
            changed = leadership.changed() => changed,
        };
        let Some(shard) = shard.upgrade() else { return };
        if !is_running {
            // Retired before waiters are woken, so that they see it.
            shard.replica.wait_stopped().await;
            shard.retire();
            shard.end_leadership();
            return;
        }
        leader_in = shard.check_leadership(leader_in, &mut since);
    }
}

impl Shard {
    /// Records that this node stops. Other nodes may stop with it, and are then silent.
    pub fn expect_stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// Returns the term in which this replica is a leader that is not isolated, if it is.
    /// `since` is the last term in which it was the leader, and when that was first seen.
    fn check_leadership(&self, before: Option<u64>, since: &mut (u64, Instant)) -> Option<u64> {
        let leadership = self.replica.leadership();
        let is_leader = leadership.leader == Some(self.replica_id);
        let alone = self.replica.voters().len() <= 1;
        if is_leader && since.0 != leadership.term {
            *since = (leadership.term, Instant::now());
        }
        // A leader that was isolated right after its election has never been confirmed.
        let silent = self.replica.confirmed_ago().unwrap_or_else(|| since.1.elapsed());
        let isolated = is_leader && !alone && silent > self.hub.timing().partitioned_after();
        if self.isolated.swap(isolated, Ordering::Relaxed) != isolated {
            let (shard_id, term) = (self.shard_id, leadership.term);
            if isolated && self.stopping.load(Ordering::Relaxed) {
                tracing::info!(shard_id, term, "no majority responds while this node stops");
            } else if isolated {
                tracing::warn!(shard_id, term, "refusing appends, no majority responds");
            } else if is_leader {
                tracing::info!(shard_id, term, "accepting appends, a majority responds again");
            }
        }
        let leader_in = (is_leader && !isolated).then_some(leadership.term);
        if before.is_some() && leader_in != before {
            self.end_leadership();
        }
        leader_in
    }

    fn end_leadership(&self) {
        self.leadership_token.send_replace(CancellationToken::new()).cancel();
        // Waiting readers and members must notice that they have to use another node.
        self.machine.watchers().wake_all();
        self.machine.group_watchers().wake_watchers();
    }
}
