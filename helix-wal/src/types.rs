//! The plain values that cross the door of the log.
//! No behaviour beyond constructors.

use bytes::Bytes;

use crate::Error;

/// An entry's whole identity: two entries with equal ids have equal bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct LogId {
    pub term: u64,
    pub index: u64,
}

/// Bytes with the checksum that their author computed. The log never computes it anew on the way
/// in: `crc` is CRC-32 (IEEE) continued from `crc_seed` over `bytes`, so a checksum that also
/// covers something before the bytes needs no second pass.
#[derive(Debug, Clone, Default)]
pub struct Payload {
    pub bytes: Bytes,
    pub crc: u32,
    pub crc_seed: u32,
}

/// What is appended.
#[derive(Debug, Clone)]
pub struct Entry {
    pub id: LogId,
    /// Stream that the entry is meant for, 0 for none. Part of the frame's checked identity.
    pub stream: u64,
    /// The small part that replay needs; at most 64 KiB. Covered by the frame header's checksum.
    pub head: Bytes,
    pub payload: Payload,
}

/// Where the state machine put an entry: `count` positions of `stream` from `first` on.
/// `time` is opaque to the log and never decreases within a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    pub stream: u64,
    pub first: u64,
    pub count: u32,
    pub time: u64,
}

/// An entry as a reader of a stream gets it.
#[derive(Debug, Clone)]
pub struct StoredEntry {
    pub id: LogId,
    pub placement: Placement,
    pub head: Bytes,
    pub payload: Payload,
}

/// An entry that its stream still needs, and where the state machine put it.
#[derive(Debug, Clone)]
pub struct LiveEntry {
    pub id: LogId,
    pub placement: Placement,
    pub head: Bytes,
    pub payload: Payload,
}

/// What [`crate::Wal::read_live`] found.
#[derive(Debug, Clone, Default)]
pub struct LiveEntries {
    /// By index.
    pub entries: Vec<LiveEntry>,
    /// Everything live at or below this index, and above the one that was asked from, is here.
    pub upto: u64,
}

/// How a read may behave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// Only what is in memory; `Ok(None)` where anything else would be needed.
    Memory,
    /// Only what is in memory or in the page cache; `Ok(None)` where the disk would be needed.
    Cached,
    /// Waits for the disk: only on a thread that may block.
    Blocking,
    /// The same for who passes by once: reads no more than it asked for, and past the page cache,
    /// which keeps what others read. As `Blocking` where the storage has no direct I/O.
    Passing,
}

/// One segment's share of a stream, for retention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamRow {
    pub segment: u64,
    pub sealed: bool,
    /// Half-open range of positions.
    pub first: u64,
    pub next: u64,
    /// Bytes of frames.
    pub bytes: u64,
    pub last_time: u64,
}

/// The log as Raft sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogState {
    pub vote: Option<Bytes>,
    pub purged: Option<LogId>,
    /// Last entry, or `purged` when the log is empty.
    pub last: Option<LogId>,
    pub committed: Option<LogId>,
    /// Last entry known to be on stable storage.
    pub synced: Option<LogId>,
}

/// What an open found.
#[derive(Debug, Clone, Default)]
pub struct Recovered {
    /// The identity given at creation (see `Options::identity`).
    pub identity: Bytes,
    /// Whether the folder was empty.
    pub created: bool,
    pub state: LogState,
    /// The newest checkpoint of the state machine: all entries up to the id are in it.
    pub checkpoint: Option<(LogId, Bytes)>,
    /// Damage to sealed segments whose entries are withheld: reading them, by index or by a
    /// position that may be among them, fails with this.
    pub withheld: Vec<Error>,
    /// Bytes of a torn tail that were cut because nothing shows that they had been synced.
    pub cut_bytes: u64,
}

/// Bounds of the classes in which sync times are counted, in microseconds, rising.
pub const SYNC_BOUNDS_US: [u32; 15] = [
    50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000,
    1_000_000, 5_000_000,
];

/// Figures for people and metrics. Times in microseconds, from a bounded recent history.
#[derive(Debug, Clone, Default)]
pub struct Stats {
    pub segments: u64,
    pub segment_bytes: u64,
    /// Bytes of the segments that hold the log, without the ready ones.
    pub held_bytes: u64,
    pub ready_segments: u64,
    pub free_bytes: u64,
    /// Requests in the queue, which the writer has not taken yet, and their payload bytes.
    pub queued_requests: u64,
    pub queued_bytes: u64,
    /// Segments that retention has freed since the log was opened, and their bytes.
    pub freed_segments: u64,
    pub freed_bytes: u64,
    pub syncs: u64,
    /// Times of all syncs together, and how many took at most as long as the bound of
    /// [`SYNC_BOUNDS_US`] at the same place and longer than the one before; the last one counts
    /// those that took longer than every bound.
    pub sync_sum_us: u64,
    pub sync_counts: [u64; SYNC_BOUNDS_US.len() + 1],
    pub sync_p50_us: u64,
    pub sync_p99_us: u64,
    pub groups: u64,
    pub group_bytes: u64,
    pub direct_io: bool,
    /// Segments that were written at once, by a compaction or for entries from elsewhere.
    pub cold_segments: u64,
    /// Bytes of frames that a stream still needs.
    pub live_bytes: u64,
    /// Bytes of frames that compaction has written since the log was opened.
    pub rewritten_bytes: u64,
}
