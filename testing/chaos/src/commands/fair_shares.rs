//! `fair-shares`: measures a client of one principal beside another principal that floods the node,
//! and beside many principals that do not.
//!
//! All processes share one host. The many principals show the cost of a busy host alone: their
//! calls are of the same kind, and each keeps few of them open.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use serde::Serialize;
use tokio::time::{Instant, sleep};

use super::flood::{ClientLatencies, times};
use super::parse_duration;
use crate::flood::{
    CheckedCallers, Neighbour, NeighbourCalls, Neighbours, NodeUnderTest, NodeUnderTestOptions,
    ProbeClient,
};
use crate::logger::Logger;
use crate::output::print_result;

/// Time for the neighbours' calls to pile up before a measurement.
const SETTLE: Duration = Duration::from_millis(500);

/// Options of `fair-shares`.
#[derive(Debug, Clone, Args)]
pub struct FairSharesArgs {
    /// Kinds of calls of the flooding principal, in turn [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub calls: Vec<NeighbourCalls>,

    /// Connections of the flooding principal
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    pub connections: u16,

    /// Calls that it keeps open on each of them
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..))]
    pub in_flight: u16,

    /// Principals that do not flood, with two open calls each
    #[arg(long, default_value_t = 8)]
    pub principals: usize,

    /// Duration of each measurement ("5s")
    #[arg(long, default_value = "5s", value_parser = parse_duration)]
    pub duration: Duration,

    /// Memory limit of the node in MiB
    #[arg(long, default_value_t = 512)]
    pub memory_limit_mib: u64,

    /// Highest allowed p99 of appends beside the flood, as a multiple of the p99 alone
    #[arg(long, default_value_t = 3.0)]
    pub p99_factor_max: f64,

    /// Report latencies without judging them, for a shared host
    #[arg(long)]
    pub no_latency: bool,

    /// Print the result as JSON on standard output
    #[arg(long)]
    pub json: bool,
}

/// One measurement.
#[derive(Debug, Serialize)]
struct Measured {
    /// The neighbours' calls; none if the client was alone.
    calls: Option<String>,
    /// Number of principals beside the client.
    principals: usize,
    #[serde(flatten)]
    seen: ClientLatencies,
    /// p99 of appends as a multiple of the p99 alone.
    factor: f64,
    /// Calls of the neighbours that were answered and that failed, per second.
    answered_per_second: u64,
    failed_per_second: u64,
}

pub(super) async fn run(args: FairSharesArgs, program: PathBuf) -> anyhow::Result<()> {
    let logger = Logger::new(args.json);
    let dir = tempfile::tempdir().context("create a directory for the node")?;
    let callers = CheckedCallers { quota_mib: None, neighbours: args.principals };
    let options = NodeUnderTestOptions {
        memory_limit_mib: args.memory_limit_mib,
        pace: None,
        callers: Some(callers),
        has_tls: false,
    };
    let node = NodeUnderTest::start(&program, dir.path(), options).await?;
    let measured = measure_all(&args, logger, &node).await;
    let stopped = node.stop().await;
    let measured = measured?;
    stopped?;
    if args.json {
        print_result(serde_json::to_string(&measured)?)?;
    }
    judge(&args, &measured)
}

async fn measure_all(
    args: &FairSharesArgs,
    logger: Logger,
    node: &NodeUnderTest,
) -> anyhow::Result<Vec<Measured>> {
    node.fill().await.context("write records for the readers")?;
    let probe = ProbeClient::connect(node.address(), node.probe_token()).await?;
    // Warms up the node and the client.
    probe.measure(SETTLE).await;
    let alone = Measured::new(None, 0, ClientLatencies::new(&probe.measure(args.duration).await));
    log(logger, &alone);
    let mut all = vec![alone];
    let flooding = [Neighbour {
        token: node.abusive_token(),
        connections: args.connections.into(),
        in_flight: args.in_flight.into(),
    }];
    let quiet = node.neighbour_tokens().iter().cloned();
    let quiet: Vec<_> =
        quiet.map(|token| Neighbour { token, connections: 1, in_flight: 2 }).collect();
    let kinds = if args.calls.is_empty() { NeighbourCalls::value_variants() } else { &args.calls };
    for calls in kinds {
        for neighbours in [&quiet[..], &flooding] {
            let running = Neighbours::start(node.address(), neighbours, *calls).await?;
            sleep(SETTLE).await;
            let (begun, before) = (Instant::now(), running.calls());
            let seen = ClientLatencies::new(&probe.measure(args.duration).await);
            let (after, seconds) = (running.calls(), begun.elapsed().as_secs_f64());
            drop(running);
            let per_second = |after, before| ((after - before) as f64 / seconds) as u64;
            let name = calls.to_possible_value().map(|it| it.get_name().to_owned());
            let mut measured = Measured::new(name, neighbours.len(), seen);
            measured.factor = times(measured.seen.append_p99_us, all[0].seen.append_p99_us);
            measured.answered_per_second = per_second(after.0, before.0);
            measured.failed_per_second = per_second(after.1, before.1);
            log(logger, &measured);
            all.push(measured);
            // The calls that were open end.
            sleep(SETTLE).await;
        }
    }
    Ok(all)
}

impl Measured {
    fn new(calls: Option<String>, principals: usize, seen: ClientLatencies) -> Self {
        let (answered_per_second, failed_per_second) = (0, 0);
        Self { calls, principals, seen, factor: 1.0, answered_per_second, failed_per_second }
    }
}

fn log(logger: Logger, measured: &Measured) {
    let Measured { calls, principals, seen, factor, .. } = measured;
    let beside = match calls {
        None => "alone".to_owned(),
        Some(calls) => format!("beside {calls} of {principals} principals"),
    };
    logger.log(format_args!(
        "{beside}: append p50 {} us p99 {} us, {factor:.1} times alone; fetch p50 {} us p99 {} us; \
         {} calls, {} errors; neighbours {}/s answered, {}/s failed",
        seen.append_p50_us,
        seen.append_p99_us,
        seen.fetch_p50_us,
        seen.fetch_p99_us,
        seen.calls,
        seen.errors,
        measured.answered_per_second,
        measured.failed_per_second
    ));
}

fn judge(args: &FairSharesArgs, all: &[Measured]) -> anyhow::Result<()> {
    let mut slower = Vec::new();
    for Measured { calls, principals, seen, factor, .. } in all {
        let beside = calls.as_deref().unwrap_or("no calls");
        ensure!(seen.errors == 0, "{} requests failed beside {beside}", seen.errors);
        ensure!(seen.calls > 0, "no request was answered beside {beside}");
        if *principals == 1 && *factor > args.p99_factor_max {
            slower.push(format!("beside {beside}: {factor:.1} times"));
        }
    }
    ensure!(
        args.no_latency || slower.is_empty(),
        "p99 of appends relative to the p99 alone: {}",
        slower.join(", ")
    );
    Ok(())
}
