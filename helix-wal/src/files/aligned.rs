//! A byte buffer aligned to blocks, as direct writes need. Uses a vector with one spare block.

use bytes::{Buf, Bytes};

use crate::storage::BLOCK;

/// Grows like a vector. The bytes before `start` are padding.
#[derive(Debug, Default)]
pub(crate) struct Aligned {
    bytes: Vec<u8>,
    start: usize,
}

impl Aligned {
    pub(crate) fn with_len(len: usize) -> Self {
        let mut buffer = Self::default();
        buffer.clear(len);
        buffer.bytes.resize(buffer.start + len, 0);
        buffer
    }

    /// Copies `bytes` and pads with zeroes to a whole block.
    pub(crate) fn copy(bytes: &[u8]) -> Self {
        let len = bytes.len().next_multiple_of(BLOCK);
        let mut buffer = Self::default();
        buffer.clear(len);
        buffer.bytes.extend_from_slice(bytes);
        buffer.bytes.resize(buffer.start + len, 0);
        buffer
    }

    /// Clears the content and reserves `capacity` bytes.
    pub(crate) fn clear(&mut self, capacity: usize) {
        self.bytes.clear();
        if self.bytes.capacity() < capacity + BLOCK {
            self.bytes = Vec::with_capacity(capacity + BLOCK);
        }
        self.start = self.bytes.as_ptr().align_offset(BLOCK);
        self.bytes.resize(self.start, 0);
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    pub(crate) fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    /// Returns the vector to append up to `extra` bytes to.
    ///
    /// It must not grow beyond that, because growing would move it to another address.
    pub(crate) fn reserve(&mut self, extra: usize) -> &mut Vec<u8> {
        if self.bytes.capacity() - self.bytes.len() < extra {
            let mut larger = Self::default();
            larger.clear((self.len() + extra).next_power_of_two());
            larger.bytes.extend_from_slice(self.as_slice());
            *self = larger;
        }
        &mut self.bytes
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        self.bytes.get(self.start..).unwrap_or_default()
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        self.bytes.get_mut(self.start..).unwrap_or_default()
    }

    /// Returns the content without copying it.
    pub(crate) fn into_bytes(self) -> Bytes {
        let mut bytes = Bytes::from(self.bytes);
        bytes.advance(self.start);
        bytes
    }

    /// Appends zeroes up to a whole block.
    pub(crate) fn pad(&mut self) {
        let extra = self.len().next_multiple_of(BLOCK) - self.len();
        let bytes = self.reserve(extra);
        bytes.resize(bytes.len() + extra, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stays_aligned_while_it_grows() {
        let mut buffer = Aligned::default();
        buffer.clear(10);
        for round in 1..200usize {
            let bytes = [round as u8; 333];
            buffer.reserve(bytes.len()).extend_from_slice(&bytes);
            assert_eq!(buffer.as_slice().as_ptr().align_offset(BLOCK), 0);
            assert_eq!(buffer.len(), round * 333);
        }
        buffer.pad();
        assert_eq!(buffer.len() % BLOCK, 0);
        assert_eq!(buffer.as_slice()[332], 1);
        assert_eq!(Aligned::copy(&[5; 4097]).len(), 2 * BLOCK);
        assert_eq!(Aligned::with_len(BLOCK).len(), BLOCK);
        let mut content = [5; BLOCK];
        content[7..].fill(0);
        assert_eq!(Aligned::copy(&[5; 7]).into_bytes(), &content[..]);
    }
}
