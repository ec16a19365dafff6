//! Split of a data shard: some partitions move to a new shard, which begins with a copy of their
//! state. No entry is ever in both logs.
//!
//! [`ShardCommand::Split`](super::ShardCommand::Split) seals the partitions that move: from this
//! entry on the old shard refuses their batches. The state of the new shard is fixed by the same
//! entry and kept here until the split ends, so that every replica of the new shard begins with the
//! same bytes. Either the cluster's state then gives the partitions to the new shard, and
//! `FinishSplit` removes them here, or it cancels the split, and `CancelSplit` opens them again.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;

use super::shard_state::{ShardState, ShardTopic};
use super::{CheckpointError, Effects, Partition, PartitionId, ProducerTable};
use crate::records::ShardSplitRecord;
pub use crate::records::SplitRule;

impl SplitRule {
    pub(super) fn is_valid(&self) -> bool {
        self.parts >= 2
    }

    /// Returns whether a partition moves, by its position among those of its topic in the shard
    /// with ids below [`Self::ids_below`], in the order of their numbers.
    pub fn moves(self, topic_id: u64, position: u64) -> bool {
        let parts = self.parts.max(1);
        (topic_id % parts + position % parts + self.turn % parts).is_multiple_of(parts)
    }
}

/// A split that the shard's log has begun and not ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardSplit {
    /// Version of the cluster's state that planned it.
    pub id: u64,
    /// The new shard.
    pub target: u64,
    pub rule: SplitRule,
    /// Log id of its entry, after which the new shard's log begins. The term is set by the caller
    /// of [`ShardState::apply`].
    pub term: u64,
    pub index: u64,
    /// The new shard's state, encoded.
    pub state: Bytes,
}

impl ShardState {
    pub fn split(&self) -> Option<&ShardSplit> {
        self.split.as_ref()
    }

    /// Returns the greatest id of a split that was cancelled or finished here.
    pub fn ended_split(&self) -> u64 {
        self.ended_split
    }

    /// States the term of the entry that began the split.
    pub fn set_split_term(&mut self, index: u64, term: u64) {
        if let Some(split) = self.split.as_mut().filter(|split| split.index == index) {
            split.term = term;
        }
    }

    /// Returns whether the partition is not here and belongs to another shard, or was dropped.
    /// `false` if an entry to come may create it here.
    pub fn is_elsewhere(&self, id: PartitionId) -> bool {
        id.0 < self.split_below && !self.partitions.contains_key(&id)
    }

    /// Returns the partitions that a split moves, sorted by id.
    pub fn moved_by(&self, rule: SplitRule) -> BTreeSet<PartitionId> {
        let mut moved = BTreeSet::new();
        for (topic_id, topic) in &self.topics {
            let old = topic.partitions.iter().filter(|(_, id)| id.0 < rule.ids_below);
            let of_topic = (0..).zip(old).filter(|(position, _)| rule.moves(*topic_id, *position));
            moved.extend(of_topic.map(|(_, (_, id))| *id));
        }
        moved
    }

    /// Begins a split at log index `at`. A split that is repeated or has ended has no effect.
    pub(super) fn begin_split(&mut self, at: u64, id: u64, target: u64, rule: SplitRule) {
        if id <= self.ended_split || self.split.is_some() {
            return;
        }
        let moved = self.moved_by(rule);
        let state = self.forked(at, &moved, rule.ids_below).encode();
        self.seal(&moved, true);
        self.split = Some(ShardSplit { id, target, rule, term: 0, index: at, state });
    }

    /// Lets the partitions of a split take batches again. The split never begins later.
    pub(super) fn cancel_split(&mut self, id: u64) {
        self.ended_split = self.ended_split.max(id);
        if let Some(split) = self.split.take_if(|split| split.id == id) {
            let moved = self.moved_by(split.rule);
            self.seal(&moved, false);
        }
    }

    /// Removes the partitions of a split, which are in the new shard now.
    pub(super) fn finish_split(&mut self, id: u64, effects: &mut Effects) {
        let Some(split) = self.split.take_if(|split| split.id == id) else { return };
        self.ended_split = self.ended_split.max(id);
        self.split_below = self.split_below.max(split.rule.ids_below);
        let moved = self.moved_by(split.rule);
        let Self { topics, cleanup, .. } = self;
        topics.retain(|topic_id, topic| {
            topic.partitions.retain(|(_, id)| !moved.contains(id));
            if topic.partitions.is_empty() {
                cleanup.set_topic(*topic_id, false);
            }
            !topic.partitions.is_empty()
        });
        for id in moved {
            self.partitions.remove(&id);
            self.cleanup.drop_partition(id);
            self.producers.forget(id);
            effects.dropped.push(id);
        }
    }

    fn seal(&mut self, moved: &BTreeSet<PartitionId>, is_sealed: bool) {
        for id in moved {
            if let Some(partition) = self.partitions.get_mut(id) {
                partition.is_sealed = is_sealed;
            }
        }
    }

    /// Returns the state with which the new shard begins after log index `at`.
    fn forked(&self, at: u64, moved: &BTreeSet<PartitionId>, ids_below: u64) -> Self {
        let mut forked = Self::new(self.limits);
        forked.dropped_version = self.dropped_version;
        forked.dropped.clone_from(&self.dropped);
        forked.split_below = ids_below.max(self.split_below);
        forked.released = at;
        forked.producers = ProducerTable::new(self.limits.producers_max as usize);
        for (key, row) in self.producers.rows().filter(|(key, _)| moved.contains(&key.0)) {
            forked.producers.restore(key.0, key.1, row.clone());
        }
        forked.producers.restore_forgotten(self.producers.forgotten().clone());
        for (topic_id, topic) in &self.topics {
            let here = topic.partitions.iter().filter(|(_, id)| moved.contains(id)).copied();
            let partitions: Vec<_> = here.collect();
            if partitions.is_empty() {
                continue;
            }
            let settings = Arc::new(*topic.settings);
            forked.cleanup.set_topic(*topic_id, settings.is_compacted());
            for partition in partitions.iter().filter_map(|(_, id)| self.partitions.get(id)) {
                let settings = settings.clone();
                let partition = Partition { settings, is_sealed: false, ..partition.clone() };
                forked.cleanup.set_partition(&partition);
                forked.partitions.insert(partition.id, partition);
            }
            forked.topics.insert(*topic_id, ShardTopic { settings, partitions });
        }
        forked
    }

    /// Restores the split of a checkpoint.
    pub(super) fn restore_split(
        &mut self,
        record: ShardSplitRecord,
    ) -> Result<(), CheckpointError> {
        let ShardSplitRecord { id, target, rule, term, index, state } = record;
        let rule = rule.filter(|rule| rule.is_valid() && id > self.ended_split);
        let rule = rule.ok_or_else(|| CheckpointError::new("the split of the shard is invalid"))?;
        let moved = self.moved_by(rule);
        self.seal(&moved, true);
        let state = state.into();
        self.split = Some(ShardSplit { id, target, rule, term, index, state });
        Ok(())
    }
}

impl From<&ShardSplit> for ShardSplitRecord {
    fn from(split: &ShardSplit) -> Self {
        Self {
            id: split.id,
            target: split.target,
            rule: Some(split.rule),
            term: split.term,
            index: split.index,
            state: split.state.to_vec(),
        }
    }
}

#[cfg(test)]
mod tests;
