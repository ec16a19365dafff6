//! `helix-bench`: loads a Helix cluster as its clients do, and says what came of it and what
//! that is worth. A client like any other: it knows the server only by its API.

mod args;
mod budget;
mod ceiling;
mod compare;
mod e2e;
mod latency;
mod load;
mod meter;
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
mod write;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use serde::Serialize;

use args::{CeilingArgs, Cli, Command, CompareArgs, LoadArgs, Mode};
use ceiling::Ceiling;
use load::Load;
use report::Report;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<u8> {
    match command {
        Command::Write(args) => measure(Mode::Write, &args),
        Command::Read(args) => measure(Mode::Read, &args),
        Command::Latency(args) => measure(Mode::Latency, &args),
        Command::E2e(args) => measure(Mode::E2e, &args),
        Command::Wal(args) => {
            let mut report = wal::run(&args)?;
            report.command = command_line();
            deliver(&report, args.json.as_deref(), || report.table())?;
            Ok(0)
        }
        Command::Ceiling(args) => match &args.serve {
            Some(address) => serve_ceiling(&args, address),
            None => under_ceiling(&args),
        },
        Command::Compare(args) => compare(&args),
    }
}

fn measure(mode: Mode, args: &LoadArgs) -> Result<u8> {
    let load = Load::new(mode, args)?;
    let report = runtime(load.threads)?.block_on(run_load(&load))?;
    finish(report, args)
}

fn serve_ceiling(args: &CeilingArgs, address: &str) -> Result<u8> {
    let runtime = runtime(ceiling::server_threads(args.server_threads))?;
    let result = runtime.block_on(ceiling::serve(args, address));
    // Reading standard input cannot be interrupted: it is left behind.
    runtime.shutdown_background();
    result.map(|()| 0)
}

fn under_ceiling(args: &CeilingArgs) -> Result<u8> {
    let load = Load::new(args.mode, &args.load)?;
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
    finish(report, &args.load)
}

fn compare(args: &CompareArgs) -> Result<u8> {
    let load = Load::new(args.mode, &args.load)?;
    let threads = ceiling::server_threads(args.server_threads);
    let mut comparison =
        runtime(load.threads)?.block_on(compare::run(&load, args.runs, threads, run_load))?;
    comparison.command = command_line();
    deliver(&comparison, args.load.json.as_deref(), || comparison.table())?;
    Ok(comparison.exit_code())
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

fn finish(report: Report, args: &LoadArgs) -> Result<u8> {
    deliver(&report, args.json.as_deref(), || report.table())?;
    Ok(report.exit_code())
}

/// Prints the table and writes the JSON, or prints the JSON alone.
fn deliver(
    value: &impl Serialize,
    json: Option<&Path>,
    table: impl FnOnce() -> String,
) -> Result<()> {
    match json {
        None => print!("{}", table()),
        Some(path) if path == Path::new("-") => println!("{}", to_json(value)?),
        Some(path) => {
            print!("{}", table());
            write_file(path, &to_json(value)?)?;
        }
    }
    Ok(())
}

fn to_json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string_pretty(value).context("write JSON")
}

#[expect(clippy::disallowed_methods, reason = "the result's file is no part of any log")]
fn write_file(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, format!("{text}\n")).with_context(|| format!("write {}", path.display()))
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
