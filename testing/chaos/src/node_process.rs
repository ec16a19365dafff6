//! Node as a child process: this program with the subcommand `node`.
//!
//! It can be killed, paused, stopped and restarted on the same data. It exits with its parent.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::timeout;

/// Longest wait for a node to stop on request.
const STOP_MAX: Duration = Duration::from_secs(30);

/// Small, so that faults also hit segment rolls, seals and checkpoints.
const SEGMENT_BYTES: u64 = 16 << 20;

/// Fast, so that sealed segments are scrubbed after each start and damage is found soon.
const SCRUB_RATE: &str = "256MiB";

/// Memory limit of a node by default.
const MEMORY_DEFAULT_MIB: u64 = 512;

/// Memory that a node needs for each shard, with some to spare.
const SHARD_MEMORY_MIB: u64 = 96;

/// Options of a node process.
#[derive(Debug, Clone)]
pub(crate) struct NodeProcessOptions {
    pub(crate) program: PathBuf,
    pub(crate) node_id: u64,
    /// Address for clients.
    pub(crate) address: SocketAddr,
    /// Address that clients dial.
    pub(crate) advertised: SocketAddr,
    /// Address for metrics.
    pub(crate) admin: SocketAddr,
    /// Address for other nodes.
    pub(crate) peer_address: SocketAddr,
    /// All nodes of the cluster and their addresses for this one.
    pub(crate) peers: Vec<(u64, SocketAddr)>,
    pub(crate) shards: Option<u64>,
    /// Log kept for lagging replicas, and between checkpoints.
    pub(crate) log_kib: Option<u64>,
    /// Log kept for lagging replicas, if it differs from that.
    pub(crate) catch_up_kib: Option<u64>,
    pub(crate) election_timeout_ms: Option<u32>,
    pub(crate) data_dir: PathBuf,
    /// Directory of the certificates; `None` without TLS.
    pub(crate) tls_dir: Option<PathBuf>,
    /// File for the node's standard output and error.
    pub(crate) log: PathBuf,
}

/// Process of a node, running or not.
#[derive(Debug)]
pub(crate) struct NodeProcess {
    options: NodeProcessOptions,
    running: Option<Running>,
    is_paused: bool,
}

#[derive(Debug)]
struct Running {
    child: Child,
    /// Held open while the node is to run.
    _stdin: Option<ChildStdin>,
}

impl NodeProcessOptions {
    fn arguments(&self) -> Vec<String> {
        // An older release is given as its server, which is a node without a subcommand.
        let is_server = self.program.file_name().is_some_and(|name| name == "helix-server");
        let mut arguments = if is_server { Vec::new() } else { vec!["node".to_owned()] };
        arguments.extend([
            format!("--node-id={}", self.node_id),
            format!("--listen-addr={}", self.address),
            format!("--advertise-addr={}", self.advertised),
            format!("--admin-addr={}", self.admin),
            format!("--data-dir={}", self.data_dir.display()),
            format!("--segment-bytes={SEGMENT_BYTES}"),
            format!("--scrub-rate={SCRUB_RATE}"),
        ]);
        arguments.extend(self.shards.map(|shards| format!("--shards={shards}")));
        let memory_mib = self.shards.map_or(0, |shards| shards * SHARD_MEMORY_MIB);
        if memory_mib > MEMORY_DEFAULT_MIB {
            arguments.push(format!("--memory-limit={memory_mib}MiB"));
        }
        let catch_up = self.catch_up_kib.or(self.log_kib);
        arguments.extend(self.log_kib.map(|kib| format!("--checkpoint-bytes={kib}KiB")));
        arguments.extend(catch_up.map(|kib| format!("--catch-up-bytes={kib}KiB")));
        let election_timeout = self.election_timeout_ms;
        arguments.extend(election_timeout.map(|ms| format!("--election-timeout-ms={ms}")));
        if let Some(directory) = &self.tls_dir {
            let node = directory.join(format!("node-{}", self.node_id));
            arguments.push(format!("--tls-cert={}.pem", node.display()));
            arguments.push(format!("--tls-key={}.key", node.display()));
            arguments.push(format!("--tls-ca={}", directory.join("ca.pem").display()));
            // Queries of single nodes have no TLS.
            arguments.push("--tls-clients=optional".to_owned());
        }
        arguments.push(format!("--peer-addr={}", self.peer_address));
        let peers = self.peers.iter();
        arguments.extend(peers.map(|(node_id, address)| format!("--peer={node_id}={address}")));
        arguments
    }
}

impl NodeProcess {
    pub(crate) fn new(options: NodeProcessOptions) -> Self {
        Self { options, running: None, is_paused: false }
    }

    /// Sets the program of the next start.
    pub(crate) fn set_program(&mut self, program: &Path) {
        program.clone_into(&mut self.options.program);
    }

    /// Starts the process with its peers. It may not answer yet.
    pub(crate) fn start(&mut self, peers: Vec<(u64, SocketAddr)>) -> anyhow::Result<()> {
        self.options.peers = peers;
        let log = File::options().create(true).append(true).open(&self.options.log);
        let log = log.with_context(|| format!("open {}", self.options.log.display()))?;
        let mut command = Command::new(&self.options.program);
        command
            .args(self.options.arguments())
            .stdin(Stdio::piped())
            .stdout(log.try_clone().context("the node's log")?)
            .stderr(log)
            .kill_on_drop(true);
        // Settings of the user's own servers must not affect this node.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("HELIX_") && name != "HELIX_LOG" {
                command.env_remove(name);
            }
        }
        let mut child = command.spawn().context("start a node")?;
        let stdin = child.stdin.take();
        self.running = Some(Running { child, _stdin: stdin });
        self.is_paused = false;
        Ok(())
    }

    pub(crate) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    pub(crate) fn process_id(&self) -> Option<u32> {
        self.running.as_ref().and_then(|running| running.child.id())
    }

    /// Reports whether the node is paused or not running.
    pub(crate) fn is_unresponsive(&self) -> bool {
        self.running.is_none() || self.is_paused
    }

    /// Sends SIGKILL and waits until the process is gone.
    pub(crate) async fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(mut running) = self.running.take() {
            running.child.kill().await.context("kill a node")?;
        }
        self.is_paused = false;
        Ok(())
    }

    /// Sends SIGKILL without waiting, to kill several nodes at once. See [`NodeProcess::kill`].
    pub(crate) fn begin_kill(&mut self) -> anyhow::Result<()> {
        self.running.as_mut().map_or(Ok(()), |running| running.child.start_kill())?;
        Ok(())
    }

    /// Sends SIGSTOP: no thread of the process runs until [`NodeProcess::resume`].
    pub(crate) fn pause(&mut self) -> anyhow::Result<()> {
        self.signal(Signal::STOP)?;
        self.is_paused = self.running.is_some();
        Ok(())
    }

    pub(crate) fn resume(&mut self) -> anyhow::Result<()> {
        self.is_paused = false;
        self.signal(Signal::CONT)
    }

    /// Sends SIGTERM and waits for the exit.
    pub(crate) async fn terminate(&mut self) -> anyhow::Result<()> {
        self.signal(Signal::TERM)?;
        let Some(mut running) = self.running.take() else { return Ok(()) };
        let node_id = self.options.node_id;
        match timeout(STOP_MAX, running.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => bail!("node {node_id} was stopped and exited with {status}"),
            Ok(Err(error)) => Err(error).context("wait for a node"),
            Err(_) => {
                // Dropping the process kills it; its data directory is kept for inspection.
                bail!("node {node_id} did not stop within {STOP_MAX:?}")
            }
        }
    }

    /// Returns the exit status if the node has exited unexpectedly.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        let status = self.running.as_mut()?.child.try_wait().ok().flatten()?;
        self.running = None;
        Some(status)
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let child = self.running.as_ref().and_then(|running| running.child.id());
        let pid = child.and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        // If the node has just exited, `ended` reports it.
        if let Some(pid) = pid {
            match kill_process(pid, signal) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => return Err(error).context("signal a node"),
            }
        }
        Ok(())
    }
}
