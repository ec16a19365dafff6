//! `flood`: overloads a node with thousands of connections, readers that do not read, unthrottled
//! writers and abusive clients.
//!
//! It measures the latency of a well-behaved client and the peak memory of the node.
//!
//! All processes share one host, so requests are slower even if the node does nothing wrong. A
//! second node without flood runs on the same host as a reference: a second client makes the same
//! requests to it at the same time, and the two latencies are compared.
//!
//! With `--quota-mib` both nodes check their callers. The abusive clients are then one principal
//! with a quota, and the well-behaved client is another one.
//!
//! A node accepts as many connections as its memory limit allows. Connections beyond that must be
//! closed at once; within it none may be closed.

mod resets;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;
use tokio::time::{Instant, sleep};

use super::parse_duration;
use crate::flood::{
    AbusePattern, AbusiveClients, CallTimes, CheckedCallers, NewClients, NodeUnderTest,
    NodeUnderTestOptions, ProbeClient, connect_new_clients,
};
use crate::logger::Logger;
use crate::output::print_result;

/// Allowed memory above the limit: code, and memory that the allocator has not returned.
const OVER_LIMIT_PERCENT: u64 = 10;

/// Files that each of the two processes needs beside the connections.
const FILES_BESIDE: usize = 512;

/// Connections that the kernel may have accepted before the node.
const ACCEPT_BACKLOG_MAX: u64 = 8;

/// Payload of a batch of the writers.
const BATCH_BYTES: u64 = 100 << 10;

/// Time beyond a phase for which the writers' quota may be used: the bucket of one second that is
/// full before it, and the last calls.
const QUOTA_SECONDS_BEYOND: f64 = 3.0;

/// Refusals because of a quota; an overloaded node refuses calls too.
const OVER_QUOTA: &str = "helix_over_quota_total";

const ALONE: &str = "alone";
const BESIDE_HANDSHAKES: &str = "beside half-open TLS handshakes";
const BEFORE: &str = "beside the writers";
const AGAIN: &str = "alone again";
const BESIDE_ALL: &str = "beside all";
const BESIDE_ABUSIVE_CLIENTS: &str = "beside all and abusive clients";

/// Options of `flood`.
#[derive(Debug, Clone, Args)]
pub struct FloodArgs {
    /// Idle connections
    #[arg(long, default_value_t = 10_000)]
    pub connections: usize,

    /// Readers that subscribe or fetch, but do not read
    #[arg(long, default_value_t = 1_000)]
    pub readers: usize,

    /// Writers with one connection and four 100 KiB batches in flight each
    #[arg(long, default_value_t = 32)]
    pub writers: usize,

    /// Connections with abusive HTTP/2 traffic
    #[arg(long, default_value_t = 16)]
    pub abusive_clients: usize,

    /// TLS handshakes that are left half open, during a phase of their own
    #[arg(long, default_value_t = 10_000)]
    pub half_open: usize,

    /// Quota of the abusive clients, in MiB of requests per second; the nodes then check callers
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub quota_mib: Option<u64>,

    /// Patterns of abusive traffic, in turn [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub harm: Vec<AbusePattern>,

    /// Duration of each measured phase ("20s")
    #[arg(long, default_value = "20s", value_parser = parse_duration)]
    pub duration: Duration,

    /// Memory limit of the node in MiB; 3072 fits all default connections
    #[arg(long, default_value_t = 512)]
    pub memory_limit_mib: u64,

    /// Highest allowed p99 of requests, as a multiple of the reference node's; with `--resets`, of
    /// the p99 alone
    #[arg(long, default_value_t = 2.0)]
    pub p99_factor_max: f64,

    /// `--pace` of the flooded node; with 0 the run should fail
    #[arg(long)]
    pub pace: Option<u32>,

    /// Instead of all that, reset calls in every mix of connections, requests and reading
    #[arg(long)]
    pub resets: bool,

    /// Connections of each mix of resets
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16, 64])]
    pub reset_connections: Vec<u16>,

    /// Report latencies without judging them, for a shared host
    #[arg(long)]
    pub no_latency: bool,

    /// Print the result as JSON on standard output
    #[arg(long)]
    pub json: bool,
}

/// One phase of the run, as the probe client saw it.
#[derive(Debug, Serialize)]
struct FloodPhase {
    name: &'static str,
    #[serde(flatten)]
    seen: ClientLatencies,
    /// At the reference node.
    quiet: ClientLatencies,
    /// Measured length of the phase.
    seconds: f64,
    /// Batches of the flood that were acknowledged and rejected.
    flood_acked: u64,
    flood_refused: u64,
    /// Calls that the node refused because of a quota.
    over_quota: u64,
    rss_mib: u64,
    /// CPU use of the node's process, in percent of one core.
    cpu_percent: u64,
}

/// Latencies of one client.
#[derive(Debug, Serialize)]
pub(super) struct ClientLatencies {
    pub(super) calls: usize,
    pub(super) errors: u64,
    pub(super) append_p50_us: u128,
    pub(super) append_p99_us: u128,
    pub(super) fetch_p50_us: u128,
    pub(super) fetch_p99_us: u128,
}

#[derive(Debug, Serialize)]
struct FloodReport {
    memory_limit_mib: u64,
    peak_rss_mib: u64,
    /// As seen by the clients.
    connections_open: usize,
    /// Idle connections among these; readers are excluded, as the node may have ended them.
    connections_idle: usize,
    connections_refused: usize,
    /// As seen by the node, including the probe client.
    connections_served: u64,
    /// Number of times that clients hit each limit.
    limits_met: BTreeMap<String, u64>,
    readers_ended: usize,
    /// Half-open TLS handshakes that ended, at the flooded node.
    handshakes_ended: u64,
    /// Clients that connected with TLS beside the half-open handshakes.
    new_clients: NewClients,
    parts: Vec<FloodPhase>,
}

pub(super) async fn run(args: FloodArgs, program: PathBuf) -> anyhow::Result<()> {
    let logger = Logger::new(args.json);
    open_files(
        args.connections + args.readers + args.writers + args.abusive_clients + FILES_BESIDE,
    )?;
    if args.resets {
        return resets::run(&args, logger, &program).await;
    }
    let dir = tempfile::tempdir().context("create a directory for the node")?;
    let quiet_dir = tempfile::tempdir().context("create a directory for the reference node")?;
    let options = NodeUnderTestOptions {
        memory_limit_mib: args.memory_limit_mib,
        pace: None,
        callers: args.quota_mib.map(|quota_mib| CheckedCallers {
            quota_mib: Some(quota_mib),
            ..CheckedCallers::default()
        }),
        has_tls: args.half_open > 0,
    };
    let flooded = NodeUnderTestOptions { pace: args.pace, ..options };
    let mut node = NodeUnderTest::start(&program, dir.path(), flooded).await?;
    let quiet = NodeUnderTest::start(&program, quiet_dir.path(), options).await?;
    let result = execute(&args, logger, &mut node, &quiet).await;
    let stopped = [node.stop().await, quiet.stop().await];
    let report = result?;
    stopped.into_iter().collect::<anyhow::Result<()>>()?;
    print_report(&args, logger, &report)?;
    judge(&args, &report)
}

async fn execute(
    args: &FloodArgs,
    logger: Logger,
    node: &mut NodeUnderTest,
    quiet: &NodeUnderTest,
) -> anyhow::Result<FloodReport> {
    node.fill().await.context("write records for the readers")?;
    let probe_client = ProbeClient::connect(node.address(), node.probe_token()).await?;
    let elsewhere = ProbeClient::connect(quiet.address(), quiet.probe_token()).await?;
    let mut parts = Vec::new();
    let mut measure = async |name, abusive_clients: &AbusiveClients, node: &mut NodeUnderTest| {
        let (begun, cpu) = (Instant::now(), node.cpu().await?);
        let over_quota = node.metric(OVER_QUOTA).await?;
        let before = abusive_clients.writes();
        let (latencies, others) =
            tokio::join!(probe_client.measure(args.duration), elsewhere.measure(args.duration));
        let after = abusive_clients.writes();
        let used = node.cpu().await?.saturating_sub(cpu);
        let over_quota = node.metric(OVER_QUOTA).await? - over_quota;
        let seconds = begun.elapsed().as_secs_f64();
        let part = FloodPhase {
            name,
            seen: ClientLatencies::new(&latencies),
            quiet: ClientLatencies::new(&others),
            seconds,
            flood_acked: after.0 - before.0,
            flood_refused: after.1 - before.1,
            over_quota,
            rss_mib: node.rss_mib()?,
            cpu_percent: (100.0 * used.as_secs_f64() / seconds) as u64,
        };
        log(logger, &part, parts.first());
        parts.push(part);
        node.is_alive()
    };

    let mut abusive_clients = AbusiveClients::new(node.address(), node.abusive_token())?;
    measure(ALONE, &abusive_clients, node).await?;
    let (mut handshakes_ended, mut new_clients) = (0, NewClients::default());
    if args.half_open > 0 {
        abusive_clients.begin_handshakes(args.half_open, args.duration);
        let connecting = connect_new_clients(node.client_with_tls(), args.duration);
        let measuring = measure(BESIDE_HANDSHAKES, &abusive_clients, node);
        let (measured, connected) = tokio::join!(measuring, connecting);
        measured?;
        new_clients = connected;
        handshakes_ended = node.wait_for_handshakes(args.half_open).await?;
    }
    abusive_clients.write(args.writers).await?;
    // At the rate of a quota that takes minutes.
    if args.writers > 0 && !args.no_latency && args.quota_mib.is_none() {
        node.wait_for_recycling().await?;
    }
    measure(BEFORE, &abusive_clients, node).await?;
    abusive_clients.open_stalled_readers(args.readers).await;
    abusive_clients.idle(args.connections).await;
    let (connections_open, connections_refused) =
        (abusive_clients.open(), abusive_clients.refused());
    let connections_idle = abusive_clients.idle_open();
    let connections_served = node.metric("helix_client_connections").await?;
    logger.log(format_args!(
        "{connections_open} connections, {connections_refused} refused; the node has \
         {connections_served}"
    ));
    measure(BESIDE_ALL, &abusive_clients, node).await?;
    abusive_clients.abuse(args.abusive_clients, patterns(args));
    measure(BESIDE_ABUSIVE_CLIENTS, &abusive_clients, node).await?;
    let readers_ended = abusive_clients.readers_ended().await;
    let limits_met = node.limits_met().await?;
    abusive_clients.stop().await;
    // The resources of the abusive clients must be free again.
    sleep(Duration::from_secs(1)).await;
    let none = AbusiveClients::new(node.address(), node.abusive_token())?;
    measure(AGAIN, &none, node).await?;
    Ok(FloodReport {
        memory_limit_mib: args.memory_limit_mib,
        peak_rss_mib: node.peak_rss_mib()?,
        connections_open,
        connections_idle,
        connections_refused,
        connections_served,
        limits_met,
        readers_ended,
        handshakes_ended,
        new_clients,
        parts,
    })
}

fn patterns(args: &FloodArgs) -> &[AbusePattern] {
    if args.harm.is_empty() { AbusePattern::value_variants() } else { &args.harm }
}

/// Raises the limit of open files for this process and the node that it starts.
fn open_files(wanted: usize) -> anyhow::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    let wanted = wanted as u64;
    if limit.current.is_none_or(|current| current >= wanted) {
        return Ok(());
    }
    ensure!(
        limit.maximum.is_none_or(|most| most >= wanted),
        "this takes {wanted} open files, and a process may have {} here: raise the hard limit \
         (ulimit -Hn), or ask for fewer --connections and --readers",
        limit.maximum.unwrap_or_default()
    );
    setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), ..limit })
        .context("raise the limit of open files")
}

fn log(logger: Logger, part: &FloodPhase, alone: Option<&FloodPhase>) {
    let alone = alone.map_or_else(String::new, |alone| {
        let of = |seen: fn(&ClientLatencies) -> u128| times(seen(&part.seen), seen(&alone.seen));
        let (append, fetch) = (of(|it| it.append_p99_us), of(|it| it.fetch_p99_us));
        format!(", {append:.1} and {fetch:.1} times {}", alone.name)
    });
    let ClientLatencies { append_p50_us, append_p99_us, fetch_p50_us, fetch_p99_us, .. } =
        part.seen;
    let (append, fetch) = part.factors();
    logger.log(format_args!(
        "{}: append p50 {append_p50_us} us p99 {append_p99_us} us, fetch p50 {fetch_p50_us} us p99 \
         {fetch_p99_us} us: p99 {append:.1} and {fetch:.1} times the reference node{alone}; \
         {} errors; flood {} acked, {} refused; RSS {} MiB, {} % CPU",
        part.name,
        part.seen.errors,
        part.flood_acked,
        part.flood_refused,
        part.rss_mib,
        part.cpu_percent
    ));
}

pub(super) fn times(slow: u128, fast: u128) -> f64 {
    slow as f64 / fast.max(1) as f64
}

impl FloodPhase {
    /// Returns the p99 of appends and fetches as multiples of the reference node's.
    fn factors(&self) -> (f64, f64) {
        (
            times(self.seen.append_p99_us, self.quiet.append_p99_us),
            times(self.seen.fetch_p99_us, self.quiet.fetch_p99_us),
        )
    }
}

impl ClientLatencies {
    pub(super) fn new(latencies: &CallTimes) -> Self {
        let micros = |times: &[Duration], percent| at(times, percent).as_micros();
        Self {
            calls: latencies.appends.len() + latencies.fetches.len(),
            errors: latencies.errors,
            append_p50_us: micros(&latencies.appends, 50),
            append_p99_us: micros(&latencies.appends, 99),
            fetch_p50_us: micros(&latencies.fetches, 50),
            fetch_p99_us: micros(&latencies.fetches, 99),
        }
    }
}

/// Returns a percentile of sorted times.
fn at(times: &[Duration], percent: usize) -> Duration {
    let index = (times.len() * percent).div_ceil(100).saturating_sub(1);
    times.get(index).copied().unwrap_or_default()
}

fn print_report(args: &FloodArgs, logger: Logger, report: &FloodReport) -> anyhow::Result<()> {
    if args.json {
        print_result(serde_json::to_string(report)?)?;
        return Ok(());
    }
    logger.log(format_args!(
        "peak RSS {} MiB, {} % of {} MiB; {} connections were open, {} refused; {} of {} readers \
         ended; limits met: {:?}",
        report.peak_rss_mib,
        100 * report.peak_rss_mib / report.memory_limit_mib,
        report.memory_limit_mib,
        report.connections_open,
        report.connections_refused,
        report.readers_ended,
        args.readers,
        report.limits_met
    ));
    let NewClients { served, failed } = report.new_clients;
    if args.half_open > 0 {
        logger.log(format_args!(
            "{} half-open TLS handshakes ended; beside them {served} new clients were served, \
             {failed} not",
            report.handshakes_ended
        ));
    }
    Ok(())
}

fn judge(args: &FloodArgs, report: &FloodReport) -> anyhow::Result<()> {
    let bound = report.memory_limit_mib * (100 + OVER_LIMIT_PERCENT) / 100;
    ensure!(
        report.peak_rss_mib <= bound,
        "the node's peak RSS is {} MiB, above {bound} MiB",
        report.peak_rss_mib
    );
    // Every connection is served or closed; none waits for a slot.
    ensure!(
        report.connections_idle as u64 <= report.connections_served + ACCEPT_BACKLOG_MAX,
        "clients have {} idle connections, but the node has {}",
        report.connections_idle,
        report.connections_served
    );
    for part in &report.parts {
        for seen in [&part.seen, &part.quiet] {
            ensure!(seen.errors == 0, "{} requests failed {}", seen.errors, part.name);
            ensure!(seen.calls > 0, "no request was answered {}", part.name);
        }
    }
    let NewClients { served, failed } = report.new_clients;
    ensure!(failed == 0, "{failed} of {} new clients were not served", served + failed);
    ensure!(args.half_open == 0 || served > 0, "no new client connected");
    if let Some(quota_mib) = args.quota_mib.filter(|_| args.writers > 0) {
        judge_quota(args, report, quota_mib << 20)?;
    }
    if args.no_latency {
        return Ok(());
    }
    let mut slower = Vec::new();
    for part in &report.parts {
        let (append, fetch) = part.factors();
        for (call, factor) in [("append", append), ("fetch", fetch)] {
            if factor > args.p99_factor_max {
                slower.push(format!("{call} {}: {factor:.1} times", part.name));
            }
        }
    }
    ensure!(slower.is_empty(), "p99 relative to the reference node: {}", slower.join(", "));
    Ok(())
}

/// Checks that the writers met their quota and did not exceed it.
fn judge_quota(args: &FloodArgs, report: &FloodReport, per_second: u64) -> anyhow::Result<()> {
    for part in report.parts.iter().filter(|part| part.name == BEFORE) {
        ensure!(part.over_quota > 0, "the writers were never over their quota");
        ensure!(part.flood_acked > 0, "the writers appended nothing");
        // The last batch of each writer may overdraw the quota.
        let bytes_max = (per_second as f64 * (part.seconds + QUOTA_SECONDS_BEYOND)) as u64;
        let batches_max = bytes_max / BATCH_BYTES + args.writers as u64;
        let acked = part.flood_acked;
        ensure!(acked <= batches_max, "the quota is {batches_max} batches, {acked} were acked");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_recorded_times() {
        let times: Vec<Duration> = (1..=100).map(Duration::from_millis).collect();
        assert_eq!(at(&times, 50), Duration::from_millis(50));
        assert_eq!(at(&times, 99), Duration::from_millis(99));
        assert_eq!(at(&times[..1], 99), Duration::from_millis(1));
        assert_eq!(at(&[], 99), Duration::ZERO);
    }
}
