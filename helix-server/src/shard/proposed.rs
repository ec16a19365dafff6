//! How far a leader has proposed the batches of producers whose batches it acknowledges before
//! they are applied. What follows those is as good as they are; of anything else nobody would
//! hear that apply found a gap before it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, MutexGuard};

use crate::log::{PartitionId, ProducerStamp};

/// Producers that are remembered. To forget one costs its next batch the wait for a verdict.
const PRODUCERS_MAX: usize = 16_384;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Proposed(Mutex<Chains>);

#[derive(Debug, Default)]
struct Chains {
    /// Of the leader who has proposed them: what was proposed in an earlier term may be lost.
    term: u64,
    by_producer: HashMap<(PartitionId, u64), Chain>,
}

/// Batches of one epoch that follow each other.
#[derive(Debug)]
struct Chain {
    epoch: u32,
    /// Sequence that apply must pass before the chain is known to hold: that of its first batch,
    /// if nobody knew what comes before it. None: it holds.
    unproven: Option<u64>,
    next_sequence: u64,
}

/// A batch before it is proposed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    pub(super) term: u64,
    pub(super) partition: PartitionId,
    pub(super) stamp: ProducerStamp,
    /// Sequence that the partition expects by what has been applied; 0 where it knows none.
    pub(super) applied_sequence: u64,
}

impl Proposed {
    /// Whether everything before this batch has been applied, or was proposed in this term.
    pub(super) fn leads_to(&self, batch: &Candidate) -> bool {
        let chains = self.chains(batch.term);
        let chain = chains.by_producer.get(&batch.key());
        batch.is_applied_up_to() || chain.is_some_and(|chain| chain.leads_to(batch))
    }

    /// Notes a batch that has been proposed.
    pub(super) fn note(&self, batch: &Candidate, record_count: u32) {
        let end = batch.stamp.first_sequence.saturating_add(record_count.into());
        let mut chains = self.chains(batch.term);
        if chains.by_producer.len() >= PRODUCERS_MAX {
            chains.by_producer.clear();
        }
        let unproven = (!batch.is_applied_up_to()).then_some(batch.stamp.first_sequence);
        let anew = Chain { epoch: batch.stamp.epoch, unproven, next_sequence: end };
        match chains.by_producer.entry(batch.key()) {
            Entry::Vacant(place) => {
                place.insert(anew);
            }
            Entry::Occupied(place) => {
                let chain = place.into_mut();
                if chain.leads_to(batch) {
                    chain.unproven = None;
                    chain.next_sequence = chain.next_sequence.max(end);
                } else if unproven.is_some() && chain.is_continued_by(batch) {
                    chain.next_sequence = end;
                } else {
                    *chain = anew;
                }
            }
        }
    }

    fn chains(&self, term: u64) -> MutexGuard<'_, Chains> {
        let mut chains = self.0.lock().expect("no panic while it is held");
        if chains.term != term {
            *chains = Chains { term, by_producer: HashMap::new() };
        }
        chains
    }
}

impl Chain {
    fn leads_to(&self, batch: &Candidate) -> bool {
        self.epoch == batch.stamp.epoch
            && self.unproven.is_none_or(|first| batch.applied_sequence > first)
            && batch.stamp.first_sequence <= self.next_sequence
    }

    fn is_continued_by(&self, batch: &Candidate) -> bool {
        self.epoch == batch.stamp.epoch && batch.stamp.first_sequence == self.next_sequence
    }
}

impl Candidate {
    fn key(&self) -> (PartitionId, u64) {
        (self.partition, self.stamp.producer_id)
    }

    fn is_applied_up_to(&self) -> bool {
        self.stamp.first_sequence <= self.applied_sequence
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(term: u64, first_sequence: u64, applied_sequence: u64) -> Candidate {
        let stamp = ProducerStamp { producer_id: 1, epoch: 0, first_sequence };
        Candidate { term, partition: PartitionId(7), stamp, applied_sequence }
    }

    #[test]
    fn what_follows_is_led_to_before_anything_is_applied() {
        let proposed = Proposed::default();
        for sequence in (0..50).step_by(10) {
            assert!(proposed.leads_to(&batch(1, sequence, 0)), "{sequence}");
            proposed.note(&batch(1, sequence, 0), 10);
        }
        assert!(proposed.leads_to(&batch(1, 20, 0)), "again");
        assert!(!proposed.leads_to(&batch(1, 60, 0)), "a gap");
        let epoch = ProducerStamp { epoch: 1, ..batch(1, 50, 0).stamp };
        assert!(!proposed.leads_to(&Candidate { stamp: epoch, ..batch(1, 50, 0) }));
    }

    #[test]
    fn another_term_knows_only_what_is_applied() {
        let proposed = Proposed::default();
        proposed.note(&batch(1, 0, 0), 10);
        assert!(!proposed.leads_to(&batch(2, 10, 0)));
        assert!(proposed.leads_to(&batch(2, 10, 10)));
    }

    #[test]
    fn behind_a_gap_nothing_is_led_to_until_the_first_behind_it_is_applied() {
        let proposed = Proposed::default();
        for (first, applied, expected) in
            [(30, 10, false), (31, 10, false), (32, 30, false), (33, 31, true), (40, 31, false)]
        {
            assert_eq!(proposed.leads_to(&batch(1, first, applied)), expected, "{first}");
            if first < 40 {
                proposed.note(&batch(1, first, applied), 1);
            }
        }
    }

    #[test]
    fn whoever_goes_back_to_what_was_applied_begins_anew() {
        let proposed = Proposed::default();
        proposed.note(&batch(1, 30, 10), 10);
        proposed.note(&batch(1, 10, 10), 2);
        assert!(proposed.leads_to(&batch(1, 12, 10)));
        assert!(!proposed.leads_to(&batch(1, 40, 31)));
    }
}
