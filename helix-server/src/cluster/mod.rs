//! Shard 0: what the whole cluster agrees on. Nodes, shards, topics, placement, producer ids.
//! A Raft group like any other; nothing here is on the way of a record but the look-up of a topic.

mod admin;
mod calls;
mod checkpoint;
mod door;
mod machine;
mod state;
mod topic;

pub use admin::TopicSpec;
pub use door::{Bootstrap, Cluster};
pub use machine::ClusterMachine;
pub use state::{ClusterLimits, ClusterState, Node as NodeEntry, Reply};
pub use topic::{Place, TopicInfo};
