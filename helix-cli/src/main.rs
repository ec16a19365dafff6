//! `helix`: the command line of Helix.
//! Parses, runs one command, reports how it ended; what the commands do is in their modules.

mod args;
mod clock;
mod commands;
mod connect;
mod demo;
mod dev;
mod exit;
mod local;
mod node;
mod output;
mod position;
mod report;
mod units;

use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;

use args::{Cli, Command, Global};
use commands::{cluster, consume, offsets, produce, server, tail, topic, version, wal};
use exit::{Exit, Failure};
use report::Scene;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let Cli { global, command } = Cli::parse();
    match command {
        Command::Server(args) => server::run(args),
        command => conclude(&global, &command).into(),
    }
}

/// Runs a command and says what went wrong.
fn conclude(global: &Global, command: &Command) -> Exit {
    let outcome = match command {
        Command::Wal(command) => wal::run(global, command),
        command => on_runtime(global, command),
    };
    let Err(error) = outcome else { return Exit::Done };
    let exit = exit::of(&error);
    if !matches!(exit, Exit::Done | Exit::Interrupted) {
        let topic = command.topic().map(str::to_owned);
        let scene = Scene { addr: global.addr.join(","), topic };
        eprint!("{}", report::render(&error, &scene));
    }
    exit
}

fn on_runtime(global: &Global, command: &Command) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.context("start the runtime's threads")?;
    let outcome = runtime.block_on(run(global, command));
    // A read of standard input may never end, and nothing else is left to wait for.
    runtime.shutdown_background();
    outcome
}

async fn run(global: &Global, command: &Command) -> anyhow::Result<()> {
    match command {
        // These have something to bring to an end when they are interrupted.
        Command::Demo(args) => demo::run(global, args).await,
        Command::Dev(args) => dev::run(global, args).await,
        Command::Produce(args) => produce::run(global, args).await,
        command => tokio::select! {
            outcome = ask(global, command) => outcome,
            () = exit::interrupted() => Err(Failure::interrupted().into()),
        },
    }
}

/// Commands that can be dropped anywhere.
async fn ask(global: &Global, command: &Command) -> anyhow::Result<()> {
    match command {
        Command::Cluster(command) => cluster::run(global, command).await,
        Command::Topic(command) => topic::run(global, command).await,
        Command::Consume(args) => consume::run(global, args).await,
        Command::Tail(args) => tail::run(global, args).await,
        Command::Offsets(args) => offsets::run(global, args).await,
        Command::Version => version::run(global).await,
        Command::Demo(_)
        | Command::Dev(_)
        | Command::Produce(_)
        | Command::Server(_)
        | Command::Wal(_) => unreachable!("run by the callers"),
    }
}
