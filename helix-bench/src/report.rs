//! What a run found, as one value: printed as a short table, or written as JSON.
//! Everything needed to judge the figures stands beside them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use helix_proto::log::v1::{Durability, GetNodeStatusResponse, TopicConfig};
use serde::Serialize;

use crate::args::{Acks, Mode};
use crate::load::Load;
use crate::meter::{Latencies, Meter, Percentiles, durability_name};
use crate::phase::Outcome;
use crate::target::{Observation, Target};
use crate::verify::Findings;

/// Exit code when what was read back is not what was acked.
pub(crate) const EXIT_NOT_VERIFIED: u8 = 11;

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
    pub(crate) seconds: f64,
    pub(crate) warmup: Warmup,
    /// Further distributions, by name.
    pub(crate) latency_parts_us: BTreeMap<&'static str, Percentiles>,
    /// Number of acks, by durability reached.
    pub(crate) acks: BTreeMap<&'static str, u64>,
    pub(crate) duplicates: u64,
    pub(crate) sends_missed: u64,
    pub(crate) errors_by_kind: BTreeMap<String, u64>,
    pub(crate) first_error: Option<String>,
    pub(crate) cpu: Cpu,
    /// Resident memory of all nodes together, after the run.
    pub(crate) server_rss_bytes: u64,
    /// Those that answered.
    pub(crate) nodes: Vec<Node>,
    pub(crate) verify: Option<Findings>,
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

/// CPU time of the measured part.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Cpu {
    /// Cores that this process kept busy.
    pub(crate) client_cores: f64,
    pub(crate) client_us_per_request: f64,
    /// The same of all nodes together.
    pub(crate) server_cores: f64,
    pub(crate) server_us_per_request: f64,
}

/// One node, as it described itself after the run.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Node {
    pub(crate) address: String,
    pub(crate) version: String,
    pub(crate) storage: String,
    pub(crate) durability: String,
    pub(crate) sync_p50_us: Option<f64>,
    pub(crate) sync_p99_us: Option<f64>,
    /// None: it did not answer before the run, or was restarted during it.
    pub(crate) cpu_seconds: Option<f64>,
    pub(crate) rss_bytes: u64,
    pub(crate) shards: usize,
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
        let Outcome { meter, elapsed, sends_missed } = outcome;
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
            errors_by_kind: meter.failures.by_kind.clone(),
            first_error: meter.failures.first.clone(),
            cpu: Cpu::new(before, after, &nodes, meter),
            server_rss_bytes: nodes.iter().map(|node| node.rss_bytes).sum(),
            nodes,
            verify: None,
            machine: Machine::here(),
            load: load.clone(),
            notes: Vec::new(),
        };
        report.notes = report.reservations();
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
            notes.push(format!(
                "the rate was not reached: {} sends were due and never made; their latencies are \
                 missing",
                self.sends_missed
            ));
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
        match &self.verify {
            Some(findings) if !findings.is_good() => EXIT_NOT_VERIFIED,
            _ if self.requests == 0 => 1,
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
        if let Some(findings) = &self.verify {
            let _ = writeln!(out, "{}", verdict(findings));
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
        let Load { topic, clients, in_flight, size, batch_size, acks, .. } = &self.load;
        let load = &self.load;
        let partition = match load.partition {
            Some(partition) => format!("{topic}/{partition}"),
            None => format!("{topic}/*"),
        };
        let mut line = format!(
            "{:<6} {partition} at {}: {clients} client{} x {in_flight} in flight, {size} B x \
             {batch_size}",
            load.mode.name(),
            load.addr.join(","),
            if *clients == 1 { "" } else { "s" },
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
             cores ({client_us_per_request:.0} us/request), {} {server_cores:.2} cores \
             ({server_us_per_request:.0} us/request), {:.0} MB resident",
            grouped(self.records as f64),
            self.seconds,
            grouped(self.warmup.records as f64),
            self.warmup.seconds,
            if self.node_count == 1 { "server" } else { "all nodes" },
            self.server_rss_bytes as f64 / 1e6,
        )
    }
}

impl Cpu {
    fn new(before: &Observation, after: &Observation, nodes: &[Node], meter: &Meter) -> Self {
        let seconds = (after.at - before.at).as_secs_f64().max(1e-9);
        let client = after.cpu.saturating_sub(before.cpu).as_secs_f64();
        let server: f64 = nodes.iter().filter_map(|node| node.cpu_seconds).sum();
        let per_request = 1e6 / meter.requests.max(1) as f64;
        Self {
            client_cores: client / seconds,
            client_us_per_request: client * per_request,
            server_cores: server / seconds,
            server_us_per_request: server * per_request,
        }
    }
}

fn nodes(before: &Observation, after: &Observation) -> Vec<Node> {
    let cpu_before = |address: &str| {
        let node = before.nodes.iter().find(|(known, _)| known == address);
        node.map(|(_, status)| status.cpu_time_us)
    };
    let node = |(address, status): &(String, GetNodeStatusResponse)| Node {
        address: address.clone(),
        version: status.version.clone(),
        storage: status.storage.clone(),
        durability: status.durability.clone(),
        sync_p50_us: status.sync_p50.as_ref().map(micros),
        sync_p99_us: status.sync_p99.as_ref().map(micros),
        cpu_seconds: cpu_before(address)
            // Less than before: the node was restarted meanwhile.
            .and_then(|before| status.cpu_time_us.checked_sub(before))
            .map(|used| Duration::from_micros(used).as_secs_f64()),
        rss_bytes: status.rss_bytes,
        shards: status.shards.len(),
    };
    after.nodes.iter().map(node).collect()
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

fn micros(duration: &prost_types::Duration) -> f64 {
    duration.seconds as f64 * 1e6 + f64::from(duration.nanos) / 1e3
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

pub(crate) fn verdict(findings: &Findings) -> String {
    let counts = |(name, count): (&str, u64)| format!("{count} {name}");
    let problems: Vec<_> = findings
        .problems()
        .into_iter()
        .filter(|(_, count)| *count > 0 || findings.is_good())
        .map(counts)
        .collect();
    let word = if findings.is_good() { "verified" } else { "NOT VERIFIED" };
    format!("{word}: {} records, {}", grouped(findings.records as f64), problems.join(", "))
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

    fn observation(cpu_time_us: &[u64]) -> Observation {
        let node = |(number, &cpu_time_us): (usize, &u64)| {
            let status = GetNodeStatusResponse { cpu_time_us, ..GetNodeStatusResponse::default() };
            (format!("n{number}"), status)
        };
        Observation {
            at: tokio::time::Instant::now(),
            cpu: Duration::ZERO,
            nodes: cpu_time_us.iter().enumerate().map(node).collect(),
        }
    }

    #[test]
    fn the_cpu_of_all_nodes_is_added_up() {
        let (before, mut after) = (observation(&[5, 7]), observation(&[1_000_005, 2_000_007, 9]));
        after.at = before.at + Duration::from_secs(2);
        let nodes = nodes(&before, &after);
        // The third was not there before: what it has used since its start is not the run's.
        assert_eq!(nodes[2].cpu_seconds, None);
        let cpu = Cpu::new(&before, &after, &nodes, &Meter::new());
        assert!((cpu.server_cores - 1.5).abs() < 1e-6, "{cpu:?}");
        let restarted = super::nodes(&observation(&[500]), &observation(&[3]));
        assert_eq!(restarted[0].cpu_seconds, None);
    }

    #[test]
    fn replication_is_said_with_the_nodes() {
        assert_eq!(replication_text(1, 1), "1 node, replication 1");
        assert_eq!(replication_text(5, 3), "5 nodes, replication 3");
    }

    #[test]
    fn a_verdict_names_what_is_wrong() {
        let good = Findings { records: 1000, ..Findings::default() };
        assert!(verdict(&good).starts_with("verified: 1,000 records, 0 missing, 0 doubled"));
        let bad = Findings { missing: 2, ..good };
        assert_eq!(verdict(&bad), "NOT VERIFIED: 1,000 records, 2 missing");
    }
}
