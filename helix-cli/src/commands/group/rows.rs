//! Results of `helix group`.

use helix_client::proto::log::v1 as proto;
use helix_proto::short_names::ShortNames;
use prost_types::Timestamp;
use schemars::JsonSchema;
use serde::Serialize;

use crate::api_duration::ApiDuration;

/// Summary of a group.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct GroupRow {
    group: String,
    state: &'static str,
    member_count: u32,
    /// Gateway whose members read the group; null if they are Helix's own.
    #[schemars(extend("x-wide" = true))]
    gateway: Option<String>,
    /// Records to read in the topics that members may read, also without a committed offset.
    total_lag: u64,
    /// Offsets that were deleted before the group read them.
    total_lost: u64,
    /// Records to read in topics that no member subscribes to.
    #[schemars(extend("x-wide" = true))]
    unsubscribed_lag: u64,
    /// Partitions whose lag the node does not know.
    #[schemars(extend("x-wide" = true))]
    unknown_lags: u32,
}

impl From<proto::GroupSummary> for GroupRow {
    fn from(group: proto::GroupSummary) -> Self {
        Self {
            state: state_name(group.state()),
            group: group.group,
            member_count: group.member_count,
            gateway: present(&group.gateway),
            total_lag: group.total_lag.saturating_add(group.uncommitted_lag),
            total_lost: group.total_lost,
            unsubscribed_lag: group.unsubscribed_lag,
            unknown_lags: group.unknown_lags,
        }
    }
}

/// Members and partitions of a group.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct GroupDescription {
    group: String,
    state: &'static str,
    /// Records to read, where known, also without a committed offset, but without topics that no
    /// member subscribes to.
    total_lag: u64,
    /// Offsets that were deleted before the group read them.
    total_lost: u64,
    /// Records to read in topics that no member subscribes to.
    #[schemars(extend("x-wide" = true))]
    unsubscribed_lag: u64,
    /// Gateway that has reported the members; null if they are Helix's own.
    gateway: Option<String>,
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
    /// Subscribed names and patterns that the caller may not see.
    #[schemars(extend("x-wide" = true))]
    hidden_topics: u32,
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
    /// Records to read; null if the end is not known.
    lag: Option<u64>,
    /// Offsets that were deleted before the group read them; null if not known.
    lost: Option<u64>,
    /// The group has members, and none subscribes to the topic: not part of its lag.
    #[schemars(extend("x-wide" = true))]
    unsubscribed: bool,
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
        let sum = |is_unread: bool, of: fn(&proto::OffsetAndLag) -> Option<u64>| {
            let offsets = group.partitions.iter().filter_map(|it| it.offset.as_ref());
            let offsets = offsets.filter(|it| it.unsubscribed == is_unread);
            offsets.filter_map(of).fold(0, u64::saturating_add)
        };
        let (committed_lag, total_lost) = (sum(false, |it| it.lag), sum(false, |it| it.lost));
        let total_lag = committed_lag.saturating_add(group.uncommitted_lag);
        let unsubscribed_lag = sum(true, |it| it.lag);
        let partitions = group.partitions.iter();
        Self {
            state: state_name(group.state()),
            total_lag,
            total_lost,
            unsubscribed_lag,
            gateway: present(&group.gateway),
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
            hidden_topics: member.hidden_topics,
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
            lag: lagging.map_or(partition.uncommitted_lag, |it| it.lag),
            lost: lagging.and_then(|it| it.lost),
            unsubscribed: lagging.is_some_and(|it| it.unsubscribed),
            status: status_name(partition.status()),
            log_start_offset: lagging.and_then(|it| it.log_start_offset),
            high_watermark: lagging.and_then(|it| it.high_watermark),
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

/// An offset that a group has forgotten.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ForgottenRow {
    topic: String,
    partition: u32,
    topic_id: u64,
    offset: u64,
}

impl From<proto::CommittedOffset> for ForgottenRow {
    fn from(forgotten: proto::CommittedOffset) -> Self {
        let partition = forgotten.partition.unwrap_or_default();
        Self {
            topic: partition.topic,
            partition: partition.partition,
            topic_id: partition.topic_id,
            offset: forgotten.offset,
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
