//! `flood --resets`: calls that are reset, one mix after the other, beside a well-behaved client.
//!
//! The clients that reset calls are one principal, and the well-behaved client is another one. The
//! verdict on each mix is the node's peak memory and the client's p99 as a multiple of its p99
//! alone.

use std::path::Path;

use anyhow::{Context, ensure};
use serde::Serialize;

use super::{ClientLatencies, FloodArgs, OVER_LIMIT_PERCENT, times};
use crate::flood::{
    CheckedCallers, NodeUnderTest, NodeUnderTestOptions, ProbeClient, ResetFlood, ResetMix,
};
use crate::logger::Logger;
use crate::output::print_result;

/// One mix, as the probe client saw it.
#[derive(Debug, Serialize)]
struct MixReport {
    name: String,
    #[serde(flatten)]
    seen: ClientLatencies,
    /// p99 of appends and of fetches as multiples of the p99 alone.
    append_factor: f64,
    fetch_factor: f64,
    /// Highest resident memory until then.
    peak_rss_mib: u64,
}

pub(super) async fn run(args: &FloodArgs, logger: Logger, program: &Path) -> anyhow::Result<()> {
    let dir = tempfile::tempdir().context("create a directory for the node")?;
    let options = NodeUnderTestOptions {
        memory_limit_mib: args.memory_limit_mib,
        pace: args.pace,
        callers: Some(CheckedCallers::default()),
        has_tls: false,
    };
    let mut node = NodeUnderTest::start(program, dir.path(), options).await?;
    let reports = measure(args, logger, &mut node).await;
    let stopped = node.stop().await;
    let reports = reports?;
    stopped?;
    if args.json {
        print_result(serde_json::to_string(&reports)?)?;
    }
    judge(args, &reports)
}

async fn measure(
    args: &FloodArgs,
    logger: Logger,
    node: &mut NodeUnderTest,
) -> anyhow::Result<Vec<MixReport>> {
    let probe = ProbeClient::connect(node.address(), node.probe_token()).await?;
    let alone = ClientLatencies::new(&probe.measure(args.duration).await);
    let (append_p99, fetch_p99) = (alone.append_p99_us, alone.fetch_p99_us);
    let mut reports = Vec::new();
    let mut add = |name, seen: ClientLatencies, node: &NodeUnderTest| {
        let (append_factor, fetch_factor) =
            (times(seen.append_p99_us, append_p99), times(seen.fetch_p99_us, fetch_p99));
        let peak_rss_mib = node.peak_rss_mib()?;
        let report = MixReport { name, seen, append_factor, fetch_factor, peak_rss_mib };
        log(logger, &report);
        reports.push(report);
        Ok::<(), anyhow::Error>(())
    };
    add("alone".to_owned(), alone, node)?;
    for mix in ResetMix::all(&args.reset_connections) {
        let flood = ResetFlood::start(node.address(), mix, node.abusive_header())?;
        let seen = ClientLatencies::new(&probe.measure(args.duration).await);
        drop(flood);
        add(mix.to_string(), seen, node)?;
        node.is_alive()?;
    }
    let again = ClientLatencies::new(&probe.measure(args.duration).await);
    add("alone again".to_owned(), again, node)?;
    Ok(reports)
}

fn log(logger: Logger, report: &MixReport) {
    let MixReport { name, seen, append_factor, fetch_factor, peak_rss_mib } = report;
    logger.log(format_args!(
        "{name}: append p50 {} us p99 {} us, fetch p50 {} us p99 {} us: p99 {append_factor:.1} and \
         {fetch_factor:.1} times alone; {} calls, {} errors; peak RSS {peak_rss_mib} MiB",
        seen.append_p50_us,
        seen.append_p99_us,
        seen.fetch_p50_us,
        seen.fetch_p99_us,
        seen.calls,
        seen.errors
    ));
}

fn judge(args: &FloodArgs, reports: &[MixReport]) -> anyhow::Result<()> {
    let bound = args.memory_limit_mib * (100 + OVER_LIMIT_PERCENT) / 100;
    let mut slower = Vec::new();
    for MixReport { name, seen, append_factor, fetch_factor, peak_rss_mib } in reports {
        ensure!(
            *peak_rss_mib <= bound,
            "the node's peak RSS is {peak_rss_mib} MiB, above {bound} MiB: {name}"
        );
        ensure!(seen.errors == 0, "{} requests failed: {name}", seen.errors);
        ensure!(seen.calls > 0, "no request was answered: {name}");
        if append_factor.max(*fetch_factor) > args.p99_factor_max {
            slower.push(format!("{name}: {append_factor:.1} and {fetch_factor:.1} times"));
        }
    }
    ensure!(
        args.no_latency || slower.is_empty(),
        "p99 relative to the p99 alone: {}",
        slower.join("; ")
    );
    Ok(())
}
