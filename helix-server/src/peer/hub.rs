//! All connections of this node to the others, and the shards that it answers for.
//! [`Roster`] is the part that openraft's network holds: it knows no shards, so nothing goes
//! round in a circle.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use helix_wal::Wal;
use openraft::Raft;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use super::connection::{Lane, Peer, PeerStatus};
use super::fetch::{Fetch, Fetching};
use super::limits::{CATCH_UP_BURST, CATCH_UP_RATE, FETCHES_MAX};
use super::link::Link;
use super::network::{Dialer, Tcp};
use super::throttle::Throttle;
use crate::protocol::Versions;
use crate::raft::{Gate, Machine, Replica, ReplicaId, StateMachine, TypeConfig};

/// What a hub is made of.
#[derive(Debug, Clone)]
pub struct HubSettings {
    pub node_id: u64,
    /// Addresses, "host:port", of the other nodes.
    pub peers: BTreeMap<u64, String>,
    /// Protocol versions that this node speaks.
    pub versions: Versions,
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
    /// Protocol versions that it speaks.
    pub versions: Versions,
    /// Why the asker is no member of its cluster any more, if it was one.
    pub removed: Option<String>,
}

/// Who asks for a hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asker {
    pub node_id: u64,
    /// Cluster and generation, where it has them.
    pub identity: Option<(u128, u32)>,
}

/// What an empty node needs to know to be part of a cluster that exists.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Join {
    pub cluster: u128,
    /// Of the replicas that it is to make.
    pub generation: u32,
    /// The cluster's data shards.
    pub shards: Vec<u64>,
    /// Peer addresses of the other nodes.
    pub neighbours: BTreeMap<u64, String>,
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
    fn hello(&self, asker: Asker) -> Hello;
    /// Why replicas of this generation (0: not told) of a node have no place in the cluster.
    fn refusal(&self, node: u64, generation: u32) -> Option<String>;
    fn form(&self, form: Form) -> BoxFuture<'static, Result<(), String>>;
    fn join(&self, join: Join) -> BoxFuture<'static, Result<(), String>>;
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

impl PeerError {
    /// Whether the peer may have acted all the same, or may still act.
    pub fn is_open(&self) -> bool {
        match self {
            Self::Unknown { .. } | Self::Unreachable { .. } | Self::Refused(_) => false,
            Self::Lost { .. } | Self::TimedOut | Self::Closed => true,
        }
    }
}

/// The other nodes, and what all connections share.
pub(super) struct Roster {
    pub(super) node_id: u64,
    peers: RwLock<BTreeMap<u64, Arc<Peer>>>,
    pub(super) dialer: Arc<dyn Dialer>,
    pub(super) throttle: Throttle,
    pub(super) closed: CancellationToken,
    identity: watch::Sender<Option<Identity>>,
    changes: watch::Sender<u64>,
    pub(super) versions: Versions,
    /// What the cluster's state says that every member speaks, as far as this node knows.
    protocol: AtomicU32,
    /// Places for shards that fetch records.
    pub(super) fetches: Semaphore,
    ids: AtomicU64,
}

/// The cluster that this node is in, and the generation of its replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) cluster: u128,
    pub(super) generation: u32,
}

impl Roster {
    pub(super) fn peer(&self, node: u64) -> Option<Arc<Peer>> {
        self.all().get(&node).cloned()
    }

    fn all(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<u64, Arc<Peer>>> {
        self.peers.read().expect("no panic while it is held")
    }

    /// A number that was not given out before.
    pub(super) fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn identity(&self) -> Option<Identity> {
        *self.identity.borrow()
    }

    pub(super) fn cluster(&self) -> Option<u128> {
        self.identity().map(|identity| identity.cluster)
    }

    pub(super) async fn known_identity(&self) -> Identity {
        let mut identity = self.identity.subscribe();
        let known = identity.wait_for(Option::is_some).await.ok().and_then(|known| *known);
        match known {
            Some(known) => known,
            // Not possible: the sender is a part of `self`.
            None => std::future::pending().await,
        }
    }

    /// The protocol version to speak with a node that speaks these, or why there is none.
    pub(super) fn agree(&self, node: u64, theirs: Versions) -> Result<u32, String> {
        let (us, ours) = (self.node_id, self.versions);
        let Some(version) = ours.common(theirs) else {
            return Err(format!(
                "node {us} speaks protocol {ours}, node {node} {theirs}, and they have none in \
                 common: start the older of them with a newer Helix, one that speaks both"
            ));
        };
        let protocol = self.protocol.load(Ordering::Relaxed);
        if version < protocol {
            return Err(format!(
                "the cluster uses protocol version {protocol}, since all its nodes have spoken it, \
                 and node {node} speaks {theirs}: start it with a Helix that speaks {protocol}"
            ));
        }
        Ok(version)
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
    /// Asked whether it can read a snapshot, before openraft is handed what it must not fail to
    /// install.
    pub(super) machine: Arc<dyn Machine>,
    /// Where the shard has records.
    pub(super) fetch: Option<Arc<Fetch>>,
    /// What of it is let through to openraft.
    pub(super) gate: Arc<Gate>,
    /// Asked whether it has room, before openraft is handed what it must not fail to write.
    pub(super) wal: Wal,
    /// Ends what comes in for it.
    pub(super) stopped: CancellationToken,
}

/// All connections of this node to others. Dropping it closes them.
pub struct Hub {
    pub(super) roster: Arc<Roster>,
    shards: Mutex<BTreeMap<u64, Served>>,
    desk: Mutex<Option<Arc<dyn Desk>>>,
    /// The streams that are open from each peer, one per lane: a newer one ends an older one.
    inbound: Mutex<BTreeMap<(u64, Lane), CancellationToken>>,
    /// Who has dialled this node as a member of which cluster, while it was in none.
    caller: Mutex<Option<(u64, u128)>>,
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
        Self::over(Arc::new(Tcp), settings, desk)
    }

    /// As [`Self::new`], over a network of any kind.
    pub fn over(dialer: Arc<dyn Dialer>, settings: HubSettings, desk: Arc<dyn Desk>) -> Arc<Self> {
        let HubSettings { node_id, peers, versions } = settings;
        let roster = Arc::new(Roster {
            node_id,
            peers: RwLock::default(),
            dialer,
            throttle: Throttle::new(CATCH_UP_RATE, CATCH_UP_BURST),
            closed: CancellationToken::new(),
            identity: watch::Sender::new(None),
            changes: watch::Sender::new(0),
            versions,
            protocol: AtomicU32::new(0),
            fetches: Semaphore::new(FETCHES_MAX),
            ids: AtomicU64::new(1),
        });
        let hub = Arc::new(Self {
            roster,
            shards: Mutex::default(),
            desk: Mutex::new(Some(desk)),
            inbound: Mutex::default(),
            caller: Mutex::default(),
            refusals: Mutex::default(),
        });
        hub.set_peers(&peers);
        hub
    }

    /// Says which cluster this node is in, and the generation of its replicas. Before, no Raft
    /// message comes in or goes out.
    pub fn set_identity(&self, cluster: u128, generation: u32) {
        self.roster.identity.send_replace(Some(Identity { cluster, generation }));
    }

    /// Protocol versions that this node speaks.
    pub fn versions(&self) -> Versions {
        self.roster.versions
    }

    /// The version that the whole cluster speaks; 0 until this node knows.
    pub fn protocol(&self) -> u32 {
        self.roster.protocol.load(Ordering::Relaxed)
    }

    /// From now on nobody is let in who does not speak this version. Whether that is new.
    pub fn set_protocol(&self, version: u32) -> bool {
        self.roster.protocol.fetch_max(version, Ordering::Relaxed) < version
    }

    /// Takes these for the peers: new ones are dialled, and so is who has another address than
    /// before; what there is with those that are gone ends.
    pub fn set_peers(&self, addresses: &BTreeMap<u64, String>) {
        let mut gone = Vec::new();
        {
            let mut peers = self.roster.peers.write().expect("no panic while it is held");
            peers.retain(|id, peer| {
                let stays = addresses.get(id) == Some(&peer.address);
                if !stays {
                    peer.closed.cancel();
                    gone.extend((!addresses.contains_key(id)).then_some(*id));
                }
                stays
            });
            for (&id, address) in addresses {
                if id == self.roster.node_id || peers.contains_key(&id) {
                    continue;
                }
                let closed = self.roster.closed.child_token();
                let dialer = self.roster.dialer.clone();
                let peer = Arc::new(Peer::new(id, address.clone(), dialer, closed));
                for lane in Lane::ALL {
                    tokio::spawn(Arc::clone(&peer).keep(lane, Arc::clone(&self.roster)));
                }
                peers.insert(id, peer);
            }
        }
        lock(&self.inbound).retain(|(from, _), stream| {
            let is_gone = gone.contains(from);
            if is_gone {
                stream.cancel();
            }
            !is_gone
        });
        self.roster.peers_changed();
    }

    /// openraft's network for one replica. Of the log only the last index is asked for.
    pub fn network(self: &Arc<Self>, shard_id: u64, replica_id: ReplicaId, wal: Wal) -> Link {
        Link::new(Arc::clone(&self.roster), shard_id, replica_id, wal)
    }

    /// Answers for a replica from now on.
    pub fn serve_replica(&self, shard_id: u64, replica: &Replica, wal: Wal) {
        let served = Served {
            replica_id: replica.id(),
            raft: replica.raft(),
            machine: replica.machine(),
            fetch: replica.records().map(|records| Fetch::new(shard_id, records)),
            gate: replica.gate(),
            wal,
            stopped: self.roster.closed.child_token(),
        };
        self.serve(shard_id, served);
    }

    /// Answers from now on for a replica without records that is nothing but an openraft.
    pub fn serve_shard(
        &self,
        shard_id: u64,
        replica_id: ReplicaId,
        raft: Raft<TypeConfig, StateMachine>,
        machine: Arc<dyn Machine>,
        wal: Wal,
    ) {
        let stopped = self.roster.closed.child_token();
        let (fetch, gate) = (None, Arc::default());
        let served = Served { replica_id, raft, machine, fetch, gate, wal, stopped };
        self.serve(shard_id, served);
    }

    fn serve(&self, shard_id: u64, served: Served) {
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

    /// As [`Self::stop_shard`], before the shard's log is closed: nothing is written beside it any
    /// more.
    pub async fn close_shard(&self, shard_id: u64) {
        let fetch = self.served(shard_id).and_then(|served| served.fetch);
        self.stop_shard(shard_id);
        if let Some(fetch) = fetch {
            fetch.end().await;
        }
    }

    /// How far a replica is that fetches what it lacks; `None` where it lacks nothing.
    pub fn fetching(&self, shard_id: u64) -> Option<Fetching> {
        self.served(shard_id)?.fetch?.status()
    }

    /// Gives up what a replica has fetched if it is of no use any more.
    pub async fn tidy_fetch(&self, shard_id: u64) {
        let Some(served) = self.served(shard_id) else { return };
        if let Some(fetch) = &served.fetch {
            fetch.tidy(&served.raft).await;
        }
    }

    /// How the connections stand, by node id.
    pub fn peers(&self) -> Vec<PeerStatus> {
        self.roster.all().values().map(|peer| peer.status()).collect()
    }

    /// The addresses that are dialled.
    pub fn addresses(&self) -> BTreeMap<u64, String> {
        self.roster.all().iter().map(|(id, peer)| (*id, peer.address.clone())).collect()
    }

    /// Whether every lane to a node is open.
    pub fn is_connected(&self, node: u64) -> bool {
        self.roster.peer(node).is_some_and(|peer| peer.status().connected)
    }

    /// The cluster that this node is in.
    pub fn cluster(&self) -> Option<u128> {
        self.roster.cluster()
    }

    /// Nodes that are connected now.
    pub fn connected(&self) -> Vec<u64> {
        let peers = self.peers().into_iter();
        peers.filter(|peer| peer.connected).map(|peer| peer.node_id).collect()
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

    pub(super) fn note_caller(&self, caller: Option<(u64, u128)>) {
        let mut known = lock(&self.caller);
        *known = caller.or(*known);
    }

    /// A node that takes this one for a member of its cluster, although this one is in none.
    pub fn caller(&self) -> Option<(u64, u128)> {
        *lock(&self.caller)
    }

    /// Logs a refusal unless it is the same as the last one.
    pub(super) fn note_refusal(&self, from: u64, why: &str) {
        let from = if self.roster.peer(from).is_some() { from } else { 0 };
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
