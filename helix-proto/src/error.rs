//! Encodes errors as a gRPC status: machine-readable details, and the same hints as trailers.
//!
//! Servers write and clients read errors with this module.

use std::time::Duration;

use prost::Message;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Status};
use tonic_types::pb;

use crate::log::v1::{ErrorDetail, ErrorReason, LeaderHint};

/// Domain of every `google.rpc.ErrorInfo` of Helix.
///
/// A status without it comes from a gRPC library, a proxy or the network.
pub const DOMAIN: &str = "helix.dev";

/// Trailer with the reason's name, for clients without support for details.
pub const REASON_TRAILER: &str = "helix-reason";
/// Trailer with the leader's node id.
pub const LEADER_NODE_TRAILER: &str = "helix-leader-node";
/// Trailer with the address, "host:port", at which the leader serves clients.
pub const LEADER_ENDPOINT_TRAILER: &str = "helix-leader-endpoint";
/// Trailer with the Raft term of that leader.
pub const LEADER_TERM_TRAILER: &str = "helix-leader-term";
/// Trailer that says whether the request may have been applied: "true" or "false".
pub const MAY_HAVE_APPLIED_TRAILER: &str = "helix-may-have-applied";
/// Trailer with the milliseconds to wait before a retry, which gRPC libraries understand.
pub const RETRY_PUSHBACK_TRAILER: &str = "grpc-retry-pushback-ms";

const REASON_PREFIX: &str = "ERROR_REASON_";
const DETAIL_URL: &str = "type.googleapis.com/helix.log.v1.ErrorDetail";
const ERROR_INFO_URL: &str = "type.googleapis.com/google.rpc.ErrorInfo";
const RETRY_INFO_URL: &str = "type.googleapis.com/google.rpc.RetryInfo";

/// Returns a reason's name without its prefix, as in `google.rpc.ErrorInfo`: `"NOT_LEADER"`.
pub fn reason_name(reason: ErrorReason) -> &'static str {
    let name = reason.as_str_name();
    name.strip_prefix(REASON_PREFIX).unwrap_or(name)
}

/// Returns the reason with this name (without prefix), or `None` if it is unknown.
pub fn reason_from_name(name: &str) -> Option<ErrorReason> {
    ErrorReason::from_str_name(&format!("{REASON_PREFIX}{name}"))
}

/// Returns the gRPC code of a reason.
pub fn code(reason: ErrorReason) -> Code {
    use ErrorReason as R;
    match reason {
        R::Unspecified => Code::Unknown,
        R::NoLeader | R::Draining | R::OutcomeUnknown | R::StorageFailed => Code::Unavailable,
        R::TopicNotFound
        | R::TopicDeleted
        | R::PartitionNotFound
        | R::GroupNotFound
        | R::UnknownMember
        | R::NoCommittedOffset
        | R::NodeNotFound
        | R::TokenNotFound => Code::NotFound,
        R::TopicAlreadyExists => Code::AlreadyExists,
        R::OffsetOutOfRange => Code::OutOfRange,
        R::ExpectedOffsetMismatch | R::StaleMemberEpoch | R::PartitionNotOwned | R::StaleCommit => {
            Code::Aborted
        }
        R::NotLeader
        | R::Fenced
        | R::ProducerFenced
        | R::OutOfOrderSequence
        | R::UnknownProducer
        | R::SequenceReused
        | R::TopicRecreated
        | R::UndecodableBatch
        | R::GroupNotEmpty
        | R::MemberNameInUse
        | R::GroupLimitReached
        | R::MembershipChangeInProgress
        | R::MembershipChangeRefused
        | R::NotEnoughNodes => Code::FailedPrecondition,
        R::BatchTooLarge
        | R::CorruptBatch
        | R::RecordTooLarge
        | R::EmptyBatch
        | R::KeyRequired
        | R::RecordCountMismatch
        | R::InvalidArgument => Code::InvalidArgument,
        R::CorruptLog => Code::DataLoss,
        R::UnsupportedCompression | R::Unimplemented => Code::Unimplemented,
        R::Throttled | R::DiskFull => Code::ResourceExhausted,
        R::Unauthenticated => Code::Unauthenticated,
        R::PermissionDenied | R::ProducerNotOwned => Code::PermissionDenied,
        R::Internal => Code::Internal,
    }
}

/// Returns true if the same request may succeed when it is sent again.
///
/// For NOT_LEADER and DRAINING it must go to another node.
pub fn is_retryable(reason: ErrorReason) -> bool {
    use ErrorReason as R;
    matches!(
        reason,
        R::NotLeader
            | R::NoLeader
            | R::Draining
            | R::OutcomeUnknown
            | R::StorageFailed
            | R::Throttled
    )
}

/// Returns a detail with the reason and the flags that follow from it.
pub fn detail(reason: ErrorReason) -> ErrorDetail {
    ErrorDetail {
        reason: reason.into(),
        retryable: is_retryable(reason),
        may_have_applied: reason == ErrorReason::OutcomeUnknown,
        ..ErrorDetail::default()
    }
}

/// Builds the status of a failed call, with the gRPC code of its reason.
///
/// Clients wait for `retry_after` before they send the request again.
pub fn to_status(detail: &ErrorDetail, message: &str, retry_after: Option<Duration>) -> Status {
    let code = code(detail.reason());
    let rpc_status = pb::Status {
        code: i32::from(code),
        message: message.to_owned(),
        details: details(detail, retry_after),
    };
    let trailers = trailers(detail, retry_after);
    let details = rpc_status.encode_to_vec().into();
    Status::with_details_and_metadata(code, message, details, trailers)
}

fn details(detail: &ErrorDetail, retry_after: Option<Duration>) -> Vec<prost_types::Any> {
    let error_info = pb::ErrorInfo {
        reason: reason_name(detail.reason()).to_owned(),
        domain: DOMAIN.to_owned(),
        ..pb::ErrorInfo::default()
    };
    let mut details = vec![any(ERROR_INFO_URL, &error_info), any(DETAIL_URL, detail)];
    if let Some(wait) = retry_after.and_then(|wait| prost_types::Duration::try_from(wait).ok()) {
        details.push(any(RETRY_INFO_URL, &pb::RetryInfo { retry_delay: Some(wait) }));
    }
    details
}

fn any(type_url: &str, message: &impl Message) -> prost_types::Any {
    prost_types::Any { type_url: type_url.to_owned(), value: message.encode_to_vec() }
}

fn trailers(detail: &ErrorDetail, retry_after: Option<Duration>) -> MetadataMap {
    let mut trailers = MetadataMap::new();
    let reason = MetadataValue::from_static(reason_name(detail.reason()));
    trailers.insert(REASON_TRAILER, reason);
    let may_have_applied = if detail.may_have_applied { "true" } else { "false" };
    trailers.insert(MAY_HAVE_APPLIED_TRAILER, MetadataValue::from_static(may_have_applied));
    if let Some(leader) = &detail.leader {
        trailers.insert(LEADER_NODE_TRAILER, leader.node_id.into());
        trailers.insert(LEADER_TERM_TRAILER, leader.term.into());
        // The detail has the address even if it is not a valid header value.
        if let Ok(endpoint) = MetadataValue::try_from(&leader.endpoint) {
            trailers.insert(LEADER_ENDPOINT_TRAILER, endpoint);
        }
    }
    if let Some(wait) = retry_after {
        let wait_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
        trailers.insert(RETRY_PUSHBACK_TRAILER, wait_ms.into());
    }
    trailers
}

/// The details of a status written by [`to_status`].
#[derive(Debug, Clone, PartialEq)]
pub struct StatusDetails {
    /// The detail, rebuilt from the trailers if the status has only those.
    pub detail: ErrorDetail,
    /// Wait before a retry.
    pub retry_after: Option<Duration>,
}

/// Longest wait before a retry that is read from a status; a longer one is read as this.
///
/// The wait is added to clocks, which a wait of a server's choice could overflow.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 3600);

/// Reads the details that [`to_status`] wrote. Returns `None` if Helix did not write the status.
pub fn from_status(status: &Status) -> Option<StatusDetails> {
    let read = from_details(status.details()).or_else(|| from_trailers(status.metadata()))?;
    let retry_after = read.retry_after.map(|wait| wait.min(RETRY_AFTER_MAX));
    Some(StatusDetails { retry_after, ..read })
}

fn from_details(bytes: &[u8]) -> Option<StatusDetails> {
    let rpc_status = pb::Status::decode(bytes).ok()?;
    let mut detail = None;
    let mut retry_after = None;
    for any in rpc_status.details {
        match any.type_url.as_str() {
            DETAIL_URL => detail = Some(ErrorDetail::decode(&any.value[..]).ok()?),
            RETRY_INFO_URL => retry_after = retry_delay(&any.value),
            _ => {}
        }
    }
    Some(StatusDetails { detail: detail?, retry_after })
}

fn retry_delay(bytes: &[u8]) -> Option<Duration> {
    crate::time::duration(pb::RetryInfo::decode(bytes).ok()?.retry_delay?).ok()
}

fn from_trailers(trailers: &MetadataMap) -> Option<StatusDetails> {
    let text = |name| trailers.get(name)?.to_str().ok();
    let number = |name| text(name)?.parse::<u64>().ok();
    let reason = reason_from_name(text(REASON_TRAILER)?).unwrap_or(ErrorReason::Unspecified);
    let leader = number(LEADER_NODE_TRAILER).map(|node_id| LeaderHint {
        node_id,
        endpoint: text(LEADER_ENDPOINT_TRAILER).unwrap_or_default().to_owned(),
        term: number(LEADER_TERM_TRAILER).unwrap_or_default(),
    });
    let known = detail(reason);
    // A node of an earlier version does not send it.
    let may_have_applied =
        text(MAY_HAVE_APPLIED_TRAILER).map_or(known.may_have_applied, |value| value == "true");
    Some(StatusDetails {
        detail: ErrorDetail { leader, may_have_applied, ..known },
        retry_after: number(RETRY_PUSHBACK_TRAILER).map(Duration::from_millis),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn not_leader() -> ErrorDetail {
        ErrorDetail {
            leader: Some(LeaderHint { node_id: 3, endpoint: "n3:9092".to_owned(), term: 7 }),
            ..detail(ErrorReason::NotLeader)
        }
    }

    #[test]
    fn reason_names_convert_both_ways() {
        assert_eq!(reason_name(ErrorReason::NotLeader), "NOT_LEADER");
        for number in 0..100 {
            if let Ok(reason) = ErrorReason::try_from(number) {
                assert_eq!(reason_from_name(reason_name(reason)), Some(reason));
            }
        }
        assert_eq!(reason_from_name("NOT_A_REASON"), None);
    }

    #[test]
    fn status_reads_back_as_written() {
        let wait = Duration::from_millis(1500);
        let status = to_status(&not_leader(), "not the leader", Some(wait));
        assert_eq!(status.code(), Code::FailedPrecondition);
        let received = from_status(&status).unwrap();
        assert_eq!(received, StatusDetails { detail: not_leader(), retry_after: Some(wait) });
    }

    #[test]
    fn trailers_alone_carry_the_leader_hint() {
        let wait = Duration::from_millis(20);
        let full = to_status(&not_leader(), "not the leader", Some(wait));
        let bare = Status::with_metadata(full.code(), "", full.metadata().clone());
        let received = from_status(&bare).unwrap();
        assert_eq!(received, StatusDetails { detail: not_leader(), retry_after: Some(wait) });
    }

    #[test]
    fn trailer_says_whether_the_request_may_have_been_applied() {
        // The value that follows from the reason, and another one in the detail.
        for (reason, may_have_applied) in [
            (ErrorReason::OutcomeUnknown, true),
            (ErrorReason::StorageFailed, true),
            (ErrorReason::StorageFailed, false),
            (ErrorReason::NoLeader, false),
        ] {
            let stated = ErrorDetail { may_have_applied, ..detail(reason) };
            let status = to_status(&stated, "", None);
            let trailer = status.metadata().get(MAY_HAVE_APPLIED_TRAILER).unwrap();
            assert_eq!(trailer, &may_have_applied.to_string());
            let bare = Status::with_metadata(status.code(), "", status.metadata().clone());
            assert_eq!(from_status(&bare).unwrap().detail, stated);
        }
    }

    #[test]
    fn a_wait_of_any_length_is_read_or_ignored() {
        let status = |seconds, nanos| {
            let wait = Some(prost_types::Duration { seconds, nanos });
            let retry_info = any(RETRY_INFO_URL, &pb::RetryInfo { retry_delay: wait });
            let details = vec![any(DETAIL_URL, &not_leader()), retry_info];
            let rpc_status = pb::Status { details, ..pb::Status::default() };
            Status::with_details(Code::Internal, "", rpc_status.encode_to_vec().into())
        };
        let read = |seconds, nanos| from_status(&status(seconds, nanos)).unwrap().retry_after;
        assert_eq!(read(2, 0), Some(Duration::from_secs(2)));
        assert_eq!(read(i64::MAX, i32::MAX), Some(RETRY_AFTER_MAX));
        assert_eq!(read(i64::MIN, 0), None);
        assert_eq!(read(i64::MIN, i32::MIN), None);
    }

    #[test]
    fn foreign_status_has_no_details() {
        assert_eq!(from_status(&Status::unavailable("connection refused")), None);
        let garbage = Status::with_details(Code::Internal, "", vec![0xFF; 9].into());
        assert_eq!(from_status(&garbage), None);
    }
}
