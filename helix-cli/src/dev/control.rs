//! How the other `helix dev` commands reach the one that runs the cluster: a socket file for each
//! port, in a folder that only this user can enter. One line of JSON each way.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::exit::{Exit, Failure};

/// Longest request, in bytes.
const REQUEST_BYTES_MAX: u64 = 1024;

/// How long a caller may take to say what it wants.
const REQUEST_MAX: Duration = Duration::from_secs(5);

/// How long an answer may take. A restart is a stop and a start, each with a bound of its own that
/// together lie below this.
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// What is asked of a running dev cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Request {
    Status,
    Kill(u64),
    Restart(u64),
    Stop,
}

/// The nodes' processes after what was asked, or why it was not done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    Nodes(Vec<Process>),
    Refused { is_not_found: bool, what: String, why: String },
}

/// One node's process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Process {
    pub(super) node_id: u64,
    pub(super) addr: String,
    pub(super) state: String,
    /// None: it does not run.
    pub(super) pid: Option<u32>,
}

/// The side of the cluster.
#[derive(Debug)]
pub(super) struct Control {
    path: PathBuf,
    calls: mpsc::Receiver<Call>,
}

/// Somebody who waits for an answer.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) request: Request,
    stream: UnixStream,
}

impl Control {
    /// # Errors
    /// Another dev cluster listens already, or the socket cannot be made.
    pub(super) fn listen(port: u16) -> anyhow::Result<Self> {
        Self::listen_in(&folder()?, port)
    }

    fn listen_in(folder: &Path, port: u16) -> anyhow::Result<Self> {
        let path = socket(folder, port);
        if std::os::unix::net::UnixStream::connect(&path).is_ok() {
            let what = format!("a dev cluster runs at port {port} already");
            let failure = Failure::new(Exit::Precondition, what);
            return Err(failure.hint(super::with_port("helix dev status", port)).into());
        }
        // Nobody answers: whoever made it is gone.
        remove(&path);
        let listener = UnixListener::bind(&path);
        let listener = listener.with_context(|| format!("listen at {}", path.display()))?;
        let (sender, calls) = mpsc::channel(8);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(take(stream, sender.clone()));
            }
        });
        Ok(Self { path, calls })
    }

    /// The next one who wants something. Dropping the future loses nothing.
    pub(super) async fn next(&mut self) -> Call {
        match self.calls.recv().await {
            Some(call) => call,
            // The listener has failed: nobody will come.
            None => std::future::pending().await,
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

impl Call {
    /// Answers. A caller that is gone is no failure.
    pub(super) async fn answer(mut self, answer: &Answer) {
        if let Ok(mut line) = serde_json::to_vec(answer) {
            line.push(b'\n');
            let _ = self.stream.write_all(&line).await;
            let _ = self.stream.shutdown().await;
        }
    }
}

/// Reads what a caller wants. One that says nothing, or nonsense, is hung up on.
async fn take(mut stream: UnixStream, calls: mpsc::Sender<Call>) {
    let mut line = String::new();
    let mut reader = BufReader::new((&mut stream).take(REQUEST_BYTES_MAX));
    let is_read = matches!(timeout(REQUEST_MAX, reader.read_line(&mut line)).await, Ok(Ok(_)));
    if is_read && let Ok(request) = serde_json::from_str(&line) {
        // Refused only if the cluster is being stopped.
        let _ = calls.send(Call { request, stream }).await;
    }
}

/// Asks the dev cluster at this port. Gives its processes.
///
/// # Errors
/// There is none, or it refuses.
pub(super) async fn ask(port: u16, request: Request) -> anyhow::Result<Vec<Process>> {
    ask_in(&folder()?, port, request).await
}

async fn ask_in(folder: &Path, port: u16, request: Request) -> anyhow::Result<Vec<Process>> {
    let Ok(mut stream) = UnixStream::connect(socket(folder, port)).await else {
        let what = format!("no dev cluster runs at port {port}");
        let failure = Failure::new(Exit::NotFound, what);
        return Err(failure.hint("helix dev   starts one\n--port for that of another").into());
    };
    let mut line = serde_json::to_vec(&request)?;
    line.push(b'\n');
    let exchange = async {
        stream.write_all(&line).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok::<_, io::Error>(answer)
    };
    let answer = timeout(ANSWER_MAX, exchange).await.context("the dev cluster does not answer")?;
    let answer = answer.context("ask the dev cluster")?;
    ensure!(!answer.is_empty(), "the dev cluster ended without an answer");
    match serde_json::from_str(&answer).context("read the dev cluster's answer")? {
        Answer::Nodes(nodes) => Ok(nodes),
        Answer::Refused { is_not_found, what, why } => {
            let exit = if is_not_found { Exit::NotFound } else { Exit::Error };
            Err(Failure::new(exit, what).why(why).into())
        }
    }
}

/// Folder of the sockets, made if it is not there.
fn folder() -> anyhow::Result<PathBuf> {
    let user = rustix::process::getuid().as_raw();
    let folder = std::env::temp_dir().join(format!("helix-dev-{user}"));
    match std::fs::DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(error).with_context(|| format!("make {}", folder.display()));
        }
        _ => {}
    }
    // Whoever can enter it can stop our nodes.
    let found = std::fs::symlink_metadata(&folder);
    let found = found.with_context(|| format!("look at {}", folder.display()))?;
    let is_ours = found.is_dir() && found.uid() == user && found.mode() & 0o077 == 0;
    ensure!(is_ours, "{} is open to other users; remove it", folder.display());
    Ok(folder)
}

fn socket(folder: &Path, port: u16) -> PathBuf {
    folder.join(format!("{port}.sock"))
}

#[expect(clippy::disallowed_methods, reason = "a socket's file is no part of any log")]
fn remove(path: &Path) {
    // It may not be there.
    let _ = std::fs::remove_file(path);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process() -> Process {
        Process {
            node_id: 1,
            addr: "127.0.0.1:9092".to_owned(),
            state: "running".to_owned(),
            pid: Some(7),
        }
    }

    #[tokio::test]
    async fn what_is_asked_arrives_and_is_answered() {
        let folder = tempfile::tempdir().unwrap();
        let mut control = Control::listen_in(folder.path(), 9092).unwrap();
        let asked = ask_in(folder.path(), 9092, Request::Kill(2));
        let answered = async {
            let call = control.next().await;
            assert_eq!(call.request, Request::Kill(2));
            call.answer(&Answer::Nodes(vec![process()])).await;
        };
        let (nodes, ()) = tokio::join!(asked, answered);
        assert_eq!(nodes.unwrap(), [process()]);
    }

    #[tokio::test]
    async fn refusals_keep_their_code() {
        let folder = tempfile::tempdir().unwrap();
        let mut control = Control::listen_in(folder.path(), 9092).unwrap();
        let answered = async {
            let what = "there is no node 9".to_owned();
            let refused = Answer::Refused { is_not_found: true, what, why: String::new() };
            control.next().await.answer(&refused).await;
        };
        let asked = ask_in(folder.path(), 9092, Request::Restart(9));
        let (refused, ()) = tokio::join!(asked, answered);
        assert_eq!(crate::exit::of(&refused.unwrap_err()), Exit::NotFound);
    }

    #[tokio::test]
    async fn nonsense_is_hung_up_on() {
        let folder = tempfile::tempdir().unwrap();
        let _control = Control::listen_in(folder.path(), 9092).unwrap();
        let mut stream = UnixStream::connect(socket(folder.path(), 9092)).await.unwrap();
        stream.write_all(b"{\"kill\": \"everything\"}\n").await.unwrap();
        let mut answer = Vec::new();
        assert_eq!(stream.read_to_end(&mut answer).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn a_socket_that_was_left_behind_is_replaced_and_a_live_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        drop(std::os::unix::net::UnixListener::bind(socket(folder.path(), 9092)).unwrap());
        let error = ask_in(folder.path(), 9092, Request::Status).await.unwrap_err();
        assert_eq!(crate::exit::of(&error), Exit::NotFound);
        let control = Control::listen_in(folder.path(), 9092).unwrap();
        assert!(Control::listen_in(folder.path(), 9092).is_err());
        assert!(Control::listen_in(folder.path(), 9300).is_ok());
        drop(control);
        assert!(!socket(folder.path(), 9092).exists());
    }
}
