//! `grow`: one node becomes three and five, a disk is lost and replaced, and five become three
//! again, without the one that was first, all under load. Every replica is read and everything is
//! checked.

use std::path::PathBuf;

use clap::Args;

use super::Common;
use super::stage::Stage;
use crate::operator;
use crate::voice::Voice;
use crate::workload::Shape;

/// Options of `grow`.
#[derive(Debug, Clone, Args)]
pub struct GrowArgs {
    /// Seed and bounds; `--nodes` is not looked at.
    #[command(flatten)]
    pub common: Common,

    /// Kill the leader of the cluster's own shard while each change runs
    #[arg(long)]
    pub kill: bool,
}

pub(super) async fn run(args: GrowArgs, program: PathBuf) -> anyhow::Result<()> {
    let voice = Voice::new(false);
    let common = Common { nodes: 1, ..args.common.clone() };
    let mut stage = Stage::set(&common, program, voice, Shape::default(), false).await?;
    let result = play(&args, &mut stage).await;
    stage.end(result).await
}

async fn play(args: &GrowArgs, stage: &mut Stage) -> anyhow::Result<()> {
    stage.play()?;
    stage.progress().await?;
    for id in 2..=5 {
        operator::add(&mut stage.cluster, id, args.kill && id > 2).await?;
        stage.voice.say(format_args!("node {id} was added"));
    }
    let wiped = 5;
    operator::wipe(&mut stage.cluster, wiped, args.kill).await?;
    stage.voice.say(format_args!("node {wiped} lost its disk and was replaced"));
    for id in [1, 3] {
        operator::remove(&mut stage.cluster, id, false).await?;
        stage.voice.say(format_args!("node {id} was removed"));
    }
    stage.progress().await?;
    stage.settle().await?;
    stage.figures();
    Ok(())
}
