//! `rolling`: drains and restarts one node after another under load.
//!
//! It measures the ack times of a client meanwhile. Finally every replica is read and the history
//! is checked.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use clap::Args;
use helix_client::{Admin, NewTopic};
use tokio::time::sleep;

use super::ack_probe::{AckProbe, PROBE_TOPIC};
use super::test_bed::{READY_MAX, TestBed};
use super::{CommonArgs, parse_duration};
use crate::logger::Logger;
use crate::workload::WorkloadShape;

/// Options of `rolling`.
#[derive(Debug, Clone, Args)]
pub struct RollingArgs {
    /// Cluster, seed and limits.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Number of rounds; each restarts every node
    #[arg(long, default_value_t = 2)]
    pub rounds: u32,

    /// Stop the nodes without draining them first
    #[arg(long)]
    pub plain: bool,

    /// Time to measure before the first restart ("10s")
    #[arg(long, default_value = "10s", value_parser = parse_duration)]
    pub before: Duration,

    /// Pause after each restart, once the cluster is healthy ("5s")
    #[arg(long, default_value = "5s", value_parser = parse_duration)]
    pub pause: Duration,

    /// Fail if the p99 of the ack time grows by more than this factor
    #[arg(long)]
    pub p99_factor_max: Option<f64>,
}

pub(super) async fn run(args: RollingArgs, program: PathBuf) -> anyhow::Result<()> {
    let logger = Logger::new(false);
    let mut test_bed =
        TestBed::start(&args.common, program, logger, WorkloadShape::default(), false).await?;
    let result = execute(&args, &mut test_bed).await;
    test_bed.end(result).await
}

async fn execute(args: &RollingArgs, test_bed: &mut TestBed) -> anyhow::Result<()> {
    let client = test_bed.context.client()?;
    let admin = client.admin();
    admin.create_topic(&NewTopic::new(PROBE_TOPIC, test_bed.context.partitions)).await?;
    test_bed.start_workload()?;
    test_bed.progress().await?;
    let mut ack_probe = AckProbe::start(&client, PROBE_TOPIC, test_bed.context.partitions);
    // The first appends pay for connection setup.
    sleep(Duration::from_secs(1)).await;
    ack_probe.take();
    sleep(args.before).await;
    let mut before = ack_probe.take();
    for _ in 0..args.rounds {
        for id in test_bed.cluster.ids() {
            restart(args, test_bed, &admin, id).await?;
        }
    }
    let mut during = ack_probe.take();
    ack_probe.stop().await?;
    test_bed.progress().await?;
    test_bed.check_replicas().await?;
    test_bed.log_stats();
    let (was, is) = (before.percentile(99), during.percentile(99));
    let factor = is.as_secs_f64() / was.as_secs_f64().max(1e-6);
    test_bed.logger.log(format_args!(
        "time to an ack before ({} acks): p50 {:?}, p99 {was:?}; during {} restarts ({} acks): \
         p50 {:?}, p99 {is:?}, max {:?}, {} errors; p99 grew by {factor:.2}",
        before.count(),
        before.percentile(50),
        test_bed.cluster.ids().len() * args.rounds as usize,
        during.count(),
        during.percentile(50),
        during.percentile(100),
        during.errors
    ));
    ensure!(before.errors + during.errors == 0, "appends failed at the client");
    if let Some(most) = args.p99_factor_max {
        ensure!(factor <= most, "p99 grew by {factor:.2}, more than {most}");
    }
    Ok(())
}

async fn restart(
    args: &RollingArgs,
    test_bed: &mut TestBed,
    admin: &Admin,
    id: u64,
) -> anyhow::Result<()> {
    if !args.plain {
        admin.set_draining(id, true, false).await?;
    }
    test_bed.cluster.terminate(id).await?;
    test_bed.cluster.start_node(id)?;
    if !args.plain {
        admin.set_draining(id, false, false).await?;
    }
    test_bed.cluster.wait_until_healthy(READY_MAX).await?;
    test_bed.logger.log(format_args!("restarted node {id}"));
    sleep(args.pause).await;
    Ok(())
}
