//! Writing cold segments: whole segments outside of the chain.
//!
//! They have groups and a footer like every sealed segment. They become part of the log when the
//! state file lists them.

use std::fmt;
use std::sync::Arc;

use tracing::debug;

use crate::error::{Error, changing, is_no_space, poison};
use crate::files::active_segment::ActiveSegment;
use crate::files::cold_segment::{ColdSegment, ColdSegments, UnnamedFile};
use crate::format::footer::{SealedEntry, SegmentEnd, build};
use crate::format::frame::{Context, Frame, LogPosition, SegmentHeader, frame_len};
use crate::format::layout::{HEAD_BYTES_MAX, NUMBERS_END, cold_name, is_within_bounds};
use crate::format::sizing::COLD_GROUP_BYTES;
use crate::format::sizing::frame_bytes_max;
use crate::shared::Shared;
use crate::storage::Storage;
use crate::types::LiveEntry;

/// Bytes of the first segment of a writer, which does not know how much will come.
///
/// Each further segment is twice as large, up to the usual size, so at most half of the space is
/// unused.
const FIRST_BYTES: u64 = 1 << 20;

/// Builds a cold segment.
#[derive(Debug)]
pub(crate) struct ColdSegmentBuilder {
    active: ActiveSegment,
    entries: Vec<SealedEntry>,
    identity_crc: u32,
    gathered: bool,
    file: UnnamedFile,
}

impl ColdSegmentBuilder {
    /// Begins a segment of `len` bytes. `gathered` goes into its trailer.
    ///
    /// Fails with `DiskFull` if the segment would use the reserve.
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
        let file = created.map_err(|e| match is_no_space(&e) {
            true => Error::DiskFull { free_bytes, needed_bytes },
            false => changing("create", &name, &e),
        })?;
        let unnamed =
            UnnamedFile { storage: Arc::clone(storage), name, kept: false, is_pinned: false };
        let header = SegmentHeader {
            id,
            predecessor: LogPosition::default(),
            synced: LogPosition::default(),
            file_len: len,
            identity: shared.identity.clone(),
            context: Context::default(),
            cold: true,
        };
        let active = ActiveSegment::begin(file, &unnamed.name, &header)?;
        let identity_crc = crc32fast::hash(&shared.identity);
        Ok(Self { active, entries: Vec::new(), identity_crc, gathered, file: unnamed })
    }

    pub(crate) fn fits(&self, frame_bytes: usize) -> bool {
        self.active.fits_groups(std::iter::once(frame_bytes), COLD_GROUP_BYTES)
    }

    /// Adds an entry, which must fit. Indexes may come in any order.
    ///
    /// `begins_share`: it begins a share. `spans_gap`: it does not, also after a gap.
    ///
    /// After a shortage the entry was not added.
    pub(crate) fn push(
        &mut self,
        frame: &Frame<'_>,
        placement: crate::types::Placement,
        begins_share: bool,
        spans_gap: bool,
    ) -> Result<(), Error> {
        let is_full = self.active.group_len() + frame.len() > COLD_GROUP_BYTES;
        if self.active.is_waiting() || (is_full && !self.active.is_empty()) {
            self.write_group()?;
        }
        let place = self.active.push(frame);
        self.entries.push(SealedEntry {
            id: frame.id,
            offset: place.at as u32,
            frame_len: frame.len() as u32,
            placement: Some(placement),
            begins_share,
            spans_gap,
        });
        Ok(())
    }

    /// Returns an index that occurs twice, which no table could represent.
    pub(crate) fn repeated(&self) -> Option<u64> {
        let mut indexes: Vec<u64> = self.entries.iter().map(|entry| entry.id.index).collect();
        indexes.sort_unstable();
        indexes.array_windows().find(|[a, b]| a == b).map(|[a, _]| *a)
    }

    fn write_group(&mut self) -> Result<(), Error> {
        self.active.write(None)?;
        self.active.sync()
    }

    /// Writes the rest and the footer. Everything except the file's name is durable then.
    ///
    /// After a shortage the call can be repeated; after success the builder is used up.
    pub(crate) fn finish(&mut self) -> Result<ColdSegment, Error> {
        if !self.active.is_empty() {
            self.write_group()?;
        }
        let segment = Arc::clone(&self.active.segment);
        self.entries.sort_unstable_by_key(|entry| entry.id.index);
        let end = SegmentEnd {
            segment: segment.id,
            identity_crc: self.identity_crc,
            file_len: segment.len,
            data_end: self.active.at,
            gathered: self.gathered,
            context: Context::default(),
        };
        let footer = build(&self.entries, end).ok_or_else(|| {
            let e = std::io::Error::other("the footer does not fit");
            poison("seal", &self.file.name, &e)
        })?;
        segment.write_footer(&footer)?;
        segment.set_trailer(footer.trailer.clone());
        debug!(segment = segment.id, entries = self.entries.len(), "wrote cold segment");
        let (trailer, directory) = (footer.trailer, footer.directory);
        Ok(ColdSegment { segment, trailer, directory, file: self.file.take() })
    }
}

/// Writes entries of another replica, in index order, into segments outside of the log.
///
/// They become part of the log with [`Wal::install`](crate::Wal::install). Dropping the writer
/// removes its files.
pub struct ColdWriter {
    shared: Arc<Shared>,
    made: Vec<ColdSegment>,
    growing: Option<ColdSegmentBuilder>,
    next_len: u64,
    /// Entries kept instead for an in-memory log.
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

    /// Writes the next entry; indexes must grow, with gaps allowed. Blocks.
    ///
    /// # Errors
    /// After [`Error::DiskFull`] or [`Error::Exhausted`] the entry was not written and can be
    /// offered again. Any other error ends the writer; a disk error also poisons the log.
    pub fn write(&mut self, entry: LiveEntry) -> Result<(), Error> {
        self.shared.lock().check_open()?;
        self.check(&entry)?;
        let index = entry.id.index;
        if self.shared.storage.is_none() {
            self.memory.push(entry);
        } else {
            self.write_to_disk(&entry).inspect_err(|error| self.poison_on_disk_error(error))?;
        }
        self.last = Some(index);
        Ok(())
    }

    fn check(&self, entry: &LiveEntry) -> Result<(), Error> {
        let LiveEntry { id, placement, head, payload } = entry;
        let refused = |what: &str| Err(Error::Unusable(format!("live entry {} {what}", id.index)));
        if self.last.is_some_and(|last| id.index <= last) {
            return refused("does not follow the previous one");
        }
        if placement.count == 0 || !is_within_bounds(placement) {
            return refused("has no positions");
        }
        if id.index >= NUMBERS_END - 1 {
            return refused("has an index out of range");
        }
        let bytes = frame_len(head.len(), payload.bytes.len()) as u64;
        // The source may use larger segments, but a limit is needed here too.
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
                let growing = ColdSegmentBuilder::begin(&self.shared, storage, len, false)?;
                self.next_len = (2 * len).min(self.shared.options.segment_bytes).max(self.next_len);
                self.growing.insert(growing)
            }
        };
        // A gap between entries of one fetch was left by cleaning, or by a trim.
        growing.push(&frame, *placement, false, true)?;
        Ok(())
    }

    /// Finishes the current segment, if there is one.
    fn close(&mut self) -> Result<(), Error> {
        if let Some(growing) = &mut self.growing {
            self.made.push(growing.finish()?);
            self.growing = None;
        }
        Ok(())
    }

    /// Poisons the log after a disk error.
    fn poison_on_disk_error(&self, error: &Error) {
        if matches!(error, Error::Poisoned { .. }) {
            self.shared.poison(error);
        }
    }

    /// Returns the index of the last entry written.
    pub fn last(&self) -> Option<u64> {
        self.last
    }

    /// Returns the segments finished so far, which hold the first entries. Blocks.
    ///
    /// # Errors
    /// Fails if the log is closed, or the directory cannot be synced.
    pub fn take_finished(&mut self) -> Result<ColdSegments, Error> {
        self.shared.lock().check_open()?;
        if self.made.is_empty() {
            return Ok(ColdSegments::default());
        }
        self.sync_dir().inspect_err(|error| self.poison_on_disk_error(error))?;
        Ok(ColdSegments::of(std::mem::take(&mut self.made)))
    }

    fn sync_dir(&self) -> Result<(), Error> {
        let Some(storage) = &self.shared.storage else { return Ok(()) };
        storage.sync_dir().map_err(|e| changing("sync", &storage.describe(), &e))
    }

    /// Writes and syncs the rest, and returns all segments not taken yet. Blocks.
    ///
    /// # Errors
    /// Fails if the log is closed, or on a disk error, which poisons the log. After
    /// [`Error::DiskFull`] or [`Error::Exhausted`] the call can be repeated.
    pub fn finish(&mut self) -> Result<ColdSegments, Error> {
        self.shared.lock().check_open()?;
        let closed = self.close().and_then(|()| self.sync_dir());
        closed.inspect_err(|error| self.poison_on_disk_error(error))?;
        let (made, memory) = (std::mem::take(&mut self.made), std::mem::take(&mut self.memory));
        Ok(ColdSegments { made, memory, last: self.last })
    }
}
