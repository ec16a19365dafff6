//! Tasks that read the partitions of a member ahead of the application.
//!
//! Each reader is a subscription with a fixed set of partitions. A change of the partitions
//! therefore stops the affected readers and starts new ones at the offsets that they reached.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::fetch_queue::{FetchQueue, FetchedMessage};
use super::{AssignedPartition, GroupKey};
use crate::client::Client;
use crate::consumer::{Event, Position, ReadOptions, ReadStart, Subscription};

/// Limit of readers. At the limit, the next one replaces all others and reads all partitions,
/// because each reader opens a stream per node.
const READERS_MAX: usize = 4;

/// The readers of a member.
#[derive(Debug)]
pub(super) struct Readers {
    client: Client,
    queue: Arc<FetchQueue>,
    list: Vec<Reader>,
    last_id: u64,
}

#[derive(Debug)]
struct Reader {
    id: u64,
    partitions: BTreeMap<GroupKey, String>,
    task: JoinHandle<()>,
}

impl Readers {
    pub(super) fn new(client: Client, queue: Arc<FetchQueue>) -> Self {
        Self { client, queue, list: Vec::new(), last_id: 0 }
    }

    /// Reads exactly these partitions, after the last queued message or from the given offset.
    ///
    /// New readers wait for `delay` first.
    pub(super) fn set(&mut self, wanted: &BTreeMap<GroupKey, (String, u64)>, delay: Duration) {
        let is_wanted =
            |reader: &Reader| reader.partitions.keys().all(|it| wanted.contains_key(it));
        let mut kept: Vec<Reader> = Vec::new();
        for reader in std::mem::take(&mut self.list) {
            if is_wanted(&reader) { kept.push(reader) } else { self.stop(&reader) }
        }
        self.list = kept;
        let is_read =
            |list: &[Reader], key: &GroupKey| list.iter().any(|it| it.partitions.contains_key(key));
        if wanted.keys().all(|key| is_read(&self.list, key)) {
            return;
        }
        if self.list.len() >= READERS_MAX {
            for reader in std::mem::take(&mut self.list) {
                self.stop(&reader);
            }
        }
        let mut partitions = BTreeMap::new();
        let mut starts = Vec::new();
        for (&key, (topic, offset)) in wanted {
            if is_read(&self.list, &key) {
                continue;
            }
            let offset = self.queue.next_offset(key).unwrap_or(*offset);
            let start = ReadStart::new(topic, key.partition, Position::Offset(offset));
            starts.push(start.in_topic(key.topic_id));
            partitions.insert(key, topic.clone());
        }
        self.last_id += 1;
        let id = self.last_id;
        self.queue.add_reader(id);
        let topics: HashMap<String, u64> =
            partitions.iter().map(|(key, topic)| (topic.clone(), key.topic_id)).collect();
        let (client, queue) = (self.client.clone(), self.queue.clone());
        let task = tokio::spawn(async move {
            sleep(delay).await;
            let subscription = client.consumer().subscribe(starts, ReadOptions::default());
            forward(subscription, id, &topics, &queue).await;
        });
        self.list.push(Reader { id, partitions, task });
    }

    /// Removes a failed reader, and returns its partitions.
    pub(super) fn remove(&mut self, id: u64) -> Vec<AssignedPartition> {
        let Some(index) = self.list.iter().position(|reader| reader.id == id) else {
            return Vec::new();
        };
        let reader = self.list.swap_remove(index);
        self.stop(&reader);
        reader.partitions.iter().map(|(key, topic)| key.with_topic(topic)).collect()
    }

    fn stop(&self, reader: &Reader) {
        reader.task.abort();
        // The aborted task may still be adding a message.
        self.queue.remove_reader(reader.id);
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        for reader in &self.list {
            self.stop(reader);
        }
    }
}

/// Moves the messages of a subscription to the queue.
async fn forward(
    mut subscription: Subscription,
    id: u64,
    topics: &HashMap<String, u64>,
    queue: &FetchQueue,
) {
    while let Some(event) = subscription.next_encoded().await {
        let message = match event {
            Ok(Event::Data(data)) => FetchedMessage::Data(data),
            Ok(Event::CaughtUp { topic, partition, watermarks }) => {
                let Some(&topic_id) = topics.get(&topic) else { continue };
                FetchedMessage::CaughtUp(GroupKey { topic_id, partition }, watermarks)
            }
            Ok(Event::Heartbeat(_) | Event::Restarted { .. }) => continue,
            Err(error) => FetchedMessage::Failed(id, error),
        };
        if !queue.push(id, message).await {
            return;
        }
    }
}
