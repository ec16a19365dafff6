//! State shared by a session and its driver: unacked batches and pipeline capacity.
//!
//! Contains all decisions about them, without waiting; the driver waits.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use helix_proto::log::v1::append_stream_request::Message;
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::{
    AppendAcks, AppendStreamBatch, AppendStreamOpened, AppendStreamRequest, Batch, EncodedBatch,
    ErrorReason, ProducerIdentity,
};
use tokio::sync::{AcquireError, Notify, Semaphore, SemaphorePermit, mpsc, oneshot};
use tokio::time::Instant;
use tonic::Code;

use super::SessionOptions;
use crate::append::Ack;
use crate::error::{Error, Result};

/// Sends requests to the open stream. Unbounded; the pipeline capacity bounds it.
pub(super) type RequestSender = mpsc::UnboundedSender<AppendStreamRequest>;

/// The pipeline shared by a session and its driver. The lock is never held across an await.
#[derive(Debug)]
pub(super) struct Pipeline {
    state: Mutex<State>,
    batches: Semaphore,
    bytes: Semaphore,
    bytes_max: usize,
    /// Notified on close, on the last ack after the close, and on failure.
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Unacked batches, oldest first. Invariant: their sequences have no gap.
    unacked: VecDeque<Unacked>,
    identity: Option<ProducerIdentity>,
    /// Sequence of the next record under `identity`.
    next_sequence: u64,
    /// Id of the topic that the session was opened for; 0 until the service has stated it.
    topic_id: u64,
    /// None while no stream is open.
    outgoing: Option<RequestSender>,
    batch_bytes_max: usize,
    /// Payload bytes that the service allows in flight, once it has stated them.
    bytes_allowed: Option<usize>,
    /// Some batches were acked before they were applied (LEADER_WRITTEN, NONE): the partition may
    /// expect a sequence below the acked ones.
    has_early_acks: bool,
    is_closed: bool,
    failure: Option<Error>,
}

/// A queued batch without an ack.
#[derive(Debug)]
struct Unacked {
    batch: EncodedBatch,
    first_sequence: u64,
    expected_offset: Option<u64>,
    /// Permits of the byte semaphore that it holds.
    bytes: u32,
    queued_at: Instant,
    /// Sent on a stream that has failed since, so the service may have applied it.
    may_be_applied: bool,
    ack: oneshot::Sender<Result<Ack>>,
}

/// Pipeline capacity for one batch; released on drop unless a batch takes it over.
pub(super) struct PipelinePermit<'a> {
    batch: SemaphorePermit<'a>,
    bytes: SemaphorePermit<'a>,
    permits: u32,
}

/// Next step of a session after a new stream was opened.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Resume {
    /// Unacked batches were resent; the stream is in use.
    Open,
    /// The partition forgot the identity and no batch is in flight: use another identity.
    Renew,
}

impl Pipeline {
    pub(super) fn new(options: &SessionOptions) -> Self {
        let batches = options.in_flight_batches.clamp(1, Semaphore::MAX_PERMITS);
        let bytes_max = options.in_flight_bytes.clamp(1, u32::MAX as usize);
        Self {
            state: Mutex::new(State { topic_id: options.topic_id, ..State::default() }),
            batches: Semaphore::new(batches),
            bytes: Semaphore::new(bytes_max),
            bytes_max,
            changed: Notify::new(),
        }
    }

    /// Waits for capacity in the pipeline.
    pub(super) async fn permit(&self, payload_bytes: usize) -> Result<PipelinePermit<'_>> {
        let bytes_max = self.state().bytes_allowed.unwrap_or(self.bytes_max);
        let permits = u32::try_from(payload_bytes.clamp(1, bytes_max)).unwrap_or(u32::MAX);
        // Only a failure closes the semaphores, and the state has it by then.
        let permit = async {
            let batch = self.batches.acquire().await?;
            let bytes = self.bytes.acquire_many(permits).await?;
            Ok(PipelinePermit { batch, bytes, permits })
        };
        permit.await.map_err(|_: AcquireError| {
            self.failure()
                .unwrap_or_else(|| Error::client(Code::Cancelled, "the session is closed"))
        })
    }

    /// Adds a batch to the pipeline and sends it if a stream is open.
    pub(super) fn push(
        &self,
        batch: EncodedBatch,
        expected_offset: Option<u64>,
        permit: PipelinePermit<'_>,
    ) -> Result<oneshot::Receiver<Result<Ack>>> {
        let (ack, acked) = oneshot::channel();
        let mut state = self.state();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let unacked = Unacked {
            first_sequence: state.next_sequence,
            expected_offset,
            bytes: permit.permits,
            queued_at: Instant::now(),
            may_be_applied: false,
            ack,
            batch,
        };
        state.next_sequence += u64::from(unacked.batch.record_count);
        if let Some(outgoing) = &state.outgoing {
            // Ignored: the stream has just failed, and the next one resends everything.
            let _ = outgoing.send(unacked.request(state.identity.is_some()));
        }
        state.unacked.push_back(unacked);
        drop(state);
        // Released with the ack.
        permit.batch.forget();
        permit.bytes.forget();
        Ok(acked)
    }

    /// Processes acks, which arrive in order.
    ///
    /// # Errors
    /// The service acked more batches than were sent.
    pub(super) fn on_acks(&self, acks: &AppendAcks) -> Result<()> {
        let mut state = self.state();
        for ack in &acks.acks {
            let unacked = state.unacked.pop_front().ok_or_else(|| {
                Error::client(Code::Internal, "received an ack for a batch that was not sent")
            })?;
            state.has_early_acks |= ack.first_offset.is_none();
            self.batches.add_permits(1);
            self.bytes.add_permits(unacked.bytes as usize);
            // Ignored: the caller has dropped the future.
            let _ = unacked.ack.send(Ok(Ack::new(ack, acks.watermarks, state.topic_id)));
        }
        // Only a closed session waits for an empty pipeline.
        if state.is_closed && state.unacked.is_empty() {
            self.changed.notify_waiters();
        }
        Ok(())
    }

    /// Resends unacked batches on a new stream, after checking its next sequence.
    ///
    /// # Errors
    /// The sequence does not match the unacked batches; the session cannot continue.
    pub(super) fn on_opened(
        &self,
        opened: &AppendStreamOpened,
        outgoing: RequestSender,
    ) -> Result<Resume> {
        let mut state = self.state();
        self.apply_limits(&mut state, opened);
        if state.topic_id == 0 {
            state.topic_id = opened.topic_id;
        }
        if state.identity.is_some() && state.check(opened.next_sequence)? == Resume::Renew {
            return Ok(Resume::Renew);
        }
        let has_identity = state.identity.is_some();
        for unacked in &state.unacked {
            // Ignored: this stream has already failed, and the next one resends everything.
            let _ = outgoing.send(unacked.request(has_identity));
        }
        state.outgoing = Some(outgoing);
        Ok(Resume::Open)
    }

    /// Records the end of a stream; batches wait for the next one.
    ///
    /// Returns false if the session cannot resume: without an identity, a batch that may have been
    /// applied must not be resent.
    pub(super) fn on_broken(&self, may_have_applied: bool) -> bool {
        let mut state = self.state();
        // Before the first stream no batch has been sent.
        let was_open = state.outgoing.take().is_some();
        if was_open && may_have_applied {
            for unacked in &mut state.unacked {
                unacked.may_be_applied = true;
            }
        }
        state.identity.is_some() || !state.unacked.iter().any(|unacked| unacked.may_be_applied)
    }

    /// Sets an identity and renumbers the unacked batches from sequence 0.
    ///
    /// Only safe while no unacked batch can still be applied under the previous identity.
    pub(super) fn set_identity(&self, identity: ProducerIdentity) {
        let mut state = self.state();
        state.identity = Some(identity);
        state.has_early_acks = false;
        let mut next_sequence = 0;
        for unacked in &mut state.unacked {
            unacked.may_be_applied = false;
            unacked.first_sequence = next_sequence;
            next_sequence += u64::from(unacked.batch.record_count);
        }
        state.next_sequence = next_sequence;
    }

    /// Ends the session with an error for the oldest batch and everything after it.
    pub(super) fn fail(&self, error: Error) {
        let mut state = self.state();
        state.outgoing = None;
        let mut batch_error = error.clone();
        for unacked in state.unacked.drain(..) {
            let may_have_applied = error.may_have_applied || unacked.may_be_applied;
            // Ignored: the caller has dropped the future.
            let _ = unacked.ack.send(Err(batch_error.with_may_have_applied(may_have_applied)));
            batch_error = error.clone().failed_by_earlier_batch();
        }
        // Batches that are queued later are never sent.
        let later = error.failed_by_earlier_batch().with_may_have_applied(false);
        state.failure.get_or_insert(later);
        drop(state);
        self.batches.close();
        self.bytes.close();
        self.changed.notify_waiters();
    }

    /// Closes the session for new batches.
    pub(super) fn close(&self) {
        self.state().is_closed = true;
        self.changed.notify_waiters();
    }

    /// Waits until the session is closed with everything acked, or has failed.
    pub(super) async fn finished(&self) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.is_finished() {
                return;
            }
            changed.await;
        }
    }

    pub(super) fn is_finished(&self) -> bool {
        let state = self.state();
        state.failure.is_some() || (state.is_closed && state.unacked.is_empty())
    }

    /// Returns the time when the oldest unacked batch was queued.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.state().unacked.front().map(|unacked| unacked.queued_at)
    }

    /// Returns the number of unacked batches.
    pub(super) fn unacked_count(&self) -> usize {
        self.state().unacked.len()
    }

    pub(super) fn identity(&self) -> Option<ProducerIdentity> {
        self.state().identity
    }

    /// Returns the id that the topic of the next stream must have; 0 before the first stream.
    pub(super) fn topic_id(&self) -> u64 {
        self.state().topic_id
    }

    pub(super) fn batch_bytes_max(&self) -> usize {
        self.state().batch_bytes_max
    }

    /// Reduces the pipeline capacity to the service's limits, on the first stream only.
    ///
    /// On later streams batches may already wait for capacity; a service with lower limits
    /// throttles them.
    fn apply_limits(&self, state: &mut State, opened: &AppendStreamOpened) {
        state.batch_bytes_max = opened.max_batch_bytes as usize;
        if state.bytes_allowed.is_none() {
            shrink(&self.batches, opened.max_in_flight_batches.into());
            state.bytes_allowed = Some(shrink(&self.bytes, opened.max_in_flight_bytes));
        }
    }

    /// Returns true if this rejection of the oldest batch shows the loss of acked batches.
    ///
    /// They were acked before they were applied. The rejection was decided at the batch's position
    /// in the log, after everything that the partition will ever have of the lost batches. With the
    /// gap before them, no unacked batch can be applied under this identity.
    pub(super) fn has_lost_acked(&self, rejection: &Error) -> bool {
        let state = self.state();
        state.has_early_acks
            && rejection.is(ErrorReason::OutOfOrderSequence)
            && rejection.next_sequence.is_some_and(|next| next < state.first_unacked())
    }

    /// Returns the error that ended the session.
    pub(super) fn failure(&self) -> Option<Error> {
        self.state().failure.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code under the lock can panic in the middle of a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Returns the sequence of the oldest unacked batch, or of the next one.
    fn first_unacked(&self) -> u64 {
        self.unacked.front().map_or(self.next_sequence, |oldest| oldest.first_sequence)
    }

    /// Compares the sequence that the partition expects with the unacked batches.
    fn check(&self, expected: Option<u64>) -> Result<Resume> {
        let first = self.first_unacked();
        match expected {
            // Acks of batches below `next` were lost; the service acks a second copy with the
            // offsets of the first.
            Some(next) if (first..=self.next_sequence).contains(&next) => Ok(Resume::Open),
            None if first == 0 => Ok(Resume::Open),
            // The early-acked batches are still being replicated or are lost. In the second case
            // the service rejects the next batch as a gap: see `has_lost_acked`.
            next if self.has_early_acks && next.unwrap_or(0) < first => Ok(Resume::Open),
            _ if self.unacked.is_empty() => Ok(Resume::Renew),
            None => Err(Error::known(
                ErrorReason::UnknownProducer,
                "the partition forgot this producer while batches were in flight",
            )
            .with_may_have_applied(true)),
            Some(next) => Err(Error::known(
                ErrorReason::OutOfOrderSequence,
                format!(
                    "the partition expects sequence {next}, but the oldest unacked one is {first}"
                ),
            )
            .with_may_have_applied(true)),
        }
    }
}

impl Unacked {
    fn request(&self, has_identity: bool) -> AppendStreamRequest {
        let batch = AppendStreamBatch {
            batch: Some(Batch { form: Some(Form::Encoded(self.batch.clone())) }),
            first_sequence: has_identity.then_some(self.first_sequence),
            expected_offset: self.expected_offset,
        };
        AppendStreamRequest { message: Some(Message::Batch(batch)) }
    }
}

/// Removes permits until at most `limit` are left (0 is no limit), and returns the rest.
///
/// Requires that all permits are free.
fn shrink(semaphore: &Semaphore, limit: u64) -> usize {
    let present = semaphore.available_permits();
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    if limit == 0 || limit >= present {
        return present;
    }
    present - semaphore.forget_permits(present - limit)
}

#[cfg(test)]
mod tests;
