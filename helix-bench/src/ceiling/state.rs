//! State that the ceiling pretends to have, and the checks that it makes before it answers.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use helix_proto::batch;
use helix_proto::error as wire;
use helix_proto::log::v1 as pb;
use helix_proto::log::v1::{EncodedBatch, ErrorReason, Watermarks};
use prost_types::Timestamp;
use tokio::time::Instant;
use tonic::Status;

use super::fan_out::FanOut;

/// Same values as in the server's `limits.rs`, which documents the reasons.
const RECORD_BYTES_MAX: usize = 1 << 20;
pub(super) const FETCH_BYTES_DEFAULT: u64 = 1 << 20;
const FETCH_BYTES_MAX: u64 = 8 << 20;

/// Records that each partition appears to have.
pub(super) const RECORDS: u64 = 1 << 40;
/// Partitions of a topic that was not created.
const PARTITIONS_DEFAULT: u32 = 4;
/// Partitions with their own offset counter; higher partitions share them.
const COUNTERS: usize = 1 << 12;
pub(super) const NODE_ID: u64 = 1;
/// Append time of all batches.
pub(super) const APPEND_TIME: Timestamp = Timestamp { seconds: 1_700_000_000, nanos: 1_000 };

#[derive(Debug)]
pub(super) struct CeilingState {
    pub(super) endpoint: String,
    pub(super) started: Instant,
    /// Batches that fetches return in an endless cycle.
    batches: Vec<EncodedBatch>,
    /// Next offset of each partition, for acks only.
    next_offsets: Vec<AtomicU64>,
    /// Partitions of the created topics.
    topics: Mutex<HashMap<String, u32>>,
    /// Subscriptions at the end of a partition.
    pub(super) live: FanOut,
}

impl CeilingState {
    pub(super) fn new(address: SocketAddr, batches: Vec<EncodedBatch>) -> Self {
        assert!(!batches.is_empty(), "there is something to fetch");
        Self {
            endpoint: address.to_string(),
            started: Instant::now(),
            batches,
            next_offsets: (0..COUNTERS).map(|_| AtomicU64::new(0)).collect(),
            topics: Mutex::default(),
            live: FanOut::default(),
        }
    }

    pub(super) fn ack(&self, partition: u32, records: u32) -> pb::AppendAck {
        let next_offset = &self.next_offsets[partition as usize % COUNTERS];
        let first = next_offset.fetch_add(u64::from(records), Ordering::Relaxed);
        pb::AppendAck {
            first_offset: Some(first),
            next_offset: Some(first + u64::from(records)),
            duplicate: false,
            durability: pb::Durability::None.into(),
        }
    }

    /// Returns the batches from that with `offset` on, and the offset after them.
    fn fetch(&self, offset: u64, bounds: FetchBounds) -> (Vec<pb::StoredBatch>, u64) {
        let batch_records = u64::from(self.batches[0].record_count);
        let mut number = offset / batch_records;
        let (mut records, mut bytes) = (0, 0);
        let mut found = Vec::with_capacity(1);
        loop {
            let index = number % self.batches.len() as u64;
            let batch = &self.batches[usize::try_from(index).expect("index is in range")];
            let first_offset = number * batch_records;
            let is_full = records >= bounds.records
                || bytes + batch.payload.len() as u64 > bounds.bytes && !found.is_empty();
            if is_full || offset.max(first_offset) >= bounds.until {
                return (found, offset.max(first_offset).min(bounds.until.max(offset)));
            }
            // The first batch counts from the requested offset on, as in the server.
            records += first_offset + batch_records - offset.max(first_offset);
            bytes += batch.payload.len() as u64;
            found.push(pb::StoredBatch {
                first_offset,
                append_time: Some(APPEND_TIME),
                offset_deltas: Vec::new(),
                batch: Some(batch.clone()),
            });
            number += 1;
        }
    }

    pub(super) fn read(
        &self,
        start: pb::PartitionStart,
        mut bounds: FetchBounds,
    ) -> Result<pb::PartitionRecords, Status> {
        let offset = resolve(start.start.as_ref())?;
        bounds.until = bounds.until.min(start.until_offset.unwrap_or(RECORDS));
        let (batches, next_offset) = self.fetch(offset, bounds);
        Ok(pb::PartitionRecords {
            topic: start.topic,
            partition: start.partition,
            records: Vec::new(),
            batches,
            next_offset,
            watermarks: Some(WATERMARKS),
            start_offset: offset,
            topic_id: 0,
        })
    }

    pub(super) fn create(&self, topic: String, partitions: u32) {
        self.topics.lock().unwrap_or_else(PoisonError::into_inner).insert(topic, partitions);
    }

    pub(super) fn partitions(&self, topic: &str) -> u32 {
        let topics = self.topics.lock().unwrap_or_else(PoisonError::into_inner);
        topics.get(topic).copied().unwrap_or(PARTITIONS_DEFAULT)
    }

    pub(super) fn leader(&self) -> pb::LeaderHint {
        pb::LeaderHint { node_id: NODE_ID, endpoint: self.endpoint.clone(), term: 1 }
    }

    pub(super) fn topic(&self, name: String) -> pb::Topic {
        let partitions = (0..self.partitions(&name)).map(|partition| pb::PartitionInfo {
            partition,
            leader: Some(self.leader()),
            replicas: vec![NODE_ID],
            watermarks: Some(WATERMARKS),
            shard_id: 1,
            ..pb::PartitionInfo::default()
        });
        pb::Topic {
            partitions: partitions.collect(),
            name,
            replication_factor: 1,
            config: Some(pb::TopicConfig {
                default_durability: pb::Durability::None.into(),
                ..pb::TopicConfig::default()
            }),
            topic_id: 0,
        }
    }
}

pub(super) const WATERMARKS: Watermarks =
    Watermarks { log_start_offset: 0, high_watermark: RECORDS };

/// Limits of one response.
#[derive(Debug, Clone, Copy)]
pub(super) struct FetchBounds {
    pub(super) records: u64,
    pub(super) bytes: u64,
    pub(super) until: u64,
}

impl FetchBounds {
    pub(super) fn new(limits: Option<&pb::ReadLimits>) -> Self {
        let records = limits.and_then(|limits| limits.max_records).unwrap_or(u64::MAX);
        let bytes = limits.and_then(|limits| limits.max_bytes).unwrap_or(FETCH_BYTES_DEFAULT);
        Self { records, bytes: bytes.min(FETCH_BYTES_MAX), until: RECORDS }
    }
}

/// Reports whether a subscription starts at the end of a partition and has no end itself.
pub(super) fn is_at_end(start: &pb::PartitionStart) -> bool {
    start.until_offset.is_none()
        && resolve(start.start.as_ref()).is_ok_and(|offset| offset == RECORDS)
}

/// Returns the offset of a position. [`RECORDS`] stands for the end, also where more was published.
///
/// # Errors
/// The position is of a kind that the ceiling does not know.
pub(super) fn resolve(start: Option<&pb::StartPosition>) -> Result<u64, Status> {
    use pb::start_position::Position;
    match start.and_then(|start| start.position.as_ref()) {
        Some(Position::Offset(offset)) => Ok((*offset).min(RECORDS)),
        Some(Position::Named(named)) => match pb::NamedPosition::try_from(*named) {
            Ok(pb::NamedPosition::Earliest) => Ok(0),
            Ok(pb::NamedPosition::Latest) => Ok(RECORDS),
            _ => Err(error_status(ErrorReason::InvalidArgument, "no position")),
        },
        _ => Err(error_status(ErrorReason::Unimplemented, "the ceiling knows offsets only")),
    }
}

/// Makes the checks that a server needs before it may store a batch. Returns the record count.
pub(super) fn check(batch: Option<&pb::Batch>) -> Result<u32, Status> {
    use pb::batch::Form;
    let Some(Form::Encoded(batch)) = batch.and_then(|batch| batch.form.as_ref()) else {
        return Err(error_status(
            ErrorReason::Unimplemented,
            "the ceiling takes encoded batches only",
        ));
    };
    let payload = batch::uncompressed_payload(batch)
        .map_err(|error| error_status(ErrorReason::CorruptBatch, &error.to_string()))?;
    batch::scan(&payload, batch.record_count, RECORD_BYTES_MAX)
        .map_err(|error| error_status(ErrorReason::RecordCountMismatch, &error.to_string()))?;
    Ok(batch.record_count)
}

pub(super) fn error_status(reason: ErrorReason, message: &str) -> Status {
    wire::to_status(&wire::detail(reason), message, None)
}

pub(super) fn unimplemented_call<T>() -> Result<T, Status> {
    Err(error_status(ErrorReason::Unimplemented, "the ceiling does not implement this method"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::payload::{BatchPool, PayloadKind};

    fn state() -> CeilingState {
        let batches = BatchPool::new(PayloadKind::Zero, 10, 100, 1, 1).into_batches();
        CeilingState::new(([127, 0, 0, 1], 1).into(), batches)
    }

    fn bounds(records: u64) -> FetchBounds {
        FetchBounds { records, bytes: FETCH_BYTES_DEFAULT, until: RECORDS }
    }

    #[test]
    fn fetch_returns_whole_batches_from_the_offset_on() {
        let state = state();
        let (batches, next) = state.fetch(200, bounds(100));
        assert_eq!((batches.len(), batches[0].first_offset, next), (1, 200, 300));
        let (batches, next) = state.fetch(250, bounds(100));
        assert_eq!((batches.len(), batches[0].first_offset, next), (2, 200, 400));
        let (batches, next) = state.fetch(0, FetchBounds { bytes: 1, ..bounds(1000) });
        assert_eq!((batches.len(), next), (1, 100));
        let (batches, next) = state.fetch(200, FetchBounds { until: 250, ..bounds(1000) });
        assert_eq!((batches.len(), next), (1, 250));
        let (batches, next) = state.fetch(RECORDS, bounds(1));
        assert_eq!((batches.len(), next), (0, RECORDS));
    }

    #[test]
    fn offsets_are_counted_per_partition() {
        let state = state();
        assert_eq!(state.ack(3, 100).first_offset, Some(0));
        assert_eq!(state.ack(3, 100).first_offset, Some(100));
        assert_eq!(state.ack(4, 100).first_offset, Some(0));
    }

    #[test]
    fn rejects_damaged_batches() {
        let mut batch = state().batches[0].clone();
        let form = |batch| pb::Batch { form: Some(pb::batch::Form::Encoded(batch)) };
        assert_eq!(check(Some(&form(batch.clone()))).unwrap(), 100);
        batch.crc32 ^= 1;
        assert!(check(Some(&form(batch))).is_err());
        assert!(check(None).is_err());
    }
}
