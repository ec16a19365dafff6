//! The binary `helix-server`.
//! Exit codes: 0 after SIGTERM, SIGINT or SIGHUP, 1 if it cannot start or does not stop in time,
//! 2 for wrong usage, 70 on failure, 130 after a second signal.

use std::process::ExitCode;

use clap::Parser;
use helix_server::config::Flags;
use helix_server::daemon;

#[global_allocator]
static ALLOCATOR: helix_allocator::Allocator = helix_allocator::Allocator;

/// Helix: a replicated, append-only log service with a gRPC API
#[derive(Debug, Parser)]
#[command(name = "helix-server", version, about)]
struct Cli {
    #[command(flatten)]
    flags: Flags,
}

fn main() -> ExitCode {
    helix_allocator::prepare();
    match daemon::configure(&Cli::parse().flags) {
        Ok(config) => daemon::main(config),
        Err(code) => code,
    }
}
