//! Updates of keys: batches that state which update is the latest of each key.
//!
//! Each lane updates keys of its own and has one batch in flight, so the order of its updates is
//! known. Seeded: the same flags give the same updates.

use bytes::{BufMut, Bytes, BytesMut};
use helix_proto::batch;
use helix_proto::log::v1::{EncodedBatch, Record};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Bytes of a value that number its update, little endian.
pub(crate) const NUMBER_BYTES: usize = 8;
/// Bytes from which values are cut, so that they do not compress.
const FILLER_BYTES: usize = 64 << 10;
/// Characters of a key, all of them hexadecimal digits.
const KEY_CHARS: usize = 16;

/// Updates of one lane, in random order of its keys.
#[derive(Debug)]
pub(crate) struct KeyedUpdates {
    rng: StdRng,
    /// Number of the first key.
    lane: usize,
    /// Distance of the lane's keys.
    lanes: usize,
    size: usize,
    filler: Bytes,
    /// Number of the last update of each of the lane's keys; 0 for none.
    latest: Vec<u64>,
    updates: u64,
    /// Batches whose appends failed, so they may or may not be in the log.
    failed: u64,
}

/// The last update of each key, by the number of the key; 0 for none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LatestUpdates {
    pub(crate) of_key: Vec<u64>,
    /// Batches of which it is not known whether they are in the log.
    pub(crate) failed: u64,
}

impl KeyedUpdates {
    /// Creates the updates of a lane, which has every `lanes`-th key. There are at least as many
    /// keys as lanes.
    pub(crate) fn new(seed: u64, lane: usize, lanes: usize, keys: usize, size: usize) -> Self {
        let mut rng = StdRng::seed_from_u64(seed.wrapping_add(lane as u64));
        let mut filler = vec![0; FILLER_BYTES + size];
        rng.fill(&mut filler[..]);
        let latest = vec![0; (lane..keys).step_by(lanes).count()];
        Self { rng, lane, lanes, size, filler: filler.into(), latest, updates: 0, failed: 0 }
    }

    /// Returns the next batch.
    pub(crate) fn next(&mut self, records: u32) -> EncodedBatch {
        let records: Vec<Record> = (0..records).map(|_| self.next_record()).collect();
        batch::encode(&records)
    }

    fn next_record(&mut self) -> Record {
        self.updates += 1;
        let key = self.rng.random_range(0..self.latest.len());
        self.latest[key] = self.updates;
        record(self.lane + key * self.lanes, self.value())
    }

    fn value(&mut self) -> Bytes {
        let start = self.rng.random_range(0..FILLER_BYTES);
        let rest = self.size.saturating_sub(NUMBER_BYTES);
        let mut value = BytesMut::with_capacity(NUMBER_BYTES + rest);
        value.put_u64_le(self.updates);
        value.extend_from_slice(&self.filler[start..start + rest]);
        value.freeze()
    }

    pub(crate) fn note_failure(&mut self) {
        self.failed += 1;
    }
}

impl LatestUpdates {
    /// Combines the updates of all lanes.
    pub(crate) fn of(keys: usize, lanes: &[KeyedUpdates]) -> Self {
        let mut of_key = vec![0; keys];
        for lane in lanes {
            let all = (lane.lane..).step_by(lane.lanes.max(1)).zip(&lane.latest);
            all.for_each(|(key, update)| of_key[key] = *update);
        }
        Self { of_key, failed: lanes.iter().map(|lane| lane.failed).sum() }
    }

    /// Returns the number of keys that were updated.
    pub(crate) fn key_count(&self) -> usize {
        self.of_key.iter().filter(|update| **update > 0).count()
    }

    /// Counts the keys whose latest update differs; `None` if that is not known of all.
    pub(crate) fn count_lost(&self, found: &Self) -> Option<u64> {
        let lost = self.of_key.iter().zip(&found.of_key).filter(|(sent, found)| sent != found);
        (self.failed == 0).then(|| lost.count() as u64)
    }

    /// Takes a record that was read. Returns false if it is none of the updates.
    pub(crate) fn take(&mut self, key: Option<&[u8]>, value: Option<&[u8]>) -> bool {
        let number = |value: &[u8]| {
            let number = value.first_chunk::<NUMBER_BYTES>()?;
            Some(u64::from_le_bytes(*number))
        };
        let key = key.and_then(key_number).and_then(|key| self.of_key.get_mut(key));
        match (key, value.and_then(number)) {
            (Some(latest), Some(number)) => {
                *latest = number;
                true
            }
            _ => false,
        }
    }
}

/// Returns the bytes of one record with its length in a batch; all have the same.
pub(crate) fn record_bytes(size: usize) -> u64 {
    batch::encode(&[record(0, vec![0; size.max(NUMBER_BYTES)].into())]).payload.len() as u64
}

fn record(key: usize, value: Bytes) -> Record {
    let key = format!("{key:0KEY_CHARS$x}");
    Record { key: Some(key.into()), value: Some(value), ..Record::default() }
}

fn key_number(key: &[u8]) -> Option<usize> {
    let key = std::str::from_utf8(key).ok().filter(|key| key.len() == KEY_CHARS)?;
    usize::from_str_radix(key, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: usize = 10;

    fn lanes() -> Vec<KeyedUpdates> {
        (0..3).map(|lane| KeyedUpdates::new(1, lane, 3, KEYS, 20)).collect()
    }

    #[test]
    fn lanes_divide_the_keys_and_number_their_updates() {
        let mut lanes = lanes();
        let mut found = LatestUpdates { of_key: vec![0; KEYS], failed: 0 };
        for round in 0..50 {
            let batch = lanes[round % 3].next(4);
            assert_eq!(batch.payload.len() as u64, 4 * record_bytes(20));
            for record in batch::decode(&batch).unwrap().records {
                assert_eq!(record.value.as_ref().map(Bytes::len), Some(20));
                assert!(found.take(record.key.as_deref(), record.value.as_deref()));
            }
        }
        let sent = LatestUpdates::of(KEYS, &lanes);
        assert_eq!((sent.key_count(), sent.count_lost(&found)), (KEYS, Some(0)));
        found.of_key[7] -= 1;
        assert_eq!(sent.count_lost(&found), Some(1));
        lanes[0].note_failure();
        assert_eq!(LatestUpdates::of(KEYS, &lanes).count_lost(&found), None);
        assert!(!found.take(Some(b"other"), Some(&[0; 20])) && !found.take(None, None));
    }

    #[test]
    fn updates_repeat_with_the_seed() {
        let first = |seed: u64| KeyedUpdates::new(seed, 0, 1, KEYS, 20).next(9).payload;
        assert_eq!(first(1), first(1));
        assert_ne!(first(1), first(2));
    }
}
