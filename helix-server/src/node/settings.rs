//! What a node is opened with.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use helix_wal::storage::Storage;

use crate::clock::Clock;
use crate::log::PartitionSettings;
use crate::memory::Shares;
use crate::shard::LogLimits;

/// Where a node keeps its logs.
#[derive(Clone)]
pub enum NodeStorage {
    /// Nowhere: they are gone with the process.
    Memory,
    /// In a folder of its own for each shard.
    Folder { path: PathBuf, direct_io: bool },
    /// On a simulated disk for each shard, driven by the runtime's own tasks.
    Simulated(Arc<dyn SimulatedDisks>),
}

/// The disks of a simulated node.
pub trait SimulatedDisks: Send + Sync + 'static {
    fn open(&self, shard_id: u64) -> Arc<dyn Storage>;

    /// How long the shard's disk takes for what its writer is about to give it.
    fn pace(&self, shard_id: u64) -> Duration {
        let _ = shard_id;
        Duration::ZERO
    }
}

impl<F: Fn(u64) -> Arc<dyn Storage> + Send + Sync + 'static> SimulatedDisks for F {
    fn open(&self, shard_id: u64) -> Arc<dyn Storage> {
        self(shard_id)
    }
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
    /// Name of the cluster; `None` takes the one that the others have, or draws one.
    pub cluster_name: Option<String>,
    /// Data shards of a new cluster.
    pub shard_count: u64,
    /// Topics of a new cluster: name and partitions.
    pub topics: Vec<(String, u32)>,
    /// Settings of a topic whose creator does not name any.
    pub topic_settings: PartitionSettings,
    pub segment_bytes: u64,
    pub tail_bytes: usize,
    pub footer_bytes: usize,
    /// What clients may make the node hold.
    pub shares: Shares,
    pub log_limits: LogLimits,
    /// Bytes of the logs that are read anew in a second, to find damage; 0: none are.
    pub scrub_rate: u64,
    /// For how long a log's writer stays awake for the next batch.
    pub idle_poll: Duration,
    /// How far small batches go before large ones; 0: not at all.
    pub pace: u32,
    pub clock: Arc<dyn Clock>,
    /// For simulations; `None` draws from the operating system.
    pub seed: Option<u64>,
}
