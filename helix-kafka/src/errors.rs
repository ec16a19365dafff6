//! Errors of Helix as Kafka's error codes.
//!
//! Kafka's clients decide by the code alone whether to retry. A code that they retry is given only
//! where a retry may succeed and can do no harm. An append with an unknown outcome becomes
//! REQUEST_TIMED_OUT, after which an idempotent producer sends the same sequence again.

use helix_client::proto::log::v1::ErrorReason;
use helix_client::{Error, Origin};
use kafka_protocol::error::ResponseError;

/// Resource of a call, which selects the code of a missing right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallTarget {
    /// A topic, or a partition of one.
    Topic,
    /// A consumer group.
    Group,
    /// The cluster.
    Cluster,
}

/// Returns the code of an error.
pub(crate) fn code_of(error: &Error, target: CallTarget) -> ResponseError {
    use ErrorReason as Reason;
    if error.may_have_applied {
        return ResponseError::RequestTimedOut;
    }
    let Some(reason) = error.reason else {
        return match error.origin {
            // The node was not reached.
            Origin::Transport => ResponseError::NotLeaderOrFollower,
            _ if error.code == tonic::Code::DeadlineExceeded => ResponseError::RequestTimedOut,
            _ if error.retryable => ResponseError::NotLeaderOrFollower,
            _ => ResponseError::UnknownServerError,
        };
    };
    match reason {
        Reason::NotLeader | Reason::NoLeader | Reason::Draining => match target {
            CallTarget::Topic => ResponseError::NotLeaderOrFollower,
            CallTarget::Group => ResponseError::CoordinatorNotAvailable,
            CallTarget::Cluster => ResponseError::RequestTimedOut,
        },
        Reason::OutcomeUnknown => ResponseError::RequestTimedOut,
        Reason::StorageFailed | Reason::CorruptLog | Reason::DiskFull => {
            ResponseError::KafkaStorageError
        }
        Reason::TopicNotFound | Reason::PartitionNotFound | Reason::TopicRecreated => {
            ResponseError::UnknownTopicOrPartition
        }
        Reason::TopicAlreadyExists => ResponseError::TopicAlreadyExists,
        Reason::OffsetOutOfRange => ResponseError::OffsetOutOfRange,
        Reason::ProducerFenced => ResponseError::InvalidProducerEpoch,
        // DUPLICATE_SEQUENCE_NUMBER would be a success for the client.
        Reason::OutOfOrderSequence | Reason::SequenceReused => {
            ResponseError::OutOfOrderSequenceNumber
        }
        Reason::UnknownProducer => ResponseError::UnknownProducerId,
        Reason::ProducerNotOwned => ResponseError::ClusterAuthorizationFailed,
        Reason::KeyRequired | Reason::EmptyBatch | Reason::RecordCountMismatch => {
            ResponseError::InvalidRecord
        }
        Reason::BatchTooLarge | Reason::RecordTooLarge => ResponseError::MessageTooLarge,
        Reason::CorruptBatch | Reason::UndecodableBatch => ResponseError::CorruptMessage,
        Reason::UnsupportedCompression => ResponseError::UnsupportedCompressionType,
        Reason::InvalidArgument => ResponseError::InvalidRequest,
        Reason::Unimplemented => ResponseError::UnsupportedVersion,
        Reason::Throttled => match target {
            // Producers do not retry the code of quotas.
            CallTarget::Topic => ResponseError::NotEnoughReplicas,
            CallTarget::Group => ResponseError::CoordinatorLoadInProgress,
            CallTarget::Cluster => ResponseError::ThrottlingQuotaExceeded,
        },
        Reason::StaleMemberEpoch | Reason::StaleCommit | Reason::PartitionNotOwned => {
            ResponseError::IllegalGeneration
        }
        Reason::GroupNotFound => ResponseError::GroupIdNotFound,
        Reason::GroupNotEmpty => ResponseError::NonEmptyGroup,
        Reason::UnknownMember => ResponseError::UnknownMemberId,
        Reason::GroupLimitReached => ResponseError::GroupMaxSizeReached,
        Reason::Unauthenticated | Reason::PermissionDenied => match target {
            CallTarget::Topic => ResponseError::TopicAuthorizationFailed,
            CallTarget::Group => ResponseError::GroupAuthorizationFailed,
            CallTarget::Cluster => ResponseError::ClusterAuthorizationFailed,
        },
        _ => ResponseError::UnknownServerError,
    }
}

/// Returns the code of an append's error. `NotLeaderOrFollower` of a node that was not reached says
/// that nothing was stored.
pub(crate) fn append_code(error: &Error) -> ResponseError {
    match error.reason {
        // The topic or the cluster does not take Kafka batches.
        Some(ErrorReason::Unimplemented | ErrorReason::InvalidArgument) => {
            ResponseError::UnsupportedForMessageFormat
        }
        // The checksum was right, so another attempt would fail as well.
        Some(ErrorReason::CorruptBatch) => ResponseError::InvalidRecord,
        _ => code_of(error, CallTarget::Topic),
    }
}

#[cfg(test)]
mod tests {
    use helix_proto::error as wire;

    use super::*;

    fn code(reason: ErrorReason) -> ResponseError {
        let status = wire::to_status(&wire::detail(reason), "", None);
        append_code(&Error::from_status(&status))
    }

    /// Codes after which Kafka's producers send a batch again.
    const RETRIED: [ResponseError; 6] = [
        ResponseError::RequestTimedOut,
        ResponseError::NotLeaderOrFollower,
        ResponseError::NotEnoughReplicas,
        ResponseError::KafkaStorageError,
        ResponseError::UnknownTopicOrPartition,
        ResponseError::CorruptMessage,
    ];

    #[test]
    fn retriable_reasons_have_codes_that_producers_retry() {
        for number in 0..100 {
            let Ok(reason) = ErrorReason::try_from(number) else { continue };
            let is_group = (50..60).contains(&number);
            if wire::is_retryable(reason) && reason != ErrorReason::Unspecified && !is_group {
                assert!(RETRIED.contains(&code(reason)), "{reason:?}: {:?}", code(reason));
            }
        }
    }

    #[test]
    fn unknown_outcomes_are_timeouts() {
        assert_eq!(code(ErrorReason::OutcomeUnknown), ResponseError::RequestTimedOut);
        let reset = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        let error = Error::from_status(&tonic::Status::from_error(Box::new(reset)));
        assert_eq!(append_code(&error), ResponseError::RequestTimedOut);
    }

    #[test]
    fn no_error_is_a_success_for_clients() {
        for number in 0..100 {
            let Ok(reason) = ErrorReason::try_from(number) else { continue };
            let code = code(reason);
            assert_ne!(code, ResponseError::DuplicateSequenceNumber, "{reason:?}");
            assert_ne!(code.code(), 0, "{reason:?}");
        }
    }
}
