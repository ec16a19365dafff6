//! State of a partition's compaction by key, as the shard's log has decided it.

use std::collections::{BTreeSet, HashSet};

use super::{Partition, PartitionId, ShardState};

/// A decided round of compaction of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CleanupRound {
    /// Below this offset, only the latest record of each key has to stay.
    pub upto: u64,
    /// Tombstones below do not have to stay either.
    pub tombstones_below: u64,
}

/// Decisions about the compaction of a partition. The offsets never decrease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CleanupState {
    /// End of the last round, which replicas may not have finished.
    pub upto: u64,
    pub tombstones_below: u64,
    /// Log index of the entry that began the last round.
    pub round_index: u64,
    /// Below this offset every replica is known to be clean.
    pub cleaned: u64,
    /// Agreed time at which `cleaned` was reached, in µs since the Unix epoch.
    pub cleaned_us: u64,
    /// Log index of the entry that set `cleaned`.
    pub cleaned_index: u64,
    /// Tombstones below are removed next, once their retention has passed since
    /// `tombstones_next_us`. Both are copies of earlier values of `cleaned` and `cleaned_us`, since
    /// those change all the time in a partition that is written to.
    pub tombstones_next: u64,
    pub tombstones_next_us: u64,
}

impl CleanupState {
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns whether the values are possible in a partition with this next offset.
    pub(super) fn is_sound(&self, next_offset: u64) -> bool {
        self.tombstones_below <= self.cleaned
            && self.tombstones_next <= self.cleaned
            && self.tombstones_next_us <= self.cleaned_us
            && self.cleaned <= self.upto
            && self.upto <= next_offset
    }

    /// Returns the offset below which tombstones may go at this time, if they stay for `kept_us`.
    pub fn tombstones_due(&self, now_us: u64, kept_us: u64) -> u64 {
        let is_due = now_us >= self.tombstones_next_us.saturating_add(kept_us);
        if is_due { self.tombstones_below.max(self.tombstones_next) } else { self.tombstones_below }
    }

    /// Begins the retention of tombstones below `cleaned`, unless older ones are still retained.
    fn begin_retention(&mut self) {
        if self.tombstones_next <= self.tombstones_below {
            self.tombstones_next = self.cleaned;
            self.tombstones_next_us = self.cleaned_us;
        }
    }
}

impl Partition {
    /// Begins a round at log index `at`, or ignores it if it is invalid.
    ///
    /// A round must raise `upto` or `tombstones_below`, and must lower neither. It must end at or
    /// below the high watermark, and must keep tombstones above `cleaned`. Rounds of topics that
    /// are not compacted are ignored, too.
    pub(super) fn begin_cleanup(&mut self, at: u64, round: CleanupRound) {
        let CleanupState { upto, tombstones_below, cleaned, .. } = self.cleanup;
        let grows = round.upto > upto || round.tombstones_below > tombstones_below;
        let is_valid = round.upto >= upto
            && round.tombstones_below >= tombstones_below
            && round.upto <= self.next_offset
            && round.tombstones_below <= cleaned;
        if grows && is_valid && self.settings.is_compacted() {
            self.cleanup.upto = round.upto;
            self.cleanup.tombstones_below = round.tombstones_below;
            self.cleanup.round_index = at;
            self.cleanup.begin_retention();
        }
    }

    /// Records at log index `at` that every replica is clean below `upto`, as of `time_us`.
    pub(super) fn finish_cleanup(&mut self, at: u64, upto: u64, time_us: u64) {
        if upto > self.cleanup.cleaned && upto <= self.cleanup.upto {
            self.cleanup.cleaned = upto;
            // Never decreases, since the clocks of two leaders may differ.
            self.cleanup.cleaned_us = self.cleanup.cleaned_us.max(time_us);
            self.cleanup.cleaned_index = at;
            self.cleanup.begin_retention();
        }
    }
}

/// Index of the partitions that compaction by key concerns, to avoid scans of all partitions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct CleanupIndex {
    /// Topics that are compacted.
    topics: BTreeSet<u64>,
    /// Partitions that had a round.
    partitions: BTreeSet<PartitionId>,
}

impl CleanupIndex {
    /// Records whether a topic is compacted.
    pub(super) fn set_topic(&mut self, topic_id: u64, is_compacted: bool) {
        if is_compacted {
            self.topics.insert(topic_id);
        } else {
            self.topics.remove(&topic_id);
        }
    }

    /// Adds a partition that has had a round.
    pub(super) fn set_partition(&mut self, partition: &Partition) {
        if !partition.cleanup.is_default() {
            self.partitions.insert(partition.id);
        }
    }

    pub(super) fn drop_partition(&mut self, id: PartitionId) {
        self.partitions.remove(&id);
    }
}

impl ShardState {
    /// Returns the partitions that have had a round, even if their topic is no longer compacted.
    pub fn partitions_with_rounds(&self) -> impl Iterator<Item = &Partition> {
        self.cleanup.partitions.iter().filter_map(|id| self.partition(*id))
    }

    /// Returns a fingerprint of the tombstones that replicas may have removed from these streams.
    ///
    /// Changes with each round that lets more tombstones go; 0 if there are none.
    pub fn forgotten(&self, streams: &HashSet<u64>) -> u64 {
        let rounds = self.partitions_with_rounds().map(|it| (it.id.0, it.cleanup.tombstones_below));
        let removed = rounds.filter(|(id, below)| *below > 0 && streams.contains(id));
        removed.fold(0, |sum, (id, below)| {
            let mut row = [0; 16];
            row[..8].copy_from_slice(&id.to_le_bytes());
            row[8..].copy_from_slice(&below.to_le_bytes());
            sum.wrapping_add(u64::from(crc32fast::hash(&row)) + 1)
        })
    }

    /// Returns the partitions of compacted topics.
    pub fn compacted_partitions(&self) -> impl Iterator<Item = &Partition> {
        self.cleanup.topics.iter().flat_map(|topic_id| self.topic_partitions(*topic_id))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::testing::batch_head;
    use super::super::{Effects, Head, PartitionRun, PartitionSettings, ShardCommand, StateLimits};
    use super::*;

    fn partition(cleanup: i32) -> Partition {
        let settings = PartitionSettings { cleanup, ..PartitionSettings::default() };
        let mut partition = Partition::new(PartitionId(1), 1, 0, Arc::new(settings));
        partition.append(100, 5);
        partition
    }

    fn round(upto: u64, tombstones_below: u64) -> CleanupRound {
        CleanupRound { upto, tombstones_below }
    }

    #[test]
    fn rounds_only_grow_and_end_at_the_high_watermark() {
        let mut partition = partition(2);
        partition.begin_cleanup(7, round(60, 0));
        let first = CleanupState { upto: 60, round_index: 7, ..CleanupState::default() };
        assert_eq!(partition.cleanup, first);
        for ignored in [round(60, 0), round(59, 0), round(101, 0), round(70, 1)] {
            partition.begin_cleanup(8, ignored);
            assert_eq!(partition.cleanup, first, "{ignored:?}");
        }
        partition.begin_cleanup(9, round(100, 0));
        assert_eq!((partition.cleanup.upto, partition.cleanup.round_index), (100, 9));
    }

    #[test]
    fn tombstones_go_only_below_what_every_replica_has_cleaned() {
        let mut partition = partition(3);
        partition.begin_cleanup(7, round(60, 0));
        partition.finish_cleanup(8, 61, 1_000);
        assert_eq!(partition.cleanup.cleaned, 0, "beyond the round");
        partition.finish_cleanup(9, 60, 1_000);
        let CleanupState { cleaned, cleaned_us, cleaned_index, .. } = partition.cleanup;
        assert_eq!((cleaned, cleaned_us, cleaned_index), (60, 1_000, 9));
        partition.begin_cleanup(10, round(60, 61));
        assert_eq!(partition.cleanup.tombstones_below, 0);
        partition.begin_cleanup(11, round(60, 60));
        assert_eq!((partition.cleanup.tombstones_below, partition.cleanup.round_index), (60, 11));
        partition.begin_cleanup(12, round(80, 30));
        assert_eq!(partition.cleanup.upto, 60, "tombstones do not come back");
        partition.begin_cleanup(13, round(80, 60));
        partition.finish_cleanup(14, 80, 500);
        assert_eq!((partition.cleanup.cleaned, partition.cleanup.cleaned_us), (80, 1_000));
        let CleanupState { tombstones_next, tombstones_next_us, .. } = partition.cleanup;
        assert_eq!((tombstones_next, tombstones_next_us), (80, 1_000));
        assert!(partition.cleanup.is_sound(100) && !partition.cleanup.is_sound(79));
        let broken = CleanupState { tombstones_next: 81, ..partition.cleanup };
        assert!(!broken.is_sound(100));
        let broken = CleanupState { tombstones_next_us: 1_001, ..partition.cleanup };
        assert!(!broken.is_sound(100));
    }

    #[test]
    fn tombstones_go_from_a_table_that_is_cleaned_more_often_than_they_stay() {
        const HOUR_US: u64 = 3_600_000_000;
        const HOURS_KEPT: u64 = 24;
        let mut partition = partition(2);
        // Appends one record per hour, and begins a round for each.
        for hour in 1..=100 {
            let now_us = hour * HOUR_US;
            let below = partition.cleanup.tombstones_due(now_us, HOURS_KEPT * HOUR_US);
            partition.begin_cleanup(2 * hour, round(hour, below));
            assert_eq!(partition.cleanup.tombstones_below, below);
            partition.finish_cleanup(2 * hour + 1, hour, now_us);
            assert_eq!(partition.cleanup.cleaned, hour);
            // One hour after its append, a record is clean on every replica.
            assert!(below == 0 || below + HOURS_KEPT <= hour, "{below} at {hour} is early");
            assert!(below + 2 * HOURS_KEPT >= hour, "{below} at {hour} is late");
            assert!(partition.cleanup.is_sound(100));
        }
    }

    #[test]
    fn topics_that_are_not_compacted_have_no_rounds() {
        let mut partition = partition(0);
        partition.begin_cleanup(7, round(60, 0));
        assert!(partition.cleanup.is_default());
    }

    #[test]
    fn a_checkpoint_has_the_progress() {
        let id = PartitionId(1);
        let mut state = ShardState::new(StateLimits::default());
        let settings =
            PartitionSettings { cleanup: 2, max_batch_bytes: 1 << 20, ..Default::default() };
        let runs = vec![PartitionRun { first_id: 1, first_number: 0, stride: 1, count: 1 }];
        let clean_up = |upto, tombstones_below| ShardCommand::CleanUp {
            rounds: vec![(id, round(upto, tombstones_below))],
        };
        let cleaned =
            |upto, time_us| ShardCommand::Cleaned { partitions: vec![(id, upto)], time_us };
        let create =
            ShardCommand::CreatePartitions { cluster_version: 1, topic_id: 1, runs, settings };
        let heads = [
            Head::Shard(create),
            Head::Batch(batch_head(1, 100)),
            Head::Shard(clean_up(40, 0)),
            Head::Shard(cleaned(40, 7_000)),
            Head::Shard(clean_up(60, 0)),
            Head::Shard(cleaned(60, 8_000)),
            Head::Shard(clean_up(70, 40)),
            Head::Shard(clean_up(80, 40)),
            Head::Shard(cleaned(80, 9_000)),
        ];
        let (own, other) = ([1].into(), [2].into());
        for (index, head) in (1..).zip(&heads) {
            state.apply(index, head, &mut Effects::default());
            assert_eq!(state.forgotten(&own) == 0, index < 7, "tombstones go at entry 7");
            assert_eq!(state.forgotten(&other), 0);
            assert_eq!(state.compacted_partitions().count(), 1);
            assert_eq!(state.partitions_with_rounds().count(), usize::from(index >= 3));
        }
        let progress = CleanupState {
            upto: 80,
            tombstones_below: 40,
            round_index: 8,
            cleaned: 80,
            cleaned_us: 9_000,
            cleaned_index: 9,
            tombstones_next: 60,
            tombstones_next_us: 8_000,
        };
        assert_eq!(state.partition(id).unwrap().cleanup, progress);
        let decoded = ShardState::decode(&state.encode()).unwrap();
        assert_eq!(decoded.partition(id).unwrap().cleanup, progress);
        assert_eq!(decoded, state);

        // The index follows the topic.
        let settings = PartitionSettings { version: 9, cleanup: 0, ..settings };
        let update = Head::Shard(ShardCommand::UpdateSettings { topic_id: 1, settings });
        state.apply(10, &update, &mut Effects::default());
        assert_eq!(state.compacted_partitions().count(), 0);
        assert_eq!(state.partitions_with_rounds().count(), 1, "replicas finish it");
        let drop = Head::Shard(ShardCommand::DropTopic { cluster_version: 3, topic_id: 1 });
        state.apply(11, &drop, &mut Effects::default());
        assert_eq!(state.partitions_with_rounds().count(), 0);
    }
}
