//! Disk failures and file damage under running nodes, and checks of how the nodes react.

use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, ensure};
use helix_checker::HistoryEvent;
use helix_checker::payload::events;
use helix_client::{AppendOptions, NewTopic};
use helix_proto::log::v1::{ErrorReason, HealthReason, Record, TopicConfig};
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::time::{Instant, sleep};

use crate::cluster::ChaosCluster;
use crate::disk::{SyncFault, SyscallTracer};
use crate::logger::Logger;
use crate::node_client::{NodeClient, NodeFetchError};
use crate::operator::retry_until_ok;
use crate::segment_damage::{self, SegmentBackup, SegmentFileDamage};
use crate::workload::{WorkloadContext, is_out_of_range};

/// Longest time that a node with failing syncs may run: until its next sync.
const STOP_MAX: Duration = Duration::from_secs(60);

/// Longest wait until a full disk is reported.
const FULL_MAX: Duration = Duration::from_secs(60);

/// Longest wait until a node has scrubbed its logs and rebuilt damaged ranges.
const REPAIR_MAX: Duration = Duration::from_secs(120);

/// Topic with minimal retention, written to until a disk is full.
const BALLAST: &str = "ballast";
const BALLAST_PARTITIONS: u32 = 6;
const BALLAST_KEPT_BYTES: u64 = 1 << 20;
const BALLAST_RECORD_BYTES: usize = 900_000;

/// Damaged ranges skipped in one partition, at most.
const RANGES_MAX: usize = 10;

/// Exit code of a node whose disk has failed.
const DISK_FAILED: i32 = 70;

/// Lets every sync of a node fail until it has exited, which it must.
pub(crate) async fn fail_syncs(cluster: &mut ChaosCluster, node: u64) -> anyhow::Result<()> {
    let tracer = attach(cluster, node, SyncFault::Fails)?;
    let code = cluster.wait_for_exit(node, STOP_MAX).await;
    tracer.detach().await?;
    let code = code.context("a node with failing syncs must exit")?;
    ensure!(code == Some(DISK_FAILED), "node {node} with failing syncs exited with {code:?}");
    Ok(())
}

/// Delays every sync of a node for a while.
pub(crate) async fn slow_syncs(
    cluster: &mut ChaosCluster,
    node: u64,
    time: Duration,
    lasting: Duration,
) -> anyhow::Result<()> {
    let tracer = attach(cluster, node, SyncFault::Takes(time))?;
    sleep(lasting).await;
    tracer.detach().await
}

fn attach(
    cluster: &mut ChaosCluster,
    node: u64,
    fault: SyncFault,
) -> anyhow::Result<SyscallTracer> {
    let process = cluster.process_id(node).with_context(|| format!("node {node} does not run"))?;
    SyscallTracer::attach(process, fault)
}

/// Fills a node's disk, writes until the node reports that it is full, and frees the space later.
///
/// Returns false if the node did not report it, which happens if it leads no shard.
pub(crate) async fn fill_disk(
    cluster: &ChaosCluster,
    context: &WorkloadContext,
    node: u64,
    left_mib: u64,
    lasting: Duration,
) -> anyhow::Result<bool> {
    let disk = cluster.disk(node).with_context(|| format!("node {node} has no disk"))?;
    let (client, node_client) = (context.client()?, cluster.client_of(node)?);
    let config =
        TopicConfig { retention_bytes: Some(BALLAST_KEPT_BYTES), ..TopicConfig::default() };
    let topic = NewTopic { config, ..NewTopic::new(BALLAST, BALLAST_PARTITIONS) };
    retry_until_ok(|| async { client.admin().create_topic(&topic).await }).await?;
    disk.fill(left_mib << 20)?;
    let value = Some(vec![7; BALLAST_RECORD_BYTES].into());
    let records = [Record { value, ..Record::default() }];
    let deadline = Instant::now() + FULL_MAX;
    let mut partition = 0;
    let is_full = loop {
        let is_full = node_client.health().await.is_ok_and(|health| {
            let mut issues = health.issues.iter();
            issues.any(|issue| issue.reason() == HealthReason::DiskFull)
        });
        if is_full || Instant::now() > deadline {
            break is_full;
        }
        // Rejected once the disk of a leader is full, which is the goal.
        let options = AppendOptions::default();
        let _ = client.append(BALLAST, partition, &records[..], &options).await;
        partition = (partition + 1) % BALLAST_PARTITIONS;
    };
    sleep(lasting).await;
    disk.release().await?;
    Ok(is_full)
}

/// Damages files of a node, which must repair them without serving wrong records.
///
/// The node may reject reads of damaged ranges. The other replicas are intact, and `segment_damage`
/// injects only damage that a replica can detect and repair, so no node has to be replaced.
pub(crate) async fn damage_files(
    cluster: &mut ChaosCluster,
    context: &WorkloadContext,
    logger: Logger,
    (node, what): (u64, SegmentFileDamage),
    (is_running, seed): (bool, u64),
    lasting: Duration,
) -> anyhow::Result<()> {
    if !is_running {
        cluster.kill(&[node]).await?;
    }
    let mut rng = StdRng::seed_from_u64(seed);
    let description = segment_damage::damage(&cluster.data_dir(node), what, &mut rng).await?;
    logger.log(format_args!("  {description}"));
    if is_running {
        // Damage that a read hits is repaired at once; the next start repairs the rest.
        let (given, refused) = read_all(context, &cluster.client_of(node)?).await;
        logger.log(format_args!("  served {given} batches, rejected {refused} ranges"));
        sleep(lasting).await;
        cluster.kill(&[node]).await?;
    }
    cluster.start_node(node)?;
    wait_for_repair(cluster, context, logger, node).await
}

/// Restores an older copy of a segment while the node is down; the node must detect and repair it.
///
/// Returns false if there was nothing to restore.
pub(crate) async fn restore(
    cluster: &mut ChaosCluster,
    context: &WorkloadContext,
    logger: Logger,
    backup: &SegmentBackup,
    (node, seed): (u64, u64),
) -> anyhow::Result<bool> {
    cluster.kill(&[node]).await?;
    let mut rng = StdRng::seed_from_u64(seed);
    let description = backup.restore(&cluster.data_dir(node), &mut rng).await?;
    cluster.start_node(node)?;
    let Some(description) = description else { return Ok(false) };
    logger.log(format_args!("  {description}"));
    wait_for_repair(cluster, context, logger, node).await?;
    Ok(true)
}

/// Waits until a restarted node has scrubbed its logs and repaired the damage.
///
/// Reads meanwhile, and again once the node reports that it is repaired.
async fn wait_for_repair(
    cluster: &mut ChaosCluster,
    context: &WorkloadContext,
    logger: Logger,
    node: u64,
) -> anyhow::Result<()> {
    let begin = Instant::now();
    let node_client = cluster.client_of(node)?;
    let (given, refused) = read_all(context, &node_client).await;
    let repaired = cluster.wait_until_repaired(node, REPAIR_MAX).await?;
    logger.log(format_args!(
        "  served {given} batches, rejected {refused} ranges; repaired shards {repaired:?} within \
         {} ms",
        begin.elapsed().as_millis()
    ));
    context.stats.repairs.fetch_add(repaired.len() as u64, Ordering::Relaxed);
    let (_, refused) = read_all(context, &node_client).await;
    ensure!(
        refused == 0,
        "NOT REPAIRED: node {node} reports no damage, but rejects {refused} ranges as damaged"
    );
    Ok(())
}

/// Reads what a damaged replica serves of each partition, skipping damaged ranges.
///
/// The checker sees the records. Returns the batches served and the ranges rejected as damaged.
async fn read_all(context: &WorkloadContext, node_client: &NodeClient) -> (usize, usize) {
    let (mut given, mut refused) = (0, 0);
    for (partition, target) in context.all_partitions() {
        let reader = context.id();
        let mut offset = 0;
        context.recorder.add(HistoryEvent::Opened { reader, partition, offset });
        let mut skipped = 0;
        while skipped < RANGES_MAX {
            let asked = (target.topic, target.partition);
            match node_client.fetch(asked, offset, Duration::ZERO).await {
                Ok(read) => {
                    let (new_events, end) = events(reader, partition, &read.batches, offset);
                    context.recorder.add_all(new_events);
                    given += read.batches.len();
                    if end == offset {
                        break;
                    }
                    offset = end;
                    continue;
                }
                Err(NodeFetchError::Rejected(error)) if is_out_of_range(&error) => {
                    let log_start = error.watermarks.unwrap_or_default().log_start_offset;
                    context.note_log_start(partition, log_start);
                    let Some(next) = context.next_boundary(partition, log_start) else { break };
                    offset = next;
                }
                Err(NodeFetchError::Rejected(error)) if error.is(ErrorReason::CorruptLog) => {
                    refused += 1;
                    let Some(next) = context.next_boundary(partition, offset + 1) else { break };
                    offset = next;
                }
                // The node is down or does not serve this shard.
                Err(_) => break,
            }
            skipped += 1;
            context.recorder.add(HistoryEvent::Opened { reader, partition, offset });
        }
    }
    (given, refused)
}
