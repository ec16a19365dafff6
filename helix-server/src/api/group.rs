//! GroupService: members, commits and lists of consumer groups.
//! `group_offsets.rs` reads and seeks offsets, `group_describe.rs` explains a group.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use helix_proto::log::v1::group_service_server::GroupService;
use helix_proto::log::v1::{
    CommitOffsetsRequest, CommitOffsetsResponse, CommittedOffset, DeleteGroupRequest,
    DeleteGroupResponse, DescribeGroupRequest, DescribeGroupResponse, ForgetGroupTopicRequest,
    ForgetGroupTopicResponse, GetOffsetsRequest, GetOffsetsResponse, HeartbeatRequest,
    HeartbeatResponse, LeaveRequest, LeaveResponse, ListGroupsRequest, ListGroupsResponse,
    ReportGatewayMembersRequest, ReportGatewayMembersResponse, SeekGroupRequest, SeekGroupResponse,
    TopicPartition,
};
use tonic::{Request, Response, Status};

use super::authorize::{Visibility, authorize_change, authorize_request, authorize_subscription};
use super::group_gateway::check_no_gateway;
use super::lag_history::LagHistory;
use super::recheck::{self, HeldRights};
use super::status::status_at;
use super::{call_memory, group_describe, group_offsets, time};
use crate::access::AuthMode;
use crate::call::CallMemory;
use crate::clock::Clock;
use crate::cluster::is_topic_name;
use crate::error::{Error, Result};
use crate::limits::{
    CLIENT_NAME_BYTES_MAX, COMMIT_BYTES_MAX, COMMIT_METADATA_BYTES_MAX, FETCH_WAIT_MAX,
    GROUP_HEARTBEAT_MAX, GROUP_HEARTBEAT_MIN, GROUP_HEARTBEAT_SOON, MEMBER_ID_BYTES_MAX,
    OFFSETS_PER_COMMIT_MAX, SESSION_TIMEOUT_MAX, SESSION_TIMEOUT_MIN, SUBSCRIBED_TOPICS_MAX,
    TOPIC_NAME_BYTES_MAX,
};
use crate::log::{
    CommittingMember, ConsumerGroup, GroupChange, GroupRefusal, GroupTable, MemberReport,
    MemberSpec, MemberView, OffsetUpdate, PARTITIONS_PER_GROUP_MAX, PartitionKey, Refusal,
    TopicOffsets, is_pattern,
};
use crate::node::Node;
use crate::shard::{HeartbeatDetails, Shard};

pub(crate) struct GroupHandler {
    pub(super) node: Arc<Node>,
    lags: Arc<LagHistory>,
}

impl GroupHandler {
    pub(crate) fn new(node: &Arc<Node>) -> Self {
        Self { node: node.clone(), lags: LagHistory::start(node) }
    }

    async fn heartbeat(
        &self,
        request: HeartbeatRequest,
        call: Option<&CallMemory>,
    ) -> Result<HeartbeatResponse> {
        check_group(&request.group)?;
        check_id("member_id", &request.member_id, 1)?;
        check_id("static_name", &request.static_name, 0)?;
        if request.client_name.len() > CLIENT_NAME_BYTES_MAX {
            let what = format!("must have at most {CLIENT_NAME_BYTES_MAX} bytes");
            return Err(Error::InvalidArgument { field: "client_name", what });
        }
        if request.member_epoch == 0 && request.topics.is_empty() {
            return Err(invalid("topics", "is required to join"));
        }
        if request.take_over && (request.member_epoch != 0 || request.static_name.is_empty()) {
            return Err(invalid("take_over", "is for a join with a static_name"));
        }
        let wait = request.max_wait.unwrap_or_default();
        let wait = time::from_duration("max_wait", wait)?.min(FETCH_WAIT_MAX);
        let report = MemberReport {
            spec: MemberSpec {
                member_id: request.member_id,
                static_name: request.static_name,
                client_name: request.client_name,
                session_timeout_ms: session_timeout_ms(request.session_timeout)?,
                topics: subscribed(request.topics)?,
            },
            epoch: request.member_epoch,
            owned: self.keys("owned", &request.owned)?.into_iter().collect(),
            take_over: request.take_over,
        };
        let details = HeartbeatDetails {
            paused: self.keys("paused", &request.paused)?.into_iter().collect(),
            principal: call.and_then(CallMemory::quota_meter).map(|it| it.principal().clone()),
        };
        let group = request.group.as_str();
        let shard = match self.node.find_group(group).await {
            Err(Error::GroupNotFound { .. }) if report.epoch == 0 => {
                self.node.find_or_place_group(group).await?
            }
            Err(Error::GroupNotFound { .. }) => {
                let member_id = report.spec.member_id;
                return Err(Refusal::from(GroupRefusal::UnknownMember { member_id }).into());
            }
            found => found?,
        };
        if report.epoch == 0 {
            check_no_gateway(&shard, group)?;
        }
        let mut held = HeartbeatRequest { group: group.to_owned(), ..HeartbeatRequest::default() };
        if self.node.auth_mode() != AuthMode::Off {
            held.topics.clone_from(&report.spec.topics);
        }
        if report.spec.topics.is_empty() && self.node.auth_mode() != AuthMode::Off {
            // The member keeps its subscription.
            let known = shard.read_groups(|groups| groups.snapshot(group));
            let member = known.as_ref().and_then(|group| group.member(&report.spec.member_id));
            let topics = member.map_or(&[][..], |member| &*member.settings.topics);
            authorize_subscription(&self.node, call, topics)?;
            held.topics = topics.to_vec();
        }
        let rights = HeldRights::new(&self.node, call, held);
        let reported = shard.report(group, &report, &details, wait, rights.lost());
        let view = match Box::pin(reported).await {
            Ok(view) => view,
            Err(error) => return Err(shard.redirect(error).await),
        };
        // This node's copy of the cluster's state may be older than the assignment.
        self.node.learn_topics(view.assigned.iter().chain(&view.pending)).await?;
        rights.check()?;
        Ok(self.response(view))
    }

    fn response(&self, view: MemberView) -> HeartbeatResponse {
        let timeout = Duration::from_millis(view.session_timeout_ms.into());
        let steady = (timeout / 10).clamp(GROUP_HEARTBEAT_MIN, GROUP_HEARTBEAT_MAX);
        let next = if view.is_settled { steady } else { steady.min(GROUP_HEARTBEAT_SOON) };
        HeartbeatResponse {
            member_epoch: view.epoch,
            assigned: self.wire_partitions(view.assigned),
            next_heartbeat: Some(wire_duration(next)),
            pending: self.wire_partitions(view.pending),
            unmatched_topics: self.node.unmatched_topics(&view.topics),
            session_timeout: Some(wire_duration(timeout)),
            settled: view.is_settled,
        }
    }

    async fn leave(&self, request: LeaveRequest, call: Option<&CallMemory>) -> Result<()> {
        check_group(&request.group)?;
        check_id("member_id", &request.member_id, 1)?;
        let shard = match self.node.find_group(&request.group).await {
            Err(Error::GroupNotFound { .. }) => return Ok(()),
            found => found?,
        };
        let left = async {
            shard.ready().await?;
            let is_member = shard.read_groups(|groups| {
                let group = groups.get(&request.group);
                group.is_some_and(|group| group.member(&request.member_id).is_some())
            });
            if !is_member {
                return Ok(());
            }
            HeldRights::new(&self.node, call, request.clone()).check()?;
            let members = vec![request.member_id.clone()];
            shard.change_group(&request.group, GroupChange::RemoveMembers { members }).await
        };
        match left.await {
            Ok(()) => Ok(()),
            Err(error) => Err(shard.redirect(error).await),
        }
    }

    async fn commit(
        &self,
        request: CommitOffsetsRequest,
        call: Option<&CallMemory>,
    ) -> Result<CommitOffsetsResponse, Status> {
        check_group(&request.group)?;
        check_id("member_id", &request.member_id, 0)?;
        if request.member_id.is_empty() && request.member_epoch != 0 {
            return Err(invalid("member_epoch", "is for a commit with a member_id").into());
        }
        if request.member_id.is_empty() && request.sequence != 0 {
            return Err(invalid("sequence", "is for a commit with a member_id").into());
        }
        if !request.member_id.is_empty() && request.offsets_epoch.is_some() {
            let what = "is for a commit without a member_id; a member numbers its commits";
            return Err(invalid("offsets_epoch", what).into());
        }
        let count = request.offsets.len() as u64;
        let named_only = named_only(&request.offsets);
        let topics = self.new_offsets(request.offsets).await?;
        let shard = match request.member_id.is_empty() {
            true => self.node.find_or_place_group(&request.group).await?,
            false => match self.node.find_group(&request.group).await {
                Err(Error::GroupNotFound { .. }) => {
                    let member_id = request.member_id;
                    let unknown = Refusal::from(GroupRefusal::UnknownMember { member_id });
                    return Err(Error::from(unknown).into());
                }
                found => found?,
            },
        };
        let names: BTreeMap<u64, String> =
            topics.iter().map(|topic| (topic.topic_id, topic.name.clone())).collect();
        let offsets = match self.node.auth_mode() {
            AuthMode::Off => Vec::new(),
            _ => named_topics(names.values()),
        };
        let held = CommitOffsetsRequest {
            group: request.group.clone(),
            offsets,
            ..CommitOffsetsRequest::default()
        };
        let rights = HeldRights::new(&self.node, call, held);
        let CommitOffsetsRequest { member_id, member_epoch: epoch, sequence, .. } = request;
        let (group, offsets_epoch) = (request.group.as_str(), request.offsets_epoch);
        let is_member = !member_id.is_empty();
        let member = is_member.then_some(CommittingMember { member_id, epoch, sequence });
        let at_us = self.node.clock().now_us();
        let checked = async {
            shard.ready().await?;
            let check = |groups: &GroupTable| {
                groups.check_commit(group, member.as_ref(), offsets_epoch, &topics)
            };
            shard.read_groups(check).map_err(Refusal::from)?;
            let of_group = shard.read_groups(|groups| groups.snapshot(group));
            check_named_topics(of_group.as_deref(), &topics, &named_only)
        };
        if let Err(error) = checked.await {
            return Err(self.commit_status(&shard, &names, error).await);
        }
        // Runs after the checks of the group, because it may have to ask leaders of partitions.
        group_offsets::check_ends(&self.node, &topics).await?;
        rights.check()?;
        let commit = GroupChange::Commit { member, offsets_epoch, topics: topics.clone(), at_us };
        if let Err(error) = shard.change_group(group, commit).await {
            return Err(self.commit_status(&shard, &names, error).await);
        }
        self.node.metrics().on_group_commit(count);
        let next_epoch = shard.read_groups(|groups| {
            let group = groups.get(group).filter(|_| groups.is_ordered() && !is_member);
            group.and_then(|group| group.epoch_after_commit(offsets_epoch, &topics))
        });
        Ok(CommitOffsetsResponse { offsets_epoch: next_epoch })
    }

    /// Returns the status of a failed commit, which names the partition that failed.
    async fn commit_status(
        &self,
        shard: &Shard,
        names: &BTreeMap<u64, String>,
        error: Error,
    ) -> Status {
        match failed_partition(&error) {
            Some(partition) => {
                let topic = names.get(&partition.topic_id).map_or("", String::as_str);
                status_at(&error, topic, partition.number)
            }
            None => shard.redirect(error).await.into(),
        }
    }

    /// Checks the offsets of a request, and resolves their partitions.
    pub(super) async fn new_offsets(
        &self,
        offsets: Vec<CommittedOffset>,
    ) -> Result<Vec<TopicOffsets>, Status> {
        if !(1..=OFFSETS_PER_COMMIT_MAX).contains(&offsets.len()) {
            let what = format!("must be 1..={OFFSETS_PER_COMMIT_MAX}, not {}", offsets.len());
            return Err(Error::InvalidArgument { field: "offsets", what }.into());
        }
        let mut topics: BTreeMap<u64, TopicOffsets> = BTreeMap::new();
        let mut seen = BTreeSet::new();
        let mut bytes = 0;
        for CommittedOffset { partition, offset, metadata } in offsets {
            let partition = partition.ok_or_else(|| invalid("offsets.partition", "is required"))?;
            let TopicPartition { topic, partition: number, topic_id } = partition;
            if metadata.len() > COMMIT_METADATA_BYTES_MAX {
                let what = format!("must have at most {COMMIT_METADATA_BYTES_MAX} bytes");
                let error = Error::InvalidArgument { field: "offsets.metadata", what };
                return Err(status_at(&error, &topic, number));
            }
            let found = self.node.find_key(&topic, topic_id, number).await;
            let key = found.map_err(|error| status_at(&error, &topic, number))?;
            if !seen.insert(key) {
                let what = format!("{topic}/{number} is named twice");
                return Err(Error::InvalidArgument { field: "offsets", what }.into());
            }
            bytes += metadata.len() + 16;
            let row = topics.entry(key.topic_id).or_insert_with(|| {
                bytes += topic.len() + 16;
                TopicOffsets { topic_id: key.topic_id, name: topic, offsets: Vec::new() }
            });
            row.offsets.push(OffsetUpdate { number, offset: Some(offset), metadata });
        }
        if bytes > COMMIT_BYTES_MAX {
            let what =
                format!("has {bytes} bytes of names and metadata, the limit is {COMMIT_BYTES_MAX}");
            return Err(Error::InvalidArgument { field: "offsets", what }.into());
        }
        Ok(topics.into_values().collect())
    }

    async fn delete(&self, request: DeleteGroupRequest) -> Result<()> {
        check_group(&request.group)?;
        let shard = self.node.find_group(&request.group).await?;
        check_no_gateway(&shard, &request.group)?;
        let change = GroupChange::Delete { offsets_epoch: request.offsets_epoch };
        match shard.change_group(&request.group, change).await {
            Ok(()) => Ok(()),
            Err(error) => Err(shard.redirect(error).await),
        }
    }

    /// Resolves partitions that a member reports. Leaves out unknown topics: the member cannot own
    /// their partitions.
    pub(super) fn keys(
        &self,
        field: &'static str,
        partitions: &[TopicPartition],
    ) -> Result<Vec<PartitionKey>> {
        if partitions.len() > PARTITIONS_PER_GROUP_MAX {
            let what = format!("must be at most {PARTITIONS_PER_GROUP_MAX} partitions");
            return Err(Error::InvalidArgument { field, what });
        }
        let key = |named: &TopicPartition| {
            let topic_id = match named.topic_id {
                0 => self.node.topic(&named.topic).ok()?.id,
                topic_id => topic_id,
            };
            Some(PartitionKey { topic_id, number: named.partition })
        };
        let mut keys: Vec<PartitionKey> = partitions.iter().filter_map(key).collect();
        keys.sort_unstable();
        if let Some(pair) = keys.windows(2).find(|pair| pair[0] == pair[1]) {
            let named = partitions.iter().find(|named| key(named) == Some(pair[0]));
            let topic = named.map_or("", |named| named.topic.as_str());
            let what = format!("{topic}/{} is named twice", pair[0].number);
            return Err(Error::InvalidArgument { field, what });
        }
        Ok(keys)
    }

    /// Converts partitions to the wire format. Leaves out partitions of deleted topics.
    fn wire_partitions(&self, keys: Vec<PartitionKey>) -> Vec<TopicPartition> {
        wire_partitions(&self.node, keys)
    }
}

/// Converts partitions to the wire format, in order. Leaves out partitions of deleted topics.
pub(super) fn wire_partitions(
    node: &Node,
    keys: impl IntoIterator<Item = PartitionKey>,
) -> Vec<TopicPartition> {
    let mut known: Option<(u64, Option<String>)> = None;
    let mut partitions = Vec::new();
    for PartitionKey { topic_id, number } in keys {
        if known.as_ref().is_none_or(|(id, _)| *id != topic_id) {
            known = Some((topic_id, node.topic_of(topic_id).map(|topic| topic.name.clone())));
        }
        if let Some((_, Some(topic))) = &known {
            let topic = topic.clone();
            partitions.push(TopicPartition { topic, partition: number, topic_id });
        }
    }
    partitions
}

/// Returns offsets that name these topics, for a check of rights.
fn named_topics<'a>(names: impl Iterator<Item = &'a String>) -> Vec<CommittedOffset> {
    let offset = |topic: &String| {
        let partition = TopicPartition { topic: topic.clone(), ..TopicPartition::default() };
        CommittedOffset { partition: Some(partition), ..CommittedOffset::default() }
    };
    names.map(offset).collect()
}

fn failed_partition(error: &Error) -> Option<PartitionKey> {
    let Error::Refused(Refusal::Group(refusal)) = error else { return None };
    match **refusal {
        GroupRefusal::NotOwned { partition, .. } => Some(partition),
        GroupRefusal::StaleCommit(stale) => stale.partition,
        _ => None,
    }
}

/// Returns the topics that offsets name without an id.
fn named_only(offsets: &[CommittedOffset]) -> BTreeSet<String> {
    let partitions = offsets.iter().filter_map(|offset| offset.partition.as_ref());
    partitions.filter(|it| it.topic_id == 0).map(|it| it.topic.clone()).collect()
}

/// Rejects topics without an id if the group's offsets belong to an earlier topic of the name.
///
/// The commit may be meant for the earlier topic.
fn check_named_topics(
    group: Option<&ConsumerGroup>,
    topics: &[TopicOffsets],
    named_only: &BTreeSet<String>,
) -> Result<()> {
    for topic in topics.iter().filter(|topic| named_only.contains(&topic.name)) {
        let earlier = group.and_then(|group| group.earlier_topic(topic.topic_id, &topic.name));
        if let Some(expected) = earlier {
            let (topic, current) = (topic.name.clone(), topic.topic_id);
            return Err(Error::TopicRecreated { topic, expected, current });
        }
    }
    Ok(())
}

fn invalid(field: &'static str, what: &str) -> Error {
    Error::InvalidArgument { field, what: what.to_owned() }
}

pub(super) fn wire_duration(duration: Duration) -> prost_types::Duration {
    time::to_duration(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
}

pub(super) fn check_group(group: &str) -> Result<()> {
    if is_topic_name(group) {
        return Ok(());
    }
    let what = format!(
        "a group name has 1..={TOPIC_NAME_BYTES_MAX} ASCII letters, digits, '.', '_' and '-', and \
         is neither \".\" nor \"..\""
    );
    Err(Error::InvalidArgument { field: "group", what })
}

pub(super) fn check_id(field: &'static str, id: &str, bytes_min: usize) -> Result<()> {
    let is_valid = (bytes_min..=MEMBER_ID_BYTES_MAX).contains(&id.len())
        && id.bytes().all(|byte| byte.is_ascii_graphic());
    if is_valid {
        return Ok(());
    }
    let what = format!(
        "must have {bytes_min}..={MEMBER_ID_BYTES_MAX} printable ASCII characters without spaces"
    );
    Err(Error::InvalidArgument { field, what })
}

/// Returns the session timeout in milliseconds; 0 if it is not set.
fn session_timeout_ms(timeout: Option<prost_types::Duration>) -> Result<u32> {
    let Some(timeout) = timeout else { return Ok(0) };
    let timeout = time::from_duration("session_timeout", timeout)?;
    if !(SESSION_TIMEOUT_MIN..=SESSION_TIMEOUT_MAX).contains(&timeout) {
        let what =
            format!("must be {SESSION_TIMEOUT_MIN:?} to {SESSION_TIMEOUT_MAX:?}, not {timeout:?}");
        return Err(Error::InvalidArgument { field: "session_timeout", what });
    }
    Ok(u32::try_from(timeout.as_millis()).expect("ten minutes fit"))
}

/// Checks subscribed names and patterns; returns them sorted and without duplicates.
fn subscribed(mut topics: Vec<String>) -> Result<Vec<String>> {
    if topics.len() > SUBSCRIBED_TOPICS_MAX {
        let what = format!("must be at most {SUBSCRIBED_TOPICS_MAX}, not {}", topics.len());
        return Err(Error::InvalidArgument { field: "topics", what });
    }
    for topic in &topics {
        let plain = topic.replace('*', "x");
        let is_valid = is_topic_name(if is_pattern(topic) { &plain } else { topic });
        if !is_valid {
            let what = format!("{topic:?} is neither a topic name nor a pattern with '*'");
            return Err(Error::InvalidArgument { field: "topics", what });
        }
    }
    topics.sort_unstable();
    topics.dedup();
    Ok(topics)
}

#[tonic::async_trait]
impl GroupService for GroupHandler {
    async fn heartbeat(
        &self,
        request: Request<HeartbeatRequest>,
    ) -> Result<Response<HeartbeatResponse>, Status> {
        authorize_request(&self.node, &request)?;
        let call = call_memory(&request);
        Ok(Response::new(self.heartbeat(request.into_inner(), call.as_deref()).await?))
    }

    async fn leave(
        &self,
        request: Request<LeaveRequest>,
    ) -> Result<Response<LeaveResponse>, Status> {
        authorize_request(&self.node, &request)?;
        let call = call_memory(&request);
        self.leave(request.into_inner(), call.as_deref()).await?;
        Ok(Response::new(LeaveResponse {}))
    }

    async fn commit_offsets(
        &self,
        request: Request<CommitOffsetsRequest>,
    ) -> Result<Response<CommitOffsetsResponse>, Status> {
        authorize_request(&self.node, &request)?;
        let call = call_memory(&request);
        Ok(Response::new(self.commit(request.into_inner(), call.as_deref()).await?))
    }

    async fn get_offsets(
        &self,
        request: Request<GetOffsetsRequest>,
    ) -> Result<Response<GetOffsetsResponse>, Status> {
        let call = call_memory(&request);
        let call = call.as_deref();
        let request = request.into_inner();
        let get = || async {
            let visible = Visibility::of(&self.node, call)?;
            group_offsets::get(&self.node, request.clone(), &visible, call).await
        };
        Ok(Response::new(recheck::read(&self.node, call, &request, get).await?))
    }

    async fn list_groups(
        &self,
        request: Request<ListGroupsRequest>,
    ) -> Result<Response<ListGroupsResponse>, Status> {
        authorize_request(&self.node, &request)?;
        let visible = Visibility::of(&self.node, call_memory(&request).as_deref())?;
        Ok(Response::new(self.list(request.into_inner(), &visible).await?))
    }

    async fn describe_group(
        &self,
        request: Request<DescribeGroupRequest>,
    ) -> Result<Response<DescribeGroupResponse>, Status> {
        let call = call_memory(&request);
        let call = call.as_deref();
        let request = request.into_inner();
        let describe = || async {
            let visible = Visibility::of(&self.node, call)?;
            let lags = (request.include_history && visible.sees_every_topic())
                .then(|| self.lags.of(&request.group));
            let described = group_describe::describe(&self.node, request.clone(), &visible, call);
            Ok::<_, Error>(DescribeGroupResponse { lag_history: lags, ..described.await? })
        };
        Ok(Response::new(recheck::read(&self.node, call, &request, describe).await?))
    }

    async fn seek_group(
        &self,
        request: Request<SeekGroupRequest>,
    ) -> Result<Response<SeekGroupResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        let sought = group_offsets::seek(&self.node, self, request.into_inner()).await?;
        Ok(Response::new(sought))
    }

    async fn forget_group_topic(
        &self,
        request: Request<ForgetGroupTopicRequest>,
    ) -> Result<Response<ForgetGroupTopicResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        let forgotten = group_offsets::forget_topic(&self.node, request.into_inner()).await?;
        Ok(Response::new(forgotten))
    }

    async fn report_gateway_members(
        &self,
        request: Request<ReportGatewayMembersRequest>,
    ) -> Result<Response<ReportGatewayMembersResponse>, Status> {
        authorize_request(&self.node, &request)?;
        self.report_gateway(request.into_inner()).await?;
        Ok(Response::new(ReportGatewayMembersResponse {}))
    }

    async fn delete_group(
        &self,
        request: Request<DeleteGroupRequest>,
    ) -> Result<Response<DeleteGroupResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        self.delete(request.into_inner()).await?;
        Ok(Response::new(DeleteGroupResponse {}))
    }
}
