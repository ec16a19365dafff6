//! Cleaning: a request to rewrite the entries of some streams through a filter.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::error::Error;
use crate::types::{CleanMark, Entry, Payload, Placement};

/// Decides what becomes of the entries of cleaned streams while a compaction copies them.
pub trait EntryFilter: Send + Sync {
    /// Judges an entry of a cleaned stream. Called again after a crash or a failed attempt.
    ///
    /// # Errors
    /// Fails the request with this text as [`Error::Unusable`]. Segments already rewritten stay so.
    fn filter(&self, placement: &Placement, entry: &Entry) -> Result<FilteredEntry, String>;

    /// Returns the thread that judges the entries; `None` for the keeper's thread.
    ///
    /// It should have a lower priority than the threads that append. It takes none of the log's
    /// locks.
    fn worker(&self) -> Option<&dyn BackgroundWorker> {
        None
    }

    /// Returns the bytes to charge to the rate limit for one entry; for compressed entries, the
    /// decompressed size.
    fn work_bytes(&self, entry: &Entry) -> u64 {
        entry.payload.bytes.len() as u64
    }
}

/// Runs pieces of a cleaning on another thread.
pub trait BackgroundWorker: Send + Sync {
    /// Queues a piece of work, of at most a few milliseconds of CPU time.
    ///
    /// Work that panics, or that is dropped before it runs, poisons its log.
    fn submit(&self, work: Box<dyn FnOnce() + Send>);
}

/// Decision about an entry. The entry keeps its id, its stream and its positions.
#[derive(Debug, Clone)]
pub enum FilteredEntry {
    /// Copies the entry unchanged.
    Unchanged,
    /// Removes the entry, as if it were trimmed.
    Removed,
    /// Replaces the head and the payload.
    Replaced {
        /// New head.
        head: Bytes,
        /// New payload with its checksum.
        payload: Payload,
    },
}

/// A request to rewrite entries of streams: see [`Wal::clean`](crate::Wal::clean).
pub struct CleanRequest {
    /// Judges the entries.
    pub filter: Arc<dyn EntryFilter>,
    /// Position below which each stream is rewritten.
    pub below: BTreeMap<u64, u64>,
    /// Positions of each stream that the filter may change. Segments without any are left alone.
    pub dirty: BTreeMap<u64, Vec<Range<u64>>>,
    /// Marks that become durable once everything is rewritten, by stream.
    pub marks: BTreeMap<u64, CleanMark>,
    /// Called once, when the marks are durable or the request has failed.
    pub done: Box<dyn FnOnce(Result<(), Error>) + Send>,
}

impl fmt::Debug for CleanRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CleanRequest").field("below", &self.below).finish_non_exhaustive()
    }
}

/// A running request.
#[derive(Debug)]
pub(crate) struct Cleaning {
    pub request: CleanRequest,
    /// Segments that are not rewritten yet.
    pub left: Vec<u64>,
}

impl CleanRequest {
    pub(crate) fn finish(self, result: Result<(), Error>) {
        let Self { filter, below, dirty, marks, done } = self;
        // Dropped first, so that the caller has the last reference to the filter, which may be
        // large.
        drop((filter, below, dirty, marks));
        done(result);
    }
}
