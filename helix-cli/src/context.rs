//! Contexts of the command line: their errors, and the file that `helix context` writes.
//! [`helix_client::contexts`] reads the file and chooses the cluster of a command.

use anyhow::Context as _;
use helix_client::contexts::{ContextError, ContextErrorKind, Contexts};

use crate::exit::{CliError, Exit};
use crate::files;

/// Order of the address sources, for help texts and documentation.
pub(crate) const HELP: &str = "\
A command connects to the first of these that is set:
  --addr HOST:PORT,...   nodes to contact first; they name the other nodes. PORT defaults to 9092;
                         unix:PATH is the socket of a node on this machine
  --context NAME         a context: helix context add NAME --addr ...; with --addr too, only its
                         files of TLS are used
  HELIX_ADDR             environment variable, same format as --addr
  the current context    helix context use NAME
  127.0.0.1:9092         the default
Each file of TLS is the one of its option, else of the context, else of its variable (HELIX_TLS_CA,
HELIX_TLS_CERT, HELIX_TLS_KEY). TLS is on if there is a CA; other settings of TLS without a CA are
refused, so that no token goes out unencrypted.";

/// Loads the user's contexts; empty if there is no file.
///
/// # Errors
/// Fails if the file cannot be read or parsed.
pub(crate) fn load() -> anyhow::Result<Contexts> {
    Contexts::load().map_err(failure)
}

/// Saves the user's contexts.
///
/// # Errors
/// Fails if the file cannot be written.
pub(crate) fn save(contexts: &Contexts) -> anyhow::Result<()> {
    let path = Contexts::path().map_err(failure)?;
    let text = toml::to_string(contexts).context("write the contexts as TOML")?;
    let saved = path
        .parent()
        .map_or(Ok(()), files::create_directory)
        .and_then(|()| files::replace(&path, text.as_bytes()));
    saved.with_context(|| format!("write {}", path.display()))
}

/// Returns the error of a command whose cluster could not be chosen.
pub(crate) fn failure(error: ContextError) -> anyhow::Error {
    let exit = match error.kind {
        ContextErrorKind::InvalidSetting => Exit::Usage,
        ContextErrorKind::UnknownContext => Exit::NotFound,
        ContextErrorKind::ContextsFile => Exit::Error,
    };
    CliError { exit, what: error.what, why: error.why, hint: error.hint }.into()
}
