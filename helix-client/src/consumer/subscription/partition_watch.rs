//! Partitions that topics gain while a subscription reads them, or lose when they are recreated.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use helix_proto::log::v1::ErrorReason;
use tokio::time::{Instant, sleep};
use tracing::debug;

use super::StreamTask;
use super::cursor::Cursor;
use crate::consumer::{OnRecreate, Position, ReadStart};
use crate::error::Error;

/// Interval at which a subscription checks its topics for new partitions.
const NEW_PARTITIONS_INTERVAL: Duration = Duration::from_secs(2);

/// Partitions of a topic that a subscription reads or has skipped.
#[derive(Debug, Default)]
pub(super) struct KnownPartitions {
    /// Id of the topic; 0 until it is known.
    id: u64,
    count: u32,
}

impl KnownPartitions {
    /// Returns the partitions up to the highest start of each topic.
    pub(super) fn of_starts(starts: &[ReadStart]) -> BTreeMap<String, Self> {
        let mut topics: BTreeMap<String, Self> = BTreeMap::new();
        for start in starts {
            let known = topics.entry(start.topic.clone()).or_default();
            known.id = known.id.max(start.topic_id);
            known.count = known.count.max(start.partition.saturating_add(1));
        }
        topics
    }

    /// Follows a topic of this id. Returns false if the subscription does not read that topic.
    fn follow(&mut self, id: u64, on_recreate: OnRecreate) -> bool {
        // Nodes of earlier versions report no id. A node with old metadata reports a lower one.
        let is_recreated = self.id != 0 && id > self.id;
        if id != 0 && id < self.id || is_recreated && on_recreate == OnRecreate::Fail {
            return false;
        }
        self.id = self.id.max(id);
        true
    }

    /// Returns the partitions above the known ones, and records them as known.
    fn extend(&mut self, count: u32) -> Range<u32> {
        let first = self.count;
        self.count = count.max(first);
        first..self.count
    }
}

/// Cursors of partitions that a recreated topic lacks, kept until it gains them.
#[derive(Debug, Clone, Default)]
pub(super) struct ParkedCursors(Arc<Mutex<Vec<Cursor>>>);

impl ParkedCursors {
    fn add(&self, cursors: impl IntoIterator<Item = Cursor>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(cursors);
    }

    /// Removes and returns the cursors of a topic whose partitions are below `count`.
    fn take(&self, topic: &str, count: u32) -> Vec<Cursor> {
        let mut parked = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let exists = |it: &mut Cursor| it.start.topic == topic && it.start.partition < count;
        parked.extract_if(.., exists).collect()
    }
}

impl StreamTask {
    /// Reads partitions that are added to the topics, until the subscription is dropped.
    pub(super) async fn watch_new_partitions(self, mut topics: BTreeMap<String, KnownPartitions>) {
        loop {
            tokio::select! {
                () = self.events.closed() => return,
                () = sleep(NEW_PARTITIONS_INTERVAL) => {}
            }
            for (topic, known) in &mut topics {
                // Ignored: the next check follows soon, and the streams report lasting failures.
                let Ok(metadata) = self.client.admin().metadata(&[topic.as_str()]).await else {
                    continue;
                };
                let Some(found) = metadata.topics.iter().find(|it| it.topic == *topic) else {
                    continue;
                };
                let id = found.topic_id;
                if !known.follow(id, self.options.on_recreate) {
                    continue;
                }
                let count = u32::try_from(found.shard_ids.len()).unwrap_or(0);
                let start =
                    |partition| ReadStart::new(topic, partition, Position::Earliest).in_topic(id);
                let mut cursors = self.parked.take(topic, count);
                cursors.extend(known.extend(count).map(start).map(Cursor::new));
                if !cursors.is_empty() {
                    debug!(topic, count, new = cursors.len(), "subscribing to new partitions");
                    self.client.shared.routing.forget_topic(topic);
                    let progress_at = Instant::now();
                    Self { progress_at, ..self.with_cursors(cursors) }.spawn();
                }
            }
        }
    }

    /// Returns true if the error is caused by partitions that a recreated topic lacks.
    pub(super) fn has_absent(&self, error: &Error) -> bool {
        error.is(ErrorReason::PartitionNotFound)
            && self.options.on_recreate == OnRecreate::Restart
            && self.cursors.iter().any(|cursor| self.is_absent(cursor))
    }

    fn is_absent(&self, cursor: &Cursor) -> bool {
        let known = self.client.shared.routing.known_topic(&cursor.start.topic);
        known.is_some_and(|(id, count)| cursor.is_absent(id, count))
    }

    /// Stops reading partitions that a recreated topic lacks.
    ///
    /// Parks their cursors if the subscription reads new partitions.
    pub(super) fn park_absent(&mut self) {
        let cursors = std::mem::take(&mut self.cursors);
        let (absent, present) = cursors.into_iter().partition(|cursor| self.is_absent(cursor));
        self.cursors = present;
        let absent: Vec<_> = absent;
        debug!(partitions = absent.len(), "recreated topics lack partitions");
        if self.options.new_partitions {
            self.parked.add(absent);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(topic_id: u64) -> KnownPartitions {
        let start =
            |partition| ReadStart::new("orders", partition, Position::Earliest).in_topic(topic_id);
        KnownPartitions::of_starts(&[start(1), start(0)]).remove("orders").unwrap()
    }

    #[test]
    fn recreated_topic_has_no_added_partitions() {
        for mut known in [known(4), known(0)] {
            assert!(known.follow(4, OnRecreate::Fail));
            assert_eq!(known.extend(3), 2..3);
            assert!(!known.follow(6, OnRecreate::Fail));
            assert!(known.follow(4, OnRecreate::Fail), "it stays with its topic");
        }
    }

    #[test]
    fn restarted_subscription_ignores_the_old_topic() {
        let mut known = known(4);
        assert!(known.follow(6, OnRecreate::Restart));
        assert_eq!(known.extend(3), 2..3);
        assert!(!known.follow(4, OnRecreate::Restart));
        assert!(known.extend(2).is_empty());
    }

    #[test]
    fn parked_cursors_return_with_their_partitions() {
        let parked = ParkedCursors::default();
        let start = |partition| ReadStart::new("orders", partition, Position::Earliest);
        parked.add([2, 3].map(start).map(Cursor::new));
        assert!(parked.take("orders", 2).is_empty() && parked.take("other", 4).is_empty());
        let partitions = |count| -> Vec<_> {
            parked.take("orders", count).iter().map(|it| it.start.partition).collect()
        };
        assert_eq!([partitions(3), partitions(4), partitions(4)], [vec![2], vec![3], vec![]]);
    }
}
