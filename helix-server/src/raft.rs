//! openraft on the WAL: the only module besides `peer` that uses openraft. It knows no gRPC.
//! The rest of the server proposes to a [`Replica`] and implements a [`Machine`] that applies.

mod blocking;
mod codec;
mod leadership;
mod log_store;
mod membership;
mod proposal_gate;
mod repair_guard;
mod replica;
mod runtime;
mod snapshot_records;
mod stamped_entries;
mod state_machine;
mod timing;
mod types;

/// Log filter for openraft. It silences the errors of append streams, which end with every shard
/// that is closed.
pub const LOG_FILTER: &str = "openraft=error,openraft::raft::stream_append=off";

pub use blocking::{DiskReads, FoundDamage};
pub(crate) use codec::{
    as_uncommitted_vote, decode_checkpoint, decode_vote, from_wal, raft_id, to_wal, wal_id,
};
pub use codec::{decode_head, encode_head};
pub(crate) use codec::{initial_checkpoint, initial_vote};
pub use leadership::{ElectionState, LeadershipWatch, ReplicaRole, ShardLeadership, TransferError};
pub use log_store::LogStore;
pub(crate) use log_store::to_io;
pub use membership::Membership;
pub use repair_guard::RepairGuard;
pub(crate) use replica::ReplicaParts;
pub use replica::{ProposalOutcome, ProposeError, Replica, ReplicaSettings, ReplicaStatus};
pub use runtime::{Runtime, seed_this_thread};
pub use snapshot_records::{FetchedRecords, RecordStore, SnapshotRecords};
pub use state_machine::{Checkpointer, Machine, StateMachine};
pub use timing::{ElectionRank, ElectionTiming};
pub use types::{
    Command, ProposalGuard, ProposalResponder, ReplicaId, SnapshotData, TimedResult, TypeConfig,
    node_and_generation, node_of, replica_id,
};
pub(crate) use types::{RaftEntry, RaftLogId, Vote};
