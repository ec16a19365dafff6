//! Arguments of `helix quota`.

use clap::{Args, Subcommand};

use crate::units;

#[derive(Debug, Subcommand)]
pub(crate) enum QuotaSubcommand {
    /// Limit a principal on each node
    ///
    /// Replaces the quota that the principal has. A limit that is not given is no limit.
    Set(QuotaArgs),
    /// Remove the quota of a principal
    Remove {
        /// Principal, or * for the quota of all others
        principal: String,
    },
    /// List quotas and their use on one node
    List {
        /// Principal [default: all]
        principal: Option<String>,
    },
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("limits").required(true).multiple(true))]
pub(crate) struct QuotaArgs {
    /// Principal, or * for every principal without a quota of its own
    pub(crate) principal: String,
    /// Bytes of requests per second, from 64KiB
    #[arg(long, value_name = "BYTES", value_parser = units::parse_bytes, group = "limits")]
    pub(crate) bytes_in: Option<u64>,
    /// Bytes of records read per second, from 64KiB
    #[arg(long, value_name = "BYTES", value_parser = units::parse_bytes, group = "limits")]
    pub(crate) bytes_out: Option<u64>,
    /// Calls per second; a stream is one call
    #[arg(long, value_name = "N", group = "limits")]
    pub(crate) requests: Option<u64>,
    /// Connections that are open at once
    #[arg(long, value_name = "N", group = "limits")]
    pub(crate) connections: Option<u32>,
}
