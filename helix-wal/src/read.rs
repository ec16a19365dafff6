//! Reading entries: what to read is decided under the lock, the disk is read outside it, and
//! every byte that comes from a disk is checked.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::footer::PlacedRow;
use crate::frame::{FrameHeader, Kind, Position};
use crate::log::{Log, Slot};
use crate::segment::{Segment, Stop};
use crate::shared::Shared;
use crate::streams::Row;
use crate::{Entry, Error, How, LogId, Payload, Placement, StoredEntry};

/// Frames that are at most so far apart are read at once.
const GAP_BYTES_MAX: u64 = 64 << 10;
/// Most bytes of one read, unless a single frame is larger.
const READ_BYTES_MAX: u64 = 1 << 20;
/// Payloads larger than this are skipped, not read, where only heads are wanted.
const SKIPPED_BYTES_MIN: u64 = 64 << 10;
/// Of a frame whose payload is skipped so much is read at first.
const PREFIX_BYTES: u64 = 4 << 10;
/// Most entries looked up under one hold of the lock.
const ENTRIES_AT_ONCE: usize = 4096;

/// Where an entry's frame stands, and whose it must be.
#[derive(Debug, Clone)]
struct Wanted {
    segment: Arc<Segment>,
    offset: u64,
    len: u64,
    index: u64,
    term: Option<u64>,
    stream: Option<u64>,
}

impl Wanted {
    fn of_slot(slot: &Slot, segment: Arc<Segment>) -> Self {
        Self {
            segment,
            offset: u64::from(slot.offset),
            len: u64::from(slot.frame_len),
            index: slot.id.index,
            term: Some(slot.id.term),
            stream: Some(slot.stream),
        }
    }

    fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len
    }

    fn damaged(&self, what: &str) -> Stop {
        self.segment.damaged(self.range(), what).into()
    }

    /// The frame's header from bytes that start with it and hold at least its head.
    fn header(&self, bytes: &[u8]) -> Result<FrameHeader, Stop> {
        let place = Position { segment: self.segment.id, at: self.offset };
        let header = FrameHeader::parse(bytes, place)
            .ok_or_else(|| self.damaged("a frame's header does not verify"))?;
        let fits = header.kind == Kind::Entry
            && header.len() as u64 == self.len
            && header.id.index == self.index
            && self.term.is_none_or(|term| term == header.id.term)
            && self.stream.is_none_or(|stream| stream == header.stream);
        if fits { Ok(header) } else { Err(self.damaged("a frame is not the one expected here")) }
    }
}

/// An entry that a reader will get: as it is in memory, or from its place on disk.
enum Source {
    Memory(Entry),
    Disk(Wanted),
}

/// How much one call may return. The first entry always fits.
struct Budget {
    left: usize,
    first: bool,
}

impl Budget {
    fn new(max: usize) -> Self {
        Self { left: max, first: true }
    }

    fn take(&mut self, size: usize) -> bool {
        let fits = self.first || size <= self.left;
        self.first = false;
        self.left = self.left.saturating_sub(size);
        fits
    }
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
        let mut budget = Budget::new(bytes_max);
        let found = self.find_range(range.clone(), |log, slot| {
            budget.take(slot.head.len() + slot.payload_len).then(|| source(log, slot))?
        })?;
        let sources = match found {
            Found::Slots(sources) => sources,
            Found::Sealed(segment, end) => {
                let wanted = self.sealed_range(&segment, range.start..end, how, |wanted| {
                    budget.take(wanted.len as usize)
                })?;
                wanted.into_iter().map(Source::Disk).collect()
            }
        };
        let sources = sources.into_iter().map(|source| ((), source)).collect();
        Ok(load(sources, how)?.into_iter().map(|((), entry)| entry).collect())
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
                let wanted = self.sealed_range(&segment, range.start..end, how, |_| {
                    std::mem::replace(&mut more, take())
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

    /// The frames of an index range of a sealed segment, while `take` wants more.
    fn sealed_range(
        &self,
        segment: &Arc<Segment>,
        range: Range<u64>,
        how: How,
        mut take: impl FnMut(&Wanted) -> bool,
    ) -> Result<Vec<Wanted>, Stop> {
        let mut rows = segment.by_index(&self.cache, how);
        let mut found = Vec::new();
        let start = rows.find(range.start)?;
        for number in start..rows.len() {
            let row = match rows.get(number) {
                Ok(row) => row,
                // What was found so far is an answer too.
                Err(_) if !found.is_empty() => break,
                Err(stop) => return Err(stop),
            };
            let wanted = Wanted {
                segment: Arc::clone(segment),
                offset: u64::from(row.offset),
                len: u64::from(row.frame_len),
                index: row.id.index,
                term: Some(row.id.term),
                stream: None,
            };
            if row.id.index >= range.end || !take(&wanted) {
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
        Ok(same && self.is_row_of(segment.id, placement.stream, number))
    }

    /// Whether a row of a segment's table by stream is the stream's, as far as is still known.
    fn is_row_of(&self, segment: u64, stream: u64, number: u32) -> bool {
        let core = self.lock();
        let Some(stream) = core.log.streams.get(&stream) else { return false };
        let at = stream.rows.binary_search_by_key(&segment, |row| row.row.segment);
        let share = at.ok().and_then(|at| stream.rows.get(at));
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
        let mut budget = Budget::new(bytes_max);
        let (sealed, sources) = self.find_positions(stream, &range, &mut budget)?;
        let Some((segment, rows)) = sealed else {
            return load_placed(sources, how);
        };
        let mut table = segment.by_stream(&self.cache, how);
        let start = table
            .partition_point(rows.clone(), |row| row.first + u64::from(row.count) <= range.start)?;
        let mut found = Vec::new();
        for number in start..rows.end {
            let row = match table.get(number) {
                Ok(row) => row,
                Err(_) if !found.is_empty() => break,
                Err(stop) => return Err(stop),
            };
            if row.first >= range.end || !budget.take(row.frame_len as usize) {
                break;
            }
            let wanted = Wanted {
                segment: Arc::clone(&segment),
                offset: u64::from(row.offset),
                len: u64::from(row.frame_len),
                index: row.index,
                term: None,
                stream: None,
            };
            let placement =
                Placement { stream, first: row.first, count: row.count, time: row.time };
            found.push((placement, Source::Disk(wanted)));
        }
        load_placed(found, how)
    }

    /// Looks positions up: in the slots, or else which rows of which sealed segment hold them.
    #[allow(clippy::type_complexity)]
    fn find_positions(
        &self,
        stream: u64,
        range: &Range<u64>,
        budget: &mut Budget,
    ) -> Result<(Option<(Arc<Segment>, Range<u32>)>, Vec<(Placement, Source)>), Stop> {
        let core = self.lock();
        let log = &core.log;
        let Some(held) = log.streams.get(&stream) else { return Ok((None, Vec::new())) };
        let first = held.first().map_or(held.trim, |first| first.max(held.trim));
        if held.dropped {
            return Err(Error::Trimmed { asked: range.start, first: held.next() }.into());
        }
        if range.start < first {
            return Err(Error::Trimmed { asked: range.start, first }.into());
        }
        if range.is_empty() {
            return Ok((None, Vec::new()));
        }
        if let Some(row) = held.sealed_row(range.start) {
            if row.row.first >= range.end {
                return Ok((None, Vec::new()));
            }
            let segment = log.held.get(&row.row.segment).and_then(|held| held.segment.clone());
            return Ok((segment.map(|s| (s, row.begin..row.begin + row.entries)), Vec::new()));
        }
        let start = held.refs.partition_point(|r| r.next() <= range.start);
        let refs = held.refs.range(start..).take(ENTRIES_AT_ONCE);
        let mut found = Vec::new();
        for r in refs.take_while(|r| r.first < range.end) {
            let Some(slot) = log.slot(r.index) else { break };
            if !budget.take(slot.head.len() + slot.payload_len) {
                break;
            }
            let Some(source) = source(log, slot) else { break };
            let placement = Placement { stream, first: r.first, count: r.count, time: r.time };
            found.push((placement, source));
        }
        Ok((None, found))
    }

    pub(crate) fn find_time(&self, stream: u64, time: u64, how: How) -> Result<Option<u64>, Stop> {
        let (segment, rows, trim) = {
            let core = self.lock();
            let log = &core.log;
            let Some(held) = log.streams.get(&stream).filter(|s| !s.dropped) else {
                return Ok(None);
            };
            let at = held.rows.partition_point(|row| row.row.last_time < time);
            // Times do not decrease, so where the entries in memory begin later they come later.
            let before_memory = |row: &&Row| {
                let first = row.row.first.max(held.trim);
                held.refs.front().is_none_or(|r| r.time >= time && first < r.first)
            };
            let row = held.rows.get(at).filter(|row| row.row.sealed).filter(before_memory);
            let segment = row.and_then(|row| log.held.get(&row.row.segment)?.segment.clone());
            let (Some(row), Some(segment)) = (row, segment) else {
                let at = held.refs.partition_point(|r| r.time < time);
                return Ok(held.refs.get(at).map(|r| r.first.max(held.trim)));
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

/// Where to get a slot's entry; `None` if its payload is gone for good.
fn source(log: &Log, slot: &Slot) -> Option<Source> {
    if let Some(payload) = &slot.payload {
        let mut entry = slot.head_entry();
        entry.payload.bytes = payload.clone();
        return Some(Source::Memory(entry));
    }
    let segment = log.held.get(&slot.segment)?.segment.clone()?;
    Some(Source::Disk(Wanted::of_slot(slot, segment)))
}

fn load_placed(sources: Vec<(Placement, Source)>, how: How) -> Result<Vec<StoredEntry>, Stop> {
    let stored =
        |(placement, Entry { id, head, payload, .. })| StoredEntry { id, placement, head, payload };
    Ok(load(sources, how)?.into_iter().map(stored).collect())
}

/// Fetches what is on disk. Fails only if not even the first entry can be had.
fn load<T>(sources: Vec<(T, Source)>, how: How) -> Result<Vec<(T, Entry)>, Stop> {
    let mut found = Vec::with_capacity(sources.len());
    let mut sources = sources.into_iter().peekable();
    while let Some((tag, source)) = sources.next() {
        let first = match source {
            Source::Memory(entry) => {
                found.push((tag, entry));
                continue;
            }
            Source::Disk(wanted) => wanted,
        };
        let mut run = Run::new(&first);
        let mut wanted = vec![(tag, first)];
        while let Some((tag, source)) = sources.next_if(|(_, s)| run.joins(s)) {
            if let Source::Disk(next) = source {
                run.end = next.range().end;
                wanted.push((tag, next));
            }
        }
        let loaded = run.read(how).and_then(|bytes| {
            for (tag, wanted) in wanted {
                match frame_of(&run, &bytes, &wanted) {
                    Ok(entry) => found.push((tag, entry)),
                    // The next call will meet the damage and report it.
                    Err(_) if !found.is_empty() => return Ok(false),
                    Err(stop) => return Err(stop),
                }
            }
            Ok(true)
        });
        match loaded {
            Ok(true) => {}
            Ok(false) => break,
            Err(_) if !found.is_empty() => break,
            Err(stop) => return Err(stop),
        }
    }
    Ok(found)
}

/// Neighbouring frames that are read at once.
struct Run {
    segment: Arc<Segment>,
    start: u64,
    end: u64,
}

impl Run {
    fn new(first: &Wanted) -> Self {
        let Range { start, end } = first.range();
        Self { segment: Arc::clone(&first.segment), start, end }
    }

    fn joins(&self, source: &Source) -> bool {
        matches!(source, Source::Disk(wanted) if self.joins_frame(wanted))
    }

    fn joins_frame(&self, wanted: &Wanted) -> bool {
        let Range { start, end } = wanted.range();
        wanted.segment.id == self.segment.id
            && start >= self.end
            && start - self.end <= GAP_BYTES_MAX
            && end - self.start <= READ_BYTES_MAX
    }

    fn read(&self, how: How) -> Result<Bytes, Stop> {
        if self.end > self.segment.len {
            let range = self.start..self.end;
            return Err(self.segment.damaged(range, "lies beyond the end of the file").into());
        }
        let mut bytes = vec![0; (self.end - self.start) as usize];
        self.segment.read(&mut bytes, self.start, how)?;
        Ok(Bytes::from(bytes))
    }
}

/// The wanted entry out of what a run read, if everything about it verifies.
fn frame_of(run: &Run, bytes: &Bytes, wanted: &Wanted) -> Result<Entry, Stop> {
    let start = (wanted.offset - run.start) as usize;
    let frame = bytes.slice(start..start + wanted.len as usize);
    let header = wanted.header(&frame)?;
    let payload = frame.slice(header.payload());
    if !header.payload_verifies(&payload) {
        return Err(wanted.damaged("a payload does not verify"));
    }
    Ok(entry_of(&header, frame.slice(header.head()), payload))
}

fn entry_of(header: &FrameHeader, head: Bytes, payload: Bytes) -> Entry {
    let payload =
        Payload { bytes: payload, crc: header.payload_crc, crc_seed: header.payload_crc_seed };
    Entry { id: header.id, stream: header.stream, head, payload }
}

/// Heads from disk: small frames in large reads, of large ones only the beginning.
fn load_heads(wanted: &[Wanted], how: How) -> Result<Vec<Entry>, Stop> {
    let mut found = Vec::with_capacity(wanted.len());
    let mut rest = wanted;
    while let Some(first) = rest.first() {
        let many = if first.len > SKIPPED_BYTES_MIN { 1 } else { run_of_small(rest) };
        let (now, later) = rest.split_at(many);
        rest = later;
        match load_heads_of(now, how) {
            Ok(heads) => found.extend(heads),
            Err(_) if !found.is_empty() => break,
            Err(stop) => return Err(stop),
        }
    }
    Ok(found)
}

/// How many frames from the first on are small and near enough to be read at once.
fn run_of_small(wanted: &[Wanted]) -> usize {
    let mut run: Option<Run> = None;
    let fits = |wanted: &&Wanted| match &mut run {
        Some(run) => {
            let joins = wanted.len <= SKIPPED_BYTES_MIN && run.joins_frame(wanted);
            run.end = wanted.range().end;
            joins
        }
        None => {
            run = Some(Run::new(wanted));
            true
        }
    };
    wanted.iter().take_while(fits).count()
}

fn load_heads_of(wanted: &[Wanted], how: How) -> Result<Vec<Entry>, Stop> {
    let [first, ..] = wanted else { return Ok(Vec::new()) };
    let mut run = Run::new(first);
    run.end = wanted.last().map_or(run.end, |last| last.range().end);
    if first.len > SKIPPED_BYTES_MIN {
        run.end = run.start + PREFIX_BYTES;
        let bytes = run.read(how)?;
        let prefix = FrameHeader::prefix_len(&bytes)
            .filter(|prefix| *prefix as u64 <= first.len)
            .ok_or_else(|| first.damaged("a frame's header does not verify"))?;
        run.end = run.end.max(run.start + prefix as u64);
    }
    let bytes = run.read(how)?;
    let mut heads = Vec::with_capacity(wanted.len());
    for wanted in wanted {
        let start = (wanted.offset - run.start) as usize;
        let frame = bytes.slice(start..bytes.len());
        let header = wanted.header(&frame)?;
        // A copy: the slice would keep the whole read in memory.
        let head = Bytes::copy_from_slice(frame.get(header.head()).unwrap_or_default());
        heads.push(entry_of(&header, head, Bytes::new()));
    }
    Ok(heads)
}
