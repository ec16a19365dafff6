//! `retries`: forces producers to retry batches that may have been applied, by dropping responses
//! or killing the leader.
//!
//! The log must have no duplicates and no gaps, in the original order.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::ensure;
use clap::Args;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use tokio::time::{Instant, sleep};

use super::CommonArgs;
use super::test_bed::TestBed;
use crate::logger::Logger;
use crate::proxy::LinkMode;
use crate::workload::WorkloadShape;

/// One in this many is a kill; the others drop responses.
const KILL_EVERY: u32 = 10;

/// Longest wait for responses of a node to drop.
const DROP_MAX: Duration = Duration::from_secs(5);

/// Forced retries between two full checks.
const CHECK_EVERY: u32 = 100;

/// Options of `retries`.
#[derive(Debug, Clone, Args)]
pub struct RetriesArgs {
    /// Cluster, seed and limits.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Number of forced retries; each hits all batches in flight at a leader
    #[arg(long, default_value_t = 200)]
    pub count: u32,
}

pub(super) async fn run(args: RetriesArgs, program: PathBuf) -> anyhow::Result<()> {
    let logger = Logger::new(false);
    // Only idempotent producers: an unknown outcome would hide a violation.
    let shape = WorkloadShape {
        sessions: 8,
        unary: 6,
        plain: 0,
        pace: Duration::from_millis(5),
        ..WorkloadShape::default()
    };
    let mut test_bed = TestBed::start(&args.common, program, logger, shape, true).await?;
    let result = execute(&args, &mut test_bed).await;
    test_bed.end(result).await
}

async fn execute(args: &RetriesArgs, test_bed: &mut TestBed) -> anyhow::Result<()> {
    let mut rng = StdRng::seed_from_u64(args.common.seed);
    let (mut forced, mut kills) = (0, 0);
    test_bed.start_workload()?;
    test_bed.progress().await?;
    while forced < args.count && !test_bed.is_over() {
        let leaders: Vec<u64> =
            test_bed.cluster.leaders().await.values().map(|(node, _)| *node).collect();
        let Some(leader) = leaders.choose(&mut rng).copied() else {
            sleep(Duration::from_millis(50)).await;
            continue;
        };
        if (forced + 1).is_multiple_of(KILL_EVERY) {
            test_bed.cluster.kill(&[leader]).await?;
            test_bed.cluster.heal()?;
            test_bed.logger.log(format_args!("{}: killed {leader}", forced + 1));
            test_bed.progress().await?;
            kills += 1;
        } else if !drop_responses(test_bed, leader, &mut rng).await? {
            continue;
        }
        forced += 1;
        if forced % CHECK_EVERY == 0 {
            test_bed.check_replicas().await?;
            test_bed.start_workload()?;
            test_bed.progress().await?;
        }
    }
    test_bed.progress().await?;
    test_bed.check_replicas().await?;
    test_bed.log_stats();
    let duplicates = test_bed.context.stats.duplicates.load(Ordering::Relaxed);
    test_bed.logger.log(format_args!(
        "{forced} forced retries ({kills} by a kill); {duplicates} retries met their first copy"
    ));
    ensure!(
        forced < 20 || duplicates > 0,
        "no retry met its first copy: the harness forced no retries"
    );
    Ok(())
}

/// Drops responses of one node until some were dropped, and a little longer. False if none came.
async fn drop_responses(
    test_bed: &mut TestBed,
    node: u64,
    rng: &mut StdRng,
) -> anyhow::Result<bool> {
    let before = test_bed.cluster.bytes_dropped(node);
    test_bed.cluster.set_client_link(node, LinkMode::DropResponses);
    let deadline = Instant::now() + DROP_MAX;
    while test_bed.cluster.bytes_dropped(node) == before && Instant::now() < deadline {
        test_bed.cluster.check_running()?;
        sleep(Duration::from_millis(1)).await;
    }
    sleep(Duration::from_millis(rng.random_range(5..60))).await;
    test_bed.cluster.set_client_link(node, LinkMode::Pass);
    let lost = test_bed.cluster.bytes_dropped(node) - before;
    if lost > 0 {
        test_bed.logger.log(format_args!("dropped {lost} bytes of responses of {node}"));
    }
    test_bed.progress().await?;
    Ok(lost > 0)
}
