//! Describes a group: members, epochs, and for each partition why no records arrive.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use helix_proto::log::v1::{
    DescribeGroupRequest, DescribeGroupResponse, GroupPartition, GroupState, MemberDescription,
    OffsetAndLag, OffsetChange, OffsetChangeKind, TopicPartition,
};
use tokio::time::Instant;

use super::authorize::Visibility;
use super::delivery_reason::{DeliveryOwner, DeliveryReason, DeliveryState, Unassigned};
use super::group::{wire_duration, wire_partitions};
use super::group_offsets::{offset_and_lag, read_group};
use super::{time, wire_shard_id};
use crate::error::Result;
use crate::log::{
    CommittedRow, ConsumerGroup, OffsetEvent, OffsetEventKind, PartitionKey, SortedMap, Watermarks,
    is_pattern,
};
use crate::node::Node;
use crate::shard::{MemberSession, Shard};

/// Describes a group, at its coordinator.
pub(super) async fn describe(
    node: &Node,
    request: DescribeGroupRequest,
    visible: &Visibility,
) -> Result<DescribeGroupResponse> {
    let group = read_group(node, &request.group).await?;
    let shard = node.find_group(&request.group).await?;
    let targets = group
        .members()
        .flat_map(|(id, member)| member.target.iter().map(move |partition| (*partition, &**id)));
    let description = Description {
        node,
        visible,
        group: &group,
        sessions: shard.group_sessions().of_group(&request.group),
        empty_since: shard.group_sessions().empty_since(&request.group),
        topic_names: group.topic_names().map(|(id, name)| (id, &**name)).collect(),
        targets: targets.collect(),
        owners: group.owners(),
    };
    let mut keys: BTreeSet<PartitionKey> = group.offsets().map(|(key, _)| key).collect();
    for (topic_id, count) in group.assigned_topics().iter() {
        let topic_id = *topic_id;
        keys.extend((0..*count).map(|number| PartitionKey { topic_id, number }));
    }
    let partitions = keys
        .into_iter()
        .filter(|key| visible.sees_topic(&description.topic_name(*key)))
        .map(|key| description.partition(key, request.include_history));
    Ok(DescribeGroupResponse {
        state: state_of(&group).into(),
        group_epoch: group.epoch(),
        assignment_epoch: group.assignment_epoch(),
        shard_id: wire_shard_id(shard.id()),
        coordinator_node_id: node.info().node_id,
        members: group.members().map(|(id, _)| description.member(id)).collect(),
        partitions: partitions.collect(),
        group: request.group.clone(),
    })
}

pub(super) fn state_of(group: &ConsumerGroup) -> GroupState {
    if group.members().len() == 0 {
        GroupState::Empty
    } else if !group.is_assigned() {
        GroupState::Assigning
    } else if group.is_stable() {
        GroupState::Stable
    } else {
        GroupState::Reconciling
    }
}

struct Description<'a> {
    node: &'a Node,
    visible: &'a Visibility,
    group: &'a ConsumerGroup,
    sessions: SortedMap<Arc<str>, MemberSession>,
    /// When the last member left, if this coordinator knows it.
    empty_since: Option<Instant>,
    topic_names: BTreeMap<u64, &'a str>,
    targets: BTreeMap<PartitionKey, &'a str>,
    owners: BTreeMap<PartitionKey, &'a Arc<str>>,
}

impl Description<'_> {
    fn member(&self, id: &str) -> MemberDescription {
        let Some(member) = self.group.member(id) else { return MemberDescription::default() };
        let session = self.sessions.get(id);
        let heard = session.and_then(|session| session.last_heartbeat);
        let timeout = Duration::from_millis(member.settings.session_timeout_ms.into());
        MemberDescription {
            member_id: id.to_owned(),
            static_name: member.static_name.to_string(),
            client_name: member.settings.client_name.to_string(),
            topics: self.visible_subscriptions(&member.settings.topics),
            member_epoch: session.map_or(0, |session| session.epoch),
            session_timeout: Some(wire_duration(timeout)),
            since_heartbeat: heard.map(|heard| wire_duration(heard.elapsed())),
            owned: self.visible_partitions(member.owned.keys().copied()),
            target: self.visible_partitions(member.target.iter().copied()),
        }
    }

    /// Returns the name of a partition's topic, also of a deleted one; empty if it is not known.
    fn topic_name(&self, key: PartitionKey) -> String {
        let named = || self.topic_names.get(&key.topic_id).map(|name| (*name).to_owned());
        let topic = self.node.topic_of(key.topic_id).map(|topic| topic.name.clone());
        topic.or_else(named).unwrap_or_default()
    }

    /// Returns the names that the caller may see, and every pattern.
    fn visible_subscriptions(&self, topics: &[String]) -> Vec<String> {
        let is_visible = |topic: &&String| is_pattern(topic) || self.visible.sees_topic(topic);
        topics.iter().filter(is_visible).cloned().collect()
    }

    fn visible_partitions(
        &self,
        keys: impl IntoIterator<Item = PartitionKey>,
    ) -> Vec<TopicPartition> {
        let mut partitions = wire_partitions(self.node, keys);
        partitions.retain(|partition| self.visible.sees_topic(&partition.topic));
        partitions
    }

    fn partition(&self, key: PartitionKey, include_history: bool) -> GroupPartition {
        let topic = self.topic_name(key);
        let owner = self.owners.get(&key).map(|id| id.to_string());
        let target = self.targets.get(&key).map(|id| (*id).to_owned());
        let row = self.group.offset(key);
        let offset = row.and_then(|row| offset_and_lag(self.node, topic.clone(), key, row));
        let reason = self.reason(key, owner.as_deref(), target.as_deref(), offset.as_ref());
        let history = row.filter(|_| include_history).map(history).unwrap_or_default();
        GroupPartition {
            partition: Some(TopicPartition {
                topic,
                partition: key.number,
                topic_id: key.topic_id,
            }),
            owner: owner.unwrap_or_default(),
            target: target.unwrap_or_default(),
            offset,
            status: reason.status.into(),
            detail: reason.detail,
            waiting_for: reason.waiting_for,
            history,
        }
    }

    fn reason(
        &self,
        key: PartitionKey,
        owner: Option<&str>,
        target: Option<&str>,
        offset: Option<&OffsetAndLag>,
    ) -> DeliveryReason {
        let located = self.node.locate_key(key);
        // A follower's replica may lack the records.
        let is_empty = located.as_ref().is_some_and(|(_, shard, partition)| {
            let is_empty = |it: Watermarks| it.log_start == it.high_watermark;
            shard.is_leader() && shard.watermarks(*partition).is_ok_and(is_empty)
        });
        let shard = located.as_ref().map(|(_, shard, _)| &**shard);
        let state = DeliveryState {
            is_topic_deleted: self.node.topic_of(key.topic_id).is_none(),
            owner: match owner {
                Some(owner) => Ok(self.owner(owner, key, shard)),
                None => Err(self.unassigned(target)),
            },
            target,
            has_leader: shard.is_some_and(|shard| shard.leader_hint().is_some()),
            is_empty,
            offset,
        };
        state.reason()
    }

    fn owner<'b>(
        &self,
        id: &'b str,
        key: PartitionKey,
        shard: Option<&Shard>,
    ) -> DeliveryOwner<'b> {
        let session = self.sessions.get(id);
        let timeout_ms = self.group.member(id).map_or(0, |it| it.settings.session_timeout_ms);
        DeliveryOwner {
            id,
            silence: session.and_then(|it| it.last_heartbeat).map(|it| it.elapsed()),
            session_timeout: Duration::from_millis(timeout_ms.into()),
            has_paused: session.is_some_and(|session| session.details.paused.contains(&key)),
            is_throttled: self.is_throttled(shard, session),
        }
    }

    /// Returns whether the quota of the member's principal delays its reads of the partition, as
    /// far as this node knows: each node has meters of its own.
    fn is_throttled(&self, shard: Option<&Shard>, session: Option<&MemberSession>) -> bool {
        let is_leader = shard.is_some_and(|shard| shard.is_leader());
        let principal = session.and_then(|session| session.details.principal.as_deref());
        let meter = principal.filter(|_| is_leader).and_then(|it| self.node.quota_meter(it));
        meter.is_some_and(|meter| meter.delays_reads())
    }

    fn unassigned(&self, target: Option<&str>) -> Unassigned {
        if self.group.members().len() == 0 {
            Unassigned::NoMembers(self.empty_since.map(|since| since.elapsed()))
        } else if !self.group.is_assigned() {
            Unassigned::Assigning
        } else if target.is_none() {
            Unassigned::NotSubscribed
        } else {
            Unassigned::NotTaken
        }
    }
}

fn history(row: &CommittedRow) -> Vec<OffsetChange> {
    let change = |event: OffsetEvent<'_>| OffsetChange {
        kind: match event.kind {
            OffsetEventKind::Commit => OffsetChangeKind::Commit,
            OffsetEventKind::Seek => OffsetChangeKind::Seek,
            OffsetEventKind::Undo => OffsetChangeKind::Undo,
        }
        .into(),
        by: event.by.to_owned(),
        from: event.from,
        to: event.to.unwrap_or_default(),
        since: Some(time::to_timestamp(event.since_us)),
        until: Some(time::to_timestamp(event.until_us)),
    };
    row.history().map(change).collect()
}
