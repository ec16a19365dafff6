//! Arguments of `helix demo` and `helix dev`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

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
    /// Nodes to start: 1, 3 or 5
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
pub(crate) const NODES_MAX: u8 = 5;

/// Difference between the peer port and the client port of a node.
pub(crate) const PEER_PORT_STEP: u16 = 100;

/// Highest client port of the first node; all other ports lie above it.
const BASE_PORT_MAX: u16 = u16::MAX - PEER_PORT_STEP - NODES_MAX as u16;

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "HELIX_LOG=info shows the log output of the nodes."
)]
pub(crate) struct DevArgs {
    #[command(subcommand)]
    pub(crate) command: Option<DevSubcommand>,
    #[command(flatten)]
    pub(crate) start: DevStartArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DevStartArgs {
    /// Nodes to start: 1, 3 or 5
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
        Ok(nodes @ (1 | 3 | NODES_MAX)) => Ok(nodes),
        _ => Err("the number of nodes must be 1, 3 or 5".to_owned()),
    }
}

fn record_bytes(text: &str) -> Result<usize, String> {
    let bytes = units::parse_bytes(text)?;
    match usize::try_from(bytes) {
        Ok(bytes) if (RECORD_BYTES_MIN..=1 << 19).contains(&bytes) => Ok(bytes),
        _ => Err(format!("the record size must be {RECORD_BYTES_MIN} bytes to 512 KiB")),
    }
}
