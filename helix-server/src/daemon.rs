//! A server as a process of its own: log, runtime, signals, exit codes.
//! What `helix-server` and `helix server` have in common.

use std::future::{Future, pending};
use std::io::{ErrorKind, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use tokio::runtime;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::config::{Asked, Config, ConfigError, Flags, LogFormat, Resolved};
use crate::raft;
use crate::server::{Running, Server, StartError};

/// EX_SOFTWARE of sysexits.h: something inside failed, and a restart is the way out.
const EXIT_FAILED: i32 = 70;

/// What clap ends with as well: the command line, or what it names, is wrong.
const EXIT_USAGE: u8 = 2;

/// What the runtime's threads get to end once the server has stopped.
const THREADS_WAIT_MAX: Duration = Duration::from_secs(1);

/// Runs a server until SIGTERM or SIGINT. The exit code is 0 after such a stop and 1 where the
/// server cannot start; a storage that fails ends the process at once, with 70.
pub fn main(config: Config) -> ExitCode {
    main_until(config, pending())
}

/// As [`main`], and also stops when `stop` does.
pub fn main_until(config: Config, stop: impl Future<Output = ()>) -> ExitCode {
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
            complain(format, &error.to_string());
            ExitCode::FAILURE
        }
    }
}

/// What to run, from the flags, the environment and the file. Where the flags ask for something
/// else, or something is wrong, that is said, and how to end is what comes back.
pub fn configure(flags: &Flags) -> Result<Config, ExitCode> {
    match (flags.resolve(&|name| std::env::var_os(name)), flags.asked()) {
        (Err(ConfigError { problems }), _) => {
            for problem in problems {
                eprintln!("helix-server: {problem}");
            }
            Err(ExitCode::from(EXIT_USAGE))
        }
        (Ok(Resolved { config, .. }), Asked::Run) => Ok(config),
        (Ok(_), Asked::Check) => Err(print("the configuration is good\n")),
        (Ok(resolved), Asked::Print) => Err(print(&resolved.to_string())),
    }
}

fn print(text: &str) -> ExitCode {
    // A reader that has seen enough is no failure.
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            eprintln!("helix-server: standard output: {error}");
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}

fn log_to_stderr(config: &Config) {
    // What is said of the level later overrules what is said first.
    // The HTTP/2 library warns of each client that misbehaves, as often as it does.
    let filter = EnvFilter::new(format!("h2=error,{},{}", raft::LOG_FILTER, config.log_level));
    // As https://no-color.org has it.
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let log = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal() && !is_plain)
        .with_env_filter(filter);
    // Fails where the process has a log already, which then serves as well.
    let _ = match config.log_format {
        LogFormat::Text => log.try_init(),
        LogFormat::Json => log.json().try_init(),
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
    for (flag, addr) in config.exposed() {
        tracing::warn!(
            flag, %addr,
            "--insecure: whoever reaches this address may do everything, and can be listened in on"
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

/// Every line of a log in JSON is JSON.
fn announce(format: LogFormat, running: &Running) {
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

fn complain(format: LogFormat, what: &str) {
    match format {
        LogFormat::Text => eprintln!("helix-server: {what}"),
        LogFormat::Json => tracing::error!("{what}"),
    }
}

/// Stops in bounded time; a storage that fails meanwhile still ends the process as a failure.
async fn shutdown(format: LogFormat, running: Running) {
    tracing::info!("stopping");
    let node = running.node().clone();
    tokio::select! {
        () = running.shutdown() => {}
        reason = node.failed() => abort(format, &reason),
    }
    tracing::info!("stopped");
}

/// Ends the process at once: nothing that a failed disk did not sync may be acknowledged by what
/// still runs.
fn abort(format: LogFormat, reason: &str) -> ! {
    let what = format!(
        "{reason}; stopping at once. What was acknowledged as synced had been synced; look at \
         the disk, then start again"
    );
    complain(format, &what);
    std::process::exit(EXIT_FAILED)
}
