//! The consumer of a group: yields records and changes of the assignment, and tracks positions.

mod changes;

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use helix_proto::log::v1::ErrorReason;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::builder::{AutoCommit, GroupConsumerBuilder};
use super::committer::{Committer, OffsetToCommit, OwnedOffset, not_owned};
use super::fetch_queue::FetchQueue;
use super::heartbeats::{EndRequest, MemberSettings, run_member};
use super::membership::MemberHandle;
use super::readers::Readers;
use super::starts::ResolvedStart;
use super::{AssignedPartition, GroupEvent, GroupKey, OwnershipId, StartPolicy};
use crate::consumer::{Batches, Records, decode};
use crate::error::{Error, Result};

/// A member of a consumer group that reads its partitions.
///
/// Calls of [`GroupConsumer::next`] drive the consumer: call it until the work is done, then call
/// [`GroupConsumer::close`]. A dropped consumer leaves the group in the background, if the runtime
/// is still running, except a static member. It commits only records that the application has
/// finished.
#[derive(Debug)]
pub struct GroupConsumer {
    membership: Arc<MemberHandle>,
    committer: Arc<Committer>,
    queue: Arc<FetchQueue>,
    readers: Readers,
    start: StartPolicy,
    is_auto_commit: bool,
    is_static: bool,
    skips_undecodable: bool,
    partitions: BTreeMap<GroupKey, ReadPartition>,
    /// Partitions whose start is being resolved.
    starting: JoinSet<Vec<ResolvedStart>>,
    /// Assigned partitions that the last call has reported to the application.
    assigned: Vec<GroupKey>,
    /// Revoked partitions that the last call has reported to the application.
    revoked: Vec<(GroupKey, OwnershipId)>,
    /// Partition of the last records.
    yielded: Option<GroupKey>,
    /// Errors of single partitions.
    errors: VecDeque<Error>,
    /// True once an error was final.
    has_ended: bool,
    is_closed: bool,
}

/// A partition that the application reads.
#[derive(Debug)]
struct ReadPartition {
    topic: String,
    ownership: OwnershipId,
    /// Offset after the last yielded record; `None` until the start is resolved.
    position: Option<u64>,
    /// Last offset that is committed, or that the committer keeps until it is committed.
    committed: Option<u64>,
    is_paused: bool,
    /// Not read, because the topic is gone or the partition has failed.
    is_stopped: bool,
    /// No longer read: the next call releases the partition.
    is_revoked: bool,
}

impl ReadPartition {
    fn is_read(&self) -> bool {
        !self.is_paused && !self.is_stopped && !self.is_revoked
    }

    /// Returns the position for the committer, unless the committer already has it.
    fn take_position(&mut self, key: GroupKey) -> Option<OwnedOffset> {
        let position = self.position.filter(|_| self.position != self.committed)?;
        self.committed = Some(position);
        let offset = OffsetToCommit::new(key.with_topic(&self.topic), position);
        Some(OwnedOffset { ownership: self.ownership, offset })
    }
}

impl GroupConsumer {
    pub(super) fn new(builder: GroupConsumerBuilder) -> Self {
        let GroupConsumerBuilder { client, group, member_id, release_timeout, .. } = builder;
        let is_static = !builder.static_name.is_empty();
        let settings = MemberSettings {
            topics: builder.topics,
            static_name: builder.static_name,
            client_name: builder.client_name,
            session_timeout: builder.session_timeout,
        };
        let membership =
            Arc::new(MemberHandle::new(client.clone(), group, member_id, release_timeout));
        let committer = Arc::new(Committer::new(membership.clone(), builder.auto_commit));
        // The task stops after an end request to the committer.
        tokio::spawn(run_member(membership.clone(), committer.clone(), settings));
        let queue = Arc::new(FetchQueue::new(builder.buffer_bytes));
        Self {
            membership,
            committer,
            readers: Readers::new(client, queue.clone()),
            queue,
            start: builder.start,
            is_auto_commit: matches!(builder.auto_commit, AutoCommit::Every(_)),
            is_static,
            skips_undecodable: builder.skips_undecodable,
            partitions: BTreeMap::new(),
            starting: JoinSet::new(),
            assigned: Vec::new(),
            revoked: Vec::new(),
            yielded: None,
            errors: VecDeque::new(),
            has_ended: false,
            is_closed: false,
        }
    }

    /// Returns the next event, or `None` after a final error.
    ///
    /// A call tells the consumer that the application is done with the last records and with the
    /// partitions of the last [`GroupEvent::Revoked`]. Waits for records without a limit.
    ///
    /// Cancel safe: no event is lost if the future is dropped.
    ///
    /// # Errors
    /// An error that names a partition (`topic_partition`) stops only that partition, until a
    /// [`GroupConsumer::seek`]: `OFFSET_OUT_OF_RANGE`, `NO_COMMITTED_OFFSET` and `TOPIC_RECREATED`
    /// as [`StartPolicy`] says, or `CORRUPT_LOG`. `UNDECODABLE_BATCH` follows the records before
    /// the batch, which can be committed; see [`GroupConsumerBuilder::skip_undecodable`].
    ///
    /// A failed automatic commit is reported unless it is repeated; it stops nothing.
    ///
    /// Other errors are final: a rejected join, `MEMBER_NAME_IN_USE` if another process has taken
    /// over the static name, `UNIMPLEMENTED` if the cluster has no groups yet.
    pub async fn next(&mut self) -> Option<Result<GroupEvent<Records>>> {
        let batches = match self.next_encoded().await? {
            Ok(GroupEvent::Data(batches)) => batches,
            Ok(GroupEvent::CaughtUp { partition, watermarks }) => {
                return Some(Ok(GroupEvent::CaughtUp { partition, watermarks }));
            }
            Ok(GroupEvent::Assigned(partitions)) => {
                return Some(Ok(GroupEvent::Assigned(partitions)));
            }
            Ok(GroupEvent::Revoked(partitions)) => {
                return Some(Ok(GroupEvent::Revoked(partitions)));
            }
            Ok(GroupEvent::Lost(partitions)) => return Some(Ok(GroupEvent::Lost(partitions))),
            Err(error) => return Some(Err(error)),
        };
        let (records, failure) = decode::readable(batches, self.skips_undecodable);
        let Some(error) = failure else { return Some(Ok(GroupEvent::Data(records))) };
        let error = error.with_partition(&records.topic, records.partition);
        let key = AssignedPartition::from(&records).key();
        if let Some(read) = self.partitions.get_mut(&key) {
            // The position stays before the batch, which the application did not get.
            (read.position, read.is_stopped) = (Some(records.next_offset), true);
        }
        self.discard([key]);
        self.read_partitions();
        if records.records.is_empty() {
            self.yielded = None;
            return Some(Err(error));
        }
        // Reported by the next call, after the records before it.
        self.errors.push_back(error);
        Some(Ok(GroupEvent::Data(records)))
    }

    /// Like [`GroupConsumer::next`], but returns the stored batches.
    ///
    /// # Errors
    /// As [`GroupConsumer::next`].
    pub async fn next_encoded(&mut self) -> Option<Result<GroupEvent<Batches>>> {
        self.finish_last_event();
        loop {
            if self.has_ended {
                return None;
            }
            self.membership.expire(Instant::now());
            if let Some(change) = self.membership.take_change() {
                return Some(self.on_change(change));
            }
            while let Some(started) = self.starting.try_join_next() {
                self.on_started(started.unwrap_or_default());
            }
            if let Some(error) = self.errors.pop_front() {
                return Some(Err(error));
            }
            while let Some(message) = self.queue.pop() {
                if let Some(event) = self.on_message(message) {
                    return Some(Ok(event));
                }
            }
            if !self.errors.is_empty() {
                continue;
            }
            let expiry = self.membership.next_expiry();
            tokio::select! {
                () = self.membership.changed.notified() => {}
                () = self.queue.readable.notified() => {}
                Some(started) = self.starting.join_next() => {
                    self.on_started(started.unwrap_or_default());
                }
                () = sleep_until(expiry.unwrap_or_else(Instant::now)), if expiry.is_some() => {}
            }
        }
    }

    /// Like [`GroupConsumer::next`], but returns only records.
    ///
    /// Suits applications whose only state of a partition is its offset.
    ///
    /// # Errors
    /// As [`GroupConsumer::next`].
    pub async fn next_records(&mut self) -> Option<Result<Records>> {
        loop {
            match self.next().await? {
                Ok(GroupEvent::Data(records)) => return Some(Ok(records)),
                Ok(_) => {}
                Err(error) => return Some(Err(error)),
            }
        }
    }

    /// Commits all yielded records in the background, including the last ones.
    ///
    /// Failed commits are repeated; [`GroupConsumer::next`] reports final failures.
    pub fn commit(&mut self) {
        for offset in self.take_positions() {
            self.committer.add(offset);
        }
        self.committer.commit_soon();
    }

    /// Commits all yielded records, including the last ones, and waits until the commit is durable.
    ///
    /// # Errors
    /// `PARTITION_NOT_OWNED` or `UNKNOWN_MEMBER` if a partition was lost: other members read its
    /// records again. Otherwise the last failure, also of an earlier commit: failed offsets are
    /// part of the next commit while the consumer owns their partitions. If the coordinator does
    /// not respond within the request timeout, the commit is repeated later.
    pub async fn commit_sync(&mut self) -> Result<()> {
        let positions = self.take_positions();
        committed(self.committer.commit_now(positions)).await
    }

    /// Commits these offsets, and waits until they are durable.
    ///
    /// The offsets need not belong to yielded records.
    ///
    /// # Errors
    /// `PARTITION_NOT_OWNED` for a partition that the consumer does not own; nothing is committed.
    /// Otherwise as [`GroupConsumer::commit_sync`].
    pub async fn commit_offsets(
        &mut self,
        offsets: impl IntoIterator<Item = OffsetToCommit>,
    ) -> Result<()> {
        let offsets: Vec<_> = offsets.into_iter().collect();
        let mut owned = Vec::with_capacity(offsets.len());
        for offset in offsets {
            let ownership = self.owned(&offset.partition)?.ownership;
            owned.push(OwnedOffset { ownership, offset });
        }
        for offset in &owned {
            if let Some(read) = self.partitions.get_mut(&offset.offset.partition.key()) {
                read.committed = Some(offset.offset.offset);
            }
        }
        committed(self.committer.commit_now(owned)).await
    }

    /// Pauses these partitions, which stay assigned.
    ///
    /// Drops their buffered records, which are read again after [`GroupConsumer::resume`].
    ///
    /// # Errors
    /// `PARTITION_NOT_OWNED`; nothing is paused.
    pub fn pause(&mut self, partitions: &[AssignedPartition]) -> Result<()> {
        self.set_paused(partitions, true)
    }

    /// Reads paused partitions again.
    ///
    /// # Errors
    /// `PARTITION_NOT_OWNED`; nothing is resumed.
    pub fn resume(&mut self, partitions: &[AssignedPartition]) -> Result<()> {
        self.set_paused(partitions, false)
    }

    /// Continues reading a partition at this offset.
    ///
    /// Commits nothing, and drops an uncommitted offset of the partition. Also restarts a partition
    /// that an error has stopped.
    ///
    /// # Errors
    /// `PARTITION_NOT_OWNED`.
    pub fn seek(&mut self, partition: &AssignedPartition, offset: u64) -> Result<()> {
        self.owned(partition)?;
        let key = partition.key();
        // A new reader must start at the offset, not where the old reader stopped.
        self.suspend(key);
        self.discard([key]);
        self.committer.remove(key);
        self.yielded.take_if(|yielded| *yielded == key);
        // Earlier errors of the partition do not concern the new position.
        let named = Some((partition.topic.clone(), partition.partition));
        self.errors.retain(|error| error.topic_partition != named);
        if let Some(read) = self.partitions.get_mut(&key) {
            (read.position, read.committed, read.is_stopped) = (Some(offset), None, false);
        }
        // Partitions of the last `Assigned` start with the next call.
        if !self.assigned.contains(&key) {
            self.read_partitions();
        }
        Ok(())
    }

    /// Returns the partitions of this member, sorted by topic id and number.
    pub fn assignment(&self) -> Vec<AssignedPartition> {
        self.partitions.iter().map(|(key, read)| key.with_topic(&read.topic)).collect()
    }

    /// Returns the offset after the last yielded record of a partition.
    ///
    /// `None` if the consumer does not own the partition, or its start is not known yet.
    pub fn position(&self, partition: &AssignedPartition) -> Option<u64> {
        self.partitions.get(&partition.key())?.position
    }

    /// Returns true while the member has all of its partitions of the current assignment.
    ///
    /// None of them waits for a release by another member. If other members have all partitions,
    /// [`GroupConsumer::assignment`] is empty.
    pub fn is_settled(&self) -> bool {
        self.membership.is_settled()
    }

    /// Returns subscribed names and patterns that match no topic.
    pub fn unmatched_topics(&self) -> Vec<String> {
        self.membership.unmatched_topics()
    }

    /// Returns the member id.
    pub fn member_id(&self) -> &str {
        &self.membership.member_id
    }

    /// Returns the bytes that were read ahead.
    pub fn buffered_bytes(&self) -> usize {
        self.queue.bytes()
    }

    /// Commits all yielded records, unless automatic commits are off, and leaves the group.
    ///
    /// The last records are included. A static member does not leave: its partitions wait for the
    /// next process until the session timeout.
    ///
    /// # Errors
    /// As [`GroupConsumer::commit_sync`]; the last failure if the coordinator does not respond.
    pub async fn close(self) -> Result<()> {
        let leaves = !self.is_static;
        self.end(leaves).await
    }

    /// Like [`GroupConsumer::close`], but a static member leaves too.
    ///
    /// # Errors
    /// As [`GroupConsumer::close`].
    pub async fn leave(self) -> Result<()> {
        self.end(true).await
    }

    async fn end(mut self, leaves: bool) -> Result<()> {
        self.finish_last_event();
        self.is_closed = true;
        let (sender, receiver) = oneshot::channel();
        self.committer.end(EndRequest { leaves, done: Some(sender) });
        // Stop the readers before waiting.
        drop(self);
        committed(receiver).await
    }

    /// Marks the last event as done, as the application asks for the next one.
    fn finish_last_event(&mut self) {
        if let Some(key) = self.yielded.take()
            && self.is_auto_commit
        {
            self.add_position(key);
        }
        if !self.revoked.is_empty() {
            let revoked = std::mem::take(&mut self.revoked);
            for (key, _) in &revoked {
                self.partitions.remove(key);
            }
            // Drop buffered records even if the partition was sought or resumed after it was
            // revoked.
            self.read_partitions();
            self.discard(revoked.iter().map(|(key, _)| *key));
            self.committer.release(revoked);
            self.report_paused();
        }
        if !self.assigned.is_empty() {
            let assigned = std::mem::take(&mut self.assigned);
            self.resolve_starts(assigned, Duration::ZERO);
            self.read_partitions();
        }
    }

    fn set_paused(&mut self, partitions: &[AssignedPartition], is_paused: bool) -> Result<()> {
        for partition in partitions {
            self.owned(partition)?;
        }
        for partition in partitions {
            if let Some(read) = self.partitions.get_mut(&partition.key()) {
                read.is_paused = is_paused;
            }
        }
        self.read_partitions();
        if is_paused {
            self.discard(partitions.iter().map(AssignedPartition::key));
        }
        self.report_paused();
        Ok(())
    }

    fn report_paused(&self) {
        let paused = self.partitions.iter().filter(|(_, read)| read.is_paused);
        self.membership.set_paused(paused.map(|(key, _)| *key).collect::<BTreeSet<_>>());
    }

    fn owned(&self, partition: &AssignedPartition) -> Result<&ReadPartition> {
        self.partitions.get(&partition.key()).ok_or_else(|| not_owned(partition))
    }

    /// Takes the positions that the committer does not have, for its next commit.
    fn take_positions(&mut self) -> Vec<OwnedOffset> {
        self.partitions.iter_mut().filter_map(|(key, read)| read.take_position(*key)).collect()
    }

    /// Adds the position of a partition to the next commit, unless the committer already has it.
    fn add_position(&mut self, key: GroupKey) {
        let Some(read) = self.partitions.get_mut(&key) else { return };
        let Some(position) = read.position.filter(|_| read.position != read.committed) else {
            return;
        };
        if self.committer.advance(key, read.ownership, position) {
            read.committed = Some(position);
        } else if let Some(offset) = read.take_position(key) {
            self.committer.add(offset);
        }
    }

    fn discard(&self, keys: impl IntoIterator<Item = GroupKey>) {
        let keys: HashSet<_> = keys.into_iter().collect();
        self.queue.discard(&keys);
    }

    /// Stops reading a partition until the next [`Self::read_partitions`].
    fn suspend(&mut self, key: GroupKey) {
        let mut wanted = self.wanted();
        wanted.remove(&key);
        self.readers.set(&wanted, Duration::ZERO);
    }

    /// Reads the partitions that have a start and are neither paused nor stopped.
    fn read_partitions(&mut self) {
        self.read_after(Duration::ZERO);
    }

    fn read_after(&mut self, delay: Duration) {
        let wanted = self.wanted();
        self.readers.set(&wanted, delay);
    }

    fn wanted(&self) -> BTreeMap<GroupKey, (String, u64)> {
        let read = self.partitions.iter().filter(|(_, read)| read.is_read());
        read.filter_map(|(key, read)| Some((*key, (read.topic.clone(), read.position?)))).collect()
    }
}

impl Drop for GroupConsumer {
    fn drop(&mut self) {
        if !self.is_closed {
            self.committer.end(EndRequest { leaves: !self.is_static, done: None });
        }
    }
}

/// Waits for the result of a commit.
async fn committed(receiver: oneshot::Receiver<Result<()>>) -> Result<()> {
    receiver.await.unwrap_or_else(|_| {
        let message = "the consumer has ended, and its member with it";
        Err(Error::known(ErrorReason::UnknownMember, message))
    })
}
