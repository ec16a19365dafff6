//! `helix-bench`: loads a Helix cluster as its clients do, and says what came of it and what
//! that is worth. A client like any other: it knows the server only by its API.

mod args;
mod budget;
mod ceiling;
mod compare;
mod e2e;
mod exit;
mod latency;
mod load;
mod meter;
mod nodes;
mod output;
mod payload;
mod phase;
mod place;
mod read;
mod readback;
mod report;
mod stamp;
mod target;
mod verify;
mod wal;
mod weak;
mod write;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use args::{CeilingArgs, Cli, Command, CompareArgs, LoadArgs, Mode, WalArgs};
use ceiling::Ceiling;
use load::Load;
use output::Output;
use report::Report;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            // Ignored: without standard error there is nobody to tell.
            let _ = write!(std::io::stderr(), "{}", exit::text(&error));
            ExitCode::from(exit::code(&error))
        }
    }
}

fn run(command: Command) -> Result<u8> {
    match command {
        Command::Write(args) => measure(Mode::Write, &args),
        Command::Read(args) => measure(Mode::Read, &args),
        Command::Latency(args) => measure(Mode::Latency, &args),
        Command::E2e(args) => measure(Mode::E2e, &args),
        Command::Wal(args) => log_alone(&args),
        Command::Ceiling(args) => {
            at_least_one("--server-threads", args.server_threads)?;
            match &args.serve {
                Some(address) => serve_ceiling(&args, address),
                None => under_ceiling(&args),
            }
        }
        Command::Compare(args) => compare(&args),
    }
}

fn measure(mode: Mode, args: &LoadArgs) -> Result<u8> {
    let load = load(mode, args)?;
    let output = Output::open(args.json.as_deref())?;
    let report = runtime(load.threads)?.block_on(run_load(&load))?;
    finish(&report, output)
}

fn log_alone(args: &WalArgs) -> Result<u8> {
    wal::check(args).map_err(exit::usage)?;
    let output = Output::open(args.json.as_deref())?;
    let mut report = wal::run(args)?;
    report.command = command_line();
    output.deliver(&report, || report.table())?;
    Ok(0)
}

fn serve_ceiling(args: &CeilingArgs, address: &str) -> Result<u8> {
    let runtime = runtime(ceiling::server_threads(args.server_threads))?;
    let result = runtime.block_on(ceiling::serve(args, address));
    // Reading standard input cannot be interrupted: it is left behind.
    runtime.shutdown_background();
    result.map(|()| 0)
}

fn under_ceiling(args: &CeilingArgs) -> Result<u8> {
    let load = load_with_ceiling(args.mode, &args.load)?;
    if !args.load.addr.is_empty() {
        return Err(exit::usage("--addr has no meaning for ceiling: it starts its own service"));
    }
    let output = Output::open(args.load.json.as_deref())?;
    let report = runtime(load.threads)?.block_on(async {
        let threads = ceiling::server_threads(args.server_threads);
        let ceiling = Ceiling::start(&load, Some(threads)).await?;
        let mut report = run_load(&ceiling.load(&load)).await?;
        report.notes.push(format!(
            "against a service that only decodes, checks and answers, in a process of its own \
             with {threads} runtime threads"
        ));
        anyhow::Ok(report)
    })?;
    finish(&report, output)
}

fn compare(args: &CompareArgs) -> Result<u8> {
    let load = load_with_ceiling(args.mode, &args.load)?;
    at_least_one("--server-threads", args.server_threads)?;
    at_least_one("--runs", Some(args.runs))?;
    let output = Output::open(args.load.json.as_deref())?;
    let threads = ceiling::server_threads(args.server_threads);
    let mut comparison =
        runtime(load.threads)?.block_on(compare::run(&load, args.runs, threads, run_load))?;
    comparison.command = command_line();
    output.deliver(&comparison, || comparison.table())?;
    Ok(comparison.exit_code())
}

fn load(mode: Mode, args: &LoadArgs) -> Result<Load> {
    Load::new(mode, args).map_err(exit::usage)
}

fn load_with_ceiling(mode: Mode, args: &LoadArgs) -> Result<Load> {
    let load = load(mode, args)?;
    if load.verify {
        return Err(exit::usage("--verify has no meaning here: the ceiling stores nothing"));
    }
    Ok(load)
}

fn at_least_one(flag: &str, value: Option<usize>) -> Result<()> {
    match value {
        Some(0) => Err(exit::usage(format!("{flag} must be at least 1"))),
        _ => Ok(()),
    }
}

async fn run_load(load: &Load) -> Result<Report> {
    let mut report = match load.mode {
        Mode::Write | Mode::Stream => write::run(load).await,
        Mode::Read => read::run(load).await,
        Mode::Latency => latency::run(load).await,
        Mode::E2e => e2e::run(load).await,
    }?;
    report.command = command_line();
    Ok(report)
}

fn finish(report: &Report, output: Output) -> Result<u8> {
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
