//! The pure domain: log entries, and the state that applying them changes.
//! No I/O, no async, no clock.

mod access;
mod checkpoint;
mod cleanup;
mod cluster_reply;
mod command;
mod command_record;
mod condition;
mod group;
mod head;
mod kept_offsets;
mod member_change;
mod member_command;
mod partition;
mod producer_owner;
mod producers;
mod retention;
mod shard_state;
mod split;
#[cfg(test)]
pub(crate) mod testing;
mod topic;

pub use access::{
    AccessChange, AccessCommand, AccessOperation, AccessResource, AccessRule, AccessState,
    BearerToken, CreateToken, EVERY_PRINCIPAL, JwtError, OperationSet, PRINCIPAL_BYTES_MAX,
    PresentedToken, PrincipalRules, QUOTA_BYTES_MIN, QUOTAS_MAX, QuotaLimits, RULES_MAX,
    RULES_PER_COMMAND_MAX, RULES_PER_PRINCIPAL_MAX, ResourceKind, RuleSet, TOKENS_MAX, TokenError,
    TokenRecord, is_principal_name,
};
pub use checkpoint::CheckpointError;
pub use cleanup::{CleanupRound, CleanupState};
pub use cluster_reply::ClusterReply;
pub use command::{
    ClusterCommand, CreateTopic, PartitionRun, PartitionSettings, ROWS_PER_ENTRY_MAX, SettingsMask,
    ShardCommand,
};
pub(crate) use command_record::has_no_unknown_fields;
pub use condition::{Condition, FENCING_TOKEN_BYTES_MAX, FencingToken};
pub use group::{
    Assignment, CommittedRow, CommittingMember, ConsumerGroup, DELETED_GROUPS_MAX,
    GROUPS_PER_SHARD_MAX, GroupChange, GroupCommand, GroupMember, GroupRefusal, GroupTable,
    MEMBERS_PER_GROUP_MAX, MatchedTopic, MemberReport, MemberSpec, MemberView, OFFSET_HISTORY_MAX,
    OFFSETS_PER_GROUP_MAX, OffsetEvent, OffsetEventKind, OffsetLag, OffsetUpdate,
    PARTITIONS_PER_GROUP_MAX, PATTERNS_PER_GROUP_MAX, PartitionKey, ReportStep, SeekOrigin,
    SortedMap, SortedSet, StaleCommit, StaleReason, TOPICS_PER_GROUP_MAX, TopicOffsets, is_pattern,
    pattern_matches, within_limits,
};
pub use head::{BatchHead, HEAD_BYTES_MAX, Head, HeadError, ProducerStamp};
pub use kept_offsets::{COMPACTED_OFFSETS_MAX, KeptOffsets};
pub use member_change::{ChangeKind, MemberChange};
pub use member_command::{
    AddMember, AddShards, CancelMove, CancelSplit, EndSplit, FinishMove, InitMembers, Joined,
    MemberCommand, PlanMove, PlanSplit, RemoveMember, ReplaceMember, ReplicaCreated, SetCordoned,
    SetDraining, SetRack, SplitProgress, TakePlacement,
};
pub use partition::Partition;
pub use producer_owner::{BatchChecksum, ProducerOwner};
pub use producers::{DEDUP_WINDOW_BATCHES, ProducerTable, SequenceVerdict};
pub use retention::{PartitionSegment, RetentionPolicy, log_start_after_retention};
pub use shard_state::{Effects, ShardState, StateLimits};
pub use split::{ShardSplit, SplitRule};
pub use topic::{PartitionLocation, TopicInfo};

use std::fmt::{self, Display};

/// Id of a partition in the cluster, never reused. Also its stream in the WAL; 0 stands for none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartitionId(pub u64);

impl Display for PartitionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Readable offsets of a partition: `log_start..high_watermark`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Watermarks {
    pub log_start: u64,
    pub high_watermark: u64,
}

/// Result of applying an entry: a pure function of the shard's log up to that entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// No effect: a blank or membership entry, or a command for another kind of shard.
    Nothing,
    /// The batch was appended: its records have the offsets `first_offset..next_offset`.
    Appended { first_offset: u64, next_offset: u64, time_us: u64, watermarks: Watermarks },
    /// The batch had already been appended, with these offsets.
    Duplicate { first_offset: u64, next_offset: u64, watermarks: Watermarks },
    /// The batch or command was refused, and changed nothing.
    Refused(Refusal),
    /// A control entry of a data shard was applied.
    Changed,
    /// Reply of the cluster's state (shard 0).
    Cluster(ClusterReply),
}

/// Reason why apply refused a batch or a conditional control entry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("partition {partition} does not exist; it may have been deleted")]
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
        "producer {producer_id} is unknown to the partition; call InitProducer and start with \
         sequence 0"
    )]
    UnknownProducer { producer_id: u64 },
    /// The identity was given to another principal.
    #[error(
        "producer {producer_id} belongs to another principal; call InitProducer and use the \
         identity that it returns"
    )]
    ProducerNotOwned { producer_id: u64 },
    /// The sequence has a batch with the same number of records and another checksum.
    #[error(
        "sequence {sequence} of producer {producer_id} was appended before with other records; \
         two programs use one identity, or a retry has changed its batch: let each program call \
         InitProducer, and repeat the same bytes"
    )]
    SequenceReused { producer_id: u64, sequence: u64 },
    #[error(
        "expected_offset is {expected}, but the next offset is {}",
        watermarks.high_watermark
    )]
    OffsetMismatch { expected: u64, watermarks: Watermarks },
    #[error("another fencing token is in force: {in_force}")]
    Fenced { in_force: FencingToken },
    #[error("the partition has reached the last possible offset")]
    OffsetsExhausted,
    /// Boxed, since batches are refused for other reasons.
    #[error(transparent)]
    Group(Box<GroupRefusal>),
}

impl From<GroupRefusal> for Refusal {
    fn from(refusal: GroupRefusal) -> Self {
        Self::Group(Box::new(refusal))
    }
}
