//! The configuration of a server: its settings, their defaults, and values derived from them.
//! [`Flags`] reads them from the command line, the environment and a file.

mod check;
mod container;
mod copy_rate;
mod file;
mod flags;
mod jwt;
mod print;
#[cfg(test)]
mod reference;
mod settings;
mod tls;
mod token_file;
mod values;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;
use std::{fmt, thread};

use crate::limits::{
    BATCH_BYTES_DEFAULT, CLEANER_DIRTY_PERCENT, ELECTION_TIMEOUT_MS, PACE, RECORD_BYTES_DEFAULT,
};
use crate::log::PartitionSettings;
use crate::memory::MemoryShares;
pub use check::ConfigError;
pub use container::ContainerLimits;
pub use copy_rate::CopyRateFile;
pub use flags::{ConfigAction, Flags, ResolvedConfig, SettingOrigin};
pub use jwt::JwksFile;
pub use settings::{Setting, SettingKind, settings};
pub use tls::{ClientCertificates, TlsUse};
pub use token_file::SecretFile;
pub(crate) use values::log_filter;
use values::{
    parse_address, parse_admin_addr, parse_bytes, parse_duration, parse_log_level, parse_peer,
    parse_share, parse_socket, parse_socket_mode, parse_topic,
};

/// Storage of a node's logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum StorageMode {
    /// On disk: acknowledged records are durable.
    Durable,
    /// In memory: lost with the process.
    Memory,
}

/// Preparation of the logs' next segment files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum PrepareMode {
    /// Zero-filled while the disk has idle bandwidth, otherwise allocated.
    Auto,
    /// Zero-filled: every byte is written twice until segments are recycled.
    Zero,
    /// Allocated: syncs take longer until segments are recycled.
    Allocate,
}

impl From<PrepareMode> for helix_wal::Preparation {
    fn from(mode: PrepareMode) -> Self {
        match mode {
            PrepareMode::Auto => Self::Auto,
            PrepareMode::Zero => Self::Zero,
            PrepareMode::Allocate => Self::Allocate,
        }
    }
}

/// Checks of callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum AuthSetting {
    /// Every caller may do everything; credentials are ignored.
    Off,
    /// As `required` for callers with credentials; those without may do everything.
    Optional,
    /// Every caller needs valid credentials, and may do only what rules allow.
    Required,
}

/// Use of the console on the admin port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ConsoleUse {
    On,
    Off,
}

/// Address of the admin port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminAddr {
    Off,
    At(SocketAddr),
}

/// Permissions of the file of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketMode(pub u32);

impl SocketMode {
    /// All permissions for all users.
    pub const MAX: Self = Self(0o777);
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

/// Difference between the default admin port and the clients' port, so that nodes on one machine
/// differ in both.
const ADMIN_PORT_STEP: u16 = 552;

/// A share of batches, from 0 to 1, in millionths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleShare(pub u32);

impl SampleShare {
    pub(super) const WHOLE: u32 = 1_000_000;

    pub fn as_f64(self) -> f64 {
        f64::from(self.0) / f64::from(Self::WHOLE)
    }
}

impl fmt::Display for SampleShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.as_f64())
    }
}

/// Format of the server's log on stderr.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Human-readable lines.
    Text,
    /// One JSON object for each line.
    Json,
}

/// Configuration of a server.
///
/// A new setting needs only a field with a flag. Its variable (HELIX_ and the flag in capitals),
/// its key in the file (the flag with underscores) and its row in `docs/configuration.md` follow
/// from it. Its default is defined here only. `value_name` BYTES or TIME makes it a size or a
/// duration. `check.rs` checks ranges and combinations.
#[derive(Debug, Clone, PartialEq, Eq, clap::Args)]
pub struct ServerConfig {
    /// Id of this node in its cluster, at least 1
    #[arg(long, default_value_t = 1)]
    pub node_id: u64,

    /// Address to listen on for clients; port 0 picks a free one
    #[arg(long, alias = "listen", value_parser = parse_address, default_value = "127.0.0.1:9092")]
    pub listen_addr: SocketAddr,

    /// Unix domain socket to listen on too, for clients of this machine, without TLS; the path must
    /// be absolute
    #[arg(long, value_name = "unix:PATH", value_parser = parse_socket)]
    pub listen_socket: Option<PathBuf>,

    /// Permissions of the file of --listen-socket, in octal; a client needs the right to write
    #[arg(long, value_name = "MODE", value_parser = parse_socket_mode, default_value = "0660")]
    pub listen_socket_mode: SocketMode,

    /// Address that clients dial, "host:port", if it differs from --listen-addr
    #[arg(long)]
    pub advertise_addr: Option<String>,

    /// Rack or zone of the node; replicas of a shard spread over racks [default: none]
    #[arg(long, value_name = "NAME")]
    pub rack: Option<String>,

    /// Time ("1h") after which other nodes take the replicas of a node that does not respond; the
    /// same on all nodes [default: never]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub replace_down_after: Option<Duration>,

    /// Name of the cluster; the node joins no cluster of another name [default: any]
    #[arg(long, value_name = "NAME")]
    pub cluster_id: Option<String>,

    /// Address to listen on for other nodes of the cluster; used only with --peer
    #[arg(long, value_parser = parse_address, default_value = "127.0.0.1:9192")]
    pub peer_addr: SocketAddr,

    /// Peer address of a node of the cluster, once for each node; other nodes dial this node's own
    #[arg(
        long = "peer",
        value_name = "ID=HOST:PORT",
        value_parser = parse_peer,
        value_delimiter = ','
    )]
    pub peers: Vec<(u64, String)>,

    /// Address of the admin port with /metrics, /livez and /readyz; "off" closes it [default:
    /// 127.0.0.1 and the port of --listen-addr plus 552: 9644 for 9092]
    #[arg(long, value_name = "ADDR|off", value_parser = parse_admin_addr)]
    pub admin_addr: Option<AdminAddr>,

    /// Console for browsers on the admin port [default: on for loopback, and with --auth and
    /// --tls-admin required]
    #[arg(long, value_enum, value_name = "USE")]
    pub console: Option<ConsoleUse>,

    /// Host name by which browsers may call the console, beside localhost and the port's address;
    /// can be given more than once
    #[arg(long = "console-host", value_name = "NAME", value_delimiter = ',')]
    pub console_hosts: Vec<String>,

    /// Allow addresses that other machines can reach, without TLS and credentials
    #[arg(long)]
    pub insecure: bool,

    /// Checks of callers: off ignores credentials, optional holds only callers with credentials to
    /// rules, required refuses all others
    #[arg(long, value_enum, default_value_t = AuthSetting::Off)]
    pub auth: AuthSetting,

    /// File for the first administrator's token of a cluster that never had a token, unless --auth
    /// is off [default: admin-token in the data directory]
    #[arg(long, value_name = "FILE")]
    pub admin_token_file: Option<PathBuf>,

    /// Public keys of the issuer whose JWTs name callers, a JWKS; read again when it changes
    #[arg(long, value_name = "FILE")]
    pub jwt_jwks: Option<PathBuf>,

    /// Issuer that a JWT must be of: its claim "iss"
    #[arg(long, value_name = "URL")]
    pub jwt_issuer: Option<String>,

    /// Audience that a JWT must be for: its claim "aud"
    #[arg(long, value_name = "NAME")]
    pub jwt_audience: Option<String>,

    /// Claim of a JWT that names the principal
    #[arg(long, value_name = "CLAIM", default_value = "sub")]
    pub jwt_principal_claim: String,

    /// Beginning of the principals of JWTs; empty lets a JWT name the principals of tokens and
    /// certificates too
    #[arg(long, value_name = "TEXT", default_value = "jwt:")]
    pub jwt_principal_prefix: String,

    /// Certificate of this node, PEM, followed by its intermediate certificates; turns TLS on
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,

    /// Private key of --tls-cert, PEM; only the server's user should be able to read it
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,

    /// CAs that sign the certificates of nodes, PEM; several while they change
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,

    /// CAs that sign the certificates of clients, PEM [default: those of --tls-ca]
    #[arg(long, value_name = "FILE")]
    pub tls_client_ca: Option<PathBuf>,

    /// TLS on the clients' port; optional also serves connections without it [default: required
    /// with --tls-cert, else off]
    #[arg(long, value_enum, value_name = "USE")]
    pub tls_clients: Option<TlsUse>,

    /// Certificates of clients: off requests none, optional verifies one if the client presents it
    #[arg(long, value_enum, value_name = "USE", default_value_t = ClientCertificates::Off)]
    pub tls_client_auth: ClientCertificates,

    /// TLS between nodes, with certificates of both; optional also accepts and dials plaintext
    /// [default: required with --tls-cert, else off]
    #[arg(long, value_enum, value_name = "USE")]
    pub tls_peers: Option<TlsUse>,

    /// TLS on the admin port; optional also serves connections without it
    #[arg(long, value_enum, value_name = "USE", default_value_t = TlsUse::Off)]
    pub tls_admin: TlsUse,

    /// Data directory; created if it does not exist
    #[arg(long, default_value = "./helix-data")]
    pub data_dir: PathBuf,

    /// Storage of the logs: durable acknowledges synced records, memory loses all data at exit
    #[arg(long, value_enum, default_value_t = StorageMode::Durable)]
    pub storage: StorageMode,

    /// Topic to create in a new cluster, "name:partitions"; can be given more than once
    #[arg(
        long = "topic",
        value_name = "NAME:PARTITIONS",
        value_parser = parse_topic,
        value_delimiter = ','
    )]
    pub topics: Vec<(String, u32)>,

    /// Shards of a new cluster: replicated logs that its partitions share [default: 1]
    #[arg(long)]
    pub shards: Option<u64>,

    /// Threads that serve calls [default: the number of CPUs less one, within a CPU quota]
    #[arg(long)]
    pub worker_threads: Option<NonZeroUsize>,

    /// Size of a segment file of the log
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "64MiB")]
    pub segment_bytes: u64,

    /// Preparation of segment files: zero for faster syncs, allocate to write every byte once, auto
    /// by the disk's idle bandwidth
    #[arg(long, value_enum, default_value_t = PrepareMode::Auto)]
    pub prepare: PrepareMode,

    /// Memory limit of the node; each part of it gets a fixed share. The default is less in a
    /// container with less memory
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "512MiB")]
    pub memory_limit: u64,

    /// Memory for the newest records of each shard, which serves readers near the end [default:
    /// derived from the memory limit, at most 16MiB]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub tail_bytes: Option<u64>,

    /// Log that each shard keeps for replicas that are down or behind; a replica that lacks more
    /// gets a snapshot and its records
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "4GiB")]
    pub catch_up_bytes: u64,

    /// Least log between two checkpoints of a shard's state; a restart replays about that much
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "64MiB")]
    pub checkpoint_bytes: u64,

    /// Share of a partition's full segments, in percent, that must be new before it is compacted by
    /// key
    #[arg(long, value_name = "PERCENT", default_value_t = CLEANER_DIRTY_PERCENT)]
    pub cleaner_dirty_percent: u32,

    /// Longest time ("1h") that records wait for compaction by key, whatever their share
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "1h")]
    pub cleaner_lag: Duration,

    /// Bytes of its logs that the node reads per second to find damage early; 0 turns it off
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "8MiB")]
    pub scrub_rate: u64,

    /// Bytes per second that the node copies at most for moves and recovery, and less while appends
    /// are slow; read again when the file changes
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "146MiB")]
    pub copy_rate_max: u64,

    /// In-flight limit for batches over 16 KiB while smaller ones arrive, in multiples of the log's
    /// bandwidth-delay product; 0 turns it off
    #[arg(long, value_name = "TIMES", default_value_t = PACE)]
    pub pace: u32,

    /// Milliseconds for which a follower that hears from a leader votes for no other one; all
    /// timing of elections follows from it
    #[arg(long, value_name = "MILLISECONDS", default_value_t = ELECTION_TIMEOUT_MS)]
    pub election_timeout_ms: u32,

    /// Bytes that a partition keeps, for topics without retention_bytes; 0 is unlimited
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "0")]
    pub default_retention_bytes: u64,

    /// Time that a partition keeps records ("7d"), for topics without retention_time; 0 is
    /// unlimited
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "0")]
    pub default_retention_time: Duration,

    /// Use the page cache instead of direct I/O
    #[arg(long)]
    pub no_direct_io: bool,

    /// OpenTelemetry collector for traces, over gRPC without TLS
    #[arg(long, value_name = "http://HOST:PORT")]
    pub otlp_endpoint: Option<String>,

    /// Share of the batches without a trace context that are traced, from 0 to 1; needs
    /// --otlp-endpoint
    #[arg(long, value_name = "SHARE", value_parser = parse_share, default_value = "0")]
    pub trace_sample: SampleShare,

    /// Format of the log on stderr
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,

    /// Log level, or levels of modules as in "info,helix_server::peer=warn"
    #[arg(
        long,
        alias = "log",
        value_name = "LEVEL",
        value_parser = parse_log_level,
        default_value = "info"
    )]
    pub log_level: String,

    /// File in which `copy_rate_max` may change while the node runs.
    #[arg(skip)]
    pub copy_rate_file: Option<CopyRateFile>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        use clap::{Args, Command, FromArgMatches};

        let command = Self::augment_args(Command::new("helix-server"));
        let matches = command.get_matches_from(["helix-server"]);
        Self::from_arg_matches(&matches).expect("every flag has a valid default")
    }
}

impl ServerConfig {
    /// Returns the configuration of a server in memory on a free local port, with the topic
    /// `default` of four partitions; for tests and tools.
    pub fn in_memory() -> Self {
        let listen_addr = SocketAddr::from(([127, 0, 0, 1], 0));
        let admin_addr = Some(AdminAddr::Off);
        let topics = vec![("default".to_owned(), 4)];
        Self { storage: StorageMode::Memory, listen_addr, admin_addr, topics, ..Self::default() }
    }

    /// Returns the configuration of a durable server in this directory, otherwise as
    /// [`Self::in_memory`]: on a free local port, with the topic `default`.
    pub fn in_dir(data_dir: impl Into<PathBuf>) -> Self {
        let data_dir = data_dir.into();
        Self { storage: StorageMode::Durable, data_dir, ..Self::in_memory() }
    }

    /// Returns the peer addresses of the other nodes.
    pub fn other_nodes(&self) -> BTreeMap<u64, String> {
        self.peers.iter().filter(|(id, _)| *id != self.node_id).cloned().collect()
    }

    /// Returns the number of nodes in the cluster.
    pub fn node_count(&self) -> usize {
        self.other_nodes().len() + 1
    }

    /// Returns the address of the admin port, if it is on.
    pub fn admin_listen_addr(&self) -> Option<SocketAddr> {
        match self.admin_addr {
            Some(AdminAddr::Off) => None,
            Some(AdminAddr::At(addr)) => Some(addr),
            None => {
                let port = self.default_admin_port()?;
                Some(SocketAddr::from(([127, 0, 0, 1], port)))
            }
        }
    }

    /// Returns true if the admin port serves the console.
    ///
    /// Without `--console` it does where that opens nothing: to this machine unless callers are
    /// known by certificates, which the console does not ask for; or with TLS and credentials.
    pub fn has_console(&self) -> bool {
        let Some(addr) = self.admin_listen_addr() else { return false };
        if let Some(console) = self.console {
            return console == ConsoleUse::On;
        }
        let has_credentials = self.auth == AuthSetting::Required;
        let needs_certificate = self.tls_client_auth == ClientCertificates::Required;
        let is_local = addr.ip().is_loopback() && (has_credentials || !needs_certificate);
        is_local || has_credentials && self.tls_admin == TlsUse::Required
    }

    /// Returns the admin port that follows from the clients' port; a free port follows from a free
    /// one. `None` if it would exceed the largest port, which [`Self::validate`] rejects.
    fn default_admin_port(&self) -> Option<u16> {
        match self.listen_addr.port() {
            0 => Some(0),
            port => port.checked_add(ADMIN_PORT_STEP),
        }
    }

    /// Returns the file for the first token of a cluster; `None` if callers are not checked.
    pub fn first_token_file(&self) -> Option<PathBuf> {
        let path = || self.data_dir.join("admin-token");
        (self.auth != AuthSetting::Off).then(|| self.admin_token_file.clone().unwrap_or_else(path))
    }

    /// Returns the number of data shards of a new cluster.
    pub fn shard_count(&self) -> u64 {
        self.shards.unwrap_or(1)
    }

    /// Returns the memory shares of the node's parts.
    pub fn shares(&self) -> MemoryShares {
        let shares = MemoryShares::of(self.memory_limit);
        match self.client_tls() {
            TlsUse::Off => shares,
            TlsUse::Optional | TlsUse::Required => shares.with_client_tls(),
        }
    }

    /// Returns the bytes of newest records that each shard keeps in memory.
    pub fn tail_bytes(&self) -> u64 {
        self.tail_bytes.unwrap_or_else(|| self.shares().tail_bytes(self.shard_count()))
    }

    /// Returns the bytes of footer pages that each shard keeps in memory.
    pub fn footer_bytes(&self) -> u64 {
        self.shares().footer_bytes(self.shard_count(), self.tail_bytes()).unwrap_or_default()
    }

    pub fn worker_threads(&self) -> usize {
        let cpus = || thread::available_parallelism().map_or(1, NonZeroUsize::get);
        // One CPU is left to the logs' writer threads and the kernel.
        self.worker_threads.map_or_else(|| (cpus() - 1).max(1), NonZeroUsize::get)
    }

    /// Returns the settings of a topic without settings of its own.
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
            allowed_compression: 0,
            takes_any_records: false,
            cleanup: 0,
            tombstone_retention_us: None,
            batch_format: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        let config = ServerConfig::default();
        config.validate().unwrap();
        assert!(config.topics.is_empty(), "a topic is created only where it is requested");
        assert_eq!(config.listen_addr.to_string(), "127.0.0.1:9092");
        assert_eq!(config.exposed(), []);
        assert!(config.worker_threads() >= 1);
    }

    #[test]
    fn the_admin_port_follows_the_clients_port() {
        let admin = |listen: &str, admin_addr: Option<AdminAddr>| {
            let config = ServerConfig {
                listen_addr: listen.parse().unwrap(),
                admin_addr,
                ..ServerConfig::default()
            };
            config.admin_listen_addr().map(|addr| addr.to_string())
        };
        assert_eq!(admin("127.0.0.1:9092", None).unwrap(), "127.0.0.1:9644");
        assert_eq!(admin("10.0.0.1:9093", None).unwrap(), "127.0.0.1:9645");
        assert_eq!(admin("127.0.0.1:0", None).unwrap(), "127.0.0.1:0");
        assert_eq!(admin("127.0.0.1:64983", None).unwrap(), "127.0.0.1:65535");
        assert_eq!(admin("127.0.0.1:9092", Some(AdminAddr::Off)), None);
        let addr = "127.0.0.1:1".parse().unwrap();
        assert_eq!(admin("127.0.0.1:9092", Some(AdminAddr::At(addr))).unwrap(), "127.0.0.1:1");
    }
}
