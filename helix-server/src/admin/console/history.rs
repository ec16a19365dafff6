//! The last 15 minutes of this node: rates and sizes, sampled into a ring. Outside the append path:
//! a sample reads counters that exist anyway.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::metrics::{BOUNDS_US, MetricTotals};
use crate::node::Node;
use crate::{process, sync};

/// Time between two samples.
pub(super) const SAMPLE_INTERVAL: Duration = Duration::from_secs(5);

/// Samples in the ring: 15 minutes.
pub(super) const SAMPLES_MAX: usize = 180;

/// One interval of the past.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct LoadSample {
    pub(super) appended_bytes: f64,
    pub(super) appended_records: f64,
    pub(super) read_bytes: f64,
    /// Upper bound of the 99th percentile of appends in ms; 0 without appends.
    pub(super) append_p99_ms: f64,
    pub(super) memory_bytes: f64,
    /// CPUs that the process used.
    pub(super) cpus: f64,
}

/// The ring of a node.
#[derive(Debug, Default)]
pub(super) struct LoadHistory(Mutex<VecDeque<LoadSample>>);

/// Counters at the end of an interval.
struct Reading {
    at: Instant,
    totals: MetricTotals,
    cpu_time_us: u64,
    memory_bytes: u64,
}

impl Reading {
    fn of(node: &Node) -> Self {
        Self {
            at: Instant::now(),
            totals: node.metrics().totals(),
            cpu_time_us: process::cpu_time_us(),
            memory_bytes: process::rss_bytes(),
        }
    }

    /// Returns the sample between an earlier reading and this one.
    fn since(&self, before: &Self) -> LoadSample {
        let seconds = (self.at - before.at).as_secs_f64().max(1e-3);
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
        let (now, earlier) = (&self.totals, &before.totals);
        LoadSample {
            appended_bytes: rate(now.appended_bytes, earlier.appended_bytes),
            appended_records: rate(now.appended_records, earlier.appended_records),
            read_bytes: rate(now.read_bytes, earlier.read_bytes),
            append_p99_ms: p99_us(&earlier.append_times, &now.append_times) as f64 / 1e3,
            memory_bytes: self.memory_bytes as f64,
            cpus: rate(self.cpu_time_us, before.cpu_time_us) / 1e6,
        }
    }
}

impl LoadHistory {
    /// Returns the samples, oldest first.
    pub(super) fn samples(&self) -> Vec<LoadSample> {
        sync::lock(&self.0).iter().copied().collect()
    }

    fn add(&self, sample: LoadSample) {
        let mut samples = sync::lock(&self.0);
        if samples.len() >= SAMPLES_MAX {
            samples.pop_front();
        }
        samples.push_back(sample);
    }

    /// Samples a node until it or this ring is dropped.
    pub(super) async fn follow(history: Weak<Self>, node: Weak<Node>) {
        let mut tick = interval(SAMPLE_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut before: Option<Reading> = None;
        loop {
            tick.tick().await;
            let (Some(history), Some(node)): (Option<Arc<Self>>, _) =
                (history.upgrade(), node.upgrade())
            else {
                return;
            };
            let now = Reading::of(&node);
            if let Some(before) = &before {
                history.add(now.since(before));
            }
            before = Some(now);
        }
    }
}

/// Returns the bound of the bucket of the 99th percentile between two readings of a histogram.
fn p99_us(before: &[u64], now: &[u64]) -> u64 {
    let counts: Vec<u64> = now
        .iter()
        .enumerate()
        .map(|(index, count)| count - before.get(index).unwrap_or(&0).min(count))
        .collect();
    let all: u64 = counts.iter().sum();
    let mut seen = 0;
    for (index, count) in counts.iter().enumerate() {
        seen += count;
        if all > 0 && seen * 100 >= all * 99 {
            let last = BOUNDS_US[BOUNDS_US.len() - 1];
            return BOUNDS_US.get(index).copied().unwrap_or(last);
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_has_the_newest_samples() {
        let history = LoadHistory::default();
        for number in 0..SAMPLES_MAX + 7 {
            history.add(LoadSample { cpus: number as f64, ..LoadSample::default() });
        }
        let samples = history.samples();
        assert_eq!(samples.len(), SAMPLES_MAX);
        assert_eq!((samples[0].cpus, samples[SAMPLES_MAX - 1].cpus), (7.0, 186.0));
    }

    #[test]
    fn percentiles_are_those_of_the_interval() {
        let mut before = vec![0; BOUNDS_US.len() + 1];
        before[0] = 1_000;
        assert_eq!(p99_us(&before, &before), 0, "no appends");
        let mut now = before.clone();
        now[4] = 99;
        now[10] = 1;
        assert_eq!(p99_us(&before, &now), BOUNDS_US[4]);
        now[10] = 2;
        assert_eq!(p99_us(&before, &now), BOUNDS_US[10]);
        let mut slow = before.clone();
        slow[BOUNDS_US.len()] = 1;
        assert_eq!(p99_us(&before, &slow), 20_000_000);
    }

    #[tokio::test(start_paused = true)]
    async fn rates_are_those_of_a_second() {
        let reading = |bytes: u64| Reading {
            at: Instant::now(),
            totals: MetricTotals { appended_bytes: bytes, ..MetricTotals::default() },
            cpu_time_us: bytes,
            memory_bytes: 7,
        };
        let before = reading(1_000);
        tokio::time::advance(Duration::from_secs(2)).await;
        let sample = reading(5_000).since(&before);
        assert_eq!((sample.appended_bytes, sample.memory_bytes), (2_000.0, 7.0));
        assert_eq!(reading(0).since(&before).appended_bytes, 0.0, "a counter never falls");
    }
}
