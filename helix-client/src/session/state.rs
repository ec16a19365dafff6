//! What a session's handle and its driver share: the batches that are not acked, and the room.
//! All decisions about them are here and synchronous; the driver does the waiting.

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

/// Where a handle sends while a stream is open. Unbounded by itself; the room bounds it.
pub(super) type Outgoing = mpsc::UnboundedSender<AppendStreamRequest>;

/// Shared by a session and its driver. The lock is never held across a wait.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    batches: Semaphore,
    bytes: Semaphore,
    bytes_max: usize,
    /// Told when the session is closed, when the last batch is acked after that, and on failure.
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Oldest first. Invariant: sequences follow each other without a gap.
    unacked: VecDeque<Unacked>,
    identity: Option<ProducerIdentity>,
    /// Sequence of the next record under `identity`.
    next_sequence: u64,
    /// None between two streams.
    outgoing: Option<Outgoing>,
    batch_bytes_max: usize,
    /// Payload bytes in flight, once the service has said what it allows.
    bytes_allowed: Option<usize>,
    /// Batches were acked before they were applied (LEADER_WRITTEN, NONE): what the partition
    /// expects next may lie below what was acked.
    has_early_acks: bool,
    is_closed: bool,
    failure: Option<Error>,
}

/// A batch that was handed over.
#[derive(Debug)]
struct Unacked {
    batch: EncodedBatch,
    first_sequence: u64,
    expected_offset: Option<u64>,
    /// Permits of the two semaphores that it holds.
    bytes: u32,
    handed_over: Instant,
    /// Sent on a stream that has broken since: the service may have applied it.
    is_in_doubt: bool,
    answer: oneshot::Sender<Result<Ack>>,
}

/// Room for one batch.
pub(super) struct Room<'a> {
    batch: SemaphorePermit<'a>,
    bytes: SemaphorePermit<'a>,
    permits: u32,
}

/// How a session goes on after a stream has ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Resume {
    /// What was not acked has been sent again; the stream is in use.
    Open,
    /// The partition does not know the identity and nothing is under way: take another one.
    Renew,
}

impl Shared {
    pub(super) fn new(options: &SessionOptions) -> Self {
        let batches = options.in_flight_batches.clamp(1, Semaphore::MAX_PERMITS);
        let bytes_max = options.in_flight_bytes.clamp(1, u32::MAX as usize);
        Self {
            state: Mutex::default(),
            batches: Semaphore::new(batches),
            bytes: Semaphore::new(bytes_max),
            bytes_max,
            changed: Notify::new(),
        }
    }

    /// Waits for room in the pipeline.
    pub(super) async fn room(&self, payload_bytes: usize) -> Result<Room<'_>> {
        let bytes_max = self.state().bytes_allowed.unwrap_or(self.bytes_max);
        let permits = u32::try_from(payload_bytes.clamp(1, bytes_max)).unwrap_or(u32::MAX);
        // Closed only by a failure, which the state then has.
        let room = async {
            let batch = self.batches.acquire().await?;
            let bytes = self.bytes.acquire_many(permits).await?;
            Ok(Room { batch, bytes, permits })
        };
        room.await.map_err(|_: AcquireError| {
            self.failure()
                .unwrap_or_else(|| Error::client(Code::Cancelled, "the session is closed"))
        })
    }

    /// Takes a batch into the pipeline and sends it if a stream is open.
    pub(super) fn hand_over(
        &self,
        batch: EncodedBatch,
        expected_offset: Option<u64>,
        room: Room<'_>,
    ) -> Result<oneshot::Receiver<Result<Ack>>> {
        let (answer, acked) = oneshot::channel();
        let mut state = self.state();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let unacked = Unacked {
            first_sequence: state.next_sequence,
            expected_offset,
            bytes: room.permits,
            handed_over: Instant::now(),
            is_in_doubt: false,
            answer,
            batch,
        };
        state.next_sequence += u64::from(unacked.batch.record_count);
        if let Some(outgoing) = &state.outgoing {
            // Ignored: the stream has just broken, and the next one sends everything again.
            let _ = outgoing.send(unacked.request(state.identity.is_some()));
        }
        state.unacked.push_back(unacked);
        drop(state);
        // Given back with the ack.
        room.batch.forget();
        room.bytes.forget();
        Ok(acked)
    }

    /// Takes acks from the stream, in order.
    ///
    /// # Errors
    /// The service has acked more than was sent.
    pub(super) fn on_acks(&self, acks: &AppendAcks) -> Result<()> {
        let mut state = self.state();
        for ack in &acks.acks {
            let unacked = state.unacked.pop_front().ok_or_else(|| {
                Error::client(Code::Internal, "an ack for a batch that was not sent")
            })?;
            state.has_early_acks |= ack.first_offset.is_none();
            self.batches.add_permits(1);
            self.bytes.add_permits(unacked.bytes as usize);
            // Ignored: the caller does not want to know.
            let _ = unacked.answer.send(Ok(Ack::new(ack, acks.watermarks)));
        }
        // Nobody waits for an empty pipeline before that.
        if state.is_closed && state.unacked.is_empty() {
            self.changed.notify_waiters();
        }
        Ok(())
    }

    /// A stream is open: checks that both sides agree on what was applied, and sends again what
    /// was not acked.
    ///
    /// # Errors
    /// The two sides do not agree; the session cannot go on.
    pub(super) fn on_opened(
        &self,
        opened: &AppendStreamOpened,
        outgoing: Outgoing,
    ) -> Result<Resume> {
        let mut state = self.state();
        self.take_limits(&mut state, opened);
        if state.identity.is_some() && state.check(opened.next_sequence)? == Resume::Renew {
            return Ok(Resume::Renew);
        }
        let has_identity = state.identity.is_some();
        for unacked in &state.unacked {
            // Ignored: this stream has broken already, and the next one begins anew.
            let _ = outgoing.send(unacked.request(has_identity));
        }
        state.outgoing = Some(outgoing);
        Ok(Resume::Open)
    }

    /// A stream has ended. From now on batches wait for the next one. False if it cannot be
    /// resumed: without identity, a batch that may have been applied must not be sent again.
    pub(super) fn on_broken(&self, may_have_applied: bool) -> bool {
        let mut state = self.state();
        // Before the first stream nothing has been sent.
        let was_open = state.outgoing.take().is_some();
        if was_open && may_have_applied {
            for unacked in &mut state.unacked {
                unacked.is_in_doubt = true;
            }
        }
        state.identity.is_some() || !state.unacked.iter().any(|unacked| unacked.is_in_doubt)
    }

    /// Takes an identity: sequences start at 0. Only while nothing that is under way can count
    /// under the one before.
    pub(super) fn set_identity(&self, identity: ProducerIdentity) {
        let mut state = self.state();
        state.identity = Some(identity);
        state.has_early_acks = false;
        let mut next_sequence = 0;
        for unacked in &mut state.unacked {
            unacked.is_in_doubt = false;
            unacked.first_sequence = next_sequence;
            next_sequence += u64::from(unacked.batch.record_count);
        }
        state.next_sequence = next_sequence;
    }

    /// Ends the session: the oldest batch gets the error, and so does everything later.
    pub(super) fn fail(&self, error: Error) {
        let mut state = self.state();
        state.outgoing = None;
        let mut own = error.clone();
        for unacked in state.unacked.drain(..) {
            let may_have_applied = error.may_have_applied || unacked.is_in_doubt;
            // Ignored: the caller does not want to know.
            let _ = unacked.answer.send(Err(own.with_may_have_applied(may_have_applied)));
            own = error.clone().of_an_earlier_batch();
        }
        // What was never handed over was never applied.
        let later = error.of_an_earlier_batch().with_may_have_applied(false);
        state.failure.get_or_insert(later);
        drop(state);
        self.batches.close();
        self.bytes.close();
        self.changed.notify_waiters();
    }

    /// No more batches will come.
    pub(super) fn close(&self) {
        self.state().is_closed = true;
        self.changed.notify_waiters();
    }

    /// Waits until the session is closed and everything is acked, or it has failed.
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

    /// When the oldest batch was handed over.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.state().unacked.front().map(|unacked| unacked.handed_over)
    }

    /// How many batches are under way.
    pub(super) fn unacked_count(&self) -> usize {
        self.state().unacked.len()
    }

    pub(super) fn identity(&self) -> Option<ProducerIdentity> {
        self.state().identity
    }

    pub(super) fn batch_bytes_max(&self) -> usize {
        self.state().batch_bytes_max
    }

    /// Shrinks the room to what the service allows, once: later streams meet batches that already
    /// wait for room, and a service that allows less by then throttles them.
    fn take_limits(&self, state: &mut State, opened: &AppendStreamOpened) {
        state.batch_bytes_max = opened.max_batch_bytes as usize;
        if state.bytes_allowed.is_none() {
            shrink(&self.batches, opened.max_in_flight_batches.into());
            state.bytes_allowed = Some(shrink(&self.bytes, opened.max_in_flight_bytes));
        }
    }

    /// Whether this refusal of the oldest batch says that batches are lost which were acked before
    /// they were applied. It was judged at its place in the log, behind all that the partition will
    /// ever have of them: no copy of what is under way can count any more, with a gap before it.
    pub(super) fn has_lost_acked(&self, refusal: &Error) -> bool {
        let state = self.state();
        state.has_early_acks
            && refusal.is(ErrorReason::OutOfOrderSequence)
            && refusal.next_sequence.is_some_and(|next| next < state.first_unacked())
    }

    /// What has ended the session, if anything has.
    pub(super) fn failure(&self) -> Option<Error> {
        self.state().failure.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that runs under the lock can panic half way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Sequence of the oldest batch that is not acked, or of the next one.
    fn first_unacked(&self) -> u64 {
        self.unacked.front().map_or(self.next_sequence, |oldest| oldest.first_sequence)
    }

    /// Compares the sequence that the partition expects with what is under way.
    fn check(&self, expected: Option<u64>) -> Result<Resume> {
        let first = self.first_unacked();
        match expected {
            // Between the two: the acks of what lies below are lost, and a second copy of it is
            // answered with the first one's offsets.
            Some(next) if (first..=self.next_sequence).contains(&next) => Ok(Resume::Open),
            None if first == 0 => Ok(Resume::Open),
            // Either still on its way there, or lost as such acks allow. What comes next tells: it
            // is refused as a gap in the second case, see `has_lost_acked`.
            next if self.has_early_acks && next.unwrap_or(0) < first => Ok(Resume::Open),
            _ if self.unacked.is_empty() => Ok(Resume::Renew),
            None => Err(Error::known(
                ErrorReason::UnknownProducer,
                "the partition has forgotten this producer while batches were under way",
            )
            .with_may_have_applied(true)),
            Some(next) => Err(Error::known(
                ErrorReason::OutOfOrderSequence,
                format!("the partition expects sequence {next}, under way is {first}"),
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

/// Takes free permits away until at most `limit` are left (0 is no limit), and says how many are.
/// All of them are free when this is called.
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
