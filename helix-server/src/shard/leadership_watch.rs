//! Watches for lost leadership and isolation from the majority.
//! Requests stop waiting for an outcome once this replica can no longer learn it.

use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::Shard;
use crate::sync;

/// Terms in which a replica was a leader at the last check.
#[derive(Debug, Clone, Copy, Default)]
struct SeenTerms {
    /// Term in which it leads and is not isolated.
    leads: Option<u64>,
    /// Term in which it leads and may still learn the outcome of its proposals.
    settles: Option<u64>,
}

/// Runs until the shard is gone or openraft has stopped.
pub(super) async fn run(shard: Weak<Shard>) {
    let Some((mut leadership, timing)) =
        shard.upgrade().map(|shard| (shard.replica.watch_leadership(), shard.hub.timing().clone()))
    else {
        return;
    };
    let first = Instant::now() + timing.until_check();
    let mut tick = tokio::time::interval_at(first, timing.check_interval());
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut seen = SeenTerms::default();
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
            shard.end_proposals();
            return;
        }
        seen = shard.check_leadership(seen);
    }
}

impl Shard {
    /// Records that this node stops. Other nodes may stop with it, and are then silent.
    pub fn expect_stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// Compares this replica's leadership with the last check, and ends what depends on it.
    fn check_leadership(&self, before: SeenTerms) -> SeenTerms {
        let leadership = self.replica.leadership();
        let is_leader = leadership.leader == Some(self.replica_id);
        let alone = self.replica.voters().len() <= 1;
        // A leader that was isolated right after its election has never been confirmed.
        let led_for = if is_leader { self.note_leader_of(leadership.term) } else { Duration::ZERO };
        let silent = self.replica.confirmed_ago().unwrap_or(led_for);
        let timing = self.hub.timing();
        let isolated = is_leader && !alone && silent > timing.partitioned_after();
        let abandoned = isolated && silent > timing.abandoned_after();
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
        let now = SeenTerms {
            leads: (is_leader && !isolated).then_some(leadership.term),
            settles: (is_leader && !abandoned).then_some(leadership.term),
        };
        if before.leads.is_some() && now.leads != before.leads {
            self.end_leadership();
        }
        if before.settles.is_some() && now.settles != before.settles {
            self.end_proposals();
        }
        now
    }

    /// Records that this replica leads in a term. Returns for how long it has.
    fn note_leader_of(&self, term: u64) -> Duration {
        let mut led = sync::lock(&self.led_since);
        match *led {
            Some((known, since)) if known == term => since.elapsed(),
            _ => {
                *led = Some((term, Instant::now()));
                Duration::ZERO
            }
        }
    }

    /// Ends open waits for outcomes. They are unknown: the next leader may have the entries.
    fn end_proposals(&self) {
        self.proposal_token.send_replace(CancellationToken::new()).cancel();
    }

    fn end_leadership(&self) {
        self.leadership_token.send_replace(CancellationToken::new()).cancel();
        // Waiting readers and members must notice that they have to use another node.
        self.machine.watchers().wake_all();
        self.machine.group_watchers().wake_watchers();
    }
}
