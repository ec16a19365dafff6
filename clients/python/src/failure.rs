//! Failures of calls, and the exceptions that Python code gets for them.

use helix_client::contexts::ContextError;
use helix_client::{Error, Origin};
use helix_proto::error::reason_name;
use helix_proto::log::v1::ErrorReason;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// Reason why a call failed.
#[derive(Debug)]
pub(crate) enum Failed {
    /// The service or the Rust client reports it.
    Call(Error),
    /// No cluster could be chosen.
    Context(ContextError),
    /// The handle was closed.
    Closed(&'static str),
    /// The handle is from the process that this one was forked from.
    Forked,
    /// The buffer of a producer is full.
    BufferFull { limit: usize },
    /// An argument is invalid.
    Argument(String),
    /// Records that were posted have failed.
    Posted { first: Error, count: u64 },
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Call(error)
    }
}

impl From<ContextError> for Failed {
    fn from(error: ContextError) -> Self {
        Self::Context(error)
    }
}

/// The fields of an exception. `helix.errors.from_fields` makes it.
#[derive(Debug, Default, IntoPyObject)]
struct ErrorFields {
    kind: &'static str,
    message: String,
    reason: Option<&'static str>,
    code: Option<String>,
    retryable: bool,
    may_have_applied: bool,
    hint: Option<String>,
    topic: Option<String>,
    partition: Option<u32>,
    next_offset: Option<u64>,
    next_sequence: Option<u64>,
    log_start_offset: Option<u64>,
    high_watermark: Option<u64>,
    fencing_token: Option<String>,
    limit: Option<u64>,
    retry_after: Option<f64>,
    member_epoch: Option<u64>,
    member_ids: Vec<String>,
    is_tls_failure: bool,
    failed_records: u64,
}

impl ErrorFields {
    fn of_call(error: &Error) -> Self {
        let kind = match error.origin {
            Origin::Service => "service",
            Origin::Transport => "transport",
            Origin::Client => "client",
        };
        let (topic, partition) = error.topic_partition.clone().unzip();
        Self {
            kind,
            message: error.message.clone(),
            reason: error.reason.map(reason_name),
            code: Some(format!("{:?}", error.code)),
            retryable: error.retryable,
            may_have_applied: error.may_have_applied,
            topic: topic.or_else(|| error.recreated.as_ref().map(|it| it.topic.clone())),
            partition,
            next_offset: error.next_offset,
            next_sequence: error.next_sequence,
            log_start_offset: error.watermarks.map(|it| it.log_start_offset),
            high_watermark: error.watermarks.map(|it| it.high_watermark),
            fencing_token: error.fencing_token.clone(),
            limit: error.limit,
            retry_after: error.retry_after.map(|it| it.as_secs_f64()),
            member_epoch: error.member_epoch,
            member_ids: error.member_ids.clone(),
            is_tls_failure: error.is_tls_failure,
            ..Self::default()
        }
    }
}

impl From<&Failed> for ErrorFields {
    fn from(failed: &Failed) -> Self {
        let local = |kind, message: String| Self { kind, message, ..Self::default() };
        match failed {
            Failed::Call(error) => Self::of_call(error),
            Failed::Context(error) => Self {
                hint: Some(error.hint.clone()).filter(|hint| !hint.is_empty()),
                ..local("context", error.to_string())
            },
            Failed::Closed(what) => local("closed", format!("the {what} is closed")),
            Failed::Forked => {
                let message = "this handle is from the process that this one was forked from";
                local("forked", message.to_owned())
            }
            Failed::BufferFull { limit } => Self {
                retryable: true,
                limit: Some(*limit as u64),
                ..local("buffer_full", format!("the buffer of {limit} bytes is full"))
            },
            Failed::Argument(message) => local("argument", message.clone()),
            Failed::Posted { first, count } => {
                let mut fields = Self::of_call(first);
                fields.failed_records = *count;
                if *count > 1 {
                    fields.message =
                        format!("{count} records failed, the first: {}", first.message);
                }
                fields
            }
        }
    }
}

impl From<Failed> for PyErr {
    fn from(failed: Failed) -> Self {
        static FROM_FIELDS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        Python::attach(|py| {
            let make = FROM_FIELDS.import(py, "helix.errors", "from_fields");
            let made = make.and_then(|make| make.call1((ErrorFields::from(&failed),)));
            made.map_or_else(|error| error, Self::from_value)
        })
    }
}

/// Returns the names of all reasons that the service gives, for tests of the Python package.
#[pyfunction]
pub(crate) fn error_reasons() -> Vec<&'static str> {
    (1..1000).filter_map(|number| ErrorReason::try_from(number).ok()).map(reason_name).collect()
}
