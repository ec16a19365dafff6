//! Both directions of a node's peer connections: a dialer and a stream of accepted connections.
//! TCP in a server; simulations bring their own.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use futures_util::Stream;
use futures_util::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::transport::Error;
use tonic::transport::server::{Connected, TcpIncoming};

use super::dialer::{Dialer, TcpDialer};
use super::hub::Hub;
use super::receive::service;
use super::tls::{self, CallerRule, PeerTls, TlsDialer};
use crate::protocol::ProtocolVersions;

/// Serves peers on `listener` until `stop` is cancelled or the hub is closed.
/// Connections that are still open after a grace period are closed.
///
/// # Errors
/// Returns the error of the listener.
pub async fn serve(
    hub: Arc<Hub>,
    listener: TcpListener,
    stop: CancellationToken,
) -> Result<(), Error> {
    Network::from(listener).serve(hub, stop).await
}

type Serving = BoxFuture<'static, Result<(), Error>>;

/// A dialer, and the server of incoming peer connections.
pub struct Network {
    dialer: Arc<dyn Dialer>,
    /// Address of the listener, if other nodes can dial it.
    local_addr: Option<SocketAddr>,
    versions: ProtocolVersions,
    serve: Box<dyn FnOnce(Arc<Hub>, CancellationToken) -> Serving + Send>,
}

impl Network {
    /// Creates a network that dials with `dialer` and serves the connections of `incoming`, which
    /// prove no identity.
    pub fn new<I, C>(dialer: Arc<dyn Dialer>, incoming: I) -> Self
    where
        I: Stream<Item = io::Result<C>> + Send + 'static,
        C: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        Self::with_callers(dialer, incoming, CallerRule::Trusted)
    }

    fn with_callers<I, C>(dialer: Arc<dyn Dialer>, incoming: I, callers: CallerRule) -> Self
    where
        I: Stream<Item = io::Result<C>> + Send + 'static,
        C: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        let serve = move |hub, stop| -> Serving {
            Box::pin(service::serve_incoming(hub, incoming, callers, stop))
        };
        let versions = ProtocolVersions::OWN;
        Self { dialer, local_addr: None, versions, serve: Box::new(serve) }
    }

    /// Creates a network over TLS on a TCP listener.
    pub fn over_tls(listener: TcpListener, tls: PeerTls) -> Self {
        let local_addr = listener.local_addr().ok();
        let incoming = tls::incoming(listener, tls.acceptor.clone());
        let dialer = Arc::new(TlsDialer::new(tls));
        Self { local_addr, ..Self::with_callers(dialer, incoming, CallerRule::Identified) }
    }

    pub fn dialer(&self) -> Arc<dyn Dialer> {
        self.dialer.clone()
    }

    /// Replaces the advertised protocol versions: for tests of clusters of mixed versions.
    pub fn with_versions(self, versions: ProtocolVersions) -> Self {
        Self { versions, ..self }
    }

    pub fn versions(&self) -> ProtocolVersions {
        self.versions
    }

    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.local_addr
    }

    /// Serves peers as [`super::serve`] does.
    ///
    /// # Errors
    /// Returns the error of the listener.
    pub fn serve(self, hub: Arc<Hub>, stop: CancellationToken) -> Serving {
        (self.serve)(hub, stop)
    }
}

impl From<TcpListener> for Network {
    fn from(listener: TcpListener) -> Self {
        let local_addr = listener.local_addr().ok();
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        Self { local_addr, ..Self::new(Arc::new(TcpDialer), incoming) }
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Network").field("dialer", &self.dialer).finish_non_exhaustive()
    }
}
