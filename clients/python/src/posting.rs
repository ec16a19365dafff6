//! The buffer of a producer between Python and the Rust client.
//!
//! Python adds records without waiting. One task passes them on in order, in whatever lots they
//! have come together by then; one task for each partition takes the acks, which come in order.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use helix_client::proto::log::v1::Record;
use helix_client::{Ack, DeliveryFuture, Error, Producer};
use tokio::sync::{Notify, mpsc, oneshot};

use crate::arguments::RecordArgument;
use crate::failure::Failed;
use crate::operation::lock;

/// Memory of a queued record besides its bytes.
const RECORD_OVERHEAD_BYTES: usize = 256;

/// Records after which the task reports that it has passed them on.
const REPORT_RECORDS: usize = 64;

/// Acks that a partition's task takes at once.
const ACKS_MAX: usize = 512;

/// The ack of a record with its partition.
pub(crate) type Placed = (u32, Ack);

type AckSender = oneshot::Sender<Result<Placed, Error>>;

/// A record on its way.
struct Posted {
    record: Record,
    partition: Option<u32>,
    /// None for records whose failures are reported by a flush.
    ack: Option<AckSender>,
}

enum Item {
    Record(Posted),
    /// Dropped once everything before it has an ack or an error.
    Marker(Arc<oneshot::Sender<()>>),
}

#[derive(Default)]
struct PostState {
    items: Vec<Item>,
    /// Bytes of records that the Rust client has not accepted.
    bytes: usize,
    is_closed: bool,
    failed: u64,
    first_failure: Option<Error>,
}

/// Shared by the handle and its tasks.
struct Posts {
    state: Mutex<PostState>,
    bytes_max: usize,
    has_items: Notify,
    has_capacity: Notify,
}

/// The handle. Dropping it lets queued records finish.
pub(crate) struct Posting {
    posts: Arc<Posts>,
}

impl Posting {
    /// Starts the task. Needs the context of a runtime.
    pub(crate) fn start(producer: Producer, topic: String, bytes_max: usize) -> Self {
        let posts = Arc::new(Posts {
            state: Mutex::default(),
            bytes_max,
            has_items: Notify::new(),
            has_capacity: Notify::new(),
        });
        let task = PostTask { posts: posts.clone(), producer, topic, partitions: HashMap::new() };
        tokio::spawn(task.run());
        Self { posts }
    }

    /// Adds records until the buffer is full, and returns how many were added.
    pub(crate) fn post(
        &self,
        records: impl IntoIterator<Item = RecordArgument>,
    ) -> Result<usize, Failed> {
        let mut state = lock(&self.posts.state);
        if state.is_closed {
            return Err(Failed::Closed("producer"));
        }
        let was_empty = state.items.is_empty();
        let mut added = 0;
        let mut records = records.into_iter();
        while state.bytes < self.posts.bytes_max
            && let Some(RecordArgument { record, partition }) = records.next()
        {
            state.bytes += charged(&record);
            state.items.push(Item::Record(Posted { record, partition, ack: None }));
            added += 1;
        }
        drop(state);
        if was_empty && added > 0 {
            self.posts.has_items.notify_one();
        }
        Ok(added)
    }

    pub(crate) fn bytes_max(&self) -> usize {
        self.posts.bytes_max
    }

    pub(crate) fn is_full(&self) -> bool {
        lock(&self.posts.state).bytes >= self.posts.bytes_max
    }

    /// Waits until the buffer takes another record. Cancel safe.
    pub(crate) fn capacity(&self) -> impl Future<Output = Result<(), Failed>> + Send + use<> {
        let posts = self.posts.clone();
        async move {
            posts.capacity().await;
            Ok(())
        }
    }

    /// Adds a record and waits for its ack. Once it is added, it is sent even if the future is
    /// dropped.
    pub(crate) fn send(
        &self,
        argument: RecordArgument,
    ) -> impl Future<Output = Result<Placed, Failed>> + Send + use<> {
        let posts = self.posts.clone();
        async move {
            posts.capacity().await;
            let (ack, acked) = oneshot::channel();
            let RecordArgument { record, partition } = argument;
            let bytes = charged(&record);
            posts.push(Item::Record(Posted { record, partition, ack: Some(ack) }), bytes)?;
            match acked.await {
                Ok(result) => Ok(result?),
                Err(_) => Err(Failed::Closed("producer")),
            }
        }
    }

    /// Waits until everything that was added before has an ack or an error, and reports the
    /// failures of posted records since the last flush. Cancel safe.
    pub(crate) fn flush(&self) -> impl Future<Output = Result<(), Failed>> + Send + use<> {
        let posts = self.posts.clone();
        async move {
            let (marker, reached) = oneshot::channel();
            posts.push(Item::Marker(Arc::new(marker)), 0)?;
            // Ends with an error: the marker is only dropped.
            let _ = reached.await;
            let mut state = lock(&posts.state);
            let count = std::mem::take(&mut state.failed);
            match state.first_failure.take() {
                Some(first) => Err(Failed::Posted { first, count }),
                None => Ok(()),
            }
        }
    }

    /// Refuses more records; those that were added are still sent.
    pub(crate) fn close(&self) {
        lock(&self.posts.state).is_closed = true;
        self.posts.has_items.notify_one();
        self.posts.has_capacity.notify_waiters();
    }
}

impl Drop for Posting {
    fn drop(&mut self) {
        self.close();
    }
}

impl Posts {
    async fn capacity(&self) {
        loop {
            let notified = self.has_capacity.notified();
            let mut notified = std::pin::pin!(notified);
            notified.as_mut().enable();
            {
                let state = lock(&self.state);
                if state.bytes < self.bytes_max || state.is_closed {
                    return;
                }
            }
            notified.await;
        }
    }

    fn push(&self, item: Item, bytes: usize) -> Result<(), Failed> {
        let mut state = lock(&self.state);
        if state.is_closed {
            return Err(Failed::Closed("producer"));
        }
        state.bytes += bytes;
        state.items.push(item);
        drop(state);
        self.has_items.notify_one();
        Ok(())
    }

    /// Returns everything that was added; none after the end.
    async fn take(&self) -> Option<Vec<Item>> {
        loop {
            {
                let mut state = lock(&self.state);
                if !state.items.is_empty() {
                    return Some(std::mem::take(&mut state.items));
                }
                if state.is_closed {
                    return None;
                }
            }
            // A notification between the check and here is kept.
            self.has_items.notified().await;
        }
    }

    fn release(&self, bytes: usize) {
        lock(&self.state).bytes -= bytes;
        self.has_capacity.notify_waiters();
    }

    fn fail(&self, ack: Option<AckSender>, error: Error) {
        match ack {
            // Ignored: the caller has stopped waiting.
            Some(ack) => drop(ack.send(Err(error))),
            None => {
                let mut state = lock(&self.state);
                state.failed += 1;
                state.first_failure.get_or_insert(error);
            }
        }
    }
}

fn charged(record: &Record) -> usize {
    let field = |bytes: &Option<bytes::Bytes>| bytes.as_ref().map_or(0, bytes::Bytes::len);
    let headers: usize = record.headers.iter().map(|it| it.name.len() + it.value.len() + 64).sum();
    field(&record.key) + field(&record.value) + headers + RECORD_OVERHEAD_BYTES
}

/// A record that the Rust client has accepted.
enum Accepted {
    Record(DeliveryFuture, Option<AckSender>),
    Marker { _marker: Arc<oneshot::Sender<()>> },
}

/// The task that passes records on.
struct PostTask {
    posts: Arc<Posts>,
    producer: Producer,
    topic: String,
    partitions: HashMap<u32, mpsc::UnboundedSender<Accepted>>,
}

impl PostTask {
    async fn run(mut self) {
        while let Some(items) = self.posts.take().await {
            self.pass_on(items).await;
        }
    }

    async fn pass_on(&mut self, items: Vec<Item>) {
        let (mut bytes, mut records) = (0, 0);
        let mut failure: Option<Error> = None;
        for item in items {
            let posted = match item {
                Item::Record(posted) => posted,
                Item::Marker(marker) => {
                    self.mark(&marker);
                    continue;
                }
            };
            bytes += charged(&posted.record);
            records += 1;
            match &failure {
                // Their topic is the same: each lookup could take the whole request timeout.
                Some(failure) => self.posts.fail(posted.ack, failure.clone()),
                None => failure = self.pass(posted).await.err(),
            }
            if records >= REPORT_RECORDS {
                self.posts.release(bytes);
                (bytes, records) = (0, 0);
            }
        }
        self.posts.release(bytes);
    }

    /// Passes a record on, after waiting for the Rust client's buffer.
    async fn pass(&mut self, posted: Posted) -> Result<(), Error> {
        let Posted { record, partition, ack } = posted;
        let partition = match partition {
            Some(partition) => Ok(partition),
            None => self.producer.select_partition(&self.topic, &record).await,
        };
        let sent = match partition {
            Ok(partition) => {
                let sent = self.producer.send_to(&self.topic, partition, record).await;
                sent.map(|delivery| (partition, delivery))
            }
            Err(error) => Err(error),
        };
        match sent {
            Ok((partition, delivery)) => {
                self.accept(partition, Accepted::Record(delivery, ack));
                Ok(())
            }
            Err(error) => {
                self.posts.fail(ack, error.clone());
                Err(error)
            }
        }
    }

    fn accept(&mut self, partition: u32, accepted: Accepted) {
        let posts = &self.posts;
        let queue = self.partitions.entry(partition).or_insert_with(|| {
            let (queue, receiver) = mpsc::unbounded_channel();
            tokio::spawn(take_acks(posts.clone(), partition, receiver));
            queue
        });
        // Ignored: the task ends after this sender.
        let _ = queue.send(accepted);
    }

    /// Sends the marker behind everything that was accepted, without further linger.
    fn mark(&self, marker: &Arc<oneshot::Sender<()>>) {
        for queue in self.partitions.values() {
            // As above.
            let _ = queue.send(Accepted::Marker { _marker: marker.clone() });
        }
        let (producer, marker) = (self.producer.clone(), marker.clone());
        tokio::spawn(async move {
            producer.flush().await;
            drop(marker);
        });
    }
}

/// Takes the acks of one partition, in order.
async fn take_acks(
    posts: Arc<Posts>,
    partition: u32,
    mut queue: mpsc::UnboundedReceiver<Accepted>,
) {
    let mut accepted = Vec::with_capacity(ACKS_MAX);
    while queue.recv_many(&mut accepted, ACKS_MAX).await > 0 {
        for accepted in accepted.drain(..) {
            let Accepted::Record(delivery, ack) = accepted else { continue };
            match (delivery.await, ack) {
                // Ignored: the caller has stopped waiting.
                (Ok(acked), Some(ack)) => drop(ack.send(Ok((partition, acked)))),
                (Ok(_), None) => {}
                (Err(error), ack) => posts.fail(ack, error),
            }
        }
    }
}
