//! The peer port over TLS: nodes authenticate each other with their certificates.
//!
//! A certificate names its cluster and its node. The dialing node checks it during the handshake.
//! The accepting node checks it against the node id of each call, so that the caller gets the
//! reason of a refusal.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use futures_util::{FutureExt, Stream};
use helix_tls::{
    AcceptedSocket, Acceptor, Connector, HandshakeError, NodeIdentity, TlsSocket, forward_read,
    forward_write,
};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint, Error};

use super::dialer::Dialer;
use crate::limits::ACCEPT_RETRY_WAIT;
use crate::sync::lock;

/// TLS of the peer port.
#[derive(Debug, Clone)]
pub struct PeerTls {
    /// Handshakes of incoming connections; requires client certificates.
    pub acceptor: Arc<Acceptor>,
    /// Handshakes of outgoing connections.
    pub connector: Arc<Connector>,
    /// Dials a peer without TLS if it does not speak TLS: while a cluster changes to TLS.
    pub allows_plaintext: bool,
}

/// Dials over TCP with TLS. The dialer of one node has its id.
#[derive(Debug, Clone)]
pub(super) struct TlsDialer {
    tls: PeerTls,
    node_id: Option<u64>,
    encrypted: EncryptedPeers,
}

/// Peers that have completed TLS in this process.
#[derive(Debug, Clone, Default)]
struct EncryptedPeers(Arc<Mutex<BTreeSet<u64>>>);

impl EncryptedPeers {
    fn record(&self, node_id: u64) {
        lock(&self.0).insert(node_id);
    }

    /// Returns true if the error shows a peer that has no TLS, unless it has had it before.
    ///
    /// An attacker on the network can cause the same error.
    fn may_be_plaintext(&self, node_id: u64, error: &HandshakeError) -> bool {
        let shows_no_tls = match error {
            HandshakeError::Plaintext => true,
            // A server without TLS answers with HTTP/2, or closes the connection.
            HandshakeError::Ended(error) => matches!(
                error.kind(),
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
            ),
            _ => false,
        };
        shows_no_tls && !lock(&self.0).contains(&node_id)
    }
}

impl TlsDialer {
    pub(super) fn new(tls: PeerTls) -> Self {
        Self { tls, node_id: None, encrypted: EncryptedPeers::default() }
    }

    async fn dial(self, uri: Uri) -> io::Result<TokioIo<TlsSocket<TcpStream>>> {
        let Some(node_id) = self.node_id else { return Err(io::ErrorKind::InvalidInput.into()) };
        let handshake = self.tls.connector.connect_node(open_tcp(&uri).await?, node_id).await;
        let socket = match handshake {
            Ok(socket) => {
                self.encrypted.record(node_id);
                socket
            }
            Err(error)
                if self.tls.allows_plaintext
                    && self.encrypted.may_be_plaintext(node_id, &error) =>
            {
                TlsSocket::plain(open_tcp(&uri).await?)
            }
            Err(error) => return Err(error.into_io()),
        };
        Ok(TokioIo::new(socket))
    }
}

async fn open_tcp(uri: &Uri) -> io::Result<TcpStream> {
    let (host, port) = uri.host().zip(uri.port_u16()).ok_or(io::ErrorKind::InvalidInput)?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let stream = TcpStream::connect((host, port)).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

impl Dialer for TlsDialer {
    fn connect(&self, endpoint: Endpoint) -> BoxFuture<'static, Result<Channel, Error>> {
        let dialer = self.clone();
        async move { endpoint.connect_with_connector(dialer).await }.boxed()
    }

    fn connect_lazily(&self, endpoint: &Endpoint) -> Channel {
        endpoint.connect_with_connector_lazy(self.clone())
    }

    fn for_node(&self, node_id: u64) -> Option<Arc<dyn Dialer>> {
        Some(Arc::new(Self { node_id: Some(node_id), ..self.clone() }))
    }
}

impl Service<Uri> for TlsDialer {
    type Response = TokioIo<TlsSocket<TcpStream>>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        self.clone().dial(uri).boxed()
    }
}

/// Identities that the callers of a network have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallerRule {
    /// Every connection carries a [`CallerIdentity`]; a call without one is refused.
    Identified,
    /// Connections carry none, because the network has no TLS.
    Trusted,
}

impl CallerRule {
    /// Checks that the caller of a connection is a node of this cluster, before a request is read.
    ///
    /// # Errors
    /// The reason, for the operators of both nodes.
    pub(super) fn check_cluster(self, caller: Option<&CallerIdentity>) -> Result<(), String> {
        match (caller, self) {
            (Some(caller), _) => caller.check_cluster(),
            (None, Self::Trusted) => Ok(()),
            (None, Self::Identified) => {
                Err("the connection of the caller has no identity".to_owned())
            }
        }
    }

    /// Checks that the caller of a connection may speak as `node_id`.
    ///
    /// # Errors
    /// The reason, for the operators of both nodes.
    pub(super) fn check(self, caller: Option<&CallerIdentity>, node_id: u64) -> Result<(), String> {
        match (caller, self) {
            (Some(caller), _) => caller.check(node_id),
            (None, Self::Trusted) => Ok(()),
            (None, Self::Identified) => {
                Err(format!("the caller is not node {node_id}: its connection has no identity"))
            }
        }
    }
}

/// Node of a caller, as far as its connection proves it.
#[derive(Debug, Clone)]
pub(super) enum CallerIdentity {
    /// The connection has no TLS, and the port accepts that.
    Unproven,
    /// The verified certificate is for this node.
    Proven { caller: NodeIdentity, own: NodeIdentity },
    /// The verified certificate proves no node.
    Invalid(String),
}

impl CallerIdentity {
    fn new(accepted: &AcceptedSocket<TcpStream>, acceptor: &Acceptor) -> Self {
        if !accepted.socket.is_encrypted() {
            return Self::Unproven;
        }
        let Some(names) = &accepted.names else {
            return Self::Invalid("it presented no certificate".to_owned());
        };
        let set = acceptor.store().current();
        match (NodeIdentity::of(names), set.identity()) {
            (Ok(caller), Ok(own)) => Self::Proven { caller, own: own.clone() },
            (Err(what), _) | (_, Err(what)) => Self::Invalid(what),
        }
    }

    fn check_cluster(&self) -> Result<(), String> {
        match self {
            Self::Unproven => Ok(()),
            Self::Proven { caller, own } => caller.check_cluster(own),
            Self::Invalid(what) => Err(what.clone()),
        }
        .map_err(|what| format!("the caller is no node of this cluster: {what}"))
    }

    /// Checks that the caller may speak as `node_id`.
    ///
    /// # Errors
    /// The reason, for the operators of both nodes.
    fn check(&self, node_id: u64) -> Result<(), String> {
        match self {
            Self::Unproven => Ok(()),
            Self::Proven { caller, own } => caller.check(own, node_id),
            Self::Invalid(what) => Err(what.clone()),
        }
        .map_err(|what| format!("the caller is not node {node_id}: {what}"))
    }
}

/// An accepted connection of a peer.
pub(super) struct PeerSocket {
    socket: TlsSocket<TcpStream>,
    identity: CallerIdentity,
}

impl fmt::Debug for PeerSocket {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("PeerSocket").field(&self.identity).finish()
    }
}

impl Connected for PeerSocket {
    type ConnectInfo = CallerIdentity;

    fn connect_info(&self) -> CallerIdentity {
        self.identity.clone()
    }
}

forward_read!([] PeerSocket, Self { socket, .. } => socket);
forward_write!([] PeerSocket, Self { socket, .. } => socket);

/// Returns the connections of a listener whose handshakes have succeeded.
///
/// The acceptor bounds the handshakes, and logs those that fail.
pub(super) fn incoming(
    listener: TcpListener,
    acceptor: Arc<Acceptor>,
) -> impl Stream<Item = io::Result<PeerSocket>> + Send + 'static {
    let handshakes = FuturesUnordered::<BoxFuture<'static, Option<PeerSocket>>>::new();
    let state = (listener, acceptor, handshakes);
    futures_util::stream::unfold(state, |(listener, acceptor, mut handshakes)| async move {
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, peer)) => {
                        // Ignored: without it the connection is slower, but correct.
                        let _ = stream.set_nodelay(true);
                        let acceptor = acceptor.clone();
                        handshakes.push(async move {
                            let accepted = acceptor.accept(stream, peer).await.ok()?;
                            let identity = CallerIdentity::new(&accepted, &acceptor);
                            Some(PeerSocket { socket: accepted.socket, identity })
                        }.boxed());
                    }
                    Err(error) => {
                        tracing::warn!(%error, "failed to accept a connection of a peer");
                        sleep(ACCEPT_RETRY_WAIT).await;
                    }
                },
                Some(finished) = handshakes.next(), if !handshakes.is_empty() => {
                    if let Some(socket) = finished {
                        return Some((Ok(socket), (listener, acceptor, handshakes)));
                    }
                }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_dialed_without_tls_only_if_it_never_had_tls() {
        let ended = |kind: io::ErrorKind| HandshakeError::Ended(kind.into());
        let shows_no_tls = [
            HandshakeError::Plaintext,
            ended(io::ErrorKind::UnexpectedEof),
            ended(io::ErrorKind::ConnectionReset),
        ];
        let shows_nothing = [
            ended(io::ErrorKind::TimedOut),
            HandshakeError::TimedOut,
            HandshakeError::Rejected("it has expired".to_owned()),
        ];
        let peers = EncryptedPeers::default();
        for error in &shows_no_tls {
            assert!(peers.may_be_plaintext(2, error), "{error}");
        }
        for error in &shows_nothing {
            assert!(!peers.may_be_plaintext(2, error), "{error}");
        }
        // The dialers of all nodes share the set.
        let [recorded, other] = [peers.clone(), peers];
        recorded.record(2);
        for error in &shows_no_tls {
            assert!(!other.may_be_plaintext(2, error), "{error}");
            assert!(other.may_be_plaintext(3, error), "{error}");
        }
    }

    #[test]
    fn a_caller_without_an_identity_is_refused_where_connections_have_one() {
        CallerRule::Trusted.check(None, 2).unwrap();
        let said = CallerRule::Identified.check(None, 2).unwrap_err();
        assert!(said.contains("has no identity"), "{said}");
        let node = |node_id| NodeIdentity { cluster: "prod".to_owned(), node_id };
        let proven = CallerIdentity::Proven { caller: node(2), own: node(1) };
        let invalid = CallerIdentity::Invalid("it presented no certificate".to_owned());
        for rule in [CallerRule::Identified, CallerRule::Trusted] {
            rule.check(Some(&proven), 2).unwrap();
            rule.check(Some(&proven), 3).unwrap_err();
            rule.check(Some(&invalid), 2).unwrap_err();
            rule.check_cluster(Some(&proven)).unwrap();
            rule.check_cluster(Some(&invalid)).unwrap_err();
        }
        let other = NodeIdentity { cluster: "other".to_owned(), node_id: 2 };
        let foreign = CallerIdentity::Proven { caller: other, own: node(1) };
        let said = CallerRule::Identified.check_cluster(Some(&foreign)).unwrap_err();
        assert!(said.contains("cluster \"other\""), "{said}");
        CallerRule::Identified.check_cluster(None).unwrap_err();
        CallerRule::Trusted.check_cluster(None).unwrap();
        CallerRule::Identified.check(Some(&CallerIdentity::Unproven), 2).unwrap();
    }
}
