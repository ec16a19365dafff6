//! Files of TLS of a command: from its options, else those of the context that gives the addresses,
//! else from the environment.

use std::path::{Path, PathBuf};

use helix_client::TlsOptions;
use serde::{Deserialize, Serialize};

use crate::args::TlsArgs;
use crate::exit::{CliError, Exit};

/// Environment variables, in the order of [`ContextTls`].
const CA_ENV: &str = "HELIX_TLS_CA";
const CERT_ENV: &str = "HELIX_TLS_CERT";
const KEY_ENV: &str = "HELIX_TLS_KEY";

/// Files of TLS as a context has them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ContextTls {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ca: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cert: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) key: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) server_name: Option<String>,
}

impl ContextTls {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the options of a command, with absolute paths so that a context is valid in every
    /// directory.
    pub(crate) fn of_args(args: &TlsArgs) -> Self {
        let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        Self {
            ca: args.tls_ca.as_ref().map(absolute),
            cert: args.tls_cert.as_ref().map(absolute),
            key: args.tls_key.as_ref().map(absolute),
            server_name: args.tls_server_name.clone(),
        }
    }

    fn of_environment(variable: impl Fn(&str) -> Option<String>) -> Self {
        let path = |name| variable(name).filter(|it| !it.is_empty()).map(PathBuf::from);
        Self { ca: path(CA_ENV), cert: path(CERT_ENV), key: path(KEY_ENV), server_name: None }
    }

    /// Converts the files for the client; `None` without TLS.
    ///
    /// # Errors
    /// Fails if a file is missing among them.
    pub(crate) fn options(&self) -> anyhow::Result<Option<TlsOptions>> {
        let missing = |what: &str, hint: &str| {
            let failure = CliError::new(Exit::Usage, what.to_owned());
            Err(failure.hint(hint.to_owned()).into())
        };
        let Some(ca) = &self.ca else {
            return match self.is_empty() {
                true => Ok(None),
                false => missing("TLS needs the CA of the nodes", "--tls-ca FILE"),
            };
        };
        let certificate = match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => Some((cert.clone(), key.clone())),
            (None, None) => None,
            (Some(_), None) => {
                return missing("the certificate has no private key", "--tls-key FILE");
            }
            (None, Some(_)) => {
                return missing("the private key has no certificate", "--tls-cert FILE");
            }
        };
        let ca_files = vec![ca.clone()];
        let server_name = self.server_name.clone();
        Ok(Some(TlsOptions { ca_files, certificate, server_name }))
    }

    /// Returns the files in a directory that `helix dev --tls` has made, for its client.
    pub(crate) fn in_directory(directory: &Path) -> Self {
        Self {
            ca: Some(directory.join("ca.pem")),
            cert: Some(directory.join("client-dev.pem")),
            key: Some(directory.join("client-dev.key")),
            server_name: None,
        }
    }
}

/// Selects the files of a command. A context gives them only if it gives the addresses too.
///
/// # Errors
/// Fails if a file is missing among those of the first source that has any.
pub(crate) fn resolve(
    args: &TlsArgs,
    context: Option<ContextTls>,
) -> anyhow::Result<Option<TlsOptions>> {
    select(args, context, |name| std::env::var(name).ok())
}

fn select(
    args: &TlsArgs,
    context: Option<ContextTls>,
    variable: impl Fn(&str) -> Option<String>,
) -> anyhow::Result<Option<TlsOptions>> {
    let given = ContextTls::of_args(args);
    if !given.is_empty() {
        return given.options();
    }
    match context {
        Some(context) => context.options(),
        None => ContextTls::of_environment(variable).options(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ca_of(args: &TlsArgs, context: Option<&str>, env: Option<&str>) -> Option<String> {
        let context = context.map(|ca| ContextTls { ca: Some(ca.into()), ..ContextTls::default() });
        let variable = |name: &str| env.filter(|_| name == CA_ENV).map(str::to_owned);
        let options = select(args, context, variable).unwrap()?;
        Some(options.ca_files[0].display().to_string())
    }

    #[test]
    fn options_precede_the_context_which_precedes_the_environment() {
        let args = TlsArgs { tls_ca: Some("/f.pem".into()), ..TlsArgs::default() };
        let none = TlsArgs::default();
        assert_eq!(ca_of(&args, Some("/c.pem"), Some("/e.pem")).unwrap(), "/f.pem");
        assert_eq!(ca_of(&none, Some("/c.pem"), Some("/e.pem")).unwrap(), "/c.pem");
        assert_eq!(ca_of(&none, None, Some("/e.pem")).unwrap(), "/e.pem");
        assert_eq!(ca_of(&none, None, Some("")), None);
        // A context without TLS is a cluster without TLS.
        assert_eq!(select(&none, Some(ContextTls::default()), |_| None).unwrap(), None);
    }

    #[test]
    fn a_certificate_needs_its_key_and_a_ca() {
        let pem = || Some(PathBuf::from("/x.pem"));
        for args in [
            TlsArgs { tls_cert: pem(), tls_key: pem(), ..TlsArgs::default() },
            TlsArgs { tls_ca: pem(), tls_cert: pem(), ..TlsArgs::default() },
            TlsArgs { tls_ca: pem(), tls_key: pem(), ..TlsArgs::default() },
            TlsArgs { tls_server_name: Some("n1".to_owned()), ..TlsArgs::default() },
        ] {
            let error = select(&args, None, |_| None).unwrap_err();
            assert_eq!(crate::exit::of(&error), Exit::Usage, "{args:?}");
        }
    }
}
