//! Who reads on: a reader of old entries that comes back for what follows gets the disk to fetch
//! some more than it asked for, where that lies scattered. The bytes go to the page cache, which
//! bounds and drops them.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use crate::How;

/// Bytes of frames made ready for the reads to come.
const AHEAD_BYTES: usize = 2 << 20;
/// Readers that are remembered; one of old entries only, and only between two of its reads.
const READERS_MAX: usize = 64;

/// Readers that have waited for the disk lately, the latest last.
#[derive(Debug, Default)]
pub(crate) struct Readers(Mutex<VecDeque<Reader>>);

#[derive(Debug)]
struct Reader {
    /// `None` for one that reads by index.
    stream: Option<u64>,
    /// From where it was served to to where more was made ready.
    next: Range<u64>,
}

impl Readers {
    /// Bytes to fetch beyond what a read asks for: none if it follows no other.
    pub(crate) fn ahead(&self, stream: Option<u64>, start: u64, how: How) -> usize {
        if how != How::Blocking {
            return 0;
        }
        let mut readers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // What was made ready may have been read without waiting meanwhile.
        let follows =
            |r: &Reader| r.stream == stream && (r.next.start..=r.next.end).contains(&start);
        let Some(at) = readers.iter().position(follows) else { return 0 };
        readers.remove(at);
        AHEAD_BYTES
    }

    /// Notes where a read ended and how far beyond it more was made ready.
    pub(crate) fn note(&self, stream: Option<u64>, next: Range<u64>, how: How) {
        if how != How::Blocking {
            return;
        }
        let mut readers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if readers.len() >= READERS_MAX {
            readers.pop_front();
        }
        readers.push_back(Reader { stream, next });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_read_that_goes_on_from_another_fetches_more() {
        let readers = Readers::default();
        let ahead = |stream, start| readers.ahead(stream, start, How::Blocking) > 0;
        assert!(!ahead(None, 0));
        readers.note(None, 10..10, How::Blocking);
        readers.note(Some(1), 20..20, How::Cached);
        readers.note(Some(1), 20..20, How::Passing);
        assert!(!ahead(Some(1), 20), "it did not wait");
        assert!(!ahead(Some(1), 10) && !ahead(None, 9) && !ahead(None, 11));
        assert!(ahead(None, 10));
        assert!(!ahead(None, 10), "once");
        // It read up to 25 from what was ready.
        readers.note(None, 20..30, How::Blocking);
        assert_eq!(readers.ahead(None, 25, How::Cached), 0);
        assert!(ahead(None, 25));
    }

    #[test]
    fn the_oldest_readers_are_forgotten() {
        let readers = Readers::default();
        for stream in 0..1000 {
            readers.note(Some(stream), 5..5, How::Blocking);
        }
        let known = (0..1000).filter(|s| readers.ahead(Some(*s), 5, How::Blocking) > 0).count();
        assert_eq!(known, READERS_MAX);
    }
}
