//! Errors of calls on a node, one variant for each reaction of the caller.
//! `api/status.rs` maps each variant to a gRPC status.

use crate::limits::{QUOTE_BYTES_MAX, THROTTLED_RETRY_AFTER};
use crate::log::{PartitionId, Refusal, TokenError, Watermarks};
use crate::quote::{cut, quote};
use crate::raft::TransferError;

/// The leader of a shard, as far as this node knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaderHint {
    pub node_id: u64,
    pub endpoint: String,
    pub term: u64,
}

#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    #[error("this node is not the leader of shard {shard}; send the request to the leader")]
    NotLeader { shard: u64, leader: Option<LeaderHint> },
    #[error("shard {shard} has no leader; retry")]
    NoLeader { shard: u64 },
    /// The replica on this node has stopped, and is opened again once it can be.
    #[error("this node does not serve shard {shard} now: {what}; retry")]
    ShardClosed { shard: u64, what: String },
    #[error("the node is shutting down; use another node")]
    Draining,
    /// A batch or a command was proposed; it may still be committed.
    #[error("the request was proposed, but its outcome is unknown: {reason}")]
    OutcomeUnknown { reason: String },
    #[error("topic {} does not exist; create it, or list the topics", quote(.topic))]
    TopicNotFound { topic: String },
    /// The request or its call began with a topic that was deleted, and no topic has its name.
    #[error(
        "topic {} with the id {expected} was deleted; start again without the id if it is created \
         again",
        quote(.topic)
    )]
    TopicDeleted { topic: String, expected: u64 },
    /// A gateway has members in the group, which it assigns.
    #[error(
        "the group has {count} members of the gateway {}, such as {first:?}; stop them first, or \
         use another group",
        quote(.gateway)
    )]
    GatewayMembers { gateway: String, count: usize, first: Vec<String> },
    /// The name belongs to another topic than the request or its call began with.
    #[error(
        "topic {topic:?} was deleted and created again: its id is {current}, not {expected}; \
         offsets and sequences of the old topic mean nothing in it, so start again without them"
    )]
    TopicRecreated { topic: String, expected: u64, current: u64 },
    #[error(
        "topic {} has no partition {partition}, its partitions are 0..{partition_count}; \
         AddPartitions adds more",
        quote(.topic)
    )]
    PartitionNotFound { topic: String, partition: u32, partition_count: u32 },
    /// The partition was deleted during the call.
    #[error("partition {partition} was deleted with its topic; list the topics")]
    PartitionDeleted { partition: PartitionId },
    #[error("topic {} already exists with other settings: {difference}", quote(.topic))]
    TopicAlreadyExists { topic: String, difference: String },
    #[error(
        "offset {requested} is out of range {}..{}; use EARLIEST or LATEST, or clamp",
        watermarks.log_start,
        watermarks.high_watermark
    )]
    OffsetOutOfRange { requested: u64, watermarks: Watermarks },
    /// Apply rejected the batch.
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(
        "batch of {bytes} bytes exceeds the limit of {bytes_max}; send several, or raise the \
         topic's max_batch_bytes"
    )]
    BatchTooLarge { bytes: u64, bytes_max: u64 },
    #[error(
        "record of {bytes} bytes exceeds the limit of {bytes_max}; make it smaller, or raise the \
         topic's max_record_bytes"
    )]
    RecordTooLarge { bytes: u64, bytes_max: u64 },
    #[error("a batch needs at least one record")]
    EmptyBatch,
    #[error(
        "record {record} of the batch has no key, but the topic is compacted by key; set a key, \
         or set the topic's cleanup to delete"
    )]
    KeyRequired { record: u32 },
    #[error("record_count is {stated} but the payload has {counted} records")]
    RecordCountMismatch { stated: u32, counted: u32 },
    #[error("{what}")]
    CorruptBatch { what: String },
    /// The numbers of the compressions that can be sent are in `allowed`.
    #[error("{what}")]
    UnsupportedCompression { what: String, allowed: &'static [i32] },
    #[error("{field}: {what}")]
    InvalidArgument { field: &'static str, what: String },
    /// A field or call that this version does not implement.
    #[error("{what} is not supported by this version")]
    Unimplemented { what: &'static str },
    /// Bytes on this node's disk fail their checksum, or a shard is quarantined for that reason.
    #[error("stored data is damaged: {what}")]
    CorruptLog { what: String },
    /// The bytes are intact: the producer sent an invalid record.
    #[error(
        "the producer sent an invalid record at offset {offset} ({why}); read from the next \
         offset, or with accept_encoded"
    )]
    NotARecord { offset: u64, why: String },
    /// Too much in flight; nothing was applied.
    #[error("too much in flight: {what}; retry after the delay in the status")]
    Throttled { what: &'static str, retry_after_ms: u64 },
    /// The caller is over its quota on this node; nothing was applied.
    #[error(
        "principal {} is over its quota of {limit} {unit} on this node; retry after the delay in \
         the status, or ask an administrator for a larger quota",
        quote(.principal)
    )]
    OverQuota {
        principal: String,
        limit: u64,
        unit: &'static str,
        /// Name of the limit, for metrics.
        kind: &'static str,
        retry_after_ms: u64,
    },
    #[error("disk is full: {what}")]
    DiskFull { what: String },
    /// The process has no file descriptor or memory for a call; nothing was applied.
    #[error("the node is short of open files or memory: {what}")]
    Exhausted { what: String },
    /// The disk failed; the node stops.
    #[error("storage failed: {what}")]
    StorageFailed { what: String, may_have_applied: bool },
    /// The data directory is not this node's; only at start.
    #[error("{what}")]
    Unusable { what: String },
    #[error("node {node_id} is not in this cluster; GetMetadata lists its nodes")]
    NodeNotFound { node_id: u64 },
    /// Only one membership change runs at a time.
    #[error("a membership change is already in progress: {what}; wait until it ends")]
    ChangeInProgress { what: String },
    /// The change would leave too few nodes, or too few reachable ones.
    #[error("not enough nodes: {what}")]
    NotEnoughNodes { what: String },
    /// A check before a membership change failed.
    #[error("{what}")]
    ChangeRefused { what: String },
    /// This node was removed from its cluster. `other` is a member, as far as it knew.
    #[error("{what}")]
    NotAMember { what: String, other: Option<LeaderHint> },
    #[error("group {group:?} does not exist; it begins with its first member or committed offset")]
    GroupNotFound { group: String },
    #[error("group {group:?} has no committed offset for the partition; choose a commit_fallback")]
    NoCommittedOffset { group: String },
    /// The caller is unknown.
    #[error(transparent)]
    Unauthenticated(#[from] TokenError),
    /// The caller may not do this, or may not know whether the resource exists.
    #[error("{denial}; an administrator can allow it with `helix acl allow`")]
    PermissionDenied { denial: Box<Denial> },
    #[error("there is no token {id}; `helix token list` lists the tokens")]
    TokenNotFound { id: String },
}

/// A denied operation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "principal {} may not {operation} {kind}{}",
    quote(.principal),
    if name.is_empty() { String::new() } else { format!(" {}", quote(.name)) }
)]
pub struct Denial {
    pub principal: String,
    pub operation: &'static str,
    pub kind: &'static str,
    /// Empty for the cluster.
    pub name: String,
}

impl Denial {
    /// Returns the right that is missing: "create topic orders".
    pub fn right(&self) -> String {
        let Self { operation, kind, name, .. } = self;
        let name = cut(name, QUOTE_BYTES_MAX);
        format!("{operation} {kind} {name}").trim_end().to_owned()
    }
}

impl Error {
    /// Returns [`Error::Throttled`] with the retry hint of this node.
    pub(crate) fn throttled(what: &'static str) -> Self {
        let retry_after_ms = THROTTLED_RETRY_AFTER.as_millis() as u64;
        Self::Throttled { what, retry_after_ms }
    }

    /// Returns why the leadership of a shard was not transferred.
    pub(crate) fn of_transfer(shard: u64, error: TransferError) -> Self {
        match error {
            TransferError::NoTarget => Self::InvalidArgument {
                field: "target_node_id",
                what: format!("no such replica of shard {shard} is reachable"),
            },
            TransferError::Unsettled => {
                Self::throttled("appends that must settle before a transfer")
            }
            TransferError::Unknown(reason) => Self::OutcomeUnknown { reason },
        }
    }
}

pub type Result<T, E = Error> = std::result::Result<T, E>;
