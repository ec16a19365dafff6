//! Settings that a node is opened with.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use helix_wal::storage::Storage;

use crate::access::{AuthMode, JwtVerifier};
use crate::clock::Clock;
use crate::log::PartitionSettings;
use crate::memory::MemoryShares;
use crate::shard::LogLimits;

/// Storage of a node's logs.
#[derive(Clone)]
pub enum NodeStorage {
    /// In memory; the logs are lost with the process.
    Memory,
    /// In one directory per shard.
    DataDir { path: PathBuf, direct_io: bool },
    /// On one simulated disk per shard, driven by tasks of the runtime.
    Simulated(Arc<dyn SimulatedDisks>),
}

/// The disks of a simulated node.
pub trait SimulatedDisks: Send + Sync + 'static {
    fn open(&self, shard_id: u64) -> Arc<dyn Storage>;

    /// Returns the shards that have a disk; `None` if only `open` shows that, which creates one.
    fn shards(&self) -> Option<Vec<u64>> {
        None
    }

    /// Returns the time that the shard's disk needs for the next write.
    fn write_delay(&self, shard_id: u64) -> Duration {
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
            Self::DataDir { path, .. } => write!(f, "{}", path.display()),
            Self::Simulated(_) => f.write_str("simulated disk"),
        }
    }
}

/// Settings of a node.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    pub node_id: u64,
    pub storage: NodeStorage,
    /// Rack or zone; empty if it states none.
    pub rack: String,
    /// Time after which others take the replicas of a node that does not respond; `None`: never.
    pub replace_down_after: Option<Duration>,
    /// Name or id of the cluster. `None` accepts the other nodes' cluster, or draws a random id.
    pub cluster_name: Option<String>,
    /// Data shards of a new cluster.
    pub shard_count: u64,
    /// Topics of a new cluster: name and partitions.
    pub topics: Vec<(String, u32)>,
    /// Default settings of topics.
    pub topic_settings: PartitionSettings,
    pub segment_bytes: u64,
    /// Preparation of the logs' next segment files.
    pub preparation: helix_wal::Preparation,
    pub tail_bytes: usize,
    pub footer_bytes: usize,
    /// Open files of sealed segments, shared by all logs of the node.
    pub files: helix_wal::FileCache,
    /// Limits of the memory that clients may occupy.
    pub shares: MemoryShares,
    pub log_limits: LogLimits,
    /// Scrub rate in bytes per second; 0 disables the scrub.
    pub scrub_rate: u64,
    /// Largest rate of copies in bytes per second; at least [`crate::limits::COPY_RATE_LEAST`].
    pub copy_rate_max: u64,
    /// Lets the logs' writers busy-poll for the next batch.
    pub busy_poll: bool,
    /// Priority of small batches over large ones; 0 disables it.
    pub pace: u32,
    /// Election timeout, from which the timing of elections follows.
    pub election_timeout: Duration,
    pub clock: Arc<dyn Clock>,
    /// Treatment of callers.
    pub auth: AuthMode,
    /// Verifier of JWTs; `None` accepts none.
    pub jwt: Option<Arc<JwtVerifier>>,
    /// Random seed for simulations; `None` seeds from the operating system.
    pub seed: Option<u64>,
}
