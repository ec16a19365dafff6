//! Measurements of the demo, and their text form.
//! Times are wall-clock times; a megabyte is 10^6 bytes of record values.

use std::fmt::Write;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;

use super::timeline::AckTimeline;
use super::verify::VerifyFindings;
use super::workload::DemoWorkload;
use crate::units::{count, measured};

/// The result of `helix demo`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct DemoMeasurements {
    pub(crate) version: &'static str,
    pub(crate) nodes: usize,
    pub(crate) replication_factor: u32,
    pub(crate) records: u64,
    pub(crate) record_bytes: usize,
    pub(crate) partitions: u32,
    /// Write rate before the kill.
    pub(crate) write: MeasuredRate,
    /// Write rate from the time when all partitions accepted writes again, until the end. None if
    /// nothing was left to write.
    pub(crate) write_after: Option<MeasuredRate>,
    pub(crate) crash: CrashMeasurement,
    /// Rate of acks during the writes, through the kill.
    pub(crate) timeline: AckTimeline,
    pub(crate) read: MeasuredRate,
    pub(crate) check: VerifyCounts,
    /// Weakest durability of all acks.
    pub(crate) durability: &'static str,
    pub(crate) storage: String,
    pub(crate) sync_p50_us: Option<u64>,
    pub(crate) sync_p99_us: Option<u64>,
    pub(crate) cpus: usize,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct MeasuredRate {
    pub(crate) seconds: f64,
    /// None if the time was too short for a rate.
    pub(crate) records_per_sec: Option<f64>,
    pub(crate) mb_per_sec: Option<f64>,
}

/// Minimum time for a rate; in shorter times, records in flight at the ends dominate.
const RATE_TIME_MIN: Duration = Duration::from_millis(100);

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct CrashMeasurement {
    /// The killed node.
    pub(crate) node_id: u64,
    /// Number of partitions that it led.
    pub(crate) partitions_led: usize,
    /// Records acked at the time of the kill.
    pub(crate) acked_records: u64,
    /// Records in flight at the time of the kill.
    pub(crate) in_flight_records: u64,
    /// Time from the kill to the first ack of a batch sent after it to one of those partitions. A
    /// single node has to restart first. None if nothing was left to write.
    pub(crate) failover_ms: Option<f64>,
    /// Time from the kill until all of those partitions had such an ack.
    pub(crate) failover_all_ms: Option<f64>,
    /// Time from the restart to the node's first response.
    pub(crate) restart_ms: f64,
    /// Time from the restart until the node had synced and applied all entries that the other nodes
    /// had committed before. None for a single node.
    pub(crate) caught_up_ms: Option<f64>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct VerifyCounts {
    pub(crate) records_read: u64,
    pub(crate) missing: u64,
    pub(crate) doubled: u64,
    pub(crate) changed: u64,
    pub(crate) out_of_order: u64,
    pub(crate) displaced: u64,
    pub(crate) gaps: u64,
}

impl MeasuredRate {
    pub(crate) fn new(records: u64, workload: &DemoWorkload, time: Duration) -> Self {
        let seconds = time.as_secs_f64();
        let records_per_sec = (time >= RATE_TIME_MIN).then(|| records as f64 / seconds);
        let mb_per_sec = records_per_sec.map(|rate| rate * workload.record_bytes as f64 / 1e6);
        Self { seconds, records_per_sec, mb_per_sec }
    }

    fn text(&self) -> String {
        match (self.records_per_sec, self.mb_per_sec) {
            (Some(records), Some(mb)) => {
                format!("{} records/s, {mb:.0} MB/s", count(records.round() as u64))
            }
            _ => format!("{}, too short for a rate", millis(self.seconds * 1e3)),
        }
    }
}

impl VerifyCounts {
    pub(crate) fn new(records_read: u64, findings: &VerifyFindings) -> Self {
        let VerifyFindings {
            missing,
            doubled,
            changed,
            out_of_order,
            displaced,
            gaps,
            examples: _,
        } = *findings;
        Self { records_read, missing, doubled, changed, out_of_order, displaced, gaps }
    }

    fn findings(&self) -> u64 {
        self.missing + self.doubled + self.changed + self.out_of_order + self.displaced + self.gaps
    }
}

impl CrashMeasurement {
    fn failover_text(&self) -> String {
        match (self.failover_ms, self.failover_all_ms) {
            (Some(first), Some(all)) => format!(
                "{} from the kill to the next ack of its partitions, {} until all had one",
                millis(first),
                millis(all)
            ),
            _ => "not measured: nothing was left to write to its partitions".to_owned(),
        }
    }

    fn recovery_text(&self) -> String {
        let restart = format!("{} from restart to first response", millis(self.restart_ms));
        match self.caught_up_ms {
            Some(time) => format!("{restart}, {} until caught up", millis(time)),
            None => restart,
        }
    }
}

fn millis(millis: f64) -> String {
    measured(Duration::from_secs_f64(millis / 1e3))
}

impl DemoMeasurements {
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let mut line = |name: &str, value: String| {
            let _ = writeln!(text, "  {name:10} {value}");
        };
        line("cluster", self.cluster_text());
        line("write", self.write_text());
        let crash = &self.crash;
        line(
            "kill -9",
            format!(
                "node {}, leader of {} of {} partitions, after {} acks, with {} records in flight",
                crash.node_id,
                crash.partitions_led,
                self.partitions,
                count(crash.acked_records),
                count(crash.in_flight_records)
            ),
        );
        line("failover", crash.failover_text());
        line("recovery", crash.recovery_text());
        line("read", format!("{}, every byte verified", self.read.text()));
        line("durability", self.durability_text());
        line("hardware", format!("{} CPUs, shared by the client and all nodes", self.cpus));
        let check = &self.check;
        line(
            "check",
            format!(
                "{} acked, {} read: {} missing, {} duplicated, {} changed, {} out of order",
                count(self.records),
                count(check.records_read),
                count(check.missing),
                count(check.doubled),
                count(check.changed),
                count(check.out_of_order)
            ),
        );
        text.push('\n');
        text += &self.timeline.text("  ");
        if check.findings() == 0 {
            text += "\nNo acked record is missing, duplicated or changed.\n";
        }
        text
    }

    fn cluster_text(&self) -> String {
        let nodes = self.nodes;
        let plural = if nodes == 1 { "" } else { "s" };
        format!("{nodes} node{plural}, replication {}", self.replication_factor)
    }

    fn write_text(&self) -> String {
        let before = format!("{}, {} bytes each", self.write.text(), self.record_bytes);
        let when = match self.nodes {
            1 => "after the restart".to_owned(),
            nodes => format!("with {} of {nodes} nodes", nodes - 1),
        };
        match &self.write_after {
            Some(after) => format!("{before}; {} {when}", after.text()),
            None => before,
        }
    }

    fn durability_text(&self) -> String {
        let meaning = match self.durability {
            "QUORUM_SYNCED" => "an ack means synced to disk",
            "QUORUM_WRITTEN" => "an ack means written, not synced",
            _ => "an acked record may be lost",
        };
        let time = |us| measured(Duration::from_micros(us));
        let sync = match (self.sync_p50_us, self.sync_p99_us) {
            (Some(p50), Some(p99)) => format!("; a sync takes {} (p99 {})", time(p50), time(p99)),
            _ => String::new(),
        };
        format!("{}: {meaning}{sync}", self.durability)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_needs_a_minimum_time() {
        let workload = DemoWorkload { seed: 1, records: 1000, record_bytes: 1000, partitions: 1 };
        let rate = MeasuredRate::new(1000, &workload, Duration::from_millis(500));
        assert_eq!((rate.records_per_sec, rate.mb_per_sec), (Some(2000.0), Some(2.0)));
        assert_eq!(rate.text(), "2,000 records/s, 2 MB/s");
        let rate = MeasuredRate::new(1000, &workload, Duration::from_micros(10));
        assert_eq!((rate.records_per_sec, rate.mb_per_sec), (None, None));
        assert!(rate.text().ends_with("too short for a rate"), "{}", rate.text());
    }
}
