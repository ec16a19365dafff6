//! Holds calls and their messages back while their caller is over its quota.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Sleep, sleep};

use crate::access::{QuotaKind, QuotaMeter};
use crate::call::CallMemory;
use crate::error::{Error, Result};
use crate::limits::{QUOTA_DELAY_MAX, QUOTA_REFUSAL_DELAY_MAX};
use crate::node::Node;

/// Admits the messages of one request to its caller's quota.
pub(super) struct QuotaDelay {
    node: Arc<Node>,
    meter: Arc<QuotaMeter>,
    /// True for appends; other messages are counted and not held back.
    is_limited: bool,
    /// True for a stream, which waits. A unary call is refused.
    waits: bool,
    sleep: Option<Pin<Box<Sleep>>>,
    /// A unary call has waited before its refusal.
    has_waited: bool,
}

impl QuotaDelay {
    /// Returns `None` for a caller without credentials, which has no quota.
    pub(super) fn new(
        node: &Arc<Node>,
        call: &CallMemory,
        is_limited: bool,
        waits: bool,
    ) -> Option<Self> {
        let meter = call.quota_meter()?;
        Some(Self { node: node.clone(), meter, is_limited, waits, sleep: None, has_waited: false })
    }

    /// Returns how long the refusal of a call over its quota is held back, and takes it off the
    /// time that the refusal tells the caller to wait.
    pub(super) fn of_refusal(error: &mut Error) -> Duration {
        let Error::OverQuota { retry_after_ms, .. } = error else { return Duration::ZERO };
        let delay = Duration::from_millis(*retry_after_ms).min(QUOTA_REFUSAL_DELAY_MAX);
        let left = Duration::from_millis(*retry_after_ms).saturating_sub(delay);
        // At least 1, so that a client does not retry at once.
        *retry_after_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1);
        delay
    }

    /// Admits a message of this length, once the caller is within its quota.
    ///
    /// # Errors
    /// [`Error::OverQuota`] if a unary call is still over it after [`QUOTA_REFUSAL_DELAY_MAX`], or
    /// a stream would wait too long: its unread messages take the window that other calls of the
    /// connection need.
    pub(super) fn poll_admit(
        &mut self,
        length: usize,
        context: &mut Context<'_>,
    ) -> Poll<Result<()>> {
        loop {
            if let Some(sleep) = &mut self.sleep {
                ready!(sleep.as_mut().poll(context));
                self.sleep = None;
            }
            if self.is_limited
                && !self.waits
                && !self.has_waited
                && let Some(wait) = self.meter.wait(QuotaKind::BytesIn)
            {
                self.has_waited = true;
                self.sleep = Some(Box::pin(sleep(wait.min(QUOTA_REFUSAL_DELAY_MAX))));
                continue;
            }
            let admitted = match self.is_limited {
                true => self.meter.admit(QuotaKind::BytesIn),
                false => Ok(()),
            };
            let Err(error) = admitted else {
                self.meter.take(QuotaKind::BytesIn, length as u64);
                return Poll::Ready(Ok(()));
            };
            self.node.note_over_quota(&error);
            let wait = match &error {
                Error::OverQuota { retry_after_ms, .. } => Duration::from_millis(*retry_after_ms),
                _ => return Poll::Ready(Err(error)),
            };
            if !self.waits || wait > QUOTA_DELAY_MAX {
                return Poll::Ready(Err(error));
            }
            self.sleep = Some(Box::pin(sleep(wait)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_takes_its_delay_off_the_time_to_wait() {
        let of = |retry_after_ms| {
            let principal = "tenant".to_owned();
            let (unit, kind) = ("bytes", "bytes_in");
            let mut error = Error::OverQuota { principal, limit: 1, unit, kind, retry_after_ms };
            let delay = QuotaDelay::of_refusal(&mut error).as_millis();
            let Error::OverQuota { retry_after_ms, .. } = error else { unreachable!() };
            (delay, retry_after_ms)
        };
        assert_eq!([of(1), of(250), of(251)], [(1, 1), (250, 1), (250, 1)]);
        assert_eq!([of(900), of(10_000)], [(250, 650), (250, 9_750)]);
        let mut other = Error::Draining;
        assert!(QuotaDelay::of_refusal(&mut other).is_zero());
    }
}
