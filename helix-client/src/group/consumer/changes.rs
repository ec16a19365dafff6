//! Handles changes of the assignment, messages of readers, and resolved starts.

use std::collections::HashMap;
use std::time::Duration;

use helix_proto::log::v1::ErrorReason;
use tokio::time::sleep;
use tracing::{debug, warn};

use super::{GroupConsumer, ReadPartition};
use crate::consumer::Batches;
use crate::error::{Error, Result};
use crate::group::fetch_queue::{FetchedMessage, key_of};
use crate::group::membership::AssignmentChange;
use crate::group::starts::{self, ResolvedStart, StartingPartition, is_gone};
use crate::group::{AssignedPartition, GroupEvent, GroupKey, StartPolicy};

impl GroupConsumer {
    /// Resolves the start of partitions that have none.
    pub(super) fn resolve_starts(&mut self, keys: Vec<GroupKey>, delay: Duration) {
        let starting = |key: GroupKey| {
            let is_awaited = |read: &&ReadPartition| {
                read.position.is_none() && !read.is_stopped && !read.is_revoked
            };
            let read = self.partitions.get(&key).filter(is_awaited)?;
            let partition = key.with_topic(&read.topic);
            Some(StartingPartition { partition, ownership: read.ownership })
        };
        let partitions: Vec<_> = keys.into_iter().filter_map(starting).collect();
        if partitions.is_empty() {
            return;
        }
        let membership = self.membership.clone();
        let position = starts::committed(&membership.group, self.start);
        self.starting.spawn(async move {
            sleep(delay).await;
            starts::resolve(&membership, partitions, position).await
        });
    }

    pub(super) fn on_started(&mut self, started: Vec<ResolvedStart>) {
        // Committed at once, because a later start at the end would skip the records in between.
        let commits_start = self.start == StartPolicy::Latest;
        let mut unknown = Vec::new();
        for (key, ownership, start) in started {
            // A start after a seek is ignored.
            let is_awaited =
                |read: &&mut ReadPartition| read.ownership == ownership && read.position.is_none();
            let Some(read) = self.partitions.get_mut(&key).filter(is_awaited) else { continue };
            match start {
                Ok(offset) => {
                    read.position = Some(offset);
                    read.committed = Some(offset).filter(|_| !commits_start);
                    if commits_start {
                        self.add_position(key);
                        self.committer.commit_soon();
                    }
                }
                // A node may not know a new partition yet. A deleted partition will be revoked.
                Err(error) if is_gone(&error, key.topic_id) => {
                    let group = &self.membership.group;
                    debug!(group, %error, "retrying to resolve a start offset");
                    unknown.push(key);
                }
                Err(error) => {
                    read.is_stopped = true;
                    self.errors.push_back(error);
                }
            }
        }
        self.resolve_starts(unknown, self.membership.client.config().backoff_max);
        self.read_partitions();
    }

    pub(super) fn on_change<T>(&mut self, change: AssignmentChange) -> Result<GroupEvent<T>> {
        match change {
            AssignmentChange::Assigned(partitions) => {
                let topic_ids: HashMap<&str, u64> =
                    partitions.iter().map(|(it, _)| (it.topic.as_str(), it.topic_id)).collect();
                for (key, read) in &mut self.partitions {
                    // The earlier topic of the same name is gone.
                    let topic_id = topic_ids.get(read.topic.as_str());
                    read.is_stopped |= topic_id.is_some_and(|id| *id != key.topic_id);
                }
                self.discard(partitions.iter().map(|(partition, _)| partition.key()));
                for (partition, ownership) in &partitions {
                    let read = ReadPartition {
                        topic: partition.topic.clone(),
                        ownership: *ownership,
                        position: None,
                        committed: None,
                        is_paused: false,
                        is_stopped: false,
                        is_revoked: false,
                    };
                    self.partitions.insert(partition.key(), read);
                    self.assigned.push(partition.key());
                }
                Ok(GroupEvent::Assigned(partitions.into_iter().map(|(it, _)| it).collect()))
            }
            AssignmentChange::Revoked(partitions) => {
                for partition in &partitions {
                    if let Some(read) = self.partitions.get_mut(&partition.key()) {
                        read.is_revoked = true;
                        self.revoked.push((partition.key(), read.ownership));
                    }
                }
                self.read_partitions();
                self.discard(partitions.iter().map(AssignedPartition::key));
                Ok(GroupEvent::Revoked(partitions))
            }
            AssignmentChange::Lost(partitions) => {
                for partition in &partitions {
                    self.partitions.remove(&partition.key());
                    self.committer.remove(partition.key());
                }
                self.read_partitions();
                self.discard(partitions.iter().map(AssignedPartition::key));
                self.report_paused();
                Ok(GroupEvent::Lost(partitions))
            }
            AssignmentChange::Failed(error, is_final) => {
                self.has_ended |= is_final;
                Err(error)
            }
        }
    }

    pub(super) fn on_message(&mut self, message: FetchedMessage) -> Option<GroupEvent<Batches>> {
        match message {
            FetchedMessage::Data(batches) => {
                let key = key_of(&batches);
                let read = self.partitions.get_mut(&key).filter(|read| read.is_read())?;
                read.position = Some(batches.next_offset);
                self.yielded = Some(key);
                Some(GroupEvent::Data(batches))
            }
            FetchedMessage::CaughtUp(key, watermarks) => {
                let read = self.partitions.get(&key).filter(|read| read.is_read())?;
                let partition = key.with_topic(&read.topic);
                Some(GroupEvent::CaughtUp { partition, watermarks })
            }
            FetchedMessage::Failed(reader, error) => {
                self.on_reader_failure(reader, error);
                None
            }
        }
    }

    /// Stops or restarts the partitions that an error concerns, and reads the others again.
    fn on_reader_failure(&mut self, reader: u64, error: Error) {
        let partitions = self.readers.remove(reader);
        if partitions.is_empty() {
            return;
        }
        let is_concerned =
            |it: &&AssignedPartition| match (&error.recreated, &error.topic_partition) {
                (Some(recreated), _) => it.topic == recreated.topic,
                (None, Some((topic, number))) => it.topic == *topic && it.partition == *number,
                (None, None) => true,
            };
        let concerned: Vec<_> = partitions.iter().filter(is_concerned).cloned().collect();
        let group = &self.membership.group;
        let mut delay = Duration::ZERO;
        if error.is(ErrorReason::TopicRecreated) {
            // The service will revoke the partitions of the earlier topic.
            for partition in &concerned {
                if let Some(read) = self.partitions.get_mut(&partition.key()) {
                    read.is_stopped = true;
                }
            }
            debug!(group, partitions = concerned.len(), %error, "stopped partitions");
        } else if error.retryable || concerned.iter().any(|it| is_gone(&error, it.topic_id)) {
            // A node may not know a new partition yet.
            warn!(group, count = partitions.len(), %error, "starting another reader");
            delay = self.membership.client.config().backoff_max;
        } else if error.is(ErrorReason::OffsetOutOfRange)
            // With several partitions, the fallback would skip records of readable ones.
            && let [partition] = &concerned[..]
            && let Some(read) = self.partitions.get_mut(&partition.key())
            && let Some(reached) = read.position
            && let Some(position) = starts::overtaken(group, self.start, reached)
        {
            warn!(group, policy = ?self.start, %error, "starting at the fallback");
            read.position = None;
            let (partition, ownership) = (partition.clone(), read.ownership);
            let starting = vec![StartingPartition { partition, ownership }];
            self.discard(starting.iter().map(|it| it.partition.key()));
            let membership = self.membership.clone();
            self.starting
                .spawn(async move { starts::resolve(&membership, starting, position).await });
        } else {
            for partition in &concerned {
                if let Some(read) = self.partitions.get_mut(&partition.key()) {
                    read.is_stopped = true;
                    let AssignedPartition { topic, partition, .. } = partition;
                    self.errors.push_back(error.clone().with_partition(topic, *partition));
                }
            }
            debug!(group, partitions = concerned.len(), %error, "stopped partitions");
        }
        self.read_after(delay);
    }
}
