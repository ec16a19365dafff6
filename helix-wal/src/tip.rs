//! The growing end of the log: the active segment, and the group that is being put together.
//! Shared by the writer and by recovery. Writes; the caller syncs.

use std::sync::Arc;
use std::time::Duration;

use crc32fast::Hasher;

use crate::aligned::Aligned;
use crate::error::poison;
use crate::footer::footer_bytes_max;
use crate::frame::{
    Context, FIRST_GROUP, Frame, GROUP_HEADER, GroupHeader, GroupRef, Kind, Position, SegmentHeader,
};
use crate::layout::{BLOCK_BYTES, blocks};
use crate::segment::Segment;
use crate::storage::File;
use crate::{Error, LogId};

/// Buffers larger than this are not kept for the next group.
const BUFFER_KEPT_BYTES_MAX: usize = 8 << 20;

#[derive(Debug)]
pub(crate) struct Tip {
    pub segment: Arc<Segment>,
    file: Arc<dyn File>,
    /// Where the next group goes.
    pub at: u64,
    /// As of the end of what was written or pushed.
    pub context: Context,
    /// Entries in the segment: a bound for its footer.
    entries: u64,
    group: Aligned,
    frames: u32,
    frames_crc: Hasher,
}

/// Room at a segment's end that entries leave to votes, truncations and marks.
pub(crate) fn notes_reserve(segment_len: u64) -> u64 {
    blocks(segment_len / 64).min(64 << 10)
}

/// Most bytes of a frame that a segment of this size takes.
pub(crate) fn frame_bytes_max(segment_len: u64) -> u64 {
    let fixed = FIRST_GROUP
        + GROUP_HEADER as u64
        + footer_bytes_max(1)
        + notes_reserve(segment_len)
        + BLOCK_BYTES;
    (segment_len / 2).min(segment_len.saturating_sub(fixed))
}

impl Tip {
    /// Begins a segment in a file: writes its header and syncs it.
    pub(crate) fn begin(
        file: Arc<dyn File>,
        name: &str,
        header: &SegmentHeader,
    ) -> Result<Self, Error> {
        let block = Aligned::copy(&header.encode());
        file.write_at(block.as_slice(), 0).map_err(|e| poison("write", name, &e))?;
        file.sync_data().map_err(|e| poison("sync", name, &e))?;
        let new = if header.cold { Segment::new_cold } else { Segment::new };
        Ok(Self {
            segment: Arc::new(new(header.id, Arc::clone(&file), header.file_len)),
            file,
            at: FIRST_GROUP,
            context: header.context.clone(),
            entries: 0,
            group: Aligned::default(),
            frames: 0,
            frames_crc: Hasher::new(),
        })
    }

    /// Goes on in another segment, which begins where this one ends.
    pub(crate) fn roll(
        &mut self,
        file: Arc<dyn File>,
        name: &str,
        header: &SegmentHeader,
    ) -> Result<(), Error> {
        let mut next = Self::begin(file, name, header)?;
        std::mem::swap(&mut next.group, &mut self.group);
        *self = next;
        Ok(())
    }

    pub(crate) fn position(&self) -> Position {
        Position { segment: self.segment.id, at: self.at }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.frames == 0
    }

    /// Bytes of the group so far, header included.
    pub(crate) fn group_len(&self) -> usize {
        if self.frames == 0 { GROUP_HEADER } else { self.group.len() }
    }

    /// Whether `entries` more entries of `bytes` bytes in all fit into the segment.
    pub(crate) fn fits_entries(&self, entries: u64, bytes: u64) -> bool {
        self.room(entries, bytes) >= Some(notes_reserve(self.segment.len))
    }

    /// Whether entries of these lengths fit into the segment when groups are cut at `group_max`.
    pub(crate) fn fits_groups(&self, lens: impl Iterator<Item = usize>, group_max: usize) -> bool {
        let (mut at, mut group, mut entries) = (self.at, self.group_len(), self.entries);
        let mut empty = self.is_empty();
        for len in lens {
            if !empty && group + len > group_max {
                at += blocks(group as u64);
                group = GROUP_HEADER;
            }
            group += len;
            entries += 1;
            empty = false;
        }
        let end = at + blocks(group as u64) + footer_bytes_max(entries);
        end + notes_reserve(self.segment.len) <= self.segment.len
    }

    /// Whether a frame without entry (of `bytes` bytes, 0 for a mark) fits into the segment.
    pub(crate) fn fits_note(&self, bytes: u64) -> bool {
        self.room(0, bytes).is_some()
    }

    fn room(&self, entries: u64, bytes: u64) -> Option<u64> {
        let end = self.at + blocks(self.group_len() as u64 + bytes);
        self.segment.len.checked_sub(end + footer_bytes_max(self.entries + entries))
    }

    /// Adds a frame to the group; where it will stand.
    pub(crate) fn push(&mut self, frame: &Frame<'_>) -> Position {
        if self.frames == 0 {
            self.begin_group();
        }
        let place = Position { segment: self.segment.id, at: self.at + self.group.len() as u64 };
        let crc = frame.encode(place, self.group.reserve(frame.len()));
        self.frames_crc.update(&crc.to_le_bytes());
        self.frames += 1;
        if frame.kind == Kind::Entry {
            self.entries += 1;
            self.context.last = Some(frame.id);
        }
        place
    }

    fn begin_group(&mut self) {
        if self.group.capacity() > BUFFER_KEPT_BYTES_MAX {
            self.group = Aligned::default();
        }
        self.group.clear(64 << 10);
        self.group.reserve(GROUP_HEADER).extend_from_slice(&[0; GROUP_HEADER]);
    }

    /// Writes the group, or a mark if nothing was pushed. The caller syncs before it goes on:
    /// the next group will say that this one is durable.
    pub(crate) fn write(&mut self, committed: Option<LogId>) -> Result<(), Error> {
        if self.frames == 0 {
            self.begin_group();
        }
        let header = GroupHeader {
            position: self.position(),
            len: self.group.len() as u64,
            frames: self.frames,
            frames_crc: std::mem::take(&mut self.frames_crc).finalize(),
            predecessor: self.context.last_group,
            synced: self.position(),
            committed,
        };
        let (bytes, crc) = header.encode();
        if let Some(start) = self.group.as_mut_slice().first_chunk_mut() {
            *start = bytes;
        }
        self.group.pad();
        let group = self.group.as_slice();
        let written = self.file.write_at(group, self.at);
        written.map_err(|e| poison("write", &self.segment.name(), &e))?;
        self.context.last_group = GroupRef { position: header.position, crc };
        self.context.committed = committed.or(self.context.committed);
        self.at += group.len() as u64;
        self.frames = 0;
        Ok(())
    }

    pub(crate) fn sync(&self) -> Result<(), Error> {
        self.file.sync_data().map_err(|e| poison("sync", &self.segment.name(), &e))
    }
}

/// Time since some moment, for what only measures and never decides.
#[allow(clippy::disallowed_methods)]
pub(crate) fn stopwatch() -> impl Fn() -> Duration {
    let start = std::time::Instant::now();
    move || start.elapsed()
}
