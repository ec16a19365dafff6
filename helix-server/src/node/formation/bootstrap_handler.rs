//! Handler of peer requests. It exists before the node, since nodes talk while they form a cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::ready;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::sync::{mpsc, oneshot};

use crate::clock::Clock;
use crate::cluster::{FIRST_GENERATION, answer_without_node};
use crate::node::{Node, NodeSettings};
use crate::peer::{FormCluster, Hello, HelloRequest, Hub, JoinCluster, PeerHandler};
use crate::raft::{ReplicaId, replica_id};
use crate::sync;

/// Request to an empty node to form a new cluster or to join an existing one.
pub(in crate::node) enum BootstrapRequest {
    Form(FormCluster),
    Join(JoinCluster),
}

/// A request, and the sender for its response.
pub(in crate::node) type PendingBootstrap = (BootstrapRequest, oneshot::Sender<Result<(), String>>);

/// Answers the requests of other nodes, before and after this node has opened.
pub(in crate::node) struct BootstrapHandler {
    node_id: u64,
    /// The node's own clock, which the other members compare with theirs.
    clock: Arc<dyn Clock>,
    /// The configured cluster name or id.
    pub(in crate::node) cluster_name: Option<String>,
    /// This node and its configured peers.
    pub(in crate::node) members: BTreeSet<u64>,
    inner: Mutex<Inner>,
    request_sender: mpsc::Sender<PendingBootstrap>,
    pub(in crate::node) bootstrap_requests: tokio::sync::Mutex<mpsc::Receiver<PendingBootstrap>>,
    node: OnceLock<Weak<Node>>,
    hub: OnceLock<Weak<Hub>>,
}

#[derive(Default)]
struct Inner {
    /// Cluster, and generation of this node's replicas.
    identity: Option<(u128, u32)>,
    /// Reason why this node waits, for operators.
    waits_for: String,
}

impl BootstrapHandler {
    pub(in crate::node) fn new(
        settings: &NodeSettings,
        peers: &BTreeMap<u64, String>,
    ) -> Arc<Self> {
        let mut members: BTreeSet<u64> = peers.keys().copied().collect();
        members.insert(settings.node_id);
        // There is one initiator; a second request waits for the first.
        let (request_sender, bootstrap_requests) = mpsc::channel(1);
        Arc::new(Self {
            node_id: settings.node_id,
            clock: settings.clock.clone(),
            cluster_name: settings.cluster_name.clone(),
            members,
            inner: Mutex::default(),
            request_sender,
            bootstrap_requests: tokio::sync::Mutex::new(bootstrap_requests),
            node: OnceLock::new(),
            hub: OnceLock::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        sync::lock(&self.inner)
    }

    /// Sets the cluster and generation of this node.
    pub(in crate::node) fn set_identity(&self, cluster: u128, generation: u32) {
        let identity = Some((cluster, generation));
        *self.lock() = Inner { identity, waits_for: String::new() };
    }

    /// Sets the reason why the node waits; returns whether it differs from the previous one.
    pub(in crate::node) fn set_wait_reason(&self, why: &str) -> bool {
        let mut inner = self.lock();
        let is_new = inner.waits_for != why;
        why.clone_into(&mut inner.waits_for);
        is_new
    }

    /// Sets the node that answers requests from now on.
    pub(in crate::node) fn attach_node(&self, node: &Arc<Node>) {
        // Ignored: a node is opened once.
        let _ = self.node.set(Arc::downgrade(node));
    }

    /// Sets the hub. Before the node exists, it serves the logs that cannot be replayed.
    pub(in crate::node) fn attach_hub(&self, hub: &Arc<Hub>) {
        // Ignored: a node has one hub.
        let _ = self.hub.set(Arc::downgrade(hub));
    }

    /// Returns whether no peers are configured.
    pub(in crate::node) fn is_single_node(&self) -> bool {
        self.members.len() == 1
    }

    /// Returns the replicas of each shard of a newly formed cluster.
    pub(in crate::node) fn replica_ids(&self) -> BTreeSet<ReplicaId> {
        self.members.iter().map(|node| replica_id(*node, FIRST_GENERATION)).collect()
    }

    pub(in crate::node) fn weak_node(&self) -> Weak<Node> {
        self.node.get().cloned().unwrap_or_default()
    }

    fn node(&self) -> Option<Arc<Node>> {
        self.node.get()?.upgrade()
    }

    /// Returns whether the cluster exists, and its members, or else the nodes that are to form it.
    fn known_members(&self) -> (bool, Vec<u64>) {
        let voters = self.node().map(|node| node.cluster.nodes()).unwrap_or_default();
        if voters.is_empty() {
            return (false, self.members.iter().copied().collect());
        }
        (true, voters)
    }

    /// Passes a request to the formation task and waits for its response.
    fn enqueue(&self, request: BootstrapRequest) -> BoxFuture<'static, Result<(), String>> {
        let request_sender = self.request_sender.clone();
        Box::pin(async move {
            let (sender, receiver) = oneshot::channel();
            let gone = || "the node is not waiting to form or join a cluster".to_owned();
            request_sender.send((request, sender)).await.map_err(|_| gone())?;
            receiver.await.unwrap_or_else(|_| Err(gone()))
        })
    }
}

impl PeerHandler for BootstrapHandler {
    fn may_lead(&self) -> bool {
        self.node().is_none_or(|node| !node.cluster.is_draining(self.node_id))
    }

    fn hello(&self, request: HelloRequest) -> Hello {
        let (formed, members) = self.known_members();
        let own = self.lock().identity.map(|(cluster, _)| cluster);
        let same_cluster = request.identity.filter(|(cluster, _)| Some(*cluster) == own);
        let removed =
            same_cluster.and_then(|(_, generation)| self.refusal(request.node_id, generation));
        let inner = self.lock();
        Hello {
            node_id: self.node_id,
            cluster: own,
            cluster_name: self.cluster_name.clone().unwrap_or_default(),
            formed,
            members,
            detail: inner.waits_for.clone(),
            removed,
            wall_time_us: self.clock.now_us(),
            ..Hello::default()
        }
    }

    fn refusal(&self, node: u64, generation: u32) -> Option<String> {
        let machine = self.node()?.cluster.machine().clone();
        machine.read(|state| state.members().refusal(node, generation))
    }

    fn form(&self, form: FormCluster) -> BoxFuture<'static, Result<(), String>> {
        let known = self.lock().identity;
        match known {
            Some((cluster, _)) if cluster == form.cluster => Box::pin(ready(Ok(()))),
            Some((cluster, _)) => Box::pin(ready(Err(belongs_to(cluster)))),
            None => self.enqueue(BootstrapRequest::Form(form)),
        }
    }

    fn join(&self, join: JoinCluster) -> BoxFuture<'static, Result<(), String>> {
        let known = self.lock().identity;
        match known {
            Some(known) if known == (join.cluster, join.generation) => Box::pin(ready(Ok(()))),
            Some((cluster, generation)) if cluster == join.cluster => {
                let why = format!(
                    "its data has generation {generation}, not {}; empty its data directory",
                    join.generation
                );
                Box::pin(ready(Err(why)))
            }
            Some((cluster, _)) => Box::pin(ready(Err(belongs_to(cluster)))),
            None => self.enqueue(BootstrapRequest::Join(join)),
        }
    }

    fn call(&self, _from: u64, request: Bytes) -> BoxFuture<'static, Result<Bytes, String>> {
        let (node, hub) = (self.node(), self.hub.get().and_then(Weak::upgrade));
        Box::pin(async move {
            match (node, hub) {
                (Some(node), _) => node.cluster.handle_request(request).await,
                (None, Some(hub)) => answer_without_node(&hub, request),
                (None, None) => Err("the node is not serving yet".to_owned()),
            }
        })
    }
}

fn belongs_to(cluster: u128) -> String {
    format!("it belongs to cluster {cluster:032x}")
}

impl fmt::Debug for BootstrapHandler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BootstrapHandler").field("node_id", &self.node_id).finish_non_exhaustive()
    }
}
