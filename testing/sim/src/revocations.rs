//! Calls that wait while their rights are removed: a long fetch, a heartbeat of a group's member
//! and a subscription, each with the token of a new principal. Then the token is revoked, or the
//! principal loses its rules.
//!
//! - No answer shows a high watermark that its node reached after it had applied the removal.
//! - In a network without faults, each wait ends with an error soon after its node has applied the
//!   removal. At least one round runs after all faults.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use helix_checker::HistoryEvent;
use helix_client::{AccessGrant, Client, Error};
use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::group_service_client::GroupServiceClient;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::subscribe_response::Message;
use helix_proto::log::v1::{
    AccessRole, ErrorReason, FetchRequest, HeartbeatRequest, LeaveRequest, NamedPosition,
    PartitionRecords, PartitionStart, ReadLimits, ReadSource, RoleGrant, StartPosition,
    SubscribeRequest,
};
use helix_server::log::PartitionKey;
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::time::{Instant, sleep, timeout};
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::{Channel, Endpoint};

use crate::cluster::SimulatedMachine;
use crate::coverage::CoverageMark;
use crate::net::{CLIENT_PORT, channel};
use crate::plan::SimulationPlan;
use crate::principals::{new_token, with_token};
use crate::workload::{ClientContext, RETRY_PAUSE, TOPIC, TOPIC_IS_THERE};

/// Mean pause between two rounds.
const PAUSE: Duration = Duration::from_millis(500);

/// Roles of a principal, on everything.
const ROLES: [AccessRole; 2] = [AccessRole::Consumer, AccessRole::GroupMember];

/// Group of the members.
const GROUP: &str = "revoked-waits";

const SESSION_TIMEOUT: Duration = Duration::from_secs(30);

/// Longest wait of a call.
const WAIT: Duration = Duration::from_secs(9);

/// Payload bytes that end the wait of a fetch: more than the partitions get in a round.
const WAITED_BYTES: u32 = 512 << 10;

/// Interval between checks of what a node knows.
const POLL: Duration = Duration::from_millis(5);

/// Time after which a node that has applied a removal may answer nothing.
const ANSWERED_MAX: Duration = Duration::from_millis(100);

/// Time after which a wait has ended, in a network without faults.
const ENDED_MAX: Duration = Duration::from_millis(500);

/// Time limit for a node to learn of a new token, and for a round after the removal.
const ROUND_MAX: Duration = Duration::from_secs(4);

/// Rounds after all faults until one has ended all waits.
const LAST_ROUNDS_MAX: u32 = 10;

/// A principal whose rights are removed.
#[derive(Clone)]
struct RevokedPrincipal {
    name: String,
    token: AsciiMetadataValue,
    token_id: u64,
    /// The removal has begun.
    is_revoked: Arc<AtomicBool>,
    /// The round began after all faults.
    is_calm: bool,
}

impl RevokedPrincipal {
    fn is_revoked(&self) -> bool {
        self.is_revoked.load(Ordering::Relaxed)
    }
}

struct RevokedWaits {
    context: ClientContext,
    machines: Vec<SimulatedMachine>,
    /// One of each machine.
    endpoints: Vec<Endpoint>,
    client: Client,
    reader: u32,
}

/// Knowledge of a node about a removal.
struct NodeKnowledge<'a> {
    machine: &'a SimulatedMachine,
    start_count: u64,
    principal: &'a RevokedPrincipal,
    partition: Option<PartitionKey>,
    /// Time at which the node had applied the removal.
    since: Option<Instant>,
    /// High watermark of the node's replica, after the time for answers.
    watermark: Option<u64>,
}

impl<'a> NodeKnowledge<'a> {
    fn new(
        machine: &'a SimulatedMachine,
        principal: &'a RevokedPrincipal,
        partition: Option<PartitionKey>,
    ) -> Self {
        let start_count = machine.start_count();
        Self { machine, start_count, principal, partition, since: None, watermark: None }
    }

    /// Returns whether the node has the token and the rules; `None` if it is not open.
    fn has_rights(&self) -> Option<bool> {
        let access = self.machine.node()?.cluster().machine().access();
        let rules = access.rules_of(&self.principal.name);
        let has_rules = rules.is_some_and(|rules| !rules.rules().is_empty());
        Some(has_rules && access.token(self.principal.token_id).is_some())
    }

    fn update(&mut self) {
        if self.machine.start_count() != self.start_count {
            (self.since, self.watermark) = (None, None);
            return;
        }
        if !self.principal.is_revoked() || self.has_rights() != Some(false) {
            return;
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        if self.watermark.is_none() && since.elapsed() >= ANSWERED_MAX {
            let node = self.machine.node();
            let watermarks = node.zip(self.partition).and_then(|(node, it)| node.watermarks_of(it));
            self.watermark = watermarks.map(|it| it.high_watermark);
        }
    }

    /// Returns what is wrong with an answer that has this high watermark, or with a wait that goes
    /// on.
    fn problem(&self, watermark: Option<u64>) -> Option<String> {
        let since = self.since?;
        if let (Some(shown), Some(known)) = (watermark, self.watermark)
            && shown > known
        {
            return Some(format!("shows the high watermark {shown}, {known} at the removal"));
        }
        let is_late = self.principal.is_calm && since.elapsed() > ENDED_MAX;
        is_late.then(|| format!("goes on {:?} after the removal", since.elapsed()))
    }

    /// Returns whether the round is over.
    fn is_over(&self) -> bool {
        self.machine.start_count() != self.start_count
    }
}

/// End of one wait.
enum WaitEnd {
    /// An answer, with the high watermark that it shows.
    Answered(Option<u64>),
    Failed(Error),
    /// The round is over.
    Abandoned,
}

/// Runs rounds until the workload stops.
pub async fn run(context: ClientContext, machines: Vec<SimulatedMachine>) -> turmoil::Result {
    context.wait_for_phase(TOPIC_IS_THERE).await;
    let reader = context.id();
    let (client, mut rng) = (context.client()?, context.rng(reader));
    let endpoint = |machine: &SimulatedMachine| {
        let host = SimulationPlan::host(machine.node_id());
        Endpoint::from_shared(format!("http://{host}:{CLIENT_PORT}"))
    };
    let endpoints = machines.iter().map(endpoint).collect::<Result<_, _>>()?;
    let waits = RevokedWaits { context, machines, endpoints, client, reader };
    for number in 0.. {
        if !waits.context.pause(PAUSE, &mut rng).await {
            break;
        }
        waits.round(number, &mut rng).await;
    }
    for number in 0..LAST_ROUNDS_MAX {
        if waits.round(u64::MAX - u64::from(number), &mut rng).await {
            break;
        }
    }
    waits.context.on_end();
    Ok(())
}

fn to_proto(duration: Duration) -> prost_types::Duration {
    prost_types::Duration { seconds: i64::try_from(duration.as_secs()).unwrap_or(0), nanos: 0 }
}

impl RevokedWaits {
    /// Lets a new principal wait and removes its rights. Returns whether all waits ended with an
    /// error for that reason.
    async fn round(&self, number: u64, rng: &mut StdRng) -> bool {
        let is_calm = self.context.group.is_calm();
        let name = format!("waiter{number}");
        let made = timeout(ROUND_MAX, new_token(&self.context, &self.client, &name, &ROLES, rng));
        let Ok(Some((token, id))) = made.await else { return false };
        let Ok(token_id) = u64::from_str_radix(&id, 16) else { return false };
        let is_revoked = Arc::default();
        let principal = RevokedPrincipal { name, token, token_id, is_revoked, is_calm };
        let partition = rng.random_range(0..self.context.plan.partitions);
        let is_open = |at: &usize| self.machines[*at].node().is_some();
        let open: Vec<usize> = (0..self.machines.len()).filter(is_open).collect();
        if open.is_empty() {
            return false;
        }
        let places = [0; 2].map(|_| open[rng.random_range(0..open.len())]);
        let before = Duration::from_millis(rng.random_range(200..800));
        let of_token = rng.random_bool(0.5);
        let (fetched, subscribed, heard, ()) = tokio::join!(
            self.fetch(&principal, places[0], partition),
            self.subscribe(&principal, places[1], partition),
            self.heartbeat(&principal, places[0]),
            self.revoke(&principal, before, of_token, &id),
        );
        // Its session would go on.
        let mut node = self.group(places[0]);
        let leave = LeaveRequest { group: GROUP.to_owned(), member_id: principal.name.clone() };
        let _ = timeout(RETRY_PAUSE, node.leave(leave)).await;
        fetched && subscribed && heard
    }

    async fn revoke(&self, it: &RevokedPrincipal, before: Duration, of_token: bool, id: &str) {
        sleep(before).await;
        it.is_revoked.store(true, Ordering::Relaxed);
        let admin = self.client.admin();
        let revoked = async {
            match of_token {
                true => admin.revoke_token(id).await,
                false => {
                    let role = |role: AccessRole| RoleGrant {
                        role: role.into(),
                        is_prefix: true,
                        ..RoleGrant::default()
                    };
                    let grant =
                        AccessGrant { roles: ROLES.map(role).into(), ..AccessGrant::default() };
                    admin.remove_access(&it.name, &grant).await.map(|_| ())
                }
            }
        };
        let text = match timeout(ROUND_MAX, revoked).await {
            Ok(Ok(())) => "removed".to_owned(),
            Ok(Err(error)) => format!("not removed: {error}"),
            Err(_) => "not removed in time".to_owned(),
        };
        self.context.recorder.note(&format!("rights of {}: {text}", it.name));
    }

    fn consume(&self, at: usize) -> ConsumeServiceClient<Channel> {
        ConsumeServiceClient::new(self.channel(at)).max_decoding_message_size(16 << 20)
    }

    fn group(&self, at: usize) -> GroupServiceClient<Channel> {
        GroupServiceClient::new(self.channel(at))
    }

    /// Opens a connection: an earlier one may never deliver a response.
    fn channel(&self, at: usize) -> Channel {
        channel(&self.endpoints[at])
    }

    /// Returns the partition's key, as a node knows it.
    fn key(&self, at: usize, partition: u32) -> Option<PartitionKey> {
        let topic = self.machines[at].node()?.topic(TOPIC).ok()?;
        Some(PartitionKey { topic_id: topic.id, number: partition })
    }

    /// Waits until a node has the rights of a new principal.
    async fn is_known(&self, knowledge: &NodeKnowledge<'_>) -> bool {
        let until = Instant::now() + ROUND_MAX;
        while Instant::now() < until && !knowledge.principal.is_revoked() {
            if knowledge.has_rights() == Some(true) {
                return true;
            }
            sleep(POLL).await;
        }
        false
    }

    /// Waits for the end of a wait while it watches what the node knows.
    async fn watch(
        &self,
        knowledge: &mut NodeKnowledge<'_>,
        what: &str,
        wait: impl Future<Output = WaitEnd>,
    ) -> WaitEnd {
        let mut wait = std::pin::pin!(wait);
        let mut over = None;
        loop {
            tokio::select! {
                biased;
                end = &mut wait => {
                    knowledge.update();
                    if let WaitEnd::Answered(watermark) = end
                        && let Some(problem) = knowledge.problem(watermark)
                    {
                        self.violate(knowledge, what, &problem);
                        return WaitEnd::Abandoned;
                    }
                    return end;
                }
                () = sleep(POLL) => {}
            }
            knowledge.update();
            if let Some(problem) = knowledge.problem(None) {
                self.violate(knowledge, what, &problem);
                return WaitEnd::Abandoned;
            }
            if knowledge.principal.is_revoked() {
                let over = *over.get_or_insert_with(|| Instant::now() + ROUND_MAX);
                if knowledge.is_over() || Instant::now() >= over {
                    return WaitEnd::Abandoned;
                }
            }
        }
    }

    fn violate(&self, knowledge: &NodeKnowledge<'_>, what: &str, problem: &str) {
        let (node, name) = (knowledge.machine.node_id(), &knowledge.principal.name);
        let what = format!("{what} of {name} at node {node} {problem}");
        let reader = self.reader;
        self.context.recorder.add(HistoryEvent::Foreign { reader, partition: 0, offset: 0, what });
    }

    /// Decides about the end of a wait. Returns `None` to wait again.
    async fn judge(
        &self,
        knowledge: &NodeKnowledge<'_>,
        was_waiting: bool,
        end: WaitEnd,
        mark: CoverageMark,
    ) -> Option<bool> {
        match end {
            WaitEnd::Answered(_) => None,
            WaitEnd::Abandoned => Some(false),
            WaitEnd::Failed(error) => {
                let is_lost = error.is(ErrorReason::PermissionDenied)
                    || error.is(ErrorReason::Unauthenticated);
                if is_lost {
                    let is_end = was_waiting && knowledge.principal.is_revoked();
                    if is_end {
                        self.context.marks.hit(mark);
                    }
                    return Some(is_end);
                }
                sleep(RETRY_PAUSE).await;
                (knowledge.principal.is_revoked() || knowledge.is_over()).then_some(false)
            }
        }
    }

    fn start(partition: u32) -> PartitionStart {
        PartitionStart {
            topic: TOPIC.to_owned(),
            partition,
            start: Some(StartPosition {
                position: Some(Position::Named(NamedPosition::Latest.into())),
                ..StartPosition::default()
            }),
            ..PartitionStart::default()
        }
    }

    async fn fetch(&self, principal: &RevokedPrincipal, at: usize, partition: u32) -> bool {
        let key = self.key(at, partition);
        let mut knowledge = NodeKnowledge::new(&self.machines[at], principal, key);
        if !self.is_known(&knowledge).await {
            return false;
        }
        let node = self.consume(at);
        loop {
            let request = FetchRequest {
                partitions: vec![Self::start(partition)],
                limits: Some(ReadLimits::default()),
                max_wait: Some(to_proto(WAIT)),
                min_bytes: WAITED_BYTES,
                source: ReadSource::AnyReplica.into(),
                ..FetchRequest::default()
            };
            let request = with_token(request, Some(&principal.token));
            let mut node = node.clone();
            let call = async {
                match node.fetch(request).await {
                    Ok(response) => WaitEnd::Answered(
                        response.into_inner().partitions.iter().filter_map(watermark).max(),
                    ),
                    Err(status) => WaitEnd::Failed(Error::from_status(&status)),
                }
            };
            let was_waiting = !principal.is_revoked();
            let end = self.watch(&mut knowledge, "a fetch", call).await;
            let mark = CoverageMark::RevokedFetchEnded;
            if let Some(is_end) = self.judge(&knowledge, was_waiting, end, mark).await {
                return is_end;
            }
        }
    }

    async fn subscribe(&self, principal: &RevokedPrincipal, at: usize, partition: u32) -> bool {
        let key = self.key(at, partition);
        let mut knowledge = NodeKnowledge::new(&self.machines[at], principal, key);
        if !self.is_known(&knowledge).await {
            return false;
        }
        let mut stream = None;
        loop {
            let was_waiting = stream.is_some() || !principal.is_revoked();
            let call = async {
                if stream.is_none() {
                    let request = SubscribeRequest {
                        partitions: vec![Self::start(partition)],
                        source: ReadSource::AnyReplica.into(),
                        ..SubscribeRequest::default()
                    };
                    let request = with_token(request, Some(&principal.token));
                    match self.consume(at).subscribe(request).await {
                        Ok(response) => stream = Some(response.into_inner()),
                        Err(status) => return WaitEnd::Failed(Error::from_status(&status)),
                    }
                }
                let Some(open) = &mut stream else { return WaitEnd::Abandoned };
                match open.message().await {
                    Ok(Some(response)) => WaitEnd::Answered(match response.message {
                        Some(Message::Data(records)) => watermark(&records),
                        _ => None,
                    }),
                    Ok(None) => WaitEnd::Abandoned,
                    Err(status) => WaitEnd::Failed(Error::from_status(&status)),
                }
            };
            let end = self.watch(&mut knowledge, "a subscription", call).await;
            if matches!(end, WaitEnd::Failed(_)) {
                stream = None;
            }
            let mark = CoverageMark::RevokedSubscriptionEnded;
            if let Some(is_end) = self.judge(&knowledge, was_waiting, end, mark).await {
                return is_end;
            }
        }
    }

    async fn heartbeat(&self, principal: &RevokedPrincipal, first: usize) -> bool {
        let (mut at, mut epoch, mut owned) = (first, 0, Vec::new());
        let mut node = self.group(at);
        loop {
            let mut knowledge = NodeKnowledge::new(&self.machines[at], principal, None);
            if !self.is_known(&knowledge).await {
                return false;
            }
            let is_join = epoch == 0;
            let request = HeartbeatRequest {
                group: GROUP.to_owned(),
                member_id: principal.name.clone(),
                member_epoch: epoch,
                topics: if is_join { vec![TOPIC.to_owned()] } else { Vec::new() },
                owned: std::mem::take(&mut owned),
                session_timeout: is_join.then(|| to_proto(SESSION_TIMEOUT)),
                max_wait: Some(to_proto(WAIT)),
                ..HeartbeatRequest::default()
            };
            let request = with_token(request, Some(&principal.token));
            let call = async {
                match node.heartbeat(request).await {
                    Ok(response) => {
                        let response = response.into_inner();
                        (epoch, owned) = (response.member_epoch, response.assigned);
                        WaitEnd::Answered(None)
                    }
                    Err(status) => WaitEnd::Failed(Error::from_status(&status)),
                }
            };
            let was_waiting = !principal.is_revoked();
            let end = self.watch(&mut knowledge, "a heartbeat", call).await;
            if let WaitEnd::Failed(error) = &end {
                let hint = error.leader.as_ref().map_or(0, |leader| leader.node_id);
                let hinted = usize::try_from(hint).ok().and_then(|node| node.checked_sub(1));
                at = hinted.filter(|at| *at < self.machines.len()).unwrap_or(at);
                node = self.group(at);
                (epoch, owned) = (0, Vec::new());
            }
            let mark = CoverageMark::RevokedHeartbeatEnded;
            if let Some(is_end) = self.judge(&knowledge, was_waiting, end, mark).await {
                return is_end;
            }
        }
    }
}

fn watermark(records: &PartitionRecords) -> Option<u64> {
    records.watermarks.as_ref().map(|it| it.high_watermark)
}
