//! What a server is started with: flags, the same as HELIX_* in the environment, and the checks
//! that they make sense. An error says what, where, and what to do next.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use crate::limits::{BATCH_BYTES_DEFAULT, BATCH_BYTES_MAX, RECORD_BYTES_DEFAULT, SHARDS_MAX};
use crate::log::PartitionSettings;

/// Segments are preallocated, and several are kept ready: beyond this they are a surprise.
const SEGMENT_BYTES_MAX: u64 = 2 << 30;

/// A segment must hold the largest batch well, or batches would decide where segments end.
const SEGMENT_BYTES_MIN: u64 = 2 * BATCH_BYTES_MAX as u64;

/// Nodes of a cluster: an odd number, since an even one survives no more losses than the odd one
/// below it.
const NODES: [usize; 3] = [1, 3, 5];

/// Where a node keeps its logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Storage {
    /// On disk: what is acknowledged is on stable storage.
    Durable,
    /// In memory: gone with the process.
    Memory,
}

/// How the server's own log is written to stderr.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    Text,
}

/// Configuration of a server. Flags of `helix-server`, each also as HELIX_* in the environment.
#[derive(Debug, Clone, PartialEq, Eq, clap::Args)]
pub struct Config {
    /// Number of this node in its cluster, at least 1
    #[arg(long, env = "HELIX_NODE_ID", default_value_t = 1)]
    pub node_id: u64,

    /// Address to listen on; port 0 takes any free one
    #[arg(long, alias = "listen", env = "HELIX_LISTEN_ADDR", default_value = "127.0.0.1:9092")]
    pub listen_addr: SocketAddr,

    /// Address that clients dial, "host:port", where it is not the one listened on
    #[arg(long, env = "HELIX_ADVERTISE_ADDR")]
    pub advertise_addr: Option<String>,

    /// Name of the cluster; a node joins no other one [default: any]
    #[arg(long, env = "HELIX_CLUSTER_ID", value_name = "NAME")]
    pub cluster_id: Option<String>,

    /// Address to listen on for the cluster's other nodes; used only with --peer
    #[arg(long, env = "HELIX_PEER_ADDR", default_value = "127.0.0.1:9192")]
    pub peer_addr: SocketAddr,

    /// Peer address of a node of the cluster; once for each node, this one may be among them
    #[arg(
        long = "peer",
        env = "HELIX_PEER",
        value_name = "ID=HOST:PORT",
        value_parser = parse_peer,
        value_delimiter = ','
    )]
    pub peers: Vec<(u64, String)>,

    /// Folder for the data; created if it is not there
    #[arg(long, env = "HELIX_DATA_DIR", default_value = "./helix-data")]
    pub data_dir: PathBuf,

    /// Where the logs are kept: durable acknowledges what is synced, memory loses all at exit
    #[arg(long, env = "HELIX_STORAGE", value_enum, default_value_t = Storage::Durable)]
    pub storage: Storage,

    /// Topic to create on a fresh cluster, "name:partitions"; may be given more than once
    #[arg(
        long = "topic",
        env = "HELIX_TOPIC",
        value_name = "NAME:PARTITIONS",
        value_parser = parse_topic,
        value_delimiter = ',',
        default_value = "default:4"
    )]
    pub topics: Vec<(String, u32)>,

    /// Shards of a fresh cluster: replicated logs that its partitions share [default: 1]
    #[arg(long, env = "HELIX_SHARDS")]
    pub shards: Option<u64>,

    /// Threads that serve calls [default: one less than there are cores]
    #[arg(long, env = "HELIX_WORKER_THREADS")]
    pub worker_threads: Option<NonZeroUsize>,

    /// Size of a segment file
    #[arg(
        long,
        env = "HELIX_SEGMENT_BYTES",
        value_name = "BYTES",
        value_parser = parse_bytes,
        default_value = "64MiB"
    )]
    pub segment_bytes: u64,

    /// Memory for the newest records of each shard, from which readers near the end are served
    #[arg(
        long,
        env = "HELIX_TAIL_BYTES",
        value_name = "BYTES",
        value_parser = parse_bytes,
        default_value = "16MiB"
    )]
    pub tail_bytes: u64,

    /// Bytes that a partition keeps unless its topic says otherwise; 0: unlimited
    #[arg(
        long,
        env = "HELIX_DEFAULT_RETENTION_BYTES",
        value_name = "BYTES",
        value_parser = parse_bytes,
        default_value = "0"
    )]
    pub default_retention_bytes: u64,

    /// Time that a partition keeps records unless its topic says otherwise ("7d"); 0: unlimited
    #[arg(
        long,
        env = "HELIX_DEFAULT_RETENTION_TIME",
        value_name = "TIME",
        value_parser = parse_duration,
        default_value = "0"
    )]
    pub default_retention_time: Duration,

    /// Go through the page cache instead of around it
    #[arg(
        long,
        env = "HELIX_NO_DIRECT_IO",
        value_parser = clap::builder::BoolishValueParser::new()
    )]
    pub no_direct_io: bool,

    /// Form of the log on stderr
    #[arg(long, env = "HELIX_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log: LogFormat,
}

/// A value that makes no sense.
#[derive(Debug, thiserror::Error)]
#[error("--{flag} {value}: {what}")]
pub struct ConfigError {
    flag: &'static str,
    value: String,
    what: String,
}

impl Default for Config {
    fn default() -> Self {
        use clap::{Args, Command, FromArgMatches};

        // The environment is the binary's affair, not that of a server inside another program.
        let command =
            Self::augment_args(Command::new("helix-server")).mut_args(|arg| arg.env(None));
        let matches = command.get_matches_from(["helix-server"]);
        Self::from_arg_matches(&matches).expect("every flag has a valid default")
    }
}

impl Config {
    /// A server in memory, on any free port of this machine: for tests and tools.
    pub fn in_memory() -> Self {
        let listen_addr = SocketAddr::from(([127, 0, 0, 1], 0));
        Self { storage: Storage::Memory, listen_addr, ..Self::default() }
    }

    /// A durable server in this folder, on any free port of this machine.
    pub fn in_folder(data_dir: impl Into<PathBuf>) -> Self {
        let data_dir = data_dir.into();
        Self { storage: Storage::Durable, data_dir, ..Self::in_memory() }
    }

    /// Checks what no single flag can check for itself.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let error = |flag, value: &dyn ToString, what: &str| {
            Err(ConfigError { flag, value: value.to_string(), what: what.to_owned() })
        };
        // A replica id has 32 bits for the node.
        if self.node_id == 0 || self.node_id > u64::from(u32::MAX) {
            return error("node-id", &self.node_id, "choose a number in 1..=4294967295");
        }
        if let Some(shards) = self.shards.filter(|it| !(1..=SHARDS_MAX).contains(it)) {
            return error("shards", &shards, "choose a number in 1..=64");
        }
        self.validate_peers()?;
        if !(SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&self.segment_bytes) {
            return error("segment-bytes", &self.segment_bytes, "choose 16MiB to 2GiB");
        }
        if usize::try_from(self.tail_bytes).is_err() {
            return error("tail-bytes", &self.tail_bytes, "more than this machine can address");
        }
        if let Some(advertised) = &self.advertise_addr
            && !has_port(advertised)
        {
            return error("advertise-addr", advertised, "give it as host:port");
        }
        if self.advertise_addr.is_none() && self.listen_addr.ip().is_unspecified() {
            let what = "this listens on all addresses, and clients cannot dial it; say which one \
                        they reach with --advertise-addr host:port";
            return error("listen-addr", &self.listen_addr, what);
        }
        for (place, (name, _)) in self.topics.iter().enumerate() {
            if self.topics[..place].iter().any(|(earlier, _)| earlier == name) {
                return error("topic", name, "is there twice; give each topic once");
            }
        }
        Ok(())
    }

    fn validate_peers(&self) -> Result<(), ConfigError> {
        let error = |flag, value: &dyn ToString, what: &str| {
            Err(ConfigError { flag, value: value.to_string(), what: what.to_owned() })
        };
        for (place, (id, address)) in self.peers.iter().enumerate() {
            let shown = format!("{id}={address}");
            if *id == 0 || *id > u64::from(u32::MAX) {
                return error("peer", &shown, "a node's number is in 1..=4294967295");
            }
            if self.peers[..place].iter().any(|(earlier, _)| earlier == id) {
                return error("peer", &shown, "this node is there twice; give each node once");
            }
        }
        if !NODES.contains(&self.node_count()) {
            let what = "with this node that makes an even number, or more than five: a cluster has \
                        1, 3 or 5 nodes";
            return error("peer", &self.peers.len(), what);
        }
        if self.cluster_id.as_ref().is_some_and(String::is_empty) {
            return error("cluster-id", &"", "give it a name, or leave the flag out");
        }
        Ok(())
    }

    /// The other nodes' peer addresses.
    pub fn other_nodes(&self) -> BTreeMap<u64, String> {
        self.peers.iter().filter(|(id, _)| *id != self.node_id).cloned().collect()
    }

    /// Nodes of the cluster that this one forms or belongs to.
    pub fn node_count(&self) -> usize {
        self.other_nodes().len() + 1
    }

    /// Data shards of a fresh cluster.
    pub fn shard_count(&self) -> u64 {
        self.shards.unwrap_or(1)
    }

    /// Whether others than this machine reach the server, which checks nobody's identity.
    pub fn is_exposed(&self) -> bool {
        let peers_listen = !self.other_nodes().is_empty() && !self.peer_addr.ip().is_loopback();
        !self.listen_addr.ip().is_loopback() || peers_listen
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

fn has_port(address: &str) -> bool {
    address
        .rsplit_once(':')
        .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
}

fn parse_topic(text: &str) -> Result<(String, u32), String> {
    let wanted = || format!("write name:partitions, as in orders:4, not {text:?}");
    let (name, partitions) = text.rsplit_once(':').ok_or_else(wanted)?;
    let partitions = partitions.parse().map_err(|_| wanted())?;
    if name.is_empty() || partitions == 0 {
        return Err(wanted());
    }
    Ok((name.to_owned(), partitions))
}

fn parse_peer(text: &str) -> Result<(u64, String), String> {
    let wanted = || format!("write id=host:port, as in 2=helix-2:9192, not {text:?}");
    let (id, address) = text.split_once('=').ok_or_else(wanted)?;
    let id = id.trim().parse().map_err(|_| wanted())?;
    if !has_port(address) {
        return Err(wanted());
    }
    Ok((id, address.to_owned()))
}

/// A number of bytes: "67108864", "64MiB", "64M".
fn parse_bytes(text: &str) -> Result<u64, String> {
    let wanted = || format!("write a number of bytes, as in 1048576, 64MiB or 2GiB, not {text:?}");
    let (number, unit) = split_unit(text).ok_or_else(wanted)?;
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return Err(wanted()),
    };
    number.checked_mul(1 << shift).ok_or_else(wanted)
}

/// A length of time: "0", "90s", "15m", "12h", "7d".
fn parse_duration(text: &str) -> Result<Duration, String> {
    let wanted = || format!("write a length of time, as in 90s, 15m, 12h or 7d, not {text:?}");
    let (number, unit) = split_unit(text).ok_or_else(wanted)?;
    let seconds = match (number, unit) {
        (0, "") | (_, "s") => 1,
        (_, "m") => 60,
        (_, "h") => 60 * 60,
        (_, "d") => 24 * 60 * 60,
        (_, "w") => 7 * 24 * 60 * 60,
        _ => return Err(wanted()),
    };
    number.checked_mul(seconds).map(Duration::from_secs).ok_or_else(wanted)
}

fn split_unit(text: &str) -> Option<(u64, &str)> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    Some((number.parse().ok()?, unit.trim()))
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
        assert!(!config.is_exposed());
        assert!(config.worker_threads() >= 1);
    }

    #[test]
    fn sizes_and_times_are_read_as_people_write_them() {
        assert_eq!(parse_bytes("64MiB").unwrap(), 64 << 20);
        assert_eq!(parse_bytes("2g").unwrap(), 2 << 30);
        assert_eq!(parse_bytes("1048576").unwrap(), 1 << 20);
        assert_eq!(parse_duration("7d").unwrap(), Duration::from_secs(7 * 24 * 3600));
        assert_eq!(parse_duration("0").unwrap(), Duration::ZERO);
        for wrong in ["", "x", "-1", "5q", "99999999999999999999", "9999999999999TiB"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong:?}");
            assert!(parse_duration(wrong).is_err(), "{wrong:?}");
        }
        assert!(parse_duration("5").is_err(), "a number without a unit is a riddle");
    }

    #[test]
    fn topics_have_a_name_and_partitions() {
        assert_eq!(parse_topic("orders:8").unwrap(), ("orders".to_owned(), 8));
        for wrong in ["orders", "orders:", ":4", "orders:0", "orders:x"] {
            assert!(parse_topic(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn peers_have_an_id_and_an_address() {
        assert_eq!(parse_peer("2=n2:9192").unwrap(), (2, "n2:9192".to_owned()));
        for wrong in ["n2:9192", "2=n2", "x=n2:9192", "2=", "=n2:1"] {
            assert!(parse_peer(wrong).is_err(), "{wrong:?}");
        }
        let peer = |id: u64| (id, format!("n{id}:9192"));
        let with = |peers: Vec<(u64, String)>| Config { peers, ..Config::default() };
        let three = with(vec![peer(1), peer(2), peer(3)]);
        three.validate().unwrap();
        assert_eq!(three.other_nodes().keys().copied().collect::<Vec<_>>(), [2, 3]);
        assert_eq!((three.node_count(), three.shard_count()), (3, 1));
        with(vec![peer(2), peer(3)]).validate().unwrap();
        assert!(with(vec![peer(2)]).validate().is_err(), "two nodes");
        assert!(with(vec![peer(2), peer(2)]).validate().is_err(), "twice");
        assert!(with(vec![peer(0), peer(2)]).validate().is_err(), "no such node");
    }

    #[test]
    fn an_error_names_the_flag_and_the_way_out() {
        let all = Config { listen_addr: "0.0.0.0:9092".parse().unwrap(), ..Config::default() };
        let message = all.validate().unwrap_err().to_string();
        assert!(message.starts_with("--listen-addr 0.0.0.0:9092: "), "{message}");
        assert!(message.contains("--advertise-addr host:port"), "{message}");
        let reachable = Config { advertise_addr: Some("n1:9092".to_owned()), ..all };
        reachable.validate().unwrap();
        assert!(reachable.is_exposed());
        let advertised = Config { advertise_addr: Some("n1".to_owned()), ..Config::default() };
        assert!(advertised.validate().is_err());
        assert!(Config { node_id: 0, ..Config::default() }.validate().is_err());
        assert!(Config { segment_bytes: 1, ..Config::default() }.validate().is_err());
        let twice = vec![("a".to_owned(), 1), ("a".to_owned(), 2)];
        assert!(Config { topics: twice, ..Config::default() }.validate().is_err());
    }
}
