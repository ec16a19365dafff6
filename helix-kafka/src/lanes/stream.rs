//! The task of a lane: opens an append stream, sends batches, and hands out their results.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use helix_client::proto::log::v1::append_stream_request::Message as StreamRequest;
use helix_client::proto::log::v1::append_stream_response::Message as StreamResponse;
use helix_client::proto::log::v1::batch::Form;
use helix_client::proto::log::v1::{
    AppendAcks, AppendStreamBatch, AppendStreamInit, AppendStreamOpened, AppendStreamRequest,
    AppendStreamResponse, Batch, ErrorReason,
};
use helix_client::{Error, Route};
use kafka_protocol::error::ResponseError;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout};
use tonic::{Status, Streaming};
use tracing::debug;

use super::resend::PendingResend;
use super::{LaneBatch, LaneKey, LaneResult, StoredOffsets, widen_sequence};
use crate::errors::append_code;
use crate::state::GatewayState;
use crate::upstream::Upstream;

/// Time without batches after which a stream is closed.
const IDLE_MAX: Duration = Duration::from_secs(10);

/// Silence of a leader with batches in flight after which their outcome is unknown.
pub(super) const SILENCE_MAX: Duration = Duration::from_secs(15);

/// Timeout of opening a stream.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// Leaders that are tried in a row to open a stream. Nothing is sent before one has accepted.
pub(super) const OPEN_ATTEMPTS: u32 = 3;

/// Wait before another attempt if no other leader is known. Three of them cover an election.
pub(super) const OPEN_WAIT: Duration = Duration::from_millis(300);

pub(super) struct LaneTask {
    pub(super) state: Arc<GatewayState>,
    pub(super) upstream: Arc<Upstream>,
    pub(super) key: LaneKey,
    pending_resend: PendingResend,
    /// Sequence after the last batch that was sent.
    expected: u64,
    /// The next batch waits for a stream, which tells the producer's position.
    needs_stream: bool,
}

type Batches = mpsc::UnboundedReceiver<LaneBatch>;

/// An open stream.
struct OpenStream {
    requests: mpsc::UnboundedSender<AppendStreamRequest>,
    responses: Streaming<AppendStreamResponse>,
    opened: AppendStreamOpened,
    route: Route,
    _permit: OwnedSemaphorePermit,
}

/// Batches that were sent and have no ack yet.
#[derive(Default)]
struct InFlight {
    batches: VecDeque<SentBatch>,
    bytes: usize,
}

struct SentBatch {
    done: oneshot::Sender<LaneResult>,
    bytes: usize,
    sequence: Option<u32>,
}

impl InFlight {
    /// Hands out the results of the oldest batches.
    fn on_acks(&mut self, acks: &AppendAcks) {
        for ack in &acks.acks {
            let Some(SentBatch { done, bytes, .. }) = self.batches.pop_front() else { return };
            self.bytes -= bytes;
            let log_start = acks.watermarks.map(|watermarks| watermarks.log_start_offset);
            // Ignored: the client has stopped waiting.
            let _ = done.send(Ok(StoredOffsets { first: ack.first_offset, log_start }));
        }
    }

    /// Fails all batches. A failure with a reason is that of the oldest one, and says that no later
    /// one was stored.
    fn fail(&mut self, error: &Error) {
        let is_unknown = error.may_have_applied;
        let mut failure = (append_code(error), error.to_string());
        for sent in self.batches.drain(..) {
            // Ignored: the client has stopped waiting.
            let _ = sent.done.send(Err(failure.clone()));
            if !is_unknown {
                failure = behind();
            }
        }
        self.bytes = 0;
    }
}

/// Returns the failure of a batch that was not stored because an earlier one failed.
fn behind() -> (ResponseError, String) {
    (ResponseError::NotLeaderOrFollower, "an earlier batch failed; send this one again".to_owned())
}

impl LaneTask {
    pub(super) fn new(state: Arc<GatewayState>, upstream: Arc<Upstream>, key: LaneKey) -> Self {
        let pending_resend = PendingResend::default();
        Self { state, upstream, key, pending_resend, expected: 0, needs_stream: false }
    }

    /// Runs until the connection has closed, or no batch came for a while.
    pub(super) async fn run(mut self, mut batches: Batches) {
        let mut next = None;
        loop {
            let first = match next.take() {
                Some(first) => first,
                None => match timeout(IDLE_MAX, batches.recv()).await {
                    Ok(Some(first)) => first,
                    Ok(None) => return,
                    Err(_) => break,
                },
            };
            if self.pending_resend.holds_back(first.sequence) {
                // Ignored: the client has stopped waiting.
                let _ = first.done.send(Err(behind()));
                continue;
            }
            let error = match self.stream_permit().await {
                Some(permit) => match self.open(permit).await {
                    Ok(stream) => {
                        self.needs_stream = false;
                        self.serve(stream, first, &mut batches, &mut next).await;
                        continue;
                    }
                    Err(error) => error,
                },
                None => match self.append_single(&first).await {
                    Ok(stored) => {
                        self.expected = self.sequence_after(&first);
                        // Ignored: the client has stopped waiting.
                        let _ = first.done.send(Ok(stored));
                        continue;
                    }
                    // Kafka's sequence may have wrapped.
                    Err(error) if error.is(ErrorReason::OutOfOrderSequence) => {
                        self.needs_stream = true;
                        next = Some(first);
                        continue;
                    }
                    Err(error) => error,
                },
            };
            debug!(topic = self.key.topic, %error, "append failed");
            let failure = (append_code(&error), error.to_string());
            self.pending_resend.expect(first.sequence);
            // Ignored: the client has stopped waiting.
            let _ = first.done.send(Err(failure));
            fail_waiting(&mut batches);
        }
        batches.close();
        fail_waiting(&mut batches);
    }

    /// Returns a permit for a stream; `None` if all are in use and the lane can do without one.
    async fn stream_permit(&self) -> Option<OwnedSemaphorePermit> {
        let streams = self.state.append_streams.clone();
        match streams.clone().try_acquire_owned() {
            Err(_) if self.needs_stream => {
                self.state.stream_wanted.notify_waiters();
                streams.acquire_owned().await.ok()
            }
            permit => permit.ok(),
        }
    }

    /// Returns Helix' sequence of a batch with this sequence of Kafka's.
    pub(super) fn widen(&self, sequence: u32) -> u64 {
        widen_sequence(sequence, self.expected)
    }

    fn sequence_after(&self, batch: &LaneBatch) -> u64 {
        let count = u64::from(batch.batch.record_count);
        batch.sequence.map_or(0, |sequence| self.widen(sequence) + count)
    }

    /// Opens a stream at the partition's leader. Nothing was appended if it fails.
    async fn open(&self, permit: OwnedSemaphorePermit) -> Result<OpenStream, Error> {
        let client = self.upstream.client();
        let mut attempt = 1;
        loop {
            let opening = async {
                let route = client.route(&self.key.topic, self.key.partition).await?;
                match self.open_at(&route).await {
                    Ok(opened) => Ok((route, opened)),
                    Err(error) => {
                        let has_other = client.report_failure(&route, &error);
                        if !has_other && error.retryable && attempt < OPEN_ATTEMPTS {
                            tokio::time::sleep(OPEN_WAIT).await;
                        }
                        Err(error)
                    }
                }
            };
            match timeout(OPEN_TIMEOUT, opening).await {
                Ok(Ok((route, (requests, responses, opened)))) => {
                    let _permit = permit;
                    return Ok(OpenStream { requests, responses, opened, route, _permit });
                }
                Ok(Err(error)) if error.retryable && attempt < OPEN_ATTEMPTS => {
                    if error.origin == helix_client::Origin::Client {
                        // No leader is known.
                        tokio::time::sleep(OPEN_WAIT).await;
                    }
                }
                Ok(Err(error)) => return Err(unsent(error)),
                Err(_) => return Err(unsent(timed_out("opening an append stream"))),
            }
            attempt += 1;
        }
    }

    async fn open_at(
        &self,
        route: &Route,
    ) -> Result<
        (
            mpsc::UnboundedSender<AppendStreamRequest>,
            Streaming<AppendStreamResponse>,
            AppendStreamOpened,
        ),
        Error,
    > {
        let (outgoing, mut requests) = mpsc::unbounded_channel();
        let init = AppendStreamInit {
            topic: self.key.topic.clone(),
            partition: self.key.partition,
            durability: self.key.durability().into(),
            producer: self.key.identity(),
            fencing_token: None,
            topic_id: 0,
        };
        // The receiver is in scope.
        let _ = outgoing.send(AppendStreamRequest { message: Some(StreamRequest::Init(init)) });
        let next = move |context: &mut Context<'_>| requests.poll_recv(context);
        let request = helix_transport::requests::append_stream(next, tokio_stream::empty());
        let mut responses = route.connection.produce().append_stream(request).await?.into_inner();
        match responses.message().await?.and_then(|first| first.message) {
            Some(StreamResponse::Opened(opened)) => Ok((outgoing, responses, opened)),
            _ => Err(Error::from(Status::internal("the first message is not `opened`"))),
        }
    }

    /// Sends batches until the stream fails or is idle. A batch that came too late is in `next`.
    async fn serve(
        &mut self,
        mut stream: OpenStream,
        first: LaneBatch,
        batches: &mut Batches,
        next: &mut Option<LaneBatch>,
    ) {
        let mut in_flight = InFlight::default();
        self.expected = stream.opened.next_sequence.unwrap_or(0);
        let mut waiting = Some(first);
        let mut progress_at = Instant::now();
        let error = loop {
            if let Some(batch) = waiting.take_if(|batch| has_capacity(&stream, &in_flight, batch)) {
                if in_flight.batches.is_empty() {
                    progress_at = Instant::now();
                }
                if let Err(unsent) = send(&stream, &mut in_flight, batch, &mut self.expected) {
                    // The response has the reason.
                    waiting = Some(unsent);
                }
            }
            let is_idle = in_flight.batches.is_empty();
            let deadline = progress_at + if is_idle { IDLE_MAX } else { SILENCE_MAX };
            tokio::select! {
                message = stream.responses.message() => match message {
                    Ok(Some(AppendStreamResponse {
                        message: Some(StreamResponse::Acks(acks)),
                    })) => {
                        in_flight.on_acks(&acks);
                        progress_at = Instant::now();
                    }
                    Ok(Some(_)) => break Error::from(Status::internal("a message is not an ack")),
                    Ok(None) => break Error::from(Status::unavailable("the stream has ended")),
                    Err(status) => break Error::from(status),
                },
                batch = batches.recv(), if waiting.is_none() => match batch {
                    Some(batch) => waiting = Some(batch),
                    // The connection has closed, but its last batches are stored.
                    None if is_idle => return,
                    None => return self.drain(stream, in_flight).await,
                },
                () = self.state.stream_wanted.notified(), if is_idle && waiting.is_none() => return,
                () = sleep_until(deadline) => match is_idle {
                    true => return,
                    false => break timed_out("append"),
                },
            }
        };
        debug!(topic = self.key.topic, partition = self.key.partition, %error, "appends failed");
        self.upstream.client().report_failure(&stream.route, &error);
        let is_idle = in_flight.batches.is_empty();
        if let Some(oldest) = in_flight.batches.front() {
            self.pending_resend.expect(oldest.sequence);
        }
        in_flight.fail(&error);
        match waiting {
            // It was not sent, and no batch before it failed.
            Some(batch) if is_idle => *next = Some(batch),
            Some(batch) => {
                // Ignored: the client has stopped waiting.
                let _ = batch.done.send(Err(behind()));
            }
            None => {}
        }
        if !is_idle {
            fail_waiting(batches);
        }
    }

    /// Waits for the acks of the last batches, so that a closed connection ends no append.
    async fn drain(&self, mut stream: OpenStream, mut in_flight: InFlight) {
        while !in_flight.batches.is_empty() {
            match timeout(SILENCE_MAX, stream.responses.message()).await {
                Ok(Ok(Some(AppendStreamResponse {
                    message: Some(StreamResponse::Acks(acks)),
                }))) => {
                    in_flight.on_acks(&acks);
                }
                _ => return,
            }
        }
    }
}

/// Returns true if the stream takes this batch now. A large one is sent alone.
fn has_capacity(stream: &OpenStream, in_flight: &InFlight, batch: &LaneBatch) -> bool {
    let (count, bytes) = (stream.opened.max_in_flight_batches, stream.opened.max_in_flight_bytes);
    let bytes_after = (in_flight.bytes + batch.payload().len()) as u64;
    in_flight.batches.is_empty()
        || (in_flight.batches.len() < count as usize && bytes_after <= bytes)
}

fn send(
    stream: &OpenStream,
    in_flight: &mut InFlight,
    batch: LaneBatch,
    expected: &mut u64,
) -> Result<(), LaneBatch> {
    if stream.requests.is_closed() {
        return Err(batch);
    }
    let first_sequence = batch.sequence.map(|sequence| widen_sequence(sequence, *expected));
    if let Some(first) = first_sequence {
        *expected = first + u64::from(batch.batch.record_count);
    }
    let (bytes, sequence) = (batch.payload().len(), batch.sequence);
    let message = AppendStreamBatch {
        batch: Some(Batch { form: Some(Form::Encoded(batch.batch)) }),
        first_sequence,
        expected_offset: None,
    };
    let request = AppendStreamRequest { message: Some(StreamRequest::Batch(message)) };
    // If the stream ends now, the batch fails with the others.
    let _ = stream.requests.send(request);
    in_flight.batches.push_back(SentBatch { done: batch.done, bytes, sequence });
    in_flight.bytes += bytes;
    Ok(())
}

/// Fails batches that were not sent because an earlier one failed.
fn fail_waiting(batches: &mut Batches) {
    while let Ok(batch) = batches.try_recv() {
        // Ignored: the client has stopped waiting.
        let _ = batch.done.send(Err(behind()));
    }
}

pub(super) fn timed_out(what: &str) -> Error {
    Error::from(Status::deadline_exceeded(format!("{what} timed out")))
}

/// Marks an error of a call that appended nothing.
fn unsent(error: Error) -> Error {
    let mut failure = (*error).clone();
    failure.may_have_applied = false;
    Error::from(failure)
}
