//! Rules of final reads: each has everything that was known before it began, and equals the reads
//! of other replicas in the same round.

use super::event::BatchKey;
use super::state::{AppendOutcome, HistoryChecker, PartitionHistory};
use super::verdict::ViolationClass;

/// Read of one partition of one replica up to its high watermark, with all producers stopped.
#[derive(Debug)]
pub(super) struct FinalRead {
    round: u32,
    replica: u64,
    /// Line of its start.
    pub(super) opened: u64,
    batches: Vec<(u64, BatchKey, u32)>,
    /// Log start.
    pub(super) start: u64,
    /// High watermark.
    pub(super) end: u64,
}

impl FinalRead {
    pub(super) fn new(round: u32, replica: u64, opened: u64) -> Self {
        Self { round, replica, opened, batches: Vec::new(), start: 0, end: 0 }
    }

    pub(super) fn on_batch(&mut self, offset: u64, key: BatchKey, records: u32) {
        self.batches.push((offset, key, records));
    }

    /// Returns batches known before the read began that are not in it: (offset, batch, line).
    fn missing(&self, partition: &PartitionHistory) -> Vec<(u64, BatchKey, u64)> {
        let mut sorted = self.batches.clone();
        sorted.sort_unstable();
        let mut here = sorted.into_iter().peekable();
        let kept = partition.placed.range(self.start..);
        let known = kept.filter(|(_, placed)| placed.line < self.opened);
        known
            .filter(|&(&offset, placed)| {
                while here.next_if(|(at, _, _)| *at < offset).is_some() {}
                here.peek().is_none_or(|(at, key, _)| (*at, *key) != (offset, placed.key))
            })
            .map(|(offset, placed)| (*offset, placed.key, placed.line))
            .collect()
    }

    /// Describes the first difference to another read.
    fn difference(&self, other: &Self) -> Option<String> {
        let (mine, theirs) = (self.batches.iter(), other.batches.iter());
        if let Some((a, b)) = mine.zip(theirs).find(|(a, b)| a != b) {
            return Some(format!("{} at {} against {} at {}", a.1, a.0, b.1, b.0));
        }
        let same = (self.batches.len(), self.start, self.end)
            == (other.batches.len(), other.start, other.end);
        (!same).then(|| {
            format!("{} to {} against {} to {}", self.start, self.end, other.start, other.end)
        })
    }
}

impl HistoryChecker {
    pub(super) fn judge_final(&mut self, partition: u32, read: FinalRead) {
        let FinalRead { replica, opened, end, .. } = read;
        let place = self.partitions.entry(partition).or_default();
        let missing = read.missing(place);
        let committed = place.committed;
        for (offset, key, line) in missing {
            let outcome = self.appends.get(&key).map(|append| append.outcome);
            let (class, how) = match outcome {
                Some(AppendOutcome::Acked(_)) => (ViolationClass::AckedLost, "acked"),
                _ => (ViolationClass::Vanished, "read"),
            };
            let what = format!(
                "{key} was {how} at {partition}@{offset}; node {replica}, which ends at {end}, \
                 does not have it there"
            );
            self.found(class, what, &[line, opened]);
        }
        if committed.line < opened && committed.offset > end {
            let what = format!(
                "partition {partition} was committed up to {}; node {replica} ends at {end}",
                committed.offset
            );
            self.found(ViolationClass::Vanished, what, &[committed.line, opened]);
        }
        self.compare(partition, read);
    }

    fn compare(&mut self, partition: u32, read: FinalRead) {
        let place = self.partitions.entry(partition).or_default();
        let Some(reference) = place.reference.as_ref().filter(|first| first.round == read.round)
        else {
            place.reference = Some(read);
            return;
        };
        let Some(what) = reference.difference(&read) else { return };
        let lines = [reference.opened, read.opened];
        let (first, second) = (reference.replica, read.replica);
        let what = format!("partition {partition}, nodes {first} and {second}: {what}");
        self.found(ViolationClass::ReplicasDiffer, what, &lines);
    }
}
