//! `helix server`: one node in this process, the same as the binary `helix-server`.
//! Also what `helix demo` and `helix dev` start as their children.

use std::io;
use std::process::ExitCode;
use std::thread;

use clap::Args;
use helix_server::config::Flags;
use helix_server::daemon;
use tokio::sync::oneshot;

#[derive(Debug, Args)]
pub(crate) struct ServerArgs {
    #[command(flatten)]
    flags: Flags,
    /// Stop when standard input closes: whoever holds its other end owns this process
    #[arg(long, hide = true)]
    exit_with_stdin: bool,
}

/// Runs until it is asked to stop. Brings its own runtime.
pub(crate) fn run(args: ServerArgs) -> ExitCode {
    let ServerArgs { flags, exit_with_stdin } = args;
    let config = match daemon::configure(&flags) {
        Ok(config) => config,
        Err(code) => return code,
    };
    if !exit_with_stdin {
        return daemon::main(config);
    }
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
