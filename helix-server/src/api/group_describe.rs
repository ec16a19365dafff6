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
use super::group_gateway::wire_state;
use super::group_lag::{LagView, learn_ends, readable_records, uncommitted_lag};
use super::group_offsets::read_group;
use super::group_pages::{GroupPageRequest, GroupRowKey};
use super::{time, wire_shard_id};
use crate::call::CallMemory;
use crate::error::{Error, Result};
use crate::limits::{
    GROUP_LEFT_OUT_MAX, GROUP_MEMBER_BYTES, GROUP_PARTITION_BYTES, OFFSET_CHANGE_BYTES,
};
use crate::log::{
    CommittedRow, ConsumerGroup, GroupMember, MatchedTopic, OffsetEvent, OffsetEventKind,
    PARTITIONS_PER_GROUP_MAX, PartitionKey, SortedMap, TOPICS_PER_GROUP_MAX, Watermarks,
    within_limits,
};
use crate::node::Node;
use crate::shard::{GatewayGroup, MemberSession, ReportedMember, Shard};

/// Describes a group, at its coordinator.
pub(super) async fn describe(
    node: &Node,
    request: DescribeGroupRequest,
    visible: &Visibility,
    call: Option<&CallMemory>,
) -> Result<DescribeGroupResponse> {
    let page = GroupPageRequest::parse(request.page_size, &request.page_token)?;
    let (group, of_gateway, shard) = read_described(node, &request.group).await?;
    let mut targets: BTreeMap<PartitionKey, &str> = group
        .members()
        .flat_map(|(id, member)| member.target.iter().map(move |partition| (*partition, &**id)))
        .collect();
    let subscribed = SubscribedTopics::new(node.matched_topics(&group));
    let mut owners = group.owners();
    let mut keys = subscribed.keys();
    for member in of_gateway.iter().flat_map(|report| &report.members) {
        keys.extend(member.partitions.iter().copied());
        owners.extend(member.partitions.iter().map(|key| (*key, &member.id)));
        targets.extend(member.partitions.iter().map(|key| (*key, &*member.id)));
    }
    keys.extend(group.offsets().map(|(key, _)| key));
    for (topic_id, count) in group.assigned_topics().iter() {
        let topic_id = *topic_id;
        keys.extend((0..*count).map(|number| PartitionKey { topic_id, number }));
    }
    let description = Description {
        node,
        visible,
        group: &group,
        of_gateway: of_gateway.as_deref(),
        sessions: shard.group_sessions().of_group(&request.group),
        empty_since: shard.group_sessions().empty_since(&request.group),
        topics: described_topics(
            node,
            &group,
            keys.iter().chain(owners.keys()).chain(targets.keys()),
        ),
        subscribed,
        targets,
        owners,
        include_history: request.include_history,
    };
    keys.retain(|key| visible.sees_topic(description.topic_name(*key)));
    let reported = of_gateway.iter().flat_map(|report| &report.members).map(|member| &member.id);
    let members = group.members().map(|(id, _)| id).chain(reported);
    let members = members.map(|id| GroupRowKey::Member(id.clone()));
    let rows = members.chain(keys.into_iter().map(GroupRowKey::Partition));
    let page = page.cut(rows, |row| description.row_bytes(row));
    page.reserve(call).await?;
    learn_ends(node, &group, |name| visible.sees_topic(name)).await;
    let shown = page.rows.iter().filter_map(GroupRowKey::partition);
    let lags = LagView::new(node, &group, shown).await;
    let (mut members, mut partitions) = (Vec::new(), Vec::new());
    for row in &page.rows {
        match row {
            GroupRowKey::Member(id) => members.extend(description.member(id)),
            GroupRowKey::Partition(key) => partitions.push(description.partition(*key, &lags)),
        }
    }
    Ok(DescribeGroupResponse {
        state: state_of(&group, of_gateway.as_deref()).into(),
        gateway: of_gateway.as_ref().map(|it| it.gateway.clone()).unwrap_or_default(),
        group_epoch: group.epoch(),
        assignment_epoch: group.assignment_epoch(),
        shard_id: wire_shard_id(shard.id()),
        coordinator_node_id: node.info().node_id,
        members,
        partitions,
        group: request.group.clone(),
        next_page_token: page.next_page_token,
        uncommitted_lag: uncommitted_lag(node, &group, |name| visible.sees_topic(name)),
        lag_history: None,
    })
}

/// Reads a group's state and its members behind a gateway, at its coordinator.
async fn read_described(
    node: &Node,
    name: &str,
) -> Result<(Arc<ConsumerGroup>, Option<Arc<GatewayGroup>>, Arc<Shard>)> {
    let read = read_group(node, name).await;
    let (shard, group) = match read {
        Ok(group) => (node.find_group(name).await?, group),
        // A group whose members are behind a gateway may not have committed yet.
        Err(missing @ Error::GroupNotFound { .. }) => match node.find_group(name).await {
            Ok(shard) if shard.gateway_groups().get(name).is_some() => (shard, Arc::default()),
            _ => return Err(missing),
        },
        Err(error) => return Err(error),
    };
    let of_gateway = shard.gateway_groups().get(name).filter(|_| group.members().len() == 0);
    Ok((group, of_gateway, shard))
}

pub(super) fn state_of(group: &ConsumerGroup, of_gateway: Option<&GatewayGroup>) -> GroupState {
    if let Some(report) = of_gateway {
        return wire_state(report.state);
    }
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

/// A topic with partitions of a group.
struct DescribedTopic {
    /// Name, even of a deleted topic; empty if unknown.
    name: String,
    /// Id of an earlier topic of the name that the group's offsets belong to.
    earlier: Option<u64>,
}

/// Returns the topics of these partitions, by id.
fn described_topics<'a>(
    node: &Node,
    group: &ConsumerGroup,
    keys: impl Iterator<Item = &'a PartitionKey>,
) -> BTreeMap<u64, DescribedTopic> {
    let names: BTreeMap<u64, &str> = group.topic_names().map(|(id, name)| (id, &**name)).collect();
    let topic_ids: BTreeSet<u64> = keys.map(|key| key.topic_id).collect();
    let topics = topic_ids.into_iter().map(|id| {
        let named = || names.get(&id).map(|name| (*name).to_owned());
        let name = node.topic_of(id).map(|topic| topic.name.clone()).or_else(named);
        let name = name.unwrap_or_default();
        (id, DescribedTopic { earlier: group.earlier_topic(id, &name), name })
    });
    topics.collect()
}

/// Topics that a group subscribes to, in the order of their ids.
struct SubscribedTopics {
    matched: Vec<MatchedTopic>,
    /// The first of `matched` that fit into an assignment. The last one may be truncated.
    fitting: Vec<MatchedTopic>,
}

impl SubscribedTopics {
    fn new(matched: Vec<MatchedTopic>) -> Self {
        Self { fitting: within_limits(&matched), matched }
    }

    /// Returns the partitions that fit into an assignment, and the first of the rest.
    fn keys(&self) -> BTreeSet<PartitionKey> {
        let fitting = self.fitting.iter().flat_map(|topic| partitions_of(topic, 0));
        let fitting_count =
            |place: usize| self.fitting.get(place).map_or(0, |topic| topic.partition_count);
        let left_out = self.matched.iter().enumerate();
        let left_out =
            left_out.flat_map(|(place, topic)| partitions_of(topic, fitting_count(place)));
        fitting.chain(left_out.take(GROUP_LEFT_OUT_MAX)).collect()
    }

    /// Returns the reason why a partition is not in the current assignment.
    fn unassigned(&self, key: PartitionKey) -> Unassigned {
        let place = self.matched.binary_search_by_key(&key.topic_id, |topic| topic.topic_id);
        let is_matched = |place: &usize| key.number < self.matched[*place].partition_count;
        let Some(place) = place.ok().filter(is_matched) else { return Unassigned::NotSubscribed };
        if self.fitting.get(place).is_some_and(|topic| key.number < topic.partition_count) {
            // The topic or the partition is new.
            Unassigned::Assigning
        } else if place >= TOPICS_PER_GROUP_MAX {
            Unassigned::LeftOut { limit: TOPICS_PER_GROUP_MAX, what: "topics" }
        } else {
            Unassigned::LeftOut { limit: PARTITIONS_PER_GROUP_MAX, what: "partitions" }
        }
    }
}

/// Returns the partitions of a topic from a number on.
fn partitions_of(topic: &MatchedTopic, first: u32) -> impl Iterator<Item = PartitionKey> {
    let topic_id = topic.topic_id;
    (first..topic.partition_count).map(move |number| PartitionKey { topic_id, number })
}

/// Encoded size of a listed partition or subscription without its topic name, at most.
const LISTED_BYTES: usize = 24;

struct Description<'a> {
    node: &'a Node,
    visible: &'a Visibility,
    group: &'a ConsumerGroup,
    /// Members that a gateway has reported; the group then has no other members.
    of_gateway: Option<&'a GatewayGroup>,
    sessions: SortedMap<Arc<str>, MemberSession>,
    /// Time when the last member left, if this coordinator has seen it.
    empty_since: Option<Instant>,
    /// Topics of all partitions that the group has or had.
    topics: BTreeMap<u64, DescribedTopic>,
    subscribed: SubscribedTopics,
    targets: BTreeMap<PartitionKey, &'a str>,
    owners: BTreeMap<PartitionKey, &'a Arc<str>>,
    include_history: bool,
}

impl Description<'_> {
    /// Returns the encoded size of a row, at most.
    fn row_bytes(&self, row: &GroupRowKey) -> usize {
        match row {
            GroupRowKey::Member(id) => match self.reported(id) {
                Some(member) => {
                    self.listed_bytes(member.partitions.iter().chain(&member.partitions))
                }
                None => self.group.member(id).map_or(0, |it| self.member_bytes(it)),
            },
            GroupRowKey::Partition(key) => self.partition_bytes(*key),
        }
    }

    fn member_bytes(&self, member: &GroupMember) -> usize {
        let topic = |topic: &String| topic.len() + LISTED_BYTES;
        let topics: usize = member.settings.topics.iter().map(topic).sum();
        topics + self.listed_bytes(member.owned.keys().chain(member.target.iter()))
    }

    fn listed_bytes<'b>(&self, listed: impl Iterator<Item = &'b PartitionKey>) -> usize {
        let partition = |key: &PartitionKey| self.topic_name(*key).len() + LISTED_BYTES;
        GROUP_MEMBER_BYTES + listed.map(partition).sum::<usize>()
    }

    fn reported(&self, id: &str) -> Option<&ReportedMember> {
        self.of_gateway.and_then(|report| report.member(id))
    }

    fn reported_member(&self, report: &GatewayGroup, member: &ReportedMember) -> MemberDescription {
        let partitions = self.visible_partitions(member.partitions.iter().copied());
        MemberDescription {
            member_id: member.id.to_string(),
            static_name: member.static_name.clone(),
            client_name: member.client_name.clone(),
            session_timeout: Some(wire_duration(report.valid_for)),
            since_heartbeat: Some(wire_duration(report.reported_at.elapsed())),
            owned: partitions.clone(),
            target: partitions,
            ..MemberDescription::default()
        }
    }

    fn partition_bytes(&self, key: PartitionKey) -> usize {
        let row = self.group.offset(key);
        let metadata = row.map_or(0, |row| row.metadata().len());
        let history = row
            .filter(|_| self.include_history)
            .map_or(0, |row| row.history().map(|event| event.by.len() + OFFSET_CHANGE_BYTES).sum());
        // The committed offset names the topic again.
        GROUP_PARTITION_BYTES + 2 * self.topic_name(key).len() + metadata + history
    }

    fn member(&self, id: &str) -> Option<MemberDescription> {
        if let (Some(report), Some(member)) = (self.of_gateway, self.reported(id)) {
            return Some(self.reported_member(report, member));
        }
        let member = self.group.member(id)?;
        let session = self.sessions.get(id);
        let heard = session.and_then(|session| session.last_heartbeat);
        let timeout = Duration::from_millis(member.settings.session_timeout_ms.into());
        let topics = self.visible_subscriptions(&member.settings.topics);
        Some(MemberDescription {
            member_id: id.to_owned(),
            static_name: member.static_name.to_string(),
            client_name: member.settings.client_name.to_string(),
            hidden_topics: u32::try_from(member.settings.topics.len() - topics.len())
                .unwrap_or(u32::MAX),
            topics,
            member_epoch: session.map_or(0, |session| session.epoch),
            session_timeout: Some(wire_duration(timeout)),
            since_heartbeat: heard.map(|heard| wire_duration(heard.elapsed())),
            owned: self.visible_partitions(member.owned.keys().copied()),
            target: self.visible_partitions(member.target.iter().copied()),
        })
    }

    fn topic_name(&self, key: PartitionKey) -> &str {
        self.topics.get(&key.topic_id).map_or("", |topic| &*topic.name)
    }

    /// Returns the subscribed names and patterns that the caller may see.
    fn visible_subscriptions(&self, topics: &[String]) -> Vec<String> {
        topics.iter().filter(|text| self.visible.sees_subscription(text)).cloned().collect()
    }

    fn visible_partitions(
        &self,
        keys: impl IntoIterator<Item = PartitionKey>,
    ) -> Vec<TopicPartition> {
        let mut partitions = wire_partitions(self.node, keys);
        partitions.retain(|partition| self.visible.sees_topic(&partition.topic));
        partitions
    }

    fn partition(&self, key: PartitionKey, lags: &LagView<'_>) -> GroupPartition {
        let topic = self.topic_name(key).to_owned();
        let owner = self.owners.get(&key).map(|id| id.to_string());
        let target = self.targets.get(&key).map(|id| (*id).to_owned());
        let row = self.group.offset(key);
        let offset = row.and_then(|row| lags.offset_and_lag(topic.clone(), key, row));
        let reason = self.reason(key, owner.as_deref(), target.as_deref(), offset.as_ref());
        let history = row.filter(|_| self.include_history).map(history).unwrap_or_default();
        let is_unread = offset.is_some() || self.group.has_left(&topic);
        let uncommitted_lag = if is_unread { None } else { readable_records(self.node, key) };
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
            uncommitted_lag,
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
        let remote = self.node.remote_state(key);
        let state = DeliveryState {
            is_topic_deleted: self.node.topic_of(key.topic_id).is_none(),
            owner: match owner {
                Some(owner) => Ok(self.owner(owner, key, shard)),
                None => Err(self.unassigned(key, target)),
            },
            target,
            has_leader: shard.is_some_and(|shard| shard.leader_hint().is_some())
                || remote.is_some_and(|(has_leader, _)| has_leader),
            is_empty: is_empty || remote.is_some_and(|(_, is_empty)| is_empty),
            earlier_topic: match offset {
                Some(_) => None,
                None => self.topics.get(&key.topic_id).and_then(|topic| topic.earlier),
            },
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
        if let Some(report) = self.of_gateway {
            return DeliveryOwner {
                id,
                silence: report.reported_at.elapsed(),
                is_heard: true,
                session_timeout: report.valid_for,
                has_paused: false,
                is_throttled: false,
            };
        }
        let session = self.sessions.get(id);
        let timeout_ms = self.group.member(id).map_or(0, |it| it.settings.session_timeout_ms);
        let session_timeout = Duration::from_millis(timeout_ms.into());
        DeliveryOwner {
            id,
            silence: session.map(|it| it.silence(session_timeout)).unwrap_or_default(),
            is_heard: session.is_some_and(|it| it.last_heartbeat.is_some()),
            session_timeout,
            has_paused: session.is_some_and(|session| session.details.paused.contains(&key)),
            is_throttled: self.is_throttled(shard, session),
        }
    }

    /// Returns whether the quota of the member's principal delays its reads of the partition.
    ///
    /// `false` if this node is not the leader of the partition: each node meters only its own
    /// reads.
    fn is_throttled(&self, shard: Option<&Shard>, session: Option<&MemberSession>) -> bool {
        let is_leader = shard.is_some_and(|shard| shard.is_leader());
        let principal = session.and_then(|session| session.details.principal.as_deref());
        let meter = principal.filter(|_| is_leader).and_then(|it| self.node.quota_meter(it));
        meter.is_some_and(|meter| meter.delays_reads())
    }

    fn unassigned(&self, key: PartitionKey, target: Option<&str>) -> Unassigned {
        if self.of_gateway.is_some() {
            Unassigned::NotSubscribed
        } else if self.group.members().len() == 0 {
            Unassigned::NoMembers(self.empty_since.map(|since| since.elapsed()))
        } else if !self.group.is_assigned() {
            Unassigned::Assigning
        } else if target.is_none() {
            self.subscribed.unassigned(key)
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
