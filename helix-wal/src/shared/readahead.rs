//! Read-ahead for sequential readers of old entries.
//!
//! The disk fetches more than a read asked for, if the entries are scattered. The page cache holds
//! the bytes and evicts them.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Mutex;

use crate::sync::IgnorePoison;
use crate::types::ReadMode;

/// Bytes of frames fetched ahead of the next reads.
const AHEAD_BYTES: usize = 2 << 20;
/// Maximum number of tracked readers. Only readers of old entries are tracked, between two reads.
const READERS_MAX: usize = 64;

/// Readers that waited for the disk recently, the latest last.
#[derive(Debug, Default)]
pub(crate) struct Readahead(Mutex<VecDeque<TrackedReader>>);

#[derive(Debug)]
struct TrackedReader {
    /// `None` for a reader by index.
    stream: Option<u64>,
    /// From the end of its last read to the end of the read-ahead.
    next: Range<u64>,
}

impl Readahead {
    /// Returns the bytes to read ahead: 0 unless the read continues another one.
    pub(crate) fn bytes_ahead(&self, stream: Option<u64>, start: u64, mode: ReadMode) -> usize {
        if mode != ReadMode::Blocking {
            return 0;
        }
        let mut readers = self.0.lock().ignore_poison();
        // A part of the read-ahead may have been read without waiting meanwhile.
        let follows =
            |r: &TrackedReader| r.stream == stream && (r.next.start..=r.next.end).contains(&start);
        let Some(at) = readers.iter().position(follows) else { return 0 };
        readers.remove(at);
        AHEAD_BYTES
    }

    /// Records the end of a read and of its read-ahead.
    pub(crate) fn record(&self, stream: Option<u64>, next: Range<u64>, mode: ReadMode) {
        if mode != ReadMode::Blocking {
            return;
        }
        let mut readers = self.0.lock().ignore_poison();
        if readers.len() >= READERS_MAX {
            readers.pop_front();
        }
        readers.push_back(TrackedReader { stream, next });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_ahead_only_for_continued_reads() {
        let readers = Readahead::default();
        let bytes_ahead =
            |stream, start| readers.bytes_ahead(stream, start, ReadMode::Blocking) > 0;
        assert!(!bytes_ahead(None, 0));
        readers.record(None, 10..10, ReadMode::Blocking);
        readers.record(Some(1), 20..20, ReadMode::CachedOnly);
        readers.record(Some(1), 20..20, ReadMode::Direct);
        assert!(!bytes_ahead(Some(1), 20), "it did not wait");
        assert!(!bytes_ahead(Some(1), 10) && !bytes_ahead(None, 9) && !bytes_ahead(None, 11));
        assert!(bytes_ahead(None, 10));
        assert!(!bytes_ahead(None, 10), "once");
        // The reader read up to 25 from the read-ahead.
        readers.record(None, 20..30, ReadMode::Blocking);
        assert_eq!(readers.bytes_ahead(None, 25, ReadMode::CachedOnly), 0);
        assert!(bytes_ahead(None, 25));
    }

    #[test]
    fn forgets_oldest_readers() {
        let readers = Readahead::default();
        for stream in 0..1000 {
            readers.record(Some(stream), 5..5, ReadMode::Blocking);
        }
        let known =
            (0..1000).filter(|s| readers.bytes_ahead(Some(*s), 5, ReadMode::Blocking) > 0).count();
        assert_eq!(known, READERS_MAX);
    }
}
