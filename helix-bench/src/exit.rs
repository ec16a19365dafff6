//! Exit codes and error output.
//!
//! An error has up to three parts: what failed, a possible cause, and a hint.

use std::fmt;

use anyhow::Error;
use helix_client::contexts::{ContextError, ContextErrorKind};
use helix_client::exit::{CODES, Exit};

/// The run failed, or no request succeeded.
pub(crate) const FAILED: u8 = Exit::Error as u8;
/// Acked records are missing, changed or doubled.
pub(crate) const NOT_AS_ACKED: u8 = Exit::VerificationFailed as u8;
/// The user or the system requested a stop.
pub(crate) const INTERRUPTED: u8 = Exit::Interrupted as u8;

/// Failure with an exit code, a cause and a hint.
#[derive(Debug)]
pub(crate) struct BenchFailure {
    pub(crate) exit: Exit,
    pub(crate) what: String,
    pub(crate) why: String,
    pub(crate) hint: String,
}

impl BenchFailure {
    pub(crate) fn new(exit: Exit, what: impl fmt::Display) -> Self {
        Self { exit, what: what.to_string(), why: String::new(), hint: String::new() }
    }
}

impl fmt::Display for BenchFailure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.what)
    }
}

impl std::error::Error for BenchFailure {}

impl From<ContextError> for BenchFailure {
    fn from(error: ContextError) -> Self {
        let exit = match error.kind {
            ContextErrorKind::InvalidSetting => Exit::Usage,
            ContextErrorKind::UnknownContext => Exit::NotFound,
            ContextErrorKind::ContextsFile => Exit::Error,
        };
        Self { exit, what: error.what, why: error.why, hint: error.hint }
    }
}

/// Returns the exit codes, for the help.
pub(crate) fn help() -> String {
    format!(
        "Exit codes, as of helix:\n{CODES}\nA run without any successful request ends with 1, and \
         one whose acked records are missing, changed or doubled with 11."
    )
}

/// Creates an error about the command line, unless it has an exit code of its own.
pub(crate) fn usage(error: Error) -> Error {
    if error.is::<BenchFailure>() {
        return error;
    }
    BenchFailure::new(Exit::Usage, format!("{error:#}")).into()
}

/// Returns the exit code of an error.
pub(crate) fn code(error: &Error) -> u8 {
    if let Some(failure) = error.downcast_ref::<BenchFailure>() {
        return failure.exit as u8;
    }
    let call = error.chain().find_map(|cause| cause.downcast_ref::<helix_client::Error>());
    call.map_or(FAILED, |error| Exit::of(error) as u8)
}

/// Returns the text for standard error, with a trailing newline.
pub(crate) fn text(error: &Error) -> String {
    let mut text = format!("error: {error:#}\n");
    if let Some(BenchFailure { why, hint, .. }) = error.downcast_ref() {
        for (label, part) in [("why", why), ("try", hint)] {
            if !part.is_empty() {
                text += &format!("  {label}: {}\n", part.replace('\n', "\n       "));
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};
    use helix_client::proto::error as wire;
    use helix_client::proto::log::v1::ErrorReason;

    use super::*;

    #[test]
    fn error_has_a_code_and_a_hint() {
        let failure = BenchFailure {
            why: "connection refused".to_owned(),
            hint: "one\ntwo".to_owned(),
            ..BenchFailure::new(Exit::Unavailable, "connect to here")
        };
        let error = Err::<(), _>(failure).context("run").unwrap_err();
        assert_eq!(code(&error), 6);
        let expected =
            "error: run: connect to here\n  why: connection refused\n  try: one\n       two\n";
        assert_eq!(text(&error), expected);
        let error = usage(anyhow!("--clients must be at least 1"));
        assert_eq!((code(&error), code(&anyhow!("other"))), (2, FAILED));
        assert_eq!(text(&error), "error: --clients must be at least 1\n");
    }

    #[test]
    fn errors_with_a_code_of_their_own_keep_it() {
        let unknown = BenchFailure::new(Exit::NotFound, "there is no context \"x\"");
        let error = Err::<(), _>(unknown).context("--payload 1 KiB").unwrap_err();
        assert_eq!(code(&usage(error)), 3);
        let status = wire::to_status(&wire::detail(ErrorReason::NoLeader), "", None);
        let call = Error::new(helix_client::Error::from(status)).context("create the topic");
        assert_eq!(code(&call), 6);
    }
}
