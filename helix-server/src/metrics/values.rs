//! A count and a distribution of times. Both only grow, and cost an atomic addition or two.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the classes of times, in microseconds. From a read out of memory to the wait
/// after which an outcome is called unknown.
pub const BOUNDS_US: [u64; 18] = [
    50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000,
    1_000_000, 2_000_000, 5_000_000, 10_000_000, 20_000_000,
];

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

#[derive(Debug, Default)]
pub struct Histogram {
    /// One class for each bound, and one above them all.
    classes: [AtomicU64; BOUNDS_US.len() + 1],
    sum_us: AtomicU64,
}

impl Histogram {
    pub fn observe(&self, time: Duration) {
        let time_us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let class = BOUNDS_US.partition_point(|bound| *bound < time_us);
        self.classes[class].fetch_add(1, Ordering::Relaxed);
        self.sum_us.fetch_add(time_us, Ordering::Relaxed);
    }

    /// How many times fell into each class, and all of them together.
    pub fn get(&self) -> (Vec<u64>, u64) {
        let classes = self.classes.iter().map(|class| class.load(Ordering::Relaxed));
        (classes.collect(), self.sum_us.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_falls_into_the_class_of_the_first_bound_that_it_does_not_exceed() {
        let histogram = Histogram::default();
        for time_us in [0, 50, 51, 1_000, 30_000_000] {
            histogram.observe(Duration::from_micros(time_us));
        }
        let (classes, sum_us) = histogram.get();
        assert_eq!((classes[0], classes[1], classes[4]), (2, 1, 1));
        assert_eq!((classes[BOUNDS_US.len()], classes.iter().sum::<u64>()), (1, 5));
        assert_eq!(sum_us, 30_001_101);
    }
}
