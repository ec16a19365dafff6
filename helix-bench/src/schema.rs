//! JSON Schemas of the results, generated from the Rust types.

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};

use crate::compaction::CompactionBenchReport;
use crate::compare::Comparison;
use crate::connections::ConnectionsReport;
use crate::group::GroupBenchReport;
use crate::output::{self, schema_of};
use crate::perf::PerfReport;
use crate::pubsub::PubsubReport;
use crate::rate_limit::RateLimitReport;
use crate::report::BenchReport;
use crate::sequencer::SequencerReport;
use crate::wal::WalReport;

/// Flags of `schema`.
#[derive(Debug, Clone, Args)]
pub(crate) struct SchemaArgs {
    /// Mode of the result
    mode: ResultMode,
}

/// Modes that have results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ResultMode {
    /// Single runs: write, stream, read, latency, e2e, and ceiling
    #[value(aliases = ["write", "stream", "read", "latency", "e2e", "ceiling"])]
    Load,
    Pubsub,
    Sequencer,
    Connections,
    Group,
    Compaction,
    Limit,
    Perf,
    Wal,
    Compare,
}

/// Prints the schema of a mode's results.
///
/// # Errors
/// Standard output cannot be written.
pub(crate) fn command(args: &SchemaArgs) -> Result<u8> {
    let schema = match args.mode {
        ResultMode::Load => schema_of::<BenchReport>(),
        ResultMode::Pubsub => schema_of::<PubsubReport>(),
        ResultMode::Sequencer => schema_of::<SequencerReport>(),
        ResultMode::Connections => schema_of::<ConnectionsReport>(),
        ResultMode::Group => schema_of::<GroupBenchReport>(),
        ResultMode::Compaction => schema_of::<CompactionBenchReport>(),
        ResultMode::Limit => schema_of::<RateLimitReport>(),
        ResultMode::Perf => schema_of::<PerfReport>(),
        ResultMode::Wal => schema_of::<WalReport>(),
        ResultMode::Compare => schema_of::<Comparison>(),
    };
    let text = serde_json::to_string_pretty(&schema).context("write JSON")?;
    output::print(&format!("{text}\n"))?;
    Ok(0)
}
