//! Child process that serves the ceiling: starts it, reads its address and ends it.
//!
//! The ceiling gets its own process because a server has one too.

mod fan_out;
mod service;
mod state;

use std::process::Stdio;

use anyhow::{Context, Result, anyhow};
use clap::Args;
use helix_client::TokenSource;
use helix_client::contexts::{ADDR_DEFAULT, ChosenCluster};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::TcpListener;
use tokio::process::{Child, Command};

use crate::host::cores;
use crate::load::{BenchLoad, LoadArgs, LoadMode, check_count};
use crate::options::TargetOptions;
use crate::payload::{BatchPool, PayloadKind};
use crate::report::BenchReport;
use crate::{exit, interrupt, output, runner, single};

/// Prefix of the line in which the child prints its address.
const GREETING: &str = "ceiling at ";

/// Flags of `ceiling`.
#[derive(Debug, Clone, Args)]
pub(crate) struct CeilingArgs {
    /// Load to run against the service
    #[arg(long, default_value = "write")]
    mode: LoadMode,
    /// Serve at this address until interrupted
    #[arg(long, value_name = "HOST:PORT")]
    serve: Option<String>,
    /// Exit when standard input closes, which is when the parent exits
    #[arg(long, hide = true, requires = "serve")]
    end_with_stdin: bool,
    /// Runtime threads of the service [default: cores - 1, at least 1, as the server]
    #[arg(long)]
    server_threads: Option<usize>,
    #[command(flatten)]
    load: LoadArgs,
}

/// Serves the ceiling, or runs a load against one, and returns the exit code.
///
/// # Errors
/// A flag is out of range, the ceiling could not start, or the run failed.
pub(crate) fn command(args: &CeilingArgs) -> Result<u8> {
    let threads = server_threads(args.server_threads)?;
    if let Some(address) = &args.serve {
        let runtime = runner::runtime(threads)?;
        let result = runtime.block_on(serve(args, address));
        // A blocking read of standard input cannot be interrupted, so its thread is left running.
        runtime.shutdown_background();
        return result.map(|()| 0);
    }
    if args.load.cluster != TargetOptions::default() {
        let what = "--addr and other options of a cluster are not valid: ceiling starts its own \
                    service";
        return Err(exit::usage(anyhow!(what)));
    }
    // No context or environment may name another cluster.
    let load = LoadArgs { cluster: TargetOptions::of_node(ADDR_DEFAULT), ..args.load.clone() };
    let load = BenchLoad::with_ceiling(args.mode, &load).map_err(exit::usage)?;
    runner::run(load.threads, &args.load.output, run(&load, threads))
}

async fn run(load: &BenchLoad, threads: usize) -> Result<BenchReport> {
    let ceiling = CeilingProcess::start(load, Some(threads)).await?;
    let mut report = single::run(&ceiling.load(load)).await?;
    report.notes.push(format!(
        "against a service without storage, in its own process with {threads} runtime threads"
    ));
    Ok(report)
}

/// Ceiling process that runs until this is dropped.
#[derive(Debug)]
pub(crate) struct CeilingProcess {
    /// Holds the child's standard input open, so that the child exits when this process does.
    _child: Child,
    pub(crate) address: String,
}

impl CeilingProcess {
    /// Starts the child process and waits for its address.
    ///
    /// # Errors
    /// The child could not be started.
    pub(crate) async fn start(load: &BenchLoad, server_threads: Option<usize>) -> Result<Self> {
        let program = std::env::current_exe().context("find this executable")?;
        let mut command = Command::new(program);
        command
            .args(["ceiling", "--serve", "127.0.0.1:0", "--end-with-stdin"])
            .args(["--size", &load.size.to_string()])
            .args(["--batch-size", &load.batch_size.to_string()])
            .args(["--seed", &load.seed.to_string()])
            // The terminal's Ctrl-C must not end it before the run.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        if let Some(threads) = server_threads {
            command.args(["--server-threads", &threads.to_string()]);
        }
        let mut child = command.spawn().context("start the ceiling")?;
        let stdout = child.stdout.take().context("read from the ceiling")?;
        let mut lines = BufReader::new(stdout).lines();
        let line = lines.next_line().await.context("read from the ceiling")?.unwrap_or_default();
        let address = line.strip_prefix(GREETING).context("the ceiling did not start")?.to_owned();
        Ok(Self { _child: child, address })
    }

    /// Returns the same load against the ceiling.
    pub(crate) fn load(&self, load: &BenchLoad) -> BenchLoad {
        let cluster = ChosenCluster {
            addr: vec![self.address.clone()],
            source: "the ceiling".to_owned(),
            token: TokenSource::none(),
            rack: None,
            tls: None,
        };
        BenchLoad { cluster, ..load.clone() }
    }
}

/// Returns the ceiling's runtime threads; the default is the server's.
///
/// # Errors
/// The flag is out of range.
pub(crate) fn server_threads(asked: Option<usize>) -> Result<usize> {
    let threads = asked.unwrap_or_else(|| cores().saturating_sub(1).max(1));
    check_count("--server-threads", threads).map_err(exit::usage)?;
    Ok(threads)
}

/// Serves the ceiling until interrupted.
async fn serve(args: &CeilingArgs, address: &str) -> Result<()> {
    let LoadArgs { size, batch_size, payload, seed, .. } = &args.load;
    let payload = payload.unwrap_or(PayloadKind::Random);
    let pool = BatchPool::new(payload, size.unwrap_or(1024), batch_size.unwrap_or(100), *seed, 1);
    let listener = TcpListener::bind(address).await.with_context(|| format!("bind {address}"))?;
    let address = listener.local_addr().context("look up the address")?;
    output::print(&format!("{GREETING}{address}\n"))?;
    tokio::select! {
        result = service::serve(listener, pool.into_batches()) => result.context("serve"),
        () = interrupt::requested() => Ok(()),
        () = end_of_stdin(), if args.end_with_stdin => Ok(()),
    }
}

async fn end_of_stdin() {
    let mut nothing = [0; 64];
    // Input is discarded; only its end, or a read error, matters.
    while matches!(tokio::io::stdin().read(&mut nothing).await, Ok(bytes) if bytes > 0) {}
}
