//! One partition of a producer: its sequence, and the rule that one batch is under way at a time.
//! Sequences must arrive without gaps, so the next batch waits until the last one's fate is known.

use helix_proto::log::v1::{EncodedBatch, ErrorReason, ProducerIdentity};
use tokio::sync::Mutex;
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
}

impl Lane {
    pub(super) fn new(
        client: Client,
        identities: Option<Identities>,
        topic: &str,
        partition: u32,
    ) -> Self {
        let topic = topic.to_owned();
        Self { client, topic, partition, identities, position: Mutex::default() }
    }

    /// Appends a batch after those that came before. If the future is dropped while the batch is
    /// under way, the lane goes on under a new identity.
    pub(super) async fn append(
        &self,
        batch: &EncodedBatch,
        options: &AppendOptions,
    ) -> Result<Ack> {
        let Some(identities) = &self.identities else {
            return self.send(batch, options, None).await;
        };
        let mut position = self.position.lock().await;
        let first = self.try_append(identities, &mut position, batch, options).await;
        match first {
            // This batch was surely not applied, and nothing else is under way here: a new
            // identity cannot double anything.
            Err(error) if error.is(ErrorReason::UnknownProducer) && !error.may_have_applied => {
                warn!(
                    topic = self.topic,
                    partition = self.partition,
                    "the partition has forgotten this producer; going on under a new identity"
                );
                position.is_spoiled = true;
                self.try_append(identities, &mut position, batch, options).await
            }
            result => result,
        }
    }

    async fn try_append(
        &self,
        identities: &Identities,
        position: &mut Position,
        batch: &EncodedBatch,
        options: &AppendOptions,
    ) -> Result<Ack> {
        let identity = position.claim(identities).await?;
        position.is_spoiled = true;
        let result = self.send(batch, options, Some((identity, position.next_sequence))).await;
        position.is_spoiled = match &result {
            Ok(_) => {
                position.next_sequence += u64::from(batch.record_count);
                false
            }
            Err(error) => error.may_have_applied || spoils(error),
        };
        result
    }

    async fn send(
        &self,
        batch: &EncodedBatch,
        options: &AppendOptions,
        identity: Option<(ProducerIdentity, u64)>,
    ) -> Result<Ack> {
        self.client.append_as(&self.topic, self.partition, batch, options, identity).await
    }
}

impl Position {
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
