//! `grow`: grows one node to three and five, replaces a lost disk, and shrinks to three without the
//! first node, all under load. With more than five nodes, shards get three replicas, which spread
//! while nodes are killed. Then the shards are split, six nodes lead partitions of the topic from
//! before and every node some of a new one, and the added nodes are removed again.
//!
//! Every log is purged before a node joins, so each new node has to fetch a snapshot and the
//! records. Finally every replica is read and the history is checked.

use std::path::PathBuf;

use anyhow::ensure;
use clap::Args;

use super::CommonArgs;
use super::test_bed::TestBed;
use crate::cluster::NODES_MAX;
use crate::logger::Logger;
use crate::operator;
use crate::workload::{TOPIC, WorkloadShape};

/// Log that nodes keep; the load writes this much within seconds.
const LOG_KIB: u64 = 512;

/// Data shards after the splits.
const SHARDS: u32 = 12;

/// Nodes that lead partitions of the topic from before the splits, at least. Other topics share the
/// shards, so not each of nine nodes leads a shard with one of its twelve partitions.
const OLD_TOPIC_LEADERS: usize = 6;

/// Options of `grow`.
#[derive(Debug, Clone, Args)]
pub struct GrowArgs {
    /// Seed and limits; `--nodes` is ignored.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Kill the leader of the metadata shard during each change
    #[arg(long)]
    pub kill: bool,

    /// Nodes of the cluster at its largest
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(5..=NODES_MAX))]
    pub most: u64,
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
    if args.most > 5 {
        spread(args, test_bed).await?;
    }
    for id in [1, 3] {
        operator::remove(&mut test_bed.cluster, id, false).await?;
        test_bed.logger.log(format_args!("removed node {id}"));
    }
    test_bed.progress().await?;
    test_bed.check_replicas().await?;
    test_bed.log_stats();
    Ok(())
}

/// Grows beyond five nodes with three replicas of each shard, kills nodes during moves, and shrinks
/// to five again.
async fn spread(args: &GrowArgs, test_bed: &mut TestBed) -> anyhow::Result<()> {
    operator::set_replicas(&test_bed.cluster, 3).await?;
    for id in 6..=args.most {
        operator::add(&mut test_bed.cluster, id, args.kill).await?;
        test_bed.logger.log(format_args!("added node {id}"));
        // Its first replicas are being moved.
        test_bed.cluster.kill(&[id]).await?;
        test_bed.cluster.start_node(id)?;
    }
    operator::split_shards(&mut test_bed.cluster, SHARDS).await?;
    test_bed.logger.log(format_args!("the shards were split into {SHARDS}"));
    operator::wait_until_placed(&mut test_bed.cluster).await?;
    let nodes = usize::try_from(args.most)?;
    let client = test_bed.context.client()?;
    let topic = (TOPIC, args.common.topic_partitions);
    let leaders = nodes.min(OLD_TOPIC_LEADERS);
    operator::lead_by_all(&mut test_bed.cluster, &client, topic, leaders).await?;
    test_bed.logger.log(format_args!("{leaders} nodes lead partitions of the topic from before"));
    operator::spread_new_topic(&mut test_bed.cluster, &test_bed.context, nodes).await?;
    test_bed.logger.log(format_args!("all {nodes} nodes lead partitions of a new topic"));
    test_bed.progress().await?;
    test_bed.check_replicas().await?;
    test_bed.start_workload()?;
    for id in (6..=args.most).rev() {
        operator::remove(&mut test_bed.cluster, id, args.kill).await?;
        test_bed.logger.log(format_args!("removed node {id}"));
    }
    operator::wait_until_placed(&mut test_bed.cluster).await?;
    Ok(())
}
