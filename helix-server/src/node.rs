//! A node: which shards live here, which partition is in which shard, and what they share.
//! Opens everything in order and closes it in reverse.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use helix_wal::Wal;
use helix_wal::storage::{DirStorage, Storage};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::cluster::{Cluster, ClusterMachine, NodeEntry, Place, TopicInfo, TopicSpec};
use crate::drive::{self, Drive};
use crate::error::{Error, Result};
use crate::limits;
use crate::log::{ClusterCommand, PartitionId, PartitionSettings};
use crate::peer::Solitary;
use crate::raft::{DiskReads, Replica, ReplicaSettings, replica_id};
use crate::random::Random;
use crate::shard::{Shard, ShardSettings};

/// Where a node keeps its logs.
#[derive(Clone)]
pub enum NodeStorage {
    /// Nowhere: they are gone with the process.
    Memory,
    /// In a folder of its own for each shard.
    Folder { path: PathBuf, direct_io: bool },
    /// On a simulated disk for each shard, driven by the runtime's own tasks.
    Simulated(Arc<dyn Fn(u64) -> Arc<dyn Storage> + Send + Sync>),
}

impl std::fmt::Debug for NodeStorage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Memory => f.write_str("memory"),
            Self::Folder { path, .. } => write!(f, "{}", path.display()),
            Self::Simulated(_) => f.write_str("simulated disk"),
        }
    }
}

/// What a node is opened with.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    pub node_id: u64,
    pub storage: NodeStorage,
    /// Data shards of a new node.
    pub shard_count: u64,
    /// Topics of a new node: name and partitions.
    pub topics: Vec<(String, u32)>,
    /// Settings of a topic whose creator does not name any.
    pub topic_settings: PartitionSettings,
    pub segment_bytes: u64,
    pub tail_bytes: usize,
    pub clock: Arc<dyn Clock>,
    /// For simulations; `None` draws from the operating system.
    pub seed: Option<u64>,
}

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

/// A partition, found.
#[derive(Debug, Clone)]
pub struct Located {
    pub partition: PartitionId,
    pub shard: Arc<Shard>,
    pub settings: PartitionSettings,
    pub topic: Arc<TopicInfo>,
    pub number: u32,
}

/// A shard's place in the node: a damaged one is withheld, the others go on.
#[derive(Debug)]
enum Slot {
    Open(Arc<Shard>),
    Withheld(String),
}

#[derive(Debug)]
pub struct Node {
    settings: NodeSettings,
    cluster_id: String,
    cluster: Cluster,
    shards: BTreeMap<u64, Slot>,
    endpoint: Arc<OnceLock<String>>,
    random: Random,
    draining: CancellationToken,
    failed: watch::Sender<Option<String>>,
    sync_probe: (u64, u64),
    direct_io: bool,
}

/// Who a log belongs to, in every one of its files.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Identity {
    cluster: u128,
    node_id: u64,
    generation: u32,
    shard_id: u64,
}

impl Identity {
    const MAGIC: &'static [u8; 8] = b"helix-id";

    fn encode(&self) -> Bytes {
        let mut bytes = BytesMut::with_capacity(44);
        bytes.put_slice(Self::MAGIC);
        bytes.put_u128_le(self.cluster);
        bytes.put_u64_le(self.node_id);
        bytes.put_u32_le(self.generation);
        bytes.put_u64_le(self.shard_id);
        bytes.freeze()
    }

    fn decode(mut bytes: Bytes) -> Option<Self> {
        if bytes.len() != 44 || bytes.split_to(8) != Self::MAGIC[..] {
            return None;
        }
        Some(Self {
            cluster: bytes.get_u128_le(),
            node_id: bytes.get_u64_le(),
            generation: bytes.get_u32_le(),
            shard_id: bytes.get_u64_le(),
        })
    }
}

/// What it takes to open the logs of one node.
#[derive(Debug)]
struct Logs<'a> {
    settings: &'a NodeSettings,
    failed: watch::Sender<Option<String>>,
}

/// One opened log.
struct OpenLog {
    wal: Wal,
    identity: Identity,
    created: bool,
    checkpoint: Option<(helix_wal::LogId, Bytes)>,
    reads: DiskReads,
}

impl Logs<'_> {
    fn storage(&self, shard_id: u64) -> Result<Option<Arc<dyn Storage>>> {
        match &self.settings.storage {
            NodeStorage::Memory => Ok(None),
            NodeStorage::Simulated(open) => Ok(Some(open(shard_id))),
            NodeStorage::Folder { path, direct_io } => {
                let folder = path.join(format!("shard-{shard_id}"));
                let open = if *direct_io { DirStorage::open } else { DirStorage::open_buffered };
                let storage = open(&folder).map_err(|error| Error::StorageFailed {
                    what: format!("folder {}: {error}", folder.display()),
                    may_have_applied: false,
                })?;
                Ok(Some(Arc::new(storage)))
            }
        }
    }

    fn options(&self, shard_id: u64, identity: Bytes) -> helix_wal::Options {
        let mut options = helix_wal::Options { identity, ..helix_wal::Options::default() };
        if shard_id == 0 {
            // The cluster's own log is small and rarely written.
            options.segment_bytes = limits::CLUSTER_SEGMENT_BYTES;
            options.group_bytes = limits::CLUSTER_GROUP_BYTES;
            options.tail_bytes = limits::CLUSTER_GROUP_BYTES;
            options.ready_segments = 1;
        } else {
            options.segment_bytes = self.settings.segment_bytes;
            options.tail_bytes = self.settings.tail_bytes;
        }
        options
    }

    /// Opens a shard's log, for `identity` where it is new.
    async fn open(&self, identity: Identity) -> Result<OpenLog> {
        let shard_id = identity.shard_id;
        let in_place = !matches!(self.settings.storage, NodeStorage::Folder { .. });
        let reads = DiskReads::new(in_place);
        let options = self.options(shard_id, Bytes::new());
        let Some(storage) = self.storage(shard_id)? else {
            let wal = Wal::open_memory(options);
            return Ok(OpenLog { wal, identity, created: true, checkpoint: None, reads });
        };
        let new = identity.encode();
        let open = move || {
            // An existing log says itself whose it is; a new one is told.
            let exists = Wal::exists(&*storage)?;
            let identity = if exists { Bytes::new() } else { new };
            Wal::open(storage, helix_wal::Options { identity, ..options })
        };
        let opened =
            reads.wait(open).await.map_err(|error| self.unusable(shard_id, &error.to_string()))?;
        let (wal, writer, keeper, recovered) = opened.map_err(|error| match error {
            helix_wal::Error::Damaged { .. } => self.damaged(shard_id, &error.to_string()),
            other => self.unusable(shard_id, &other.to_string()),
        })?;
        let found = Identity::decode(recovered.identity.clone()).ok_or_else(|| {
            self.unusable(shard_id, "the log's identity is not one of this program")
        })?;
        if (found.node_id, found.shard_id) != (identity.node_id, shard_id) {
            let what = format!(
                "it belongs to shard {} of node {} of cluster {:032x}; this is node {}: give it \
                 its own --data-dir, or start it with --node-id {}",
                found.shard_id, found.node_id, found.cluster, identity.node_id, found.node_id
            );
            return Err(self.unusable(shard_id, &what));
        }
        if recovered.cut_bytes > 0 {
            tracing::info!(
                shard_id,
                bytes = recovered.cut_bytes,
                "cut a torn, unacknowledged tail"
            );
        }
        let failed = self.failed.clone();
        wal.on_poisoned(Box::new(move |error| {
            failed.send_replace(Some(format!("shard {shard_id}: {error}")));
        }));
        let drive = match self.settings.storage {
            NodeStorage::Simulated(_) => Drive::Tasks,
            NodeStorage::Memory | NodeStorage::Folder { .. } => Drive::Threads,
        };
        drive::start(drive, &wal, writer, keeper)
            .map_err(|error| self.unusable(shard_id, &error.to_string()))?;
        let checkpoint = recovered.checkpoint;
        Ok(OpenLog { wal, identity: found, created: recovered.created, checkpoint, reads })
    }

    fn place(&self, shard_id: u64) -> String {
        match &self.settings.storage {
            NodeStorage::Folder { path, .. } => {
                path.join(format!("shard-{shard_id}")).display().to_string()
            }
            other => format!("shard {shard_id} ({other:?})"),
        }
    }

    fn unusable(&self, shard_id: u64, what: &str) -> Error {
        Error::Unusable { what: format!("{}: {what}", self.place(shard_id)) }
    }

    fn damaged(&self, shard_id: u64, what: &str) -> Error {
        Error::CorruptLog { what: format!("{}: {what}", self.place(shard_id)) }
    }
}

impl Node {
    /// Opens a node: recovers its shards, forms a cluster of its own where the folder is new.
    pub async fn open(settings: NodeSettings) -> Result<Arc<Self>> {
        let random = Random::new(settings.seed);
        let (failed, _) = watch::channel(None);
        let logs = Logs { settings: &settings, failed: failed.clone() };
        let draining = CancellationToken::new();
        let cluster = u128::from(random.next_u64()) << 64 | u128::from(random.next_u64());
        let identity = Identity { cluster, node_id: settings.node_id, generation: 1, shard_id: 0 };
        let log = logs.open(identity).await?;
        let (identity, created) = (log.identity.clone(), log.created);
        let machine = Arc::new(ClusterMachine::new(log.wal.clone()));
        let replica = Replica::open(
            ReplicaSettings {
                shard_id: 0,
                replica_id: replica_id(identity.node_id, identity.generation),
                wal: log.wal,
                reads: log.reads,
                machine: machine.clone(),
                checkpoint: log.checkpoint,
            },
            Solitary,
        )
        .await
        .map_err(|error| logs.damaged(0, &error.to_string()))?;
        replica.form_alone().await.map_err(|error| logs.damaged(0, &error.to_string()))?;
        let cluster = Cluster::new(replica, machine, settings.clock.clone());
        if !cluster.replica().wait_ready(limits::READY_WAIT_MAX).await {
            return Err(Error::NoLeader { shard: 0 });
        }
        if cluster.machine().read(|state| state.shards().is_empty()) {
            let shards = (1..=settings.shard_count).collect();
            cluster.command(ClusterCommand::RegisterShards { shards }).await?;
        }
        let endpoint = Arc::new(OnceLock::new());
        let mut slots = BTreeMap::new();
        let mut open = BTreeMap::new();
        for shard_id in cluster.machine().read(|state| state.shards().clone()) {
            let identity = Identity { shard_id, ..identity.clone() };
            match open_shard(&logs, identity, &endpoint, &draining).await {
                Ok(shard) => {
                    open.insert(shard_id, shard.clone());
                    slots.insert(shard_id, Slot::Open(shard));
                }
                Err(Error::CorruptLog { what }) if !created => {
                    tracing::error!(shard_id, %what, "shard is withheld");
                    slots.insert(shard_id, Slot::Withheld(what));
                }
                Err(error) => return Err(error),
            }
        }
        let direct_io = open.values().any(|shard| shard.status().wal.direct_io);
        cluster.set_shards(open);
        let sync_probe = probe(&logs).await?;
        let node = Arc::new(Self {
            cluster_id: format!("{:032x}", identity.cluster),
            cluster,
            shards: slots,
            endpoint,
            random,
            draining,
            failed,
            sync_probe,
            direct_io,
            settings,
        });
        node.settle(created).await?;
        Ok(node)
    }

    async fn settle(&self, created: bool) -> Result<()> {
        for slot in self.shards.values() {
            if let Slot::Open(shard) = slot {
                shard.ready().await?;
            }
        }
        if let Err(error) = self.cluster.settle().await {
            match error {
                // A withheld shard has partitions that nobody can bring up to date.
                Error::CorruptLog { what } => tracing::warn!(%what, "topics are not all served"),
                other => return Err(other),
            }
        }
        if created {
            for (name, partition_count) in &self.settings.topics {
                let spec = TopicSpec {
                    name: name.clone(),
                    partition_count: *partition_count,
                    replication_factor: 1,
                    settings: self.settings.topic_settings,
                };
                self.cluster.create_topic(spec, false).await?;
            }
        }
        Ok(())
    }

    /// Says where clients reach this node, once that is known.
    pub async fn announce(&self, endpoint: String) -> Result<()> {
        // Ignored: a node announces itself once.
        let _ = self.endpoint.set(endpoint.clone());
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let node_id = self.settings.node_id;
        let known = self.nodes();
        let same =
            |n: &NodeEntry| n.node_id == node_id && n.endpoint == endpoint && n.version == version;
        if !known.iter().any(same) {
            let command = ClusterCommand::RegisterNode { node_id, endpoint, version };
            self.cluster.command(command).await?;
        }
        Ok(())
    }

    /// Finds a partition and its shard.
    pub fn locate(&self, topic: &str, partition: u32) -> Result<Located> {
        let info = self.cluster.topic(topic)?;
        let Some(Place { shard_id, partition: id }) = info.place(partition) else {
            return Err(Error::PartitionNotFound {
                topic: topic.to_owned(),
                partition,
                partition_count: info.partition_count,
            });
        };
        match self.shards.get(&shard_id) {
            Some(Slot::Open(shard)) => Ok(Located {
                partition: id,
                shard: shard.clone(),
                settings: info.settings,
                topic: info,
                number: partition,
            }),
            Some(Slot::Withheld(what)) => Err(Error::CorruptLog { what: what.clone() }),
            None => Err(Error::NoLeader { shard: shard_id }),
        }
    }

    pub fn topic(&self, name: &str) -> Result<Arc<TopicInfo>> {
        self.cluster.topic(name)
    }

    /// Topics by name: those that begin with `prefix` and come after `after`.
    pub fn topics(&self, prefix: &str, after: Option<&str>, limit: usize) -> Vec<Arc<TopicInfo>> {
        self.cluster.machine().read(|state| {
            let first = after.unwrap_or_default();
            let topics = state.topics_from(prefix, first).filter(|t| t.name.as_str() != first);
            topics.take(limit).cloned().collect()
        })
    }

    pub fn shard(&self, id: u64) -> Option<Arc<Shard>> {
        match self.shards.get(&id) {
            Some(Slot::Open(shard)) => Some(shard.clone()),
            Some(Slot::Withheld(_)) | None => None,
        }
    }

    /// The shards that are served.
    pub fn shards(&self) -> Vec<Arc<Shard>> {
        self.shards.keys().filter_map(|id| self.shard(*id)).collect()
    }

    /// The shards that are not served, and why.
    pub fn withheld(&self) -> Vec<(u64, String)> {
        let withheld = self.shards.iter().filter_map(|(id, slot)| match slot {
            Slot::Withheld(what) => Some((*id, what.clone())),
            Slot::Open(_) => None,
        });
        withheld.collect()
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

    pub fn watch_metadata(&self) -> watch::Receiver<u64> {
        self.cluster.machine().watch()
    }

    /// Cancelled when the node drains.
    pub fn shutdown_token(&self) -> &CancellationToken {
        &self.draining
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

    /// Stops all shards. Calls in progress end with an error; acknowledged batches are on disk.
    pub async fn close(&self) {
        self.draining.cancel();
        for shard in self.shards() {
            shard.close().await;
        }
        self.cluster.replica().close().await;
    }
}

async fn open_shard(
    logs: &Logs<'_>,
    identity: Identity,
    endpoint: &Arc<OnceLock<String>>,
    draining: &CancellationToken,
) -> Result<Arc<Shard>> {
    let cluster = identity.cluster;
    let shard_id = identity.shard_id;
    let log = logs.open(identity).await?;
    if log.identity.cluster != cluster {
        let what = format!("it belongs to another cluster, {:032x}", log.identity.cluster);
        return Err(logs.unusable(shard_id, &what));
    }
    let settings = ShardSettings {
        shard_id,
        replica_id: replica_id(log.identity.node_id, log.identity.generation),
        node_id: log.identity.node_id,
        endpoint: endpoint.clone(),
        wal: log.wal,
        checkpoint: log.checkpoint,
        reads: log.reads,
        durable: !matches!(logs.settings.storage, NodeStorage::Memory),
        clock: logs.settings.clock.clone(),
        draining: draining.clone(),
    };
    Shard::open(settings).await.map_err(|error| logs.damaged(shard_id, &error.to_string()))
}

/// Measures what a small sync costs here.
async fn probe(logs: &Logs<'_>) -> Result<(u64, u64)> {
    let NodeStorage::Folder { .. } = logs.settings.storage else { return Ok((0, 0)) };
    let Some(storage) = logs.storage(0)? else { return Ok((0, 0)) };
    let reads = DiskReads::new(false);
    let measure = move || helix_wal::storage::probe_sync(&*storage, limits::SYNC_PROBES);
    let failed = |what: String| Error::StorageFailed { what, may_have_applied: false };
    let measured = reads.wait(measure).await.map_err(|error| failed(error.to_string()))?;
    let (p50, p99) = measured.map_err(|error| failed(format!("measuring a sync: {error}")))?;
    let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    Ok((us(p50), us(p99)))
}
