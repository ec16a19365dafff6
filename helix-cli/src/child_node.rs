//! A node as a child process: runs `helix server` of the same binary.
//! The child stops when its standard input closes, so it never outlives this process.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use helix_client::proto::log::v1::Metadata;
use helix_client::{Admin, Client, Config};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::{Instant, sleep, timeout};

use crate::exit::{CliError, Exit};
use crate::files;
use crate::output::message;
use crate::tls;

/// Maximum time from the start of a node until it is ready.
const START_MAX: Duration = Duration::from_secs(30);

/// Maximum time of a graceful stop; the shutdown timeout of the node is shorter.
const STOP_MAX: Duration = Duration::from_secs(15);

/// Poll interval while a node starts.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Number of output lines that are kept, to be shown if the node fails.
const LINES_KEPT: usize = 20;

/// Port range to choose from. It is below the ephemeral ports of usual systems, so that an outgoing
/// connection cannot take the port of a stopped node.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// Options of a child node.
#[derive(Debug, Clone)]
pub(crate) struct ChildNodeOptions {
    pub(crate) node_id: u64,
    pub(crate) port: u16,
    /// Node ids and peer ports of all nodes, including this one. Empty for a single-node cluster.
    pub(crate) peers: Vec<(u64, u16)>,
    /// Data directory; None for memory storage.
    pub(crate) data_dir: Option<PathBuf>,
    /// Hides the output of the node.
    pub(crate) is_quiet: bool,
    /// Enables the admin port, which is derived from the client port.
    pub(crate) has_admin: bool,
    /// Directory with the certificates; None without TLS.
    pub(crate) tls_dir: Option<PathBuf>,
    /// Further settings: environment variables and their values.
    pub(crate) settings: Vec<(String, String)>,
}

/// State of a child process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessState {
    Running,
    /// This program stopped or killed it.
    Stopped,
    /// It exited on its own.
    Exited(ExitStatus),
}

/// A node process, running or not.
#[derive(Debug)]
pub(crate) struct ChildNode {
    options: ChildNodeOptions,
    state: ProcessState,
    child: Child,
    /// Closing it makes the node stop.
    stdin: Option<ChildStdin>,
    lines: Arc<Mutex<VecDeque<String>>>,
}

impl ChildNodeOptions {
    pub(crate) fn address(&self) -> String {
        loopback(self.port)
    }

    /// Opens the file that keeps the output of the node, beside its data directory.
    fn open_log(&self) -> anyhow::Result<Option<Arc<File>>> {
        let Some(directory) = &self.data_dir else { return Ok(None) };
        let path = directory.with_extension("log");
        let opened = path.parent().map_or(Ok(()), files::create_directory);
        let opened = opened.and_then(|()| files::open_to_append(&path));
        let file = opened.with_context(|| format!("open {}", path.display()))?;
        Ok(Some(Arc::new(file)))
    }

    fn arguments(&self) -> Vec<String> {
        let mut arguments = vec!["server".to_owned(), "--exit-with-stdin".to_owned()];
        let mut flag = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
        flag("--node-id", self.node_id.to_string());
        flag("--listen-addr", self.address());
        if !self.has_admin {
            flag("--admin-addr", "off".to_owned());
        }
        for (node_id, port) in &self.peers {
            if *node_id == self.node_id {
                flag("--peer-addr", loopback(*port));
            }
            flag("--peer", format!("{node_id}={}", loopback(*port)));
        }
        match &self.data_dir {
            Some(directory) => flag("--data-dir", directory.display().to_string()),
            None => flag("--storage", "memory".to_owned()),
        }
        if let Some(directory) = &self.tls_dir {
            let node_id = self.node_id;
            let mut file =
                |name: &str, file: String| flag(name, directory.join(file).display().to_string());
            file("--tls-cert", format!("node-{node_id}.pem"));
            file("--tls-key", format!("node-{node_id}.key"));
            file("--tls-ca", "ca.pem".to_owned());
            flag("--tls-client-auth", "required".to_owned());
        }
        arguments
    }
}

impl ChildNode {
    /// Starts the process; [`ChildNode::ready`] waits until it answers.
    pub(crate) fn start(options: ChildNodeOptions) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("find this program")?;
        let mut command = Command::new(program);
        command.args(options.arguments()).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // In a process group of its own, the node gets no Ctrl-C; this program stops it.
        command.process_group(0);
        // The user's server settings do not apply to this node.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("HELIX_") && name != "HELIX_LOG" {
                command.env_remove(name);
            }
        }
        command.envs(options.settings.iter().map(|(variable, value)| (variable, value)));
        let log = options.open_log()?;
        if std::env::var_os("HELIX_LOG").is_none() {
            // A file may have more lines than a terminal.
            let level = if options.is_quiet && log.is_some() { "info" } else { "warn" };
            command.env("HELIX_LOG", format!("{level},openraft=error"));
        }
        let mut child = command.spawn().context("start a node")?;
        let stdin = child.stdin.take();
        let lines = Arc::default();
        let shown = (!options.is_quiet).then(|| format!("node {}", options.node_id));
        if let Some(stdout) = child.stdout.take() {
            collect_output(stdout, &lines, shown.clone(), log.clone());
        }
        if let Some(stderr) = child.stderr.take() {
            collect_output(stderr, &lines, shown, log);
        }
        Ok(Self { options, state: ProcessState::Running, child, stdin, lines })
    }

    pub(crate) fn node_id(&self) -> u64 {
        self.options.node_id
    }

    pub(crate) fn address(&self) -> String {
        self.options.address()
    }

    pub(crate) fn state(&self) -> ProcessState {
        self.state
    }

    pub(crate) fn is_running(&self) -> bool {
        self.state == ProcessState::Running
    }

    /// Returns the process id while the process runs.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.id().filter(|_| self.is_running())
    }

    /// Waits until the node answers. With a number of nodes, also waits until the node knows that
    /// many nodes and a leader of each shard.
    ///
    /// # Errors
    /// Fails if the node exits or the time is up; the error has the last lines of its output.
    pub(crate) async fn ready(&mut self, nodes: Option<usize>) -> anyhow::Result<()> {
        let tls = self.options.tls_dir.as_deref().map(tls::in_directory);
        let tls = tls.map(|tls| tls.options()).transpose()?.flatten();
        let config = Config { attempt_timeout: START_MAX, tls, ..Config::new([self.address()]) };
        let admin = Client::new(config)?.admin();
        let address = self.address();
        let result = tokio::select! {
            ready = poll_ready(&admin, &address, nodes) => ready,
            status = self.child.wait() => {
                let status = status.context("wait for a node")?;
                self.state = ProcessState::Exited(status);
                Err(self.failure(status).into())
            }
        };
        result.map_err(|error| self.with_last_output(error))
    }

    /// Waits until the node exits on its own. Cancel safe.
    pub(crate) async fn exited(&mut self) {
        match self.child.wait().await {
            Ok(status) => self.state = ProcessState::Exited(status),
            // The exit status is unknown.
            Err(_) => self.state = ProcessState::Stopped,
        }
    }

    /// Kills the process (SIGKILL), without a graceful stop.
    pub(crate) async fn kill(&mut self) -> anyhow::Result<()> {
        if self.check_exit().is_none() {
            self.child.kill().await.context("kill a node")?;
            self.state = ProcessState::Stopped;
        }
        Ok(())
    }

    /// Starts the stopped process again, with the same address and data.
    pub(crate) fn restart(&mut self) -> anyhow::Result<()> {
        *self = Self::start(self.options.clone())?;
        Ok(())
    }

    /// Stops the node gracefully, or kills it after a timeout. Does nothing if it is not running.
    pub(crate) async fn stop(&mut self) -> anyhow::Result<()> {
        drop(self.stdin.take());
        if !self.is_running() {
            return Ok(());
        }
        match timeout(STOP_MAX, self.child.wait()).await {
            Ok(status) => {
                status.context("wait for a node")?;
                self.state = ProcessState::Stopped;
                Ok(())
            }
            Err(_) => {
                self.kill().await?;
                let node_id = self.node_id();
                anyhow::bail!("node {node_id} did not stop within {STOP_MAX:?} and was killed")
            }
        }
    }

    /// Returns an error with the last output if the node exited on its own.
    pub(crate) fn exit_error(&mut self) -> Option<anyhow::Error> {
        let status = self.check_exit()?;
        let failure = self.failure(status);
        Some(self.with_last_output(failure.into()))
    }

    /// Updates the state and returns the exit status if the node exited on its own.
    fn check_exit(&mut self) -> Option<ExitStatus> {
        if let (ProcessState::Running, Ok(Some(status))) = (self.state, self.child.try_wait()) {
            self.state = ProcessState::Exited(status);
        }
        match self.state {
            ProcessState::Exited(status) => Some(status),
            ProcessState::Running | ProcessState::Stopped => None,
        }
    }

    fn failure(&self, status: ExitStatus) -> CliError {
        CliError::new(Exit::Error, format!("node {} exited: {status}", self.node_id()))
    }

    fn with_last_output(&self, error: anyhow::Error) -> anyhow::Error {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.is_empty() {
            return error;
        }
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        let why = format!("its last output:\n{}", lines.join("\n"));
        CliError::new(Exit::Error, format!("{error:#}")).why(why).into()
    }
}

/// Polls a node until it answers and, with a number of nodes, knows the whole cluster.
async fn poll_ready(admin: &Admin, address: &str, nodes: Option<usize>) -> anyhow::Result<()> {
    let started = Instant::now();
    loop {
        let response = admin.node_metadata(address).await;
        let is_ready = |metadata| nodes.is_none_or(|nodes| is_complete(metadata, nodes));
        if response.as_ref().is_ok_and(is_ready) {
            return Ok(());
        }
        if started.elapsed() >= START_MAX {
            let what = format!("the node at {address} was not ready within {START_MAX:?}");
            let why = match response {
                Ok(metadata) => missing_state(&metadata, nodes),
                Err(error) => error.to_string(),
            };
            return Err(CliError::new(Exit::Unavailable, what).why(why).into());
        }
        sleep(POLL_INTERVAL).await;
    }
}

fn is_complete(metadata: &Metadata, nodes: usize) -> bool {
    // Waiting does not help a damaged shard; the node serves the others.
    let mut shards = metadata.shards.iter().filter(|shard| !shard.is_damaged);
    metadata.nodes.len() == nodes
        && !metadata.shards.is_empty()
        && shards.all(|shard| shard.leader.as_ref().is_some_and(|l| l.node_id != 0))
}

fn missing_state(metadata: &Metadata, nodes: Option<usize>) -> String {
    let led = metadata.shards.iter().filter(|shard| shard.leader.is_some()).count();
    format!(
        "it knows {} of {} nodes, and leaders of {led} of {} shards",
        metadata.nodes.len(),
        nodes.unwrap_or(1),
        metadata.shards.len()
    )
}

/// Keeps the last lines of a process, and prints all lines after the name in `shown`, if any.
pub(crate) fn collect_output(
    output: impl AsyncRead + Unpin + Send + 'static,
    kept: &Arc<Mutex<VecDeque<String>>>,
    shown: Option<String>,
    log: Option<Arc<File>>,
) {
    let kept = kept.clone();
    let mut lines = BufReader::new(output).lines();
    // The task ends when the process closes the pipe.
    tokio::spawn(async move {
        while let Ok(Some(line)) = lines.next_line().await {
            if let Some(name) = &shown {
                message!("{name}: {line}");
            }
            if let Some(log) = &log {
                // Ignored: a full disk must not stop the node.
                let _ = (&**log).write_all(format!("{line}\n").as_bytes());
            }
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            if kept.len() == LINES_KEPT {
                kept.pop_front();
            }
            kept.push_back(line);
        }
    });
}

pub(crate) fn loopback(port: u16) -> String {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port)).to_string()
}

/// Returns true if a port of this machine is free.
pub(crate) fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}

/// Returns ports of this machine that are free now.
pub(crate) fn free_ports(count: usize) -> anyhow::Result<Vec<u16>> {
    // The process id varies the first port. The factor keeps the ports of concurrent runs apart:
    // their process ids are close to each other, and the port of a stopped node looks free.
    let span = u32::from(PORTS.end - PORTS.start);
    let first = std::process::id().wrapping_mul(61) % span;
    let ports: Vec<u16> = (0..span)
        .filter_map(|step| u16::try_from((first + step) % span).ok())
        .map(|offset| PORTS.start + offset)
        .filter(|port| is_free(*port))
        .take(count)
        .collect();
    anyhow::ensure!(ports.len() == count, "no free ports on 127.0.0.1");
    Ok(ports)
}

#[cfg(test)]
mod tests {
    use helix_client::proto::log::v1::{LeaderHint, Node, ShardRoute};

    use super::*;

    #[test]
    fn free_ports_are_distinct_and_bindable() {
        let mut ports = free_ports(6).unwrap();
        let listeners: Vec<_> =
            ports.iter().map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port))).collect();
        assert!(listeners.iter().all(Result::is_ok));
        assert!(ports.iter().all(|port| PORTS.contains(port)));
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 6);
    }

    fn options(peers: Vec<(u64, u16)>) -> ChildNodeOptions {
        ChildNodeOptions {
            node_id: 2,
            port: 9093,
            peers,
            data_dir: None,
            is_quiet: true,
            has_admin: false,
            tls_dir: None,
            settings: Vec::new(),
        }
    }

    #[test]
    fn arguments_list_all_peers() {
        let arguments = options(vec![(1, 9192), (2, 9193)]).arguments().join(" ");
        let expected = "server --exit-with-stdin --node-id 2 --listen-addr 127.0.0.1:9093 \
                        --admin-addr off --peer 1=127.0.0.1:9192 --peer-addr 127.0.0.1:9193 \
                        --peer 2=127.0.0.1:9193 --storage memory";
        assert_eq!(arguments, expected);
        assert!(!options(Vec::new()).arguments().join(" ").contains("peer"));
    }

    #[test]
    fn cluster_is_complete_when_every_shard_has_a_leader() {
        let shard = |leader: Option<u64>| ShardRoute {
            leader: leader.map(|node_id| LeaderHint { node_id, ..LeaderHint::default() }),
            ..ShardRoute::default()
        };
        let cluster = |nodes: usize, shards: Vec<ShardRoute>| Metadata {
            nodes: vec![Node::default(); nodes],
            shards,
            ..Metadata::default()
        };
        assert!(is_complete(&cluster(3, vec![shard(Some(1)), shard(Some(2))]), 3));
        assert!(!is_complete(&cluster(2, vec![shard(Some(1))]), 3));
        assert!(!is_complete(&cluster(3, vec![shard(Some(1)), shard(Some(0))]), 3));
        assert!(!is_complete(&cluster(3, vec![shard(None)]), 3));
        assert!(!is_complete(&cluster(3, Vec::new()), 3));
    }
}
