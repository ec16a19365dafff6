//! The domain, pure: what a log entry means and what it does to a shard's bookkeeping.
//! No I/O, no async, no clock.

mod checkpoint;
mod command;
mod command_record;
mod condition;
mod head;
mod member_command;
mod partition;
mod producers;
mod retention;
mod shard_state;
#[cfg(test)]
pub(crate) mod testing;

pub use checkpoint::CheckpointError;
pub use command::{
    ClusterCommand, NewTopic, PartitionRun, PartitionSettings, ROWS_PER_ENTRY_MAX, SettingsMask,
    ShardCommand,
};
pub(crate) use command_record::is_whole;
pub use condition::{Condition, FENCING_TOKEN_BYTES_MAX, FencingToken};
pub use head::{BatchHead, HEAD_BYTES_MAX, Head, HeadError, ProducerStamp};
pub use member_command::{
    AddMember, Joined, MemberCommand, RemoveMember, ReplaceMember, SetDraining, TakeUp,
};
pub use partition::Partition;
pub use producers::{DEDUP_WINDOW_BATCHES, Judgement, ProducerTable};
pub use retention::{RetentionPolicy, SegmentShare, log_start_after_retention};
pub use shard_state::{Effects, ShardState, StateLimits};

use std::fmt::{self, Display};

/// Number of a partition in the whole cluster, never reused. Also its stream in the WAL; 0 is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartitionId(pub u64);

impl Display for PartitionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// What readers may see of a partition: `log_start..high_watermark`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Watermarks {
    pub log_start: u64,
    pub high_watermark: u64,
}

/// What apply made of an entry. A pure function of the shard's log up to and including the entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Blank and membership entries, and commands that are not for this kind of shard.
    Nothing,
    /// The batch counts: its records have the offsets `first_offset..next_offset`.
    Appended { first_offset: u64, next_offset: u64, time_us: u64, watermarks: Watermarks },
    /// The batch had been applied before, with these offsets; this entry counts nothing.
    Duplicate { first_offset: u64, next_offset: u64, watermarks: Watermarks },
    /// The batch does not count.
    Refused(Refusal),
    /// A control entry of a shard was applied.
    Changed,
    /// Answer of the cluster's own state (shard 0).
    Cluster(crate::cluster::Reply),
}

/// Why apply refused a batch, or a control entry that has a condition.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("partition {partition} does not exist (any more)")]
    UnknownPartition { partition: PartitionId },
    #[error(
        "epoch {epoch} of producer {producer_id} is fenced by epoch {current_epoch}; another \
         instance has taken over, so stop this one"
    )]
    ProducerFenced { producer_id: u64, epoch: u32, current_epoch: u32 },
    #[error(
        "sequence {sequence} of producer {producer_id} is out of order, {next_sequence} is next"
    )]
    OutOfOrderSequence { producer_id: u64, sequence: u64, next_sequence: u64 },
    #[error(
        "producer {producer_id} is not known to the partition (any more); call InitProducer and \
         begin with sequence 0"
    )]
    UnknownProducer { producer_id: u64 },
    #[error(
        "the batch was to begin at offset {expected}, the next one is {}",
        watermarks.high_watermark
    )]
    OffsetMismatch { expected: u64, watermarks: Watermarks },
    #[error("another fencing token is in force: {in_force}")]
    Fenced { in_force: FencingToken },
    #[error("the partition has reached its last offset")]
    OffsetsExhausted,
}
