//! Does to the cluster what the schedule has drawn, and undoes it.

use std::time::Duration;

use anyhow::bail;
use helix_checker::Event;
use tokio::time::{Instant, sleep};

use crate::cluster::Cluster;
use crate::files::Shelf;
use crate::proxy::Mode;
use crate::schedule::{Fault, What};
use crate::voice::Voice;
use crate::workload::{Scene, TOPIC};
use crate::{ailments, operator};

/// How long the logs may take to be purged of what a node lacks.
const PURGE_MAX: Duration = Duration::from_secs(120);

/// How long a replica that has no majority may take to answer a read of what it has.
const LONE_READ_MAX: Duration = Duration::from_secs(10);

/// Does it, and undoes it.
///
/// While a majority is down the history says so, and, where `is_settled` says that the replicas
/// had been up for a while, those that are left must give what they have.
pub(crate) async fn strike(
    cluster: &mut Cluster,
    scene: &Scene,
    (voice, shelf): (Voice, &Shelf),
    fault: &Fault,
    is_settled: bool,
) -> anyhow::Result<()> {
    let lasting = fault.lasting;
    match fault.what {
        // Someone else does that, see `Scene::trim`.
        What::Trim { .. } => Ok(()),
        What::Delete(node) => operator::delete_behind(cluster, scene, voice, node, lasting).await,
        What::Drain(node) => operator::restart(cluster, node).await,
        What::Wipe { node, kills_leader } => operator::wipe(cluster, node, kills_leader).await,
        What::Change { joins, leaves, is_lost, kills_leader } => {
            operator::exchange(cluster, (joins, leaves), is_lost, kills_leader).await
        }
        What::SlowSyncs(node, time) => {
            ailments::slow_syncs(cluster, node, time, lasting).await?;
            cluster.none_has_ended()
        }
        What::FillDisk { node, left_mib } => {
            if !ailments::fill_disk(cluster, scene, node, left_mib, lasting).await? {
                voice.say("  the disk was not full");
            }
            cluster.none_has_ended()
        }
        What::Damage { node, what, is_running, seed } => {
            let (which, how) = ((node, what), (is_running, seed));
            ailments::harm(cluster, scene, voice, which, how, lasting).await
        }
        What::Restore { node, seed } => {
            if !ailments::restore(cluster, scene, voice, shelf, (node, seed)).await? {
                voice.say("  there was no segment to put back");
            }
            Ok(())
        }
        _ => hold(cluster, scene, fault, is_settled).await,
    }
}

/// Breaks, waits, and heals.
async fn hold(
    cluster: &mut Cluster,
    scene: &Scene,
    fault: &Fault,
    is_settled: bool,
) -> anyhow::Result<()> {
    let takes_majority = fault.takes_majority(cluster.minority());
    let ends = Instant::now() + fault.lasting;
    begin(cluster, &fault.what).await?;
    if let What::Outlast(node) = fault.what {
        outlast(cluster, node).await?;
    }
    if takes_majority {
        scene.recorder.add(Event::QuorumLost);
        if is_settled {
            lone_reads(cluster, scene, &fault.what).await?;
        }
    }
    tokio::time::sleep_until(ends).await;
    if takes_majority {
        scene.recorder.add(Event::QuorumBack);
    }
    let ends_nodes = matches!(
        fault.what,
        What::Kill(_) | What::Terminate(_) | What::Outlast(_) | What::FailSyncs(_)
    );
    if !ends_nodes {
        cluster.none_has_ended()?;
    }
    cluster.heal()
}

async fn begin(cluster: &mut Cluster, what: &What) -> anyhow::Result<()> {
    let others = |node: u64| {
        let ids = cluster.ids().into_iter();
        ids.filter(move |other| *other != node).collect::<Vec<_>>()
    };
    match what {
        What::Kill(nodes) => cluster.kill(nodes).await?,
        What::Terminate(node) => cluster.terminate(*node).await?,
        What::FailSyncs(node) => ailments::fail_syncs(cluster, *node).await?,
        What::Pause(nodes) => nodes.iter().try_for_each(|node| cluster.pause(*node))?,
        What::Isolate(node) => {
            for other in others(*node) {
                cluster.set_link(*node, other, Mode::Stall);
                cluster.set_link(other, *node, Mode::Stall);
            }
        }
        What::Mute(node) => {
            for other in others(*node) {
                cluster.set_link(*node, other, Mode::StallForward);
                cluster.set_link(other, *node, Mode::StallBackward);
            }
        }
        What::Deafen(node) => {
            for other in others(*node) {
                cluster.set_link(*node, other, Mode::StallBackward);
                cluster.set_link(other, *node, Mode::StallForward);
            }
        }
        What::Part(a, b) => {
            cluster.set_link(*a, *b, Mode::Stall);
            cluster.set_link(*b, *a, Mode::Stall);
        }
        What::Scatter => cluster.set_links(Mode::Stall),
        What::Slow(wait) => cluster.set_links(Mode::Delay(*wait)),
        What::Clients(node, mode) => cluster.set_client_link(*node, *mode),
        // With what it has, see `outlast`; the rest is done elsewhere, see `strike`.
        What::Outlast(_)
        | What::Trim { .. }
        | What::Delete(_)
        | What::Drain(_)
        | What::Wipe { .. }
        | What::Change { .. }
        | What::SlowSyncs(..)
        | What::FillDisk { .. }
        | What::Damage { .. }
        | What::Restore { .. } => {}
    }
    Ok(())
}

/// Kills a node, and waits until the logs of the others are purged of what it lacks.
async fn outlast(cluster: &mut Cluster, node: u64) -> anyhow::Result<()> {
    let had = cluster.last_indexes(node).await?;
    cluster.kill(&[node]).await?;
    let deadline = Instant::now() + PURGE_MAX;
    while !cluster.has_purged(&had).await {
        if Instant::now() > deadline {
            bail!("STUCK: after {PURGE_MAX:?} the logs still have what node {node} lacks: {had:?}");
        }
        sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

/// A replica without a majority still gives the committed records that it has.
async fn lone_reads(cluster: &Cluster, scene: &Scene, what: &What) -> anyhow::Result<()> {
    let silent = match what {
        What::Kill(nodes) | What::Pause(nodes) => nodes.clone(),
        _ => Vec::new(),
    };
    for direct in cluster.direct().into_iter().filter(|node| !silent.contains(&node.node_id)) {
        for partition in 0..scene.partitions {
            let deadline = Instant::now() + LONE_READ_MAX;
            while let Err(error) = direct.fetch((TOPIC, partition), 0, Duration::ZERO).await {
                if Instant::now() > deadline {
                    let node = direct.node_id;
                    bail!(
                        "NO READ: node {node}, alone, does not give partition {partition}: {error}"
                    )
                }
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
    Ok(())
}
