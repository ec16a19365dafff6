//! Idempotent producers: append batches, or send single records that are batched.
//!
//! Each partition has one batch in flight at a time; use `session` for pipelines.

mod batcher;
mod partition;
mod sequence_lookup;

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use helix_proto::log::v1::{Durability, ProducerIdentity, Record};
use tokio::time::Instant;

use crate::append::{Ack, AppendOptions, IntoBatch};
use crate::client::Client;
use crate::compression::{BatchCompressor, Compression};
use crate::error::Result;
use crate::identity::Identities;
use batcher::Batcher;
pub use batcher::DeliveryFuture;
use partition::PartitionProducer;

/// Settings of a [`Producer`].
#[derive(Debug, Clone)]
pub struct ProducerOptions {
    /// Durability to wait for. Default: `Unspecified`, the topic's own default.
    pub durability: Durability,
    /// Send an identity and sequences, so that a retry never stores a second copy. Without them, a
    /// batch with an unknown outcome is not retried. Default: true.
    pub idempotent: bool,
    /// Stable name, up to 255 bytes: a later producer of the same name fences this one. Default:
    /// empty, anonymous.
    pub name: String,
    /// Continue under the identity of an earlier producer, from [`Producer::identity`], with the
    /// sequences that the partitions have of it. The producer then never takes another identity.
    /// Requires `idempotent`. Default: none, a new identity.
    pub identity: Option<ProducerIdentity>,
    /// Fencing token that must hold with every batch, up to 64 bytes. Default: none.
    pub fencing_token: Option<String>,
    /// Compression of batches that are built from records. Default: none.
    pub compression: Compression,
    /// Longest wait of a [`Producer::send`] batch for more records. Zero: only while the previous
    /// batch is in flight. Default: 1 ms.
    pub linger: Duration,
    /// Serialized bytes, before compression, at which `send` closes a batch; at most the topic's
    /// batch limit.
    /// Default: 256 KiB.
    pub batch_bytes: usize,
    /// Records at which `send` closes a batch, at least 1. Default: 10,000.
    pub batch_records: usize,
    /// Bytes that `send` buffers over all partitions before it waits, at least 1. Counts serialized
    /// bytes plus 256 per record for its overhead. Default: 32 MiB.
    pub buffer_bytes: usize,
    /// Stop at the first failed batch of `send`: records that are queued for any partition or sent
    /// later fail with the same error and are not appended. Default: false, batches fail
    /// independently.
    pub stops_at_failure: bool,
    /// Age of a topic's number of partitions from which `send` asks for it again, in the
    /// background. Keys move to other partitions once partitions were added. At least 1 s.
    /// Default: 30 s.
    pub partition_count_age_max: Duration,
}

impl Default for ProducerOptions {
    fn default() -> Self {
        Self {
            durability: Durability::Unspecified,
            idempotent: true,
            name: String::new(),
            identity: None,
            fencing_token: None,
            compression: Compression::None,
            linger: Duration::from_millis(1),
            batch_bytes: 256 << 10,
            batch_records: 10_000,
            buffer_bytes: 32 << 20,
            stops_at_failure: false,
            partition_count_age_max: Duration::from_secs(30),
        }
    }
}

/// Appends to any number of partitions. Cheap to clone; clones share identity and order.
#[derive(Debug, Clone)]
pub struct Producer {
    partitions: Arc<PartitionProducers>,
    batcher: Arc<Batcher>,
}

impl Client {
    /// Returns a producer, which requests its identity with its first batch.
    pub fn producer(&self, options: ProducerOptions) -> Producer {
        let partitions = Arc::new(PartitionProducers::new(self.clone(), &options));
        let batcher = Arc::new(Batcher::new(partitions.clone(), options));
        Producer { partitions, batcher }
    }
}

impl Producer {
    /// Appends one batch atomically and waits for the ack.
    ///
    /// Batches to one partition are applied in the order in which the futures are first polled. If
    /// the future is dropped, the batch may or may not be applied.
    ///
    /// # Errors
    /// The service's rejection. With `may_have_applied` the outcome is unknown; sending the batch
    /// again may store it twice, since the partition then continues under a new identity.
    pub async fn append(&self, topic: &str, partition: u32, batch: impl IntoBatch) -> Result<Ack> {
        self.append_with(topic, partition, batch, &self.partitions.options).await
    }

    /// Like [`Producer::append`], with its own options.
    ///
    /// The producer's fencing token still applies, unless the options have another one.
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
        let since = Instant::now();
        let format = self.partitions.client.batch_format(topic, since).await?;
        let batch = self.partitions.compressor.build(batch, format)?;
        let options = self.partitions.fenced(options);
        self.partitions.get(topic, partition).append(&batch, &options, since).await
    }

    /// Queues one record for the partition of its key, or for partitions in turn if it has none.
    ///
    /// See [`partitioner::of_key`](crate::partitioner::of_key). Waits only for buffer space. The
    /// returned future resolves with the ack of the record's batch; dropping it does not cancel the
    /// record.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`, or the last failure if the topic cannot be looked up. With
    /// [`ProducerOptions::stops_at_failure`] also the error of the first failed batch.
    pub async fn send(&self, topic: &str, record: Record) -> Result<DeliveryFuture> {
        let partition = self.batcher.partition(topic, &record).await?;
        self.batcher.send(topic, partition, record).await
    }

    /// Returns the partition that [`Producer::send`] would select for the record now.
    ///
    /// Counts a record without a key as sent: such records fill a batch for one partition before
    /// the next one gets some.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`, or the last failure if the topic cannot be looked up.
    pub async fn select_partition(&self, topic: &str, record: &Record) -> Result<u32> {
        self.batcher.partition(topic, record).await
    }

    /// Queues one record for a given partition: see [`Producer::send`].
    ///
    /// # Errors
    /// With [`ProducerOptions::stops_at_failure`] the error of the first failed batch.
    pub async fn send_to(
        &self,
        topic: &str,
        partition: u32,
        record: Record,
    ) -> Result<DeliveryFuture> {
        self.batcher.send(topic, partition, record).await
    }

    /// Returns the identity, and requests it if there is none yet. None if the producer is not
    /// idempotent. A later producer can continue it: see [`ProducerOptions::identity`].
    ///
    /// # Errors
    /// The last failure if no node responds within the request timeout.
    pub async fn identity(&self) -> Result<Option<ProducerIdentity>> {
        match &self.partitions.identities {
            Some(identities) => identities.current().await.map(Some),
            None => Ok(None),
        }
    }

    /// Returns how many records a partition has of this producer's identity: the sequence of the
    /// next one. A record that is still in flight is not counted.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`, `PARTITION_NOT_FOUND`, or the last failure if the leader is unreachable
    /// within the request timeout.
    pub async fn next_sequence(&self, topic: &str, partition: u32) -> Result<u64> {
        self.partitions.get(topic, partition).next_sequence().await
    }

    /// Sends queued records without further linger and waits for their acks or errors.
    ///
    /// The deadlines of the batches bound the wait.
    pub async fn flush(&self) {
        self.batcher.flush().await;
    }
}

/// The partitions of a producer, created on first use.
#[derive(Debug)]
struct PartitionProducers {
    client: Client,
    /// None if the producer is not idempotent.
    identities: Option<Identities>,
    options: AppendOptions,
    compressor: BatchCompressor,
    by_topic: Mutex<HashMap<String, HashMap<u32, Arc<PartitionProducer>>>>,
}

impl PartitionProducers {
    fn new(client: Client, options: &ProducerOptions) -> Self {
        let identities = options.idempotent.then(|| match options.identity {
            Some(identity) => Identities::continued(client.clone(), &options.name, identity),
            None => Identities::new(client.clone(), &options.name),
        });
        let compressor = BatchCompressor::new(options.compression);
        let unfenced = AppendOptions::durability(options.durability);
        let options = match &options.fencing_token {
            Some(token) => unfenced.fenced_by(token),
            None => unfenced,
        };
        Self { client, identities, options, compressor, by_topic: Mutex::default() }
    }

    /// Adds the producer's fencing token to options without one.
    fn fenced<'a>(&self, options: &'a AppendOptions) -> Cow<'a, AppendOptions> {
        let token = |options: &AppendOptions| options.condition.as_ref()?.fencing_token.clone();
        match token(&self.options) {
            Some(own) if token(options).is_none() => Cow::Owned(options.clone().fenced_by(own)),
            _ => Cow::Borrowed(options),
        }
    }

    fn get(&self, topic: &str, partition: u32) -> Arc<PartitionProducer> {
        // A panic elsewhere cannot have left the map inconsistent.
        let mut by_topic = self.by_topic.lock().unwrap_or_else(PoisonError::into_inner);
        let known = by_topic.get(topic).and_then(|partitions| partitions.get(&partition));
        if let Some(partition_producer) = known {
            return partition_producer.clone();
        }
        let partition_producer =
            PartitionProducer::new(self.client.clone(), self.identities.clone(), topic, partition);
        let partition_producer = Arc::new(partition_producer);
        by_topic.entry(topic.to_owned()).or_default().insert(partition, partition_producer.clone());
        partition_producer
    }
}
