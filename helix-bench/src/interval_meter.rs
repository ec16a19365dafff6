//! Measurements of intervals: many tasks add to them, and one takes them at each interval's end.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hdrhistogram::Histogram;
use helix_client::Error;

use crate::meter::{Failures, Percentiles};

/// Highest recorded time in nanoseconds: twelve hours, for records that wait in a backlog.
const TIME_NS_MAX: u64 = 12 * 3600 * 1_000_000_000;
/// Parts of a shared meter. Further tasks share them, which bounds the memory of the histograms.
const PARTS_MAX: usize = 16;
/// Steps of [`LongHistogram::distribution`] in each halving of the distance to 100 %.
const DISTRIBUTION_TICKS: u32 = 100;

/// Histogram of times up to twelve hours, to three significant digits.
#[derive(Debug, Clone)]
pub(crate) struct LongHistogram(Histogram<u64>);

impl LongHistogram {
    pub(crate) fn new() -> Self {
        Self(Histogram::new_with_bounds(1, TIME_NS_MAX, 3).expect("bounds in order"))
    }

    pub(crate) fn record(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.0.saturating_record(ns.max(1));
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        self.0.add(&other.0).expect("equal bounds");
    }

    /// Returns the mean in microseconds; 0 if nothing was recorded.
    pub(crate) fn mean_us(&self) -> f64 {
        self.0.mean() / 1e3
    }

    /// Returns the time in microseconds that a share of the times, in percent, does not exceed; 0
    /// if nothing was recorded.
    pub(crate) fn percentile_us(&self, percent: f64) -> f64 {
        if self.0.is_empty() { 0.0 } else { us(self.0.value_at_quantile(percent / 100.0)) }
    }

    /// Returns the longest time in microseconds; 0 if nothing was recorded.
    pub(crate) fn max_us(&self) -> f64 {
        if self.0.is_empty() { 0.0 } else { us(self.0.max()) }
    }

    /// Returns percentages, in steps that become finer towards 100, with their times in
    /// microseconds.
    pub(crate) fn distribution(&self) -> Vec<(f64, f64)> {
        let steps = self.0.iter_quantiles(DISTRIBUTION_TICKS);
        let mut points: Vec<_> =
            steps.map(|step| (step.percentile(), us(step.value_iterated_to()))).collect();
        // Many steps may fall on one value.
        points.dedup_by(|a, b| a.0.total_cmp(&b.0).is_eq());
        points
    }

    /// Returns `None` if nothing was recorded.
    pub(crate) fn percentiles(&self) -> Option<Percentiles> {
        (!self.0.is_empty()).then(|| Percentiles {
            p50: self.percentile_us(50.0),
            p90: self.percentile_us(90.0),
            p95: self.percentile_us(95.0),
            p99: self.percentile_us(99.0),
            p999: self.percentile_us(99.9),
            p9999: self.percentile_us(99.99),
            max: self.max_us(),
            mean: self.mean_us(),
            min: us(self.0.min()),
            count: self.0.len(),
        })
    }
}

/// Nanoseconds in microseconds.
fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}

/// Counters and latencies of one interval.
#[derive(Debug, Clone)]
pub(crate) struct IntervalMeter {
    /// Acked records and the bytes of their values.
    pub(crate) acked: u64,
    pub(crate) acked_bytes: u64,
    /// Records whose send or append failed.
    pub(crate) failed: u64,
    /// Deliveries over all consumers, and the bytes of their values.
    pub(crate) received: u64,
    pub(crate) received_bytes: u64,
    /// From the intended send to the ack.
    pub(crate) publish: LongHistogram,
    /// From the intended send to the send.
    pub(crate) delay: LongHistogram,
    /// From the intended send to the delivery.
    pub(crate) end_to_end: LongHistogram,
}

impl IntervalMeter {
    pub(crate) fn new() -> Self {
        Self {
            acked: 0,
            acked_bytes: 0,
            failed: 0,
            received: 0,
            received_bytes: 0,
            publish: LongHistogram::new(),
            delay: LongHistogram::new(),
            end_to_end: LongHistogram::new(),
        }
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        self.acked += other.acked;
        self.acked_bytes += other.acked_bytes;
        self.failed += other.failed;
        self.received += other.received;
        self.received_bytes += other.received_bytes;
        self.publish.merge(&other.publish);
        self.delay.merge(&other.delay);
        self.end_to_end.merge(&other.end_to_end);
    }
}

/// Records since the start, over all tasks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RecordTotals {
    pub(crate) acked: u64,
    pub(crate) failed: u64,
    pub(crate) received: u64,
}

/// Meter that the tasks of a run share.
#[derive(Debug)]
pub(crate) struct SharedMeter {
    parts: Vec<Mutex<IntervalMeter>>,
    acked: AtomicU64,
    failed: AtomicU64,
    received: AtomicU64,
    failures: Mutex<Failures>,
}

impl SharedMeter {
    /// Returns a meter for this many tasks.
    pub(crate) fn new(tasks: usize) -> Self {
        let parts = tasks.clamp(1, PARTS_MAX);
        Self {
            parts: (0..parts).map(|_| Mutex::new(IntervalMeter::new())).collect(),
            acked: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            received: AtomicU64::new(0),
            failures: Mutex::default(),
        }
    }

    /// Notes the ack of a record. `latency` and `delay` are from the intended send.
    pub(crate) fn note_ack(&self, task: usize, bytes: u64, latency: Duration, delay: Duration) {
        {
            let mut part = self.part(task);
            part.acked += 1;
            part.acked_bytes += bytes;
            part.publish.record(latency);
            part.delay.record(delay);
        }
        self.acked.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes a record that was not acked.
    pub(crate) fn note_failure(&self, task: usize, error: &Error) {
        self.part(task).failed += 1;
        self.failed.fetch_add(1, Ordering::Relaxed);
        lock(&self.failures).add(format!("{:?}", error.code), 1, error.to_string());
    }

    /// Notes deliveries: for each record its bytes and its latency from the intended send.
    pub(crate) fn note_deliveries(
        &self,
        task: usize,
        deliveries: impl Iterator<Item = (u64, Duration)>,
    ) {
        let mut count = 0;
        {
            let mut part = self.part(task);
            for (bytes, latency) in deliveries {
                count += 1;
                part.received_bytes += bytes;
                part.end_to_end.record(latency);
            }
            part.received += count;
        }
        self.received.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn totals(&self) -> RecordTotals {
        RecordTotals {
            acked: self.acked.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            received: self.received.load(Ordering::Relaxed),
        }
    }

    /// Returns the failures since the start.
    pub(crate) fn failures(&self) -> Failures {
        lock(&self.failures).clone()
    }

    /// Returns the measurements since the last call, and starts the next interval.
    pub(crate) fn take(&self) -> IntervalMeter {
        let mut all = IntervalMeter::new();
        for part in &self.parts {
            let taken = std::mem::replace(&mut *lock(part), IntervalMeter::new());
            all.merge(&taken);
        }
        all
    }

    fn part(&self, task: usize) -> MutexGuard<'_, IntervalMeter> {
        lock(&self.parts[task % self.parts.len()])
    }
}

/// Counters stay consistent if a task panics, so a poisoned lock is used like any other.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn is_near(us: f64, ms: f64) -> bool {
        (us / (ms * 1e3) - 1.0).abs() < 0.01
    }

    #[test]
    fn interval_starts_empty_after_it_was_taken() {
        let meter = SharedMeter::new(40);
        for task in 0..40 {
            meter.note_ack(task, 100, MS, Duration::ZERO);
            meter.note_deliveries(task, [(100, 2 * MS), (100, 2 * MS)].into_iter());
        }
        let taken = meter.take();
        assert_eq!((taken.acked, taken.acked_bytes), (40, 4000));
        assert_eq!((taken.received, taken.received_bytes), (80, 8000));
        assert!(is_near(taken.publish.percentile_us(99.0), 1.0));
        assert!(is_near(taken.end_to_end.mean_us(), 2.0));
        let empty = meter.take();
        assert_eq!((empty.acked, empty.received), (0, 0));
        assert_eq!((empty.publish.mean_us(), empty.publish.max_us()), (0.0, 0.0));
        assert_eq!(empty.publish.percentile_us(50.0), 0.0);
        assert!(empty.publish.percentiles().is_none() && empty.publish.distribution().is_empty());
        assert_eq!(meter.totals(), RecordTotals { acked: 40, failed: 0, received: 80 });
    }

    #[test]
    fn times_in_a_backlog_are_not_cut() {
        let mut histogram = LongHistogram::new();
        histogram.record(Duration::from_secs(3600));
        assert!(is_near(histogram.max_us(), 3_600_000.0));
    }

    #[test]
    fn distribution_rises_to_the_maximum() {
        let mut histogram = LongHistogram::new();
        (1..=1000).for_each(|ms| histogram.record(ms * MS));
        let points = histogram.distribution();
        assert!(points.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1));
        let (percent, us) = points[points.len() - 1];
        assert_eq!(percent, 100.0);
        assert!(is_near(us, 1000.0));
    }
}
