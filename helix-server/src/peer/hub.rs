//! All connections of this node to the others, and the shards that it answers for.
//! [`Roster`] is the part that openraft's network holds: it knows no shards, so nothing goes
//! round in a circle.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use helix_proto::raft::v1 as pb;
use helix_wal::Wal;
use openraft::Raft;
use pb::peer_service_client::PeerServiceClient;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::connection::{Lane, Peer, PeerStatus, status_text};
use super::limits::{
    CATCH_UP_BURST, CATCH_UP_RATE, FORM_WAIT_MAX, HELLO_WAIT_MAX, SNAPSHOT_WARNING_INTERVAL,
};
use super::link::Link;
use super::throttle::Throttle;
use super::wire;
use crate::raft::{ReplicaId, StateMachine, TypeConfig};

/// What a hub is made of.
#[derive(Debug, Clone)]
pub struct HubSettings {
    pub node_id: u64,
    /// Addresses, "host:port", of the other nodes.
    pub peers: BTreeMap<u64, String>,
}

/// Who a node is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Hello {
    pub node_id: u64,
    /// None while it is in no cluster.
    pub cluster: Option<u128>,
    pub cluster_name: String,
    pub formed: bool,
    pub members: Vec<u64>,
    /// What it is waiting for, for people.
    pub detail: String,
}

/// What a node needs to know to be part of a new cluster.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Form {
    pub cluster: u128,
    pub cluster_name: String,
    pub members: Vec<u64>,
    pub shards: u64,
}

/// Answers what is not Raft. A text is a refusal, for people.
pub trait Desk: Send + Sync + 'static {
    fn hello(&self) -> Hello;
    fn form(&self, form: Form) -> BoxFuture<'static, Result<(), String>>;
    fn call(&self, from: u64, request: Bytes) -> BoxFuture<'static, Result<Bytes, String>>;
}

/// Why a call to a peer has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    #[error("node {node} is not one of the peers")]
    Unknown { node: u64 },
    /// Nothing was sent: the peer has not seen the call.
    #[error("node {node} cannot be reached: {why}")]
    Unreachable { node: u64, why: String },
    /// Sent, and then the connection ended: the peer may have acted.
    #[error("node {node} was lost before it answered: {why}")]
    Lost { node: u64, why: String },
    /// No answer in time: the peer may have acted, or may still act.
    #[error("no answer in time")]
    TimedOut,
    /// The peer answered: no.
    #[error("{0}")]
    Refused(String),
    #[error("this node is closing its connections")]
    Closed,
}

/// The other nodes, and what all connections share.
pub(super) struct Roster {
    pub(super) node_id: u64,
    pub(super) peers: BTreeMap<u64, Arc<Peer>>,
    pub(super) throttle: Throttle,
    pub(super) closed: CancellationToken,
    cluster: watch::Sender<Option<u128>>,
    changes: watch::Sender<u64>,
    ids: AtomicU64,
    /// When each (shard, replica) was last warned about.
    warned: Mutex<HashMap<(u64, ReplicaId), Instant>>,
}

impl Roster {
    pub(super) fn peer(&self, node: u64) -> Option<&Arc<Peer>> {
        self.peers.get(&node)
    }

    /// A number that was not given out before.
    pub(super) fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn cluster(&self) -> Option<u128> {
        *self.cluster.borrow()
    }

    pub(super) async fn known_cluster(&self) -> u128 {
        let mut cluster = self.cluster.subscribe();
        let known = cluster.wait_for(Option::is_some).await.ok().and_then(|known| *known);
        match known {
            Some(known) => known,
            // Not possible: the sender is a part of `self`.
            None => std::future::pending().await,
        }
    }

    /// Whether it is time again to warn about a replica that cannot be brought up to date.
    pub(super) fn may_warn(&self, shard_id: u64, replica_id: ReplicaId) -> bool {
        let now = Instant::now();
        let before = lock(&self.warned).insert((shard_id, replica_id), now);
        let Some(before) = before else { return true };
        if now - before >= SNAPSHOT_WARNING_INTERVAL {
            return true;
        }
        lock(&self.warned).insert((shard_id, replica_id), before);
        false
    }

    pub(super) fn peers_changed(&self) {
        self.changes.send_modify(|changes| *changes += 1);
    }
}

/// A shard that is answered for.
#[derive(Clone)]
pub(super) struct Served {
    pub(super) replica_id: ReplicaId,
    pub(super) raft: Raft<TypeConfig, StateMachine>,
    /// Ends what comes in for it.
    pub(super) stopped: CancellationToken,
}

/// All connections of this node to others. Dropping it closes them.
pub struct Hub {
    pub(super) roster: Arc<Roster>,
    calls: BTreeMap<u64, PeerServiceClient<Channel>>,
    shards: Mutex<HashMap<u64, Served>>,
    desk: Mutex<Option<Arc<dyn Desk>>>,
    /// The streams that are open from each peer, one per lane: a newer one ends an older one.
    inbound: Mutex<HashMap<(u64, Lane), CancellationToken>>,
    /// What each peer was refused with last (0 for strangers), so that it is logged once.
    refusals: Mutex<BTreeMap<u64, String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no panic while it is held")
}

impl Hub {
    /// Dials the peers as soon as [`Self::set_cluster`] says which cluster this is. Runs on the
    /// current tokio runtime.
    pub fn new(settings: HubSettings, desk: Arc<dyn Desk>) -> Arc<Self> {
        let HubSettings { node_id, peers } = settings;
        let others = peers.into_iter().filter(|(id, _)| *id != node_id);
        let roster = Arc::new(Roster {
            node_id,
            peers: others.map(|(id, address)| (id, Arc::new(Peer::new(id, address)))).collect(),
            throttle: Throttle::new(CATCH_UP_RATE, CATCH_UP_BURST),
            closed: CancellationToken::new(),
            cluster: watch::Sender::new(None),
            changes: watch::Sender::new(0),
            ids: AtomicU64::new(1),
            warned: Mutex::default(),
        });
        for peer in roster.peers.values() {
            for lane in Lane::ALL {
                tokio::spawn(Arc::clone(peer).keep(lane, Arc::clone(&roster)));
            }
        }
        let calls = roster.peers.iter();
        let calls = calls.filter_map(|(id, peer)| Some((*id, peer.calls()?))).collect();
        Arc::new(Self {
            roster,
            calls,
            shards: Mutex::default(),
            desk: Mutex::new(Some(desk)),
            inbound: Mutex::default(),
            refusals: Mutex::default(),
        })
    }

    /// Says which cluster this node is in. Before, no Raft message comes in or goes out.
    pub fn set_cluster(&self, cluster: u128) {
        self.roster.cluster.send_replace(Some(cluster));
    }

    /// openraft's network for one replica. Of the log only the last index is asked for.
    pub fn network(self: &Arc<Self>, shard_id: u64, replica_id: ReplicaId, wal: Wal) -> Link {
        Link::new(Arc::clone(&self.roster), shard_id, replica_id, wal)
    }

    /// Answers for a replica from now on.
    pub fn serve_shard(
        &self,
        shard_id: u64,
        replica_id: ReplicaId,
        raft: Raft<TypeConfig, StateMachine>,
    ) {
        let stopped = self.roster.closed.child_token();
        let served = Served { replica_id, raft, stopped };
        if let Some(before) = lock(&self.shards).insert(shard_id, served) {
            before.stopped.cancel();
        }
    }

    /// Answers for it no longer; what came in and is not with openraft yet is dropped.
    pub fn stop_shard(&self, shard_id: u64) {
        if let Some(served) = lock(&self.shards).remove(&shard_id) {
            served.stopped.cancel();
        }
    }

    /// Asks a node who it is. Needs no cluster.
    pub async fn hello(&self, node: u64) -> Result<Hello, PeerError> {
        let request = pb::HelloRequest { from_node: self.roster.node_id, to_node: node };
        let mut client = self.client(node)?;
        let answer = self.bounded(node, HELLO_WAIT_MAX, client.hello(request)).await?;
        Ok(Hello {
            node_id: answer.node_id,
            cluster: wire::read_cluster(&answer.cluster),
            cluster_name: answer.cluster_name,
            formed: answer.formed,
            members: answer.members,
            detail: answer.detail,
        })
    }

    /// Makes an empty node part of a new cluster.
    pub async fn form(&self, node: u64, form: Form) -> Result<(), PeerError> {
        let request = pb::FormRequest {
            from_node: self.roster.node_id,
            to_node: node,
            cluster: wire::cluster_bytes(form.cluster),
            cluster_name: form.cluster_name,
            members: form.members,
            shards: form.shards,
        };
        let mut client = self.client(node)?;
        self.bounded(node, FORM_WAIT_MAX, client.form(request)).await.map(drop)
    }

    /// Asks a node's [`Desk`] for something.
    pub async fn call(
        &self,
        node: u64,
        request: Bytes,
        wait: Duration,
    ) -> Result<Bytes, PeerError> {
        let request = pb::CallRequest { from_node: self.roster.node_id, to_node: node, request };
        let mut client = self.client(node)?;
        Ok(self.bounded(node, wait, client.call(request)).await?.response)
    }

    fn client(&self, node: u64) -> Result<PeerServiceClient<Channel>, PeerError> {
        self.calls.get(&node).cloned().ok_or(PeerError::Unknown { node })
    }

    async fn bounded<T>(
        &self,
        node: u64,
        wait: Duration,
        calling: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, PeerError> {
        let answered = tokio::select! {
            answered = timeout(wait, calling) => answered.map_err(|_| PeerError::TimedOut)?,
            () = self.roster.closed.cancelled() => return Err(PeerError::Closed),
        };
        answered.map(Response::into_inner).map_err(|status| call_error(node, &status))
    }

    /// How the connections stand, by node id.
    pub fn peers(&self) -> Vec<PeerStatus> {
        self.roster.peers.values().map(|peer| peer.status()).collect()
    }

    /// Counts up whenever a peer is connected or lost, or the reason why it is lost changes.
    pub fn watch_peers(&self) -> watch::Receiver<u64> {
        self.roster.changes.subscribe()
    }

    /// Ends every connection and task, and lets go of shards and desk.
    pub fn close(&self) {
        self.roster.closed.cancel();
        lock(&self.shards).clear();
        lock(&self.desk).take();
    }

    pub(super) fn served(&self, shard_id: u64) -> Option<Served> {
        lock(&self.shards).get(&shard_id).cloned()
    }

    pub(super) fn desk(&self) -> Option<Arc<dyn Desk>> {
        lock(&self.desk).clone()
    }

    /// Makes way for a new stream of a lane; the token ends it.
    pub(super) fn admit(
        &self,
        from: u64,
        lane: Lane,
        until: &CancellationToken,
    ) -> CancellationToken {
        let token = until.child_token();
        lock(&self.refusals).remove(&from);
        if let Some(before) = lock(&self.inbound).insert((from, lane), token.clone()) {
            before.cancel();
        }
        token
    }

    /// Logs a refusal unless it is the same as the last one.
    pub(super) fn note_refusal(&self, from: u64, why: &str) {
        let from = if self.roster.peers.contains_key(&from) { from } else { 0 };
        let before = lock(&self.refusals).insert(from, why.to_owned());
        if before.as_deref() != Some(why) {
            tracing::warn!(node = from, "a peer's connection is refused: {why}");
        }
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.roster.closed.cancel();
    }
}

impl fmt::Debug for Hub {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = formatter.debug_struct("Hub");
        debug.field("node_id", &self.roster.node_id).field("peers", &self.peers()).finish()
    }
}

fn call_error(node: u64, status: &Status) -> PeerError {
    if status.code() == Code::FailedPrecondition {
        return PeerError::Refused(status.message().to_owned());
    }
    let why = status_text(status);
    if never_sent(status) {
        PeerError::Unreachable { node, why }
    } else {
        PeerError::Lost { node, why }
    }
}

/// Whether there was no connection to send a call over.
fn never_sent(status: &Status) -> bool {
    let mut next = std::error::Error::source(status);
    while let Some(source) = next {
        if source.is::<tonic::ConnectError>() {
            return true;
        }
        next = source.source();
    }
    false
}
