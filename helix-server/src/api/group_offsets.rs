//! Committed offsets of a group: reads with lag, and seeks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use helix_proto::log::v1::{
    CommitStatus, CommittedOffset, GetOffsetsRequest, GetOffsetsResponse, OffsetAndLag,
    SeekGroupRequest, SeekGroupResponse, SoughtOffset, TopicPartition,
};
use tonic::Status;

use super::authorize::Visibility;
use super::group::{GroupHandler, check_group};
use super::group_pages::{GroupPageRequest, GroupRowKey};
use super::status::status_at;
use super::time;
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::limits::{
    COMMIT_BYTES_MAX, GROUP_PARTITION_BYTES, MEMBER_ID_BYTES_MAX, OFFSETS_PER_COMMIT_MAX,
};
use crate::log::{
    CommittedRow, ConsumerGroup, GroupChange, OffsetUpdate, PartitionKey, SeekOrigin,
    TOPICS_PER_GROUP_MAX, TopicOffsets, Watermarks,
};
use crate::node::Node;
use crate::shard::Shard;
use crate::transport::CallMemory;

/// Reads the offsets of a group, at its coordinator.
pub(super) async fn get(
    node: &Node,
    request: GetOffsetsRequest,
    visible: &Visibility,
    call: Option<&CallMemory>,
) -> Result<GetOffsetsResponse> {
    let page = GroupPageRequest::parse(request.page_size, &request.page_token)?;
    let requested = requested_topics(&request.topics)?;
    let group = read_group(node, &request.group).await?;
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
    let offsets = page.rows.iter().filter_map(found);
    let offsets =
        offsets.filter_map(|(key, row)| offset_and_lag(node, name(key).to_owned(), key, row));
    Ok(GetOffsetsResponse { offsets: offsets.collect(), next_page_token: page.next_page_token })
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
    check_group(name)?;
    let shard = node.find_group(name).await?;
    if let Err(error) = shard.ready().await {
        return Err(shard.redirect(error).await);
    }
    let group = shard.read_groups(|groups| groups.snapshot(name));
    group.ok_or_else(|| Error::GroupNotFound { group: name.to_owned() })
}

/// Returns a committed offset with lag; `None` if there is none.
pub(super) fn offset_and_lag(
    node: &Node,
    topic: String,
    key: PartitionKey,
    row: &CommittedRow,
) -> Option<OffsetAndLag> {
    let offset = row.offset()?;
    let located = node.locate_key(key).and_then(|(_, shard, partition)| {
        let is_leader = shard.is_leader();
        Some((shard.watermarks(partition).ok()?, is_leader))
    });
    let status = match located {
        None if node.topic_of(key.topic_id).is_none() => CommitStatus::TopicDeleted,
        Some((Watermarks { log_start, .. }, _)) if offset < log_start => {
            CommitStatus::BelowLogStart
        }
        Some((Watermarks { high_watermark, .. }, true)) if offset > high_watermark => {
            CommitStatus::AboveHighWatermark
        }
        Some(_) | None => CommitStatus::Valid,
    };
    let Watermarks { log_start, mut high_watermark } =
        located.map(|(watermarks, _)| watermarks).unwrap_or_default();
    if located.is_some_and(|(_, is_leader)| !is_leader) {
        // A follower may be behind; what was committed was readable.
        high_watermark = high_watermark.max(offset);
    }
    let partition = TopicPartition { topic, partition: key.number, topic_id: key.topic_id };
    let metadata = row.metadata().to_owned();
    Some(OffsetAndLag {
        committed: Some(CommittedOffset { partition: Some(partition), offset, metadata }),
        high_watermark,
        lag: high_watermark.saturating_sub(offset),
        log_start_offset: log_start,
        status: status.into(),
        committed_at: Some(time::to_timestamp(row.changed_us())),
    })
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
        (node.find_group(&request.group).await?, undone(&group, &only)?)
    } else {
        // First, as it checks that the cluster's protocol has groups.
        let shard = node.find_or_place_group(&request.group).await?;
        let topics = handler.new_offsets(request.offsets).await?;
        for topic in &topics {
            for update in &topic.offsets {
                let checked = check_readable(node, topic, update).await;
                checked.map_err(|error| status_at(&error, &topic.name, update.number))?;
            }
        }
        (shard, topics)
    };
    let origin = SeekOrigin { by: request.by, is_undo: request.undo };
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
    let group = shard.read_groups(|groups| groups.snapshot(name)).unwrap_or_default();
    group.check_no_members().map_err(crate::log::Refusal::from)?;
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

/// Checks that an offset is readable, or the high watermark.
async fn check_readable(node: &Node, topic: &TopicOffsets, update: &OffsetUpdate) -> Result<()> {
    let located = node.find(&topic.name, topic.topic_id, update.number).await?;
    let requested = update.offset.unwrap_or_default();
    let is_inside = |it: Watermarks| (it.log_start..=it.high_watermark).contains(&requested);
    if located.shard.watermarks(located.partition).is_ok_and(is_inside) {
        return Ok(());
    }
    // This node's replica may be behind.
    node.cluster().catch_up_shard(&located.shard).await?;
    let watermarks = located.shard.watermarks(located.partition)?;
    if is_inside(watermarks) {
        return Ok(());
    }
    Err(Error::OffsetOutOfRange { requested, watermarks })
}

/// Returns the offsets before the last seek of each partition in these topics, or in all.
fn undone(group: &ConsumerGroup, only: &BTreeSet<&str>) -> Result<Vec<TopicOffsets>> {
    let mut topics = Vec::new();
    let mut bytes = 0;
    let mut count = 0;
    for (topic_id, name) in group.topic_names() {
        if !only.is_empty() && !only.contains(&**name) {
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
