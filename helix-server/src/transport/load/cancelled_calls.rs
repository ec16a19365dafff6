//! Counts the calls that the client of a connection cancels.

use std::time::Duration;

use tokio::time::Instant;

use crate::limits;

const SECOND: Duration = Duration::from_secs(1);

/// Cancelled calls of one connection.
#[derive(Debug, Default)]
pub(super) struct CancelledCalls {
    /// Time until which all of them would take at the rate that is allowed.
    until: Option<Instant>,
    /// The calls since a time that is at most a second before the newest one.
    counted: Option<(Instant, u32)>,
}

impl CancelledCalls {
    pub(super) fn add(&mut self, now: Instant) {
        let begun = self.until.map_or(now, |until| until.max(now));
        self.until = Some(begun + SECOND / limits::CANCELLED_PER_SECOND);
        self.counted = match self.counted {
            Some((since, count)) if now < since + SECOND => Some((since, count + 1)),
            _ => Some((now, 1)),
        };
    }

    /// Returns true if there were more than [`limits::CANCELLED_UNPACED`] within a second, and the
    /// last one was less than a second ago.
    ///
    /// A few mean nothing: a client ends a subscription or a long poll this way.
    pub(super) fn are_many(&self, now: Instant) -> bool {
        let is_recent = self.until.is_some_and(|until| until + SECOND > now);
        is_recent && self.counted.is_some_and(|(_, count)| count > limits::CANCELLED_UNPACED)
    }

    /// Returns the time until which the connection is not read, if they came faster than
    /// [`limits::CANCELLED_PER_SECOND`] for longer than [`limits::CANCELLED_BURST`].
    pub(super) fn read_again_at(&self, now: Instant) -> Option<Instant> {
        self.until?.checked_sub(limits::CANCELLED_BURST).filter(|until| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_cancelled_calls_do_not_slow_a_connection_down() {
        let mut calls = CancelledCalls::default();
        let start = Instant::now();
        assert!(!calls.are_many(start));
        for _ in 0..limits::CANCELLED_UNPACED {
            calls.add(start);
        }
        assert!(!calls.are_many(start));
        calls.add(start);
        assert!(calls.are_many(start));
        assert!(calls.are_many(start + SECOND));
        assert!(!calls.are_many(start + 2 * SECOND));
        // A second later they no longer count.
        calls.add(start + SECOND);
        assert!(!calls.are_many(start + SECOND));
    }
}
