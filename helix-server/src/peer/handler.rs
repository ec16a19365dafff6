//! Requests between nodes that are not Raft messages, and the trait that answers them.

use std::collections::BTreeMap;

use bytes::Bytes;
use futures_util::future::BoxFuture;

use crate::protocol::ProtocolVersions;

/// A node's description of itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Hello {
    pub node_id: u64,
    /// `None` while the node is in no cluster.
    pub cluster: Option<u128>,
    pub cluster_name: String,
    pub formed: bool,
    pub members: Vec<u64>,
    /// Reason for which the node waits, for operators.
    pub detail: String,
    /// Protocol versions that the node speaks.
    pub versions: ProtocolVersions,
    /// Reason for which the caller was removed from its cluster, if it was.
    pub removed: Option<String>,
    /// The node's wall clock, in microseconds since the Unix epoch; 0 if it does not state it.
    pub wall_time_us: u64,
}

/// The caller of [`PeerHandler::hello`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HelloRequest {
    pub node_id: u64,
    /// Cluster and generation; `None` while the caller is in no cluster.
    pub identity: Option<(u128, u32)>,
}

/// Request to an empty node to join an existing cluster.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct JoinCluster {
    pub cluster: u128,
    /// Generation of the replicas that the node creates.
    pub generation: u32,
    /// The cluster's data shards.
    pub shards: Vec<u64>,
    /// Peer addresses of the other nodes, by node id.
    pub peer_addrs: BTreeMap<u64, String>,
}

/// Request to an empty node to form a new cluster with others.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FormCluster {
    pub cluster: u128,
    pub cluster_name: String,
    pub members: Vec<u64>,
    /// Number of data shards.
    pub shards: u64,
}

/// Answers requests of peers that are not Raft messages.
/// An error text is a refusal that the caller's operator reads.
pub trait PeerHandler: Send + Sync + 'static {
    fn hello(&self, request: HelloRequest) -> Hello;
    /// Returns the reason why replicas of this generation of a node are not in the cluster.
    /// Generation 0 is an unknown one.
    fn refusal(&self, node: u64, generation: u32) -> Option<String>;
    /// Returns whether this node may become a leader. A draining node may not, if others can.
    fn may_lead(&self) -> bool {
        true
    }
    fn form(&self, form: FormCluster) -> BoxFuture<'static, Result<(), String>>;
    fn join(&self, join: JoinCluster) -> BoxFuture<'static, Result<(), String>>;
    /// Answers a call between servers, in an encoding of their own.
    fn call(&self, from: u64, request: Bytes) -> BoxFuture<'static, Result<Bytes, String>>;
}
