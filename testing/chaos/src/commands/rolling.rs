//! `rolling`: one node after the other is drained, stopped, started and taken back, under load.
//! Every replica is read and everything is checked; and what a client feels meanwhile is measured.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use clap::Args;
use helix_client::{Admin, NewTopic};
use tokio::time::sleep;

use super::probe::{PROBE_TOPIC, Probe};
use super::stage::{READY_MAX, Stage};
use super::{Common, parse_duration};
use crate::voice::Voice;
use crate::workload::Shape;

/// Options of `rolling`.
#[derive(Debug, Clone, Args)]
pub struct RollingArgs {
    /// Cluster, seed and bounds.
    #[command(flatten)]
    pub common: Common,

    /// Times that every node is restarted
    #[arg(long, default_value_t = 2)]
    pub rounds: u32,

    /// Stop the nodes without draining them first
    #[arg(long)]
    pub plain: bool,

    /// How long to measure before the first restart ("10s")
    #[arg(long, default_value = "10s", value_parser = parse_duration)]
    pub before: Duration,

    /// How long to go on after each restart, once the cluster is healthy, before the next
    #[arg(long, default_value = "5s", value_parser = parse_duration)]
    pub pause: Duration,

    /// Fail if the 99th percentile of the time to an ack grows by more than this factor
    #[arg(long)]
    pub p99_factor_max: Option<f64>,
}

pub(super) async fn run(args: RollingArgs, program: PathBuf) -> anyhow::Result<()> {
    let voice = Voice::new(false);
    let mut stage = Stage::set(&args.common, program, voice, Shape::default(), false).await?;
    let result = play(&args, &mut stage).await;
    stage.end(result).await
}

async fn play(args: &RollingArgs, stage: &mut Stage) -> anyhow::Result<()> {
    let client = stage.scene.client()?;
    let admin = client.admin();
    admin.create_topic(&NewTopic::new(PROBE_TOPIC, stage.scene.partitions)).await?;
    stage.play()?;
    stage.progress().await?;
    let probe = Probe::start(&client, stage.scene.partitions);
    // What comes first pays for connections.
    sleep(Duration::from_secs(1)).await;
    probe.take();
    sleep(args.before).await;
    let mut before = probe.take();
    for _ in 0..args.rounds {
        for id in stage.cluster.ids() {
            restart(args, stage, &admin, id).await?;
        }
    }
    let mut during = probe.take();
    probe.stop().await?;
    stage.progress().await?;
    stage.settle().await?;
    stage.figures();
    let (was, is) = (before.percentile(99), during.percentile(99));
    let factor = is.as_secs_f64() / was.as_secs_f64().max(1e-6);
    stage.voice.say(format_args!(
        "time to an ack before ({} acks): p50 {:?}, p99 {was:?}; during {} restarts ({} acks): \
         p50 {:?}, p99 {is:?}, max {:?}, {} errors; p99 grew by {factor:.2}",
        before.count(),
        before.percentile(50),
        stage.cluster.ids().len() * args.rounds as usize,
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
    stage: &mut Stage,
    admin: &Admin,
    id: u64,
) -> anyhow::Result<()> {
    if !args.plain {
        admin.set_draining(id, true, false).await?;
    }
    stage.cluster.terminate(id).await?;
    stage.cluster.start_node(id)?;
    if !args.plain {
        admin.set_draining(id, false, false).await?;
    }
    stage.cluster.healthy(READY_MAX).await?;
    stage.voice.say(format_args!("node {id} was restarted"));
    sleep(args.pause).await;
    Ok(())
}
