//! `helix`: the command line of Helix.
//! Parses, runs one command, reports how it ended; what the commands do is in their modules.

mod args;
mod backup;
mod clock;
mod commands;
mod connect;
mod context;
mod demo;
mod dev;
mod exit;
mod files;
mod local;
#[cfg(test)]
mod manual;
mod node;
mod output;
mod position;
mod reasons;
mod report;
mod schema;
mod style;
mod template;
mod units;

use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory, Parser};

use args::{Cli, ClusterCommand, Command, Global};
use commands::{
    cheat, check, cluster, consume, explain, offsets, produce, server, tail, topic, version, wal,
};
use exit::{Exit, Failure};
use report::Scene;
use style::Style;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    if let Some(path) = args::schema_asked_for() {
        let path: Vec<&str> = path.iter().map(String::as_str).collect();
        return say(schema::show(&path), &Scene::default()).into();
    }
    let Cli { mut global, command } = Cli::parse();
    if let Command::Server(args) = command {
        return server::run(args);
    }
    // Where a command looks for its cluster is decided once, and said with its errors.
    let found = match command.has_cluster() {
        true => context::resolve(&global.addr, global.context.as_deref()).map(|addresses| {
            (global.addr, global.addr_source) = (addresses.addr, addresses.source);
        }),
        false => Ok(()),
    };
    let outcome = found.and_then(|()| match &command {
        Command::Wal(command) => wal::run(&global, command),
        Command::Config(command) => commands::config::run(&global, command),
        Command::Context(command) => commands::context::run(&global, command),
        Command::Explain { reason } => explain::run(&global, reason.as_deref()),
        Command::Cheat => cheat::run(),
        Command::Completions { shell } => {
            let mut completions = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "helix", &mut completions);
            output::write(&completions).context("print the completions")
        }
        command => on_runtime(&global, command),
    });
    let topic = command.topic().map(str::to_owned);
    let is_health = matches!(command, Command::Cluster(ClusterCommand::Health(_)));
    let Global { addr, addr_source, .. } = global;
    say(outcome, &Scene { addr: addr.join(","), addr_source, topic, is_health }).into()
}

/// Says what went wrong.
fn say(outcome: anyhow::Result<()>, scene: &Scene) -> Exit {
    let Err(error) = outcome else { return Exit::Done };
    let exit = exit::of(&error);
    if !matches!(exit, Exit::Done | Exit::Interrupted) {
        eprint!("{}", report::render(&error, scene, Style::of_stderr()));
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
        Command::Backup(args) => backup::run(global, args).await,
        Command::Restore(args) => backup::restore::run(global, args).await,
        Command::Check => check::run(global).await,
        Command::Version => version::run(global).await,
        Command::Demo(_)
        | Command::Dev(_)
        | Command::Produce(_)
        | Command::Server(_)
        | Command::Wal(_)
        | Command::Config(_)
        | Command::Context(_)
        | Command::Explain { .. }
        | Command::Cheat
        | Command::Completions { .. } => unreachable!("run by the callers"),
    }
}
