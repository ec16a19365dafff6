//! One pass of a cleaner over one partition: decides which records a later one has replaced.
//!
//! Performs no I/O; the log reads the entries and rewrites them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use helix_proto::compaction::{
    BatchParts, Codecs, CompactError, CompactedBatch, KeyedRecord, RecordFate, compact,
    visit_records,
};
use helix_proto::compression::UNCOMPRESSED_BYTES_MAX;
use helix_proto::kafka::KAFKA_BATCH_VERSION;
use helix_wal::{BackgroundWorker, Entry, EntryFilter, FilteredEntry, Payload, Placement};

use super::key_map::{KeyMap, PassMemory};
use super::worker::CleanerWorker;
use crate::log::{BatchHead, Head, KeptOffsets};
use crate::raft::{decode_head, encode_head};

/// Bytes by which a head may grow without counting against the payload. They hold the shortest list
/// of kept offsets, so that replaced records also leave batches of a few small records.
const OFFSETS_BYTES_FREE: usize = 16;

/// A pass over the offsets from `from` up to where its map was full.
#[derive(Debug)]
pub(super) struct CleanPass {
    map: KeyMap,
    /// Everything below is clean already, except for tombstones.
    from: u64,
    /// End of the records that the map has seen; records below are judged.
    upto: u64,
    /// Tombstones below are removed.
    tombstones_below: u64,
    is_full: bool,
}

impl CleanPass {
    pub(super) fn new(from: u64, tombstones_below: u64, memory: Arc<PassMemory>) -> Self {
        let map = KeyMap::new(memory);
        Self { map, from, upto: from, tombstones_below, is_full: false }
    }

    /// Returns the offset up to which the partition is clean after the pass.
    pub(super) fn upto(&self) -> u64 {
        self.upto
    }

    /// Returns whether no further record fits.
    pub(super) fn is_full(&self) -> bool {
        self.is_full
    }

    /// Adds the records of the next entry below `end`; entries come in order.
    ///
    /// # Errors
    /// The text names the batch and says why it cannot be read.
    pub(super) fn add(
        &mut self,
        placement: &Placement,
        entry: &StoredBytes<'_>,
        end: u64,
        codecs: &mut Codecs,
    ) -> Result<(), String> {
        let (head, parts) = batch_of(placement, entry)?;
        let offsets = Offsets { first: placement.first, head: &head };
        let visit = |record: KeyedRecord<'_>| {
            let offset = offsets.of(record.number);
            if offset < self.from {
                return true;
            }
            if offset >= end {
                return false;
            }
            // The map has seen all records before the first that does not fit.
            self.upto = offset;
            let latest = LatestRecord { offset, is_tombstone: record.is_tombstone() };
            self.is_full |= record.key.is_some_and(|key| !self.map.set(key, latest.packed()));
            !self.is_full
        };
        unless_no_records(visit_records(&parts, codecs, visit))
            .map_err(|error| broken(placement, &error))?;
        if !self.is_full {
            let next = placement.first + u64::from(placement.count);
            self.upto = next.min(end).max(self.from);
        }
        Ok(())
    }

    /// Extends the pass over a gap: there are no more records below `end`.
    pub(super) fn reach(&mut self, end: u64) {
        debug_assert!(!self.is_full);
        self.upto = self.upto.max(end);
    }

    /// Decides what becomes of a record.
    ///
    /// A value that a tombstone deletes must go: the pass that sees the tombstone removes
    /// everything older, so that a later pass may remove the tombstone. A record with a later value
    /// only takes space, and so does an expired tombstone. Such records may stay where the batch
    /// would be larger without them.
    fn judge(&self, offset: u64, record: &KeyedRecord<'_>) -> RecordFate {
        let Some(key) = record.key else { return RecordFate::Stays };
        if offset >= self.upto {
            return RecordFate::Stays;
        }
        let latest = self.map.latest(key).map(LatestRecord::from_packed);
        let is_forgotten = record.is_tombstone() && offset < self.tombstones_below;
        match latest.filter(|latest| latest.offset > offset) {
            Some(LatestRecord { is_tombstone: true, .. }) => RecordFate::MustGo,
            Some(_) => RecordFate::MayGo,
            None if is_forgotten => RecordFate::MayGo,
            None => RecordFate::Stays,
        }
    }

    /// Returns whether [`Self::filter`] would change an entry of the partition.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub(super) fn changes(
        &self,
        placement: &Placement,
        entry: &StoredBytes<'_>,
        codecs: &mut Codecs,
    ) -> Result<bool, String> {
        let (head, parts) = batch_of(placement, entry)?;
        let offsets = Offsets { first: placement.first, head: &head };
        let mut strictest = RecordFate::Stays;
        let visit = |record: KeyedRecord<'_>| {
            strictest = strictest.max(self.judge(offsets.of(record.number), &record));
            strictest != RecordFate::MustGo
        };
        unless_no_records(visit_records(&parts, codecs, visit))
            .map_err(|error| broken(placement, &error))?;
        match strictest {
            RecordFate::Stays => Ok(false),
            RecordFate::MustGo => Ok(true),
            RecordFate::MayGo => {
                let filtered = self.filter(placement, entry, codecs)?;
                Ok(!matches!(filtered, FilteredEntry::Unchanged))
            }
        }
    }

    /// Judges an entry of the partition.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub(super) fn filter(
        &self,
        placement: &Placement,
        entry: &StoredBytes<'_>,
        codecs: &mut Codecs,
    ) -> Result<FilteredEntry, String> {
        let (head, parts) = batch_of(placement, entry)?;
        let offsets = Offsets { first: placement.first, head: &head };
        let judge = |record: KeyedRecord<'_>| self.judge(offsets.of(record.number), &record);
        // The head grows by the list of kept offsets.
        let payload_bytes = entry.payload.bytes.len();
        let payload_max = |numbers: &[u32]| {
            let kept = offsets.kept(placement.count, numbers);
            let new_head = BatchHead { kept: kept.map(Box::new), ..head.clone() };
            let head_bytes = encode_head(&Head::Batch(new_head)).len();
            let growth = head_bytes.saturating_sub(entry.head.len() + OFFSETS_BYTES_FREE);
            payload_bytes.saturating_sub(growth)
        };
        let compacted = compact(&parts, codecs, judge, payload_max).map(Some);
        let compacted = unless_no_records(compacted).map_err(|error| broken(placement, &error))?;
        let (parts, numbers) = match compacted {
            None | Some(CompactedBatch::Unchanged) => return Ok(FilteredEntry::Unchanged),
            Some(CompactedBatch::Empty) => return Ok(FilteredEntry::Removed),
            Some(CompactedBatch::Smaller(parts, numbers)) => (parts, numbers),
        };
        let kept = offsets.kept(placement.count, &numbers).ok_or_else(|| {
            let count = numbers.len();
            broken(placement, &format!("{count} of {} offsets do not fit a head", placement.count))
        })?;
        let states_bytes = parts.states_uncompressed_bytes();
        let head = BatchHead {
            record_count: parts.record_count,
            compression: parts.compression,
            payload_bytes: u32::try_from(parts.payload.len()).unwrap_or(u32::MAX),
            uncompressed_bytes: if states_bytes { parts.uncompressed_bytes } else { 0 },
            kept: Some(Box::new(kept)),
            ..head
        };
        let crc_seed = parts.crc_seed();
        Ok(FilteredEntry::Replaced {
            head: encode_head(&Head::Batch(head)),
            payload: Payload { bytes: parts.payload, crc: parts.crc, crc_seed },
        })
    }
}

/// The latest record of a key, as the map of a pass has it.
#[derive(Debug, Clone, Copy)]
struct LatestRecord {
    offset: u64,
    is_tombstone: bool,
}

impl LatestRecord {
    /// Returns a number that grows with the offset. The top bit of an offset is never used.
    fn packed(self) -> u64 {
        self.offset << 1 | u64::from(self.is_tombstone)
    }

    fn from_packed(packed: u64) -> Self {
        Self { offset: packed >> 1, is_tombstone: packed & 1 == 1 }
    }
}

/// Head and payload of a stored entry.
#[derive(Debug, Clone, Copy)]
pub(super) struct StoredBytes<'a> {
    pub(super) head: &'a [u8],
    pub(super) payload: &'a Payload,
}

impl StoredBytes<'_> {
    /// Returns the size of the payload after decompression, as its head states.
    pub(super) fn decoded_bytes(&self) -> usize {
        let stated = match decode_head(self.head) {
            Ok(Head::Batch(head)) if head.version == KAFKA_BATCH_VERSION => {
                // The head states the size as a `RecordList`; as Kafka records they may take 4
                // times as much.
                (head.uncompressed_bytes as usize * 4).min(UNCOMPRESSED_BYTES_MAX)
            }
            Ok(Head::Batch(head)) => head.uncompressed_bytes as usize,
            _ => 0,
        };
        stated.max(self.payload.bytes.len())
    }
}

/// Offsets of the records in a batch.
struct Offsets<'a> {
    first: u64,
    head: &'a BatchHead,
}

impl Offsets<'_> {
    fn delta(&self, number: u32) -> u32 {
        let kept = self.head.kept.as_ref().and_then(|kept| kept.deltas().get(number as usize));
        kept.copied().unwrap_or(number)
    }

    fn of(&self, number: u32) -> u64 {
        self.first + u64::from(self.delta(number))
    }

    /// Returns the offsets of the records with these numbers; `None` if they do not fit a head.
    fn kept(&self, count: u32, numbers: &[u32]) -> Option<KeptOffsets> {
        KeptOffsets::new(count, numbers.iter().map(|number| self.delta(*number)).collect())
    }
}

fn batch_of(
    placement: &Placement,
    entry: &StoredBytes<'_>,
) -> Result<(BatchHead, BatchParts), String> {
    let decoded = decode_head(entry.head).map_err(|error| broken(placement, &error))?;
    let Head::Batch(head) = decoded else {
        return Err(broken(placement, &"the entry is a command"));
    };
    if head.offset_count() != placement.count {
        return Err(broken(placement, &"the head covers another number of offsets"));
    }
    let parts = BatchParts {
        version: head.version,
        record_count: head.record_count,
        compression: head.compression,
        uncompressed_bytes: head.uncompressed_bytes,
        crc: entry.payload.crc,
        payload: entry.payload.bytes.clone(),
    };
    Ok((head, parts))
}

/// Treats an intact batch that is not a list of records as a batch without keys, which stays.
fn unless_no_records<T: Default>(result: Result<T, CompactError>) -> Result<T, CompactError> {
    match result {
        Err(error) if error.is_no_record_list() => Ok(T::default()),
        result => result,
    }
}

fn broken(placement: &Placement, why: &dyn std::fmt::Display) -> String {
    format!("the batch at offset {} cannot be compacted: {why}", placement.first)
}

/// The passes of several partitions, as a filter of the log.
#[derive(Debug)]
pub(super) struct CleanFilter {
    passes: BTreeMap<u64, CleanPass>,
    worker: CleanerWorker,
    has_refused: AtomicBool,
}

impl CleanFilter {
    pub(super) fn new(passes: BTreeMap<u64, CleanPass>, worker: CleanerWorker) -> Self {
        Self { passes, worker, has_refused: AtomicBool::new(false) }
    }

    /// Returns whether an entry was refused.
    pub(super) fn has_refused(&self) -> bool {
        self.has_refused.load(Ordering::Relaxed)
    }
}

impl EntryFilter for CleanFilter {
    fn filter(&self, placement: &Placement, entry: &Entry) -> Result<FilteredEntry, String> {
        let Some(pass) = self.passes.get(&placement.stream) else {
            return Ok(FilteredEntry::Unchanged);
        };
        let stored = StoredBytes { head: &entry.head, payload: &entry.payload };
        let filtered = self.worker.with_codecs(|codecs| pass.filter(placement, &stored, codecs));
        self.has_refused.fetch_or(filtered.is_err(), Ordering::Relaxed);
        filtered
    }

    fn worker(&self) -> Option<&dyn BackgroundWorker> {
        self.worker.thread()
    }

    fn work_bytes(&self, entry: &Entry) -> u64 {
        StoredBytes { head: &entry.head, payload: &entry.payload }.decoded_bytes() as u64
    }
}
