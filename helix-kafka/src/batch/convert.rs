//! Native batches as Kafka batches, for readers of the gateway.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};

use bytes::{BufMut, Bytes, BytesMut};
use helix_client::proto::batch;
use helix_client::proto::kafka::{
    KAFKA_BATCH_VERSION, KAFKA_HEADER_BYTES, KafkaBatchBuilder, NO_TIMESTAMP, milliseconds,
};
use helix_client::proto::log::v1::StoredBatch;

/// Bytes of a batch that depend on its position: base offset, length, leader epoch.
const PLACED_BYTES: usize = 16;

/// Position of the length.
const LENGTH_AT: usize = 8;
const LENGTH_END: usize = 12;

/// Returns a stored Kafka batch with its base offset and leader epoch, as two chunks. Its checksum
/// covers neither, so the records are not copied. `None` if it is shorter than a header.
pub fn place_batch(payload: &Bytes, base_offset: u64, leader_epoch: i32) -> Option<[Bytes; 2]> {
    if payload.len() < KAFKA_HEADER_BYTES {
        return None;
    }
    let mut head = BytesMut::with_capacity(PLACED_BYTES);
    head.put_u64(base_offset);
    head.put_slice(&payload[LENGTH_AT..LENGTH_END]);
    head.put_i32(leader_epoch);
    Some([head.freeze(), payload.slice(PLACED_BYTES..)])
}

/// Returns the Kafka batch of a stored one; a native one is converted. Records without an event
/// time get the append time.
///
/// # Errors
/// The payload is not a list of records.
pub fn kafka_batch_of(stored: &StoredBatch) -> Result<Bytes, String> {
    let encoded = stored.batch.as_ref().ok_or("the response has no batch")?;
    if encoded.version == KAFKA_BATCH_VERSION {
        return Ok(encoded.payload.clone());
    }
    if !batch::is_intact(encoded) {
        return Err("the checksum of the batch is wrong".to_owned());
    }
    let list = batch::decode(encoded).map_err(|error| error.to_string())?;
    let appended = stored.append_time.as_ref().map_or(NO_TIMESTAMP, milliseconds);
    let deltas = &stored.offset_deltas;
    let mut builder = KafkaBatchBuilder::default();
    for (index, record) in (0_u32..).zip(&list.records) {
        let delta = deltas.get(index as usize).copied().unwrap_or(index);
        let time = record.event_time.as_ref().map_or(appended, milliseconds);
        let headers = record.headers.iter().map(|it| (it.name.as_bytes(), Some(&it.value[..])));
        builder
            .push(delta, time, record.key.as_deref(), record.value.as_deref(), headers)
            .map_err(|error| error.to_string())?;
    }
    builder.finish(stored.first_offset, None, None).map_err(|error| error.to_string())
}

/// Topic, partition and first offset of a batch, and its compaction.
type BatchKey = (u64, u32, u64, usize);

/// Converted batches, the oldest of which are dropped beyond a limit in bytes.
#[derive(Debug)]
pub struct ConvertedBatches {
    bytes_max: usize,
    batches: Mutex<Converted>,
}

#[derive(Debug, Default)]
struct Converted {
    by_key: HashMap<BatchKey, Bytes>,
    order: VecDeque<BatchKey>,
    bytes: usize,
}

impl ConvertedBatches {
    /// Returns an empty cache.
    pub fn new(bytes_max: usize) -> Self {
        Self { bytes_max, batches: Mutex::default() }
    }

    /// Returns the converted batch, and whether it was found.
    ///
    /// # Errors
    /// The payload is not a list of records.
    pub(crate) fn get_or_convert(
        &self,
        topic_id: u64,
        partition: u32,
        stored: &StoredBatch,
    ) -> Result<(Bytes, bool), String> {
        // Compaction removes records of a batch, so their number tells its states apart.
        let count = stored.batch.as_ref().map_or(0, |batch| batch.record_count as usize);
        let key = (topic_id, partition, stored.first_offset, count);
        if let Some(found) = self.lock().by_key.get(&key) {
            return Ok((found.clone(), true));
        }
        let converted = kafka_batch_of(stored)?;
        self.insert(key, converted.clone());
        Ok((converted, false))
    }

    fn insert(&self, key: BatchKey, batch: Bytes) {
        if batch.len() > self.bytes_max {
            return;
        }
        let mut converted = self.lock();
        let bytes = batch.len();
        match converted.by_key.insert(key, batch) {
            None => converted.order.push_back(key),
            Some(before) => converted.bytes -= before.len(),
        }
        converted.bytes += bytes;
        while converted.bytes > self.bytes_max {
            let Some(oldest) = converted.order.pop_front() else { return };
            if let Some(dropped) = converted.by_key.remove(&oldest) {
                converted.bytes -= dropped.len();
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Converted> {
        // No code under the lock can panic in the middle of a change.
        self.batches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use helix_client::proto::kafka::KafkaBatch;
    use helix_client::proto::log::v1::{Header, Record};

    use super::*;

    fn stored(records: &[Record], offset_deltas: Vec<u32>) -> StoredBatch {
        StoredBatch {
            first_offset: 40,
            append_time: Some(prost_types::Timestamp { seconds: 9, nanos: 5_000_000 }),
            offset_deltas,
            batch: Some(batch::encode(records)),
        }
    }

    fn records() -> Vec<Record> {
        let full = Record {
            key: Some(Bytes::new()),
            value: None,
            headers: vec![Header { name: "h".to_owned(), value: "x".into() }],
            event_time: Some(prost_types::Timestamp { seconds: 1, nanos: 0 }),
        };
        vec![full, Record { value: Some("v".into()), ..Record::default() }]
    }

    #[test]
    fn converted_records_are_the_same() {
        let bytes = kafka_batch_of(&stored(&records(), vec![2, 5])).unwrap();
        let kafka = KafkaBatch::parse(&bytes).unwrap();
        assert_eq!((kafka.base_offset(), kafka.last_offset_delta()), (40, 5));
        let read: Vec<_> = kafka.records(kafka.record_section()).map(Result::unwrap).collect();
        assert_eq!((read[0].key, read[0].value, read[0].offset_delta), (Some(&b""[..]), None, 2));
        assert_eq!((read[1].key, read[1].value), (None, Some(&b"v"[..])));
        assert_eq!([read[0].timestamp(), read[1].timestamp()], [Some(1000), Some(9005)]);
    }

    #[test]
    fn placed_batch_has_its_offset_and_the_same_checksum() {
        let bytes = kafka_batch_of(&stored(&records(), Vec::new())).unwrap();
        let placed = place_batch(&bytes, 77, 3).unwrap().concat();
        let kafka = KafkaBatch::parse(&placed).unwrap();
        assert_eq!(kafka.base_offset(), 77);
        assert_eq!(placed[12..16], 3_i32.to_be_bytes());
        assert!(place_batch(&Bytes::from_static(b"short"), 0, 0).is_none());
    }

    #[test]
    fn oldest_converted_batches_are_dropped() {
        let cache = ConvertedBatches::new(400);
        for first_offset in 0..10 {
            let stored = StoredBatch { first_offset, ..stored(&records(), Vec::new()) };
            assert!(!cache.get_or_convert(1, 0, &stored).unwrap().1);
            assert!(cache.get_or_convert(1, 0, &stored).unwrap().1);
            assert!(cache.lock().bytes <= 400);
        }
        assert!(cache.lock().by_key.len() < 10);
    }
}
