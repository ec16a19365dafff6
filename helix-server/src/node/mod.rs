//! A node: its shards, their shared dependencies and the background tasks. It opens everything in
//! order and closes it in reverse.
//!
//! Files in reading order:
//! - `settings`: settings of a node, and the storage of its logs.
//! - `bootstrap_handler`: answers peer requests, also before the node exists.
//! - `formation`: forms a new cluster with other nodes, or joins an existing one.
//! - `logs`: opens, identifies and quarantines the logs of the shards.
//! - `open`: opens shard 0 and the data shards on their logs. `shard_slots` holds the data shards.
//! - `principal`: callers and their rules. `bootstrap_token` makes the first token of a cluster.
//! - `lookup`: finds topics, partitions and shards for requests; `groups` consumer groups.
//! - `background`: forms shards, propagates topics, registers the node and balances leaderships.
//! - `member_tasks`: dials the members and carries out membership changes.
//! - `repair`: reopens stopped shards and repairs damaged logs: `repair_decision` has the rule,
//!   `repair_in_place` repairs sealed segments, also of logs that cannot be replayed
//!   (`unreplayed`). `scrub` finds damage.
//! - `clock_watch`: compares the clocks of the members.
//! - `readiness`: reasons why the node is not ready. `tls`: its certificates.

mod background;
mod bootstrap_handler;
mod bootstrap_token;
mod call_share;
mod clock_watch;
mod formation;
mod groups;
mod leadership_log;
mod logs;
mod lookup;
mod member_tasks;
mod open;
mod principal;
mod quota;
mod readiness;
mod rebuild;
mod repair;
mod repair_decision;
mod repair_in_place;
mod scrub;
mod settings;
mod shard_slots;
mod tls;
mod unreplayed;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::audit::AuditLog;
use crate::clock::AgreedClock;
use crate::cluster::{Bootstrap, Cluster, RegisteredNode, TopicSpec};
use crate::error::{Error, Result};
use crate::log::{ClusterCommand, PartitionSettings};
use crate::memory::MemoryShares;
use crate::metrics::Metrics;
use crate::peer::{Hub, HubSettings};
pub use crate::peer::{Network, PeerStatus, PeerTls};
use crate::protocol::ProtocolVersions;
use crate::raft::ElectionTiming;
use crate::random::Random;
pub use crate::shard::LogLimits;
use crate::shard::{CleanerCodecs, KeyMapMemory};
use bootstrap_handler::BootstrapHandler;
pub use bootstrap_token::{FIRST_PRINCIPAL, TokenFile, make_first_token};
pub use call_share::{CallShare, CallSlot};
pub use groups::{CommitFallback, ReaderMembership};
use logs::{LogIdentity, NodeLogs};
pub use lookup::LocatedPartition;
use open::{ShardContext, StartupPeers, directory, existing_shards, open_cluster, open_or_rebuild};
use principal::TokenRefresh;
pub use principal::{AuthMode, Caller, Credentials, Principal};
use quota::QuotaMeters;
pub use quota::{ConnectionSlot, QuotaKind, QuotaMeter};
pub use readiness::Unready;
pub use settings::{NodeSettings, NodeStorage, SimulatedDisks};
use shard_slots::{ShardSlot, ShardSlots};
pub use tls::NodeTls;
use unreplayed::{OpenFailure, UnreplayedLogs};

/// Durability of the node's storage.
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
    /// Cancelled once the port is closed.
    stopped: CancellationToken,
}

#[derive(Debug)]
pub struct Node {
    settings: NodeSettings,
    cluster_id: String,
    cluster: Cluster,
    shards: ShardSlots,
    /// Logs of data shards that cannot be replayed.
    unreplayed: UnreplayedLogs,
    /// Identity of this node's logs; its shard id is 0.
    identity: LogIdentity,
    handler: Arc<BootstrapHandler>,
    /// Held while a shard is reopened, and while the node closes.
    reopening: tokio::sync::Mutex<()>,
    /// Progress of each shard's repair, or the reason why it waits, by shard id.
    repairs: Mutex<BTreeMap<u64, String>>,
    /// Number of segments repaired in place, by shard id.
    repaired: Mutex<BTreeMap<u64, u64>>,
    /// Number of times that each shard was reopened, by shard id.
    restarts: Mutex<BTreeMap<u64, u64>>,
    endpoint: OnceLock<String>,
    /// Address that this node announces to other nodes; empty if it knows none.
    peer_addr: String,
    /// Reason why this node is no longer a member of its cluster.
    removed: OnceLock<String>,
    tls: OnceLock<NodeTls>,
    hub: Arc<Hub>,
    /// Set if the node has a peer port.
    peer_port: OnceLock<PeerPort>,
    /// Incremented when nodes, topics or leaders change.
    routes: watch::Sender<u64>,
    random: Random,
    draining: CancellationToken,
    failed: watch::Sender<Option<String>>,
    sync_probe: (u64, u64),
    direct_io: bool,
    metrics: Arc<Metrics>,
    codecs: CleanerCodecs,
    key_maps: KeyMapMemory,
    audit: AuditLog,
    token_refresh: TokenRefresh,
    quota_meters: QuotaMeters,
    /// The clock of `settings`, bounded by the agreed time.
    clock: Arc<AgreedClock>,
}

impl Node {
    /// Opens a single-node cluster without a peer port, and waits until it serves.
    ///
    /// # Errors
    /// [`Error::Unusable`] if the data directory is not this node's, and the errors of its logs.
    pub async fn open(settings: NodeSettings) -> Result<Arc<Self>> {
        let handler = BootstrapHandler::new(&settings, &BTreeMap::new());
        let hub_settings = HubSettings {
            node_id: settings.node_id,
            peers: BTreeMap::new(),
            versions: ProtocolVersions::OWN,
            timing: ElectionTiming::new(settings.election_timeout),
        };
        let hub = Hub::new(hub_settings, handler.clone());
        handler.attach_hub(&hub);
        let node = Self::open_with(settings, handler, hub, None).await?;
        node.settle().await?;
        Ok(node)
    }

    /// Opens a node with a peer port, `network`, which is usually a TCP listener. If `peers` has an
    /// address for the node itself, the node announces it to other nodes. Waits until the cluster
    /// is formed or this node has joined it, but not until it has a leader.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn open_among(
        settings: NodeSettings,
        mut peers: BTreeMap<u64, String>,
        network: impl Into<Network>,
    ) -> Result<Arc<Self>> {
        let network = network.into();
        let own = peers.remove(&settings.node_id);
        let bound = network.local_addr().filter(|addr| !addr.ip().is_unspecified());
        let peer_addr = own.or(bound.map(|addr| addr.to_string())).unwrap_or_default();
        let handler = BootstrapHandler::new(&settings, &peers);
        let hub_settings = HubSettings {
            node_id: settings.node_id,
            peers: peers.clone(),
            versions: network.versions(),
            timing: ElectionTiming::new(settings.election_timeout),
        };
        let hub = Hub::over(network.dialer(), hub_settings, handler.clone());
        handler.attach_hub(&hub);
        let stop = CancellationToken::new();
        let serving = tokio::spawn(network.serve(hub.clone(), stop.clone()));
        let guard = stop.clone().drop_guard();
        let node = Self::open_with(settings, handler, hub, Some((peers, peer_addr))).await?;
        if node.is_single_node() {
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

    /// Boxed, so that only this crate compiles the future.
    fn open_with(
        settings: NodeSettings,
        handler: Arc<BootstrapHandler>,
        hub: Arc<Hub>,
        among: Option<(BTreeMap<u64, String>, String)>,
    ) -> BoxFuture<'static, Result<Arc<Self>>> {
        Self::open_unboxed(settings, handler, hub, among).boxed()
    }

    async fn open_unboxed(
        settings: NodeSettings,
        handler: Arc<BootstrapHandler>,
        hub: Arc<Hub>,
        // Addresses of the peers and of this node; `None` for a node without a peer port.
        among: Option<(BTreeMap<u64, String>, String)>,
    ) -> Result<Arc<Self>> {
        let clock = AgreedClock::new(settings.clock.clone());
        let settings = NodeSettings { clock: clock.clone(), ..settings };
        let listens = among.is_some();
        let (mut seeds, peer_addr) = among.unwrap_or_default();
        let random = Random::new(settings.seed);
        let (failed, _) = watch::channel(None);
        let logs = NodeLogs { settings: &settings, failed: failed.clone() };
        let draining = CancellationToken::new();
        let mut formed = formation::form(&logs, &handler, &hub, &random, listens).await?;
        hub.set_identity(formed.identity.cluster, formed.identity.generation);
        for (node, address) in std::mem::take(&mut formed.peer_addrs) {
            seeds.entry(node).or_insert(address);
        }
        hub.set_peers(&seeds);
        let existing = existing_shards(&logs, &formed).await?;
        let startup_peers =
            StartupPeers { is_single_node: handler.is_single_node(), listens, seeds };
        let cluster =
            open_cluster(&logs, &mut formed, &hub, startup_peers, existing.len() as u64).await?;
        if let Some(what) = cluster.protocol_mismatch() {
            // Releases the data directory, so that a fitting release can open it at once.
            cluster.replica().close().await;
            return Err(logs.unusable(0, &what));
        }
        hub.set_protocol(cluster.protocol());
        let (metrics, codecs) = (Arc::new(Metrics::default()), CleanerCodecs::default());
        let key_maps = KeyMapMemory::new(settings.log_limits.key_map_bytes);
        let context = ShardContext {
            members: handler.replica_ids(),
            hub: &hub,
            directory: directory(&cluster),
            draining: &draining,
            metrics: &metrics,
            codecs: &codecs,
            key_maps: &key_maps,
        };
        let (slots, unreplayed) = (ShardSlots::default(), UnreplayedLogs::default());
        let has_other_replicas = cluster.data_has_other_replicas().await;
        let may_be_single = has_other_replicas != Some(true);
        let named = cluster.machine().read(|state| state.shards().clone());
        for shard_id in existing.union(&named).copied() {
            let log = formed.take(shard_id);
            let identity = LogIdentity { shard_id, ..formed.identity.clone() };
            let opened = open_or_rebuild(&logs, log, identity, &context, may_be_single).await;
            let opened = match opened {
                Err(OpenFailure::Replay(log)) if has_other_replicas != Some(false) => {
                    // Repaired once the node runs: `repair` reopens stopped shards.
                    let what = log.damage(&logs).to_string();
                    unreplayed.hold(&hub, log);
                    tracing::error!(shard_id, %what, "replay of a log met damage");
                    slots.set(shard_id, ShardSlot::Stopped(what));
                    continue;
                }
                Err(failure) => Err(failure.into_error(&hub, &logs).await),
                Ok(shard) => Ok(shard),
            };
            let slot = match opened {
                Ok(shard) => {
                    cluster.set_shard(shard_id, Some(shard.clone()));
                    ShardSlot::Open(shard)
                }
                Err(Error::CorruptLog { what })
                    if !formed.is_new && has_other_replicas.is_none() =>
                {
                    tracing::error!(shard_id, %what, "cannot open the shard yet");
                    ShardSlot::Stopped(what)
                }
                Err(Error::CorruptLog { what }) if !formed.is_new => {
                    tracing::error!(shard_id, %what, "cannot serve the shard: its log is damaged");
                    ShardSlot::Damaged(what)
                }
                Err(Error::DiskFull { what } | Error::Exhausted { what }) if !formed.is_new => {
                    tracing::error!(shard_id, %what, "cannot open the shard yet");
                    ShardSlot::Stopped(what)
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
            unreplayed,
            identity: formed.identity.clone(),
            handler: handler.clone(),
            reopening: tokio::sync::Mutex::default(),
            repairs: Mutex::default(),
            repaired: Mutex::default(),
            restarts: Mutex::default(),
            endpoint: OnceLock::new(),
            peer_addr,
            removed: OnceLock::new(),
            tls: OnceLock::new(),
            hub,
            peer_port: OnceLock::new(),
            routes: watch::Sender::new(0),
            random,
            draining,
            failed,
            sync_probe,
            direct_io,
            metrics,
            codecs,
            key_maps,
            audit: AuditLog::default(),
            token_refresh: TokenRefresh::default(),
            quota_meters: QuotaMeters::default(),
            clock,
            settings,
        });
        handler.attach_node(&node);
        background::start(&node);
        member_tasks::start(&node);
        repair::start(&node);
        scrub::start(&node);
        tokio::spawn(clock_watch::run(Arc::downgrade(&node)));
        if formed.is_initiator && node.cluster.replica().repair_of().is_none() {
            tokio::spawn(formation::lead_formation(
                Arc::downgrade(&node),
                handler,
                formed.identity,
            ));
        }
        Ok(node)
    }

    /// Waits until a single node serves all of its shards and topics.
    async fn settle(&self) -> Result<()> {
        self.cluster.bootstrap(&self.bootstrap()).await?;
        for shard in self.shards() {
            shard.ready().await?;
        }
        match self.cluster.propagate_all().await {
            // The partitions of a damaged shard cannot be brought up to date.
            Err(Error::CorruptLog { what }) => {
                tracing::warn!(%what, "cannot serve all topics");
                Ok(())
            }
            // A shard that waits for disk space gets them when it is opened.
            Err(error) if !self.shards.closed().is_empty() => {
                tracing::warn!(%error, "cannot serve all topics yet");
                Ok(())
            }
            other => other,
        }
    }

    /// Returns the initial contents of a new cluster.
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

    /// Announces the address at which clients reach this node. In a cluster of several nodes it is
    /// registered in the background, as soon as there is a leader.
    ///
    /// # Errors
    /// On a single node, the error of the command that registers it.
    pub async fn announce(self: &Arc<Self>, endpoint: String) -> Result<()> {
        // Ignored: a node announces itself once.
        let _ = self.endpoint.set(endpoint);
        if self.is_single_node() {
            return self.register().await;
        }
        tokio::spawn(background::register(Arc::downgrade(self)));
        Ok(())
    }

    async fn register(&self) -> Result<()> {
        let Some(endpoint) = self.endpoint.get().cloned() else { return Ok(()) };
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let node_id = self.settings.node_id;
        let peer_addr = self.peer_addr.clone();
        let entry = RegisteredNode {
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

    /// Returns whether this node is the only voter of its cluster.
    pub fn is_single_node(&self) -> bool {
        self.cluster.is_single_node()
    }

    /// Applies the cluster's protocol version to peer connections.
    /// Fails this node if it does not support that version.
    async fn check_protocol(&self) {
        if self.hub.set_protocol(self.cluster.protocol()) {
            // Records the version in the data, for the program that is started on it next.
            self.cluster.replica().checkpoint().await;
        }
        if let Some(what) = self.cluster.protocol_mismatch() {
            self.failed.send_replace(Some(what));
        }
    }

    /// Returns why this node is no longer a member of its cluster, if it was removed.
    pub fn removed(&self) -> Option<&str> {
        self.removed.get().map(String::as_str)
    }

    /// Checks that this node is still a member of its cluster.
    ///
    /// # Errors
    /// [`Error::NotAMember`] if it was removed.
    pub fn check_member(&self) -> Result<()> {
        match self.removed() {
            Some(what) => Err(Error::NotAMember { what: what.to_owned() }),
            None => Ok(()),
        }
    }

    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Returns the writer of the audit log.
    pub fn audit(&self) -> &AuditLog {
        &self.audit
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
            NodeStorage::DataDir { .. } | NodeStorage::Simulated(_) => StorageKind::Durable,
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

    pub fn nodes(&self) -> Vec<RegisteredNode> {
        self.cluster.machine().read(|state| state.nodes().cloned().collect())
    }

    pub fn metadata_version(&self) -> u64 {
        self.cluster.machine().read(|state| state.version())
    }

    /// Subscribes to changes of the routes: nodes, topics and leaders.
    pub fn watch_routes(&self) -> watch::Receiver<u64> {
        self.routes.subscribe()
    }

    /// Returns the status of the connections to other nodes.
    pub fn peers(&self) -> Vec<PeerStatus> {
        self.hub.peers()
    }

    /// Returns the token that is cancelled when the node shuts down.
    pub fn shutdown_token(&self) -> &CancellationToken {
        &self.draining
    }

    /// Returns the memory shares that the transport holds clients to.
    pub fn shares(&self) -> &MemoryShares {
        &self.settings.shares
    }

    pub fn clock(&self) -> &AgreedClock {
        &self.clock
    }

    pub fn random_u64(&self) -> u64 {
        self.random.next_u64()
    }

    /// Returns a producer id that was never issued.
    ///
    /// # Errors
    /// [`Error::NoLeader`] if no ids are left on this node and shard 0 has no leader.
    pub async fn next_producer_id(&self) -> Result<u64> {
        self.cluster.next_producer_id().await
    }

    /// Returns the p50 and p99 latency of a small sync at startup, in µs; 0 if not measured.
    pub fn sync_probe(&self) -> (u64, u64) {
        self.sync_probe
    }

    /// Waits until this node has failed, and returns the reason.
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

    /// Transfers leaderships to other nodes, then stops all shards. Requests in progress fail;
    /// acknowledged batches are durable.
    pub async fn close(&self) {
        self.draining.cancel();
        let _guard = self.reopening.lock().await;
        // This node may have become a leader again meanwhile.
        self.transfer_leadership().await;
        // Concurrently, so that a hanging disk delays the shutdown once.
        let shards = self.shards();
        join_all(shards.iter().map(|shard| shard.close())).await;
        self.unreplayed.close_all(&self.hub, &self.logs()).await;
        self.hub.stop_shard(0);
        self.cluster.replica().close().await;
        self.hub.close();
        if let Some(PeerPort { stop, stopped }) = self.peer_port.get() {
            stop.cancel();
            // The address is free again afterwards.
            stopped.cancelled().await;
        }
    }

    /// Returns the node that should lead shard 0 after this one.
    async fn successor(&self) -> Option<u64> {
        self.cluster.successor(0, &self.cluster.replica(), true).await
    }

    /// Transfers all leaderships to other nodes, if there are any: this node stops.
    pub async fn transfer_leadership(&self) {
        let shards = self.shards();
        shards.iter().for_each(|shard| shard.expect_stop());
        let led = shards.into_iter().filter(|shard| {
            shard.is_leader() && !shard.is_isolated() && shard.replicas().len() > 1
        });
        let transfers = led.map(|shard| async move {
            let successor = self.cluster.successor(shard.id(), shard.replica(), true).await;
            if let Err(error) = shard.abandon_leadership(successor).await {
                // All nodes may be stopping; an election follows otherwise.
                tracing::info!(shard_id = shard.id(), %error, "leadership transfer failed");
            }
        });
        join_all(transfers).await;
        if !self.is_single_node()
            && self.cluster.is_leader()
            && let successor = self.successor().await
            && let Err(error) = self.cluster.abandon_leadership(successor).await
        {
            tracing::info!(shard_id = 0, %error, "leadership transfer failed");
        }
    }
}
