//! This node as its connections see it: node id, cluster, and protocol versions.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tokio::sync::watch;

use crate::protocol::ProtocolVersions;
use crate::raft::ElectionTiming;

/// The cluster of this node, and the generation of its replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ClusterIdentity {
    pub(super) cluster: u128,
    pub(super) generation: u32,
}

/// State of this node that all its connections share.
pub(super) struct LocalNode {
    pub(super) node_id: u64,
    /// Protocol versions that this node speaks.
    pub(super) versions: ProtocolVersions,
    pub(super) timing: ElectionTiming,
    /// Protocol version that every member speaks, per the cluster state; 0 until it is known.
    protocol: AtomicU32,
    identity: watch::Sender<Option<ClusterIdentity>>,
    /// Incremented on every change of a peer's connection state.
    changes: watch::Sender<u64>,
    ids: AtomicU64,
}

impl LocalNode {
    pub(super) fn new(node_id: u64, versions: ProtocolVersions, timing: ElectionTiming) -> Self {
        Self {
            node_id,
            versions,
            timing,
            protocol: AtomicU32::new(0),
            identity: watch::Sender::new(None),
            changes: watch::Sender::new(0),
            ids: AtomicU64::new(1),
        }
    }

    /// Returns an id that was not returned before; later ids are larger.
    pub(super) fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn set_identity(&self, identity: ClusterIdentity) {
        self.identity.send_replace(Some(identity));
    }

    pub(super) fn identity(&self) -> Option<ClusterIdentity> {
        *self.identity.borrow()
    }

    pub(super) fn cluster(&self) -> Option<u128> {
        self.identity().map(|identity| identity.cluster)
    }

    /// Waits until this node is part of a cluster.
    pub(super) async fn known_identity(&self) -> ClusterIdentity {
        let mut identity = self.identity.subscribe();
        let known = identity.wait_for(Option::is_some).await.ok().and_then(|known| *known);
        match known {
            Some(known) => known,
            // Unreachable: `self` owns the sender.
            None => std::future::pending().await,
        }
    }

    pub(super) fn protocol(&self) -> u32 {
        self.protocol.load(Ordering::Relaxed)
    }

    /// Raises the cluster's protocol version. Returns `false` if it was not lower before.
    pub(super) fn set_protocol(&self, version: u32) -> bool {
        self.protocol.fetch_max(version, Ordering::Relaxed) < version
    }

    /// Returns the newest protocol version that this node and `node` both speak.
    ///
    /// # Errors
    /// A reason for the operator, if there is none or the cluster already uses a later one.
    pub(super) fn agree(&self, node: u64, theirs: ProtocolVersions) -> Result<u32, String> {
        let (us, ours) = (self.node_id, self.versions);
        let Some(version) = ours.common(theirs) else {
            return Err(format!(
                "node {us} speaks protocol {ours} and node {node} speaks {theirs}, with none in \
                 common; upgrade the older node to a release that speaks both"
            ));
        };
        let protocol = self.protocol();
        if version < protocol {
            return Err(format!(
                "the cluster uses protocol version {protocol} and node {node} speaks {theirs}; \
                 start it with a release that speaks {protocol}"
            ));
        }
        Ok(version)
    }

    /// Notifies watchers that the connection state of a peer changed.
    pub(super) fn peers_changed(&self) {
        self.changes.send_modify(|changes| *changes += 1);
    }

    pub(super) fn watch_peers(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}
