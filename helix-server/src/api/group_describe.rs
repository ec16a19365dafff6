//! Describes a group: members, epochs, and for each partition why no records arrive.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use helix_proto::log::v1::{
    CommitStatus, DeliveryStatus, DescribeGroupRequest, DescribeGroupResponse, GroupPartition,
    GroupState, MemberDescription, OffsetAndLag, OffsetChange, OffsetChangeKind, TopicPartition,
};

use super::authorize::Visibility;
use super::group::{wire_duration, wire_partitions};
use super::group_offsets::{offset_and_lag, read_group};
use super::{time, wire_shard_id};
use crate::error::Result;
use crate::log::{
    CommittedRow, ConsumerGroup, OffsetEvent, OffsetEventKind, PartitionKey, SortedMap, is_pattern,
};
use crate::node::Node;
use crate::shard::MemberSession;

/// Heartbeats that a member may miss before it counts as silent, as a part of its session timeout.
const SILENT_PART: u32 = 2;

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

    /// Returns the first reason that applies, from the causes to the effects.
    fn reason(
        &self,
        key: PartitionKey,
        owner: Option<&str>,
        target: Option<&str>,
        offset: Option<&OffsetAndLag>,
    ) -> Reason {
        if self.node.topic_of(key.topic_id).is_none() {
            return Reason::new(DeliveryStatus::TopicDeleted, "the topic was deleted");
        }
        let Some(owner) = owner else { return self.unassigned(target) };
        if let Some(target) = target.filter(|target| *target != owner) {
            let detail = format!("{target} waits until {owner} has released the partition");
            let reason = Reason::new(DeliveryStatus::WaitingForRelease, detail);
            return Reason { waiting_for: owner.to_owned(), ..reason };
        }
        let session = self.sessions.get(owner);
        let timeout = self.group.member(owner).map_or(0, |it| it.settings.session_timeout_ms);
        let timeout = Duration::from_millis(timeout.into());
        let silence = session.and_then(|it| it.last_heartbeat).map(|it| it.elapsed());
        if let Some(silence) = silence.filter(|silence| *silence > timeout / SILENT_PART) {
            let detail = format!("{owner} is silent for {silence:?} of its {timeout:?}");
            return Reason::new(DeliveryStatus::OwnerSilent, detail);
        }
        if session.is_some_and(|session| session.details.paused.contains(&key)) {
            return Reason::new(
                DeliveryStatus::Paused,
                format!("{owner} has paused the partition"),
            );
        }
        let shard = self.node.locate_key(key).map(|(_, shard, _)| shard);
        if shard.is_none_or(|shard| shard.leader_hint().is_none()) {
            return Reason::new(DeliveryStatus::NoLeader, "the partition's shard has no leader");
        }
        let Some(offset) = offset else {
            if self.is_throttled(key, session) {
                return Reason::throttled(owner);
            }
            let detail = format!("{owner} has not committed an offset yet");
            return Reason::new(DeliveryStatus::Flowing, detail);
        };
        match offset.status() {
            CommitStatus::BelowLogStart | CommitStatus::AboveHighWatermark => {
                let (start, end) = (offset.log_start_offset, offset.high_watermark);
                let detail = format!("the committed offset is out of {start}..{end}");
                Reason::new(DeliveryStatus::OffsetOutOfRange, detail)
            }
            _ if offset.lag == 0 => {
                Reason::new(DeliveryStatus::NoNewRecords, "everything is committed")
            }
            _ if self.is_throttled(key, session) => Reason::throttled(owner),
            _ => {
                let detail = format!("{owner} has {} records to commit", offset.lag);
                Reason::new(DeliveryStatus::Flowing, detail)
            }
        }
    }

    /// Returns whether the quota of the member's principal delays its reads of the partition, as
    /// far as this node knows: each node has meters of its own.
    fn is_throttled(&self, key: PartitionKey, session: Option<&MemberSession>) -> bool {
        let is_leader = self.node.locate_key(key).is_some_and(|(_, shard, _)| shard.is_leader());
        let principal = session.and_then(|session| session.details.principal.as_deref());
        let meter = principal.filter(|_| is_leader).and_then(|it| self.node.quota_meter(it));
        meter.is_some_and(|meter| meter.delays_reads())
    }

    fn unassigned(&self, target: Option<&str>) -> Reason {
        let detail = if self.group.members().len() == 0 {
            "the group has no members"
        } else if !self.group.is_assigned() {
            "the assignment is being computed"
        } else if target.is_none() {
            "no member subscribes to the topic, or the group has too many partitions"
        } else {
            "the member takes it over with its next heartbeat"
        };
        Reason::new(DeliveryStatus::Unassigned, detail)
    }
}

/// Reason why no records of a partition arrive.
struct Reason {
    status: DeliveryStatus,
    detail: String,
    waiting_for: String,
}

impl Reason {
    fn new(status: DeliveryStatus, detail: impl Into<String>) -> Self {
        Self { status, detail: detail.into(), waiting_for: String::new() }
    }

    fn throttled(owner: &str) -> Self {
        let detail = format!("reads of {owner} are over its principal's quota of bytes out");
        Self::new(DeliveryStatus::Throttled, detail)
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
