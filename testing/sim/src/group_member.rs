//! A member of a consumer group without `helix-client`, as a client in another language might be.
//!
//! Each slot runs one member after another on a host of its own. A member joins by names or a
//! pattern, sends heartbeats, reads its partitions from the group's offsets through Fetch or
//! Subscribe, and commits. Until the group is to be calm it may crash, leave, change its
//! subscription or be absent for longer than its session, and some have a static name. Copies of
//! commits arrive again later.
//!
//! A member obeys the contract of `GroupService`: it stops reading a partition before it sends a
//! heartbeat that leaves it out, and once its session may be over.

mod commits;
mod reader;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use futures_util::future::join_all;
use helix_checker::GroupPartitionKey;
use helix_client::Error;
use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::group_service_client::GroupServiceClient;
use helix_proto::log::v1::{
    CommitFallback, ErrorReason, HeartbeatRequest, HeartbeatResponse, LeaveRequest,
    SubscribeResponse, TopicPartition,
};
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};

use crate::coverage::CoverageMark;
use crate::group_topics::PREFIX;
use crate::net::{CLIENT_PORT, channel};
use crate::plan::{GroupPlan, SimulationPlan};
use crate::workload::{ClientContext, TOPIC, TOPIC_IS_THERE};

/// Interval of pings on connections with open calls, and the time for their responses.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// Longest wait for the response to a call, beyond the wait that the call asks for.
const RESPONSE_TIMEOUT: Duration = Duration::from_millis(1_500);

/// Attempts of a commit or a leave.
const ATTEMPTS_MAX: u32 = 4;

/// A node's services.
#[derive(Clone)]
struct NodeClient {
    group: GroupServiceClient<Channel>,
    consume: ConsumeServiceClient<Channel>,
}

/// A partition that a member has.
struct Reading {
    topic: String,
    /// Next offset to read; `None` until the group's offset is known.
    next: Option<u64>,
    /// Offset up to which everything is committed.
    committed: Option<u64>,
    fallback: CommitFallback,
    /// The member may read it now. Else its session may be over.
    is_claimed: bool,
    stream: Option<Streaming<SubscribeResponse>>,
}

/// One life of a member.
struct Member {
    id: u32,
    member_id: String,
    epoch: u64,
    topics: Vec<String>,
    /// The subscription is new to the group.
    sends_topics: bool,
    uses_subscribe: bool,
    session_timeout: Duration,
    /// End of the session, if no response extends it.
    expires: Instant,
    next_heartbeat: Instant,
    next_action: Instant,
    readings: BTreeMap<GroupPartitionKey, Reading>,
}

/// End of a member's life.
enum MemberEnd {
    Crashed,
    Left,
    /// The group is stopped.
    Stopped,
}

/// Runs members one after another.
pub struct MemberSlot {
    context: ClientContext,
    plan: GroupPlan,
    slot: u32,
    static_name: String,
    nodes: Vec<NodeClient>,
    /// Node that is asked first.
    coordinator: usize,
    /// Node of the last successful heartbeat.
    last_coordinator: Option<usize>,
    /// Commits of the slot's members that arrive again.
    copies: VecDeque<commits::CommitCopy>,
    rng: StdRng,
}

/// Runs the members of a slot until the group is stopped.
pub async fn run(context: ClientContext, plan: GroupPlan, slot: u32) -> turmoil::Result {
    context.wait_for_phase(TOPIC_IS_THERE).await;
    MemberSlot::new(&context, plan, slot)?.run().await;
    context.on_end();
    Ok(())
}

fn millis(rng: &mut StdRng, range: std::ops::RangeInclusive<u64>) -> Duration {
    Duration::from_millis(rng.random_range(range))
}

fn to_proto(duration: Duration) -> prost_types::Duration {
    prost_types::Duration {
        seconds: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(duration.subsec_nanos()).unwrap_or(0),
    }
}

fn from_proto(duration: Option<prost_types::Duration>) -> Duration {
    let duration = duration.unwrap_or_default();
    helix_proto::time::duration(duration).unwrap_or_default()
}

fn key_of(partition: &TopicPartition) -> GroupPartitionKey {
    GroupPartitionKey { topic_id: partition.topic_id, number: partition.partition }
}

fn is_fenced(error: &Error) -> bool {
    error.is(ErrorReason::StaleMemberEpoch) || error.is(ErrorReason::UnknownMember)
}

/// Waits for a response. The error is `None` if none came in time.
async fn call<T>(
    limit: Duration,
    response: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Option<Error>> {
    match timeout(limit, response).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(Some(Error::from_status(&status))),
        Err(_) => Err(None),
    }
}

impl Member {
    /// Returns the partitions that the member reads, for requests.
    fn owned(&self) -> Vec<TopicPartition> {
        let partition = |(key, reading): (&GroupPartitionKey, &Reading)| TopicPartition {
            topic: reading.topic.clone(),
            partition: key.number,
            topic_id: key.topic_id,
        };
        self.readings.iter().map(partition).collect()
    }
}

impl MemberSlot {
    fn new(context: &ClientContext, plan: GroupPlan, slot: u32) -> turmoil::Result<Self> {
        let mut rng = context.rng(context.id());
        let node = |node| -> turmoil::Result<_> {
            let host = SimulationPlan::host(node);
            // As helix-client does: a subscription to a node that lost its power unnoticed would
            // wait without end.
            let endpoint = Endpoint::from_shared(format!("http://{host}:{CLIENT_PORT}"))?
                .http2_keep_alive_interval(KEEP_ALIVE)
                .keep_alive_timeout(KEEP_ALIVE);
            let channel = channel(&endpoint);
            let group = GroupServiceClient::new(channel.clone());
            let consume = ConsumeServiceClient::new(channel).max_decoding_message_size(16 << 20);
            Ok(NodeClient { group, consume })
        };
        let nodes = (1..=context.plan.machines()).map(node).collect::<Result<_, _>>()?;
        let static_name = match rng.random_bool(0.4) {
            true => format!("static-{slot}"),
            false => String::new(),
        };
        Ok(Self {
            context: context.clone(),
            plan,
            slot,
            static_name,
            nodes,
            coordinator: 0,
            last_coordinator: None,
            copies: VecDeque::new(),
            rng,
        })
    }

    async fn run(mut self) {
        while !self.context.group.is_stopped() {
            let mut member = self.new_member();
            self.context.group.set_running(self.slot, Some(&member.member_id));
            let end = self.live(&mut member).await;
            self.context.group.set_running(self.slot, None);
            self.lose_all(&mut member);
            let pause = match end {
                MemberEnd::Stopped => return,
                MemberEnd::Left => millis(&mut self.rng, 0..=3_000),
                MemberEnd::Crashed => millis(&mut self.rng, 0..=8_000),
            };
            // The first slot always starts again: a member must live at the end.
            let stays_away = self.slot > 0 && self.rng.random_bool(0.1);
            let until = Instant::now() + pause;
            while !self.context.group.is_stopped()
                && (stays_away || Instant::now() < until && !self.context.group.is_calm())
            {
                sleep(Duration::from_millis(10)).await;
            }
        }
    }

    fn new_member(&mut self) -> Member {
        let id = self.context.id();
        let topics = self.draw_topics();
        let now = Instant::now();
        let session_timeout = millis(&mut self.rng, self.plan.session_ms.clone());
        Member {
            id,
            member_id: format!("m{}-{id}", self.slot),
            epoch: 0,
            topics,
            sends_topics: true,
            uses_subscribe: self.rng.random_bool(0.4),
            session_timeout,
            expires: now,
            next_heartbeat: now,
            next_action: self.next_action(),
            readings: BTreeMap::new(),
        }
    }

    /// Draws a subscription. That of the first slot has all topics.
    fn draw_topics(&mut self) -> Vec<String> {
        let names = |count: u32| (0..count).map(|number| format!("{PREFIX}{number}"));
        let all: Vec<String> = [TOPIC.to_owned()].into_iter().chain(names(2)).collect();
        let draws = if self.slot == 0 { 3 } else { 5 };
        match self.rng.random_range(0..draws) {
            // Members expect every offset, and a compacted topic has gaps.
            0 if self.context.plan.table.is_none() => vec!["*".to_owned()],
            0 => all,
            1 => all,
            2 => vec![TOPIC.to_owned(), format!("{PREFIX}*")],
            3 => vec![TOPIC.to_owned()],
            _ => vec![format!("{PREFIX}*"), "s*m".to_owned()],
        }
    }

    fn next_action(&mut self) -> Instant {
        Instant::now() + self.plan.churn.mul_f64(self.rng.random_range(0.1..2.0))
    }

    async fn live(&mut self, member: &mut Member) -> MemberEnd {
        loop {
            if self.context.group.is_stopped() {
                self.leave(member).await;
                return MemberEnd::Stopped;
            }
            if Instant::now() >= member.next_action && !self.context.group.is_calm() {
                member.next_action = self.next_action();
                match self.rng.random_range(0..10) {
                    0..3 => return MemberEnd::Crashed,
                    3..4 => {
                        self.leave(member).await;
                        return MemberEnd::Left;
                    }
                    4..8 => self.be_absent(member).await,
                    _ => {
                        member.topics = self.draw_topics();
                        member.sends_topics = true;
                    }
                }
            }
            if Instant::now() >= member.next_heartbeat {
                self.heartbeat(member).await;
            }
            self.suspend_if_expired(member);
            if member.uses_subscribe {
                self.receive(member).await;
            } else {
                self.fetch(member).await;
            }
            if self.rng.random_bool(0.2) || self.context.group.is_calm() {
                self.commit(member, None).await;
            }
            if self.rng.random_bool(0.05) {
                self.send_copy().await;
            }
            if self.rng.random_bool(0.01) {
                self.check_offsets().await;
            }
            sleep(millis(&mut self.rng, 5..=40)).await;
        }
    }

    fn note(&self, member: &Member, text: &str) {
        self.context.recorder.note(&format!("{}: {text}", member.member_id));
    }

    fn found(&self, member: &Member, what: &str) {
        self.note(member, what);
        self.context.group.checker().found(format!("member {}: {what}", member.member_id));
    }

    fn node(&self) -> NodeClient {
        self.nodes[self.coordinator].clone()
    }

    fn random_node(&mut self) -> NodeClient {
        self.nodes[self.context.random_member(&mut self.rng)].clone()
    }

    /// Chooses the next node to ask after a failed call of the group's.
    fn reroute(&mut self, error: Option<&Error>) {
        let hint = error.and_then(|error| error.leader.as_ref()).map_or(0, |leader| leader.node_id);
        let hinted = usize::try_from(hint).ok().and_then(|node| node.checked_sub(1));
        self.coordinator = match hinted.filter(|at| *at < self.nodes.len()) {
            Some(at) => at,
            None => self.context.random_member(&mut self.rng),
        };
    }

    /// Stops reading all partitions; they stay with the member.
    fn suspend(&self, member: &mut Member) {
        let mut checker = self.context.group.checker();
        for (key, reading) in &mut member.readings {
            checker.give_up(member.id, *key);
            (reading.is_claimed, reading.stream) = (false, None);
        }
    }

    fn suspend_if_expired(&self, member: &mut Member) {
        if Instant::now() >= member.expires && member.readings.values().any(|it| it.is_claimed) {
            self.note(member, "the session may be over");
            self.suspend(member);
        }
    }

    /// Forgets all partitions.
    fn lose_all(&self, member: &mut Member) {
        self.suspend(member);
        member.readings.clear();
    }

    /// Does not respond for a while, then commits as if nothing had happened.
    async fn be_absent(&mut self, member: &mut Member) {
        self.context.marks.hit(CoverageMark::GroupMemberAbsent);
        self.note(member, "is absent");
        let mut streams = self.take_streams(member);
        self.suspend(member);
        if self.rng.random_bool(0.5) {
            // Its next heartbeat may meet its removal.
            sleep(member.expires - Instant::now() + millis(&mut self.rng, 0..=60)).await;
            self.note(member, "is back at the end of its session");
        } else {
            let absence = member.session_timeout.mul_f64(self.rng.random_range(0.5..3.0));
            let back = Instant::now() + absence;
            if self.rng.random_bool(0.5) {
                // Only its heartbeats fail: it still receives, so each stream ends as soon as its
                // node has applied the removal.
                self.note(member, "receives meanwhile");
                let ends = streams.iter_mut().map(|stream| self.drain_until(member, stream, back));
                join_all(ends).await;
            }
            sleep_until(back).await;
            self.note(member, "is back");
            for stream in &mut streams {
                self.drain(member, stream).await;
            }
            // Also what it has committed before.
            member.readings.values_mut().for_each(|reading| reading.committed = None);
            self.commit(member, None).await;
        }
        member.next_heartbeat = Instant::now();
    }

    async fn heartbeat(&mut self, member: &mut Member) {
        let is_join = member.epoch == 0;
        let wait = match self.rng.random_bool(0.3) {
            true => millis(&mut self.rng, 10..=300),
            false => Duration::ZERO,
        };
        let has_name = is_join && !self.static_name.is_empty();
        let mut owned = member.owned();
        if self.rng.random_bool(0.5) {
            // The ids suffice.
            owned.iter_mut().for_each(|partition| partition.topic.clear());
        }
        let request = HeartbeatRequest {
            group: self.context.group.name().to_owned(),
            member_id: member.member_id.clone(),
            member_epoch: member.epoch,
            topics: match is_join || member.sends_topics {
                true => member.topics.clone(),
                false => Vec::new(),
            },
            owned,
            static_name: if has_name { self.static_name.clone() } else { String::new() },
            session_timeout: is_join.then(|| to_proto(member.session_timeout)),
            take_over: has_name,
            paused: Vec::new(),
            max_wait: Some(to_proto(wait)),
            client_name: "simulation".to_owned(),
        };
        let sent = Instant::now();
        let mut node = self.node();
        let response = call(RESPONSE_TIMEOUT + wait, node.group.heartbeat(request)).await;
        self.suspend_if_expired(member);
        match response {
            Ok(response) => {
                if self
                    .last_coordinator
                    .replace(self.coordinator)
                    .is_some_and(|it| it != self.coordinator)
                {
                    self.context.marks.hit(CoverageMark::GroupCoordinatorChanged);
                }
                if has_name {
                    self.context.marks.hit(CoverageMark::GroupNameTakenOver);
                }
                member.sends_topics = false;
                self.learn(member, sent, response).await;
            }
            Err(Some(error)) if is_fenced(&error) => self.rejoin(member, &error),
            Err(error) => {
                let text = error.as_ref().map_or("no response".to_owned(), ToString::to_string);
                self.note(member, &format!("heartbeat failed: {text}"));
                self.reroute(error.as_ref());
                member.next_heartbeat = Instant::now() + millis(&mut self.rng, 5..=100);
            }
        }
    }

    /// Joins again after the group continued without the member.
    fn rejoin(&self, member: &mut Member, error: &Error) {
        self.note(member, &format!("was fenced: {error}"));
        self.context.marks.hit(CoverageMark::GroupMemberFenced);
        // A delayed join of an earlier member may take over a static name at any time.
        if Instant::now() < member.expires && self.static_name.is_empty() && member.epoch > 0 {
            self.found(member, &format!("was removed within its session: {error}"));
        }
        self.lose_all(member);
        (member.epoch, member.next_heartbeat) = (0, Instant::now());
        member.expires = Instant::now();
    }

    /// Converges to the assignment of a response to a heartbeat that was sent at `sent`.
    async fn learn(&mut self, member: &mut Member, sent: Instant, response: HeartbeatResponse) {
        if response.member_epoch < member.epoch {
            let what = format!("epoch {} after {}", response.member_epoch, member.epoch);
            self.found(member, &what);
        }
        let timeout = from_proto(response.session_timeout);
        let now = Instant::now();
        let next = from_proto(response.next_heartbeat);
        member.next_heartbeat = now + next;
        if sent + timeout <= now {
            member.next_heartbeat = now;
            return;
        }
        if member.epoch != 0 && member.epoch != response.member_epoch {
            self.context.marks.hit(CoverageMark::GroupRebalanced);
        }
        member.expires = member.expires.max(sent + timeout);
        self.context.group.set_answered(self.slot);
        self.context.group.set_session(member.id, member.expires);
        self.context.group.end_sessions();
        member.epoch = response.member_epoch;
        let assigned: BTreeMap<GroupPartitionKey, String> =
            response.assigned.iter().map(|it| (key_of(it), it.topic.clone())).collect();
        for (key, topic) in &assigned {
            let reading = member.readings.entry(*key).or_insert_with(|| Reading {
                topic: topic.clone(),
                next: None,
                committed: None,
                fallback: CommitFallback::Unspecified,
                is_claimed: false,
                stream: None,
            });
            if !std::mem::replace(&mut reading.is_claimed, true) {
                let text = format!("{}: reads {key:?} of {topic}", member.member_id);
                self.context.recorder.note(&text);
                self.context.group.checker().claim(member.id, *key, reading.next);
            }
        }
        let revoked: BTreeSet<GroupPartitionKey> =
            member.readings.keys().filter(|key| !assigned.contains_key(key)).copied().collect();
        if revoked.is_empty() {
            return;
        }
        self.note(member, &format!("releases {revoked:?}"));
        if self.rng.random_bool(0.8) {
            self.commit(member, Some(&revoked)).await;
        }
        // The commit may have found that the member is fenced.
        for key in revoked {
            self.context.group.checker().give_up(member.id, key);
            member.readings.remove(&key);
        }
        member.next_heartbeat = Instant::now();
    }

    /// Commits, then leaves.
    async fn leave(&mut self, member: &mut Member) {
        if self.rng.random_bool(0.8) || self.context.group.is_stopped() {
            self.commit(member, None).await;
        }
        self.note(member, "leaves");
        self.lose_all(member);
        for _ in 0..ATTEMPTS_MAX {
            let request = LeaveRequest {
                group: self.context.group.name().to_owned(),
                member_id: member.member_id.clone(),
            };
            let mut node = self.node();
            match call(RESPONSE_TIMEOUT, node.group.leave(request)).await {
                Ok(_) => {
                    self.context.marks.hit(CoverageMark::GroupMemberLeft);
                    return;
                }
                Err(error) => self.reroute(error.as_ref()),
            }
            sleep(millis(&mut self.rng, 5..=100)).await;
        }
    }
}
