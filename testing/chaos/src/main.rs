//! `helix-chaos`: breaks a real cluster under load and checks what it said; see its commands.
//! The same binary is also the node that it starts, kills and starts again.

use std::io;
use std::process::ExitCode;
use std::thread;

use clap::{Args, Parser, Subcommand};
use helix_chaos::commands;
use helix_server::config::Flags;
use helix_server::daemon;
use tokio::sync::oneshot;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Faults on a real cluster under load, and a check of everything that its clients were told
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Role,
}

#[derive(Debug, Subcommand)]
enum Role {
    #[command(flatten)]
    Chaos(commands::Command),
    /// One node, which ends when standard input closes
    #[command(hide = true)]
    Node(NodeArgs),
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
    }
}

/// Runs until told to stop, or until whoever started us is gone. Brings its own runtime.
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
    daemon::main_until(config, async {
        // Always an error: the sender is only ever dropped.
        let _ = is_closed.await;
    })
}
