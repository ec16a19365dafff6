//! One stream from a peer. Lives inside its answer stream, without a task of its own: whoever
//! writes the answers reads the requests, hands them to openraft, and gathers what is ready.
//! It is never held up by one shard: the windows bound what can be queued.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, SelectAll};
use futures_util::{Future, FutureExt, Stream, StreamExt};
use helix_proto::messages::Messages;
use helix_proto::raft::v1 as pb;
use pb::exchange_request::Message;
use pb::exchange_response::Message as Said;
use pb::question::Question;
use prost::Message as _;
use tokio::sync::Semaphore;
use tokio::time::{Instant, Sleep, sleep};
use tokio_util::sync::{CancellationToken, DropGuard, WaitForCancellationFutureOwned};
use tonic::Status;

use super::connection::Traffic;
use super::follow::{Ended, Epoch, EpochResults, Outcome};
use super::hub::{Hub, Served};
use super::limits::{
    EPOCHS_MAX, MESSAGE_WAIT, MESSAGES_PER_POLL, QUESTIONS_MAX, RECORDS_REQUESTS_MAX,
};
use super::questions;
use super::snapshot::{Arrived, Assembly};
use super::wire;

/// Dropping it ends the work, whose answer nobody waits for any more.
struct Installing {
    id: u64,
    _given_up: DropGuard,
}

/// Looks now and then whether a stream is within the message that it was in the last time. Whoever
/// sent something that is no message would otherwise wait for its answer for as long as the
/// connection lives, since the rest of what was taken for one may never come.
struct Lookout {
    next: Pin<Box<Sleep>>,
    /// Number of the message that was under way.
    within: Option<u64>,
}

impl Lookout {
    fn new() -> Self {
        Self { next: Box::pin(sleep(MESSAGE_WAIT)), within: None }
    }

    /// Whether it is, for a stream that is `within` this message. To be polled with the stream.
    fn is_stuck(&mut self, within: Option<u64>, context: &mut Context<'_>) -> bool {
        while self.next.as_mut().poll(context).is_ready() {
            if within.is_some() && within == self.within {
                return true;
            }
            self.within = within;
            self.next.as_mut().reset(Instant::now() + MESSAGE_WAIT);
        }
        false
    }
}

pub(super) struct Inbound {
    hub: Arc<Hub>,
    from: u64,
    traffic: Option<Arc<Traffic>>,
    requests: Messages<pb::ExchangeRequest>,
    /// Messages so far.
    taken: u64,
    lookout: Lookout,
    opened: Option<pb::Opened>,
    stop: Pin<Box<WaitForCancellationFutureOwned>>,
    /// The newest epoch of each shard: a peer has one replica of it.
    epochs: BTreeMap<u64, Epoch>,
    outcomes: SelectAll<EpochResults>,
    questions: FuturesUnordered<BoxFuture<'static, pb::Answer>>,
    snapshots: Assembly,
    /// Places for requests for records.
    records: Arc<Semaphore>,
    /// The snapshots that are being installed, by shard.
    installing: BTreeMap<u64, Installing>,
    ready: pb::Results,
    /// The last complaint, so that it is logged once.
    complaint: String,
    over: bool,
}

impl Inbound {
    pub(super) fn new(
        hub: Arc<Hub>,
        from: u64,
        requests: Messages<pb::ExchangeRequest>,
        opened: pb::Opened,
        stop: WaitForCancellationFutureOwned,
    ) -> Self {
        Self {
            traffic: hub.roster.peer(from).map(|peer| Arc::clone(&peer.traffic)),
            hub,
            from,
            requests,
            taken: 0,
            lookout: Lookout::new(),
            opened: Some(opened),
            stop: Box::pin(stop),
            epochs: BTreeMap::new(),
            outcomes: SelectAll::new(),
            questions: FuturesUnordered::new(),
            snapshots: Assembly::default(),
            records: Arc::new(Semaphore::new(RECORDS_REQUESTS_MAX)),
            installing: BTreeMap::new(),
            ready: pb::Results::default(),
            complaint: String::new(),
            over: false,
        }
    }

    /// Reads what has come; whether there may be more.
    fn read(&mut self, context: &mut Context<'_>) -> Result<bool, Option<Status>> {
        for _ in 0..MESSAGES_PER_POLL {
            match self.requests.poll_message(context) {
                Poll::Pending => return Ok(false),
                Poll::Ready(Ok(None)) => return Err(None),
                Poll::Ready(Ok(Some(request))) => {
                    self.taken += 1;
                    if let Some(traffic) = &self.traffic {
                        traffic.received.add(request.encoded_len() as u64);
                    }
                    if let Err(status) = self.take(request) {
                        self.complain(status.message());
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

    fn take(&mut self, request: pb::ExchangeRequest) -> Result<(), Status> {
        match request.message {
            Some(Message::Append(append)) => self.append(append),
            Some(Message::Question(question)) => self.question(question)?,
            Some(Message::Chunk(chunk)) => self.chunk(chunk),
            Some(Message::Ending(ending)) => self.ending(ending),
            Some(Message::Opening(_)) => {
                return Err(Status::invalid_argument("a second handshake"));
            }
            None => return Err(Status::invalid_argument("a message that says nothing")),
        }
        Ok(())
    }

    /// The replica that a message is for, if it is one of ours and the sender one of its own.
    fn find(&self, route: Option<pb::Route>) -> Result<(pb::Route, Served), pb::Failure> {
        let route = route.ok_or_else(|| wire::failure("a message without a route", true))?;
        let pb::Route { shard_id, source_replica, target_replica, .. } = route;
        let refused = |why: String| Err(wire::failure(why, true));
        if source_replica >> 32 != self.from {
            return refused(format!("replica {source_replica:#x} is not on node {}", self.from));
        }
        let Some(served) = self.hub.served(shard_id) else {
            return refused(format!("shard {shard_id} is not open here"));
        };
        if served.replica_id != target_replica {
            return refused(format!(
                "replica {target_replica:#x} of shard {shard_id} is not here; {:#x} is",
                served.replica_id
            ));
        }
        Ok((route, served))
    }

    fn append(&mut self, append: pb::Append) {
        let (id, sequence) = (append.route.unwrap_or_default().id, append.sequence);
        let (route, served) = match self.find(append.route) {
            Ok(found) => found,
            Err(failure) => return self.refuse_append(id, sequence, failure),
        };
        let newest = self.epochs.get(&route.shard_id).map(|epoch| epoch.id);
        if Some(id) < newest {
            // Left over from an epoch that its sender has ended.
            return;
        }
        if Some(id) > newest {
            if self.outcomes.len() >= EPOCHS_MAX {
                let failure = wire::failure("too many epochs are open", true);
                return self.refuse_append(id, sequence, failure);
            }
            let (epoch, outcomes) = Epoch::open(&route, &served);
            self.epochs.insert(route.shard_id, epoch);
            self.outcomes.push(outcomes);
        }
        let Some(epoch) = self.epochs.get_mut(&route.shard_id) else { return };
        if let Err(Ended(failure)) = epoch.take(sequence, append.entries, route.source_replica) {
            self.refuse_append(id, sequence, failure);
        }
    }

    fn refuse_append(&mut self, epoch: u64, sequence: u64, failure: pb::Failure) {
        self.complain(&failure.text);
        let result = Some(pb::ack::Result::Failure(failure));
        self.ready.acks.push(pb::Ack { epoch, sequence, result });
    }

    fn question(&mut self, question: pb::Question) -> Result<(), Status> {
        if self.questions.len() >= QUESTIONS_MAX {
            return Err(Status::resource_exhausted("too many questions are open"));
        }
        let id = question.route.unwrap_or_default().id;
        let place = match &question.question {
            Some(Question::Records(_)) => {
                let place = self.records.clone().try_acquire_owned();
                let many = |_| Status::resource_exhausted("too many requests for records are open");
                Some(place.map_err(many)?)
            }
            _ => None,
        };
        let asked = self.find(question.route).and_then(|(route, served)| {
            let answer = questions::answer(&self.hub.roster, &route, &served, question.question)
                .map_err(|error| wire::failure(error.to_string(), true))?;
            Ok(async move {
                let _place = place;
                answer.await
            })
        });
        match asked {
            Ok(answer) => self.questions.push(answer.boxed()),
            Err(failure) => self.refuse(id, failure),
        }
        Ok(())
    }

    fn chunk(&mut self, chunk: pb::SnapshotChunk) {
        let id = chunk.route.unwrap_or_default().id;
        let taken = self.find(chunk.route).and_then(|(route, served)| {
            let arrived = self.snapshots.take(&route, chunk);
            let arrived = arrived.map_err(|error| wire::failure(error.to_string(), true))?;
            Ok(arrived.map(|arrived| (route, served, arrived)))
        });
        match taken {
            Ok(None) => {}
            Ok(Some((route, served, arrived))) => self.install(route, &served, arrived),
            Err(failure) => self.refuse(id, failure),
        }
    }

    fn install(&mut self, route: pb::Route, served: &Served, arrived: Arrived) {
        let given_up = CancellationToken::new();
        let work = questions::install(&self.hub.roster, route, served, arrived);
        let over = pb::Answer {
            id: route.id,
            result: Some(pb::answer::Result::Failure(wire::failure("given up", true))),
        };
        let ended = given_up.clone().cancelled_owned();
        let work = async move {
            tokio::select! {
                biased;
                () = ended => over,
                answer = work => answer,
            }
        };
        self.questions.push(work.boxed());
        let installing = Installing { id: route.id, _given_up: given_up.drop_guard() };
        self.installing.insert(route.shard_id, installing);
    }

    fn refuse(&mut self, id: u64, failure: pb::Failure) {
        self.complain(&failure.text);
        let result = Some(pb::answer::Result::Failure(failure));
        self.ready.answers.push(pb::Answer { id, result });
    }

    fn ending(&mut self, ending: pb::Ending) {
        let Some(route) = ending.route else { return };
        self.snapshots.forget(&route);
        if self.installing.get(&route.shard_id).is_some_and(|it| it.id == route.id) {
            self.installing.remove(&route.shard_id);
        }
        if self.epochs.get(&route.shard_id).is_some_and(|epoch| epoch.id == route.id) {
            self.epochs.remove(&route.shard_id);
        }
    }

    /// Gathers what has become ready.
    fn gather(&mut self, context: &mut Context<'_>) {
        while let Poll::Ready(Some(outcome)) = self.outcomes.poll_next_unpin(context) {
            self.settle(outcome);
        }
        while let Poll::Ready(Some(answer)) = self.questions.poll_next_unpin(context) {
            // Of records one piece is as much as a message should hold.
            let has_records = matches!(answer.result, Some(pb::answer::Result::Records(_)));
            self.ready.answers.push(answer);
            if has_records {
                return;
            }
        }
    }

    fn settle(&mut self, outcome: Outcome) {
        let Outcome { shard_id, epoch: id, result } = outcome;
        let Some(epoch) = self.epochs.get_mut(&shard_id).filter(|epoch| epoch.id == id) else {
            return;
        };
        let Some(sequence) = epoch.settle(&result) else { return };
        let result = match result {
            Ok(result) => wire::ack_result(&result),
            Err(fatal) => pb::ack::Result::Failure(wire::failure(fatal.to_string(), true)),
        };
        let is_match =
            |result: &Option<pb::ack::Result>| matches!(result, Some(pb::ack::Result::Matched(_)));
        let ack = pb::Ack { epoch: id, sequence, result: Some(result) };
        // An ack stands for all before it: of several matches the last one is enough.
        match self.ready.acks.last_mut() {
            Some(last) if last.epoch == id && is_match(&last.result) && is_match(&ack.result) => {
                *last = ack;
            }
            _ => self.ready.acks.push(ack),
        }
    }

    fn complain(&mut self, text: &str) {
        if self.complaint != text {
            tracing::warn!(node = self.from, "a peer's message is refused: {text}");
            text.clone_into(&mut self.complaint);
        }
    }

    fn end(&mut self) {
        self.over = true;
        self.epochs.clear();
        self.outcomes.clear();
        self.questions.clear();
        self.snapshots = Assembly::default();
        self.installing.clear();
    }

    fn say(said: Said) -> Poll<Option<Result<pb::ExchangeResponse, Status>>> {
        Poll::Ready(Some(Ok(pb::ExchangeResponse { message: Some(said) })))
    }
}

impl Stream for Inbound {
    type Item = Result<pb::ExchangeResponse, Status>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if this.over {
            return Poll::Ready(None);
        }
        if let Some(opened) = this.opened.take() {
            return Self::say(Said::Opened(opened));
        }
        if this.stop.as_mut().poll(context).is_ready() {
            this.end();
            return Poll::Ready(Some(Err(Status::unavailable("the stream is being closed"))));
        }
        let more = match this.read(context) {
            Ok(more) => more,
            Err(ended) => {
                this.end();
                return Poll::Ready(ended.map(Err));
            }
        };
        let within = this.requests.is_within().then_some(this.taken);
        if this.lookout.is_stuck(within, context) {
            let status = Status::deadline_exceeded("the rest of a message has not come");
            this.complain(status.message());
            this.end();
            return Poll::Ready(Some(Err(status)));
        }
        this.gather(context);
        if !this.ready.acks.is_empty() || !this.ready.answers.is_empty() {
            return Self::say(Said::Results(std::mem::take(&mut this.ready)));
        }
        if more {
            context.waker().wake_by_ref();
        }
        Poll::Pending
    }
}
