//! Append streams: pipelined batches of one partition, acked in order.
//! A session lives inside its response stream, without a task or a channel. If a client stops
//! reading acks, its batches are no longer read either; only its batches in flight stay in memory.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_util::stream;
use helix_proto::log::v1::append_stream_request::Message as Received;
use helix_proto::log::v1::append_stream_response::Message as Sent;
use helix_proto::log::v1::{
    AppendAck, AppendAcks, AppendStreamBatch, AppendStreamOpened, AppendStreamRequest,
    AppendStreamResponse, ProducerIdentity, Watermarks,
};
use helix_transport::MessageStream;
use tokio::sync::watch;
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::Status;
use tonic::codegen::BoxStream;

use super::authorize::authorize;
use super::batch_signer::BatchSigner;
use super::batch_size::BatchSize;
use super::batch_watch::{BatchWatch, count_ack};
use super::compressed::AdmittedBatch;
use super::decompressors::Decompressors;
use super::settings::durability_to_reach;
use super::{batch, wire_ack, wire_watermarks};
use crate::call::CallMemory;
use crate::error::{Error, Result};
use crate::limits::{COMMIT_WAIT_MAX, STREAM_BATCHES_IN_FLIGHT_MAX, STREAM_BYTES_IN_FLIGHT_MAX};
use crate::log::{DEDUP_WINDOW_BATCHES, FencingToken, ProducerStamp, Refusal};
use crate::node::{LocatedPartition, Node};
use crate::shard::{Durability, FlowShare, NewBatch, PendingAck, ReadFrom, Shard};
use crate::trace::TraceContext;

// The dedup window recognizes every batch that a broken stream may send again.
const _: () = assert!(DEDUP_WINDOW_BATCHES >= STREAM_BATCHES_IN_FLIGHT_MAX);

/// Returns the acks of one client's batches.
///
/// The first failure ends them, after the acks of all earlier batches.
pub(super) fn responses(
    node: Arc<Node>,
    call: Option<Arc<CallMemory>>,
    context: Option<Box<TraceContext>>,
    decompressors: Arc<Decompressors>,
    requests: MessageStream<AppendStreamRequest>,
) -> BoxStream<AppendStreamResponse> {
    let opening = Box::new(Opening { node, call, context, decompressors, requests });
    Box::pin(stream::try_unfold(Stage::Opening(opening), Stage::next))
}

enum Stage {
    Opening(Box<Opening>),
    Running(Box<AppendSession>),
}

struct Opening {
    node: Arc<Node>,
    call: Option<Arc<CallMemory>>,
    context: Option<Box<TraceContext>>,
    decompressors: Arc<Decompressors>,
    requests: MessageStream<AppendStreamRequest>,
}

impl Stage {
    async fn next(self) -> Result<Option<(AppendStreamResponse, Self)>, Status> {
        let (message, session) = match self {
            Self::Opening(opening) => {
                // Boxed: the future takes 5 KiB, which every open stream would keep.
                let (session, opened) = Box::pin(AppendSession::open(*opening)).await?;
                (Sent::Opened(opened), Box::new(session))
            }
            Self::Running(mut session) => match poll_fn(|context| session.poll(context)).await {
                Ok(Some(acks)) => (Sent::Acks(acks), session),
                Ok(None) => return Ok(None),
                Err(status) => return Err(session.explain(status).await),
            },
        };
        let message = AppendStreamResponse { message: Some(message) };
        Ok(Some((message, Self::Running(session))))
    }
}

struct AppendSession {
    node: Arc<Node>,
    /// Holds the permit of the current message; `None` without admission.
    call: Option<Arc<CallMemory>>,
    /// Trace context of the call, for the first batch.
    context: Option<Box<TraceContext>>,
    decompressors: Arc<Decompressors>,
    /// The partition, with the settings of its topic as last read.
    located: LocatedPartition,
    /// Changes when the settings may have changed.
    versions: watch::Receiver<u64>,
    /// As the client requested it.
    requested: i32,
    /// Level that the acks wait for; it is never lowered.
    durability: Durability,
    /// True if batches may be acked before their verdict. Then it is unknown whether all batches
    /// before one were applied.
    is_before_apply: bool,
    sequences: SequenceSource,
    /// As the stream was opened, so that all its batches have one owner.
    signer: BatchSigner,
    /// Sequence after the newest batch; `None` before the first one.
    next_sequence: Option<u64>,
    /// Token that every batch of the session requires.
    fencing_token: Option<FencingToken>,
    draining: CancellationToken,
    is_draining: Pin<Box<WaitForCancellationFutureOwned>>,
    requests: MessageStream<AppendStreamRequest>,
    intake: Intake,
    /// Proposed batches, oldest first; at most [`STREAM_BATCHES_IN_FLIGHT_MAX`].
    in_flight: VecDeque<InFlight>,
    bytes_in_flight: usize,
    /// Fires at the deadline of the oldest batch, or earlier.
    commit_timer: Pin<Box<Sleep>>,
    /// The error that ended the session because its partition was deleted.
    deleted: Option<Error>,
}

struct InFlight {
    pending: PendingAck,
    size: BatchSize,
    watch: Option<Box<BatchWatch>>,
    deadline: Instant,
}

/// Source of the batches' sequences.
///
/// Every session has a producer id and a sequence. After a rejected or lost batch, apply rejects
/// all later ones by their sequence.
enum SequenceSource {
    Client(ProducerIdentity),
    Session { producer_id: u64 },
}

/// State of the client's next batch.
enum Intake {
    Open,
    /// A large compressed batch is being verified. Later batches are not read meanwhile, so that
    /// their order is kept.
    Verifying {
        verification: Pin<Box<dyn Future<Output = Result<NewBatch>> + Send>>,
        follows: bool,
    },
    /// A batch whose sequence does not follow the previous one waits until all earlier batches are
    /// acked. If one of them were rejected, its sequence would not show that it came later.
    OutOfSequence(NewBatch),
    /// A batch waits for its share of the bytes in flight, and then for its log index. Later
    /// batches are not read meanwhile, so that TCP slows the client down.
    Proposing {
        proposal: Pin<Box<dyn Future<Output = Result<PendingAck>> + Send>>,
        size: BatchSize,
        watch: Option<Box<BatchWatch>>,
    },
    /// Nothing more is read. The session ends with this result after the acks of all batches in
    /// flight.
    Closed(Result<(), Status>),
}

impl AppendSession {
    async fn open(opening: Opening) -> Result<(Self, AppendStreamOpened), Status> {
        let Opening { node, call, context, decompressors, mut requests } = opening;
        let draining = node.shutdown_token().clone();
        let first = tokio::select! {
            first = requests.message() => first?,
            () = draining.cancelled() => return Err(Error::Draining.into()),
        };
        let init = match first.and_then(|request| request.message) {
            Some(Received::Init(init)) => init,
            Some(Received::Batch(_)) | None => return Err(not_opened().into()),
        };
        authorize(&node, call.as_deref(), &init)?;
        // Before the settings are read, so that later changes are noticed.
        let versions = node.cluster().machine().watch();
        let located = node.find(&init.topic, init.topic_id, init.partition).await?;
        located.shard.ready().await?;
        let signer = BatchSigner::of(&node, call.as_deref());
        let identity = init.producer.map(|ProducerIdentity { producer_id, epoch }| {
            signer.sign(ProducerStamp::new(producer_id, epoch, 0), 0)
        });
        // Id 0 is invalid; the first batch fails with it.
        if let Some(stamp) = identity.filter(|stamp| stamp.producer_id > 0) {
            node.check_producer(&located, stamp).await?;
        }
        let opened = match opened(identity.as_ref(), &located) {
            Err(error) if init.topic_id > 0 => {
                return Err(node.explain_deleted(&located.topic, error).await.into());
            }
            opened => opened?,
        };
        let (sequences, signer) = match init.producer {
            Some(producer) => (SequenceSource::Client(producer), signer),
            None => {
                // An id of the caller, so that no other caller gets it or may use it.
                let producer_id = node.next_producer_id(signer.owner()).await?;
                (SequenceSource::Session { producer_id }, signer.of_session())
            }
        };
        let durability = durability_to_reach(init.durability, &located.settings)?;
        let token = |text: &str| batch::fencing_token("init.fencing_token", text);
        let fencing_token = init.fencing_token.as_deref().map(token).transpose()?;
        batch::condition(None, fencing_token.clone(), durability)?;
        release_request(call.as_ref());
        let session = Self {
            node,
            call,
            context,
            decompressors,
            located,
            versions,
            requested: init.durability,
            durability,
            is_before_apply: durability.is_before_apply(),
            sequences,
            signer,
            next_sequence: None,
            fencing_token,
            is_draining: Box::pin(draining.clone().cancelled_owned()),
            draining,
            requests,
            intake: Intake::Open,
            in_flight: VecDeque::new(),
            bytes_in_flight: 0,
            commit_timer: Box::pin(sleep_until(Instant::now() + COMMIT_WAIT_MAX)),
            deleted: None,
        };
        Ok((session, opened))
    }

    /// Returns the status that ends the session, given the status of its failure.
    ///
    /// A session stays with the topic that it was opened for, so that its end says what became of
    /// that topic.
    async fn explain(&mut self, status: Status) -> Status {
        match self.deleted.take() {
            Some(error) => self.node.explain_deleted(&self.located.topic, error).await.into(),
            None => status,
        }
    }

    /// Returns the next acks; `None` at the end of the session.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<AppendAcks>, Status>> {
        if matches!(self.intake, Intake::Open) && self.is_draining.as_mut().poll(context).is_ready()
        {
            self.intake = Intake::Closed(Err(Error::Draining.into()));
        }
        // Before the acks, so that these batches share the next sync.
        while self.poll_intake(context).is_ready() {}
        if let Some(acks) = self.ready_acks(context) {
            return Poll::Ready(Ok(Some(acks)));
        }
        self.check_commit_timer(context);
        match &mut self.intake {
            Intake::Closed(end) if self.in_flight.is_empty() => {
                Poll::Ready(std::mem::replace(end, Ok(())).map(|()| None))
            }
            _ => Poll::Pending,
        }
    }

    /// Advances the next batch by one step.
    ///
    /// Pending if no step is possible; the cause of the wait wakes the session.
    fn poll_intake(&mut self, context: &mut Context<'_>) -> Poll<()> {
        match std::mem::replace(&mut self.intake, Intake::Open) {
            Intake::Open => {
                if !self.has_capacity() {
                    // The next ack frees capacity and wakes the session.
                    return Poll::Pending;
                }
                self.intake = match ready!(self.requests.poll_message(context)) {
                    Ok(Some(request)) => self.accept(request),
                    Ok(None) => Intake::Closed(Ok(())),
                    Err(status) => Intake::Closed(Err(status)),
                };
            }
            Intake::Verifying { mut verification, follows } => {
                match verification.as_mut().poll(context) {
                    Poll::Ready(Ok(batch)) => self.intake = self.accepted(batch, follows),
                    Poll::Ready(Err(error)) => self.intake = self.close(error),
                    Poll::Pending => {
                        self.intake = Intake::Verifying { verification, follows };
                        return Poll::Pending;
                    }
                }
            }
            Intake::OutOfSequence(batch) => {
                if !self.in_flight.is_empty() {
                    self.intake = Intake::OutOfSequence(batch);
                    return Poll::Pending;
                }
                self.intake = self.begin(batch);
            }
            Intake::Proposing { mut proposal, size, mut watch } => {
                match proposal.as_mut().poll(context) {
                    Poll::Ready(Ok(pending)) => {
                        let deadline = Instant::now() + COMMIT_WAIT_MAX;
                        self.in_flight.push_back(InFlight { pending, size, watch, deadline });
                        self.bytes_in_flight += size.bytes;
                    }
                    Poll::Ready(Err(error)) => {
                        if let Some(watch) = &mut watch {
                            watch.failed(&size, &self.located, &error);
                        }
                        self.intake = self.close(error);
                    }
                    Poll::Pending => {
                        self.intake = Intake::Proposing { proposal, size, watch };
                        return Poll::Pending;
                    }
                }
            }
            closed @ Intake::Closed(_) => {
                self.intake = closed;
                return Poll::Pending;
            }
        }
        Poll::Ready(())
    }

    fn has_capacity(&self) -> bool {
        self.in_flight.len() < STREAM_BATCHES_IN_FLIGHT_MAX
            && self.bytes_in_flight < STREAM_BYTES_IN_FLIGHT_MAX
    }

    fn accept(&mut self, request: AppendStreamRequest) -> Intake {
        let batch = match request.message {
            Some(Received::Batch(batch)) => self.admit(batch),
            Some(Received::Init(_)) | None => Err(Error::InvalidArgument {
                field: "message",
                what: "every message after the first one must be a batch".to_owned(),
            }),
        };
        let (admitted, follows) = match batch {
            Ok(admitted) => admitted,
            Err(error) => return self.close(error),
        };
        let compressed = match admitted {
            AdmittedBatch::Uncompressed(batch) => return self.accepted(batch, follows),
            AdmittedBatch::Compressed(compressed) => compressed,
        };
        match compressed.verify_now(&self.node) {
            ControlFlow::Break(Ok(batch)) => self.accepted(batch, follows),
            ControlFlow::Break(Err(error)) => self.close(error),
            ControlFlow::Continue(large) => {
                let (node, decompressors) = (self.node.clone(), self.decompressors.clone());
                let shard = self.located.shard.clone();
                let verification = async move { large.verify(&node, &decompressors, &shard).await };
                Intake::Verifying { verification: Box::pin(verification), follows }
            }
        }
    }

    fn accepted(&mut self, batch: NewBatch, follows: bool) -> Intake {
        if follows { self.begin(batch) } else { Intake::OutOfSequence(batch) }
    }

    /// Returns the end of the session with this failure, which replaces an earlier one.
    ///
    /// The batch that the session last read was dropped.
    fn close(&mut self, error: Error) -> Intake {
        release_request(self.call.as_ref());
        self.deleted = matches!(error, Error::PartitionDeleted { .. }).then(|| error.clone());
        Intake::Closed(Err(error.into()))
    }

    fn begin(&mut self, mut batch: NewBatch) -> Intake {
        let size = BatchSize::of(&batch, Instant::now());
        let context = self.context.take();
        let watch = BatchWatch::begin(&self.node, context, false, size.since, &mut batch);
        let shard = self.located.shard.clone();
        let (call, draining) = (self.call.clone(), self.draining.clone());
        let proposal = propose(shard, call, self.signer.share(), batch, self.durability, draining);
        Intake::Proposing { proposal: Box::pin(proposal), size, watch }
    }

    /// Reads the topic's settings again if they may have changed.
    ///
    /// Raises the durability of the acks, never lowers it: the client and its conditions rely on
    /// the durability at the start of the session.
    fn refresh_settings(&mut self) -> Result<()> {
        // Costs one atomic read for nearly every batch.
        if !self.versions.has_changed().unwrap_or(false) {
            return Ok(());
        }
        self.versions.mark_unchanged();
        let topic_id = self.located.topic.id;
        if self.node.cluster().machine().read(|state| state.is_deleted(topic_id)) {
            // Its shard rejects the batch too, but with LEADER_WRITTEN and NONE that is not seen.
            return Err(Error::PartitionDeleted { partition: self.located.partition });
        }
        match self.node.topic(&self.located.topic.name) {
            Ok(topic) if topic.id == topic_id => {
                let least = durability_to_reach(self.requested, &topic.settings)?;
                self.durability = self.durability.min(least);
                self.located.settings = self.node.settings_in_force(&topic);
                self.located.topic = topic;
            }
            // The topic was deleted meanwhile.
            Ok(_) | Err(_) => {}
        }
        Ok(())
    }

    /// Checks a batch; returns it, and true if its sequence follows the previous one.
    fn admit(&mut self, message: AppendStreamBatch) -> Result<(AdmittedBatch, bool)> {
        self.refresh_settings()?;
        let LocatedPartition { partition, settings, .. } = &self.located;
        let mut admitted = batch::admit(message.batch, *partition, settings)?;
        let batch = admitted.batch_mut();
        let next = self.next_sequence;
        let stamp =
            self.sequences.stamp(message.first_sequence, next.unwrap_or(0), batch.record_count)?;
        let ProducerStamp { producer_id, first_sequence: sequence, .. } = stamp;
        let follows = next.is_none_or(|next| next == sequence);
        if let Some(next_sequence) = next.filter(|_| self.is_before_apply && !follows) {
            // If an earlier batch was rejected, this one could still be applied.
            return Err(Refusal::OutOfOrderSequence { producer_id, sequence, next_sequence }.into());
        }
        self.next_sequence = Some(sequence + u64::from(batch.record_count));
        batch.producer = Some(self.signer.sign(stamp, batch.crc));
        let token = self.fencing_token.clone();
        batch.condition = batch::condition(message.expected_offset, token, self.durability)?;
        Ok((admitted, follows))
    }

    /// Returns all acks that are ready, in one message. A failed batch closes the session.
    fn ready_acks(&mut self, context: &mut Context<'_>) -> Option<AppendAcks> {
        let mut acks: Vec<AppendAck> = Vec::new();
        let mut watermarks: Option<Watermarks> = None;
        while let Some(oldest) = self.in_flight.front_mut() {
            let Poll::Ready(outcome) = Pin::new(&mut oldest.pending).poll(context) else { break };
            let (size, watch) = (oldest.size, oldest.watch.take());
            self.bytes_in_flight -= size.bytes;
            self.in_flight.pop_front();
            match outcome {
                Ok(ack) => {
                    count_ack(&self.node, &self.located, &size, &ack);
                    if let Some(watch) = watch {
                        watch.acked(&size, &self.located, &ack);
                    }
                    acks.push(wire_ack(&ack));
                    watermarks = ack.offsets.map(|_| wire_watermarks(ack.watermarks));
                }
                Err(error) => {
                    if let Some(mut watch) = watch {
                        watch.failed(&size, &self.located, &error);
                    }
                    self.fail(error);
                }
            }
        }
        (!acks.is_empty()).then_some(AppendAcks { acks, watermarks })
    }

    /// Closes the session. Apply rejects the batches after a failed one, so drops their acks.
    fn fail(&mut self, error: Error) {
        self.in_flight.clear();
        self.bytes_in_flight = 0;
        self.intake = self.close(error);
    }

    fn check_commit_timer(&mut self, context: &mut Context<'_>) {
        while let Some(oldest) = self.in_flight.front() {
            if self.commit_timer.as_mut().poll(context).is_pending() {
                return;
            }
            if oldest.deadline <= Instant::now() {
                let reason = format!("not committed within {COMMIT_WAIT_MAX:?}");
                self.fail(Error::OutcomeUnknown { reason });
            } else {
                // It was set for a batch that is acked now.
                let deadline = oldest.deadline;
                self.commit_timer.as_mut().reset(deadline);
            }
        }
    }
}

impl SequenceSource {
    /// Returns the stamp of a batch; a session without a producer uses `next_sequence`.
    fn stamp(
        &self,
        first_sequence: Option<u64>,
        next_sequence: u64,
        record_count: u32,
    ) -> Result<ProducerStamp> {
        match self {
            Self::Client(producer) => batch::numbered(*producer, first_sequence, record_count),
            Self::Session { producer_id } => {
                // Rejects a sequence without a producer.
                batch::stamp(None, first_sequence, record_count)?;
                let (producer_id, first_sequence) = (*producer_id, next_sequence);
                Ok(ProducerStamp::new(producer_id, 0, first_sequence))
            }
        }
    }
}

/// Proposes a batch. Waits without a limit for its share of the bytes in flight.
///
/// The earlier batches are in flight, and TCP holds the client back meanwhile.
async fn propose(
    shard: Arc<Shard>,
    call: Option<Arc<CallMemory>>,
    share: FlowShare,
    batch: NewBatch,
    durability: Durability,
    draining: CancellationToken,
) -> Result<PendingAck> {
    let permit = loop {
        match shard.permit(share, batch.payload.len()).await {
            Err(Error::Throttled { .. }) if !draining.is_cancelled() => {}
            outcome => break outcome,
        }
    };
    let proposed = match permit {
        Ok(permit) => {
            // The shard's bytes in flight cover the batch from here on. Otherwise a client that
            // reads no acks would keep the permit: its next message is not polled for.
            release_request(call.as_ref());
            shard.propose(batch, durability, permit).await
        }
        Err(error) => Err(error),
    };
    match proposed {
        Ok(pending) => Ok(pending),
        Err(error) => Err(shard.redirect(error).await),
    }
}

/// Releases the permit of the message that was read last.
fn release_request(call: Option<&Arc<CallMemory>>) {
    if let Some(call) = call {
        call.release_request();
    }
}

fn opened(
    identity: Option<&ProducerStamp>,
    located: &LocatedPartition,
) -> Result<AppendStreamOpened> {
    let watermarks = located.shard.watermarks_for(located.partition, ReadFrom::Leader)?;
    let next_sequence =
        identity.and_then(|stamp| located.shard.next_sequence(located.partition, stamp));
    Ok(AppendStreamOpened {
        watermarks: Some(wire_watermarks(watermarks)),
        max_batch_bytes: located.settings.max_batch_bytes,
        next_sequence,
        max_in_flight_batches: u32::try_from(STREAM_BATCHES_IN_FLIGHT_MAX).expect("small"),
        max_in_flight_bytes: STREAM_BYTES_IN_FLIGHT_MAX as u64,
        topic_id: located.topic.id,
    })
}

fn not_opened() -> Error {
    Error::InvalidArgument { field: "message", what: "the first message must be init".to_owned() }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_waiting_stream_takes_little_memory() {
        super::super::assert_small_future(super::Stage::next);
    }
}
