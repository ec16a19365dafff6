//! One incoming stream of a peer. It lives inside its response stream, without a task of its own:
//! polling for responses reads requests, passes them to openraft, and collects results.
//! No shard blocks another one: the epoch windows bound the queues into openraft.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, SelectAll};
use futures_util::{Future, FutureExt, Stream, StreamExt};
use helix_proto::raft::v1 as pb;
use helix_transport::MessageStream;
use pb::exchange_request::Message;
use pb::exchange_response::Message as ResponseMessage;
use pb::question::Question as UnaryRequest;
use prost::Message as _;
use tokio::sync::Semaphore;
use tokio::time::{Instant, Sleep, sleep};
use tokio_util::sync::{CancellationToken, DropGuard, WaitForCancellationFutureOwned};
use tonic::Status;

use super::epoch::{EpochEnded, EpochResponse, EpochResponses, ReceiveEpoch};
use super::unary::{self, UnaryResponseFuture};
use crate::peer::connection::lane::PeerLane;
use crate::peer::connection::traffic::Traffic;
use crate::peer::hub::Hub;
use crate::peer::limits::{
    EPOCHS_MAX, MESSAGE_WAIT, MESSAGES_PER_POLL, RECORDS_REQUESTS_MAX, UNARY_REQUESTS_MAX,
};
use crate::peer::served::{HeldLog, ServedReplica};
use crate::peer::snapshot::assembly::{ReceivedSnapshot, SnapshotAssembly};
use crate::peer::wire;
use crate::raft::{ReplicaId, node_of};

/// A snapshot that is being installed. Dropping it ends the work.
struct Installing {
    id: u64,
    _abandoned: DropGuard,
}

/// Detects a stream that stays within one message for longer than [`MESSAGE_WAIT`].
/// A sender that lost track of message boundaries could otherwise wait for a response for as long
/// as the connection lives: the rest of the supposed message may never arrive.
struct StallDetector {
    next: Pin<Box<Sleep>>,
    /// Number of the message that was incomplete at the last check.
    incomplete: Option<u64>,
}

impl StallDetector {
    fn new() -> Self {
        Self { next: Box::pin(sleep(MESSAGE_WAIT)), incomplete: None }
    }

    /// Returns `true` if the `incomplete` message was incomplete at the last check too.
    /// Polled with the stream.
    fn is_stalled(&mut self, incomplete: Option<u64>, context: &mut Context<'_>) -> bool {
        while self.next.as_mut().poll(context).is_ready() {
            if incomplete.is_some() && incomplete == self.incomplete {
                return true;
            }
            self.incomplete = incomplete;
            self.next.as_mut().reset(Instant::now() + MESSAGE_WAIT);
        }
        false
    }
}

/// An incoming stream: yields the responses to the requests that it reads.
pub(super) struct InboundStream {
    hub: Arc<Hub>,
    from: u64,
    lane: PeerLane,
    traffic: Option<Arc<Traffic>>,
    requests: MessageStream<pb::ExchangeRequest>,
    messages_read: u64,
    stall_detector: StallDetector,
    /// Handshake to send first.
    opened: Option<pb::Opened>,
    stop: Pin<Box<WaitForCancellationFutureOwned>>,
    /// Newest epoch of each shard: a peer has one replica of it.
    epochs: BTreeMap<u64, ReceiveEpoch>,
    /// Responses to appends, with those of replaced epochs.
    append_responses: SelectAll<EpochResponses>,
    unary_responses: FuturesUnordered<BoxFuture<'static, pb::Answer>>,
    snapshots: SnapshotAssembly,
    /// Permits for record requests.
    record_permits: Arc<Semaphore>,
    /// Snapshots that are being installed, by shard.
    installing: BTreeMap<u64, Installing>,
    /// Results to send next.
    results: pb::Results,
    /// Last logged refusal, so that a repeated one is logged once.
    last_refusal: String,
    is_ended: bool,
}

impl InboundStream {
    pub(super) fn new(
        hub: Arc<Hub>,
        (from, lane): (u64, PeerLane),
        requests: MessageStream<pb::ExchangeRequest>,
        opened: pb::Opened,
        stop: WaitForCancellationFutureOwned,
    ) -> Self {
        Self {
            traffic: hub.table.peer(from).map(|peer| Arc::clone(&peer.traffic)),
            hub,
            from,
            lane,
            requests,
            messages_read: 0,
            stall_detector: StallDetector::new(),
            opened: Some(opened),
            stop: Box::pin(stop),
            epochs: BTreeMap::new(),
            append_responses: SelectAll::new(),
            unary_responses: FuturesUnordered::new(),
            snapshots: SnapshotAssembly::default(),
            record_permits: Arc::new(Semaphore::new(RECORDS_REQUESTS_MAX)),
            installing: BTreeMap::new(),
            results: pb::Results::default(),
            last_refusal: String::new(),
            is_ended: false,
        }
    }

    /// Reads up to [`MESSAGES_PER_POLL`] messages. Returns `true` if there may be more.
    fn read(&mut self, context: &mut Context<'_>) -> Result<bool, Option<Status>> {
        for _ in 0..MESSAGES_PER_POLL {
            match self.requests.poll_message(context) {
                Poll::Pending => return Ok(false),
                Poll::Ready(Ok(None)) => return Err(None),
                Poll::Ready(Ok(Some(request))) => {
                    self.messages_read += 1;
                    let bytes = request.encoded_len() as u64;
                    if let Some(traffic) = &self.traffic {
                        traffic.received.add(bytes);
                    }
                    let is_copy =
                        matches!(request.message, Some(Message::Append(_) | Message::Chunk(_)));
                    if is_copy && self.lane == PeerLane::CatchUp {
                        // The sender chooses the rate, and this node learns what slows its appends.
                        self.hub.table.throttle.note(bytes);
                    }
                    if let Err(status) = self.on_message(request) {
                        self.log_refusal(status.message());
                        return Err(Some(status));
                    }
                }
                Poll::Ready(Err(status)) => {
                    tracing::debug!(node = self.from, "a peer's stream ended: {status}");
                    return Err(Some(status));
                }
            }
        }
        Ok(true)
    }

    fn on_message(&mut self, request: pb::ExchangeRequest) -> Result<(), Status> {
        match request.message {
            Some(Message::Append(append)) => self.on_append(append),
            Some(Message::Question(request)) => self.on_unary(request)?,
            Some(Message::Chunk(chunk)) => self.on_chunk(chunk),
            Some(Message::Ending(ending)) => self.on_ending(ending),
            Some(Message::Opening(_)) => {
                return Err(Status::invalid_argument("a second handshake"));
            }
            None => return Err(Status::invalid_argument("a message without content")),
        }
        Ok(())
    }

    /// Returns the local replica that a message addresses.
    /// Fails if it is not here, or if the sender's replica is not on the peer's node.
    fn find(&self, route: Option<pb::Route>) -> Result<(pb::Route, ServedReplica), pb::Failure> {
        let route = self.check_source(route)?;
        let shard_id = route.shard_id;
        let not_open = || wire::failure(format!("shard {shard_id} {}", wire::NOT_OPEN), true);
        let served = self.hub.served(shard_id).ok_or_else(not_open)?;
        check_target(&route, served.replica_id)?;
        Ok((route, served))
    }

    /// Returns the log that a request for records addresses, if its replica does not run.
    fn find_log(&self, route: Option<pb::Route>) -> Result<Option<HeldLog>, pb::Failure> {
        let route = self.check_source(route)?;
        if self.hub.served(route.shard_id).is_some() {
            return Ok(None);
        }
        let Some(log) = self.hub.held_log(route.shard_id) else { return Ok(None) };
        check_target(&route, log.replica_id)?;
        Ok(Some(log))
    }

    /// Checks that the sender's replica is on the peer's node.
    fn check_source(&self, route: Option<pb::Route>) -> Result<pb::Route, pb::Failure> {
        let route = route.ok_or_else(|| wire::failure("a message without a route", true))?;
        let source_replica = route.source_replica;
        if node_of(source_replica) != self.from {
            let why = format!("replica {source_replica:#x} is not on node {}", self.from);
            return Err(wire::failure(why, true));
        }
        Ok(route)
    }

    fn on_append(&mut self, append: pb::Append) {
        let (id, sequence) = (append.route.unwrap_or_default().id, append.sequence);
        let (route, served) = match self.find(append.route) {
            Ok(found) => found,
            Err(failure) => return self.refuse_append(id, sequence, failure),
        };
        let newest = self.epochs.get(&route.shard_id).map(|epoch| epoch.id);
        if Some(id) < newest {
            // The sender has ended this epoch.
            return;
        }
        if Some(id) > newest {
            if self.append_responses.len() >= EPOCHS_MAX {
                let why = format!("{EPOCHS_MAX} epochs are open on this stream; retry later");
                return self.refuse_append(id, sequence, wire::failure(why, true));
            }
            let (epoch, responses) = ReceiveEpoch::open(&route, &served);
            self.epochs.insert(route.shard_id, epoch);
            self.append_responses.push(responses);
        }
        let Some(epoch) = self.epochs.get_mut(&route.shard_id) else { return };
        let pushed = epoch.push(sequence, append.entries, route.source_replica);
        if let Err(EpochEnded(failure)) = pushed {
            self.refuse_append(id, sequence, failure);
        }
    }

    fn refuse_append(&mut self, epoch: u64, sequence: u64, failure: pb::Failure) {
        self.log_refusal(&failure.text);
        let result = Some(pb::ack::Result::Failure(failure));
        self.results.acks.push(pb::Ack { epoch, sequence, result });
    }

    fn on_unary(&mut self, request: pb::Question) -> Result<(), Status> {
        if self.unary_responses.len() >= UNARY_REQUESTS_MAX {
            return Err(Status::resource_exhausted(format!(
                "more than {UNARY_REQUESTS_MAX} requests are in flight on this stream"
            )));
        }
        let id = request.route.unwrap_or_default().id;
        let permit = match &request.question {
            Some(UnaryRequest::Records(_)) => {
                let permit = self.record_permits.clone().try_acquire_owned();
                let exhausted = |_| {
                    Status::resource_exhausted(format!(
                        "more than {RECORDS_REQUESTS_MAX} requests for records are in flight"
                    ))
                };
                Some(permit.map_err(exhausted)?)
            }
            _ => None,
        };
        match self.response(request) {
            Ok(response) => {
                let response = async move {
                    let _permit = permit;
                    response.await
                };
                self.unary_responses.push(response.boxed());
            }
            Err(failure) => self.refuse(id, failure),
        }
        Ok(())
    }

    /// Returns the future response to a request.
    fn response(&self, request: pb::Question) -> Result<UnaryResponseFuture, pb::Failure> {
        let pb::Question { route, question } = request;
        if let Some(UnaryRequest::Records(records)) = &question
            && let Some(log) = self.find_log(route)?
        {
            let id = route.unwrap_or_default().id;
            return Ok(unary::respond_from(&self.hub.table, id, log, *records));
        }
        let (route, served) = self.find(route)?;
        unary::respond(&self.hub.table, &route, &served, question)
            .map_err(|error| wire::failure(error.to_string(), true))
    }

    fn on_chunk(&mut self, chunk: pb::SnapshotChunk) {
        let id = chunk.route.unwrap_or_default().id;
        let added = self.find(chunk.route).and_then(|(route, served)| {
            let received = self.snapshots.add(&route, chunk);
            let received = received.map_err(|error| wire::failure(error.to_string(), true))?;
            Ok(received.map(|received| (route, served, received)))
        });
        match added {
            Ok(None) => {}
            Ok(Some((route, served, received))) => self.install(route, &served, received),
            Err(failure) => self.refuse(id, failure),
        }
    }

    fn install(&mut self, route: pb::Route, served: &ServedReplica, received: ReceivedSnapshot) {
        let abandoned = CancellationToken::new();
        let work = unary::install(&self.hub.table, route, served, received);
        let failure = wire::failure("the snapshot was abandoned", true);
        let failed =
            pb::Answer { id: route.id, result: Some(pb::answer::Result::Failure(failure)) };
        let cancelled = abandoned.clone().cancelled_owned();
        let work = async move {
            tokio::select! {
                biased;
                () = cancelled => failed,
                response = work => response,
            }
        };
        self.unary_responses.push(work.boxed());
        let installing = Installing { id: route.id, _abandoned: abandoned.drop_guard() };
        self.installing.insert(route.shard_id, installing);
    }

    fn refuse(&mut self, id: u64, failure: pb::Failure) {
        self.log_refusal(&failure.text);
        let result = Some(pb::answer::Result::Failure(failure));
        self.results.answers.push(pb::Answer { id, result });
    }

    fn on_ending(&mut self, ending: pb::Ending) {
        let Some(route) = ending.route else { return };
        self.snapshots.discard(&route);
        if self.installing.get(&route.shard_id).is_some_and(|it| it.id == route.id) {
            self.installing.remove(&route.shard_id);
        }
        if self.epochs.get(&route.shard_id).is_some_and(|epoch| epoch.id == route.id) {
            self.epochs.remove(&route.shard_id);
        }
    }

    /// Collects the results that are ready.
    fn collect_results(&mut self, context: &mut Context<'_>) {
        while let Poll::Ready(Some(response)) = self.append_responses.poll_next_unpin(context) {
            self.add_ack(response);
        }
        while let Poll::Ready(Some(response)) = self.unary_responses.poll_next_unpin(context) {
            // Stops after records, which fill a message.
            let has_records = matches!(response.result, Some(pb::answer::Result::Records(_)));
            self.results.answers.push(response);
            if has_records {
                return;
            }
        }
    }

    fn add_ack(&mut self, response: EpochResponse) {
        let EpochResponse { shard_id, epoch: id, result } = response;
        let Some(epoch) = self.epochs.get_mut(&shard_id).filter(|epoch| epoch.id == id) else {
            return;
        };
        let Some(sequence) = epoch.on_response(&result) else { return };
        let result = match result {
            Ok(result) => wire::ack_result(&result),
            Err(fatal) => pb::ack::Result::Failure(wire::failure(fatal.to_string(), true)),
        };
        let is_match =
            |result: &Option<pb::ack::Result>| matches!(result, Some(pb::ack::Result::Matched(_)));
        let ack = pb::Ack { epoch: id, sequence, result: Some(result) };
        // An ack covers all requests before it, so the last of several matches is enough.
        match self.results.acks.last_mut() {
            Some(last) if last.epoch == id && is_match(&last.result) && is_match(&ack.result) => {
                *last = ack;
            }
            _ => self.results.acks.push(ack),
        }
    }

    /// Logs a refusal unless it repeats the last one.
    fn log_refusal(&mut self, text: &str) {
        if self.last_refusal != text {
            if wire::is_of_start_or_stop(text) {
                tracing::info!(node = self.from, "refused a peer's message: {text}");
            } else {
                tracing::warn!(node = self.from, "refused a peer's message: {text}");
            }
            text.clone_into(&mut self.last_refusal);
        }
    }

    fn end(&mut self) {
        self.is_ended = true;
        self.epochs.clear();
        self.append_responses.clear();
        self.unary_responses.clear();
        self.snapshots = SnapshotAssembly::default();
        self.installing.clear();
    }

    fn respond(message: ResponseMessage) -> Poll<Option<Result<pb::ExchangeResponse, Status>>> {
        Poll::Ready(Some(Ok(pb::ExchangeResponse { message: Some(message) })))
    }
}

/// Checks that a message addresses the replica that is here.
fn check_target(route: &pb::Route, here: ReplicaId) -> Result<(), pb::Failure> {
    let pb::Route { shard_id, target_replica, .. } = *route;
    if target_replica == here {
        return Ok(());
    }
    let why = format!("replica {target_replica:#x} of shard {shard_id} is not here; {here:#x} is");
    Err(wire::failure(why, true))
}

impl Stream for InboundStream {
    type Item = Result<pb::ExchangeResponse, Status>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if this.is_ended {
            return Poll::Ready(None);
        }
        if let Some(opened) = this.opened.take() {
            return Self::respond(ResponseMessage::Opened(opened));
        }
        if this.stop.as_mut().poll(context).is_ready() {
            this.end();
            return Poll::Ready(Some(Err(Status::unavailable("the stream is being closed"))));
        }
        let has_more = match this.read(context) {
            Ok(has_more) => has_more,
            Err(ended) => {
                this.end();
                return Poll::Ready(ended.map(Err));
            }
        };
        let incomplete = this.requests.is_mid_message().then_some(this.messages_read);
        if this.stall_detector.is_stalled(incomplete, context) {
            let status = Status::deadline_exceeded("the rest of a message did not arrive in time");
            this.log_refusal(status.message());
            this.end();
            return Poll::Ready(Some(Err(status)));
        }
        this.collect_results(context);
        if !this.results.acks.is_empty() || !this.results.answers.is_empty() {
            return Self::respond(ResponseMessage::Results(std::mem::take(&mut this.results)));
        }
        if has_more {
            context.waker().wake_by_ref();
        }
        Poll::Pending
    }
}
