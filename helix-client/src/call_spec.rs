//! Name, retry rule and deadline of a call.

use std::time::Duration;

use tokio::time::Instant;

/// Rule for repeating a request after an attempt with an unknown outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Repeat {
    /// Repeat: a read applies nothing.
    Read,
    /// Repeat: an idempotent change, or an append with its sequence.
    Always,
    /// Do not repeat unless it was certainly not applied: a second copy would be a second batch.
    UnlessApplied,
}

/// Name, retry rule and deadline of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallSpec {
    /// Name for error messages.
    pub(crate) name: &'static str,
    pub(crate) repeat: Repeat,
    /// Time that the service may wait on request, in addition to the timeouts.
    pub(crate) wait: Duration,
    /// Start of the caller's wait, from which the deadline counts.
    pub(crate) since: Instant,
    /// Limit of each attempt, without `wait`.
    pub(crate) attempt_max: Duration,
    /// Ask again where a topic is unknown: it may be new.
    pub(crate) rechecks_topics: bool,
}

impl CallSpec {
    pub(crate) fn new(name: &'static str, repeat: Repeat) -> Self {
        Self {
            name,
            repeat,
            wait: Duration::ZERO,
            since: Instant::now(),
            attempt_max: Duration::MAX,
            rechecks_topics: true,
        }
    }
}
