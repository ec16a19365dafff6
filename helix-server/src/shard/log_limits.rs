//! Limits of a shard's log, of its compaction by key, and of its groups.

use std::time::Duration;

use crate::limits;

/// Limits of the log that a shard's replicas keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogLimits {
    /// Smallest amount of log between two checkpoints, in bytes.
    pub checkpoint_bytes: u64,
    /// Log kept for replicas that are behind, in bytes.
    pub catch_up_bytes: u64,
    /// Memory of the maps from keys to offsets in compaction by key, of all shards of a node.
    pub key_map_bytes: usize,
    /// Share of a partition's sealed bytes that is new when it is compacted by key, in percent.
    pub cleaner_dirty_percent: u32,
    /// Longest time that records wait for that, and that a leader waits for an open round.
    pub cleaner_lag: Duration,
    /// Estimated bytes of the shard's groups, beyond which none may grow.
    pub groups_bytes: usize,
}

impl LogLimits {
    pub const DEFAULT: Self = Self {
        checkpoint_bytes: limits::CHECKPOINT_BYTES,
        catch_up_bytes: limits::CATCH_UP_BYTES,
        key_map_bytes: limits::CLEANER_MAP_BYTES,
        cleaner_dirty_percent: limits::CLEANER_DIRTY_PERCENT,
        cleaner_lag: limits::CLEANER_LAG,
        groups_bytes: limits::GROUPS_BYTES_MAX,
    };
}

impl Default for LogLimits {
    fn default() -> Self {
        Self::DEFAULT
    }
}
