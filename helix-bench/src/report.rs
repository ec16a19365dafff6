//! Result of a run: printed as a short table or written as JSON.
//!
//! It includes everything that is needed to judge the numbers.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::Result;
use clap::ValueEnum;
use helix_proto::log::v1::{Durability, TopicConfig};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use crate::exit;
use crate::format::{grouped, known, replication_text};
use crate::host::cores;
use crate::load::{BatchCompression, BenchLoad, LoadMode};
use crate::meter::{LatencyHistogram, LoadMeter, Percentiles, durability_name};
use crate::nodes::{CpuUsage, NodeUsage, nodes, rss_bytes};
use crate::options::AckLevel;
use crate::output::ModeResult;
use crate::phase::{FAILURES_IN_A_ROW_MAX, PhaseResult};
use crate::series::RateInterval;
use crate::target::{BenchTarget, Observation};
use crate::verify::Verification;

/// Error kind for acked records that a subscriber did not receive.
pub(crate) const NOT_DELIVERED: &str = "NOT_DELIVERED";
/// Error kind for records that a subscriber received more than once.
pub(crate) const DELIVERED_TWICE: &str = "DELIVERED_TWICE";

/// A run shorter than this many seconds is too short to be repeatable.
const SECONDS_MIN: f64 = 2.0;

/// Divisor for the share of sends that an open loop may miss before a note is added.
const SENDS_MISSED_SHARE: u64 = 1000;

/// Share of all cores above which the client itself may be the bottleneck.
const BUSY_CORES_SHARE: f64 = 0.95;

/// Result of a run.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(crate) struct BenchReport {
    pub(crate) records_per_sec: f64,
    /// Payload bytes before compression, in units of 10^6 bytes.
    pub(crate) mb_per_sec: f64,
    pub(crate) requests_per_sec: f64,
    /// Requests that failed after the client's own retries. They are not counted in other results.
    pub(crate) errors: u64,
    /// `None` for a subscription, which has no requests to time.
    pub(crate) latency_us: Option<Percentiles>,
    /// Weakest durability of any ack; for reads, the topic's default durability.
    pub(crate) durability: String,
    pub(crate) storage: String,
    /// Nodes of the cluster.
    pub(crate) node_count: usize,
    /// Replication factor of the topic, as reported by the cluster.
    pub(crate) replication: u32,
    pub(crate) idempotent: Option<bool>,
    /// The connections used TLS.
    pub(crate) tls: bool,
    /// The calls carried a token.
    pub(crate) token: bool,
    pub(crate) server_version: String,
    pub(crate) sync_p50_us: Option<f64>,
    pub(crate) sync_p99_us: Option<f64>,
    pub(crate) records: u64,
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
    /// Measured, not configured; `None` without records.
    pub(crate) bytes_per_record: Option<f64>,
    pub(crate) seconds: f64,
    pub(crate) warmup: WarmupSummary,
    /// Further distributions, by name.
    pub(crate) latency_parts_us: BTreeMap<&'static str, Percentiles>,
    /// Number of acks by durability.
    pub(crate) acks: BTreeMap<&'static str, u64>,
    pub(crate) duplicates: u64,
    pub(crate) sends_missed: u64,
    /// Clients, or lanes of clients, that stopped after too many failures.
    pub(crate) gave_up: u64,
    /// Records that were acked by weak acks and are missing. `None` if that was not checked.
    pub(crate) records_missing: Option<u64>,
    pub(crate) errors_by_kind: BTreeMap<String, u64>,
    pub(crate) first_error: Option<String>,
    pub(crate) cpu: CpuUsage,
    /// Resident memory of all nodes together after the run; `None` if no node reports it.
    pub(crate) server_rss_bytes: Option<u64>,
    /// Nodes that answered after the run.
    pub(crate) nodes: Vec<NodeUsage>,
    pub(crate) verify: Option<Verification>,
    /// Whole seconds of the measured phase; for `e2e`, of the acks.
    pub(crate) intervals: Vec<RateInterval>,
    pub(crate) load: BenchLoad,
    pub(crate) notes: Vec<String>,
}

/// Counts of the warm-up.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(crate) struct WarmupSummary {
    pub(crate) records: u64,
    pub(crate) seconds: f64,
    pub(crate) errors: u64,
}

impl BenchReport {
    pub(crate) fn new(
        load: &BenchLoad,
        target: &BenchTarget,
        before: &Observation,
        after: &Observation,
        warmup: &PhaseResult,
        outcome: &PhaseResult,
    ) -> Self {
        let PhaseResult { meter, elapsed, sends_missed, lanes, intervals, .. } = outcome;
        let seconds = elapsed.as_secs_f64().max(1e-9);
        let nodes = nodes(before, after);
        let storages: Vec<_> = nodes.iter().map(|node| node.storage.clone()).collect();
        let versions: Vec<_> = nodes.iter().map(|node| node.version.clone()).collect();
        let worst =
            |of: fn(&NodeUsage) -> Option<f64>| nodes.iter().filter_map(of).reduce(f64::max);
        let mut report = Self {
            records_per_sec: rate(meter.records, seconds),
            mb_per_sec: rate(meter.bytes, seconds) / 1e6,
            requests_per_sec: rate(meter.requests, seconds),
            errors: meter.failures.count,
            latency_us: meter.latency.percentiles(),
            durability: match load.mode {
                LoadMode::Read => stored_durability(target, &nodes),
                _ => meter.durability().unwrap_or("unknown"),
            }
            .to_owned(),
            storage: distinct(storages),
            node_count: target.addresses.len(),
            replication: target.topic.replication_factor,
            idempotent: (load.mode != LoadMode::Read).then_some(load.idempotent),
            tls: load.cluster.tls.is_some(),
            token: !load.cluster.token.is_none(),
            server_version: distinct(versions),
            sync_p50_us: worst(|node| node.sync_p50_us),
            sync_p99_us: worst(|node| node.sync_p99_us),
            records: meter.records,
            requests: meter.requests,
            bytes: meter.bytes,
            bytes_per_record: (meter.records > 0)
                .then(|| meter.bytes as f64 / meter.records as f64),
            seconds,
            warmup: WarmupSummary {
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
            cpu: CpuUsage::new(before, after, &nodes, meter),
            server_rss_bytes: rss_bytes(&nodes),
            nodes,
            verify: None,
            intervals: intervals.clone(),
            load: load.clone(),
            notes: Vec::new(),
        };
        report.notes = report.caveats();
        report.note_lanes_that_gave_up(meter, *lanes);
        if meter.starts_moved > 0 {
            report.notes.push(format!(
                "retention overtook {} reads: they continued at the log start",
                meter.starts_moved
            ));
        }
        report
    }

    /// Lists the reasons why the results may be misleading.
    fn caveats(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.seconds < SECONDS_MIN {
            notes.push(format!(
                "a run of {:.2} s is too short: use --duration or more records",
                self.seconds
            ));
        }
        let failed_before = self.warmup.errors;
        if failed_before > 0 {
            notes.push(format!("{failed_before} warm-up requests failed"));
        }
        if self.errors > 0 {
            let first = self.first_error.as_deref().unwrap_or_default();
            notes.push(format!(
                "failed requests are not counted in other results; first error: {first}"
            ));
        }
        if self.sends_missed > self.requests / SENDS_MISSED_SHARE {
            let ends_with_records = self.load.run.records.is_some_and(|most| self.records >= most);
            notes.push(match ends_with_records {
                true => format!(
                    "the rate was not reached: {} more sends were due when the last one was made",
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
                "{silent} of {} nodes did not report usage: cpu and memory exclude them",
                self.node_count
            ));
        }
        let unmeasured = self.nodes.iter().filter(|node| node.cpu_seconds.is_none()).count();
        if unmeasured > 0 {
            notes.push(format!("{unmeasured} nodes joined or restarted: cpu excludes them"));
        }
        let is_weaker = self.load.acks == AckLevel::All
            && self.load.mode != LoadMode::Read
            && self.requests > 0
            && self.storage != "none"
            && self.durability != "quorum-synced";
        if is_weaker {
            notes.push(format!("acks were only {}, not quorum-synced", self.durability));
        }
        let busy = self.cpu.client_cores / cores() as f64;
        if busy > BUSY_CORES_SHARE {
            notes.push("the client kept every core busy: it may be the bottleneck".into());
        }
        notes
    }

    fn note_lanes_that_gave_up(&mut self, meter: &LoadMeter, lanes: usize) {
        let Some(after) = meter.gave_up_after else { return };
        let unit = if lanes == self.load.clients { "clients" } else { "lanes of the clients" };
        let of = self.load.run.duration.map_or(self.seconds, |duration| duration.as_secs_f64());
        self.notes.push(format!(
            "{} of {lanes} {unit} gave up after {FAILURES_IN_A_ROW_MAX} failures in a row, the \
             first after {:.2} of {of:.2} s",
            meter.gave_up,
            after.as_secs_f64()
        ));
    }

    /// Notes how many records with weak acks are missing.
    pub(crate) fn note_missing(&mut self, acked: u64, missing: Result<u64>) {
        match missing {
            Ok(missing) => {
                self.records_missing = Some(missing);
                if missing > 0 {
                    self.notes.push(format!(
                        "{missing} of {acked} acked records, warm-up included, are missing: \
                         --acks {} does not promise more, and the throughput counts them",
                        self.load.acks.name()
                    ));
                }
            }
            Err(error) => self.notes.push(format!(
                "could not check the records that were acked with --acks {}: {error:#}",
                self.load.acks.name()
            )),
        }
    }

    pub(crate) fn note_stream_count(&mut self, streams: usize) {
        if streams > self.load.clients {
            self.notes.push(format!(
                "{streams} streams, one per partition of each client, with up to {} batches in \
                 flight each",
                self.load.in_flight
            ));
        }
    }

    pub(crate) fn headline(&self) -> String {
        let BenchLoad { topic, clients, in_flight, acks, .. } = &self.load;
        let load = &self.load;
        let partition = match load.partition {
            Some(partition) => format!("{topic}/{partition}"),
            None => format!("{topic}/*"),
        };
        let mut line = format!(
            "{:<6} {partition} at {}: {clients} client{} x {in_flight} in flight, {}",
            load.mode.name(),
            load.cluster.addr.join(","),
            if *clients == 1 { "" } else { "s" },
            self.shape(),
        );
        let path = match (load.mode, load.stream) {
            (LoadMode::Read, true) => "subscribe",
            (_, true) => "stream",
            (_, false) => "unary",
        };
        let _ = write!(line, ", {path}");
        if load.mode != LoadMode::Read {
            let acks = acks.name();
            let producer = if load.idempotent { "idempotent" } else { "not idempotent" };
            let _ = write!(line, ", acks {acks}, {producer}");
            if load.compression != BatchCompression::None {
                let name = load.compression.to_possible_value();
                let name = name.as_ref().map_or("unknown", |value| value.get_name());
                let _ = write!(line, ", {name}");
            }
        }
        if let Some(rate) = load.rate {
            let _ = write!(line, ", open loop at {rate} records/s");
        }
        line
    }

    /// Describes the record size and batch size: configured for writes, measured for reads.
    fn shape(&self) -> String {
        let BenchLoad { size, batch_size, .. } = &self.load;
        match (self.load.mode, self.bytes_per_record) {
            (LoadMode::Read, Some(bytes)) => {
                let records = self.records as f64 / self.requests.max(1) as f64;
                format!("{bytes:.0} B x {records:.0} measured")
            }
            (LoadMode::Read, None) => "no records".to_owned(),
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
        let CpuUsage { client_cores, client_us_per_request, server_cores, server_us_per_request } =
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

impl ModeResult for BenchReport {
    fn mode(&self) -> &'static str {
        self.load.mode.name()
    }

    fn exit_code(&self) -> u8 {
        let is_lost = self.records_missing.is_some_and(|missing| missing > 0)
            || [NOT_DELIVERED, DELIVERED_TWICE]
                .iter()
                .any(|kind| self.errors_by_kind.contains_key(*kind));
        match &self.verify {
            _ if is_lost => exit::NOT_AS_ACKED,
            Some(verification) if !verification.is_clean() => verification.exit_code(),
            _ if self.requests == 0 => exit::FAILED,
            _ => 0,
        }
    }

    fn text(&self, _: &Value) -> Result<String> {
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
            env!("CARGO_PKG_VERSION"),
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
        Ok(out)
    }
}

/// Returns the topic's default durability. Memory storage reaches at most quorum-written.
fn stored_durability(target: &BenchTarget, nodes: &[NodeUsage]) -> &'static str {
    let default = target.topic.config.as_ref().map(TopicConfig::default_durability);
    let is_memory = nodes.iter().any(|node| node.storage == "memory");
    match default.unwrap_or_default() {
        Durability::QuorumSynced if is_memory => durability_name(Durability::QuorumWritten),
        default => durability_name(default),
    }
}

fn parts(meter: &LoadMeter) -> BTreeMap<&'static str, Percentiles> {
    let of = |part: &LatencyHistogram| part.percentiles();
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
