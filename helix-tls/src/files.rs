//! Reads certificates, keys and CAs from PEM files.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::error::TlsFilesError;

/// Largest file; a chain has some KiB.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Most certificates in a file.
const CERTIFICATES_MAX: usize = 256;

/// The files of one process. Each is PEM; a file of CAs may have several, and so may the list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CertificateFiles {
    /// Certificate of this process, followed by its intermediate certificates.
    pub certificate: Option<PathBuf>,
    /// Private key of the certificate: PKCS #8, SEC 1 or PKCS #1.
    pub key: Option<PathBuf>,
    /// CAs that sign the certificates of servers and nodes.
    pub ca: Vec<PathBuf>,
    /// CAs that sign the certificates of clients; if empty, those of `ca`.
    pub client_ca: Vec<PathBuf>,
}

/// Bytes that must not be shown: their debug output is empty.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretBytes(Vec<u8>);

impl fmt::Debug for SecretBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(hidden)")
    }
}

/// Contents of all files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileContents {
    certificate: Option<SecretBytes>,
    key: Option<SecretBytes>,
    ca: Vec<SecretBytes>,
    client_ca: Vec<SecretBytes>,
}

impl FileContents {
    /// Returns true if both have the same certificate of this process.
    pub(crate) fn has_certificate_of(&self, other: &Self) -> bool {
        self.certificate == other.certificate
    }
}

/// Parsed contents of all files.
pub(crate) struct ParsedFiles {
    pub(crate) own: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
    pub(crate) ca: Vec<CertificateDer<'static>>,
    pub(crate) client_ca: Vec<CertificateDer<'static>>,
}

impl CertificateFiles {
    /// Reads all files.
    ///
    /// # Errors
    /// A file cannot be read, or is too large.
    pub(crate) fn read(&self) -> Result<FileContents, TlsFilesError> {
        let all = |paths: &[PathBuf]| -> Result<Vec<SecretBytes>, TlsFilesError> {
            paths.iter().map(|path| read(path)).collect()
        };
        Ok(FileContents {
            certificate: self.certificate.as_deref().map(read).transpose()?,
            key: self.key.as_deref().map(read).transpose()?,
            ca: all(&self.ca)?,
            client_ca: all(&self.client_ca)?,
        })
    }

    /// Parses the contents of these files.
    ///
    /// # Errors
    /// A file is not PEM, or has no certificate or key.
    pub(crate) fn parse(&self, contents: &FileContents) -> Result<ParsedFiles, TlsFilesError> {
        let own = match (&self.certificate, &self.key) {
            (Some(certificate), Some(key)) => {
                let chain = contents.certificate.as_ref();
                let chain = chain.map_or(Ok(Vec::new()), |it| certificates(certificate, it))?;
                let secret = contents.key.as_ref().map(|it| private_key(key, it)).transpose()?;
                secret.map(|secret| (chain, secret))
            }
            (Some(path), None) => {
                return Err(TlsFilesError::new(path, "the file of its private key is not set"));
            }
            (None, Some(path)) => {
                return Err(TlsFilesError::new(path, "the file of its certificate is not set"));
            }
            (None, None) => None,
        };
        let all = |paths: &[PathBuf], contents: &[SecretBytes]| {
            let each = paths.iter().zip(contents).map(|(path, bytes)| certificates(path, bytes));
            Ok(each.collect::<Result<Vec<_>, TlsFilesError>>()?.concat())
        };
        Ok(ParsedFiles {
            own,
            ca: all(&self.ca, &contents.ca)?,
            client_ca: all(&self.client_ca, &contents.client_ca)?,
        })
    }
}

// Not logs, whose files only helix-wal accesses.
#[expect(clippy::disallowed_methods, reason = "files of certificates belong to no log")]
fn read(path: &Path) -> Result<SecretBytes, TlsFilesError> {
    let cannot = |error: std::io::Error| {
        TlsFilesError::new(path, format!("cannot be read: {error}; check path and permissions"))
    };
    let file = std::fs::File::open(path).map_err(cannot)?;
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(cannot)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(TlsFilesError::new(path, "has more than 1 MiB; it is no file of certificates"));
    }
    Ok(SecretBytes(bytes))
}

fn certificates(
    path: &Path,
    SecretBytes(pem): &SecretBytes,
) -> Result<Vec<CertificateDer<'static>>, TlsFilesError> {
    let mut found = Vec::new();
    for certificate in CertificateDer::pem_slice_iter(pem) {
        if found.len() == CERTIFICATES_MAX {
            let what = format!("has more than {CERTIFICATES_MAX} certificates");
            return Err(TlsFilesError::new(path, what));
        }
        found.push(certificate.map_err(|_| TlsFilesError::new(path, "is not valid PEM"))?);
    }
    if found.is_empty() {
        let what = "has no certificate; write PEM with -----BEGIN CERTIFICATE-----";
        return Err(TlsFilesError::new(path, what));
    }
    Ok(found)
}

fn private_key(
    path: &Path,
    SecretBytes(pem): &SecretBytes,
) -> Result<PrivateKeyDer<'static>, TlsFilesError> {
    // The parser's error is not shown, because it may have contents of the file.
    PrivateKeyDer::from_pem_slice(pem).map_err(|_| {
        let what = "has no private key; write PEM with -----BEGIN PRIVATE KEY-----, not encrypted";
        TlsFilesError::new(path, what)
    })
}
