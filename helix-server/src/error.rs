//! Why a call on a node failed, by what the caller can do about it.
//! `api/status.rs` maps each variant to a gRPC status exactly once.

use crate::log::{PartitionId, Refusal, Watermarks};
use crate::raft::HandOverError;

/// Where a leader is, as far as this node knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaderHint {
    pub node_id: u64,
    pub endpoint: String,
    pub term: u64,
}

#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    #[error("this node does not lead shard {shard}; go to the leader")]
    NotLeader { shard: u64, leader: Option<LeaderHint> },
    #[error("shard {shard} has no leader now; try again in a moment")]
    NoLeader { shard: u64 },
    #[error("the node is shutting down; go to another one")]
    Draining,
    /// A batch or a command was proposed; whether it will count is not known.
    #[error("it was handed to the log, but its outcome is not known: {reason}")]
    OutcomeUnknown { reason: String },
    #[error("topic {topic:?} does not exist; create it, or look at the list of topics")]
    TopicNotFound { topic: String },
    #[error(
        "topic {topic:?} has {partition_count} partitions, there is no partition {partition}; \
         they count from 0, and AddPartitions makes more"
    )]
    PartitionNotFound { topic: String, partition: u32, partition_count: u32 },
    /// The partition was deleted while the call ran.
    #[error("partition {partition} was deleted")]
    PartitionDeleted { partition: PartitionId },
    #[error("topic {topic:?} exists already with other settings: {difference}")]
    TopicAlreadyExists { topic: String, difference: String },
    #[error(
        "offset {asked} is outside of {}..{}; begin within, by a name, or let it be clamped",
        watermarks.log_start,
        watermarks.high_watermark
    )]
    OffsetOutOfRange { asked: u64, watermarks: Watermarks },
    /// Apply refused the batch at its place in the log.
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
    #[error("batch says {stated} records, its payload holds {counted}; state the true number")]
    RecordCountMismatch { stated: u32, counted: u32 },
    #[error("{what}")]
    CorruptBatch { what: String },
    #[error("compression {compression} is not supported by this version; send the records as is")]
    UnsupportedCompression { compression: i32 },
    #[error("{field}: {what}")]
    InvalidArgument { field: &'static str, what: String },
    /// A field or call whose feature this version does not have.
    #[error("{what} is not supported by this version; do without")]
    Unimplemented { what: &'static str },
    /// Bytes on this node's disk do not verify, or a shard is withheld for that reason.
    #[error("stored data is damaged: {what}")]
    CorruptLog { what: String },
    /// Its bytes are whole, and as they came in their batch.
    #[error(
        "offset {offset} has what its producer sent, which is not a record ({why}); begin behind \
         it, or read it encoded"
    )]
    NotARecord { offset: u64, why: String },
    /// Too much in flight; nothing was done.
    #[error("too much in flight: {what}; wait as the status says, then send it again")]
    Throttled { what: &'static str, retry_after_ms: u64 },
    #[error("disk is full: {what}")]
    DiskFull { what: String },
    /// The disk failed; the node stops.
    #[error("storage failed: {what}")]
    StorageFailed { what: String, may_have_applied: bool },
    /// The data folder cannot be this node's: only at start.
    #[error("{what}")]
    Unusable { what: String },
    #[error("node {node_id} is not one of this cluster; look at its metadata for those that are")]
    NodeNotFound { node_id: u64 },
    /// One change of the cluster's nodes at a time.
    #[error("the cluster is being changed already: {what}; wait for its end")]
    ChangeInProgress { what: String },
    /// A change that would leave too few nodes, or too few that answer.
    #[error("not enough nodes: {what}")]
    NotEnoughNodes { what: String },
    /// A check before a change of the cluster's nodes failed.
    #[error("{what}")]
    ChangeRefused { what: String },
    /// This node is no member of its cluster any more.
    #[error("{what}")]
    NotAMember { what: String },
}

impl Error {
    /// Why the lead of a shard was not handed over.
    pub(crate) fn of_hand_over(shard: u64, error: HandOverError) -> Self {
        match error {
            HandOverError::NoTarget => Self::InvalidArgument {
                field: "target_node_id",
                what: format!("no such replica of shard {shard} can be reached"),
            },
            HandOverError::Unknown(reason) => Self::OutcomeUnknown { reason },
        }
    }
}

pub type Result<T, E = Error> = std::result::Result<T, E>;
