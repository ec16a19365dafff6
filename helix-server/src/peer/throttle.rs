//! A token bucket that may go into debt. A sender that finds it above zero may send one request of
//! any size. Later senders wait until the debt is paid.

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use crate::sync;

/// Limits the rate of all senders on the catch-up lane.
#[derive(Debug)]
pub(super) struct Throttle {
    /// Bytes per second.
    rate: u64,
    /// Bytes that can be sent at once after a pause.
    burst: u64,
    /// Time at which the bucket is, or was, at zero.
    empty_at: Mutex<Instant>,
}

impl Throttle {
    pub(super) fn new(rate: u64, burst: u64) -> Self {
        let full = Instant::now() - time_for(burst, rate);
        Self { rate, burst, empty_at: Mutex::new(full) }
    }

    /// Returns the time at which the next request may be sent; `None` if it may be sent now.
    pub(super) fn wait_until(&self) -> Option<Instant> {
        let empty_at = *sync::lock(&self.empty_at);
        (empty_at > Instant::now()).then_some(empty_at)
    }

    /// Takes the bytes of a request that is sent now.
    pub(super) fn spend(&self, bytes: u64) {
        let full = Instant::now() - time_for(self.burst, self.rate);
        let mut empty_at = sync::lock(&self.empty_at);
        *empty_at = (*empty_at).max(full) + time_for(bytes, self.rate);
    }
}

fn time_for(bytes: u64, rate: u64) -> Duration {
    let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn bytes_beyond_the_burst_are_limited_to_the_rate() {
        let throttle = Throttle::new(1000, 500);
        throttle.spend(400);
        assert_eq!(throttle.wait_until(), None);
        throttle.spend(1100);
        let until = throttle.wait_until().expect("in debt");
        assert_eq!(until - Instant::now(), Duration::from_secs(1));
        tokio::time::advance(Duration::from_millis(1000)).await;
        assert_eq!(throttle.wait_until(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn long_pause_allows_one_burst() {
        let throttle = Throttle::new(1000, 500);
        tokio::time::advance(Duration::from_secs(100)).await;
        throttle.spend(1500);
        let until = throttle.wait_until().expect("in debt");
        assert_eq!(until - Instant::now(), Duration::from_secs(1));
    }
}
