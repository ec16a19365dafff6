//! Records that were read ahead of the application, bounded by bytes over all partitions.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use helix_proto::log::v1::Watermarks;
use tokio::sync::Notify;

use super::GroupKey;
use crate::consumer::Batches;
use crate::error::Error;

/// Bytes that a message counts beyond its payloads.
const MESSAGE_BYTES: usize = 256;

/// A message of a reader.
#[derive(Debug)]
pub(super) enum FetchedMessage {
    Data(Batches),
    CaughtUp(GroupKey, Watermarks),
    /// The reader with this id has failed.
    Failed(u64, Error),
}

/// Messages of all readers, in the order of their arrival.
#[derive(Debug)]
pub(super) struct FetchQueue {
    state: Mutex<QueueState>,
    bytes_max: usize,
    /// Wakes the consumer.
    pub(super) readable: Notify,
    /// Wakes the readers.
    writable: Notify,
}

#[derive(Debug, Default)]
struct QueueState {
    messages: VecDeque<FetchedMessage>,
    bytes: usize,
    /// Readers whose messages are accepted.
    readers: HashSet<u64>,
    /// Offset after the last message of each partition.
    next_offsets: HashMap<GroupKey, u64>,
}

impl FetchQueue {
    pub(super) fn new(bytes_max: usize) -> Self {
        let (readable, writable) = (Notify::new(), Notify::new());
        Self { state: Mutex::default(), bytes_max, readable, writable }
    }

    pub(super) fn add_reader(&self, reader: u64) {
        self.state().readers.insert(reader);
    }

    /// Rejects later messages of a reader. Its earlier ones stay.
    pub(super) fn remove_reader(&self, reader: u64) {
        self.state().readers.remove(&reader);
        self.writable.notify_waiters();
    }

    /// Adds a message once there is capacity. Returns false if the reader was removed.
    pub(super) async fn push(&self, reader: u64, message: FetchedMessage) -> bool {
        let bytes = bytes_of(&message);
        let mut message = Some(message);
        loop {
            let writable = self.writable.notified();
            tokio::pin!(writable);
            // Registered before the check, so that no wake-up is missed.
            writable.as_mut().enable();
            {
                let mut state = self.state();
                if !state.readers.contains(&reader) {
                    return false;
                }
                // A message above the limit must pass too.
                if state.bytes == 0 || state.bytes < self.bytes_max {
                    state.bytes += bytes;
                    if let Some(FetchedMessage::Data(data)) = &message {
                        state.next_offsets.insert(key_of(data), data.next_offset);
                    }
                    state.messages.extend(message.take());
                    self.readable.notify_one();
                    return true;
                }
            }
            writable.await;
        }
    }

    /// Returns the oldest message.
    pub(super) fn pop(&self) -> Option<FetchedMessage> {
        let mut state = self.state();
        let message = state.messages.pop_front()?;
        state.bytes -= bytes_of(&message);
        drop(state);
        self.writable.notify_waiters();
        Some(message)
    }

    /// Drops the messages of these partitions, as if they had not been read.
    pub(super) fn discard(&self, partitions: &HashSet<GroupKey>) {
        let mut state = self.state();
        let QueueState { messages, bytes, next_offsets, .. } = &mut *state;
        messages.retain(|message| {
            let is_kept = match message {
                FetchedMessage::Data(data) => !partitions.contains(&key_of(data)),
                FetchedMessage::CaughtUp(key, _) => !partitions.contains(key),
                FetchedMessage::Failed(..) => true,
            };
            if !is_kept {
                *bytes -= bytes_of(message);
            }
            is_kept
        });
        next_offsets.retain(|key, _| !partitions.contains(key));
        drop(state);
        self.writable.notify_waiters();
    }

    /// Returns the offset after the last message of a partition, if there was one.
    pub(super) fn next_offset(&self, partition: GroupKey) -> Option<u64> {
        self.state().next_offsets.get(&partition).copied()
    }

    /// Returns the bytes of all messages.
    pub(super) fn bytes(&self) -> usize {
        self.state().bytes
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
        // No code under the lock can panic in the middle of a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn bytes_of(message: &FetchedMessage) -> usize {
    let FetchedMessage::Data(data) = message else { return MESSAGE_BYTES };
    let batches = data.batches.iter().filter_map(|stored| stored.batch.as_ref());
    MESSAGE_BYTES + batches.map(|batch| batch.payload.len()).sum::<usize>()
}

pub(super) fn key_of(data: &Batches) -> GroupKey {
    GroupKey { topic_id: data.topic_id, partition: data.partition }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use helix_proto::log::v1::{EncodedBatch, StoredBatch};

    use super::*;

    fn data(partition: u32, next_offset: u64, payload: usize) -> FetchedMessage {
        let batch = EncodedBatch { payload: vec![0; payload].into(), ..EncodedBatch::default() };
        FetchedMessage::Data(Batches {
            topic: "orders".to_owned(),
            partition,
            start_offset: 0,
            until: None,
            batches: vec![StoredBatch { batch: Some(batch), ..StoredBatch::default() }],
            next_offset,
            watermarks: Watermarks::default(),
            topic_id: 1,
        })
    }

    fn key(partition: u32) -> GroupKey {
        GroupKey { topic_id: 1, partition }
    }

    #[tokio::test]
    async fn readers_wait_for_capacity() {
        let queue = Arc::new(FetchQueue::new(1000));
        queue.add_reader(1);
        assert!(queue.push(1, data(0, 5, 2000)).await, "one message always passes");
        let waiting = tokio::spawn({
            let queue = queue.clone();
            async move { queue.push(1, data(1, 7, 10)).await }
        });
        while !waiting.is_finished() && queue.bytes() > 0 {
            tokio::task::yield_now().await;
            if queue.next_offset(key(1)).is_none() && queue.bytes() > 2000 {
                queue.pop().unwrap();
            }
        }
        assert!(waiting.await.unwrap());
        assert_eq!((queue.next_offset(key(0)), queue.next_offset(key(1))), (Some(5), Some(7)));
        assert_eq!(queue.bytes(), MESSAGE_BYTES + 10);
    }

    #[tokio::test]
    async fn discarded_partitions_free_their_bytes() {
        let queue = FetchQueue::new(1 << 20);
        queue.add_reader(1);
        assert!(queue.push(1, data(0, 5, 10)).await && queue.push(1, data(1, 6, 20)).await);
        queue.discard(&HashSet::from([key(0)]));
        assert_eq!((queue.next_offset(key(0)), queue.bytes()), (None, MESSAGE_BYTES + 20));
        let Some(FetchedMessage::Data(left)) = queue.pop() else { panic!("a message is left") };
        assert_eq!((left.partition, queue.bytes()), (1, 0));
    }

    #[tokio::test]
    async fn removed_reader_adds_nothing() {
        let queue = FetchQueue::new(10);
        queue.add_reader(1);
        assert!(queue.push(1, data(0, 5, 10)).await);
        queue.remove_reader(1);
        assert!(!queue.push(1, data(0, 9, 10)).await);
        assert_eq!(queue.next_offset(key(0)), Some(5));
    }
}
