//! Reading entries by index. Lookups run under the lock; disk reads (`load.rs`) outside it.
//!
//! Every byte read from disk is verified.

use std::ops::Range;
use std::sync::Arc;

use crate::error::Error;
use crate::files::segment::{ReadStop, Segment};
use crate::format::footer::PlacedRow;
use crate::memory::log::Log;
use crate::memory::slot::Slot;
use crate::memory::stream::{EntryRef, Stream, StreamShare};
use crate::read::load::load_entries;
use crate::read::load::{EntrySource, FrameRef, load_heads};
use crate::shared::Shared;
use crate::types::{Entry, LogId, Placement, ReadMode, StoredEntry};

/// Maximum number of entries looked up per lock acquisition.
const ENTRIES_PER_LOCK: usize = 4096;
/// Maximum number of shares of a stream that one call reads.
const SHARES_PER_READ: usize = 64;

/// Bytes that one call may return, and bytes to read ahead for the next call.
///
/// The first entry always fits.
struct ReadBudget {
    left: usize,
    ahead: usize,
    /// Number of entries that this call returns.
    now: usize,
    is_spent: bool,
}

impl ReadBudget {
    fn new(max: usize, ahead: usize) -> Self {
        Self { left: max, ahead, now: 0, is_spent: false }
    }

    /// Returns about how many bytes are still to be fetched.
    fn bytes(&self) -> u64 {
        (self.left as u64).saturating_add(self.ahead as u64)
    }

    /// Returns whether an entry is fetched. `asked`: it is in the requested range.
    fn take(&mut self, size: usize, asked: bool) -> bool {
        self.is_spent |= !asked || (self.now > 0 && size > self.left);
        if !self.is_spent {
            self.left = self.left.saturating_sub(size);
            self.now += 1;
            return true;
        }
        let fits = size <= self.ahead;
        self.ahead -= if fits { size } else { self.ahead };
        fits
    }
}

/// Rows of a sealed segment's stream table that may hold the requested positions.
struct ShareRows {
    segment: Arc<Segment>,
    rows: Range<u32>,
    /// First position of the share. Earlier rows are in another segment by now: while a compaction
    /// moves the share, its old segment keeps the rows of what was moved.
    first: u64,
}

/// Result of looking up a range of positions under the lock.
enum PositionLookup {
    Memory(Vec<(Placement, EntrySource)>),
    /// On disk, in these consecutive shares.
    Sealed(Vec<ShareRows>),
}

/// Result of looking up a range of the Raft log under the lock.
enum IndexLookup<T> {
    Slots(Vec<T>),
    Sealed(Arc<Segment>, u64),
}

impl Shared {
    /// Reads entries with payloads.
    pub(crate) fn read_entries(
        &self,
        range: Range<u64>,
        bytes_max: usize,
        mode: ReadMode,
    ) -> Result<Vec<Entry>, ReadStop> {
        let mut budget =
            ReadBudget::new(bytes_max, self.readahead.bytes_ahead(None, range.start, mode));
        let found = self.find_range(range.clone(), |log, slot| {
            let wanted = budget.take(slot.head.len() + slot.payload_len, true);
            wanted.then(|| Some((slot.id.index, source(log, slot)?)))?
        })?;
        let mut sources = match found {
            IndexLookup::Slots(sources) => sources,
            IndexLookup::Sealed(segment, end) => {
                let wanted = self.sealed_range(&segment, range.start, mode, |wanted| {
                    budget.take(wanted.len as usize, wanted.index < end)
                })?;
                wanted.into_iter().map(|wanted| (wanted.index, EntrySource::Disk(wanted))).collect()
            }
        };
        let ahead = sources.split_off(budget.now.min(sources.len()));
        let found = load_entries(sources, &ahead, mode)?;
        if let Some((last, _)) = found.last() {
            let upto = ahead.last().map_or(last + 1, |(index, _)| index + 1);
            self.readahead.record(None, last + 1..upto, mode);
        }
        Ok(found.into_iter().map(|(_, entry)| entry).collect())
    }

    /// Reads entries without payloads.
    pub(crate) fn read_heads(
        &self,
        range: Range<u64>,
        entries_max: usize,
        mode: ReadMode,
    ) -> Result<Vec<Entry>, ReadStop> {
        let mut left = entries_max.clamp(1, ENTRIES_PER_LOCK);
        let mut take = || {
            left = left.saturating_sub(1);
            left > 0
        };
        let mut more = true;
        let found = self.find_range(range.clone(), |_, slot| {
            std::mem::replace(&mut more, take()).then(|| slot.head_entry())
        })?;
        match found {
            IndexLookup::Slots(entries) => Ok(entries),
            IndexLookup::Sealed(segment, end) => {
                let wanted = self.sealed_range(&segment, range.start, mode, |wanted| {
                    wanted.index < end && std::mem::replace(&mut more, take())
                })?;
                load_heads(&wanted, mode)
            }
        }
    }

    /// Looks up a range: in the slots while `take` accepts, or in the sealed segment at its start.
    fn find_range<T>(
        &self,
        range: Range<u64>,
        mut take: impl FnMut(&Log, &Slot) -> Option<T>,
    ) -> Result<IndexLookup<T>, ReadStop> {
        let core = self.lock();
        let log = &core.log;
        if range.start < log.first() && !range.is_empty() {
            return Err(Error::Trimmed { asked: range.start, first: log.first() }.into());
        }
        let end = range.end.min(log.end());
        if range.start >= end {
            return Ok(IndexLookup::Slots(Vec::new()));
        }
        let Some(at) = log.find_from(range.start) else {
            let segment = log.sealed_from(range.start).ok_or_else(|| {
                let index = range.start;
                Error::Unusable(format!("entry {index} is in no segment"))
            })?;
            return Ok(IndexLookup::Sealed(segment, end));
        };
        let slots = log.slots.range(at..).take(ENTRIES_PER_LOCK);
        let wanted = slots.take_while(|slot| slot.id.index < end);
        Ok(IndexLookup::Slots(wanted.map_while(|slot| take(log, slot)).collect()))
    }

    /// Returns the frames of a sealed segment from an index on, while `take` accepts.
    fn sealed_range(
        &self,
        segment: &Arc<Segment>,
        start: u64,
        mode: ReadMode,
        mut take: impl FnMut(&FrameRef) -> bool,
    ) -> Result<Vec<FrameRef>, ReadStop> {
        let mut rows = segment.by_index(&self.cache, mode);
        let mut found = Vec::new();
        let start = rows.find(start)?;
        for number in start..rows.len() {
            let row = match rows.get(number) {
                Ok(row) => row,
                // The entries found so far are a valid result.
                Err(_) if !found.is_empty() => break,
                Err(stop) => return Err(stop),
            };
            let wanted = FrameRef::of_index(&row, segment);
            if !take(&wanted) {
                break;
            }
            found.push(wanted);
        }
        Ok(found)
    }

    pub(crate) fn read_log_id(
        &self,
        index: u64,
        mode: ReadMode,
    ) -> Result<Option<LogId>, ReadStop> {
        let segment = {
            let core = self.lock();
            let log = &core.log;
            if let Some(purged) = log.purged.filter(|purged| purged.index >= index) {
                return Ok((purged.index == index).then_some(purged));
            }
            if let Some(slot) = log.slot(index) {
                return Ok(Some(slot.id));
            }
            if index >= log.end() {
                return Ok(None);
            }
            log.sealed_segment(index)
        };
        let Some(segment) = segment else { return Ok(None) };
        let mut rows = segment.by_index(&self.cache, mode);
        let number = rows.find(index)?;
        if number >= rows.len() {
            return Ok(None);
        }
        let row = rows.get(number)?;
        Ok((row.id.index == index).then_some(row.id))
    }

    /// Returns whether the footer of a sealed segment agrees with a placement of the state machine.
    pub(crate) fn sealed_agrees(
        &self,
        segment: &Segment,
        index: u64,
        placement: Option<Placement>,
    ) -> Result<bool, ReadStop> {
        let mut rows = segment.by_index(&self.cache, ReadMode::Blocking);
        let number = rows.find(index)?;
        let row = rows.get(number)?;
        if row.id.index != index {
            return Ok(false);
        }
        let (Some(number), Some(placement)) = (row.stream_row, placement) else {
            return Ok(row.stream_row.is_some() == placement.is_some());
        };
        let row = segment.by_stream(&self.cache, ReadMode::Blocking).get(number)?;
        let same = (row.index, row.first, row.count, row.time)
            == (index, placement.first, placement.count, placement.time);
        Ok(same && self.is_row_of(segment.id, &placement, number))
    }

    /// Returns whether a stream table row belongs to the stream, as far as it is known.
    fn is_row_of(&self, segment: u64, placement: &Placement, number: u32) -> bool {
        let core = self.lock();
        let Some(stream) = core.log.streams.get(&placement.stream) else { return false };
        let share = stream.row_of(segment, placement.first);
        let trimmed = stream.dropped || stream.trim > 0;
        share.map_or(trimmed, |share| (share.begin..share.begin + share.entries).contains(&number))
    }

    /// Reads entries of a stream.
    pub(crate) fn read_positions(
        &self,
        stream: u64,
        range: Range<u64>,
        bytes_max: usize,
        mode: ReadMode,
    ) -> Result<Vec<StoredEntry>, ReadStop> {
        let ahead = self.readahead.bytes_ahead(Some(stream), range.start, mode);
        let mut budget = ReadBudget::new(bytes_max, ahead);
        let shares = match self.find_positions(stream, &range, &mut budget)? {
            PositionLookup::Memory(found) => return self.load_placed(stream, found, &budget, mode),
            PositionLookup::Sealed(shares) => shares,
        };
        let mut found = Vec::new();
        for share in &shares {
            match self.share_sources(stream, &range, share, &mut budget, &mut found, mode) {
                Ok(true) => {}
                Ok(false) => break,
                // The entries found so far are a valid result.
                Err(_) if !found.is_empty() => break,
                Err(stop) => return Err(stop),
            }
        }
        self.load_placed(stream, found, &budget, mode)
    }

    /// Adds the entries of a share in a range. Returns whether budget is left.
    fn share_sources(
        &self,
        stream: u64,
        range: &Range<u64>,
        share: &ShareRows,
        budget: &mut ReadBudget,
        found: &mut Vec<(Placement, EntrySource)>,
        mode: ReadMode,
    ) -> Result<bool, ReadStop> {
        let ShareRows { segment, rows, first } = share;
        let from = range.start.max(*first);
        let mut table = segment.by_stream(&self.cache, mode);
        let start =
            table.partition_point(rows.clone(), |row| row.first + u64::from(row.count) <= from)?;
        for number in start..rows.end {
            let row = table.get(number)?;
            if !budget.take(row.frame_len as usize, row.first < range.end) {
                return Ok(false);
            }
            let wanted = FrameRef::of_row(&row, segment);
            let placement =
                Placement { stream, first: row.first, count: row.count, time: row.time };
            found.push((placement, EntrySource::Disk(wanted)));
        }
        Ok(true)
    }

    /// Loads the entries for a reader of a stream, and records where it will continue.
    fn load_placed(
        &self,
        stream: u64,
        mut sources: Vec<(Placement, EntrySource)>,
        budget: &ReadBudget,
        mode: ReadMode,
    ) -> Result<Vec<StoredEntry>, ReadStop> {
        let ahead = sources.split_off(budget.now.min(sources.len()));
        let found = load_entries(sources, &ahead, mode)?;
        let next = |placement: &Placement| placement.first + u64::from(placement.count);
        if let Some((last, _)) = found.last() {
            let upto = ahead.last().map_or(next(last), |(placement, _)| next(placement));
            self.readahead.record(Some(stream), next(last)..upto, mode);
        }
        let stored = |(placement, entry)| {
            let Entry { id, head, payload, .. } = entry;
            StoredEntry { id, placement, head, payload }
        };
        Ok(found.into_iter().map(stored).collect())
    }

    /// Looks up positions: in the slots, or else in the shares of sealed segments.
    fn find_positions(
        &self,
        stream: u64,
        range: &Range<u64>,
        budget: &mut ReadBudget,
    ) -> Result<PositionLookup, ReadStop> {
        let core = self.lock();
        let log = &core.log;
        let none = Stream::default();
        let held = log.streams.get(&stream).unwrap_or(&none);
        if !held.dropped && range.start >= held.trim && !range.is_empty() {
            let (row, first) = held.from(range.start);
            if let Some(damage) = log.quarantined_before(held, range.start, row, first) {
                return Err(damage.clone().into());
            }
        }
        let first = held.first().map_or(held.trim, |first| first.max(held.trim));
        if held.dropped {
            return Err(Error::Trimmed { asked: range.start, first: held.next() }.into());
        }
        if range.start < first {
            return Err(Error::Trimmed { asked: range.start, first }.into());
        }
        if range.is_empty() {
            return Ok(PositionLookup::Memory(Vec::new()));
        }
        if !log.memory
            && let Some(row) = held.sealed_row(range.start)
        {
            return Ok(PositionLookup::Sealed(shares(log, held, row, range.end, budget)));
        }
        let start = held.refs.partition_point(|r| r.next() <= range.start);
        let refs = held.refs.range(start..).take(ENTRIES_PER_LOCK);
        let mut found = Vec::new();
        let mut next = None;
        for r in refs {
            // The positions of a gap in memory may be in a cold segment.
            if next.is_some_and(|next| next < r.first && held.has_row_in(next..r.first)) {
                break;
            }
            next = Some(r.next());
            let Some(slot) = log.slot(r.index) else { break };
            if !budget.take(slot.head.len() + slot.payload_len, r.first < range.end) {
                break;
            }
            let Some(source) = source(log, slot) else { break };
            let placement = Placement { stream, first: r.first, count: r.count, time: r.time };
            found.push((placement, source));
        }
        Ok(PositionLookup::Memory(found))
    }

    pub(crate) fn find_time(
        &self,
        stream: u64,
        time: u64,
        mode: ReadMode,
    ) -> Result<Option<u64>, ReadStop> {
        let (segment, rows, trim) = {
            let core = self.lock();
            let log = &core.log;
            let none = Stream::default();
            let held = log.streams.get(&stream).unwrap_or(&none);
            if held.dropped {
                return Ok(None);
            }
            // A trimmed row stays until its segment is sealed.
            let over = |row: &StreamShare| row.row.last_time < time || row.row.next <= held.trim;
            let at = held.rows.partition_point(over);
            // Earlier entries of that time may be in a quarantined segment.
            let known = at.checked_sub(1).and_then(|at| held.rows.get(at)).map(|row| row.row.next);
            let known = known.unwrap_or(0).max(held.trim);
            let row = held.rows.get(at).map(|row| row.row.first);
            let r = held.refs.get(held.refs.partition_point(|r| r.time < time)).map(|r| r.first);
            let first = row.into_iter().chain(r).min();
            if let Some(damage) = log.quarantined_before(held, known, at, first) {
                return Err(damage.clone().into());
            }
            // Times do not decrease. The wanted entry lies between the last entry in memory that is
            // too early and the first that is not, in memory or in a row.
            let late = held.refs.partition_point(|r| r.time < time);
            let early =
                late.checked_sub(1).and_then(|at| held.refs.get(at)).map_or(0, EntryRef::next);
            let late = held.refs.get(late).map(|r| r.first);
            let before_memory = |row: &&StreamShare| {
                let first = row.row.first.max(held.trim).max(early);
                first < row.row.next && late.is_none_or(|late| first < late)
            };
            let row = held.rows.get(at).filter(|row| row.row.sealed).filter(before_memory);
            let segment = row.and_then(|row| log.segment(row.row.segment)?.segment.clone());
            let (Some(row), Some(segment)) = (row, segment) else {
                return Ok(late.map(|first| first.max(held.trim)));
            };
            (segment, row.begin..row.begin + row.entries, held.trim)
        };
        let mut table = segment.by_stream(&self.cache, mode);
        let before = |row: &PlacedRow| row.time < time || row.first + u64::from(row.count) <= trim;
        let at = table.partition_point(rows.clone(), before)?;
        if at >= rows.end {
            return Ok(None);
        }
        Ok(Some(table.get(at)?.first.max(trim)))
    }
}

/// Returns a stream's consecutive shares on disk from a row on, as far as the budget allows.
///
/// The entries of the later shares are not in memory.
fn shares(log: &Log, held: &Stream, row: usize, end: u64, budget: &ReadBudget) -> Vec<ShareRows> {
    let mut shares = Vec::new();
    let (mut bytes, mut next) = (0, None);
    let memory = held
        .refs
        .partition_point(|r| held.rows.get(row).is_some_and(|row| r.next() <= row.row.first));
    let memory = held.refs.get(memory).map_or(u64::MAX, |r| r.first);
    for StreamShare { row, begin, entries, .. } in held.rows.range(row..).take(SHARES_PER_READ) {
        let follows = next.is_none_or(|next| row.first == next && row.first < memory);
        if !row.sealed || !follows || row.first >= end || bytes > budget.bytes() {
            break;
        }
        let Some(segment) = log.segment(row.segment).and_then(|held| held.segment.clone()) else {
            break;
        };
        shares.push(ShareRows { segment, rows: *begin..begin + entries, first: row.first });
        bytes += row.bytes;
        next = Some(row.next);
    }
    shares
}

/// Returns the source of a slot's entry; `None` if its payload is gone.
pub(crate) fn source(log: &Log, slot: &Slot) -> Option<EntrySource> {
    if let Some(payload) = &slot.payload {
        let mut entry = slot.head_entry();
        entry.payload.bytes = payload.clone();
        return Some(EntrySource::Memory(entry));
    }
    let segment = log.chain.get(&slot.segment)?.segment.clone()?;
    Some(EntrySource::Disk(FrameRef::of_slot(slot, segment)))
}
