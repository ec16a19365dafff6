//! Decides whether what producers and readers were told can be the story of a correct log. Pure.
//!
//! A history is a list of lines in the order in which they happened at the clients: a line that
//! stands before another was over before that other began. That order is all the time that there
//! is; every rule below is an order or an equality. n lines take O(n log n).
//!
//! What is demanded, and of whom:
//!
//! - An acknowledged batch stands at the offset that its ack named, in every final read.
//! - A batch stands in the log once. A batch that surely failed never does. Nobody reads what
//!   nobody wrote, or half a batch.
//! - One offset has one content, for everyone and for ever. What was read once, or lay below a
//!   high watermark that anyone was told, is in every final read.
//! - A reader gets offsets without gap or step back, and is told that an offset it has reached is
//!   out of range only where the log may have been trimmed beyond it.
//! - Batches of one producer that were acked in one partition stand there in the order in which
//!   they were sent. Of a stream (a pipelined session) even the batches with open outcomes do, and
//!   none is there if one before it is missing. (A unary retry that was given up may land late.)
//! - A batch that was invoked after something was acked or read stands behind it.
//! - "Latest" is linearizable: it is not below anything acked, read or told as latest before the
//!   question was asked. An ordinary read promises less: it may lag, and a high watermark may be
//!   lower on another node or after a restart. Only within one session (one reader, one node
//!   between two starts) it never goes back.
//! - While the harness holds a majority down, nothing is acked that was invoked meanwhile.
//! - A batch that demands an offset is acked only there, and is refused only with another end,
//!   which is not below what was known before it was invoked. A batch with a token is not acked
//!   if it was invoked after a later token was in force.
//! - A log starts nowhere but where a trim was acknowledged or may have reached, whoever is told.
//! - Append times never step back from one batch to the next, and every reader is told the same.
//! - Final reads of all replicas are equal, and each ends where its high watermark says.

mod event;
mod finals;
mod orders;
pub mod payload;
mod state;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod verdict;

pub use event::{BatchKey, Event, Line};
pub use state::Checker;
pub use verdict::{Class, Verdict, Violation};

/// Checks a whole history.
pub fn check(lines: &[Line]) -> Verdict {
    let mut checker = Checker::default();
    for line in lines {
        checker.on(&line.event);
    }
    checker.verdict()
}
