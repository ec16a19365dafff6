//! `retries`: producers are forced to send again what may have been applied, because its answer
//! was swallowed or its leader killed. No copy, no gap, order kept.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::ensure;
use clap::Args;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use tokio::time::{Instant, sleep};

use super::Common;
use super::stage::Stage;
use crate::proxy::Mode;
use crate::voice::Voice;
use crate::workload::Shape;

/// One of this many is a kill, the others swallow answers.
const KILL_EVERY: u32 = 10;

/// How long a node's answers are awaited so that they can be lost.
const SWALLOW_MAX: Duration = Duration::from_secs(5);

/// Between two full reads.
const CHECK_EVERY: u32 = 100;

/// Options of `retries`.
#[derive(Debug, Clone, Args)]
pub struct RetriesArgs {
    /// Cluster, seed and bounds.
    #[command(flatten)]
    pub common: Common,

    /// Times that retries are forced; each hits every batch that is under way at one leader
    #[arg(long, default_value_t = 200)]
    pub count: u32,
}

pub(super) async fn run(args: RetriesArgs, program: PathBuf) -> anyhow::Result<()> {
    let voice = Voice::new(false);
    // Only producers that may repeat: an open outcome would be no finding here.
    let shape = Shape {
        sessions: 8,
        unary: 6,
        plain: 0,
        pace: Duration::from_millis(5),
        ..Shape::default()
    };
    let mut stage = Stage::set(&args.common, program, voice, shape, true).await?;
    let result = play(&args, &mut stage).await;
    stage.end(result).await
}

async fn play(args: &RetriesArgs, stage: &mut Stage) -> anyhow::Result<()> {
    let mut rng = StdRng::seed_from_u64(args.common.seed);
    let (mut forced, mut kills) = (0, 0);
    stage.play()?;
    stage.progress().await?;
    while forced < args.count && !stage.is_over() {
        let leaders: Vec<u64> =
            stage.cluster.leaders().await.values().map(|(node, _)| *node).collect();
        let Some(leader) = leaders.choose(&mut rng).copied() else {
            sleep(Duration::from_millis(50)).await;
            continue;
        };
        if (forced + 1).is_multiple_of(KILL_EVERY) {
            stage.cluster.kill(&[leader]).await?;
            stage.cluster.heal()?;
            stage.voice.say(format_args!("{}: killed {leader}", forced + 1));
            stage.progress().await?;
            kills += 1;
        } else if !swallow(stage, leader, &mut rng).await? {
            continue;
        }
        forced += 1;
        if forced % CHECK_EVERY == 0 {
            stage.settle().await?;
            stage.play()?;
            stage.progress().await?;
        }
    }
    stage.progress().await?;
    stage.settle().await?;
    stage.figures();
    let duplicates = stage.scene.stats.duplicates.load(Ordering::Relaxed);
    stage.voice.say(format_args!(
        "{forced} times forced ({kills} by a kill); {duplicates} retries met their first copy"
    ));
    ensure!(
        forced < 20 || duplicates > 0,
        "no retry met its first copy: the harness did not do what it says"
    );
    Ok(())
}

/// Loses answers of one node until some were lost and a little longer. False if none came.
async fn swallow(stage: &mut Stage, node: u64, rng: &mut StdRng) -> anyhow::Result<bool> {
    let before = stage.cluster.swallowed(node);
    stage.cluster.set_client_link(node, Mode::Swallow);
    let deadline = Instant::now() + SWALLOW_MAX;
    while stage.cluster.swallowed(node) == before && Instant::now() < deadline {
        stage.cluster.none_has_ended()?;
        sleep(Duration::from_millis(1)).await;
    }
    sleep(Duration::from_millis(rng.random_range(5..60))).await;
    stage.cluster.set_client_link(node, Mode::Pass);
    let lost = stage.cluster.swallowed(node) - before;
    if lost > 0 {
        stage.voice.say(format_args!("lost {lost} bytes of answers of {node}"));
    }
    stage.progress().await?;
    Ok(lost > 0)
}
