//! `helix-bench`: loads a Helix cluster, measures it and reports the results.
//!
//! It is an ordinary client and knows the server only by its public API. A mode is a file or a
//! directory with its flags, its result and a function that runs it.

mod assignment;
mod budget;
mod ceiling;
mod chart;
mod compaction;
mod compare;
mod completion;
mod connections;
mod delivery;
mod disk;
mod e2e;
mod examples;
mod exit;
mod figures;
mod format;
mod group;
mod host;
mod html;
mod interrupt;
mod interval_meter;
mod keyed_updates;
mod latency;
mod limits;
mod load;
mod median_range;
mod messages;
mod meter;
mod nodes;
mod omb;
mod options;
mod output;
mod payload;
mod perf;
mod phase;
#[cfg(feature = "png")]
mod png;
mod progress;
mod pubsub;
mod rate_limit;
mod read;
mod readback;
mod report;
mod result_file;
mod runner;
mod schema;
mod sequencer;
mod series;
mod single;
mod single_sends;
mod stamp;
mod stored;
mod table;
mod target;
mod verify;
mod wal;
mod weak_acks;
mod write;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use ceiling::CeilingArgs;
use compaction::CompactionBenchArgs;
use compare::CompareArgs;
use connections::ConnectionsArgs;
use group::GroupBenchArgs;
use load::{LoadArgs, LoadMode};
use omb::OmbArgs;
use perf::PerfArgs;
use pubsub::PubsubArgs;
use rate_limit::RateLimitArgs;
use schema::SchemaArgs;
use sequencer::SequencerArgs;
use stored::{PlotArgs, ReportArgs, TablesArgs};
use wal::WalArgs;

#[global_allocator]
static ALLOCATOR: helix_allocator::Allocator = helix_allocator::Allocator;

/// Benchmarks Helix: throughput, latency and end-to-end delivery.
#[derive(Debug, Parser)]
#[command(name = "helix-bench", version, after_help = exit::help())]
struct BenchCli {
    /// Show no progress
    #[arg(long, global = true)]
    quiet: bool,
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Debug, Subcommand)]
enum BenchCommand {
    /// Append batches and wait for their acks
    #[command(after_help = examples::WRITE)]
    Write(LoadArgs),
    /// Fetch records, or subscribe with --stream
    #[command(after_help = examples::READ)]
    Read(LoadArgs),
    /// Append one record and fetch it back, repeatedly
    #[command(after_help = examples::LATENCY)]
    Latency(LoadArgs),
    /// Publish records and time their delivery to subscribers
    #[command(after_help = examples::E2E)]
    E2e(LoadArgs),
    /// Measure publish/subscribe over payload sizes
    #[command(after_help = examples::PUBSUB)]
    Pubsub(PubsubArgs),
    /// Measure or check a stream that several nodes publish to
    #[command(after_help = examples::SEQUENCER)]
    Sequencer(SequencerArgs),
    /// Measure requests over many connections at once
    #[command(after_help = examples::CONNECTIONS)]
    Connections(ConnectionsArgs),
    /// Measure consumer groups
    #[command(after_help = examples::GROUP)]
    Group(GroupBenchArgs),
    /// Measure compaction by key: space, and latency beside it
    #[command(after_help = examples::COMPACTION)]
    Compaction(CompactionBenchArgs),
    /// Find the highest rate whose p99 stays within a bound
    #[command(after_help = examples::LIMIT)]
    Limit(RateLimitArgs),
    /// Run a workload file of the OpenMessaging Benchmark
    #[command(after_help = examples::OMB)]
    Omb(OmbArgs),
    /// Send records as Kafka's producer performance test
    #[command(after_help = examples::PERF)]
    Perf(PerfArgs),
    /// Write to helix-wal directly, without network or Raft
    #[command(after_help = examples::WAL)]
    Wal(WalArgs),
    /// Run a load against a service that stores nothing
    #[command(after_help = examples::CEILING)]
    Ceiling(CeilingArgs),
    /// Alternate runs against the ceiling and a server
    #[command(after_help = examples::COMPARE)]
    Compare(CompareArgs),
    /// Draw plots of results
    #[command(after_help = examples::PLOT)]
    Plot(PlotArgs),
    /// Print tables of results as Markdown
    #[command(after_help = examples::TABLES)]
    Tables(TablesArgs),
    /// Write a page with tables and plots of results
    #[command(after_help = examples::REPORT)]
    Report(ReportArgs),
    /// Print the JSON Schema of a mode's results
    #[command(after_help = examples::SCHEMA)]
    Schema(SchemaArgs),
}

fn main() -> ExitCode {
    completion::complete_if_asked::<BenchCli>();
    let cli = BenchCli::parse();
    // As in a node, so that no measured call waits for memory.
    helix_allocator::prepare();
    if cli.quiet {
        progress::silence();
    }
    let is_measurement = !matches!(
        cli.command,
        BenchCommand::Plot(_)
            | BenchCommand::Tables(_)
            | BenchCommand::Report(_)
            | BenchCommand::Schema(_)
    );
    let watched = if is_measurement { interrupt::watch() } else { Ok(()) };
    match watched.and_then(|()| run(&cli.command)) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            // Ignored: without standard error there is nowhere to report.
            let _ = write!(std::io::stderr(), "{}", exit::text(&error));
            ExitCode::from(exit::code(&error))
        }
    }
}

/// Runs a command and returns its exit code.
fn run(command: &BenchCommand) -> Result<u8> {
    match command {
        BenchCommand::Write(args) => single::command(LoadMode::Write, args),
        BenchCommand::Read(args) => single::command(LoadMode::Read, args),
        BenchCommand::Latency(args) => single::command(LoadMode::Latency, args),
        BenchCommand::E2e(args) => single::command(LoadMode::E2e, args),
        BenchCommand::Pubsub(args) => pubsub::command(args),
        BenchCommand::Sequencer(args) => sequencer::command(args),
        BenchCommand::Connections(args) => connections::command(args),
        BenchCommand::Group(args) => group::command(args),
        BenchCommand::Compaction(args) => compaction::command(args),
        BenchCommand::Limit(args) => rate_limit::command(args),
        BenchCommand::Omb(args) => omb::command(args),
        BenchCommand::Perf(args) => perf::command(args),
        BenchCommand::Wal(args) => wal::command(args),
        BenchCommand::Ceiling(args) => ceiling::command(args),
        BenchCommand::Compare(args) => compare::command(args),
        BenchCommand::Plot(args) => stored::plot(args),
        BenchCommand::Report(args) => stored::report(args),
        BenchCommand::Tables(args) => stored::tables(args),
        BenchCommand::Schema(args) => schema::command(args),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn each_command_has_examples_that_parse() {
        for command in BenchCli::command().get_subcommands() {
            let name = command.get_name();
            let help = command.get_after_help().expect("examples").to_string();
            let examples: Vec<&str> =
                help.lines().filter_map(|line| line.strip_prefix("  helix-bench ")).collect();
            assert!(!examples.is_empty(), "{name} has no examples");
            for example in examples {
                assert_eq!(example.split(' ').next(), Some(name));
                let words = ["helix-bench"].into_iter().chain(example.split(' '));
                BenchCli::try_parse_from(words)
                    .unwrap_or_else(|error| panic!("{example}: {error}"));
            }
        }
    }

    #[test]
    fn flags_are_consistent() {
        BenchCli::command().debug_assert();
    }
}
