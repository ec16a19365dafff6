//! Memory that disk reads go into, used again. Fresh memory has to be zeroed before the system can
//! copy into it, and brought into the processor's caches twice: for a batch in the page cache that
//! is about a twentieth of what the node does for a fetch.
//!
//! What a buffer held before is never seen: it is shown to others only when all of it was read.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

/// What waits to be used again: a few readers' batches.
const KEPT_BYTES_MAX: usize = 4 << 20;
/// Smaller ones are had for less than another turn here.
const KEPT_LEN_MIN: usize = 16 << 10;
/// A larger one would drive out too many others.
const KEPT_LEN_MAX: usize = KEPT_BYTES_MAX / 2;
/// Lengths are multiples of this: batches of about the same size fit into each other's buffers.
const LEN_STEP: usize = 16 << 10;

static POOL: Pool = Pool::new();

/// Buffers that wait, the one that has waited longest first.
#[derive(Debug)]
struct Pool {
    waiting: Mutex<VecDeque<Vec<u8>>>,
}

impl Pool {
    const fn new() -> Self {
        Self { waiting: Mutex::new(VecDeque::new()) }
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<Vec<u8>>> {
        // Whatever has happened, all that is in it are buffers.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&'static self, len: usize) -> Buffer {
        let bytes = self.find(len).unwrap_or_else(|| match len {
            KEPT_LEN_MIN..=KEPT_LEN_MAX => vec![0; len.next_multiple_of(LEN_STEP)],
            _ => vec![0; len],
        });
        Buffer { bytes, len, pool: self }
    }

    /// One that is long enough, and not twice as long: who holds a read is charged for its length.
    fn find(&self, len: usize) -> Option<Vec<u8>> {
        if !(KEPT_LEN_MIN..=KEPT_LEN_MAX).contains(&len) {
            return None;
        }
        let mut waiting = self.waiting();
        // The newest first: it may be in the processor's cache yet.
        let fits = |bytes: &Vec<u8>| bytes.len() >= len && bytes.len() / 2 < len;
        let found = waiting.iter().rposition(fits)?;
        waiting.remove(found)
    }

    fn give_back(&self, bytes: Vec<u8>) {
        if !(KEPT_LEN_MIN..=KEPT_LEN_MAX).contains(&bytes.len()) {
            return;
        }
        let mut too_many = Vec::new();
        let mut waiting = self.waiting();
        waiting.push_back(bytes);
        let mut kept: usize = waiting.iter().map(Vec::len).sum();
        // What is not asked for any more is what goes.
        while kept > KEPT_BYTES_MAX
            && let Some(oldest) = waiting.pop_front()
        {
            kept -= oldest.len();
            too_many.push(oldest);
        }
    }
}

/// A buffer to read into; goes back when it, or the last that refers to its bytes, is dropped.
#[derive(Debug)]
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    len: usize,
    pool: &'static Pool,
}

impl Buffer {
    /// With anything in it.
    pub(crate) fn with_len(len: usize) -> Self {
        POOL.take(len)
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }

    /// The content, without a copy, once all of it has been written.
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
    fn a_buffer_is_used_again_for_what_is_about_as_long() {
        let pool = pool();
        let mut first = pool.take(100_000);
        first.as_mut_slice().fill(7);
        let (address, bytes) = (first.as_ref().as_ptr(), first.into_bytes());
        let part = bytes.slice(50_000..);
        drop(bytes);
        assert_ne!(pool.take(100_000).as_ref().as_ptr(), address, "a part of it is in use");
        assert_eq!(part, [7; 50_000][..]);
        drop(part);
        // Too long for the one, too short for the other.
        assert_ne!(pool.take(50_000).as_ref().as_ptr(), address);
        assert_ne!(pool.take(200_000).as_ref().as_ptr(), address);
        let again = pool.take(90_000);
        assert_eq!((again.as_ref().as_ptr(), again.as_ref().len()), (address, 90_000));
    }

    #[test]
    fn it_keeps_no_more_than_it_may_and_the_newest_of_that() {
        let pool = pool();
        let lens = [0, 1, KEPT_LEN_MIN - 1, KEPT_LEN_MAX + 1, 8 << 20];
        for len in lens {
            assert_eq!(pool.take(len).as_ref(), vec![0; len]);
        }
        assert!(pool.waiting().is_empty());
        let many: Vec<_> = (0..100).map(|at| pool.take(KEPT_LEN_MIN + at * 1000)).collect();
        let newest = many.last().unwrap().bytes.len();
        drop(many);
        let kept: usize = pool.waiting().iter().map(Vec::len).sum();
        assert!((KEPT_BYTES_MAX - KEPT_LEN_MAX..=KEPT_BYTES_MAX).contains(&kept), "{kept}");
        assert_eq!(pool.waiting().back().unwrap().len(), newest);
    }
}
