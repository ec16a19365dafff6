//! A shard's pulse: whether this replica still leads, is cut off from the majority, or has a disk
//! that stalls. What waits for an outcome is let go when nobody here can say it any more.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::Shard;
use crate::limits;

/// Runs until the shard is gone or openraft has stopped.
pub(super) async fn run(shard: Weak<Shard>) {
    let Some(mut leadership) = shard.upgrade().map(|shard| shard.replica.watch_leadership()) else {
        return;
    };
    let mut tick = tokio::time::interval(limits::PULSE_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut led = None;
    let mut since = (0, Instant::now());
    loop {
        let goes_on = tokio::select! {
            biased;
            _ = tick.tick() => true,
            changed = leadership.changed() => changed,
        };
        let Some(shard) = shard.upgrade() else { return };
        if !goes_on {
            // Before anybody is woken: who looks then must see it.
            shard.replica.wait_stopped().await;
            shard.retire();
            shard.end_reign();
            return;
        }
        led = shard.beat(led, &mut since);
    }
}

/// Runs until the shard is gone: on its own, since a hand-over takes a while.
pub(super) async fn watch_disk(shard: Weak<Shard>) {
    let mut tick = tokio::time::interval(limits::DISK_LOOK_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let Some(shard) = shard.upgrade() else { return };
        if shard.closed.is_cancelled() {
            return;
        }
        shard.hand_over_if_stalled().await;
    }
}

impl Shard {
    /// The term in which this replica leads and may say outcomes, if it does. `since` is the last
    /// term in which it was seen to lead, and when that began.
    fn beat(&self, led: Option<u64>, since: &mut (u64, Instant)) -> Option<u64> {
        let leadership = self.replica.leadership();
        let leads = leadership.leader == Some(self.replica_id);
        let alone = self.replica.voters().len() <= 1;
        if leads && since.0 != leadership.term {
            *since = (leadership.term, Instant::now());
        }
        // One that was elected and then hears nobody is never confirmed at all.
        let silent = self.replica.confirmed_ago().unwrap_or_else(|| since.1.elapsed());
        let cut_off = leads && !alone && silent > limits::CUT_OFF_AFTER;
        if self.cut_off.swap(cut_off, Ordering::Relaxed) != cut_off && cut_off {
            tracing::warn!(shard_id = self.shard_id, "no majority answers; appends are refused");
        }
        let leads_in = (leads && !cut_off).then_some(leadership.term);
        if led.is_some() && leads_in != led {
            self.end_reign();
        }
        leads_in
    }

    fn end_reign(&self) {
        self.reign.send_replace(CancellationToken::new()).cancel();
        // Readers that wait here look again, and learn that they must go elsewhere.
        self.machine.watchers().wake_all();
    }

    /// A leader whose disk does not finish a sync must not hold up what others could commit.
    async fn hand_over_if_stalled(self: &Arc<Self>) {
        let stalled = self.wal.unsynced_for().filter(|time| *time >= limits::STALLED_AFTER);
        let Some(stalled) = stalled else { return };
        if !self.leads() || self.replica.voters().len() <= 1 {
            return;
        }
        tracing::warn!(shard_id = self.shard_id, ?stalled, "the disk stalls; handing over");
        if let Err(error) = self.transfer(None).await {
            tracing::warn!(shard_id = self.shard_id, %error, "nobody took over");
        }
    }
}
