//! Offsets at which a member starts to read its partitions.

use std::collections::{BTreeMap, HashMap};

use futures_util::StreamExt;
use futures_util::stream::{FuturesUnordered, iter};
use helix_proto::log::v1::start_position::Position as WirePosition;
use helix_proto::log::v1::{ErrorReason, StartPosition};
use tokio::time::sleep;
use tracing::debug;

use super::membership::MemberHandle;
use super::{AssignedPartition, GroupKey, OwnershipId, StartPolicy};
use crate::client::Client;
use crate::error::{Error, Result};
use crate::topic::TopicRef;

/// Limit of concurrent requests for single partitions.
const SINGLE_REQUESTS_MAX: usize = 16;

/// A partition whose start is needed.
#[derive(Debug, Clone)]
pub(super) struct StartingPartition {
    pub(super) partition: AssignedPartition,
    pub(super) ownership: OwnershipId,
}

/// Start of a partition, or the reason why it has none.
pub(super) type ResolvedStart = (GroupKey, OwnershipId, Result<u64>);

/// Returns the start position at a group's committed offset.
pub(super) fn committed(group: &str, policy: StartPolicy) -> StartPosition {
    StartPosition {
        position: Some(WirePosition::CommittedGroup(group.to_owned())),
        commit_fallback: policy.to_wire().into(),
        reached_offset: None,
    }
}

/// Returns the start position after an offset that is no longer readable.
///
/// `None` if the policy has no fallback. The service chooses the start, so that its metrics count
/// the fallback.
pub(super) fn overtaken(group: &str, policy: StartPolicy, reached: u64) -> Option<StartPosition> {
    match policy {
        StartPolicy::Safe | StartPolicy::Fail => None,
        StartPolicy::Earliest | StartPolicy::Latest => {
            Some(StartPosition { reached_offset: Some(reached), ..committed(group, policy) })
        }
    }
}

/// Resolves a position in partitions. Retries while the member owns them.
pub(super) async fn resolve(
    membership: &MemberHandle,
    partitions: Vec<StartingPartition>,
    position: StartPosition,
) -> Vec<ResolvedStart> {
    let mut by_topic: BTreeMap<(String, u64), Vec<StartingPartition>> = BTreeMap::new();
    for starting in partitions {
        let AssignedPartition { topic, topic_id, .. } = starting.partition.clone();
        by_topic.entry((topic, topic_id)).or_default().push(starting);
    }
    let topics =
        by_topic.into_values().map(|partitions| of_topic(membership, partitions, &position));
    topics.collect::<FuturesUnordered<_>>().collect::<Vec<_>>().await.concat()
}

async fn of_topic(
    membership: &MemberHandle,
    mut partitions: Vec<StartingPartition>,
    position: &StartPosition,
) -> Vec<ResolvedStart> {
    let mut resolved = Vec::new();
    loop {
        let is_held = |it: &StartingPartition| membership.holds(it.partition.key(), it.ownership);
        partitions.retain(is_held);
        if partitions.is_empty() {
            return resolved;
        }
        let client = &membership.client;
        let error = match request(client, &partitions, position).await {
            Ok(starts) => {
                resolved.extend(starts);
                return resolved;
            }
            Err(error) if !error.retryable && partitions.len() == 1 => {
                let StartingPartition { partition, ownership } = &partitions[0];
                let AssignedPartition { topic, partition: number, .. } = partition;
                let error = error.with_partition(topic, *number);
                resolved.push((partition.key(), *ownership, Err(error)));
                return resolved;
            }
            // One partition fails the request of all, so request each separately.
            Err(error) if !error.retryable => {
                let singles = std::mem::take(&mut partitions).into_iter();
                let singles = singles.map(|it| Box::pin(of_topic(membership, vec![it], position)));
                let singles: Vec<_> =
                    iter(singles).buffer_unordered(SINGLE_REQUESTS_MAX).collect().await;
                resolved.extend(singles.concat());
                return resolved;
            }
            Err(error) => error,
        };
        debug!(group = membership.group, %error, "retrying to resolve start offsets");
        sleep(client.shared.jitter.draw(u32::MAX)).await;
    }
}

async fn request(
    client: &Client,
    partitions: &[StartingPartition],
    position: &StartPosition,
) -> Result<Vec<ResolvedStart>> {
    let AssignedPartition { topic, topic_id, .. } = &partitions[0].partition;
    let numbers: Vec<_> = partitions.iter().map(|it| it.partition.partition).collect();
    let topic = TopicRef::with_id(topic, *topic_id);
    let offsets = client.admin().resolve_start(topic, &numbers, position.clone()).await?;
    let offsets: HashMap<u32, u64> = offsets.iter().map(|it| (it.partition, it.offset)).collect();
    let offset_of = |it: &StartingPartition| {
        let missing = || Error::known(ErrorReason::Internal, "the response lacks a partition");
        let offset = offsets.get(&it.partition.partition).copied().ok_or_else(missing);
        (it.partition.key(), it.ownership, offset)
    };
    Ok(partitions.iter().map(offset_of).collect())
}

/// Returns true if a partition cannot be read because its topic was deleted.
///
/// The service will revoke the partition.
pub(super) fn is_gone(error: &Error, topic_id: u64) -> bool {
    match &error.recreated {
        Some(recreated) => recreated.expected_id == topic_id,
        None => matches!(
            error.reason,
            Some(
                ErrorReason::TopicNotFound
                    | ErrorReason::TopicDeleted
                    | ErrorReason::PartitionNotFound
            )
        ),
    }
}
