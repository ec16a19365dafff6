//! Handshakes of a server's port, with a deadline and a bound on the open ones.

use std::fmt::Display;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustls::pki_types::UnixTime;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{HandshakeKind, ServerConfig};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;

use crate::certificate::CertificateNames;
use crate::error::HandshakeError;
use crate::handshake_slots::HandshakeSlots;
use crate::socket::{PeekedSocket, TlsSocket};
use crate::store::{CertificateStore, TrustedSet};
use crate::{ALPN_H2, VERSIONS, provider};

/// First byte of every TLS connection: a handshake record (RFC 8446, section 5.1).
const TLS_FIRST_BYTE: u8 = 0x16;

/// Rejection of a client that begins with that byte and goes on with no record of TLS.
const INVALID_RECORD: &str = "the other side sent an invalid TLS record";

/// Least time between two log messages about failed handshakes of a port.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Bytes of a refused connection that are read and dropped, and the time for them. An HTTP/2 client
/// sends the 64 KiB of its first window without waiting, and the headers of its calls.
const REFUSED_BYTES_MAX: usize = 128 << 10;
const LINGER_MAX: Duration = Duration::from_secs(1);

/// Bytes that an accepted connection buffers of what its client has not read, twice the largest
/// record. Each connection may hold them, so servers count them in their memory.
const SEND_BUFFER_BYTES: usize = 32 << 10;

/// Use of client certificates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientAuth {
    /// No certificate is requested.
    Off,
    /// A certificate is requested; if the client presents one, it must be valid.
    Optional,
    /// A valid certificate is required.
    Required,
}

/// CAs that sign the certificates of a port's callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallerCa {
    /// Those of nodes. The CA of clients must not be able to make a node.
    Nodes,
    /// Those of clients.
    Clients,
}

/// Use of connections without TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlaintextRule {
    /// They are served too; the first byte decides.
    Accept,
    /// They get a refusal and are closed.
    Refuse,
}

/// Settings of an [`Acceptor`].
#[derive(Debug, Clone, Copy)]
pub struct AcceptorOptions {
    /// Name of the port, for the log.
    pub port: &'static str,
    /// Client certificates.
    pub client_auth: ClientAuth,
    /// CAs that sign them.
    pub caller_ca: CallerCa,
    /// Connections without TLS.
    pub plaintext: PlaintextRule,
    /// Protocol of the port: [`ALPN_H2`] or [`ALPN_HTTP1`](crate::ALPN_HTTP1).
    pub protocol: &'static [u8],
    /// Deadline of a handshake.
    pub deadline: Duration,
    /// Open handshakes; a further one ends the oldest.
    pub handshakes_max: usize,
}

/// A connection after its handshake.
#[derive(Debug)]
pub struct AcceptedSocket<S> {
    /// The connection.
    pub socket: TlsSocket<S>,
    /// Names of the client's certificate, which is verified; `None` if it presented none.
    pub names: Option<CertificateNames>,
}

/// Makes the handshakes of a port, with the store's current certificates.
#[derive(Debug)]
pub struct Acceptor {
    store: Arc<CertificateStore>,
    options: AcceptorOptions,
    /// The configuration of the set in use.
    config: Mutex<Option<(Arc<TrustedSet>, PortConfig)>>,
    slots: HandshakeSlots,
    counts: HandshakeCounts,
    failures: Mutex<UnloggedFailures>,
}

/// Configuration of the handshakes, and the verifier of client certificates in it.
#[derive(Debug, Clone)]
struct PortConfig {
    server: Arc<ServerConfig>,
    verifier: Option<Arc<dyn ClientCertVerifier>>,
}

#[derive(Debug, Default)]
struct HandshakeCounts {
    succeeded: AtomicU64,
    failed: AtomicU64,
    timed_out: AtomicU64,
    displaced: AtomicU64,
    plaintext: AtomicU64,
}

#[derive(Debug, Default)]
struct UnloggedFailures {
    count: u64,
    logged_at: Option<Instant>,
}

impl Acceptor {
    /// Creates the acceptor of a port.
    ///
    /// # Errors
    /// The store has no certificate, or client certificates are requested and it has no CA.
    pub fn new(store: Arc<CertificateStore>, options: AcceptorOptions) -> Result<Self, String> {
        let config = server_config(&store.current(), &options)?;
        Ok(Self {
            config: Mutex::new(Some((store.current(), config))),
            store,
            slots: HandshakeSlots::new(options.handshakes_max),
            options,
            counts: HandshakeCounts::default(),
            failures: Mutex::default(),
        })
    }

    /// Returns the store of the certificates.
    pub fn store(&self) -> &Arc<CertificateStore> {
        &self.store
    }

    /// Returns the name of the port.
    pub fn port(&self) -> &'static str {
        self.options.port
    }

    /// Returns the handshakes since the start, by result.
    pub fn counts(&self) -> [(&'static str, u64); 5] {
        let HandshakeCounts { succeeded, failed, timed_out, displaced, plaintext } = &self.counts;
        [
            ("succeeded", succeeded),
            ("failed", failed),
            ("timed_out", timed_out),
            ("displaced", displaced),
            ("plaintext", plaintext),
        ]
        .map(|(result, count)| (result, count.load(Ordering::Relaxed)))
    }

    /// Makes the handshake of a connection from `peer`. Counts the result, and logs a failure.
    ///
    /// # Errors
    /// The handshake failed, did not complete in time, or was displaced by newer ones.
    pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        socket: S,
        peer: impl Display,
    ) -> Result<AcceptedSocket<S>, HandshakeError> {
        let mut slot = self.slots.enter();
        let accepted = tokio::select! {
            accepted = timeout(self.options.deadline, self.shake_hands(socket)) => {
                accepted.unwrap_or(Err(HandshakeError::TimedOut))
            }
            () = slot.displaced() => Err(HandshakeError::Displaced),
        };
        let count = match &accepted {
            Ok(accepted) if accepted.socket.is_encrypted() => &self.counts.succeeded,
            Ok(_) | Err(HandshakeError::Plaintext) => &self.counts.plaintext,
            Err(HandshakeError::TimedOut) => &self.counts.timed_out,
            Err(HandshakeError::Displaced) => &self.counts.displaced,
            Err(HandshakeError::Ended(_) | HandshakeError::Rejected(_)) => &self.counts.failed,
        };
        count.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = &accepted {
            self.log_failure(&peer, error);
        }
        accepted
    }

    async fn shake_hands<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        mut socket: S,
    ) -> Result<AcceptedSocket<S>, HandshakeError> {
        let first = match socket.read_u8().await {
            Ok(first) => first,
            Err(error) => return Err(HandshakeError::Ended(error)),
        };
        if first != TLS_FIRST_BYTE {
            if self.options.plaintext == PlaintextRule::Refuse {
                // Ignored: the client is gone, or does not read the refusal.
                let _ = timeout(LINGER_MAX, refuse(&mut socket, self.options.protocol)).await;
                return Err(HandshakeError::Plaintext);
            }
            let socket = TlsSocket::peeked(PeekedSocket::new(socket, Some(first)));
            return Ok(AcceptedSocket { socket, names: None });
        }
        let PortConfig { server, verifier } = self.config()?;
        let acceptor = TlsAcceptor::from(server);
        let socket = PeekedSocket::new(socket, Some(first));
        let mut stream = match acceptor.accept(socket).into_fallible().await {
            Ok(stream) => stream,
            Err((error, mut socket)) => {
                // Ignored: the client is gone, or does not read the alert.
                let _ = timeout(LINGER_MAX, linger(&mut socket)).await;
                return Err(match HandshakeError::from_io(error) {
                    // The first byte was that of TLS: the client is broken, not without TLS.
                    HandshakeError::Plaintext => {
                        HandshakeError::Rejected(INVALID_RECORD.to_owned())
                    }
                    error => error,
                });
            }
        };
        stream.get_mut().1.set_buffer_limit(Some(SEND_BUFFER_BYTES));
        let session = stream.get_ref().1;
        let names = match session.peer_certificates() {
            Some([leaf, intermediates @ ..]) => {
                // rustls does not verify the chain of a resumed session, which may have expired.
                if session.handshake_kind() == Some(HandshakeKind::Resumed)
                    && let Some(verifier) = verifier
                {
                    verifier
                        .verify_client_cert(leaf, intermediates, UnixTime::now())
                        .map_err(|error| HandshakeError::from_tls(&error))?;
                }
                Some(CertificateNames::of(leaf).map_err(HandshakeError::Rejected)?)
            }
            _ => None,
        };
        Ok(AcceptedSocket { socket: TlsSocket::tls(stream), names })
    }

    /// Returns the configuration of the set in use.
    fn config(&self) -> Result<PortConfig, HandshakeError> {
        let set = self.store.current();
        let mut cached = self.config.lock().unwrap_or_else(PoisonError::into_inner);
        match &*cached {
            Some((of, config)) if Arc::ptr_eq(of, &set) => Ok(config.clone()),
            _ => {
                let config = server_config(&set, &self.options);
                let config = config.map_err(HandshakeError::Rejected)?;
                *cached = Some((set, config.clone()));
                Ok(config)
            }
        }
    }

    /// Logs a failure: the first one at once, later ones together.
    fn log_failure(&self, peer: &dyn Display, error: &HandshakeError) {
        let failures = {
            let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
            failures.count += 1;
            if failures.logged_at.is_some_and(|at| at.elapsed() < LOG_INTERVAL) {
                return;
            }
            failures.logged_at = Some(Instant::now());
            std::mem::take(&mut failures.count)
        };
        let port = self.options.port;
        match error {
            HandshakeError::Plaintext => tracing::warn!(
                port,
                %peer,
                failures,
                "refused a connection without TLS, which this port requires"
            ),
            error => tracing::warn!(port, %peer, failures, "TLS handshake failed: {error}"),
        }
    }
}

fn server_config(set: &TrustedSet, options: &AcceptorOptions) -> Result<PortConfig, String> {
    let own = set.own.clone().ok_or("a port with TLS needs a certificate and its key")?;
    let builder = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(VERSIONS)
        .map_err(|error| error.to_string())?;
    let verifier = match options.client_auth {
        ClientAuth::Off => None,
        auth => {
            let ca = match options.caller_ca {
                CallerCa::Nodes => &set.ca,
                CallerCa::Clients => &set.client_ca,
            };
            let verifier = WebPkiClientVerifier::builder_with_provider(ca.clone(), provider());
            let verifier = match auth {
                ClientAuth::Optional => verifier.allow_unauthenticated(),
                _ => verifier,
            };
            let verifier = verifier.build();
            Some(verifier.map_err(|error| format!("no CA for client certificates: {error}"))?)
        }
    };
    let builder = match verifier.clone() {
        Some(verifier) => builder.with_client_cert_verifier(verifier),
        None => builder.with_no_client_auth(),
    };
    let mut config = builder.with_cert_resolver(Arc::new(own));
    config.alpn_protocols = vec![options.protocol.to_vec()];
    // Stateless, so that clients cannot make a server remember sessions.
    config.ticketer = rustls::crypto::ring::Ticketer::new().map_err(|error| error.to_string())?;
    config.send_tls13_tickets = 1;
    Ok(PortConfig { server: Arc::new(config), verifier })
}

/// Tells a client without TLS in its own protocol why its connection is closed.
async fn refuse<S: AsyncRead + AsyncWrite + Unpin>(
    socket: &mut S,
    protocol: &[u8],
) -> io::Result<()> {
    let refusal = if protocol == ALPN_H2 { http2_refusal() } else { http1_refusal() };
    socket.write_all(&refusal).await?;
    linger(socket).await
}

/// Ends a connection so that the other side reads what was sent last, and no reset instead.
async fn linger<S: AsyncRead + AsyncWrite + Unpin>(socket: &mut S) -> io::Result<()> {
    socket.shutdown().await?;
    let mut left = REFUSED_BYTES_MAX;
    let mut buffer = [0; 1024];
    while left > 0 {
        match socket.read(&mut buffer).await? {
            0 => break,
            bytes => left = left.saturating_sub(bytes),
        }
    }
    Ok(())
}

/// Reason that a client without TLS reads in its own protocol.
pub const PLAINTEXT_REFUSAL: &str = "this port requires TLS";

/// Returns empty settings and a GOAWAY with INADEQUATE_SECURITY (RFC 9113, section 7).
fn http2_refusal() -> Vec<u8> {
    const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    const GOAWAY: [u8; 6] = [7, 0, 0, 0, 0, 0];
    const LAST_STREAM_AND_CODE: [u8; 8] = [0, 0, 0, 0, 0, 0, 0, 12];
    let length = (LAST_STREAM_AND_CODE.len() + PLAINTEXT_REFUSAL.len()) as u32;
    let length = &length.to_be_bytes()[1..];
    [&SETTINGS, length, &GOAWAY, &LAST_STREAM_AND_CODE, PLAINTEXT_REFUSAL.as_bytes()].concat()
}

fn http1_refusal() -> Vec<u8> {
    let length = PLAINTEXT_REFUSAL.len() + 1;
    format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: \
         {length}\r\nconnection: close\r\n\r\n{PLAINTEXT_REFUSAL}\n"
    )
    .into_bytes()
}
