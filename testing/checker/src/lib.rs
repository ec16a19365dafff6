//! Decides whether the responses to producers and readers are possible with a correct log. Pure.
//!
//! A history is a list of lines in the order in which clients observed them. A line before another
//! one ended before the other one began. The checker uses no other notion of time: every rule below
//! is an order or an equality. Checking n lines takes O(n log n).
//!
//! Rules:
//!
//! - An acknowledged batch is at the offset of its ack in every final read.
//! - A batch is in the log at most once. A batch that failed for certain is not in the log. Readers
//!   get only whole batches that were written.
//! - An offset has the same content for all readers, permanently. Every final read has all content
//!   that was read before, or was below a high watermark of a response.
//! - A reader gets offsets without gaps or steps back. Its next offset is out of range only if the
//!   log may have been trimmed beyond it.
//! - Acknowledged batches of one producer in one partition are in the order of sending. In a stream
//!   (a pipelined session) this includes batches with unknown outcomes, and no batch follows a
//!   missing one. An abandoned unary retry may be appended late.
//! - A batch that was invoked after another one was acked or read has a higher offset.
//! - "Latest" is linearizable: not below any offset that was acked, read or returned as latest
//!   before the request. Other reads may lag, and a high watermark may be lower on another node or
//!   after a restart. It never goes back within a session (one reader of one node between two
//!   starts).
//! - While the harness keeps a majority down, no batch that was invoked meanwhile is acked.
//! - A batch with an expected offset is acked only there. It is rejected only if the next offset is
//!   another one, not below the end known before its invocation. A batch with a fencing token is
//!   not acked if it was invoked after a later token was set.
//! - A log starts at an acknowledged trim or at an offset that a trim may have reached.
//! - Append times never decrease from batch to batch, and are equal for all readers.
//! - Final reads of all replicas are equal, and each ends at its high watermark.

mod event;
mod final_reads;
mod group;
mod group_offset;
mod ordering;
pub mod payload;
#[cfg(test)]
mod random_history;
mod state;
#[cfg(test)]
mod tests;
mod verdict;

pub use event::{BatchKey, HistoryEvent, HistoryLine};
pub use group::{GroupChecker, GroupCounts, GroupPartitionKey, GroupStart, SentCommit};
pub use group_offset::{GroupOffsetChange, GroupOffsetChecker, SentOffsetChange, StoredOffset};
pub use state::HistoryChecker;
pub use verdict::{HistoryVerdict, Violation, ViolationClass};

/// Checks a complete history.
pub fn check(lines: &[HistoryLine]) -> HistoryVerdict {
    let mut checker = HistoryChecker::default();
    for line in lines {
        checker.on(&line.event);
    }
    checker.verdict()
}
