//! In-memory state of each live segment.

use std::sync::Arc;

use crate::files::segment::Segment;
use crate::format::footer::{DirectoryRow, Trailer};
use crate::format::frame::Context;
use crate::types::LogId;

/// A live segment: listed in the state file, or begun after it was written.
#[derive(Debug)]
pub(crate) struct LiveSegment {
    /// `None` in an in-memory log, where a segment is only a unit of retention.
    pub segment: Option<Arc<Segment>>,
    /// End of its groups and the state of the log there, once the next segment is begun.
    pub rolled: Option<(u64, Context)>,
    pub sealed: bool,
    /// First index and last id, once sealed; `None` if it has no entries.
    pub entries: Option<(u64, LogId)>,
    pub frame_bytes: u64,
    /// Streams with a share in it, once for each share. Cleared when the segment is sealed.
    pub streams: Vec<u64>,
    /// Number of shares that are not trimmed yet.
    pub live_rows: usize,
    /// Bytes of frames in the live shares, without the trimmed part of a share.
    pub live_bytes: u64,
    pub live_entries: u64,
    /// Number of streams in it, once sealed.
    pub stream_count: u32,
    /// No longer listed in the next state file.
    pub removing: bool,
    /// Read or written by a running compaction, so it must not be freed.
    pub busy: bool,
    /// Receives the shares of the segments that it replaces, one after the other.
    pub receiving_rows: bool,
    /// A compaction found damage in it, so it is never compacted again.
    pub damage_found: bool,
}

impl LiveSegment {
    pub(crate) fn new(segment: Option<Arc<Segment>>) -> Self {
        Self {
            segment,
            rolled: None,
            sealed: false,
            entries: None,
            frame_bytes: 0,
            streams: Vec::new(),
            live_rows: 0,
            live_bytes: 0,
            live_entries: 0,
            stream_count: 0,
            removing: false,
            busy: false,
            receiving_rows: false,
            damage_found: false,
        }
    }
}

/// Counts the streams of a directory, whose rows are sorted by stream.
pub(crate) fn streams_in(directory: &[DirectoryRow]) -> u32 {
    directory.chunk_by(|a, b| a.stream == b.stream).count() as u32
}

impl LiveSegment {
    /// Creates a cold segment, which is sealed from the start.
    pub(crate) fn cold(
        segment: Arc<Segment>,
        trailer: &Trailer,
        directory: &[DirectoryRow],
    ) -> Self {
        segment.set_trailer(trailer.clone());
        let mut held = Self::new(Some(segment));
        held.sealed = true;
        held.entries = trailer.entries;
        held.frame_bytes = trailer.frame_bytes;
        held.count_shares(directory);
        held
    }

    /// Creates a cold segment that will receive the shares of other segments.
    pub(crate) fn receiving_rows(
        segment: Arc<Segment>,
        trailer: &Trailer,
        directory: &[DirectoryRow],
    ) -> Self {
        let stream_count = streams_in(directory);
        let held = Self::cold(segment, trailer, &[]);
        Self { stream_count, busy: true, receiving_rows: true, ..held }
    }

    pub(crate) fn count_shares(&mut self, directory: &[DirectoryRow]) {
        self.stream_count = streams_in(directory);
        self.live_rows = directory.len();
        self.live_bytes = directory.iter().map(|share| share.bytes).sum();
        self.live_entries = directory.iter().map(|share| u64::from(share.entries)).sum();
    }

    /// Returns whether reads by index use this segment.
    ///
    /// While a segment receives shares, its entries are read from the segments that it replaces.
    pub(crate) fn is_readable_by_index(&self) -> bool {
        !self.receiving_rows
    }

    /// Returns whether it is sealed and all of its entries have left the Raft log, up to `upto`.
    pub(crate) fn is_purged(&self, upto: Option<u64>) -> bool {
        let below = |(_, last): (u64, LogId)| upto.is_some_and(|upto| last.index <= upto);
        self.sealed && self.entries.is_none_or(below)
    }
}
