//! Deduplicates and orders the batches of producers, and fences old epochs.
//! Tracks a bounded number of (partition, producer) pairs of one shard.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{BatchChecksum, PartitionId, ProducerOwner, ProducerStamp, Refusal};

/// Number of batches per producer and partition whose offsets are kept to detect duplicates.
/// A stream may have at most as many in flight, so that every retry is recognized.
pub const DEDUP_WINDOW_BATCHES: usize = 64;

/// Producers of a shard. The least recently used one, by log index, is forgotten when the table is
/// full, so that every replica forgets the same one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProducerTable {
    rows: BTreeMap<(PartitionId, u64), ProducerState>,
    /// The keys of `rows`, by their last use.
    by_use: BTreeSet<(u64, PartitionId, u64)>,
    rows_max: usize,
    forgotten: ForgottenProducers,
}

/// Producers that the table has forgotten, in a bounded summary.
///
/// Their batches with sequence 0 may be duplicates, so they are refused before they are proposed.
/// Such a producer takes a new id, or the next epoch. The summary decides no verdict of apply, so
/// replicas may differ in it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct ForgottenProducers {
    /// One more than the greatest forgotten id. Ids assigned later are not covered.
    pub(super) ids_end: u64,
    /// Greatest forgotten epoch by id, of producers with epochs above 0. Has at most `rows_max`
    /// entries.
    pub(super) epochs: BTreeMap<u64, u32>,
    /// All epochs of ids below this are covered: `epochs` was full.
    pub(super) epochs_end: u64,
}

/// State of one producer on one partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ProducerState {
    pub(super) epoch: u32,
    /// Owner of this epoch.
    pub(super) owner: ProducerOwner,
    pub(super) next_sequence: u64,
    /// Index of its last appended entry.
    pub(super) last_used: u64,
    /// The newest batches of this epoch, oldest first. They are contiguous and end at
    /// `next_sequence`, from which their first sequences follow.
    pub(super) window: VecDeque<DedupEntry>,
}

/// An appended batch in the window of a producer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DedupEntry {
    pub(super) record_count: u32,
    /// `None` for a batch from before protocol version 8.
    pub(super) checksum: Option<BatchChecksum>,
    pub(super) first_offset: u64,
}

/// Result of the sequence check of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SequenceVerdict {
    Accept,
    /// The batch had already been appended, at this offset.
    Duplicate {
        first_offset: u64,
    },
    Refuse(Refusal),
}

impl ProducerTable {
    /// Creates a table of `rows_max` producers, at least one.
    pub fn new(rows_max: usize) -> Self {
        Self {
            rows: BTreeMap::new(),
            by_use: BTreeSet::new(),
            rows_max: rows_max.max(1),
            forgotten: ForgottenProducers::default(),
        }
    }

    /// Checks a batch against the applied batches of its producer.
    pub fn check_sequence(
        &self,
        id: PartitionId,
        stamp: &ProducerStamp,
        record_count: u32,
    ) -> SequenceVerdict {
        let ProducerStamp { producer_id, epoch, first_sequence: sequence, .. } = *stamp;
        let out_of_order = |next_sequence| {
            SequenceVerdict::Refuse(Refusal::OutOfOrderSequence {
                producer_id,
                sequence,
                next_sequence,
            })
        };
        let row = self.rows.get(&(id, producer_id));
        // Before anything that depends on the row's sequence, which only its owner may learn.
        if let Some(row) = row
            && row.epoch == epoch
            && let Err(refusal) = stamp.check_owner(row.owner)
        {
            return SequenceVerdict::Refuse(refusal);
        }
        match row {
            None if sequence == 0 => SequenceVerdict::Accept,
            None => SequenceVerdict::Refuse(Refusal::UnknownProducer { producer_id }),
            Some(row) if epoch < row.epoch => {
                let current_epoch = row.epoch;
                SequenceVerdict::Refuse(Refusal::ProducerFenced {
                    producer_id,
                    epoch,
                    current_epoch,
                })
            }
            Some(row) if epoch > row.epoch => {
                if sequence == 0 {
                    SequenceVerdict::Accept
                } else {
                    out_of_order(0)
                }
            }
            Some(row) if sequence == row.next_sequence => SequenceVerdict::Accept,
            Some(row) => match row.counted(sequence, record_count) {
                Some(appended) if appended.may_be(stamp.checksum) => {
                    SequenceVerdict::Duplicate { first_offset: appended.first_offset }
                }
                Some(_) => {
                    SequenceVerdict::Refuse(Refusal::SequenceReused { producer_id, sequence })
                }
                None => out_of_order(row.next_sequence),
            },
        }
    }

    /// Records an appended batch. `index` is that of its entry, and greater than any before.
    pub fn record(
        &mut self,
        index: u64,
        id: PartitionId,
        stamp: &ProducerStamp,
        record_count: u32,
        first_offset: u64,
    ) {
        let key = (id, stamp.producer_id);
        let row = self.rows.entry(key).or_insert_with(|| ProducerState::new(stamp));
        self.by_use.remove(&(row.last_used, key.0, key.1));
        if row.epoch != stamp.epoch {
            *row = ProducerState::new(stamp);
        }
        row.push(DedupEntry { record_count, checksum: stamp.checksum, first_offset });
        row.last_used = index;
        self.by_use.insert((index, key.0, key.1));
        while self.rows.len() > self.rows_max {
            let Some((_, id, producer_id)) = self.by_use.pop_first() else { break };
            if let Some(row) = self.rows.remove(&(id, producer_id)) {
                self.forgotten.add(producer_id, row.epoch, self.rows_max);
            }
        }
    }

    /// Returns whether a batch that [`ProducerTable::check_sequence`] accepts may be a duplicate:
    /// it has sequence 0 and its producer may have been forgotten.
    pub fn may_be_duplicate(&self, id: PartitionId, stamp: &ProducerStamp) -> bool {
        stamp.first_sequence == 0 && self.has_forgotten(id, stamp.producer_id, stamp.epoch)
    }

    /// Returns whether the table does not track the producer on the partition, but may have done.
    pub fn has_forgotten(&self, id: PartitionId, producer_id: u64, epoch: u32) -> bool {
        !self.rows.contains_key(&(id, producer_id)) && self.forgotten.covers(producer_id, epoch)
    }

    /// Returns the sequence that the producer's next batch must have.
    /// `None` where the producer is unknown, fenced by a later epoch, or of another principal.
    pub fn next_sequence(&self, id: PartitionId, stamp: &ProducerStamp) -> Option<u64> {
        let row = self.rows.get(&(id, stamp.producer_id))?;
        match stamp.epoch.cmp(&row.epoch) {
            Ordering::Less => None,
            Ordering::Equal => (row.owner == stamp.owner).then_some(row.next_sequence),
            Ordering::Greater => Some(0),
        }
    }

    /// Checks that an epoch that the partition tracks belongs to the owner of the stamp.
    ///
    /// # Errors
    /// The refusal that a batch with this stamp would get.
    pub fn check_owner(&self, id: PartitionId, stamp: &ProducerStamp) -> Result<(), Refusal> {
        match self.rows.get(&(id, stamp.producer_id)) {
            Some(row) if row.epoch == stamp.epoch => stamp.check_owner(row.owner),
            _ => Ok(()),
        }
    }

    pub(super) fn has_owners_or_checksums(&self) -> bool {
        let has_checksum = |row: &ProducerState| row.window.iter().any(|it| it.checksum.is_some());
        self.rows.values().any(|row| !row.owner.is_anonymous() || has_checksum(row))
    }

    /// Removes the producers of a dropped partition.
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

    pub(super) fn forgotten(&self) -> &ForgottenProducers {
        &self.forgotten
    }

    /// Restores the summary of a checkpoint. Returns whether it is within bounds.
    pub(super) fn restore_forgotten(&mut self, forgotten: ForgottenProducers) -> bool {
        let fits = forgotten.epochs.len() <= self.rows_max;
        self.forgotten = forgotten;
        fits
    }

    pub(super) fn rows(
        &self,
    ) -> impl ExactSizeIterator<Item = (&(PartitionId, u64), &ProducerState)> {
        self.rows.iter()
    }

    /// Restores a producer of a checkpoint. Returns whether it was new and within bounds.
    pub(super) fn restore(
        &mut self,
        id: PartitionId,
        producer_id: u64,
        row: ProducerState,
    ) -> bool {
        self.by_use.insert((row.last_used, id, producer_id));
        self.rows.insert((id, producer_id), row).is_none() && self.rows.len() <= self.rows_max
    }
}

impl ForgottenProducers {
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

impl ProducerState {
    fn new(stamp: &ProducerStamp) -> Self {
        let ProducerStamp { epoch, owner, .. } = *stamp;
        Self { epoch, owner, next_sequence: 0, last_used: 0, window: VecDeque::new() }
    }

    fn push(&mut self, batch: DedupEntry) {
        if self.window.len() == DEDUP_WINDOW_BATCHES {
            self.window.pop_front();
        }
        self.next_sequence = self.next_sequence.saturating_add(u64::from(batch.record_count));
        self.window.push_back(batch);
    }

    /// Returns the batch of the window with this sequence and count.
    fn counted(&self, first_sequence: u64, record_count: u32) -> Option<&DedupEntry> {
        let mut first = self.next_sequence;
        for counted in self.window.iter().rev() {
            first = first.checked_sub(u64::from(counted.record_count))?;
            if first == first_sequence && counted.record_count == record_count {
                return Some(counted);
            }
            if first < first_sequence {
                return None;
            }
        }
        None
    }
}

impl DedupEntry {
    /// Returns whether a batch with the same sequence and count is this one. Without one of the
    /// checksums, sequence and count decide.
    fn may_be(&self, checksum: Option<BatchChecksum>) -> bool {
        match (self.checksum, checksum) {
            (Some(appended), Some(checksum)) => appended == checksum,
            _ => true,
        }
    }

    /// Returns the checksum as a field of a checkpoint; 0 for none.
    pub(super) fn checksum_field(&self) -> u32 {
        self.checksum.map_or(0, BatchChecksum::get)
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
        ProducerStamp::new(1, epoch, first_sequence)
    }

    fn out_of_order(sequence: u64, next_sequence: u64) -> SequenceVerdict {
        let refusal = Refusal::OutOfOrderSequence { producer_id: 1, sequence, next_sequence };
        SequenceVerdict::Refuse(refusal)
    }

    /// Returns a table with batches of 10, 20 and 30 records of epoch 5, at offsets 100, 200 and
    /// 300.
    fn table() -> ProducerTable {
        let mut table = ProducerTable::new(10);
        table.record(1, ID, &stamp(5, 0), 10, 100);
        table.record(2, ID, &stamp(5, 10), 20, 200);
        table.record(3, ID, &stamp(5, 30), 30, 300);
        table
    }

    #[test]
    fn checks_batches_of_a_known_producer() {
        let table = table();
        let fenced = Refusal::ProducerFenced { producer_id: 1, epoch: 4, current_epoch: 5 };
        let duplicate = |first_offset| SequenceVerdict::Duplicate { first_offset };
        let rules = [
            ("next", 5, 60, 1, SequenceVerdict::Accept),
            ("gap", 5, 61, 1, out_of_order(61, 60)),
            ("newest again", 5, 30, 30, duplicate(300)),
            ("middle again", 5, 10, 20, duplicate(200)),
            ("oldest again", 5, 0, 10, duplicate(100)),
            ("again with another count", 5, 10, 10, out_of_order(10, 60)),
            ("within a batch", 5, 15, 20, out_of_order(15, 60)),
            ("lower epoch", 4, 60, 1, SequenceVerdict::Refuse(fenced.clone())),
            ("lower epoch from its start", 4, 0, 10, SequenceVerdict::Refuse(fenced)),
            ("higher epoch from its start", 6, 0, 10, SequenceVerdict::Accept),
            ("higher epoch not from its start", 6, 60, 1, out_of_order(60, 0)),
        ];
        for (what, epoch, sequence, count, expected) in rules {
            assert_eq!(
                table.check_sequence(ID, &stamp(epoch, sequence), count),
                expected,
                "{what}"
            );
        }
    }

    #[test]
    fn checks_batches_of_an_unknown_producer() {
        let table = table();
        let unknown = SequenceVerdict::Refuse(Refusal::UnknownProducer { producer_id: 1 });
        let other = PartitionId(8);
        assert_eq!(table.check_sequence(other, &stamp(5, 0), 1), SequenceVerdict::Accept);
        assert_eq!(table.check_sequence(other, &stamp(5, 60), 1), unknown);
        assert_eq!(table.next_sequence(other, &stamp(5, 0)), None);
    }

    #[test]
    fn first_batch_of_a_forgotten_producer_may_be_a_duplicate() {
        let stamp = |producer_id, epoch| ProducerStamp::new(producer_id, epoch, 0);
        let mut table = ProducerTable::new(2);
        for (index, producer_id) in [(1, 4), (2, 5)] {
            table.record(index, ID, &stamp(producer_id, 0), 1, index);
        }
        for producer_id in [0, 3] {
            assert!(
                !table.may_be_duplicate(ID, &stamp(producer_id, 0)),
                "nothing was forgotten yet"
            );
        }
        table.record(3, ID, &stamp(6, 0), 1, 3);
        assert!(table.may_be_duplicate(ID, &stamp(4, 0)), "it was forgotten");
        assert!(table.may_be_duplicate(PartitionId(8), &stamp(4, 0)), "on any partition");
        assert!(table.may_be_duplicate(ID, &stamp(3, 0)), "a lower id may have been forgotten");
        assert!(!table.may_be_duplicate(ID, &stamp(5, 0)), "it is tracked");
        assert!(!table.may_be_duplicate(ID, &stamp(7, 0)), "its id was assigned later");
        let later = ProducerStamp { first_sequence: 1, ..stamp(4, 0) };
        assert!(!table.may_be_duplicate(ID, &later), "refused as unknown anyway");

        // A named producer returns with the next epoch.
        assert!(!table.may_be_duplicate(ID, &stamp(4, 1)));
        table.record(4, ID, &stamp(4, 1), 1, 4);
        table.record(5, ID, &stamp(8, 0), 1, 5);
        table.record(6, ID, &stamp(9, 0), 1, 6);
        assert!(table.may_be_duplicate(ID, &stamp(4, 1)));
        assert!(!table.may_be_duplicate(ID, &stamp(4, 2)));
        assert!(!table.may_be_duplicate(ID, &stamp(5, 1)), "it never had an epoch above 0");
    }

    #[test]
    fn forgotten_epochs_are_bounded_and_conservative() {
        let mut forgotten = ForgottenProducers::default();
        for producer_id in [7, 3, 5] {
            forgotten.add(producer_id, 2, 2);
        }
        assert_eq!(forgotten.epochs.len(), 2);
        assert_eq!((forgotten.ids_end, forgotten.epochs_end), (8, 4));
        assert!(forgotten.covers(3, 9) && forgotten.covers(2, 1), "covered conservatively");
        assert!(forgotten.covers(5, 2) && !forgotten.covers(5, 3) && !forgotten.covers(4, 1));
    }

    #[test]
    fn next_sequence_depends_on_the_epoch() {
        let table = table();
        assert_eq!(table.next_sequence(ID, &stamp(5, 0)), Some(60));
        assert_eq!(table.next_sequence(ID, &stamp(6, 0)), Some(0));
        assert_eq!(table.next_sequence(ID, &stamp(4, 0)), None);
        assert_eq!(table.next_sequence(ID, &ProducerStamp::new(2, 5, 0)), None);
    }

    #[test]
    fn higher_epoch_starts_at_sequence_zero() {
        let mut table = table();
        table.record(4, ID, &stamp(6, 0), 2, 400);
        assert_eq!(table.next_sequence(ID, &stamp(6, 0)), Some(2));
        assert_eq!(table.check_sequence(ID, &stamp(6, 0), 10), out_of_order(0, 2));
        assert!(matches!(table.check_sequence(ID, &stamp(5, 60), 1), SequenceVerdict::Refuse(_)));
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn window_keeps_only_the_newest_batches() {
        let mut table = ProducerTable::new(10);
        let batches = DEDUP_WINDOW_BATCHES as u64 + 5;
        for i in 0..batches {
            table.record(i, ID, &stamp(0, i), 1, i * 2);
        }
        for i in 0..batches {
            let expected = match i {
                0..5 => out_of_order(i, batches),
                _ => SequenceVerdict::Duplicate { first_offset: i * 2 },
            };
            assert_eq!(table.check_sequence(ID, &stamp(0, i), 1), expected, "batch {i}");
        }
    }

    #[test]
    fn forgets_the_least_recently_used_producer() {
        let mut table = ProducerTable::new(3);
        let record = |table: &mut ProducerTable, index, producer_id| {
            let mut stamp = ProducerStamp::new(producer_id, 0, 0);
            stamp.first_sequence = table.next_sequence(ID, &stamp).unwrap_or(0);
            table.record(index, ID, &stamp, 1, index);
        };
        for (index, producer_id) in [(1, 1), (2, 2), (3, 3), (4, 1), (5, 4)] {
            record(&mut table, index, producer_id);
        }
        let known = |id| table.next_sequence(ID, &ProducerStamp::new(id, 0, 0)).is_some();
        assert_eq!([1, 2, 3, 4].map(known), [true, false, true, true]);
    }

    #[test]
    fn dropped_partition_removes_its_producers() {
        let mut table = table();
        table.record(4, PartitionId(8), &stamp(0, 0), 1, 0);
        table.forget(ID);
        assert_eq!((table.len(), table.by_use.len()), (1, 1));
        table.forget(PartitionId(8));
        assert!(table.is_empty() && table.by_use.is_empty());
    }

    #[test]
    fn epoch_belongs_to_the_owner_of_its_first_batch() {
        let [alice, bob] = ["alice", "bob"].map(ProducerOwner::of);
        let checksum = Some(BatchChecksum::of_crc(7));
        let by = |owner, epoch, first_sequence| ProducerStamp {
            owner,
            checksum,
            ..stamp(epoch, first_sequence)
        };
        let mut table = ProducerTable::new(10);
        table.record(1, ID, &by(alice, 5, 0), 10, 100);
        let not_owned = SequenceVerdict::Refuse(Refusal::ProducerNotOwned { producer_id: 1 });
        for sequence in [0, 1, 10, 60] {
            for other in [bob, ProducerOwner::ANONYMOUS, ProducerOwner::SESSION] {
                let verdict = table.check_sequence(ID, &by(other, 5, sequence), 10);
                assert_eq!(verdict, not_owned, "{other:?} at {sequence}");
            }
        }
        assert_eq!(table.next_sequence(ID, &by(bob, 5, 0)), None);
        assert_eq!(table.check_sequence(ID, &by(alice, 5, 10), 1), SequenceVerdict::Accept);
        let unknown = SequenceVerdict::Refuse(Refusal::UnknownProducer { producer_id: 1 });
        let unsigned = ProducerStamp { owner: ProducerOwner::ANONYMOUS, ..stamp(5, 10) };
        assert_eq!(table.check_sequence(ID, &unsigned, 1), unknown, "from an older leader");
        // The leader has checked that the next epoch is the caller's own.
        table.record(2, ID, &by(bob, 6, 0), 1, 200);
        assert_eq!(table.check_sequence(ID, &by(alice, 6, 1), 1), not_owned);
        assert_eq!(table.check_sequence(ID, &by(bob, 6, 1), 1), SequenceVerdict::Accept);
        // A row without an owner, from an earlier version or from before access control.
        let other = PartitionId(8);
        table.record(3, other, &stamp(5, 0), 1, 300);
        assert_eq!(table.check_sequence(other, &by(alice, 5, 1), 1), unknown);
        assert_eq!(table.check_sequence(other, &stamp(5, 1), 1), SequenceVerdict::Accept);
    }

    #[test]
    fn duplicate_has_the_same_checksum() {
        let with = |crc, first_sequence| ProducerStamp {
            checksum: Some(BatchChecksum::of_crc(crc)),
            ..stamp(0, first_sequence)
        };
        let duplicate = SequenceVerdict::Duplicate { first_offset: 100 };
        let reused = Refusal::SequenceReused { producer_id: 1, sequence: 0 };
        let mut table = ProducerTable::new(10);
        table.record(1, ID, &with(7, 0), 10, 100);
        assert_eq!(table.check_sequence(ID, &with(7, 0), 10), duplicate);
        assert_eq!(table.check_sequence(ID, &with(8, 0), 10), SequenceVerdict::Refuse(reused));
        assert_eq!(table.check_sequence(ID, &with(7, 0), 9), out_of_order(0, 10));
        // A batch of an earlier version has no checksum.
        table.record(2, ID, &stamp(0, 10), 5, 200);
        let duplicate = SequenceVerdict::Duplicate { first_offset: 200 };
        assert_eq!(table.check_sequence(ID, &with(8, 10), 5), duplicate);
    }

    /// Accepted batches of an epoch are contiguous, and duplicates get their original offsets.
    #[test]
    fn appends_random_batches_once_and_in_order() {
        let mut rng = seeded("appends_random_batches_once_and_in_order");
        let mut table = ProducerTable::new(1_000);
        let mut counted: HashMap<(u64, u64, u32, u64, u32), u64> = HashMap::new();
        let mut next: HashMap<(u64, u64), (u32, u64)> = HashMap::new();
        for index in 0..20_000 {
            let (id, producer_id) = (rng.random_range(1..4), rng.random_range(1..4));
            let at = next.entry((id, producer_id)).or_default();
            let epoch = at.0 + u32::from(rng.random_bool(0.001));
            let back = rng.random_range(0..30);
            let first_sequence = if epoch > at.0 { 0 } else { at.1.saturating_sub(back) };
            let stamp = ProducerStamp::new(producer_id, epoch, first_sequence);
            let count = rng.random_range(1..4);
            let key = (id, producer_id, epoch, first_sequence, count);
            match table.check_sequence(PartitionId(id), &stamp, count) {
                SequenceVerdict::Accept => {
                    assert!(epoch > at.0 || first_sequence == at.1);
                    table.record(index, PartitionId(id), &stamp, count, index);
                    *at = (epoch, first_sequence + u64::from(count));
                    assert_eq!(counted.insert(key, index), None);
                }
                SequenceVerdict::Duplicate { first_offset } => {
                    assert_eq!(counted.get(&key), Some(&first_offset));
                }
                SequenceVerdict::Refuse(_) => assert_ne!(first_sequence, at.1),
            }
            assert_eq!(table.rows.len(), table.by_use.len());
        }
    }
}
