//! Reading entries: what to read is decided here, under the lock; the disk is read outside it
//! (`load.rs`), and every byte that comes from a disk is checked.

use std::ops::Range;
use std::sync::Arc;

use crate::footer::PlacedRow;
use crate::load::{Source, Wanted, load, load_heads};
use crate::log::Log;
use crate::segment::{Segment, Stop};
use crate::shared::Shared;
use crate::slot::Slot;
use crate::streams::{Ref, Row, Stream};
use crate::{Entry, Error, How, LogId, Placement, StoredEntry};

/// Most entries looked up under one hold of the lock.
const ENTRIES_AT_ONCE: usize = 4096;
/// Most shares of a stream that one call reads from.
const SHARES_AT_ONCE: usize = 64;

/// How much one call may return, and how much after it is made ready for the call to come. The
/// first entry always fits.
struct Budget {
    left: usize,
    ahead: usize,
    /// Entries that this call returns.
    now: usize,
    is_spent: bool,
}

impl Budget {
    fn new(max: usize, ahead: usize) -> Self {
        Self { left: max, ahead, now: 0, is_spent: false }
    }

    /// About how much is still fetched.
    fn bytes(&self) -> u64 {
        (self.left as u64).saturating_add(self.ahead as u64)
    }

    /// Whether an entry is fetched; `asked` if it was asked for.
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

/// Rows of a sealed segment's table by stream that may hold what is asked for.
struct Share {
    segment: Arc<Segment>,
    rows: Range<u32>,
}

/// What the lock had to say about a range of positions.
enum Positions {
    Memory(Vec<(Placement, Source)>),
    /// On disk: in these, which follow each other.
    Sealed(Vec<Share>),
}

/// What the lock had to say about a range of the Raft log.
enum Found<T> {
    Slots(Vec<T>),
    Sealed(Arc<Segment>, u64),
}

impl Shared {
    /// Entries with payloads.
    pub(crate) fn read_entries(
        &self,
        range: Range<u64>,
        bytes_max: usize,
        how: How,
    ) -> Result<Vec<Entry>, Stop> {
        let mut budget = Budget::new(bytes_max, self.readers.ahead(None, range.start, how));
        let found = self.find_range(range.clone(), |log, slot| {
            let wanted = budget.take(slot.head.len() + slot.payload_len, true);
            wanted.then(|| Some((slot.id.index, source(log, slot)?)))?
        })?;
        let mut sources = match found {
            Found::Slots(sources) => sources,
            Found::Sealed(segment, end) => {
                let wanted = self.sealed_range(&segment, range.start, how, |wanted| {
                    budget.take(wanted.len as usize, wanted.index < end)
                })?;
                wanted.into_iter().map(|wanted| (wanted.index, Source::Disk(wanted))).collect()
            }
        };
        let ahead = sources.split_off(budget.now.min(sources.len()));
        let found = load(sources, &ahead, how)?;
        if let Some((last, _)) = found.last() {
            let upto = ahead.last().map_or(last + 1, |(index, _)| index + 1);
            self.readers.note(None, last + 1..upto, how);
        }
        Ok(found.into_iter().map(|(_, entry)| entry).collect())
    }

    /// Entries without payloads.
    pub(crate) fn read_heads(
        &self,
        range: Range<u64>,
        entries_max: usize,
        how: How,
    ) -> Result<Vec<Entry>, Stop> {
        let mut left = entries_max.clamp(1, ENTRIES_AT_ONCE);
        let mut take = || {
            left = left.saturating_sub(1);
            left > 0
        };
        let mut more = true;
        let found = self.find_range(range.clone(), |_, slot| {
            std::mem::replace(&mut more, take()).then(|| slot.head_entry())
        })?;
        match found {
            Found::Slots(entries) => Ok(entries),
            Found::Sealed(segment, end) => {
                let wanted = self.sealed_range(&segment, range.start, how, |wanted| {
                    wanted.index < end && std::mem::replace(&mut more, take())
                })?;
                load_heads(&wanted, how)
            }
        }
    }

    /// Looks a range up: in the slots from its start on while `take` wants more, or in the sealed
    /// segment that holds its start.
    fn find_range<T>(
        &self,
        range: Range<u64>,
        mut take: impl FnMut(&Log, &Slot) -> Option<T>,
    ) -> Result<Found<T>, Stop> {
        let core = self.lock();
        let log = &core.log;
        if range.start < log.first() && !range.is_empty() {
            return Err(Error::Trimmed { asked: range.start, first: log.first() }.into());
        }
        let end = range.end.min(log.end());
        if range.start >= end {
            return Ok(Found::Slots(Vec::new()));
        }
        let Some(at) = log.find_from(range.start) else {
            let segment = log.sealed_from(range.start).ok_or_else(|| {
                let index = range.start;
                Error::Unusable(format!("entry {index} is in no segment"))
            })?;
            return Ok(Found::Sealed(segment, end));
        };
        let slots = log.slots.range(at..).take(ENTRIES_AT_ONCE);
        let wanted = slots.take_while(|slot| slot.id.index < end);
        Ok(Found::Slots(wanted.map_while(|slot| take(log, slot)).collect()))
    }

    /// The frames of a sealed segment from an index on, while `take` wants more.
    fn sealed_range(
        &self,
        segment: &Arc<Segment>,
        start: u64,
        how: How,
        mut take: impl FnMut(&Wanted) -> bool,
    ) -> Result<Vec<Wanted>, Stop> {
        let mut rows = segment.by_index(&self.cache, how);
        let mut found = Vec::new();
        let start = rows.find(start)?;
        for number in start..rows.len() {
            let row = match rows.get(number) {
                Ok(row) => row,
                // What was found so far is an answer too.
                Err(_) if !found.is_empty() => break,
                Err(stop) => return Err(stop),
            };
            let wanted = Wanted::of_index(&row, segment);
            if !take(&wanted) {
                break;
            }
            found.push(wanted);
        }
        Ok(found)
    }

    pub(crate) fn read_log_id(&self, index: u64, how: How) -> Result<Option<LogId>, Stop> {
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
        let mut rows = segment.by_index(&self.cache, how);
        let number = rows.find(index)?;
        if number >= rows.len() {
            return Ok(None);
        }
        let row = rows.get(number)?;
        Ok((row.id.index == index).then_some(row.id))
    }

    /// Whether the footer of a sealed segment says the same of an entry as the state machine.
    pub(crate) fn sealed_agrees(
        &self,
        segment: &Segment,
        index: u64,
        placement: Option<Placement>,
    ) -> Result<bool, Stop> {
        let mut rows = segment.by_index(&self.cache, How::Blocking);
        let number = rows.find(index)?;
        let row = rows.get(number)?;
        if row.id.index != index {
            return Ok(false);
        }
        let (Some(number), Some(placement)) = (row.stream_row, placement) else {
            return Ok(row.stream_row.is_some() == placement.is_some());
        };
        let row = segment.by_stream(&self.cache, How::Blocking).get(number)?;
        let same = (row.index, row.first, row.count, row.time)
            == (index, placement.first, placement.count, placement.time);
        Ok(same && self.is_row_of(segment.id, &placement, number))
    }

    /// Whether a row of a segment's table by stream is the stream's, as far as is still known.
    fn is_row_of(&self, segment: u64, placement: &Placement, number: u32) -> bool {
        let core = self.lock();
        let Some(stream) = core.log.streams.get(&placement.stream) else { return false };
        let share = stream.row_of(segment, placement.first);
        let trimmed = stream.dropped || stream.trim > 0;
        share.map_or(trimmed, |share| (share.begin..share.begin + share.entries).contains(&number))
    }

    /// Entries of a stream.
    pub(crate) fn read_positions(
        &self,
        stream: u64,
        range: Range<u64>,
        bytes_max: usize,
        how: How,
    ) -> Result<Vec<StoredEntry>, Stop> {
        let ahead = self.readers.ahead(Some(stream), range.start, how);
        let mut budget = Budget::new(bytes_max, ahead);
        let shares = match self.find_positions(stream, &range, &mut budget)? {
            Positions::Memory(found) => return self.load_placed(stream, found, &budget, how),
            Positions::Sealed(shares) => shares,
        };
        let mut found = Vec::new();
        for share in &shares {
            match self.share_sources(stream, &range, share, &mut budget, &mut found, how) {
                Ok(true) => {}
                Ok(false) => break,
                // What was found so far is an answer too.
                Err(_) if !found.is_empty() => break,
                Err(stop) => return Err(stop),
            }
        }
        self.load_placed(stream, found, &budget, how)
    }

    /// Adds a share's entries of a range, while the budget lasts; whether it still does.
    fn share_sources(
        &self,
        stream: u64,
        range: &Range<u64>,
        share: &Share,
        budget: &mut Budget,
        found: &mut Vec<(Placement, Source)>,
        how: How,
    ) -> Result<bool, Stop> {
        let Share { segment, rows } = share;
        let mut table = segment.by_stream(&self.cache, how);
        let start = table
            .partition_point(rows.clone(), |row| row.first + u64::from(row.count) <= range.start)?;
        for number in start..rows.end {
            let row = table.get(number)?;
            if !budget.take(row.frame_len as usize, row.first < range.end) {
                return Ok(false);
            }
            let wanted = Wanted::of_row(&row, segment);
            let placement =
                Placement { stream, first: row.first, count: row.count, time: row.time };
            found.push((placement, Source::Disk(wanted)));
        }
        Ok(true)
    }

    /// Fetches what a reader of a stream gets, and remembers where it will go on.
    fn load_placed(
        &self,
        stream: u64,
        mut sources: Vec<(Placement, Source)>,
        budget: &Budget,
        how: How,
    ) -> Result<Vec<StoredEntry>, Stop> {
        let ahead = sources.split_off(budget.now.min(sources.len()));
        let found = load(sources, &ahead, how)?;
        let next = |placement: &Placement| placement.first + u64::from(placement.count);
        if let Some((last, _)) = found.last() {
            let upto = ahead.last().map_or(next(last), |(placement, _)| next(placement));
            self.readers.note(Some(stream), next(last)..upto, how);
        }
        let stored = |(placement, entry)| {
            let Entry { id, head, payload, .. } = entry;
            StoredEntry { id, placement, head, payload }
        };
        Ok(found.into_iter().map(stored).collect())
    }

    /// Looks positions up: in the slots, or else which rows of which sealed segment hold them.
    fn find_positions(
        &self,
        stream: u64,
        range: &Range<u64>,
        budget: &mut Budget,
    ) -> Result<Positions, Stop> {
        let core = self.lock();
        let log = &core.log;
        let none = Stream::default();
        let held = log.streams.get(&stream).unwrap_or(&none);
        if !held.dropped && range.start >= held.trim && !range.is_empty() {
            let (row, first) = held.from(range.start);
            if let Some(damage) = log.withheld_before(held, range.start, row, first) {
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
            return Ok(Positions::Memory(Vec::new()));
        }
        if !log.memory
            && let Some(row) = held.sealed_row(range.start)
        {
            return Ok(Positions::Sealed(shares(log, held, row, range.end, budget)));
        }
        let start = held.refs.partition_point(|r| r.next() <= range.start);
        let refs = held.refs.range(start..).take(ENTRIES_AT_ONCE);
        let mut found = Vec::new();
        let mut next = None;
        for r in refs {
            // What a gap in memory leaves out may be in a cold segment.
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
        Ok(Positions::Memory(found))
    }

    pub(crate) fn find_time(&self, stream: u64, time: u64, how: How) -> Result<Option<u64>, Stop> {
        let (segment, rows, trim) = {
            let core = self.lock();
            let log = &core.log;
            let none = Stream::default();
            let held = log.streams.get(&stream).unwrap_or(&none);
            if held.dropped {
                return Ok(None);
            }
            // A trimmed row stays while its segment is not sealed.
            let over = |row: &Row| row.row.last_time < time || row.row.next <= held.trim;
            let at = held.rows.partition_point(over);
            // Earlier ones of that time may be where nobody can look.
            let known = at.checked_sub(1).and_then(|at| held.rows.get(at)).map(|row| row.row.next);
            let known = known.unwrap_or(0).max(held.trim);
            let row = held.rows.get(at).map(|row| row.row.first);
            let r = held.refs.get(held.refs.partition_point(|r| r.time < time)).map(|r| r.first);
            let first = row.into_iter().chain(r).min();
            if let Some(damage) = log.withheld_before(held, known, at, first) {
                return Err(damage.clone().into());
            }
            // Times do not decrease: what is wanted lies between the entries in memory that are too
            // early and the first that is not, there or in a row.
            let late = held.refs.partition_point(|r| r.time < time);
            let early = late.checked_sub(1).and_then(|at| held.refs.get(at)).map_or(0, Ref::next);
            let late = held.refs.get(late).map(|r| r.first);
            let before_memory = |row: &&Row| {
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
        let mut table = segment.by_stream(&self.cache, how);
        let before = |row: &PlacedRow| row.time < time || row.first + u64::from(row.count) <= trim;
        let at = table.partition_point(rows.clone(), before)?;
        if at >= rows.end {
            return Ok(None);
        }
        Ok(Some(table.get(at)?.first.max(trim)))
    }
}

/// A stream's shares on disk from a row on, as far as the budget goes: they follow each other
/// without a gap, and the entries of the later ones are not in memory.
fn shares(log: &Log, held: &Stream, row: usize, end: u64, budget: &Budget) -> Vec<Share> {
    let mut shares = Vec::new();
    let (mut bytes, mut next) = (0, None);
    let memory = held
        .refs
        .partition_point(|r| held.rows.get(row).is_some_and(|row| r.next() <= row.row.first));
    let memory = held.refs.get(memory).map_or(u64::MAX, |r| r.first);
    for Row { row, begin, entries, .. } in held.rows.range(row..).take(SHARES_AT_ONCE) {
        let follows = next.is_none_or(|next| row.first == next && row.first < memory);
        if !row.sealed || !follows || row.first >= end || bytes > budget.bytes() {
            break;
        }
        let Some(segment) = log.segment(row.segment).and_then(|held| held.segment.clone()) else {
            break;
        };
        shares.push(Share { segment, rows: *begin..begin + entries });
        bytes += row.bytes;
        next = Some(row.next);
    }
    shares
}

/// Where to get a slot's entry; `None` if its payload is gone for good.
pub(crate) fn source(log: &Log, slot: &Slot) -> Option<Source> {
    if let Some(payload) = &slot.payload {
        let mut entry = slot.head_entry();
        entry.payload.bytes = payload.clone();
        return Some(Source::Memory(entry));
    }
    let segment = log.held.get(&slot.segment)?.segment.clone()?;
    Some(Source::Disk(Wanted::of_slot(slot, segment)))
}
