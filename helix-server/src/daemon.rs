//! A server as a process of its own: log, runtime, signals, exit codes.
//! What `helix-server` and `helix server` have in common.

use std::future::{Future, pending};
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use tokio::runtime;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::config::{Config, LogFormat};
use crate::raft;
use crate::server::{Running, Server, StartError};

/// EX_SOFTWARE of sysexits.h: something inside failed, and a restart is the way out.
const EXIT_FAILED: i32 = 70;

/// What the runtime's threads get to end once the server has stopped.
const THREADS_WAIT_MAX: Duration = Duration::from_secs(1);

/// Runs a server until SIGTERM or SIGINT. The exit code is 0 after such a stop and 1 where the
/// server cannot start; a storage that fails ends the process at once, with 70.
pub fn main(config: Config) -> ExitCode {
    main_until(config, pending())
}

/// As [`main`], and also stops when `stop` does.
pub fn main_until(config: Config, stop: impl Future<Output = ()>) -> ExitCode {
    log_to_stderr(config.log);
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(config.worker_threads())
        .enable_all()
        .build();
    let outcome = runtime.map_err(StartError::Runtime).and_then(|runtime| {
        let outcome = runtime.block_on(run(config, stop));
        runtime.shutdown_timeout(THREADS_WAIT_MAX);
        outcome
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("helix-server: {error}");
            ExitCode::FAILURE
        }
    }
}

/// HELIX_LOG chooses what is logged, as in `HELIX_LOG=debug`.
fn log_to_stderr(format: LogFormat) {
    let quiet = || EnvFilter::new(format!("info,{}", raft::LOG_FILTER));
    let filter = EnvFilter::try_from_env("HELIX_LOG").unwrap_or_else(|_| quiet());
    let log = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_env_filter(filter);
    // Fails where the process has a log already, which then serves as well.
    let _ = match format {
        LogFormat::Text => log.try_init(),
    };
}

async fn run(config: Config, stop: impl Future<Output = ()>) -> Result<(), StartError> {
    // Before the start: a stop that is asked for while data is being opened is not lost.
    let mut terminate = signal(SignalKind::terminate()).map_err(StartError::Runtime)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(StartError::Runtime)?;
    let stop = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            () = stop => {}
        }
    };
    tokio::pin!(stop);
    if config.is_exposed() {
        tracing::warn!(
            addr = %config.listen_addr,
            "others than this machine can connect, and nobody's identity is checked"
        );
    }
    let mut running = tokio::select! {
        running = Server::start(config) => running?,
        () = &mut stop => return Ok(()),
    };
    eprintln!("{}", running.banner());
    tokio::select! {
        reason = running.wait_failed() => abort(&reason),
        () = &mut stop => {}
    }
    shutdown(running).await;
    Ok(())
}

/// Stops in bounded time; a storage that fails meanwhile still ends the process as a failure.
async fn shutdown(running: Running) {
    tracing::info!("stopping");
    let node = running.node().clone();
    tokio::select! {
        () = running.shutdown() => {}
        reason = node.failed() => abort(&reason),
    }
    tracing::info!("stopped");
}

/// Ends the process at once: nothing that a failed disk did not sync may be acknowledged by what
/// still runs.
fn abort(reason: &str) -> ! {
    eprintln!(
        "helix-server: {reason}; stopping at once. What was acknowledged as synced had been \
         synced; look at the disk, then start again"
    );
    std::process::exit(EXIT_FAILED)
}
