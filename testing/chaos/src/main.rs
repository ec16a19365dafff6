//! `helix-chaos`: injects faults into a real cluster under load and checks its responses.
//!
//! The same binary also runs as the nodes and group members that it starts, kills and restarts.

use std::io;
use std::process::ExitCode;
use std::thread;

use clap::{Args, Parser, Subcommand};
use helix_chaos::commands;
use helix_server::config::Flags;
use helix_server::daemon;
use tokio::sync::oneshot;

#[global_allocator]
static ALLOCATOR: helix_allocator::Allocator = helix_allocator::Allocator;

/// Inject faults into a real cluster and check its promises
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Role,
}

#[derive(Debug, Subcommand)]
enum Role {
    #[command(flatten)]
    Chaos(commands::ChaosCommand),
    /// Run one node, which exits when standard input closes
    #[command(hide = true)]
    Node(NodeArgs),
    /// Read as a member of a group, until standard input closes
    #[command(hide = true)]
    Member(commands::GroupMemberArgs),
}

#[derive(Debug, Args)]
struct NodeArgs {
    #[command(flatten)]
    flags: Flags,
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Role::Chaos(command) => commands::main(command),
        Role::Node(NodeArgs { flags }) => node(&flags),
        Role::Member(args) => commands::main_as_member(args),
    }
}

/// Runs a node until it is stopped or its parent exits. Starts its own runtime.
fn node(flags: &Flags) -> ExitCode {
    let config = match daemon::configure(flags) {
        Ok(config) => config,
        Err(code) => return code,
    };
    let (closed, is_closed) = oneshot::channel::<()>();
    thread::spawn(move || {
        // An error ends the wait just as the end of the input does.
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        drop(closed);
    });
    // Always an error: the sender is only ever dropped.
    daemon::main_until(config, Box::pin(async { drop(is_closed.await) }))
}
