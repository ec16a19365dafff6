//! State of a data shard: its partitions, offsets and producers.
//! A pure function of the log: equal logs give equal states, byte for byte.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::cleanup::CleanupIndex;
use super::{
    BatchHead, GroupTable, Head, Partition, PartitionId, PartitionRun, PartitionSettings,
    ProducerStamp, ProducerTable, Refusal, SequenceVerdict, ShardCommand, ShardSplit, Verdict,
};

/// Limits that decide verdicts of apply. They must be equal on every replica, so they are kept in
/// checkpoints; a changed default applies to new shards only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateLimits {
    /// Number of tracked (partition, producer) pairs.
    pub producers_max: u32,
}

impl Default for StateLimits {
    fn default() -> Self {
        Self { producers_max: 16_384 }
    }
}

/// Changes of an entry that the log's streams, readers and open append streams must learn.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Effects {
    /// New log starts.
    pub trimmed: Vec<(PartitionId, u64)>,
    pub dropped: Vec<PartitionId>,
    pub created: Vec<PartitionId>,
    /// Topics whose settings changed here.
    pub updated: Vec<u64>,
    /// Groups whose members may learn something new.
    pub groups: Vec<Arc<str>>,
}

impl Effects {
    pub fn is_empty(&self) -> bool {
        self.trimmed.is_empty()
            && self.dropped.is_empty()
            && self.created.is_empty()
            && self.updated.is_empty()
            && self.groups.is_empty()
    }

    pub fn clear(&mut self) {
        self.trimmed.clear();
        self.dropped.clear();
        self.created.clear();
        self.updated.clear();
        self.groups.clear();
    }
}

/// State of a data shard.
///
/// Invariants: each partition is in exactly one topic's list and shares that topic's settings.
/// Every topic has a partition. Producers are tracked only for partitions that exist. A dropped
/// id never exists again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardState {
    pub(super) limits: StateLimits,
    pub(super) partitions: BTreeMap<PartitionId, Partition>,
    pub(super) topics: BTreeMap<u64, ShardTopic>,
    pub(super) producers: ProducerTable,
    /// Greatest version of the cluster's state that dropped a topic here.
    pub(super) dropped_version: u64,
    /// Ids that were dropped here, as ranges from the key to the value, both included. A range may
    /// contain ids of other shards that belonged to the same topic.
    pub(super) dropped: BTreeMap<u64, u64>,
    /// Index up to which replicas may purge the log. Only grows.
    pub(super) released: u64,
    pub(super) groups: GroupTable,
    pub(super) cleanup: CleanupIndex,
    pub(super) split: Option<ShardSplit>,
    pub(super) ended_split: u64,
    /// Partitions with lower ids are never created here again: a split has moved them, or found
    /// them in another shard.
    pub(super) split_below: u64,
}

/// The part of a topic that is in this shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ShardTopic {
    pub(super) settings: Arc<PartitionSettings>,
    /// In the order of their numbers.
    pub(super) partitions: Vec<(u32, PartitionId)>,
}

impl ShardState {
    pub fn new(limits: StateLimits) -> Self {
        Self {
            limits,
            partitions: BTreeMap::new(),
            topics: BTreeMap::new(),
            producers: ProducerTable::new(limits.producers_max as usize),
            dropped_version: 0,
            dropped: BTreeMap::new(),
            released: 0,
            groups: GroupTable::default(),
            cleanup: CleanupIndex::default(),
            split: None,
            ended_split: 0,
            split_below: 0,
        }
    }

    /// Applies the entry at `index`, which grows from call to call, and adds to `effects`.
    /// A refused or duplicate batch changes nothing.
    pub fn apply(&mut self, index: u64, head: &Head, effects: &mut Effects) -> Verdict {
        match head {
            Head::Batch(batch) => self.append(index, batch),
            Head::Shard(command) => match self.change(index, command, effects) {
                Ok(()) => Verdict::Changed,
                Err(refusal) => Verdict::Refused(refusal),
            },
            Head::Cluster(_) => Verdict::Nothing,
        }
    }

    /// Returns the verdict on a batch if its log index can no longer change it.
    ///
    /// The leader then need not propose it: it is a duplicate, or its condition can never hold
    /// again. `None` means that apply has to decide.
    pub fn early_verdict(&self, batch: &BatchHead) -> Option<Verdict> {
        let partition = self.partitions.get(&batch.partition)?;
        match self.check_sequence(batch) {
            SequenceVerdict::Duplicate { first_offset } => {
                Some(duplicate(partition, batch, first_offset))
            }
            // No later entry gives an epoch to another principal, ends its fence or
            // changes a batch.
            SequenceVerdict::Refuse(
                refusal @ (Refusal::ProducerNotOwned { .. }
                | Refusal::ProducerFenced { .. }
                | Refusal::SequenceReused { .. }),
            ) => Some(Verdict::Refused(refusal)),
            // The split may be cancelled, but the client can retry at any time.
            _ if partition.is_sealed => Some(Verdict::Refused(unknown(batch.partition))),
            SequenceVerdict::Accept if self.may_be_duplicate(batch) => {
                let producer_id = batch.producer?.producer_id;
                Some(Verdict::Refused(Refusal::UnknownProducer { producer_id }))
            }
            // With a producer id it may still turn out as a duplicate of a proposed copy.
            SequenceVerdict::Accept if batch.producer.is_none() => {
                batch.condition.certain_refusal(partition).map(Verdict::Refused)
            }
            SequenceVerdict::Accept | SequenceVerdict::Refuse(_) => None,
        }
    }

    pub fn partition(&self, id: PartitionId) -> Option<&Partition> {
        self.partitions.get(&id)
    }

    /// In the order of their ids.
    pub fn partitions(&self) -> impl ExactSizeIterator<Item = &Partition> {
        self.partitions.values()
    }

    /// A topic's partitions in this shard, in the order of their numbers.
    pub fn topic_partitions(&self, topic_id: u64) -> impl Iterator<Item = &Partition> {
        let ids = self.topics.get(&topic_id).map_or(&[][..], |topic| &topic.partitions);
        ids.iter().filter_map(|(_, id)| self.partitions.get(id))
    }

    /// Topics that have partitions here: id, settings, and how many.
    pub fn topics(&self) -> impl ExactSizeIterator<Item = (u64, &Arc<PartitionSettings>, usize)> {
        self.topics.iter().map(|(id, topic)| (*id, &topic.settings, topic.partitions.len()))
    }

    /// Returns the version of a topic's settings, and the number of its partitions here.
    pub fn topic(&self, topic_id: u64) -> Option<(u64, usize)> {
        let topic = self.topics.get(&topic_id)?;
        Some((topic.settings.version, topic.partitions.len()))
    }

    /// Returns whether the partition was in this shard and was dropped.
    pub fn is_dropped(&self, id: PartitionId) -> bool {
        self.dropped.range(..=id.0).next_back().is_some_and(|(_, &last)| id.0 <= last)
    }

    /// Returns the sequence that a producer's next batch on a partition must have.
    /// `None` where the producer is unknown, fenced by a later epoch, or of another principal.
    pub fn next_sequence(&self, id: PartitionId, stamp: &ProducerStamp) -> Option<u64> {
        self.producers.next_sequence(id, stamp)
    }

    /// Checks that an epoch that the partition tracks belongs to the owner of the stamp.
    ///
    /// # Errors
    /// The refusal that a batch with this stamp would get.
    pub fn check_owner(&self, id: PartitionId, stamp: &ProducerStamp) -> Result<(), Refusal> {
        self.producers.check_owner(id, stamp)
    }

    /// Returns whether the shard may have forgotten the producer on the partition. Its batches
    /// with sequence 0 are then refused.
    pub fn has_forgotten(&self, id: PartitionId, producer_id: u64, epoch: u32) -> bool {
        self.producers.has_forgotten(id, producer_id, epoch)
    }

    /// Returns the index up to which the log may be purged, as far as other replicas need it.
    pub fn released(&self) -> u64 {
        self.released
    }

    pub fn producers(&self) -> &ProducerTable {
        &self.producers
    }

    pub fn groups(&self) -> &GroupTable {
        &self.groups
    }

    pub fn limits(&self) -> StateLimits {
        self.limits
    }

    fn may_be_duplicate(&self, batch: &BatchHead) -> bool {
        let stamp = batch.producer.as_ref();
        stamp.is_some_and(|stamp| self.producers.may_be_duplicate(batch.partition, stamp))
    }

    fn check_sequence(&self, batch: &BatchHead) -> SequenceVerdict {
        batch.producer.as_ref().map_or(SequenceVerdict::Accept, |stamp| {
            self.producers.check_sequence(batch.partition, stamp, batch.record_count)
        })
    }

    fn append(&mut self, index: u64, batch: &BatchHead) -> Verdict {
        let judgement = self.check_sequence(batch);
        let id = batch.partition;
        let Some(partition) = self.partitions.get_mut(&id) else {
            return Verdict::Refused(unknown(id));
        };
        match judgement {
            SequenceVerdict::Duplicate { first_offset } => {
                return duplicate(partition, batch, first_offset);
            }
            _ if partition.is_sealed => return Verdict::Refused(unknown(id)),
            SequenceVerdict::Accept => {}
            SequenceVerdict::Refuse(refusal) => return Verdict::Refused(refusal),
        }
        // After the check for duplicates: an appended batch has changed the offset it expected.
        if let Err(refusal) = batch.condition.check(partition) {
            return Verdict::Refused(refusal);
        }
        let first_offset = partition.next_offset;
        let Some(next_offset) = first_offset.checked_add(u64::from(batch.record_count)) else {
            return Verdict::Refused(Refusal::OffsetsExhausted);
        };
        let time_us = partition.append(next_offset, batch.proposed_us);
        if let Some(stamp) = &batch.producer {
            self.producers.record(index, id, stamp, batch.record_count, first_offset);
        }
        Verdict::Appended { first_offset, next_offset, time_us, watermarks: partition.watermarks() }
    }

    fn change(
        &mut self,
        at: u64,
        command: &ShardCommand,
        effects: &mut Effects,
    ) -> Result<(), Refusal> {
        match command {
            ShardCommand::CreatePartitions { cluster_version, topic_id, runs, settings } => {
                // A proposer with an older version may not have seen that the topic was dropped.
                if *cluster_version >= self.dropped_version {
                    self.create_partitions(*topic_id, runs, settings, effects);
                }
            }
            ShardCommand::UpdateSettings { topic_id, settings } => {
                self.update_settings(*topic_id, settings, effects);
            }
            ShardCommand::DropTopic { cluster_version, topic_id } => {
                self.dropped_version = self.dropped_version.max(*cluster_version);
                self.drop_topic(*topic_id, effects);
            }
            ShardCommand::Release { index } => {
                // No proposer can have seen the log beyond this entry.
                self.released = self.released.max(*index.min(&at));
            }
            ShardCommand::Trim { starts } => {
                if let [(id, _)] = starts[..] {
                    self.check_not_sealed(id)?;
                }
                for (id, start) in starts {
                    if let Some(partition) = self.partitions.get_mut(id)
                        && !partition.is_sealed
                        && partition.trim(*start)
                    {
                        effects.trimmed.push((*id, partition.log_start));
                    }
                }
            }
            ShardCommand::SetFencingToken { partition: id, expected, token } => {
                self.check_not_sealed(*id)?;
                let partition = self.partitions.get_mut(id).ok_or_else(|| unknown(*id))?;
                partition.fencing_token.check(expected.as_ref())?;
                partition.fencing_token = token.clone();
            }
            ShardCommand::CleanUp { rounds } => {
                for (id, round) in rounds {
                    let partition = self.partitions.get_mut(id);
                    if let Some(partition) = partition.filter(|it| !it.is_sealed) {
                        partition.begin_cleanup(at, *round);
                        self.cleanup.set_partition(partition);
                    }
                }
            }
            ShardCommand::Cleaned { partitions, time_us } => {
                for (id, upto) in partitions {
                    let partition = self.partitions.get_mut(id);
                    if let Some(partition) = partition.filter(|it| !it.is_sealed) {
                        partition.finish_cleanup(at, *upto, *time_us);
                    }
                }
            }
            ShardCommand::Group(command) => {
                self.groups.apply(at, command, &mut effects.groups)?;
            }
            ShardCommand::Split { id, target, rule } => self.begin_split(at, *id, *target, *rule),
            ShardCommand::CancelSplit { id } => self.cancel_split(*id),
            ShardCommand::FinishSplit { id } => self.finish_split(*id, effects),
        }
        Ok(())
    }

    /// Refuses a change of a partition that moves to another shard.
    fn check_not_sealed(&self, id: PartitionId) -> Result<(), Refusal> {
        let is_sealed = self.partitions.get(&id).is_some_and(|partition| partition.is_sealed);
        if is_sealed { Err(unknown(id)) } else { Ok(()) }
    }

    fn create_partitions(
        &mut self,
        topic_id: u64,
        runs: &[PartitionRun],
        settings: &PartitionSettings,
        effects: &mut Effects,
    ) {
        self.update_settings(topic_id, settings, effects);
        let new = || ShardTopic { settings: Arc::new(*settings), partitions: Vec::new() };
        let mut topic = self.topics.remove(&topic_id).unwrap_or_else(new);
        for (number, id) in runs.iter().flat_map(|run| run.partitions()) {
            let is_over = self.is_dropped(id) || self.is_elsewhere(id);
            if self.partitions.contains_key(&id) || is_over {
                continue;
            }
            let position = topic.partitions.binary_search_by_key(&number, |(number, _)| *number);
            // One cluster's state never gives a number to two ids.
            let Err(position) = position else { continue };
            topic.partitions.insert(position, (number, id));
            let partition = Partition::new(id, topic_id, number, topic.settings.clone());
            self.partitions.insert(id, partition);
            effects.created.push(id);
        }
        if !topic.partitions.is_empty() {
            self.cleanup.set_topic(topic_id, topic.settings.is_compacted());
            self.topics.insert(topic_id, topic);
        }
    }

    fn update_settings(
        &mut self,
        topic_id: u64,
        settings: &PartitionSettings,
        effects: &mut Effects,
    ) {
        let Some(topic) = self.topics.get_mut(&topic_id) else { return };
        if settings.version <= topic.settings.version {
            return;
        }
        topic.settings = Arc::new(*settings);
        self.cleanup.set_topic(topic_id, settings.is_compacted());
        for (_, id) in &topic.partitions {
            if let Some(partition) = self.partitions.get_mut(id) {
                partition.settings = topic.settings.clone();
            }
        }
        effects.updated.push(topic_id);
    }

    fn drop_topic(&mut self, topic_id: u64, effects: &mut Effects) {
        let Some(topic) = self.topics.remove(&topic_id) else { return };
        self.cleanup.set_topic(topic_id, false);
        for run in PartitionRun::cover(&topic.partitions) {
            self.record_dropped(run);
        }
        for (_, id) in topic.partitions {
            self.partitions.remove(&id);
            self.cleanup.drop_partition(id);
            self.producers.forget(id);
            effects.dropped.push(id);
        }
    }

    /// Records dropped ids. The ids between those of a run belonged to the same topic.
    fn record_dropped(&mut self, run: PartitionRun) {
        let steps = u64::from(run.count - 1) * u64::from(run.stride);
        let (mut first, mut last) = (run.first_id, run.first_id + steps);
        if let Some((&before, &end)) = self.dropped.range(..first).next_back()
            && end + 1 == first
        {
            first = before;
        }
        if let Some(end) = self.dropped.remove(&last.saturating_add(1)) {
            last = end;
        }
        self.dropped.insert(first, last);
    }
}

fn unknown(partition: PartitionId) -> Refusal {
    Refusal::UnknownPartition { partition }
}

fn duplicate(partition: &Partition, batch: &BatchHead, first_offset: u64) -> Verdict {
    Verdict::Duplicate {
        first_offset,
        next_offset: first_offset.saturating_add(u64::from(batch.record_count)),
        watermarks: partition.watermarks(),
    }
}

#[cfg(test)]
mod condition_tests;
#[cfg(test)]
mod tests;
