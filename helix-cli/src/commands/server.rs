//! `helix server`: runs one node in this process, like the binary `helix-server`.
//! `helix demo` and `helix dev` start it as child processes.

use std::io;
use std::process::ExitCode;
use std::thread;

use helix_server::daemon;
use tokio::sync::oneshot;

use crate::args::ServerArgs;

/// Runs the node on its own runtime until a signal or the end of standard input stops it.
pub(crate) fn run(args: ServerArgs) -> ExitCode {
    let ServerArgs { flags, exit_with_stdin } = args;
    let config = match daemon::configure(&flags) {
        Ok(config) => config,
        Err(code) => return code,
    };
    if !exit_with_stdin {
        return daemon::main(config);
    }
    let (closed_sender, closed) = oneshot::channel::<()>();
    thread::spawn(move || {
        // A read error ends the wait too, like the end of the input.
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        drop(closed_sender);
    });
    // Always an error: the sender sends nothing and is dropped.
    daemon::main_until(config, Box::pin(async { drop(closed.await) }))
}
