//! Lag of consumer groups in one topic, for `helix topic describe`.

use std::time::Duration;

use futures_util::{StreamExt, stream};
use helix_client::Client;
use helix_client::proto::log::v1::{ErrorReason, GroupSummary, OffsetAndLag, Topic};
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::{Instant, timeout_at};

use super::rows::state_name;
use crate::commands::topic::record_count;
use crate::output::message;

/// Most groups that are asked for their offsets, in the order of their names.
const GROUPS_MAX: i32 = 200;

/// Groups that are asked at the same time.
const CALLS_MAX: usize = 16;

/// Time for all groups. A group without a coordinator must not hold back the description.
const TIME_MAX: Duration = Duration::from_secs(3);

/// Lag of a group in a topic.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct TopicGroupRow {
    group: String,
    state: &'static str,
    member_count: u32,
    /// Records to read, also without a committed offset; null if the group's coordinator did not
    /// answer, or does not know an end.
    lag: Option<u64>,
}

/// Returns the groups that have committed offsets in a topic.
pub(crate) async fn of_topic(client: &Client, topic: &Topic, is_quiet: bool) -> Vec<TopicGroupRow> {
    let deadline = Instant::now() + TIME_MAX;
    let admin = client.admin();
    // A cluster without groups, or without this service, has none to show.
    let listed = timeout_at(deadline, admin.groups_page(GROUPS_MAX, "")).await;
    let Ok(Ok((groups, next))) = listed else { return Vec::new() };
    if !next.is_empty() && !is_quiet {
        message!("the lag of the first {} groups is shown", groups.len());
    }
    let lag = |group: GroupSummary| {
        let admin = &admin;
        async move {
            let offsets =
                timeout_at(deadline, admin.group_offsets(&group.group, &[&topic.name])).await;
            let lag = match offsets {
                Ok(Ok(offsets)) if offsets.is_empty() => return None,
                Ok(Ok(offsets)) => lag_in(topic, &offsets),
                Ok(Err(error)) if error.is(ErrorReason::GroupNotFound) => return None,
                Ok(Err(_)) | Err(_) => None,
            };
            let state = state_name(group.state());
            Some(TopicGroupRow { group: group.group, state, member_count: group.member_count, lag })
        }
    };
    let found = stream::iter(groups).map(lag).buffered(CALLS_MAX);
    found.filter_map(std::future::ready).collect().await
}

/// Returns the records to read in all partitions of a topic; `None` if an end is not known.
fn lag_in(topic: &Topic, offsets: &[OffsetAndLag]) -> Option<u64> {
    let lag = |number: u32| {
        let is_wanted = |it: &&OffsetAndLag| {
            let committed = it.committed.as_ref().and_then(|it| it.partition.as_ref());
            committed.is_some_and(|it| it.partition == number)
        };
        offsets.iter().find(is_wanted).map(|it| it.lag)
    };
    let partitions = topic.partitions.iter();
    partitions.map(|it| lag(it.partition).unwrap_or_else(|| record_count(it))).sum()
}

#[cfg(test)]
mod tests {
    use helix_client::proto::log::v1::{
        CommittedOffset, PartitionInfo, TopicPartition, Watermarks,
    };

    use super::*;

    #[test]
    fn lag_has_partitions_without_an_offset() {
        let partition = |partition, high_watermark| PartitionInfo {
            partition,
            watermarks: Some(Watermarks { log_start_offset: 2, high_watermark }),
            ..PartitionInfo::default()
        };
        let mut topic =
            Topic { partitions: vec![partition(0, 9), partition(1, 12)], ..Topic::default() };
        let at = TopicPartition { partition: 0, ..TopicPartition::default() };
        let committed = Some(CommittedOffset { partition: Some(at), ..CommittedOffset::default() });
        let offset = OffsetAndLag { committed, lag: Some(3), ..OffsetAndLag::default() };
        assert_eq!(lag_in(&topic, std::slice::from_ref(&offset)), Some(3 + 10));
        assert_eq!(lag_in(&topic, &[OffsetAndLag { lag: None, ..offset.clone() }]), None);
        topic.partitions[1].watermarks = None;
        assert_eq!(lag_in(&topic, &[offset]), None);
    }
}
