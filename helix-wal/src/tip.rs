//! The growing end of the log: the active segment, and the group that is being put together.
//! Shared by the writer and by recovery. Writes; the caller syncs.

use std::sync::Arc;
use std::time::Duration;

use crc32fast::Hasher;

use crate::aligned::Aligned;
use crate::error::poison;
use crate::footer::footer_bytes_max;
use crate::frame::{
    Context, FIRST_GROUP, FRAME_HEADER, Frame, GROUP_HEADER, GroupHeader, GroupRef, Kind, Position,
    SegmentHeader,
};
use crate::layout::{BLOCK_BYTES, blocks};
use crate::segment::Segment;
use crate::staging::{Buffer, Staged};
use crate::storage::File;
use crate::{Error, LogId};

/// Room that a group begins with.
const GROUP_BYTES: usize = 64 << 10;
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
    /// The group, and behind it what was staged for it and has not been pushed.
    group: Aligned,
    /// Bytes of the group so far, header included; zero before it begins.
    group_len: usize,
    /// Number of the staged buffer that the group is in, or zero.
    staged: u64,
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
            group_len: 0,
            staged: 0,
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
        self.group_len.max(GROUP_HEADER)
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

    /// Begins the group in a buffer in which it has been staged; the buffer that it takes the place
    /// of.
    pub(crate) fn adopt(&mut self, buffer: Buffer) -> Aligned {
        debug_assert!(self.is_empty());
        self.group_len = GROUP_HEADER;
        self.staged = buffer.number;
        std::mem::replace(&mut self.group, buffer.bytes)
    }

    /// Adds a frame to the group; where it will stand.
    pub(crate) fn push(&mut self, frame: &Frame<'_>) -> Position {
        self.push_staged(frame, None)
    }

    /// The same for a frame whose bytes may be in the group's buffer already.
    pub(crate) fn push_staged(&mut self, frame: &Frame<'_>, staged: Option<Staged>) -> Position {
        if self.group_len == 0 {
            self.begin_group();
        }
        let at = self.group_len;
        let place = Position { segment: self.segment.id, at: self.at + at as u64 };
        let end = at + frame.len();
        let is_there = staged == Some(Staged { buffer: self.staged, at }) && self.staged != 0;
        let crc = match self.group.as_mut_slice().get_mut(at..end) {
            Some(bytes) if is_there => {
                let (header, crc) = frame.header(place);
                bytes[..FRAME_HEADER].copy_from_slice(&header);
                crc
            }
            _ => {
                // Whatever else was staged would not stand in its place any more.
                self.group.truncate(at);
                self.staged = 0;
                frame.encode(place, self.group.reserve(frame.len()))
            }
        };
        self.group_len = end;
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
        self.group.clear(GROUP_BYTES);
        self.group.reserve(GROUP_HEADER).extend_from_slice(&[0; GROUP_HEADER]);
        self.group_len = GROUP_HEADER;
        self.staged = 0;
    }

    /// Writes the group, or a mark if nothing was pushed. The caller syncs before it goes on:
    /// the next group will say that this one is durable.
    pub(crate) fn write(&mut self, committed: Option<LogId>) -> Result<(), Error> {
        if self.frames == 0 {
            self.begin_group();
        }
        self.group.truncate(self.group_len);
        let header = GroupHeader {
            position: self.position(),
            len: self.group_len as u64,
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
        self.group_len = 0;
        self.staged = 0;
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

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::staging::Staging;
    use crate::storage::{SimulatedDisk, Storage};
    use crate::{Entry, Payload};

    const SEGMENT_BYTES: u64 = 1 << 20;

    fn tip(disk: &SimulatedDisk, name: &str) -> Tip {
        let file = disk.create(name, SEGMENT_BYTES).unwrap();
        let header = SegmentHeader {
            id: 1,
            predecessor: Position::default(),
            synced: Position::default(),
            file_len: SEGMENT_BYTES,
            identity: Vec::new().into(),
            context: Context::default(),
            cold: false,
        };
        Tip::begin(file, name, &header).unwrap()
    }

    /// What the groups of a log come to must not depend on what was staged where.
    #[test]
    fn a_staged_group_is_the_same_bytes() {
        let entries: Vec<Entry> = (1..=9)
            .map(|index| Entry {
                id: LogId { term: 1, index },
                stream: 7,
                head: vec![index as u8; 5].into(),
                payload: Payload { bytes: vec![index as u8; 60].into(), crc: 1, crc_seed: 2 },
            })
            .collect();
        let disk = SimulatedDisk::new(1);
        let (mut plain, mut staged) = (tip(&disk, "plain"), tip(&disk, "staged"));
        let mut staging = Staging::default();
        let ones = entries.iter().map(std::slice::from_ref);
        let places: Vec<_> = ones.map(|one| staging.add(one, 4096)).collect();
        let mut buffers = VecDeque::new();
        staging.exchange(&mut buffers, &mut Vec::new());
        staged.adopt(buffers.pop_front().unwrap());
        for (i, entry) in entries.iter().enumerate() {
            let frame = Frame::entry(entry.id, entry.stream, &entry.head, &entry.payload);
            let place = match i {
                // As if they stood there in another buffer, whose bytes are not these.
                3 => {
                    let len = frame.len();
                    let other = &mut staged.group.as_mut_slice()[staged.group_len..][..len];
                    other.fill(0xee);
                    places[i].map(|place| Staged { buffer: place.buffer + 1, ..place })
                }
                // Behind it nothing is in its place any more.
                _ => places[i],
            };
            assert_eq!(staged.push_staged(&frame, place), plain.push(&frame));
            let is_there = i < 3;
            assert_eq!(staged.staged != 0, is_there, "entry {i}");
        }
        let vote = Frame::note(Kind::Vote, LogId::default(), b"vote");
        assert_eq!(staged.push(&vote), plain.push(&vote));
        plain.write(None).unwrap();
        staged.write(None).unwrap();
        assert_eq!(staged.at, plain.at);
        let mut bytes = [vec![0; SEGMENT_BYTES as usize], vec![1; SEGMENT_BYTES as usize]];
        plain.file.read_at(&mut bytes[0], 0).unwrap();
        staged.file.read_at(&mut bytes[1], 0).unwrap();
        assert!(bytes[0] == bytes[1]);
    }
}
