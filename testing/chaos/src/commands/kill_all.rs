//! `kill-all`: kills all nodes at once under load and restarts them on their synced data.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use helix_checker::HistoryEvent;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::time::sleep;

use super::CommonArgs;
use super::test_bed::TestBed;
use crate::logger::Logger;
use crate::workload::WorkloadShape;

/// Options of `kill-all`.
#[derive(Debug, Clone, Args)]
pub struct KillAllArgs {
    /// Cluster, seed and limits.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Number of times that all nodes are killed
    #[arg(long, default_value_t = 20)]
    pub rounds: u32,

    /// Rounds between two checks of all replicas
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub check_every: u32,

    /// Replace the data with an older copy in the last round, as a lying disk does. The check must
    /// fail: this tests the harness
    #[arg(long, hide = true)]
    pub forget: bool,
}

pub(super) async fn run(args: KillAllArgs, program: PathBuf) -> anyhow::Result<()> {
    let logger = Logger::new(false);
    let shape =
        WorkloadShape { sessions: 12, pace: Duration::from_millis(4), ..WorkloadShape::default() };
    let mut test_bed = TestBed::start(&args.common, program, logger, shape, false).await?;
    let result = execute(&args, &mut test_bed).await;
    test_bed.end(result).await
}

async fn execute(args: &KillAllArgs, test_bed: &mut TestBed) -> anyhow::Result<()> {
    let mut rng = StdRng::seed_from_u64(args.common.seed);
    let all = test_bed.cluster.ids();
    let mut done = 0;
    test_bed.start_workload()?;
    while done < args.rounds && !test_bed.is_over() {
        test_bed.progress().await?;
        sleep(Duration::from_millis(rng.random_range(0..1500))).await;
        test_bed.cluster.kill(&all).await?;
        if args.forget {
            forget(test_bed, done, args.rounds).await?;
        }
        test_bed.context.recorder.add(HistoryEvent::QuorumLost);
        done += 1;
        test_bed.logger.log(format_args!("{done}: killed all nodes"));
        sleep(Duration::from_millis(rng.random_range(0..300))).await;
        test_bed.context.recorder.add(HistoryEvent::QuorumBack);
        test_bed.cluster.heal()?;
        if done % args.check_every == 0 {
            test_bed.check_replicas().await?;
            test_bed.start_workload()?;
        }
    }
    test_bed.progress().await?;
    test_bed.check_replicas().await?;
    test_bed.logger.log(format_args!("killed all nodes {done} times"));
    test_bed.log_stats();
    Ok(())
}

/// Copies the data of the killed nodes in the first round and restores it in the last.
async fn forget(test_bed: &TestBed, done: u32, rounds: u32) -> anyhow::Result<()> {
    for id in test_bed.cluster.ids() {
        let data = test_bed.dir().join(format!("node-{id}"));
        let old = test_bed.dir().join(format!("node-{id}-old"));
        if done == 0 {
            copy(&data, &old).await?;
        } else if done + 1 == rounds {
            tokio::fs::remove_dir_all(&data).await?;
            tokio::fs::rename(&old, &data).await?;
        }
    }
    Ok(())
}

/// Copies a directory recursively.
async fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    let mut dirs = vec![(from.to_owned(), to.to_owned())];
    while let Some((from, to)) = dirs.pop() {
        tokio::fs::create_dir(&to).await?;
        let mut entries = tokio::fs::read_dir(&from).await?;
        while let Some(entry) = entries.next_entry().await? {
            let to = to.join(entry.file_name());
            if entry.file_type().await?.is_dir() {
                dirs.push((entry.path(), to));
            } else {
                tokio::fs::copy(entry.path(), to).await?;
            }
        }
    }
    Ok(())
}
