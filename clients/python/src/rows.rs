//! Answers of control calls as dictionaries, whose keys are the fields of Python's dataclasses.
//!
//! Times are datetimes, durations seconds, and names of enums those of the API in lower case.

use std::time::{Duration, SystemTime};

use helix_proto::log::v1::{
    AllowedCompression, BatchFormat, CleanupPolicy, CommitStatus, DeliveryStatus,
    DescribeGroupResponse, GetHealthResponse, GroupPartition, GroupState, GroupSummary,
    HealthReason, MemberDescription, Metadata, OffsetAndLag, OffsetChange, OffsetChangeKind,
    PartitionInfo, ShardRoute, SoughtOffset, Topic, TopicConfig, TopicPartition, WhoAmIResponse,
};
use helix_proto::time;
use pyo3::prelude::*;

use crate::arguments::{PartitionTuple, durability, durability_name};
use crate::failure::Failed;

/// Returns the name of an enum's value without its prefix, in lower case; empty if it is not set.
fn name(of: &str, prefix: &str) -> String {
    match of.strip_prefix(prefix).unwrap_or(of) {
        "UNSPECIFIED" => String::new(),
        name => name.to_lowercase(),
    }
}

fn wire_time(at: Option<prost_types::Timestamp>) -> Option<SystemTime> {
    at.and_then(|at| time::system_time(at).ok())
}

fn wire_seconds(of: Option<prost_types::Duration>) -> Option<f64> {
    of.and_then(|it| time::duration(it).ok()).map(|it| it.as_secs_f64())
}

fn tuple(of: Option<TopicPartition>) -> PartitionTuple {
    let TopicPartition { topic, partition, topic_id } = of.unwrap_or_default();
    (topic, partition, topic_id)
}

fn tuples(of: Vec<TopicPartition>) -> Vec<PartitionTuple> {
    of.into_iter().map(|it| tuple(Some(it))).collect()
}

fn optional(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

/// Settings of a topic, in both directions.
#[derive(FromPyObject, IntoPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct TopicConfigRow {
    retention_time: Option<f64>,
    retention_bytes: Option<u64>,
    max_batch_bytes: Option<u32>,
    max_record_bytes: Option<u32>,
    min_durability: Option<String>,
    default_durability: Option<String>,
    allowed_compression: Option<String>,
    validate_records: Option<bool>,
    cleanup: Option<String>,
    tombstone_retention_time: Option<f64>,
    batch_format: Option<String>,
}

impl From<TopicConfig> for TopicConfigRow {
    fn from(config: TopicConfig) -> Self {
        let durability = |it| durability_name(it).map(str::to_owned);
        let compression = config.allowed_compression().as_str_name();
        let cleanup = name(config.cleanup().as_str_name(), "CLEANUP_POLICY_");
        Self {
            retention_time: wire_seconds(config.retention_time),
            retention_bytes: config.retention_bytes,
            max_batch_bytes: config.max_batch_bytes,
            max_record_bytes: config.max_record_bytes,
            min_durability: durability(config.min_durability()),
            default_durability: durability(config.default_durability()),
            allowed_compression: optional(name(compression, "ALLOWED_COMPRESSION_")),
            validate_records: config.validate_records,
            cleanup: optional(cleanup.replace("_and_", "+")),
            tombstone_retention_time: wire_seconds(config.tombstone_retention_time),
            batch_format: optional(name(config.batch_format().as_str_name(), "BATCH_FORMAT_")),
        }
    }
}

impl TopicConfigRow {
    pub(crate) fn into_config(self) -> Result<TopicConfig, Failed> {
        let unknown = |what: &str, name: &str| Failed::Argument(format!("unknown {what} {name:?}"));
        let seconds = |what: &str, it: Option<f64>| {
            let seconds = it.map(|it| crate::arguments::seconds(what, it)).transpose()?;
            let convert = |it: Duration| {
                prost_types::Duration::try_from(it)
                    .map_err(|_| Failed::Argument(format!("{what} is too long")))
            };
            seconds.map(convert).transpose()
        };
        let compression = self.allowed_compression.unwrap_or_else(|| "unspecified".to_owned());
        let stated = format!("ALLOWED_COMPRESSION_{}", compression.to_uppercase());
        let allowed_compression = AllowedCompression::from_str_name(&stated)
            .ok_or_else(|| unknown("allowed_compression", &compression))?;
        let cleanup = self.cleanup.unwrap_or_else(|| "unspecified".to_owned());
        let stated = format!("CLEANUP_POLICY_{}", cleanup.replace('+', "_and_").to_uppercase());
        let policy =
            CleanupPolicy::from_str_name(&stated).ok_or_else(|| unknown("cleanup", &cleanup))?;
        let format = self.batch_format.unwrap_or_else(|| "unspecified".to_owned());
        let stated = format!("BATCH_FORMAT_{}", format.to_uppercase());
        let batch_format =
            BatchFormat::from_str_name(&stated).ok_or_else(|| unknown("batch_format", &format))?;
        Ok(TopicConfig {
            retention_time: seconds("retention_time", self.retention_time)?,
            retention_bytes: self.retention_bytes,
            max_batch_bytes: self.max_batch_bytes,
            max_record_bytes: self.max_record_bytes,
            min_durability: durability(self.min_durability.as_deref())?.into(),
            default_durability: durability(self.default_durability.as_deref())?.into(),
            allowed_compression: allowed_compression.into(),
            validate_records: self.validate_records,
            cleanup: policy.into(),
            tombstone_retention_time: seconds(
                "tombstone_retention_time",
                self.tombstone_retention_time,
            )?,
            batch_format: batch_format.into(),
        })
    }
}

#[derive(IntoPyObject)]
pub(crate) struct TopicRow {
    name: String,
    topic_id: u64,
    replication_factor: u32,
    partitions: Vec<PartitionRow>,
    config: TopicConfigRow,
}

#[derive(IntoPyObject)]
struct PartitionRow {
    partition: u32,
    leader_node_id: Option<u64>,
    replicas: Vec<u64>,
    log_start_offset: Option<u64>,
    high_watermark: Option<u64>,
    shard_id: u32,
    live_bytes: Option<u64>,
    held_bytes: Option<u64>,
    fencing_token: Option<String>,
}

impl From<PartitionInfo> for PartitionRow {
    fn from(info: PartitionInfo) -> Self {
        let marks = info.watermarks;
        Self {
            partition: info.partition,
            leader_node_id: info.leader.map(|it| it.node_id).filter(|id| *id > 0),
            replicas: info.replicas,
            log_start_offset: marks.map(|it| it.log_start_offset),
            high_watermark: marks.map(|it| it.high_watermark),
            shard_id: info.shard_id,
            live_bytes: info.live_bytes,
            held_bytes: info.held_bytes,
            fencing_token: info.fencing_token,
        }
    }
}

impl From<Topic> for TopicRow {
    fn from(topic: Topic) -> Self {
        Self {
            name: topic.name,
            topic_id: topic.topic_id,
            replication_factor: topic.replication_factor,
            partitions: topic.partitions.into_iter().map(Into::into).collect(),
            config: topic.config.unwrap_or_default().into(),
        }
    }
}

#[derive(IntoPyObject)]
pub(crate) struct HealthRow {
    healthy: bool,
    issues: Vec<HealthIssueRow>,
}

#[derive(IntoPyObject)]
struct HealthIssueRow {
    reason: String,
    message: String,
    shard_id: Option<u32>,
    needed_node_ids: Vec<u64>,
}

impl From<GetHealthResponse> for HealthRow {
    fn from(health: GetHealthResponse) -> Self {
        let issue = |it: helix_proto::log::v1::HealthIssue| {
            let reason = HealthReason::try_from(it.reason).unwrap_or_default().as_str_name();
            HealthIssueRow {
                reason: reason.strip_prefix("HEALTH_REASON_").unwrap_or(reason).to_owned(),
                message: it.message,
                shard_id: it.shard_id,
                needed_node_ids: it.needed_node_ids,
            }
        };
        let issues = health.issues.into_iter().map(issue).collect();
        Self { healthy: health.healthy, issues }
    }
}

#[derive(IntoPyObject)]
pub(crate) struct ClusterRow {
    cluster_id: String,
    nodes: Vec<NodeRow>,
    shards: Vec<ShardRow>,
}

#[derive(IntoPyObject)]
struct NodeRow {
    node_id: u64,
    endpoint: String,
    rack: String,
    version: String,
    draining: bool,
    leaving: bool,
}

#[derive(IntoPyObject)]
struct ShardRow {
    shard_id: u32,
    leader_node_id: Option<u64>,
    replicas: Vec<u64>,
    learners: Vec<u64>,
}

impl From<Metadata> for ClusterRow {
    fn from(metadata: Metadata) -> Self {
        let node = |it: helix_proto::log::v1::Node| NodeRow {
            node_id: it.node_id,
            endpoint: it.endpoint,
            rack: it.rack,
            version: it.version,
            draining: it.draining,
            leaving: it.leaving,
        };
        let shard = |it: ShardRoute| ShardRow {
            shard_id: it.shard_id,
            leader_node_id: it.leader.map(|it| it.node_id).filter(|id| *id > 0),
            replicas: it.replicas,
            learners: it.learners,
        };
        Self {
            cluster_id: metadata.cluster_id,
            nodes: metadata.nodes.into_iter().map(node).collect(),
            shards: metadata.shards.into_iter().map(shard).collect(),
        }
    }
}

#[derive(IntoPyObject)]
pub(crate) struct GroupSummaryRow {
    group: String,
    state: String,
    member_count: u32,
    total_lag: u64,
}

fn state_name(state: i32) -> String {
    name(GroupState::try_from(state).unwrap_or_default().as_str_name(), "GROUP_STATE_")
}

impl From<GroupSummary> for GroupSummaryRow {
    fn from(group: GroupSummary) -> Self {
        Self {
            state: state_name(group.state),
            group: group.group,
            member_count: group.member_count,
            total_lag: group.total_lag,
        }
    }
}

#[derive(IntoPyObject)]
pub(crate) struct GroupRow {
    group: String,
    state: String,
    group_epoch: u64,
    assignment_epoch: u64,
    shard_id: u32,
    coordinator_node_id: u64,
    members: Vec<MemberRow>,
    partitions: Vec<GroupPartitionRow>,
}

#[derive(IntoPyObject)]
struct MemberRow {
    member_id: String,
    static_name: Option<String>,
    client_name: Option<String>,
    topics: Vec<String>,
    member_epoch: u64,
    session_timeout: Option<f64>,
    since_heartbeat: Option<f64>,
    owned: Vec<PartitionTuple>,
    target: Vec<PartitionTuple>,
}

impl From<MemberDescription> for MemberRow {
    fn from(member: MemberDescription) -> Self {
        Self {
            member_id: member.member_id,
            static_name: optional(member.static_name),
            client_name: optional(member.client_name),
            topics: member.topics,
            member_epoch: member.member_epoch,
            session_timeout: wire_seconds(member.session_timeout),
            since_heartbeat: wire_seconds(member.since_heartbeat),
            owned: tuples(member.owned),
            target: tuples(member.target),
        }
    }
}

#[derive(IntoPyObject)]
struct GroupPartitionRow {
    partition: PartitionTuple,
    owner: Option<String>,
    target: Option<String>,
    status: String,
    detail: Option<String>,
    waiting_for: Option<String>,
    offset: Option<GroupOffsetRow>,
    history: Vec<OffsetChangeRow>,
}

impl From<GroupPartition> for GroupPartitionRow {
    fn from(of: GroupPartition) -> Self {
        let status = DeliveryStatus::try_from(of.status).unwrap_or_default().as_str_name();
        Self {
            partition: tuple(of.partition),
            owner: optional(of.owner),
            target: optional(of.target),
            status: name(status, "DELIVERY_STATUS_"),
            detail: optional(of.detail),
            waiting_for: optional(of.waiting_for),
            offset: of.offset.map(Into::into),
            history: of.history.into_iter().map(Into::into).collect(),
        }
    }
}

#[derive(IntoPyObject)]
struct OffsetChangeRow {
    kind: String,
    by: Option<String>,
    before: Option<u64>,
    after: u64,
    since: Option<SystemTime>,
    until: Option<SystemTime>,
}

impl From<OffsetChange> for OffsetChangeRow {
    fn from(change: OffsetChange) -> Self {
        let kind = OffsetChangeKind::try_from(change.kind).unwrap_or_default().as_str_name();
        Self {
            kind: name(kind, "OFFSET_CHANGE_KIND_"),
            by: optional(change.by),
            before: change.from,
            after: change.to,
            since: wire_time(change.since),
            until: wire_time(change.until),
        }
    }
}

#[derive(IntoPyObject)]
pub(crate) struct GroupOffsetRow {
    partition: PartitionTuple,
    offset: u64,
    metadata: String,
    high_watermark: Option<u64>,
    lag: Option<u64>,
    log_start_offset: Option<u64>,
    status: String,
    committed_at: Option<SystemTime>,
}

impl From<OffsetAndLag> for GroupOffsetRow {
    fn from(of: OffsetAndLag) -> Self {
        let status = CommitStatus::try_from(of.status).unwrap_or_default().as_str_name();
        let committed = of.committed.unwrap_or_default();
        Self {
            partition: tuple(committed.partition),
            offset: committed.offset,
            metadata: committed.metadata,
            high_watermark: of.high_watermark,
            lag: of.lag,
            log_start_offset: of.log_start_offset,
            status: name(status, "COMMIT_STATUS_"),
            committed_at: wire_time(of.committed_at),
        }
    }
}

impl From<DescribeGroupResponse> for GroupRow {
    fn from(group: DescribeGroupResponse) -> Self {
        Self {
            state: state_name(group.state),
            group: group.group,
            group_epoch: group.group_epoch,
            assignment_epoch: group.assignment_epoch,
            shard_id: group.shard_id,
            coordinator_node_id: group.coordinator_node_id,
            members: group.members.into_iter().map(Into::into).collect(),
            partitions: group.partitions.into_iter().map(Into::into).collect(),
        }
    }
}

#[derive(IntoPyObject)]
pub(crate) struct SoughtRow {
    partition: PartitionTuple,
    before: Option<u64>,
    after: Option<u64>,
}

impl From<SoughtOffset> for SoughtRow {
    fn from(sought: SoughtOffset) -> Self {
        Self { partition: tuple(sought.partition), before: sought.from, after: sought.to }
    }
}

#[derive(IntoPyObject)]
pub(crate) struct CallerRow {
    principal: String,
    token_id: Option<String>,
    expires_at: Option<SystemTime>,
    restricted: bool,
}

impl From<WhoAmIResponse> for CallerRow {
    fn from(caller: WhoAmIResponse) -> Self {
        Self {
            principal: caller.principal,
            token_id: optional(caller.token_id),
            expires_at: wire_time(caller.expires_at),
            restricted: caller.is_restricted,
        }
    }
}
