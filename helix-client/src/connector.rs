//! Connections that send a request's headers in one packet with its body: over TCP, with TLS or
//! without, and over Unix domain sockets.

use std::error::Error as StdError;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use helix_tls::{CertificateFiles, CertificateStore, HandshakeError, ServerRule, TlsSocket};
use helix_transport::{CoalescedIo, FlushPolicy};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpStream, UnixStream};
use tonic::Code;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};

use crate::error::{Error, Result};
use crate::refusal::{RefusalNote, WatchedSocket};
use crate::tls_options::TlsOptions;

/// Age from which on a new connection reads the certificate files again.
const FILES_AGE_MAX: Duration = Duration::from_secs(1);

/// TLS of a client's connections.
#[derive(Debug)]
pub(crate) struct ClientTls {
    connector: helix_tls::Connector,
    server_name: Option<String>,
}

impl ClientTls {
    /// Reads the files. This blocks, once for each client, so that a wrong file fails at the start.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if a file cannot be read or is not valid.
    pub(crate) fn open(options: &TlsOptions) -> Result<Arc<Self>> {
        let invalid = |what: String| Error::client(Code::InvalidArgument, format!("TLS: {what}"));
        let (certificate, key) = options.certificate.clone().unzip();
        let files =
            CertificateFiles { certificate, key, ca: options.ca_files.clone(), client_ca: vec![] };
        let store = CertificateStore::open(files, None);
        let store = store.map_err(|error| invalid(error.to_string()))?;
        let connector = helix_tls::Connector::new(store, ServerRule::HostName).map_err(invalid)?;
        Ok(Arc::new(Self { connector, server_name: options.server_name.clone() }))
    }

    async fn encrypt(
        &self,
        tcp: TcpStream,
        host: &str,
    ) -> std::result::Result<TlsSocket<TcpStream>, HandshakeError> {
        self.connector.store().refresh_if_older(FILES_AGE_MAX).await;
        self.connector.connect(tcp, self.server_name.as_deref().unwrap_or(host)).await
    }
}

/// Returns a channel that connects on first use. Refusals of its connections are noted.
pub(crate) fn connect_lazily(
    endpoint: &Endpoint,
    tls: Option<&Arc<ClientTls>>,
    refusal: &RefusalNote,
) -> Channel {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(endpoint.get_tcp_nodelay());
    // Divided among the addresses that a name resolves to.
    tcp.set_connect_timeout(endpoint.get_connect_timeout());
    let refusal = refusal.clone();
    endpoint.connect_with_connector_lazy(SocketConnector { tcp, tls: tls.cloned(), refusal })
}

struct SocketConnector {
    tcp: HttpConnector,
    tls: Option<Arc<ClientTls>>,
    refusal: RefusalNote,
}

type ConnectFailure = Box<dyn StdError + Send + Sync>;

impl Service<Uri> for SocketConnector {
    type Response = TokioIo<CoalescedIo<WatchedSocket>>;
    type Error = ConnectFailure;
    type Future = BoxFuture<'static, std::result::Result<Self::Response, ConnectFailure>>;

    fn poll_ready(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<std::result::Result<(), ConnectFailure>> {
        self.tcp.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let host = uri.host().unwrap_or_default().to_owned();
        let connecting = self.tcp.call(uri);
        let (tls, refusal) = (self.tls.clone(), self.refusal.clone());
        Box::pin(async move {
            let tcp = connecting.await?.into_inner();
            let socket = match tls {
                Some(tls) => tls.encrypt(tcp, &host).await.map_err(HandshakeError::into_io)?,
                None => TlsSocket::plain(tcp),
            };
            let socket = WatchedSocket::new(socket, refusal);
            Ok(TokioIo::new(CoalescedIo::new(socket, FlushPolicy::DeferAll)))
        })
    }
}

/// Returns a channel that connects to a Unix domain socket on first use.
pub(crate) fn connect_unix_lazily(endpoint: &Endpoint, path: &str) -> Channel {
    endpoint.connect_with_connector_lazy(UnixConnector { path: path.into() })
}

/// Connects to a Unix domain socket, whatever the address of the endpoint is.
struct UnixConnector {
    path: PathBuf,
}

impl Service<Uri> for UnixConnector {
    type Response = TokioIo<CoalescedIo<UnixStream>>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let path = self.path.clone();
        Box::pin(async move {
            let connected = UnixStream::connect(&path).await;
            let stream = connected.map_err(|error| explain_unix(&path, &error))?;
            Ok(TokioIo::new(CoalescedIo::new(stream, FlushPolicy::DeferAll)))
        })
    }
}

/// Adds the path and its problem to the error of a connect, which has neither.
fn explain_unix(path: &Path, error: &io::Error) -> io::Error {
    let hint = match error.kind() {
        io::ErrorKind::NotFound => "; no node listens there",
        io::ErrorKind::ConnectionRefused => "; the node that listened there has ended",
        io::ErrorKind::PermissionDenied => "; this user may not write to the socket",
        io::ErrorKind::WouldBlock => "; too many connections wait to be accepted",
        _ => "",
    };
    io::Error::new(error.kind(), format!("unix:{}: {error}{hint}", path.display()))
}
