//! A token bucket that may go into debt, for all copies of a node. A copy that finds it above zero
//! may send or take one request of any size. Later copies wait until the debt is paid.

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::metrics::Counter;
use crate::sync;

/// Limits the rate of all copies, which may change while they run.
#[derive(Debug)]
pub(super) struct Throttle {
    /// Bytes that can be copied at once after a pause.
    burst: u64,
    bucket: Mutex<Bucket>,
    /// Bytes copied since the start.
    copied: Counter,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    /// Bytes per second.
    rate: u64,
    /// Time at which the bucket is, or was, at zero.
    empty_at: Instant,
}

impl Throttle {
    pub(super) fn new(rate: u64, burst: u64) -> Self {
        let empty_at = Instant::now() - time_for(burst, rate);
        let bucket = Mutex::new(Bucket { rate, empty_at });
        Self { burst, bucket, copied: Counter::default() }
    }

    /// Changes the rate. A debt is paid at the new one.
    pub(super) fn set_rate(&self, rate: u64) {
        let mut bucket = sync::lock(&self.bucket);
        let now = Instant::now();
        let debt = bucket.empty_at.saturating_duration_since(now);
        if rate != bucket.rate && !debt.is_zero() {
            let share = bucket.rate as f64 / rate.max(1) as f64;
            bucket.empty_at = now + debt.mul_f64(share);
        }
        bucket.rate = rate;
    }

    /// Returns the time at which the next request may be sent; `None` if it may be sent now.
    pub(super) fn wait_until(&self) -> Option<Instant> {
        let empty_at = sync::lock(&self.bucket).empty_at;
        (empty_at > Instant::now()).then_some(empty_at)
    }

    /// Waits until the next request may be sent.
    pub(super) async fn wait(&self) {
        while let Some(until) = self.wait_until() {
            sleep_until(until).await;
        }
    }

    /// Takes the bytes of a request that is sent now.
    pub(super) fn spend(&self, bytes: u64) {
        self.note(bytes);
        let mut bucket = sync::lock(&self.bucket);
        let full = Instant::now() - time_for(self.burst, bucket.rate);
        bucket.empty_at = bucket.empty_at.max(full) + time_for(bytes, bucket.rate);
    }

    /// Counts bytes that another node sends at its own rate, without taking them from the bucket.
    pub(super) fn note(&self, bytes: u64) {
        self.copied.add(bytes);
    }

    /// Returns the bytes copied since the start.
    pub(super) fn copied(&self) -> u64 {
        self.copied.get()
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

    #[tokio::test(start_paused = true)]
    async fn debt_is_paid_at_a_changed_rate() {
        let throttle = Throttle::new(1000, 500);
        throttle.spend(2500);
        throttle.set_rate(500);
        let until = throttle.wait_until().expect("in debt");
        assert_eq!(until - Instant::now(), Duration::from_secs(4));
        tokio::time::advance(Duration::from_secs(2)).await;
        throttle.set_rate(2000);
        let began = Instant::now();
        throttle.wait().await;
        assert_eq!(began.elapsed(), Duration::from_millis(500));
        throttle.note(7);
        assert_eq!(throttle.wait_until(), None, "another node pays for these");
        assert_eq!(throttle.copied(), 2507);
    }
}
