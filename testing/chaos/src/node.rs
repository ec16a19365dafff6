//! One node as a child process: this program again, as `node`. It can be killed, stopped and
//! continued, asked to end, and started again on the same data; it ends when we end.

use std::fs::File;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::timeout;

/// How long a node may take to stop by itself.
const STOP_MAX: Duration = Duration::from_secs(30);

/// Small, so that faults also meet rolls, seals and checkpoints.
const SEGMENT_BYTES: u64 = 16 << 20;

/// Fast, so that all that is sealed is read anew after each start, and damage is found soon.
const SCRUB_RATE: &str = "256MiB";

/// What to start.
#[derive(Debug, Clone)]
pub(crate) struct NodeOptions {
    pub(crate) program: PathBuf,
    pub(crate) node_id: u64,
    /// Where clients are served.
    pub(crate) address: SocketAddr,
    /// What clients are told to dial.
    pub(crate) advertised: SocketAddr,
    /// Where figures are served.
    pub(crate) admin: SocketAddr,
    /// Where other nodes are served.
    pub(crate) peer_address: SocketAddr,
    /// The nodes of the cluster and where this one finds them.
    pub(crate) peers: Vec<(u64, SocketAddr)>,
    pub(crate) shards: Option<u64>,
    /// Log that it keeps for others, and between checkpoints.
    pub(crate) log_kib: Option<u64>,
    pub(crate) data_dir: PathBuf,
    /// Gets everything that the node prints.
    pub(crate) log: PathBuf,
}

/// A node's process, running or not.
#[derive(Debug)]
pub(crate) struct Node {
    options: NodeOptions,
    running: Option<Running>,
    is_paused: bool,
}

#[derive(Debug)]
struct Running {
    child: Child,
    /// Open as long as the node is to run.
    _stdin: Option<ChildStdin>,
}

impl NodeOptions {
    fn arguments(&self) -> Vec<String> {
        let mut arguments = vec![
            "node".to_owned(),
            format!("--node-id={}", self.node_id),
            format!("--listen-addr={}", self.address),
            format!("--advertise-addr={}", self.advertised),
            format!("--admin-addr={}", self.admin),
            format!("--data-dir={}", self.data_dir.display()),
            format!("--segment-bytes={SEGMENT_BYTES}"),
            format!("--scrub-rate={SCRUB_RATE}"),
        ];
        arguments.extend(self.shards.map(|shards| format!("--shards={shards}")));
        if let Some(kib) = self.log_kib {
            arguments.push(format!("--checkpoint-bytes={kib}KiB"));
            arguments.push(format!("--catch-up-bytes={kib}KiB"));
        }
        arguments.push(format!("--peer-addr={}", self.peer_address));
        let peers = self.peers.iter();
        arguments.extend(peers.map(|(node_id, address)| format!("--peer={node_id}={address}")));
        arguments
    }
}

impl Node {
    pub(crate) fn new(options: NodeOptions) -> Self {
        Self { options, running: None, is_paused: false }
    }

    /// Starts the process, which may not answer yet, and tells it of its cluster.
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
        // What is set for the user's own servers is not meant for this one.
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

    /// Whether it was told to do nothing, or is not there.
    pub(crate) fn is_silent(&self) -> bool {
        self.running.is_none() || self.is_paused
    }

    /// SIGKILL. When this returns the process is gone.
    pub(crate) async fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(mut running) = self.running.take() {
            running.child.kill().await.context("kill a node")?;
        }
        self.is_paused = false;
        Ok(())
    }

    /// Sends SIGKILL and does not wait for the end: for many at once. See [`Node::kill`].
    pub(crate) fn begin_kill(&mut self) -> anyhow::Result<()> {
        self.running.as_mut().map_or(Ok(()), |running| running.child.start_kill())?;
        Ok(())
    }

    /// SIGSTOP: no thread of the process runs until [`Node::resume`].
    pub(crate) fn pause(&mut self) -> anyhow::Result<()> {
        self.signal(Signal::STOP)?;
        self.is_paused = self.running.is_some();
        Ok(())
    }

    pub(crate) fn resume(&mut self) -> anyhow::Result<()> {
        self.is_paused = false;
        self.signal(Signal::CONT)
    }

    /// SIGTERM, and waits until the node has ended by itself.
    pub(crate) async fn terminate(&mut self) -> anyhow::Result<()> {
        self.signal(Signal::TERM)?;
        let Some(mut running) = self.running.take() else { return Ok(()) };
        let node_id = self.options.node_id;
        match timeout(STOP_MAX, running.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => bail!("node {node_id} was asked to stop and ended with {status}"),
            Ok(Err(error)) => Err(error).context("wait for a node"),
            Err(_) => {
                // Dropped with its process; the folder is what is left to look at.
                bail!("node {node_id} was asked to stop and did not within {STOP_MAX:?}")
            }
        }
    }

    /// How it ended, if it has ended although nobody wanted it to.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        let status = self.running.as_mut()?.child.try_wait().ok().flatten()?;
        self.running = None;
        Some(status)
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let child = self.running.as_ref().and_then(|running| running.child.id());
        let pid = child.and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        // A node that has just ended is found by whoever looks next.
        if let Some(pid) = pid {
            match kill_process(pid, signal) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => return Err(error).context("signal a node"),
            }
        }
        Ok(())
    }
}
