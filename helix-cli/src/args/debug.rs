//! Arguments of `helix debug` and `helix top`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use helix_proto::address;

use crate::units;

#[derive(Debug, Subcommand)]
pub(crate) enum DebugSubcommand {
    /// Write one archive for the search for a problem
    ///
    /// It has versions, nodes, shards, topics, groups and health of the cluster. Settings, logs,
    /// metrics and a stopped log are added where the options name them; run it on each node for all
    /// of them. Values of settings that may be secret are hidden; records are never added.
    Bundle(BundleArgs),
}

#[derive(Debug, Args)]
pub(crate) struct BundleArgs {
    /// Archive to write [default: helix-TIME.tar]
    pub(crate) file: Option<PathBuf>,
    /// Replace an archive that exists
    #[arg(long)]
    pub(crate) force: bool,
    /// Admin addresses of nodes, for their metrics
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "HOST:PORT,...",
        value_parser = parse_admin_address
    )]
    pub(crate) admin_addr: Vec<String>,
    /// File with the settings of a node
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Log of a node, whose last 5,000 lines are added; may be repeated
    #[arg(long, value_name = "FILE")]
    pub(crate) log: Vec<PathBuf>,
    /// Data directory of a stopped node, whose segments are listed
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Time between two updates
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    pub(crate) interval: Duration,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = units::parse_duration(text)?;
    match interval >= Duration::from_millis(200) {
        true => Ok(interval),
        false => Err("the interval must be at least 200ms".to_owned()),
    }
}

/// Parses the address of an admin port, which has no default port.
fn parse_admin_address(text: &str) -> Result<String, String> {
    address::check_dialable(text).map(|()| text.to_owned())
}
