//! `grow`: grows one node to three and five, replaces a lost disk, and shrinks to three without the
//! first node, all under load.
//!
//! Every log is purged before a node joins, so each new node has to fetch a snapshot and the
//! records. Finally every replica is read and the history is checked.

use std::path::PathBuf;

use anyhow::ensure;
use clap::Args;

use super::CommonArgs;
use super::test_bed::TestBed;
use crate::logger::Logger;
use crate::operator;
use crate::workload::WorkloadShape;

/// Log that nodes keep; the load writes this much within seconds.
const LOG_KIB: u64 = 512;

/// Options of `grow`.
#[derive(Debug, Clone, Args)]
pub struct GrowArgs {
    /// Seed and limits; `--nodes` is ignored.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Kill the leader of the metadata shard during each change
    #[arg(long)]
    pub kill: bool,
}

pub(super) async fn run(args: GrowArgs, program: PathBuf) -> anyhow::Result<()> {
    let logger = Logger::new(false);
    let log_kib = args.common.log_kib.or(Some(LOG_KIB));
    let common = CommonArgs { nodes: 1, log_kib, ..args.common.clone() };
    let mut test_bed =
        TestBed::start(&common, program, logger, WorkloadShape::default(), false).await?;
    let result = execute(&args, &mut test_bed).await;
    test_bed.end(result).await
}

async fn execute(args: &GrowArgs, test_bed: &mut TestBed) -> anyhow::Result<()> {
    test_bed.start_workload()?;
    test_bed.progress().await?;
    let beginning = test_bed.shards().await?.into_iter().map(|shard| (shard, 0)).collect();
    for id in 2..=5 {
        test_bed.wait_until_purged(&beginning).await?;
        operator::add(&mut test_bed.cluster, id, args.kill && id > 2).await?;
        // Its logs must begin where the snapshots ended.
        ensure!(test_bed.cluster.has_purged(&beginning).await, "node {id} received whole logs");
        test_bed.logger.log(format_args!("added node {id}"));
    }
    let wiped = 5;
    operator::wipe(&mut test_bed.cluster, wiped, args.kill).await?;
    test_bed.logger.log(format_args!("replaced node {wiped} after it lost its disk"));
    for id in [1, 3] {
        operator::remove(&mut test_bed.cluster, id, false).await?;
        test_bed.logger.log(format_args!("removed node {id}"));
    }
    test_bed.progress().await?;
    test_bed.check_replicas().await?;
    test_bed.log_stats();
    Ok(())
}
