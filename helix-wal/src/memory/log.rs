//! The log in memory: entries of unsealed segments, the cached tail, and the Raft view of the log.
//!
//! The other files of `memory/` add operations on it. All of it is protected by one lock.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;

use crate::error::Error;
use crate::files::segment::Segment;
use crate::format::frame::frame_len;
use crate::format::layout::NUMBERS_END;
use crate::memory::live_segment::LiveSegment;
use crate::memory::slot::{PlacementState, Slot, UNWRITTEN, WrittenEntry};
use crate::memory::stream::Stream;
use crate::types::{Entry, LogId, LogState};

/// Minimum number of slots checked per removal, which bounds how long the lock is held.
const SLOTS_PER_POP: usize = 256;

/// In-memory log. Invariants:
///
/// - Slots are sorted by index and by segment; unwritten slots come last.
/// - Indexes are consecutive, except for a gap left by a purge beyond the end.
/// - Entries below `placed` are placed, entries from `placed` on are not.
/// - A slot is removed only when its segment is sealed and its payload evicted. Every entry of an
///   unsealed segment therefore has a slot.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// The log has no disk: payloads are never evicted, and unneeded entries are removed at once.
    pub(crate) memory: bool,
    tail_bytes_max: usize,
    pub(crate) slots: VecDeque<Slot>,
    /// Memory cost of the slots with a payload. Not tracked for an in-memory log.
    pub(crate) tail_bytes: usize,
    /// Number of slots at the front without a payload.
    pub(crate) evicted: usize,
    next_serial: u64,
    /// Next index to place; `None` before the first entry.
    pub(crate) placed: Option<u64>,
    pub(crate) last: Option<LogId>,
    pub(crate) synced: Option<LogId>,
    pub(crate) purged: Option<LogId>,
    pub(crate) committed: Option<LogId>,
    pub(crate) checkpoint: Option<LogId>,
    pub(crate) vote: Option<Bytes>,
    pub(crate) streams: HashMap<u64, Stream>,
    /// Live segments of the chain by id, each following the previous one.
    pub(crate) chain: BTreeMap<u64, LiveSegment>,
    /// Cold segments by id. They hold entries up to the purge point, interleaved with others.
    pub(crate) cold: BTreeMap<u64, LiveSegment>,
    /// Ids of the sealed segments, by first index.
    pub(crate) sealed_by_index: BTreeMap<u64, u64>,
    /// Sealed segments with a damaged footer, of which only the range of entries is known.
    pub(crate) quarantined: Vec<Arc<Segment>>,
}

impl Log {
    pub(crate) fn new(memory: bool, tail_bytes_max: usize) -> Self {
        Self { memory, tail_bytes_max, ..Self::default() }
    }

    /// Returns the index of the next entry; `None` if any index is accepted.
    pub(crate) fn next(&self) -> Option<u64> {
        self.last.map(|last| last.index + 1)
    }

    /// Returns the next index, for comparisons.
    pub(crate) fn end(&self) -> u64 {
        self.next().unwrap_or(0)
    }

    pub(crate) fn state(&self) -> LogState {
        let by_index = |id: &LogId| id.index;
        debug_assert!(
            self.purged.is_none_or(|purged| purged.index < self.end()),
            "{:?} is purged of {:?}",
            self.purged,
            self.last
        );
        debug_assert!(
            self.synced.is_none_or(|synced| synced.index < self.end()),
            "{:?} is synced of {:?}",
            self.synced,
            self.last
        );
        LogState {
            vote: self.vote.clone(),
            purged: self.purged,
            last: self.last,
            committed: self.committed,
            synced: self.synced.into_iter().chain(self.purged).max_by_key(by_index),
        }
    }

    /// Returns the first index of the Raft log.
    pub(crate) fn first(&self) -> u64 {
        self.purged.map_or(0, |purged| purged.index + 1)
    }

    /// Returns the first index present above the purge point, or the next index.
    pub(crate) fn first_present(&self) -> u64 {
        if self.purged.is_some() {
            return self.first();
        }
        let sealed = self.sealed_by_index.keys().next().copied();
        let slot = self.slots.front().map(|slot| slot.id.index);
        sealed.into_iter().chain(slot).min().unwrap_or_else(|| self.end())
    }

    /// Checks that these entries follow the last one.
    pub(crate) fn check_append(&self, entries: &[Entry]) -> Result<(), Error> {
        let mut next = self.next();
        for entry in entries {
            let index = entry.id.index;
            if next.is_some_and(|next| next != index) || index >= NUMBERS_END - 1 {
                let next = next.unwrap_or_default();
                let message = format!("entry {index} does not follow; the next index is {next}");
                return Err(Error::Unusable(message));
            }
            next = Some(index + 1);
        }
        Ok(())
    }

    /// Returns the serial number of the next entry.
    pub(crate) fn next_serial(&self) -> u64 {
        self.next_serial
    }

    /// Adds an entry whose index was checked.
    pub(crate) fn push(&mut self, entry: Entry) {
        let index = entry.id.index;
        let placed = *self.placed.get_or_insert(index);
        // A checkpoint ahead of the log covers these entries, so they are never placed.
        let place = if index < placed { PlacementState::Void } else { PlacementState::Unknown };
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

    /// Adds an entry found at open.
    pub(crate) fn restore(&mut self, mut slot: Slot) {
        slot.serial = self.next_serial;
        self.next_serial += 1;
        if let Some(held) = self.chain.get_mut(&slot.segment) {
            held.frame_bytes += u64::from(slot.frame_len);
        }
        let note = slot.place.placement().map(|p| (p, slot.segment, slot.frame_len));
        let index = slot.id.index;
        self.slots.push_back(slot);
        self.evicted = self.slots.len();
        if let Some((placement, segment, frame_len)) = note {
            self.add_entry_ref(index, placement);
            self.add_to_share(segment, placement, frame_len);
        }
    }

    /// Marks entries as durable and evicts payloads beyond the tail's budget.
    ///
    /// Returns the evicted payloads, which the caller should drop outside the lock.
    pub(crate) fn on_written(&mut self, segment: u64, written: &[WrittenEntry]) -> Vec<Bytes> {
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
            if let Some(held) = self.chain.get_mut(&segment) {
                held.frame_bytes += u64::from(frame_len);
            }
            if let PlacementState::At(placement) = place {
                self.add_to_share(segment, placement, frame_len);
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

    /// Removes unneeded slots at the front, about `max` of them.
    pub(crate) fn pop_slots(&mut self, max: usize) {
        for _ in 0..max.max(SLOTS_PER_POP) {
            let Some(slot) = self.slots.front() else { return };
            let needed = if self.memory {
                !self.is_dead(slot)
            } else {
                self.evicted == 0 || self.chain.get(&slot.segment).is_some_and(|h| !h.sealed)
            };
            // An unwritten slot belongs to no segment yet.
            if needed || !slot.is_written() {
                return;
            }
            self.pop_front();
        }
    }

    /// Removes the first slot, which has no payload on a log with a disk.
    fn pop_front(&mut self) {
        let Some(slot) = self.slots.pop_front() else { return };
        self.evicted = self.evicted.saturating_sub(1);
        let stream = slot.place.placement().map(|placement| placement.stream);
        if let Some(stream) = stream.and_then(|stream| self.streams.get_mut(&stream)) {
            stream.forget(slot.id.index);
        }
    }

    /// Removes slots of sealed segments at the front up to an index, at most `max` of them, also
    /// while the tail has space for them.
    ///
    /// Returns their payloads, which the caller should drop outside the lock.
    pub(crate) fn drop_slots_upto(&mut self, index: u64, max: usize) -> Vec<Bytes> {
        let mut gone = Vec::new();
        for _ in 0..max {
            let Some(slot) = self.slots.front_mut() else { break };
            let is_sealed = self.chain.get(&slot.segment).is_none_or(|held| held.sealed);
            if slot.id.index > index || !slot.is_written() || !is_sealed {
                break;
            }
            if let Some(payload) = slot.payload.take() {
                self.tail_bytes -= slot.cost();
                self.evicted += 1;
                gone.push(payload);
            }
            self.pop_front();
        }
        gone
    }

    /// Returns whether neither the Raft log nor a stream needs the entry.
    pub(crate) fn is_dead(&self, slot: &Slot) -> bool {
        slot.id.index < self.first()
            && match slot.place {
                PlacementState::Unknown => false,
                PlacementState::Void => true,
                PlacementState::At(p) => {
                    self.streams.get(&p.stream).is_some_and(|s| s.is_trimmed(&p))
                }
            }
    }

    /// Drops the payload of an unneeded entry of an in-memory log.
    pub(crate) fn drop_dead_payload(&mut self, index: u64) {
        let dead = self.slot(index).is_some_and(|slot| self.is_dead(slot));
        if dead && let Some(slot) = self.slot_mut(index) {
            slot.payload = None;
        }
    }

    pub(crate) fn is_memory(&self) -> bool {
        self.memory
    }

    // Lookups.

    /// Returns the position of an index in `slots`.
    pub(crate) fn find(&self, index: u64) -> Option<usize> {
        let back = self.slots.back()?.id.index;
        let guess = (self.slots.len() as u64 - 1).checked_sub(back.checked_sub(index)?);
        // Counts from the end, because gaps are near the front.
        if let Some(guess) = guess
            && self.slots.get(guess as usize).is_some_and(|slot| slot.id.index == index)
        {
            return Some(guess as usize);
        }
        self.slots.binary_search_by_key(&index, |slot| slot.id.index).ok()
    }

    /// Returns the slot to start reading at, or the first one if the log begins later.
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

    pub(crate) fn slot_mut(&mut self, index: u64) -> Option<&mut Slot> {
        self.find(index).and_then(|at| self.slots.get_mut(at))
    }

    /// Returns the sealed segment that contains an index.
    pub(crate) fn sealed_segment(&self, index: u64) -> Option<Arc<Segment>> {
        let (_, id) = self.sealed_by_index.range(..=index).next_back()?;
        let held = self.chain.get(id)?;
        let (_, last) = held.entries?;
        (index <= last.index).then(|| held.segment.clone())?
    }

    /// Returns the sealed segment that contains an index, or the first one if the log begins later.
    pub(crate) fn sealed_from(&self, index: u64) -> Option<Arc<Segment>> {
        let begins_later = || {
            let (first, id) = self.sealed_by_index.first_key_value()?;
            (*first > index).then(|| self.chain.get(id)?.segment.clone())?
        };
        self.sealed_segment(index).or_else(begins_later)
    }
}

#[cfg(test)]
#[path = "log_tests.rs"]
mod tests;
