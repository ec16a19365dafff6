//! A data shard's bookkeeping: partitions, offsets and producers, as the log made them.
//! A pure function of the log: equal logs give equal states, byte for byte.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{
    BatchHead, Head, Judgement, Partition, PartitionId, PartitionRun, PartitionSettings,
    ProducerTable, Refusal, ShardCommand, Verdict,
};

/// Bounds that apply itself holds to. They decide verdicts, so they must be the same on every
/// replica and are kept in checkpoints: a changed default is for new shards only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateLimits {
    /// (partition, producer) pairs of which the shard remembers the recent past.
    pub producers_max: u32,
}

impl Default for StateLimits {
    fn default() -> Self {
        Self { producers_max: 16_384 }
    }
}

/// What an entry changed for those outside: the log's streams, waiting readers, open streams.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Effects {
    /// New log starts.
    pub trimmed: Vec<(PartitionId, u64)>,
    pub dropped: Vec<PartitionId>,
    pub created: Vec<PartitionId>,
    /// Topics whose settings changed here.
    pub updated: Vec<u64>,
}

impl Effects {
    pub fn is_empty(&self) -> bool {
        self.trimmed.is_empty()
            && self.dropped.is_empty()
            && self.created.is_empty()
            && self.updated.is_empty()
    }

    pub fn clear(&mut self) {
        self.trimmed.clear();
        self.dropped.clear();
        self.created.clear();
        self.updated.clear();
    }
}

/// Invariants: each partition is in exactly one topic's list, and shares that topic's settings;
/// a topic without partitions has no entry; producers have rows only for partitions that exist;
/// a dropped id never exists again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardState {
    pub(super) limits: StateLimits,
    pub(super) partitions: BTreeMap<PartitionId, Partition>,
    pub(super) topics: BTreeMap<u64, ShardTopic>,
    pub(super) producers: ProducerTable,
    /// Greatest version of the cluster's state that dropped a topic here.
    pub(super) dropped_version: u64,
    /// Ids that were dropped here, as ranges from the key to the value, both included. Ids of
    /// other shards may lie in a range: they belonged to the same topic.
    pub(super) dropped: BTreeMap<u64, u64>,
    /// Index up to which no replica needs the log any more. Only grows.
    pub(super) released: u64,
}

/// A topic as far as it lives in this shard.
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
        }
    }

    /// Applies the entry at `index`; indices grow from call to call. What it changed for others
    /// is added to `effects`. A batch that does not count changes nothing.
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

    /// The verdict on a batch where no place in the log can change it any more, so that the leader
    /// need not propose it: it is applied already, or what it expects is past. None says nothing.
    pub fn foregone(&self, batch: &BatchHead) -> Option<Verdict> {
        let partition = self.partitions.get(&batch.partition)?;
        match self.judge(batch) {
            Judgement::Duplicate { first_offset } => {
                Some(duplicate(partition, batch, first_offset))
            }
            Judgement::Accept if self.may_be_copy(batch) => {
                let producer_id = batch.producer?.producer_id;
                Some(Verdict::Refused(Refusal::UnknownProducer { producer_id }))
            }
            // With an identity it may yet be a duplicate: of a copy that is on its way.
            Judgement::Accept if batch.producer.is_none() => {
                batch.condition.is_lost(partition).map(Verdict::Refused)
            }
            Judgement::Accept | Judgement::Refuse(_) => None,
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

    /// Version of a topic's settings, and how many of its partitions are here.
    pub fn topic(&self, topic_id: u64) -> Option<(u64, usize)> {
        let topic = self.topics.get(&topic_id)?;
        Some((topic.settings.version, topic.partitions.len()))
    }

    /// The partition was here, and is gone for ever.
    pub fn is_dropped(&self, id: PartitionId) -> bool {
        self.dropped.range(..=id.0).next_back().is_some_and(|(_, &last)| id.0 <= last)
    }

    /// The sequence that a producer's next batch on a partition must have. None where it is not
    /// known, or fenced by a later epoch.
    pub fn next_sequence(&self, id: PartitionId, producer_id: u64, epoch: u32) -> Option<u64> {
        self.producers.next_sequence(id, producer_id, epoch)
    }

    /// The shard does not know the producer on the partition, and may have forgotten it: nothing
    /// that it begins there with sequence 0 is taken.
    pub fn has_forgotten(&self, id: PartitionId, producer_id: u64, epoch: u32) -> bool {
        self.producers.has_forgotten(id, producer_id, epoch)
    }

    /// Index up to which the log may be purged, as far as other replicas are concerned.
    pub fn released(&self) -> u64 {
        self.released
    }

    pub fn producers(&self) -> &ProducerTable {
        &self.producers
    }

    pub fn limits(&self) -> StateLimits {
        self.limits
    }

    fn may_be_copy(&self, batch: &BatchHead) -> bool {
        let stamp = batch.producer.as_ref();
        stamp.is_some_and(|stamp| self.producers.may_be_copy(batch.partition, stamp))
    }

    fn judge(&self, batch: &BatchHead) -> Judgement {
        batch.producer.as_ref().map_or(Judgement::Accept, |stamp| {
            self.producers.judge(batch.partition, stamp, batch.record_count)
        })
    }

    fn append(&mut self, index: u64, batch: &BatchHead) -> Verdict {
        let judgement = self.judge(batch);
        let id = batch.partition;
        let Some(partition) = self.partitions.get_mut(&id) else {
            return Verdict::Refused(Refusal::UnknownPartition { partition: id });
        };
        match judgement {
            Judgement::Accept => {}
            Judgement::Duplicate { first_offset } => {
                return duplicate(partition, batch, first_offset);
            }
            Judgement::Refuse(refusal) => return Verdict::Refused(refusal),
        }
        // Behind the duplicates: a batch that counted has changed what its condition asks of.
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
                // A proposer that has not seen a later drop yet: what it wants to create may be
                // what was dropped.
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
                // Nobody can have seen the log beyond this entry.
                self.released = self.released.max(*index.min(&at));
            }
            ShardCommand::Trim { starts } => {
                for (id, start) in starts {
                    if let Some(partition) = self.partitions.get_mut(id)
                        && partition.trim(*start)
                    {
                        effects.trimmed.push((*id, partition.log_start));
                    }
                }
            }
            ShardCommand::SetFencingToken { partition: id, expected, token } => {
                let unknown = Refusal::UnknownPartition { partition: *id };
                let partition = self.partitions.get_mut(id).ok_or(unknown)?;
                partition.fencing_token.demand(expected.as_ref())?;
                partition.fencing_token = token.clone();
            }
        }
        Ok(())
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
            if self.partitions.contains_key(&id) || self.is_dropped(id) {
                continue;
            }
            let place = topic.partitions.binary_search_by_key(&number, |(number, _)| *number);
            // A number that is taken by another id cannot come from one cluster's state.
            let Err(place) = place else { continue };
            topic.partitions.insert(place, (number, id));
            let partition = Partition::new(id, topic_id, number, topic.settings.clone());
            self.partitions.insert(id, partition);
            effects.created.push(id);
        }
        if !topic.partitions.is_empty() {
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
        for (_, id) in &topic.partitions {
            if let Some(partition) = self.partitions.get_mut(id) {
                partition.settings = topic.settings.clone();
            }
        }
        effects.updated.push(topic_id);
    }

    fn drop_topic(&mut self, topic_id: u64, effects: &mut Effects) {
        let Some(topic) = self.topics.remove(&topic_id) else { return };
        for run in PartitionRun::cover(&topic.partitions) {
            self.bury(run);
        }
        for (_, id) in topic.partitions {
            self.partitions.remove(&id);
            self.producers.forget(id);
            effects.dropped.push(id);
        }
    }

    /// Remembers dropped ids. What lies between those of a run belonged to the same topic.
    fn bury(&mut self, run: PartitionRun) {
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
