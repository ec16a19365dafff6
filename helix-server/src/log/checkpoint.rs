//! Encodes the state of a data shard for checkpoints and snapshots.
//! Equal states give equal bytes. Unknown fields are an error.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use prost::Message;

use super::producers::{DEDUP_WINDOW_BATCHES, DedupEntry, ForgottenProducers, ProducerState};
use super::shard_state::{ShardState, ShardTopic, StateLimits};
use super::{
    BatchChecksum, CleanupState, FencingToken, Partition, PartitionId, PartitionRun, ProducerOwner,
    ProducerTable, has_no_unknown_fields,
};
use crate::records::{
    PartitionRecord, ProducerRecord, ShardStateRecord as StateRecord,
    ShardTopicRecord as TopicRecord,
};

/// Reason why a checkpoint cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("checkpoint: {what}")]
pub struct CheckpointError {
    pub what: String,
}

impl CheckpointError {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self { what: what.into() }
    }
}

/// Format 2 added fencing tokens; a state of format 1 has none.
const FORMAT_PLAIN: u32 = 2;
/// Format 3 added forgotten producers; a state without any is written in format 2.
const FORMAT_FORGOTTEN: u32 = 3;
/// Format 4 added consumer groups; a state without any is written in format 3 or 2.
const FORMAT_GROUPS: u32 = 4;
/// Format 5 added compaction by key; a state without any is written in an earlier format.
const FORMAT_COMPACTED: u32 = 5;
/// Format 6 added owners of producers, checksums of their batches and the order of commits; a state
/// without any of them is written in an earlier format.
const FORMAT_OWNERS: u32 = 6;
/// Format 7 added splits; a shard that took no part in one is written in an earlier format.
const FORMAT: u32 = 7;
const FORMAT_MIN: u32 = 1;

/// Spare capacity of an encoded state, for the membership that a checkpoint puts before it.
const SPARE_BYTES: usize = 256;

impl ShardState {
    /// Encodes the whole state.
    pub fn encode(&self) -> Bytes {
        self.encode_with(self.producers.forgotten())
    }

    /// Encodes the state without forgotten producers, for nodes before protocol
    /// [`FORGOTTEN_PRODUCERS`](crate::protocol::FORGOTTEN_PRODUCERS). There are no groups then.
    pub fn encode_plain(&self) -> Bytes {
        self.encode_with(&ForgottenProducers::default())
    }

    fn encode_with(&self, forgotten: &ForgottenProducers) -> Bytes {
        let topics = self.topics.iter().map(|(topic_id, topic)| TopicRecord {
            topic_id: *topic_id,
            settings: Some(*topic.settings),
            runs: PartitionRun::cover(&topic.partitions),
        });
        let partitions = self.partitions.values().filter(|partition| !partition.is_fresh());
        let partitions = partitions.map(|partition| PartitionRecord {
            id: partition.id.0,
            log_start: partition.log_start,
            next_offset: partition.next_offset,
            last_time_us: partition.last_time_us,
            fencing_token: partition.fencing_token.as_str().to_owned(),
            cleanup_upto: partition.cleanup.upto,
            tombstones_below: partition.cleanup.tombstones_below,
            round_index: partition.cleanup.round_index,
            cleaned: partition.cleanup.cleaned,
            cleaned_us: partition.cleanup.cleaned_us,
            cleaned_index: partition.cleanup.cleaned_index,
            tombstones_next: partition.cleanup.tombstones_next,
            tombstones_next_us: partition.cleanup.tombstones_next_us,
        });
        let producers =
            self.producers.rows().map(|((partition, producer_id), row)| ProducerRecord {
                partition: partition.0,
                producer_id: *producer_id,
                epoch: row.epoch,
                next_sequence: row.next_sequence,
                last_used: row.last_used,
                record_counts: row.window.iter().map(|counted| counted.record_count).collect(),
                first_offsets: row.window.iter().map(|counted| counted.first_offset).collect(),
                checksums: match row.window.iter().any(|counted| counted.checksum.is_some()) {
                    true => row.window.iter().map(DedupEntry::checksum_field).collect(),
                    false => Vec::new(),
                },
                owner: row.owner.to_field(),
            });
        let record = StateRecord {
            format: match *forgotten == ForgottenProducers::default() {
                _ if self.has_splits() => FORMAT,
                _ if self.producers.has_owners_or_checksums() || self.groups.is_ordered() => {
                    FORMAT_OWNERS
                }
                _ if self.partitions.values().any(|it| !it.cleanup.is_default()) => {
                    FORMAT_COMPACTED
                }
                _ if !self.groups.is_empty() => FORMAT_GROUPS,
                true => FORMAT_PLAIN,
                false => FORMAT_FORGOTTEN,
            },
            producers_max: self.limits.producers_max,
            dropped_version: self.dropped_version,
            topics: topics.collect(),
            partitions: partitions.collect(),
            producers: producers.collect(),
            dropped_firsts: self.dropped.keys().copied().collect(),
            dropped_lasts: self.dropped.values().copied().collect(),
            released: self.released,
            forgotten_ids_end: forgotten.ids_end,
            forgotten_ids: forgotten.epochs.keys().copied().collect(),
            forgotten_epochs: forgotten.epochs.values().copied().collect(),
            forgotten_epochs_end: forgotten.epochs_end,
            ..StateRecord::default()
        };
        let len = record.encoded_len() + self.groups.estimated_len();
        let mut bytes = Vec::with_capacity(len + SPARE_BYTES);
        let mut append = |part: StateRecord| {
            let len = part.encoded_len();
            if bytes.capacity() - bytes.len() < len {
                // Less than a vector would add, since the buffer stays in memory.
                bytes.reserve_exact(len.max(bytes.len() / 8));
            }
            part.encode(&mut bytes).expect("a vector grows");
        };
        append(record);
        // One at a time, to need little memory. Only the last fields follow the groups, so these
        // are the bytes of one record with all of them.
        for group in self.groups.records() {
            append(StateRecord { groups: vec![group], ..StateRecord::default() });
        }
        let (deleted_groups, deleted_group_epochs, forgotten_group_epoch) = self.groups.deletions();
        append(StateRecord {
            ordered_commits: self.groups.is_ordered(),
            deleted_groups,
            deleted_group_epochs,
            forgotten_group_epoch,
            split: self.split.as_ref().map(Into::into),
            ended_split: self.ended_split,
            split_below: self.split_below,
            ..StateRecord::default()
        });
        bytes.into()
    }

    /// Decodes a state.
    ///
    /// # Errors
    /// Fails on an unknown format or field, and where an invariant does not hold.
    pub fn decode(bytes: &[u8]) -> Result<Self, CheckpointError> {
        let record = StateRecord::decode(bytes).map_err(|e| CheckpointError::new(e.to_string()))?;
        if !(FORMAT_MIN..=FORMAT).contains(&record.format) {
            let format = record.format;
            let what = format!("format {format} of a shard's state is unknown to this version");
            return Err(CheckpointError::new(what));
        }
        if !has_no_unknown_fields(&record, bytes) {
            return Err(CheckpointError::new("it has fields that are unknown to this version"));
        }
        let mut state = Self::new(StateLimits { producers_max: record.producers_max });
        state.dropped_version = record.dropped_version;
        state.released = record.released;
        if record.dropped_firsts.len() != record.dropped_lasts.len() {
            return Err(CheckpointError::new("columns of dropped partitions differ in length"));
        }
        state.dropped = record.dropped_firsts.into_iter().zip(record.dropped_lasts).collect();
        if !PartitionRun::are_valid(record.topics.iter().flat_map(|topic| &topic.runs)) {
            return Err(CheckpointError::new("a run of partitions is out of bounds"));
        }
        for topic in record.topics {
            state.restore_topic(topic)?;
        }
        for row in record.partitions {
            state.restore_partition(row)?;
        }
        for row in record.producers {
            restore_producer(&mut state.producers, &state.partitions, row)?;
        }
        let (ids, epochs) = (record.forgotten_ids, record.forgotten_epochs);
        if ids.len() != epochs.len() || !ids.is_sorted_by(|a, b| a < b) {
            return Err(CheckpointError::new("forgotten producers are not in order"));
        }
        let forgotten = ForgottenProducers {
            ids_end: record.forgotten_ids_end,
            epochs: ids.into_iter().zip(epochs).collect(),
            epochs_end: record.forgotten_epochs_end,
        };
        if !state.producers.restore_forgotten(forgotten) {
            return Err(CheckpointError::new("there are too many forgotten producers"));
        }
        for group in record.groups {
            state.groups.restore(group).map_err(CheckpointError::new)?;
        }
        let restored = state.groups.restore_order(
            record.ordered_commits,
            record.deleted_groups,
            record.deleted_group_epochs,
            record.forgotten_group_epoch,
        );
        restored.map_err(CheckpointError::new)?;
        (state.ended_split, state.split_below) = (record.ended_split, record.split_below);
        if let Some(split) = record.split {
            state.restore_split(split)?;
        }
        Ok(state)
    }

    fn has_splits(&self) -> bool {
        self.split.is_some() || self.ended_split > 0 || self.split_below > 0
    }

    fn restore_topic(&mut self, topic: TopicRecord) -> Result<(), CheckpointError> {
        let id = topic.topic_id;
        let broken = |what: &str| CheckpointError::new(format!("topic {id}: {what}"));
        let settings = Arc::new(topic.settings.ok_or_else(|| broken("settings are missing"))?);
        if topic.runs.is_empty() {
            return Err(broken("topic has no partitions"));
        }
        let partitions: Vec<_> = topic.runs.iter().flat_map(|run| run.partitions()).collect();
        if !partitions.is_sorted_by(|(a, _), (b, _)| a < b) {
            return Err(broken("partitions are not in order"));
        }
        for &(number, partition) in &partitions {
            let row = Partition::new(partition, id, number, settings.clone());
            if self.partitions.insert(partition, row).is_some() {
                return Err(broken("duplicate partition"));
            }
        }
        self.cleanup.set_topic(id, settings.is_compacted());
        match self.topics.insert(id, ShardTopic { settings, partitions }) {
            None => Ok(()),
            Some(_) => Err(broken("duplicate topic")),
        }
    }

    fn restore_partition(&mut self, row: PartitionRecord) -> Result<(), CheckpointError> {
        let broken = |what: &str| CheckpointError::new(format!("partition {}: {what}", row.id));
        let partition = self.partitions.get_mut(&PartitionId(row.id));
        let partition = partition.ok_or_else(|| broken("partition has no topic"))?;
        if row.log_start > row.next_offset {
            return Err(broken("log start is above the next offset"));
        }
        partition.fencing_token = FencingToken::new(&row.fencing_token)
            .ok_or_else(|| broken("fencing token is too long"))?;
        partition.cleanup = CleanupState {
            upto: row.cleanup_upto,
            tombstones_below: row.tombstones_below,
            round_index: row.round_index,
            cleaned: row.cleaned,
            cleaned_us: row.cleaned_us,
            cleaned_index: row.cleaned_index,
            tombstones_next: row.tombstones_next,
            tombstones_next_us: row.tombstones_next_us,
        };
        if !partition.cleanup.is_sound(row.next_offset) {
            return Err(broken("offsets of its compaction are out of order"));
        }
        partition.log_start = row.log_start;
        partition.next_offset = row.next_offset;
        partition.last_time_us = row.last_time_us;
        self.cleanup.set_partition(partition);
        Ok(())
    }
}

fn restore_producer(
    producers: &mut ProducerTable,
    partitions: &BTreeMap<PartitionId, Partition>,
    row: ProducerRecord,
) -> Result<(), CheckpointError> {
    let (partition, producer_id) = (PartitionId(row.partition), row.producer_id);
    let broken = |what: &str| {
        let name = format!("producer {producer_id} of partition {partition}");
        CheckpointError::new(format!("{name}: {what}"))
    };
    if !partitions.contains_key(&partition) {
        return Err(broken("the partition does not exist"));
    }
    let batches = row.record_counts.len();
    if batches != row.first_offsets.len() || batches > DEDUP_WINDOW_BATCHES {
        return Err(broken("the window is out of bounds"));
    }
    let mut checksums = row.checksums;
    if checksums.is_empty() {
        checksums.resize(batches, 0);
    } else if checksums.len() != batches {
        return Err(broken("checksums of the window are missing"));
    }
    let owner = ProducerOwner::from_field(&row.owner);
    let counted = row.record_counts.into_iter().zip(row.first_offsets).zip(checksums);
    let counted = counted.map(|((record_count, first_offset), checksum)| DedupEntry {
        record_count,
        first_offset,
        checksum: BatchChecksum::from_field(checksum),
    });
    let row = ProducerState {
        epoch: row.epoch,
        owner: owner.ok_or_else(|| broken("the owner has a wrong form"))?,
        next_sequence: row.next_sequence,
        last_used: row.last_used,
        window: counted.collect(),
    };
    if !producers.restore(partition, producer_id, row) {
        return Err(broken("duplicate producer, or too many"));
    }
    Ok(())
}
