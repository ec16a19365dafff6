//! Reused buffers for disk reads.
//!
//! A new buffer has to be zeroed before the system can copy into it, and passes through the CPU
//! caches twice. For a batch in the page cache, that is about a twentieth of the node's cost of a
//! fetch.
//!
//! The previous content of a buffer is never visible: a buffer is shared only after all of it was
//! read.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};

use crate::sync::IgnorePoison;
use bytes::Bytes;

/// Maximum bytes of unused buffers: the batches of a few readers.
const KEPT_BYTES_MAX: usize = 4 << 20;
/// Smaller buffers are cheaper to allocate than to reuse.
const KEPT_LEN_MIN: usize = 16 << 10;
/// A larger buffer would evict too many others.
const KEPT_LEN_MAX: usize = KEPT_BYTES_MAX / 2;
/// Lengths are multiples of this, so that batches of similar size share buffers.
const LEN_STEP: usize = 16 << 10;

static POOL: Pool = Pool::new();

/// Unused buffers, oldest first.
#[derive(Debug)]
struct Pool {
    unused: Mutex<VecDeque<Vec<u8>>>,
}

impl Pool {
    const fn new() -> Self {
        Self { unused: Mutex::new(VecDeque::new()) }
    }

    fn unused(&self) -> MutexGuard<'_, VecDeque<Vec<u8>>> {
        // A panic cannot leave anything but buffers in it.
        self.unused.lock().ignore_poison()
    }

    fn take(&'static self, len: usize) -> Buffer {
        let bytes = self.find(len).unwrap_or_else(|| match len {
            KEPT_LEN_MIN..=KEPT_LEN_MAX => vec![0; len.next_multiple_of(LEN_STEP)],
            _ => vec![0; len],
        });
        Buffer { bytes, len, pool: self }
    }

    /// Takes a buffer that is long enough, and less than twice as long.
    ///
    /// A reader is charged for the full length of the buffer it holds.
    fn find(&self, len: usize) -> Option<Vec<u8>> {
        if !(KEPT_LEN_MIN..=KEPT_LEN_MAX).contains(&len) {
            return None;
        }
        let mut unused = self.unused();
        // Newest first: it may still be in the CPU cache.
        let fits = |bytes: &Vec<u8>| bytes.len() >= len && bytes.len() / 2 < len;
        let found = unused.iter().rposition(fits)?;
        unused.remove(found)
    }

    fn give_back(&self, bytes: Vec<u8>) {
        if !(KEPT_LEN_MIN..=KEPT_LEN_MAX).contains(&bytes.len()) {
            return;
        }
        let mut too_many = Vec::new();
        let mut unused = self.unused();
        unused.push_back(bytes);
        let mut kept: usize = unused.iter().map(Vec::len).sum();
        // The least recently used buffers go first.
        while kept > KEPT_BYTES_MAX
            && let Some(oldest) = unused.pop_front()
        {
            kept -= oldest.len();
            too_many.push(oldest);
        }
    }
}

/// A buffer to read into. Returns to the pool when the last reference to its bytes is dropped.
#[derive(Debug)]
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    len: usize,
    pool: &'static Pool,
}

impl Buffer {
    /// Returns a buffer with arbitrary content.
    pub(crate) fn with_len(len: usize) -> Self {
        POOL.take(len)
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }

    /// Returns the content without copying it. All of it must have been written.
    pub(crate) fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.pool.give_back(std::mem::take(&mut self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool() -> &'static Pool {
        Box::leak(Box::new(Pool::new()))
    }

    #[test]
    fn reuses_buffers_of_similar_length() {
        let pool = pool();
        let mut first = pool.take(100_000);
        first.as_mut_slice().fill(7);
        let (address, bytes) = (first.as_ref().as_ptr(), first.into_bytes());
        let part = bytes.slice(50_000..);
        drop(bytes);
        assert_ne!(pool.take(100_000).as_ref().as_ptr(), address, "a part of it is in use");
        assert_eq!(part, [7; 50_000][..]);
        drop(part);
        // Too long for the first request, too short for the second.
        assert_ne!(pool.take(50_000).as_ref().as_ptr(), address);
        assert_ne!(pool.take(200_000).as_ref().as_ptr(), address);
        let again = pool.take(90_000);
        assert_eq!((again.as_ref().as_ptr(), again.as_ref().len()), (address, 90_000));
    }

    #[test]
    fn keeps_bounded_bytes_of_newest_buffers() {
        let pool = pool();
        let lens = [0, 1, KEPT_LEN_MIN - 1, KEPT_LEN_MAX + 1, 8 << 20];
        for len in lens {
            assert_eq!(pool.take(len).as_ref(), vec![0; len]);
        }
        assert!(pool.unused().is_empty());
        let many: Vec<_> = (0..100).map(|at| pool.take(KEPT_LEN_MIN + at * 1000)).collect();
        let newest = many.last().unwrap().bytes.len();
        drop(many);
        let kept: usize = pool.unused().iter().map(Vec::len).sum();
        assert!((KEPT_BYTES_MAX - KEPT_LEN_MAX..=KEPT_BYTES_MAX).contains(&kept), "{kept}");
        assert_eq!(pool.unused().back().unwrap().len(), newest);
    }
}
