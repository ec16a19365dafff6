//! TLS of Helix, for servers and clients: certificates from files, handshakes, identities.
//!
//! - [`CertificateStore`] reads a certificate with its key and the trusted CAs, as one set or not
//!   at all. It reads the files again when they change, so that certificates rotate without a
//!   restart. A set that is not valid leaves the one before in use.
//! - [`Acceptor`] and [`Connector`] make handshakes with the store's current certificates. Open
//!   connections are not affected by a rotation.
//! - [`CertificateNames`] has the names of a verified certificate, [`NodeIdentity`] the node that a
//!   certificate of a node is for.
//! - [`issue`] makes certificates, with the feature `issue`.
//! - [`forward_read!`] and [`forward_write!`] implement I/O for connections that wrap others.
//!
//! The crate knows no setting, no RPC and no metric. rustls with ring makes TLS 1.3 and 1.2
//! (docs/decisions/0041).

mod acceptor;
mod certificate;
mod connector;
mod error;
mod files;
mod forward;
mod handshake_slots;
mod identity;
#[cfg(feature = "issue")]
pub mod issue;
mod pem;
mod socket;
mod store;

use std::sync::Arc;

use rustls::crypto::CryptoProvider;

pub use acceptor::{
    AcceptedSocket, Acceptor, AcceptorOptions, CallerCa, ClientAuth, PLAINTEXT_REFUSAL,
    PlaintextRule,
};
pub use certificate::{CertificateInfo, CertificateKind, CertificateNames};
pub use connector::{Connector, ServerRule};
pub use error::{HandshakeError, TlsFilesError, describe_tls_error};
pub use files::{CertificateFiles, SecretBytes};
pub use identity::{NodeIdentity, check_cluster_name};
pub use socket::TlsSocket;
pub use store::{CertificateStore, NodeRule, RELOAD_INTERVAL, ReloadStatus, TrustedSet};

/// Protocol name of HTTP/2 in the handshake (RFC 7540).
pub const ALPN_H2: &[u8] = b"h2";
/// Protocol name of HTTP/1.1 in the handshake.
pub const ALPN_HTTP1: &[u8] = b"http/1.1";

/// TLS versions in use.
const VERSIONS: &[&rustls::SupportedProtocolVersion] =
    &[&rustls::version::TLS13, &rustls::version::TLS12];

/// Returns the cryptography. Explicit, so that no process-wide default decides.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Returns the seconds since the Unix epoch.
fn unix_now() -> i64 {
    let now = rustls::pki_types::UnixTime::now().as_secs();
    i64::try_from(now).unwrap_or(i64::MAX)
}
