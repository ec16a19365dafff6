//! Divides a node's memory limit into one share for each of its parts.
//! Each share is an enforced bound, so their sum bounds the node. `docs/limits.md` has the table.
//! Pure.

use crate::limits::{
    BATCH_BYTES_MAX, CALL_BYTES, CONNECTION_BYTES, LOG_BUFFER_BYTES, MESSAGE_BYTES_MAX,
    PARTITION_READ_BYTES, SHARD_BYTES_IN_FLIGHT_MAX, TLS_CONNECTION_BYTES,
};

/// Default memory limit of a node.
pub const MEMORY_LIMIT_DEFAULT: u64 = 512 << 20;

/// Smallest memory limit at which the largest message and the largest response fit their shares.
pub const MEMORY_LIMIT_MIN: u64 = 256 << 20;

/// Bytes in flight that each shard has at any limit: the largest batch.
const IN_FLIGHT_MIN: u64 = BATCH_BYTES_MAX as u64;

/// Useful bounds of the footer cache of a shard's sealed segments.
const FOOTERS_BYTES: std::ops::RangeInclusive<u64> = 1 << 20..=8 << 20;

/// The memory shares of one node's parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryShares {
    /// Memory limit that the shares divide.
    pub limit: u64,
    /// Open client connections.
    pub connections: usize,
    /// Bytes of all HTTP/2 windows together, beyond the smallest window of each connection.
    pub window_bytes: u64,
    /// Open calls, over all connections.
    pub calls: usize,
    /// Bytes of requests that have arrived whole, and are not yet in a log or answered.
    pub request_bytes: usize,
    /// Bytes of requests of which only a part has arrived.
    pub arriving_bytes: usize,
    /// Bytes of those requests on one connection.
    pub connection_request_bytes: usize,
    /// Buffers in which large compressed batches are verified, each for the largest batch.
    pub decompressors: usize,
    /// Bytes of responses that clients have not read yet.
    pub response_bytes: usize,
    /// Bytes of the maps from keys to offsets in compaction by key, of all shards.
    pub key_map_bytes: usize,
    /// Partitions named by all open fetches and subscriptions together.
    pub partitions_read: usize,
    /// Bytes of all shards' logs.
    pub logs: u64,
}

impl MemoryShares {
    /// Divides `limit`, which must be at least [`MEMORY_LIMIT_MIN`].
    ///
    /// In parts of 32: connections 12, logs 5, responses 3.5, requests 2, windows 2, calls 2,
    /// arriving requests 1, decompression 1, partitions read 1, maps of keys 0.5. The rest is for
    /// the program.
    pub fn of(limit: u64) -> Self {
        let part = limit / 32;
        let count = |parts: u64, bytes: u64| usize::try_from(parts * part / bytes);
        let request_bytes = to_usize(2 * part);
        Self {
            limit,
            connections: count(12, CONNECTION_BYTES).unwrap_or(usize::MAX),
            window_bytes: 2 * part,
            calls: count(2, CALL_BYTES).unwrap_or(usize::MAX),
            request_bytes,
            arriving_bytes: to_usize(part),
            connection_request_bytes: (request_bytes / 4).max(MESSAGE_BYTES_MAX),
            decompressors: count(1, BATCH_BYTES_MAX.into()).unwrap_or(usize::MAX),
            response_bytes: to_usize(4 * part - part / 2),
            key_map_bytes: to_usize(part / 2),
            partitions_read: count(1, PARTITION_READ_BYTES).unwrap_or(usize::MAX),
            logs: 5 * part,
        }
    }

    /// Returns the shares of a node with TLS on the clients' port: a connection takes more memory.
    #[must_use]
    pub fn with_client_tls(self) -> Self {
        let bytes = 12 * (self.limit / 32);
        let connections = usize::try_from(bytes / (CONNECTION_BYTES + TLS_CONNECTION_BYTES));
        Self { connections: connections.unwrap_or(usize::MAX), ..self }
    }

    /// Returns the bytes of newest records that each of `shards` shards keeps in memory.
    pub fn tail_bytes(&self, shards: u64) -> u64 {
        let caches = self.caches(shards);
        // Two thirds: a missed footer page costs one read, a missed tail one for each reader.
        (caches - caches / 3).clamp(IN_FLIGHT_MIN, SHARD_BYTES_IN_FLIGHT_MAX as u64)
    }

    /// Returns the bytes of footer pages that each shard keeps in memory beside such a tail.
    ///
    /// `None` if the logs' share is too small for that tail.
    pub fn footer_bytes(&self, shards: u64, tail_bytes: u64) -> Option<u64> {
        let left = self.caches(shards).checked_sub(tail_bytes.max(IN_FLIGHT_MIN))?;
        (left >= *FOOTERS_BYTES.start()).then(|| left.min(*FOOTERS_BYTES.end()))
    }

    /// Returns the smallest limit, in whole MiB, at which so many shards can have such tails.
    pub fn limit_for(shards: u64, tail_bytes: u64) -> u64 {
        let tail = tail_bytes.max(IN_FLIGHT_MIN);
        let shard = tail.saturating_add(LOG_BUFFER_BYTES + FOOTERS_BYTES.start());
        let logs = shards.max(1).saturating_mul(shard);
        let limit = logs.div_ceil(5).saturating_mul(32).max(MEMORY_LIMIT_MIN);
        limit.div_ceil(1 << 20).saturating_mul(1 << 20)
    }

    /// Returns the bytes that a shard's log may cache for readers.
    fn caches(&self, shards: u64) -> u64 {
        (self.logs / shards.max(1)).saturating_sub(LOG_BUFFER_BYTES)
    }
}

impl Default for MemoryShares {
    fn default() -> Self {
        Self::of(MEMORY_LIMIT_DEFAULT)
    }
}

/// Returns the limit of bytes in flight in one shard: what its tail holds.
///
/// Beyond it, followers would read from the disk that is being written to.
pub fn bytes_in_flight(tail_bytes: usize) -> usize {
    tail_bytes.clamp(BATCH_BYTES_MAX as usize, SHARD_BYTES_IN_FLIGHT_MAX)
}

fn to_usize(bytes: u64) -> usize {
    // A semaphore cannot count more, which is as good as no limit.
    usize::try_from(bytes).unwrap_or(usize::MAX).min(usize::MAX >> 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{FETCH_BYTES_MAX, FRAME_PART};

    #[test]
    fn shares_add_up_to_less_than_the_limit() {
        for limit in [MEMORY_LIMIT_MIN, MEMORY_LIMIT_DEFAULT, 1 << 30, 16 << 30] {
            let shares = MemoryShares::of(limit);
            let sum = shares.connections as u64 * CONNECTION_BYTES
                + shares.window_bytes
                + shares.calls as u64 * CALL_BYTES
                + (shares.request_bytes + shares.arriving_bytes) as u64
                + shares.decompressors as u64 * u64::from(BATCH_BYTES_MAX)
                + shares.response_bytes as u64
                + shares.key_map_bytes as u64
                + shares.partitions_read as u64 * PARTITION_READ_BYTES
                + shares.logs;
            assert!(sum <= limit - limit / 16, "{limit}: {sum}");
            // The program's part covers frames beyond the smallest one of each connection.
            assert!(sum + shares.window_bytes / FRAME_PART <= limit - limit / 32);
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
    fn the_smallest_limit_fits_the_largest_request_and_response() {
        let least = MemoryShares::of(MEMORY_LIMIT_MIN);
        assert!(least.connection_request_bytes <= least.request_bytes);
        assert!(MESSAGE_BYTES_MAX <= least.connection_request_bytes);
        assert!(least.decompressors >= 1);
        assert!(FETCH_BYTES_MAX + BATCH_BYTES_MAX as usize <= least.response_bytes);
    }

    #[test]
    fn more_shards_keep_less_each_until_none_fits() {
        let shares = MemoryShares::default();
        assert_eq!(shares.connections, 2048);
        let over_tls = shares.with_client_tls();
        assert_eq!(over_tls, MemoryShares { connections: 1293, ..shares });
        assert_eq!(shares.tail_bytes(1), 16 << 20);
        assert_eq!(shares.footer_bytes(1, 16 << 20), Some(8 << 20));
        assert!(shares.tail_bytes(4) < shares.tail_bytes(2));
        assert!(shares.footer_bytes(6, shares.tail_bytes(6)).is_some());
        assert_eq!(shares.footer_bytes(8, shares.tail_bytes(8)), None);
        assert_eq!(shares.footer_bytes(1, 1 << 30), None);
    }

    #[test]
    fn the_limit_that_an_error_suggests_is_enough() {
        for (shards, tail) in [(1, 64 << 20), (3, 64 << 20), (64, 4 << 20), (2, 5)] {
            let limit = MemoryShares::limit_for(shards, tail);
            assert!(
                MemoryShares::of(limit).footer_bytes(shards, tail).is_some(),
                "{shards} {tail}"
            );
        }
    }
}
