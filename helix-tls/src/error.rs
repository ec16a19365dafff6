//! Errors of files and of handshakes, in words for operators.

use std::error::Error as StdError;
use std::io;
use std::path::{Path, PathBuf};

use rustls::{AlertDescription, CertificateError, InvalidMessage};

/// Problem with a file of certificates or keys.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {what}", path.display())]
pub struct TlsFilesError {
    /// The file.
    pub path: PathBuf,
    /// The problem, and the remedy. Never has contents of the file.
    pub what: String,
}

impl TlsFilesError {
    pub(crate) fn new(path: &Path, what: impl Into<String>) -> Self {
        Self { path: path.to_owned(), what: what.into() }
    }
}

/// Reason why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The other side did not complete the handshake in time.
    #[error("the TLS handshake did not complete in time")]
    TimedOut,
    /// The handshake was the oldest one when too many were open.
    #[error("too many TLS handshakes are open, and this one was the oldest")]
    Displaced,
    /// The other side does not speak TLS.
    #[error("the other side does not speak TLS")]
    Plaintext,
    /// The connection ended, or the host refused it.
    #[error("the connection ended during the TLS handshake: {0}")]
    Ended(io::Error),
    /// The other side, its certificate, or this side's certificate was rejected.
    #[error("{0}")]
    Rejected(String),
}

impl HandshakeError {
    /// Converts the error of a handshake.
    pub(crate) fn from_io(error: io::Error) -> Self {
        if is_plaintext(&error) {
            return Self::Plaintext;
        }
        match describe_tls_error(&error) {
            Some(what) => Self::Rejected(what),
            None => Self::Ended(error),
        }
    }

    /// Converts the error of a certificate that was verified after the handshake.
    pub(crate) fn from_tls(error: &rustls::Error) -> Self {
        Self::Rejected(describe(error))
    }
}

impl HandshakeError {
    /// Converts the error for a caller that connects a socket.
    pub fn into_io(self) -> io::Error {
        match self {
            Self::Ended(error) => error,
            Self::TimedOut | Self::Displaced => io::Error::new(io::ErrorKind::TimedOut, self),
            Self::Plaintext | Self::Rejected(_) => {
                io::Error::new(io::ErrorKind::PermissionDenied, self)
            }
        }
    }
}

/// Returns true if the bytes that arrived are not those of a TLS connection.
fn is_plaintext(error: &io::Error) -> bool {
    matches!(
        error.get_ref().and_then(|inner| inner.downcast_ref()),
        Some(rustls::Error::InvalidMessage(
            InvalidMessage::InvalidContentType
                | InvalidMessage::UnknownProtocolVersion
                | InvalidMessage::MessageTooLarge
                | InvalidMessage::InvalidEmptyPayload
        ))
    )
}

/// Returns a description of the TLS error among the sources of an error, if there is one.
///
/// With TLS 1.3 a server rejects a client's certificate after the client's handshake has ended, so
/// that the error appears in a later read.
pub fn describe_tls_error(error: &(dyn StdError + 'static)) -> Option<String> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(error) = error.downcast_ref::<rustls::Error>() {
            return Some(describe(error));
        }
        // The source of an I/O error is that of the error within.
        let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        if let Some(what) = inner.and_then(|inner| describe_tls_error(inner)) {
            return Some(what);
        }
        next = error.source();
    }
    None
}

fn describe(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidCertificate(error) => describe_certificate(error),
        rustls::Error::NoCertificatesPresented => {
            "the client presents no certificate, and this port requires one".to_owned()
        }
        rustls::Error::AlertReceived(alert) => describe_alert(*alert),
        rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
            "the other side does not speak TLS".to_owned()
        }
        other => format!("TLS failed: {other}"),
    }
}

fn describe_certificate(error: &CertificateError) -> String {
    match error {
        // With a bad signature a trusted CA has the name of the issuer, and another key.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "the certificate of the other side is signed by no CA that this side trusts; check the \
             CA file"
                .to_owned()
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "the certificate of the other side has expired; renew it, and check the clocks"
                .to_owned()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "the certificate of the other side is not valid yet; check the clocks".to_owned()
        }
        CertificateError::NotValidForName => {
            "the certificate of the other side is for another name".to_owned()
        }
        CertificateError::NotValidForNameContext { expected, presented } => {
            let expected = expected.to_str();
            let names: Vec<_> = presented.iter().filter_map(|name| host_name(name)).collect();
            let presented = match names.as_slice() {
                [] => "no host".to_owned(),
                names => names.join(", "),
            };
            format!(
                "the certificate of the other side is for {presented}, not for {expected}; dial \
                 one of its names, or set the server name"
            )
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "the extended key usage of the other side's certificate does not allow its use; a \
             server needs serverAuth, a client clientAuth, a node both"
                .to_owned()
        }
        CertificateError::Other(error) => error.to_string(),
        other => format!("the certificate of the other side is not valid: {other}"),
    }
}

/// Returns the host of a name as rustls shows it, `DnsName("n1")` or `IpAddress(10.0.0.1)`; `None`
/// for a name of another kind.
fn host_name(shown: &str) -> Option<&str> {
    let (kind, name) = shown.strip_suffix(')')?.split_once('(')?;
    matches!(kind, "DnsName" | "IpAddress").then(|| name.trim_matches('"'))
}

fn describe_alert(alert: AlertDescription) -> String {
    match alert {
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            "the other side trusts no CA that signed this side's certificate".to_owned()
        }
        AlertDescription::CertificateRequired => {
            "the other side requires a client certificate".to_owned()
        }
        AlertDescription::CertificateExpired => {
            "the other side rejects this side's certificate: it has expired".to_owned()
        }
        AlertDescription::BadCertificate
        | AlertDescription::CertificateUnknown
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateRevoked
        | AlertDescription::AccessDenied => {
            format!("the other side rejects this side's certificate: {alert:?}; see its log")
        }
        AlertDescription::NoApplicationProtocol => {
            "the other side speaks another protocol than this port".to_owned()
        }
        alert => format!("the other side ended the TLS handshake: {alert:?}"),
    }
}
