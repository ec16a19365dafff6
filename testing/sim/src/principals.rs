//! Producers of several principals that use each other's identities, in a cluster that checks
//! tokens: two principals with tokens, and callers without credentials, who are one principal.
//!
//! Each producer appends under its own identity and knows its sequence. Now and then another
//! principal sends a batch under that identity: the next sequence, a used sequence, or a gap.
//! Such a batch must be refused, must reveal no sequence, and is in the history as a batch that
//! failed for certain, whatever its response. So the final reads show whether one was appended,
//! and whether a record of the owner was taken for a duplicate.

use std::time::Duration;

use helix_checker::{BatchKey, HistoryEvent, payload};
use helix_client::{AccessGrant, Error};
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_proto::log::v1::{
    AccessRole, AppendAck, AppendRequest, Batch, EncodedBatch, ErrorReason, InitProducerRequest,
    ProducerIdentity, RoleGrant,
};
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::time::{sleep, timeout};
use tonic::Request;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::{Channel, Endpoint};

use crate::coverage::CoverageMark;
use crate::net::{CLIENT_PORT, channel};
use crate::plan::SimulationPlan;
use crate::workload::{ClientContext, RETRY_PAUSE, TOPIC, TOPIC_IS_THERE};

/// Mean pause between two batches.
const PAUSE: Duration = Duration::from_millis(60);

const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum attempts of one batch before its outcome stays unknown.
const ATTEMPTS_MAX: u32 = 20;

/// Probability that another principal uses the identity.
const FOREIGN: f64 = 0.3;

/// Probability that a principal takes a new identity. The others live through many faults.
const RENEWED: f64 = 0.01;

/// Gap between the next sequence and a sequence that was never used.
const GAP: u64 = 1_000;

/// Principals with tokens.
const NAMED: [&str; 2] = ["alice", "bob"];

/// Returns a token of a new principal with this role on everything, and its id. Retries until the
/// workload stops.
pub async fn new_token(
    context: &ClientContext,
    client: &helix_client::Client,
    principal: &str,
    roles: &[AccessRole],
    rng: &mut StdRng,
) -> Option<(AsciiMetadataValue, String)> {
    let role = |role: &AccessRole| RoleGrant {
        role: (*role).into(),
        is_prefix: true,
        ..RoleGrant::default()
    };
    let grant = AccessGrant { roles: roles.iter().map(role).collect(), ..AccessGrant::default() };
    loop {
        match client.admin().create_token(principal, None, &grant).await {
            Ok(made) => {
                let header = format!("Bearer {}", made.token).parse().ok()?;
                return Some((header, made.info.unwrap_or_default().token_id));
            }
            Err(error) => {
                context.recorder.note(&format!("no token of {principal} yet: {error}"));
            }
        }
        if !context.pause(RETRY_PAUSE, rng).await {
            return None;
        }
    }
}

/// Returns a request with credentials, if there are any.
pub fn with_token<T>(message: T, token: Option<&AsciiMetadataValue>) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(token) = token {
        request.metadata_mut().insert("authorization", token.clone());
    }
    request
}

/// Identity of a principal, and what was appended under it.
struct OwnedIdentity {
    identity: ProducerIdentity,
    partition: u32,
    next_sequence: u64,
    /// Last acknowledged batch with its sequence.
    last: Option<(u64, EncodedBatch)>,
    /// Leader changes of the run when it was made.
    leader_changes: u64,
}

/// A principal with its connections to all nodes.
struct Principal {
    name: &'static str,
    /// `None` for callers without credentials.
    token: Option<AsciiMetadataValue>,
    nodes: Vec<ProduceServiceClient<Channel>>,
    owned: Option<OwnedIdentity>,
}

struct Principals {
    context: ClientContext,
    principals: Vec<Principal>,
    producer: u32,
    number: u64,
    rng: StdRng,
}

/// Runs all principals until the workload stops.
pub async fn run(context: ClientContext) -> turmoil::Result {
    context.wait_for_phase(TOPIC_IS_THERE).await;
    let producer = context.id();
    let client = context.client()?;
    let mut rng = context.rng(producer);
    let mut principals = vec![Principal::new(&context, "anonymous", None)?];
    for name in NAMED {
        let roles = [AccessRole::Producer];
        let made = new_token(&context, &client, name, &roles, &mut rng).await;
        let Some((token, _)) = made else { break };
        principals.push(Principal::new(&context, name, Some(token))?);
    }
    let mut all = Principals { context, principals, producer, number: 0, rng };
    while all.context.pause(PAUSE, &mut all.rng).await {
        all.step().await;
    }
    all.context.on_end();
    Ok(())
}

/// Returns a connection to each node, for producers without a client library.
pub(crate) fn produce_clients(
    context: &ClientContext,
) -> turmoil::Result<Vec<ProduceServiceClient<Channel>>> {
    let client = |node| {
        let host = SimulationPlan::host(node);
        let endpoint = Endpoint::from_shared(format!("http://{host}:{CLIENT_PORT}"))?;
        Ok(ProduceServiceClient::new(channel(&endpoint)))
    };
    (1..=context.plan.machines()).map(client).collect()
}

impl Principal {
    fn new(
        context: &ClientContext,
        name: &'static str,
        token: Option<AsciiMetadataValue>,
    ) -> turmoil::Result<Self> {
        let nodes = produce_clients(context)?;
        Ok(Self { name, token, nodes, owned: None })
    }

    /// Sends a batch to one node. Returns `None` if no response came in time.
    async fn send(
        &self,
        node: usize,
        (identity, partition): (ProducerIdentity, u32),
        sequence: u64,
        batch: &EncodedBatch,
    ) -> Option<Result<AppendAck, Error>> {
        let request = AppendRequest {
            topic: TOPIC.to_owned(),
            partition,
            batch: Some(Batch { form: Some(Form::Encoded(batch.clone())) }),
            producer: Some(identity),
            first_sequence: Some(sequence),
            ..AppendRequest::default()
        };
        let request = with_token(request, self.token.as_ref());
        let mut node = self.nodes[node].clone();
        match timeout(RESPONSE_TIMEOUT, node.append(request)).await {
            Ok(Ok(response)) => Some(Ok(response.into_inner().ack.unwrap_or_default())),
            Ok(Err(status)) => Some(Err(Error::from_status(&status))),
            Err(_) => None,
        }
    }
}

impl Principals {
    async fn step(&mut self) {
        let owner = self.rng.random_range(0..self.principals.len());
        if self.rng.random_bool(RENEWED) {
            self.principals[owner].owned = None;
        }
        if self.principals[owner].owned.is_none() {
            self.init(owner).await;
        } else if self.principals.len() > 1 && self.rng.random_bool(FOREIGN) {
            let others = self.principals.len() - 1;
            let other = (owner + self.rng.random_range(1..=others)) % (others + 1);
            self.use_foreign(owner, other).await;
        } else {
            self.append(owner).await;
        }
    }

    async fn init(&mut self, owner: usize) {
        let node = self.random_node();
        let principal = &mut self.principals[owner];
        let request = with_token(InitProducerRequest::default(), principal.token.as_ref());
        let mut node = principal.nodes[node].clone();
        let response = timeout(RESPONSE_TIMEOUT, node.init_producer(request)).await;
        let Ok(Ok(response)) = response else { return };
        let Some(identity) = response.into_inner().producer else { return };
        let partition = self.rng.random_range(0..self.context.plan.partitions);
        let leader_changes = self.context.marks.get(CoverageMark::LeaderChange);
        principal.owned = Some(OwnedIdentity {
            identity,
            partition,
            next_sequence: 0,
            last: None,
            leader_changes,
        });
    }

    fn next_batch(&mut self, partition: u32) -> (BatchKey, EncodedBatch) {
        let records = self.rng.random_range(1..=3);
        let key = BatchKey { producer: self.producer, number: self.number };
        self.number += 1;
        self.context.recorder.add(HistoryEvent::Invoked { key, partition, records, stream: None });
        (key, payload::build(key, records))
    }

    /// Appends the owner's next batch, with retries.
    async fn append(&mut self, owner: usize) {
        let Some(owned) = &self.principals[owner].owned else { return };
        let (partition, sequence) = (owned.partition, owned.next_sequence);
        let place = (owned.identity, partition);
        let (key, batch) = self.next_batch(partition);
        self.context.recorder.on_begin(partition);
        for _ in 0..ATTEMPTS_MAX {
            let node = self.random_node();
            let principal = &self.principals[owner];
            match principal.send(node, place, sequence, &batch).await {
                Some(Ok(AppendAck { first_offset: Some(offset), .. })) => {
                    self.context.recorder.on_end(partition, true);
                    self.context.recorder.add(HistoryEvent::Acked { key, offset });
                    if let Some(owned) = &mut self.principals[owner].owned {
                        owned.next_sequence += u64::from(batch.record_count);
                        owned.last = Some((sequence, batch));
                    }
                    return;
                }
                Some(Ok(ack)) => {
                    self.violate(
                        partition,
                        format!("{key} was acknowledged without offset: {ack:?}"),
                    );
                }
                Some(Err(error)) if error.is(ErrorReason::ProducerNotOwned) => {
                    let name = principal.name;
                    let what = format!("{name} was refused its own identity: {error}");
                    self.violate(partition, what);
                }
                // Another one has used the owner's sequence.
                Some(Err(error)) if error.is(ErrorReason::SequenceReused) => {
                    let what = format!("{key} of {} was refused: {error}", principal.name);
                    self.violate(partition, what);
                }
                Some(Err(error)) if error.is(ErrorReason::UnknownProducer) => break,
                Some(Err(_)) | None => {}
            }
            if self.context.is_stopped() {
                break;
            }
            sleep(RETRY_PAUSE).await;
        }
        self.context.recorder.on_end(partition, false);
        self.context.recorder.add(HistoryEvent::Unknown { key });
        self.principals[owner].owned = None;
    }

    /// Lets another principal send a batch under the owner's identity.
    async fn use_foreign(&mut self, owner: usize, other: usize) {
        let Some(owned) = &self.principals[owner].owned else { return };
        let (place, leader_changes) = ((owned.identity, owned.partition), owned.leader_changes);
        let (next, last) = (owned.next_sequence, owned.last.clone());
        let (sequence, batch) = match (self.rng.random_range(0..5), last) {
            // The owner's own batch: its offsets are not for others.
            (0, Some(last)) => last,
            (1, Some((used, _))) => (used, self.foreign_batch(place.1)),
            (2, _) => (next + GAP, self.foreign_batch(place.1)),
            _ => (next, self.foreign_batch(place.1)),
        };
        let node = self.random_node();
        let (name, owner) = (self.principals[other].name, self.principals[owner].name);
        let response = self.principals[other].send(node, place, sequence, &batch).await;
        let what = match response {
            Some(Ok(ack)) => format!("{name} used an identity of {owner}: {ack:?}"),
            Some(Err(error))
                if error.next_sequence.is_some()
                    || error.is(ErrorReason::OutOfOrderSequence)
                    || error.is(ErrorReason::SequenceReused) =>
            {
                format!("{name} received the sequence of {owner}: {error}")
            }
            Some(Err(error)) => {
                if error.is(ErrorReason::ProducerNotOwned) {
                    self.context.marks.hit(CoverageMark::ForeignProducerRefused);
                    if self.context.marks.get(CoverageMark::LeaderChange) > leader_changes {
                        self.context.marks.hit(CoverageMark::ForeignProducerRefusedByNewLeader);
                    }
                }
                return;
            }
            None => return,
        };
        self.violate(place.1, what);
    }

    /// Returns a batch that must never be in the log, whatever its response.
    fn foreign_batch(&mut self, partition: u32) -> EncodedBatch {
        let (key, batch) = self.next_batch(partition);
        self.context.recorder.add(HistoryEvent::Failed { key });
        batch
    }

    fn random_node(&mut self) -> usize {
        self.context.random_member(&mut self.rng)
    }

    fn violate(&self, partition: u32, what: String) {
        let reader = self.producer;
        self.context.recorder.add(HistoryEvent::Foreign { reader, partition, offset: 0, what });
    }
}
