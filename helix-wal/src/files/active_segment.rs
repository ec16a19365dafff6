//! The active segment, and the group that is being built. Used by the writer and by recovery.
//!
//! Writes groups; the caller syncs.

use std::sync::Arc;

use crc32fast::Hasher;

use crate::error::{Error, changing};
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
    /// The group in the buffer is complete, and has found no space on the disk yet.
    waiting: Option<EncodedGroup>,
    /// The last group written, until the next one begins. Its bytes are still in the buffer.
    written: EncodedGroup,
}

/// A group whose bytes are final.
#[derive(Debug, Clone, Copy, Default)]
struct EncodedGroup {
    reference: GroupRef,
    frames: u32,
    committed: Option<LogId>,
}

impl ActiveSegment {
    /// Begins a segment in a file: writes its header and syncs it.
    pub(crate) fn begin(
        file: Arc<dyn File>,
        name: &str,
        header: &SegmentHeader,
    ) -> Result<Self, Error> {
        let block = Aligned::copy(&header.encode());
        file.write_at(block.as_slice(), 0).map_err(|e| changing("write", name, &e))?;
        file.sync_data().map_err(|e| changing("sync", name, &e))?;
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
            waiting: None,
            written: EncodedGroup::default(),
        })
    }

    /// Continues in `next`, which begins where this one ends.
    pub(crate) fn roll(&mut self, mut next: Self) {
        std::mem::swap(&mut next.group, &mut self.group);
        *self = next;
    }

    pub(crate) fn position(&self) -> LogPosition {
        LogPosition { segment: self.segment.id, at: self.at }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.frames == 0
    }

    /// Returns whether a complete group waits for space. Only [`Self::write`] may follow.
    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting.is_some()
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
    ///
    /// After a shortage ([`Error::is_shortage`]) the group waits, and the next call writes the same
    /// bytes at the same position. A crash before that leaves a torn group, or the group as it will
    /// be.
    pub(crate) fn write(&mut self, committed: Option<LogId>) -> Result<(), Error> {
        let encoded = match self.waiting.take() {
            Some(encoded) => encoded,
            None => self.encode(committed),
        };
        let group = self.group.as_slice();
        if let Err(e) = self.file.write_at(group, self.at) {
            self.waiting = Some(encoded);
            return Err(changing("write", &self.segment.name(), &e));
        }
        self.context.last_group = encoded.reference;
        self.context.committed = encoded.committed.or(self.context.committed);
        self.at += group.len() as u64;
        self.written = encoded;
        self.frames = 0;
        Ok(())
    }

    /// Completes the bytes of the group.
    fn encode(&mut self, committed: Option<LogId>) -> EncodedGroup {
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
        let reference = GroupRef { position: header.position, crc };
        EncodedGroup { reference, frames: self.frames, committed }
    }

    /// Syncs the group just written.
    ///
    /// After a shortage the position is again before the group, and the group waits: the system may
    /// have dropped its bytes, so they are written again. All earlier groups were synced before.
    pub(crate) fn sync(&mut self) -> Result<(), Error> {
        let Err(e) = self.file.sync_data() else { return Ok(()) };
        let error = changing("sync", &self.segment.name(), &e);
        if error.is_shortage() {
            self.at -= self.group.as_slice().len() as u64;
            self.frames = self.written.frames;
            self.waiting = Some(self.written);
        }
        Err(error)
    }
}
