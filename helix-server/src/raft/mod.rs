//! openraft on the WAL. The only room, with `peer`, that knows openraft; knows nothing of gRPC.
//! Outside of it a shard is proposed to through [`Raft`] and decided by a [`Machine`].

mod blocking;
mod codec;
mod gate;
mod log_store;
mod membership;
mod replica;
mod runtime;
mod staging;
mod state_machine;
mod types;

/// What is worth reading of what openraft logs. One of its errors is none: that the streams of a
/// shard end which is being closed.
pub const LOG_FILTER: &str = "openraft=error,openraft::raft::stream_append=off";

pub use blocking::DiskReads;
pub use codec::decode_head;
pub(crate) use codec::{as_only_given, decode_checkpoint, from_wal, raft_id, to_wal, wal_id};
pub use gate::Gate;
pub use log_store::LogStore;
pub(crate) use log_store::to_io;
pub use membership::Membership;
pub use replica::{
    HandOverError, Leadership, LeadershipWatch, Outcome, ProposeError, Replica, ReplicaSettings,
    ReplicaStatus, Role, Stance,
};
pub use runtime::{Runtime, seed_this_thread};
pub use staging::{Fetched, RecordStore, Staging};
pub use state_machine::{Checkpointer, Machine, StateMachine};
pub use types::{Command, Held, ReplicaId, Reply, SnapshotData, TypeConfig, node_of, replica_id};
pub(crate) use types::{Entry, LogId, Vote};
