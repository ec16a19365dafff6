//! The audit log: control operations, failed logins and denials, with the tracing target `audit`.
//! Lines of failed operations, failed logins and denials are limited, so that a client cannot flood
//! the log. The last failed logins and denials are also kept in memory.

use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use crate::limits::{REFUSED_CALL_TEXT_BYTES, REFUSED_CALLS_MAX};
use crate::quote::cut;
use crate::sync;

/// Tracing target of the audit log.
pub const TARGET: &str = "audit";

/// Lines of failed operations, and of failed logins and denials, in one [`SPAN`]; later ones are
/// counted.
const LINES_PER_SPAN: u32 = 100;

const SPAN: Duration = Duration::from_secs(1);

/// An event of the audit log.
#[derive(Debug, Clone, Copy)]
pub struct AuditEvent<'a> {
    /// "control", "login" or "denial".
    pub kind: &'static str,
    /// Empty if it is unknown.
    pub principal: &'a str,
    pub user_agent: &'a str,
    /// "helix.log.v1.TopicService/CreateTopic".
    pub method: &'a str,
    /// Operations and resources: "create topic orders".
    pub resource: &'a str,
    /// "OK", or the reason of the failure.
    pub result: &'a str,
}

/// Writes the audit log of a node.
#[derive(Debug, Default)]
pub struct AuditLog {
    refusals: Mutex<Refusals>,
    /// Control operations that failed.
    failures: Mutex<Refusals>,
    /// The last failed logins and denials that were logged, oldest first.
    refused: Mutex<VecDeque<RefusedCall>>,
}

/// A failed login or a denial. Its texts are cut.
#[derive(Debug, Clone)]
pub struct RefusedCall {
    pub at: Instant,
    pub principal: String,
    pub peer: String,
    pub user_agent: String,
    pub method: String,
    pub resource: String,
    pub result: String,
}

impl RefusedCall {
    fn new(peer: &dyn Display, event: &AuditEvent<'_>) -> Self {
        let text = |text: &str| cut(text, REFUSED_CALL_TEXT_BYTES).to_owned();
        Self {
            at: Instant::now(),
            principal: text(event.principal),
            peer: text(&peer.to_string()),
            user_agent: text(event.user_agent),
            method: text(event.method),
            resource: text(event.resource),
            result: text(event.result),
        }
    }
}

#[derive(Debug, Default)]
struct Refusals {
    since: Option<Instant>,
    lines: u32,
    suppressed: u64,
}

impl Refusals {
    /// Returns the number of earlier lines that were suppressed, or `None` to suppress this one.
    fn next(&mut self) -> Option<u64> {
        if self.since.is_none_or(|since| since.elapsed() >= SPAN) {
            self.since = Some(Instant::now());
            self.lines = 0;
        }
        if self.lines >= LINES_PER_SPAN {
            self.suppressed += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

impl AuditLog {
    /// Logs the outcome of a control operation, unless too many failed in this second.
    pub fn control(&self, peer: &dyn Display, event: &AuditEvent<'_>) {
        if event.result == "OK" {
            return write(peer, event, 0);
        }
        let suppressed = sync::lock(&self.failures).next();
        if let Some(suppressed) = suppressed {
            write(peer, event, suppressed);
        }
    }

    /// Logs a failed login or a denial, unless there were too many in this second.
    pub fn refusal(&self, peer: &dyn Display, event: &AuditEvent<'_>) {
        let suppressed = sync::lock(&self.refusals).next();
        if let Some(suppressed) = suppressed {
            write(peer, event, suppressed);
            let mut refused = sync::lock(&self.refused);
            if refused.len() == REFUSED_CALLS_MAX {
                refused.pop_front();
            }
            refused.push_back(RefusedCall::new(peer, event));
        }
    }

    /// Returns the last failed logins and denials, the newest first.
    pub fn refused(&self) -> Vec<RefusedCall> {
        sync::lock(&self.refused).iter().rev().cloned().collect()
    }
}

fn write(peer: &dyn Display, event: &AuditEvent<'_>, suppressed: u64) {
    let AuditEvent { kind, principal, user_agent, method, resource, result } = event;
    tracing::info!(
        target: TARGET,
        kind, principal, %peer, user_agent, method, resource, result,
        suppressed = (suppressed > 0).then_some(suppressed),
        "audit"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_bounded_number_of_refused_calls_is_kept() {
        let log = AuditLog::default();
        let long = "x".repeat(9_000);
        for number in 0..REFUSED_CALLS_MAX + 10 {
            let event = AuditEvent {
                kind: "denial",
                principal: &number.to_string(),
                user_agent: &long,
                method: "m",
                resource: "create topic orders",
                result: "PERMISSION_DENIED",
            };
            log.refusal(&"127.0.0.1:1", &event);
            tokio::time::advance(SPAN / 10).await;
        }
        let refused = log.refused();
        assert_eq!(refused.len(), REFUSED_CALLS_MAX);
        assert_eq!(refused[0].principal, (REFUSED_CALLS_MAX + 9).to_string());
        assert_eq!(refused[0].user_agent.len(), REFUSED_CALL_TEXT_BYTES);
    }

    #[tokio::test(start_paused = true)]
    async fn refusals_beyond_the_limit_are_counted() {
        let mut refusals = Refusals::default();
        for _ in 0..LINES_PER_SPAN {
            assert_eq!(refusals.next(), Some(0));
        }
        assert_eq!((refusals.next(), refusals.next()), (None, None));
        tokio::time::advance(SPAN).await;
        assert_eq!((refusals.next(), refusals.next()), (Some(2), Some(0)));
    }
}
