//! One memory limit, and the share of each part of a node. Each share is a bound that something
//! holds, so the sum of the bounds is what a node can come to. `docs/limits.md` has the table.
//! Pure.

use crate::limits::{
    BATCH_BYTES_MAX, CALL_BYTES, CONNECTION_BYTES, LOG_BUFFER_BYTES, MESSAGE_BYTES_MAX,
    PARTITION_READ_BYTES, SHARD_BYTES_IN_FLIGHT_MAX,
};

/// What a node may take unless it is told otherwise.
pub const MEMORY_LIMIT_DEFAULT: u64 = 512 << 20;

/// Below it the largest message and the largest answer would not fit their shares.
pub const MEMORY_LIMIT_MIN: u64 = 256 << 20;

/// A shard has the largest batch in flight, whatever the limit is.
const IN_FLIGHT_MIN: u64 = BATCH_BYTES_MAX as u64;

/// What is worth keeping of the footers of a shard's sealed segments.
const FOOTERS_BYTES: std::ops::RangeInclusive<u64> = 1 << 20..=8 << 20;

/// The bounds of one node's parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shares {
    /// What they were derived from.
    pub limit: u64,
    /// Client connections at the same time.
    pub connections: usize,
    /// HTTP/2 windows of all connections together, beyond the least one that each has.
    pub windows: u64,
    /// Calls at the same time, over all connections.
    pub calls: usize,
    /// Bytes of requests that have begun to arrive and are not yet in a log or answered.
    pub received: usize,
    /// Of these, most of one connection.
    pub received_per_connection: usize,
    /// Bytes of answers that readers have not taken yet.
    pub answers: usize,
    /// Partitions named by all open fetches and subscriptions together.
    pub partitions_read: usize,
    /// Bytes of all shards' logs.
    pub logs: u64,
}

impl Shares {
    /// Divides `limit`, at least [`MEMORY_LIMIT_MIN`]. In parts of 32: connections 12, logs 5,
    /// requests 4, answers 4, windows 2, calls 2, partitions read 1; the rest is the program's.
    pub fn of(limit: u64) -> Self {
        let part = limit / 32;
        let count = |parts: u64, bytes: u64| usize::try_from(parts * part / bytes);
        let received = to_usize(4 * part);
        Self {
            limit,
            connections: count(12, CONNECTION_BYTES).unwrap_or(usize::MAX),
            windows: 2 * part,
            calls: count(2, CALL_BYTES).unwrap_or(usize::MAX),
            received,
            received_per_connection: (received / 4).max(MESSAGE_BYTES_MAX),
            answers: to_usize(4 * part),
            partitions_read: count(1, PARTITION_READ_BYTES).unwrap_or(usize::MAX),
            logs: 5 * part,
        }
    }

    /// Newest records that each of so many shards keeps in memory.
    pub fn tail_bytes(&self, shards: u64) -> u64 {
        let caches = self.caches(shards);
        // Two thirds: a footer page costs one read when it is missed, a tail one for each reader.
        (caches - caches / 3).clamp(IN_FLIGHT_MIN, SHARD_BYTES_IN_FLIGHT_MAX as u64)
    }

    /// Footer pages that each of so many shards keeps in memory beside such a tail; `None` where
    /// the share of the logs does not reach for it.
    pub fn footer_bytes(&self, shards: u64, tail_bytes: u64) -> Option<u64> {
        let left = self.caches(shards).checked_sub(tail_bytes.max(IN_FLIGHT_MIN))?;
        (left >= *FOOTERS_BYTES.start()).then(|| left.min(*FOOTERS_BYTES.end()))
    }

    /// The least limit at which so many shards have room for such tails, in whole MiB.
    pub fn limit_for(shards: u64, tail_bytes: u64) -> u64 {
        let tail = tail_bytes.max(IN_FLIGHT_MIN);
        let shard = tail.saturating_add(LOG_BUFFER_BYTES + FOOTERS_BYTES.start());
        let logs = shards.max(1).saturating_mul(shard);
        let limit = logs.div_ceil(5).saturating_mul(32).max(MEMORY_LIMIT_MIN);
        limit.div_ceil(1 << 20).saturating_mul(1 << 20)
    }

    /// What a shard's log may keep for its readers.
    fn caches(&self, shards: u64) -> u64 {
        (self.logs / shards.max(1)).saturating_sub(LOG_BUFFER_BYTES)
    }
}

impl Default for Shares {
    fn default() -> Self {
        Self::of(MEMORY_LIMIT_DEFAULT)
    }
}

/// Bytes of batches in flight in one shard: those that its tail holds. Beyond it followers would
/// have to be served from the disk that is written to.
pub fn bytes_in_flight(tail_bytes: usize) -> usize {
    tail_bytes.clamp(BATCH_BYTES_MAX as usize, SHARD_BYTES_IN_FLIGHT_MAX)
}

fn to_usize(bytes: u64) -> usize {
    // More than a semaphore can count is as good as no limit.
    usize::try_from(bytes).unwrap_or(usize::MAX).min(usize::MAX >> 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{FETCH_BYTES_MAX, FRAME_PART};

    #[test]
    fn the_shares_add_up_to_less_than_the_limit() {
        for limit in [MEMORY_LIMIT_MIN, MEMORY_LIMIT_DEFAULT, 1 << 30, 16 << 30] {
            let shares = Shares::of(limit);
            let sum = shares.connections as u64 * CONNECTION_BYTES
                + shares.windows
                + shares.calls as u64 * CALL_BYTES
                + shares.received as u64
                + shares.answers as u64
                + shares.partitions_read as u64 * PARTITION_READ_BYTES
                + shares.logs;
            assert!(sum <= limit - limit / 16, "{limit}: {sum}");
            // Of the program's: what frames are larger than the least that a connection has.
            assert!(sum + shares.windows / FRAME_PART <= limit - limit / 32);
            for shards in [1, 2, 3, 6, 12] {
                let tail = shares.tail_bytes(shards);
                if let Some(footers) = shares.footer_bytes(shards, tail) {
                    let in_memory = tail.max(bytes_in_flight(tail as usize) as u64);
                    let shard = in_memory + footers + LOG_BUFFER_BYTES;
                    assert!(shards * shard <= shares.logs, "{limit} {shards}");
                }
            }
        }
    }

    #[test]
    fn the_least_limit_has_room_for_the_largest_request_and_answer() {
        let least = Shares::of(MEMORY_LIMIT_MIN);
        assert!(least.received_per_connection <= least.received);
        assert!(MESSAGE_BYTES_MAX <= least.received_per_connection);
        assert!(FETCH_BYTES_MAX + BATCH_BYTES_MAX as usize <= least.answers);
    }

    #[test]
    fn more_shards_keep_less_each_until_there_is_no_room() {
        let shares = Shares::default();
        assert_eq!(shares.connections, 2048);
        assert_eq!(shares.tail_bytes(1), 16 << 20);
        assert_eq!(shares.footer_bytes(1, 16 << 20), Some(8 << 20));
        assert!(shares.tail_bytes(4) < shares.tail_bytes(2));
        assert!(shares.footer_bytes(6, shares.tail_bytes(6)).is_some());
        assert_eq!(shares.footer_bytes(8, shares.tail_bytes(8)), None);
        assert_eq!(shares.footer_bytes(1, 1 << 30), None);
    }

    #[test]
    fn the_limit_that_an_error_names_is_enough() {
        for (shards, tail) in [(1, 64 << 20), (3, 64 << 20), (64, 4 << 20), (2, 5)] {
            let limit = Shares::limit_for(shards, tail);
            assert!(Shares::of(limit).footer_bytes(shards, tail).is_some(), "{shards} {tail}");
        }
    }
}
