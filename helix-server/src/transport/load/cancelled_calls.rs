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
    /// Start of the window of a second that the newest one is in, and the calls in it.
    counted: Option<(Instant, u32)>,
    /// Time until which the connection is read in small turns.
    many_until: Option<Instant>,
}

impl CancelledCalls {
    pub(super) fn add(&mut self, now: Instant) {
        let begun = self.until.map_or(now, |until| until.max(now));
        let until = begun + SECOND / limits::CANCELLED_PER_SECOND;
        self.until = Some(until);
        let (since, count) = match self.counted {
            Some((since, count)) if now < since + SECOND => (since, count + 1),
            _ => (now, 1),
        };
        self.counted = Some((since, count));
        if count > limits::CANCELLED_UNPACED {
            // Holds in the next window too, until its own calls are counted.
            self.many_until = Some(until + SECOND);
        }
    }

    /// Returns true if a window had more than [`limits::CANCELLED_UNPACED`], until a second after
    /// the last of them, or after `until` if that is later.
    ///
    /// A few mean nothing: a client ends a subscription or a long poll this way.
    pub(super) fn are_many(&self, now: Instant) -> bool {
        self.many_until.is_some_and(|until| until > now)
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
        calls.add(start + 2 * SECOND);
        assert!(!calls.are_many(start + 2 * SECOND));
    }

    #[test]
    fn a_flood_of_cancelled_calls_stays_paced() {
        let mut calls = CancelledCalls::default();
        let (start, per_second) = (Instant::now(), 300_u32);
        for number in 0..3 * per_second {
            let now = start + number * SECOND / per_second;
            calls.add(now);
            assert_eq!(calls.are_many(now), number >= limits::CANCELLED_UNPACED, "{number}");
        }
    }
}
