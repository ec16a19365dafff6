//! `grow`: one node becomes three and five, a disk is lost and replaced, and five become three
//! again, without the one that was first, all under load. No log has its beginning any more when
//! they come, so that each has to get the state and fetch the records. Every replica is read and
//! everything is checked.

use std::path::PathBuf;

use anyhow::ensure;
use clap::Args;

use super::Common;
use super::stage::Stage;
use crate::operator;
use crate::voice::Voice;
use crate::workload::Shape;

/// Log that nodes keep: what the load writes within seconds.
const LOG_KIB: u64 = 512;

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
    let log_kib = args.common.log_kib.or(Some(LOG_KIB));
    let common = Common { nodes: 1, log_kib, ..args.common.clone() };
    let mut stage = Stage::set(&common, program, voice, Shape::default(), false).await?;
    let result = play(&args, &mut stage).await;
    stage.end(result).await
}

async fn play(args: &GrowArgs, stage: &mut Stage) -> anyhow::Result<()> {
    stage.play()?;
    stage.progress().await?;
    let beginning = stage.shards().await?.into_iter().map(|shard| (shard, 0)).collect();
    for id in 2..=5 {
        stage.purged(&beginning).await?;
        operator::add(&mut stage.cluster, id, args.kill && id > 2).await?;
        // Its logs begin where the snapshots ended.
        ensure!(stage.cluster.has_purged(&beginning).await, "node {id} has got whole logs");
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
