//! A client with tokens, in a cluster whose clocks jump. It calls every node with each token, on
//! connections that the token keeps, and knows the right time:
//!
//! - An administrator's token without an expiry is never refused.
//! - A node that has compared its clock with those of a majority refuses no valid token. Once it
//!   has compared the clocks of all members, it accepts no expired one.
//! - A refusal says that the token expired, and is counted.
//! - After all faults every node accepts the valid tokens, also with a wrong clock.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use helix_client::{AccessGrant, Error};
use helix_proto::log::v1::access_service_client::AccessServiceClient;
use helix_proto::log::v1::topic_service_client::TopicServiceClient;
use helix_proto::log::v1::{
    AccessRole, CreateTokenRequest, ErrorReason, ListTopicsRequest, RoleGrant,
};
use helix_server::metrics::MetricsPage;
use helix_server::node::Node;
use prost_types::Timestamp;
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::time::timeout;
use tonic::Request;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::{Channel, Endpoint};

use crate::clock;
use crate::cluster::SimulatedMachine;
use crate::coverage::CoverageMark;
use crate::net::{CLIENT_PORT, channel};
use crate::plan::SimulationPlan;
use crate::workload::{ClientContext, RETRY_PAUSE, TOPIC_IS_THERE};

/// Mean pause between two calls.
const CALL_PAUSE: Duration = Duration::from_millis(100);

const RESPONSE_TIMEOUT: Duration = Duration::from_secs(3);

/// Probability that a call opens a new connection, on which the node has no login yet.
const RECONNECTS: f64 = 0.05;

/// Tokens at the same time: those that are valid for the whole run, and others.
const TOKENS: usize = 4;

/// Tokens that are valid for the whole run: the first ones, of them the administrator's.
const LASTING: usize = 2;

/// Lifetime of the second token: longer than any run.
const LONG_S: u64 = 7_200;

/// Lifetimes of the others.
const SHORT_S: RangeInclusive<u64> = 2..=8;

/// Time after which an expired token is replaced.
const KEPT_US: u64 = 30_000_000;

/// Distance from the expiry at which the verdict is certain: the difference from the agreed time up
/// to which a node's own clock counts, and the error of a comparison.
const MARGIN_US: u64 = 12_000_000;

/// Longest call during which at most one comparison of clocks ends.
const JUDGED_US: u64 = 1_000_000;

/// Error of a clock from which it counts as wrong in coverage marks.
const WRONG_US: u64 = 3_600_000_000;

/// Sample that counts the refusals of expired tokens.
const EXPIRED_LOGINS: &str = "helix_failed_logins_total{reason=\"expired\"} ";

/// Findings of the client. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct TokenLog(Arc<Mutex<TokenFindings>>);

#[derive(Debug, Default)]
struct TokenFindings {
    violation: Option<String>,
    /// Right time of the last call that a node accepted, by node and lasting token.
    accepted: BTreeMap<(u64, usize), u64>,
}

impl TokenLog {
    fn lock(&self) -> MutexGuard<'_, TokenFindings> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the first violation as an error.
    ///
    /// # Errors
    /// The rule that is broken.
    pub fn check(&self) -> Result<(), String> {
        self.lock().violation.clone().map_or(Ok(()), Err)
    }

    /// Returns whether each of these nodes has accepted each lasting token since this time.
    pub fn are_accepted(&self, nodes: &BTreeSet<u64>, since_us: u64) -> bool {
        let findings = self.lock();
        let is_accepted = |key| findings.accepted.get(&key).is_some_and(|at| *at >= since_us);
        nodes.iter().all(|node| (0..LASTING).all(|token| is_accepted((*node, token))))
    }

    fn violate(&self, what: String) {
        self.lock().violation.get_or_insert(what);
    }

    fn on_accepted(&self, node: u64, token: usize, at_us: u64) {
        if token < LASTING {
            self.lock().accepted.insert((node, token), at_us);
        }
    }
}

/// A token with its connections.
struct HeldToken {
    header: AsciiMetadataValue,
    /// Right time from which nodes refuse the token, in microseconds; `None` if it does not expire.
    expires_us: Option<u64>,
    /// A connection to each machine.
    channels: Vec<Channel>,
}

impl HeldToken {
    fn new(
        token: &str,
        expires_us: Option<u64>,
        machines: &[SimulatedMachine],
    ) -> turmoil::Result<Self> {
        let header: AsciiMetadataValue = format!("Bearer {token}").parse()?;
        let channels = machines.iter().map(open_channel).collect::<turmoil::Result<_>>()?;
        Ok(Self { header, expires_us, channels })
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.metadata_mut().insert("authorization", self.header.clone());
        request
    }
}

fn open_channel(machine: &SimulatedMachine) -> turmoil::Result<Channel> {
    let host = SimulationPlan::host(machine.node_id());
    Ok(channel(&Endpoint::from_shared(format!("http://{host}:{CLIENT_PORT}"))?))
}

/// State of a node before or after a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeView {
    pub start_count: u64,
    /// Voters of shard 0, as far as the node knows.
    pub members: usize,
    /// Clocks in the node's last comparison with a majority; 0 before the first one.
    pub compared: usize,
    /// Refusals of expired tokens that the node has counted.
    pub refused: u64,
}

impl NodeView {
    /// Returns the state of the node on a machine; `None` if it is not open.
    fn of(machine: &SimulatedMachine) -> Option<Self> {
        let node = machine.node()?;
        Some(Self {
            start_count: machine.start_count(),
            members: node.cluster().nodes().len(),
            compared: node.clock().offsets().len(),
            refused: expired_logins(&node),
        })
    }
}

fn expired_logins(node: &Node) -> u64 {
    let mut page = MetricsPage::default();
    node.metrics().write(&mut page);
    let page = page.to_string();
    let count = page.lines().find_map(|line| line.strip_prefix(EXPIRED_LOGINS));
    count.and_then(|count| count.parse().ok()).unwrap_or(0)
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenOutcome {
    Accepted,
    /// Refused with this text.
    Refused(String),
}

/// A call that has ended.
#[derive(Debug)]
pub struct ObservedCall {
    /// Right times, in microseconds.
    pub began_us: u64,
    pub ended_us: u64,
    /// The node before and after the call; `None` if it was not the same one, or not open.
    pub views: Option<(NodeView, NodeView)>,
    pub member_count: usize,
    pub expires_us: Option<u64>,
    pub outcome: TokenOutcome,
}

impl ObservedCall {
    fn is_surely_valid(&self) -> bool {
        self.expires_us.is_none_or(|expires_us| self.ended_us + MARGIN_US < expires_us)
    }

    fn has_surely_expired(&self) -> bool {
        self.expires_us.is_some_and(|expires_us| expires_us + MARGIN_US < self.began_us)
    }

    /// Returns whether the node's last comparison, before and after the call, was of at least this
    /// many clocks.
    fn has_compared(&self, least: usize) -> bool {
        // While a node is replaced, its clock counts twice.
        let knows = |it: NodeView| {
            it.members == self.member_count && (least..=self.member_count).contains(&it.compared)
        };
        self.ended_us - self.began_us < JUDGED_US
            && self.views.is_some_and(|(before, after)| knows(before) && knows(after))
    }

    fn has_compared_majority(&self) -> bool {
        self.has_compared(self.member_count / 2 + 1)
    }

    /// Returns whether the expiry decided about the call, by a node that had to know the time.
    fn is_judged(&self) -> bool {
        match self.outcome {
            TokenOutcome::Accepted => self.is_surely_valid() && self.has_compared_majority(),
            TokenOutcome::Refused(_) => self.has_surely_expired() && self.has_compared_majority(),
        }
    }

    /// Returns the rule that the node broke, if any.
    pub fn broken_rule(&self) -> Option<&'static str> {
        let text = match &self.outcome {
            TokenOutcome::Accepted => {
                let is_wrong = self.has_surely_expired() && self.has_compared(self.member_count);
                return is_wrong.then_some("accepted an expired token");
            }
            TokenOutcome::Refused(text) => text,
        };
        if self.expires_us.is_none() {
            return Some("refused the administrator's token, which does not expire");
        }
        if !text.contains("expired") {
            return Some("refused a token without saying that it expired");
        }
        if !self.has_compared_majority() {
            return None;
        }
        if self.is_surely_valid() {
            return Some("refused a valid token");
        }
        let is_counted = self.views.is_none_or(|(before, after)| after.refused > before.refused);
        (self.has_surely_expired() && !is_counted).then_some("did not count a refused token")
    }
}

struct TokenHolder {
    context: ClientContext,
    machines: Vec<SimulatedMachine>,
    log: TokenLog,
    /// The administrator's token, a token that outlives the run, and tokens that expire.
    tokens: Vec<HeldToken>,
    calls: usize,
    rng: StdRng,
}

/// Makes tokens and calls with them until the workload stops.
pub async fn run(
    context: ClientContext,
    machines: Vec<SimulatedMachine>,
    log: TokenLog,
) -> turmoil::Result {
    context.wait_for_phase(TOPIC_IS_THERE).await;
    let rng = context.rng(context.id());
    let mut holder = TokenHolder { context, machines, log, tokens: Vec::new(), calls: 0, rng };
    holder.make_first().await?;
    while holder.context.pause(CALL_PAUSE, &mut holder.rng).await {
        holder.renew().await?;
        holder.call_next().await?;
    }
    holder.context.on_end();
    Ok(())
}

fn now_us() -> u64 {
    clock::right_us(turmoil::sim_elapsed().unwrap_or_default())
}

impl TokenHolder {
    /// Makes the administrator's token, as a caller without credentials, who may do everything.
    async fn make_first(&mut self) -> turmoil::Result {
        let client = self.context.client()?;
        let role = RoleGrant { role: AccessRole::Admin.into(), ..RoleGrant::default() };
        let grant = AccessGrant { roles: vec![role], ..AccessGrant::default() };
        while self.tokens.is_empty() && self.context.pause(RETRY_PAUSE, &mut self.rng).await {
            match client.admin().create_token("admin", None, &grant).await {
                Ok(made) => self.tokens.push(HeldToken::new(&made.token, None, &self.machines)?),
                Err(error) => self.context.recorder.note(&format!("no first token yet: {error}")),
            }
        }
        Ok(())
    }

    /// Drops a token that expired long ago, and lets the administrator make a missing one.
    async fn renew(&mut self) -> turmoil::Result {
        let now_us = now_us();
        let is_kept = |it: &HeldToken| it.expires_us.is_none_or(|at| now_us < at + KEPT_US);
        self.tokens.retain(is_kept);
        let Some(admin) = self.tokens.first().filter(|_| self.tokens.len() < TOKENS) else {
            return Ok(());
        };
        let lifetime_s = match self.tokens.len() < LASTING {
            true => LONG_S,
            false => self.rng.random_range(SHORT_S),
        };
        let expires_s = now_us / 1_000_000 + lifetime_s;
        let expires_at = Timestamp { seconds: i64::try_from(expires_s)?, nanos: 0 };
        let at = self.rng.random_range(0..self.machines.len());
        let request = admin.request(CreateTokenRequest {
            principal: "holder".to_owned(),
            expires_at: Some(expires_at),
            ..CreateTokenRequest::default()
        });
        let mut service = AccessServiceClient::new(admin.channels[at].clone());
        match timeout(RESPONSE_TIMEOUT, service.create_token(request)).await {
            Ok(Ok(response)) => {
                let expires_us = Some(expires_s * 1_000_000);
                let token = response.into_inner().token;
                self.tokens.push(HeldToken::new(&token, expires_us, &self.machines)?);
            }
            Ok(Err(status)) => {
                let (error, node) = (Error::from_status(&status), self.machines[at].node_id());
                self.context.recorder.note(&format!("node {node} makes no token: {error}"));
                if is_refusal(&error) || error.is(ErrorReason::PermissionDenied) {
                    let what = format!("node {node} locked out the administrator: {error}");
                    self.log.violate(what);
                }
            }
            Err(_) => self.reconnect(0, at)?,
        }
        Ok(())
    }

    /// Calls the next node with the next token, in turn.
    async fn call_next(&mut self) -> turmoil::Result {
        let nodes = self.machines.len();
        let (at, number) = (self.calls % nodes, self.calls / nodes % self.tokens.len().max(1));
        self.calls += 1;
        if self.rng.random_bool(RECONNECTS) {
            self.reconnect(number, at)?;
        }
        let (Some(token), machine) = (self.tokens.get(number), &self.machines[at]) else {
            return Ok(());
        };
        let (before, began_us) = (NodeView::of(machine), now_us());
        let mut service = TopicServiceClient::new(token.channels[at].clone());
        // Needs no right, so that only the token decides.
        let list = ListTopicsRequest { page_size: 1, ..ListTopicsRequest::default() };
        let Ok(response) =
            timeout(RESPONSE_TIMEOUT, service.list_topics(token.request(list))).await
        else {
            return self.reconnect(number, at);
        };
        let outcome = match response {
            Ok(_) => TokenOutcome::Accepted,
            Err(status) => match Error::from_status(&status) {
                error if is_refusal(&error) => TokenOutcome::Refused(error.message.clone()),
                _ => return Ok(()),
            },
        };
        let views = before.zip(NodeView::of(machine));
        let call = ObservedCall {
            began_us,
            ended_us: now_us(),
            views: views.filter(|(before, after)| before.start_count == after.start_count),
            member_count: usize::try_from(self.context.plan.nodes)?,
            expires_us: token.expires_us,
            outcome,
        };
        self.judge(number, machine, &call);
        Ok(())
    }

    fn judge(&self, number: usize, machine: &SimulatedMachine, call: &ObservedCall) {
        let node = machine.node_id();
        if let Some(rule) = call.broken_rule() {
            self.context.recorder.note(&format!("node {node} {rule}"));
            let error_us = machine.clock().error_us();
            self.log.violate(format!("node {node}, clock error {error_us} us, {rule}: {call:?}"));
        }
        if call.outcome == TokenOutcome::Accepted {
            self.log.on_accepted(node, number, call.began_us);
        }
        if call.expires_us.is_some() && call.is_judged() {
            if call.outcome != TokenOutcome::Accepted {
                self.context.marks.hit(CoverageMark::ExpiredTokenRefused);
            }
            if machine.clock().error_us().unsigned_abs() > WRONG_US {
                self.context.marks.hit(CoverageMark::TokenJudgedUnderWrongClock);
            }
        }
    }

    /// Replaces a token's connection to a machine: the old one may never deliver a response.
    fn reconnect(&mut self, number: usize, at: usize) -> turmoil::Result {
        let channel = open_channel(&self.machines[at])?;
        if let Some(token) = self.tokens.get_mut(number) {
            token.channels[at] = channel;
        }
        Ok(())
    }
}

fn is_refusal(error: &Error) -> bool {
    error.is(ErrorReason::Unauthenticated)
}
