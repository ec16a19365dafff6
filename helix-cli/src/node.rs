//! A node as a child process of this one: `helix server` in the same binary.
//! It never outlives us: it stops when its standard input closes, however we end.

use std::collections::VecDeque;
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

use crate::exit::{Exit, Failure};

/// How long a node may take until it answers.
const START_MAX: Duration = Duration::from_secs(30);

/// How long a node may take to stop by itself; its own bound is below this.
const STOP_MAX: Duration = Duration::from_secs(15);

/// How often a node that starts is asked.
const ASK_INTERVAL: Duration = Duration::from_millis(10);

/// Lines of a node's output that are kept, to be shown if it fails.
const LINES_KEPT: usize = 20;

/// Ports to choose from: below those that systems give to outgoing connections, so that a client
/// that dials a node which is down cannot take its port.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// What to start.
#[derive(Debug, Clone)]
pub(crate) struct NodeOptions {
    pub(crate) node_id: u64,
    pub(crate) port: u16,
    /// Node ids and peer ports of the cluster, this node's included. Empty: a cluster of its own.
    pub(crate) peers: Vec<(u64, u16)>,
    /// None: memory storage.
    pub(crate) data_dir: Option<PathBuf>,
    /// Whether the node's own output is kept to itself.
    pub(crate) is_quiet: bool,
    /// Whether it has an admin port, which follows from its clients' port.
    pub(crate) has_admin: bool,
}

/// What has become of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Running,
    /// We have ended it.
    Stopped,
    /// It has ended by itself.
    Ended(ExitStatus),
}

/// A node, running or not.
#[derive(Debug)]
pub(crate) struct Node {
    options: NodeOptions,
    state: State,
    child: Child,
    /// Open as long as the node is to run.
    stdin: Option<ChildStdin>,
    lines: Arc<Mutex<VecDeque<String>>>,
}

impl NodeOptions {
    pub(crate) fn address(&self) -> String {
        loopback(self.port)
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
            Some(folder) => flag("--data-dir", folder.display().to_string()),
            None => flag("--storage", "memory".to_owned()),
        }
        arguments
    }
}

impl Node {
    /// Starts the process. It may not answer yet: see [`Node::ready`].
    pub(crate) fn start(options: NodeOptions) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("find this program")?;
        let mut command = Command::new(program);
        command.args(options.arguments()).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C in a terminal is for us alone: we stop the nodes, in order.
        command.process_group(0);
        // What is set for the user's own servers is not meant for this one.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("HELIX_") && name != "HELIX_LOG" {
                command.env_remove(name);
            }
        }
        if std::env::var_os("HELIX_LOG").is_none() {
            command.env("HELIX_LOG", "warn,openraft=error");
        }
        let mut child = command.spawn().context("start a node")?;
        let stdin = child.stdin.take();
        let lines = Arc::default();
        let shown = (!options.is_quiet).then_some(options.node_id);
        if let Some(stdout) = child.stdout.take() {
            keep(stdout, &lines, shown);
        }
        if let Some(stderr) = child.stderr.take() {
            keep(stderr, &lines, shown);
        }
        Ok(Self { options, state: State::Running, child, stdin, lines })
    }

    pub(crate) fn node_id(&self) -> u64 {
        self.options.node_id
    }

    pub(crate) fn address(&self) -> String {
        self.options.address()
    }

    pub(crate) fn state(&self) -> State {
        self.state
    }

    pub(crate) fn is_running(&self) -> bool {
        self.state == State::Running
    }

    /// None: it does not run.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.id().filter(|_| self.is_running())
    }

    /// Waits until the node answers; where a number of nodes is given, until it knows so many and
    /// a leader in each shard.
    ///
    /// # Errors
    /// It ended instead, or took too long; its last words are in the error.
    pub(crate) async fn ready(&mut self, nodes: Option<usize>) -> anyhow::Result<()> {
        let config = Config { attempt_timeout: START_MAX, ..Config::new([self.address()]) };
        let admin = Client::new(config)?.admin();
        let address = self.address();
        let result = tokio::select! {
            answers = answers(&admin, &address, nodes) => answers,
            status = self.child.wait() => {
                let status = status.context("wait for a node")?;
                self.state = State::Ended(status);
                Err(self.failure(status).into())
            }
        };
        result.map_err(|error| self.with_last_words(error))
    }

    /// Waits until the node ends by itself, which it should not. Dropping the future loses nothing.
    pub(crate) async fn ended(&mut self) {
        match self.child.wait().await {
            Ok(status) => self.state = State::Ended(status),
            // Nothing more will be known of it.
            Err(_) => self.state = State::Stopped,
        }
    }

    /// Ends the process as a crash would (SIGKILL): it gets to finish nothing.
    pub(crate) async fn kill(&mut self) -> anyhow::Result<()> {
        if self.note_end().is_none() {
            self.child.kill().await.context("kill a node")?;
            self.state = State::Stopped;
        }
        Ok(())
    }

    /// Starts the process again, on the same address and data. It must not run.
    pub(crate) fn restart(&mut self) -> anyhow::Result<()> {
        *self = Self::start(self.options.clone())?;
        Ok(())
    }

    /// Lets the node stop by itself, in bounded time. One that does not run has done so.
    pub(crate) async fn stop(&mut self) -> anyhow::Result<()> {
        drop(self.stdin.take());
        if !self.is_running() {
            return Ok(());
        }
        match timeout(STOP_MAX, self.child.wait()).await {
            Ok(status) => {
                status.context("wait for a node")?;
                self.state = State::Stopped;
                Ok(())
            }
            Err(_) => {
                self.kill().await?;
                let node_id = self.node_id();
                anyhow::bail!("node {node_id} did not stop within {STOP_MAX:?} and was killed")
            }
        }
    }

    /// Why it is not there, with its last words. None: it runs, or we have ended it.
    pub(crate) fn explanation(&mut self) -> Option<anyhow::Error> {
        let status = self.note_end()?;
        let failure = self.failure(status);
        Some(self.with_last_words(failure.into()))
    }

    /// Looks whether it has ended by itself.
    fn note_end(&mut self) -> Option<ExitStatus> {
        if let (State::Running, Ok(Some(status))) = (self.state, self.child.try_wait()) {
            self.state = State::Ended(status);
        }
        match self.state {
            State::Ended(status) => Some(status),
            State::Running | State::Stopped => None,
        }
    }

    fn failure(&self, status: ExitStatus) -> Failure {
        Failure::new(Exit::Error, format!("node {} ended: {status}", self.node_id()))
    }

    fn with_last_words(&self, error: anyhow::Error) -> anyhow::Error {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.is_empty() {
            return error;
        }
        let words: Vec<&str> = lines.iter().map(String::as_str).collect();
        let why = format!("its last words were\n{}", words.join("\n"));
        Failure::new(Exit::Error, format!("{error:#}")).why(why).into()
    }
}

/// Asks one node until it answers, and until it knows the whole cluster where that is wanted.
async fn answers(admin: &Admin, address: &str, nodes: Option<usize>) -> anyhow::Result<()> {
    let started = Instant::now();
    loop {
        let answer = admin.node_metadata(address).await;
        let is_enough = |metadata| nodes.is_none_or(|nodes| is_complete(metadata, nodes));
        if answer.as_ref().is_ok_and(is_enough) {
            return Ok(());
        }
        if started.elapsed() >= START_MAX {
            let what = format!("the node at {address} was not ready within {START_MAX:?}");
            let why = match answer {
                Ok(metadata) => missing(&metadata, nodes),
                Err(error) => error.to_string(),
            };
            return Err(Failure::new(Exit::Unavailable, what).why(why).into());
        }
        sleep(ASK_INTERVAL).await;
    }
}

fn is_complete(metadata: &Metadata, nodes: usize) -> bool {
    metadata.nodes.len() == nodes
        && !metadata.shards.is_empty()
        && metadata.shards.iter().all(|shard| shard.leader.as_ref().is_some_and(|l| l.node_id != 0))
}

fn missing(metadata: &Metadata, nodes: Option<usize>) -> String {
    let led = metadata.shards.iter().filter(|shard| shard.leader.is_some()).count();
    format!(
        "it knows {} of {} nodes, and leaders of {led} of {} shards",
        metadata.nodes.len(),
        nodes.unwrap_or(1),
        metadata.shards.len()
    )
}

/// Keeps the last lines of a node's output, and shows them all under the node's number.
fn keep(
    output: impl AsyncRead + Unpin + Send + 'static,
    kept: &Arc<Mutex<VecDeque<String>>>,
    shown: Option<u64>,
) {
    let kept = kept.clone();
    let mut lines = BufReader::new(output).lines();
    // Ends with the process, whose end of the pipe it reads.
    tokio::spawn(async move {
        while let Ok(Some(line)) = lines.next_line().await {
            if let Some(node_id) = shown {
                eprintln!("node {node_id}: {line}");
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

/// Whether nobody listens on a port of this machine.
pub(crate) fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}

/// Ports that nobody listens on now.
pub(crate) fn free_ports(count: usize) -> anyhow::Result<Vec<u16>> {
    // Different runs begin at different places, so that they do not meet.
    let span = u32::from(PORTS.end - PORTS.start);
    let first = std::process::id() % span;
    let ports: Vec<u16> = (0..span)
        .filter_map(|step| u16::try_from((first + step) % span).ok())
        .map(|place| PORTS.start + place)
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
    fn free_ports_differ_and_can_be_taken() {
        let mut ports = free_ports(6).unwrap();
        let listeners: Vec<_> =
            ports.iter().map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port))).collect();
        assert!(listeners.iter().all(Result::is_ok));
        assert!(ports.iter().all(|port| PORTS.contains(port)));
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 6);
    }

    fn options(peers: Vec<(u64, u16)>) -> NodeOptions {
        NodeOptions {
            node_id: 2,
            port: 9093,
            peers,
            data_dir: None,
            is_quiet: true,
            has_admin: false,
        }
    }

    #[test]
    fn a_node_is_told_of_its_peers() {
        let arguments = options(vec![(1, 9192), (2, 9193)]).arguments().join(" ");
        let expected = "server --exit-with-stdin --node-id 2 --listen-addr 127.0.0.1:9093 \
                        --admin-addr off --peer 1=127.0.0.1:9192 --peer-addr 127.0.0.1:9193 \
                        --peer 2=127.0.0.1:9193 --storage memory";
        assert_eq!(arguments, expected);
        assert!(!options(Vec::new()).arguments().join(" ").contains("peer"));
    }

    #[test]
    fn a_cluster_is_complete_when_every_shard_is_led() {
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
