//! Files of TLS: those of the options, and those that `helix dev --tls` has made.

use std::path::{Path, PathBuf};

use helix_client::contexts::ContextTls;

use crate::args::TlsArgs;

/// Returns the files of the options, with absolute paths so that a context is valid in every
/// directory.
pub(crate) fn of_args(args: &TlsArgs) -> ContextTls {
    let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
    ContextTls {
        ca: args.tls_ca.as_ref().map(absolute),
        cert: args.tls_cert.as_ref().map(absolute),
        key: args.tls_key.as_ref().map(absolute),
        server_name: args.tls_server_name.clone(),
    }
}

/// Returns the files in a directory that `helix dev --tls` has made, for its client.
pub(crate) fn in_directory(directory: &Path) -> ContextTls {
    ContextTls {
        ca: Some(directory.join("ca.pem")),
        cert: Some(directory.join("client-dev.pem")),
        key: Some(directory.join("client-dev.key")),
        server_name: None,
    }
}
