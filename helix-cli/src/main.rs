//! `helix`: the command line of Helix.
//! Parses the arguments, runs one command, reports errors and sets the exit code.

mod api_duration;
mod args;
mod backup;
mod batch_format;
mod child_node;
mod cleanup;
mod clock;
mod commands;
mod completion;
mod completion_setup;
mod compression;
mod connect;
mod context;
mod deadline;
mod demo;
mod dev;
mod durability;
mod exit;
mod files;
mod format;
mod interrupt;
mod line_parser;
mod local_cluster;
#[cfg(test)]
mod manual;
mod offset_lookup;
mod output;
mod partitions;
mod position;
mod progress;
mod reason_pages;
mod reasons;
mod report;
mod result_schemas;
mod schema;
mod stdout_reader;
mod style;
mod template;
mod tls;
mod wait_notes;

use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use helix_client::PendingCalls;
use helix_client::contexts::ClusterChoice;
use helix_proto::units;

use args::{Cli, CliCommand, ClusterSubcommand, GlobalArgs, TraceSubcommand};
use commands::{
    access, cheat, check, cluster, consume, consume_group, explain, group, offsets, produce, quota,
    server, tail, topic, trace, version, wal,
};
use exit::{CliError, Exit};
use report::ErrorContext;
use style::Style;
use wait_notes::WaitNotes;

#[global_allocator]
static ALLOCATOR: helix_allocator::Allocator = helix_allocator::Allocator;

fn main() -> ExitCode {
    completion_setup::complete_if_asked();
    if let Some(path) = args::schema_request() {
        let path: Vec<&str> = path.iter().map(String::as_str).collect();
        return report_error(result_schemas::show(&path), &ErrorContext::default()).into();
    }
    let Cli { mut global, command } = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return report_usage(&error),
    };
    if let CliCommand::Server(args) = command {
        helix_allocator::prepare();
        return server::run(args);
    }
    let mut needed_nodes = None;
    // Resolved once, because errors name the source of the addresses.
    let resolved = match command.needs_cluster() {
        true => resolve(&mut global),
        false => Ok(()),
    };
    let outcome = resolved.and_then(|()| match &command {
        CliCommand::Wal(command) => wal::run(&global, command),
        CliCommand::Config(command) => commands::config::run(&global, command),
        CliCommand::Context(command) => commands::context::run(&global, command),
        CliCommand::Cert(command) => commands::cert::run(&global, command),
        CliCommand::Explain { reason } => explain::run(&global, reason.as_deref()),
        CliCommand::Cheat => cheat::run(),
        CliCommand::Completions { shell, program } => {
            completion_setup::print_registration(*shell, *program)
        }
        command => on_runtime(&mut global, command, &mut needed_nodes),
    });
    let retry_hint = match &command {
        CliCommand::Produce(args) => Some(produce::hint_after_unknown_outcome(args)),
        _ => None,
    };
    let context = ErrorContext {
        addr: global.addr.join(","),
        addr_source: global.addr_source,
        tls_ca: global
            .tls_files
            .iter()
            .flat_map(|tls| &tls.ca_files)
            .map(|path| path.display().to_string())
            .collect(),
        topic: command.topic().map(str::to_owned),
        group: command.group().map(str::to_owned),
        is_health: matches!(command, CliCommand::Cluster(ClusterSubcommand::Health(_))),
        needed_nodes,
        retry_hint,
        is_json: global.output.is_json(),
    };
    report_error(outcome, &context).into()
}

/// Reports arguments that clap rejects, or prints the help that they ask for.
fn report_usage(error: &clap::Error) -> ExitCode {
    let is_json = error.use_stderr() && args::is_json_requested(std::env::args());
    if is_json {
        let context = ErrorContext { is_json, ..ErrorContext::default() };
        let text = error.render().to_string();
        let mut parts = text.trim_start_matches("error: ").splitn(2, "\n\n");
        let what = parts.next().unwrap_or_default().trim().to_owned();
        let hint = parts.next().unwrap_or_default().trim().to_owned();
        let failure = CliError::new(Exit::Usage, what).hint(hint);
        return report_error(Err(failure.into()), &context).into();
    }
    // Ignored: there is nowhere to report it.
    let _ = error.print();
    match error.use_stderr() {
        true => Exit::Usage.into(),
        false => Exit::Done.into(),
    }
}

/// Selects the addresses, the token, the rack and the files of TLS of a command that connects to a
/// cluster.
fn resolve(global: &mut GlobalArgs) -> anyhow::Result<()> {
    let choice = ClusterChoice {
        addr: global.addr.clone(),
        context: global.context.clone(),
        token_file: global.token_file.clone(),
        rack: global.client_rack.clone(),
        tls: tls::of_args(&global.tls),
    };
    let cluster = choice.resolve().map_err(context::failure)?;
    (global.addr, global.addr_source) = (cluster.addr, cluster.source);
    (global.token, global.tls_files) = (cluster.token, cluster.tls);
    global.client_rack = cluster.rack;
    Ok(())
}

/// Prints the error, if any, and returns the exit code.
fn report_error(outcome: anyhow::Result<()>, context: &ErrorContext) -> Exit {
    let Err(error) = outcome else { return Exit::Done };
    let exit = exit::of(&error);
    let is_reported = error.downcast_ref::<CliError>().is_some_and(CliError::is_reported);
    if !is_reported && !matches!(exit, Exit::Done | Exit::Interrupted) {
        let text = match context.is_json {
            true => report::render_json(&error, context),
            false => report::render(&error, context, Style::of_stderr()),
        };
        output::write_message(format_args!("{text}"));
    }
    exit
}

/// Runs a command. If it fails because nodes are down, sets `needed_nodes` to the nodes it needs.
fn on_runtime(
    global: &mut GlobalArgs,
    command: &CliCommand,
    needed_nodes: &mut Option<String>,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.context("start the runtime's threads")?;
    interrupt::watch(match command {
        CliCommand::Demo(_) | CliCommand::Dev(_) | CliCommand::Produce(_) => {
            interrupt::CLEAN_UP_MAX
        }
        CliCommand::Consume(args) if args.group.is_some() => interrupt::LEAVE_MAX,
        _ => interrupt::CANCEL_MAX,
    });
    global.pending = PendingCalls::watched();
    let outcome = runtime.block_on(async {
        // The view of `helix top` fills the terminal.
        let notes = (!matches!(command, CliCommand::Top(_))).then(|| WaitNotes::start(global));
        let outcome = run_within(global, command).await;
        drop(notes);
        if outcome.as_ref().is_err_and(exit::may_lack_nodes) && command.needs_cluster() {
            tokio::select! {
                needed = cluster::needed::look_up(global) => *needed_nodes = needed,
                () = interrupt::interrupted() => {}
            }
        }
        outcome
    });
    // Does not wait for a blocked read of standard input.
    runtime.shutdown_background();
    outcome
}

/// Runs a command, and ends it at --timeout.
async fn run_within(global: &GlobalArgs, command: &CliCommand) -> anyhow::Result<()> {
    let has_own_limit = matches!(
        command,
        // The time counts for each batch, so that the outcome of all records is reported.
        CliCommand::Produce(_)
            | CliCommand::Cluster(
                ClusterSubcommand::Health(_)
                    | ClusterSubcommand::AddNode { .. }
                    | ClusterSubcommand::RemoveNode { .. }
                    | ClusterSubcommand::ReplaceNode { .. }
                    | ClusterSubcommand::MoveShard { .. }
            )
    );
    let Some(limit) = global.timeout.filter(|_| !has_own_limit) else {
        return run(global, command).await;
    };
    deadline::within(limit, &global.pending, run(global, command)).await
}

async fn run(global: &GlobalArgs, command: &CliCommand) -> anyhow::Result<()> {
    match command {
        // These commands handle interrupts themselves, to clean up.
        CliCommand::Demo(args) => demo::run(global, args).await,
        CliCommand::Dev(args) => dev::run(global, args).await,
        CliCommand::Top(args) => commands::top::run(global, args).await,
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
        CliCommand::Quota(command) => quota::run(global, command).await,
        CliCommand::Whoami => access::who_am_i(global).await,
        CliCommand::Consume(args) => consume::run(global, args).await,
        CliCommand::Tail(args) => tail::run(global, args).await,
        CliCommand::Offsets(args) => offsets::run(global, args).await,
        CliCommand::Trace(TraceSubcommand::Append(args)) => trace::run_append(global, args).await,
        CliCommand::Backup(args) => backup::run(global, args).await,
        CliCommand::Restore(args) => backup::restore::run(global, args).await,
        CliCommand::Check => check::run(global).await,
        CliCommand::Debug(command) => commands::debug::run(global, command).await,
        CliCommand::Version => version::run(global).await,
        CliCommand::Demo(_)
        | CliCommand::Dev(_)
        | CliCommand::Produce(_)
        | CliCommand::Top(_)
        | CliCommand::Server(_)
        | CliCommand::Wal(_)
        | CliCommand::Config(_)
        | CliCommand::Context(_)
        | CliCommand::Cert(_)
        | CliCommand::Explain { .. }
        | CliCommand::Cheat
        | CliCommand::Completions { .. } => unreachable!("handled by the callers"),
    }
}
