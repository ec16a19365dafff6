//! `elections`: full load and no faults. Leaders should not change; where they do, the line before
//! says whether this machine stood still at that moment.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::Args;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::stage::Stage;
use super::{Common, parse_duration};
use crate::voice::Voice;
use crate::workload::Shape;

/// Between two ticks; what a tick is late is a stall.
const TICK: Duration = Duration::from_millis(10);

/// Stalls from here on are told one by one.
const STALL: Duration = Duration::from_millis(100);

const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Options of `elections`.
#[derive(Debug, Clone, Args)]
pub struct ElectionsArgs {
    /// Cluster, seed and bounds.
    #[command(flatten)]
    pub common: Common,

    /// How long to look ("10m"). Everything written is kept to be checked: some 8 GB a minute
    #[arg(long, default_value = "10m", value_parser = parse_duration)]
    pub duration: Duration,
}

pub(super) async fn run(args: ElectionsArgs, program: PathBuf) -> anyhow::Result<()> {
    let voice = Voice::new(false);
    let shape = Shape {
        sessions: 2 * args.common.topic_partitions,
        records_max: 100,
        pace: Duration::from_millis(2),
        has_readers: false,
        ..Shape::default()
    };
    let mut stage = Stage::set(&args.common, program, voice, shape, false).await?;
    let result = play(&args, &mut stage).await;
    stage.end(result).await
}

async fn play(args: &ElectionsArgs, stage: &mut Stage) -> anyhow::Result<()> {
    stage.play()?;
    stage.progress().await?;
    let (stalls, longest) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let ticker = tick(stage.voice, stalls.clone(), longest.clone());
    let begin = Instant::now();
    let mut terms: BTreeMap<u32, u64> = BTreeMap::new();
    let mut changes = 0;
    while begin.elapsed() < args.duration && !stage.is_over() {
        stage.cluster.none_has_ended()?;
        for (shard, (node, term)) in stage.cluster.leaders().await {
            match terms.insert(shard, term) {
                Some(before) if before < term => {
                    changes += term - before;
                    stage.voice.say(format_args!(
                        "shard {shard}: node {node} leads in term {term}, after {before}"
                    ));
                }
                _ => {}
            }
        }
        sleep(LOOK_EVERY).await;
    }
    let looked = begin.elapsed();
    ticker.abort();
    stage.settle().await?;
    stage.figures();
    stage.voice.say(format_args!(
        "{changes} changes of leader in {} s over {} shards; {} stalls of {STALL:?} or more, \
         longest {} ms",
        looked.as_secs(),
        terms.len(),
        stalls.load(Ordering::Relaxed),
        longest.load(Ordering::Relaxed)
    ));
    Ok(())
}

/// Notices when this process does not get to run.
fn tick(voice: Voice, stalls: Arc<AtomicU64>, longest: Arc<AtomicU64>) -> JoinHandle<()> {
    tokio::spawn(async move {
        loop {
            let due = Instant::now() + TICK;
            sleep(TICK).await;
            let late = due.elapsed();
            let late_ms = u64::try_from(late.as_millis()).unwrap_or(u64::MAX);
            longest.fetch_max(late_ms, Ordering::Relaxed);
            if late >= STALL {
                stalls.fetch_add(1, Ordering::Relaxed);
                voice.say(format_args!("this machine stood still for {late_ms} ms"));
            }
        }
    })
}
