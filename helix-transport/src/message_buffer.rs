//! The buffers of one incoming message, which prost decodes without joining them.

use std::collections::VecDeque;

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::encode::ZERO_COPY_BYTES_MIN;

/// A field is kept as a slice only if it is at least 1/`SLICE_PART_MIN` of its HTTP/2 frame.
///
/// Frames may share a buffer with others, which cannot be detected here. A slice therefore pins up
/// to a buffer of the largest frame; this limit and [`SLICE_BYTES_MIN`] bound the factor by which
/// that exceeds the field.
const SLICE_PART_MIN: usize = 2;

/// A field of fewer bytes is copied.
const SLICE_BYTES_MIN: usize = 96 << 10;

/// Bytes of a message, and the size of the frame that they keep in memory.
#[derive(Debug)]
struct FrameSlice {
    bytes: Bytes,
    frame_bytes: usize,
}

/// Bytes of one message in order, in several buffers, none of them empty.
///
/// Implements [`Buf`], which is to be used only after [`MessageBuffer::close`].
#[derive(Debug, Default)]
pub(crate) struct MessageBuffer {
    slices: VecDeque<FrameSlice>,
    /// Small slices, copied together; they follow `slices`.
    small: BytesMut,
    bytes: usize,
}

impl MessageBuffer {
    pub(crate) fn push(&mut self, bytes: Bytes, frame_bytes: usize) {
        self.bytes += bytes.len();
        if bytes.len() < ZERO_COPY_BYTES_MIN {
            self.small.extend_from_slice(&bytes);
        } else {
            self.close();
            self.slices.push_back(FrameSlice { bytes, frame_bytes });
        }
    }

    /// Moves the copied bytes behind the slices.
    pub(crate) fn close(&mut self) {
        if !self.small.is_empty() {
            let bytes = self.small.split().freeze();
            self.slices.push_back(FrameSlice { frame_bytes: bytes.len(), bytes });
        }
    }

    /// Returns the number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    #[cfg(test)]
    pub(crate) fn slice_count(&self) -> usize {
        self.slices.len()
    }
}

impl Buf for MessageBuffer {
    fn remaining(&self) -> usize {
        self.bytes
    }

    fn chunk(&self) -> &[u8] {
        self.slices.front().map_or(&[], |first| &first.bytes)
    }

    fn advance(&mut self, mut count: usize) {
        assert!(count <= self.bytes, "{count} of {} bytes", self.bytes);
        self.bytes -= count;
        while let Some(first) = self.slices.front_mut() {
            if count < first.bytes.len() {
                first.bytes.advance(count);
                break;
            }
            count -= first.bytes.len();
            self.slices.pop_front();
        }
    }

    fn copy_to_bytes(&mut self, length: usize) -> Bytes {
        assert!(length <= self.bytes, "{length} of {} bytes", self.bytes);
        if let Some(FrameSlice { bytes, frame_bytes }) = self.slices.front()
            && length <= bytes.len()
            && length >= SLICE_BYTES_MIN.max(frame_bytes / SLICE_PART_MIN)
        {
            let field = bytes.slice(..length);
            self.advance(length);
            return field;
        }
        let mut field = BytesMut::with_capacity(length);
        field.put(self.take(length));
        field.freeze()
    }
}
