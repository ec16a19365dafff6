//! Interleaved runs against the ceiling and a server.
//!
//! Performance of a host drifts by more than most changes gain, so only ratios of adjacent runs are
//! meaningful. Reports medians, never means.

use std::fmt::Write as _;

use anyhow::{Result, ensure};
use clap::Args;
use helix_client::exit::Exit;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use crate::ceiling::{CeilingProcess, server_threads};
use crate::exit::{self, BenchFailure};
use crate::format::{grouped, known, replication_text};
use crate::load::{BenchLoad, LoadArgs, LoadMode, check_count};
use crate::median_range::MedianRange;
use crate::meter::weakest;
use crate::output::ModeResult;
use crate::report::BenchReport;
use crate::{interrupt, progress, runner, single};

/// Flags of `compare`.
#[derive(Debug, Clone, Args)]
pub(crate) struct CompareArgs {
    /// Load to run
    #[arg(long, default_value = "write")]
    mode: LoadMode,
    /// Runs against each side
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Runtime threads of the ceiling [default: cores - 1, at least 1, as the server]
    #[arg(long)]
    server_threads: Option<usize>,
    #[command(flatten)]
    load: LoadArgs,
}

/// Result of a comparison.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Comparison {
    /// Load of the runs.
    pub(crate) load_mode: &'static str,
    /// Records per second, server over ceiling, for each pair. Higher is better.
    pub(crate) throughput_ratio: MedianRange,
    /// Median latency, server over ceiling, for each pair. Lower is better.
    pub(crate) p50_ratio: Option<MedianRange>,
    pub(crate) p99_ratio: Option<MedianRange>,
    pub(crate) ceiling: SideSummary,
    pub(crate) server: SideSummary,
    pub(crate) server_threads: usize,
    /// All runs in order.
    pub(crate) runs: Vec<RunPair>,
}

/// Two adjacent runs.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct RunPair {
    pub(crate) throughput_ratio: f64,
    pub(crate) ceiling: BenchReport,
    pub(crate) server: BenchReport,
}

/// Results of one side over all runs.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct SideSummary {
    pub(crate) records_per_sec: MedianRange,
    pub(crate) mb_per_sec: MedianRange,
    pub(crate) requests_per_sec: MedianRange,
    /// Medians of the runs' percentiles, in microseconds.
    pub(crate) p50_us: Option<MedianRange>,
    pub(crate) p99_us: Option<MedianRange>,
    pub(crate) p999_us: Option<MedianRange>,
    /// `None` if no run reported it.
    pub(crate) server_us_per_request: Option<MedianRange>,
    pub(crate) client_us_per_request: Option<MedianRange>,
    pub(crate) errors: u64,
    /// Weakest durability of any run.
    pub(crate) durability: String,
    pub(crate) storage: String,
    pub(crate) node_count: usize,
    pub(crate) replication: u32,
    pub(crate) version: String,
    pub(crate) sync_p50_us: Option<f64>,
    pub(crate) sync_p99_us: Option<f64>,
}

/// Runs the mode and returns its exit code.
///
/// # Errors
/// A flag is out of range, a run failed, or the result could not be written.
pub(crate) fn command(args: &CompareArgs) -> Result<u8> {
    let load = BenchLoad::with_ceiling(args.mode, &args.load).map_err(exit::usage)?;
    check_count("--runs", args.runs).map_err(exit::usage)?;
    let threads = server_threads(args.server_threads)?;
    let output = &args.load.output;
    runner::run(load.threads, output, run(&load, args.runs, threads))
}

/// Runs the load `runs` times against each side. The first side alternates between pairs.
async fn run(load: &BenchLoad, runs: usize, server_threads: usize) -> Result<Comparison> {
    let ceiling = CeilingProcess::start(load, Some(server_threads)).await?;
    let against_ceiling = ceiling.load(load);
    let mut pairs = Vec::with_capacity(runs);
    for number in 0..runs {
        progress::step(&format!("run {} of {runs}", number + 1));
        let (ceiling, server) = if number % 2 == 0 {
            let ceiling = single::run(&against_ceiling).await?;
            (ceiling, single::run(load).await?)
        } else {
            let server = single::run(load).await?;
            (single::run(&against_ceiling).await?, server)
        };
        // The pair is not whole.
        if interrupt::is_requested() {
            break;
        }
        ensure!(ceiling.requests > 0, "no request succeeded against the ceiling");
        let throughput_ratio = server.records_per_sec / ceiling.records_per_sec;
        pairs.push(RunPair { throughput_ratio, ceiling, server });
    }
    if pairs.is_empty() {
        let what = "interrupted before the first pair of runs was done";
        return Err(BenchFailure::new(Exit::Interrupted, what).into());
    }
    Ok(Comparison::new(load, server_threads, pairs))
}

impl Comparison {
    fn new(load: &BenchLoad, server_threads: usize, runs: Vec<RunPair>) -> Self {
        let ratio = |of: fn(&BenchReport) -> Option<f64>| {
            let of_pair = |pair: &RunPair| Some(of(&pair.server)? / of(&pair.ceiling)?);
            MedianRange::of(runs.iter().filter_map(of_pair))
        };
        let throughput = MedianRange::of(runs.iter().map(|pair| pair.throughput_ratio));
        Self {
            load_mode: load.mode.name(),
            throughput_ratio: throughput.expect("at least one run"),
            p50_ratio: ratio(|report| report.latency_us.map(|latency| latency.p50)),
            p99_ratio: ratio(|report| report.latency_us.map(|latency| latency.p99)),
            ceiling: SideSummary::new(runs.iter().map(|pair| &pair.ceiling).collect()),
            server: SideSummary::new(runs.iter().map(|pair| &pair.server).collect()),
            server_threads,
            runs,
        }
    }
}

impl ModeResult for Comparison {
    fn mode(&self) -> &'static str {
        "compare"
    }

    fn exit_code(&self) -> u8 {
        let codes = self.runs.iter().map(|pair| pair.server.exit_code());
        codes.max().unwrap_or(1)
    }

    fn text(&self, _: &Value) -> Result<String> {
        let mut out = String::new();
        // Ignored throughout: writing to a string does not fail.
        let first = &self.runs[0].server;
        let _ = writeln!(out, "{}", first.headline());
        let _ = writeln!(
            out,
            "       server: storage {}, {}, durability {}; medians of {} interleaved runs \
             (min-max)",
            self.server.storage,
            replication_text(self.server.node_count, self.server.replication),
            self.server.durability,
            self.runs.len(),
        );
        let _ = writeln!(out);
        let _ = writeln!(
            out,
            "{:<9} {:>34} {:>10} {:>10} {:>10} {:>10} {:>14} {:>7}",
            "", "records/s", "MB/s", "p50 ms", "p99 ms", "p99.9 ms", "cpu us/request", "errors",
        );
        for (name, side) in [("ceiling", &self.ceiling), ("server", &self.server)] {
            let _ = writeln!(out, "{}", side.row(name));
        }
        let _ = writeln!(out);
        let _ = writeln!(out, "ratio     throughput {}", self.throughput_ratio.ratio());
        if let (Some(p50), Some(p99)) = (self.p50_ratio, self.p99_ratio) {
            let _ = writeln!(out, "          p50 {}, p99 {}", p50.ratio(), p99.ratio());
        }
        let mut notes: Vec<&String> =
            self.runs.iter().flat_map(|pair| &pair.server.notes).collect();
        notes.sort();
        notes.dedup();
        for note in notes {
            let _ = writeln!(out, "note: {note}");
        }
        Ok(out)
    }
}

impl SideSummary {
    fn new(reports: Vec<&BenchReport>) -> Self {
        let spread = |of: fn(&BenchReport) -> f64| {
            MedianRange::of(reports.iter().map(|report| of(report))).expect("at least one run")
        };
        let some = |of: fn(&BenchReport) -> Option<f64>| {
            MedianRange::of(reports.iter().filter_map(|report| of(report)))
        };
        let last = reports.last().expect("at least one run");
        Self {
            records_per_sec: spread(|report| report.records_per_sec),
            mb_per_sec: spread(|report| report.mb_per_sec),
            requests_per_sec: spread(|report| report.requests_per_sec),
            p50_us: some(|report| report.latency_us.map(|latency| latency.p50)),
            p99_us: some(|report| report.latency_us.map(|latency| latency.p99)),
            p999_us: some(|report| report.latency_us.map(|latency| latency.p999)),
            server_us_per_request: some(|report| report.cpu.server_us_per_request),
            client_us_per_request: some(|report| report.cpu.client_us_per_request),
            errors: reports.iter().map(|report| report.errors).sum(),
            durability: weakest_of(reports.iter().map(|report| report.durability.as_str())),
            storage: last.storage.clone(),
            node_count: last.node_count,
            replication: last.replication,
            version: last.server_version.clone(),
            sync_p50_us: last.sync_p50_us,
            sync_p99_us: last.sync_p99_us,
        }
    }

    fn row(&self, name: &str) -> String {
        let rate = self.records_per_sec;
        let rate =
            format!("{} ({}-{})", grouped(rate.median), grouped(rate.min), grouped(rate.max));
        let ms = |spread: Option<MedianRange>| match spread {
            Some(spread) => format!("{:.3}", spread.median / 1e3),
            None => "-".to_owned(),
        };
        format!(
            "{name:<9} {rate:>34} {:>10} {:>10} {:>10} {:>10} {:>14} {:>7}",
            grouped(self.mb_per_sec.median),
            ms(self.p50_us),
            ms(self.p99_us),
            ms(self.p999_us),
            known(self.server_us_per_request.map(|spread| spread.median), 0),
            self.errors,
        )
    }
}

/// Returns the weakest durability of all runs.
fn weakest_of<'a>(durabilities: impl Iterator<Item = &'a str>) -> String {
    weakest(durabilities).unwrap_or("unknown").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durability_is_that_of_the_weakest_run() {
        let runs = ["quorum-synced", "leader-written", "quorum-synced"];
        assert_eq!(weakest_of(runs.into_iter()), "leader-written");
        assert_eq!(weakest_of([].into_iter()), "unknown");
    }
}
