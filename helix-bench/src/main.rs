//! `helix-bench`: loads a Helix cluster, measures it and reports the results.
//!
//! It is an ordinary client and knows the server only by its public API.

mod args;
mod assignment;
mod budget;
mod ceiling;
mod compare;
mod delivery;
mod e2e;
mod exit;
mod format;
mod host;
mod latency;
mod load;
mod meter;
mod nodes;
mod output;
mod payload;
mod phase;
mod progress;
mod read;
mod readback;
mod report;
mod stamp;
mod target;
mod verify;
mod wal;
mod weak_acks;
mod write;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use args::{BenchCli, BenchCommand, CeilingArgs, CompareArgs, LoadArgs, LoadMode, WalArgs};
use ceiling::CeilingProcess;
use load::BenchLoad;
use output::ReportOutput;
use report::BenchReport;

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
        BenchCommand::Wal(args) => run_wal(&args),
        BenchCommand::Ceiling(args) => {
            at_least_one("--server-threads", args.server_threads)?;
            match &args.serve {
                Some(address) => serve_ceiling(&args, address),
                None => run_against_ceiling(&args),
            }
        }
        BenchCommand::Compare(args) => compare(&args),
    }
}

fn measure(mode: LoadMode, args: &LoadArgs) -> Result<u8> {
    let load = load(mode, args)?;
    let output = ReportOutput::open(args.json.as_deref())?;
    let report = runtime(load.threads)?.block_on(run_load(&load))?;
    finish(&report, output)
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
