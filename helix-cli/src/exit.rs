//! What a run ends with: the documented exit codes, and which failure gets which.
//! Scripts rely on these numbers; the texts are in `report`.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::process::ExitCode;

use helix_client::Error as ClientError;
use helix_proto::log::v1::ErrorReason;
use tonic::Code;

/// The codes, for documentation.
pub(crate) const CODES: &str = "\
\x20 0    done
  1    error; of cluster health and check: something is wrong
  2    wrong usage
  3    not found
  4    precondition or conflict: exists already, fenced, offset out of range, ...
  6    unavailable or timed out; trying again later may help
  11   verification failed: data is missing or damaged
  130  interrupted";

/// The codes, for `helix --help`.
pub(crate) fn help() -> String {
    format!("Exit codes:\n{CODES}")
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    Done = 0,
    Error = 1,
    Usage = 2,
    NotFound = 3,
    Precondition = 4,
    Unavailable = 6,
    VerificationFailed = 11,
    Interrupted = 130,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// A failure that is found on this side of the wire.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) exit: Exit,
    /// What failed.
    pub(crate) what: String,
    /// Why it may be; empty if the first part says it all.
    pub(crate) why: String,
    /// What to try; empty if there is nothing.
    pub(crate) hint: String,
}

impl Failure {
    pub(crate) fn new(exit: Exit, what: impl Into<String>) -> Self {
        Self { exit, what: what.into(), why: String::new(), hint: String::new() }
    }

    pub(crate) fn why(self, why: impl Into<String>) -> Self {
        Self { why: why.into(), ..self }
    }

    pub(crate) fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: hint.into(), ..self }
    }

    /// The user asked to stop. Nothing is printed for it.
    pub(crate) fn interrupted() -> Self {
        Self::new(Exit::Interrupted, "interrupted")
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.what)
    }
}

impl StdError for Failure {}

/// The code that goes with an error.
pub(crate) fn of(error: &anyhow::Error) -> Exit {
    for cause in error.chain() {
        if let Some(failure) = cause.downcast_ref::<Failure>() {
            return failure.exit;
        }
        if let Some(error) = cause.downcast_ref::<ClientError>() {
            return of_call(error.reason, error.code);
        }
        if let Some(error) = cause.downcast_ref::<io::Error>()
            && error.kind() == io::ErrorKind::BrokenPipe
        {
            // Whoever reads our output has seen enough: `helix consume ... | head`.
            return Exit::Done;
        }
    }
    Exit::Error
}

fn of_call(reason: Option<ErrorReason>, code: Code) -> Exit {
    match reason {
        // The code alone would say "precondition", but another attempt may well succeed.
        Some(ErrorReason::NotLeader) => return Exit::Unavailable,
        // These are about the data, not about how the command was written.
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

/// Resolves when the user, or the system, asks the process to stop.
pub(crate) async fn interrupted() {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut terminate) = signal(SignalKind::terminate()) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        Ok(()) = tokio::signal::ctrl_c() => {}
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context;
    use helix_proto::error as wire;

    use super::*;

    fn refused(reason: ErrorReason) -> anyhow::Error {
        let status = wire::to_status(&wire::detail(reason), "", None);
        anyhow::Error::new(ClientError::from(status)).context("doing something")
    }

    #[test]
    fn every_reason_has_the_documented_code() {
        use ErrorReason as R;
        for (reason, exit) in [
            (R::TopicNotFound, Exit::NotFound),
            (R::PartitionNotFound, Exit::NotFound),
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
            assert_eq!(of(&refused(reason)), exit, "{reason:?}");
        }
    }

    #[test]
    fn failures_of_our_own_say_their_code() {
        let failed = Err::<(), _>(Failure::new(Exit::VerificationFailed, "2 records are missing"));
        assert_eq!(of(&failed.context("demo").unwrap_err()), Exit::VerificationFailed);
        assert_eq!(of(&Failure::interrupted().into()), Exit::Interrupted);
        assert_eq!(of(&anyhow::anyhow!("anything else")), Exit::Error);
    }

    #[test]
    fn a_reader_that_has_seen_enough_is_no_error() {
        let closed = io::Error::from(io::ErrorKind::BrokenPipe);
        assert_eq!(of(&closed.into()), Exit::Done);
    }

    #[test]
    fn the_help_names_every_code() {
        for exit in [
            Exit::Done,
            Exit::Error,
            Exit::Usage,
            Exit::NotFound,
            Exit::Precondition,
            Exit::Unavailable,
            Exit::VerificationFailed,
            Exit::Interrupted,
        ] {
            assert!(format!("\n{CODES}").contains(&format!("\n  {:<5}", exit as u8)), "{exit:?}");
        }
    }
}
