//! Connections from within the process, for the console: it calls the API as any client does, so
//! that admission, limits, access control and the audit log have no second path.

use std::io;
use std::net::SocketAddr;

use tokio::io::{DuplexStream, duplex};
use tokio::sync::mpsc;

/// Bytes that one side of a connection may have written and the other not read.
const BUFFER_BYTES: usize = 64 << 10;

/// Connections that wait to be accepted.
const BACKLOG: usize = 64;

/// A new connection, with the address of the browser.
pub(super) type InProcessConnection = (DuplexStream, SocketAddr);

/// Connects to the API of the same process.
#[derive(Debug, Clone)]
pub struct InProcessConnector(mpsc::Sender<InProcessConnection>);

/// Accepts connections of the same process.
#[derive(Debug)]
pub(crate) struct InProcessListener(mpsc::Receiver<InProcessConnection>);

/// Returns a connector and the listener that it connects to.
pub(crate) fn in_process() -> (InProcessConnector, InProcessListener) {
    let (sender, receiver) = mpsc::channel(BACKLOG);
    (InProcessConnector(sender), InProcessListener(receiver))
}

impl InProcessConnector {
    /// Opens a connection on behalf of a browser at this address.
    ///
    /// # Errors
    /// The node no longer accepts connections.
    pub async fn connect(&self, peer: SocketAddr) -> io::Result<DuplexStream> {
        let (client, server) = duplex(BUFFER_BYTES);
        let closed = |_| io::Error::new(io::ErrorKind::ConnectionRefused, "the node is stopping");
        self.0.send((server, peer)).await.map_err(closed)?;
        Ok(client)
    }
}

impl InProcessListener {
    /// Returns the next connection; `None` once every connector is dropped.
    pub(super) async fn accept(&mut self) -> Option<InProcessConnection> {
        self.0.recv().await
    }
}
