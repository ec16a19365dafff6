//! `massacre`: all nodes killed at once under load, and started again on what they had synced.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use helix_checker::Event;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::time::sleep;

use super::Common;
use super::stage::Stage;
use crate::voice::Voice;
use crate::workload::Shape;

/// Options of `massacre`.
#[derive(Debug, Clone, Args)]
pub struct MassacreArgs {
    /// Cluster, seed and bounds.
    #[command(flatten)]
    pub common: Common,

    /// Times that all nodes are killed
    #[arg(long, default_value_t = 20)]
    pub rounds: u32,

    /// Rounds between two full reads of every replica
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub check_every: u32,

    /// Put older data in the place of what the nodes had synced before the last round, as a disk
    /// does that lies: the check must fail. Tries the harness, not the service
    #[arg(long, hide = true)]
    pub forget: bool,
}

pub(super) async fn run(args: MassacreArgs, program: PathBuf) -> anyhow::Result<()> {
    let voice = Voice::new(false);
    let shape = Shape { sessions: 12, pace: Duration::from_millis(4), ..Shape::default() };
    let mut stage = Stage::set(&args.common, program, voice, shape, false).await?;
    let result = play(&args, &mut stage).await;
    stage.end(result).await
}

async fn play(args: &MassacreArgs, stage: &mut Stage) -> anyhow::Result<()> {
    let mut rng = StdRng::seed_from_u64(args.common.seed);
    let all = stage.cluster.ids();
    let mut done = 0;
    stage.play()?;
    while done < args.rounds && !stage.is_over() {
        stage.progress().await?;
        sleep(Duration::from_millis(rng.random_range(0..1500))).await;
        stage.cluster.kill(&all).await?;
        if args.forget {
            forget(stage, done, args.rounds).await?;
        }
        stage.scene.recorder.add(Event::QuorumLost);
        done += 1;
        stage.voice.say(format_args!("{done}: all nodes are dead"));
        sleep(Duration::from_millis(rng.random_range(0..300))).await;
        stage.scene.recorder.add(Event::QuorumBack);
        stage.cluster.heal()?;
        if done % args.check_every == 0 {
            stage.settle().await?;
            stage.play()?;
        }
    }
    stage.progress().await?;
    stage.settle().await?;
    stage.voice.say(format_args!("{done} times"));
    stage.figures();
    Ok(())
}

/// Copies the data of the dead nodes in the first round and brings it back in the last.
async fn forget(stage: &Stage, done: u32, rounds: u32) -> anyhow::Result<()> {
    for id in stage.cluster.ids() {
        let data = stage.folder().join(format!("node-{id}"));
        let old = stage.folder().join(format!("node-{id}-old"));
        if done == 0 {
            copy(&data, &old).await?;
        } else if done + 1 == rounds {
            tokio::fs::remove_dir_all(&data).await?;
            tokio::fs::rename(&old, &data).await?;
        }
    }
    Ok(())
}

/// Copies a folder with everything in it.
async fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    let mut folders = vec![(from.to_owned(), to.to_owned())];
    while let Some((from, to)) = folders.pop() {
        tokio::fs::create_dir(&to).await?;
        let mut entries = tokio::fs::read_dir(&from).await?;
        while let Some(entry) = entries.next_entry().await? {
            let to = to.join(entry.file_name());
            if entry.file_type().await?.is_dir() {
                folders.push((entry.path(), to));
            } else {
                tokio::fs::copy(entry.path(), to).await?;
            }
        }
    }
    Ok(())
}
