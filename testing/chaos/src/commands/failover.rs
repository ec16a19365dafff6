//! `failover`: kills a leader under one client with one batch in flight per partition.
//!
//! It measures what an application sees: the time from the kill to the ack of a batch that was sent
//! after the leader was dead. Such a batch also waits for the one before it. `--pauses` stops
//! leaders for a moment (SIGSTOP) instead and counts the elections.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{bail, ensure};
use clap::Args;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use serde::Serialize;
use tokio::time::{Instant, sleep, timeout};

use super::ack_probe::{AckProbe, percentile};
use super::test_bed::{READY_MAX, TestBed};
use super::{CommonArgs, parse_duration};
use crate::cluster::ShardLeaders;
use crate::logger::Logger;
use crate::output::print_result;
use crate::workload::{TOPIC, WorkloadShape};

/// A partition without an ack for this long after a kill is a failure.
const OUTAGE_MAX: Duration = Duration::from_secs(30);

/// Time to write between kills, so that connections and caches are warm.
const WARM: Duration = Duration::from_millis(500);

/// Options of `failover`.
#[derive(Debug, Clone, Args)]
pub struct FailoverArgs {
    /// Cluster, seed and limits.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Number of leader kills
    #[arg(long, default_value_t = 20)]
    pub kills: u32,

    /// Number of leaders to pause for 0.3 to 2 s after the kills
    #[arg(long, default_value_t = 0)]
    pub pauses: u32,

    /// Fail if the p99 is longer ("750ms")
    #[arg(long, value_parser = parse_duration)]
    pub p99_max: Option<Duration>,

    /// Fail if more elections in a hundred fail
    #[arg(long)]
    pub failed_percent_max: Option<f64>,

    /// Print the result as JSON on standard output
    #[arg(long)]
    pub json: bool,
}

/// Result in milliseconds.
#[derive(Debug, Serialize)]
struct FailoverReport {
    nodes: u64,
    kills: u32,
    /// Partitions that lost their leader, over all kills.
    samples: usize,
    p50_ms: u128,
    p99_ms: u128,
    max_ms: u128,
    /// Shards that lost their leader, over all kills.
    elections: u64,
    /// Terms that passed without a leader meanwhile: split votes and failed candidates.
    failed_elections: u64,
    /// Leaders that were paused, and the shards that they led.
    pauses: u32,
    paused_leaderships: u64,
    /// Terms that began because of the pauses.
    elections_of_pauses: u64,
    /// Batches of this client that failed.
    errors: u64,
    /// Longest time between two acks around a kill, in partitions that kept their leader.
    others_max_ms: u128,
}

/// Counts the elections that follow the kills.
#[derive(Debug, Clone, Copy, Default)]
struct Elections {
    total: u64,
    failed: u64,
}

impl Elections {
    /// Compares the leaders, with their terms, before and after the loss of a node.
    fn count(&mut self, lost: u64, before: &ShardLeaders, after: &ShardLeaders) {
        for (shard, (_, term)) in before.iter().filter(|(_, (node, _))| *node == lost) {
            let Some((_, now)) = after.get(shard).filter(|(_, now)| now > term) else { continue };
            self.total += 1;
            self.failed += now - term - 1;
        }
    }
}

/// Elections that followed the pauses.
#[derive(Debug, Clone, Copy, Default)]
struct PauseCounts {
    pauses: u32,
    leaderships: u64,
    terms: u64,
}

/// Pauses leaders and counts the new terms of the shards that they led.
async fn pause_leaders(
    args: &FailoverArgs,
    test_bed: &mut TestBed,
    rng: &mut StdRng,
) -> anyhow::Result<PauseCounts> {
    let mut counts = PauseCounts::default();
    while counts.pauses < args.pauses && !test_bed.is_over() {
        sleep(WARM).await;
        let before = test_bed.cluster.leaders().await;
        let led: Vec<u64> = before.values().map(|(node, _)| *node).collect();
        let Some(paused) = led.choose(rng).copied() else { continue };
        let pause = Duration::from_millis(rng.random_range(300..=2_000));
        test_bed.cluster.pause(paused)?;
        sleep(pause).await;
        test_bed.cluster.resume(paused)?;
        test_bed.cluster.wait_until_healthy(READY_MAX).await?;
        let after = test_bed.cluster.leaders().await;
        let (mut leaderships, mut terms) = (0, 0);
        for (shard, (_, term)) in before.iter().filter(|(_, (node, _))| *node == paused) {
            leaderships += 1;
            terms += after.get(shard).map_or(0, |(_, now)| now.saturating_sub(*term));
        }
        counts.pauses += 1;
        counts.leaderships += leaderships;
        counts.terms += terms;
        test_bed.logger.log(format_args!(
            "paused {paused} for {} ms: {terms} new terms in {leaderships} shards",
            pause.as_millis()
        ));
    }
    Ok(counts)
}

pub(super) async fn run(args: FailoverArgs, program: PathBuf) -> anyhow::Result<()> {
    let logger = Logger::new(args.json);
    let shape = WorkloadShape::default();
    let mut test_bed = TestBed::start(&args.common, program, logger, shape, false).await?;
    let result = execute(&args, &mut test_bed).await;
    test_bed.end(result).await
}

async fn execute(args: &FailoverArgs, test_bed: &mut TestBed) -> anyhow::Result<()> {
    let mut rng = StdRng::seed_from_u64(args.common.seed);
    let client = test_bed.context.client()?;
    let shards = test_bed.shards().await?;
    let mut probe = AckProbe::start(&client, TOPIC, test_bed.context.partitions);
    let mut acks = probe.partitions();
    let (mut outages, mut others) = (Vec::new(), Duration::ZERO);
    let (mut kills, mut elections) = (0, Elections::default());
    while kills < args.kills && !test_bed.is_over() {
        sleep(WARM).await;
        let leaders = test_bed.cluster.leaders().await;
        let led: Vec<u64> = shards.iter().filter_map(|s| Some(leaders.get(s)?.0)).collect();
        let Some(victim) = led.choose(&mut rng).copied() else { continue };
        let is_hit = |shard: &u32| leaders.get(shard).is_some_and(|(node, _)| *node == victim);
        let killed = Instant::now();
        test_bed.cluster.kill(&[victim]).await?;
        let dead = Instant::now();
        kills += 1;
        let mut lost = Vec::new();
        for (shard, last_ack) in shards.iter().zip(&mut acks) {
            let next = timeout(OUTAGE_MAX, last_ack.wait_for(|ack| ack.sent >= dead)).await;
            let Ok(Ok(ack)) = next else {
                bail!("NO PROGRESS: no ack for {OUTAGE_MAX:?} after node {victim} was killed");
            };
            if is_hit(shard) {
                lost.push(ack.at - killed);
            } else {
                others = others.max(ack.at - ack.sent);
            }
        }
        let longest = lost.iter().max().copied().unwrap_or_default();
        test_bed.logger.log(format_args!(
            "{kills}: killed {victim}, {} partitions; longest without an ack {} ms",
            lost.len(),
            longest.as_millis()
        ));
        outages.extend(lost);
        elections.count(victim, &leaders, &test_bed.cluster.leaders().await);
        test_bed.cluster.start_node(victim)?;
        test_bed.cluster.wait_until_healthy(READY_MAX).await?;
    }
    let pauses = pause_leaders(args, test_bed, &mut rng).await?;
    probe.stop().await?;
    let errors = probe.take().errors;
    let samples = outages.len();
    let mut at = |percent| percentile(&mut outages, percent).as_millis();
    let report = FailoverReport {
        nodes: args.common.nodes,
        kills,
        samples,
        p50_ms: at(50),
        p99_ms: at(99),
        max_ms: at(100),
        elections: elections.total,
        failed_elections: elections.failed,
        pauses: pauses.pauses,
        paused_leaderships: pauses.leaderships,
        elections_of_pauses: pauses.terms,
        errors,
        others_max_ms: others.as_millis(),
    };
    log(args, test_bed, &report)?;
    ensure!(
        (kills, pauses.pauses) == (args.kills, args.pauses),
        "only {kills} of {} kills and {} of {} pauses before --duration-max",
        args.kills,
        pauses.pauses,
        args.pauses
    );
    if let Some(most) = args.p99_max {
        ensure!(report.p99_ms <= most.as_millis(), "p99 is {} ms", report.p99_ms);
    }
    if let Some(most) = args.failed_percent_max {
        let percent = 100.0 * report.failed_elections as f64 / report.elections.max(1) as f64;
        ensure!(percent <= most, "{percent:.1} % of the elections failed, at most {most} % may");
    }
    Ok(())
}

fn log(args: &FailoverArgs, test_bed: &TestBed, report: &FailoverReport) -> anyhow::Result<()> {
    if args.json {
        print_result(serde_json::to_string(report)?)?;
    } else {
        test_bed.logger.log(format_args!(
            "time to the next ack over {} partitions that lost their leader in {} kills: p50 {} \
             ms, p99 {} ms, max {} ms; {} elections, {} more without a leader; {} pauses of \
             leaders of {} shards, {} new terms; {} errors; slowest ack of the other partitions {} \
             ms",
            report.samples,
            report.kills,
            report.p50_ms,
            report.p99_ms,
            report.max_ms,
            report.elections,
            report.failed_elections,
            report.pauses,
            report.paused_leaderships,
            report.elections_of_pauses,
            report.errors,
            report.others_max_ms
        ));
    }
    Ok(())
}
