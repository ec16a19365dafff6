//! Full check: heals the cluster, reads every replica from its start and judges the history.
//!
//! The workload must be stopped.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use helix_checker::payload::events;
use helix_checker::{HistoryEvent, HistoryVerdict};
use tokio::time::{Instant, sleep};

use crate::cluster::ChaosCluster;
use crate::logger::Logger;
use crate::node_client::{NodeClient, NodeFetchError};
use crate::workload::{TopicPartition, WorkloadContext, is_out_of_range};

/// Longest wait for healed replicas to become equal.
const CATCH_UP_MAX: Duration = Duration::from_secs(60);

/// Longest time to read one partition of one replica.
const READ_MAX: Duration = Duration::from_secs(120);

/// Longest time over which full reads are repeated because the logs grow meanwhile.
const REST_MAX: Duration = Duration::from_secs(120);

/// Reads every replica and judges the history. Returns the verdict and the ends of the partitions.
///
/// # Errors
/// The replicas do not become equal or cannot be read. Violations are in the verdict, not here.
pub(crate) async fn check_replicas(
    cluster: &mut ChaosCluster,
    context: &WorkloadContext,
    logger: Logger,
) -> anyhow::Result<(HistoryVerdict, Vec<u64>)> {
    cluster.heal()?;
    let begin = Instant::now();
    cluster.wait_until_healthy(CATCH_UP_MAX).await?;
    logger.log_if_slow("  cluster is healthy", begin);
    let round = context.id();
    let deadline = Instant::now() + REST_MAX;
    while Instant::now() < deadline {
        let begin = Instant::now();
        let before = cluster.wait_until_level(CATCH_UP_MAX).await?;
        logger.log_if_slow("  replicas are level", begin);
        let begin = Instant::now();
        let (history, ends) = read_all(cluster, context, round).await?;
        logger.log_if_slow("  replicas are read", begin);
        // A leader change adds an entry and may commit pending ones; retention changes the log too.
        // Then the replicas were not read in the same state.
        if cluster.level().await.is_ok_and(|after| after == before) {
            context.on_all_read();
            context.recorder.add_all(history);
            return Ok((context.recorder.check()?, ends));
        }
    }
    bail!("STUCK: the logs keep growing for {REST_MAX:?} although the workload is stopped")
}

async fn read_all(
    cluster: &ChaosCluster,
    context: &WorkloadContext,
    round: u32,
) -> anyhow::Result<(Vec<HistoryEvent>, Vec<u64>)> {
    let mut history = Vec::new();
    let mut ends = BTreeMap::new();
    for node_client in cluster.node_clients() {
        let (reader, replica) = (context.id(), node_client.node_id);
        let metadata = node_client.metadata().await?;
        let shards: BTreeMap<_, _> =
            metadata.topics.into_iter().map(|route| (route.topic, route.shard_ids)).collect();
        let placed = cluster.shards_on(replica).await?;
        for (partition, target) in context.all_partitions() {
            let shard = shards.get(target.topic).and_then(|it| it.get(target.partition as usize));
            let shard = shard.with_context(|| {
                format!("node {replica} does not know partition {partition} of {}", target.topic)
            })?;
            if !placed.contains(shard) {
                continue;
            }
            history.push(HistoryEvent::FinalOpened { reader, partition, round, replica });
            let what = FinalRead { node_client: &node_client, context, reader, partition, target };
            let TopicPartition { topic, partition: number, .. } = target;
            let end = what
                .to_end(&mut history)
                .await
                .with_context(|| format!("read partition {number} of {topic} of node {replica}"))?;
            ends.insert(partition, end);
        }
    }
    let mut all = context.all_partitions();
    let unread = all.find(|(partition, _)| !ends.contains_key(partition));
    ensure!(unread.is_none(), "VIOLATION: no node has a replica of {unread:?}");
    Ok((history, ends.into_values().collect()))
}

/// Full read of one partition of one replica.
struct FinalRead<'a> {
    node_client: &'a NodeClient,
    context: &'a WorkloadContext,
    reader: u32,
    /// Number of the partition in the history.
    partition: u32,
    target: TopicPartition,
}

impl FinalRead<'_> {
    /// Reads from the log start to the high watermark and returns the end.
    async fn to_end(&self, history: &mut Vec<HistoryEvent>) -> anyhow::Result<u64> {
        let Self { reader, partition, target, .. } = *self;
        let deadline = Instant::now() + READ_MAX;
        let mut offset = 0;
        let mut has_begun = false;
        loop {
            let asked = (target.topic, target.partition);
            let read = match self.node_client.fetch(asked, offset, Duration::ZERO).await {
                Ok(read) => read,
                Err(NodeFetchError::Rejected(error)) if is_out_of_range(&error) => {
                    let log_start = error.watermarks.unwrap_or_default().log_start_offset;
                    if !has_begun && log_start > offset {
                        offset = log_start;
                        self.context.note_log_start(partition, offset);
                        history.push(HistoryEvent::FinalStarts { reader, partition, offset });
                        has_begun = true;
                        continue;
                    }
                    // Recorded for the verdict; the log ends here for this reader. If the log start
                    // moved during the read, the full read is repeated.
                    history.push(HistoryEvent::OutOfRange { reader, partition, offset });
                    history.push(HistoryEvent::FinalEnded {
                        reader,
                        partition,
                        high_watermark: offset,
                    });
                    return Ok(offset);
                }
                Err(error) if Instant::now() > deadline => bail!("{error}"),
                Err(_) => {
                    sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            has_begun = true;
            let high_watermark = read.watermarks.unwrap_or_default().high_watermark;
            let (new_events, end) = events(reader, partition, &read.batches, offset);
            let is_foreign =
                new_events.iter().any(|event| matches!(event, HistoryEvent::Foreign { .. }));
            history.extend(new_events);
            self.context.record_final_read(partition, &read.batches);
            // No more records come although there should be: the checker reports the gap.
            let is_stuck = end == offset && Instant::now() > deadline;
            if end >= high_watermark || is_foreign || is_stuck {
                history.push(HistoryEvent::FinalEnded { reader, partition, high_watermark });
                return Ok(end);
            }
            offset = end;
        }
    }
}
