//! A node: which shards live here, which partition is in which shard, and what they share.
//! Opens everything in order and closes it in reverse.

mod find;
mod forming;
mod front;
mod logs;
mod membership;
mod open;
mod repair;
mod scrub;
mod settings;
mod slots;
mod tend;
mod well;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

use futures_util::future::join_all;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::cluster::{Bootstrap, Cluster, NodeEntry, TopicSpec};
use crate::error::{Error, Result};
use crate::load::Load;
use crate::log::{ClusterCommand, PartitionSettings};
use crate::metrics::Metrics;
pub use crate::peer::PeerStatus;
use crate::peer::{Hub, HubSettings, Network};
use crate::protocol::Versions;
use crate::random::Random;
pub use crate::shard::LogLimits;
pub use find::Located;
use front::Front;
use logs::{Identity, Logs};
use open::{ClusterPlace, House, directory, open_cluster, open_or_rebuild, shards_made};
pub use settings::{NodeSettings, NodeStorage, SimulatedDisks};
use slots::{Slot, Slots};
pub use well::Unready;

/// Whether acknowledged batches survive the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StorageKind {
    Durable,
    Memory,
}

#[derive(Debug, Clone)]
pub struct NodeInfo {
    pub node_id: u64,
    pub cluster_id: String,
    pub endpoint: String,
    pub version: &'static str,
    pub storage: StorageKind,
    pub data_dir: String,
    pub direct_io: bool,
}

/// The port that other nodes dial.
#[derive(Debug)]
struct PeerPort {
    stop: CancellationToken,
    /// Cancelled when nobody listens any more.
    stopped: CancellationToken,
}

#[derive(Debug)]
pub struct Node {
    settings: NodeSettings,
    cluster_id: String,
    cluster: Cluster,
    shards: Slots,
    /// Whose the logs are.
    identity: Identity,
    front: Arc<Front>,
    /// Held while a shard is closed and opened again, and when the node closes all.
    reopening: tokio::sync::Mutex<()>,
    /// What the shards that are in repair wait for.
    repairs: Mutex<BTreeMap<u64, String>>,
    /// How often each shard was closed and opened again.
    restarts: Mutex<BTreeMap<u64, u64>>,
    endpoint: OnceLock<String>,
    /// What other nodes may dial, as far as this one can tell.
    peer_addr: String,
    /// Why this node is no member of its cluster any more.
    removed: OnceLock<String>,
    hub: Arc<Hub>,
    /// Where there are other nodes.
    peer_port: OnceLock<PeerPort>,
    /// Bumped when anything changes that routes are made of.
    routes: watch::Sender<u64>,
    random: Random,
    load: Arc<Load>,
    draining: CancellationToken,
    failed: watch::Sender<Option<String>>,
    sync_probe: (u64, u64),
    direct_io: bool,
    metrics: Arc<Metrics>,
}

impl Node {
    /// Opens a node that is a cluster of its own, and waits until it serves.
    pub async fn open(settings: NodeSettings) -> Result<Arc<Self>> {
        let front = Front::new(&settings, &BTreeMap::new());
        let (node_id, peers, versions) = (settings.node_id, BTreeMap::new(), Versions::OWN);
        let hub = Hub::new(HubSettings { node_id, peers, versions }, front.clone());
        let node = Self::open_with(settings, front, hub, None).await?;
        node.settle().await?;
        Ok(node)
    }

    /// Opens a node of a cluster, or one that may become one; `network` is its peer port, mostly a
    /// TCP listener. Where `peers` has the node itself, that is what it tells others to dial. Waits
    /// until the cluster is formed, or has taken this node in; not until it has a leader.
    pub async fn open_among(
        settings: NodeSettings,
        mut peers: BTreeMap<u64, String>,
        network: impl Into<Network>,
    ) -> Result<Arc<Self>> {
        let network = network.into();
        let own = peers.remove(&settings.node_id);
        let bound = network.local_addr().filter(|addr| !addr.ip().is_unspecified());
        let peer_addr = own.or(bound.map(|addr| addr.to_string())).unwrap_or_default();
        let front = Front::new(&settings, &peers);
        let hub_settings = HubSettings {
            node_id: settings.node_id,
            peers: peers.clone(),
            versions: network.versions(),
        };
        let hub = Hub::over(network.dialer(), hub_settings, front.clone());
        let stop = CancellationToken::new();
        let serving = tokio::spawn(network.serve(hub.clone(), stop.clone()));
        let guard = stop.clone().drop_guard();
        let node = Self::open_with(settings, front, hub, Some((peers, peer_addr))).await?;
        if node.is_alone() {
            node.settle().await?;
        }
        let failed = node.failed.clone();
        guard.disarm();
        // Ignored: a node is opened once.
        let stopped = CancellationToken::new();
        let _ = node.peer_port.set(PeerPort { stop: stop.clone(), stopped: stopped.clone() });
        tokio::spawn(async move {
            let _stopped = stopped.drop_guard();
            let why = match serving.await {
                Ok(Ok(())) if stop.is_cancelled() => return,
                Ok(Ok(())) => "it ended".to_owned(),
                Ok(Err(error)) => error.to_string(),
                Err(error) => error.to_string(),
            };
            failed.send_replace(Some(format!("the peer port failed: {why}")));
        });
        Ok(node)
    }

    async fn open_with(
        settings: NodeSettings,
        front: Arc<Front>,
        hub: Arc<Hub>,
        // Where others are, and what they dial: none for a node that does not listen for any.
        among: Option<(BTreeMap<u64, String>, String)>,
    ) -> Result<Arc<Self>> {
        let listens = among.is_some();
        let (mut seeds, peer_addr) = among.unwrap_or_default();
        let random = Random::new(settings.seed);
        let (failed, _) = watch::channel(None);
        let logs = Logs { settings: &settings, failed: failed.clone() };
        let draining = CancellationToken::new();
        let mut formed = forming::form(&logs, &front, &hub, &random, listens).await?;
        hub.set_identity(formed.identity.cluster, formed.identity.generation);
        for (node, address) in std::mem::take(&mut formed.neighbours) {
            seeds.entry(node).or_insert(address);
        }
        hub.set_peers(&seeds);
        let made = shards_made(&logs, &formed).await?;
        let place = ClusterPlace { is_alone: front.is_alone(), listens, seeds };
        let cluster = open_cluster(&logs, &mut formed, &hub, place, made.len() as u64).await?;
        if let Some(what) = cluster.unspoken() {
            return Err(logs.unusable(0, &what));
        }
        hub.set_protocol(cluster.protocol());
        let metrics = Arc::new(Metrics::default());
        let house = House {
            members: front.replica_ids(),
            hub: &hub,
            directory: directory(&cluster),
            draining: &draining,
            metrics: &metrics,
        };
        let slots = Slots::default();
        let has_others = cluster.has_others().await;
        let named = cluster.machine().read(|state| state.shards().clone());
        for shard_id in made.union(&named).copied() {
            let made = formed.take(shard_id);
            let identity = Identity { shard_id, ..formed.identity.clone() };
            let opened = open_or_rebuild(&logs, made, identity, &house, !has_others).await;
            let slot = match opened {
                Ok(shard) => {
                    cluster.set_shard(shard_id, Some(shard.clone()));
                    Slot::Open(shard)
                }
                Err(Error::CorruptLog { what }) if !formed.is_new => {
                    tracing::error!(shard_id, %what, "shard is withheld");
                    Slot::Withheld(what)
                }
                Err(Error::DiskFull { what }) if !formed.is_new => {
                    tracing::error!(shard_id, %what, "shard cannot be opened yet");
                    Slot::Stopped(what)
                }
                Err(error) => return Err(error),
            };
            slots.set(shard_id, slot);
        }
        let direct_io = slots.open().iter().any(|shard| shard.status().wal.direct_io);
        let sync_probe = logs::probe(&logs).await?;
        let node = Arc::new(Self {
            cluster_id: format!("{:032x}", formed.identity.cluster),
            cluster,
            shards: slots,
            identity: formed.identity.clone(),
            front: front.clone(),
            reopening: tokio::sync::Mutex::default(),
            repairs: Mutex::default(),
            restarts: Mutex::default(),
            endpoint: OnceLock::new(),
            peer_addr,
            removed: OnceLock::new(),
            hub,
            peer_port: OnceLock::new(),
            routes: watch::Sender::new(0),
            random,
            load: Load::new(settings.shares),
            draining,
            failed,
            sync_probe,
            direct_io,
            metrics,
            settings,
        });
        front.serve(&node);
        tend::start(&node);
        membership::start(&node);
        repair::start(&node);
        scrub::start(&node);
        if formed.is_former && node.cluster.replica().repair_of().is_none() {
            tokio::spawn(forming::call_together(Arc::downgrade(&node), front, formed.identity));
        }
        Ok(node)
    }

    /// Waits until a node that is alone serves all that it has.
    async fn settle(&self) -> Result<()> {
        self.cluster.bootstrap(&self.bootstrap()).await?;
        for shard in self.shards() {
            shard.ready().await?;
        }
        match self.cluster.settle().await {
            // A withheld shard has partitions that nobody can bring up to date.
            Err(Error::CorruptLog { what }) => {
                tracing::warn!(%what, "topics are not all served");
                Ok(())
            }
            other => other,
        }
    }

    /// What a fresh cluster begins with.
    fn bootstrap(&self) -> Bootstrap {
        let topic = |(name, partition_count): &(String, u32)| TopicSpec {
            name: name.clone(),
            partition_count: *partition_count,
            replication_factor: 0,
            settings: self.settings.topic_settings,
        };
        Bootstrap {
            shard_count: self.shards.len() as u64,
            topics: self.settings.topics.iter().map(topic).collect(),
        }
    }

    /// Says where clients reach this node, once that is known. In a cluster it is told to the
    /// others as soon as there is a leader to tell it to.
    pub async fn announce(self: &Arc<Self>, endpoint: String) -> Result<()> {
        // Ignored: a node announces itself once.
        let _ = self.endpoint.set(endpoint);
        if self.is_alone() {
            return self.register().await;
        }
        tokio::spawn(tend::register(Arc::downgrade(self)));
        Ok(())
    }

    async fn register(&self) -> Result<()> {
        let Some(endpoint) = self.endpoint.get().cloned() else { return Ok(()) };
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let node_id = self.settings.node_id;
        let peer_addr = self.peer_addr.clone();
        let entry = NodeEntry {
            node_id,
            endpoint: endpoint.clone(),
            version: version.clone(),
            peer_addr: peer_addr.clone(),
        };
        if !self.nodes().contains(&entry) {
            let command = ClusterCommand::RegisterNode { node_id, endpoint, version, peer_addr };
            self.cluster.command(command).await?;
        }
        Ok(())
    }

    /// Whether this node is a cluster of its own.
    pub fn is_alone(&self) -> bool {
        self.cluster.is_alone()
    }

    /// Keeps out who does not speak the cluster's protocol; ends this node where it is the one.
    async fn check_protocol(&self) {
        if self.hub.set_protocol(self.cluster.protocol()) {
            // So that the data says it to whatever program is started on it next.
            self.cluster.replica().checkpoint().await;
        }
        if let Some(what) = self.cluster.unspoken() {
            self.failed.send_replace(Some(what));
        }
    }

    /// Why this node is no member of its cluster any more, if it was told so.
    pub fn removed(&self) -> Option<&str> {
        self.removed.get().map(String::as_str)
    }

    /// # Errors
    /// This node was removed: others serve what it had.
    pub fn check_member(&self) -> Result<()> {
        match self.removed() {
            Some(what) => Err(Error::NotAMember { what: what.to_owned() }),
            None => Ok(()),
        }
    }

    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    pub fn topic_settings(&self) -> &PartitionSettings {
        &self.settings.topic_settings
    }

    pub fn info(&self) -> NodeInfo {
        let storage = match self.settings.storage {
            NodeStorage::Memory => StorageKind::Memory,
            NodeStorage::Folder { .. } | NodeStorage::Simulated(_) => StorageKind::Durable,
        };
        NodeInfo {
            node_id: self.settings.node_id,
            cluster_id: self.cluster_id.clone(),
            endpoint: self.endpoint.get().cloned().unwrap_or_default(),
            version: env!("CARGO_PKG_VERSION"),
            storage,
            data_dir: format!("{:?}", self.settings.storage),
            direct_io: self.direct_io,
        }
    }

    pub fn nodes(&self) -> Vec<NodeEntry> {
        self.cluster.machine().read(|state| state.nodes().cloned().collect())
    }

    pub fn metadata_version(&self) -> u64 {
        self.cluster.machine().read(|state| state.version())
    }

    /// Follows everything that routes are made of: nodes, topics, leaders.
    pub fn watch_routes(&self) -> watch::Receiver<u64> {
        self.routes.subscribe()
    }

    /// The other nodes as this one sees them.
    pub fn peers(&self) -> Vec<PeerStatus> {
        self.hub.peers()
    }

    /// Cancelled when the node drains.
    pub fn shutdown_token(&self) -> &CancellationToken {
        &self.draining
    }

    /// What clients make this node hold, and how often they met a limit.
    pub fn load(&self) -> &Arc<Load> {
        &self.load
    }

    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.settings.clock
    }

    pub fn random_u64(&self) -> u64 {
        self.random.next_u64()
    }

    pub async fn next_producer_id(&self) -> Result<u64> {
        self.cluster.next_producer_id().await
    }

    /// p50 and p99 of a small sync on this node's disk when it started, in microseconds.
    pub fn sync_probe(&self) -> (u64, u64) {
        self.sync_probe
    }

    /// Resolves, with the reason, when this node's storage has failed.
    pub async fn failed(&self) -> String {
        let mut failed = self.failed.subscribe();
        loop {
            if let Some(reason) = failed.borrow_and_update().clone() {
                return reason;
            }
            if failed.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Hands leadership to others where there are any, then stops all shards. Calls in progress
    /// end with an error; acknowledged batches are on disk.
    pub async fn close(&self) {
        self.draining.cancel();
        let _turn = self.reopening.lock().await;
        // Again: others may have given it something to lead meanwhile.
        self.hand_over().await;
        // Together: a disk that hangs is waited for once.
        let shards = self.shards();
        join_all(shards.iter().map(|shard| shard.close())).await;
        self.hub.stop_shard(0);
        self.cluster.replica().close().await;
        self.hub.close();
        if let Some(PeerPort { stop, stopped }) = self.peer_port.get() {
            stop.cancel();
            // The address is free for whoever starts next.
            stopped.cancelled().await;
        }
    }

    /// Who should lead shard 0 after this node.
    fn heir(&self) -> Option<u64> {
        let replica = self.cluster.replica();
        self.cluster.heir(&replica.voters(), &replica.matched())
    }

    /// Hands leadership to others where there are any.
    pub async fn hand_over(&self) {
        let led = self
            .shards()
            .into_iter()
            .filter(|shard| shard.leads() && !shard.is_cut_off() && shard.replicas().len() > 1);
        let transfers = led.map(|shard| async move {
            let replica = shard.replica();
            let heir = self.cluster.heir(&replica.voters(), &replica.matched());
            if let Err(error) = shard.transfer(heir).await {
                tracing::warn!(shard_id = shard.id(), %error, "leadership was not handed over");
            }
        });
        join_all(transfers).await;
        if !self.is_alone()
            && self.cluster.leads()
            && let Err(error) = self.cluster.transfer(self.heir()).await
        {
            tracing::warn!(shard_id = 0, %error, "leadership was not handed over");
        }
    }
}
