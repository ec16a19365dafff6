//! openraft on the WAL. The only room, with `peer`, that knows openraft; knows nothing of gRPC.
//! Outside of it a shard is proposed to through [`Raft`] and decided by a [`Machine`].

mod blocking;
mod codec;
mod log_store;
mod replica;
mod runtime;
mod state_machine;
mod types;

pub use blocking::DiskReads;
pub use codec::decode_head;
pub use log_store::LogStore;
pub use replica::{Leadership, Outcome, ProposeError, Replica, ReplicaSettings, ReplicaStatus};
pub use runtime::{Runtime, seed_this_thread};
pub use state_machine::{Checkpointer, Machine, StateMachine};
pub use types::{Command, Held, ReplicaId, Reply, SnapshotData, TypeConfig, replica_id};
