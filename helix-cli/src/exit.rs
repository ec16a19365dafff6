//! Errors that the command line itself detects. `report` renders their texts.

use std::error::Error as StdError;
use std::fmt;

use helix_client::Error as ClientError;
pub(crate) use helix_client::exit::{CODES, Exit};
use helix_proto::log::v1::ErrorReason;
use tonic::Code;

use crate::output::StdoutClosed;

/// Returns the exit codes, for `helix --help`.
pub(crate) fn help() -> String {
    format!("Exit codes:\n{CODES}")
}

/// An error detected by the command line itself, not by the service.
#[derive(Debug)]
pub(crate) struct CliError {
    pub(crate) exit: Exit,
    /// Failed action.
    pub(crate) what: String,
    /// Cause; may be empty.
    pub(crate) why: String,
    /// Commands or actions to try, one per line; may be empty.
    pub(crate) hint: String,
}

impl CliError {
    pub(crate) fn new(exit: Exit, what: impl Into<String>) -> Self {
        Self { exit, what: what.into(), why: String::new(), hint: String::new() }
    }

    pub(crate) fn why(self, why: impl Into<String>) -> Self {
        Self { why: why.into(), ..self }
    }

    pub(crate) fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: hint.into(), ..self }
    }

    /// The result that the command printed states the error; no error text is printed.
    pub(crate) fn reported(exit: Exit) -> Self {
        Self::new(exit, "")
    }

    /// Returns true if the printed result states the error.
    pub(crate) fn is_reported(&self) -> bool {
        self.what.is_empty()
    }

    /// The user interrupted the command; no error text is printed.
    pub(crate) fn interrupted() -> Self {
        Self::new(Exit::Interrupted, "interrupted")
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.what)
    }
}

impl StdError for CliError {}

/// Returns the exit code of an error.
pub(crate) fn of(error: &anyhow::Error) -> Exit {
    for cause in error.chain() {
        if let Some(failure) = cause.downcast_ref::<CliError>() {
            return failure.exit;
        }
        if let Some(error) = cause.downcast_ref::<ClientError>() {
            return Exit::of(error);
        }
        if cause.is::<StdoutClosed>() {
            return Exit::Done;
        }
    }
    Exit::Error
}

/// Returns true if a lost majority may explain the error.
pub(crate) fn may_lack_nodes(error: &anyhow::Error) -> bool {
    let cause = error.chain().find_map(|cause| cause.downcast_ref::<ClientError>());
    cause.is_some_and(|error| match error.reason {
        Some(reason) => matches!(
            reason,
            ErrorReason::NoLeader | ErrorReason::OutcomeUnknown | ErrorReason::NotLeader
        ),
        None => matches!(error.code, Code::Unavailable | Code::DeadlineExceeded),
    })
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn cli_errors_keep_their_exit_code() {
        let failed = Err::<(), _>(CliError::new(Exit::VerificationFailed, "2 records are missing"));
        assert_eq!(of(&failed.context("demo").unwrap_err()), Exit::VerificationFailed);
        assert_eq!(of(&CliError::interrupted().into()), Exit::Interrupted);
        assert_eq!(of(&anyhow::anyhow!("anything else")), Exit::Error);
    }

    #[test]
    fn only_closed_standard_output_is_success() {
        assert_eq!(of(&anyhow::Error::new(StdoutClosed).context("print")), Exit::Done);
        let broken = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        assert_eq!(of(&anyhow::Error::new(broken).context("send the request")), Exit::Error);
    }
}
