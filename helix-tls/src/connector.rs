//! Handshakes of a client, or of a node that dials another node.

use std::fmt::{self, Display};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, HandshakeKind,
    OtherError, ProtocolVersion, RootCertStore, SignatureScheme,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::certificate::CertificateNames;
use crate::error::HandshakeError;
use crate::identity::NodeIdentity;
use crate::socket::{PeekedSocket, TlsSocket};
use crate::store::{CertificateStore, TrustedSet};
use crate::{ALPN_H2, VERSIONS, provider};

/// Time for a server's first record after the handshake; and the bytes of one read, which is less
/// than rustls buffers.
const CONFIRMATION_WAIT_MAX: Duration = Duration::from_millis(500);
const CONFIRMATION_BYTES: usize = 2 << 10;

/// Prefix of the names by which nodes ask for each other; never sent.
const NODE_NAME_PREFIX: &str = "node-";

/// Names that a server's certificate must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerRule {
    /// The DNS name or the IP address that is dialed, as for any server.
    HostName,
    /// The identity of a node of this process's cluster.
    Node,
}

/// Makes handshakes with servers, with the store's current certificates.
#[derive(Debug)]
pub struct Connector {
    store: Arc<CertificateStore>,
    rule: ServerRule,
    /// The configuration of the set in use.
    config: Mutex<Option<(Arc<TrustedSet>, DialConfig)>>,
}

/// Configuration of the handshakes.
#[derive(Debug, Clone)]
struct DialConfig {
    client: Arc<ClientConfig>,
    /// The verifier in it; `None` if sessions are not resumed.
    verifier: Option<Arc<WebPkiServerVerifier>>,
}

impl Connector {
    /// Creates a connector.
    ///
    /// # Errors
    /// The store has no CA; or nodes are dialed and it has no certificate of a node.
    pub fn new(store: Arc<CertificateStore>, rule: ServerRule) -> Result<Self, String> {
        let set = store.current();
        let config = client_config(&set, rule)?;
        Ok(Self { store, rule, config: Mutex::new(Some((set, config))) })
    }

    /// Returns the store of the certificates.
    pub fn store(&self) -> &Arc<CertificateStore> {
        &self.store
    }

    /// Makes the handshake with a server of this host name or IP address.
    ///
    /// # Errors
    /// The handshake failed.
    pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        socket: S,
        host: &str,
    ) -> Result<TlsSocket<S>, HandshakeError> {
        // An IPv6 address of a URI is in brackets.
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(host.to_owned()).map_err(|_| {
            HandshakeError::Rejected(format!("{host:?} is neither a DNS name nor an IP address"))
        })?;
        let DialConfig { client, verifier } = self.config()?;
        let connector = TlsConnector::from(client);
        let stream = connector.connect(name.clone(), PeekedSocket::new(socket, None)).await;
        let mut stream = stream.map_err(HandshakeError::from_io)?;
        if let Some(verifier) = verifier {
            let verified = verify_resumed(&verifier, stream.get_ref().1, &name);
            // The sessions go with the configuration: the next handshake is a full one.
            verified.inspect_err(|_| *self.cached() = None)?;
        }
        if stream.get_ref().1.protocol_version() == Some(ProtocolVersion::TLSv1_3) {
            // Without confirmation in time, the server waits for the first request.
            if let Ok(confirmed) = timeout(CONFIRMATION_WAIT_MAX, confirmed(&mut stream)).await {
                confirmed?;
            }
        }
        Ok(TlsSocket::tls(stream))
    }

    /// Makes the handshake with a node; its certificate must be for this node id.
    ///
    /// # Errors
    /// The handshake failed.
    pub async fn connect_node<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        socket: S,
        node_id: u64,
    ) -> Result<TlsSocket<S>, HandshakeError> {
        self.connect(socket, &format!("{NODE_NAME_PREFIX}{node_id}")).await
    }

    fn cached(&self) -> MutexGuard<'_, Option<(Arc<TrustedSet>, DialConfig)>> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn config(&self) -> Result<DialConfig, HandshakeError> {
        let set = self.store.current();
        let mut cached = self.cached();
        match &*cached {
            Some((of, config)) if Arc::ptr_eq(of, &set) => Ok(config.clone()),
            _ => {
                let config = client_config(&set, self.rule).map_err(HandshakeError::Rejected)?;
                *cached = Some((set, config.clone()));
                Ok(config)
            }
        }
    }
}

fn client_config(set: &TrustedSet, rule: ServerRule) -> Result<DialConfig, String> {
    if set.ca.is_empty() {
        return Err("a connection with TLS needs a CA file to verify the server".to_owned());
    }
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(VERSIONS)
        .map_err(|error| error.to_string())?;
    let mut verifier = None;
    let builder = match rule {
        ServerRule::HostName => {
            let built =
                WebPkiServerVerifier::builder_with_provider(set.ca.clone(), provider()).build();
            let built = built.map_err(|error| error.to_string())?;
            verifier = Some(built.clone());
            builder.with_webpki_verifier(built)
        }
        ServerRule::Node => {
            let own = set.identity()?.clone();
            let of_nodes = NodeVerifier { own, ca: set.ca.clone(), provider: provider() };
            builder.dangerous().with_custom_certificate_verifier(Arc::new(of_nodes))
        }
    };
    let mut config = match &set.own {
        Some(own) => builder.with_client_cert_resolver(Arc::new(own.clone())),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![ALPN_H2.to_vec()];
    if rule == ServerRule::Node {
        // Nodes are verified in full each time, and their names are not those of hosts.
        config.resumption = Resumption::disabled();
        config.enable_sni = false;
    }
    Ok(DialConfig { client: Arc::new(config), verifier })
}

/// Verifies the chain of a resumed session, which rustls does not: it may have expired.
fn verify_resumed(
    verifier: &WebPkiServerVerifier,
    session: &ClientConnection,
    name: &ServerName<'_>,
) -> Result<(), HandshakeError> {
    if session.handshake_kind() != Some(HandshakeKind::Resumed) {
        return Ok(());
    }
    let Some([leaf, intermediates @ ..]) = session.peer_certificates() else { return Ok(()) };
    let verified = verifier.verify_server_cert(leaf, intermediates, name, &[], UnixTime::now());
    verified.map(drop).map_err(|error| HandshakeError::from_tls(&error))
}

/// Waits for the server's first record after the handshake.
///
/// With TLS 1.3 a server verifies the client after the client's handshake has ended. A server that
/// accepts the client sends a session ticket then, any other one an alert. Without this wait the
/// alert would end a connection that its caller believes to be open, and its reason would be lost.
async fn confirmed<S: AsyncRead + Unpin>(
    stream: &mut TlsStream<PeekedSocket<S>>,
) -> Result<(), HandshakeError> {
    let ended = "the other side closed the connection right after the TLS handshake; see its log";
    let ended = || HandshakeError::Rejected(ended.to_owned());
    let (socket, session) = stream.get_mut();
    let mut buffer = [0; CONFIRMATION_BYTES];
    let mut has_data = !session.wants_read();
    while !has_data && session.tls13_tickets_received() == 0 {
        let bytes = socket.read(&mut buffer).await.map_err(|_| ended())?;
        let mut unread = buffer.get(..bytes).unwrap_or_default();
        if unread.is_empty() {
            return Err(ended());
        }
        while !unread.is_empty() {
            session.read_tls(&mut unread).map_err(|_| ended())?;
            let state = session.process_new_packets().map_err(|error| {
                HandshakeError::from_io(io::Error::new(io::ErrorKind::InvalidData, error))
            })?;
            has_data |= state.plaintext_bytes_to_read() > 0;
        }
    }
    Ok(())
}

/// Verifies that a certificate is signed by a CA and is for the dialed node of the own cluster.
#[derive(Debug)]
struct NodeVerifier {
    own: NodeIdentity,
    ca: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
}

/// Reason why a certificate is not the dialed node's.
#[derive(Debug)]
struct WrongNode(String);

impl Display for WrongNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongNode {}

impl NodeVerifier {
    fn check_identity(&self, certificate: &[u8], name: &ServerName<'_>) -> Result<(), String> {
        let dialed = name.to_str();
        let dialed = dialed.strip_prefix(NODE_NAME_PREFIX).and_then(|id| id.parse().ok());
        let dialed: u64 = dialed.ok_or("the dialed node is not known")?;
        let theirs = NodeIdentity::of(&CertificateNames::of(certificate)?)?;
        theirs
            .check(&self.own, dialed)
            .map_err(|what| format!("node {dialed} was dialed, and {what}; check the addresses"))
    }
}

impl ServerCertVerifier for NodeVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let certificate = ParsedCertificate::try_from(end_entity)?;
        verify_server_cert_signed_by_trust_anchor(
            &certificate,
            &self.ca,
            intermediates,
            now,
            self.provider.signature_verification_algorithms.all,
        )?;
        self.check_identity(end_entity, server_name).map_err(|what| {
            let error = OtherError(Arc::new(WrongNode(what)));
            rustls::Error::InvalidCertificate(CertificateError::Other(error))
        })?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
