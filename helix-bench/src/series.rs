//! Rate and latency of a phase, second by second.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::Instant;

use crate::meter::{LatencyHistogram, Percentiles};

/// Length of an interval.
const INTERVAL: Duration = Duration::from_secs(1);
/// A longer phase has no intervals after these, so that its result stays small.
const INTERVALS_MAX: usize = 7200;

/// Second of a phase.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(crate) struct RateInterval {
    /// From the start of the phase to the end of the interval.
    pub(crate) at_seconds: f64,
    pub(crate) records_per_sec: f64,
    /// Requests that failed.
    pub(crate) errors: u64,
    /// Of the requests that were answered in the interval; `None` if none was.
    pub(crate) latency_us: Option<Percentiles>,
}

/// Intervals of a phase, which all of its lanes add to.
#[derive(Debug)]
pub(crate) struct RateSeries {
    start: Instant,
    intervals: Mutex<Vec<Interval>>,
}

#[derive(Debug)]
struct Interval {
    records: u64,
    errors: u64,
    latency: LatencyHistogram,
}

impl RateSeries {
    pub(crate) fn new(start: Instant) -> Self {
        Self { start, intervals: Mutex::default() }
    }

    /// Notes the response to a request.
    pub(crate) fn succeed(&self, latency: Duration, records: u64) {
        self.change(|interval| {
            interval.records += records;
            interval.latency.record(latency);
        });
    }

    /// Notes a request that failed.
    pub(crate) fn fail(&self) {
        self.change(|interval| interval.errors += 1);
    }

    fn change(&self, change: impl FnOnce(&mut Interval)) {
        let index = (self.start.elapsed().as_secs_f64() / INTERVAL.as_secs_f64()) as usize;
        if index >= INTERVALS_MAX {
            return;
        }
        let mut intervals = self.intervals.lock().unwrap_or_else(PoisonError::into_inner);
        while intervals.len() <= index {
            intervals.push(Interval { records: 0, errors: 0, latency: LatencyHistogram::new() });
        }
        change(&mut intervals[index]);
    }

    /// Returns the whole intervals of a phase of this length.
    pub(crate) fn whole(&self, elapsed: Duration) -> Vec<RateInterval> {
        let count = (elapsed.as_secs_f64() / INTERVAL.as_secs_f64()) as usize;
        let intervals = self.intervals.lock().unwrap_or_else(PoisonError::into_inner);
        let all = intervals.iter().map(Some).chain(std::iter::repeat(None));
        all.take(count.min(INTERVALS_MAX))
            .enumerate()
            .map(|(index, interval)| RateInterval {
                at_seconds: (index + 1) as f64 * INTERVAL.as_secs_f64(),
                records_per_sec: interval.map_or(0.0, |it| it.records as f64)
                    / INTERVAL.as_secs_f64(),
                errors: interval.map_or(0, |it| it.errors),
                latency_us: interval.and_then(|it| it.latency.percentiles()),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn only_whole_intervals_are_reported() {
        let series = RateSeries::new(Instant::now());
        series.succeed(Duration::from_millis(3), 100);
        sleep(Duration::from_millis(2100)).await;
        series.succeed(Duration::from_millis(5), 200);
        series.fail();
        sleep(Duration::from_millis(1000)).await;
        series.succeed(Duration::from_millis(7), 400);
        let whole = series.whole(Duration::from_millis(3900));
        let rates: Vec<f64> = whole.iter().map(|it| it.records_per_sec).collect();
        assert_eq!(rates, [100.0, 0.0, 200.0], "a silent second counts, a part of one does not");
        assert_eq!(whole[2].errors, 1);
        assert!(whole[1].latency_us.is_none() && whole[2].latency_us.is_some());
        assert_eq!(series.whole(Duration::from_secs(6)).len(), 6, "silence at the end");
    }
}
