//! The log in memory: entries of unsealed segments and the cached tail, and the log as Raft sees
//! it. Pure bookkeeping under one lock, here and in `shorten`, `places`, `held` and `streams`;
//! nothing in them reads, writes or waits.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;

use crate::frame::frame_len;
use crate::held::Held;
use crate::layout::NUMBERS_END;
use crate::segment::Segment;
use crate::slot::{Place, Slot, UNWRITTEN, Written};
use crate::streams::Stream;
use crate::{Entry, Error, LogId, LogState};

/// Least number of slots looked at when some are dropped; the lock is never held for long.
const POPPED_AT_ONCE: usize = 256;

/// Invariants: slots stand by index, and by segment too (unwritten ones last); indexes follow each
/// other except where a purge beyond the end left a gap; entries below `placed` have a place,
/// others have none; a slot goes only when its segment is sealed and its payload evicted, so
/// everything unsealed is here.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// Lives in memory only: nothing is evicted, and what is no longer needed goes at once.
    pub(crate) memory: bool,
    tail_bytes_max: usize,
    pub(crate) slots: VecDeque<Slot>,
    /// What the slots that have their payload cost. Not counted in a memory log.
    pub(crate) tail_bytes: usize,
    /// So many slots at the front have lost their payload.
    pub(crate) evicted: usize,
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
    /// The live segments of the chain by id. Each follows the one before it.
    pub(crate) held: BTreeMap<u64, Held>,
    /// The cold segments by id: entries up to the purge point, in any order among the others.
    pub(crate) cold: BTreeMap<u64, Held>,
    /// Sealed segments by their first index.
    pub(crate) sealed_by_index: BTreeMap<u64, u64>,
    /// Sealed segments of which only the range of entries is known, by id.
    pub(crate) withheld: Vec<Arc<Segment>>,
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
            if next.is_some_and(|next| next != index) || index >= NUMBERS_END - 1 {
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

    pub(crate) fn slot_mut(&mut self, index: u64) -> Option<&mut Slot> {
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
}

#[cfg(test)]
#[path = "log_tests.rs"]
mod tests;
