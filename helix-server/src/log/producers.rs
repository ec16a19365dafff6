//! Which batches of a producer count: each once, in order, and none from a fenced epoch.
//! Knows the recent past of a bounded number of (partition, producer) pairs of one shard.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{PartitionId, ProducerStamp, Refusal};

/// Batches of a producer on a partition that are remembered with their offsets: at least as many
/// as a stream may have in flight, so that whatever it sends again is recognised.
pub const DEDUP_WINDOW_BATCHES: usize = 64;

/// Rows of a shard. Idle partitions have none. The row that was used longest ago, by log index,
/// makes room for a new one, so that every replica forgets the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProducerTable {
    rows: BTreeMap<(PartitionId, u64), Row>,
    /// Exactly the rows, by their last use.
    by_use: BTreeSet<(u64, PartitionId, u64)>,
    rows_max: usize,
    forgotten: Forgotten,
}

/// Of whom rows have made room. A first batch of theirs cannot be told from a copy of one that
/// counted, so it is refused before it gets a place in the log: they take a new id, or come back
/// with the next epoch. It decides no verdict, so replicas may differ in it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Forgotten {
    /// All ids below, of which the greatest was forgotten. One that is handed out later is not.
    pub(super) ids_end: u64,
    /// Greatest epoch by id, of producers that keep their id from one epoch to the next; at most
    /// as many as there are rows.
    pub(super) epochs: BTreeMap<u64, u32>,
    /// Ids below with every epoch: those that `epochs` had no room for.
    pub(super) epochs_end: u64,
}

/// One producer on one partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) epoch: u32,
    pub(super) next_sequence: u64,
    /// Index of the last entry that counted.
    pub(super) last_used: u64,
    /// The newest batches of this epoch, oldest first. They follow each other without gaps and
    /// end at `next_sequence`, which gives each its first sequence.
    pub(super) window: VecDeque<Counted>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counted {
    pub(super) record_count: u32,
    pub(super) first_offset: u64,
}

/// What the rules say of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Judgement {
    Accept,
    /// It counted before, from this offset on.
    Duplicate {
        first_offset: u64,
    },
    Refuse(Refusal),
}

impl ProducerTable {
    /// At least one row is kept.
    pub fn new(rows_max: usize) -> Self {
        Self {
            rows: BTreeMap::new(),
            by_use: BTreeSet::new(),
            rows_max: rows_max.max(1),
            forgotten: Forgotten::default(),
        }
    }

    /// Judges a batch at its place in the log; changes nothing.
    pub fn judge(&self, id: PartitionId, stamp: &ProducerStamp, record_count: u32) -> Judgement {
        let ProducerStamp { producer_id, epoch, first_sequence: sequence } = *stamp;
        let out_of_order = |next_sequence| {
            Judgement::Refuse(Refusal::OutOfOrderSequence { producer_id, sequence, next_sequence })
        };
        match self.rows.get(&(id, producer_id)) {
            None if sequence == 0 => Judgement::Accept,
            None => Judgement::Refuse(Refusal::UnknownProducer { producer_id }),
            Some(row) if epoch < row.epoch => {
                let current_epoch = row.epoch;
                Judgement::Refuse(Refusal::ProducerFenced { producer_id, epoch, current_epoch })
            }
            Some(row) if epoch > row.epoch => {
                if sequence == 0 {
                    Judgement::Accept
                } else {
                    out_of_order(0)
                }
            }
            Some(row) if sequence == row.next_sequence => Judgement::Accept,
            Some(row) => match row.counted(sequence, record_count) {
                Some(first_offset) => Judgement::Duplicate { first_offset },
                None => out_of_order(row.next_sequence),
            },
        }
    }

    /// Remembers an accepted batch that counts from `first_offset` on. `index` is the entry's
    /// and greater than any before.
    pub fn record(
        &mut self,
        index: u64,
        id: PartitionId,
        stamp: &ProducerStamp,
        record_count: u32,
        first_offset: u64,
    ) {
        let key = (id, stamp.producer_id);
        let row = self.rows.entry(key).or_insert_with(|| Row::new(stamp.epoch));
        self.by_use.remove(&(row.last_used, key.0, key.1));
        if row.epoch != stamp.epoch {
            *row = Row::new(stamp.epoch);
        }
        row.push(record_count, first_offset);
        row.last_used = index;
        self.by_use.insert((index, key.0, key.1));
        while self.rows.len() > self.rows_max {
            let Some((_, id, producer_id)) = self.by_use.pop_first() else { break };
            if let Some(row) = self.rows.remove(&(id, producer_id)) {
                self.forgotten.add(producer_id, row.epoch, self.rows_max);
            }
        }
    }

    /// Whether a batch that [`ProducerTable::judge`] accepts may be a copy of one that counted:
    /// the first of a producer on a partition, and a row of its producer has made room.
    pub fn may_be_copy(&self, id: PartitionId, stamp: &ProducerStamp) -> bool {
        stamp.first_sequence == 0 && self.has_forgotten(id, stamp.producer_id, stamp.epoch)
    }

    /// Whether the producer has no row on the partition, and may have had one.
    pub fn has_forgotten(&self, id: PartitionId, producer_id: u64, epoch: u32) -> bool {
        !self.rows.contains_key(&(id, producer_id)) && self.forgotten.covers(producer_id, epoch)
    }

    /// The sequence that the producer's next batch must have; None where it is not known, or
    /// fenced by a later epoch.
    pub fn next_sequence(&self, id: PartitionId, producer_id: u64, epoch: u32) -> Option<u64> {
        let row = self.rows.get(&(id, producer_id))?;
        match epoch.cmp(&row.epoch) {
            std::cmp::Ordering::Less => None,
            std::cmp::Ordering::Equal => Some(row.next_sequence),
            std::cmp::Ordering::Greater => Some(0),
        }
    }

    /// Forgets a dropped partition.
    pub fn forget(&mut self, id: PartitionId) {
        let keys: Vec<_> = self.rows.range((id, 0)..=(id, u64::MAX)).map(|(key, _)| *key).collect();
        for key in keys {
            if let Some(row) = self.rows.remove(&key) {
                self.by_use.remove(&(row.last_used, key.0, key.1));
            }
        }
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub(super) fn forgotten(&self) -> &Forgotten {
        &self.forgotten
    }

    /// Takes in what a checkpoint says. Whether it is within bounds.
    pub(super) fn restore_forgotten(&mut self, forgotten: Forgotten) -> bool {
        let fits = forgotten.epochs.len() <= self.rows_max;
        self.forgotten = forgotten;
        fits
    }

    pub(super) fn rows(&self) -> impl ExactSizeIterator<Item = (&(PartitionId, u64), &Row)> {
        self.rows.iter()
    }

    /// Takes in a row of a checkpoint. Whether it was new and there was room.
    pub(super) fn restore(&mut self, id: PartitionId, producer_id: u64, row: Row) -> bool {
        self.by_use.insert((row.last_used, id, producer_id));
        self.rows.insert((id, producer_id), row).is_none() && self.rows.len() <= self.rows_max
    }
}

impl Forgotten {
    fn add(&mut self, producer_id: u64, epoch: u32, epochs_max: usize) {
        self.ids_end = self.ids_end.max(producer_id.saturating_add(1));
        if epoch == 0 {
            return;
        }
        let known = self.epochs.entry(producer_id).or_default();
        *known = epoch.max(*known);
        if self.epochs.len() > epochs_max
            && let Some((oldest, _)) = self.epochs.pop_first()
        {
            self.epochs_end = self.epochs_end.max(oldest.saturating_add(1));
        }
    }

    fn covers(&self, producer_id: u64, epoch: u32) -> bool {
        match epoch {
            0 => producer_id < self.ids_end,
            _ => {
                producer_id < self.epochs_end
                    || self.epochs.get(&producer_id).is_some_and(|known| epoch <= *known)
            }
        }
    }
}

impl Row {
    fn new(epoch: u32) -> Self {
        Self { epoch, next_sequence: 0, last_used: 0, window: VecDeque::new() }
    }

    fn push(&mut self, record_count: u32, first_offset: u64) {
        if self.window.len() == DEDUP_WINDOW_BATCHES {
            self.window.pop_front();
        }
        self.window.push_back(Counted { record_count, first_offset });
        self.next_sequence = self.next_sequence.saturating_add(u64::from(record_count));
    }

    /// The first offset of exactly this batch, if it is in the window.
    fn counted(&self, first_sequence: u64, record_count: u32) -> Option<u64> {
        let mut first = self.next_sequence;
        for counted in self.window.iter().rev() {
            first = first.checked_sub(u64::from(counted.record_count))?;
            if first == first_sequence && counted.record_count == record_count {
                return Some(counted.first_offset);
            }
            if first < first_sequence {
                return None;
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use rand::RngExt;

    use super::super::testing::seeded;
    use super::*;

    const ID: PartitionId = PartitionId(7);

    fn stamp(epoch: u32, first_sequence: u64) -> ProducerStamp {
        ProducerStamp { producer_id: 1, epoch, first_sequence }
    }

    fn out_of_order(sequence: u64, next_sequence: u64) -> Judgement {
        let refusal = Refusal::OutOfOrderSequence { producer_id: 1, sequence, next_sequence };
        Judgement::Refuse(refusal)
    }

    /// Epoch 5; batches of 10, 20 and 30 records at offsets 100, 200 and 300.
    fn table() -> ProducerTable {
        let mut table = ProducerTable::new(10);
        table.record(1, ID, &stamp(5, 0), 10, 100);
        table.record(2, ID, &stamp(5, 10), 20, 200);
        table.record(3, ID, &stamp(5, 30), 30, 300);
        table
    }

    #[test]
    fn rules_of_a_known_producer() {
        let table = table();
        let fenced = Refusal::ProducerFenced { producer_id: 1, epoch: 4, current_epoch: 5 };
        let duplicate = |first_offset| Judgement::Duplicate { first_offset };
        let rules = [
            ("next", 5, 60, 1, Judgement::Accept),
            ("gap", 5, 61, 1, out_of_order(61, 60)),
            ("newest again", 5, 30, 30, duplicate(300)),
            ("middle again", 5, 10, 20, duplicate(200)),
            ("oldest again", 5, 0, 10, duplicate(100)),
            ("again with another count", 5, 10, 10, out_of_order(10, 60)),
            ("within a batch", 5, 15, 20, out_of_order(15, 60)),
            ("lower epoch", 4, 60, 1, Judgement::Refuse(fenced.clone())),
            ("lower epoch from its start", 4, 0, 10, Judgement::Refuse(fenced)),
            ("higher epoch from its start", 6, 0, 10, Judgement::Accept),
            ("higher epoch amid", 6, 60, 1, out_of_order(60, 0)),
        ];
        for (what, epoch, sequence, count, expected) in rules {
            assert_eq!(table.judge(ID, &stamp(epoch, sequence), count), expected, "{what}");
        }
    }

    #[test]
    fn rules_of_an_unknown_producer() {
        let table = table();
        let unknown = Judgement::Refuse(Refusal::UnknownProducer { producer_id: 1 });
        let other = PartitionId(8);
        assert_eq!(table.judge(other, &stamp(5, 0), 1), Judgement::Accept);
        assert_eq!(table.judge(other, &stamp(5, 60), 1), unknown);
        assert_eq!(table.next_sequence(other, 1, 5), None);
    }

    #[test]
    fn a_first_batch_of_whom_a_row_made_room_may_be_a_copy() {
        let stamp = |producer_id, epoch| ProducerStamp { producer_id, epoch, first_sequence: 0 };
        let mut table = ProducerTable::new(2);
        for (index, producer_id) in [(1, 4), (2, 5)] {
            table.record(index, ID, &stamp(producer_id, 0), 1, index);
        }
        for producer_id in [0, 3] {
            assert!(!table.may_be_copy(ID, &stamp(producer_id, 0)), "nothing was forgotten yet");
        }
        table.record(3, ID, &stamp(6, 0), 1, 3);
        assert!(table.may_be_copy(ID, &stamp(4, 0)), "its row made room");
        assert!(table.may_be_copy(PartitionId(8), &stamp(4, 0)), "on whichever partition it was");
        assert!(table.may_be_copy(ID, &stamp(3, 0)), "handed out before, so it may be");
        assert!(!table.may_be_copy(ID, &stamp(5, 0)), "it has its row");
        assert!(!table.may_be_copy(ID, &stamp(7, 0)), "handed out later");
        let later = ProducerStamp { first_sequence: 1, ..stamp(4, 0) };
        assert!(!table.may_be_copy(ID, &later), "unknown anyway");

        // Who keeps an id comes back with the next epoch.
        assert!(!table.may_be_copy(ID, &stamp(4, 1)));
        table.record(4, ID, &stamp(4, 1), 1, 4);
        table.record(5, ID, &stamp(8, 0), 1, 5);
        table.record(6, ID, &stamp(9, 0), 1, 6);
        assert!(table.may_be_copy(ID, &stamp(4, 1)));
        assert!(!table.may_be_copy(ID, &stamp(4, 2)));
        assert!(!table.may_be_copy(ID, &stamp(5, 1)), "none of its epochs above 0 was there");
    }

    #[test]
    fn the_epochs_of_the_forgotten_are_bounded_and_err_on_the_safe_side() {
        let mut forgotten = Forgotten::default();
        for producer_id in [7, 3, 5] {
            forgotten.add(producer_id, 2, 2);
        }
        assert_eq!(forgotten.epochs.len(), 2);
        assert_eq!((forgotten.ids_end, forgotten.epochs_end), (8, 4));
        assert!(forgotten.covers(3, 9) && forgotten.covers(2, 1), "no room to know better");
        assert!(forgotten.covers(5, 2) && !forgotten.covers(5, 3) && !forgotten.covers(4, 1));
    }

    #[test]
    fn next_sequence_is_that_of_the_epoch() {
        let table = table();
        assert_eq!(table.next_sequence(ID, 1, 5), Some(60));
        assert_eq!(table.next_sequence(ID, 1, 6), Some(0));
        assert_eq!(table.next_sequence(ID, 1, 4), None);
        assert_eq!(table.next_sequence(ID, 2, 5), None);
    }

    #[test]
    fn a_higher_epoch_begins_anew() {
        let mut table = table();
        table.record(4, ID, &stamp(6, 0), 2, 400);
        assert_eq!(table.next_sequence(ID, 1, 6), Some(2));
        assert_eq!(table.judge(ID, &stamp(6, 0), 10), out_of_order(0, 2));
        assert!(matches!(table.judge(ID, &stamp(5, 60), 1), Judgement::Refuse(_)));
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn the_window_holds_the_newest_batches_only() {
        let mut table = ProducerTable::new(10);
        let batches = DEDUP_WINDOW_BATCHES as u64 + 5;
        for i in 0..batches {
            table.record(i, ID, &stamp(0, i), 1, i * 2);
        }
        for i in 0..batches {
            let expected = match i {
                0..5 => out_of_order(i, batches),
                _ => Judgement::Duplicate { first_offset: i * 2 },
            };
            assert_eq!(table.judge(ID, &stamp(0, i), 1), expected, "batch {i}");
        }
    }

    #[test]
    fn the_row_used_longest_ago_makes_room() {
        let mut table = ProducerTable::new(3);
        let record = |table: &mut ProducerTable, index, producer_id| {
            let first_sequence = table.next_sequence(ID, producer_id, 0).unwrap_or(0);
            let stamp = ProducerStamp { producer_id, epoch: 0, first_sequence };
            table.record(index, ID, &stamp, 1, index);
        };
        for (index, producer_id) in [(1, 1), (2, 2), (3, 3), (4, 1), (5, 4)] {
            record(&mut table, index, producer_id);
        }
        let known = |id| table.next_sequence(ID, id, 0).is_some();
        assert_eq!([1, 2, 3, 4].map(known), [true, false, true, true]);
    }

    #[test]
    fn a_dropped_partition_leaves_nothing() {
        let mut table = table();
        table.record(4, PartitionId(8), &stamp(0, 0), 1, 0);
        table.forget(ID);
        assert_eq!((table.len(), table.by_use.len()), (1, 1));
        table.forget(PartitionId(8));
        assert!(table.is_empty() && table.by_use.is_empty());
    }

    /// Whatever is sent, accepted batches of an epoch follow each other, and a duplicate has the
    /// offset that it got the first time.
    #[test]
    fn random_batches_count_once_and_in_order() {
        let mut rng = seeded("random_batches_count_once_and_in_order");
        let mut table = ProducerTable::new(1_000);
        let mut counted: HashMap<(u64, u64, u32, u64, u32), u64> = HashMap::new();
        let mut next: HashMap<(u64, u64), (u32, u64)> = HashMap::new();
        for index in 0..20_000 {
            let (id, producer_id) = (rng.random_range(1..4), rng.random_range(1..4));
            let at = next.entry((id, producer_id)).or_default();
            let epoch = at.0 + u32::from(rng.random_bool(0.001));
            let back = rng.random_range(0..30);
            let first_sequence = if epoch > at.0 { 0 } else { at.1.saturating_sub(back) };
            let stamp = ProducerStamp { producer_id, epoch, first_sequence };
            let count = rng.random_range(1..4);
            let key = (id, producer_id, epoch, first_sequence, count);
            match table.judge(PartitionId(id), &stamp, count) {
                Judgement::Accept => {
                    assert!(epoch > at.0 || first_sequence == at.1);
                    table.record(index, PartitionId(id), &stamp, count, index);
                    *at = (epoch, first_sequence + u64::from(count));
                    assert_eq!(counted.insert(key, index), None);
                }
                Judgement::Duplicate { first_offset } => {
                    assert_eq!(counted.get(&key), Some(&first_offset));
                }
                Judgement::Refuse(_) => assert_ne!(first_sequence, at.1),
            }
            assert_eq!(table.rows.len(), table.by_use.len());
        }
    }
}
