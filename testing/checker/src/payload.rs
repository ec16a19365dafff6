//! Batches that say who they are: each record names its producer, batch and place, and its other
//! bytes follow from these. What comes back is compared byte for byte.

use bytes::Bytes;
use helix_proto::batch;
use helix_proto::log::v1::{EncodedBatch, Record, StoredBatch};

use crate::{BatchKey, Event};

/// Producer, number, place, records of the batch.
const HEAD_BYTES: usize = 4 + 8 + 4 + 4;

/// Most bytes that follow the head.
const FILL_BYTES_MAX: usize = 400;

/// The batch of this name.
pub fn build(key: BatchKey, records: u32) -> EncodedBatch {
    let records: Vec<Record> = (0..records)
        .map(|place| Record { value: Some(value(key, place, records)), ..Record::default() })
        .collect();
    batch::encode(&records)
}

/// Which batch this is, and how many of its records are here.
///
/// # Errors
/// What is wrong with it, if it is none of ours.
pub fn read(encoded: &EncodedBatch) -> Result<(BatchKey, u32), String> {
    let list = batch::decode(encoded).map_err(|error| format!("a bad batch ({error})"))?;
    let values = list.records.iter().map(|record| record.value.as_ref());
    let values: Option<Vec<&Bytes>> = values.collect();
    let values = values.ok_or("a record without a value")?;
    let (key, records) = values.first().and_then(|value| head(value)).ok_or("a foreign record")?;
    for (place, found) in (0..records).zip(&values) {
        if **found != value(key, place, records) {
            return Err(format!("a record that is not number {place} of {key}"));
        }
    }
    match u32::try_from(values.len()) {
        Ok(count) if count <= records => Ok((key, count)),
        _ => Err(format!("{} records where {key} has {records}", values.len())),
    }
}

/// Turns stored batches into what a reader is told. Gives the offset to read next.
pub fn events(
    reader: u32,
    partition: u32,
    batches: &[StoredBatch],
    next: u64,
) -> (Vec<Event>, u64) {
    let mut end = next;
    let told = batches.iter().map(|stored| {
        let offset = stored.first_offset;
        let batch = stored.batch.clone().unwrap_or_default();
        match read(&batch) {
            Ok((key, records)) => {
                end = offset + u64::from(records);
                Event::Read { reader, partition, offset, key, records }
            }
            Err(what) => Event::Foreign { reader, partition, offset, what },
        }
    });
    let told = told.collect();
    (told, end)
}

fn value(key: BatchKey, place: u32, records: u32) -> Bytes {
    let mut state = u64::from(key.producer) << 40 ^ key.number << 8 ^ u64::from(place);
    let fill = usize::try_from(mix(&mut state)).unwrap_or(0) % (FILL_BYTES_MAX + 1);
    let mut bytes = Vec::with_capacity(HEAD_BYTES + fill + 8);
    bytes.extend_from_slice(&key.producer.to_le_bytes());
    bytes.extend_from_slice(&key.number.to_le_bytes());
    bytes.extend_from_slice(&place.to_le_bytes());
    bytes.extend_from_slice(&records.to_le_bytes());
    while bytes.len() < HEAD_BYTES + fill {
        bytes.extend_from_slice(&mix(&mut state).to_le_bytes());
    }
    bytes.truncate(HEAD_BYTES + fill);
    bytes.into()
}

/// SplitMix64: every record that is read is made again, so this is what a check costs.
fn mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut mixed = *state;
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 31
}

fn head(value: &[u8]) -> Option<(BatchKey, u32)> {
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
    fn a_batch_says_who_it_is() {
        assert_eq!(read(&build(KEY, 5)), Ok((KEY, 5)));
    }

    #[test]
    fn foreign_and_damaged_batches_are_told() {
        let mut damaged = build(KEY, 2);
        damaged.crc32 ^= 1;
        assert!(read(&damaged).is_err());
        let record = |value: Bytes| Record { value: Some(value), ..Record::default() };
        let foreign = batch::encode(&[record(Bytes::from_static(b"hello"))]);
        assert!(read(&foreign).is_err());
        assert!(read(&batch::encode(&[Record::default()])).is_err());
        // The second record twice: checksums are right and the story is not.
        let (first, second) = (value(KEY, 0, 3), value(KEY, 1, 3));
        let mixed = batch::encode(&[record(first.clone()), record(second.clone()), record(second)]);
        assert!(read(&mixed).is_err());
        // A part is one of ours; the checker knows that it is not whole.
        let part = batch::encode(&[record(first)]);
        assert_eq!(read(&part), Ok((KEY, 1)));
    }
}
