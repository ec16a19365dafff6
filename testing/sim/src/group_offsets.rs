//! A client that changes the offset of one partition of a group without members, and whose
//! requests arrive late: commits with and without an epoch, seeks, undos, forgotten topics,
//! deletions, and now and then a member that joins, commits and leaves.
//!
//! Some requests are held back and sent after later ones, and copies of others arrive again. The
//! client sends one request at a time, so `helix_checker` knows which offsets are possible.

use std::collections::VecDeque;
use std::time::Duration;

use helix_checker::{GroupOffsetChange, GroupOffsetChecker, SentOffsetChange, StoredOffset};
use helix_client::Error;
use helix_proto::log::v1::group_service_client::GroupServiceClient;
use helix_proto::log::v1::{
    CommitOffsetsRequest, CommittedOffset, DeleteGroupRequest, ErrorReason,
    ForgetGroupTopicRequest, GetOffsetsRequest, HeartbeatRequest, LeaveRequest, SeekGroupRequest,
    TopicPartition,
};
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::time::{sleep, timeout};
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use crate::coverage::CoverageMark;
use crate::net::{CLIENT_PORT, channel};
use crate::plan::SimulationPlan;
use crate::workload::{ClientContext, TOPIC, TOPIC_IS_THERE};

/// Mean pause between two changes.
const PAUSE: Duration = Duration::from_millis(60);

const RESPONSE_TIMEOUT: Duration = Duration::from_millis(1_500);

/// Probability that a request is not sent at once, but as a late one.
const HELD: f64 = 0.15;

/// Probability that a copy of a request is kept.
const COPIED: f64 = 0.4;

/// Late requests that are kept.
const LATE_MAX: usize = 12;

/// Heartbeats until a member has the partition, or gives up.
const JOINS_MAX: u32 = 15;

const LEAVES_MAX: u32 = 6;

const SESSION_TIMEOUT_S: i64 = 2;

/// Longest wait of a heartbeat, in milliseconds.
const HEARTBEAT_WAIT_MS: i32 = 100;

/// A request that changes the offset.
#[derive(Clone)]
enum OffsetRequest {
    Commit(CommitOffsetsRequest),
    Seek(SeekGroupRequest),
    Forget(ForgetGroupTopicRequest),
    Delete(DeleteGroupRequest),
}

/// Member of the group.
struct JoinedMember {
    id: String,
    epoch: u64,
    /// Number of its last commit.
    sequence: u64,
}

struct OffsetChanger {
    context: ClientContext,
    nodes: Vec<GroupServiceClient<Channel>>,
    /// Node that is asked first.
    coordinator: usize,
    group: String,
    partition: u32,
    /// Epoch of the offsets as the client knows it.
    epoch: Option<u64>,
    checker: GroupOffsetChecker,
    late: VecDeque<(OffsetRequest, SentOffsetChange)>,
    changes: u64,
    rng: StdRng,
}

/// Changes the offset until the workload stops.
pub async fn run(context: ClientContext) -> turmoil::Result {
    context.wait_for_phase(TOPIC_IS_THERE).await;
    let mut changer = OffsetChanger::new(&context)?;
    while context.pause(PAUSE, &mut changer.rng).await {
        changer.step().await;
        if let Some(what) = changer.checker.violations().first() {
            context.group.checker().found(format!("offsets of {}: {what}", changer.group));
        }
    }
    context.on_end();
    Ok(())
}

impl OffsetChanger {
    fn new(context: &ClientContext) -> turmoil::Result<Self> {
        let mut rng = context.rng(context.id());
        let node = |node| -> turmoil::Result<_> {
            let host = SimulationPlan::host(node);
            let endpoint = Endpoint::from_shared(format!("http://{host}:{CLIENT_PORT}"))?;
            Ok(GroupServiceClient::new(channel(&endpoint)))
        };
        Ok(Self {
            context: context.clone(),
            nodes: (1..=context.plan.machines()).map(node).collect::<Result<_, _>>()?,
            coordinator: 0,
            group: format!("offsets-{}", context.plan.seed),
            partition: rng.random_range(0..context.plan.partitions),
            epoch: None,
            checker: GroupOffsetChecker::new(),
            late: VecDeque::new(),
            changes: 0,
            rng,
        })
    }

    fn note(&self, text: &str) {
        self.context.recorder.note(&format!("{}: {text}", self.group));
    }

    async fn step(&mut self) {
        let Some(epoch) = self.epoch else { return self.read().await };
        match self.rng.random_range(0..20) {
            0..8 => self.change(GroupOffsetChange::Commit, epoch).await,
            8 if self.checker.is_sought() => {
                self.change(GroupOffsetChange::CommitWithoutEpoch, epoch).await;
            }
            8..10 => self.change(GroupOffsetChange::Seek, epoch).await,
            10 => self.change(GroupOffsetChange::Undo, epoch).await,
            11 => self.change(GroupOffsetChange::Forget, epoch).await,
            12 => self.change(GroupOffsetChange::Delete, epoch).await,
            13 => self.act_as_member().await,
            14..18 => self.send_late().await,
            _ => self.read().await,
        }
    }

    /// Returns a new offset with unique metadata. Every acknowledged batch has a record, so the
    /// offset is not beyond the end.
    fn draw_offset(&mut self) -> (u64, String) {
        self.changes += 1;
        let offset = self.rng.random_range(0..=self.context.recorder.acks(self.partition));
        (offset, format!("change {}", self.changes))
    }

    fn committed(&self, (offset, metadata): &(u64, String)) -> CommittedOffset {
        let partition =
            TopicPartition { topic: TOPIC.to_owned(), partition: self.partition, topic_id: 0 };
        CommittedOffset { partition: Some(partition), offset: *offset, metadata: metadata.clone() }
    }

    /// Makes one change of this kind, or keeps it as a late one.
    async fn change(&mut self, kind: GroupOffsetChange, epoch: u64) {
        let group = self.group.clone();
        let offsets_epoch = Some(epoch);
        let (request, value) = match kind {
            GroupOffsetChange::Undo => {
                let undo = SeekGroupRequest {
                    group,
                    undo: true,
                    offsets_epoch,
                    ..SeekGroupRequest::default()
                };
                (OffsetRequest::Seek(undo), None)
            }
            GroupOffsetChange::Forget => {
                let topic = TOPIC.to_owned();
                let forget = ForgetGroupTopicRequest {
                    group,
                    topic,
                    offsets_epoch,
                    ..ForgetGroupTopicRequest::default()
                };
                (OffsetRequest::Forget(forget), Some(None))
            }
            GroupOffsetChange::Delete => {
                (OffsetRequest::Delete(DeleteGroupRequest { group, offsets_epoch }), Some(None))
            }
            GroupOffsetChange::Seek => {
                let offset = self.draw_offset();
                let offsets = vec![self.committed(&offset)];
                let seek = SeekGroupRequest { group, offsets, offsets_epoch, ..Default::default() };
                (OffsetRequest::Seek(seek), Some(Some(offset)))
            }
            GroupOffsetChange::Commit
            | GroupOffsetChange::CommitWithoutEpoch
            | GroupOffsetChange::MemberCommit => {
                let offset = self.draw_offset();
                let offsets_epoch = offsets_epoch.filter(|_| kind == GroupOffsetChange::Commit);
                let offsets = vec![self.committed(&offset)];
                let commit = CommitOffsetsRequest {
                    group,
                    offsets,
                    offsets_epoch,
                    ..CommitOffsetsRequest::default()
                };
                (OffsetRequest::Commit(commit), Some(Some(offset)))
            }
        };
        self.send_or_hold(kind, request, value).await;
    }

    async fn send_or_hold(
        &mut self,
        kind: GroupOffsetChange,
        request: OffsetRequest,
        value: Option<StoredOffset>,
    ) {
        let change = self.checker.change(kind, value);
        if self.rng.random_bool(HELD) {
            self.keep(request, change);
            return;
        }
        let copy = self.rng.random_bool(COPIED).then(|| request.clone());
        let node = self.nodes[self.coordinator].clone();
        match send(node, request).await {
            Ok(SendOutcome::Changed(epoch)) => {
                self.note(&format!("acknowledged {change:?}"));
                self.checker.acked(&change);
                self.epoch = epoch;
            }
            // It is sent again as a late one, which may find something.
            Ok(SendOutcome::Nothing) if copy.is_some() => {}
            Ok(SendOutcome::Nothing) => self.checker.refused(&change),
            Err(error) => {
                let text = error.as_ref().map_or("no response".to_owned(), ToString::to_string);
                self.note(&format!("failed: {change:?}: {text}"));
                // A change that may have been applied has moved it.
                self.epoch = None;
                let is_refused = error.as_ref().is_some_and(|error| !error.may_have_applied);
                if is_refused && copy.is_none() {
                    self.checker.refused(&change);
                }
                self.reroute(error.as_ref());
            }
        }
        if let Some(request) = copy {
            self.keep(request, change);
        }
    }

    fn keep(&mut self, request: OffsetRequest, change: SentOffsetChange) {
        if self.late.len() == LATE_MAX {
            self.late.pop_front();
        }
        self.late.push_back((request, change));
    }

    /// Sends a request that was held back, or a copy. It has no effect if a later change ends it.
    async fn send_late(&mut self) {
        if self.late.is_empty() {
            return;
        }
        let at = self.rng.random_range(0..self.late.len());
        let Some((request, change)) = self.late.remove(at) else { return };
        let node = match self.rng.random_bool(0.2) {
            true => self.context.random_member(&mut self.rng),
            false => self.coordinator,
        };
        let node = self.nodes[node].clone();
        match send(node, request).await {
            Ok(SendOutcome::Changed(_)) => {
                self.note(&format!("acknowledged late {change:?}"));
                self.checker.acked(&change);
            }
            Ok(SendOutcome::Nothing) => {}
            Err(error) => {
                let text = error.as_ref().map_or("no response".to_owned(), ToString::to_string);
                self.note(&format!("failed late: {change:?}: {text}"));
                if error.is_some_and(|error| error.is(ErrorReason::StaleCommit)) {
                    self.context.marks.hit(mark_of(change.kind));
                }
            }
        }
        // It may have been applied.
        self.epoch = None;
    }

    /// Reads the offset and its epoch.
    async fn read(&mut self) {
        let request = GetOffsetsRequest {
            group: self.group.clone(),
            allow_missing: true,
            ..GetOffsetsRequest::default()
        };
        let mut node = self.nodes[self.coordinator].clone();
        let response = match timeout(RESPONSE_TIMEOUT, node.get_offsets(request)).await {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(status)) => return self.reroute(Some(&Error::from_status(&status))),
            Err(_) => return self.reroute(None),
        };
        let rows = response.offsets.into_iter().filter_map(|row| row.committed);
        let value = rows.map(|row| (row.offset, row.metadata)).next();
        self.note(&format!("has {value:?} at {:?}", response.offsets_epoch));
        self.checker.read(value);
        self.epoch = response.offsets_epoch;
    }

    /// Joins the group, commits as its member and leaves it.
    async fn act_as_member(&mut self) {
        self.changes += 1;
        let id = format!("offsets-{}", self.changes);
        let mut member = JoinedMember { id, epoch: 0, sequence: 0 };
        if self.join(&mut member).await {
            for _ in 0..self.rng.random_range(1..=3) {
                member.sequence += 1;
                let offset = self.draw_offset();
                let commit = CommitOffsetsRequest {
                    group: self.group.clone(),
                    member_id: member.id.clone(),
                    member_epoch: member.epoch,
                    sequence: member.sequence,
                    offsets: vec![self.committed(&offset)],
                    offsets_epoch: None,
                };
                let (kind, value) = (GroupOffsetChange::MemberCommit, Some(Some(offset)));
                self.send_or_hold(kind, OffsetRequest::Commit(commit), value).await;
            }
        }
        for _ in 0..LEAVES_MAX {
            let request = LeaveRequest { group: self.group.clone(), member_id: member.id.clone() };
            let mut node = self.nodes[self.coordinator].clone();
            match timeout(RESPONSE_TIMEOUT, node.leave(request)).await {
                Ok(Ok(_)) => {
                    self.checker.member_left();
                    break;
                }
                Ok(Err(status)) => self.reroute(Some(&Error::from_status(&status))),
                Err(_) => self.reroute(None),
            }
        }
        self.epoch = None;
    }

    /// Sends heartbeats until the member has the partition. Returns whether it has.
    async fn join(&mut self, member: &mut JoinedMember) -> bool {
        let mut owned = Vec::new();
        for _ in 0..JOINS_MAX {
            let is_join = member.epoch == 0;
            let topics = if is_join { vec![TOPIC.to_owned()] } else { Vec::new() };
            let timeout_of_session = prost_types::Duration { seconds: SESSION_TIMEOUT_S, nanos: 0 };
            let wait = prost_types::Duration { seconds: 0, nanos: HEARTBEAT_WAIT_MS * 1_000_000 };
            let request = HeartbeatRequest {
                group: self.group.clone(),
                member_id: member.id.clone(),
                member_epoch: member.epoch,
                topics,
                owned,
                session_timeout: is_join.then_some(timeout_of_session),
                max_wait: Some(wait),
                ..HeartbeatRequest::default()
            };
            owned = Vec::new();
            let mut node = self.nodes[self.coordinator].clone();
            match timeout(RESPONSE_TIMEOUT, node.heartbeat(request)).await {
                Ok(Ok(response)) => {
                    let response = response.into_inner();
                    member.epoch = response.member_epoch;
                    let is_ours = |it: &TopicPartition| it.partition == self.partition;
                    if response.assigned.iter().any(is_ours) {
                        return true;
                    }
                    owned = response.assigned;
                }
                Ok(Err(status)) => {
                    let error = Error::from_status(&status);
                    if error.is(ErrorReason::UnknownMember) {
                        member.epoch = 0;
                    }
                    self.reroute(Some(&error));
                }
                Err(_) => self.reroute(None),
            }
            sleep(Duration::from_millis(20)).await;
        }
        false
    }

    /// Chooses the next node to ask after a failed call.
    fn reroute(&mut self, error: Option<&Error>) {
        let hint = error.and_then(|error| error.leader.as_ref()).map_or(0, |leader| leader.node_id);
        let hinted = usize::try_from(hint).ok().and_then(|node| node.checked_sub(1));
        let is_final = error.is_some_and(|error| !error.retryable);
        self.coordinator = match hinted.filter(|at| *at < self.nodes.len()) {
            Some(at) => at,
            None if is_final => self.coordinator,
            None => self.context.random_member(&mut self.rng),
        };
    }
}

/// Returns the mark of a late change that was refused.
fn mark_of(kind: GroupOffsetChange) -> CoverageMark {
    match kind {
        GroupOffsetChange::Commit | GroupOffsetChange::CommitWithoutEpoch => {
            CoverageMark::LateOffsetCommitRefused
        }
        GroupOffsetChange::MemberCommit => CoverageMark::GroupLateCommitRefused,
        GroupOffsetChange::Seek | GroupOffsetChange::Undo => CoverageMark::LateSeekRefused,
        GroupOffsetChange::Forget | GroupOffsetChange::Delete => CoverageMark::LateDeletionRefused,
    }
}

/// Outcome of a request that was accepted.
enum SendOutcome {
    /// The epoch after it, if the response has it.
    Changed(Option<u64>),
    /// There was nothing to take back or to forget.
    Nothing,
}

/// Sends a request to a node. The error is `None` if no response came in time.
async fn send(
    mut node: GroupServiceClient<Channel>,
    request: OffsetRequest,
) -> Result<SendOutcome, Option<Error>> {
    let found = |is_empty| match is_empty {
        true => SendOutcome::Nothing,
        false => SendOutcome::Changed(None),
    };
    let response = async {
        Ok::<_, Status>(match request {
            OffsetRequest::Commit(it) => {
                SendOutcome::Changed(node.commit_offsets(it).await?.into_inner().offsets_epoch)
            }
            OffsetRequest::Seek(it) => {
                found(node.seek_group(it).await?.into_inner().offsets.is_empty())
            }
            OffsetRequest::Forget(it) => {
                found(node.forget_group_topic(it).await?.into_inner().offsets.is_empty())
            }
            OffsetRequest::Delete(it) => {
                node.delete_group(it).await?;
                SendOutcome::Changed(None)
            }
        })
    };
    match timeout(RESPONSE_TIMEOUT, response).await {
        Ok(Ok(outcome)) => Ok(outcome),
        Ok(Err(status)) => Err(Some(Error::from_status(&status))),
        Err(_) => Err(None),
    }
}
