//! Self-describing batches: each record has its producer, batch number and position, and its other
//! bytes are derived from these. Batches that are read are compared byte for byte.

use bytes::Bytes;
use helix_proto::batch;
use helix_proto::compression::{BatchCodec, Compressor};
use helix_proto::log::v1::{EncodedBatch, Record, StoredBatch};

use crate::{BatchKey, HistoryEvent};

/// Length of the header: producer, batch number, position, record count.
const HEADER_BYTES: usize = 4 + 8 + 4 + 4;

/// Maximum bytes after the header.
const FILLER_BYTES_MAX: usize = 400;

/// Builds the batch with this key.
pub fn build(key: BatchKey, records: u32) -> EncodedBatch {
    let records: Vec<Record> = (0..records)
        .map(|position| Record { value: Some(value(key, position, records)), ..Record::default() })
        .collect();
    batch::encode(&records)
}

/// Compresses a batch with the codec that its key selects; a third of all batches stay as they are.
///
/// Also where that does not shrink it: most of its bytes look random.
pub fn compressed(key: BatchKey, batch: EncodedBatch) -> EncodedBatch {
    let codec = match (u64::from(key.producer) + key.number) % 3 {
        0 => BatchCodec::Lz4,
        1 => BatchCodec::Zstd,
        _ => return batch,
    };
    let mut compressor = Compressor::default();
    let Some(payload) = compressor.compress_bytes(codec, &batch.payload) else { return batch };
    with_crc(EncodedBatch {
        compression: codec.to_wire().into(),
        payload: Bytes::copy_from_slice(payload),
        ..batch.clone()
    })
}

/// Returns a batch whose checksum is that of its other fields.
pub fn with_crc(batch: EncodedBatch) -> EncodedBatch {
    let EncodedBatch { version, record_count, compression, payload, .. } = &batch;
    EncodedBatch { crc32: batch::crc(*version, *record_count, *compression, payload), ..batch }
}

/// Returns the key of a batch and the number of its records that are present.
///
/// # Errors
/// The batch was not made by [`build`].
pub fn read(encoded: &EncodedBatch) -> Result<(BatchKey, u32), String> {
    let list = batch::decode(encoded).map_err(|error| format!("an invalid batch ({error})"))?;
    let values = list.records.iter().map(|record| record.value.as_ref());
    let values: Option<Vec<&Bytes>> = values.collect();
    let values = values.ok_or("a record without a value")?;
    let (key, records) =
        values.first().and_then(|value| header(value)).ok_or("a foreign record")?;
    for (position, found) in (0..records).zip(&values) {
        if **found != value(key, position, records) {
            return Err(format!("a record that is not record {position} of {key}"));
        }
    }
    match u32::try_from(values.len()) {
        Ok(count) if count <= records => Ok((key, count)),
        _ => Err(format!("{} records where {key} has {records}", values.len())),
    }
}

/// Converts stored batches to events of a reader. Also returns the next offset to read.
pub fn events(
    reader: u32,
    partition: u32,
    batches: &[StoredBatch],
    next: u64,
) -> (Vec<HistoryEvent>, u64) {
    let mut end = next;
    let events = batches.iter().map(|stored| {
        let offset = stored.first_offset;
        let batch = stored.batch.clone().unwrap_or_default();
        match read(&batch) {
            Ok((key, records)) => {
                end = offset + u64::from(records);
                HistoryEvent::Read { reader, partition, offset, key, records }
            }
            Err(what) => HistoryEvent::Foreign { reader, partition, offset, what },
        }
    });
    let events = events.collect();
    (events, end)
}

fn value(key: BatchKey, position: u32, records: u32) -> Bytes {
    let mut state = u64::from(key.producer) << 40 ^ key.number << 8 ^ u64::from(position);
    let filler = usize::try_from(mix(&mut state)).unwrap_or(0) % (FILLER_BYTES_MAX + 1);
    let mut bytes = Vec::with_capacity(HEADER_BYTES + filler + 8);
    bytes.extend_from_slice(&key.producer.to_le_bytes());
    bytes.extend_from_slice(&key.number.to_le_bytes());
    bytes.extend_from_slice(&position.to_le_bytes());
    bytes.extend_from_slice(&records.to_le_bytes());
    while bytes.len() < HEADER_BYTES + filler {
        bytes.extend_from_slice(&mix(&mut state).to_le_bytes());
    }
    bytes.truncate(HEADER_BYTES + filler);
    bytes.into()
}

/// SplitMix64. Fast, because every record that is read is generated again.
fn mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut mixed = *state;
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 31
}

fn header(value: &[u8]) -> Option<(BatchKey, u32)> {
    let (producer, rest) = value.split_first_chunk()?;
    let (number, rest) = rest.split_first_chunk()?;
    let (_place, rest) = rest.split_first_chunk::<4>()?;
    let (records, _) = rest.split_first_chunk()?;
    let key =
        BatchKey { producer: u32::from_le_bytes(*producer), number: u64::from_le_bytes(*number) };
    Some((key, u32::from_le_bytes(*records)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: BatchKey = BatchKey { producer: 3, number: 77 };

    #[test]
    fn batch_reads_back_with_its_key() {
        assert_eq!(read(&build(KEY, 5)), Ok((KEY, 5)));
    }

    #[test]
    fn rejects_foreign_and_damaged_batches() {
        let mut damaged = build(KEY, 2);
        damaged.crc32 ^= 1;
        assert!(read(&damaged).is_err());
        let record = |value: Bytes| Record { value: Some(value), ..Record::default() };
        let foreign = batch::encode(&[record(Bytes::from_static(b"hello"))]);
        assert!(read(&foreign).is_err());
        assert!(read(&batch::encode(&[Record::default()])).is_err());
        // The second record twice: valid checksums, invalid order.
        let (first, second) = (value(KEY, 0, 3), value(KEY, 1, 3));
        let mixed = batch::encode(&[record(first.clone()), record(second.clone()), record(second)]);
        assert!(read(&mixed).is_err());
        // A part of a batch is accepted here; the checker finds that it is incomplete.
        let part = batch::encode(&[record(first)]);
        assert_eq!(read(&part), Ok((KEY, 1)));
    }
}
