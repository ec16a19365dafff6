//! Connections that can be cut: a client's TCP connections pass a relay in this process.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use helix_client::Dial;
use hyper_util::rt::TokioIo;
use tokio::io::{DuplexStream, copy_bidirectional, duplex};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;

/// Bytes that a relay holds in each direction.
const RELAY_BYTES: usize = 64 << 10;

/// Cuts the connections of one client.
#[derive(Debug)]
pub(crate) struct ConnectionCutter(watch::Sender<u64>);

impl ConnectionCutter {
    pub(crate) fn new() -> Self {
        Self(watch::channel(0).0)
    }

    /// Returns the way to dial for a client whose connections this cuts.
    pub(crate) fn dial(&self) -> Dial {
        let cuts = self.0.subscribe();
        Dial::with(move |endpoint| {
            endpoint.connect_with_connector_lazy(RelayConnector(cuts.clone()))
        })
    }

    /// Cuts all open connections. The client may connect again.
    pub(crate) fn cut(&self) {
        self.0.send_modify(|cuts| *cuts += 1);
    }
}

#[derive(Debug, Clone)]
struct RelayConnector(watch::Receiver<u64>);

impl Service<Uri> for RelayConnector {
    type Response = TokioIo<DuplexStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let mut cuts = self.0.clone();
        Box::pin(async move {
            let address = uri.authority().ok_or(io::ErrorKind::InvalidInput)?.as_str();
            let mut tcp = TcpStream::connect(address).await?;
            tcp.set_nodelay(true)?;
            cuts.mark_unchanged();
            let (near, mut far) = duplex(RELAY_BYTES);
            tokio::spawn(async move {
                // Both ends close when this ends, and the client finds its connection broken.
                tokio::select! {
                    _ = copy_bidirectional(&mut far, &mut tcp) => {}
                    _ = cuts.changed() => {}
                }
            });
            Ok(TokioIo::new(near))
        })
    }
}
