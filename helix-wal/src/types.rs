//! Plain values of the public API.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;

use crate::error::Error;

/// Identity of an entry: two entries with equal ids have equal bytes, until cleaning rewrites one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct LogId {
    pub term: u64,
    pub index: u64,
}

/// Bytes with the checksum that their author computed.
///
/// `crc` is CRC-32 (IEEE) continued from `crc_seed` over `bytes`, so the checksum can also cover
/// something before the bytes. The log does not recompute it on append.
#[derive(Debug, Clone, Default)]
pub struct Payload {
    pub bytes: Bytes,
    pub crc: u32,
    pub crc_seed: u32,
}

/// An entry to append.
#[derive(Debug, Clone)]
pub struct Entry {
    pub id: LogId,
    /// Stream of the entry, 0 for none. Covered by the checksum of the frame.
    pub stream: u64,
    /// The small part that replay needs; at most 64 KiB. Covered by the checksum of the frame
    /// header.
    pub head: Bytes,
    pub payload: Payload,
}

/// Positions that the state machine assigned to an entry: `count` positions from `first` on.
///
/// `time` is opaque to the log and never decreases within a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    pub stream: u64,
    pub first: u64,
    pub count: u32,
    pub time: u64,
}

/// An entry read by stream position.
#[derive(Debug, Clone)]
pub struct StoredEntry {
    pub id: LogId,
    pub placement: Placement,
    pub head: Bytes,
    pub payload: Payload,
}

/// An entry that its stream still needs, with its placement.
#[derive(Debug, Clone)]
pub struct LiveEntry {
    pub id: LogId,
    pub placement: Placement,
    pub head: Bytes,
    pub payload: Payload,
}

/// Result of [`crate::Wal::read_live`].
#[derive(Debug, Clone, Default)]
pub struct LiveEntries {
    /// Sorted by index.
    pub entries: Vec<LiveEntry>,
    /// The result includes every live entry of the range up to this index.
    pub upto: u64,
}

/// Sources that a read may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadMode {
    /// Reads only from memory; `Ok(None)` if anything else would be needed.
    MemoryOnly,
    /// Reads only from memory and the page cache; `Ok(None)` if the disk would be needed.
    CachedOnly,
    /// Waits for the disk. Only on a thread that may block.
    Blocking,
    /// Like `Blocking`, with direct I/O and no read-ahead: for one-off scans such as catch-up.
    ///
    /// Same as `Blocking` if the storage has no direct I/O.
    Direct,
}

/// Progress of cleaning a stream; the log only stores it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CleanMark {
    /// Every position below is clean.
    pub upto: u64,
    /// A second position, which the caller defines.
    pub also: u64,
}

/// A stream's share of one segment, for retention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamRow {
    pub segment: u64,
    pub sealed: bool,
    /// Half-open range of positions, with `next`.
    pub first: u64,
    pub next: u64,
    /// Bytes of frames.
    pub bytes: u64,
    pub last_time: u64,
}

/// The Raft view of the log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogState {
    pub vote: Option<Bytes>,
    pub purged: Option<LogId>,
    /// Last entry, or `purged` if the log is empty.
    pub last: Option<LogId>,
    pub committed: Option<LogId>,
    /// Last entry known to be durable.
    pub synced: Option<LogId>,
}

/// Result of an open.
#[derive(Debug, Clone, Default)]
pub struct Recovered {
    /// The identity given at creation (see [`Options::identity`](crate::Options::identity)).
    pub identity: Bytes,
    /// The data directory was empty.
    pub created: bool,
    pub state: LogState,
    /// The newest checkpoint of the state machine, which covers all entries up to the id.
    pub checkpoint: Option<(LogId, Bytes)>,
    /// Damage to quarantined segments.
    ///
    /// Reads of their entries fail with it, by index and by every position that they may hold.
    pub quarantined: Vec<Error>,
    /// Bytes of a torn tail that were discarded, because nothing shows that they had been synced.
    pub torn_bytes: u64,
    /// Where they were: a segment file, and the range of its bytes.
    pub torn_tail: Option<(String, Range<u64>)>,
}

/// Upper bounds of the sync time histogram, in microseconds, ascending.
pub const SYNC_BOUNDS_US: [u32; 15] = [
    50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000,
    1_000_000, 5_000_000,
];

/// Statistics of a log. Times are in microseconds; percentiles cover the last 1024 syncs.
#[derive(Debug, Clone, Default)]
pub struct WalStats {
    pub segments: u64,
    pub segment_bytes: u64,
    /// Bytes of the segments of the log, without the ready ones.
    pub held_bytes: u64,
    pub ready_segments: u64,
    /// Segments prepared by zero-filling since the log was opened.
    pub zeroed_segments: u64,
    /// Zeroes written for that, also for segments that were then only allocated to their end.
    pub zeroed_bytes: u64,
    /// Segments prepared by allocating their space since the log was opened.
    pub allocated_segments: u64,
    pub free_bytes: u64,
    /// Requests that the writer has not taken from the queue yet.
    pub queued_requests: u64,
    /// Payload bytes of those requests.
    pub queued_bytes: u64,
    /// Segments freed by retention since the log was opened.
    pub freed_segments: u64,
    /// Bytes of those segments.
    pub freed_bytes: u64,
    pub syncs: u64,
    /// Sum of all sync times.
    pub sync_sum_us: u64,
    /// Histogram of sync times by the bounds of [`SYNC_BOUNDS_US`]; the last count is above all.
    pub sync_counts: [u64; SYNC_BOUNDS_US.len() + 1],
    pub sync_p50_us: u64,
    pub sync_p99_us: u64,
    pub groups: u64,
    pub group_bytes: u64,
    pub direct_io: bool,
    /// Cold segments, written by a compaction or for entries of another replica.
    pub cold_segments: u64,
    /// Bytes of frames that a stream still needs.
    pub live_bytes: u64,
    /// Bytes of frames written by compaction since the log was opened.
    pub rewritten_bytes: u64,
}

/// Called once, from the writer, when the request and all earlier ones are durable or have failed.
pub type DurableCallback = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// Time at which a step must run again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextStep {
    /// At once: there is more to do.
    Now,
    /// When woken, or at the latest after this time.
    After(Duration),
    /// When woken.
    Idle,
    /// Never: the log is closed or poisoned.
    Done,
}
