//! A node: its shards, their shared dependencies and the background tasks. It opens everything in
//! order and closes it in reverse.
//!
//! Files in reading order:
//! - `settings`: settings of a node, and the storage of its logs.
//! - `formation`: forms a new cluster with other nodes, or joins an existing one. Its
//!   `bootstrap_handler` answers peer requests, also before the node exists.
//! - `logs`: opens, identifies and quarantines the logs of the shards.
//! - `startup`: starts the node.
//! - `open`: opens shard 0 and the data shards on their logs. `shard_slots` holds the data shards.
//! - `login`: finds the caller of a request. `bootstrap_token` makes the first token of a cluster.
//! - `lookup`: finds topics, partitions and shards for requests; `groups` consumer groups.
//! - `background`: forms shards, propagates topics, registers the node and balances leaderships.
//! - `member_tasks`: dials the members and carries out membership changes. `placed_shards` creates
//!   and deletes this node's replicas as the placement says.
//! - `repair`: reopens stopped shards and repairs damaged logs: `decision` has the rule,
//!   `in_place` repairs sealed segments, also of logs that cannot be replayed (`unreplayed`),
//!   `rebuild` fills a new log. `scrub` finds damage.
//! - `clock_watch`: compares the clocks of the members. `copy_rate` steers the rate of copies.
//! - `readiness`: reasons why the node is not ready. `tls`: its certificates.

mod background;
mod bootstrap_token;
mod clock_watch;
mod copy_rate;
mod formation;
mod groups;
mod leadership_log;
mod login;
mod logs;
mod lookup;
mod member_tasks;
mod open;
mod placed_shards;
mod readiness;
mod repair;
mod scrub;
mod settings;
mod shard_slots;
mod split_builder;
mod startup;
mod tls;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, OnceLock};

use futures_util::future::join_all;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::access::{AuditLog, QuotaMeters};
use crate::clock::AgreedClock;
use crate::cluster::{Cluster, RegisteredNode};
use crate::error::{Error, LeaderHint, Result};
use crate::log::{ClusterCommand, PartitionSettings, ProducerOwner};
use crate::memory::MemoryShares;
use crate::metrics::Metrics;
use crate::peer::Hub;
pub use crate::peer::{CopyPace, Network, PeerStatus, PeerTls};
use crate::random::Random;
pub use crate::shard::LogLimits;
use crate::shard::{CleanerWorker, KeyMapMemory};
use crate::slow::SlowCalls;
use crate::trace::Tracer;
pub use bootstrap_token::{FIRST_PRINCIPAL, TokenFile, make_first_token};
use formation::bootstrap_handler::BootstrapHandler;
pub use groups::{CommitFallback, ReaderMembership};
use login::TokenRefresh;
use logs::LogIdentity;
pub use lookup::LocatedPartition;
pub use readiness::{ClosedShard, Unready};
use repair::unreplayed::UnreplayedLogs;
pub use settings::{NodeSettings, NodeStorage, SimulatedDisks};
use shard_slots::ShardSlots;
pub use tls::NodeTls;

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
    /// Shards that have a supervisor.
    supervised: Mutex<BTreeSet<u64>>,
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
    cleaner_worker: CleanerWorker,
    key_maps: KeyMapMemory,
    audit: AuditLog,
    token_refresh: TokenRefresh,
    quota_meters: QuotaMeters,
    slow_calls: SlowCalls,
    tracer: OnceLock<Arc<Tracer>>,
    /// The clock of `settings`, bounded by the agreed time.
    clock: Arc<AgreedClock>,
}

impl Node {
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
        // A node that was removed and added again first applies its earlier registration.
        if self.nodes().contains(&entry) && !self.is_single_node() {
            self.cluster.catch_up().await?;
        }
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
            Some(what) => {
                Err(Error::NotAMember { what: what.to_owned(), other: self.other_member() })
            }
            None => Ok(()),
        }
    }

    /// Returns another node of the cluster, for clients that know only this one.
    fn other_member(&self) -> Option<LeaderHint> {
        let own = self.settings.node_id;
        let is_other = |node: &RegisteredNode| node.node_id != own && !node.endpoint.is_empty();
        let other = self.nodes().into_iter().find(is_other)?;
        Some(LeaderHint { node_id: other.node_id, endpoint: other.endpoint, term: 0 })
    }

    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Returns the slowest appends and reads of the last minutes.
    pub fn slow_calls(&self) -> &SlowCalls {
        &self.slow_calls
    }

    /// Traces batches with this tracer. Without one, none is traced.
    pub fn set_tracer(&self, tracer: Arc<Tracer>) {
        // Ignored: a node is served once.
        let _ = self.tracer.set(tracer);
    }

    pub fn tracer(&self) -> Option<&Arc<Tracer>> {
        self.tracer.get()
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

    /// Returns a producer id that was never issued, for this owner.
    ///
    /// # Errors
    /// [`Error::NoLeader`] if no ids are left on this node and shard 0 has no leader.
    pub async fn next_producer_id(&self, owner: ProducerOwner) -> Result<u64> {
        self.cluster.next_producer_id(owner).await
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
