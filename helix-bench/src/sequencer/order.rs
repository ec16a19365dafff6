//! Order of a stream as one subscriber saw it, and its violations. Pure bookkeeping.

use std::collections::BTreeMap;

use helix_proto::batch;
use helix_proto::log::v1::{EncodedBatch, StoredBatch};
use schemars::JsonSchema;
use serde::Serialize;

use crate::stamp::Stamp;

/// FNV-1a, 64 bits.
const HASH_START: u64 = 0xCBF2_9CE4_8422_2325;
const HASH_PRIME: u64 = 0x0000_0100_0000_01B3;

/// Order of the batches that one subscriber received.
#[derive(Debug, Clone)]
pub(crate) struct StreamOrder {
    run: u64,
    next_offset: u64,
    /// Next sequence by lane. A lane begins at any sequence, if the subscriber joined late.
    next_sequences: BTreeMap<u32, u64>,
    is_late: bool,
    hash: u64,
    findings: OrderFindings,
}

/// Violations of the order. All counts but the first must be 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct OrderFindings {
    pub(crate) records: u64,
    /// Records between two received ones of the same node, or offsets between two batches.
    pub(crate) lost: u64,
    pub(crate) doubled: u64,
    /// Batches with a wrong checksum, or not of this run.
    pub(crate) unknown: u64,
}

impl OrderFindings {
    pub(crate) fn is_clean(self) -> bool {
        (self.lost, self.doubled, self.unknown) == (0, 0, 0)
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.records += other.records;
        self.lost += other.lost;
        self.doubled += other.doubled;
        self.unknown += other.unknown;
    }
}

impl StreamOrder {
    /// Starts at the offset of the run's first record.
    pub(crate) fn from_start(run: u64, offset: u64) -> Self {
        let (next_sequences, findings) = (BTreeMap::new(), OrderFindings::default());
        Self {
            run,
            next_offset: offset,
            next_sequences,
            is_late: false,
            hash: HASH_START,
            findings,
        }
    }

    /// Starts at the offset of a later batch.
    pub(crate) fn late(run: u64, offset: u64) -> Self {
        Self { is_late: true, ..Self::from_start(run, offset) }
    }

    pub(crate) fn findings(&self) -> OrderFindings {
        self.findings
    }

    pub(crate) fn next_offset(&self) -> u64 {
        self.next_offset
    }

    /// Subscribers that started and ended at the same offsets must have the same hash.
    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    /// Notes a batch. Returns the stamp of its first record and its number of records, unless it
    /// was received before or is unknown.
    pub(crate) fn note(&mut self, stored: &StoredBatch) -> Option<(Stamp, u64)> {
        let intact = stored.batch.as_ref().filter(|batch| batch::is_intact(batch));
        let known = intact
            .and_then(|batch| Some((first_stamp(batch)?, u64::from(batch.record_count))))
            .filter(|(stamp, _)| stamp.run == self.run);
        let Some((stamp, records)) = known else {
            self.findings.unknown += 1;
            return None;
        };
        if stored.first_offset < self.next_offset {
            self.findings.doubled += records;
            return None;
        }
        self.findings.lost += stored.first_offset - self.next_offset;
        self.next_offset = stored.first_offset + records;
        let first = if self.is_late { stamp.sequence } else { 0 };
        let expected = self.next_sequences.entry(stamp.lane).or_insert(first);
        let end = stamp.sequence + records;
        if stamp.sequence < *expected {
            self.findings.doubled += records;
            return None;
        }
        self.findings.lost += stamp.sequence - *expected;
        *expected = end;
        self.findings.records += records;
        for value in [stored.first_offset, u64::from(stamp.lane), stamp.sequence, records] {
            self.hash = (self.hash ^ value).wrapping_mul(HASH_PRIME);
        }
        Some((stamp, records))
    }
}

/// Reads the stamp of a batch's first record.
fn first_stamp(whole: &EncodedBatch) -> Option<Stamp> {
    let end = batch::walk(&whole.payload, usize::MAX).next()?.ok()?.end;
    let first = batch::decode(&batch::from_payload(1, whole.payload.slice(..end))).ok()?;
    Stamp::read(first.records.first()?.value.as_deref()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stamp::Stamper;
    use crate::write::stamped;

    const RUN: u64 = 5;

    fn stored(lane: u32, sequence: u64, first_offset: u64) -> StoredBatch {
        let batch = stamped(&Stamper::new(1, RUN, lane, 64), sequence, 2, 0);
        StoredBatch { first_offset, batch: Some(batch), ..StoredBatch::default() }
    }

    fn order(batches: &[StoredBatch]) -> StreamOrder {
        let mut order = StreamOrder::from_start(RUN, 0);
        batches.iter().for_each(|batch| {
            order.note(batch);
        });
        order
    }

    #[test]
    fn equal_orders_have_equal_hashes() {
        let one = [stored(0, 0, 0), stored(1, 0, 2), stored(0, 2, 4)];
        let other = [stored(1, 0, 0), stored(0, 0, 2), stored(0, 2, 4)];
        assert!(order(&one).findings().is_clean());
        assert_eq!(order(&one).findings().records, 6);
        assert_eq!(order(&one).hash(), order(&one).hash());
        assert_ne!(order(&one).hash(), order(&other).hash());
    }

    #[test]
    fn finds_lost_and_doubled_records() {
        let lost = order(&[stored(0, 0, 0), stored(0, 4, 2)]).findings();
        assert_eq!((lost.lost, lost.doubled), (2, 0));
        let gap = order(&[stored(0, 0, 0), stored(0, 2, 4)]).findings();
        assert_eq!((gap.lost, gap.doubled), (2, 0));
        let stored_twice = order(&[stored(0, 0, 0), stored(0, 0, 2)]).findings();
        assert_eq!((stored_twice.lost, stored_twice.doubled), (0, 2));
        let received_twice = order(&[stored(0, 0, 0), stored(0, 0, 0)]).findings();
        assert_eq!((received_twice.records, received_twice.doubled), (2, 2));
    }

    #[test]
    fn late_subscriber_begins_at_any_sequence() {
        let mut order = StreamOrder::late(RUN, 10);
        assert!(order.note(&stored(3, 8, 10)).is_some());
        assert!(order.note(&stored(3, 10, 12)).is_some());
        assert!(order.findings().is_clean() && order.next_offset() == 14);
    }

    #[test]
    fn changed_and_foreign_batches_are_unknown() {
        let mut changed = stored(0, 0, 0);
        changed.batch.as_mut().unwrap().crc32 ^= 1;
        let foreign = stamped(&Stamper::new(1, RUN + 1, 0, 64), 0, 1, 0);
        let foreign = StoredBatch { batch: Some(foreign), ..StoredBatch::default() };
        assert_eq!(order(&[changed, foreign]).findings().unknown, 2);
    }
}
