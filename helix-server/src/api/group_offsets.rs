//! Committed offsets of a group: reads with lag, and seeks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use helix_proto::log::v1::{
    CommittedOffset, ForgetGroupTopicRequest, ForgetGroupTopicResponse, GetOffsetsRequest,
    GetOffsetsResponse, SeekGroupRequest, SeekGroupResponse, SoughtOffset, TopicPartition,
};
use tonic::Status;

use super::authorize::Visibility;
use super::group::{GroupHandler, check_group};
use super::group_lag::LagView;
use super::group_pages::{GroupPageRequest, GroupRowKey};
use super::status::status_at;
use crate::call::CallMemory;
use crate::clock::Clock;
use crate::cluster::is_topic_name;
use crate::error::{Error, Result};
use crate::limits::{
    COMMIT_BYTES_MAX, GROUP_PARTITION_BYTES, MEMBER_ID_BYTES_MAX, OFFSETS_PER_COMMIT_MAX,
};
use crate::log::{
    CommittedRow, ConsumerGroup, GroupChange, OffsetUpdate, PartitionKey, Refusal, SeekOrigin,
    TOPICS_PER_GROUP_MAX, TopicOffsets, Watermarks,
};
use crate::node::Node;
use crate::protocol::COMMIT_ORDER;
use crate::quote::quote;
use crate::shard::{ReadFrom, Shard};

/// Reads the offsets of a group, at its coordinator.
pub(super) async fn get(
    node: &Node,
    request: GetOffsetsRequest,
    visible: &Visibility,
    call: Option<&CallMemory>,
) -> Result<GetOffsetsResponse> {
    let page = GroupPageRequest::parse(request.page_size, &request.page_token)?;
    let requested = requested_topics(&request.topics)?;
    let read = read_group_with_epoch(node, &request.group, request.allow_missing).await?;
    let (group, offsets_epoch) = read;
    let names: BTreeMap<u64, String> =
        group.topic_names().map(|(id, name)| (id, name.to_string())).collect();
    let is_requested = |key: &PartitionKey| {
        let name = names.get(&key.topic_id);
        let is_named =
            requested.is_empty() || name.is_some_and(|name| requested.contains(name.as_str()));
        is_named && visible.sees_topic(name.map_or("", String::as_str))
    };
    let is_row =
        |(key, row): &(PartitionKey, &CommittedRow)| row.offset().is_some() && is_requested(key);
    let rows = group.offsets().filter(is_row).map(|(key, _)| GroupRowKey::Partition(key));
    let found = |key: &GroupRowKey| match key {
        GroupRowKey::Partition(key) => group.offset(*key).map(|row| (*key, row)),
        GroupRowKey::Member(_) => None,
    };
    let name = |key: PartitionKey| names.get(&key.topic_id).map_or("", String::as_str);
    let row_bytes = |key: &GroupRowKey| {
        let bytes = |(key, row): (PartitionKey, &CommittedRow)| {
            GROUP_PARTITION_BYTES + name(key).len() + row.metadata().len()
        };
        found(key).map_or(0, bytes)
    };
    let page = page.cut(rows, row_bytes);
    page.reserve(call).await?;
    let shown = page.rows.iter().filter_map(GroupRowKey::partition);
    let lags = LagView::new(node, &group, shown).await;
    let offsets = page.rows.iter().filter_map(found);
    let offsets =
        offsets.filter_map(|(key, row)| lags.offset_and_lag(name(key).to_owned(), key, row));
    Ok(GetOffsetsResponse {
        offsets: offsets.collect(),
        next_page_token: page.next_page_token,
        offsets_epoch,
    })
}

/// Returns the topics that a request names, each once.
fn requested_topics(topics: &[String]) -> Result<BTreeSet<&str>> {
    if topics.len() > TOPICS_PER_GROUP_MAX {
        let what = format!("must be at most {TOPICS_PER_GROUP_MAX}, not {}", topics.len());
        return Err(Error::InvalidArgument { field: "topics", what });
    }
    Ok(topics.iter().map(String::as_str).collect())
}

/// Returns a group's state, from its coordinator.
pub(super) async fn read_group(node: &Node, name: &str) -> Result<Arc<ConsumerGroup>> {
    Ok(read_group_with_epoch(node, name, false).await?.0)
}

/// Like [`read_group`], with the epoch of the offsets if the cluster's protocol has it.
///
/// With `may_be_missing`, a missing group is returned as an empty one.
async fn read_group_with_epoch(
    node: &Node,
    name: &str,
    may_be_missing: bool,
) -> Result<(Arc<ConsumerGroup>, Option<u64>)> {
    check_group(name)?;
    let has_epoch = node.cluster().protocol() >= COMMIT_ORDER;
    let shard = match node.find_group(name).await {
        Err(Error::GroupNotFound { .. }) if may_be_missing => {
            return Ok((Arc::default(), has_epoch.then_some(0)));
        }
        found => found?,
    };
    if let Err(error) = shard.ready().await {
        return Err(shard.redirect(error).await);
    }
    let (group, epoch) =
        shard.read_groups(|groups| (groups.snapshot(name), groups.offsets_epoch(name)));
    let missing = || Error::GroupNotFound { group: name.to_owned() };
    let group = match group {
        None if may_be_missing => Arc::default(),
        group => group.ok_or_else(missing)?,
    };
    Ok((group, has_epoch.then_some(epoch)))
}

/// Sets offsets of a group without members, or takes back the last seek.
pub(super) async fn seek(
    node: &Node,
    handler: &GroupHandler,
    request: SeekGroupRequest,
) -> Result<SeekGroupResponse, Status> {
    check_group(&request.group)?;
    if request.by.len() > MEMBER_ID_BYTES_MAX {
        let what = format!("must have at most {MEMBER_ID_BYTES_MAX} bytes");
        return Err(Error::InvalidArgument { field: "by", what }.into());
    }
    if request.undo != request.offsets.is_empty() {
        let what = "give offsets, or undo, but not both".to_owned();
        return Err(Error::InvalidArgument { field: "offsets", what }.into());
    }
    if !request.undo && !request.topics.is_empty() {
        let what = "is for an undo; offsets name their topics".to_owned();
        return Err(Error::InvalidArgument { field: "topics", what }.into());
    }
    let (shard, topics) = if request.undo {
        let group = read_group(node, &request.group).await?;
        let only = requested_topics(&request.topics)?;
        let topics = undone(node, &group, &only)?;
        check_all_readable(node, &topics).await?;
        (node.find_group(&request.group).await?, topics)
    } else {
        // Runs first, because it checks that the cluster's protocol has groups.
        let shard = node.find_or_place_group(&request.group).await?;
        let topics = handler.new_offsets(request.offsets).await?;
        check_all_readable(node, &topics).await?;
        (shard, topics)
    };
    let (is_undo, offsets_epoch) = (request.undo, request.offsets_epoch);
    let origin = SeekOrigin { by: request.by, is_undo, offsets_epoch };
    let sought = change(node, &shard, &request.group, origin, topics, request.validate_only);
    match sought.await {
        Ok(offsets) => Ok(SeekGroupResponse { offsets }),
        Err(error) => Err(shard.redirect(error).await.into()),
    }
}

async fn change(
    node: &Node,
    shard: &Shard,
    name: &str,
    origin: SeekOrigin,
    topics: Vec<TopicOffsets>,
    validate_only: bool,
) -> Result<Vec<SoughtOffset>> {
    shard.ready().await?;
    let is_empty = topics.is_empty();
    let group = shard.read_groups(|groups| groups.snapshot(name));
    if let Some(group) = &group {
        group.check_no_members().map_err(Refusal::from)?;
        group.check_order_of_seek(origin.offsets_epoch).map_err(Refusal::from)?;
    }
    let group = group.unwrap_or_default();
    let mut sought = Vec::new();
    for topic in &topics {
        for (key, update) in topic.updates() {
            sought.push(SoughtOffset {
                partition: Some(TopicPartition {
                    topic: topic.name.clone(),
                    partition: key.number,
                    topic_id: key.topic_id,
                }),
                from: group.offset(key).and_then(CommittedRow::offset),
                to: update.offset,
            });
        }
    }
    drop(group);
    if !validate_only && !is_empty {
        let at_us = node.clock().now_us();
        shard.change_group(name, GroupChange::Seek { origin, topics, at_us }).await?;
        tracing::info!(group = name, partitions = sought.len(), "changed offsets by a seek");
    }
    Ok(sought)
}

/// Checks that each offset is readable or the high watermark. Skips removals of offsets.
async fn check_all_readable(node: &Node, topics: &[TopicOffsets]) -> Result<(), Status> {
    for topic in topics {
        for update in topic.offsets.iter().filter(|update| update.offset.is_some()) {
            let checked = check_readable(node, topic, update).await;
            checked.map_err(|error| status_at(&error, &topic.name, update.number))?;
        }
    }
    Ok(())
}

/// Checks that no offset is beyond the end of its partition.
///
/// Accepts offsets below the start: the records may have been removed after the member read them.
pub(super) async fn check_ends(node: &Node, topics: &[TopicOffsets]) -> Result<(), Status> {
    // Shards whose replicas here caught up with everything acknowledged before the call.
    let mut fresh = BTreeSet::new();
    for topic in topics {
        for (key, update) in topic.updates() {
            let end = |it: Watermarks| it.high_watermark >= update.offset.unwrap_or_default();
            if node.watermarks_of(key).is_some_and(end) {
                continue;
            }
            let checked = check_end(node, topic, update, &mut fresh).await;
            checked.map_err(|error| status_at(&error, &topic.name, update.number))?;
        }
    }
    Ok(())
}

async fn check_end(
    node: &Node,
    topic: &TopicOffsets,
    update: &OffsetUpdate,
    fresh: &mut BTreeSet<u64>,
) -> Result<()> {
    let key = node.find_key(&topic.name, topic.topic_id, update.number).await?;
    if let Some(watermarks) = node.remote_watermarks(key).await? {
        let requested = update.offset.unwrap_or_default();
        return match requested <= watermarks.high_watermark {
            true => Ok(()),
            false => Err(Error::OffsetOutOfRange { requested, watermarks }),
        };
    }
    let located = node.find(&topic.name, topic.topic_id, update.number).await?;
    if fresh.insert(located.shard.id()) {
        node.cluster().catch_up_shard(&located.shard).await?;
    }
    let watermarks = located.shard.watermarks_for(located.partition, ReadFrom::Leader)?;
    let requested = update.offset.unwrap_or_default();
    if requested <= watermarks.high_watermark {
        return Ok(());
    }
    Err(Error::OffsetOutOfRange { requested, watermarks })
}

/// Checks that an offset is readable or the high watermark.
async fn check_readable(node: &Node, topic: &TopicOffsets, update: &OffsetUpdate) -> Result<()> {
    let requested = update.offset.unwrap_or_default();
    let is_inside = |it: Watermarks| (it.log_start..=it.high_watermark).contains(&requested);
    let key = node.find_key(&topic.name, topic.topic_id, update.number).await?;
    if let Some(watermarks) = node.remote_watermarks(key).await? {
        return match is_inside(watermarks) {
            true => Ok(()),
            false => Err(Error::OffsetOutOfRange { requested, watermarks }),
        };
    }
    let located = node.find(&topic.name, topic.topic_id, update.number).await?;
    if located.shard.watermarks(located.partition).is_ok_and(is_inside) {
        return Ok(());
    }
    // This node's replica may be behind.
    node.cluster().catch_up_shard(&located.shard).await?;
    let watermarks = located.shard.watermarks_for(located.partition, ReadFrom::Leader)?;
    if is_inside(watermarks) {
        return Ok(());
    }
    Err(Error::OffsetOutOfRange { requested, watermarks })
}

/// Returns the offsets that an undo of the last seek restores, in these topics or in all.
///
/// Does not change offsets in deleted topics.
fn undone(node: &Node, group: &ConsumerGroup, only: &BTreeSet<&str>) -> Result<Vec<TopicOffsets>> {
    let mut topics = Vec::new();
    let mut bytes = 0;
    let mut count = 0;
    for (topic_id, name) in group.topic_names() {
        let is_meant = only.is_empty() || only.contains(&**name);
        if !is_meant || node.topic_of(topic_id).is_none() {
            continue;
        }
        let rows = group.offsets().filter(|(key, _)| key.topic_id == topic_id);
        let offsets = rows.filter_map(|(key, row)| {
            let offset = row.before_last_seek()?;
            let metadata = row.metadata().to_owned();
            Some(OffsetUpdate { number: key.number, offset, metadata })
        });
        let offsets: Vec<OffsetUpdate> = offsets.collect();
        if offsets.is_empty() {
            continue;
        }
        count += offsets.len();
        bytes += name.len() + 16;
        bytes += offsets.iter().map(|update| update.metadata.len() + 16).sum::<usize>();
        topics.push(TopicOffsets { topic_id, name: name.to_string(), offsets });
    }
    if count > OFFSETS_PER_COMMIT_MAX || bytes > COMMIT_BYTES_MAX {
        let remedy = match topics.len() {
            1 => "seek to the offsets that DescribeGroup has in its history",
            _ => "name topics",
        };
        let what = format!(
            "{count} partitions are too many for one call, the limit is {OFFSETS_PER_COMMIT_MAX}; \
             {remedy}"
        );
        return Err(Error::InvalidArgument { field: "topics", what });
    }
    Ok(topics)
}

/// Longest wait for the protocol of a new cluster.
const PROTOCOL_WAIT_MAX: Duration = Duration::from_secs(1);

/// Forgets the offsets of a topic that no member reads.
pub(super) async fn forget_topic(
    node: &Node,
    request: ForgetGroupTopicRequest,
) -> Result<ForgetGroupTopicResponse> {
    let ForgetGroupTopicRequest { group: name, topic, topic_id, validate_only, offsets_epoch } =
        request;
    check_group(&name)?;
    if !is_topic_name(&topic) {
        let what = format!("{} is not a topic name", quote(&topic));
        return Err(Error::InvalidArgument { field: "topic", what });
    }
    let group = read_group(node, &name).await?;
    if !node.cluster().wait_protocol(COMMIT_ORDER, PROTOCOL_WAIT_MAX).await {
        let what = "forgetting a group's topic before every node of the cluster is upgraded";
        return Err(Error::Unimplemented { what });
    }
    group.check_topic_unused(&topic, topic_id).map_err(Refusal::from)?;
    let mut ids = group.topic_ids(&topic);
    ids.retain(|id| topic_id == 0 || *id == topic_id);
    let rows = group.offsets().filter(|(key, _)| ids.contains(&key.topic_id));
    let offsets = rows.filter_map(|(key, row)| {
        let partition =
            TopicPartition { topic: topic.clone(), partition: key.number, topic_id: key.topic_id };
        let metadata = row.metadata().to_owned();
        Some(CommittedOffset { partition: Some(partition), offset: row.offset()?, metadata })
    });
    let offsets: Vec<CommittedOffset> = offsets.collect();
    if !ids.is_empty() {
        group.check_order_of_seek(offsets_epoch).map_err(Refusal::from)?;
    }
    if !validate_only && !ids.is_empty() {
        let shard = node.find_group(&name).await?;
        let change = GroupChange::ForgetTopic { topic: topic.clone(), topic_id, offsets_epoch };
        if let Err(error) = shard.change_group(&name, change).await {
            return Err(shard.redirect(error).await);
        }
        tracing::info!(group = name, topic, offsets = offsets.len(), "forgot a topic's offsets");
    }
    Ok(ForgetGroupTopicResponse { offsets })
}
