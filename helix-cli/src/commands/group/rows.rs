//! Results of `helix group`.

use helix_client::proto::log::v1 as proto;
use helix_proto::time;
use prost_types::{Duration as WireDuration, Timestamp};
use schemars::JsonSchema;
use serde::Serialize;

use super::names::ShortNames;
use crate::api_duration::ApiDuration;

/// Summary of a group.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct GroupRow {
    group: String,
    state: &'static str,
    member_count: u32,
    /// Records to read, also in partitions without a committed offset.
    total_lag: u64,
}

impl From<proto::GroupSummary> for GroupRow {
    fn from(group: proto::GroupSummary) -> Self {
        Self {
            state: state_name(group.state()),
            group: group.group,
            member_count: group.member_count,
            total_lag: group.total_lag.saturating_add(group.uncommitted_lag),
        }
    }
}

/// Members and partitions of a group.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct GroupDescription {
    group: String,
    state: &'static str,
    total_lag: u64,
    shard_id: u32,
    coordinator_node_id: u64,
    #[schemars(extend("x-wide" = true))]
    group_epoch: u64,
    #[schemars(extend("x-wide" = true))]
    assignment_epoch: u64,
    members: Vec<MemberRow>,
    partitions: Vec<GroupPartitionRow>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct MemberRow {
    member_id: String,
    #[schemars(extend("x-wide" = true))]
    static_name: Option<String>,
    client_name: Option<String>,
    /// Subscribed names and patterns.
    #[schemars(extend("x-wide" = true))]
    topics: Vec<String>,
    /// Epoch of its last heartbeat; 0 until the coordinator has heard from it.
    #[schemars(extend("x-wide" = true))]
    member_epoch: u64,
    /// Partitions that it has now.
    owned_count: usize,
    /// Partitions that the assignment gives it.
    target_count: usize,
    #[schemars(extend("x-wide" = true))]
    session_timeout: Option<ApiDuration>,
    /// Null until the coordinator has heard from it.
    since_heartbeat: Option<ApiDuration>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct GroupPartitionRow {
    topic: String,
    partition: u32,
    #[schemars(extend("x-wide" = true))]
    topic_id: u64,
    owner: Option<String>,
    #[schemars(extend("x-wide" = true))]
    target: Option<String>,
    /// Next offset to read; null if none is committed.
    offset: Option<u64>,
    lag: Option<u64>,
    status: &'static str,
    #[schemars(extend("x-wide" = true))]
    log_start_offset: Option<u64>,
    #[schemars(extend("x-wide" = true))]
    high_watermark: Option<u64>,
    #[schemars(extend("x-wide" = true))]
    committed_at: Option<String>,
    #[schemars(extend("x-wide" = true))]
    metadata: Option<String>,
    #[schemars(extend("x-wide" = true))]
    waiting_for: Option<String>,
    #[schemars(extend("x-wide" = true))]
    detail: String,
}

impl GroupDescription {
    pub(crate) fn new(group: proto::DescribeGroupResponse, names: &ShortNames) -> Self {
        let lag = |partition: &proto::GroupPartition| partition.offset.as_ref().map(|it| it.lag);
        let total_lag = group.partitions.iter().filter_map(lag).fold(0, u64::saturating_add);
        let partitions = group.partitions.iter();
        Self {
            state: state_name(group.state()),
            total_lag,
            shard_id: group.shard_id,
            coordinator_node_id: group.coordinator_node_id,
            group_epoch: group.group_epoch,
            assignment_epoch: group.assignment_epoch,
            members: group.members.iter().map(|member| MemberRow::new(member, names)).collect(),
            partitions: partitions.map(|it| GroupPartitionRow::new(it, names)).collect(),
            group: group.group,
        }
    }
}

impl MemberRow {
    fn new(member: &proto::MemberDescription, names: &ShortNames) -> Self {
        Self {
            member_id: names.get(&member.member_id).to_owned(),
            static_name: present(&member.static_name),
            client_name: present(&member.client_name),
            topics: member.topics.clone(),
            member_epoch: member.member_epoch,
            owned_count: member.owned.len(),
            target_count: member.target.len(),
            session_timeout: member.session_timeout.and_then(ApiDuration::new),
            since_heartbeat: member.since_heartbeat.and_then(ApiDuration::new),
        }
    }
}

impl GroupPartitionRow {
    fn new(partition: &proto::GroupPartition, names: &ShortNames) -> Self {
        let at = partition.partition.clone().unwrap_or_default();
        let member = |id: &str| present(names.get(id));
        let lagging = partition.offset.as_ref();
        let committed = lagging.and_then(|it| it.committed.as_ref());
        Self {
            topic: at.topic,
            partition: at.partition,
            topic_id: at.topic_id,
            owner: member(&partition.owner),
            target: member(&partition.target),
            offset: committed.map(|committed| committed.offset),
            lag: lagging.map(|it| it.lag),
            status: status_name(partition.status()),
            log_start_offset: lagging.map(|it| it.log_start_offset),
            high_watermark: lagging.map(|it| it.high_watermark),
            committed_at: lagging.and_then(|it| it.committed_at).map(|at| at.to_string()),
            metadata: committed.and_then(|committed| present(&committed.metadata)),
            waiting_for: member(&partition.waiting_for),
            detail: partition.detail.clone(),
        }
    }
}

/// A change of a committed offset.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct OffsetChangeRow {
    topic: String,
    partition: u32,
    kind: &'static str,
    /// The member that committed, or the text of the seek; null for commits without a member.
    by: Option<String>,
    from: Option<u64>,
    to: u64,
    /// Time of the first of several commits.
    #[schemars(extend("x-wide" = true))]
    since: Option<String>,
    /// Time of the last of several commits.
    until: Option<String>,
}

impl OffsetChangeRow {
    /// Returns the changes in a topic, or in all. Brief rows have shortened members and times.
    pub(crate) fn all(
        group: proto::DescribeGroupResponse,
        topic: Option<&str>,
        is_brief: bool,
    ) -> Vec<Self> {
        let partitions = group.partitions.iter();
        let changes = partitions.clone().flat_map(|partition| &partition.history);
        let commits = changes.filter(|change| change.kind() == proto::OffsetChangeKind::Commit);
        let names = match is_brief {
            true => ShortNames::of(commits.map(|change| change.by.as_str())),
            false => ShortNames::default(),
        };
        let time = |at: Option<Timestamp>| {
            let nanos = |at: Timestamp| if is_brief { 0 } else { at.nanos };
            at.map(|at| Timestamp { nanos: nanos(at), ..at }.to_string())
        };
        let rows = partitions.flat_map(|partition| {
            let at = partition.partition.clone().unwrap_or_default();
            let (names, time) = (&names, &time);
            partition.history.iter().map(move |change| Self {
                topic: at.topic.clone(),
                partition: at.partition,
                kind: kind_name(change.kind()),
                by: match change.kind() {
                    proto::OffsetChangeKind::Commit => present(names.get(&change.by)),
                    _ => present(&change.by),
                },
                from: change.from,
                to: change.to,
                since: time(change.since),
                until: time(change.until),
            })
        });
        rows.filter(|row| topic.is_none_or(|topic| topic == row.topic)).collect()
    }
}

/// A partition whose offset was changed by a seek.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct SoughtRow {
    topic: String,
    partition: u32,
    /// Offset before; null if there was none.
    from: Option<u64>,
    /// Offset after; null if an undo has removed it.
    to: Option<u64>,
}

impl From<proto::SoughtOffset> for SoughtRow {
    fn from(sought: proto::SoughtOffset) -> Self {
        let partition = sought.partition.unwrap_or_default();
        Self {
            topic: partition.topic,
            partition: partition.partition,
            from: sought.from,
            to: sought.to,
        }
    }
}

/// Returns the name of a state as the API has it, without its prefix.
pub(crate) fn state_name(state: proto::GroupState) -> &'static str {
    state.as_str_name().trim_start_matches("GROUP_STATE_")
}

/// Returns the name of a status as the API has it, without its prefix.
pub(crate) fn status_name(status: proto::DeliveryStatus) -> &'static str {
    status.as_str_name().trim_start_matches("DELIVERY_STATUS_")
}

fn kind_name(kind: proto::OffsetChangeKind) -> &'static str {
    kind.as_str_name().trim_start_matches("OFFSET_CHANGE_KIND_")
}

fn present(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

/// Converts a duration; a negative one counts as unset.
pub(crate) fn duration(wire: Option<WireDuration>) -> Option<std::time::Duration> {
    wire.and_then(|wire| time::duration(wire).ok())
}
