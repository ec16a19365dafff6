//! Errors of calls, with what a caller needs to decide whether and where to retry.
//!
//! Built from the service's details; a status without them is a transport failure.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::ops::Deref;
use std::time::Duration;

use helix_proto::error::{self as wire, StatusDetails};
use helix_proto::log::v1::{ErrorReason, LeaderHint, Watermarks};
use helix_tls::HandshakeError;
use tonic::{Code, ConnectError, Status};

use crate::refusal::RefusedConnection;

/// Result of a call to the service.
pub type Result<T> = std::result::Result<T, Error>;

/// A failed call. Dereferences to [`Failure`], which has the details.
#[derive(Clone)]
pub struct Error(Box<Failure>);

/// The details of a failed call.
#[derive(Debug, Clone)]
pub struct Failure {
    /// Component that reported the failure.
    pub origin: Origin,
    /// gRPC code.
    pub code: Code,
    /// The service's reason. None for transport failures and for reasons of later versions.
    pub reason: Option<ErrorReason>,
    /// The same request may succeed if it is sent again.
    pub retryable: bool,
    /// The service may have applied the request. False is a guarantee that it has not.
    pub may_have_applied: bool,
    /// Leader to use instead.
    pub leader: Option<LeaderHint>,
    /// State of the partition.
    pub watermarks: Option<Watermarks>,
    /// Sequence that the partition expects next from the producer.
    pub next_sequence: Option<u64>,
    /// Offset that the partition assigns next.
    pub next_offset: Option<u64>,
    /// Fencing token in force.
    pub fencing_token: Option<String>,
    /// Limit that was exceeded, in the unit of the reason.
    pub limit: Option<u64>,
    /// Topic and partition that failed, for requests with several.
    pub topic_partition: Option<(String, u32)>,
    /// Ids of a topic that was deleted and created again, with `TOPIC_RECREATED`.
    pub recreated: Option<RecreatedTopic>,
    /// Members of the group, at most ten, with `GROUP_NOT_EMPTY`; the member that has the name,
    /// with `MEMBER_NAME_IN_USE`.
    pub member_ids: Vec<String>,
    /// Current epoch of the member, with `STALE_MEMBER_EPOCH` and `PARTITION_NOT_OWNED`.
    pub member_epoch: Option<u64>,
    /// Wait before a retry.
    pub retry_after: Option<Duration>,
    /// An earlier batch failed with this error, and this batch was therefore not appended.
    pub is_from_earlier_batch: bool,
    /// The TLS handshake failed, or the node requires TLS: check the [TLS options] and the
    /// certificates.
    ///
    /// [TLS options]: crate::TlsOptions
    pub is_tls_failure: bool,
    /// Description for humans.
    pub message: String,
}

/// A topic that was deleted and created again, so that it is another topic of the same name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecreatedTopic {
    /// Name.
    pub topic: String,
    /// Id that the call named, or began with.
    pub expected_id: u64,
    /// Id of the topic that has the name now.
    pub id: u64,
}

/// Component that reports a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// A Helix node.
    Service,
    /// The network, a proxy, or a gRPC library.
    Transport,
    /// This library: a deadline, a malformed response, a closed handle.
    Client,
}

impl Error {
    /// Converts a gRPC status.
    ///
    /// `may_have_applied` of a transport failure is true unless the request was certainly not sent.
    pub fn from_status(status: &Status) -> Self {
        match wire::from_status(status) {
            Some(received) => Self::from_service(status, received),
            None => Self::from_transport(status),
        }
    }

    fn from_service(status: &Status, received: StatusDetails) -> Self {
        let StatusDetails { detail, retry_after } = received;
        let reason = Some(detail.reason()).filter(|&reason| reason != ErrorReason::Unspecified);
        let recreated = (reason == Some(ErrorReason::TopicRecreated)).then(|| RecreatedTopic {
            topic: detail.topic.clone(),
            expected_id: detail.expected_topic_id,
            id: detail.topic_id,
        });
        Self::new(Failure {
            reason,
            retryable: detail.retryable,
            may_have_applied: detail.may_have_applied,
            leader: detail.leader,
            watermarks: detail.watermarks,
            next_sequence: detail.next_sequence,
            next_offset: detail.next_offset,
            fencing_token: detail.fencing_token,
            limit: detail.limit,
            topic_partition: detail.partition.map(|partition| (detail.topic, partition)),
            recreated,
            member_ids: detail.member_ids,
            member_epoch: Some(detail.member_epoch).filter(|epoch| *epoch > 0),
            retry_after,
            ..Failure::plain(Origin::Service, status.code(), status.message().to_owned())
        })
    }

    fn from_transport(status: &Status) -> Self {
        // A status with a source was created on this side from a broken connection.
        let is_broken = status.source().is_some();
        // Unknown and Cancelled: a stream that the other side resets ends without a status.
        let is_transient = matches!(
            status.code(),
            Code::Unavailable | Code::DeadlineExceeded | Code::Unknown | Code::Cancelled
        );
        let is_rejected = !is_broken
            && matches!(
                status.code(),
                Code::Unimplemented | Code::Unauthenticated | Code::PermissionDenied
            );
        let refused = refused_connection(status);
        let was_not_applied =
            is_rejected || refused.is_some_and(|it| it.was_not_applied) || is_unsent(status);
        let is_tls_failure = refused.is_some() || is_failed_handshake(status);
        let message = refused.map_or_else(|| innermost(status), |it| it.reason.clone());
        // One code for all of them: HTTP/2 has another one for each moment of the failure.
        let code = if is_tls_failure { Code::Unavailable } else { status.code() };
        Self::new(Failure {
            retryable: is_broken || is_transient,
            may_have_applied: !was_not_applied,
            is_tls_failure,
            ..Failure::plain(Origin::Transport, code, message)
        })
    }

    /// Returns the error of a deadline that passed while the service had the request.
    pub(crate) fn timed_out(what: &str) -> Self {
        Self::new(Failure {
            retryable: true,
            may_have_applied: true,
            ..Failure::plain(Origin::Client, Code::DeadlineExceeded, format!("{what} timed out"))
        })
    }

    /// Returns the error of a request to a silent leader that has been replaced.
    pub(crate) fn superseded(what: &str) -> Self {
        let message = format!("{what}: the leader did not respond and has been replaced");
        Self::known(ErrorReason::OutcomeUnknown, message).with_may_have_applied(true)
    }

    /// Returns an error of this library; nothing was sent.
    pub(crate) fn client(code: Code, message: impl Into<String>) -> Self {
        Self::new(Failure::plain(Origin::Client, code, message.into()))
    }

    /// Returns an error with the reason that the service would give.
    pub(crate) fn known(reason: ErrorReason, message: impl Into<String>) -> Self {
        Self::new(Failure {
            reason: Some(reason),
            retryable: wire::is_retryable(reason),
            ..Failure::plain(Origin::Client, wire::code(reason), message.into())
        })
    }

    /// Returns the error of a response that is from another topic than expected.
    pub(crate) fn recreated(topic: &str, expected_id: u64, id: u64) -> Self {
        let message = format!(
            "topic {topic:?} was deleted and created again: its id is {id}, not {expected_id}"
        );
        let mut error = Self::known(ErrorReason::TopicRecreated, message);
        error.0.recreated = Some(RecreatedTopic { topic: topic.to_owned(), expected_id, id });
        error
    }

    /// Replaces `may_have_applied`.
    pub(crate) fn with_may_have_applied(mut self, may_have_applied: bool) -> Self {
        self.0.may_have_applied = may_have_applied;
        self
    }

    /// Returns true if the service reports that this offset is already taken.
    pub(crate) fn is_beyond(&self, expected_offset: u64) -> bool {
        self.is(ErrorReason::ExpectedOffsetMismatch)
            && self.next_offset.is_some_and(|next| next > expected_offset)
    }

    /// Makes the error retryable: another node may have newer data.
    pub(crate) fn retryable_elsewhere(mut self) -> Self {
        self.0.retryable = true;
        self
    }

    /// Turns the error into that of a later request that failed because of it.
    pub(crate) fn failed_by_earlier_batch(mut self) -> Self {
        self.0.message = format!("an earlier batch failed: {}", self.0.message);
        self.0.is_from_earlier_batch = true;
        self
    }

    /// Adds the partition that failed, unless the error names one.
    pub(crate) fn with_partition(mut self, topic: &str, partition: u32) -> Self {
        self.0.topic_partition.get_or_insert_with(|| (topic.to_owned(), partition));
        self
    }

    /// Adds the last failure of a call that first failed with this error.
    pub(crate) fn with_last(mut self, last: &Self) -> Self {
        if last.message != self.message {
            self.0.message = format!("{}; the last attempt: {}", self.0.message, last.message);
        }
        self
    }

    /// Adds the limit that was exceeded.
    pub(crate) fn with_limit(mut self, limit: u64) -> Self {
        self.0.limit = Some(limit);
        self
    }

    /// Returns true if this is the reason.
    pub fn is(&self, reason: ErrorReason) -> bool {
        self.reason == Some(reason)
    }

    fn new(failure: Failure) -> Self {
        Self(Box::new(failure))
    }
}

impl Failure {
    fn plain(origin: Origin, code: Code, message: String) -> Self {
        Self {
            origin,
            code,
            reason: None,
            retryable: false,
            may_have_applied: false,
            leader: None,
            watermarks: None,
            next_sequence: None,
            next_offset: None,
            fencing_token: None,
            limit: None,
            topic_partition: None,
            recreated: None,
            member_ids: Vec::new(),
            member_epoch: None,
            retry_after: None,
            is_from_earlier_batch: false,
            is_tls_failure: false,
            message,
        }
    }
}

impl Deref for Error {
    type Target = Failure;

    fn deref(&self) -> &Failure {
        &self.0
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reason {
            Some(reason) => write!(formatter, "{}: ", wire::reason_name(reason))?,
            None => write!(formatter, "{:?}: ", self.code)?,
        }
        formatter.write_str(&self.message)?;
        if let Some((topic, partition)) = &self.topic_partition {
            write!(formatter, " ({topic}/{partition})")?;
        }
        if self.may_have_applied {
            formatter.write_str(" (may have been applied)")?;
        }
        Ok(())
    }
}

impl StdError for Error {}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        Self::new(failure)
    }
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        Self::from_status(&status)
    }
}

/// Returns true if the connect failed, so that the request was not sent.
fn is_unsent(status: &Status) -> bool {
    chain(status).any(|error| error.is::<ConnectError>())
}

/// Returns true if the handshake of a new connection failed.
fn is_failed_handshake(status: &Status) -> bool {
    // The source of an I/O error is that of the error within.
    let within = |error: &(dyn StdError + 'static)| {
        let inner = error.downcast_ref::<io::Error>()?.get_ref()?;
        inner.downcast_ref::<HandshakeError>().map(|_| ())
    };
    chain(status).any(|error| within(error).is_some())
}

/// Returns the refusal of the connection, if that is the cause.
fn refused_connection(status: &Status) -> Option<&RefusedConnection> {
    chain(status).find_map(|error| error.downcast_ref::<RefusedConnection>())
}

/// Returns the message with that of the innermost source: outer ones only say "transport error".
fn innermost(status: &Status) -> String {
    match chain(status).last() {
        Some(inner) if !status.message().contains(&inner.to_string()) => {
            format!("{}: {inner}", status.message())
        }
        _ => status.message().to_owned(),
    }
}

fn chain(status: &Status) -> impl Iterator<Item = &(dyn StdError + 'static)> {
    std::iter::successors(status.source(), |&error| error.source())
}

#[cfg(test)]
mod tests {
    use helix_proto::log::v1::ErrorDetail;

    use super::*;

    #[test]
    fn service_error_carries_its_details() {
        let detail = ErrorDetail {
            next_sequence: Some(7),
            topic: "orders".to_owned(),
            partition: Some(3),
            watermarks: Some(Watermarks { log_start_offset: 1, high_watermark: 9 }),
            ..wire::detail(ErrorReason::OutOfOrderSequence)
        };
        let error = Error::from_status(&wire::to_status(&detail, "gap", None));
        assert_eq!(error.origin, Origin::Service);
        assert_eq!(error.code, Code::FailedPrecondition);
        assert!(error.is(ErrorReason::OutOfOrderSequence));
        assert!(!error.retryable && !error.may_have_applied);
        assert_eq!(error.next_sequence, Some(7));
        assert_eq!(error.watermarks.map(|marks| marks.high_watermark), Some(9));
        assert_eq!(error.to_string(), "OUT_OF_ORDER_SEQUENCE: gap (orders/3)");
    }

    #[test]
    fn recreated_topic_has_both_ids() {
        let detail = ErrorDetail {
            topic: "orders".to_owned(),
            topic_id: 9,
            expected_topic_id: 4,
            ..wire::detail(ErrorReason::TopicRecreated)
        };
        let error = Error::from_status(&wire::to_status(&detail, "", None));
        let expected = RecreatedTopic { topic: "orders".to_owned(), expected_id: 4, id: 9 };
        assert_eq!(error.recreated, Some(expected));
        assert!(!error.retryable);
    }

    #[test]
    fn refused_group_call_names_members_and_epoch() {
        let detail = ErrorDetail {
            member_ids: vec!["m1".to_owned(), "m2".to_owned()],
            member_epoch: 7,
            ..wire::detail(ErrorReason::GroupNotEmpty)
        };
        let error = Error::from_status(&wire::to_status(&detail, "", None));
        assert_eq!((error.member_ids.len(), error.member_epoch), (2, Some(7)));
        let detail = wire::detail(ErrorReason::UnknownMember);
        let error = Error::from_status(&wire::to_status(&detail, "", None));
        assert_eq!((error.member_ids.len(), error.member_epoch), (0, None));
    }

    #[test]
    fn unknown_outcome_may_have_applied() {
        let detail = wire::detail(ErrorReason::OutcomeUnknown);
        let wait = Some(Duration::from_millis(50));
        let error = Error::from_status(&wire::to_status(&detail, "leader lost", wait));
        assert!(error.retryable && error.may_have_applied);
        assert_eq!(error.retry_after, wait);
    }

    #[test]
    fn reason_of_a_later_version_is_none() {
        let detail = ErrorDetail { reason: 9999, retryable: true, ..ErrorDetail::default() };
        let error = Error::from_status(&wire::to_status(&detail, "new", None));
        assert_eq!((error.origin, error.reason), (Origin::Service, None));
        assert!(error.retryable);
    }

    #[test]
    fn failed_connect_was_not_applied() {
        let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
        let status = Status::from_error(Box::new(ConnectError(Box::new(refused))));
        let error = Error::from_status(&status);
        assert_eq!((error.origin, error.code), (Origin::Transport, Code::Unavailable));
        assert!(error.retryable && !error.may_have_applied);
    }

    #[test]
    fn broken_connection_may_have_applied() {
        let reset = io::Error::from(io::ErrorKind::ConnectionReset);
        let error = Error::from_status(&Status::from_error(Box::new(reset)));
        assert_eq!(error.origin, Origin::Transport);
        assert!(error.retryable && error.may_have_applied);
    }

    #[test]
    fn rejection_by_a_grpc_library_is_final() {
        let error = Error::from_status(&Status::out_of_range("message length too large"));
        assert_eq!((error.origin, error.reason), (Origin::Transport, None));
        assert!(!error.retryable && error.may_have_applied);
        let error = Error::from_status(&Status::unimplemented("no such method"));
        assert!(!error.retryable && !error.may_have_applied);
    }
}
