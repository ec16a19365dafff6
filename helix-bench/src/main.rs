//! `helix-bench`: loads a Helix cluster, measures it and reports the results.
//!
//! It is an ordinary client and knows the server only by its public API.

mod args;
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
mod interval_meter;
mod latency;
mod load;
mod messages;
mod meter;
mod nodes;
mod omb;
mod output;
mod payload;
mod perf;
mod phase;
mod progress;
mod pubsub;
mod rate_limit;
mod read;
mod readback;
mod report;
mod sequencer;
mod single_sends;
mod stamp;
mod table;
mod target;
mod verify;
mod wal;
mod weak_acks;
mod write;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use serde::Serialize;
use serde_json::Value;

use args::{
    BenchCli, BenchCommand, CeilingArgs, CompareArgs, LoadArgs, LoadMode, PlotArgs, ReportArgs,
    TablesArgs, WalArgs,
};
use ceiling::CeilingProcess;
use connections::{ConnectionsArgs, ConnectionsPlan};
use figures::NamedResult;
use group::{GroupBenchArgs, GroupBenchPlan};
use load::BenchLoad;
use output::ReportOutput;
use pubsub::{PubsubArgs, PubsubPlan};
use rate_limit::RateLimitArgs;
use report::BenchReport;
use sequencer::{SequencerArgs, SequencerPlan, SequencerReport};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = BenchCli::parse();
    if cli.quiet {
        progress::silence();
    }
    match run(cli.command) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            // Ignored: without standard error there is nowhere to report.
            let _ = write!(std::io::stderr(), "{}", exit::text(&error));
            ExitCode::from(exit::code(&error))
        }
    }
}

fn run(command: BenchCommand) -> Result<u8> {
    match command {
        BenchCommand::Write(args) => measure(LoadMode::Write, &args),
        BenchCommand::Read(args) => measure(LoadMode::Read, &args),
        BenchCommand::Latency(args) => measure(LoadMode::Latency, &args),
        BenchCommand::E2e(args) => measure(LoadMode::E2e, &args),
        BenchCommand::Pubsub(args) => run_pubsub(&args),
        BenchCommand::Sequencer(args) => run_sequencer(&args),
        BenchCommand::Connections(args) => run_connections(&args),
        BenchCommand::Group(args) => run_group(&args),
        BenchCommand::Limit(args) => run_limit(&args),
        BenchCommand::Omb(args) => omb::execute(&args, runtime),
        BenchCommand::Perf(args) => perf::execute(&args, runtime),
        BenchCommand::Wal(args) => run_wal(&args),
        BenchCommand::Ceiling(args) => {
            at_least_one("--server-threads", args.server_threads)?;
            match &args.serve {
                Some(address) => serve_ceiling(&args, address),
                None => run_against_ceiling(&args),
            }
        }
        BenchCommand::Compare(args) => compare(&args),
        BenchCommand::Plot(PlotArgs { results, dir }) => {
            print_plots(&named_results(&results)?, &dir)?;
            Ok(0)
        }
        BenchCommand::Report(ReportArgs { results, output }) => {
            let page = html::page(&named_results(&results)?)?;
            figures::write_file(&output, &page)?;
            progress::step(&format!("wrote {}", output.display()));
            Ok(0)
        }
        BenchCommand::Tables(TablesArgs { results }) => {
            let results = results.iter().map(|path| table::read_result(path));
            let results: Vec<Value> = results.collect::<Result<_>>()?;
            for table in table::tables_of_all(&results)? {
                output::print(&format!("{}\n", table.markdown()))?;
            }
            Ok(0)
        }
    }
}

fn named_results(paths: &[PathBuf]) -> Result<Vec<NamedResult>> {
    paths.iter().map(|path| named_result(path)).collect()
}

/// Names a result by its file.
fn named_result(path: &Path) -> Result<NamedResult> {
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let result = table::read_result(path)?;
    // The mode is in the title of its chart already.
    let mode = format!("{}-", result["mode"].as_str().unwrap_or_default());
    let name = name.strip_prefix(&mode).unwrap_or(&name).to_owned();
    Ok(NamedResult { name, result })
}

fn print_plots(results: &[NamedResult], dir: &Path) -> Result<()> {
    for path in figures::write(results, dir)? {
        progress::step(&format!("wrote {path}"));
    }
    Ok(())
}

fn run_pubsub(args: &PubsubArgs) -> Result<u8> {
    let plan = PubsubPlan::new(args).map_err(exit::usage)?;
    let output = ReportOutput::open(args.json.as_deref())?;
    let mut report = runtime(plan.threads())?.block_on(pubsub::run(&plan))?;
    report.command = command_line();
    deliver(&report, output, args.plot.as_deref())?;
    Ok(report.exit_code())
}

fn run_sequencer(args: &SequencerArgs) -> Result<u8> {
    let plan = SequencerPlan::new(args).map_err(exit::usage)?;
    let output = ReportOutput::open(args.json.as_deref())?;
    let mut report = SequencerReport::new();
    if args.check {
        runtime(plan.threads())?.block_on(sequencer::check(&plan, &mut report))?;
    } else {
        // One message in flight keeps one thread busy; more of them only move the task.
        runtime(1)?.block_on(sequencer::latency(&plan, &mut report))?;
        runtime(plan.threads())?.block_on(sequencer::throughput(&plan, &mut report))?;
    }
    report.finish(command_line());
    deliver(&report, output, args.plot.as_deref())?;
    Ok(report.exit_code())
}

fn run_connections(args: &ConnectionsArgs) -> Result<u8> {
    let plan = ConnectionsPlan::new(args).map_err(exit::usage)?;
    let output = ReportOutput::open(args.json.as_deref())?;
    let mut report = runtime(plan.threads())?.block_on(connections::run(&plan))?;
    report.command = command_line();
    deliver(&report, output, args.plot.as_deref())?;
    Ok(report.exit_code())
}

fn run_group(args: &GroupBenchArgs) -> Result<u8> {
    let plan = GroupBenchPlan::new(args).map_err(exit::usage)?;
    let output = ReportOutput::open(args.json.as_deref())?;
    let mut report = runtime(plan.threads())?.block_on(group::run(&plan))?;
    report.command = command_line();
    deliver(&report, output, None)?;
    Ok(0)
}

fn run_limit(args: &RateLimitArgs) -> Result<u8> {
    let load = rate_limit::load(args).map_err(exit::usage)?;
    let output = ReportOutput::open(args.load.json.as_deref())?;
    let search = rate_limit::run(args, &load, run_load);
    let mut report = runtime(load.threads)?.block_on(search)?;
    report.command = command_line();
    deliver(&report, output, None)?;
    Ok(report.exit_code())
}

/// Writes a result with its tables and plots, which are made from its JSON.
fn deliver(report: &impl Serialize, output: ReportOutput, plot: Option<&Path>) -> Result<()> {
    let result = serde_json::to_value(report).context("write JSON")?;
    let text = table::plain(&result)?;
    output.deliver(report, || text)?;
    match plot {
        None => Ok(()),
        Some(dir) => print_plots(&[NamedResult { name: String::new(), result }], dir),
    }
}

fn measure(mode: LoadMode, args: &LoadArgs) -> Result<u8> {
    let load = load(mode, args)?;
    let output = ReportOutput::open(args.json.as_deref())?;
    let report = runtime(load.threads)?.block_on(run_load(&load))?;
    let code = finish(&report, output)?;
    if let Some(dir) = &args.plot {
        let result = serde_json::to_value(&report).context("write JSON")?;
        print_plots(&[NamedResult { name: String::new(), result }], dir)?;
    }
    Ok(code)
}

fn run_wal(args: &WalArgs) -> Result<u8> {
    wal::check(args).map_err(exit::usage)?;
    let output = ReportOutput::open(args.json.as_deref())?;
    let mut report = wal::run(args)?;
    report.command = command_line();
    output.deliver(&report, || report.table())?;
    Ok(0)
}

fn serve_ceiling(args: &CeilingArgs, address: &str) -> Result<u8> {
    let runtime = runtime(ceiling::server_threads(args.server_threads))?;
    let result = runtime.block_on(ceiling::serve(args, address));
    // A blocking read of standard input cannot be interrupted, so its thread is left running.
    runtime.shutdown_background();
    result.map(|()| 0)
}

fn run_against_ceiling(args: &CeilingArgs) -> Result<u8> {
    let load = load_with_ceiling(args.mode, &args.load)?;
    if !args.load.addr.is_empty() {
        return Err(exit::usage("--addr is not valid for ceiling: it starts its own service"));
    }
    let output = ReportOutput::open(args.load.json.as_deref())?;
    let report = runtime(load.threads)?.block_on(async {
        let threads = ceiling::server_threads(args.server_threads);
        let ceiling = CeilingProcess::start(&load, Some(threads)).await?;
        let mut report = run_load(&ceiling.load(&load)).await?;
        report.notes.push(format!(
            "against a service without storage, in its own process with {threads} runtime \
             threads"
        ));
        anyhow::Ok(report)
    })?;
    finish(&report, output)
}

fn compare(args: &CompareArgs) -> Result<u8> {
    let load = load_with_ceiling(args.mode, &args.load)?;
    at_least_one("--server-threads", args.server_threads)?;
    at_least_one("--runs", Some(args.runs))?;
    let output = ReportOutput::open(args.load.json.as_deref())?;
    let threads = ceiling::server_threads(args.server_threads);
    let mut comparison =
        runtime(load.threads)?.block_on(compare::run(&load, args.runs, threads, run_load))?;
    comparison.command = command_line();
    output.deliver(&comparison, || comparison.table())?;
    Ok(comparison.exit_code())
}

fn load(mode: LoadMode, args: &LoadArgs) -> Result<BenchLoad> {
    BenchLoad::new(mode, args).map_err(exit::usage)
}

fn load_with_ceiling(mode: LoadMode, args: &LoadArgs) -> Result<BenchLoad> {
    let load = load(mode, args)?;
    if load.verify {
        return Err(exit::usage("--verify is not valid here: the ceiling stores nothing"));
    }
    if args.plot.is_some() {
        return Err(exit::usage("--plot is not valid here"));
    }
    Ok(load)
}

fn at_least_one(flag: &str, value: Option<usize>) -> Result<()> {
    match value {
        Some(0) => Err(exit::usage(format!("{flag} must be at least 1"))),
        _ => Ok(()),
    }
}

async fn run_load(load: &BenchLoad) -> Result<BenchReport> {
    let mut report = match load.mode {
        LoadMode::Write | LoadMode::Stream => write::run(load).await,
        LoadMode::Read => read::run(load).await,
        LoadMode::Latency => latency::run(load).await,
        LoadMode::E2e => e2e::run(load).await,
    }?;
    report.command = command_line();
    Ok(report)
}

fn finish(report: &BenchReport, output: ReportOutput) -> Result<u8> {
    output.deliver(report, || report.table())?;
    Ok(report.exit_code())
}

fn command_line() -> String {
    let mut arguments = std::env::args();
    let program = arguments.next().unwrap_or_default();
    let name = Path::new(&program).file_name().unwrap_or_default().to_string_lossy().into_owned();
    std::iter::once(name).chain(arguments).collect::<Vec<_>>().join(" ")
}

fn runtime(threads: usize) -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()
        .context("start the runtime")
}
