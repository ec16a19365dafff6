//! Cold segments: written at once, out of the chain, and part of the log only from the moment that
//! the state file names them. Frames in groups and a footer, as in every sealed segment.

use std::fmt;
use std::io;
use std::sync::Arc;

use tracing::debug;

use crate::error::poison;
use crate::footer::{DirectoryRow, SealedEntry, SegmentEnd, Trailer, build, footer_bytes_max};
use crate::frame::{Context, FIRST_GROUP, Frame, GROUP_HEADER, Position, SegmentHeader, frame_len};
use crate::layout::{
    BLOCK_BYTES, HEAD_BYTES_MAX, NUMBERS_END, blocks, cold_name, is_within_bounds,
};
use crate::segment::Segment;
use crate::shared::Shared;
use crate::storage::Storage;
use crate::tip::{Tip, frame_bytes_max, notes_reserve};
use crate::wal::Wal;
use crate::{Error, LiveEntry, LogId};

/// Groups are about so large, and each is synced before the next is written: a sync of the writer
/// never meets more than this.
const GROUP_BYTES: usize = 512 << 10;
/// The first segment of a writer that does not know how much will come; each further one has twice
/// the size, up to that of all others. So at most half of what it writes is unused space.
const FIRST_BYTES: u64 = 1 << 20;

/// A file that goes with its value, unless the state file names it.
#[derive(Debug)]
struct Unnamed {
    storage: Arc<dyn Storage>,
    name: String,
    kept: bool,
}

impl Drop for Unnamed {
    fn drop(&mut self) {
        if !self.kept {
            // Ignored: what no state file names is removed by the next open.
            let _ = self.storage.remove(&self.name);
        }
    }
}

/// A cold segment whose every byte is durable.
#[derive(Debug)]
pub(crate) struct Cold {
    pub segment: Arc<Segment>,
    pub trailer: Trailer,
    pub directory: Vec<DirectoryRow>,
    file: Unnamed,
}

impl Cold {
    /// One that the state file names.
    pub(crate) fn named(
        storage: Arc<dyn Storage>,
        name: String,
        segment: Arc<Segment>,
        trailer: Trailer,
        directory: Vec<DirectoryRow>,
    ) -> Self {
        let file = Unnamed { storage, name, kept: true };
        Self { segment, trailer, directory, file }
    }

    /// The state file names it: it stays when this goes.
    pub(crate) fn outlive(&mut self) {
        self.file.kept = true;
    }

    /// The state file names it: it stays.
    pub(crate) fn keep(mut self) -> (Arc<Segment>, Trailer, Vec<DirectoryRow>) {
        self.file.kept = true;
        (Arc::clone(&self.segment), self.trailer.clone(), std::mem::take(&mut self.directory))
    }

    /// First index and last id.
    pub(crate) fn entries(&self) -> (u64, LogId) {
        self.trailer.entries.unwrap_or_default()
    }
}

/// A cold segment that is being written.
#[derive(Debug)]
pub(crate) struct Growing {
    tip: Tip,
    entries: Vec<SealedEntry>,
    identity_crc: u32,
    gathered: bool,
    file: Unnamed,
}

/// Bytes of a file that takes entries of so many bytes of frames.
pub(crate) fn cold_bytes(entries: u64, frame_bytes: u64) -> u64 {
    // Every group but the last is at least half full: one frame less than the bound.
    let groups = 1 + 2 * frame_bytes / GROUP_BYTES as u64;
    let data = blocks(frame_bytes) + groups * (GROUP_HEADER as u64 + BLOCK_BYTES);
    let fixed = FIRST_GROUP + footer_bytes_max(entries);
    // The tip keeps room for notes, of which there are none here, but checks for it.
    let len = blocks(fixed + data);
    blocks(len + notes_reserve(len + len / 32) + BLOCK_BYTES)
}

impl Growing {
    /// Begins a segment of `len` bytes; `gathered` goes into its trailer. `DiskFull` if that would
    /// touch the reserve.
    pub(crate) fn begin(
        shared: &Shared,
        storage: &Arc<dyn Storage>,
        len: u64,
        gathered: bool,
    ) -> Result<Self, Error> {
        let needed_bytes = len + shared.options.reserve_bytes;
        let free_bytes = storage.free_bytes().unwrap_or(u64::MAX);
        if free_bytes < needed_bytes {
            return Err(Error::DiskFull { free_bytes, needed_bytes });
        }
        let id = {
            let mut core = shared.lock();
            core.check_open()?;
            core.take_segment_number()?
        };
        let name = cold_name(id);
        let created = storage.create(&name, len);
        let file = created.map_err(|e| match e.kind() {
            io::ErrorKind::StorageFull => Error::DiskFull { free_bytes, needed_bytes },
            _ => poison("create", &name, &e),
        })?;
        let unnamed = Unnamed { storage: Arc::clone(storage), name, kept: false };
        let header = SegmentHeader {
            id,
            predecessor: Position::default(),
            synced: Position::default(),
            file_len: len,
            identity: shared.identity.clone(),
            context: Context::default(),
            cold: true,
        };
        let tip = Tip::begin(file, &unnamed.name, &header)?;
        let identity_crc = crc32fast::hash(&shared.identity);
        Ok(Self { tip, entries: Vec::new(), identity_crc, gathered, file: unnamed })
    }

    pub(crate) fn fits(&self, frame_bytes: usize) -> bool {
        self.tip.fits_groups(std::iter::once(frame_bytes), GROUP_BYTES)
    }

    /// Adds an entry that fits. In any order of indexes.
    pub(crate) fn push(
        &mut self,
        frame: &Frame<'_>,
        placement: crate::Placement,
        begins_share: bool,
    ) -> Result<(), Error> {
        if !self.tip.is_empty() && self.tip.group_len() + frame.len() > GROUP_BYTES {
            self.write_group()?;
        }
        let place = self.tip.push(frame);
        self.entries.push(SealedEntry {
            id: frame.id,
            offset: place.at as u32,
            frame_len: frame.len() as u32,
            placement: Some(placement),
            begins_share,
        });
        Ok(())
    }

    /// An index that it has twice, so that no table could lead to both.
    pub(crate) fn repeated(&self) -> Option<u64> {
        let mut indexes: Vec<u64> = self.entries.iter().map(|entry| entry.id.index).collect();
        indexes.sort_unstable();
        indexes.array_windows().find(|[a, b]| a == b).map(|[a, _]| *a)
    }

    fn write_group(&mut self) -> Result<(), Error> {
        self.tip.write(None)?;
        self.tip.sync()
    }

    /// Writes the rest and the footer. Everything but the name of the file is durable then.
    pub(crate) fn finish(mut self) -> Result<Cold, Error> {
        if !self.tip.is_empty() {
            self.write_group()?;
        }
        let segment = Arc::clone(&self.tip.segment);
        self.entries.sort_unstable_by_key(|entry| entry.id.index);
        let end = SegmentEnd {
            segment: segment.id,
            identity_crc: self.identity_crc,
            file_len: segment.len,
            data_end: self.tip.at,
            gathered: self.gathered,
            context: Context::default(),
        };
        let footer = build(&self.entries, end).ok_or_else(|| {
            poison("seal", &self.file.name, &io::Error::other("the footer does not fit"))
        })?;
        segment.write_footer(&footer)?;
        segment.set_trailer(footer.trailer.clone());
        debug!(segment = segment.id, entries = self.entries.len(), "wrote a cold segment");
        let (trailer, directory) = (footer.trailer, footer.directory);
        Ok(Cold { segment, trailer, directory, file: self.file })
    }
}

/// Takes entries that come from elsewhere, in index order, into segments of its own. Nothing of it
/// is part of the log before [`Wal::install`]; dropping it removes what it wrote.
pub struct ColdWriter {
    shared: Arc<Shared>,
    made: Vec<Cold>,
    growing: Option<Growing>,
    next_len: u64,
    /// What a memory log keeps instead.
    memory: Vec<LiveEntry>,
    last: Option<u64>,
}

impl fmt::Debug for ColdWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ColdWriter").field("last", &self.last).finish_non_exhaustive()
    }
}

impl ColdWriter {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        let next_len = shared.options.segment_bytes.min(FIRST_BYTES);
        let shared = Arc::clone(shared);
        Self { shared, made: Vec::new(), growing: None, next_len, memory: Vec::new(), last: None }
    }

    /// Takes the next entry; indexes grow, with gaps. Blocks. After `DiskFull` nothing of the entry
    /// was taken, and it can be offered again; any other error ends the writer, and those of the
    /// disk the log too.
    pub fn write(&mut self, entry: LiveEntry) -> Result<(), Error> {
        self.shared.lock().check_open()?;
        self.check(&entry)?;
        let index = entry.id.index;
        if self.shared.storage.is_none() {
            self.memory.push(entry);
        } else {
            self.write_to_disk(&entry).inspect_err(|error| self.note(error))?;
        }
        self.last = Some(index);
        Ok(())
    }

    fn check(&self, entry: &LiveEntry) -> Result<(), Error> {
        let LiveEntry { id, placement, head, payload } = entry;
        let refused = |what: &str| Err(Error::Unusable(format!("live entry {} {what}", id.index)));
        if self.last.is_some_and(|last| id.index <= last) {
            return refused("does not follow the one before it");
        }
        if placement.count == 0 || !is_within_bounds(placement) {
            return refused("has no positions");
        }
        if id.index >= NUMBERS_END - 1 {
            return refused("has no index of a log");
        }
        let bytes = frame_len(head.len(), payload.bytes.len()) as u64;
        // The one who wrote it may have had larger segments; a bound there must be all the same.
        if head.len() > HEAD_BYTES_MAX || bytes > frame_bytes_max(1 << 30) {
            return refused("is too large");
        }
        Ok(())
    }

    fn write_to_disk(&mut self, entry: &LiveEntry) -> Result<(), Error> {
        let LiveEntry { id, placement, head, payload } = entry;
        let frame = Frame::entry(*id, placement.stream, head, payload);
        if self.growing.as_ref().is_some_and(|growing| !growing.fits(frame.len())) {
            self.close()?;
        }
        let growing = match &mut self.growing {
            Some(growing) => growing,
            None => {
                let mut len = self.next_len;
                while frame_bytes_max(len) < frame.len() as u64 {
                    len *= 2;
                }
                let Some(storage) = &self.shared.storage else { return Ok(()) };
                let growing = Growing::begin(&self.shared, storage, len, false)?;
                self.next_len = (2 * len).min(self.shared.options.segment_bytes).max(self.next_len);
                self.growing.insert(growing)
            }
        };
        growing.push(&frame, *placement, false)?;
        Ok(())
    }

    /// Finishes the segment that is being written, if there is one.
    fn close(&mut self) -> Result<(), Error> {
        if let Some(growing) = self.growing.take() {
            self.made.push(growing.finish()?);
        }
        Ok(())
    }

    /// What the disk refuses ends the log.
    fn note(&self, error: &Error) {
        if matches!(error, Error::Poisoned { .. }) {
            self.shared.poison(error);
        }
    }

    /// Index of the last entry that was taken.
    pub fn last(&self) -> Option<u64> {
        self.last
    }

    /// The segments that are finished by now: they hold the first of the entries. Blocks.
    pub fn take_finished(&mut self) -> Result<ColdSegments, Error> {
        self.shared.lock().check_open()?;
        if self.made.is_empty() {
            return Ok(ColdSegments::default());
        }
        self.sync_dir().inspect_err(|error| self.note(error))?;
        Ok(ColdSegments::of(std::mem::take(&mut self.made)))
    }

    fn sync_dir(&self) -> Result<(), Error> {
        let Some(storage) = &self.shared.storage else { return Ok(()) };
        storage.sync_dir().map_err(|e| poison("sync", &storage.describe(), &e))
    }

    /// Writes what is left and syncs it. Blocks.
    pub fn finish(mut self) -> Result<ColdSegments, Error> {
        self.shared.lock().check_open()?;
        let closed = self.close().and_then(|()| self.sync_dir());
        closed.inspect_err(|error| self.note(error))?;
        let (made, memory) = (std::mem::take(&mut self.made), std::mem::take(&mut self.memory));
        Ok(ColdSegments { made, memory, last: self.last })
    }
}

/// Durable segments that wait for [`Wal::install`]. Dropping them removes them, unless they were
/// retained ([`Wal::retain`]).
#[derive(Debug, Default)]
pub struct ColdSegments {
    pub(crate) made: Vec<Cold>,
    pub(crate) memory: Vec<LiveEntry>,
    last: Option<u64>,
}

impl ColdSegments {
    pub(crate) fn of(made: Vec<Cold>) -> Self {
        let last = made.last().map(|cold| cold.entries().1.index);
        Self { made, memory: Vec::new(), last }
    }

    /// Removes them, also where they were retained.
    pub fn discard(mut self) {
        for cold in &mut self.made {
            cold.file.kept = false;
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.made.is_empty() && self.memory.is_empty()
    }

    /// Bytes of the entries on disk, with what frames them.
    pub fn bytes(&self) -> u64 {
        self.made.iter().map(|cold| cold.trailer.frame_bytes).sum()
    }

    /// Index of the first entry.
    pub fn first(&self) -> Option<u64> {
        let on_disk = self.made.first().map(|cold| cold.entries().0);
        on_disk.or_else(|| self.memory.first().map(|entry| entry.id.index))
    }

    /// Index of the last entry.
    pub fn last(&self) -> Option<u64> {
        self.last
    }

    /// Adds segments whose entries come after all that are here.
    pub fn append(&mut self, mut later: Self) {
        self.made.append(&mut later.made);
        self.memory.append(&mut later.memory);
        self.last = later.last.or(self.last);
    }
}

impl Wal {
    /// Begins segments for entries that come from elsewhere, for [`Wal::install`].
    pub fn cold_writer(&self) -> Result<ColdWriter, Error> {
        self.shared.lock().check_open()?;
        Ok(ColdWriter::new(&self.shared))
    }
}
