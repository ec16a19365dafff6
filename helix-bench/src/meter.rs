//! Measurements of one lane, and how they are merged.
//!
//! Histograms are added and percentiles are never averaged. A failed request counts only as a
//! failure.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hdrhistogram::Histogram;
use helix_proto::log::v1::Durability;
use schemars::JsonSchema;
use serde::Serialize;

use crate::series::RateSeries;

/// Highest recorded time in nanoseconds: two minutes, above every deadline.
const LATENCY_NS_MAX: u64 = 120_000_000_000;

/// Histogram of times in nanoseconds, to three significant digits.
#[derive(Debug, Clone)]
pub(crate) struct LatencyHistogram(Histogram<u64>);

impl LatencyHistogram {
    pub(crate) fn new() -> Self {
        Self(Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3).expect("bounds in order"))
    }

    pub(crate) fn record(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.0.saturating_record(ns.max(1));
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        self.0.add(&other.0).expect("equal bounds");
    }

    /// Returns mean and maximum of the lowest times, for each share in percent.
    pub(crate) fn steps(&self, percents: &[f64]) -> Vec<PercentileStep> {
        let step = |percent: &f64| {
            let wanted = ((percent / 100.0 * self.0.len() as f64).round() as u64).max(1);
            let (mut count, mut sum, mut max) = (0, 0.0, 0);
            for value in self.0.iter_recorded() {
                let take = value.count_at_value().min(wanted - count);
                count += take;
                sum += value.value_iterated_to() as f64 * take as f64;
                max = value.value_iterated_to();
                if count == wanted {
                    break;
                }
            }
            let mean_us = sum / count.max(1) as f64 / 1e3;
            PercentileStep { percent: *percent, mean_us, max_us: max as f64 / 1e3 }
        };
        percents.iter().filter(|_| !self.0.is_empty()).map(step).collect()
    }

    /// Returns `None` if nothing was recorded.
    pub(crate) fn percentiles(&self) -> Option<Percentiles> {
        let us = |ns: u64| (ns as f64 / 100.0).round() / 10.0;
        let at = |quantile| us(self.0.value_at_quantile(quantile));
        (!self.0.is_empty()).then(|| Percentiles {
            p50: at(0.5),
            p90: at(0.9),
            p95: at(0.95),
            p99: at(0.99),
            p999: at(0.999),
            p9999: at(0.9999),
            max: us(self.0.max()),
            mean: us(self.0.mean() as u64),
            min: us(self.0.min()),
            count: self.0.len(),
        })
    }
}

/// Times at and below a percentile.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, JsonSchema)]
pub(crate) struct PercentileStep {
    pub(crate) percent: f64,
    /// Mean of the lowest times up to this percentile.
    pub(crate) mean_us: f64,
    /// Longest of them.
    pub(crate) max_us: f64,
}

/// Percentiles of a distribution, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, JsonSchema)]
pub(crate) struct Percentiles {
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p95: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) p9999: f64,
    pub(crate) max: f64,
    pub(crate) mean: f64,
    pub(crate) min: f64,
    pub(crate) count: u64,
}

/// Measurements of one or more lanes.
#[derive(Debug, Clone)]
pub(crate) struct LoadMeter {
    /// From the scheduled send time in an open loop, else from the send.
    pub(crate) latency: LatencyHistogram,
    /// Further distributions, by name.
    pub(crate) parts: BTreeMap<&'static str, LatencyHistogram>,
    pub(crate) requests: u64,
    pub(crate) records: u64,
    pub(crate) bytes: u64,
    /// Acks by the durability that they report.
    pub(crate) acks: BTreeMap<&'static str, u64>,
    /// Batches that the service had already applied: retries after a failure.
    pub(crate) duplicates: u64,
    /// Acked records by partition.
    pub(crate) acked: BTreeMap<u32, u64>,
    /// Reads that retention overtook and that continued at the log start.
    pub(crate) starts_moved: u64,
    /// Lanes that stopped early, and the time of the first one.
    pub(crate) gave_up: u64,
    pub(crate) gave_up_after: Option<Duration>,
    pub(crate) failures: Failures,
    /// Intervals of the phase, if they are reported.
    series: Option<Arc<RateSeries>>,
}

/// Failed requests.
#[derive(Debug, Clone, Default)]
pub(crate) struct Failures {
    pub(crate) count: u64,
    pub(crate) by_kind: BTreeMap<String, u64>,
    /// Message of the first failure.
    pub(crate) first: Option<String>,
}

impl LoadMeter {
    pub(crate) fn new() -> Self {
        Self {
            latency: LatencyHistogram::new(),
            parts: BTreeMap::new(),
            requests: 0,
            records: 0,
            bytes: 0,
            acks: BTreeMap::new(),
            duplicates: 0,
            acked: BTreeMap::new(),
            starts_moved: 0,
            gave_up: 0,
            gave_up_after: None,
            failures: Failures::default(),
            series: None,
        }
    }

    /// Returns a meter that also adds to the intervals of the phase.
    pub(crate) fn with_series(series: &Arc<RateSeries>) -> Self {
        Self { series: Some(series.clone()), ..Self::new() }
    }

    /// Notes a successful request.
    pub(crate) fn succeed(&mut self, latency: Duration, records: u64, bytes: u64) {
        self.latency.record(latency);
        if let Some(series) = &self.series {
            series.succeed(latency, records);
        }
        self.count(records, bytes);
    }

    /// Counts pushed records, which have no latency.
    pub(crate) fn count(&mut self, records: u64, bytes: u64) {
        self.requests += 1;
        self.records += records;
        self.bytes += bytes;
    }

    pub(crate) fn part(&mut self, name: &'static str, time: Duration) {
        self.parts.entry(name).or_insert_with(LatencyHistogram::new).record(time);
    }

    pub(crate) fn ack(&mut self, durability: Durability, duplicate: bool) {
        *self.acks.entry(durability_name(durability)).or_default() += 1;
        self.duplicates += u64::from(duplicate);
    }

    pub(crate) fn fail(&mut self, error: &helix_client::Error) {
        let kind = match error.reason {
            Some(reason) => helix_proto::error::reason_name(reason).to_owned(),
            None => format!("{:?}", error.code),
        };
        self.fail_as(kind, error.to_string());
    }

    pub(crate) fn fail_as(&mut self, kind: String, message: String) {
        if let Some(series) = &self.series {
            series.fail();
        }
        self.failures.add(kind, 1, message);
    }

    pub(crate) fn count_acked(&mut self, partition: u32, records: u64) {
        *self.acked.entry(partition).or_default() += records;
    }

    /// Notes that a lane stopped after too many failures.
    pub(crate) fn give_up(&mut self, after: Duration) {
        self.gave_up += 1;
        self.gave_up_after = Some(after);
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        self.latency.merge(&other.latency);
        for (name, part) in &other.parts {
            self.parts.entry(name).or_insert_with(LatencyHistogram::new).merge(part);
        }
        self.requests += other.requests;
        self.records += other.records;
        self.bytes += other.bytes;
        for (name, count) in &other.acks {
            *self.acks.entry(name).or_default() += count;
        }
        self.duplicates += other.duplicates;
        for (partition, records) in &other.acked {
            self.count_acked(*partition, *records);
        }
        self.starts_moved += other.starts_moved;
        self.gave_up += other.gave_up;
        let times = [self.gave_up_after, other.gave_up_after];
        self.gave_up_after = times.into_iter().flatten().min();
        self.failures.merge(&other.failures);
    }

    /// Returns the weakest durability of any ack.
    pub(crate) fn durability(&self) -> Option<&'static str> {
        weakest(self.acks.keys().copied())
    }
}

/// Returns the weakest of some durabilities.
pub(crate) fn weakest<'a>(names: impl Iterator<Item = &'a str>) -> Option<&'static str> {
    let names: Vec<&str> = names.collect();
    let mut weakest_first = STRONGEST_FIRST.iter().rev().copied().map(durability_name);
    weakest_first.find(|name| names.contains(name))
}

impl Failures {
    pub(crate) fn add(&mut self, kind: String, count: u64, message: String) {
        self.count += count;
        *self.by_kind.entry(kind).or_default() += count;
        self.first.get_or_insert(message);
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        self.count += other.count;
        for (kind, count) in &other.by_kind {
            *self.by_kind.entry(kind.clone()).or_default() += count;
        }
        if self.first.is_none() {
            self.first.clone_from(&other.first);
        }
    }
}

const STRONGEST_FIRST: [Durability; 5] = [
    Durability::QuorumSynced,
    Durability::QuorumWritten,
    Durability::LeaderWritten,
    Durability::None,
    Durability::Unspecified,
];

pub(crate) fn durability_name(durability: Durability) -> &'static str {
    match durability {
        Durability::QuorumSynced => "quorum-synced",
        Durability::QuorumWritten => "quorum-written",
        Durability::LeaderWritten => "leader-written",
        Durability::None => "none",
        Durability::Unspecified => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meter(times_ms: impl IntoIterator<Item = u64>) -> LoadMeter {
        let mut meter = LoadMeter::new();
        for time in times_ms {
            meter.succeed(Duration::from_millis(time), 10, 1000);
        }
        meter
    }

    #[test]
    fn merged_percentiles_are_not_averages() {
        // One client with 990 fast requests and one with 10 slow ones: the averages of their
        // medians and of their p99s would be 50 ms.
        let mut all = meter(std::iter::repeat_n(1, 990));
        all.merge(&meter(std::iter::repeat_n(100, 10)));
        let merged = all.latency.percentiles().unwrap();
        let near = |value: f64, ms: f64| (value / (ms * 1000.0) - 1.0).abs() < 0.01;
        assert!(near(merged.p50, 1.0) && near(merged.p99, 1.0), "{merged:?}");
        assert!(near(merged.p999, 100.0) && near(merged.max, 100.0), "{merged:?}");
        assert_eq!((merged.count, all.requests, all.records), (1000, 1000, 10_000));
    }

    #[test]
    fn steps_are_of_the_lowest_times() {
        let mut histogram = LatencyHistogram::new();
        (1..=10).for_each(|ms| histogram.record(Duration::from_millis(ms)));
        let steps = histogram.steps(&[50.0, 90.0, 99.999]);
        let near = |value: f64, ms: f64| (value / (ms * 1000.0) - 1.0).abs() < 0.01;
        assert!(near(steps[0].mean_us, 3.0) && near(steps[0].max_us, 5.0), "{steps:?}");
        assert!(near(steps[1].mean_us, 5.0) && near(steps[1].max_us, 9.0), "{steps:?}");
        assert!(near(steps[2].mean_us, 5.5) && near(steps[2].max_us, 10.0), "{steps:?}");
        assert!(LatencyHistogram::new().steps(&[50.0]).is_empty());
    }

    #[test]
    fn failures_are_not_throughput() {
        let mut meter = meter([1, 2]);
        meter.fail_as("THROTTLED".to_owned(), "slow down".to_owned());
        meter.fail_as("THROTTLED".to_owned(), "slow down again".to_owned());
        assert_eq!((meter.requests, meter.records, meter.bytes), (2, 20, 2000));
        assert_eq!(meter.latency.percentiles().unwrap().count, 2);
        let mut all = LoadMeter::new();
        all.merge(&meter);
        assert_eq!((all.failures.count, all.failures.by_kind["THROTTLED"]), (2, 2));
        assert_eq!(all.failures.first.as_deref(), Some("slow down"));
    }

    #[test]
    fn percentiles_of_nothing_are_none() {
        assert_eq!(LoadMeter::new().latency.percentiles(), None);
    }

    #[test]
    fn merge_keeps_the_earliest_give_up_time() {
        let (mut all, mut one, mut two) = (LoadMeter::new(), meter([1]), meter([1]));
        two.give_up(Duration::from_secs(2));
        one.give_up(Duration::from_secs(3));
        for part in [&one, &two, &meter([1])] {
            all.merge(part);
        }
        assert_eq!((all.gave_up, all.gave_up_after), (2, Some(Duration::from_secs(2))));
    }

    #[test]
    fn durability_is_that_of_the_weakest_ack() {
        let mut meter = LoadMeter::new();
        assert_eq!(meter.durability(), None);
        meter.ack(Durability::QuorumSynced, false);
        assert_eq!(meter.durability(), Some("quorum-synced"));
        meter.ack(Durability::LeaderWritten, true);
        assert_eq!(meter.durability(), Some("leader-written"));
        assert_eq!(meter.duplicates, 1);
    }
}
