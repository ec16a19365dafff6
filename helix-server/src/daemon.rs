//! Runs a server as a process: log, runtime, signals, exit codes.
//! Shared by `helix-server` and `helix server`.

use std::fmt::Display;
use std::future::pending;
use std::io::{ErrorKind, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::runtime;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::access::audit;
use crate::config::{
    ConfigAction, ConfigError, ContainerLimits, Flags, LogFormat, ResolvedConfig, ServerConfig,
    log_filter,
};
use crate::file_limit;
use crate::raft;
use crate::server::{RunningServer, Server, StartError};
use crate::signals::{StopBounds, StopOverdue, StopSignals};
use crate::stderr;

/// `EX_SOFTWARE` of sysexits.h: an internal failure; the process must be restarted.
const EXIT_FAILED: i32 = 70;

/// Exit code for a wrong command line or configuration; the same as clap's.
const EXIT_USAGE: u8 = 2;

/// Exit code for a server that could not start, or did not stop in time.
const EXIT_ERROR: i32 = 1;

/// Exit code after a second signal, which ends the stop: 128 and SIGINT, as in shells.
const EXIT_HURRIED: i32 = 130;

/// Time for the runtime's threads to end once the server has stopped.
const THREADS_WAIT_MAX: Duration = Duration::from_secs(1);

/// Time for the last lines of the log to be written, before a normal end and before an abort.
const FLUSH_WAIT_MAX: Duration = Duration::from_millis(500);
const ABORT_FLUSH_WAIT_MAX: Duration = Duration::from_millis(100);

/// Time from a signal to the end of the process. More than the waits of a stop together, and less
/// than the usual 30 s after which container engines send SIGKILL.
const STOP_BOUNDS: StopBounds =
    StopBounds { stop_max: Duration::from_secs(28), hurried_max: Duration::ZERO };

/// Runs a server until SIGTERM, SIGINT or SIGHUP.
///
/// The exit code is 0 after such a stop, and 1 if the server cannot start or does not stop within
/// 28 s. A second signal ends the process at once, with 130; a storage failure does, with 70.
pub fn main(config: ServerConfig) -> ExitCode {
    main_until(config, pending().boxed())
}

/// Like [`main`], and also stops when `stop` resolves.
///
/// `stop` is boxed: a generic function would be compiled again, with the whole server, by each
/// program that calls it.
pub fn main_until(config: ServerConfig, stop: BoxFuture<'_, ()>) -> ExitCode {
    let format = config.log_format;
    start_log(&config);
    file_limit::raise();
    let outcome = run_on_runtime(config, stop);
    if let Err(error) = &outcome {
        report_error(format, error);
    }
    stderr::flush(FLUSH_WAIT_MAX);
    if outcome.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run_on_runtime(config: ServerConfig, stop: BoxFuture<'_, ()>) -> Result<(), StartError> {
    let format = config.log_format;
    // Before the start, so that a signal while the data is being opened is not lost.
    let signals = StopSignals::watch(STOP_BOUNDS, move |why| end_overdue(format, why));
    let signals = signals.map_err(StartError::Runtime)?;
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(config.worker_threads())
        .enable_all()
        .build();
    let runtime = runtime.map_err(StartError::Runtime)?;
    let outcome = runtime.block_on(run(config, signals, stop));
    runtime.shutdown_timeout(THREADS_WAIT_MAX);
    outcome
}

/// Resolves the configuration from the flags, the environment and the file.
///
/// # Errors
/// The exit code, after printing the problems of the configuration, the result of
/// `--check-config`, or the output of `--print-config`.
pub fn configure(flags: &Flags) -> Result<ServerConfig, ExitCode> {
    let resolved =
        flags.resolve_within(&ContainerLimits::of_process(), &|name| std::env::var_os(name));
    match (resolved, flags.action()) {
        (Err(ConfigError { problems }), _) => {
            for problem in problems {
                write_error(format_args!("helix-server: {problem}"));
            }
            Err(ExitCode::from(EXIT_USAGE))
        }
        (Ok(ResolvedConfig { config, copy_rate_file, .. }), ConfigAction::Run) => {
            Ok(ServerConfig { copy_rate_file, ..config })
        }
        (Ok(ResolvedConfig { config, .. }), ConfigAction::Check) => Err(check(&config)),
        (Ok(resolved), ConfigAction::Print) => Err(print(&resolved.to_string())),
    }
}

/// Checks what a start only logs, because the cluster may still accept the node.
fn check(config: &ServerConfig) -> ExitCode {
    match config.check_own_issuer() {
        Ok(None) => {}
        Ok(Some(warning)) => write_error(format_args!("helix-server: warning: {warning}")),
        Err(problem) => {
            write_error(format_args!("helix-server: {problem}"));
            return ExitCode::from(EXIT_USAGE);
        }
    }
    print("the configuration is good\n")
}

fn print(text: &str) -> ExitCode {
    // A closed pipe is not a failure.
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            write_error(format_args!("helix-server: standard output: {error}"));
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}

/// Writes a line to standard error before the log exists. Nothing is left to do if that fails.
fn write_error(what: impl Display) {
    let _ = std::io::stderr().write_all(format!("{what}\n").as_bytes());
}

/// Logs to standard error, and panics too. A line may be lost, and never blocks or fails.
fn start_log(config: &ServerConfig) {
    stderr::start();
    // Later directives override earlier ones. The HTTP/2 library would log a warning for each
    // misbehaving client. The audit log has its own level, which only its own directive lowers.
    let filter =
        format!("h2=error,{}=info,{},{}", audit::TARGET, raft::LOG_FILTER, config.log_level);
    let filter =
        log_filter(&filter).unwrap_or_else(|| Targets::new().with_default(LevelFilter::INFO));
    // See https://no-color.org.
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let lines = fmt::layer()
        .with_writer(stderr::LogWriter)
        // It would use `eprintln!`, which panics.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal() && !is_plain);
    let log = tracing_subscriber::registry();
    let format = config.log_format;
    // Fails if the process already has a subscriber, which is fine.
    let _ = match format {
        LogFormat::Text => log.with(lines).with(filter).try_init(),
        LogFormat::Json => log.with(lines.json()).with(filter).try_init(),
    };
    // The default hook writes to standard error itself and may block there.
    std::panic::set_hook(Box::new(move |panic| {
        let thread = std::thread::current();
        let backtrace = std::backtrace::Backtrace::capture();
        let backtrace = match backtrace.status() {
            std::backtrace::BacktraceStatus::Captured => format!("\n{backtrace}"),
            _ => String::new(),
        };
        let name = thread.name().unwrap_or("unnamed");
        report_error(format, &format_args!("thread {name} {panic}{backtrace}"));
        // The panic may end the process. A blocked standard error costs a panicking thread 100 ms.
        stderr::flush(ABORT_FLUSH_WAIT_MAX);
    }));
}

async fn run(
    config: ServerConfig,
    signals: StopSignals,
    stop: BoxFuture<'_, ()>,
) -> Result<(), StartError> {
    let stop = async {
        tokio::select! {
            () = signals.stopped() => {}
            () = stop => {}
        }
    };
    tokio::pin!(stop);
    for (flag, addr) in config.exposed() {
        tracing::warn!(
            flag, %addr,
            "other machines reach this address without TLS and credentials (--insecure)"
        );
    }
    log_limits(&config);
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

/// Logs the container's limits, and warns of a memory limit that does not fit them.
fn log_limits(config: &ServerConfig) {
    let container = ContainerLimits::of_process();
    if container == ContainerLimits::default() {
        return;
    }
    tracing::info!(
        container_memory = container.memory_bytes,
        container_cpus = container.cpus,
        memory_limit = config.memory_limit,
        worker_threads = config.worker_threads(),
        "running within a container's limits"
    );
    if let Some(advice) = container.memory_advice(config.memory_limit, config.memory_limit_min()) {
        tracing::warn!(
            memory_limit = config.memory_limit,
            container_memory = container.memory_bytes,
            "the container may run out of memory: {advice}"
        );
    }
}

/// Prints the banner, or logs it as JSON so that every line of a JSON log is JSON.
fn announce(format: LogFormat, running: &RunningServer) {
    match format {
        LogFormat::Text => stderr::write_line(&running.banner().to_string()),
        LogFormat::Json => {
            let info = running.node().info();
            let admin = running.admin_addr().map(|addr| addr.to_string());
            let socket = running.socket_path().map(|path| format!("unix:{}", path.display()));
            tracing::info!(
                version = info.version,
                node_id = info.node_id,
                storage = ?info.storage,
                data_dir = %info.data_dir,
                advertised = %info.endpoint,
                admin = admin.as_deref().unwrap_or("off"),
                listening = %running.local_addr(),
                socket = socket.as_deref().unwrap_or("off"),
                "serving"
            );
        }
    }
}

fn report_error(format: LogFormat, what: &dyn Display) {
    match format {
        LogFormat::Text => stderr::write_line(&format!("helix-server: {what}")),
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
    exit(EXIT_FAILED)
}

/// Ends a process that was asked to stop and has not stopped.
fn end_overdue(format: LogFormat, why: StopOverdue) {
    let (what, code) = match why {
        StopOverdue::Deadline => {
            (format!("did not stop within {:?}", STOP_BOUNDS.stop_max), EXIT_ERROR)
        }
        StopOverdue::SecondSignal => ("second signal".to_owned(), EXIT_HURRIED),
    };
    let what = format!(
        "{what}, stopping at once. Acknowledged records are safe; the other nodes elect leaders \
         for the shards that this node led"
    );
    report_error(format, &what);
    exit(code)
}

fn exit(code: i32) -> ! {
    stderr::flush(ABORT_FLUSH_WAIT_MAX);
    std::process::exit(code)
}
