//! Lag of a group's committed offsets, computed from the watermarks that this node knows.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use helix_proto::log::v1::{CommitStatus, CommittedOffset, OffsetAndLag, TopicPartition};
use tokio::time::timeout;

use super::time;
use crate::log::{CommittedRow, ConsumerGroup, OffsetLag, PartitionKey, Watermarks};
use crate::node::Node;
use crate::shard::Shard;

/// Longest wait for watermarks from the leaders of partitions.
const CATCH_UP_MAX: Duration = Duration::from_secs(1);

/// Returns the readable records of a partition; `None` if this node does not know its end.
pub(super) fn readable_records(node: &Node, key: PartitionKey) -> Option<u64> {
    let Watermarks { log_start, high_watermark } = node.watermarks_of(key)?;
    Some(high_watermark.saturating_sub(log_start))
}

/// Returns the readable records of the [`read_partitions`] without a committed offset.
pub(super) fn uncommitted_lag(
    node: &Node,
    group: &ConsumerGroup,
    counts: impl Fn(&str) -> bool,
) -> u64 {
    let keys = read_partitions(node, group, counts);
    let is_uncommitted =
        |key: &PartitionKey| group.offset(*key).and_then(CommittedRow::offset).is_none();
    let readable = keys.filter(is_uncommitted).filter_map(|key| readable_records(node, key));
    readable.fold(0, u64::saturating_add)
}

/// Fetches the watermarks of a group's partitions in shards without a replica here.
pub(super) async fn learn_ends(node: &Node, group: &ConsumerGroup, counts: impl Fn(&str) -> bool) {
    let read = read_partitions(node, group, counts);
    node.learn_watermarks(read.chain(group.offsets().map(|(key, _)| key))).await;
}

/// Returns the partitions of the topics that a group reads.
///
/// These topics are assigned to the group or have its offsets, and `counts` accepts their names.
/// Topics that no member of a group with members subscribes to are left out.
fn read_partitions(
    node: &Node,
    group: &ConsumerGroup,
    counts: impl Fn(&str) -> bool,
) -> impl Iterator<Item = PartitionKey> {
    let assigned = group.assigned_topics().iter().map(|(topic_id, _)| *topic_id);
    let topics: BTreeSet<u64> =
        assigned.chain(group.offsets().map(|(key, _)| key.topic_id)).collect();
    let topics = topics.into_iter().filter_map(|topic_id| node.topic_of(topic_id));
    let is_read = |name: &str| counts(name) && !group.has_left(name);
    let topics: Vec<_> = topics.filter(|topic| is_read(&topic.name)).collect();
    topics.into_iter().flat_map(|topic| {
        let topic_id = topic.id;
        (0..topic.partition_count).map(move |number| PartitionKey { topic_id, number })
    })
}

/// A group's offsets, and the watermarks that this node knows of their partitions.
pub(super) struct LagView<'a> {
    node: &'a Node,
    group: &'a ConsumerGroup,
    /// Shards whose replicas here caught up with everything acknowledged before the call.
    fresh: BTreeSet<u64>,
}

impl<'a> LagView<'a> {
    /// Fetches watermarks from other nodes, and catches up replicas here that are behind the
    /// offsets.
    pub(super) async fn new(
        node: &'a Node,
        group: &'a ConsumerGroup,
        partitions: impl Iterator<Item = PartitionKey>,
    ) -> Self {
        let mut behind: BTreeMap<u64, Arc<Shard>> = BTreeMap::new();
        let partitions: Vec<PartitionKey> = partitions.collect();
        node.learn_watermarks(partitions.iter().copied()).await;
        for key in partitions {
            let Some(offset) = group.offset(key).and_then(CommittedRow::offset) else { continue };
            if node.known_watermarks(key, offset).is_none()
                && let Some((_, shard, _)) = node.locate_key(key)
            {
                behind.insert(shard.id(), shard);
            }
        }
        let caught_up = behind.values().map(|shard| async {
            let caught_up = timeout(CATCH_UP_MAX, node.cluster().catch_up_shard(shard)).await;
            matches!(caught_up, Ok(Ok(()))).then_some(shard.id())
        });
        let fresh = join_all(caught_up).await.into_iter().flatten().collect();
        Self { node, group, fresh }
    }

    fn bounds(&self, key: PartitionKey, offset: u64) -> Option<Watermarks> {
        if let Some(bounds) = self.node.known_watermarks(key, offset) {
            return Some(bounds);
        }
        if self.node.remote_state(key).is_some() {
            return self.node.watermarks_of(key);
        }
        let (_, shard, partition) = self.node.locate_key(key)?;
        shard.watermarks(partition).ok().filter(|_| self.fresh.contains(&shard.id()))
    }

    /// Returns a committed offset with lag; `None` if there is none.
    pub(super) fn offset_and_lag(
        &self,
        topic: String,
        key: PartitionKey,
        row: &CommittedRow,
    ) -> Option<OffsetAndLag> {
        let offset = row.offset()?;
        let bounds = self.bounds(key, offset);
        let status = match bounds {
            None if self.node.topic_of(key.topic_id).is_none() => CommitStatus::TopicDeleted,
            None => CommitStatus::Unknown,
            Some(it) if offset < it.log_start => CommitStatus::BelowLogStart,
            Some(it) if offset > it.high_watermark => CommitStatus::AboveHighWatermark,
            Some(_) => CommitStatus::Valid,
        };
        let lag = bounds.map(|bounds| OffsetLag::new(offset, bounds));
        let unsubscribed = self.group.has_left(&topic);
        let partition = TopicPartition { topic, partition: key.number, topic_id: key.topic_id };
        let metadata = row.metadata().to_owned();
        Some(OffsetAndLag {
            committed: Some(CommittedOffset { partition: Some(partition), offset, metadata }),
            high_watermark: bounds.map(|it| it.high_watermark),
            lag: lag.map(|it| it.lag),
            log_start_offset: bounds.map(|it| it.log_start),
            status: status.into(),
            committed_at: Some(time::to_timestamp(row.changed_us())),
            lost: lag.map(|it| it.lost),
            unsubscribed,
        })
    }
}
