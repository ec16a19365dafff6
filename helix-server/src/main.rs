//! The binary `helix-server`: flags in, exit code out.
//! 0 after a stop that was asked for, 1 when it cannot start, 2 for wrong usage, 70 when it fails.

use std::process::ExitCode;

use clap::Parser;
use helix_server::config::Flags;
use helix_server::daemon;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Helix: a replicated, append-only log service with a gRPC API
#[derive(Debug, Parser)]
#[command(name = "helix-server", version, about)]
struct Cli {
    #[command(flatten)]
    flags: Flags,
}

fn main() -> ExitCode {
    match daemon::configure(&Cli::parse().flags) {
        Ok(config) => daemon::main(config),
        Err(code) => code,
    }
}
