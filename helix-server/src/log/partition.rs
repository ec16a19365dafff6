//! State of a partition in its shard: offsets, settings and fencing token.
//! The records are in the shard's log.

use std::sync::Arc;

use super::{CleanupState, FencingToken, PartitionId, PartitionSettings, Watermarks};

/// State of a partition.
///
/// Invariant: `log_start <= next_offset`, and both only grow. Applied entries are committed, so
/// `next_offset` is also the high watermark.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    pub id: PartitionId,
    pub topic_id: u64,
    /// Number within the topic.
    pub number: u32,
    /// Shared by the topic's partitions in this shard.
    pub settings: Arc<PartitionSettings>,
    pub log_start: u64,
    pub next_offset: u64,
    /// Append time of the newest batch; append times never decrease.
    pub last_time_us: u64,
    /// Token in force, with which the tokens of batches are compared.
    pub fencing_token: FencingToken,
    /// Compaction by key.
    pub cleanup: CleanupState,
    /// A split moves it to another shard: it takes no batches and no changes here.
    pub is_sealed: bool,
}

impl Partition {
    pub(super) fn new(
        id: PartitionId,
        topic_id: u64,
        number: u32,
        settings: Arc<PartitionSettings>,
    ) -> Self {
        Self {
            id,
            topic_id,
            number,
            settings,
            log_start: 0,
            next_offset: 0,
            last_time_us: 0,
            fencing_token: FencingToken::default(),
            cleanup: CleanupState::default(),
            is_sealed: false,
        }
    }

    pub fn watermarks(&self) -> Watermarks {
        Watermarks { log_start: self.log_start, high_watermark: self.next_offset }
    }

    /// Returns whether no record was ever appended and no token is in force.
    pub(super) fn is_fresh(&self) -> bool {
        self.next_offset == 0
            && self.log_start == 0
            && self.last_time_us == 0
            && self.fencing_token.is_none()
            && self.cleanup.is_default()
    }

    /// Appends a batch that ends before `next_offset`, and returns its append time.
    pub(super) fn append(&mut self, next_offset: u64, proposed_us: u64) -> u64 {
        debug_assert!(next_offset >= self.next_offset);
        self.next_offset = next_offset;
        self.last_time_us = self.last_time_us.max(proposed_us);
        self.last_time_us
    }

    /// Raises the log start, at most to the high watermark. Returns whether it changed.
    pub(super) fn trim(&mut self, start: u64) -> bool {
        let start = start.min(self.next_offset);
        let raised = start > self.log_start;
        if raised {
            self.log_start = start;
        }
        raised
    }
}
