//! `helix`: the command line of Helix.
//! Parses the arguments, runs one command, reports errors and sets the exit code.

mod args;
mod backup;
mod child_node;
mod cleanup;
mod clock;
mod commands;
mod compression;
mod connect;
mod context;
mod demo;
mod dev;
mod durability;
mod exit;
mod files;
mod format;
mod interrupt;
mod local_cluster;
#[cfg(test)]
mod manual;
mod offset_lookup;
mod output;
mod position;
mod reasons;
mod report;
mod result_schemas;
mod schema;
mod style;
mod template;
mod units;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory, Parser};
use helix_client::TokenSource;

use args::{Cli, CliCommand, ClusterSubcommand, GlobalArgs};
use commands::{
    access, cheat, check, cluster, consume, consume_group, explain, group, offsets, produce,
    server, tail, topic, version, wal,
};
use exit::{CliError, Exit};
use report::ErrorContext;
use style::Style;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    if let Some(path) = args::schema_request() {
        let path: Vec<&str> = path.iter().map(String::as_str).collect();
        return report_error(result_schemas::show(&path), &ErrorContext::default()).into();
    }
    let Cli { mut global, command } = Cli::parse();
    if let CliCommand::Server(args) = command {
        return server::run(args);
    }
    // Resolved once, because errors name the source of the addresses.
    let resolved = match command.needs_cluster() {
        true => resolve(&mut global),
        false => Ok(()),
    };
    let outcome = resolved.and_then(|()| match &command {
        CliCommand::Wal(command) => wal::run(&global, command),
        CliCommand::Config(command) => commands::config::run(&global, command),
        CliCommand::Context(command) => commands::context::run(&global, command),
        CliCommand::Explain { reason } => explain::run(&global, reason.as_deref()),
        CliCommand::Cheat => cheat::run(),
        CliCommand::Completions { shell } => {
            let mut completions = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "helix", &mut completions);
            output::write(&completions).context("print the completions")
        }
        command => on_runtime(&global, command),
    });
    let topic = command.topic().map(str::to_owned);
    let group = command.group().map(str::to_owned);
    let is_health = matches!(command, CliCommand::Cluster(ClusterSubcommand::Health(_)));
    let GlobalArgs { addr, addr_source, .. } = global;
    let context = ErrorContext { addr: addr.join(","), addr_source, topic, group, is_health };
    report_error(outcome, &context).into()
}

/// Selects the addresses and the token of a command that connects to a cluster.
fn resolve(global: &mut GlobalArgs) -> anyhow::Result<()> {
    let addresses = context::resolve(&global.addr, global.context.as_deref())?;
    global.token = token_source(global, addresses.token_file)?;
    (global.addr, global.addr_source) = (addresses.addr, addresses.source);
    Ok(())
}

/// Selects the token: of `--token-file`, then of `--context`, then of the environment, then of the
/// current context.
fn token_source(global: &GlobalArgs, of_context: Option<PathBuf>) -> anyhow::Result<TokenSource> {
    let named = of_context.as_ref().filter(|_| global.context.is_some());
    let file = global.token_file.as_ref().or(named);
    let source = match file {
        Some(path) => TokenSource::file(path),
        None => match (TokenSource::from_env(), of_context) {
            (Ok(env), Some(path)) if env.is_none() => TokenSource::file(path),
            (env, _) => env,
        },
    };
    source.map_err(|error| {
        let failure = CliError::new(Exit::Usage, "the token cannot be used");
        failure.why(error.message.clone()).hint("helix whoami --token-file FILE").into()
    })
}

/// Prints the error, if any, and returns the exit code.
fn report_error(outcome: anyhow::Result<()>, context: &ErrorContext) -> Exit {
    let Err(error) = outcome else { return Exit::Done };
    let exit = exit::of(&error);
    if !matches!(exit, Exit::Done | Exit::Interrupted) {
        let text = report::render(&error, context, Style::of_stderr());
        output::write_message(format_args!("{text}"));
    }
    exit
}

fn on_runtime(global: &GlobalArgs, command: &CliCommand) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.context("start the runtime's threads")?;
    interrupt::watch(match command {
        CliCommand::Demo(_) | CliCommand::Dev(_) | CliCommand::Produce(_) => {
            interrupt::CLEAN_UP_MAX
        }
        CliCommand::Consume(args) if args.group.is_some() => interrupt::LEAVE_MAX,
        _ => interrupt::CANCEL_MAX,
    });
    let outcome = runtime.block_on(run(global, command));
    // Does not wait for a blocked read of standard input.
    runtime.shutdown_background();
    outcome
}

async fn run(global: &GlobalArgs, command: &CliCommand) -> anyhow::Result<()> {
    match command {
        // These commands handle interrupts themselves, to clean up.
        CliCommand::Demo(args) => demo::run(global, args).await,
        CliCommand::Dev(args) => dev::run(global, args).await,
        CliCommand::Produce(args) => produce::run(global, args).await,
        CliCommand::Consume(args) if args.group.is_some() => consume_group::run(global, args).await,
        command => tokio::select! {
            outcome = run_cancellable(global, command) => outcome,
            () = interrupt::interrupted() => Err(CliError::interrupted().into()),
        },
    }
}

/// Runs a command that can be cancelled at any await point.
async fn run_cancellable(global: &GlobalArgs, command: &CliCommand) -> anyhow::Result<()> {
    match command {
        CliCommand::Cluster(command) => cluster::run(global, command).await,
        CliCommand::Topic(command) => topic::run(global, command).await,
        CliCommand::Group(command) => group::run(global, command).await,
        CliCommand::Token(command) => access::run_token(global, command).await,
        CliCommand::Acl(command) => access::run_acl(global, command).await,
        CliCommand::Whoami => access::who_am_i(global).await,
        CliCommand::Consume(args) => consume::run(global, args).await,
        CliCommand::Tail(args) => tail::run(global, args).await,
        CliCommand::Offsets(args) => offsets::run(global, args).await,
        CliCommand::Backup(args) => backup::run(global, args).await,
        CliCommand::Restore(args) => backup::restore::run(global, args).await,
        CliCommand::Check => check::run(global).await,
        CliCommand::Version => version::run(global).await,
        CliCommand::Demo(_)
        | CliCommand::Dev(_)
        | CliCommand::Produce(_)
        | CliCommand::Server(_)
        | CliCommand::Wal(_)
        | CliCommand::Config(_)
        | CliCommand::Context(_)
        | CliCommand::Explain { .. }
        | CliCommand::Cheat
        | CliCommand::Completions { .. } => unreachable!("handled by the callers"),
    }
}
