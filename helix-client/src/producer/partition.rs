//! One partition of a producer, with its sequence and one batch in flight at a time.
//!
//! Sequences must arrive without gaps, so a batch waits for the outcome of the previous one.

use std::sync::PoisonError;

use helix_proto::log::v1::{EncodedBatch, ErrorReason, ProducerIdentity};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout_at};
use tracing::warn;

use super::sequence_lookup::next_sequence;
use crate::append::{Ack, AppendOptions};
use crate::client::Client;
use crate::error::{Error, Result};
use crate::identity::Identities;
use crate::topic::TopicRef;

/// One partition of a producer: see the module.
#[derive(Debug)]
pub(super) struct PartitionProducer {
    client: Client,
    topic: String,
    partition: u32,
    /// None if the producer is not idempotent; then batches do not wait for each other.
    identities: Option<Identities>,
    position: Mutex<SequencePosition>,
    /// Time of the last ack.
    acked_at: std::sync::Mutex<Option<Instant>>,
}

/// Identity and sequence of the next batch.
#[derive(Debug, Default)]
struct SequencePosition {
    /// Identity of the last batch.
    identity: Option<ProducerIdentity>,
    /// Sequence of the next record under `identity`.
    next_sequence: u64,
    /// The identity must not be used again, because a sequence could name two different batches.
    ///
    /// Set while a batch is in flight, and kept if its outcome stays unknown.
    needs_new_identity: bool,
    /// Some batches were acked before they were applied (LEADER_WRITTEN, NONE) and may be lost.
    has_early_acks: bool,
    /// Id of the topic that `next_sequence` is for; 0 before the first ack.
    topic_id: u64,
    /// Time and error of the last change to another topic of the name.
    recreated: Option<(Instant, Error)>,
}

impl PartitionProducer {
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

    pub(super) fn topic(&self) -> &str {
        &self.topic
    }

    /// Appends a batch after the earlier ones.
    ///
    /// The deadline counts from `since`, when the batch was queued, or from the previous ack if
    /// that is later: a slow service delays all batches, and an unreachable one fails all of them
    /// with the first. If the future is dropped while the batch is in flight, the partition
    /// continues under a new identity.
    ///
    /// If the topic was deleted and created again, this batch and those that are queued behind it
    /// fail with `TOPIC_RECREATED`. Later batches start with sequence 0 in the new topic.
    pub(super) async fn append(
        &self,
        batch: &EncodedBatch,
        options: &AppendOptions,
        since: Instant,
    ) -> Result<Ack> {
        let pending = |since| PendingAppend { batch, options, since };
        let Some(identities) = &self.identities else {
            return self.send(pending(self.start(since)), None).await;
        };
        let mut position = self.position.lock().await;
        if let Some((at, error)) = &position.recreated
            && since <= *at
        {
            return Err(error.clone().failed_by_earlier_batch().with_may_have_applied(false));
        }
        let pending = pending(self.start(since));
        let first = self.try_append(identities, &mut position, pending).await;
        let why = match &first {
            Err(error) if error.is(ErrorReason::UnknownProducer) && !error.may_have_applied => {
                "the partition has forgotten this producer"
            }
            Err(error) if position.has_lost_acked(error) => {
                "acked batches that were not durable are lost"
            }
            _ => return first,
        };
        // The batch was not applied and no other is in flight, so that a new identity is safe.
        let (topic, partition) = (&self.topic, self.partition);
        warn!(topic, partition, "{why}; continuing under a new identity");
        position.needs_new_identity = true;
        self.try_append(identities, &mut position, pending).await
    }

    /// Returns the sequence of the next record, as known here or by the partition's leader.
    pub(super) async fn next_sequence(&self) -> Result<u64> {
        let Some(identities) = &self.identities else { return Ok(0) };
        let mut position = self.position.lock().await;
        self.take_up(identities, &mut position).await?;
        Ok(position.next_sequence)
    }

    /// Continues after the records that the partition has of a continued identity.
    async fn take_up(
        &self,
        identities: &Identities,
        position: &mut SequencePosition,
    ) -> Result<()> {
        if position.identity.is_some() || !identities.is_continued() {
            return Ok(());
        }
        let identity = identities.current().await?;
        let (next_sequence, topic_id) =
            next_sequence(&self.client, &self.topic, self.partition, identity).await?;
        let recreated = position.recreated.take();
        *position = SequencePosition {
            identity: Some(identity),
            next_sequence,
            topic_id,
            recreated,
            ..SequencePosition::default()
        };
        Ok(())
    }

    async fn try_append(
        &self,
        identities: &Identities,
        position: &mut SequencePosition,
        pending: PendingAppend<'_>,
    ) -> Result<Ack> {
        let deadline = pending.since + self.client.config().request_timeout;
        self.take_up(identities, position).await?;
        let claimed = timeout_at(deadline, position.claim(identities)).await;
        let overdue = |_| Error::timed_out("append").with_may_have_applied(false);
        let identity = claimed.map_err(overdue)??;
        position.needs_new_identity = true;
        let named = (identity, position.next_sequence, position.topic_id);
        let result = self.send(pending, Some(named)).await;
        position.needs_new_identity = match &result {
            Ok(ack) => {
                position.next_sequence += u64::from(pending.batch.record_count);
                position.has_early_acks |= ack.first_offset.is_none();
                position.topic_id = ack.topic_id;
                false
            }
            // The new topic has no sequence of this identity, unless an attempt has reached it.
            Err(error) if error.recreated.is_some() => {
                *position = SequencePosition {
                    identity: position.identity,
                    recreated: Some((Instant::now(), error.clone())),
                    ..SequencePosition::default()
                };
                error.may_have_applied
            }
            Err(error) => error.may_have_applied || is_sequence_conflict(error),
        };
        result
    }

    async fn send(
        &self,
        PendingAppend { batch, options, since }: PendingAppend<'_>,
        named: Option<(ProducerIdentity, u64, u64)>,
    ) -> Result<Ack> {
        let topic_id = named.map_or(0, |(.., topic_id)| topic_id);
        let identity = named.map(|(identity, sequence, _)| (identity, sequence));
        let partition = (TopicRef::with_id(&self.topic, topic_id), self.partition);
        let ack = self.client.append_as(partition, batch, options, identity, since).await?;
        *self.acked_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        Ok(ack)
    }

    /// Returns the time from which a batch's deadline counts.
    fn start(&self, queued_at: Instant) -> Instant {
        let acked_at = *self.acked_at.lock().unwrap_or_else(PoisonError::into_inner);
        acked_at.map_or(queued_at, |acked_at| acked_at.max(queued_at))
    }
}

/// A batch to append, with its options.
#[derive(Clone, Copy)]
struct PendingAppend<'a> {
    batch: &'a EncodedBatch,
    options: &'a AppendOptions,
    /// Start of the deadline.
    since: Instant,
}

impl SequencePosition {
    /// Returns true if this rejection shows the loss of batches acked before they were applied.
    ///
    /// The rejection was decided at the batch's position in the log, after everything that the
    /// partition will ever have of the lost batches. With the gap before it, no attempt at the
    /// rejected batch can have been applied.
    fn has_lost_acked(&self, rejection: &Error) -> bool {
        self.has_early_acks
            && rejection.is(ErrorReason::OutOfOrderSequence)
            && rejection.next_sequence.is_some_and(|next| next < self.next_sequence)
    }

    /// Returns the identity for the next batch: the current one, or a new one with sequence 0.
    async fn claim(&mut self, identities: &Identities) -> Result<ProducerIdentity> {
        if let Some(identity) = self.identity
            && !self.needs_new_identity
        {
            return Ok(identity);
        }
        let identity = identities.replace(self.identity).await?;
        let recreated = self.recreated.take();
        let topic_id = self.topic_id;
        *self = Self { identity: Some(identity), topic_id, recreated, ..Self::default() };
        Ok(identity)
    }
}

/// Returns true for rejections after which the service's sequence differs from ours.
fn is_sequence_conflict(error: &Error) -> bool {
    matches!(error.reason, Some(ErrorReason::OutOfOrderSequence | ErrorReason::UnknownProducer))
}
