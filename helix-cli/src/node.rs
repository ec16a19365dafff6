//! A node as a child process of this one: `helix server` in the same binary.
//! It never outlives us: it stops when its standard input closes, however we end.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use helix_client::{Client, Config};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::timeout;

use crate::exit::{Exit, Failure};

/// How long a node may take until it answers.
const START_MAX: Duration = Duration::from_secs(30);

/// How long a node may take to stop by itself; its own bound is below this.
const STOP_MAX: Duration = Duration::from_secs(15);

/// Lines of a quiet node's output that are kept, to be shown if it fails.
const LINES_KEPT: usize = 20;

/// Ports to choose from: below those that systems give to outgoing connections, so that a client
/// that dials a node which is down cannot take its port.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// What to start.
#[derive(Debug, Clone)]
pub(crate) struct NodeOptions {
    pub(crate) port: u16,
    /// None: memory storage.
    pub(crate) data_dir: Option<PathBuf>,
    /// Whether the node's own output is shown.
    pub(crate) is_quiet: bool,
}

/// A running node.
#[derive(Debug)]
pub(crate) struct Node {
    options: NodeOptions,
    child: Child,
    /// Open as long as the node is to run.
    stdin: Option<ChildStdin>,
    lines: Arc<Mutex<VecDeque<String>>>,
}

impl NodeOptions {
    pub(crate) fn address(&self) -> String {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.port)).to_string()
    }

    fn arguments(&self) -> Vec<String> {
        let mut arguments = vec!["server".to_owned(), "--exit-with-stdin".to_owned()];
        arguments.extend(["--listen-addr".to_owned(), self.address()]);
        match &self.data_dir {
            Some(folder) => {
                arguments.extend(["--data-dir".to_owned(), folder.display().to_string()]);
            }
            None => arguments.extend(["--storage".to_owned(), "memory".to_owned()]),
        }
        arguments
    }
}

impl Node {
    /// Starts the process. It may not answer yet: see [`Node::ready`].
    pub(crate) fn start(options: NodeOptions) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("find this program")?;
        let mut command = Command::new(program);
        command.args(options.arguments()).stdin(Stdio::piped()).kill_on_drop(true);
        // What is set for the user's own servers is not meant for this one.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("HELIX_") && name != "HELIX_LOG" {
                command.env_remove(name);
            }
        }
        if std::env::var_os("HELIX_LOG").is_none() {
            command.env("HELIX_LOG", "warn,openraft=error");
        }
        if options.is_quiet {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        } else {
            // Standard output is ours.
            command.stdout(std::io::stderr()).stderr(Stdio::inherit());
        }
        let mut child = command.spawn().context("start a node")?;
        let stdin = child.stdin.take();
        let lines = Arc::default();
        if let Some(stdout) = child.stdout.take() {
            keep(stdout, &lines);
        }
        if let Some(stderr) = child.stderr.take() {
            keep(stderr, &lines);
        }
        Ok(Self { options, child, stdin, lines })
    }

    pub(crate) fn address(&self) -> String {
        self.options.address()
    }

    /// Waits until the node answers.
    ///
    /// # Errors
    /// It ended instead, or took too long; its last words are in the error.
    pub(crate) async fn ready(&mut self) -> anyhow::Result<()> {
        let config = Config {
            request_timeout: START_MAX,
            backoff_max: Duration::from_millis(20),
            ..Config::new([self.address()])
        };
        let result = tokio::select! {
            client = Client::connect(config) => client.map(drop).map_err(anyhow::Error::from),
            status = self.child.wait() => {
                let status = status.context("wait for the node")?;
                Err(Failure::new(Exit::Error, format!("the node ended: {status}")).into())
            }
        };
        result.map_err(|error| self.with_last_words(error))
    }

    /// Waits until the node ends by itself, which it should not.
    pub(crate) async fn ended(&mut self) -> anyhow::Error {
        match self.child.wait().await {
            Ok(status) => {
                let failure = Failure::new(Exit::Error, format!("the node ended: {status}"));
                self.with_last_words(failure.into())
            }
            Err(error) => error.into(),
        }
    }

    /// Ends the process as a crash would (SIGKILL): it gets to finish nothing.
    pub(crate) async fn kill(&mut self) -> anyhow::Result<()> {
        self.child.kill().await.context("kill the node")
    }

    /// Starts the process again, on the same address and data.
    pub(crate) fn restart(&mut self) -> anyhow::Result<()> {
        *self = Self::start(self.options.clone())?;
        Ok(())
    }

    /// Lets the node stop by itself, in bounded time.
    pub(crate) async fn stop(&mut self) -> anyhow::Result<ExitStatus> {
        drop(self.stdin.take());
        match timeout(STOP_MAX, self.child.wait()).await {
            Ok(status) => status.context("wait for the node"),
            Err(_) => {
                self.kill().await?;
                Err(anyhow::anyhow!("the node did not stop within {STOP_MAX:?} and was killed"))
            }
        }
    }

    /// The same error, or, if the node has ended by itself, that one with its last words.
    pub(crate) fn explain(&mut self, error: anyhow::Error) -> anyhow::Error {
        match self.child.try_wait() {
            Ok(Some(status)) => {
                let what = format!("the node ended: {status}; {error:#}");
                self.with_last_words(Failure::new(Exit::Error, what).into())
            }
            Ok(None) | Err(_) => error,
        }
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

/// Keeps the last lines of a node's output.
fn keep(output: impl AsyncRead + Unpin + Send + 'static, kept: &Arc<Mutex<VecDeque<String>>>) {
    let kept = kept.clone();
    let mut lines = BufReader::new(output).lines();
    // Ends with the process, whose end of the pipe it reads.
    tokio::spawn(async move {
        while let Ok(Some(line)) = lines.next_line().await {
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            if kept.len() == LINES_KEPT {
                kept.pop_front();
            }
            kept.push_back(line);
        }
    });
}

/// A port that nobody listens on now.
pub(crate) fn free_port() -> anyhow::Result<u16> {
    // Different runs begin at different places, so that they do not meet.
    let span = u32::from(PORTS.end - PORTS.start);
    let first = std::process::id() % span;
    (0..span)
        .filter_map(|step| u16::try_from((first + step) % span).ok())
        .map(|place| PORTS.start + place)
        .find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok())
        .context("no free port on 127.0.0.1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_free_port_can_be_taken() {
        let port = free_port().unwrap();
        assert!(PORTS.contains(&port));
        TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    }
}
