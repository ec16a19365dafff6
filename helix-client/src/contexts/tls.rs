//! Files of TLS as options, contexts and the environment have them.

use std::ffi::OsString;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{ContextError, ContextErrorKind};
use crate::tls_options::TlsOptions;

/// Environment variables with files of TLS, in the order of [`ContextTls`].
pub(super) const CA_VARIABLE: &str = "HELIX_TLS_CA";
pub(super) const CERT_VARIABLE: &str = "HELIX_TLS_CERT";
pub(super) const KEY_VARIABLE: &str = "HELIX_TLS_KEY";

/// Files of TLS as a context has them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContextTls {
    /// CAs of the nodes, PEM; turns TLS on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    /// Certificate of the client, PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert: Option<PathBuf>,
    /// Private key of the certificate, PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
    /// Name that the certificates of all nodes must have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_name: Option<String>,
}

impl ContextTls {
    /// Returns true without any file or name.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the files that the environment names; an empty variable names none.
    pub(super) fn of_environment(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let path = |name| variable(name).filter(|it| !it.is_empty()).map(PathBuf::from);
        Self {
            ca: path(CA_VARIABLE),
            cert: path(CERT_VARIABLE),
            key: path(KEY_VARIABLE),
            server_name: None,
        }
    }

    /// Takes each field that is missing here from `other`.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            ca: self.ca.or(other.ca),
            cert: self.cert.or(other.cert),
            key: self.key.or(other.key),
            server_name: self.server_name.or(other.server_name),
        }
    }

    /// Converts the files for the client; `None` without TLS.
    ///
    /// # Errors
    /// Fails if a file is missing among them.
    pub fn options(&self) -> Result<Option<TlsOptions>, ContextError> {
        let missing = |what: &str, why: &str, hint: &str| {
            let error = ContextError::new(ContextErrorKind::InvalidSetting, what);
            Err(error.why(why).hint(hint))
        };
        let Some(ca) = &self.ca else {
            return match self.is_empty() {
                true => Ok(None),
                false => missing(
                    "TLS needs the CA of the nodes",
                    "a certificate, a key or a server name is set; options, the context and the \
                     environment (HELIX_TLS_CERT, HELIX_TLS_KEY) add up",
                    "--tls-ca FILE, or HELIX_TLS_CA",
                ),
            };
        };
        let certificate = match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => Some((cert.clone(), key.clone())),
            (None, None) => None,
            (Some(cert), None) => {
                let why = format!("the certificate is {}", cert.display());
                let hint = "--tls-key FILE, or HELIX_TLS_KEY";
                return missing("the certificate has no private key", &why, hint);
            }
            (None, Some(key)) => {
                let why = format!("the private key is {}", key.display());
                let hint = "--tls-cert FILE, or HELIX_TLS_CERT";
                return missing("the private key has no certificate", &why, hint);
            }
        };
        let (ca_files, server_name) = (vec![ca.clone()], self.server_name.clone());
        Ok(Some(TlsOptions { ca_files, certificate, server_name }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_needs_its_key_and_a_ca() {
        let pem = || Some(PathBuf::from("/x.pem"));
        for tls in [
            ContextTls { cert: pem(), key: pem(), ..ContextTls::default() },
            ContextTls { ca: pem(), cert: pem(), ..ContextTls::default() },
            ContextTls { ca: pem(), key: pem(), ..ContextTls::default() },
            ContextTls { server_name: Some("n1".to_owned()), ..ContextTls::default() },
        ] {
            let error = tls.options().unwrap_err();
            assert_eq!(error.kind, ContextErrorKind::InvalidSetting, "{tls:?}");
            assert!(!error.why.is_empty() && !error.hint.is_empty(), "{error:?}");
        }
    }
}
