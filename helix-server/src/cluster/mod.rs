//! Shard 0: what the whole cluster agrees on. Nodes, shards, topics, placement, producer ids.
//! A Raft group like any other; nothing here is on the way of a record but the look-up of a topic.

mod admin;
mod balance;
mod calls;
mod checkpoint;
mod door;
mod machine;
mod members;
mod members_record;
mod membership;
mod reconcile;
mod standing;
mod state;
mod topic;
mod upgrade;
mod whereabouts;

pub use admin::TopicSpec;
pub use door::{Bootstrap, Cluster};
pub use machine::ClusterMachine;
pub use members::{Change, ChangeKind, FIRST_GENERATION, Member, Members};
pub use membership::ChangeProgress;
pub use reconcile::{Phase, ShardProgress};
pub use standing::Standing;
pub use state::{ClusterLimits, ClusterState, Node as NodeEntry, Reply, is_topic_name};
pub use topic::{Place, TopicInfo};
pub use whereabouts::Whereabouts;
