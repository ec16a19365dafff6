//! The Unix domain socket of the clients' port, and its file from the start to the stop.

// Checks, replaces and removes the socket's file.
#![allow(clippy::disallowed_methods)]

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixSocket, UnixStream};

/// Connections that wait to be accepted, as of the TCP port.
const BACKLOG: u32 = 1024;

/// Reason why a server does not listen on a path.
#[derive(Debug, thiserror::Error)]
pub enum UnixSocketError {
    #[error("a process listens on it; stop that process, or choose another path")]
    InUse,
    #[error("a file that is not a socket has this path; remove it, or choose another path")]
    NotASocket,
    #[error(
        "a socket has this path, and the test whether a process listens on it failed: {0}; \
         remove it, or choose another path"
    )]
    Unknown(io::Error),
    #[error("{0}; name a path in a directory in which the server may create files")]
    Io(#[from] io::Error),
}

/// Listens on a Unix domain socket. Dropping it removes the socket's file.
#[derive(Debug)]
pub(crate) struct UnixSocketListener {
    /// Dropped before the listener: a server that starts meanwhile never replaces the file, so this
    /// one cannot remove the other's file, which may have the same inode.
    file: SocketFile,
    listener: UnixListener,
}

impl UnixSocketListener {
    /// Listens on `path`, whose file gets the permissions `mode`.
    ///
    /// Replaces the socket of a process that has ended. Two servers that start at the same moment
    /// on one path may both succeed; then clients reach the later one.
    ///
    /// # Errors
    /// A process listens on the path, another kind of file has it, or the file cannot be created.
    pub(crate) async fn bind(path: &Path, mode: u32) -> Result<Self, UnixSocketError> {
        remove_stale(path).await?;
        let socket = UnixSocket::new_stream()?;
        socket.bind(path)?;
        let file = SocketFile::new(path)?;
        // No client can connect before `listen`, so none passes with the mode of the umask.
        fs::set_permissions(path, Permissions::from_mode(mode))?;
        let listener = socket.listen(BACKLOG)?;
        Ok(Self { file, listener })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.file.path
    }

    /// Accepts the next connection. Cancel safe.
    pub(crate) async fn accept(&self) -> io::Result<UnixStream> {
        Ok(self.listener.accept().await?.0)
    }
}

/// Removes the socket of a process that has ended.
async fn remove_stale(path: &Path) -> Result<(), UnixSocketError> {
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    if !metadata.file_type().is_socket() {
        return Err(UnixSocketError::NotASocket);
    }
    match UnixStream::connect(path).await {
        Ok(_) => return Err(UnixSocketError::InUse),
        Err(error) => match error.kind() {
            io::ErrorKind::ConnectionRefused => {}
            // Its queue of connections is full.
            io::ErrorKind::WouldBlock => return Err(UnixSocketError::InUse),
            io::ErrorKind::NotFound => return Ok(()),
            _ => return Err(UnixSocketError::Unknown(error)),
        },
    }
    tracing::info!(path = %path.display(), "replacing the socket of a process that has ended");
    Ok(fs::remove_file(path)?)
}

/// The file of a bound socket. Dropping it removes the file, unless another one has replaced it.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    identity: FileIdentity,
}

#[derive(Debug, PartialEq, Eq)]
struct FileIdentity {
    device: u64,
    inode: u64,
}

impl FileIdentity {
    fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::symlink_metadata(path)?;
        Ok(Self { device: metadata.dev(), inode: metadata.ino() })
    }
}

impl SocketFile {
    fn new(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), identity: FileIdentity::of(path)? })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if FileIdentity::of(&self.path).is_ok_and(|found| found == self.identity) {
            // Ignored: the next start replaces it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener as StdListener;

    use super::*;

    const MODE: u32 = 0o660;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[tokio::test]
    async fn a_socket_file_has_its_mode_and_ends_with_its_listener() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        for wanted in [MODE, 0o600, 0o666] {
            let listener = UnixSocketListener::bind(&path, wanted).await.unwrap();
            assert_eq!(mode(&path), wanted);
            let (connected, accepted) = tokio::join!(UnixStream::connect(&path), listener.accept());
            drop((connected.unwrap(), accepted.unwrap()));
            drop(listener);
            assert!(!path.exists());
        }
    }

    #[tokio::test]
    async fn only_the_socket_of_an_ended_process_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let bind = || UnixSocketListener::bind(&path, MODE);
        // The standard library leaves the file behind, as a killed process does.
        drop(StdListener::bind(&path).unwrap());
        assert!(path.exists());
        let live = bind().await.unwrap();
        assert!(matches!(bind().await, Err(UnixSocketError::InUse)));
        assert!(path.exists(), "a refused start leaves the live socket");
        drop(live);
        fs::write(&path, "data").unwrap();
        assert!(matches!(bind().await, Err(UnixSocketError::NotASocket)));
        assert_eq!(fs::read(&path).unwrap(), b"data");
        let below = directory.path().join("none").join("s");
        let error = UnixSocketListener::bind(&below, MODE).await.unwrap_err();
        assert!(matches!(error, UnixSocketError::Io(_)), "{error}");
    }

    #[tokio::test]
    async fn a_listener_leaves_the_socket_that_replaced_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let first = UnixSocketListener::bind(&path, MODE).await.unwrap();
        // Keeps the inode in use, so that the second file gets another one.
        fs::rename(&path, directory.path().join("kept")).unwrap();
        let _second = StdListener::bind(&path).unwrap();
        drop(first);
        assert!(path.exists());
    }
}
