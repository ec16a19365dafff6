//! Loading entries from disk: merges neighbouring reads, requests readahead, verifies every byte.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::files::aligned::Aligned;
use crate::files::read_buffers::Buffer;
use crate::files::segment::{ReadStop, Segment};
use crate::format::footer::{IndexRow, PlacedRow};
use crate::format::frame::{FrameHeader, FrameKind, LogPosition};
use crate::memory::slot::Slot;
use crate::storage::BLOCK;
use crate::types::{Entry, Payload, ReadMode};

/// Maximum gap between two frames that are read together.
const GAP_BYTES_MAX: u64 = 64 << 10;
/// Maximum bytes of one read, unless a frame is larger: 1 MiB of payloads with their headers.
const READ_BYTES_MAX: u64 = (1 << 20) + (64 << 10);
/// Maximum number of scattered reads in flight. The device has one queue, which the writer shares.
const RUNS_AHEAD: usize = 16;
/// Larger payloads are skipped when only heads are read.
const SKIPPED_BYTES_MIN: u64 = 64 << 10;
/// Bytes read first of a frame whose payload is skipped.
const PREFIX_BYTES: u64 = 4 << 10;

/// Location of an entry's frame, and the identity that it must have.
#[derive(Debug, Clone)]
pub(crate) struct FrameRef {
    pub segment: Arc<Segment>,
    pub offset: u64,
    pub len: u64,
    pub index: u64,
    pub term: Option<u64>,
    pub stream: Option<u64>,
}

impl FrameRef {
    pub(crate) fn of_slot(slot: &Slot, segment: Arc<Segment>) -> Self {
        Self {
            segment,
            offset: u64::from(slot.offset),
            len: u64::from(slot.frame_len),
            index: slot.id.index,
            term: Some(slot.id.term),
            stream: Some(slot.stream),
        }
    }

    pub(crate) fn of_row(row: &PlacedRow, segment: &Arc<Segment>) -> Self {
        Self {
            segment: Arc::clone(segment),
            offset: u64::from(row.offset),
            len: u64::from(row.frame_len),
            index: row.index,
            term: None,
            stream: None,
        }
    }

    pub(crate) fn of_index(row: &IndexRow, segment: &Arc<Segment>) -> Self {
        Self {
            segment: Arc::clone(segment),
            offset: u64::from(row.offset),
            len: u64::from(row.frame_len),
            index: row.id.index,
            term: Some(row.id.term),
            stream: None,
        }
    }

    fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len
    }

    fn damaged(&self, what: &str) -> ReadStop {
        self.segment.damaged(self.range(), what).into()
    }

    /// Parses the header of the frame. `bytes` must hold at least its head.
    fn header(&self, bytes: &[u8]) -> Result<FrameHeader, ReadStop> {
        let place = LogPosition { segment: self.segment.id, at: self.offset };
        let header = FrameHeader::parse(bytes, place)
            .ok_or_else(|| self.damaged("a frame's header does not verify"))?;
        let fits = header.kind == FrameKind::Entry
            && header.len() as u64 == self.len
            && header.id.index == self.index
            && self.term.is_none_or(|term| term == header.id.term)
            && self.stream.is_none_or(|stream| stream == header.stream);
        if fits { Ok(header) } else { Err(self.damaged("a frame is not the expected one")) }
    }
}

/// Source of an entry: the entry in memory, or its location on disk.
pub(crate) enum EntrySource {
    Memory(Entry),
    Disk(FrameRef),
}

impl EntrySource {
    /// Returns about how many bytes are fetched.
    pub(crate) fn size(&self) -> usize {
        match self {
            Self::Memory(entry) => entry.head.len() + entry.payload.bytes.len(),
            Self::Disk(wanted) => wanted.len as usize,
        }
    }
}

/// Loads entries. Fails only if the first entry cannot be loaded.
///
/// If the read may block, scattered reads are announced to the storage in advance, those of `ahead`
/// last. The storage detects consecutive reads by its own means.
pub(crate) fn load_entries<T>(
    sources: Vec<(T, EntrySource)>,
    ahead: &[(T, EntrySource)],
    mode: ReadMode,
) -> Result<Vec<(T, Entry)>, ReadStop> {
    let mut runs = runs_of(&sources);
    runs.extend(runs_of(ahead));
    let mut found = Vec::with_capacity(sources.len());
    let mut sources = sources.into_iter();
    let mut read = 0;
    let mut announced = if mode != ReadMode::Blocking || runs.len() < 2 { runs.len() } else { 0 };
    while let Some((tag, source)) = sources.next() {
        let first = match source {
            EntrySource::Memory(entry) => {
                found.push((tag, entry));
                continue;
            }
            EntrySource::Disk(wanted) => (tag, wanted),
        };
        for (at, run) in runs.iter().enumerate().take(read + RUNS_AHEAD).skip(announced) {
            let before = at.checked_sub(1).and_then(|at| runs.get(at));
            let in_a_row = before.is_some_and(|before| run.follows(before))
                || runs.get(at + 1).is_some_and(|next| next.follows(run));
            if !in_a_row {
                run.segment.will_read(run.start..run.end);
            }
            announced += 1;
        }
        let Some(run) = runs.get(read) else { break };
        read += 1;
        let rest = sources.by_ref().take(run.frames - 1).filter_map(|(tag, source)| match source {
            EntrySource::Disk(wanted) => Some((tag, wanted)),
            EntrySource::Memory(_) => None,
        });
        match run.load(std::iter::once(first).chain(rest), mode, &mut found) {
            Ok(()) => {}
            // The next call will return the error.
            Err(_) if !found.is_empty() => break,
            Err(stop) => return Err(stop),
        }
    }
    Ok(found)
}

/// Neighbouring frames that are read together.
struct ReadRun {
    segment: Arc<Segment>,
    start: u64,
    end: u64,
    frames: usize,
}

/// Groups the frames on disk into reads, in order.
fn runs_of<T>(sources: &[(T, EntrySource)]) -> Vec<ReadRun> {
    let mut runs: Vec<ReadRun> = Vec::new();
    let mut follows = false;
    for (_, source) in sources {
        let EntrySource::Disk(wanted) = source else {
            follows = false;
            continue;
        };
        match runs.last_mut().filter(|run| follows && run.joins(wanted)) {
            Some(run) => run.add(wanted),
            None => runs.push(ReadRun::new(wanted)),
        }
        follows = true;
    }
    runs
}

impl ReadRun {
    fn new(first: &FrameRef) -> Self {
        let Range { start, end } = first.range();
        Self { segment: Arc::clone(&first.segment), start, end, frames: 1 }
    }

    fn joins(&self, wanted: &FrameRef) -> bool {
        let Range { start, end } = wanted.range();
        self.is_before(&wanted.segment, start) && end - self.start <= READ_BYTES_MAX
    }

    /// Returns whether the read continues about where a read of `other` ends.
    fn follows(&self, other: &Self) -> bool {
        other.is_before(&self.segment, self.start)
    }

    fn is_before(&self, segment: &Segment, start: u64) -> bool {
        segment.id == self.segment.id && start >= self.end && start - self.end <= GAP_BYTES_MAX
    }

    fn add(&mut self, wanted: &FrameRef) {
        self.end = wanted.range().end;
        self.frames += 1;
    }

    fn read(&self, mode: ReadMode) -> Result<Bytes, ReadStop> {
        if self.end > self.segment.len {
            let range = self.start..self.end;
            return Err(self.segment.damaged(range, "lies beyond the end of the file").into());
        }
        // Does not even allocate the buffer: the caller must not wait for memory either.
        if mode == ReadMode::MemoryOnly {
            return Err(ReadStop::WouldBlock);
        }
        let blocks = self.blocks();
        if mode == ReadMode::Direct && blocks.end <= self.segment.len {
            let mut buffer = Aligned::with_len((blocks.end - blocks.start) as usize);
            self.segment.read(buffer.as_mut_slice(), blocks.start, mode)?;
            let from = (self.start - blocks.start) as usize;
            return Ok(buffer.into_bytes().slice(from..from + self.len()));
        }
        let mut buffer = Buffer::with_len(self.len());
        self.segment.read(buffer.as_mut_slice(), self.start, mode)?;
        Ok(buffer.into_bytes())
    }

    fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// Returns the range widened to whole blocks, which the device reads without a copy.
    fn blocks(&self) -> Range<u64> {
        let block = BLOCK as u64;
        self.start - self.start % block..self.end.next_multiple_of(block)
    }

    /// Adds its entries to `found`, up to the first that cannot be loaded.
    fn load<T>(
        &self,
        frames: impl Iterator<Item = (T, FrameRef)>,
        mode: ReadMode,
        found: &mut Vec<(T, Entry)>,
    ) -> Result<(), ReadStop> {
        let bytes = self.read(mode)?;
        for (tag, wanted) in frames {
            found.push((tag, frame_of(self, &bytes, &wanted)?));
        }
        Ok(())
    }
}

/// Extracts an entry from the bytes of a read, if everything about it verifies.
fn frame_of(run: &ReadRun, bytes: &Bytes, wanted: &FrameRef) -> Result<Entry, ReadStop> {
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

/// Loads heads from disk. Reads small frames together, and only the beginning of large ones.
pub(crate) fn load_heads(wanted: &[FrameRef], mode: ReadMode) -> Result<Vec<Entry>, ReadStop> {
    let mut found = Vec::with_capacity(wanted.len());
    let mut rest = wanted;
    while let Some(first) = rest.first() {
        let many = if first.len > SKIPPED_BYTES_MIN { 1 } else { run_of_small(rest) };
        let (now, later) = rest.split_at(many);
        rest = later;
        match load_heads_of(now, mode) {
            Ok(heads) => found.extend(heads),
            Err(_) if !found.is_empty() => break,
            Err(stop) => return Err(stop),
        }
    }
    Ok(found)
}

/// Counts the leading frames that are small and close enough to be read together.
fn run_of_small(wanted: &[FrameRef]) -> usize {
    let mut run: Option<ReadRun> = None;
    let fits = |wanted: &&FrameRef| match &mut run {
        Some(run) => {
            let joins = wanted.len <= SKIPPED_BYTES_MIN && run.joins(wanted);
            run.add(wanted);
            joins
        }
        None => {
            run = Some(ReadRun::new(wanted));
            true
        }
    };
    wanted.iter().take_while(fits).count()
}

fn load_heads_of(wanted: &[FrameRef], mode: ReadMode) -> Result<Vec<Entry>, ReadStop> {
    let [first, ..] = wanted else { return Ok(Vec::new()) };
    let mut run = ReadRun::new(first);
    run.end = wanted.last().map_or(run.end, |last| last.range().end);
    if first.len > SKIPPED_BYTES_MIN {
        run.end = run.start + PREFIX_BYTES;
        let bytes = run.read(mode)?;
        let prefix = FrameHeader::prefix_len(&bytes)
            .filter(|prefix| *prefix as u64 <= first.len)
            .ok_or_else(|| first.damaged("a frame's header does not verify"))?;
        run.end = run.end.max(run.start + prefix as u64);
    }
    let bytes = run.read(mode)?;
    let mut heads = Vec::with_capacity(wanted.len());
    for wanted in wanted {
        let start = (wanted.offset - run.start) as usize;
        let frame = bytes.slice(start..bytes.len());
        let header = wanted.header(&frame)?;
        // Copied, because a slice would keep the whole read in memory.
        let head = Bytes::copy_from_slice(frame.get(header.head()).unwrap_or_default());
        heads.push(entry_of(&header, head, Bytes::new()));
    }
    Ok(heads)
}
