//! Names and validity of X.509 certificates.

use std::fmt::{self, Display, Write};

use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;

/// Longest name that is kept of a certificate, and most names of each kind.
const NAME_BYTES_MAX: usize = 1 << 10;
const NAMES_MAX: usize = 64;

/// The names of a certificate. Those of a client are verified by the handshake.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CertificateNames {
    /// URIs of the subject alternative name, in their order.
    pub uris: Vec<String>,
    /// DNS names of the subject alternative name, in their order.
    pub dns: Vec<String>,
    /// Common names of the subject, in their order.
    pub common_names: Vec<String>,
}

impl CertificateNames {
    /// Reads the names of a certificate.
    ///
    /// # Errors
    /// The certificate cannot be parsed, or has too many or too long names.
    pub fn of(der: &[u8]) -> Result<Self, String> {
        Self::of_parsed(&parse(der)?)
    }

    fn of_parsed(certificate: &X509Certificate<'_>) -> Result<Self, String> {
        let mut names = Self::default();
        let alternative = certificate.subject_alternative_name().map_err(|error| {
            format!("the certificate has an invalid subject alternative name: {error}")
        })?;
        for name in alternative.iter().flat_map(|extension| &extension.value.general_names) {
            match name {
                GeneralName::URI(uri) => names.uris.push((*uri).to_owned()),
                GeneralName::DNSName(name) => names.dns.push((*name).to_owned()),
                _ => {}
            }
        }
        for name in certificate.subject().iter_common_name() {
            // Of a type that is not text: kept, so that it still counts as a name.
            names.common_names.push(name.as_str().unwrap_or_default().to_owned());
        }
        let all = names.uris.iter().chain(&names.dns).chain(&names.common_names);
        let is_bounded = [&names.uris, &names.dns, &names.common_names]
            .iter()
            .all(|names| names.len() <= NAMES_MAX)
            && all.clone().all(|name| name.len() <= NAME_BYTES_MAX);
        if !is_bounded {
            return Err(format!(
                "the certificate has more than {NAMES_MAX} names, or one of more than \
                 {NAME_BYTES_MAX} bytes"
            ));
        }
        if all.into_iter().any(|name| name.chars().any(char::is_control)) {
            return Err("a name of the certificate has control characters".to_owned());
        }
        Ok(names)
    }

    /// Returns a name for messages: the first URI, else the first DNS name, else the first common
    /// name. `None` if the certificate has no such name.
    pub fn shown_name(&self) -> Option<&str> {
        let mut names = self.uris.iter().chain(&self.dns).chain(&self.common_names);
        names.find(|name| !name.is_empty()).map(String::as_str)
    }
}

impl Display for CertificateNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.shown_name() {
            Some(name) => write!(f, "{name:?}"),
            None => f.write_str("a subject without a name"),
        }
    }
}

/// Role of a certificate in a set of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CertificateKind {
    /// The certificate of this process.
    Own,
    /// An intermediate certificate of its chain.
    Intermediate,
    /// A CA that signs servers and nodes.
    Ca,
    /// A CA that signs clients.
    ClientCa,
}

impl CertificateKind {
    /// Returns the name for metrics and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Intermediate => "intermediate",
            Self::Ca => "ca",
            Self::ClientCa => "client-ca",
        }
    }
}

/// Description of a certificate in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateInfo {
    /// Role.
    pub kind: CertificateKind,
    /// Its first URI, DNS name or common name.
    pub name: String,
    /// Serial number in hexadecimal digits.
    pub serial: String,
    /// First second in which it is valid, since the Unix epoch.
    pub not_before: i64,
    /// Last second in which it is valid, since the Unix epoch.
    pub not_after: i64,
}

impl CertificateInfo {
    /// Reads the description of a certificate.
    ///
    /// # Errors
    /// The certificate cannot be parsed.
    pub fn of(kind: CertificateKind, der: &[u8]) -> Result<Self, String> {
        let certificate = parse(der)?;
        // A CA may have names that no identity may have.
        let names = CertificateNames::of_parsed(&certificate).unwrap_or_default();
        let mut serial = String::new();
        for byte in certificate.raw_serial().iter().take(32) {
            // Ignored: writing to a string cannot fail.
            let _ = write!(serial, "{byte:02x}");
        }
        Ok(Self {
            kind,
            name: names.shown_name().unwrap_or("?").to_owned(),
            serial,
            not_before: certificate.validity().not_before.timestamp(),
            not_after: certificate.validity().not_after.timestamp(),
        })
    }

    /// Returns the seconds until the certificate expires; negative once it has.
    pub fn seconds_left(&self) -> i64 {
        self.not_after.saturating_sub(crate::unix_now())
    }

    /// Returns true if the certificate is not valid yet.
    pub(crate) fn is_early(&self) -> bool {
        self.not_before > crate::unix_now()
    }
}

fn parse(der: &[u8]) -> Result<X509Certificate<'_>, String> {
    match X509Certificate::from_der(der) {
        Ok(([], certificate)) => Ok(certificate),
        Ok(_) => Err("bytes follow the certificate".to_owned()),
        Err(error) => Err(format!("the certificate cannot be parsed: {error}")),
    }
}
