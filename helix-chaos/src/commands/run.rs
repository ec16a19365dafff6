//! `run`: faults of every kind at random moments, with pauses in which everything is checked.

use std::path::PathBuf;

use clap::Args;

use super::Common;
use super::stage::Stage;
use crate::nemesis::strike;
use crate::schedule::{Budget, Schedule, Tempo};
use crate::voice::Voice;
use crate::workload::Shape;

/// Faults in a row that may begin before the cluster has got over the one before.
const HASTE_MAX: u32 = 3;

/// Options of `run`.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// Cluster, seed and bounds.
    #[command(flatten)]
    pub common: Common,

    /// Times that nodes are killed
    #[arg(long, default_value_t = 60)]
    pub kills: u32,

    /// Times that nodes are stopped and continued
    #[arg(long, default_value_t = 30)]
    pub pauses: u32,

    /// Times that links between nodes are cut
    #[arg(long, default_value_t = 30)]
    pub partitions: u32,

    /// Times that a node is away until the others have purged their logs of what it lacks
    #[arg(long, default_value_t = 4)]
    pub absences: u32,

    /// Faults between two full reads of every replica
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    pub check_every: u32,

    /// Short faults, for a quick look
    #[arg(long)]
    pub short: bool,
}

/// Log of the nodes: a node that is away for some seconds lacks what the others have purged, while
/// most kills and pauses end before.
const LOG_KIB: u64 = 256;

pub(super) async fn run(mut args: RunArgs, program: PathBuf) -> anyhow::Result<()> {
    args.common.log_kib.get_or_insert(LOG_KIB);
    let voice = Voice::new(false);
    let shape = Shape::default();
    let mut stage = Stage::set(&args.common, program, voice, shape, true).await?;
    let result = play(&args, &mut stage).await;
    stage.end(result).await
}

async fn play(args: &RunArgs, stage: &mut Stage) -> anyhow::Result<()> {
    let RunArgs { kills, pauses, partitions, absences, .. } = *args;
    let budget = Budget { kills, pauses, partitions, absences };
    let tempo = if args.short { Tempo::short() } else { Tempo::default() };
    let mut schedule = Schedule::new(args.common.seed, budget, tempo, &stage.cluster.ids());
    let (mut begun, mut in_haste) = (0, 0);
    stage.play()?;
    stage.progress().await?;
    while !stage.is_over() {
        let leaders: Vec<u64> =
            stage.cluster.leaders().await.values().map(|(node, _)| *node).collect();
        let Some(fault) = schedule.next(&leaders) else { break };
        begun += 1;
        stage.voice.say(format_args!("{begun}: {fault} (leaders {leaders:?})"));
        strike(&mut stage.cluster, &stage.scene, &fault, in_haste == 0).await?;
        in_haste += 1;
        if schedule.is_patient() || in_haste > HASTE_MAX {
            stage.progress().await?;
            in_haste = 0;
        }
        if begun % args.check_every == 0 {
            stage.settle().await?;
            stage.play()?;
            stage.progress().await?;
            in_haste = 0;
        }
        tokio::time::sleep(schedule.breath()).await;
    }
    if schedule.left() > 0 {
        stage.voice.say(format_args!("out of time: {} faults were left out", schedule.left()));
    }
    stage.progress().await?;
    stage.settle().await?;
    stage.restart_all().await?;
    stage.settle().await?;
    stage.voice.say(format_args!("{begun} faults"));
    stage.figures();
    Ok(())
}
