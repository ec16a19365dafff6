//! The log in memory: entries of unsealed segments and the cached tail, and the log as Raft sees
//! it. Pure bookkeeping under one lock; nothing here reads, writes or waits.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;

use crate::footer::SealedEntry;
use crate::frame::{Context, frame_len};
use crate::held::Held;
use crate::segment::Segment;
use crate::streams::Stream;
use crate::{Entry, Error, LogId, LogState, Payload, Placement};

/// Segment of an entry that is not written yet: after all others.
pub(crate) const UNWRITTEN: u64 = u64::MAX;
/// Least number of slots looked at when some are dropped; the lock is never held for long.
const POPPED_AT_ONCE: usize = 256;
/// What a slot costs beside its payload and head.
const SLOT_BYTES: usize = size_of::<Slot>() + 32;

/// What the state machine said about an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Unknown,
    Void,
    At(Placement),
}

impl Place {
    pub(crate) fn placement(self) -> Option<Placement> {
        match self {
            Self::At(placement) => Some(placement),
            Self::Unknown | Self::Void => None,
        }
    }
}

impl From<Option<Placement>> for Place {
    fn from(placement: Option<Placement>) -> Self {
        // Nothing could ever find an entry of no positions.
        placement.filter(|p| p.count > 0).map_or(Self::Void, Self::At)
    }
}

/// An entry in memory, with or without its payload.
#[derive(Debug)]
pub(crate) struct Slot {
    pub id: LogId,
    /// Tells the entry from another one that had the same index before a truncation.
    pub serial: u64,
    pub stream: u64,
    pub head: Bytes,
    pub payload: Option<Bytes>,
    pub payload_len: usize,
    pub payload_crc: u32,
    pub payload_crc_seed: u32,
    /// [`UNWRITTEN`] until the group it is in has been synced.
    pub segment: u64,
    pub offset: u32,
    pub frame_len: u32,
    pub place: Place,
}

impl Slot {
    /// The entry without its payload.
    pub(crate) fn head_entry(&self) -> Entry {
        let payload =
            Payload { bytes: Bytes::new(), crc: self.payload_crc, crc_seed: self.payload_crc_seed };
        Entry { id: self.id, stream: self.stream, head: self.head.clone(), payload }
    }

    pub(crate) fn is_written(&self) -> bool {
        self.segment != UNWRITTEN
    }

    /// What the slot counts for in the tail's budget while it has its payload. Small payloads
    /// must not fill the memory with slots.
    fn cost(&self) -> usize {
        self.payload_len + self.head.len() + SLOT_BYTES
    }
}

/// An entry that has become durable.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Written {
    pub index: u64,
    pub serial: u64,
    pub offset: u32,
}

/// Invariants: slots stand by index, and by segment too (unwritten ones last); indexes follow each
/// other except where a purge beyond the end left a gap; entries below `placed` have a place,
/// others have none; a slot goes only when its segment is sealed and its payload evicted, so
/// everything unsealed is here.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// Lives in memory only: nothing is evicted, and what is no longer needed goes at once.
    memory: bool,
    tail_bytes_max: usize,
    pub(crate) slots: VecDeque<Slot>,
    /// What the slots that have their payload cost. Not counted in a memory log.
    tail_bytes: usize,
    /// So many slots at the front have lost their payload.
    evicted: usize,
    next_serial: u64,
    /// Next index to place; `None` before the first entry of all.
    pub(crate) placed: Option<u64>,
    pub(crate) last: Option<LogId>,
    pub(crate) synced: Option<LogId>,
    pub(crate) purged: Option<LogId>,
    pub(crate) committed: Option<LogId>,
    pub(crate) checkpoint: Option<LogId>,
    pub(crate) vote: Option<Bytes>,
    pub(crate) streams: HashMap<u64, Stream>,
    /// The live segments by id.
    pub(crate) held: BTreeMap<u64, Held>,
    /// Sealed segments by their first index.
    pub(crate) sealed_by_index: BTreeMap<u64, u64>,
}

/// What `place` found out.
#[derive(Debug)]
pub(crate) enum Placed {
    /// Done; whether a rolled segment may have become ready to be sealed.
    Done { may_seal: bool },
    /// The entry is in a sealed segment: its footer says where it must be.
    Sealed(Arc<Segment>),
}

impl Log {
    pub(crate) fn new(memory: bool, tail_bytes_max: usize) -> Self {
        Self { memory, tail_bytes_max, ..Self::default() }
    }

    /// Index that the next entry must have; `None` if any will do.
    pub(crate) fn next(&self) -> Option<u64> {
        self.last.map(|last| last.index + 1)
    }

    /// Next index, for comparisons.
    pub(crate) fn end(&self) -> u64 {
        self.next().unwrap_or(0)
    }

    pub(crate) fn state(&self) -> LogState {
        let by_index = |id: &LogId| id.index;
        LogState {
            vote: self.vote.clone(),
            purged: self.purged,
            last: self.last,
            committed: self.committed,
            synced: self.synced.into_iter().chain(self.purged).max_by_key(by_index),
        }
    }

    /// First index of the Raft log.
    pub(crate) fn first(&self) -> u64 {
        self.purged.map_or(0, |purged| purged.index + 1)
    }

    /// First index that is there above the purge point, or that comes next.
    pub(crate) fn first_present(&self) -> u64 {
        if self.purged.is_some() {
            return self.first();
        }
        let sealed = self.sealed_by_index.keys().next().copied();
        let slot = self.slots.front().map(|slot| slot.id.index);
        sealed.into_iter().chain(slot).min().unwrap_or_else(|| self.end())
    }

    /// Whether these entries may follow.
    pub(crate) fn check_append(&self, entries: &[Entry]) -> Result<(), Error> {
        let mut next = self.next();
        for entry in entries {
            let index = entry.id.index;
            if next.is_some_and(|next| next != index) || index == u64::MAX {
                let next = next.unwrap_or_default();
                let message = format!("entry {index} was appended where {next} must follow");
                return Err(Error::Unusable(message));
            }
            next = Some(index + 1);
        }
        Ok(())
    }

    /// Serial number of the next entry to be pushed.
    pub(crate) fn next_serial(&self) -> u64 {
        self.next_serial
    }

    /// Takes an entry whose index was checked.
    pub(crate) fn push(&mut self, entry: Entry) {
        let index = entry.id.index;
        let placed = *self.placed.get_or_insert(index);
        // Entries that a checkpoint ran ahead of are never told to the state machine again.
        let place = if index < placed { Place::Void } else { Place::Unknown };
        let payload_len = entry.payload.bytes.len();
        let slot = Slot {
            id: entry.id,
            serial: self.next_serial,
            stream: entry.stream,
            frame_len: frame_len(entry.head.len(), payload_len) as u32,
            head: entry.head,
            payload: Some(entry.payload.bytes),
            payload_len,
            payload_crc: entry.payload.crc,
            payload_crc_seed: entry.payload.crc_seed,
            segment: UNWRITTEN,
            offset: 0,
            place,
        };
        self.tail_bytes += slot.cost();
        self.slots.push_back(slot);
        self.next_serial += 1;
        self.last = Some(entry.id);
    }

    /// Takes an entry found at open.
    pub(crate) fn restore(&mut self, mut slot: Slot) {
        slot.serial = self.next_serial;
        self.next_serial += 1;
        if let Some(held) = self.held.get_mut(&slot.segment) {
            held.frame_bytes += u64::from(slot.frame_len);
        }
        let note = slot.place.placement().map(|p| (p, slot.segment, slot.frame_len));
        let index = slot.id.index;
        self.slots.push_back(slot);
        self.evicted = self.slots.len();
        if let Some((placement, segment, frame_len)) = note {
            self.note_ref(index, placement);
            self.note_row(segment, placement, frame_len);
        }
    }

    /// Notes that entries are durable, and gives up payloads beyond the tail's budget. What is
    /// returned is to be dropped outside the lock.
    pub(crate) fn on_written(&mut self, segment: u64, written: &[Written]) -> Vec<Bytes> {
        for entry in written {
            let Some(slot) = self.slot_mut(entry.index) else { continue };
            // Truncated meanwhile, and perhaps replaced.
            if slot.serial != entry.serial {
                continue;
            }
            slot.segment = segment;
            slot.offset = entry.offset;
            let (id, frame_len, place) = (slot.id, slot.frame_len, slot.place);
            self.synced = Some(id);
            if let Some(held) = self.held.get_mut(&segment) {
                held.frame_bytes += u64::from(frame_len);
            }
            if let Place::At(placement) = place {
                self.note_row(segment, placement, frame_len);
            }
        }
        if self.memory { Vec::new() } else { self.evict(written.len() * 2) }
    }

    fn evict(&mut self, pop_max: usize) -> Vec<Bytes> {
        let mut gone = Vec::new();
        while self.tail_bytes > self.tail_bytes_max {
            match self.slots.get_mut(self.evicted) {
                Some(slot) if slot.is_written() => {
                    self.tail_bytes -= slot.cost();
                    gone.extend(slot.payload.take());
                    self.evicted += 1;
                }
                _ => break,
            }
        }
        self.pop_slots(pop_max);
        gone
    }

    /// Drops slots at the front that nothing needs any more, about `max` of them.
    pub(crate) fn pop_slots(&mut self, max: usize) {
        for _ in 0..max.max(POPPED_AT_ONCE) {
            let Some(slot) = self.slots.front() else { return };
            let needed = if self.memory {
                !self.is_dead(slot)
            } else {
                self.evicted == 0 || self.held.get(&slot.segment).is_some_and(|h| !h.sealed)
            };
            // A slot that is not written belongs to no segment yet.
            if needed || !slot.is_written() {
                return;
            }
            let (index, stream) = (slot.id.index, slot.place.placement().map(|p| p.stream));
            self.slots.pop_front();
            self.evicted = self.evicted.saturating_sub(1);
            if let Some(stream) = stream.and_then(|s| self.streams.get_mut(&s)) {
                stream.forget(index);
            }
        }
    }

    /// Whether neither the Raft log nor a reader of a stream can ask for the entry.
    pub(crate) fn is_dead(&self, slot: &Slot) -> bool {
        slot.id.index < self.first()
            && match slot.place {
                Place::Unknown => false,
                Place::Void => true,
                Place::At(p) => self.streams.get(&p.stream).is_some_and(|s| s.is_trimmed(&p)),
            }
    }

    /// Gives up the payload of an entry of a memory log that nobody can ask for.
    pub(crate) fn drop_dead_payload(&mut self, index: u64) {
        let dead = self.slot(index).is_some_and(|slot| self.is_dead(slot));
        if dead && let Some(slot) = self.slot_mut(index) {
            slot.payload = None;
        }
    }

    pub(crate) fn is_memory(&self) -> bool {
        self.memory
    }

    // Truncation, purge, checkpoint.

    /// Removes the entries after `last`. The first index that is gone, and what to drop outside
    /// the lock.
    pub(crate) fn truncate_after(&mut self, last: Option<u64>) -> Result<(u64, Vec<Slot>), Error> {
        let from = last.map_or(self.first(), |last| last + 1).max(self.first());
        let kept = self.placed.filter(|_| self.has_placed());
        if let Some(placed) = kept
            && from < placed
            && from < self.end()
        {
            let message = format!("entry {from} is placed and cannot be truncated");
            return Err(Error::Unusable(message));
        }
        Ok((from, self.cut(from)))
    }

    /// Whether any entry was ever placed: until then `placed` is only where placing begins.
    fn has_placed(&self) -> bool {
        self.checkpoint.is_some()
            || self.purged.is_some()
            || !self.sealed_by_index.is_empty()
            || self.slots.front().is_some_and(|slot| slot.place != Place::Unknown)
    }

    /// Drops the slots from `from` on.
    fn cut(&mut self, from: u64) -> Vec<Slot> {
        let keep = self.slots.partition_point(|slot| slot.id.index < from);
        let cut: Vec<Slot> = self.slots.drain(keep..).collect();
        for slot in &cut {
            self.tail_bytes -= slot.payload.as_ref().map_or(0, |_| slot.cost());
            if let Some(held) = self.held.get_mut(&slot.segment) {
                held.frame_bytes -= u64::from(slot.frame_len);
            }
        }
        self.evicted = self.evicted.min(keep);
        if self.end() > from {
            self.last = self.last_before(from);
            if self.synced.is_some_and(|synced| synced.index >= from) {
                self.synced = self.last;
            }
        }
        if self.last.is_none() && !self.has_placed() {
            self.placed = None;
        }
        cut
    }

    /// Id of the last entry below `from`, or of the purge point.
    fn last_before(&self, from: u64) -> Option<LogId> {
        let slot = self.slots.back().map(|slot| slot.id);
        let sealed = || {
            let (_, segment) = self.sealed_by_index.range(..from).next_back()?;
            self.held.get(segment)?.entries.map(|(_, last)| last)
        };
        let last = slot.or_else(sealed);
        last.into_iter().chain(self.purged).max_by_key(|id| id.index)
    }

    /// Takes entries up to `upto` out of the Raft log. If another entry stands in its place, what
    /// follows that one is of another branch and goes too. What to drop outside the lock.
    pub(crate) fn purge(&mut self, upto: LogId) -> Result<Vec<Bytes>, Error> {
        if !self.memory && self.checkpoint.is_none_or(|at| at.index < upto.index) {
            let message = format!("entry {} is not checkpointed and cannot be purged", upto.index);
            return Err(Error::Unusable(message));
        }
        if self.purged.is_some_and(|purged| purged.index >= upto.index) {
            return Ok(Vec::new());
        }
        let first = self.first();
        self.skip_places(upto.index + 1);
        let conflicts = self.slot(upto.index).is_some_and(|slot| slot.id != upto);
        let cut = if conflicts { self.cut(upto.index) } else { Vec::new() };
        let mut gone: Vec<Bytes> = cut.into_iter().filter_map(|slot| slot.payload).collect();
        self.purged = Some(upto);
        if self.end() <= upto.index {
            self.last = Some(upto);
        }
        if self.memory {
            gone.extend(self.drop_dead(first, upto.index));
        }
        Ok(gone)
    }

    /// Entries below `next` that have no place are void: the state machine went past them by
    /// other means (a snapshot).
    fn skip_places(&mut self, next: u64) {
        let placed = self.placed.unwrap_or(0);
        if placed >= next && self.placed.is_some() {
            return;
        }
        let start = self.slots.partition_point(|slot| slot.id.index < placed);
        for slot in self.slots.range_mut(start..) {
            if slot.id.index < next && slot.place == Place::Unknown {
                slot.place = Place::Void;
            }
        }
        self.placed = Some(next);
    }

    /// Payloads of a memory log that a purge has made useless.
    fn drop_dead(&mut self, first: u64, last: u64) -> Vec<Bytes> {
        let start = self.slots.partition_point(|slot| slot.id.index < first);
        let end = self.slots.partition_point(|slot| slot.id.index <= last);
        let mut gone = Vec::new();
        for at in start..end {
            let dead = self.slots.get(at).is_some_and(|slot| self.is_dead(slot));
            if dead && let Some(slot) = self.slots.get_mut(at) {
                gone.extend(slot.payload.take());
            }
        }
        self.pop_slots(end - start);
        gone
    }

    /// Whether the state machine may be checkpointed at this entry.
    pub(crate) fn check_checkpoint(&self, at: LogId) -> Result<(), Error> {
        if self.checkpoint.is_some_and(|old| old.index > at.index) {
            return Err(Error::Unusable(format!("a checkpoint at {} would go back", at.index)));
        }
        let synced = self.state().synced.map_or(0, |id| id.index + 1);
        let placed = self.placed.is_some_and(|placed| at.index < placed);
        // The same one again, perhaps one that had run ahead of the log.
        let again = self.checkpoint.is_some_and(|old| old.index == at.index);
        // Ahead of the places it comes from elsewhere, and needs nothing of this log.
        if placed && at.index >= synced && !again {
            return Err(Error::Beyond { asked: at.index, next: synced });
        }
        Ok(())
    }

    /// Notes a checkpoint that is durable. Not earlier: entries that it ran ahead of become void,
    /// and a footer must not say so while an older checkpoint may come back.
    pub(crate) fn on_checkpoint(&mut self, at: LogId) {
        self.skip_places(at.index + 1);
        self.checkpoint = Some(at);
    }

    // Places.

    pub(crate) fn place(
        &mut self,
        index: u64,
        placement: Option<Placement>,
    ) -> Result<Placed, Error> {
        self.check_place(index)?;
        let place = Place::from(placement);
        let Some(at) = self.find(index) else { return self.place_sealed(index) };
        let next = self.slots.get(at + 1).map_or(UNWRITTEN, |slot| slot.segment);
        if let Place::At(placement) = place {
            self.check_placement(index, &placement)?;
        }
        let Some(slot) = self.slots.get_mut(at) else {
            return Ok(Placed::Done { may_seal: false });
        };
        slot.place = place;
        let (segment, frame_len, written) = (slot.segment, slot.frame_len, slot.is_written());
        self.placed = Some(self.slots.get(at + 1).map_or(index + 1, |slot| slot.id.index));
        if let Place::At(placement) = place {
            self.note_ref(index, placement);
            if written {
                self.note_row(segment, placement, frame_len);
            }
        }
        Ok(Placed::Done { may_seal: written && next != segment })
    }

    fn check_place(&self, index: u64) -> Result<(), Error> {
        let next = self.placed.unwrap_or(index);
        if index < next {
            return Err(Error::Unusable(format!("entry {index} is placed already")));
        }
        if index >= self.end() {
            return Err(Error::Beyond { asked: index, next: self.end() });
        }
        if index > next {
            let message = format!("entry {index} was placed before entry {next}");
            return Err(Error::Unusable(message));
        }
        Ok(())
    }

    fn place_sealed(&self, index: u64) -> Result<Placed, Error> {
        let held = self.sealed_segment(index);
        held.map(Placed::Sealed)
            .ok_or_else(|| Error::Unusable(format!("there is no entry {index}")))
    }

    /// Counts an entry of a sealed segment as placed, after its footer agreed.
    pub(crate) fn on_sealed_placed(&mut self, index: u64) {
        if self.placed == Some(index) {
            let end = self.sealed_by_index.range(..=index).next_back();
            let last = end.and_then(|(_, id)| self.held.get(id)?.entries).map(|(_, last)| last);
            // After the last entry of a segment comes the first of the next, wherever that is.
            let follows = last.is_some_and(|last| last.index == index).then(|| {
                let slot = self.slots.partition_point(|slot| slot.id.index <= index);
                let slot = self.slots.get(slot).map(|slot| slot.id.index);
                let sealed = self.sealed_by_index.range(index + 1..).next().map(|(i, _)| *i);
                slot.into_iter().chain(sealed).min()
            });
            self.placed = Some(follows.flatten().unwrap_or(index + 1));
        }
    }

    // Finding.

    /// Where the slot of an index is.
    pub(crate) fn find(&self, index: u64) -> Option<usize> {
        let back = self.slots.back()?.id.index;
        let guess = (self.slots.len() as u64 - 1).checked_sub(back.checked_sub(index)?);
        // Counted from the end, because gaps are old where there are any.
        if let Some(guess) = guess
            && self.slots.get(guess as usize).is_some_and(|slot| slot.id.index == index)
        {
            return Some(guess as usize);
        }
        self.slots.binary_search_by_key(&index, |slot| slot.id.index).ok()
    }

    /// Where to begin reading at an index: its slot, or the first one if the log begins later.
    pub(crate) fn find_from(&self, index: u64) -> Option<usize> {
        let begins_later = || {
            let front = self.slots.front()?.id.index;
            (front > index && self.sealed_by_index.is_empty()).then_some(0)
        };
        self.find(index).or_else(begins_later)
    }

    pub(crate) fn slot(&self, index: u64) -> Option<&Slot> {
        self.find(index).and_then(|at| self.slots.get(at))
    }

    fn slot_mut(&mut self, index: u64) -> Option<&mut Slot> {
        self.find(index).and_then(|at| self.slots.get_mut(at))
    }

    /// The sealed segment that holds an index, if one does.
    pub(crate) fn sealed_segment(&self, index: u64) -> Option<Arc<Segment>> {
        let (_, id) = self.sealed_by_index.range(..=index).next_back()?;
        let held = self.held.get(id)?;
        let (_, last) = held.entries?;
        (index <= last.index).then(|| held.segment.clone())?
    }

    /// The same, or the first one if the log begins later.
    pub(crate) fn sealed_from(&self, index: u64) -> Option<Arc<Segment>> {
        let begins_later = || {
            let (first, id) = self.sealed_by_index.first_key_value()?;
            (*first > index).then(|| self.held.get(id)?.segment.clone())?
        };
        self.sealed_segment(index).or_else(begins_later)
    }

    /// Removes entries that were queued but can never be written. False if one of them is placed:
    /// then nothing consistent is left.
    pub(crate) fn drop_unwritten(&mut self) -> (bool, Vec<Slot>) {
        let at = self.slots.partition_point(Slot::is_written);
        let Some(first) = self.slots.get(at) else { return (true, Vec::new()) };
        let consistent = first.place == Place::Unknown;
        let first = first.id.index;
        (consistent, self.cut(first))
    }

    // Segments.

    /// Begins a segment; the one before it gets no more groups.
    pub(crate) fn on_rolled(&mut self, end: u64, context: Context, segment: Option<Arc<Segment>>) {
        if let Some((_, held)) = self.held.iter_mut().next_back() {
            held.rolled = Some((end, context));
        }
        if let Some(segment) = segment {
            self.held.insert(segment.id, Held::new(Some(segment)));
        }
    }

    /// The oldest segment that is not sealed, if all of its entries are placed.
    pub(crate) fn sealable(&self) -> Option<u64> {
        let (id, held) = self.held.iter().find(|(_, held)| !held.sealed)?;
        held.rolled.as_ref()?;
        let end = self.slots.partition_point(|slot| slot.segment <= *id);
        let last = end.checked_sub(1).and_then(|at| self.slots.get(at));
        last.is_none_or(|slot| slot.place != Place::Unknown).then_some(*id)
    }

    /// Entries of a segment, some at a time: from slot number `skip` within it on.
    pub(crate) fn entries_of(&self, segment: u64, skip: usize, max: usize) -> Vec<SealedEntry> {
        let start = self.slots.partition_point(|slot| slot.segment < segment) + skip;
        let end = self.slots.partition_point(|slot| slot.segment <= segment).min(start + max);
        let row = |slot: &Slot| SealedEntry {
            id: slot.id,
            offset: slot.offset,
            frame_len: slot.frame_len,
            placement: slot.place.placement(),
        };
        if start >= end { Vec::new() } else { self.slots.range(start..end).map(row).collect() }
    }

    /// Placements of entries up to `upto` that are in no sealed segment, for the state file.
    pub(crate) fn unsealed_placements(&self, upto: u64) -> Vec<(u64, Option<Placement>)> {
        let sealed = |slot: &Slot| self.held.get(&slot.segment).is_none_or(|h| h.sealed);
        let start = self.slots.partition_point(|slot| slot.is_written() && sealed(slot));
        let end = self.slots.partition_point(|slot| slot.id.index <= upto);
        if start >= end {
            return Vec::new();
        }
        let slots = self.slots.range(start..end).filter(|slot| slot.is_written());
        slots.map(|slot| (slot.id.index, slot.place.placement())).collect()
    }
}

#[cfg(test)]
#[path = "log_tests.rs"]
mod tests;
