//! The writer's queue: requests and the callbacks that wait for them.

use std::time::Duration;

use bytes::Bytes;

use crate::error::Error;
use crate::types::{DurableCallback, Entry, LogId};

/// A callback that is run exactly once, at the latest when it is dropped.
pub(crate) struct PendingCallback(Option<DurableCallback>);

impl PendingCallback {
    pub(crate) fn new(done: DurableCallback) -> Self {
        Self(Some(done))
    }

    pub(crate) fn complete(mut self, result: Result<(), Error>) {
        if let Some(done) = self.0.take() {
            done(result);
        }
    }
}

impl Drop for PendingCallback {
    fn drop(&mut self) {
        // Reached only after a panic.
        if let Some(done) = self.0.take() {
            done(Err(Error::Closed));
        }
    }
}

/// A request to the writer, in the order of the calls.
pub(crate) enum WriteRequest {
    Append {
        entries: Vec<Entry>,
        serial: u64,
        epoch: u64,
        done: PendingCallback,
    },
    Vote {
        vote: Bytes,
        done: PendingCallback,
    },
    Truncate {
        from: u64,
        last: Option<LogId>,
        done: PendingCallback,
    },
    /// `empties`: no entry remains after it.
    Purge {
        upto: LogId,
        empties: bool,
        done: PendingCallback,
    },
}

impl WriteRequest {
    /// Returns the bytes of its payloads.
    pub(crate) fn payload_bytes(&self) -> u64 {
        match self {
            Self::Append { entries, .. } => {
                entries.iter().map(|entry| entry.payload.bytes.len() as u64).sum()
            }
            Self::Vote { .. } | Self::Truncate { .. } | Self::Purge { .. } => 0,
        }
    }

    pub(crate) fn into_done(self) -> PendingCallback {
        match self {
            Self::Append { done, .. }
            | Self::Vote { done, .. }
            | Self::Truncate { done, .. }
            | Self::Purge { done, .. } => done,
        }
    }
}

/// A request and its arrival time.
pub(crate) struct QueuedRequest {
    pub request: WriteRequest,
    pub since: Duration,
}
