//! Control socket of a dev cluster: other `helix dev` commands send requests to it.
//! It is a Unix socket for each port, in a directory that only the user can access.
//! A request and its response are one line of JSON each.

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
use tokio::time::{sleep, timeout};

use crate::exit::{CliError, Exit};

/// Maximum size of a request in bytes.
const REQUEST_BYTES_MAX: u64 = 1024;

/// Wait after a connection that could not be accepted.
const ACCEPT_RETRY_WAIT: Duration = Duration::from_millis(100);

/// Timeout for reading a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Timeout of a response. It exceeds the sum of the stop and start timeouts of a restart.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

/// A request to a running dev cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ControlRequest {
    Status,
    Kill(u64),
    Restart(u64),
    Stop,
}

/// The node processes after a request, or the reason why it failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ControlResponse {
    Nodes(Vec<ProcessStatus>),
    Refused { is_not_found: bool, what: String, why: String },
}

/// Status of a node process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct ProcessStatus {
    pub(super) node_id: u64,
    pub(super) addr: String,
    pub(super) state: String,
    /// None if it is not running.
    pub(super) pid: Option<u32>,
}

/// The socket of the cluster, with the incoming requests.
#[derive(Debug)]
pub(super) struct ControlSocket {
    path: PathBuf,
    requests: mpsc::Receiver<PendingRequest>,
}

/// A request that waits for its response.
#[derive(Debug)]
pub(super) struct PendingRequest {
    pub(super) request: ControlRequest,
    stream: UnixStream,
}

impl ControlSocket {
    /// Opens the socket of the dev cluster with this first port.
    ///
    /// # Errors
    /// Fails if another dev cluster listens, or if the socket cannot be created.
    pub(super) fn listen(port: u16) -> anyhow::Result<Self> {
        Self::listen_in(&socket_directory()?, port)
    }

    fn listen_in(directory: &Path, port: u16) -> anyhow::Result<Self> {
        let path = socket(directory, port);
        if std::os::unix::net::UnixStream::connect(&path).is_ok() {
            let what = format!("a dev cluster is already running on port {port}");
            let failure = CliError::new(Exit::Precondition, what);
            return Err(failure.hint(with_port("helix dev status", port)).into());
        }
        // The socket is left over from a dev cluster that has ended.
        remove(&path);
        let listener = UnixListener::bind(&path);
        let listener = listener.with_context(|| format!("listen on {}", path.display()))?;
        let (sender, requests) = mpsc::channel(8);
        tokio::spawn(async move {
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => {
                        tokio::spawn(read_request(stream, sender.clone()));
                    }
                    // No free file descriptor, for example: a later request may find one.
                    Err(_) => sleep(ACCEPT_RETRY_WAIT).await,
                }
            }
        });
        Ok(Self { path, requests })
    }

    /// Returns the next request. Cancel safe.
    pub(super) async fn next(&mut self) -> PendingRequest {
        match self.requests.recv().await {
            Some(request) => request,
            // The task of the listener has ended, with its runtime.
            None => std::future::pending().await,
        }
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

impl PendingRequest {
    /// Sends the response. Ignores a closed connection.
    pub(super) async fn respond(mut self, response: &ControlResponse) {
        if let Ok(mut line) = serde_json::to_vec(response) {
            line.push(b'\n');
            let _ = self.stream.write_all(&line).await;
            let _ = self.stream.shutdown().await;
        }
    }
}

/// Reads a request. Closes the connection on a timeout or an invalid request.
async fn read_request(mut stream: UnixStream, requests: mpsc::Sender<PendingRequest>) {
    let mut line = String::new();
    let mut reader = BufReader::new((&mut stream).take(REQUEST_BYTES_MAX));
    let is_read = matches!(timeout(REQUEST_TIMEOUT, reader.read_line(&mut line)).await, Ok(Ok(_)));
    if is_read && let Ok(request) = serde_json::from_str(&line) {
        // Fails only while the cluster stops.
        let _ = requests.send(PendingRequest { request, stream }).await;
    }
}

/// Sends a request to the dev cluster on a port and returns its processes.
///
/// # Errors
/// Fails if no dev cluster runs there, or if it rejects the request.
pub(super) async fn send(port: u16, request: ControlRequest) -> anyhow::Result<Vec<ProcessStatus>> {
    send_in(&socket_directory()?, port, request).await
}

async fn send_in(
    directory: &Path,
    port: u16,
    request: ControlRequest,
) -> anyhow::Result<Vec<ProcessStatus>> {
    let Ok(mut stream) = UnixStream::connect(socket(directory, port)).await else {
        let what = format!("no dev cluster is running on port {port}");
        let failure = CliError::new(Exit::NotFound, what);
        return Err(failure
            .hint("helix dev   starts one\n--port PORT   selects another one")
            .into());
    };
    let mut line = serde_json::to_vec(&request)?;
    line.push(b'\n');
    let exchange = async {
        stream.write_all(&line).await?;
        let mut response = String::new();
        stream.read_to_string(&mut response).await?;
        Ok::<_, io::Error>(response)
    };
    let response = timeout(RESPONSE_TIMEOUT, exchange)
        .await
        .context("no response from the dev cluster in time")?;
    let response = response.context("send the request to the dev cluster")?;
    ensure!(!response.is_empty(), "the dev cluster closed the connection without a response");
    match serde_json::from_str(&response).context("parse the response of the dev cluster")? {
        ControlResponse::Nodes(nodes) => Ok(nodes),
        ControlResponse::Refused { is_not_found, what, why } => {
            let exit = if is_not_found { Exit::NotFound } else { Exit::Error };
            Err(CliError::new(exit, what).why(why).into())
        }
    }
}

/// Returns the directory of the sockets and creates it if necessary.
///
/// # Errors
/// Fails if other users can access the directory.
fn socket_directory() -> anyhow::Result<PathBuf> {
    let user = rustix::process::getuid().as_raw();
    let directory = std::env::temp_dir().join(format!("helix-dev-{user}"));
    match std::fs::DirBuilder::new().mode(0o700).create(&directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(error).with_context(|| format!("create {}", directory.display()));
        }
        _ => {}
    }
    // A user with access to the directory can stop the nodes.
    let found = std::fs::symlink_metadata(&directory);
    let found = found.with_context(|| format!("check {}", directory.display()))?;
    let is_ours = found.is_dir() && found.uid() == user && found.mode() & 0o077 == 0;
    ensure!(is_ours, "{} is accessible to other users; remove it", directory.display());
    Ok(directory)
}

/// Returns a command for the dev cluster on a port; the default port is omitted.
pub(super) fn with_port(command: &str, port: u16) -> String {
    match port {
        9092 => command.to_owned(),
        port => format!("{command} --port {port}"),
    }
}

fn socket(directory: &Path, port: u16) -> PathBuf {
    directory.join(format!("{port}.sock"))
}

#[expect(clippy::disallowed_methods, reason = "a socket file does not belong to a log")]
fn remove(path: &Path) {
    // The file may not exist.
    let _ = std::fs::remove_file(path);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process() -> ProcessStatus {
        ProcessStatus {
            node_id: 1,
            addr: "127.0.0.1:9092".to_owned(),
            state: "running".to_owned(),
            pid: Some(7),
        }
    }

    #[tokio::test]
    async fn request_gets_its_response() {
        let directory = tempfile::tempdir().unwrap();
        let mut control = ControlSocket::listen_in(directory.path(), 9092).unwrap();
        let sent = send_in(directory.path(), 9092, ControlRequest::Kill(2));
        let served = async {
            let pending = control.next().await;
            assert_eq!(pending.request, ControlRequest::Kill(2));
            pending.respond(&ControlResponse::Nodes(vec![process()])).await;
        };
        let (nodes, ()) = tokio::join!(sent, served);
        assert_eq!(nodes.unwrap(), [process()]);
    }

    #[tokio::test]
    async fn rejections_keep_their_exit_code() {
        let directory = tempfile::tempdir().unwrap();
        let mut control = ControlSocket::listen_in(directory.path(), 9092).unwrap();
        let served = async {
            let what = "there is no node 9".to_owned();
            let rejected =
                ControlResponse::Refused { is_not_found: true, what, why: String::new() };
            control.next().await.respond(&rejected).await;
        };
        let sent = send_in(directory.path(), 9092, ControlRequest::Restart(9));
        let (rejected, ()) = tokio::join!(sent, served);
        assert_eq!(crate::exit::of(&rejected.unwrap_err()), Exit::NotFound);
    }

    #[tokio::test]
    async fn invalid_request_closes_the_connection() {
        let directory = tempfile::tempdir().unwrap();
        let _control = ControlSocket::listen_in(directory.path(), 9092).unwrap();
        let mut stream = UnixStream::connect(socket(directory.path(), 9092)).await.unwrap();
        stream.write_all(b"{\"kill\": \"everything\"}\n").await.unwrap();
        let mut response = Vec::new();
        assert_eq!(stream.read_to_end(&mut response).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn replaces_stale_socket_but_not_a_live_one() {
        let directory = tempfile::tempdir().unwrap();
        drop(std::os::unix::net::UnixListener::bind(socket(directory.path(), 9092)).unwrap());
        let error = send_in(directory.path(), 9092, ControlRequest::Status).await.unwrap_err();
        assert_eq!(crate::exit::of(&error), Exit::NotFound);
        let control = ControlSocket::listen_in(directory.path(), 9092).unwrap();
        assert!(ControlSocket::listen_in(directory.path(), 9092).is_err());
        assert!(ControlSocket::listen_in(directory.path(), 9300).is_ok());
        drop(control);
        assert!(!socket(directory.path(), 9092).exists());
    }
}
