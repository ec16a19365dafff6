//! Finished cold segments that the log may not name yet.

use std::sync::Arc;

use crate::files::segment::Segment;
use crate::format::footer::{DirectoryRow, Trailer};
use crate::format::state::ColdSegmentInfo;
use crate::storage::Storage;
use crate::types::{LiveEntry, LogId};

/// A file that is removed on drop unless the state file lists it.
#[derive(Debug)]
pub(crate) struct UnnamedFile {
    pub storage: Arc<dyn Storage>,
    pub name: String,
    pub kept: bool,
    /// The state file may list it although the call failed, so it stays until an open can tell.
    pub is_pinned: bool,
}

impl UnnamedFile {
    /// Moves the file out, so that dropping this value keeps it.
    pub(crate) fn take(&mut self) -> Self {
        let (storage, name) = (Arc::clone(&self.storage), self.name.clone());
        let kept = std::mem::replace(&mut self.kept, true);
        Self { storage, name, kept, is_pinned: self.is_pinned }
    }
}

impl Drop for UnnamedFile {
    fn drop(&mut self) {
        if !self.kept {
            // Ignored: the next open removes files that the state file does not list.
            let _ = self.storage.remove(&self.name);
        }
    }
}

/// A cold segment, all of it durable.
#[derive(Debug)]
pub(crate) struct ColdSegment {
    pub segment: Arc<Segment>,
    pub trailer: Trailer,
    pub directory: Vec<DirectoryRow>,
    pub file: UnnamedFile,
}

impl ColdSegment {
    /// Creates a cold segment that the state file lists.
    pub(crate) fn named(
        storage: Arc<dyn Storage>,
        name: String,
        segment: Arc<Segment>,
        trailer: Trailer,
        directory: Vec<DirectoryRow>,
    ) -> Self {
        let file = UnnamedFile { storage, name, kept: true, is_pinned: false };
        Self { segment, trailer, directory, file }
    }

    /// Keeps the file on drop, because the state file lists it.
    pub(crate) fn retain_file(&mut self) {
        self.file.kept = true;
    }

    /// Keeps the file even on discard, because the state file may list it as part of the log.
    pub(crate) fn pin_file(&mut self) {
        (self.file.kept, self.file.is_pinned) = (true, true);
    }

    /// Returns the parts and keeps the file, because the state file lists it.
    pub(crate) fn into_parts(mut self) -> (Arc<Segment>, Trailer, Vec<DirectoryRow>) {
        self.file.kept = true;
        (Arc::clone(&self.segment), self.trailer.clone(), std::mem::take(&mut self.directory))
    }

    /// Returns the entry of the state file for this segment.
    pub(crate) fn info(&self) -> ColdSegmentInfo {
        let (first, last) = self.entries();
        ColdSegmentInfo { id: self.segment.id, first, last }
    }

    /// Returns the first index and the last id.
    pub(crate) fn entries(&self) -> (u64, LogId) {
        self.trailer.entries.unwrap_or_default()
    }
}

/// Durable segments for [`Wal::install`](crate::Wal::install).
///
/// Dropping them removes their files, unless they were retained
/// ([`Wal::retain`](crate::Wal::retain)).
#[derive(Debug, Default)]
pub struct ColdSegments {
    pub(crate) made: Vec<ColdSegment>,
    pub(crate) memory: Vec<LiveEntry>,
    pub(crate) last: Option<u64>,
}

impl ColdSegments {
    pub(crate) fn of(made: Vec<ColdSegment>) -> Self {
        let last = made.last().map(|cold| cold.entries().1.index);
        Self { made, memory: Vec::new(), last }
    }

    /// Removes the files, even if they were retained.
    ///
    /// Keeps those that a failed install may have made part of the log on disk.
    pub fn discard(mut self) {
        for cold in &mut self.made {
            cold.file.kept = cold.file.is_pinned;
        }
    }

    /// Returns whether there are no segments.
    pub fn is_empty(&self) -> bool {
        self.made.is_empty() && self.memory.is_empty()
    }

    /// Returns the bytes of frames on disk.
    pub fn bytes(&self) -> u64 {
        self.made.iter().map(|cold| cold.trailer.frame_bytes).sum()
    }

    /// Returns the index of the first entry.
    pub fn first(&self) -> Option<u64> {
        let on_disk = self.made.first().map(|cold| cold.entries().0);
        on_disk.or_else(|| self.memory.first().map(|entry| entry.id.index))
    }

    /// Returns the index of the last entry.
    pub fn last(&self) -> Option<u64> {
        self.last
    }

    /// Adds segments whose entries follow all present ones.
    pub fn append(&mut self, mut later: Self) {
        self.made.append(&mut later.made);
        self.memory.append(&mut later.memory);
        self.last = later.last.or(self.last);
    }
}
