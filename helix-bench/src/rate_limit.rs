//! Highest open-loop rate whose p99 stays within a bound, by doubling and then bisection.

use std::time::Duration;

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use schemars::JsonSchema;
use serde::Serialize;

use crate::format::grouped;
use crate::load::{BenchLoad, LoadArgs, LoadMode};
use crate::options::duration;
use crate::output::ModeResult;
use crate::report::BenchReport;
use crate::{exit, interrupt, progress, runner, single};

/// The search ends when the bounds are this close.
const PRECISION: f64 = 1.05;
/// Most steps, more than doubling from 1 to the highest rate and the bisection need.
pub(crate) const STEPS_MAX: usize = 48;
/// Share of the sends that may be due and not made at the end of a step.
const MISSED_MAX: f64 = 0.02;
/// Length of a step.
const DURATION_DEFAULT: Duration = Duration::from_secs(5);

/// Flags of `limit`.
#[derive(Debug, Clone, Args)]
pub(crate) struct RateLimitArgs {
    /// Load to run
    #[arg(long, default_value = "e2e")]
    mode: RateLimitMode,
    /// Bound of p99, which counts from the scheduled send time
    #[arg(long, default_value = "5ms", value_parser = duration)]
    max_p99: Duration,
    /// First rate, in records per second
    #[arg(long, default_value_t = 1000.0, value_name = "RECORDS_PER_SEC")]
    start: f64,
    #[command(flatten)]
    load: LoadArgs,
}

/// Loads that have a rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RateLimitMode {
    Write,
    /// Same as `write --stream`.
    Stream,
    E2e,
}

/// Result of the search.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct RateLimitReport {
    title: String,
    max_p99_us: f64,
    /// Highest rate within the bound, as it was sent; `None` if the first rates were beyond it.
    highest_rate: Option<f64>,
    steps: Vec<RateLimitStep>,
    notes: Vec<String>,
}

/// One run at a rate.
#[derive(Debug, Serialize, JsonSchema)]
struct RateLimitStep {
    rate: f64,
    is_within: bool,
    /// Reason why the rate is beyond the bound.
    why: Option<&'static str>,
    run: BenchReport,
}

/// Runs the mode and returns its exit code.
///
/// # Errors
/// A flag is out of range, a run could not start, or the result could not be written.
pub(crate) fn command(args: &RateLimitArgs) -> Result<u8> {
    let load = load(args).map_err(exit::usage)?;
    runner::run(load.threads, &args.load.output, run(args, &load))
}

/// Validates the flags and returns the load at its first rate.
fn load(args: &RateLimitArgs) -> Result<BenchLoad> {
    ensure!(args.load.rate.is_none(), "--rate is not valid for limit: it finds the rate");
    ensure!(!args.load.verify, "--verify is not valid for limit");
    ensure!(!args.max_p99.is_zero(), "--max-p99 must be above 0");
    let mode = match args.mode {
        RateLimitMode::Write => LoadMode::Write,
        RateLimitMode::Stream => LoadMode::Stream,
        RateLimitMode::E2e => LoadMode::E2e,
    };
    let duration = args.load.duration.unwrap_or(DURATION_DEFAULT);
    let load = LoadArgs { rate: Some(args.start), duration: Some(duration), ..args.load.clone() };
    BenchLoad::new(mode, &load)
}

/// Runs the load at rates until the highest one is found.
async fn run(args: &RateLimitArgs, load: &BenchLoad) -> Result<RateLimitReport> {
    let mut search = RateSearch::new(args.start);
    let mut steps = Vec::new();
    let mut highest_rate = None;
    while let Some(rate) = search.next()
        && steps.len() < STEPS_MAX
    {
        let report = single::run(&BenchLoad { rate: Some(rate), ..load.clone() }).await?;
        // The step is not whole.
        if interrupt::is_requested() {
            break;
        }
        let why = beyond(&report, rate, load, args.max_p99);
        progress::step(&format!(
            "{} of {} records/s: p99 {:.3} ms, {}",
            grouped(report.records_per_sec.round()),
            grouped(rate.round()),
            report.latency_us.map_or(f64::NAN, |latency| latency.p99 / 1e3),
            why.unwrap_or("within the bound")
        ));
        if why.is_none() {
            // The search needs the rate of the schedule, the result the rate that was sent.
            highest_rate = Some(rate.min(report.records_per_sec));
        }
        search.note(rate, why.is_none());
        steps.push(RateLimitStep { rate, is_within: why.is_none(), why, run: report });
    }
    Ok(RateLimitReport::new(args, load, highest_rate, steps))
}

/// Returns the reason why a run is beyond the bound.
fn beyond(
    report: &BenchReport,
    rate: f64,
    load: &BenchLoad,
    max_p99: Duration,
) -> Option<&'static str> {
    let due = rate * load.run.duration.unwrap_or(DURATION_DEFAULT).as_secs_f64();
    let most = load.run.records.map_or(f64::INFINITY, |records| records as f64);
    StepCounts {
        due: due.min(most) - load.batch_size as f64,
        records: report.records as f64,
        errors: report.errors,
        requests: report.requests,
        missed: report.sends_missed,
        p99_us: report.latency_us.map(|latency| latency.p99),
    }
    .beyond(max_p99)
}

/// Measurements of a run that decide about its rate.
#[derive(Debug, Clone, Copy)]
struct StepCounts {
    /// Records that were due by the rate, but for the last batch, and those that were sent.
    due: f64,
    records: f64,
    errors: u64,
    requests: u64,
    /// Sends that were due and not made.
    missed: u64,
    /// `None` if no request succeeded.
    p99_us: Option<f64>,
}

impl StepCounts {
    fn beyond(self, max_p99: Duration) -> Option<&'static str> {
        let Self { due, records, errors, requests, missed, p99_us } = self;
        let missed = missed as f64;
        match p99_us {
            _ if errors > 0 => Some("errors"),
            None => Some("no request succeeded"),
            Some(us) if us > max_p99.as_secs_f64() * 1e6 => Some("p99 beyond the bound"),
            Some(_) if missed > (requests as f64 + missed) * MISSED_MAX => Some("rate not reached"),
            // Sends that were late to the end of the step are not missed, but were made too late.
            Some(_) if records < due * (1.0 - MISSED_MAX) => Some("rate not reached"),
            Some(_) => None,
        }
    }
}

/// Bounds of the highest rate.
#[derive(Debug)]
pub(crate) struct RateSearch {
    start: f64,
    /// Highest rate within the bound, and lowest rate beyond it.
    pub(crate) within: Option<f64>,
    beyond: Option<f64>,
}

impl RateSearch {
    pub(crate) fn new(start: f64) -> Self {
        Self { start, within: None, beyond: None }
    }

    /// Returns the next rate to try, or `None` when the bounds are close.
    pub(crate) fn next(&self) -> Option<f64> {
        match (self.within, self.beyond) {
            (None, None) => Some(self.start),
            (Some(within), None) => Some(within * 2.0),
            (None, Some(beyond)) => Some(beyond / 2.0).filter(|rate| *rate >= 1.0),
            (Some(within), Some(beyond)) if beyond / within <= PRECISION => None,
            (Some(within), Some(beyond)) => Some((within * beyond).sqrt()),
        }
    }

    pub(crate) fn note(&mut self, rate: f64, is_within: bool) {
        let bound = if is_within { &mut self.within } else { &mut self.beyond };
        *bound = Some(rate);
    }
}

impl RateLimitReport {
    fn new(
        args: &RateLimitArgs,
        load: &BenchLoad,
        highest_rate: Option<f64>,
        steps: Vec<RateLimitStep>,
    ) -> Self {
        let found = match highest_rate {
            Some(rate) => format!("{} records/s", grouped(rate.round())),
            None => "no rate".to_owned(),
        };
        let mut title = format!(
            "limit: {found} with p99 within {:?}, {} of {} B x {}, {} clients x {} in flight",
            args.max_p99,
            load.mode.name(),
            load.size,
            load.batch_size,
            load.clients,
            load.in_flight
        );
        if let Some(step) = steps.last() {
            title += &format!("; storage {}, acks {}", step.run.storage, step.run.durability);
        }
        let max_p99_us = args.max_p99.as_secs_f64() * 1e6;
        Self { title, max_p99_us, highest_rate, steps, notes: Vec::new() }
    }
}

impl ModeResult for RateLimitReport {
    fn mode(&self) -> &'static str {
        "limit"
    }

    /// Lost records come first; without any rate the search has failed.
    fn exit_code(&self) -> u8 {
        let codes = self.steps.iter().map(|step| step.run.exit_code());
        let is_lost = codes.into_iter().any(|code| code == exit::NOT_AS_ACKED);
        match (is_lost, self.highest_rate) {
            (true, _) => exit::NOT_AS_ACKED,
            (false, None) => exit::FAILED,
            (false, Some(_)) => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the highest rate found where all up to `limit` are within, and the number of steps.
    fn search(start: f64, limit: f64) -> (Option<f64>, usize) {
        let mut search = RateSearch::new(start);
        let mut steps = 0;
        while let Some(rate) = search.next() {
            search.note(rate, rate <= limit);
            steps += 1;
            assert!(steps <= STEPS_MAX);
        }
        (search.within, steps)
    }

    #[test]
    fn search_ends_close_below_the_limit() {
        for (start, limit) in [(1000.0, 123_456.0), (1e6, 1234.0), (10.0, 10.0), (1.0, 1e8)] {
            let (found, steps) = search(start, limit);
            let found = found.unwrap();
            assert!(found <= limit && limit / found <= PRECISION, "{start} {limit}: {found}");
            assert!(steps < STEPS_MAX, "{steps} steps");
        }
    }

    #[test]
    fn search_without_any_rate_ends() {
        assert_eq!(search(1000.0, 0.0).0, None);
    }

    /// Searches a system with one queue: its latency grows without bound near its capacity.
    fn search_queue(capacity: f64, max_p99: Duration, fails_above: f64) -> f64 {
        let mut search = RateSearch::new(1000.0);
        while let Some(rate) = search.next() {
            let served = rate.min(capacity);
            let counts = StepCounts {
                due: rate * 5.0,
                records: served * 5.0,
                errors: u64::from(rate > fails_above),
                requests: (served * 5.0) as u64,
                missed: ((rate - capacity).max(0.0) * 5.0) as u64,
                // 99 % of the times of such a queue are below 4.6 times their mean.
                p99_us: Some(4.6e6 / (capacity - served).max(1e-3)),
            };
            search.note(rate, counts.beyond(max_p99).is_none());
        }
        search.within.unwrap()
    }

    #[test]
    fn search_finds_the_rate_where_a_queue_exceeds_the_bound() {
        // With 100,000 a second, p99 is 5 ms where 920 a second are left.
        let (ms, unlimited) = (Duration::from_millis, f64::INFINITY);
        for (max_p99, fails_above, limit) in [
            (ms(5), unlimited, 99_080.0),
            (Duration::from_micros(100), unlimited, 54_000.0),
            // Errors and sends that were not made count against the rate, whatever the bound is.
            (ms(5), 20_000.0, 20_000.0),
            (ms(100_000_000), unlimited, 102_000.0),
        ] {
            let rate = search_queue(100_000.0, max_p99, fails_above);
            assert!(rate <= limit * 1.001 && limit / rate <= PRECISION, "{rate}, not {limit}");
        }
    }

    #[test]
    fn run_without_success_is_beyond_any_bound() {
        let counts =
            StepCounts { due: 0.0, records: 0.0, errors: 0, requests: 0, missed: 0, p99_us: None };
        assert_eq!(counts.beyond(Duration::from_secs(1)), Some("no request succeeded"));
    }

    #[test]
    fn rate_that_was_not_sent_is_beyond_any_bound() {
        let sent = |records: f64| StepCounts {
            due: 5000.0,
            records,
            errors: 0,
            requests: records as u64,
            missed: 0,
            p99_us: Some(1.0),
        };
        let bound = Duration::from_secs(1);
        assert_eq!(sent(4950.0).beyond(bound), None);
        assert_eq!(sent(4000.0).beyond(bound), Some("rate not reached"));
    }
}
