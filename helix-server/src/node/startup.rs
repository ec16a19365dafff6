//! Starts a node: forms or joins a cluster, opens the shards, and starts the background tasks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::formation::bootstrap_handler::BootstrapHandler;
use super::login::TokenRefresh;
use super::logs::NodeLogs;
use super::open::{
    ShardContext, StartupPeers, directory, existing_shards, open_cluster, open_data_shards,
};
use super::{
    Network, Node, NodeSettings, NodeStorage, PeerPort, background, clock_watch, copy_rate,
    formation, logs, member_tasks, placed_shards, repair, scrub, split_builder,
};
use crate::access::{AuditLog, QuotaMeters};
use crate::clock::AgreedClock;
use crate::cluster::{Bootstrap, TopicSpec};
use crate::error::{Error, Result};
use crate::metrics::Metrics;
use crate::peer::{Hub, HubSettings};
use crate::protocol::ProtocolVersions;
use crate::raft::ElectionTiming;
use crate::random::Random;
use crate::shard::{CleanerWorker, KeyMapMemory};
use crate::slow::SlowCalls;

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
        let (reports, versions) = (failed.clone(), hub.versions());
        let logs = NodeLogs { settings: &settings, failed: reports, versions };
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
        let metrics = Arc::new(Metrics::default());
        let is_simulated = matches!(settings.storage, NodeStorage::Simulated(_));
        let cleaner_worker = CleanerWorker::new(is_simulated);
        let key_maps = KeyMapMemory::new(settings.log_limits.key_map_bytes);
        let context = ShardContext {
            members: handler.replica_ids(),
            hub: &hub,
            directory: directory(&cluster),
            draining: &draining,
            metrics: &metrics,
            cleaner_worker: &cleaner_worker,
            key_maps: &key_maps,
        };
        let (slots, unreplayed) =
            open_data_shards(&logs, &mut formed, &cluster, &existing, &context).await?;
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
            supervised: Mutex::default(),
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
            cleaner_worker,
            key_maps,
            audit: AuditLog::default(),
            token_refresh: TokenRefresh::default(),
            quota_meters: QuotaMeters::default(),
            slow_calls: SlowCalls::default(),
            tracer: OnceLock::new(),
            clock,
            settings,
        });
        handler.attach_node(&node);
        background::start(&node);
        member_tasks::start(&node);
        repair::start(&node);
        placed_shards::start(&node);
        split_builder::start(&node);
        scrub::start(&node);
        copy_rate::start(&node);
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
    pub(super) fn bootstrap(&self) -> Bootstrap {
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
}
