//! Appends that can be repeated without making a second copy, batch by batch or record by record.
//! One batch per partition is under way at a time; `session` is for pipelines.

mod batcher;
mod lane;

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use helix_proto::log::v1::{Durability, Record};
use tokio::time::Instant;

use crate::append::{Ack, AppendOptions, IntoBatch};
use crate::client::Client;
use crate::error::Result;
use crate::identity::Identities;
use batcher::Batcher;
pub use batcher::Sent;
use lane::Lane;

/// Settings of a [`Producer`].
#[derive(Debug, Clone)]
pub struct ProducerOptions {
    /// Durability to wait for. Default: `Unspecified`, the topic's own default.
    pub durability: Durability,
    /// Whether batches carry an identity and a sequence, so that a retry never makes a second
    /// copy. Without, a batch whose outcome is not known is not sent again. Default: yes.
    pub idempotent: bool,
    /// Stable name, up to 255 bytes: a later producer of the same name fences this one. Default:
    /// empty, anonymous.
    pub name: String,
    /// Fencing token that must hold with every batch, up to 64 bytes. Default: none.
    pub fencing_token: Option<String>,
    /// How long [`Producer::send`] lets a batch wait for more records. Zero: as long as the batch
    /// before it is under way. Default: 1 ms.
    pub linger: Duration,
    /// Serialized bytes at which `send` closes a batch; what the topic allows is the bound.
    /// Default: 256 KiB.
    pub batch_bytes: usize,
    /// Records at which `send` closes a batch, at least 1. Default: 10,000.
    pub batch_records: usize,
    /// Bytes that `send` holds over all partitions before it waits, at least 1: serialized ones,
    /// and 256 for each record, about what one takes in memory beside them. Default: 32 MiB.
    pub buffer_bytes: usize,
    /// Whether the first batch of `send` that fails ends it all: what is queued for any partition
    /// or sent later then fails with the same error and is not appended. Default: no, each batch
    /// succeeds or fails by itself.
    pub stops_at_failure: bool,
}

impl Default for ProducerOptions {
    fn default() -> Self {
        Self {
            durability: Durability::Unspecified,
            idempotent: true,
            name: String::new(),
            fencing_token: None,
            linger: Duration::from_millis(1),
            batch_bytes: 256 << 10,
            batch_records: 10_000,
            buffer_bytes: 32 << 20,
            stops_at_failure: false,
        }
    }
}

/// Writes to any number of partitions. Cheap to clone; clones share identity and order.
#[derive(Debug, Clone)]
pub struct Producer {
    lanes: Arc<Lanes>,
    batcher: Arc<Batcher>,
}

impl Client {
    /// A producer. Asks for its identity with its first batch.
    pub fn producer(&self, options: ProducerOptions) -> Producer {
        let lanes = Arc::new(Lanes::new(self.clone(), &options));
        let batcher = Arc::new(Batcher::new(lanes.clone(), options));
        Producer { lanes, batcher }
    }
}

impl Producer {
    /// Appends one batch, all of it or nothing, and waits for the ack. Batches to one partition
    /// are applied in the order of the calls' first polls.
    ///
    /// Dropping the future leaves open whether the batch is applied.
    ///
    /// # Errors
    /// The service's refusal; `may_have_applied` says whether the outcome is open. After an open
    /// outcome the partition goes on under a new identity, so nothing later can be mistaken for
    /// the lost batch.
    pub async fn append(&self, topic: &str, partition: u32, batch: impl IntoBatch) -> Result<Ack> {
        self.append_with(topic, partition, batch, &self.lanes.options).await
    }

    /// As [`Producer::append`], with options of its own. The producer's fencing token must hold
    /// nevertheless, unless they name another one.
    ///
    /// # Errors
    /// As [`Producer::append`].
    pub async fn append_with(
        &self,
        topic: &str,
        partition: u32,
        batch: impl IntoBatch,
        options: &AppendOptions,
    ) -> Result<Ack> {
        let batch = batch.into_batch();
        let options = self.lanes.fenced(options);
        self.lanes.get(topic, partition).append(&batch, &options, Instant::now()).await
    }

    /// Hands over one record: to the partition of its key (see
    /// [`partitioner::of_key`](crate::partitioner::of_key)), or to one after the other if it has
    /// none. Waits only for room in the buffer; the returned future resolves with the ack of the
    /// batch that the record went into. Dropping it does not take the record back.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`, or why the topic could not be looked up.
    pub async fn send(&self, topic: &str, record: Record) -> Result<Sent> {
        let partition = self.batcher.partition(topic, &record).await?;
        self.batcher.send(topic, partition, record).await
    }

    /// As [`Producer::send`], to a given partition.
    ///
    /// # Errors
    /// As [`Producer::send`].
    pub async fn send_to(&self, topic: &str, partition: u32, record: Record) -> Result<Sent> {
        self.batcher.send(topic, partition, record).await
    }

    /// Waits until everything that was sent before has its ack or its error, without further
    /// linger. Bounded by the deadlines of the batches.
    pub async fn flush(&self) {
        self.batcher.flush().await;
    }
}

/// The lanes of a producer, by partition, made when first used.
#[derive(Debug)]
struct Lanes {
    client: Client,
    /// None: not idempotent.
    identities: Option<Identities>,
    options: AppendOptions,
    by_topic: Mutex<HashMap<String, HashMap<u32, Arc<Lane>>>>,
}

impl Lanes {
    fn new(client: Client, options: &ProducerOptions) -> Self {
        let identities = options.idempotent.then(|| Identities::new(client.clone(), &options.name));
        let unfenced = AppendOptions::durability(options.durability);
        let options = match &options.fencing_token {
            Some(token) => unfenced.fenced_by(token),
            None => unfenced,
        };
        Self { client, identities, options, by_topic: Mutex::default() }
    }

    /// These options, with the producer's token where they have none.
    fn fenced<'a>(&self, options: &'a AppendOptions) -> Cow<'a, AppendOptions> {
        let token = |options: &AppendOptions| options.condition.as_ref()?.fencing_token.clone();
        match token(&self.options) {
            Some(own) if token(options).is_none() => Cow::Owned(options.clone().fenced_by(own)),
            _ => Cow::Borrowed(options),
        }
    }

    fn get(&self, topic: &str, partition: u32) -> Arc<Lane> {
        // A panic elsewhere cannot have left the map half changed.
        let mut by_topic = self.by_topic.lock().unwrap_or_else(PoisonError::into_inner);
        let known = by_topic.get(topic).and_then(|lanes| lanes.get(&partition));
        if let Some(lane) = known {
            return lane.clone();
        }
        let lane = Lane::new(self.client.clone(), self.identities.clone(), topic, partition);
        let lane = Arc::new(lane);
        by_topic.entry(topic.to_owned()).or_default().insert(partition, lane.clone());
        lane
    }
}
