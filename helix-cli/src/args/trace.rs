//! Arguments of `helix trace`.

use clap::{Args, Subcommand};

use crate::completion;
use crate::durability::DurabilityArg;

#[derive(Debug, Subcommand)]
pub(crate) enum TraceSubcommand {
    /// Append one record and show where its time went
    ///
    /// Needs neither a collector nor settings of the nodes. The record stays in the topic.
    Append(TraceAppendArgs),
}

#[derive(Debug, Args)]
pub(crate) struct TraceAppendArgs {
    /// Name of the topic
    #[arg(add = completion::topics())]
    pub(crate) topic: String,
    /// Value of the record
    #[arg(long, value_name = "TEXT", default_value = "trace")]
    pub(crate) value: String,
    /// Key of the record
    #[arg(short, long, value_name = "KEY")]
    pub(crate) key: Option<String>,
    /// Partition
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    pub(crate) partition: u32,
    /// Durability to wait for [default: the topic's]
    #[arg(long, value_enum, value_name = "LEVEL")]
    pub(crate) durability: Option<DurabilityArg>,
}
