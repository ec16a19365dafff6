//! Arguments of `helix demo` and `helix dev`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use helix_server::config::settings;

use crate::units;

/// Minimum size of a demo record: an id of 8 bytes and a checksum of 4 bytes.
pub(crate) const RECORD_BYTES_MIN: usize = 12;

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Records to write
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) records: u64,
    /// Size of each record
    #[arg(long, default_value = "256", value_parser = record_bytes, value_name = "BYTES")]
    pub(crate) size: usize,
    /// Partitions to write to
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) partitions: u32,
    /// Nodes to start: 1, 3, 5, 7 or 9
    #[arg(long, default_value_t = 3, value_parser = cluster_size)]
    pub(crate) nodes: u8,
    /// Parent of the temporary data directory [default: the system's]
    #[arg(long)]
    pub(crate) dir: Option<PathBuf>,
    /// Seed of the record contents
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

/// Maximum number of nodes of a local cluster.
pub(crate) const NODES_MAX: u8 = 9;

/// Difference between the peer port and the client port of a node.
pub(crate) const PEER_PORT_STEP: u16 = 100;

/// Difference between the port for Kafka's clients and the client port of a node.
pub(crate) const KAFKA_PORT_STEP: u16 = 200;

/// Highest client port of the first node; all other ports lie above it.
const BASE_PORT_MAX: u16 = u16::MAX - KAFKA_PORT_STEP - NODES_MAX as u16;

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "HELIX_LOG=info shows the log output of the nodes. --set shards=3 gives them a \
                  setting."
)]
pub(crate) struct DevArgs {
    #[command(subcommand)]
    pub(crate) command: Option<DevSubcommand>,
    #[command(flatten)]
    pub(crate) start: DevStartArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DevStartArgs {
    /// Nodes to start: 1, 3, 5, 7 or 9
    #[arg(long, default_value_t = 3, value_parser = cluster_size)]
    pub(crate) nodes: u8,
    #[command(flatten)]
    pub(crate) base: DevPortArgs,
    /// Keep data in memory: nothing is synced, nothing survives
    #[arg(long, conflicts_with_all = ["keep", "dir"])]
    pub(crate) memory: bool,
    /// Make certificates, and a context that uses them; TLS is then required
    #[arg(long, conflicts_with = "memory")]
    pub(crate) tls: bool,
    /// Keep the data directory on exit
    #[arg(long)]
    pub(crate) keep: bool,
    /// Data directory, which is kept on exit [default: helix-dev, removed unless it existed]
    #[arg(long, alias = "data-dir")]
    pub(crate) dir: Option<PathBuf>,
    /// Start a helix-kafka beside each node, at +200, for Kafka's clients
    ///
    /// The program must be beside this one or on PATH. It gets the variables HELIX_KAFKA_... and
    /// HELIX_TOKEN.
    #[arg(long)]
    pub(crate) kafka: bool,
    /// Setting of every node, as in `helix config list`; may be repeated
    ///
    /// Variables such as HELIX_SHARDS are not passed to the nodes.
    #[arg(long, value_name = "NAME=VALUE", value_parser = node_setting)]
    pub(crate) set: Vec<NodeSettingArg>,
}

/// A setting of the nodes of a dev cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeSettingArg {
    /// Environment variable of the setting.
    pub(crate) variable: String,
    pub(crate) value: String,
}

/// Settings that differ from node to node, or that other options of the command choose.
const OWN_SETTINGS: [&str; 15] = [
    "node_id",
    "listen_addr",
    "listen_socket",
    "advertise_addr",
    "admin_addr",
    "peer",
    "peer_addr",
    "data_dir",
    "rack",
    "storage",
    "tls_cert",
    "tls_key",
    "tls_ca",
    "tls_client_auth",
    "config",
];

fn node_setting(text: &str) -> Result<NodeSettingArg, String> {
    let (name, value) = text.split_once('=').ok_or("a setting must be NAME=VALUE")?;
    let key = name.trim_start_matches('-').replace('-', "_");
    if OWN_SETTINGS.contains(&key.as_str()) {
        return Err(format!("helix dev chooses {key} of each node itself"));
    }
    let settings = settings();
    let found = settings.iter().find(|setting| setting.key() == key);
    let found = found.ok_or_else(|| format!("unknown setting {name:?}; see helix config list"))?;
    Ok(NodeSettingArg { variable: found.variable(), value: value.to_owned() })
}

/// Returns the variables of node settings in the environment, with their keys.
pub(crate) fn ignored_variables() -> Vec<(String, String)> {
    let all = settings();
    let is_set = |variable: &String| std::env::var_os(variable).is_some_and(|it| !it.is_empty());
    let of_setting = all.iter().map(|setting| (setting.variable(), setting.key()));
    // The nodes take the level of their log from it.
    of_setting.filter(|(variable, _)| variable != "HELIX_LOG" && is_set(variable)).collect()
}

/// Selects a dev cluster by its first port.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct DevPortArgs {
    /// Port of node 1 on 127.0.0.1; others follow, peers at +100
    #[arg(
        long,
        default_value_t = 9092,
        value_parser = clap::value_parser!(u16).range(1..=i64::from(BASE_PORT_MAX))
    )]
    pub(crate) port: u16,
}

/// Commands that control a running dev cluster from another terminal.
#[derive(Debug, Subcommand)]
pub(crate) enum DevSubcommand {
    /// Kill a node (kill -9)
    Kill {
        /// Node id
        node: u64,
        #[command(flatten)]
        base: DevPortArgs,
    },
    /// Restart a node on its data
    Restart {
        /// Node id
        node: u64,
        #[command(flatten)]
        base: DevPortArgs,
    },
    /// List the node processes
    Status {
        #[command(flatten)]
        base: DevPortArgs,
    },
    /// Stop the cluster, like Ctrl-C
    Stop {
        #[command(flatten)]
        base: DevPortArgs,
    },
}

fn cluster_size(text: &str) -> Result<u8, String> {
    match text.parse() {
        Ok(nodes @ (1 | 3 | 5 | 7 | NODES_MAX)) => Ok(nodes),
        _ => Err("the number of nodes must be 1, 3, 5, 7 or 9".to_owned()),
    }
}

fn record_bytes(text: &str) -> Result<usize, String> {
    let bytes = units::parse_bytes(text)?;
    match usize::try_from(bytes) {
        Ok(bytes) if (RECORD_BYTES_MIN..=1 << 19).contains(&bytes) => Ok(bytes),
        _ => Err(format!("the record size must be {RECORD_BYTES_MIN} bytes to 512 KiB")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_nodes_have_their_names() {
        let set = |text: &str| node_setting(text).map(|it| (it.variable, it.value));
        let shards = Ok(("HELIX_SHARDS".to_owned(), "3".to_owned()));
        assert_eq!(set("shards=3"), shards);
        assert_eq!(set("--shards=3"), shards);
        assert_eq!(set("memory-limit=1GiB").unwrap().0, "HELIX_MEMORY_LIMIT");
        for text in ["shards", "shard=3", "node_id=2", "listen-addr=0.0.0.0:1", "=3"] {
            assert!(set(text).is_err(), "{text}");
        }
    }

    #[test]
    fn own_settings_exist() {
        let known: Vec<String> = settings().iter().map(|setting| setting.key()).collect();
        let unknown = OWN_SETTINGS.iter().filter(|key| !known.iter().any(|known| known == *key));
        // The file of the settings is no setting of the file.
        assert_eq!(unknown.collect::<Vec<_>>(), [&"config"]);
    }
}
