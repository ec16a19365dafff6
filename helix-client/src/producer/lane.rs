//! One partition of a producer: its sequence, and the rule that one batch is under way at a time.
//! Sequences must arrive without gaps, so the next batch waits until the last one's fate is known.

use std::sync::PoisonError;

use helix_proto::log::v1::{EncodedBatch, ErrorReason, ProducerIdentity};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout_at};
use tracing::warn;

use crate::append::{Ack, AppendOptions};
use crate::client::Client;
use crate::error::{Error, Result};
use crate::identity::Identities;

/// See the module.
#[derive(Debug)]
pub(super) struct Lane {
    client: Client,
    topic: String,
    partition: u32,
    /// None: not idempotent, and nothing waits.
    identities: Option<Identities>,
    position: Mutex<Position>,
    /// When the last batch was acked.
    acked_at: std::sync::Mutex<Option<Instant>>,
}

/// Where a lane stands.
#[derive(Debug, Default)]
struct Position {
    /// Identity that the lane has used last.
    identity: Option<ProducerIdentity>,
    /// Sequence of the next record under it.
    next_sequence: u64,
    /// Set while a batch is under way and kept when its outcome stays open: the identity must not
    /// be used again, because its sequence could stand for two different batches.
    is_spoiled: bool,
    /// Batches were acked before they were applied (LEADER_WRITTEN, NONE), and may be lost.
    has_early_acks: bool,
}

impl Lane {
    pub(super) fn new(
        client: Client,
        identities: Option<Identities>,
        topic: &str,
        partition: u32,
    ) -> Self {
        let topic = topic.to_owned();
        let (position, acked_at) = Default::default();
        Self { client, topic, partition, identities, position, acked_at }
    }

    /// Appends a batch after those that came before. Its deadline counts from `since`, when it was
    /// handed over, or from the last ack before it if that came later: while the service is slow
    /// all are waited for, and when it is gone all fail with the first. If the future is dropped
    /// while the batch is under way, the lane goes on under a new identity.
    pub(super) async fn append(
        &self,
        batch: &EncodedBatch,
        options: &AppendOptions,
        since: Instant,
    ) -> Result<Ack> {
        let parcel = |since| Parcel { batch, options, since };
        let Some(identities) = &self.identities else {
            return self.send(parcel(self.start(since)), None).await;
        };
        let mut position = self.position.lock().await;
        let parcel = parcel(self.start(since));
        let first = self.try_append(identities, &mut position, parcel).await;
        let why = match &first {
            Err(error) if error.is(ErrorReason::UnknownProducer) && !error.may_have_applied => {
                "the partition has forgotten this producer"
            }
            Err(error) if position.has_lost_acked(error) => "batches are lost that had a weak ack",
            _ => return first,
        };
        // This batch was surely not applied, and nothing else is under way here: a new identity
        // cannot double anything.
        let (topic, partition) = (&self.topic, self.partition);
        warn!(topic, partition, "{why}; going on under a new identity");
        position.is_spoiled = true;
        self.try_append(identities, &mut position, parcel).await
    }

    async fn try_append(
        &self,
        identities: &Identities,
        position: &mut Position,
        parcel: Parcel<'_>,
    ) -> Result<Ack> {
        let deadline = parcel.since + self.client.config().request_timeout;
        let claimed = timeout_at(deadline, position.claim(identities)).await;
        let overdue = |_| Error::timed_out("append").with_may_have_applied(false);
        let identity = claimed.map_err(overdue)??;
        position.is_spoiled = true;
        let result = self.send(parcel, Some((identity, position.next_sequence))).await;
        position.is_spoiled = match &result {
            Ok(ack) => {
                position.next_sequence += u64::from(parcel.batch.record_count);
                position.has_early_acks |= ack.first_offset.is_none();
                false
            }
            Err(error) => error.may_have_applied || spoils(error),
        };
        result
    }

    async fn send(
        &self,
        Parcel { batch, options, since }: Parcel<'_>,
        identity: Option<(ProducerIdentity, u64)>,
    ) -> Result<Ack> {
        let place = (self.topic.as_str(), self.partition);
        let ack = self.client.append_as(place, batch, options, identity, since).await?;
        *self.acked_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        Ok(ack)
    }

    fn start(&self, handed_over: Instant) -> Instant {
        let acked_at = *self.acked_at.lock().unwrap_or_else(PoisonError::into_inner);
        acked_at.map_or(handed_over, |acked_at| acked_at.max(handed_over))
    }
}

/// What is to be appended.
#[derive(Clone, Copy)]
struct Parcel<'a> {
    batch: &'a EncodedBatch,
    options: &'a AppendOptions,
    /// When it was handed over.
    since: Instant,
}

impl Position {
    /// Whether this refusal says that batches are lost which were acked before they were applied.
    /// It was judged at its place in the log, behind all that the partition will ever have of
    /// them: no attempt to send the refused batch can have counted, with a gap before it.
    fn has_lost_acked(&self, refusal: &Error) -> bool {
        self.has_early_acks
            && refusal.is(ErrorReason::OutOfOrderSequence)
            && refusal.next_sequence.is_some_and(|next| next < self.next_sequence)
    }

    /// The identity for the next batch; a new one, with its sequence at 0, if the old is spoiled.
    async fn claim(&mut self, identities: &Identities) -> Result<ProducerIdentity> {
        if let Some(identity) = self.identity
            && !self.is_spoiled
        {
            return Ok(identity);
        }
        let identity = identities.other_than(self.identity).await?;
        *self = Self { identity: Some(identity), ..Self::default() };
        Ok(identity)
    }
}

/// Refusals after which the service counts otherwise than we do.
fn spoils(error: &Error) -> bool {
    matches!(error.reason, Some(ErrorReason::OutOfOrderSequence | ErrorReason::UnknownProducer))
}
