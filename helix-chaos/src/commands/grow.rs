//! `grow`: one node becomes three and five, a disk is lost and replaced, and five become three
//! again, without the one that was first, all under load. No log has its beginning any more when
//! they come, so that each has to get the state and fetch the records. Every replica is read and
//! everything is checked.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;
use helix_client::{Admin, Client, Config};
use helix_proto::log::v1::{MembershipChange, MembershipPhase};
use tokio::time::{Instant, sleep};

use super::Common;
use super::stage::{READY_MAX, Stage};
use crate::voice::Voice;
use crate::workload::Shape;

/// Log that nodes keep: what the load writes within seconds.
const LOG_KIB: u64 = 512;

/// How long a change may take.
const CHANGE_MAX: Duration = Duration::from_secs(120);

const LOOK_EVERY: Duration = Duration::from_millis(100);

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
        let admin = admin(stage)?;
        let peer = stage.cluster.join(id)?.to_string();
        let change = begun(|| admin.add_node(id, &peer, false)).await?;
        finish(args, stage, &admin, change).await?;
        // Its logs begin where the snapshots ended.
        ensure!(stage.cluster.has_purged(&beginning).await, "node {id} has got whole logs");
        stage.voice.say(format_args!("node {id} was added"));
    }
    let wiped = 5;
    stage.cluster.kill(&[wiped]).await?;
    stage.cluster.wipe(wiped).await?;
    stage.cluster.start_node(wiped)?;
    let operator = admin(stage)?;
    let change = begun(|| operator.replace_node(wiped, wiped, "", false)).await?;
    finish(args, stage, &operator, change).await?;
    stage.voice.say(format_args!("node {wiped} lost its disk and was replaced"));
    for id in [1, 3] {
        let admin = admin(stage)?;
        let change = begun(|| admin.remove_node(id, false, false)).await?;
        watch(&admin, &change).await?;
        stage.cluster.leave(id).await?;
        stage.cluster.healthy(READY_MAX).await?;
        stage.voice.say(format_args!("node {id} was removed"));
    }
    stage.progress().await?;
    stage.settle().await?;
    stage.figures();
    Ok(())
}

/// As an operator's next command begins: told of the nodes that there are by then.
fn admin(stage: &Stage) -> anyhow::Result<Admin> {
    let config = Config { seed: Some(1), ..Config::new(stage.cluster.endpoints()) };
    Ok(Client::new(config)?.admin())
}

/// Asks until a change is begun: a node that has just been started may not answer yet.
async fn begun<F, Fut>(ask: F) -> anyhow::Result<MembershipChange>
where
    F: Fn() -> Fut,
    Fut: Future<Output = helix_client::Result<Option<MembershipChange>>>,
{
    let deadline = Instant::now() + CHANGE_MAX;
    loop {
        match ask().await {
            Ok(change) => return change.context("a change that was only checked"),
            Err(error) if Instant::now() > deadline => return Err(error.into()),
            Err(_) => sleep(LOOK_EVERY).await,
        }
    }
}

async fn finish(
    args: &GrowArgs,
    stage: &mut Stage,
    admin: &Admin,
    change: MembershipChange,
) -> anyhow::Result<()> {
    // Of two, none can be missed.
    if args.kill && stage.cluster.ids().len() > 3 {
        let leader = stage.cluster.leaders().await.get(&0).map(|(node, _)| *node);
        if let Some(leader) = leader.filter(|leader| *leader != change.node_id) {
            stage.cluster.kill(&[leader]).await?;
            stage.cluster.start_node(leader)?;
            stage.voice.say(format_args!("  killed {leader}, which drove change {}", change.id));
        }
    }
    watch(admin, &change).await?;
    stage.cluster.healthy(READY_MAX).await
}

/// Waits until a change is done.
async fn watch(admin: &Admin, change: &MembershipChange) -> anyhow::Result<()> {
    let deadline = Instant::now() + CHANGE_MAX;
    loop {
        let seen = admin.membership_change(change.id).await;
        match &seen {
            Ok(seen) if seen.phase() == MembershipPhase::Done => return Ok(()),
            Ok(seen) => {
                ensure!(seen.phase() != MembershipPhase::Failed, "given up: {seen:?}");
            }
            Err(_) => {}
        }
        if Instant::now() > deadline {
            bail!("NO PROGRESS: change {} is not done after {CHANGE_MAX:?}: {seen:?}", change.id);
        }
        sleep(LOOK_EVERY).await;
    }
}
