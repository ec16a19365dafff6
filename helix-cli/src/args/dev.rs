//! Arguments of `helix demo` and `helix dev`.
//! Values are parsed here; nothing is done here.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::units;

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Records to write
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) records: u64,
    /// Bytes of each record
    #[arg(long, default_value = "256", value_parser = record_bytes, value_name = "BYTES")]
    pub(crate) size: usize,
    /// Partitions to spread them over
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) partitions: u32,
    /// Nodes to start: 1, 3 or 5
    #[arg(long, default_value_t = 3, value_parser = cluster_size)]
    pub(crate) nodes: u8,
    /// Folder to make the nodes' temporary folder in [default: the system's]
    #[arg(long)]
    pub(crate) dir: Option<PathBuf>,
    /// Seed of the records' bytes
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

/// Most nodes of a cluster on one machine.
pub(crate) const NODES_MAX: u8 = 5;

/// From a node's port to that on which the others reach it.
pub(crate) const PEER_PORT_STEP: u16 = 100;

/// Highest port of the first node: the other nodes' and all peer ports lie above it.
const BASE_PORT_MAX: u16 = u16::MAX - PEER_PORT_STEP - NODES_MAX as u16;

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "HELIX_LOG=info shows what the nodes say."
)]
pub(crate) struct DevArgs {
    #[command(subcommand)]
    pub(crate) command: Option<DevCommand>,
    #[command(flatten)]
    pub(crate) start: DevStartArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DevStartArgs {
    /// Nodes to start: 1, 3 or 5
    #[arg(long, default_value_t = 3, value_parser = cluster_size)]
    pub(crate) nodes: u8,
    #[command(flatten)]
    pub(crate) base: DevBase,
    /// Keep everything in memory: nothing survives, nothing is synced
    #[arg(long, conflicts_with_all = ["keep", "dir"])]
    pub(crate) memory: bool,
    /// Keep the folder at the end
    #[arg(long)]
    pub(crate) keep: bool,
    /// Folder of the data. One that exists is used as it is, and kept
    #[arg(long, alias = "data-dir", default_value = "helix-dev")]
    pub(crate) dir: PathBuf,
}

/// Which dev cluster.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct DevBase {
    /// Port of the first node on 127.0.0.1; the others follow, and peer ports are 100 higher
    #[arg(
        long,
        default_value_t = 9092,
        value_parser = clap::value_parser!(u16).range(1..=i64::from(BASE_PORT_MAX))
    )]
    pub(crate) port: u16,
}

/// What can be asked of a dev cluster from another terminal.
#[derive(Debug, Subcommand)]
pub(crate) enum DevCommand {
    /// Kill a node as a crash would (kill -9)
    Kill {
        /// Node id
        node: u64,
        #[command(flatten)]
        base: DevBase,
    },
    /// Start a node again on its data; one that runs is stopped first
    Restart {
        /// Node id
        node: u64,
        #[command(flatten)]
        base: DevBase,
    },
    /// Show the nodes' processes
    Status {
        #[command(flatten)]
        base: DevBase,
    },
    /// Stop the cluster, as Ctrl-C does
    Stop {
        #[command(flatten)]
        base: DevBase,
    },
}

fn cluster_size(text: &str) -> Result<u8, String> {
    match text.parse() {
        Ok(nodes @ (1 | 3 | NODES_MAX)) => Ok(nodes),
        _ => Err("a cluster has 1, 3 or 5 nodes".to_owned()),
    }
}

fn record_bytes(text: &str) -> Result<usize, String> {
    use crate::demo::workload::RECORD_BYTES_MIN;
    let bytes = units::parse_bytes(text)?;
    match usize::try_from(bytes) {
        Ok(bytes) if (RECORD_BYTES_MIN..=1 << 19).contains(&bytes) => Ok(bytes),
        _ => Err(format!("a record of the demo has {RECORD_BYTES_MIN} bytes to 512 KiB")),
    }
}
