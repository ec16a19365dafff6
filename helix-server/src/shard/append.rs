//! The append path of a shard: a permit, a proposal, an acknowledgement.
//! Apply decides on a batch; this module only proposes it and waits.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::Shard;
use super::sequence_tracker::NextBatch;
use crate::error::{Error, Result};
use crate::flow::{Acquired, FlowPermit, FlowShare};
use crate::limits;
use crate::log::{
    BatchHead, Condition, Head, PartitionId, ProducerStamp, Refusal, Verdict, Watermarks,
};
use crate::raft::{Command, ProposalGuard, ProposalOutcome, ProposeError};
use crate::stages::{BatchStamps, ProposalTimes};

/// Durability that a batch has reached when it is acknowledged, strongest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Durability {
    /// Synced to the disks of a majority.
    QuorumSynced,
    /// In the logs of a majority, not necessarily synced.
    QuorumWritten,
    /// In the leader's log.
    LeaderWritten,
    /// Received by the leader.
    None,
}

impl Durability {
    /// Returns whether a batch is acknowledged before apply has decided on it.
    pub fn is_before_apply(self) -> bool {
        match self {
            Self::QuorumSynced | Self::QuorumWritten => false,
            Self::LeaderWritten | Self::None => true,
        }
    }
}

/// A validated batch to append.
#[derive(Debug, Clone)]
pub struct NewBatch {
    pub partition: PartitionId,
    pub record_count: u32,
    pub version: u32,
    pub compression: i32,
    /// Size of the decompressed payload of a compressed batch, and of the `RecordList` that a batch
    /// of version 2 converts to; else 0. Verified by the caller.
    pub uncompressed_bytes: u32,
    pub payload: Bytes,
    /// CRC-32 over version, record count, compression and payload; verified by the caller.
    pub crc: u32,
    pub producer: Option<ProducerStamp>,
    /// Empty where the batch is acknowledged before apply, since its verdict is not reported.
    pub condition: Condition,
    /// Stamped on the way, if the caller or a trace asks for the batch's stages.
    pub stamps: Option<Arc<BatchStamps>>,
}

/// Permit to have a batch in flight.
#[derive(Debug)]
pub struct AppendPermit(FlowPermit);

/// Acknowledgement of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchAck {
    /// First and next offset; absent where the acknowledgement came before apply.
    pub offsets: Option<(u64, u64)>,
    /// True if the batch had already been appended, with these offsets.
    pub duplicate: bool,
    /// Durability that the batch has reached.
    pub durability: Durability,
    pub watermarks: Watermarks,
    /// Absent where the batch was not proposed, or acknowledged before apply.
    pub times: Option<ProposalTimes>,
}

impl Shard {
    /// Acquires the permit for a batch of `bytes` of a principal, within a bounded wait.
    ///
    /// # Errors
    /// [`Error::NotLeader`] and [`Error::NoLeader`] where this replica cannot append,
    /// [`Error::Throttled`] after the wait, [`Error::DiskFull`], [`Error::Exhausted`],
    /// [`Error::Draining`].
    pub async fn permit(&self, share: FlowShare, bytes: usize) -> Result<AppendPermit> {
        match self.check_writable() {
            // The leader may have disk space.
            Ok(()) | Err(Error::DiskFull { .. } | Error::Exhausted { .. })
                if self.is_isolated() || !self.is_leader() =>
            {
                return Err(self.not_leader());
            }
            checked => checked?,
        }
        let leadership_token = self.leadership_token();
        let wait = match self.flow.acquire(share, bytes) {
            Acquired::Now(permit) => return Ok(AppendPermit(permit)),
            Acquired::Later(wait) => wait,
        };
        tokio::select! {
            biased;
            () = self.draining.cancelled() => Err(Error::Draining),
            () = leadership_token.cancelled() => Err(self.not_leader()),
            waited = tokio::time::timeout(limits::PERMIT_WAIT_MAX, wait) => match waited {
                Ok(Ok(permit)) => Ok(AppendPermit(permit)),
                Ok(Err(_)) => Err(Error::Draining),
                Err(_) => Err(Error::throttled("bytes of this shard")),
            },
        }
    }

    pub(super) fn check_writable(&self) -> Result<()> {
        if self.draining.is_cancelled() {
            return Err(Error::Draining);
        }
        self.wal.writable().map_err(|error| match error {
            helix_wal::Error::DiskFull { .. } => Error::DiskFull { what: error.to_string() },
            helix_wal::Error::Exhausted { .. } => Error::Exhausted { what: error.to_string() },
            helix_wal::Error::Closed => Error::NoLeader { shard: self.id() },
            other => Error::StorageFailed { what: other.to_string(), may_have_applied: false },
        })
    }

    /// Appends one batch and waits for its acknowledgement.
    ///
    /// # Errors
    /// [`Error::OutcomeUnknown`] where it was not committed in time, and those of
    /// [`Self::propose`].
    pub async fn append(
        &self,
        batch: NewBatch,
        durability: Durability,
        permit: AppendPermit,
    ) -> Result<BatchAck> {
        let pending = self.propose(batch, durability, permit).await?;
        match tokio::time::timeout(limits::COMMIT_WAIT_MAX, pending).await {
            Ok(result) => result,
            Err(_) => Err(Error::OutcomeUnknown {
                reason: format!("not committed within {:?}", limits::COMMIT_WAIT_MAX),
            }),
        }
    }

    /// Proposes one batch. Batches are logged in the order in which this returns.
    ///
    /// A batch that asks for an acknowledgement before apply still waits for its verdict unless
    /// this leader knows that it leaves no sequence gap. A crash or another leader may have lost
    /// its predecessors.
    ///
    /// # Errors
    /// [`Error::NotLeader`], [`Error::NoLeader`], [`Error::StorageFailed`], [`Error::Draining`].
    pub async fn propose(
        &self,
        batch: NewBatch,
        durability: Durability,
        permit: AppendPermit,
    ) -> Result<PendingAck> {
        let head = BatchHead {
            partition: batch.partition,
            record_count: batch.record_count,
            version: batch.version,
            compression: batch.compression,
            payload_bytes: u32::try_from(batch.payload.len()).unwrap_or(u32::MAX),
            uncompressed_bytes: batch.uncompressed_bytes,
            proposed_us: self.clock.now_us(),
            producer: batch.producer,
            condition: batch.condition,
            kept: None,
        };
        let next_batch = durability.is_before_apply().then(|| self.next_batch(&head)).flatten();
        let durability = match &next_batch {
            Some(next_batch) if !self.sequences.is_contiguous(next_batch) => {
                Durability::QuorumSynced
            }
            _ => durability,
        };
        let reached = self.reached(durability);
        // Checked also before an acknowledgement that does not wait for apply: a split may refuse.
        let has_identity = head.producer.is_some() || head.condition.expected_offset.is_some();
        if (has_identity || durability.is_before_apply())
            && self.replica.is_ready()
            && let Some(verdict) = self.machine.early_verdict(&head)
        {
            let state = State::Known(Some(acknowledge(&self.this, verdict, reached)));
            return Ok(PendingAck { state });
        }
        let (written, wait_written) = match durability {
            Durability::LeaderWritten => {
                let (sender, receiver) = oneshot::channel();
                (Some(sender), Some(receiver))
            }
            _ => (None, None),
        };
        let payload =
            helix_wal::Payload { crc: batch.crc, crc_seed: crc_seed(&head), bytes: batch.payload };
        let record_count = head.record_count;
        let command = Command { head: Head::Batch(head), payload, guard: None };
        let guard = Arc::new(ProposalGuard::new(permit.0, written, batch.stamps));
        let term_loss: TermLoss = Box::pin(self.proposal_token().cancelled_owned());
        let since = Instant::now();
        let outcome = self
            .replica
            .propose(command, Some(guard))
            .await
            .map_err(|error| self.propose_error(error))?;
        if let Some(next_batch) = &next_batch {
            self.sequences.note(next_batch, record_count);
        }
        let state = match (durability, wait_written) {
            (Durability::None, _) => {
                State::Known(Some(Ok(self.early_ack(batch.partition, reached))))
            }
            (_, Some(written)) => State::Written {
                written: Some(written),
                outcome,
                term_loss,
                ack: self.early_ack(batch.partition, reached),
                shard: self.this.clone(),
            },
            (_, None) => {
                State::Applied { outcome, since, term_loss, reached, shard: self.this.clone() }
            }
        };
        Ok(PendingAck { state })
    }

    /// Returns the batch for the [`super::SequenceTracker`]; `None` without a producer id.
    fn next_batch(&self, head: &BatchHead) -> Option<NextBatch> {
        let (partition, stamp) = (head.partition, head.producer?);
        let applied_sequence = self.next_sequence(partition, &stamp).unwrap_or(0);
        Some(NextBatch { term: self.term(), partition, stamp, applied_sequence })
    }

    /// Returns an acknowledgement that is given before apply.
    fn early_ack(&self, partition: PartitionId, durability: Durability) -> BatchAck {
        let watermarks = self.machine.watermarks(partition).unwrap_or_default();
        BatchAck { offsets: None, duplicate: false, durability, watermarks, times: None }
    }

    /// Returns the moment at which the log's clock was 0; `None` for a log in memory.
    pub fn log_base(&self) -> Option<Instant> {
        Instant::now().checked_sub(self.wal.time()?)
    }

    /// Returns the durability that a batch has reached after a wait for `asked`.
    fn reached(&self, asked: Durability) -> Durability {
        match (asked, self.is_durable()) {
            (Durability::QuorumSynced | Durability::QuorumWritten, true) => {
                Durability::QuorumSynced
            }
            (Durability::QuorumSynced | Durability::QuorumWritten, false) => {
                Durability::QuorumWritten
            }
            (weaker, _) => weaker,
        }
    }

    pub(super) fn propose_error(&self, error: ProposeError) -> Error {
        match error {
            ProposeError::NotLeader { leader: None } => Error::NoLeader { shard: self.id() },
            ProposeError::NotLeader { leader: Some(_) } => {
                Error::NotLeader { shard: self.id(), leader: self.leader_hint() }
            }
            ProposeError::Unknown(reason) => match self.failure() {
                Some(what) => Error::StorageFailed { what, may_have_applied: true },
                None => Error::OutcomeUnknown { reason },
            },
            ProposeError::Stopped(reason) => match self.failure() {
                Some(what) => Error::StorageFailed { what, may_have_applied: false },
                None if self.draining.is_cancelled() => Error::Draining,
                // The replica has stopped and will be restarted. The client retries.
                None => {
                    tracing::debug!(shard_id = self.id(), reason, "rejected a proposal");
                    Error::NoLeader { shard: self.id() }
                }
            },
        }
    }
}

/// Returns the checksum of a batch's fields, which its payload continues.
fn crc_seed(head: &BatchHead) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&head.version.to_le_bytes());
    hasher.update(&head.record_count.to_le_bytes());
    hasher.update(&head.compression.to_le_bytes());
    hasher.finalize()
}

fn acknowledge(shard: &Weak<Shard>, verdict: Verdict, durability: Durability) -> Result<BatchAck> {
    match verdict {
        Verdict::Appended { first_offset, next_offset, watermarks, .. } => Ok(BatchAck {
            offsets: Some((first_offset, next_offset)),
            duplicate: false,
            durability,
            watermarks,
            times: None,
        }),
        Verdict::Duplicate { first_offset, next_offset, watermarks } => Ok(BatchAck {
            offsets: Some((first_offset, next_offset)),
            duplicate: true,
            durability,
            watermarks,
            times: None,
        }),
        Verdict::Refused(Refusal::UnknownPartition { partition }) => Err(shard
            .upgrade()
            .map_or(Error::PartitionDeleted { partition }, |shard| shard.missing(partition))),
        Verdict::Refused(refusal) => Err(refusal.into()),
        Verdict::Nothing | Verdict::Changed | Verdict::Cluster(_) => Err(Error::OutcomeUnknown {
            reason: "apply returned the result of a command for a batch".to_owned(),
        }),
    }
}

/// Resolves to the acknowledgement of a proposed batch.
#[derive(Debug)]
pub struct PendingAck {
    state: State,
}

#[derive(Debug)]
enum State {
    Known(Option<Result<BatchAck>>),
    Applied {
        outcome: ProposalOutcome,
        since: Instant,
        term_loss: TermLoss,
        reached: Durability,
        shard: Weak<Shard>,
    },
    Written {
        written: Option<oneshot::Receiver<()>>,
        outcome: ProposalOutcome,
        term_loss: TermLoss,
        ack: BatchAck,
        shard: Weak<Shard>,
    },
}

/// Ready when the proposing replica can no longer learn outcomes: see [`Shard::proposal_token`].
type TermLoss = Pin<Box<WaitForCancellationFutureOwned>>;

/// Polls the outcome, and fails once this replica can no longer learn it.
fn poll_outcome(
    outcome: &mut ProposalOutcome,
    term_loss: &mut TermLoss,
    shard: &Weak<Shard>,
    context: &mut Context<'_>,
) -> Poll<Result<Verdict>> {
    if let Poll::Ready(outcome) = Pin::new(outcome).poll(context) {
        return Poll::Ready(outcome.map_err(|error| failed(shard, error)));
    }
    term_loss.as_mut().poll(context).map(|()| Err(lost_outcome(shard)))
}

fn lost_outcome(shard: &Weak<Shard>) -> Error {
    match shard.upgrade() {
        Some(shard) => shard.lost_outcome(),
        None => Error::OutcomeUnknown { reason: "the shard stopped".to_owned() },
    }
}

fn failed(shard: &Weak<Shard>, error: ProposeError) -> Error {
    match shard.upgrade() {
        Some(shard) => shard.propose_error(error),
        None => Error::OutcomeUnknown { reason: error.to_string() },
    }
}

impl Future for PendingAck {
    type Output = Result<BatchAck>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.state {
            State::Known(result) => {
                Poll::Ready(result.take().expect("not polled after it was ready"))
            }
            State::Applied { outcome, since, term_loss, reached, shard } => {
                poll_outcome(outcome, term_loss, shard, context).map(|verdict| {
                    let verdict = verdict?;
                    if let Some(shard) = shard.upgrade() {
                        shard.metrics.on_commit(since.elapsed());
                    }
                    let times = ProposalTimes { proposed: *since, group: outcome.group() };
                    let ack = acknowledge(shard, verdict, *reached)?;
                    Ok(BatchAck { times: Some(times), ..ack })
                })
            }
            State::Written { written, outcome, term_loss, ack, shard } => {
                if let Some(receiver) = written
                    && let Poll::Ready(taken) = Pin::new(receiver).poll(context)
                {
                    if taken.is_ok() {
                        return Poll::Ready(Ok(*ack));
                    }
                    // Dropped without a notification: the outcome has the reason.
                    *written = None;
                }
                poll_outcome(outcome, term_loss, shard, context).map_ok(|_| *ack)
            }
        }
    }
}
