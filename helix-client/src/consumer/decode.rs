//! From the service's answers to batches and records: checks that they are what was asked for and
//! what the producer wrote. Pure.

use std::time::SystemTime;

use helix_proto::batch;
use helix_proto::log::v1::{ErrorReason, FetchResponse, PartitionRecords, Record, StoredBatch};
use tonic::Code;

use super::{Batches, ConsumedRecord, Position, Records, Start};
use crate::error::{Error, Result};

/// The answers to these starts, in their order.
///
/// # Errors
/// `CORRUPT_LOG` for damaged bytes; `INTERNAL` if the answers are for other partitions.
pub(super) fn answers<'a>(
    answer: FetchResponse,
    starts: impl Iterator<Item = &'a Start>,
) -> Result<Vec<Batches>> {
    let mut answers = answer.partitions.into_iter();
    let mut fetched = Vec::with_capacity(answers.len());
    for start in starts {
        let answer = answers
            .next()
            .filter(|answer| answer.partition == start.partition && answer.topic == start.topic)
            .ok_or_else(|| Error::client(Code::Internal, "an answer for other partitions"))?;
        let asked = match start.position {
            Position::Offset(offset) => Some(offset),
            _ => None,
        };
        fetched.push(batches(answer, asked, start.until)?);
    }
    Ok(fetched)
}

/// One partition's answer, every batch verified. `asked` is the offset that was asked for, where
/// it was one.
///
/// # Errors
/// `CORRUPT_LOG` for damaged bytes.
pub(super) fn batches(
    answer: PartitionRecords,
    asked: Option<u64>,
    until: Option<u64>,
) -> Result<Batches> {
    for stored in &answer.batches {
        verify(stored, &answer)?;
    }
    Ok(Batches {
        // With a clamped start the service's may be the lower one.
        start_offset: match asked {
            Some(asked) if asked <= answer.next_offset => asked.max(answer.start_offset),
            _ => answer.start_offset,
        },
        topic: answer.topic,
        partition: answer.partition,
        until,
        batches: answer.batches,
        next_offset: answer.next_offset,
        watermarks: answer.watermarks.unwrap_or_default(),
    })
}

fn verify(stored: &StoredBatch, answer: &PartitionRecords) -> Result<()> {
    let deltas = stored.offset_deltas.len();
    let is_sound = stored.batch.as_ref().is_some_and(|batch| {
        batch::is_intact(batch) && (deltas == 0 || deltas == batch.record_count as usize)
    });
    if is_sound {
        return Ok(());
    }
    Err(corrupt(&answer.topic, answer.partition, stored.first_offset, &"checksum mismatch"))
}

/// See [`Batches::decode`].
pub(super) fn records(batches: Batches) -> Result<Records> {
    let Batches { topic, partition, start_offset, until, batches, next_offset, watermarks } =
        batches;
    let until = until.unwrap_or(u64::MAX);
    let mut records = Vec::new();
    for stored in batches {
        let decoded = stored.batch.as_ref().map(batch::decode).transpose();
        let list = decoded
            .map_err(|error| corrupt(&topic, partition, stored.first_offset, &error))?
            .unwrap_or_default();
        let append_time = stored.append_time.map_or(SystemTime::UNIX_EPOCH, time);
        for (place, record) in list.records.into_iter().enumerate() {
            // Neither is covered by the checksum.
            let delta = delta(&stored.offset_deltas, place);
            let Some(offset) = stored.first_offset.checked_add(delta) else {
                let what = "an offset beyond 64 bits";
                return Err(corrupt(&topic, partition, stored.first_offset, &what));
            };
            if (start_offset..until).contains(&offset) {
                records.push(consumed(offset, append_time, record));
            }
        }
    }
    Ok(Records { topic, partition, records, next_offset, watermarks })
}

/// Distance of a record from its batch's first offset.
fn delta(deltas: &[u32], place: usize) -> u64 {
    deltas.get(place).map_or(place as u64, |delta| u64::from(*delta))
}

fn consumed(offset: u64, append_time: SystemTime, record: Record) -> ConsumedRecord {
    ConsumedRecord {
        offset,
        append_time,
        key: record.key,
        value: record.value,
        headers: record.headers,
        event_time: record.event_time.map(time),
    }
}

/// A time outside of what the platform can say becomes the epoch.
fn time(timestamp: prost_types::Timestamp) -> SystemTime {
    timestamp.try_into().unwrap_or(SystemTime::UNIX_EPOCH)
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

    fn answer(start_offset: u64, batches: Vec<StoredBatch>, next_offset: u64) -> PartitionRecords {
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
        answer: PartitionRecords,
        asked: Option<u64>,
        until: Option<u64>,
    ) -> Vec<(u64, String)> {
        let records = batches(answer, asked, until).unwrap().decode().unwrap().records;
        records
            .into_iter()
            .map(|record| {
                (record.offset, String::from_utf8(record.value.unwrap().to_vec()).unwrap())
            })
            .collect()
    }

    #[test]
    fn only_what_was_asked_for_comes_out() {
        let both = || vec![stored(3, &["a", "b", "c"]), stored(6, &["d", "e"])];
        let all = read(answer(3, both(), 8), Some(3), None);
        assert_eq!(all.len(), 5);
        assert_eq!(all[0], (3, "a".to_owned()));
        let middle = read(answer(4, both(), 8), Some(4), Some(7));
        assert_eq!(middle, [(4, "b".to_owned()), (5, "c".to_owned()), (6, "d".to_owned())]);
        // A start that the service resolved.
        assert_eq!(read(answer(7, both(), 8), None, None), [(7, "e".to_owned())]);
        // A start that it clamped, from below and from above.
        assert_eq!(read(answer(3, both(), 8), Some(0), None).len(), 5);
        assert_eq!(read(answer(6, both(), 8), Some(100), None).len(), 2);
    }

    #[test]
    fn gaps_of_compaction_keep_their_offsets() {
        let mut batch = stored(10, &["a", "b"]);
        batch.offset_deltas = vec![0, 7];
        let read = read(answer(10, vec![batch], 18), Some(10), None);
        assert_eq!(read, [(10, "a".to_owned()), (17, "b".to_owned())]);
    }

    #[test]
    fn damaged_bytes_are_an_error() {
        let mut damaged = stored(3, &["a"]);
        let batch = damaged.batch.as_mut().unwrap();
        let mut payload = batch.payload.to_vec();
        payload[3] ^= 1;
        batch.payload = payload.into();
        let error = batches(answer(3, vec![damaged], 4), Some(3), None).unwrap_err();
        assert!(error.is(ErrorReason::CorruptLog));
        let mut deltas = stored(3, &["a"]);
        deltas.offset_deltas = vec![0, 1];
        assert!(batches(answer(3, vec![deltas], 4), Some(3), None).is_err());
        let beyond = stored(u64::MAX, &["a", "b"]);
        let error = batches(answer(3, vec![beyond], 4), Some(3), None).unwrap().decode();
        assert!(error.unwrap_err().is(ErrorReason::CorruptLog));
    }

    #[test]
    fn answers_must_be_for_the_asked_partitions() {
        let asked = [Start::new("orders", 2, Position::Earliest)];
        let fetched = FetchResponse { partitions: vec![answer(0, Vec::new(), 0)] };
        assert!(answers(fetched, asked.iter()).is_err());
        assert!(answers(FetchResponse::default(), asked.iter()).is_err());
    }
}
