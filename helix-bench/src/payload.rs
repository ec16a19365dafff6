//! Prebuilt batches, so that a run measures sending and not building them.
//!
//! Seeded: the same flags give the same bytes.

use std::sync::Arc;

use bytes::Bytes;
use clap::ValueEnum;
use helix_proto::batch;
use helix_proto::log::v1::{EncodedBatch, Record};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use schemars::JsonSchema;
use serde::Serialize;

/// Bytes of prebuilt batches per lane, more than fits into the CPU caches.
const LANE_BYTES: usize = 4 << 20;
/// Bytes of prebuilt batches over all lanes, which share them; larger than any CPU cache.
const POOL_BYTES_MAX: usize = 64 << 20;
/// Limits of the number of batches; the upper one is per lane.
const POOL_BATCHES_MIN: usize = 2;
const POOL_BATCHES_MAX: usize = 64;
/// Distance between the first batches of two lanes.
const LANE_STEP: usize = 37;

const WORDS: [&str; 16] = [
    "append", "batch", "commit", "durable", "epoch", "frame", "group", "index", "leader", "log",
    "offset", "quorum", "record", "segment", "shard", "sync",
];

/// Contents of record values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PayloadKind {
    Random,
    Text,
    Zero,
}

/// Batches that are returned in turn. Lanes share them, with different first batches.
#[derive(Debug)]
pub(crate) struct BatchPool {
    batches: Arc<[EncodedBatch]>,
    batch_size: u32,
    next: usize,
}

impl BatchPool {
    pub(crate) fn new(
        kind: PayloadKind,
        size: usize,
        batch_size: u32,
        seed: u64,
        lanes: usize,
    ) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let bytes = size.saturating_mul(batch_size as usize).max(1);
        let wanted = LANE_BYTES.saturating_mul(lanes).min(POOL_BYTES_MAX) / bytes;
        // Small batches take more than their values' bytes, and there may be many lanes.
        let most = POOL_BATCHES_MAX.saturating_mul(lanes).min(POOL_BATCHES_MAX * 64);
        let count = wanted.clamp(POOL_BATCHES_MIN, most);
        let batches = (0..count).map(|_| build(kind, size, batch_size, &mut rng)).collect();
        Self { batches, batch_size, next: 0 }
    }

    /// Returns the pool for a lane, which starts at another batch than its neighbours.
    pub(crate) fn lane(&self, lane: usize) -> Self {
        let batches = self.batches.clone();
        // A prime step spreads the lanes, unless the number of batches is a multiple of it.
        let next = lane.wrapping_mul(LANE_STEP) % batches.len();
        Self { batches, batch_size: self.batch_size, next }
    }

    /// Returns the next batch with `records` records, at most the pool's batch size.
    pub(crate) fn next(&mut self, records: u32) -> EncodedBatch {
        let batch = &self.batches[self.next];
        self.next = (self.next + 1) % self.batches.len();
        if records == self.batch_size { batch.clone() } else { head(batch, records) }
    }

    pub(crate) fn into_batches(self) -> Vec<EncodedBatch> {
        self.batches.to_vec()
    }
}

fn build(kind: PayloadKind, size: usize, batch_size: u32, rng: &mut StdRng) -> EncodedBatch {
    let records: Vec<Record> = (0..batch_size).map(|_| record(value(kind, size, rng))).collect();
    batch::encode(&records)
}

pub(crate) fn record(value: Bytes) -> Record {
    Record { value: Some(value), ..Record::default() }
}

fn value(kind: PayloadKind, size: usize, rng: &mut StdRng) -> Bytes {
    let mut value = vec![0; size];
    match kind {
        PayloadKind::Zero => {}
        PayloadKind::Random => rng.fill(&mut value[..]),
        PayloadKind::Text => {
            let mut at = 0;
            while at < size {
                let word = WORDS[rng.random_range(0..WORDS.len())].as_bytes();
                let end = size.min(at + word.len());
                value[at..end].copy_from_slice(&word[..end - at]);
                if end < size {
                    value[end] = b' ';
                }
                at = end + 1;
            }
        }
    }
    value.into()
}

/// Returns the first records of a batch as a batch.
fn head(whole: &EncodedBatch, records: u32) -> EncodedBatch {
    let last = records.checked_sub(1).expect("at least one record") as usize;
    let end = batch::walk(&whole.payload, usize::MAX)
        .nth(last)
        .expect("the batch has at least that many records")
        .expect("the batch was built here")
        .end;
    batch::from_payload(records, whole.payload.slice(..end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_have_the_requested_shape() {
        for kind in [PayloadKind::Random, PayloadKind::Text, PayloadKind::Zero] {
            let mut pool = BatchPool::new(kind, 100, 5, 1, 1);
            let (whole, part) = (pool.next(5), pool.next(3));
            for (batch, count) in [(whole, 5), (part, 3)] {
                let records = batch::decode(&batch).unwrap().records;
                assert_eq!(records.len(), count);
                assert!(records.iter().all(|record| record.value.as_ref().unwrap().len() == 100));
            }
        }
    }

    #[test]
    fn contents_differ_but_repeat_with_the_seed() {
        let mut pool = BatchPool::new(PayloadKind::Random, 100, 5, 1, 1);
        let (first, second) = (pool.next(5), pool.next(5));
        assert_ne!(first.payload, second.payload);
        assert_eq!(BatchPool::new(PayloadKind::Random, 100, 5, 1, 1).next(5), first);
        assert_ne!(BatchPool::new(PayloadKind::Random, 100, 5, 2, 1).next(5), first);
    }

    #[test]
    fn pool_is_bounded_and_wraps_around() {
        let mut large = BatchPool::new(PayloadKind::Zero, 16 << 20, 1, 1, 1);
        assert_eq!(large.batches.len(), POOL_BATCHES_MIN);
        let mut small = BatchPool::new(PayloadKind::Random, 1, 1, 1, 1);
        assert_eq!(small.batches.len(), POOL_BATCHES_MAX);
        let first = small.next(1);
        for _ in 1..POOL_BATCHES_MAX {
            small.next(1);
        }
        assert_eq!(small.next(1), first);
        assert_eq!(large.next(1).record_count, 1);
    }
    #[test]
    fn lanes_share_the_pool() {
        let bytes = |pool: &BatchPool| -> usize {
            pool.batches.iter().map(|batch| batch.payload.len()).sum()
        };
        let many = BatchPool::new(PayloadKind::Zero, 1024, 100, 1, 1024);
        assert!(bytes(&many) <= POOL_BYTES_MAX + (POOL_BYTES_MAX >> 4), "{}", bytes(&many));
        let (mut first, mut second) = (many.lane(0), many.lane(1));
        assert!(Arc::ptr_eq(&first.batches, &second.batches));
        assert_ne!(first.next, second.next);
        assert_eq!(first.next(100).record_count, second.next(100).record_count);
        let tiny = BatchPool::new(PayloadKind::Zero, 1, 1, 1, 65_536);
        assert!(tiny.batches.len() <= POOL_BATCHES_MAX * 64);
    }
}
