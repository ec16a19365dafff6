//! Converts responses to batches and records, and verifies them.
//!
//! Checks that a response is for the requested partitions and that checksums match.

use std::time::SystemTime;

use helix_proto::batch;
use helix_proto::log::v1::{ErrorReason, FetchResponse, PartitionRecords, Record, StoredBatch};
use tonic::Code;

use super::{Batches, ConsumedRecord, Position, ReadStart, Records, UndecodableBatch};
use crate::error::{Error, Result};

/// Returns the batches of each start, in order.
///
/// # Errors
/// `CORRUPT_LOG` for corrupt bytes; `INTERNAL` if the response is for other partitions.
pub(super) fn response<'a>(
    response: FetchResponse,
    starts: impl Iterator<Item = &'a ReadStart>,
) -> Result<Vec<Batches>> {
    let mut partitions = response.partitions.into_iter();
    let mut fetched = Vec::with_capacity(partitions.len());
    for start in starts {
        let data = partitions
            .next()
            .filter(|data| data.partition == start.partition && data.topic == start.topic)
            .ok_or_else(|| Error::client(Code::Internal, "the response is for other partitions"))?;
        let requested = match start.position {
            Position::Offset(offset) => Some(offset),
            _ => None,
        };
        check_topic(&data.topic, start.topic_id, data.topic_id)?;
        fetched.push(batches(data, requested, start.until)?);
    }
    Ok(fetched)
}

/// Checks that data is from the expected topic. An id of 0 is unknown and matches any topic.
///
/// # Errors
/// `TOPIC_RECREATED`.
pub(super) fn check_topic(topic: &str, expected_id: u64, id: u64) -> Result<()> {
    if expected_id == 0 || id == 0 || id == expected_id {
        return Ok(());
    }
    Err(Error::recreated(topic, expected_id, id))
}

/// Verifies the batches of one partition.
///
/// `requested` is the requested offset, or None if another position was requested.
///
/// # Errors
/// `CORRUPT_LOG` for corrupt bytes.
pub(super) fn batches(
    data: PartitionRecords,
    requested: Option<u64>,
    until: Option<u64>,
) -> Result<Batches> {
    for stored in &data.batches {
        verify(stored, &data)?;
    }
    Ok(Batches {
        // If the service clamped the position, its start may be below the requested offset.
        start_offset: match requested {
            Some(requested) if requested <= data.next_offset => requested.max(data.start_offset),
            _ => data.start_offset,
        },
        topic: data.topic,
        topic_id: data.topic_id,
        partition: data.partition,
        until,
        batches: data.batches,
        next_offset: data.next_offset,
        watermarks: data.watermarks.unwrap_or_default(),
    })
}

fn verify(stored: &StoredBatch, data: &PartitionRecords) -> Result<()> {
    let deltas = stored.offset_deltas.len();
    let is_valid = stored.batch.as_ref().is_some_and(|batch| {
        batch::is_intact(batch) && (deltas == 0 || deltas == batch.record_count as usize)
    });
    if is_valid {
        return Ok(());
    }
    Err(corrupt(&data.topic, data.partition, stored.first_offset, &"checksum mismatch"))
}

/// Decodes the records of batches: see [`Batches::decode`].
pub(super) fn records(batches: Batches) -> Result<Records> {
    match readable(batches, false) {
        (records, None) => Ok(records),
        (_, Some(error)) => Err(error),
    }
}

/// Like [`readable`], but fails only if the first undecodable batch has no records before it.
///
/// # Errors
/// `UNDECODABLE_BATCH`, with the partition.
pub(super) fn available(batches: Batches, skips: bool) -> Result<Records> {
    match readable(batches, skips) {
        (records, Some(error)) if records.records.is_empty() => {
            Err(error.with_partition(&records.topic, records.partition))
        }
        (records, _) => Ok(records),
    }
}

/// Decodes the records up to the first undecodable batch, and returns the error of that batch.
///
/// With `skips`, undecodable batches are skipped and listed instead.
pub(crate) fn readable(batches: Batches, skips: bool) -> (Records, Option<Error>) {
    let Batches {
        topic,
        partition,
        start_offset,
        until,
        batches,
        next_offset,
        watermarks,
        topic_id,
    } = batches;
    let until = until.unwrap_or(u64::MAX);
    let mut all = Records {
        topic,
        partition,
        records: Vec::new(),
        next_offset,
        watermarks,
        topic_id,
        undecodable: Vec::new(),
    };
    for stored in batches {
        match decode(&all, &stored) {
            Ok(records) => {
                let is_requested = |it: &ConsumedRecord| (start_offset..until).contains(&it.offset);
                all.records.extend(records.into_iter().filter(is_requested));
            }
            Err(error) if skips && error.is(ErrorReason::UndecodableBatch) => {
                all.undecodable.push(UndecodableBatch {
                    first_offset: stored.first_offset,
                    record_count: stored.batch.as_ref().map_or(0, |batch| batch.record_count),
                    message: error.message.clone(),
                });
            }
            Err(error) => {
                all.next_offset = stored.first_offset.max(start_offset);
                return (all, Some(error));
            }
        }
    }
    (all, None)
}

fn decode(of: &Records, stored: &StoredBatch) -> Result<Vec<ConsumedRecord>> {
    let decoded = stored.batch.as_ref().map(batch::decode).transpose();
    let list = decoded
        .map_err(|error| undecodable(&of.topic, of.partition, stored.first_offset, &error))?
        .unwrap_or_default();
    let append_time = match stored.append_time.map(helix_proto::time::system_time) {
        None => SystemTime::UNIX_EPOCH,
        Some(Ok(time)) => time,
        // The checksum does not cover the append time.
        Some(Err(error)) => {
            return Err(corrupt(&of.topic, of.partition, stored.first_offset, &error));
        }
    };
    let records = list.records.into_iter().enumerate().map(|(index, record)| {
        // The checksum covers neither the first offset nor the deltas.
        let offset = stored.first_offset.checked_add(delta(&stored.offset_deltas, index));
        let offset = offset.ok_or_else(|| {
            let what = "a record offset exceeds 64 bits";
            corrupt(&of.topic, of.partition, stored.first_offset, &what)
        })?;
        Ok(consumed(offset, append_time, record))
    });
    records.collect()
}

/// Returns the distance of a record from its batch's first offset.
fn delta(deltas: &[u32], index: usize) -> u64 {
    deltas.get(index).map_or(index as u64, |delta| u64::from(*delta))
}

fn consumed(offset: u64, append_time: SystemTime, record: Record) -> ConsumedRecord {
    ConsumedRecord {
        offset,
        append_time,
        key: record.key,
        value: record.value,
        headers: record.headers,
        event_time: record.event_time.and_then(|time| helix_proto::time::system_time(time).ok()),
    }
}

fn undecodable(topic: &str, partition: u32, offset: u64, why: &dyn std::fmt::Display) -> Error {
    let message = format!(
        "batch at offset {offset} of {topic}/{partition} is stored intact, but its content is not \
         records: {why}"
    );
    Error::known(ErrorReason::UndecodableBatch, message)
}

fn corrupt(topic: &str, partition: u32, offset: u64, why: &dyn std::fmt::Display) -> Error {
    let message = format!("batch at offset {offset} of {topic}/{partition}: {why}");
    Error::known(ErrorReason::CorruptLog, message)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use helix_proto::log::v1::Watermarks;

    use super::*;

    fn stored(first_offset: u64, values: &[&'static str]) -> StoredBatch {
        let records: Vec<_> = values
            .iter()
            .map(|value| Record {
                value: Some(Bytes::from_static(value.as_bytes())),
                ..Record::default()
            })
            .collect();
        StoredBatch {
            first_offset,
            append_time: Some(prost_types::Timestamp { seconds: 5, nanos: 0 }),
            offset_deltas: Vec::new(),
            batch: Some(batch::encode(&records)),
        }
    }

    fn partition(
        start_offset: u64,
        batches: Vec<StoredBatch>,
        next_offset: u64,
    ) -> PartitionRecords {
        PartitionRecords {
            topic: "orders".to_owned(),
            partition: 1,
            batches,
            start_offset,
            next_offset,
            watermarks: Some(Watermarks { log_start_offset: 0, high_watermark: 9 }),
            ..PartitionRecords::default()
        }
    }

    fn read(
        data: PartitionRecords,
        requested: Option<u64>,
        until: Option<u64>,
    ) -> Vec<(u64, String)> {
        let records = batches(data, requested, until).unwrap().decode().unwrap().records;
        records
            .into_iter()
            .map(|record| {
                (record.offset, String::from_utf8(record.value.unwrap().to_vec()).unwrap())
            })
            .collect()
    }

    #[test]
    fn returns_only_the_requested_records() {
        let both = || vec![stored(3, &["a", "b", "c"]), stored(6, &["d", "e"])];
        let all = read(partition(3, both(), 8), Some(3), None);
        assert_eq!(all.len(), 5);
        assert_eq!(all[0], (3, "a".to_owned()));
        let middle = read(partition(4, both(), 8), Some(4), Some(7));
        assert_eq!(middle, [(4, "b".to_owned()), (5, "c".to_owned()), (6, "d".to_owned())]);
        // The service resolved the start.
        assert_eq!(read(partition(7, both(), 8), None, None), [(7, "e".to_owned())]);
        // The service clamped the start, from below and from above.
        assert_eq!(read(partition(3, both(), 8), Some(0), None).len(), 5);
        assert_eq!(read(partition(6, both(), 8), Some(100), None).len(), 2);
    }

    #[test]
    fn offsets_keep_their_gaps_after_compaction() {
        let mut batch = stored(10, &["a", "b"]);
        batch.offset_deltas = vec![0, 7];
        let read = read(partition(10, vec![batch], 18), Some(10), None);
        assert_eq!(read, [(10, "a".to_owned()), (17, "b".to_owned())]);
    }

    #[test]
    fn rejects_corrupt_bytes() {
        let mut corrupt_batch = stored(3, &["a"]);
        let batch = corrupt_batch.batch.as_mut().unwrap();
        let mut payload = batch.payload.to_vec();
        payload[3] ^= 1;
        batch.payload = payload.into();
        let error = batches(partition(3, vec![corrupt_batch], 4), Some(3), None).unwrap_err();
        assert!(error.is(ErrorReason::CorruptLog));
        let mut deltas = stored(3, &["a"]);
        deltas.offset_deltas = vec![0, 1];
        assert!(batches(partition(3, vec![deltas], 4), Some(3), None).is_err());
        let beyond = stored(u64::MAX, &["a", "b"]);
        let error = batches(partition(3, vec![beyond], 4), Some(3), None).unwrap().decode();
        assert!(error.unwrap_err().is(ErrorReason::CorruptLog));
    }

    #[test]
    fn undecodable_batch_ends_the_read_after_what_is_good() {
        let mut garbage = stored(4, &["x"]);
        // Field number 0 is invalid in every message.
        garbage.batch = Some(batch::from_payload(1, Bytes::from_static(&[0x0A, 2, 0, 0])));
        let list = || vec![stored(3, &["a"]), garbage.clone(), stored(5, &["b"])];
        let read = |skips| {
            let batches = batches(partition(3, list(), 6), Some(3), None).unwrap();
            readable(batches, skips)
        };
        let (records, error) = read(false);
        assert!(error.unwrap().is(ErrorReason::UndecodableBatch));
        assert_eq!((records.records.len(), records.next_offset), (1, 4));
        let (records, error) = read(true);
        assert!(error.is_none());
        let offsets: Vec<_> = records.records.iter().map(|record| record.offset).collect();
        assert_eq!((offsets, records.next_offset), (vec![3, 5], 6));
        assert_eq!(records.undecodable[0].first_offset, 4);
    }

    #[test]
    fn read_that_starts_within_an_undecodable_batch_stays_there() {
        let mut garbage = stored(4, &["x", "y"]);
        garbage.batch = Some(batch::from_payload(2, Bytes::from_static(&[0x0A, 0, 0x0A, 2, 0, 0])));
        let read = batches(partition(5, vec![garbage], 6), Some(5), None).unwrap();
        let (records, error) = readable(read.clone(), false);
        assert!(error.unwrap().is(ErrorReason::UndecodableBatch));
        assert_eq!(records.next_offset, 5);
        let error = available(read, false).unwrap_err();
        assert_eq!(error.topic_partition, Some(("orders".to_owned(), 1)));
    }

    #[test]
    fn rejects_a_response_for_other_partitions() {
        let requested = [ReadStart::new("orders", 2, Position::Earliest)];
        let fetched = FetchResponse { partitions: vec![partition(0, Vec::new(), 0)] };
        assert!(response(fetched, requested.iter()).is_err());
        assert!(response(FetchResponse::default(), requested.iter()).is_err());
    }
}
