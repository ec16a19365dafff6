//! `helix-bench`: loads a Helix cluster, measures it and reports the results.
//!
//! It is an ordinary client and knows the server only by its public API. A mode is a file or a
//! directory with its flags, its result and a function that runs it.

mod assignment;
mod budget;
mod ceiling;
mod chart;
mod compare;
mod connections;
mod delivery;
mod e2e;
mod exit;
mod figures;
mod format;
mod group;
mod host;
mod html;
mod latency;
mod load;
mod meter;
mod nodes;
mod options;
mod output;
mod payload;
mod phase;
mod progress;
mod pubsub;
mod rate_limit;
mod read;
mod readback;
mod report;
mod runner;
mod sequencer;
mod single;
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
use compare::CompareArgs;
use connections::ConnectionsArgs;
use group::GroupBenchArgs;
use load::{LoadArgs, LoadMode};
use pubsub::PubsubArgs;
use rate_limit::RateLimitArgs;
use sequencer::SequencerArgs;
use stored::{PlotArgs, ReportArgs, TablesArgs};
use wal::WalArgs;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const EXIT_CODES: &str = "Exit codes: 0 success; 1 failure, no request succeeded, or --verify was \
                          not possible; 2 usage error; 11 acked records are missing, changed or \
                          doubled; 130 interrupted.";

/// Benchmarks Helix: throughput, latency and end-to-end delivery.
#[derive(Debug, Parser)]
#[command(name = "helix-bench", version, after_help = EXIT_CODES)]
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
    Write(LoadArgs),
    /// Fetch records, or subscribe with --stream
    Read(LoadArgs),
    /// Append one record and fetch it back, repeatedly
    Latency(LoadArgs),
    /// Publish records and time their delivery to subscribers
    E2e(LoadArgs),
    /// Measure publish/subscribe over payload sizes
    Pubsub(PubsubArgs),
    /// Measure or check a stream that several nodes publish to
    Sequencer(SequencerArgs),
    /// Measure requests over many connections at once
    Connections(ConnectionsArgs),
    /// Measure consumer groups
    Group(GroupBenchArgs),
    /// Find the highest rate whose p99 stays within a bound
    Limit(RateLimitArgs),
    /// Write to helix-wal directly, without network or Raft
    Wal(WalArgs),
    /// Run a load against a service that stores nothing
    Ceiling(CeilingArgs),
    /// Alternate runs against the ceiling and a server
    Compare(CompareArgs),
    /// Draw plots of results
    Plot(PlotArgs),
    /// Print tables of results as Markdown
    Tables(TablesArgs),
    /// Write a page with tables and plots of results
    Report(ReportArgs),
}

fn main() -> ExitCode {
    let cli = BenchCli::parse();
    if cli.quiet {
        progress::silence();
    }
    match run(&cli.command) {
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
        BenchCommand::Limit(args) => rate_limit::command(args),
        BenchCommand::Wal(args) => wal::command(args),
        BenchCommand::Ceiling(args) => ceiling::command(args),
        BenchCommand::Compare(args) => compare::command(args),
        BenchCommand::Plot(args) => stored::plot(args),
        BenchCommand::Report(args) => stored::report(args),
        BenchCommand::Tables(args) => stored::tables(args),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documented_commands_parse() {
        for line in [
            "helix-bench write --records 100000 --size 1024 --batch-size 100 --clients 4",
            "helix-bench read --records 100000 --batch-size 100 --clients 4",
            "helix-bench latency --ops 1000 --size 1024",
            "helix-bench write --clients 64 --batch-size 1 --partition -1 --create-topic 1000",
            "helix-bench compare --addr 127.0.0.1:1,127.0.0.1:2 --runs 5 --mode stream",
            "helix-bench ceiling --mode read --duration 2s --acks 1",
            "helix-bench wal --group-size 1MiB",
            "helix-bench e2e --rate 1000 --subscribers 2",
            "helix-bench write --addr localhost:1,localhost:2,localhost:3 --clients 4 --acks 1",
            "helix-bench write --topic new --partitions 12 --replication-factor 3 --acks none",
            "helix-bench write --acks quorum-written",
            "helix-bench write --acks 0",
            "helix-bench write --payload text --compression lz4",
            "helix-bench pubsub --producers 2 --consumers 4 --topics 2 --payload 256B,1KiB",
            "helix-bench sequencer --duration 2s --size 64,256 --plot plots",
            "helix-bench sequencer --check --records 1000",
            "helix-bench connections --count 100,1000 --rate 1000",
            "helix-bench group --parts read,commit --runs 5 --committers 8",
            "helix-bench limit --mode write --max-p99 5ms --clients 4",
            "helix-bench plot one.json two.json --dir plots",
            "helix-bench tables one.json",
            "helix-bench report one.json two.json -o report.html",
        ] {
            BenchCli::try_parse_from(line.split(' '))
                .unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }
}
