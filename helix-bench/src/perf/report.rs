//! Result of `perf`, and the lines that it prints.

use std::time::Duration;

use anyhow::Result;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use super::PerfPlan;
use crate::exit;
use crate::interval_meter::IntervalMeter;
use crate::load::BenchLoad;
use crate::meter::{Failures, Percentiles};
use crate::output::ModeResult;

/// Result of the test.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct PerfReport {
    /// Acked records, and the bytes of their values.
    records: u64,
    bytes: u64,
    seconds: f64,
    records_per_sec: f64,
    /// MiB per second, as the lines have it.
    mib_per_sec: f64,
    /// From the intended send with a throughput, else from the send, to the ack.
    latency_us: Option<Percentiles>,
    /// From the intended send to the send.
    send_delay_us: Option<Percentiles>,
    errors: u64,
    first_error: Option<String>,
    pub(super) sends_missed: u64,
    batch_bytes: usize,
    linger_ms: f64,
    pub(super) storage: String,
    pub(super) server_version: String,
    pub(super) node_count: usize,
    pub(super) replication: u32,
    /// Intervals of the printed lines, and the rest after them unless it is short.
    pub(super) intervals: Vec<PerfInterval>,
    load: BenchLoad,
    #[serde(skip)]
    line: String,
}

/// Measurements of one interval.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(crate) struct PerfInterval {
    /// From the start of the run to the end of the interval.
    at_seconds: f64,
    records_per_sec: f64,
    mib_per_sec: f64,
    errors: u64,
    /// As that of the whole run.
    latency_us: Option<Percentiles>,
}

impl PerfInterval {
    pub(super) fn new(meter: &IntervalMeter, before: Duration, length: Duration) -> Self {
        let (records_per_sec, mib_per_sec) = rates(meter, length);
        Self {
            at_seconds: (before + length).as_secs_f64(),
            records_per_sec,
            mib_per_sec,
            errors: meter.failed,
            latency_us: meter.publish.percentiles(),
        }
    }
}

impl PerfReport {
    pub(super) fn new(
        plan: &PerfPlan,
        total: &IntervalMeter,
        elapsed: Duration,
        failures: &Failures,
    ) -> Self {
        let (records_per_sec, mib_per_sec) = rates(total, elapsed);
        Self {
            records: total.acked,
            bytes: total.acked_bytes,
            seconds: elapsed.as_secs_f64(),
            records_per_sec,
            mib_per_sec,
            latency_us: total.publish.percentiles(),
            send_delay_us: total.delay.percentiles(),
            errors: failures.count,
            first_error: failures.first.clone(),
            sends_missed: 0,
            batch_bytes: plan.options.batch_bytes,
            linger_ms: plan.options.linger.as_secs_f64() * 1e3,
            storage: String::new(),
            server_version: String::new(),
            node_count: 0,
            replication: 0,
            intervals: Vec::new(),
            load: plan.load.clone(),
            line: total_line(total, elapsed),
        }
    }

    /// Lists what the last line does not say.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes = vec![format!(
            "storage {}, replication {}, acks {}, server {}",
            self.storage,
            self.replication,
            self.load.acks.name(),
            self.server_version
        )];
        if let Some(Percentiles { p50, p95, p99, p999, .. }) = self.latency_us {
            notes.push(format!(
                "latency p50 {:.3} ms, p95 {:.3} ms, p99 {:.3} ms, p99.9 {:.3} ms",
                p50 / 1e3,
                p95 / 1e3,
                p99 / 1e3,
                p999 / 1e3
            ));
        }
        if self.sends_missed > 0 {
            notes.push(format!(
                "the throughput was not reached: {} more sends were due when the last one was made",
                self.sends_missed
            ));
        }
        notes
    }

    /// Returns the line about failed and unsent records, if there are any.
    fn failure_line(&self) -> String {
        let Some(first) = &self.first_error else { return String::new() };
        let unsent = self.load.run.records.unwrap_or(0).saturating_sub(self.records + self.errors);
        let stopped = match unsent {
            0 => String::new(),
            _ => format!(", {unsent} not sent"),
        };
        format!("{} records failed{stopped}; the first error: {first}\n", self.errors)
    }
}

impl ModeResult for PerfReport {
    fn mode(&self) -> &'static str {
        "perf"
    }

    fn exit_code(&self) -> u8 {
        if self.records == 0 { exit::FAILED } else { 0 }
    }

    fn text(&self, _: &Value) -> Result<String> {
        Ok(self.failure_line() + &self.line)
    }
}

/// Returns records and MiB per second.
fn rates(meter: &IntervalMeter, elapsed: Duration) -> (f64, f64) {
    let seconds = elapsed.as_secs_f64().max(1e-9);
    (meter.acked as f64 / seconds, meter.acked_bytes as f64 / seconds / 1_048_576.0)
}

/// Returns the line of an interval.
pub(super) fn window_line(meter: &IntervalMeter, elapsed: Duration) -> String {
    let (records_per_sec, mib_per_sec) = rates(meter, elapsed);
    format!(
        "{} records sent, {records_per_sec:.1} records/sec ({mib_per_sec:.2} MB/sec), {:.1} ms avg \
         latency, {:.1} ms max latency.\n",
        meter.acked,
        meter.publish.mean_us() / 1e3,
        meter.publish.max_us() / 1e3
    )
}

/// Returns the last line. Its percentiles are whole milliseconds, as in the tool that it follows.
fn total_line(meter: &IntervalMeter, elapsed: Duration) -> String {
    let (records_per_sec, mib_per_sec) = rates(meter, elapsed);
    let ms = |percent| (meter.publish.percentile_us(percent) / 1e3).round() as u64;
    format!(
        "{} records sent, {records_per_sec:.6} records/sec ({mib_per_sec:.2} MB/sec), {:.2} ms avg \
         latency, {:.2} ms max latency, {} ms 50th, {} ms 95th, {} ms 99th, {} ms 99.9th.\n",
        meter.acked,
        meter.publish.mean_us() / 1e3,
        meter.publish.max_us() / 1e3,
        ms(50.0),
        ms(95.0),
        ms(99.0),
        ms(99.9)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::tests::plan;

    #[test]
    fn failed_and_unsent_records_are_shown_before_the_last_line() {
        let mut meter = IntervalMeter::new();
        meter.acked = 6;
        let second = Duration::from_secs(1);
        let text = |failures: &Failures| {
            let report = PerfReport::new(&plan(&[]).unwrap(), &meter, second, failures);
            report.text(&Value::Null).unwrap()
        };
        assert!(text(&Failures::default()).starts_with("6 records sent, "));
        let mut failures = Failures::default();
        failures.add("Unavailable".to_owned(), 3, "no leader".to_owned());
        let failed = text(&failures);
        let (first, last) = failed.split_once('\n').unwrap();
        assert_eq!(first, "3 records failed, 1 not sent; the first error: no leader");
        assert!(last.starts_with("6 records sent, "), "{last}");
    }

    #[test]
    fn lines_have_the_form_of_the_tool() {
        let mut meter = IntervalMeter::new();
        (meter.acked, meter.acked_bytes) = (100_000, 100_000 * 1024);
        for ms in 1..=100 {
            meter.publish.record(Duration::from_millis(ms));
        }
        // Times are kept to three digits.
        let line = window_line(&meter, Duration::from_secs(5));
        assert!(
            line.starts_with("100000 records sent, 20000.0 records/sec (19.53 MB/sec), 50."),
            "{line}"
        );
        assert!(line.contains(" ms avg latency, 100.") && line.ends_with(" ms max latency.\n"));
        let line = total_line(&meter, Duration::from_secs(5));
        assert!(
            line.starts_with("100000 records sent, 20000.000000 records/sec (19.53 MB/sec), 50."),
            "{line}"
        );
        assert!(
            line.ends_with(" ms max latency, 50 ms 50th, 95 ms 95th, 99 ms 99th, 100 ms 99.9th.\n"),
            "{line}"
        );
    }
}
