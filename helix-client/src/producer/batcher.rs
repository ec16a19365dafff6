//! Gathers single records into batches: one task per partition, which fills a batch while the one
//! before it is under way. Bounded in bytes over all partitions.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, ready};

use helix_proto::batch::record_bytes;
use helix_proto::log::v1::Record;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::{Instant, timeout_at};
use tonic::Code;

use super::lane::Lane;
use super::{Lanes, ProducerOptions};
use crate::append::{Ack, AppendOptions, IntoBatch};
use crate::error::{Error, Result};
use crate::partitioner::{Sticky, of_key};

/// What a record takes in memory while it waits, beside its bytes: itself, its place in the queue,
/// and the way back for its ack. Without it a buffer of short records would take many times what
/// it is allowed.
const RECORD_OVERHEAD_BYTES: usize = 256;

/// The ack of one record, once it is there: its offsets are the record's own.
///
/// Resolves at the latest when the request timeout has passed since the oldest record of its batch
/// was handed over, or since the last ack of the partition before it if that came later.
#[derive(Debug)]
pub struct Sent(oneshot::Receiver<Result<Ack>>);

impl Future for Sent {
    type Output = Result<Ack>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<Ack>> {
        // The task goes away without an answer only with its runtime.
        let answer = ready!(Pin::new(&mut self.0).poll(context));
        Poll::Ready(answer.unwrap_or_else(|_| {
            let stopped = Error::client(Code::Cancelled, "the producer was stopped");
            Err(stopped.with_may_have_applied(true))
        }))
    }
}

#[derive(Debug)]
pub(super) struct Batcher {
    lanes: Arc<Lanes>,
    options: ProducerOptions,
    /// Bytes that may still be handed over.
    room: Arc<Semaphore>,
    sticky: Mutex<HashMap<String, Sticky>>,
    /// The queue to each partition's task. Unbounded by itself; `room` bounds all of them.
    queues: Mutex<HashMap<String, HashMap<u32, mpsc::UnboundedSender<Item>>>>,
    /// The first failure, where that ends everything.
    failure: Arc<OnceLock<Error>>,
}

/// What a partition's task is given.
enum Item {
    Record(Waiting),
    /// Close the batch, and answer when it is done.
    Flush(oneshot::Sender<()>),
}

/// A record that waits for its batch.
struct Waiting {
    record: Record,
    bytes: usize,
    handed_over: Instant,
    answer: oneshot::Sender<Result<Ack>>,
    /// Given back when the batch is done.
    _room: OwnedSemaphorePermit,
}

impl Batcher {
    pub(super) fn new(lanes: Arc<Lanes>, options: ProducerOptions) -> Self {
        let room = options.buffer_bytes.clamp(1, Semaphore::MAX_PERMITS);
        Self {
            lanes,
            options,
            room: Arc::new(Semaphore::new(room)),
            sticky: Mutex::default(),
            queues: Mutex::default(),
            failure: Arc::default(),
        }
    }

    /// Chooses the partition of a record.
    pub(super) async fn partition(&self, topic: &str, record: &Record) -> Result<u32> {
        let count = self.lanes.client.partition_count(topic).await?;
        if let Some(key) = &record.key {
            return Ok(of_key(key, count));
        }
        let mut sticky = self.sticky.lock().unwrap_or_else(PoisonError::into_inner);
        if !sticky.contains_key(topic) {
            sticky.insert(topic.to_owned(), Sticky::default());
        }
        let place = sticky.get_mut(topic).expect("inserted above");
        Ok(place.next(record_bytes(record), self.options.batch_bytes, count))
    }

    pub(super) async fn send(&self, topic: &str, partition: u32, record: Record) -> Result<Sent> {
        let bytes = record_bytes(&record);
        // A record larger than the whole buffer goes alone through an empty one.
        let charged = bytes.saturating_add(RECORD_OVERHEAD_BYTES);
        let permits = charged.min(self.options.buffer_bytes).max(1);
        let permits = u32::try_from(permits).unwrap_or(u32::MAX);
        let room = self.room.clone().acquire_many_owned(permits).await;
        let room = room.expect("the semaphore is never closed");
        if let Some(failure) = self.failure.get() {
            return Err(failure.clone());
        }
        let (answer, sent) = oneshot::channel();
        let handed_over = Instant::now();
        let waiting = Waiting { record, bytes, handed_over, answer, _room: room };
        self.queue(topic, partition, Item::Record(waiting));
        Ok(Sent(sent))
    }

    pub(super) async fn flush(&self) {
        let mut flushed = Vec::new();
        {
            let queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
            for queue in queues.values().flat_map(HashMap::values) {
                let (done, is_done) = oneshot::channel();
                // A task that is gone has nothing left to flush.
                let _ = queue.send(Item::Flush(done));
                flushed.push(is_done);
            }
        }
        for is_done in flushed {
            let _ = is_done.await;
        }
    }

    fn queue(&self, topic: &str, partition: u32, item: Item) {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        let known = queues.get(topic).and_then(|queues| queues.get(&partition));
        let item = match known {
            Some(queue) => match queue.send(item) {
                Ok(()) => return,
                // The runtime that the task ran on is gone; start another one on this.
                Err(mpsc::error::SendError(item)) => item,
            },
            None => item,
        };
        let (queue, items) = mpsc::unbounded_channel();
        let task = Task {
            lane: self.lanes.get(topic, partition),
            append_options: self.lanes.options.clone(),
            options: self.options.clone(),
            failure: self.failure.clone(),
            items,
            next: None,
        };
        // Ends by itself when the producer is dropped and the queue is empty.
        tokio::spawn(task.run());
        // The task holds the other end.
        let _ = queue.send(item);
        queues.entry(topic.to_owned()).or_default().insert(partition, queue);
    }
}

/// The task of one partition.
struct Task {
    lane: Arc<Lane>,
    append_options: AppendOptions,
    options: ProducerOptions,
    failure: Arc<OnceLock<Error>>,
    items: mpsc::UnboundedReceiver<Item>,
    /// Taken from the queue, but did not fit the last batch.
    next: Option<Waiting>,
}

impl Task {
    async fn run(mut self) {
        while let Some((waiting, flush)) = self.gather().await {
            self.append(waiting).await;
            if let Some(done) = flush {
                // Ignored: whoever flushed has stopped waiting.
                let _ = done.send(());
            }
        }
    }

    /// Waits for a record and fills a batch: until it is full, the linger is over, or a flush
    /// comes. None when the producer is gone.
    async fn gather(&mut self) -> Option<(Vec<Waiting>, Option<oneshot::Sender<()>>)> {
        let mut batch = Vec::new();
        let mut bytes = 0;
        let mut end = None;
        loop {
            let item = match (self.next.take(), end) {
                (Some(waiting), _) => Some(Item::Record(waiting)),
                (None, None) => Some(self.items.recv().await?),
                (None, Some(end)) => self.more(end).await,
            };
            match item {
                Some(Item::Record(waiting)) => {
                    if !batch.is_empty() && bytes + waiting.bytes > self.options.batch_bytes {
                        self.next = Some(waiting);
                        return Some((batch, None));
                    }
                    bytes += waiting.bytes;
                    batch.push(waiting);
                    end.get_or_insert_with(|| Instant::now() + self.options.linger);
                    if batch.len() >= self.options.batch_records {
                        return Some((batch, None));
                    }
                }
                Some(Item::Flush(done)) => return Some((batch, Some(done))),
                None => return Some((batch, None)),
            }
        }
    }

    /// One more item, if there is one before `end`.
    async fn more(&mut self, end: Instant) -> Option<Item> {
        if let Ok(item) = self.items.try_recv() {
            return Some(item);
        }
        if self.options.linger.is_zero() {
            return None;
        }
        timeout_at(end, self.items.recv()).await.ok().flatten()
    }

    async fn append(&self, waiting: Vec<Waiting>) {
        let Some(since) = waiting.first().map(|oldest| oldest.handed_over) else { return };
        let (records, answers): (Vec<Record>, Vec<_>) = waiting
            .into_iter()
            .map(|Waiting { record, answer, _room, .. }| (record, (answer, _room)))
            .unzip();
        let result = match self.failure.get() {
            Some(failure) => Err(failure.clone()),
            None => {
                let batch = records.as_slice().into_batch();
                drop(records);
                self.lane.append(&batch, &self.append_options, since).await
            }
        };
        if let Err(error) = &result
            && self.options.stops_at_failure
        {
            let later = error.clone().of_an_earlier_batch().with_may_have_applied(false);
            // The first one stays.
            let _ = self.failure.set(later);
        }
        for (place, (answer, _room)) in (0u64..).zip(answers) {
            let result = match &result {
                Ok(ack) => Ok(of_record(ack, place)),
                Err(error) => Err(error.clone()),
            };
            // Ignored: the sender does not want to know.
            let _ = answer.send(result);
        }
    }
}

/// The ack of the record at this place of the batch.
fn of_record(ack: &Ack, place: u64) -> Ack {
    let offset = ack.first_offset.map(|first| first + place);
    Ack { first_offset: offset, next_offset: offset.map(|offset| offset + 1), ..*ack }
}
