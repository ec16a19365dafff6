//! What a node says of itself to other nodes, and who answers their calls.
//! It stands before the node does: nodes that form a cluster talk before there is one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::ready;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::sync::{mpsc, oneshot};

use super::{Node, NodeSettings};
use crate::cluster::FIRST_GENERATION;
use crate::peer::{Asker, Desk, Form, Hello, Join};
use crate::raft::{ReplicaId, replica_id};

/// A call to be part of a cluster: of a new one, or of one that exists.
pub(super) enum Call {
    Form(Form),
    Join(Join),
}

/// A call, and where its answer goes.
pub(super) type Called = (Call, oneshot::Sender<Result<(), String>>);

pub(super) struct Front {
    node_id: u64,
    /// As configured.
    pub(super) cluster_name: Option<String>,
    /// The node itself and its peers, as configured.
    pub(super) members: BTreeSet<u64>,
    inner: Mutex<Inner>,
    calls: mpsc::Sender<Called>,
    pub(super) called: tokio::sync::Mutex<mpsc::Receiver<Called>>,
    node: OnceLock<Weak<Node>>,
}

#[derive(Default)]
struct Inner {
    /// Cluster, and generation of the replicas here.
    identity: Option<(u128, u32)>,
    /// Why this node waits, for people.
    waits_for: String,
}

impl Front {
    pub(super) fn new(settings: &NodeSettings, peers: &BTreeMap<u64, String>) -> Arc<Self> {
        let mut members: BTreeSet<u64> = peers.keys().copied().collect();
        members.insert(settings.node_id);
        // One former calls; a second call waits for the first.
        let (calls, called) = mpsc::channel(1);
        Arc::new(Self {
            node_id: settings.node_id,
            cluster_name: settings.cluster_name.clone(),
            members,
            inner: Mutex::default(),
            calls,
            called: tokio::sync::Mutex::new(called),
            node: OnceLock::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic while it is held")
    }

    /// From now on this node belongs to a cluster.
    pub(super) fn belong(&self, cluster: u128, generation: u32) {
        let identity = Some((cluster, generation));
        *self.lock() = Inner { identity, waits_for: String::new() };
    }

    /// Says why the node waits; true where that is news.
    pub(super) fn wait_for(&self, why: &str) -> bool {
        let mut inner = self.lock();
        let news = inner.waits_for != why;
        why.clone_into(&mut inner.waits_for);
        news
    }

    /// From now on calls are answered by the node.
    pub(super) fn serve(&self, node: &Arc<Node>) {
        // Ignored: a node is opened once.
        let _ = self.node.set(Arc::downgrade(node));
    }

    pub(super) fn is_alone(&self) -> bool {
        self.members.len() == 1
    }

    /// The replicas of each shard of a cluster that is formed now.
    pub(super) fn replica_ids(&self) -> BTreeSet<ReplicaId> {
        self.members.iter().map(|node| replica_id(*node, FIRST_GENERATION)).collect()
    }

    fn node(&self) -> Option<Arc<Node>> {
        self.node.get()?.upgrade()
    }

    /// The members once the cluster exists, else those that are to form it.
    fn known_members(&self) -> (bool, Vec<u64>) {
        let voters = self.node().map(|node| node.cluster.nodes()).unwrap_or_default();
        if voters.is_empty() {
            return (false, self.members.iter().copied().collect());
        }
        (true, voters)
    }

    /// Hands a call to whoever waits for one.
    fn take_call(&self, call: Call) -> BoxFuture<'static, Result<(), String>> {
        let calls = self.calls.clone();
        Box::pin(async move {
            let (sender, receiver) = oneshot::channel();
            let gone = || "it does not wait to be part of a cluster".to_owned();
            calls.send((call, sender)).await.map_err(|_| gone())?;
            receiver.await.unwrap_or_else(|_| Err(gone()))
        })
    }
}

impl Desk for Front {
    fn hello(&self, asker: Asker) -> Hello {
        let (formed, members) = self.known_members();
        let own = self.lock().identity.map(|(cluster, _)| cluster);
        let fellow = asker.identity.filter(|(cluster, _)| Some(*cluster) == own);
        let removed = fellow.and_then(|(_, generation)| self.refusal(asker.node_id, generation));
        let inner = self.lock();
        Hello {
            node_id: self.node_id,
            cluster: own,
            cluster_name: self.cluster_name.clone().unwrap_or_default(),
            formed,
            members,
            detail: inner.waits_for.clone(),
            removed,
            ..Hello::default()
        }
    }

    fn refusal(&self, node: u64, generation: u32) -> Option<String> {
        let machine = self.node()?.cluster.machine().clone();
        machine.read(|state| state.members().refusal(node, generation))
    }

    fn form(&self, form: Form) -> BoxFuture<'static, Result<(), String>> {
        let known = self.lock().identity;
        match known {
            Some((cluster, _)) if cluster == form.cluster => Box::pin(ready(Ok(()))),
            Some((cluster, _)) => Box::pin(ready(Err(belongs_to(cluster)))),
            None => self.take_call(Call::Form(form)),
        }
    }

    fn join(&self, join: Join) -> BoxFuture<'static, Result<(), String>> {
        let known = self.lock().identity;
        match known {
            Some(known) if known == (join.cluster, join.generation) => Box::pin(ready(Ok(()))),
            Some((cluster, generation)) if cluster == join.cluster => {
                let why = format!(
                    "its data is of generation {generation}, not {}: empty its data folder",
                    join.generation
                );
                Box::pin(ready(Err(why)))
            }
            Some((cluster, _)) => Box::pin(ready(Err(belongs_to(cluster)))),
            None => self.take_call(Call::Join(join)),
        }
    }

    fn call(&self, _from: u64, request: Bytes) -> BoxFuture<'static, Result<Bytes, String>> {
        let node = self.node();
        Box::pin(async move {
            let node = node.ok_or_else(|| "it is not serving yet".to_owned())?;
            node.cluster.answer(request).await
        })
    }
}

fn belongs_to(cluster: u128) -> String {
    format!("it belongs to cluster {cluster:032x}")
}

impl fmt::Debug for Front {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Front").field("node_id", &self.node_id).finish_non_exhaustive()
    }
}
