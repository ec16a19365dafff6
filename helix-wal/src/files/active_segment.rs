//! The active segment, and the group that is being built. Used by the writer and by recovery.
//!
//! Writes groups; the caller syncs.

use std::sync::Arc;

use crc32fast::Hasher;

use crate::error::{Error, poison};
use crate::files::aligned::Aligned;
use crate::files::segment::Segment;
use crate::format::footer::footer_bytes_max;
use crate::format::frame::{
    Context, FIRST_GROUP, Frame, FrameKind, GROUP_HEADER, GroupHeader, GroupRef, LogPosition,
    SegmentHeader,
};
use crate::format::layout::blocks;
use crate::format::sizing::control_reserve;
use crate::storage::File;
use crate::types::LogId;

/// Larger buffers are not reused for the next group.
const BUFFER_KEPT_BYTES_MAX: usize = 8 << 20;

#[derive(Debug)]
pub(crate) struct ActiveSegment {
    pub segment: Arc<Segment>,
    file: Arc<dyn File>,
    /// Offset of the next group.
    pub at: u64,
    /// State of the log after the last entry written or pushed.
    pub context: Context,
    /// Number of entries in the segment, which bounds the size of its footer.
    entries: u64,
    group: Aligned,
    frames: u32,
    frames_crc: Hasher,
}

impl ActiveSegment {
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

    /// Continues in another segment, which begins where this one ends.
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

    pub(crate) fn position(&self) -> LogPosition {
        LogPosition { segment: self.segment.id, at: self.at }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.frames == 0
    }

    /// Returns the bytes of the group so far, including its header.
    pub(crate) fn group_len(&self) -> usize {
        if self.frames == 0 { GROUP_HEADER } else { self.group.len() }
    }

    /// Returns whether `entries` more entries with `bytes` bytes in total fit into the segment.
    pub(crate) fn fits_entries(&self, entries: u64, bytes: u64) -> bool {
        self.free_after(entries, bytes) >= Some(control_reserve(self.segment.len))
    }

    /// Returns whether entries of these lengths fit into the segment, in groups of up to
    /// `group_max`.
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
        end + control_reserve(self.segment.len) <= self.segment.len
    }

    /// Returns whether a control frame of `bytes` bytes (0: a sync marker) fits into the segment.
    pub(crate) fn fits_control(&self, bytes: u64) -> bool {
        self.free_after(0, bytes).is_some()
    }

    fn free_after(&self, entries: u64, bytes: u64) -> Option<u64> {
        let end = self.at + blocks(self.group_len() as u64 + bytes);
        self.segment.len.checked_sub(end + footer_bytes_max(self.entries + entries))
    }

    /// Adds a frame to the group and returns its position.
    pub(crate) fn push(&mut self, frame: &Frame<'_>) -> LogPosition {
        if self.frames == 0 {
            self.begin_group();
        }
        let place = LogPosition { segment: self.segment.id, at: self.at + self.group.len() as u64 };
        let crc = frame.encode(place, self.group.reserve(frame.len()));
        self.frames_crc.update(&crc.to_le_bytes());
        self.frames += 1;
        if frame.kind == FrameKind::Entry {
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

    /// Writes the group, or a sync marker if nothing was pushed.
    ///
    /// The caller must sync before the next write, because the next group states that this one is
    /// durable.
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
