//! Pauses between the attempts of a split. An attempt that hangs seals partitions for seconds
//! before it is cancelled, so the attempts of a split that keeps hanging become rare.
//!
//! Shard 0's leader counts the attempts; a new leader starts at zero.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::client::Cluster;
use super::placement::ReplicaPlacement;
use crate::sync;

/// Pause after the first cancelled try; each further one doubles it.
const PAUSE_MIN: Duration = Duration::from_secs(1);

/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(300);

/// Cancelled tries of the splits in progress, by the shard that is to come from the split.
#[derive(Debug, Default)]
pub(super) struct SplitTries(BTreeMap<u64, SplitTry>);

#[derive(Debug, Default)]
struct SplitTry {
    /// Id of the planned split that was seen last; 0 after its end.
    planned: u64,
    cancelled: u32,
    /// No try starts before this time.
    not_before: Option<Instant>,
}

impl SplitTries {
    pub(super) fn observe(&mut self, placement: &ReplicaPlacement, now: Instant) {
        self.0
            .retain(|shard_id, _| placement.shard(*shard_id).is_some_and(|it| it.split.is_some()));
        for (shard_id, split) in placement.splits() {
            let tries = self.0.entry(shard_id).or_default();
            if tries.planned != split.id && tries.planned != 0 {
                let pause = PAUSE_MIN.saturating_mul(1 << tries.cancelled.min(16)).min(PAUSE_MAX);
                tries.cancelled += 1;
                tries.not_before = Some(now + pause);
                let cancelled = tries.cancelled;
                tracing::warn!(shard_id, cancelled, ?pause, "a split was cancelled, trying later");
            }
            tries.planned = split.id;
        }
    }

    /// Returns the time until the next try of a split; `None` if it may start.
    pub(super) fn pause(&self, shard_id: u64, now: Instant) -> Option<Duration> {
        let not_before = self.0.get(&shard_id)?.not_before?;
        not_before.checked_duration_since(now).filter(|pause| !pause.is_zero())
    }

    /// Returns whether a split waits for its next try.
    fn any_waits(&self, now: Instant) -> bool {
        self.0.iter().any(|(id, it)| it.planned == 0 && self.pause(*id, now).is_some())
    }
}

impl Cluster {
    /// Records the splits of this state. Returns whether no split only waits for its next attempt.
    pub(super) fn observe_splits(&self, placement: Option<&ReplicaPlacement>) -> bool {
        let (mut tries, now) = (sync::lock(&self.split_tries), Instant::now());
        if let Some(placement) = placement {
            tries.observe(placement, now);
        }
        !tries.any_waits(now)
    }

    /// Returns the time until the next try of a split; `None` if it may start.
    pub(super) fn split_pause(&self, shard_id: u64) -> Option<Duration> {
        sync::lock(&self.split_tries).pause(shard_id, Instant::now())
    }
}
