//! `elections`: full load without faults. Leaders should not change; if one does, the log shows
//! whether this host was stalled at that moment.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::Args;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::test_bed::TestBed;
use super::{CommonArgs, parse_duration};
use crate::logger::Logger;
use crate::workload::WorkloadShape;

/// Interval between ticks; the delay of a tick is a stall.
const TICK: Duration = Duration::from_millis(10);

/// Stalls from here on are logged.
const STALL: Duration = Duration::from_millis(100);

const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Options of `elections`.
#[derive(Debug, Clone, Args)]
pub struct ElectionsArgs {
    /// Cluster, seed and limits.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Time to observe ("10m"). All records are kept to be checked: about 8 GB a minute
    #[arg(long, default_value = "10m", value_parser = parse_duration)]
    pub duration: Duration,
}

pub(super) async fn run(args: ElectionsArgs, program: PathBuf) -> anyhow::Result<()> {
    let logger = Logger::new(false);
    let shape = WorkloadShape {
        sessions: 2 * args.common.topic_partitions,
        records_max: 100,
        pace: Duration::from_millis(2),
        has_readers: false,
        ..WorkloadShape::default()
    };
    let mut test_bed = TestBed::start(&args.common, program, logger, shape, false).await?;
    let result = execute(&args, &mut test_bed).await;
    test_bed.end(result).await
}

async fn execute(args: &ElectionsArgs, test_bed: &mut TestBed) -> anyhow::Result<()> {
    test_bed.start_workload()?;
    test_bed.progress().await?;
    let (stalls, longest) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let ticker = tick(test_bed.logger, stalls.clone(), longest.clone());
    let begin = Instant::now();
    let mut terms: BTreeMap<u32, u64> = BTreeMap::new();
    let mut changes = 0;
    while begin.elapsed() < args.duration && !test_bed.is_over() {
        test_bed.cluster.check_running()?;
        for (shard, (node, term)) in test_bed.cluster.leaders().await {
            match terms.insert(shard, term) {
                Some(before) if before < term => {
                    changes += term - before;
                    test_bed.logger.log(format_args!(
                        "shard {shard}: node {node} is leader in term {term}, after term {before}"
                    ));
                }
                _ => {}
            }
        }
        sleep(POLL_INTERVAL).await;
    }
    let looked = begin.elapsed();
    ticker.abort();
    test_bed.check_replicas().await?;
    test_bed.log_stats();
    test_bed.logger.log(format_args!(
        "{changes} changes of leader in {} s over {} shards; {} stalls of {STALL:?} or more, \
         longest {} ms",
        looked.as_secs(),
        terms.len(),
        stalls.load(Ordering::Relaxed),
        longest.load(Ordering::Relaxed)
    ));
    Ok(())
}

/// Detects when this process is not scheduled.
fn tick(logger: Logger, stalls: Arc<AtomicU64>, longest: Arc<AtomicU64>) -> JoinHandle<()> {
    tokio::spawn(async move {
        loop {
            let due = Instant::now() + TICK;
            sleep(TICK).await;
            let late = due.elapsed();
            let late_ms = u64::try_from(late.as_millis()).unwrap_or(u64::MAX);
            longest.fetch_max(late_ms, Ordering::Relaxed);
            if late >= STALL {
                stalls.fetch_add(1, Ordering::Relaxed);
                logger.log(format_args!("this host was stalled for {late_ms} ms"));
            }
        }
    })
}
