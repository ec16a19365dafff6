//! Runs a server as a process: log, runtime, signals, exit codes.
//! Shared by `helix-server` and `helix server`.

use std::future::{Future, pending};
use std::io::{ErrorKind, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use tokio::runtime;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::config::{ConfigAction, ConfigError, Flags, LogFormat, ResolvedConfig, ServerConfig};
use crate::raft;
use crate::server::{RunningServer, Server, StartError};

/// `EX_SOFTWARE` of sysexits.h: an internal failure; the process must be restarted.
const EXIT_FAILED: i32 = 70;

/// Exit code for a wrong command line or configuration; the same as clap's.
const EXIT_USAGE: u8 = 2;

/// Time for the runtime's threads to end once the server has stopped.
const THREADS_WAIT_MAX: Duration = Duration::from_secs(1);

/// Runs a server until SIGTERM or SIGINT.
///
/// The exit code is 0 after such a stop, and 1 if the server cannot start. A storage failure ends
/// the process at once, with 70.
pub fn main(config: ServerConfig) -> ExitCode {
    main_until(config, pending())
}

/// Like [`main`], and also stops when `stop` resolves.
pub fn main_until(config: ServerConfig, stop: impl Future<Output = ()>) -> ExitCode {
    log_to_stderr(&config);
    let format = config.log_format;
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
            report_error(format, &error.to_string());
            ExitCode::FAILURE
        }
    }
}

/// Resolves the configuration from the flags, the environment and the file.
///
/// # Errors
/// The exit code, after printing the problems of the configuration, the result of
/// `--check-config`, or the output of `--print-config`.
pub fn configure(flags: &Flags) -> Result<ServerConfig, ExitCode> {
    match (flags.resolve(&|name| std::env::var_os(name)), flags.action()) {
        (Err(ConfigError { problems }), _) => {
            for problem in problems {
                eprintln!("helix-server: {problem}");
            }
            Err(ExitCode::from(EXIT_USAGE))
        }
        (Ok(ResolvedConfig { config, .. }), ConfigAction::Run) => Ok(config),
        (Ok(_), ConfigAction::Check) => Err(print("the configuration is good\n")),
        (Ok(resolved), ConfigAction::Print) => Err(print(&resolved.to_string())),
    }
}

fn print(text: &str) -> ExitCode {
    // A closed pipe is not a failure.
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            eprintln!("helix-server: standard output: {error}");
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}

fn log_to_stderr(config: &ServerConfig) {
    // Later directives override earlier ones. The HTTP/2 library would log a warning for each
    // misbehaving client.
    let filter = EnvFilter::new(format!("h2=error,{},{}", raft::LOG_FILTER, config.log_level));
    // See https://no-color.org.
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let log = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal() && !is_plain)
        .with_env_filter(filter);
    // Fails if the process already has a subscriber, which is fine.
    let _ = match config.log_format {
        LogFormat::Text => log.try_init(),
        LogFormat::Json => log.json().try_init(),
    };
}

async fn run(config: ServerConfig, stop: impl Future<Output = ()>) -> Result<(), StartError> {
    // Before the start, so that a signal while the data is being opened is not lost.
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
    for (flag, addr) in config.exposed() {
        tracing::warn!(
            flag, %addr,
            "listening without encryption or authentication (--insecure)"
        );
    }
    let format = config.log_format;
    let mut running = tokio::select! {
        running = Server::start(config) => running?,
        () = &mut stop => return Ok(()),
    };
    announce(format, &running);
    tokio::select! {
        reason = running.wait_failed() => abort(format, &reason),
        () = &mut stop => {}
    }
    shutdown(format, running).await;
    Ok(())
}

/// Prints the banner, or logs it as JSON so that every line of a JSON log is JSON.
fn announce(format: LogFormat, running: &RunningServer) {
    match format {
        LogFormat::Text => eprintln!("{}", running.banner()),
        LogFormat::Json => {
            let info = running.node().info();
            let admin = running.admin_addr().map(|addr| addr.to_string());
            tracing::info!(
                version = info.version,
                node_id = info.node_id,
                storage = ?info.storage,
                data_dir = %info.data_dir,
                advertised = %info.endpoint,
                admin = admin.as_deref().unwrap_or("off"),
                listening = %running.local_addr(),
                "serving"
            );
        }
    }
}

fn report_error(format: LogFormat, what: &str) {
    match format {
        LogFormat::Text => eprintln!("helix-server: {what}"),
        LogFormat::Json => tracing::error!("{what}"),
    }
}

/// Stops in bounded time. A storage failure meanwhile still ends the process with a failure.
async fn shutdown(format: LogFormat, running: RunningServer) {
    tracing::info!("stopping");
    let node = running.node().clone();
    tokio::select! {
        () = running.shutdown() => {}
        reason = node.failed() => abort(format, &reason),
    }
    tracing::info!("stopped");
}

/// Ends the process at once, so that nothing is acknowledged that the failed disk did not sync.
fn abort(format: LogFormat, reason: &str) -> ! {
    let what = format!(
        "{reason}; stopping at once. Records acknowledged as synced are on disk; check the disk, \
         then start the server again"
    );
    report_error(format, &what);
    std::process::exit(EXIT_FAILED)
}
