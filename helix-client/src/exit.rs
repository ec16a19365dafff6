//! Exit codes of the programs of Helix. Scripts rely on these numbers.

use std::process::ExitCode;

use helix_proto::log::v1::ErrorReason;
use tonic::Code;

use crate::error::Error;

/// Exit codes, for documentation.
pub const CODES: &str = "\
\x20 0    success
  1    error; for cluster health and check: an issue was found
  2    invalid usage
  3    not found; also a topic that was deleted and created again meanwhile
  4    failed precondition or conflict: already exists, fenced, offset out of range, ...
  5    partly done: the message says what is missing; the rest is done
  6    unavailable or timed out; retry later
  11   verification failed: data is missing or damaged
  130  interrupted";

/// Outcome of a run; the value is the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Exit {
    /// Success.
    Done = 0,
    /// An error without a code of its own.
    Error = 1,
    /// Invalid usage.
    Usage = 2,
    /// A named thing does not exist.
    NotFound = 3,
    /// A precondition failed, or the request conflicts with the state.
    Precondition = 4,
    /// A part is done.
    Partly = 5,
    /// The cluster is unavailable; a retry may succeed.
    Unavailable = 6,
    /// Data is missing or damaged.
    VerificationFailed = 11,
    /// The user or the system requested a stop.
    Interrupted = 130,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

impl Exit {
    /// Returns the exit code of a program that a failed call ends.
    pub fn of(error: &Error) -> Self {
        match error.reason {
            // Its gRPC code is a failed precondition, but a retry may succeed.
            Some(ErrorReason::NotLeader) => return Self::Unavailable,
            // The topic that the command began with is gone.
            Some(ErrorReason::TopicRecreated) => return Self::NotFound,
            // Their gRPC code is invalid argument, but the cause is the data, not the usage.
            Some(
                ErrorReason::BatchTooLarge
                | ErrorReason::RecordTooLarge
                | ErrorReason::CorruptBatch
                | ErrorReason::EmptyBatch
                | ErrorReason::KeyRequired
                | ErrorReason::RecordCountMismatch,
            ) => return Self::Error,
            _ => {}
        }
        match error.code {
            Code::NotFound => Self::NotFound,
            Code::InvalidArgument => Self::Usage,
            Code::AlreadyExists | Code::FailedPrecondition | Code::Aborted | Code::OutOfRange => {
                Self::Precondition
            }
            Code::Unavailable | Code::DeadlineExceeded | Code::ResourceExhausted => {
                Self::Unavailable
            }
            _ => Self::Error,
        }
    }
}

#[cfg(test)]
mod tests {
    use helix_proto::error as wire;

    use super::*;

    fn service_error(reason: ErrorReason) -> Error {
        let status = wire::to_status(&wire::detail(reason), "", None);
        Error::from(status)
    }

    #[test]
    fn service_errors_have_the_documented_exit_code() {
        use ErrorReason as R;
        for (reason, exit) in [
            (R::TopicNotFound, Exit::NotFound),
            (R::TopicDeleted, Exit::NotFound),
            (R::PartitionNotFound, Exit::NotFound),
            (R::TopicRecreated, Exit::NotFound),
            (R::TopicAlreadyExists, Exit::Precondition),
            (R::OffsetOutOfRange, Exit::Precondition),
            (R::ExpectedOffsetMismatch, Exit::Precondition),
            (R::Fenced, Exit::Precondition),
            (R::ProducerFenced, Exit::Precondition),
            (R::SequenceReused, Exit::Precondition),
            (R::ProducerNotOwned, Exit::Error),
            (R::InvalidArgument, Exit::Usage),
            (R::RecordTooLarge, Exit::Error),
            (R::KeyRequired, Exit::Error),
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
            assert_eq!(Exit::of(&service_error(reason)), exit, "{reason:?}");
        }
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
