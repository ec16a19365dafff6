//! Reads certificates, keys and CAs from PEM files.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use rustls::pki_types::pem::SectionKind;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::error::TlsFilesError;
use crate::pem::{self, PemBlock};

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

/// A certificate, and where it is.
#[derive(Debug)]
pub(crate) struct FoundCertificate {
    pub(crate) der: CertificateDer<'static>,
    path: PathBuf,
    line: usize,
}

impl FoundCertificate {
    /// Returns the error of this certificate.
    pub(crate) fn error(&self, what: &str) -> TlsFilesError {
        TlsFilesError::new(&self.path, format!("line {}: {what}", self.line))
    }
}

/// Parsed contents of all files.
pub(crate) struct ParsedFiles {
    pub(crate) own: Option<(Vec<FoundCertificate>, PrivateKeyDer<'static>)>,
    pub(crate) ca: Vec<FoundCertificate>,
    pub(crate) client_ca: Vec<FoundCertificate>,
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
    /// A file is not PEM, has no certificate or key, or has a block that would be left out.
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
            let all = each.collect::<Result<Vec<_>, TlsFilesError>>()?;
            Ok::<_, TlsFilesError>(all.into_iter().flatten().collect())
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
    SecretBytes(file): &SecretBytes,
) -> Result<Vec<FoundCertificate>, TlsFilesError> {
    let wrong = |what: String| TlsFilesError::new(path, what);
    let mut found = Vec::new();
    for block in pem::blocks(file).map_err(wrong)? {
        if is_key(&block) || is_parameters(&block) {
            // The key of a certificate may be in the same file.
            continue;
        }
        if block.label != "CERTIFICATE" {
            return Err(left_out(path, &block, "certificates"));
        }
        if found.len() == CERTIFICATES_MAX {
            return Err(wrong(format!("has more than {CERTIFICATES_MAX} certificates")));
        }
        let (_, der) = block.decode().map_err(wrong)?;
        found.push(FoundCertificate { der: der.into(), path: path.to_owned(), line: block.line });
    }
    if found.is_empty() {
        let what = "has no certificate; write PEM with -----BEGIN CERTIFICATE-----";
        return Err(wrong(what.to_owned()));
    }
    Ok(found)
}

fn private_key(
    path: &Path,
    SecretBytes(file): &SecretBytes,
) -> Result<PrivateKeyDer<'static>, TlsFilesError> {
    let wrong = |what: String| TlsFilesError::new(path, what);
    let mut found: Option<(usize, PrivateKeyDer<'static>)> = None;
    for block in pem::blocks(file).map_err(wrong)? {
        if !is_key(&block) {
            // The certificate may be in the same file.
            if block.label == "CERTIFICATE" || is_parameters(&block) {
                continue;
            }
            return Err(left_out(path, &block, "a private key that is not encrypted"));
        }
        let line = block.line;
        if let Some((first, _)) = found {
            let what = format!("line {line}: is a second private key, after that of line {first}");
            return Err(wrong(format!("{what}; remove the key of another certificate")));
        }
        let key = match block.decode().map_err(wrong)? {
            (SectionKind::PrivateKey, der) => PrivateKeyDer::Pkcs8(der.into()),
            (SectionKind::EcPrivateKey, der) => PrivateKeyDer::Sec1(der.into()),
            (SectionKind::RsaPrivateKey, der) => PrivateKeyDer::Pkcs1(der.into()),
            _ => return Err(left_out(path, &block, "a private key that is not encrypted")),
        };
        found = Some((line, key));
    }
    found.map(|(_, key)| key).ok_or_else(|| {
        let what = "has no private key; write PEM with -----BEGIN PRIVATE KEY-----, not encrypted";
        wrong(what.to_owned())
    })
}

fn is_key(block: &PemBlock<'_>) -> bool {
    matches!(block.label, "PRIVATE KEY" | "EC PRIVATE KEY" | "RSA PRIVATE KEY")
}

/// Returns true for a block that OpenSSL writes beside a key, which has the parameters too.
fn is_parameters(block: &PemBlock<'_>) -> bool {
    matches!(block.label, "EC PARAMETERS" | "DH PARAMETERS")
}

/// Returns the error of a block that cannot be taken.
fn left_out(path: &Path, block: &PemBlock<'_>, taken: &str) -> TlsFilesError {
    let label = pem::shown(block.label);
    let remedy = match block.label {
        "TRUSTED CERTIFICATE" | "X509 CERTIFICATE" => "; convert it with openssl x509",
        "X509 CRL" => "; revocation lists are not supported",
        "ENCRYPTED PRIVATE KEY" => "; write it without a password, as openssl pkey does",
        _ => "; remove it",
    };
    let line = block.line;
    let what = format!("line {line}: has a block {label}, and takes only {taken}{remedy}");
    TlsFilesError::new(path, what)
}
