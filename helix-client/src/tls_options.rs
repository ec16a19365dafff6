//! Files of TLS.

use std::path::PathBuf;

/// Files of TLS: PEM, read again when they change, so that certificates rotate without a restart.
///
/// A new connection uses the files as they are then; if they are not valid, those before. The CAs
/// of the operating system are not used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsOptions {
    /// CAs that sign the certificates of the nodes; at least one. A file may have several CAs.
    pub ca_files: Vec<PathBuf>,
    /// Certificate of the client, followed by its intermediate certificates, and its private key.
    /// Default: none, an anonymous client.
    pub certificate: Option<(PathBuf, PathBuf)>,
    /// Name that the certificates of all nodes must have. Default: the host of the address.
    pub server_name: Option<String>,
}

impl TlsOptions {
    /// Returns the options of a client without a certificate that trusts the CAs of a file.
    pub fn new(ca_file: impl Into<PathBuf>) -> Self {
        Self { ca_files: vec![ca_file.into()], ..Self::default() }
    }

    /// Sets the certificate of the client and its private key.
    #[must_use]
    pub fn with_certificate(
        self,
        certificate: impl Into<PathBuf>,
        key: impl Into<PathBuf>,
    ) -> Self {
        Self { certificate: Some((certificate.into(), key.into())), ..self }
    }
}
