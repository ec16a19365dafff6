//! What the connections between nodes are made of: TCP, or a network that a simulation brings.
//! Both end in tonic's own channels and streams, so nothing behind this door knows which it is.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use futures_util::Stream;
use futures_util::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::{Connected, TcpIncoming};
use tonic::transport::{Channel, Endpoint, Error};

use super::hub::Hub;
use super::service;
use crate::protocol::Versions;

/// How other nodes are reached.
pub trait Dialer: fmt::Debug + Send + Sync + 'static {
    /// Connects.
    fn connect(&self, endpoint: Endpoint) -> BoxFuture<'static, Result<Channel, Error>>;
    /// A channel that connects at its first call, and again after a failure.
    fn connect_lazily(&self, endpoint: &Endpoint) -> Channel;
}

/// The network of the operating system.
#[derive(Debug, Default)]
pub struct Tcp;

impl Dialer for Tcp {
    fn connect(&self, endpoint: Endpoint) -> BoxFuture<'static, Result<Channel, Error>> {
        Box::pin(async move { endpoint.connect().await })
    }

    fn connect_lazily(&self, endpoint: &Endpoint) -> Channel {
        endpoint.connect_lazy()
    }
}

type Serving = BoxFuture<'static, Result<(), Error>>;

/// Both directions of a node's connections to its peers.
pub struct Network {
    dialer: Arc<dyn Dialer>,
    /// Where it listens, if that is an address that others may be told.
    local_addr: Option<SocketAddr>,
    versions: Versions,
    serve: Box<dyn FnOnce(Arc<Hub>, CancellationToken) -> Serving + Send>,
}

impl Network {
    /// Dials as `dialer` does, and serves what comes in.
    pub fn new<I, C>(dialer: Arc<dyn Dialer>, incoming: I) -> Self
    where
        I: Stream<Item = io::Result<C>> + Send + 'static,
        C: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        let serve =
            move |hub, stop| -> Serving { Box::pin(service::serve_incoming(hub, incoming, stop)) };
        let versions = Versions::OWN;
        Self { dialer, local_addr: None, versions, serve: Box::new(serve) }
    }

    pub fn dialer(&self) -> Arc<dyn Dialer> {
        self.dialer.clone()
    }

    /// Says that it speaks other protocol versions than it does: for tests of clusters of several
    /// versions.
    pub fn speaking(self, versions: Versions) -> Self {
        Self { versions, ..self }
    }

    pub fn versions(&self) -> Versions {
        self.versions
    }

    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.local_addr
    }

    /// As [`super::serve`].
    pub fn serve(self, hub: Arc<Hub>, stop: CancellationToken) -> Serving {
        (self.serve)(hub, stop)
    }
}

impl From<TcpListener> for Network {
    fn from(listener: TcpListener) -> Self {
        let local_addr = listener.local_addr().ok();
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        Self { local_addr, ..Self::new(Arc::new(Tcp), incoming) }
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Network").field("dialer", &self.dialer).finish_non_exhaustive()
    }
}
