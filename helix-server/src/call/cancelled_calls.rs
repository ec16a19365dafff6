//! Paces the calls that clients cancel.

use std::time::Duration;

use tokio::time::Instant;

use crate::limits;

const SECOND: Duration = Duration::from_secs(1);

/// Cancelled calls at a rate, and for [`limits::CANCELLED_BURST`] above it.
#[derive(Debug)]
pub(crate) struct CancelRate {
    per_second: u32,
    /// Time until which all calls so far take at the rate.
    until: Option<Instant>,
}

impl CancelRate {
    pub(super) fn new(per_second: u32) -> Self {
        Self { per_second, until: None }
    }

    /// Counts calls. Returns the time until which no more may be read, if they are above the rate.
    pub(super) fn add(&mut self, count: u32, now: Instant) -> Option<Instant> {
        let begun = self.until.map_or(now, |until| until.max(now));
        let until = begun + SECOND * count / self.per_second;
        self.until = Some(until);
        until.checked_sub(limits::CANCELLED_BURST).filter(|until| *until > now)
    }
}

/// Cancelled calls of one connection.
#[derive(Debug)]
pub(crate) struct CancelledCalls {
    rate: CancelRate,
    /// Start of the window of a second that the newest one is in, and the calls in it.
    window: Option<(Instant, u32)>,
}

impl CancelledCalls {
    pub(crate) fn new() -> Self {
        Self { rate: CancelRate::new(limits::CANCELLED_PER_SECOND), window: None }
    }

    /// Counts calls that the client has cancelled. Returns the time until which its connection is
    /// not read, if there is one, and how many of them are too many for a client that ends its
    /// subscriptions and long polls this way.
    pub(super) fn add(&mut self, count: u32, now: Instant) -> (Option<Instant>, u32) {
        let (since, before) = match self.window {
            Some((since, before)) if now < since + SECOND => (since, before),
            _ => (now, 0),
        };
        let total = before.saturating_add(count);
        self.window = Some((since, total));
        let many = total.saturating_sub(before.max(limits::CANCELLED_UNPACED));
        (self.rate.add(count, now), many)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_free_and_a_flood_has_the_rate() {
        let mut rate = CancelRate::new(limits::CANCELLED_PER_SECOND);
        let (start, burst) = (Instant::now(), limits::CANCELLED_PER_SECOND);
        assert_eq!(rate.add(burst, start), None);
        let mut now = start;
        for _ in 0..100 {
            now = rate.add(burst / 10, now).unwrap_or(now);
        }
        let elapsed = now - start;
        assert!((9..=10).contains(&elapsed.as_secs()), "{elapsed:?}");
        // A second without any allows another burst.
        assert_eq!(rate.add(burst, now + 2 * SECOND), None);
    }

    #[test]
    fn a_few_cancelled_calls_of_each_second_are_not_many() {
        let (start, few) = (Instant::now(), limits::CANCELLED_UNPACED);
        let mut calls = CancelledCalls::new();
        assert_eq!(calls.add(few, start), (None, 0));
        assert_eq!(calls.add(3, start), (None, 3));
        assert_eq!(calls.add(3, start + SECOND / 2), (None, 3));
        assert_eq!(calls.add(few + 1, start + SECOND), (None, 1));
    }
}
