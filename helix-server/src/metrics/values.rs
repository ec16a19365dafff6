//! Counter and histogram. Both only grow; an update is one or two atomic additions.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the histogram buckets in µs.
/// They range from a read from memory to the wait after which an outcome is unknown.
pub const BOUNDS_US: [u64; 18] = [
    50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000,
    1_000_000, 2_000_000, 5_000_000, 10_000_000, 20_000_000,
];

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A distribution of durations.
#[derive(Debug, Default)]
pub struct Histogram {
    /// One bucket for each bound, and one above them.
    buckets: [AtomicU64; BOUNDS_US.len() + 1],
    sum_us: AtomicU64,
}

impl Histogram {
    pub fn observe(&self, time: Duration) {
        let time_us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_US.partition_point(|bound| *bound < time_us);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_us.fetch_add(time_us, Ordering::Relaxed);
    }

    /// Returns the count of each bucket, and the sum of all durations in µs.
    pub fn get(&self) -> (Vec<u64>, u64) {
        let buckets = self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed));
        (buckets.collect(), self.sum_us.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_a_duration_in_the_first_bucket_that_holds_it() {
        let histogram = Histogram::default();
        for time_us in [0, 50, 51, 1_000, 30_000_000] {
            histogram.observe(Duration::from_micros(time_us));
        }
        let (buckets, sum_us) = histogram.get();
        assert_eq!((buckets[0], buckets[1], buckets[4]), (2, 1, 1));
        assert_eq!((buckets[BOUNDS_US.len()], buckets.iter().sum::<u64>()), (1, 5));
        assert_eq!(sum_us, 30_001_101);
    }
}
