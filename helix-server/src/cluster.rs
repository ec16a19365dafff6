//! Shard 0: the metadata that the whole cluster agrees on. It holds nodes, members, shards, topics,
//! producer ids, tokens and rules. It is a Raft group like any other. Only the lookup of topics and
//! rules is on the data path.
//!
//! Files in reading order:
//! - `state`: the replicated state, a pure function of shard 0's log. `members` is its part about
//!   membership; `checkpoint` and `members_record` encode both.
//! - `machine`: the state machine that applies shard 0's log and that the node reads.
//!   `topic_snapshot` matches patterns with the topics without its lock.
//! - `client`: [`Cluster`], the handle that sends commands to shard 0's leader and waits for them.
//!   `peer_messages` encodes its requests and responses between nodes.
//! - `bootstrap`: the first shards and topics of a new cluster.
//! - `topic_changes`: creates, updates and deletes topics, and propagates them to the data shards.
//! - `node_changes`: requests to add, remove, replace and drain nodes. `change_driver` carries them
//!   out. `reconcile` moves the replicas of one shard to the target, one Raft membership change at
//!   a time. `dial` chooses the addresses of the members.
//! - `placement`: the replicas of each shard. `shard_moves` changes them by moves. `planner`
//!   decides which moves to make, `placement_driver` submits them. `obstacle` explains what cannot
//!   go on.
//! - `shard_growth`: adds data shards, and chooses the shards of new partitions.
//! - `shard_split`: the splits from which new shards come, with the state in `placed_split`.
//!   `split_driver` carries them out.
//! - `access`: creates and revokes tokens, changes rules.
//! - `group_coordinator`: drives the consumer groups of the shards that this node leads.
//! - `cleanup_rounds`: drives the compaction by key in the shards that this node leads.
//! - `balance`: spreads shard leaders over the nodes.
//! - `upgrade`: raises the protocol version of the cluster.
//! - `remote_shards`: what this node asks the leaders of shards without a replica here.
//! - `replica_status`, `member_addresses`: what a node with a damaged log asks other nodes.

mod access;
mod balance;
mod bootstrap;
mod change_driver;
mod checkpoint;
mod cleanup_rounds;
mod client;
mod dial;
mod down_nodes;
mod group_coordinator;
mod machine;
mod member_addresses;
mod members;
mod members_record;
mod node_changes;
mod obstacle;
mod peer_messages;
mod placed_split;
mod placement;
mod placement_driver;
mod planner;
mod producers;
mod reconcile;
mod remote_shards;
mod replica_status;
mod shard_growth;
mod shard_moves;
mod shard_split;
mod split_driver;
mod split_tries;
mod state;
mod topic_changes;
mod topic_replicas;
mod topic_snapshot;
mod upgrade;

pub use bootstrap::Bootstrap;
pub use change_driver::ChangeProgress;
pub use cleanup_rounds::CleanupRounds;
pub use client::Cluster;
pub use group_coordinator::{CoordinatorRound, matched_topics, unmatched};
pub use machine::ClusterMachine;
pub use member_addresses::MemberAddresses;
pub use members::{FIRST_GENERATION, Member, Members};
pub use node_changes::NodeRemoval;
pub use obstacle::Obstacle;
pub use peer_messages::{EntryRange, PartitionReport, ReplicaStatusReport};
pub use placed_split::{PlacedSplit, SplitReplica, SplitStep};
pub use placement::{MoveReason, PlacedShard, ReplicaPlacement, ShardMove, ShardTarget};
pub use placement_driver::PlacementReport;
pub use planner::{Plan, PlanStep, PlannedMove, StuckReason, StuckShard};
pub use reconcile::{ChangePhase, ShardProgress};
pub use replica_status::{answer_without_node, ask_replica_status};
pub use split_driver::SealWatch;
pub use state::{ClusterLimits, ClusterState, RegisteredNode, is_topic_name};
pub use topic_changes::TopicSpec;
