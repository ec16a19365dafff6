//! Passes published batches on to the subscriptions at the end of a partition, through bounded
//! queues. Nothing is stored.
//!
//! A publisher waits for the slowest subscription, so nothing is dropped. A subscription receives
//! what is published after it was opened.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use helix_proto::log::v1 as pb;
use helix_proto::log::v1::subscribe_response::Message;
use helix_proto::log::v1::{EncodedBatch, Watermarks};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::Status;

use super::state::{APPEND_TIME, FETCH_BYTES_DEFAULT, RECORDS};

/// Batches that wait for one subscription.
const QUEUE_BATCHES: usize = 32;

/// Partitions that have been subscribed to at their end, by topic and number.
#[derive(Debug, Default)]
pub(super) struct FanOut(Mutex<HashMap<(String, u32), Arc<LivePartition>>>);

/// Partition with subscriptions at its end.
#[derive(Debug)]
pub(super) struct LivePartition(Mutex<LiveState>);

#[derive(Debug)]
struct LiveState {
    next_offset: u64,
    subscriptions: Vec<LiveSubscription>,
}

/// Queue of a subscription.
#[derive(Debug)]
struct LiveSubscription {
    /// Number of the partition among those of the subscription.
    slot: usize,
    queue: mpsc::Sender<LiveBatch>,
}

/// Batch for one subscription.
#[derive(Debug)]
struct LiveBatch {
    slot: usize,
    next_offset: u64,
    stored: pb::StoredBatch,
}

impl LiveBatch {
    fn bytes(&self) -> u64 {
        self.stored.batch.as_ref().map_or(0, |batch| batch.payload.len() as u64)
    }
}

/// Outcome of an attempt to pass a batch on.
pub(super) enum PushOutcome {
    Acked(pb::AppendAck),
    Full(UnsentBatch),
}

/// Batch for which a subscription has no capacity yet.
pub(super) struct UnsentBatch {
    pub(super) batch: EncodedBatch,
    capacity: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl UnsentBatch {
    /// Polls until the subscription has had capacity.
    pub(super) fn poll_capacity(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.capacity.as_mut().poll(context)
    }
}

impl FanOut {
    /// Returns the partition, if it has been subscribed to.
    pub(super) fn find(&self, topic: &str, partition: u32) -> Option<Arc<LivePartition>> {
        lock(&self.0).get(&(topic.to_owned(), partition)).cloned()
    }

    /// Returns the end offset of a partition.
    pub(super) fn end(&self, topic: &str, partition: u32) -> u64 {
        self.find(topic, partition).map_or(RECORDS, |live| lock(&live.0).next_offset)
    }

    /// Opens a subscription at the ends of partitions.
    pub(super) fn subscribe(&self, starts: Vec<pb::PartitionStart>) -> LiveStream {
        let (queue, batches) = mpsc::channel(QUEUE_BATCHES);
        let mut stream = LiveStream {
            partitions: Vec::with_capacity(starts.len()),
            greetings: VecDeque::with_capacity(starts.len()),
            batches,
            next: None,
        };
        for (slot, pb::PartitionStart { topic, partition, .. }) in starts.into_iter().enumerate() {
            let live = lock(&self.0).entry((topic.clone(), partition)).or_default().clone();
            let mut state = lock(&live.0);
            state.subscriptions.push(LiveSubscription { slot, queue: queue.clone() });
            stream.greetings.push_back(Message::CaughtUp(pb::CaughtUp {
                topic: topic.clone(),
                partition,
                watermarks: Some(watermarks(state.next_offset)),
                topic_id: 0,
            }));
            stream.partitions.push((topic, partition));
        }
        stream
    }
}

impl Default for LivePartition {
    fn default() -> Self {
        Self(Mutex::new(LiveState { next_offset: RECORDS, subscriptions: Vec::new() }))
    }
}

impl LivePartition {
    /// Passes a batch on to all subscriptions, or to none if one of them has no capacity.
    pub(super) fn push(&self, batch: EncodedBatch) -> PushOutcome {
        let mut state = lock(&self.0);
        state.subscriptions.retain(|subscription| !subscription.queue.is_closed());
        let full = state.subscriptions.iter().find(|it| it.queue.capacity() == 0);
        if let Some(full) = full {
            let queue = full.queue.clone();
            let capacity = Box::pin(async move {
                // Ignored: a subscription that has ended is not waited for.
                let _ = queue.reserve().await;
            });
            return PushOutcome::Full(UnsentBatch { batch, capacity });
        }
        let first = state.next_offset;
        state.next_offset += u64::from(batch.record_count);
        let next_offset = state.next_offset;
        for LiveSubscription { slot, queue } in &state.subscriptions {
            let stored = pb::StoredBatch {
                first_offset: first,
                append_time: Some(APPEND_TIME),
                offset_deltas: Vec::new(),
                batch: Some(batch.clone()),
            };
            // Ignored: only publishers fill the queue, so it has capacity unless it was closed.
            let _ = queue.try_send(LiveBatch { slot: *slot, next_offset, stored });
        }
        PushOutcome::Acked(pb::AppendAck {
            first_offset: Some(first),
            next_offset: Some(next_offset),
            duplicate: false,
            durability: pb::Durability::None.into(),
        })
    }
}

/// One subscription at the ends of its partitions.
#[derive(Debug)]
pub(super) struct LiveStream {
    /// Topic and number by slot.
    partitions: Vec<(String, u32)>,
    /// Messages that precede all data.
    greetings: VecDeque<Message>,
    batches: mpsc::Receiver<LiveBatch>,
    /// First batch of the next message.
    next: Option<LiveBatch>,
}

impl Stream for LiveStream {
    type Item = Result<pb::SubscribeResponse, Status>;

    /// Returns all batches that wait, up to the size of a message.
    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(greeting) = self.greetings.pop_front() {
            return Poll::Ready(Some(Ok(pb::SubscribeResponse { message: Some(greeting) })));
        }
        let first = match self.next.take() {
            Some(first) => first,
            None => match ready!(self.batches.poll_recv(context)) {
                Some(first) => first,
                None => return Poll::Ready(None),
            },
        };
        let (slot, start_offset) = (first.slot, first.stored.first_offset);
        let (mut bytes, mut next_offset) = (first.bytes(), first.next_offset);
        let mut batches = vec![first.stored];
        while let Ok(more) = self.batches.try_recv() {
            bytes += more.bytes();
            if more.slot != slot || bytes > FETCH_BYTES_DEFAULT {
                self.next = Some(more);
                break;
            }
            next_offset = more.next_offset;
            batches.push(more.stored);
        }
        let (topic, partition) = self.partitions[slot].clone();
        let data = pb::PartitionRecords {
            topic,
            partition,
            records: Vec::new(),
            batches,
            next_offset,
            watermarks: Some(watermarks(next_offset)),
            start_offset,
            topic_id: 0,
        };
        Poll::Ready(Some(Ok(pb::SubscribeResponse { message: Some(Message::Data(data)) })))
    }
}

fn watermarks(high_watermark: u64) -> Watermarks {
    Watermarks { log_start_offset: 0, high_watermark }
}

/// Offsets and queues stay consistent if a task panics, so a poisoned lock is used like any other.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio_stream::StreamExt;

    use super::*;

    const RECORD_COUNT: u32 = 10;

    fn start(topic: &str) -> pb::PartitionStart {
        pb::PartitionStart { topic: topic.to_owned(), ..pb::PartitionStart::default() }
    }

    fn batch() -> EncodedBatch {
        EncodedBatch { record_count: RECORD_COUNT, ..EncodedBatch::default() }
    }

    fn is_acked(live: &LivePartition) -> bool {
        matches!(live.push(batch()), PushOutcome::Acked(_))
    }

    /// Returns the offsets of the next message: the start, and the one after its batches.
    async fn offsets(stream: &mut LiveStream) -> Option<(u64, u64)> {
        match stream.next().await.unwrap().unwrap().message.unwrap() {
            Message::Data(data) => Some((data.start_offset, data.next_offset)),
            _ => None,
        }
    }

    #[tokio::test]
    async fn each_subscription_receives_every_batch_in_order() {
        let fan_out = FanOut::default();
        assert!(fan_out.find("t", 0).is_none());
        let mut streams =
            [fan_out.subscribe(vec![start("t")]), fan_out.subscribe(vec![start("t")])];
        let live = fan_out.find("t", 0).unwrap();
        assert!(is_acked(&live) && is_acked(&live));
        let end = RECORDS + 2 * u64::from(RECORD_COUNT);
        assert_eq!((fan_out.end("t", 0), fan_out.end("t", 1)), (end, RECORDS));
        for stream in &mut streams {
            assert_eq!(offsets(stream).await, None, "it says first that it is at the end");
            assert_eq!(offsets(stream).await, Some((RECORDS, end)), "both batches in a message");
        }
        // A later subscription starts at the end.
        let mut late = fan_out.subscribe(vec![start("t")]);
        assert!(is_acked(&live));
        assert_eq!(offsets(&mut late).await, None);
        assert_eq!(offsets(&mut late).await, Some((end, end + u64::from(RECORD_COUNT))));
    }

    #[tokio::test]
    async fn publisher_waits_for_the_slowest_subscription() {
        let fan_out = FanOut::default();
        let mut slow = fan_out.subscribe(vec![start("t")]);
        let live = fan_out.find("t", 0).unwrap();
        for _ in 0..QUEUE_BATCHES {
            assert!(is_acked(&live));
        }
        let PushOutcome::Full(mut unsent) = live.push(batch()) else { panic!("a full queue") };
        let polled = poll_fn(|context| Poll::Ready(unsent.poll_capacity(context))).await;
        assert!(polled.is_pending());
        assert_eq!(offsets(&mut slow).await, None);
        assert!(offsets(&mut slow).await.is_some());
        poll_fn(|context| unsent.poll_capacity(context)).await;
        assert!(is_acked(&live));
        // A subscription that has ended holds no publisher back.
        drop(slow);
        for _ in 0..=QUEUE_BATCHES {
            assert!(is_acked(&live));
        }
    }
}
