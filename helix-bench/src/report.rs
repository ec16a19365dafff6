//! What a run found, as one value: printed as a short table, or written as JSON.
//! Everything needed to judge the figures stands beside them.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use helix_proto::log::v1::{Durability, TopicConfig};
use serde::Serialize;

use crate::args::{Acks, Mode};
use crate::exit;
use crate::load::Load;
use crate::meter::{Latencies, Meter, Percentiles, durability_name};
use crate::nodes::{Cpu, Node, nodes, rss_bytes};
use crate::phase::{FAILURES_IN_A_ROW_MAX, Outcome};
use crate::target::{Observation, Target};
use crate::verify::Verification;

/// Failures of this kind are acked records that a subscriber did not get.
pub(crate) const NOT_DELIVERED: &str = "NOT_DELIVERED";

/// A run shorter than this says little about the next one.
const SECONDS_MIN: f64 = 2.0;

/// One in so many sends may be missed at the end of an open loop before the rate counts as missed.
const SENDS_MISSED_SHARE: u64 = 1000;

/// Share of all cores above which the machine is what was measured.
const BUSY_CORES_SHARE: f64 = 0.95;

/// Result of a run.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    /// The command line.
    pub(crate) command: String,
    pub(crate) records_per_sec: f64,
    /// Payload bytes: records as they travel, in units of 10^6.
    pub(crate) mb_per_sec: f64,
    pub(crate) requests_per_sec: f64,
    /// Requests that failed, after the client's own retries. Not part of any other figure.
    pub(crate) errors: u64,
    /// None where nothing was asked for, so that nothing could be late.
    pub(crate) latency_us: Option<Percentiles>,
    /// Weakest that an ack reached; of a read, what the topic's acks promise by default.
    pub(crate) durability: String,
    pub(crate) storage: String,
    /// Nodes of the cluster.
    pub(crate) node_count: usize,
    /// Replicas of the topic, as the cluster tells it.
    pub(crate) replication: u32,
    pub(crate) idempotent: Option<bool>,
    pub(crate) server_version: String,
    pub(crate) client_version: &'static str,
    pub(crate) sync_p50_us: Option<f64>,
    pub(crate) sync_p99_us: Option<f64>,
    pub(crate) records: u64,
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
    /// As they came; None without records.
    pub(crate) bytes_per_record: Option<f64>,
    pub(crate) seconds: f64,
    pub(crate) warmup: Warmup,
    /// Further distributions, by name.
    pub(crate) latency_parts_us: BTreeMap<&'static str, Percentiles>,
    /// Number of acks, by durability reached.
    pub(crate) acks: BTreeMap<&'static str, u64>,
    pub(crate) duplicates: u64,
    pub(crate) sends_missed: u64,
    /// Clients, or requests and streams in flight, that failed too often to go on.
    pub(crate) gave_up: u64,
    /// Acked by weak acks and not there afterwards. None where that was not looked at.
    pub(crate) records_missing: Option<u64>,
    pub(crate) errors_by_kind: BTreeMap<String, u64>,
    pub(crate) first_error: Option<String>,
    pub(crate) cpu: Cpu,
    /// Resident memory of all nodes together, after the run. None if none says.
    pub(crate) server_rss_bytes: Option<u64>,
    /// Those that answered.
    pub(crate) nodes: Vec<Node>,
    pub(crate) verify: Option<Verification>,
    pub(crate) machine: Machine,
    pub(crate) load: Load,
    pub(crate) notes: Vec<String>,
}

/// What was done before the measured part.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Warmup {
    pub(crate) records: u64,
    pub(crate) seconds: f64,
    pub(crate) errors: u64,
}

/// Where the client ran.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Machine {
    pub(crate) cores: usize,
    pub(crate) os: &'static str,
    pub(crate) arch: &'static str,
    pub(crate) kernel: String,
}

impl Machine {
    pub(crate) fn here() -> Self {
        let kernel = rustix::system::uname();
        Self {
            cores: cores(),
            os: std::env::consts::OS,
            arch: std::env::consts::ARCH,
            kernel: kernel.release().to_string_lossy().into_owned(),
        }
    }
}

pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

impl Report {
    pub(crate) fn new(
        load: &Load,
        target: &Target,
        before: &Observation,
        after: &Observation,
        warmup: &Outcome,
        outcome: &Outcome,
    ) -> Self {
        let Outcome { meter, elapsed, sends_missed, lanes } = outcome;
        let seconds = elapsed.as_secs_f64().max(1e-9);
        let nodes = nodes(before, after);
        let storages: Vec<_> = nodes.iter().map(|node| node.storage.clone()).collect();
        let versions: Vec<_> = nodes.iter().map(|node| node.version.clone()).collect();
        let worst = |of: fn(&Node) -> Option<f64>| nodes.iter().filter_map(of).reduce(f64::max);
        let mut report = Self {
            command: String::new(),
            records_per_sec: rate(meter.records, seconds),
            mb_per_sec: rate(meter.bytes, seconds) / 1e6,
            requests_per_sec: rate(meter.requests, seconds),
            errors: meter.failures.count,
            latency_us: meter.latency.percentiles(),
            durability: match load.mode {
                Mode::Read => stored_durability(target, &nodes),
                _ => meter.durability().unwrap_or("unknown"),
            }
            .to_owned(),
            storage: distinct(storages),
            node_count: target.addresses.len(),
            replication: target.topic.replication_factor,
            idempotent: (load.mode != Mode::Read).then_some(load.idempotent),
            server_version: distinct(versions),
            client_version: env!("CARGO_PKG_VERSION"),
            sync_p50_us: worst(|node| node.sync_p50_us),
            sync_p99_us: worst(|node| node.sync_p99_us),
            records: meter.records,
            requests: meter.requests,
            bytes: meter.bytes,
            bytes_per_record: (meter.records > 0)
                .then(|| meter.bytes as f64 / meter.records as f64),
            seconds,
            warmup: Warmup {
                records: warmup.meter.records,
                seconds: warmup.elapsed.as_secs_f64(),
                errors: warmup.meter.failures.count,
            },
            latency_parts_us: parts(meter),
            acks: meter.acks.clone(),
            duplicates: meter.duplicates,
            sends_missed: *sends_missed,
            gave_up: meter.gave_up,
            records_missing: None,
            errors_by_kind: meter.failures.by_kind.clone(),
            first_error: meter.failures.first.clone(),
            cpu: Cpu::new(before, after, &nodes, meter),
            server_rss_bytes: rss_bytes(&nodes),
            nodes,
            verify: None,
            machine: Machine::here(),
            load: load.clone(),
            notes: Vec::new(),
        };
        report.notes = report.reservations();
        report.note_who_gave_up(meter, *lanes);
        if meter.starts_moved > 0 {
            report.notes.push(format!(
                "retention overtook reads {} times: they went on at the log start",
                meter.starts_moved
            ));
        }
        report
    }

    /// What keeps the figures from meaning what they seem to.
    fn reservations(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.seconds < SECONDS_MIN {
            notes.push(format!(
                "a run of {:.2} s says little: use --duration or more records",
                self.seconds
            ));
        }
        let failed_before = self.warmup.errors;
        if failed_before > 0 {
            notes.push(format!("{failed_before} requests of the warm-up failed"));
        }
        if self.errors > 0 {
            let first = self.first_error.as_deref().unwrap_or_default();
            notes.push(format!("requests failed and are in no other figure; the first: {first}"));
        }
        if self.sends_missed > self.requests / SENDS_MISSED_SHARE {
            let ends_with_records = self.load.run.records.is_some_and(|most| self.records >= most);
            notes.push(match ends_with_records {
                true => format!(
                    "the rate was not reached: {} sends more had been due when the last one was \
                     made",
                    self.sends_missed
                ),
                false => format!(
                    "the rate was not reached: {} sends were due and never made; their latencies \
                     are missing",
                    self.sends_missed
                ),
            });
        }
        let silent = self.node_count - self.nodes.len().min(self.node_count);
        if silent > 0 {
            notes.push(format!(
                "{silent} of {} nodes did not say what they used: cpu and memory lack theirs",
                self.node_count
            ));
        }
        let unmeasured = self.nodes.iter().filter(|node| node.cpu_seconds.is_none()).count();
        if unmeasured > 0 {
            notes.push(format!("{unmeasured} nodes came or were restarted: cpu lacks theirs"));
        }
        let is_weaker = self.load.acks == Acks::All
            && self.load.mode != Mode::Read
            && self.requests > 0
            && self.storage != "none"
            && self.durability != "quorum-synced";
        if is_weaker {
            notes.push(format!("acks reached {} only, not quorum-synced", self.durability));
        }
        let busy = self.cpu.client_cores / self.machine.cores as f64;
        if busy > BUSY_CORES_SHARE {
            notes.push("the client alone kept every core busy: it may be what was measured".into());
        }
        notes
    }

    fn note_who_gave_up(&mut self, meter: &Meter, lanes: usize) {
        let Some(after) = meter.gave_up_after else { return };
        let who = if lanes == self.load.clients { "clients" } else { "lanes of the clients" };
        let of = self.load.run.duration.map_or(self.seconds, |duration| duration.as_secs_f64());
        self.notes.push(format!(
            "{} of {lanes} {who} gave up after {FAILURES_IN_A_ROW_MAX} failures in a row, the \
             first after {:.2} of {of:.2} s",
            meter.gave_up,
            after.as_secs_f64()
        ));
    }

    /// Notes what became of the records that weak acks were given for.
    pub(crate) fn note_missing(&mut self, acked: u64, missing: anyhow::Result<u64>) {
        match missing {
            Ok(missing) => {
                self.records_missing = Some(missing);
                if missing > 0 {
                    self.notes.push(format!(
                        "{missing} of {acked} records that were acked, warm-up included, are not \
                         there: --acks {} promises no more, and the throughput counts them",
                        self.load.acks.name()
                    ));
                }
            }
            Err(error) => self.notes.push(format!(
                "whether what was acked with --acks {} is there could not be looked at: {error:#}",
                self.load.acks.name()
            )),
        }
    }

    pub(crate) fn note_in_flight_per_stream(&mut self, streams: usize) {
        if streams > self.load.clients {
            self.notes.push(format!(
                "{streams} streams, one per partition of each client, with up to {} batches in \
                 flight each",
                self.load.in_flight
            ));
        }
    }

    pub(crate) fn exit_code(&self) -> u8 {
        let is_lost = self.records_missing.is_some_and(|missing| missing > 0)
            || self.errors_by_kind.contains_key(NOT_DELIVERED);
        match &self.verify {
            _ if is_lost => exit::NOT_AS_ACKED,
            Some(verification) if !verification.is_good() => verification.exit_code(),
            _ if self.requests == 0 => exit::FAILED,
            _ => 0,
        }
    }

    /// The report for people.
    pub(crate) fn table(&self) -> String {
        let mut out = String::new();
        let Self { load, .. } = self;
        // Ignored throughout: writing to a string does not fail.
        let _ = writeln!(out, "{}", self.headline());
        let _ = writeln!(
            out,
            "       storage {}, {}, durability {}{}, server {}, client {}",
            self.storage,
            replication_text(self.node_count, self.replication),
            self.durability,
            self.sync_times(),
            self.server_version,
            self.client_version,
        );
        let _ = writeln!(out);
        let header = ["records/s", "MB/s", "requests/s", "p50 ms", "p90", "p95", "p99", "p99.9"];
        let _ = write!(out, "{:>9}", "");
        for name in header.iter().chain(&["max", "errors"]) {
            let _ = write!(out, " {name:>11}");
        }
        let _ = writeln!(out);
        let _ = write!(out, "{:<9}", load.mode.name());
        for value in [self.records_per_sec, self.mb_per_sec, self.requests_per_sec] {
            let _ = write!(out, " {:>11}", grouped(value));
        }
        let _ = writeln!(out, "{} {:>11}", percentile_cells(self.latency_us.as_ref()), self.errors);
        for (name, part) in &self.latency_parts_us {
            let cells = percentile_cells(Some(part));
            let _ = writeln!(out, "{:<9}{:36}{cells}", name.replace('_', " "), "");
        }
        let _ = writeln!(out);
        let _ = writeln!(out, "{}", self.totals());
        if let Some(verification) = &self.verify {
            let _ = writeln!(out, "{verification}");
        }
        if let Some(missing) = self.records_missing.filter(|missing| *missing > 0) {
            let _ = writeln!(out, "MISSING: {} acked records", grouped(missing as f64));
        }
        for (kind, count) in &self.errors_by_kind {
            let _ = writeln!(out, "error: {kind} x {count}");
        }
        for note in &self.notes {
            let _ = writeln!(out, "note: {note}");
        }
        out
    }

    pub(crate) fn headline(&self) -> String {
        let Load { topic, clients, in_flight, acks, .. } = &self.load;
        let load = &self.load;
        let partition = match load.partition {
            Some(partition) => format!("{topic}/{partition}"),
            None => format!("{topic}/*"),
        };
        let mut line = format!(
            "{:<6} {partition} at {}: {clients} client{} x {in_flight} in flight, {}",
            load.mode.name(),
            load.addr.join(","),
            if *clients == 1 { "" } else { "s" },
            self.shape(),
        );
        let path = match (load.mode, load.stream) {
            (Mode::Read, true) => "subscribe",
            (_, true) => "stream",
            (_, false) => "unary",
        };
        let _ = write!(line, ", {path}");
        if load.mode != Mode::Read {
            let acks = acks.name();
            let producer = if load.idempotent { "idempotent" } else { "not idempotent" };
            let _ = write!(line, ", acks {acks}, {producer}");
        }
        if let Some(rate) = load.rate {
            let _ = write!(line, ", open loop at {rate} records/s");
        }
        line
    }

    /// Of what is written, how large; of what is read, how large it was found.
    fn shape(&self) -> String {
        let Load { size, batch_size, .. } = &self.load;
        match (self.load.mode, self.bytes_per_record) {
            (Mode::Read, Some(bytes)) => {
                let records = self.records as f64 / self.requests.max(1) as f64;
                format!("{bytes:.0} B x {records:.0} as they came")
            }
            (Mode::Read, None) => "nothing came".to_owned(),
            _ => format!("{size} B x {batch_size}"),
        }
    }

    fn sync_times(&self) -> String {
        match (self.sync_p50_us, self.sync_p99_us) {
            (Some(p50), Some(p99)) => {
                format!(", sync p50 {:.3} ms p99 {:.3} ms", p50 / 1e3, p99 / 1e3)
            }
            _ => String::new(),
        }
    }

    fn totals(&self) -> String {
        let Cpu { client_cores, client_us_per_request, server_cores, server_us_per_request } =
            &self.cpu;
        format!(
            "{} records in {:.2} s after a warm-up of {} in {:.2} s; cpu: client {client_cores:.2} \
             cores ({} us/request), {} {} cores ({} us/request), {} MB resident",
            grouped(self.records as f64),
            self.seconds,
            grouped(self.warmup.records as f64),
            self.warmup.seconds,
            known(*client_us_per_request, 0),
            if self.node_count == 1 { "server" } else { "all nodes" },
            known(*server_cores, 2),
            known(*server_us_per_request, 0),
            known(self.server_rss_bytes.map(|bytes| bytes as f64 / 1e6), 0),
        )
    }
}

/// A number with so many decimals; "-" if it is not known.
pub(crate) fn known(value: Option<f64>, decimals: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.decimals$}"))
}

/// What the acks of the topic promise by default: memory cannot keep more than is written.
fn stored_durability(target: &Target, nodes: &[Node]) -> &'static str {
    let default = target.topic.config.as_ref().map(TopicConfig::default_durability);
    let is_memory = nodes.iter().any(|node| node.storage == "memory");
    match default.unwrap_or_default() {
        Durability::QuorumSynced if is_memory => durability_name(Durability::QuorumWritten),
        default => durability_name(default),
    }
}

/// How many nodes there are and how many of them have each record.
pub(crate) fn replication_text(nodes: usize, replication: u32) -> String {
    let plural = if nodes == 1 { "" } else { "s" };
    format!("{nodes} node{plural}, replication {replication}")
}

fn parts(meter: &Meter) -> BTreeMap<&'static str, Percentiles> {
    let of = |part: &Latencies| part.percentiles();
    meter.parts.iter().filter_map(|(name, part)| Some((*name, of(part)?))).collect()
}

fn distinct(mut values: Vec<String>) -> String {
    values.sort();
    values.dedup();
    if values.is_empty() { "unknown".to_owned() } else { values.join(",") }
}

fn rate(count: u64, seconds: f64) -> f64 {
    count as f64 / seconds
}

fn percentile_cells(percentiles: Option<&Percentiles>) -> String {
    let mut out = String::new();
    let Some(found) = percentiles else {
        for _ in 0..6 {
            let _ = write!(out, " {:>11}", "-");
        }
        return out;
    };
    for us in [found.p50, found.p90, found.p95, found.p99, found.p999, found.max] {
        let _ = write!(out, " {:>11.3}", us / 1e3);
    }
    out
}

/// A number with its thousands set apart; small ones with one decimal.
pub(crate) fn grouped(value: f64) -> String {
    if value < 100.0 && value.fract() != 0.0 {
        return format!("{value:.1}");
    }
    let digits = format!("{value:.0}");
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped() {
        assert_eq!(grouped(0.0), "0");
        assert_eq!(grouped(12.34), "12.3");
        assert_eq!(grouped(999.6), "1,000");
        assert_eq!(grouped(1_234_567.8), "1,234,568");
    }

    #[test]
    fn replication_is_said_with_the_nodes() {
        assert_eq!(replication_text(1, 1), "1 node, replication 1");
        assert_eq!(replication_text(5, 3), "5 nodes, replication 3");
    }

    #[test]
    fn what_is_not_known_is_no_number() {
        assert_eq!((known(None, 2), known(Some(1.234), 2)), ("-".to_owned(), "1.23".to_owned()));
    }
}
