//! Fetching entries from disk: neighbours in one read, what is needed soon asked for in advance,
//! and every byte checked.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::aligned::Aligned;
use crate::buffers::Buffer;
use crate::footer::{IndexRow, PlacedRow};
use crate::frame::{FrameHeader, Kind, Position};
use crate::segment::{Segment, Stop};
use crate::slot::Slot;
use crate::storage::BLOCK;
use crate::{Entry, How, Payload};

/// Frames that are at most so far apart are read at once.
const GAP_BYTES_MAX: u64 = 64 << 10;
/// Most bytes of one read, unless a single frame is larger: 1 MiB of payloads with their headers.
const READ_BYTES_MAX: u64 = (1 << 20) + (64 << 10);
/// So many reads are under way at once where frames lie scattered: the device has one queue, and
/// the writer waits in it too.
const RUNS_AHEAD: usize = 16;
/// Payloads larger than this are skipped, not read, where only heads are wanted.
const SKIPPED_BYTES_MIN: u64 = 64 << 10;
/// Of a frame whose payload is skipped so much is read at first.
const PREFIX_BYTES: u64 = 4 << 10;

/// Where an entry's frame stands, and whose it must be.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub segment: Arc<Segment>,
    pub offset: u64,
    pub len: u64,
    pub index: u64,
    pub term: Option<u64>,
    pub stream: Option<u64>,
}

impl Wanted {
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
pub(crate) enum Source {
    Memory(Entry),
    Disk(Wanted),
}

impl Source {
    /// About how many bytes it fetches.
    pub(crate) fn size(&self) -> usize {
        match self {
            Self::Memory(entry) => entry.head.len() + entry.payload.bytes.len(),
            Self::Disk(wanted) => wanted.len as usize,
        }
    }
}

/// Fetches what is on disk. Fails only if not even the first entry can be had. Where it may wait,
/// the disk is told of the reads to come, those of `ahead` last; not of those that follow each
/// other, which the storage sees by itself.
pub(crate) fn load<T>(
    sources: Vec<(T, Source)>,
    ahead: &[(T, Source)],
    how: How,
) -> Result<Vec<(T, Entry)>, Stop> {
    let mut runs = runs_of(&sources);
    runs.extend(runs_of(ahead));
    let mut found = Vec::with_capacity(sources.len());
    let mut sources = sources.into_iter();
    let mut read = 0;
    let mut told = if how != How::Blocking || runs.len() < 2 { runs.len() } else { 0 };
    while let Some((tag, source)) = sources.next() {
        let first = match source {
            Source::Memory(entry) => {
                found.push((tag, entry));
                continue;
            }
            Source::Disk(wanted) => (tag, wanted),
        };
        for (at, run) in runs.iter().enumerate().take(read + RUNS_AHEAD).skip(told) {
            let before = at.checked_sub(1).and_then(|at| runs.get(at));
            let in_a_row = before.is_some_and(|before| run.follows(before))
                || runs.get(at + 1).is_some_and(|next| next.follows(run));
            if !in_a_row {
                run.segment.will_read(run.start..run.end);
            }
            told += 1;
        }
        let Some(run) = runs.get(read) else { break };
        read += 1;
        let rest = sources.by_ref().take(run.frames - 1).filter_map(|(tag, source)| match source {
            Source::Disk(wanted) => Some((tag, wanted)),
            Source::Memory(_) => None,
        });
        match run.load(std::iter::once(first).chain(rest), how, &mut found) {
            Ok(()) => {}
            // The next call will meet it and report it.
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
    frames: usize,
}

/// The reads that fetch what is on disk, in order.
fn runs_of<T>(sources: &[(T, Source)]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut follows = false;
    for (_, source) in sources {
        let Source::Disk(wanted) = source else {
            follows = false;
            continue;
        };
        match runs.last_mut().filter(|run| follows && run.joins(wanted)) {
            Some(run) => run.add(wanted),
            None => runs.push(Run::new(wanted)),
        }
        follows = true;
    }
    runs
}

impl Run {
    fn new(first: &Wanted) -> Self {
        let Range { start, end } = first.range();
        Self { segment: Arc::clone(&first.segment), start, end, frames: 1 }
    }

    fn joins(&self, wanted: &Wanted) -> bool {
        let Range { start, end } = wanted.range();
        self.is_before(&wanted.segment, start) && end - self.start <= READ_BYTES_MAX
    }

    /// Whether a read of it goes on about where one of `other` ends.
    fn follows(&self, other: &Self) -> bool {
        other.is_before(&self.segment, self.start)
    }

    fn is_before(&self, segment: &Segment, start: u64) -> bool {
        segment.id == self.segment.id && start >= self.end && start - self.end <= GAP_BYTES_MAX
    }

    fn add(&mut self, wanted: &Wanted) {
        self.end = wanted.range().end;
        self.frames += 1;
    }

    fn read(&self, how: How) -> Result<Bytes, Stop> {
        if self.end > self.segment.len {
            let range = self.start..self.end;
            return Err(self.segment.damaged(range, "lies beyond the end of the file").into());
        }
        // Not even the room for it is taken: who asks is not to wait, not for memory either.
        if how == How::Memory {
            return Err(Stop::WouldBlock);
        }
        let blocks = self.blocks();
        if how == How::Passing && blocks.end <= self.segment.len {
            let mut buffer = Aligned::with_len((blocks.end - blocks.start) as usize);
            self.segment.read(buffer.as_mut_slice(), blocks.start, how)?;
            let from = (self.start - blocks.start) as usize;
            return Ok(buffer.into_bytes().slice(from..from + self.len()));
        }
        let mut buffer = Buffer::with_len(self.len());
        self.segment.read(buffer.as_mut_slice(), self.start, how)?;
        Ok(buffer.into_bytes())
    }

    fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// The whole blocks that it lies in, which the device reads without a copy.
    fn blocks(&self) -> Range<u64> {
        let block = BLOCK as u64;
        self.start - self.start % block..self.end.next_multiple_of(block)
    }

    /// Adds its entries to what was found, up to the first that cannot be had.
    fn load<T>(
        &self,
        frames: impl Iterator<Item = (T, Wanted)>,
        how: How,
        found: &mut Vec<(T, Entry)>,
    ) -> Result<(), Stop> {
        let bytes = self.read(how)?;
        for (tag, wanted) in frames {
            found.push((tag, frame_of(self, &bytes, &wanted)?));
        }
        Ok(())
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
pub(crate) fn load_heads(wanted: &[Wanted], how: How) -> Result<Vec<Entry>, Stop> {
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
            let joins = wanted.len <= SKIPPED_BYTES_MIN && run.joins(wanted);
            run.add(wanted);
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
