//! Holds the messages of a call back while its caller is over its quota of bytes.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Sleep, sleep};

use super::load::CallMemory;
use crate::error::{Error, Result};
use crate::limits::QUOTA_DELAY_MAX;
use crate::node::{Node, QuotaKind, QuotaMeter};

/// Admits the messages of one request to its caller's quota.
pub(super) struct QuotaDelay {
    node: Arc<Node>,
    meter: Arc<QuotaMeter>,
    /// True for appends; other messages are counted and not held back.
    is_limited: bool,
    /// True for a stream, which waits. A unary call is refused.
    waits: bool,
    sleep: Option<Pin<Box<Sleep>>>,
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
        Some(Self { node: node.clone(), meter, is_limited, waits, sleep: None })
    }

    /// Admits a message of this length, once the caller is within its quota.
    ///
    /// # Errors
    /// [`Error::OverQuota`] if a unary call is over it, or a stream would wait too long: its unread
    /// messages take the window that other calls of the connection need.
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
