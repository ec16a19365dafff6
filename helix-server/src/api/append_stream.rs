//! One append session: batches of one partition, pipelined, acked in order.
//! Lives inside the answer stream, without a task or a channel: a client that stops reading acks
//! is no longer read either, and its batches in flight are the only thing it holds.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_util::stream;
use helix_proto::log::v1::append_stream_request::Message as Received;
use helix_proto::log::v1::append_stream_response::Message as Sent;
use helix_proto::log::v1::{
    AppendAck, AppendAcks, AppendStreamBatch, AppendStreamInit, AppendStreamOpened,
    AppendStreamRequest, AppendStreamResponse, ProducerIdentity, Watermarks,
};
use helix_proto::messages::Messages;
use tokio::sync::watch;
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::Status;
use tonic::codegen::BoxStream;

use super::produce::wire_ack;
use super::settings::durability_to_reach;
use super::{batch, wire_watermarks};
use crate::error::{Error, Result};
use crate::limits::{COMMIT_WAIT_MAX, STREAM_BATCHES_IN_FLIGHT_MAX, STREAM_BYTES_IN_FLIGHT_MAX};
use crate::log::{DEDUP_WINDOW_BATCHES, FencingToken, ProducerStamp, Refusal};
use crate::node::{Located, Node};
use crate::shard::{Durability, NewBatch, Pending, Shard};

// Whatever a broken stream may have to send again is recognised.
const _: () = assert!(DEDUP_WINDOW_BATCHES >= STREAM_BATCHES_IN_FLIGHT_MAX);

/// The answers to one client's batches. The first failure is their end, after the acks of
/// everything before it.
pub(super) fn answers(
    node: Arc<Node>,
    requests: Messages<AppendStreamRequest>,
) -> BoxStream<AppendStreamResponse> {
    let opening = Box::new(Opening { node, requests });
    Box::pin(stream::try_unfold(Stage::Opening(opening), Stage::next))
}

enum Stage {
    Opening(Box<Opening>),
    Running(Box<Session>),
}

struct Opening {
    node: Arc<Node>,
    requests: Messages<AppendStreamRequest>,
}

impl Stage {
    async fn next(self) -> Result<Option<(AppendStreamResponse, Self)>, Status> {
        let (message, session) = match self {
            Self::Opening(opening) => {
                // Boxed, since it takes 5 KiB, which every open stream would keep.
                let (session, opened) = Box::pin(Session::open(*opening)).await?;
                (Sent::Opened(opened), Box::new(session))
            }
            Self::Running(mut session) => {
                let Some(acks) = poll_fn(|context| session.poll(context)).await? else {
                    return Ok(None);
                };
                (Sent::Acks(acks), session)
            }
        };
        let message = AppendStreamResponse { message: Some(message) };
        Ok(Some((message, Self::Running(session))))
    }
}

struct Session {
    node: Arc<Node>,
    /// Where the batches go, with the topic's settings as they were last seen.
    located: Located,
    /// Tells when the settings may have changed.
    versions: watch::Receiver<u64>,
    /// As the client asked for it.
    asked: i32,
    /// What the batches wait for: never less than before.
    durability: Durability,
    /// Whether batches may have been acked before their verdicts: nobody can say then whether all
    /// before a batch have counted.
    is_blind: bool,
    author: Author,
    /// Sequence behind the newest batch; none before the first one.
    next_sequence: Option<u64>,
    /// What every batch of the session demands.
    fencing_token: Option<FencingToken>,
    draining: CancellationToken,
    is_draining: Pin<Box<WaitForCancellationFutureOwned>>,
    requests: Messages<AppendStreamRequest>,
    intake: Intake,
    /// Proposed batches, oldest first: at most [`STREAM_BATCHES_IN_FLIGHT_MAX`].
    in_flight: VecDeque<InFlight>,
    bytes_in_flight: usize,
    /// Ends a wait that has become too long; never later than the oldest batch's limit.
    alarm: Pin<Box<Sleep>>,
}

struct InFlight {
    pending: Pending,
    size: Size,
    deadline: Instant,
}

/// What a batch counts, and when it came.
#[derive(Debug, Clone, Copy)]
struct Size {
    records: u32,
    bytes: usize,
    since: Instant,
}

/// Who numbers the batches. Every session has an identity and a sequence: after a batch that was
/// refused or went missing, apply refuses all later ones by it.
enum Author {
    Client(ProducerIdentity),
    Session { producer_id: u64 },
}

/// What is being done about the client's next batch.
enum Intake {
    Open,
    /// A batch whose sequence does not follow the one before it waits until all before it are
    /// acked: were one of them refused, its sequence would not tell that it comes behind.
    Astray(NewBatch),
    /// A batch waits for its share of the bytes in flight, and then for its place in the log.
    /// Nothing behind it is read meanwhile, so that TCP slows the client down.
    Proposing {
        proposal: Pin<Box<dyn Future<Output = Result<Pending>> + Send>>,
        size: Size,
    },
    /// Nothing more is read. The session ends like this after the acks of what is in flight.
    Closed(Result<(), Status>),
}

impl Session {
    async fn open(opening: Opening) -> Result<(Self, AppendStreamOpened), Status> {
        let Opening { node, mut requests } = opening;
        let draining = node.shutdown_token().clone();
        let first = tokio::select! {
            first = requests.message() => first?,
            () = draining.cancelled() => return Err(Error::Draining.into()),
        };
        let init = match first.and_then(|request| request.message) {
            Some(Received::Init(init)) => init,
            Some(Received::Batch(_)) | None => return Err(not_opened().into()),
        };
        // Before the settings are read: what changes after that is seen.
        let versions = node.cluster().machine().watch();
        let located = node.find(&init.topic, init.partition).await?;
        located.shard.ready().await?;
        // That 0 is nobody's id is said of the first batch.
        if let Some(ProducerIdentity { producer_id, epoch }) = init.producer
            && producer_id > 0
        {
            node.check_producer(&located, producer_id, epoch).await?;
        }
        let opened = opened(&init, &located)?;
        let author = match init.producer {
            Some(producer) => Author::Client(producer),
            None => {
                let producer_id = node.next_producer_id().await?;
                Author::Session { producer_id }
            }
        };
        let durability = durability_to_reach(init.durability, &located.settings)?;
        let token = |text: &str| batch::fencing_token("init.fencing_token", text);
        let fencing_token = init.fencing_token.as_deref().map(token).transpose()?;
        batch::condition(None, fencing_token.clone(), durability)?;
        let session = Self {
            node,
            located,
            versions,
            asked: init.durability,
            durability,
            is_blind: durability.is_blind(),
            author,
            next_sequence: None,
            fencing_token,
            is_draining: Box::pin(draining.clone().cancelled_owned()),
            draining,
            requests,
            intake: Intake::Open,
            in_flight: VecDeque::new(),
            bytes_in_flight: 0,
            alarm: Box::pin(sleep_until(Instant::now() + COMMIT_WAIT_MAX)),
        };
        Ok((session, opened))
    }

    /// The next acks; none at the end of the session.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<AppendAcks>, Status>> {
        if matches!(self.intake, Intake::Open) && self.is_draining.as_mut().poll(context).is_ready()
        {
            self.intake = Intake::Closed(Err(Error::Draining.into()));
        }
        // Before the acks: what is proposed now can still share the sync that comes next.
        while self.poll_intake(context).is_ready() {}
        if let Some(acks) = self.ready_acks(context) {
            return Poll::Ready(Ok(Some(acks)));
        }
        self.check_alarm(context);
        match &mut self.intake {
            Intake::Closed(end) if self.in_flight.is_empty() => {
                Poll::Ready(std::mem::replace(end, Ok(())).map(|()| None))
            }
            _ => Poll::Pending,
        }
    }

    /// Takes one step with the next batch. Pending where there is none to take, for whatever
    /// reason; the reason wakes the session when it is over.
    fn poll_intake(&mut self, context: &mut Context<'_>) -> Poll<()> {
        match std::mem::replace(&mut self.intake, Intake::Open) {
            Intake::Open => {
                if !self.has_room() {
                    // An ack makes room, and wakes.
                    return Poll::Pending;
                }
                self.intake = match ready!(self.requests.poll_message(context)) {
                    Ok(Some(request)) => self.take_in(request),
                    Ok(None) => Intake::Closed(Ok(())),
                    Err(status) => Intake::Closed(Err(status)),
                };
            }
            Intake::Astray(batch) => {
                if !self.in_flight.is_empty() {
                    self.intake = Intake::Astray(batch);
                    return Poll::Pending;
                }
                self.intake = self.begin(batch);
            }
            Intake::Proposing { mut proposal, size } => match proposal.as_mut().poll(context) {
                Poll::Ready(Ok(pending)) => {
                    let deadline = Instant::now() + COMMIT_WAIT_MAX;
                    self.in_flight.push_back(InFlight { pending, size, deadline });
                    self.bytes_in_flight += size.bytes;
                }
                Poll::Ready(Err(error)) => self.intake = Intake::Closed(Err(error.into())),
                Poll::Pending => {
                    self.intake = Intake::Proposing { proposal, size };
                    return Poll::Pending;
                }
            },
            closed @ Intake::Closed(_) => {
                self.intake = closed;
                return Poll::Pending;
            }
        }
        Poll::Ready(())
    }

    fn has_room(&self) -> bool {
        self.in_flight.len() < STREAM_BATCHES_IN_FLIGHT_MAX
            && self.bytes_in_flight < STREAM_BYTES_IN_FLIGHT_MAX
    }

    fn take_in(&mut self, request: AppendStreamRequest) -> Intake {
        let batch = match request.message {
            Some(Received::Batch(batch)) => self.admit(batch),
            Some(Received::Init(_)) | None => Err(Error::InvalidArgument {
                field: "message",
                what: "every message after the first one must be a batch".to_owned(),
            }),
        };
        match batch {
            Ok((batch, true)) => self.begin(batch),
            Ok((batch, false)) => Intake::Astray(batch),
            Err(error) => Intake::Closed(Err(error.into())),
        }
    }

    fn begin(&self, batch: NewBatch) -> Intake {
        let (records, bytes) = (batch.record_count, batch.payload.len());
        let size = Size { records, bytes, since: Instant::now() };
        let shard = self.located.shard.clone();
        let proposal = propose(shard, batch, self.durability, self.draining.clone());
        Intake::Proposing { proposal: Box::pin(proposal), size }
    }

    /// Takes over what the topic's settings have become. What the batches wait for is only ever
    /// raised by it: whoever opened the session relies on what it began with, and so do conditions.
    fn follow_settings(&mut self) -> Result<()> {
        // One atomic read for nearly every batch.
        if !self.versions.has_changed().unwrap_or(false) {
            return Ok(());
        }
        self.versions.mark_unchanged();
        match self.node.topic(&self.located.topic.name) {
            Ok(topic) if topic.id == self.located.topic.id => {
                let least = durability_to_reach(self.asked, &topic.settings)?;
                self.durability = self.durability.min(least);
                self.located.settings = topic.settings;
                self.located.topic = topic;
            }
            // It is deleted, of which its shard tells.
            Ok(_) | Err(_) => {}
        }
        Ok(())
    }

    /// A batch that may go on, and whether it follows the one before it.
    fn admit(&mut self, message: AppendStreamBatch) -> Result<(NewBatch, bool)> {
        self.follow_settings()?;
        let Located { partition, settings, .. } = &self.located;
        let mut batch = batch::admit(message.batch, *partition, settings)?;
        let next = self.next_sequence;
        let stamp =
            self.author.stamp(message.first_sequence, next.unwrap_or(0), batch.record_count)?;
        let ProducerStamp { producer_id, first_sequence: sequence, .. } = stamp;
        let follows = next.is_none_or(|next| next == sequence);
        if let Some(next_sequence) = next.filter(|_| self.is_blind && !follows) {
            // Were one of those before it refused, this one could still count.
            return Err(Refusal::OutOfOrderSequence { producer_id, sequence, next_sequence }.into());
        }
        self.next_sequence = Some(sequence + u64::from(batch.record_count));
        batch.producer = Some(stamp);
        let token = self.fencing_token.clone();
        batch.condition = batch::condition(message.expected_offset, token, self.durability)?;
        Ok((batch, follows))
    }

    /// All acks that are ready, in one message. A failed batch closes the session behind them.
    fn ready_acks(&mut self, context: &mut Context<'_>) -> Option<AppendAcks> {
        let mut acks: Vec<AppendAck> = Vec::new();
        let mut watermarks: Option<Watermarks> = None;
        while let Some(oldest) = self.in_flight.front_mut() {
            let Poll::Ready(outcome) = Pin::new(&mut oldest.pending).poll(context) else { break };
            let Size { records, bytes, since } = oldest.size;
            self.bytes_in_flight -= bytes;
            self.in_flight.pop_front();
            match outcome {
                Ok(ack) => {
                    self.node.metrics().on_ack(records, bytes, ack.duplicate, since.elapsed());
                    acks.push(wire_ack(&ack));
                    watermarks = ack.offsets.map(|_| wire_watermarks(ack.watermarks));
                }
                Err(error) => self.fail(error),
            }
        }
        (!acks.is_empty()).then_some(AppendAcks { acks, watermarks })
    }

    /// Apply refuses what was proposed behind a failed batch; nobody waits for those verdicts.
    fn fail(&mut self, error: Error) {
        self.in_flight.clear();
        self.bytes_in_flight = 0;
        self.intake = Intake::Closed(Err(error.into()));
    }

    fn check_alarm(&mut self, context: &mut Context<'_>) {
        while let Some(oldest) = self.in_flight.front() {
            if self.alarm.as_mut().poll(context).is_pending() {
                return;
            }
            if oldest.deadline <= Instant::now() {
                let reason = format!("not committed within {COMMIT_WAIT_MAX:?}");
                self.fail(Error::OutcomeUnknown { reason });
            } else {
                // Set for a batch that is acked since.
                let deadline = oldest.deadline;
                self.alarm.as_mut().reset(deadline);
            }
        }
    }
}

impl Author {
    /// `next_sequence` is for a batch that the client does not number itself.
    fn stamp(
        &self,
        first_sequence: Option<u64>,
        next_sequence: u64,
        record_count: u32,
    ) -> Result<ProducerStamp> {
        match self {
            Self::Client(producer) => batch::numbered(*producer, first_sequence, record_count),
            Self::Session { producer_id } => {
                // Refuses a sequence that nobody could check.
                batch::stamp(None, first_sequence, record_count)?;
                let (producer_id, first_sequence) = (*producer_id, next_sequence);
                Ok(ProducerStamp { producer_id, epoch: 0, first_sequence })
            }
        }
    }
}

/// Hands a batch to the log. A session waits for its share of the bytes in flight for as long as
/// it takes: the batches before it are on their way, and the client is held back meanwhile.
async fn propose(
    shard: Arc<Shard>,
    batch: NewBatch,
    durability: Durability,
    draining: CancellationToken,
) -> Result<Pending> {
    let permit = loop {
        match shard.permit(batch.payload.len()).await {
            Err(Error::Throttled { .. }) if !draining.is_cancelled() => {}
            outcome => break outcome,
        }
    };
    let proposed = match permit {
        Ok(permit) => shard.propose(batch, durability, permit).await,
        Err(error) => Err(error),
    };
    match proposed {
        Ok(pending) => Ok(pending),
        Err(error) => Err(shard.turned_away(error).await),
    }
}

fn opened(init: &AppendStreamInit, located: &Located) -> Result<AppendStreamOpened> {
    let watermarks = located.shard.watermarks(located.partition)?;
    let next_sequence = init.producer.and_then(|producer| {
        let ProducerIdentity { producer_id, epoch } = producer;
        located.shard.next_sequence(located.partition, producer_id, epoch)
    });
    Ok(AppendStreamOpened {
        watermarks: Some(wire_watermarks(watermarks)),
        max_batch_bytes: located.settings.max_batch_bytes,
        next_sequence,
        max_in_flight_batches: u32::try_from(STREAM_BATCHES_IN_FLIGHT_MAX).expect("small"),
        max_in_flight_bytes: STREAM_BYTES_IN_FLIGHT_MAX as u64,
    })
}

fn not_opened() -> Error {
    Error::InvalidArgument { field: "message", what: "the first message must be init".to_owned() }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_stream_takes_little_while_it_waits() {
        super::super::expect_small(super::Stage::next);
    }
}
