//! Injects the scheduled faults and undoes them.

use std::time::Duration;

use anyhow::bail;
use helix_checker::HistoryEvent;
use tokio::time::{Instant, sleep};

use crate::cluster::ChaosCluster;
use crate::logger::Logger;
use crate::proxy::LinkMode;
use crate::schedule::{ChaosFault, FaultAction};
use crate::segment_damage::SegmentBackup;
use crate::workload::{TOPIC, WorkloadContext};
use crate::{disk_faults, operator};

/// Longest wait until the logs are purged of the entries that a node lacks.
const PURGE_MAX: Duration = Duration::from_secs(120);

/// Longest wait for a read from a replica without a majority.
const READ_WITHOUT_MAJORITY_MAX: Duration = Duration::from_secs(10);

/// Injects a fault and undoes it.
///
/// The history notes while a majority is down. If `is_settled`, the replicas had caught up before,
/// and the remaining ones must serve the committed records that they have.
pub(crate) async fn inject(
    cluster: &mut ChaosCluster,
    context: &WorkloadContext,
    (logger, backup): (Logger, &SegmentBackup),
    fault: &ChaosFault,
    is_settled: bool,
) -> anyhow::Result<()> {
    let lasting = fault.lasting;
    match fault.what {
        // `WorkloadContext::trim` does that concurrently.
        FaultAction::Trim { .. } => Ok(()),
        FaultAction::Delete(node) => {
            operator::delete_while_down(cluster, context, logger, node, lasting).await
        }
        FaultAction::Drain(node) => operator::restart(cluster, node).await,
        FaultAction::Wipe { node, kills_leader } => {
            operator::wipe(cluster, node, kills_leader).await
        }
        FaultAction::Change { joins, leaves, is_lost, kills_leader } => {
            operator::change_members(cluster, (joins, leaves), is_lost, kills_leader).await
        }
        FaultAction::SlowSyncs(node, time) => {
            disk_faults::slow_syncs(cluster, node, time, lasting).await?;
            cluster.check_running()
        }
        FaultAction::FillDisk { node, left_mib } => {
            if !disk_faults::fill_disk(cluster, context, node, left_mib, lasting).await? {
                logger.log("  the disk did not become full");
            }
            cluster.check_running()
        }
        FaultAction::Damage { node, what, is_running, seed } => {
            let (which, how) = ((node, what), (is_running, seed));
            disk_faults::damage_files(cluster, context, logger, which, how, lasting).await
        }
        FaultAction::Restore { node, seed } => {
            if !disk_faults::restore(cluster, context, logger, backup, (node, seed)).await? {
                logger.log("  no segment to restore");
            }
            Ok(())
        }
        _ => inject_for_a_while(cluster, context, fault, is_settled).await,
    }
}

/// Starts a fault, waits and heals the cluster.
async fn inject_for_a_while(
    cluster: &mut ChaosCluster,
    context: &WorkloadContext,
    fault: &ChaosFault,
    is_settled: bool,
) -> anyhow::Result<()> {
    let takes_majority = fault.takes_majority(cluster.minority());
    let ends = Instant::now() + fault.lasting;
    start_fault(cluster, &fault.what).await?;
    if let FaultAction::AwayUntilPurged(node) = fault.what {
        keep_away_until_purged(cluster, node).await?;
    }
    if takes_majority {
        context.recorder.add(HistoryEvent::QuorumLost);
        if is_settled {
            check_reads_without_majority(cluster, context, &fault.what).await?;
        }
    }
    tokio::time::sleep_until(ends).await;
    if takes_majority {
        context.recorder.add(HistoryEvent::QuorumBack);
    }
    let ends_nodes = matches!(
        fault.what,
        FaultAction::Kill(_)
            | FaultAction::Terminate(_)
            | FaultAction::AwayUntilPurged(_)
            | FaultAction::FailSyncs(_)
    );
    if !ends_nodes {
        cluster.check_running()?;
    }
    cluster.heal()
}

async fn start_fault(cluster: &mut ChaosCluster, what: &FaultAction) -> anyhow::Result<()> {
    let others = |node: u64| {
        let ids = cluster.ids().into_iter();
        ids.filter(move |other| *other != node).collect::<Vec<_>>()
    };
    match what {
        FaultAction::Kill(nodes) => cluster.kill(nodes).await?,
        FaultAction::Terminate(node) => cluster.terminate(*node).await?,
        FaultAction::FailSyncs(node) => disk_faults::fail_syncs(cluster, *node).await?,
        FaultAction::Pause(nodes) => nodes.iter().try_for_each(|node| cluster.pause(*node))?,
        FaultAction::Isolate(node) => {
            for other in others(*node) {
                cluster.set_link(*node, other, LinkMode::HoldAll);
                cluster.set_link(other, *node, LinkMode::HoldAll);
            }
        }
        FaultAction::BlockOutgoing(node) => {
            for other in others(*node) {
                cluster.set_link(*node, other, LinkMode::HoldForward);
                cluster.set_link(other, *node, LinkMode::HoldBackward);
            }
        }
        FaultAction::BlockIncoming(node) => {
            for other in others(*node) {
                cluster.set_link(*node, other, LinkMode::HoldBackward);
                cluster.set_link(other, *node, LinkMode::HoldForward);
            }
        }
        FaultAction::PartitionPair(a, b) => {
            cluster.set_link(*a, *b, LinkMode::HoldAll);
            cluster.set_link(*b, *a, LinkMode::HoldAll);
        }
        FaultAction::PartitionAll => cluster.set_links(LinkMode::HoldAll),
        FaultAction::Slow(wait) => cluster.set_links(LinkMode::Delay(*wait)),
        FaultAction::Clients(node, mode) => cluster.set_client_link(*node, *mode),
        // Handled by `keep_away_until_purged` and `inject`.
        FaultAction::AwayUntilPurged(_)
        | FaultAction::Trim { .. }
        | FaultAction::Delete(_)
        | FaultAction::Drain(_)
        | FaultAction::Wipe { .. }
        | FaultAction::Change { .. }
        | FaultAction::SlowSyncs(..)
        | FaultAction::FillDisk { .. }
        | FaultAction::Damage { .. }
        | FaultAction::Restore { .. } => {}
    }
    Ok(())
}

/// Kills a node and waits until the other logs are purged of the entries that it lacks.
async fn keep_away_until_purged(cluster: &mut ChaosCluster, node: u64) -> anyhow::Result<()> {
    let last_indexes = cluster.last_indexes(node).await?;
    cluster.kill(&[node]).await?;
    let deadline = Instant::now() + PURGE_MAX;
    while !cluster.has_purged(&last_indexes).await {
        if Instant::now() > deadline {
            bail!(
                "STUCK: the logs still have what node {node} lacks after {PURGE_MAX:?}: \
                 {last_indexes:?}"
            );
        }
        sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

/// Checks that replicas without a majority still serve their committed records.
async fn check_reads_without_majority(
    cluster: &ChaosCluster,
    context: &WorkloadContext,
    what: &FaultAction,
) -> anyhow::Result<()> {
    let silent = match what {
        FaultAction::Kill(nodes) | FaultAction::Pause(nodes) => nodes.clone(),
        _ => Vec::new(),
    };
    for node_client in
        cluster.node_clients().into_iter().filter(|node| !silent.contains(&node.node_id))
    {
        for partition in 0..context.partitions {
            let deadline = Instant::now() + READ_WITHOUT_MAJORITY_MAX;
            while let Err(error) = node_client.fetch((TOPIC, partition), 0, Duration::ZERO).await {
                if Instant::now() > deadline {
                    let node = node_client.node_id;
                    bail!(
                        "NO READ: node {node}, without a majority, does not serve partition \
                         {partition}: {error}"
                    )
                }
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
    Ok(())
}
