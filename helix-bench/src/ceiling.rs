//! Child process that serves the ceiling: starts it, reads its address and ends it.
//!
//! The ceiling gets its own process because a server has one too.

mod service;
mod state;

use std::process::Stdio;

use anyhow::{Context, Result};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::TcpListener;
use tokio::process::{Child, Command};

use crate::args::{CeilingArgs, LoadArgs, PayloadKind};
use crate::host::cores;
use crate::load::BenchLoad;
use crate::output;
use crate::payload::BatchPool;

/// Prefix of the line in which the child prints its address.
const GREETING: &str = "ceiling at ";

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
        BenchLoad { addr: vec![self.address.clone()], tls: None, ..load.clone() }
    }
}

/// Returns the ceiling's runtime threads; the default is the server's.
pub(crate) fn server_threads(asked: Option<usize>) -> usize {
    asked.unwrap_or_else(|| cores().saturating_sub(1)).max(1)
}

/// Serves the ceiling until interrupted.
///
/// # Errors
/// The address could not be served.
pub(crate) async fn serve(args: &CeilingArgs, address: &str) -> Result<()> {
    let LoadArgs { size, batch_size, payload, seed, .. } = &args.load;
    let payload = payload.unwrap_or(PayloadKind::Random);
    let pool = BatchPool::new(payload, size.unwrap_or(1024), batch_size.unwrap_or(100), *seed, 1);
    let listener = TcpListener::bind(address).await.with_context(|| format!("bind {address}"))?;
    let address = listener.local_addr().context("look up the address")?;
    output::print(&format!("{GREETING}{address}\n"))?;
    tokio::select! {
        result = service::serve(listener, pool.into_batches()) => result.context("serve"),
        result = tokio::signal::ctrl_c() => result.context("wait for an interrupt"),
        () = end_of_stdin(), if args.end_with_stdin => Ok(()),
    }
}

async fn end_of_stdin() {
    let mut nothing = [0; 64];
    // Input is discarded; only its end, or a read error, matters.
    while matches!(tokio::io::stdin().read(&mut nothing).await, Ok(bytes) if bytes > 0) {}
}
