//! Appending to a shard: a permit, a proposal, an acknowledgement.
//! What becomes of a batch is decided by apply; here it is only handed in and waited for.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::proposed::Candidate;
use super::{Shard, deposed};
use crate::error::{Error, Result};
use crate::flow::{Share, Taken};
use crate::limits;
use crate::load::throttled;
use crate::log::{
    BatchHead, Condition, Head, PartitionId, ProducerStamp, Refusal, Verdict, Watermarks,
};
use crate::raft::{Command, Held, Outcome, ProposeError};

/// What has happened to a batch when it is acknowledged, strongest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Durability {
    /// On stable storage of a majority.
    QuorumSynced,
    /// In the logs of a majority, not necessarily on stable storage.
    QuorumWritten,
    /// In the leader's log.
    LeaderWritten,
    /// Received.
    None,
}

impl Durability {
    /// Whether the acknowledgement comes before the verdict.
    pub fn is_blind(self) -> bool {
        match self {
            Self::QuorumSynced | Self::QuorumWritten => false,
            Self::LeaderWritten | Self::None => true,
        }
    }
}

/// A checked batch on its way in.
#[derive(Debug, Clone)]
pub struct NewBatch {
    pub partition: PartitionId,
    pub record_count: u32,
    pub version: u32,
    pub compression: i32,
    pub payload: Bytes,
    /// CRC-32 over version, record count, compression and payload; verified by the caller.
    pub crc: u32,
    pub producer: Option<ProducerStamp>,
    /// Empty where the batch is acknowledged before it is applied: nobody would hear the verdict.
    pub condition: Condition,
}

/// A batch's share of the bytes in flight.
#[derive(Debug)]
pub struct Permit(Share);

/// Answer to a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ack {
    /// First and next offset; absent where the acknowledgement came before apply.
    pub offsets: Option<(u64, u64)>,
    /// Whether the batch had been applied before, with these offsets.
    pub duplicate: bool,
    /// What was reached.
    pub durability: Durability,
    pub watermarks: Watermarks,
}

impl Shard {
    /// Takes a share of the bytes in flight, waiting a bounded time for it.
    ///
    /// # Errors
    /// [`Error::NotLeader`] and [`Error::NoLeader`] where it could not be used,
    /// [`Error::Throttled`], [`Error::DiskFull`], [`Error::Draining`].
    pub async fn permit(&self, bytes: usize) -> Result<Permit> {
        match self.check_writable() {
            // Whoever leads may have room.
            Ok(()) | Err(Error::DiskFull { .. }) if self.is_cut_off() || !self.leads() => {
                return Err(self.not_leader());
            }
            checked => checked?,
        }
        let reign = self.reign();
        let wait = match self.flow.take(bytes) {
            Taken::Now(share) => return Ok(Permit(share)),
            Taken::Later(wait) => wait,
        };
        tokio::select! {
            biased;
            () = self.draining.cancelled() => Err(Error::Draining),
            () = reign.cancelled() => Err(self.not_leader()),
            share = tokio::time::timeout(limits::PERMIT_WAIT_MAX, wait) => match share {
                Ok(Ok(share)) => Ok(Permit(share)),
                Ok(Err(_)) => Err(Error::Draining),
                Err(_) => Err(throttled("bytes of this shard")),
            },
        }
    }

    pub(super) fn check_writable(&self) -> Result<()> {
        if self.draining.is_cancelled() {
            return Err(Error::Draining);
        }
        self.wal.writable().map_err(|error| match error {
            helix_wal::Error::DiskFull { .. } => Error::DiskFull { what: error.to_string() },
            helix_wal::Error::Closed => Error::NoLeader { shard: self.id() },
            other => Error::StorageFailed { what: other.to_string(), may_have_applied: false },
        })
    }

    /// Appends one batch and waits for its acknowledgement.
    pub async fn append(
        &self,
        batch: NewBatch,
        durability: Durability,
        permit: Permit,
    ) -> Result<Ack> {
        let pending = self.propose(batch, durability, permit).await?;
        match tokio::time::timeout(limits::COMMIT_WAIT_MAX, pending).await {
            Ok(result) => result,
            Err(_) => Err(Error::OutcomeUnknown {
                reason: format!("not committed within {:?}", limits::COMMIT_WAIT_MAX),
            }),
        }
    }

    /// Hands one batch to the log. Batches are logged in the order in which this returns.
    ///
    /// A batch that is to be acknowledged before it is applied, and of which this leader does not
    /// know that it leaves no gap, is acknowledged by its verdict instead: a crash, or another
    /// leader, may have lost what came before it.
    pub async fn propose(
        &self,
        batch: NewBatch,
        durability: Durability,
        permit: Permit,
    ) -> Result<Pending> {
        let head = BatchHead {
            partition: batch.partition,
            record_count: batch.record_count,
            version: batch.version,
            compression: batch.compression,
            payload_bytes: u32::try_from(batch.payload.len()).unwrap_or(u32::MAX),
            proposed_us: self.clock.now_us(),
            producer: batch.producer,
            condition: batch.condition,
        };
        let candidate = durability.is_blind().then(|| self.candidate(&head)).flatten();
        let durability = match &candidate {
            Some(candidate) if !self.proposed.leads_to(candidate) => Durability::QuorumSynced,
            _ => durability,
        };
        let reached = self.reached(durability);
        if (head.producer.is_some() || head.condition.expected_offset.is_some())
            && self.replica.is_ready()
            && let Some(verdict) = self.machine.foregone(&head)
        {
            let state = State::Known(Some(acknowledge(&self.this, verdict, reached)));
            return Ok(Pending { state });
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
        let command = Command { head: Head::Batch(head), payload, held: None };
        let held = Arc::new(Held::new(permit.0, written));
        let reign: Reign = Box::pin(self.reign().cancelled_owned());
        let since = Instant::now();
        let outcome = self
            .replica
            .propose(command, Some(held))
            .await
            .map_err(|error| self.propose_error(error))?;
        if let Some(candidate) = &candidate {
            self.proposed.note(candidate, record_count);
        }
        let state = match (durability, wait_written) {
            (Durability::None, _) => State::Known(Some(Ok(self.blind(batch.partition, reached)))),
            (_, Some(written)) => State::Written {
                written: Some(written),
                outcome,
                reign,
                ack: self.blind(batch.partition, reached),
                shard: self.this.clone(),
            },
            (_, None) => {
                State::Applied { outcome, since, reign, reached, shard: self.this.clone() }
            }
        };
        Ok(Pending { state })
    }

    /// The batch as [`super::Proposed`] sees it. None without an identity.
    fn candidate(&self, head: &BatchHead) -> Option<Candidate> {
        let (partition, stamp) = (head.partition, head.producer?);
        let next_sequence = self.next_sequence(partition, stamp.producer_id, stamp.epoch);
        let applied_sequence = next_sequence.unwrap_or(0);
        Some(Candidate { term: self.term(), partition, stamp, applied_sequence })
    }

    /// An acknowledgement given before apply.
    fn blind(&self, partition: PartitionId, durability: Durability) -> Ack {
        let watermarks = self.machine.watermarks(partition).unwrap_or_default();
        Ack { offsets: None, duplicate: false, durability, watermarks }
    }

    /// What this shard can say of a batch for which `asked` was waited.
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
                // It has stopped, and will be started again; whoever leads by then takes it.
                None => {
                    tracing::debug!(shard_id = self.id(), reason, "a proposal was not taken");
                    Error::NoLeader { shard: self.id() }
                }
            },
        }
    }
}

/// What the checksum of a batch has come to before its payload.
fn crc_seed(head: &BatchHead) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&head.version.to_le_bytes());
    hasher.update(&head.record_count.to_le_bytes());
    hasher.update(&head.compression.to_le_bytes());
    hasher.finalize()
}

fn acknowledge(shard: &Weak<Shard>, verdict: Verdict, durability: Durability) -> Result<Ack> {
    match verdict {
        Verdict::Appended { first_offset, next_offset, watermarks, .. } => Ok(Ack {
            offsets: Some((first_offset, next_offset)),
            duplicate: false,
            durability,
            watermarks,
        }),
        Verdict::Duplicate { first_offset, next_offset, watermarks } => Ok(Ack {
            offsets: Some((first_offset, next_offset)),
            duplicate: true,
            durability,
            watermarks,
        }),
        Verdict::Refused(Refusal::UnknownPartition { partition }) => Err(shard
            .upgrade()
            .map_or(Error::PartitionDeleted { partition }, |shard| shard.missing(partition))),
        Verdict::Refused(refusal) => Err(refusal.into()),
        Verdict::Nothing | Verdict::Changed | Verdict::Cluster(_) => Err(Error::OutcomeUnknown {
            reason: "apply answered a batch as if it were a command".to_owned(),
        }),
    }
}

/// The acknowledgement of a proposed batch, to be awaited.
#[derive(Debug)]
pub struct Pending {
    state: State,
}

#[derive(Debug)]
enum State {
    Known(Option<Result<Ack>>),
    Applied {
        outcome: Outcome,
        since: Instant,
        reign: Reign,
        reached: Durability,
        shard: Weak<Shard>,
    },
    Written {
        written: Option<oneshot::Receiver<()>>,
        outcome: Outcome,
        reign: Reign,
        ack: Ack,
        shard: Weak<Shard>,
    },
}

/// Ready when the replica that proposed has stopped leading.
type Reign = Pin<Box<WaitForCancellationFutureOwned>>;

/// The outcome, unless nobody here can say it any more.
fn poll_outcome(
    outcome: &mut Outcome,
    reign: &mut Reign,
    shard: &Weak<Shard>,
    context: &mut Context<'_>,
) -> Poll<Result<Verdict>> {
    if let Poll::Ready(outcome) = Pin::new(outcome).poll(context) {
        return Poll::Ready(outcome.map_err(|error| failed(shard, error)));
    }
    reign.as_mut().poll(context).map(|()| Err(deposed()))
}

fn failed(shard: &Weak<Shard>, error: ProposeError) -> Error {
    match shard.upgrade() {
        Some(shard) => shard.propose_error(error),
        None => Error::OutcomeUnknown { reason: error.to_string() },
    }
}

impl Future for Pending {
    type Output = Result<Ack>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.state {
            State::Known(result) => {
                Poll::Ready(result.take().expect("a future is not polled after it was ready"))
            }
            State::Applied { outcome, since, reign, reached, shard } => {
                poll_outcome(outcome, reign, shard, context).map(|verdict| {
                    let verdict = verdict?;
                    if let Some(shard) = shard.upgrade() {
                        shard.metrics.on_commit(since.elapsed());
                    }
                    acknowledge(shard, verdict, *reached)
                })
            }
            State::Written { written, outcome, reign, ack, shard } => {
                if let Some(receiver) = written
                    && let Poll::Ready(taken) = Pin::new(receiver).poll(context)
                {
                    if taken.is_ok() {
                        return Poll::Ready(Ok(*ack));
                    }
                    // Dropped without a word: the outcome says why.
                    *written = None;
                }
                poll_outcome(outcome, reign, shard, context).map_ok(|_| *ack)
            }
        }
    }
}
