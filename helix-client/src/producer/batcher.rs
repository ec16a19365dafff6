//! Collects single records into batches.
//!
//! One task per partition fills a batch while the previous one is in flight. The buffered bytes are
//! bounded over all partitions.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use helix_proto::batch::record_bytes;
use helix_proto::log::v1::{BatchFormat, EncodedBatch, Record};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};
use tonic::Code;

use super::partition::PartitionProducer;
use super::{PartitionProducers, ProducerOptions};
use crate::append::{Ack, AppendOptions};
use crate::error::{Error, Result};
use crate::partitioner::{StickyPartitioner, of_key};

/// Memory of a queued record besides its bytes: the struct, its queue slot, and its ack channel.
///
/// Without it a buffer of short records would exceed its limit many times over.
const RECORD_OVERHEAD_BYTES: usize = 256;

/// Bytes by which a record in a Kafka batch is larger at most, so that the batch stays within its
/// limit: distances of its time and offset, attributes, and lengths of missing fields.
const KAFKA_RECORD_EXTRA_BYTES: usize = 24;

/// Minimum age of a topic's number of partitions from which it is asked for again.
const COUNT_AGE_MIN: Duration = Duration::from_secs(1);

/// Future of the ack of one record, with the record's own offsets.
///
/// Resolves within the request timeout, which counts from the oldest record of its batch or from
/// the partition's previous ack, whichever is later.
///
/// # Errors
/// The error of the record's batch: see [`Producer::append`](super::Producer::append).
#[derive(Debug)]
pub struct DeliveryFuture(oneshot::Receiver<Result<Ack>>);

impl Future for DeliveryFuture {
    type Output = Result<Ack>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<Ack>> {
        // The sender is dropped without a result only when the runtime shuts down.
        let result = ready!(Pin::new(&mut self.0).poll(context));
        Poll::Ready(result.unwrap_or_else(|_| {
            let stopped = Error::client(Code::Cancelled, "the producer was stopped");
            Err(stopped.with_may_have_applied(true))
        }))
    }
}

#[derive(Debug)]
pub(super) struct Batcher {
    partitions: Arc<PartitionProducers>,
    options: ProducerOptions,
    /// Free bytes of the buffer.
    capacity: Arc<Semaphore>,
    sticky: Mutex<HashMap<String, StickyPartitioner>>,
    /// The last request for the number of partitions of each topic.
    counted: Mutex<HashMap<String, CountRequest>>,
    /// The queue of each partition's task. Unbounded; `capacity` bounds their total.
    queues: Mutex<HashMap<String, HashMap<u32, mpsc::UnboundedSender<QueueItem>>>>,
    /// The first failure, if the producer stops at it.
    failure: Arc<OnceLock<Error>>,
}

/// A message to a partition's task.
enum QueueItem {
    Record(PendingRecord),
    /// Closes the batch, and signals when it is done.
    Flush(oneshot::Sender<()>),
}

/// A request for the number of partitions of a topic.
#[derive(Debug)]
struct CountRequest {
    at: Instant,
    /// Its call, unless it was made elsewhere.
    call: Option<JoinHandle<()>>,
}

/// A record queued for its batch.
struct PendingRecord {
    record: Record,
    bytes: usize,
    queued_at: Instant,
    ack: oneshot::Sender<Result<Ack>>,
    /// Released when the batch is done.
    _permit: OwnedSemaphorePermit,
}

impl Batcher {
    pub(super) fn new(partitions: Arc<PartitionProducers>, options: ProducerOptions) -> Self {
        let capacity = options.buffer_bytes.clamp(1, Semaphore::MAX_PERMITS);
        Self {
            partitions,
            options,
            capacity: Arc::new(Semaphore::new(capacity)),
            sticky: Mutex::default(),
            counted: Mutex::default(),
            queues: Mutex::default(),
            failure: Arc::default(),
        }
    }

    /// Chooses the partition of a record.
    pub(super) async fn partition(&self, topic: &str, record: &Record) -> Result<u32> {
        let count = self.partitions.client.partition_count(topic).await?;
        self.look_for_added_partitions(topic, count);
        if let Some(key) = &record.key {
            return Ok(of_key(key, count));
        }
        let mut sticky = self.sticky.lock().unwrap_or_else(PoisonError::into_inner);
        if !sticky.contains_key(topic) {
            let first = self.partitions.client.shared.jitter.draw_index(count);
            sticky.insert(topic.to_owned(), StickyPartitioner::starting_at(first));
        }
        let partitioner = sticky.get_mut(topic).expect("inserted above");
        Ok(partitioner.next(record_bytes(record), self.options.batch_bytes, count))
    }

    /// Asks for the number of partitions again if it is old. Does not wait for the response.
    fn look_for_added_partitions(&self, topic: &str, count: u32) {
        let at = Instant::now();
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(last) = counted.get_mut(topic) else {
            counted.insert(topic.to_owned(), CountRequest { at, call: None });
            return;
        };
        let age_max = self.options.partition_count_age_max.max(COUNT_AGE_MIN);
        let is_running = last.call.as_ref().is_some_and(|call| !call.is_finished());
        if is_running || at - last.at < age_max {
            return;
        }
        let (client, topic) = (self.partitions.client.clone(), topic.to_owned());
        let call = tokio::spawn(async move {
            // Ignored: a later record asks again, and the batches report lasting failures.
            let Ok(metadata) = client.admin().metadata(&[topic.as_str()]).await else { return };
            let found = metadata.topics.iter().find(|it| it.topic == topic);
            if found.is_some_and(|found| found.shard_ids.len() > count as usize) {
                client.shared.routing.forget_topic(&topic);
            }
        });
        *last = CountRequest { at, call: Some(call) };
    }

    pub(super) async fn send(
        &self,
        topic: &str,
        partition: u32,
        record: Record,
    ) -> Result<DeliveryFuture> {
        let bytes = record_bytes(&record) + self.extra_bytes(topic);
        // A record larger than the whole buffer takes all of it.
        let charged = bytes.saturating_add(RECORD_OVERHEAD_BYTES);
        let permits = charged.min(self.options.buffer_bytes).max(1);
        let permits = u32::try_from(permits).unwrap_or(u32::MAX);
        let permit = self.capacity.clone().acquire_many_owned(permits).await;
        let permit = permit.expect("the semaphore is never closed");
        if let Some(failure) = self.failure.get() {
            return Err(failure.clone());
        }
        let (ack, acked) = oneshot::channel();
        let queued_at = Instant::now();
        let pending = PendingRecord { record, bytes, queued_at, ack, _permit: permit };
        self.queue(topic, partition, QueueItem::Record(pending));
        Ok(DeliveryFuture(acked))
    }

    /// Returns the bytes that a record of a topic may take beyond its own form.
    fn extra_bytes(&self, topic: &str) -> usize {
        match self.partitions.client.shared.routing.known_batch_format(topic) {
            Some(BatchFormat::Kafka) => KAFKA_RECORD_EXTRA_BYTES,
            _ => 0,
        }
    }

    pub(super) async fn flush(&self) {
        let mut flushed = Vec::new();
        {
            let queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
            for queue in queues.values().flat_map(HashMap::values) {
                let (done, is_done) = oneshot::channel();
                // Ignored: a task that has ended has nothing to flush.
                let _ = queue.send(QueueItem::Flush(done));
                flushed.push(is_done);
            }
        }
        for is_done in flushed {
            let _ = is_done.await;
        }
    }

    fn queue(&self, topic: &str, partition: u32, item: QueueItem) {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        let known = queues.get(topic).and_then(|queues| queues.get(&partition));
        let item = match known {
            Some(queue) => match queue.send(item) {
                Ok(()) => return,
                // The task's runtime has shut down; starts another task on this one.
                Err(mpsc::error::SendError(item)) => item,
            },
            None => item,
        };
        let (queue, items) = mpsc::unbounded_channel();
        let task = PartitionTask {
            partitions: self.partitions.clone(),
            partition_producer: self.partitions.get(topic, partition),
            append_options: self.partitions.options.clone(),
            options: self.options.clone(),
            failure: self.failure.clone(),
            items,
            next: None,
        };
        // The task ends when the producer is dropped and the queue is empty.
        tokio::spawn(task.run());
        // Ignored: the task holds the receiver.
        let _ = queue.send(item);
        queues.entry(topic.to_owned()).or_default().insert(partition, queue);
    }
}

/// The task of one partition.
struct PartitionTask {
    partitions: Arc<PartitionProducers>,
    partition_producer: Arc<PartitionProducer>,
    append_options: AppendOptions,
    options: ProducerOptions,
    failure: Arc<OnceLock<Error>>,
    items: mpsc::UnboundedReceiver<QueueItem>,
    /// Record from the queue that did not fit the last batch.
    next: Option<PendingRecord>,
}

impl PartitionTask {
    async fn run(mut self) {
        while let Some((batch, flush)) = self.collect().await {
            self.append(batch).await;
            if let Some(done) = flush {
                // Ignored: the caller of flush has stopped waiting.
                let _ = done.send(());
            }
        }
    }

    /// Collects a batch until it is full, the linger has passed, or a flush arrives.
    ///
    /// Returns `None` when the producer is dropped.
    async fn collect(&mut self) -> Option<(Vec<PendingRecord>, Option<oneshot::Sender<()>>)> {
        let mut batch = Vec::new();
        let mut bytes = 0;
        let mut end = None;
        loop {
            let item = match (self.next.take(), end) {
                (Some(pending), _) => Some(QueueItem::Record(pending)),
                (None, None) => Some(self.items.recv().await?),
                (None, Some(end)) => self.receive_until(end).await,
            };
            match item {
                Some(QueueItem::Record(pending)) => {
                    if !batch.is_empty() && bytes + pending.bytes > self.options.batch_bytes {
                        self.next = Some(pending);
                        return Some((batch, None));
                    }
                    bytes += pending.bytes;
                    batch.push(pending);
                    end.get_or_insert_with(|| Instant::now() + self.options.linger);
                    if batch.len() >= self.options.batch_records {
                        return Some((batch, None));
                    }
                }
                Some(QueueItem::Flush(done)) => return Some((batch, Some(done))),
                None => return Some((batch, None)),
            }
        }
    }

    /// Returns the next item that arrives before `end`.
    async fn receive_until(&mut self, end: Instant) -> Option<QueueItem> {
        if let Ok(item) = self.items.try_recv() {
            return Some(item);
        }
        if self.options.linger.is_zero() {
            return None;
        }
        timeout_at(end, self.items.recv()).await.ok().flatten()
    }

    async fn build(&self, records: &[Record], since: Instant) -> Result<EncodedBatch> {
        let topic = self.partition_producer.topic();
        let format = self.partitions.client.batch_format(topic, since).await?;
        self.partitions.compressor.build(records, format)
    }

    async fn append(&self, batch: Vec<PendingRecord>) {
        let Some(since) = batch.first().map(|oldest| oldest.queued_at) else { return };
        let (records, acks): (Vec<Record>, Vec<_>) = batch
            .into_iter()
            .map(|PendingRecord { record, ack, _permit, .. }| (record, (ack, _permit)))
            .unzip();
        let result = match self.failure.get() {
            Some(failure) => Err(failure.clone()),
            None => {
                let batch = self.build(&records, since).await;
                drop(records);
                match batch {
                    Err(error) => Err(error),
                    Ok(batch) => {
                        let options = &self.append_options;
                        self.partition_producer.append(&batch, options, since).await
                    }
                }
            }
        };
        if let Err(error) = &result
            && self.options.stops_at_failure
        {
            let later = error.clone().failed_by_earlier_batch().with_may_have_applied(false);
            // Ignored: only the first failure is kept.
            let _ = self.failure.set(later);
        }
        for (index, (ack, _permit)) in (0u64..).zip(acks) {
            let result = match &result {
                Ok(batch_ack) => Ok(record_ack(batch_ack, index)),
                Err(error) => Err(error.clone()),
            };
            // Ignored: the caller has dropped the future.
            let _ = ack.send(result);
        }
    }
}

/// Returns the ack of the record at this index of the batch.
fn record_ack(ack: &Ack, index: u64) -> Ack {
    let offset = ack.first_offset.map(|first| first + index);
    Ack { first_offset: offset, next_offset: offset.map(|offset| offset + 1), ..*ack }
}
