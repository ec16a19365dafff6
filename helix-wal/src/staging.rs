//! The groups to come, put together by those who append while the disk is at work on the one
//! before: a payload is copied while it is still in the appender's cache, and not between two
//! writes. Only a copy in advance: where a frame comes to stand elsewhere, it is copied again.

use std::collections::VecDeque;

use crate::Entry;
use crate::aligned::Aligned;
use crate::frame::{FRAME_HEADER, GROUP_HEADER, frame_len};

/// Buffers larger than this are not kept for another group.
const BUFFER_KEPT_BYTES_MAX: usize = 8 << 20;
/// Most buffers in use at a time, beside the one that is being written.
const BUFFERS_MAX: usize = 3;
/// Room that a new buffer begins with.
const BUFFER_BYTES: usize = 64 << 10;

/// Where the frames of an append stand in advance, one behind the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Staged {
    /// Which buffer. Never zero, and never used twice.
    pub buffer: u64,
    /// Byte in the group.
    pub at: usize,
}

/// A group as far as it can be known in advance: without its header and those of its frames.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub number: u64,
    pub bytes: Aligned,
}

/// What the writer has not taken yet. Behind a lock of its own, taken before the log's: the order
/// of what is staged is that of the queue.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    /// Oldest first; the last one grows.
    buffers: VecDeque<Buffer>,
    spare: Vec<Aligned>,
    /// Buffers here and with the writer, spare ones left out.
    used: usize,
    last: u64,
    /// The last append was not staged: no later one is before the writer has taken it.
    closed: bool,
}

impl Staging {
    /// Copies what an append brings, unless that would take too much memory.
    pub(crate) fn add(&mut self, entries: &[Entry], group_bytes: usize) -> Option<Staged> {
        let lens =
            entries.iter().map(|entry| frame_len(entry.head.len(), entry.payload.bytes.len()));
        let len = lens.sum::<usize>();
        if self.closed || len == 0 || !self.make_room(len, group_bytes) {
            self.closed |= len > 0;
            return None;
        }
        let buffer = self.buffers.back_mut()?;
        let staged = Staged { buffer: buffer.number, at: buffer.bytes.len() };
        let bytes = buffer.bytes.reserve(len);
        let end = bytes.len() + len;
        for Entry { head, payload, .. } in entries {
            let frame_end = bytes.len() + frame_len(head.len(), payload.bytes.len());
            bytes.resize(bytes.len() + FRAME_HEADER, 0);
            bytes.extend_from_slice(head);
            bytes.extend_from_slice(&payload.bytes);
            bytes.resize(frame_end, 0);
        }
        debug_assert_eq!(bytes.len(), end);
        Some(staged)
    }

    /// Takes back what was added last.
    pub(crate) fn undo(&mut self, staged: Option<Staged>) {
        match (staged, self.buffers.back_mut()) {
            (Some(staged), Some(buffer)) if buffer.number == staged.buffer => {
                buffer.bytes.truncate(staged.at);
            }
            _ => {}
        }
    }

    /// Whether the last buffer has room for so many bytes more.
    fn make_room(&mut self, len: usize, group_bytes: usize) -> bool {
        let fits = |used: usize| used + len <= group_bytes;
        if self.buffers.back().is_some_and(|buffer| fits(buffer.bytes.len())) {
            return true;
        }
        if self.used == BUFFERS_MAX || !fits(GROUP_HEADER) {
            return false;
        }
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.clear(BUFFER_BYTES);
        bytes.reserve(GROUP_HEADER).extend_from_slice(&[0; GROUP_HEADER]);
        self.last += 1;
        self.used += 1;
        self.buffers.push_back(Buffer { number: self.last, bytes });
        true
    }

    /// Hands out what is staged, and takes back buffers that have been written.
    pub(crate) fn exchange(&mut self, taken: &mut VecDeque<Buffer>, written: &mut Vec<Aligned>) {
        self.used -= written.len();
        written.retain(|bytes| bytes.capacity() <= BUFFER_KEPT_BYTES_MAX);
        self.spare.append(written);
        self.spare.truncate(BUFFERS_MAX);
        taken.append(&mut self.buffers);
        self.closed = false;
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::{LogId, Payload};

    const GROUP_MAX: usize = 4096;

    fn entries(lens: &[usize]) -> Vec<Entry> {
        let entry = |(i, len): (usize, &usize)| Entry {
            id: LogId { term: 1, index: i as u64 },
            stream: 1,
            head: Bytes::from_static(b"head"),
            payload: Payload { bytes: vec![i as u8 + 1; *len].into(), crc: 0, crc_seed: 0 },
        };
        lens.iter().enumerate().map(entry).collect()
    }

    #[test]
    fn frames_follow_each_other_as_in_a_group() {
        let mut staging = Staging::default();
        let first = staging.add(&entries(&[10, 100]), GROUP_MAX);
        assert_eq!(first, Some(Staged { buffer: 1, at: GROUP_HEADER }));
        let len = frame_len(4, 10) + frame_len(4, 100);
        // What was refused leaves no trace.
        let undone = staging.add(&entries(&[7]), GROUP_MAX);
        staging.undo(undone);
        let second = staging.add(&entries(&[1]), GROUP_MAX);
        assert_eq!(second, Some(Staged { buffer: 1, at: GROUP_HEADER + len }));
        assert_eq!(staging.add(&[], GROUP_MAX), None);
        let (mut taken, mut written) = (VecDeque::new(), Vec::new());
        staging.exchange(&mut taken, &mut written);
        let buffer = taken.pop_front().unwrap();
        let bytes = buffer.bytes.as_slice();
        assert_eq!((taken.len(), bytes.len()), (0, GROUP_HEADER + len + frame_len(4, 1)));
        assert_eq!(bytes.as_ptr().align_offset(crate::storage::BLOCK), 0);
        let payload = GROUP_HEADER + frame_len(4, 10) + FRAME_HEADER + 4;
        assert_eq!(bytes[payload - 4..payload + 100], [&b"head"[..], &[2; 100]].concat());
    }

    #[test]
    fn takes_no_more_memory_than_it_may_and_goes_on_when_buffers_come_back() {
        let mut staging = Staging::default();
        let half = entries(&[GROUP_MAX / 2]);
        for buffer in 1..=BUFFERS_MAX as u64 {
            assert_eq!(staging.add(&half, GROUP_MAX).map(|staged| staged.buffer), Some(buffer));
        }
        assert_eq!(staging.add(&half, GROUP_MAX), None);
        // It would stand behind one that is not staged.
        assert_eq!(staging.add(&entries(&[1]), GROUP_MAX), None);
        let (mut taken, mut written) = (VecDeque::new(), Vec::new());
        staging.exchange(&mut taken, &mut written);
        assert_eq!(taken.len(), BUFFERS_MAX);
        assert_eq!(staging.add(&half, GROUP_MAX), None);
        written.extend(taken.pop_front().map(|buffer| buffer.bytes));
        staging.exchange(&mut taken, &mut written);
        assert!(written.is_empty());
        let next = BUFFERS_MAX as u64 + 1;
        assert_eq!(staging.add(&half, GROUP_MAX).map(|staged| staged.buffer), Some(next));
        // What no group has room for is never staged.
        let large = entries(&[GROUP_MAX]);
        assert_eq!(Staging::default().add(&large, GROUP_MAX), None);
    }
}
