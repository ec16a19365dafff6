//! What a server is started with: the settings, their defaults, and what follows from them.
//! Where their values come from (flags, environment, file) is the affair of `Flags`.

mod check;
mod file;
mod flags;
mod print;
#[cfg(test)]
mod reference;
mod settings;
mod values;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use crate::limits::{BATCH_BYTES_DEFAULT, IDLE_POLL_US, PACE, RECORD_BYTES_DEFAULT};
use crate::log::PartitionSettings;
use crate::memory::Shares;
pub use check::ConfigError;
pub use flags::{Asked, Flags, Origin, Resolved};
pub use settings::{Kind, Setting, settings};
use values::{
    parse_address, parse_admin_addr, parse_bytes, parse_duration, parse_log_level, parse_peer,
    parse_topic,
};

/// Where a node keeps its logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Storage {
    /// On disk: what is acknowledged is on stable storage.
    Durable,
    /// In memory: gone with the process.
    Memory,
}

/// Where the admin port is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminAddr {
    Off,
    At(SocketAddr),
}

/// From the clients' port to that of administration, unless another one is chosen: nodes on one
/// machine differ in both.
const ADMIN_PORT_STEP: u16 = 552;

/// How the server's own log is written to stderr.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Configuration of a server.
///
/// A field with a flag is all that a new setting takes: its variable (HELIX_ and the flag in
/// capitals), its key in the file (the flag with underscores) and its row in
/// `docs/configuration.md` follow from it. The default stands here and nowhere else; `value_name`
/// BYTES and TIME say that it is a size or a length of time. What a value must satisfy beside its
/// form is in `check.rs`.
#[derive(Debug, Clone, PartialEq, Eq, clap::Args)]
pub struct Config {
    /// Number of this node in its cluster, at least 1
    #[arg(long, default_value_t = 1)]
    pub node_id: u64,

    /// Address to listen on; port 0 takes any free one
    #[arg(long, alias = "listen", value_parser = parse_address, default_value = "127.0.0.1:9092")]
    pub listen_addr: SocketAddr,

    /// Address that clients dial, "host:port", where it is not the one listened on
    #[arg(long)]
    pub advertise_addr: Option<String>,

    /// Name of the cluster; a node joins no other one [default: any]
    #[arg(long, value_name = "NAME")]
    pub cluster_id: Option<String>,

    /// Address to listen on for the cluster's other nodes; used only with --peer
    #[arg(long, value_parser = parse_address, default_value = "127.0.0.1:9192")]
    pub peer_addr: SocketAddr,

    /// Peer address of a node of the cluster, once for each; this node's own is what others dial
    #[arg(
        long = "peer",
        value_name = "ID=HOST:PORT",
        value_parser = parse_peer,
        value_delimiter = ','
    )]
    pub peers: Vec<(u64, String)>,

    /// Address of the admin port, with /metrics, /livez and /readyz; "off" for none [default:
    /// 127.0.0.1 and the port of --listen-addr plus 552: 9644 for 9092]
    #[arg(long, value_name = "ADDR|off", value_parser = parse_admin_addr)]
    pub admin_addr: Option<AdminAddr>,

    /// Listen where others than this machine can reach it, without encryption or authentication
    #[arg(long)]
    pub insecure: bool,

    /// Folder for the data; created if it is not there
    #[arg(long, default_value = "./helix-data")]
    pub data_dir: PathBuf,

    /// Where the logs are kept: durable acknowledges what is synced, memory loses all at exit
    #[arg(long, value_enum, default_value_t = Storage::Durable)]
    pub storage: Storage,

    /// Topic to create on a fresh cluster, "name:partitions"; may be given more than once
    #[arg(
        long = "topic",
        value_name = "NAME:PARTITIONS",
        value_parser = parse_topic,
        value_delimiter = ',',
        default_value = "default:4"
    )]
    pub topics: Vec<(String, u32)>,

    /// Shards of a fresh cluster: replicated logs that its partitions share [default: 1]
    #[arg(long)]
    pub shards: Option<u64>,

    /// Threads that serve calls [default: one less than there are cores]
    #[arg(long)]
    pub worker_threads: Option<NonZeroUsize>,

    /// Size of a segment file
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "64MiB")]
    pub segment_bytes: u64,

    /// Memory that the node may take; what each part of it may take follows from that
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "512MiB")]
    pub memory_limit: u64,

    /// Memory for the newest records of each shard, from which readers near the end are served
    /// [default: by the memory limit, at most 16MiB]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub tail_bytes: Option<u64>,

    /// Log that each shard keeps for replicas that are away or behind; one that lacks more gets the
    /// shard's state and its records instead
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "4GiB")]
    pub catch_up_bytes: u64,

    /// Log between two checkpoints of a shard's state, at least: about what a restart reads again
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "64MiB")]
    pub checkpoint_bytes: u64,

    /// Bytes of its logs that the node reads anew in a second to find damage early; 0: none
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "8MiB")]
    pub scrub_rate: u64,

    /// While batches of up to 16 KiB come, larger ones may have this many times in flight of what
    /// the log does in the time that one batch takes alone: 2 leaves the small ones about the
    /// latency that they have alone, more gives the large ones more of the log; 0: no bound
    #[arg(long, value_name = "TIMES", default_value_t = PACE)]
    pub pace: u32,

    /// Microseconds that a log's writer stays awake for the next batch, while batches come that
    /// soon; 0, it sleeps at once, where processor time is scarcer than latency
    #[arg(long, value_name = "MICROSECONDS", default_value_t = IDLE_POLL_US)]
    pub idle_poll_us: u32,

    /// Bytes that a partition keeps unless its topic says otherwise; 0: unlimited
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "0")]
    pub default_retention_bytes: u64,

    /// Time that a partition keeps records unless its topic says otherwise ("7d"); 0: unlimited
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "0")]
    pub default_retention_time: Duration,

    /// Go through the page cache instead of around it
    #[arg(long)]
    pub no_direct_io: bool,

    /// Form of the log on stderr
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,

    /// What is logged: a level, or levels of parts as in "info,helix_server::peer=warn"
    #[arg(
        long,
        alias = "log",
        value_name = "LEVEL",
        value_parser = parse_log_level,
        default_value = "info"
    )]
    pub log_level: String,
}

impl Default for Config {
    fn default() -> Self {
        use clap::{Args, Command, FromArgMatches};

        let command = Self::augment_args(Command::new("helix-server"));
        let matches = command.get_matches_from(["helix-server"]);
        Self::from_arg_matches(&matches).expect("every flag has a valid default")
    }
}

impl Config {
    /// A server in memory, on any free port of this machine: for tests and tools.
    pub fn in_memory() -> Self {
        let listen_addr = SocketAddr::from(([127, 0, 0, 1], 0));
        let admin_addr = Some(AdminAddr::Off);
        Self { storage: Storage::Memory, listen_addr, admin_addr, ..Self::default() }
    }

    /// A durable server in this folder, on any free port of this machine.
    pub fn in_folder(data_dir: impl Into<PathBuf>) -> Self {
        let data_dir = data_dir.into();
        Self { storage: Storage::Durable, data_dir, ..Self::in_memory() }
    }

    /// The other nodes' peer addresses.
    pub fn other_nodes(&self) -> BTreeMap<u64, String> {
        self.peers.iter().filter(|(id, _)| *id != self.node_id).cloned().collect()
    }

    /// Nodes of the cluster that this one forms or belongs to.
    pub fn node_count(&self) -> usize {
        self.other_nodes().len() + 1
    }

    /// Where the admin port listens, if there is one.
    pub fn admin_listen_addr(&self) -> Option<SocketAddr> {
        match self.admin_addr {
            Some(AdminAddr::Off) => None,
            Some(AdminAddr::At(addr)) => Some(addr),
            None => {
                // Any free one beside a port that is any free one itself, and beyond the last.
                let port = match self.listen_addr.port() {
                    0 => 0,
                    port => port.checked_add(ADMIN_PORT_STEP).unwrap_or(0),
                };
                Some(SocketAddr::from(([127, 0, 0, 1], port)))
            }
        }
    }

    /// Data shards of a fresh cluster.
    pub fn shard_count(&self) -> u64 {
        self.shards.unwrap_or(1)
    }

    /// What each part of the node may take of its memory.
    pub fn shares(&self) -> Shares {
        Shares::of(self.memory_limit)
    }

    /// Newest records that each shard keeps in memory.
    pub fn tail_bytes(&self) -> u64 {
        self.tail_bytes.unwrap_or_else(|| self.shares().tail_bytes(self.shard_count()))
    }

    /// Footer pages that each shard keeps in memory.
    pub fn footer_bytes(&self) -> u64 {
        self.shares().footer_bytes(self.shard_count(), self.tail_bytes()).unwrap_or_default()
    }

    pub fn worker_threads(&self) -> usize {
        let cores = || thread::available_parallelism().map_or(1, NonZeroUsize::get);
        // One core is left to the logs' writer threads and the kernel.
        self.worker_threads.map_or_else(|| (cores() - 1).max(1), NonZeroUsize::get)
    }

    /// Settings of a topic that names none.
    pub fn topic_settings(&self) -> PartitionSettings {
        let time_us = u64::try_from(self.default_retention_time.as_micros()).unwrap_or(u64::MAX);
        PartitionSettings {
            retention_us: (time_us > 0).then_some(time_us),
            retention_bytes: Some(self.default_retention_bytes).filter(|bytes| *bytes > 0),
            max_batch_bytes: BATCH_BYTES_DEFAULT,
            max_record_bytes: RECORD_BYTES_DEFAULT,
            default_durability: 1,
            min_durability: 4,
            version: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_make_sense() {
        let config = Config::default();
        config.validate().unwrap();
        assert_eq!(config.topics, [("default".to_owned(), 4)]);
        assert_eq!(config.listen_addr.to_string(), "127.0.0.1:9092");
        assert_eq!(config.exposed(), []);
        assert!(config.worker_threads() >= 1);
    }

    #[test]
    fn the_admin_port_follows_the_clients_port() {
        let admin = |listen: &str, admin_addr: Option<AdminAddr>| {
            let config =
                Config { listen_addr: listen.parse().unwrap(), admin_addr, ..Config::default() };
            config.admin_listen_addr().map(|addr| addr.to_string())
        };
        assert_eq!(admin("127.0.0.1:9092", None).unwrap(), "127.0.0.1:9644");
        assert_eq!(admin("10.0.0.1:9093", None).unwrap(), "127.0.0.1:9645");
        assert_eq!(admin("127.0.0.1:0", None).unwrap(), "127.0.0.1:0");
        assert_eq!(admin("127.0.0.1:65000", None).unwrap(), "127.0.0.1:0");
        assert_eq!(admin("127.0.0.1:9092", Some(AdminAddr::Off)), None);
        let addr = "127.0.0.1:1".parse().unwrap();
        assert_eq!(admin("127.0.0.1:9092", Some(AdminAddr::At(addr))).unwrap(), "127.0.0.1:1");
    }
}
