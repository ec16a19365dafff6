//! Exit codes, and errors that the command line itself detects.
//! Scripts rely on these numbers. `report` renders the error texts.

use std::error::Error as StdError;
use std::fmt;
use std::process::ExitCode;

use helix_client::Error as ClientError;
use helix_proto::log::v1::ErrorReason;
use tonic::Code;

use crate::output::StdoutClosed;

/// Exit codes, for documentation.
pub(crate) const CODES: &str = "\
\x20 0    success
  1    error; for cluster health and check: an issue was found
  2    invalid usage
  3    not found; also a topic that was deleted and created again meanwhile
  4    failed precondition or conflict: already exists, fenced, offset out of range, ...
  5    partly done: the message says what is missing; the rest is done
  6    unavailable or timed out; retry later
  11   verification failed: data is missing or damaged
  130  interrupted";

/// Returns the exit codes, for `helix --help`.
pub(crate) fn help() -> String {
    format!("Exit codes:\n{CODES}")
}

/// Outcome of a run; the value is the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    Done = 0,
    Error = 1,
    Usage = 2,
    NotFound = 3,
    Precondition = 4,
    Partly = 5,
    Unavailable = 6,
    VerificationFailed = 11,
    Interrupted = 130,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
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
            return of_service_error(error.reason, error.code);
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

fn of_service_error(reason: Option<ErrorReason>, code: Code) -> Exit {
    match reason {
        // Its gRPC code is a failed precondition, but a retry may succeed.
        Some(ErrorReason::NotLeader) => return Exit::Unavailable,
        // The topic that the command began with is gone.
        Some(ErrorReason::TopicRecreated) => return Exit::NotFound,
        // Their gRPC code is invalid argument, but the cause is the data, not the usage.
        Some(
            ErrorReason::BatchTooLarge
            | ErrorReason::RecordTooLarge
            | ErrorReason::CorruptBatch
            | ErrorReason::EmptyBatch
            | ErrorReason::RecordCountMismatch,
        ) => return Exit::Error,
        _ => {}
    }
    match code {
        Code::NotFound => Exit::NotFound,
        Code::InvalidArgument => Exit::Usage,
        Code::AlreadyExists | Code::FailedPrecondition | Code::Aborted | Code::OutOfRange => {
            Exit::Precondition
        }
        Code::Unavailable | Code::DeadlineExceeded | Code::ResourceExhausted => Exit::Unavailable,
        _ => Exit::Error,
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context;
    use helix_proto::error as wire;

    use super::*;

    fn service_error(reason: ErrorReason) -> anyhow::Error {
        let status = wire::to_status(&wire::detail(reason), "", None);
        anyhow::Error::new(ClientError::from(status)).context("doing something")
    }

    #[test]
    fn service_errors_have_the_documented_exit_code() {
        use ErrorReason as R;
        for (reason, exit) in [
            (R::TopicNotFound, Exit::NotFound),
            (R::PartitionNotFound, Exit::NotFound),
            (R::TopicRecreated, Exit::NotFound),
            (R::TopicAlreadyExists, Exit::Precondition),
            (R::OffsetOutOfRange, Exit::Precondition),
            (R::ExpectedOffsetMismatch, Exit::Precondition),
            (R::Fenced, Exit::Precondition),
            (R::ProducerFenced, Exit::Precondition),
            (R::InvalidArgument, Exit::Usage),
            (R::RecordTooLarge, Exit::Error),
            (R::NotLeader, Exit::Unavailable),
            (R::NoLeader, Exit::Unavailable),
            (R::Draining, Exit::Unavailable),
            (R::Throttled, Exit::Unavailable),
            (R::DiskFull, Exit::Unavailable),
            (R::StorageFailed, Exit::Unavailable),
            (R::CorruptLog, Exit::Error),
            (R::Unimplemented, Exit::Error),
            (R::Internal, Exit::Error),
        ] {
            assert_eq!(of(&service_error(reason)), exit, "{reason:?}");
        }
    }

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

    #[test]
    fn help_lists_every_exit_code() {
        for exit in [
            Exit::Done,
            Exit::Error,
            Exit::Usage,
            Exit::NotFound,
            Exit::Precondition,
            Exit::Partly,
            Exit::Unavailable,
            Exit::VerificationFailed,
            Exit::Interrupted,
        ] {
            assert!(format!("\n{CODES}").contains(&format!("\n  {:<5}", exit as u8)), "{exit:?}");
        }
    }
}
