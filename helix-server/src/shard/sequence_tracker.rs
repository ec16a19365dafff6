//! Tracks the proposed sequences of producers whose batches are acknowledged before apply.
//!
//! A batch that continues an unbroken run of proposed batches can be acknowledged early. Any other
//! batch must wait for its verdict, since apply may find a gap before it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, MutexGuard};

use crate::log::{PartitionId, ProducerOwner, ProducerStamp};
use crate::sync;

/// Number of tracked producers. A forgotten producer's next batch waits for its verdict.
const PRODUCERS_MAX: usize = 16_384;

/// The proposed sequences of all producers of a shard, in one term.
#[derive(Debug, Default)]
pub(super) struct SequenceTracker(Mutex<Chains>);

#[derive(Debug, Default)]
struct Chains {
    /// Term of the proposals; those of an earlier term may be lost.
    term: u64,
    /// The owner is a part of the key, so that no caller continues the chain of another one.
    by_producer: HashMap<(PartitionId, u64, ProducerOwner), Chain>,
}

/// Consecutive batches of one epoch of a producer.
#[derive(Debug)]
struct Chain {
    epoch: u32,
    /// Sequence of the chain's first batch, while its predecessors are unknown. Apply must pass
    /// it first. `None` once the chain is known to have no gap before it.
    unproven: Option<u64>,
    next_sequence: u64,
}

/// A batch before it is proposed.
#[derive(Debug, Clone, Copy)]
pub(super) struct NextBatch {
    pub(super) term: u64,
    pub(super) partition: PartitionId,
    pub(super) stamp: ProducerStamp,
    /// Next sequence by the applied state; 0 for an unknown producer.
    pub(super) applied_sequence: u64,
}

impl SequenceTracker {
    /// Returns whether this batch follows directly those that are applied, or proposed in this
    /// term. A batch with an earlier sequence must wait for its verdict: it may be a duplicate, or
    /// another batch with the same sequence.
    pub(super) fn is_contiguous(&self, batch: &NextBatch) -> bool {
        let chains = self.chains(batch.term);
        match chains.by_producer.get(&batch.key()) {
            Some(chain) if chain.epoch > batch.stamp.epoch => false,
            Some(chain) if chain.is_proven(batch) => {
                batch.stamp.first_sequence == chain.next_sequence.max(batch.applied_sequence)
            }
            Some(_) | None => batch.is_next_applied(),
        }
    }

    /// Records a batch that has been proposed.
    pub(super) fn note(&self, batch: &NextBatch, record_count: u32) {
        let end = batch.stamp.first_sequence.saturating_add(record_count.into());
        let mut chains = self.chains(batch.term);
        if chains.by_producer.len() >= PRODUCERS_MAX {
            chains.by_producer.clear();
        }
        let unproven = (!batch.is_next_applied()).then_some(batch.stamp.first_sequence);
        let new_chain = Chain { epoch: batch.stamp.epoch, unproven, next_sequence: end };
        match chains.by_producer.entry(batch.key()) {
            Entry::Vacant(entry) => {
                entry.insert(new_chain);
            }
            Entry::Occupied(entry) => {
                let chain = entry.into_mut();
                let is_continued = batch.stamp.first_sequence == chain.next_sequence;
                if chain.epoch > batch.stamp.epoch {
                    // Apply refuses the batch.
                } else if chain.is_proven(batch) {
                    // Another batch with an earlier sequence waits for its verdict. It changes
                    // nothing about what follows this chain.
                    let next = chain.next_sequence.max(batch.applied_sequence);
                    let follows = batch.stamp.first_sequence == next;
                    chain.unproven = None;
                    chain.next_sequence = if follows { end } else { next };
                } else if unproven.is_some() && chain.epoch == batch.stamp.epoch && is_continued {
                    chain.next_sequence = end;
                } else {
                    *chain = new_chain;
                }
            }
        }
    }

    fn chains(&self, term: u64) -> MutexGuard<'_, Chains> {
        let mut chains = sync::lock(&self.0);
        if chains.term != term {
            *chains = Chains { term, by_producer: HashMap::new() };
        }
        chains
    }
}

impl Chain {
    /// Returns whether it has the batch's epoch and no gap before it.
    fn is_proven(&self, batch: &NextBatch) -> bool {
        self.epoch == batch.stamp.epoch
            && self.unproven.is_none_or(|first| batch.applied_sequence > first)
    }
}

impl NextBatch {
    fn key(&self) -> (PartitionId, u64, ProducerOwner) {
        (self.partition, self.stamp.producer_id, self.stamp.owner)
    }

    fn is_next_applied(&self) -> bool {
        self.stamp.first_sequence == self.applied_sequence
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(term: u64, first_sequence: u64, applied_sequence: u64) -> NextBatch {
        let stamp = ProducerStamp::new(1, 0, first_sequence);
        NextBatch { term, partition: PartitionId(7), stamp, applied_sequence }
    }

    #[test]
    fn consecutive_batches_are_contiguous_before_apply() {
        let tracker = SequenceTracker::default();
        for sequence in (0..50).step_by(10) {
            assert!(tracker.is_contiguous(&batch(1, sequence, 0)), "{sequence}");
            tracker.note(&batch(1, sequence, 0), 10);
        }
        assert!(!tracker.is_contiguous(&batch(1, 20, 0)), "again");
        assert!(!tracker.is_contiguous(&batch(1, 60, 0)), "a gap");
        let other = ProducerStamp { owner: ProducerOwner::SESSION, ..batch(1, 50, 0).stamp };
        assert!(!tracker.is_contiguous(&NextBatch { stamp: other, ..batch(1, 50, 0) }), "not own");
        let epoch = ProducerStamp { epoch: 1, ..batch(1, 50, 0).stamp };
        assert!(!tracker.is_contiguous(&NextBatch { stamp: epoch, ..batch(1, 50, 0) }));
    }

    #[test]
    fn another_batch_with_a_proposed_sequence_waits_and_changes_nothing() {
        let tracker = SequenceTracker::default();
        tracker.note(&batch(1, 5, 5), 1);
        let other = batch(1, 5, 5);
        assert!(!tracker.is_contiguous(&other));
        tracker.note(&other, 3);
        assert!(!tracker.is_contiguous(&batch(1, 8, 5)), "the other one may be refused");
        assert!(tracker.is_contiguous(&batch(1, 6, 5)));
        // A late copy of an applied batch, outside the window.
        assert!(!tracker.is_contiguous(&batch(1, 1, 6)));
        tracker.note(&batch(1, 1, 6), 1);
        assert!(!tracker.is_contiguous(&batch(1, 2, 6)));
        assert!(tracker.is_contiguous(&batch(1, 6, 6)));
    }

    #[test]
    fn new_term_trusts_only_applied_sequences() {
        let tracker = SequenceTracker::default();
        tracker.note(&batch(1, 0, 0), 10);
        assert!(!tracker.is_contiguous(&batch(2, 10, 0)));
        assert!(tracker.is_contiguous(&batch(2, 10, 10)));
    }

    #[test]
    fn batches_after_a_gap_are_not_contiguous_until_the_first_is_applied() {
        let tracker = SequenceTracker::default();
        for (first, applied, expected) in
            [(30, 10, false), (31, 10, false), (32, 30, false), (33, 31, true), (40, 31, false)]
        {
            assert_eq!(tracker.is_contiguous(&batch(1, first, applied)), expected, "{first}");
            if first < 40 {
                tracker.note(&batch(1, first, applied), 1);
            }
        }
    }

    #[test]
    fn producer_that_goes_back_to_applied_sequences_starts_a_new_chain() {
        let tracker = SequenceTracker::default();
        tracker.note(&batch(1, 30, 10), 10);
        tracker.note(&batch(1, 10, 10), 2);
        assert!(tracker.is_contiguous(&batch(1, 12, 10)));
        assert!(!tracker.is_contiguous(&batch(1, 40, 31)));
    }
}
