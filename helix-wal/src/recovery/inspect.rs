//! Describes and verifies the files of a log without changing them. For operators.
//!
//! A log that is in use may change during the inspection.

use std::collections::BTreeMap;
use std::ops::Range;
use std::{fmt, io};

use bytes::Bytes;

use crate::error::Error;
use crate::files::aligned::Aligned;
use crate::files::data_dir::DirListing;
use crate::files::footer_cache::FooterCache;
use crate::files::open_segment::{self, read_directory, read_header, read_trailer};
use crate::files::scan::{ScanBounds, scan};
use crate::files::segment::{ReadStop, Segment};
use crate::files::state_file::load_state;
use crate::format::footer::{IndexRow, PlacedRow, Trailer};
use crate::format::frame::{FrameHeader, FrameKind, LogPosition, SegmentHeader, payload_crc};
use crate::format::layout::{BLOCK_BYTES, STATE, cold_name, new_name, ready_name, segment_name};
use crate::format::state::{ColdSegmentInfo, PersistedState};
use crate::recovery::quarantine::unless_short;
use crate::storage::Storage;
use crate::types::{CleanMark, LogId, ReadMode, StreamRow};

/// Contents of a data directory.
#[derive(Debug, Clone, Default)]
pub struct LogReport {
    pub identity: Bytes,
    pub checkpoint: Option<LogId>,
    pub checkpoint_bytes: u64,
    pub vote: Option<Bytes>,
    pub purged: Option<LogId>,
    pub committed: Option<LogId>,
    /// Segments of the chain, oldest first, then cold ones, then staged ones.
    pub segments: Vec<SegmentReport>,
    /// Number of prepared segments.
    pub ready_segments: u64,
    /// Number of prepared segments that are allocated but not completely written.
    pub allocated_segments: u64,
    /// Files that are no longer, or not yet, part of the log.
    pub leftovers: Vec<String>,
    /// Marks of clean streams, by stream.
    pub clean_marks: BTreeMap<u64, CleanMark>,
}

/// Contents of one segment.
#[derive(Debug, Clone)]
pub struct SegmentReport {
    pub id: u64,
    pub file: String,
    pub state: SegmentState,
    /// First index and last id of its entries.
    pub entries: Option<(u64, LogId)>,
    /// Number of entries. In an unsealed segment it includes entries truncated later.
    pub entries_count: u64,
    /// Bytes of frames.
    pub frame_bytes: u64,
    /// Bytes in use, without the footer.
    pub used_bytes: u64,
    pub file_bytes: u64,
    /// Bytes of the file that are allocated and were never written; 0 if unknown.
    pub unwritten_bytes: u64,
    /// Bytes of a torn group at the end, which the next open will discard.
    pub torn_bytes: u64,
    /// Shares by stream; only for a sealed segment.
    pub streams: Vec<(u64, StreamRow)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SegmentState {
    Sealed,
    Unsealed,
    /// Sealed and not part of the chain: written as a whole, with gaps in the index.
    Cold,
    /// Staged: a cold segment received for a snapshot that is not installed yet.
    Received,
    /// Describes the damage.
    Damaged(String),
}

impl fmt::Display for SegmentState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sealed => f.write_str("sealed"),
            Self::Unsealed => f.write_str("unsealed"),
            Self::Cold => f.write_str("cold"),
            Self::Received => f.write_str("received"),
            Self::Damaged(what) => write!(f, "damaged: {what}"),
        }
    }
}

/// A part of the log that does not verify.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub file: String,
    /// Damaged bytes; empty for the file as a whole, which may be missing.
    pub bytes: Range<u64>,
    pub what: String,
    /// The bytes could not be read for want of a file descriptor or of memory. They may be good.
    pub is_unread: bool,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.bytes.is_empty() {
            return write!(f, "{}: {}", self.file, self.what);
        }
        write!(f, "{} bytes {}..{}: {}", self.file, self.bytes.start, self.bytes.end, self.what)
    }
}

impl From<Error> for Finding {
    fn from(error: Error) -> Self {
        let is_unread = error.is_shortage();
        let (file, bytes, what) = match error {
            Error::Damaged { file, bytes, what } => (file, bytes, what),
            Error::Io { file, reason, .. } | Error::Exhausted { file, reason, .. } => {
                (file, 0..0, reason)
            }
            other => (String::new(), 0..0, other.to_string()),
        };
        Self { file, bytes, what, is_unread }
    }
}

/// An entry as an inspection meets it.
#[derive(Debug)]
pub struct InspectedEntry<'a> {
    pub id: LogId,
    pub stream: u64,
    pub head: &'a [u8],
    pub payload_bytes: usize,
}

/// Visitor of [`inspect_entries`].
pub type EntryVisitor<'a> = dyn FnMut(&InspectedEntry<'_>) + 'a;

/// Describes a data directory. Damage to a segment is part of the report.
///
/// # Errors
/// Fails if the state file is missing or unusable, or after a shortage ([`Error::is_shortage`]).
pub fn inspect(storage: &dyn Storage) -> Result<LogReport, Error> {
    inspect_with(storage, &mut None)
}

/// Like [`inspect`], but reads all segments and visits every entry, including truncated ones of
/// unsealed segments. Entries behind damage in a segment are not visited.
///
/// # Errors
/// As [`inspect`].
pub fn inspect_entries(
    storage: &dyn Storage,
    visitor: &mut EntryVisitor<'_>,
) -> Result<LogReport, Error> {
    inspect_with(storage, &mut Some(visitor))
}

fn inspect_with(
    storage: &dyn Storage,
    visitor: &mut Option<&mut EntryVisitor<'_>>,
) -> Result<LogReport, Error> {
    let names = DirListing::list(storage)?;
    let Some(state) = load_state(storage)? else {
        return Err(no_state(storage, &names));
    };
    let live = live_files(&names, &state);
    let mut report = LogReport {
        identity: state.identity.clone(),
        checkpoint: state.checkpoint.as_ref().map(|(at, _)| *at),
        checkpoint_bytes: state.checkpoint.as_ref().map_or(0, |(_, bytes)| bytes.len() as u64),
        vote: state.vote.clone(),
        purged: state.purged,
        committed: state.committed,
        segments: Vec::new(),
        ready_segments: names.ready.len() as u64,
        allocated_segments: allocated_segments(storage, &names),
        leftovers: leftovers(&names, &live, &state),
        clean_marks: BTreeMap::clone(&state.clean_marks),
    };
    let mut segment_ends = segment_ends(storage, &live)?;
    for (id, file) in &live {
        let mut segment = SegmentReport::new(*id, file);
        let synced = Some(state.synced).filter(|s| s.segment == *id).map_or(0, |s| s.at);
        let known = ScanBounds { end: segment_ends.remove(id), synced, tolerate_damage: false };
        let is_flagged = state.segments.iter().any(|(named, sealed)| named == id && *sealed);
        match segment.fill(storage, known, is_flagged, &mut report, visitor) {
            Ok(()) => {}
            Err(error) if error.is_shortage() => return Err(error),
            Err(error) => segment.state = SegmentState::Damaged(error.to_string()),
        }
        report.segments.push(segment);
    }
    for (is_received, ColdSegmentInfo { id, .. }) in state.all_cold() {
        let mut segment = SegmentReport::new(*id, &cold_name(*id));
        segment.state = match segment.fill_cold(storage, visitor) {
            Ok(()) if is_received => SegmentState::Received,
            Ok(()) => SegmentState::Cold,
            Err(error) if error.is_shortage() => return Err(error),
            Err(error) => SegmentState::Damaged(error.to_string()),
        };
        report.segments.push(segment);
    }
    Ok(report)
}

/// Returns the number of prepared segments that are allocated but not completely written.
fn allocated_segments(storage: &dyn Storage, names: &DirListing) -> u64 {
    let is_allocated = |number: &&u64| unwritten_bytes(storage, &ready_name(**number)) > 0;
    names.ready.iter().filter(is_allocated).count() as u64
}

/// Returns the bytes of a file that were never written; 0 if unknown, or if the file is gone.
fn unwritten_bytes(storage: &dyn Storage, name: &str) -> u64 {
    storage.open(name).and_then(|file| file.unwritten_bytes()).unwrap_or(0)
}

/// Error for a missing state file: there is no log, or it lost the file.
fn no_state(storage: &dyn Storage, names: &DirListing) -> Error {
    if names.segments.is_empty() && names.ready.is_empty() && names.cold.is_empty() {
        return Error::Unusable(format!("{} holds no log", storage.describe()));
    }
    let what = "is missing, but there are segments".to_owned();
    Error::Damaged { file: STATE.to_owned(), bytes: 0..0, what }
}

fn open_segment(storage: &dyn Storage, id: u64, name: &str) -> Result<Segment, Error> {
    let is_absent = storage.open(name).is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
    if is_absent {
        let what = "the file is missing".to_owned();
        return Err(Error::Damaged { file: name.to_owned(), bytes: 0..0, what });
    }
    open_segment::open_segment(storage, id, name)
}

/// Returns the segments of the log, with their current file names.
fn live_files(names: &DirListing, state: &PersistedState) -> BTreeMap<u64, String> {
    let newest = state.segments.last().map_or(0, |(id, _)| *id);
    let named = state.segments.iter().map(|(id, _)| *id);
    let later = names.segments.iter().copied().filter(|id| *id > newest);
    let name = |id: u64| {
        let unnamed = !names.segments.contains(&id) && names.new.contains(&id);
        if unnamed { new_name(id) } else { segment_name(id) }
    };
    named.chain(later).map(|id| (id, name(id))).collect()
}

fn leftovers(
    names: &DirListing,
    live: &BTreeMap<u64, String>,
    state: &PersistedState,
) -> Vec<String> {
    let segments = names.segments.iter().map(|id| segment_name(*id));
    let new = names.new.iter().map(|id| new_name(*id));
    let cold = names.cold.iter().filter(|id| !state.names_cold(**id));
    let chain = segments.chain(new).filter(|name| !live.values().any(|live| live == name));
    chain.chain(cold.map(|id| cold_name(*id))).collect()
}

/// Returns the end of each segment, as the header of the next one states it.
fn segment_ends(
    storage: &dyn Storage,
    live: &BTreeMap<u64, String>,
) -> Result<BTreeMap<u64, u64>, Error> {
    let mut ends = BTreeMap::new();
    for (id, name) in live {
        let segment = open_segment(storage, *id, name);
        let header = segment.and_then(|segment| read_header(&segment));
        if let Some(SegmentHeader { predecessor, .. }) = unless_short(header)? {
            ends.insert(predecessor.segment, predecessor.at);
        }
    }
    Ok(ends)
}

impl SegmentReport {
    fn new(id: u64, file: &str) -> Self {
        Self {
            id,
            file: file.to_owned(),
            state: SegmentState::Unsealed,
            entries: None,
            entries_count: 0,
            frame_bytes: 0,
            used_bytes: 0,
            file_bytes: 0,
            unwritten_bytes: 0,
            torn_bytes: 0,
            streams: Vec::new(),
        }
    }

    fn fill(
        &mut self,
        storage: &dyn Storage,
        known: ScanBounds,
        is_flagged: bool,
        report: &mut LogReport,
        visitor: &mut Option<&mut EntryVisitor<'_>>,
    ) -> Result<(), Error> {
        let segment = open_segment(storage, self.id, &self.file)?;
        self.file_bytes = segment.len;
        self.unwritten_bytes = unwritten_bytes(storage, &self.file);
        let header = read_header(&segment)?;
        match read_trailer(&segment)? {
            Some(trailer) => {
                self.fill_sealed(&segment, &trailer)?;
                visit_sealed(&segment, &header, &trailer, visitor)
            }
            None if is_flagged => Err(no_trailer(&segment, SEALED)),
            None => self.fill_unsealed(&segment, &header, known, report, visitor),
        }
    }

    fn fill_cold(
        &mut self,
        storage: &dyn Storage,
        visitor: &mut Option<&mut EntryVisitor<'_>>,
    ) -> Result<(), Error> {
        let segment = open_segment(storage, self.id, &self.file)?;
        self.file_bytes = segment.len;
        self.unwritten_bytes = unwritten_bytes(storage, &self.file);
        let header = read_header(&segment)?;
        let trailer = read_trailer(&segment)?.ok_or_else(|| no_trailer(&segment, COLD))?;
        self.fill_sealed(&segment, &trailer)?;
        visit_sealed(&segment, &header, &trailer, visitor)
    }

    fn fill_sealed(&mut self, segment: &Segment, trailer: &Trailer) -> Result<(), Error> {
        self.state = SegmentState::Sealed;
        self.entries = trailer.entries;
        self.entries_count = u64::from(trailer.index.rows);
        self.frame_bytes = trailer.frame_bytes;
        self.used_bytes = trailer.data_end;
        let row = |share: &crate::format::footer::DirectoryRow| {
            let row = StreamRow {
                segment: segment.id,
                sealed: true,
                first: share.first,
                next: share.next,
                bytes: share.bytes,
                last_time: share.last_time,
            };
            (share.stream, row)
        };
        self.streams = read_directory(segment, trailer)?.iter().map(row).collect();
        Ok(())
    }

    fn fill_unsealed(
        &mut self,
        segment: &Segment,
        header: &SegmentHeader,
        known: ScanBounds,
        report: &mut LogReport,
        visitor: &mut Option<&mut EntryVisitor<'_>>,
    ) -> Result<(), Error> {
        let context = &header.context;
        report.vote = context.vote.clone().or(report.vote.take());
        report.purged = context.purged.or(report.purged);
        let mut visit = |frame: &FrameHeader, bytes: &[u8]| {
            match frame.kind {
                FrameKind::Entry => {
                    self.entries_count += 1;
                    self.frame_bytes += frame.len() as u64;
                    let first = self.entries.map_or(frame.id.index, |(first, _)| first);
                    self.entries = Some((first.min(frame.id.index), frame.id));
                    visit_entry(frame, bytes, visitor);
                }
                FrameKind::Vote => {
                    report.vote = bytes.get(frame.head()).map(Bytes::copy_from_slice)
                }
                FrameKind::Purge => report.purged = Some(frame.id),
                FrameKind::Truncate => {}
            }
            Ok(())
        };
        let scanned = scan(segment, header, known, &mut visit)?;
        report.committed = scanned.committed.or(report.committed);
        self.used_bytes = scanned.end;
        self.torn_bytes = scanned.torn_bytes;
        Ok(())
    }
}

/// Visits the entries of a segment with a trailer.
fn visit_sealed(
    segment: &Segment,
    header: &SegmentHeader,
    trailer: &Trailer,
    visitor: &mut Option<&mut EntryVisitor<'_>>,
) -> Result<(), Error> {
    if visitor.is_none() {
        return Ok(());
    }
    let end = trailer.data_end;
    let known = ScanBounds { end: Some(end), synced: end, tolerate_damage: false };
    let mut visit = |frame: &FrameHeader, bytes: &[u8]| {
        visit_entry(frame, bytes, visitor);
        Ok(())
    };
    scan(segment, header, known, &mut visit).map(drop)
}

fn visit_entry(frame: &FrameHeader, bytes: &[u8], visitor: &mut Option<&mut EntryVisitor<'_>>) {
    if let (FrameKind::Entry, Some(visitor)) = (frame.kind, visitor) {
        let head = bytes.get(frame.head()).unwrap_or_default();
        let (id, stream, payload_bytes) = (frame.id, frame.stream, frame.payload_len);
        visitor(&InspectedEntry { id, stream, head, payload_bytes });
    }
}

const SEALED: &str = "the trailer of a sealed segment does not verify";
const COLD: &str = "the trailer of a cold segment does not verify";

/// Error for a trailer that does not verify. It is the last block of the file.
fn no_trailer(segment: &Segment, what: &str) -> Error {
    segment.damaged(segment.len.saturating_sub(BLOCK_BYTES)..segment.len, what)
}

/// Reads and verifies every byte of the log. Returns an empty list if all of it verifies.
///
/// Parts that could not be read after a shortage are in the list too ([`Finding::is_unread`]).
pub fn verify(storage: &dyn Storage) -> Vec<Finding> {
    let found = DirListing::list(storage).and_then(|names| Ok((names, load_state(storage)?)));
    let (names, state) = match found {
        Ok((names, Some(state))) => (names, state),
        Ok((names, None)) => return vec![no_state(storage, &names).into()],
        Err(error) => return vec![error.into()],
    };
    let live = live_files(&names, &state);
    let mut segment_ends = match segment_ends(storage, &live) {
        Ok(ends) => ends,
        Err(error) => return vec![error.into()],
    };
    let mut findings = Vec::new();
    let mut sealed_before = true;
    let newest = state.segments.last().map(|(id, _)| *id);
    let mut before = None;
    for (id, name) in &live {
        let flagged = state.segments.iter().any(|(named, sealed)| named == id && *sealed);
        let synced = Some(state.synced).filter(|s| s.segment == *id).map_or(0, |s| s.at);
        let known = ScanBounds { end: segment_ends.remove(id), synced, tolerate_damage: false };
        match verify_segment(storage, *id, name, known, &mut findings) {
            Ok((segment, predecessor)) => {
                let sealed = segment.trailer().is_some();
                let begun_later = newest.is_some_and(|newest| *id > newest);
                if begun_later && before.is_some_and(|before| before != predecessor) {
                    findings.push(missing(predecessor));
                }
                before = Some(*id);
                if (flagged || !sealed_before) && flagged != sealed {
                    findings.push(no_trailer(&segment, SEALED).into());
                }
                sealed_before = sealed;
            }
            Err(error) => {
                sealed_before = false;
                findings.push(error.into());
            }
        }
    }
    // A segment is sealed only after the next one is durable.
    if sealed_before && let Some((id, _)) = live.last_key_value() {
        findings.push(missing(id + 1));
    }
    for (_, cold) in state.all_cold() {
        let name = cold_name(cold.id);
        match verify_segment(storage, cold.id, &name, ScanBounds::default(), &mut findings) {
            Ok((segment, _)) if segment.trailer().is_none() => {
                findings.push(no_trailer(&segment, COLD).into());
            }
            Ok(_) => {}
            Err(error) => findings.push(error.into()),
        }
    }
    findings
}

fn missing(id: u64) -> Finding {
    let what = "the file is missing".to_owned();
    Finding { file: segment_name(id), bytes: 0..0, what, is_unread: false }
}

/// Verifies a segment. Returns it, with its trailer if it has one, and the id of its predecessor.
fn verify_segment(
    storage: &dyn Storage,
    id: u64,
    name: &str,
    known: ScanBounds,
    findings: &mut Vec<Finding>,
) -> Result<(Segment, u64), Error> {
    let segment = open_segment(storage, id, name)?;
    let header = read_header(&segment)?;
    if header.file_len != segment.len {
        let bytes = header.file_len.min(segment.len)..header.file_len.max(segment.len);
        return Err(segment.damaged(bytes, "the file size differs from its header"));
    }
    let before = header.predecessor.segment;
    let trailer = read_trailer(&segment)?;
    let known = trailer.as_ref().map_or(known, |trailer| ScanBounds {
        end: Some(trailer.data_end),
        synced: trailer.data_end,
        tolerate_damage: false,
    });
    let scanned = scan(&segment, &header, known, &mut |_, _| Ok(()));
    if let Err(error) = scanned {
        findings.push(error.into());
    }
    let Some(trailer) = trailer else { return Ok((segment, before)) };
    if let Err(error) = read_directory(&segment, &trailer) {
        findings.push(error.into());
    }
    segment.set_trailer(trailer);
    if let Err(ReadStop::Failed(error)) = verify_tables(&segment) {
        findings.push(error.into());
    }
    Ok((segment, before))
}

/// Verifies that every table row of a sealed segment refers to the entry that it names.
fn verify_tables(segment: &Segment) -> Result<(), ReadStop> {
    let cache = FooterCache::new(0);
    let mut by_index = segment.by_index(&cache, ReadMode::Blocking);
    let mut by_stream = segment.by_stream(&cache, ReadMode::Blocking);
    for number in 0..by_index.len() {
        let row: IndexRow = by_index.get(number)?;
        verify_frame(segment, &row)?;
        if let Some(placed) = row.stream_row {
            let placed: PlacedRow = by_stream.get(placed)?;
            if (placed.index, placed.offset) != (row.id.index, row.offset) {
                let what = "the footer's tables disagree";
                return Err(segment.damaged(0..segment.len, what).into());
            }
        }
    }
    Ok(())
}

fn verify_frame(segment: &Segment, row: &IndexRow) -> Result<(), ReadStop> {
    let offset = u64::from(row.offset);
    let range = offset..offset + u64::from(row.frame_len);
    if range.end > segment.len - BLOCK_BYTES {
        return Err(segment.damaged(range, "lies beyond the end of the file").into());
    }
    let mut frame = Aligned::with_len(row.frame_len as usize);
    segment.read_device(frame.as_mut_slice(), offset)?;
    let bytes = frame.as_slice();
    let header = FrameHeader::parse(bytes, LogPosition { segment: segment.id, at: offset });
    let good = header.is_some_and(|header| {
        header.id == row.id
            && header.len() == bytes.len()
            && bytes.get(header.payload()).is_some_and(|payload| {
                payload_crc(payload, header.payload_crc_seed) == header.payload_crc
            })
    });
    if good { Ok(()) } else { Err(segment.damaged(range, "an entry does not verify").into()) }
}
