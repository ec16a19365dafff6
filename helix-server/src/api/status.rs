//! Maps each error to a gRPC status, in one exhaustive match.
//! `helix_proto::error` derives the code, `retryable` and the trailers from the reason.

use std::time::Duration;

use helix_proto::error::{detail, to_status};
use helix_proto::log::v1::{ErrorDetail, ErrorReason};
use tonic::Status;

use super::{wire_leader, wire_watermarks};
use crate::error::Error;
use crate::limits::{self, ERROR_TEXT_BYTES_MAX, QUOTE_BYTES_MAX};
use crate::log::{GroupRefusal, Refusal};
use crate::quote::cut;

/// Retry hint of NO_LEADER: an election of a healthy shard takes less than a second.
const NO_LEADER_RETRY_AFTER: Duration = Duration::from_millis(50);

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        status(&error_detail(&error), error.to_string(), retry_after(&error))
    }
}

/// Returns the status of a call over several partitions that failed at one of them.
pub(super) fn status_at(error: &Error, topic: &str, partition: u32) -> Status {
    let detail =
        ErrorDetail { topic: cut_name(topic), partition: Some(partition), ..error_detail(error) };
    let message = format!("{}: {error}", partition_path(topic, partition));
    status(&detail, message, retry_after(error))
}

/// Returns the status of a stream that ends while its requests may be in progress.
pub(crate) fn early_end(error: &Error, may_have_applied: bool) -> Status {
    let detail = ErrorDetail { may_have_applied, ..error_detail(error) };
    status(&detail, error.to_string(), retry_after(error))
}

/// Returns "topic/partition"; cuts a name that is too long for a topic.
pub(super) fn partition_path(topic: &str, partition: u32) -> String {
    format!("{}/{partition}", cut(topic, QUOTE_BYTES_MAX))
}

/// Cuts a text that would not fit into the trailers with the rest of the error.
fn status(detail: &ErrorDetail, mut message: String, retry_after: Option<Duration>) -> Status {
    if message.len() > ERROR_TEXT_BYTES_MAX {
        message.truncate(cut(&message, ERROR_TEXT_BYTES_MAX).len());
        message.push_str(" (cut)");
    }
    to_status(detail, &message, retry_after)
}

fn cut_name(topic: &str) -> String {
    cut(topic, QUOTE_BYTES_MAX).to_owned()
}

fn error_detail(error: &Error) -> ErrorDetail {
    use ErrorReason as R;
    match error {
        Error::NotLeader { leader, .. } => {
            ErrorDetail { leader: leader.clone().map(wire_leader), ..detail(R::NotLeader) }
        }
        Error::NoLeader { .. } | Error::ShardClosed { .. } => detail(R::NoLeader),
        Error::Draining => detail(R::Draining),
        Error::OutcomeUnknown { .. } => detail(R::OutcomeUnknown),
        Error::TopicNotFound { topic } => {
            ErrorDetail { topic: cut_name(topic), ..detail(R::TopicNotFound) }
        }
        Error::TopicDeleted { topic, expected } => ErrorDetail {
            topic: cut_name(topic),
            expected_topic_id: *expected,
            ..detail(R::TopicDeleted)
        },
        Error::TopicRecreated { topic, expected, current } => ErrorDetail {
            topic: topic.clone(),
            topic_id: *current,
            expected_topic_id: *expected,
            ..detail(R::TopicRecreated)
        },
        Error::PartitionNotFound { topic, partition, .. } => ErrorDetail {
            topic: cut_name(topic),
            partition: Some(*partition),
            ..detail(R::PartitionNotFound)
        },
        Error::PartitionDeleted { .. } => detail(R::PartitionNotFound),
        Error::TopicAlreadyExists { topic, .. } => {
            ErrorDetail { topic: cut_name(topic), ..detail(R::TopicAlreadyExists) }
        }
        Error::OffsetOutOfRange { watermarks, .. } => ErrorDetail {
            watermarks: Some(wire_watermarks(*watermarks)),
            ..detail(R::OffsetOutOfRange)
        },
        Error::Refused(refusal) => refusal_detail(refusal),
        Error::BatchTooLarge { bytes_max, .. } => {
            ErrorDetail { limit: Some(*bytes_max), ..detail(R::BatchTooLarge) }
        }
        Error::RecordTooLarge { bytes_max, .. } => {
            ErrorDetail { limit: Some(*bytes_max), ..detail(R::RecordTooLarge) }
        }
        Error::EmptyBatch => detail(R::EmptyBatch),
        Error::KeyRequired { .. } => detail(R::KeyRequired),
        Error::RecordCountMismatch { .. } => detail(R::RecordCountMismatch),
        Error::CorruptBatch { .. } => detail(R::CorruptBatch),
        Error::UnsupportedCompression { allowed, .. } => {
            let allowed_compressions = allowed.to_vec();
            ErrorDetail { allowed_compressions, ..detail(R::UnsupportedCompression) }
        }
        Error::InvalidArgument { .. } => detail(R::InvalidArgument),
        Error::Unimplemented { .. } => detail(R::Unimplemented),
        Error::CorruptLog { .. } => detail(R::CorruptLog),
        Error::NotARecord { .. } => detail(R::UndecodableBatch),
        Error::Throttled { .. } | Error::OverQuota { .. } | Error::Exhausted { .. } => {
            detail(R::Throttled)
        }
        Error::DiskFull { .. } => detail(R::DiskFull),
        Error::StorageFailed { may_have_applied, .. } => {
            ErrorDetail { may_have_applied: *may_have_applied, ..detail(R::StorageFailed) }
        }
        Error::NodeNotFound { .. } => detail(R::NodeNotFound),
        Error::ChangeInProgress { .. } => detail(R::MembershipChangeInProgress),
        Error::NotEnoughNodes { .. } => detail(R::NotEnoughNodes),
        Error::ChangeRefused { .. } => detail(R::MembershipChangeRefused),
        // Any other node can name the leader.
        Error::NotAMember { other, .. } => {
            ErrorDetail { leader: other.clone().map(wire_leader), ..detail(R::NotLeader) }
        }
        Error::GroupNotFound { .. } => detail(R::GroupNotFound),
        Error::GatewayMembers { first, .. } => {
            ErrorDetail { member_ids: first.clone(), ..detail(R::GroupNotEmpty) }
        }
        Error::NoCommittedOffset { .. } => detail(R::NoCommittedOffset),
        Error::Unauthenticated(_) => detail(R::Unauthenticated),
        Error::PermissionDenied { .. } => detail(R::PermissionDenied),
        Error::TokenNotFound { .. } => detail(R::TokenNotFound),
        // Only a start fails with it, never a call.
        Error::Unusable { .. } => detail(R::StorageFailed),
    }
}

fn refusal_detail(refusal: &Refusal) -> ErrorDetail {
    use ErrorReason as R;
    match refusal {
        Refusal::UnknownPartition { .. } => detail(R::PartitionNotFound),
        Refusal::ProducerFenced { .. } => detail(R::ProducerFenced),
        Refusal::OutOfOrderSequence { next_sequence, .. } => {
            ErrorDetail { next_sequence: Some(*next_sequence), ..detail(R::OutOfOrderSequence) }
        }
        Refusal::UnknownProducer { .. } => detail(R::UnknownProducer),
        Refusal::ProducerNotOwned { .. } => detail(R::ProducerNotOwned),
        Refusal::SequenceReused { .. } => detail(R::SequenceReused),
        Refusal::OffsetMismatch { watermarks, .. } => ErrorDetail {
            watermarks: Some(wire_watermarks(*watermarks)),
            next_offset: Some(watermarks.high_watermark),
            ..detail(R::ExpectedOffsetMismatch)
        },
        Refusal::Fenced { in_force } => {
            ErrorDetail { fencing_token: Some(in_force.as_str().to_owned()), ..detail(R::Fenced) }
        }
        Refusal::OffsetsExhausted => detail(R::OffsetOutOfRange),
        Refusal::Group(refusal) => group_detail(refusal),
    }
}

fn group_detail(refusal: &GroupRefusal) -> ErrorDetail {
    use ErrorReason as R;
    match refusal {
        GroupRefusal::GroupNotFound => detail(R::GroupNotFound),
        GroupRefusal::UnknownMember { .. } => detail(R::UnknownMember),
        GroupRefusal::StaleEpoch { current, .. } => {
            ErrorDetail { member_epoch: *current, ..detail(R::StaleMemberEpoch) }
        }
        GroupRefusal::NameInUse { holder, .. } => {
            ErrorDetail { member_ids: vec![holder.to_string()], ..detail(R::MemberNameInUse) }
        }
        GroupRefusal::StaticNameFixed { .. } => detail(R::InvalidArgument),
        GroupRefusal::NotOwned { current, .. } => {
            ErrorDetail { member_epoch: *current, ..detail(R::PartitionNotOwned) }
        }
        GroupRefusal::NotEmpty { first, .. } => {
            let member_ids = first.iter().map(|id| id.to_string()).collect();
            ErrorDetail { member_ids, ..detail(R::GroupNotEmpty) }
        }
        GroupRefusal::TopicInUse { first, .. } => {
            let member_ids = first.iter().map(|id| id.to_string()).collect();
            ErrorDetail { member_ids, ..detail(R::GroupNotEmpty) }
        }
        GroupRefusal::StaleCommit(stale) => ErrorDetail {
            offsets_epoch: Some(stale.current),
            next_sequence: stale.next_sequence(),
            ..detail(R::StaleCommit)
        },
        GroupRefusal::LimitReached { limit, .. } | GroupRefusal::BytesReached { limit } => {
            ErrorDetail { limit: Some(*limit as u64), ..detail(R::GroupLimitReached) }
        }
    }
}

fn retry_after(error: &Error) -> Option<Duration> {
    match error {
        Error::Throttled { retry_after_ms, .. } | Error::OverQuota { retry_after_ms, .. } => {
            Some(Duration::from_millis(*retry_after_ms))
        }
        Error::Exhausted { .. } => Some(limits::THROTTLED_RETRY_AFTER),
        Error::NoLeader { .. } | Error::ShardClosed { .. } => Some(NO_LEADER_RETRY_AFTER),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
