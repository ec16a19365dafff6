//! Offsets to commit, and the commits of a member.
//!
//! Commits run one after the other and are numbered. All attempts of a commit have the same number,
//! so that the service refuses a late copy that arrives after a later commit. A partition is
//! released after its last commit.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use helix_proto::log::v1::{CommitOffsetsRequest, CommittedOffset, ErrorReason, TopicPartition};
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep_until};
use tracing::{debug, warn};

use super::builder::AutoCommit;
use super::heartbeats::EndRequest;
use super::membership::MemberHandle;
use super::{AssignedPartition, GroupKey, OwnershipId};
use crate::call_spec::{CallSpec, Repeat};
use crate::error::{Error, Result};

/// Limits of one request, below the limits of the service.
const OFFSETS_PER_COMMIT_MAX: usize = 1000;
const COMMIT_BYTES_MAX: usize = 40 << 10;

/// Bytes of an offset in a request, without its texts.
const OFFSET_BYTES: usize = 32;

/// An offset to commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OffsetToCommit {
    /// Partition, which the consumer must own.
    pub partition: AssignedPartition,
    /// Offset of the next record to read.
    pub offset: u64,
    /// Free text, up to 4 KiB.
    pub metadata: String,
}

impl OffsetToCommit {
    /// Creates an offset without metadata.
    pub fn new(partition: impl Into<AssignedPartition>, offset: u64) -> Self {
        Self { partition: partition.into(), offset, metadata: String::new() }
    }
}

/// An offset of one ownership, which must not be committed after the partition was lost.
#[derive(Debug, Clone)]
pub(super) struct OwnedOffset {
    pub(super) ownership: OwnershipId,
    pub(super) offset: OffsetToCommit,
}

/// Commits the offsets of a member.
#[derive(Debug)]
pub(super) struct Committer {
    membership: Arc<MemberHandle>,
    auto_commit: AutoCommit,
    state: Mutex<CommitState>,
    wake: Notify,
    /// Number of the last request.
    sequence: AtomicU64,
}

#[derive(Debug, Default)]
struct CommitState {
    offsets: BTreeMap<GroupKey, OwnedOffset>,
    /// True to commit without waiting for the interval.
    is_urgent: bool,
    waiters: Vec<oneshot::Sender<Result<()>>>,
    /// Partitions to release once their offsets are committed.
    releases: Vec<(GroupKey, OwnershipId)>,
    end: Option<EndRequest>,
    /// Partitions whose offsets were removed since the commit in flight began.
    removed: BTreeSet<GroupKey>,
    /// True once the task has stopped: there are no more commits.
    has_ended: bool,
}

/// Outcome of one commit.
#[derive(Debug)]
struct CommitOutcome {
    committed: Result<()>,
    /// Error of offsets that were dropped because they can no longer be committed.
    dropped: Option<Error>,
}

/// Outcome of the last commit.
#[derive(Debug)]
pub(super) struct FinalCommit {
    pub(super) end: EndRequest,
    pub(super) committed: Result<()>,
}

impl Committer {
    pub(super) fn new(membership: Arc<MemberHandle>, auto_commit: AutoCommit) -> Self {
        let (wake, sequence) = (Notify::new(), AtomicU64::new(0));
        Self { membership, auto_commit, state: Mutex::default(), wake, sequence }
    }

    /// Adds an offset for the next commit.
    pub(super) fn add(&self, offset: OwnedOffset) {
        let is_first = {
            let offsets = &mut self.state().offsets;
            let is_first = offsets.is_empty();
            offsets.insert(offset.offset.partition.key(), offset);
            is_first
        };
        // The first offset determines the time of the next commit; later ones need no wake-up.
        if is_first {
            self.wake.notify_one();
        }
    }

    /// Advances an offset that the next commit already has, which is the case for nearly every
    /// read.
    ///
    /// Returns `false` if the next commit has none of this ownership.
    pub(super) fn advance(&self, key: GroupKey, ownership: OwnershipId, offset: u64) -> bool {
        let mut state = self.state();
        match state.offsets.get_mut(&key) {
            Some(known) if known.ownership == ownership => {
                known.offset.offset = offset;
                known.offset.metadata.clear();
                true
            }
            _ => false,
        }
    }

    /// Removes the uncommitted offset of a partition. A failed commit in flight does not restore
    /// it.
    pub(super) fn remove(&self, key: GroupKey) {
        let mut state = self.state();
        state.offsets.remove(&key);
        state.removed.insert(key);
    }

    /// Commits all added offsets without waiting for the interval.
    pub(super) fn commit_soon(&self) {
        self.state().is_urgent = true;
        self.wake.notify_one();
    }

    /// Commits these offsets and all added ones.
    ///
    /// The result covers all of them, and offsets that were in flight.
    pub(super) fn commit_now(
        &self,
        offsets: impl IntoIterator<Item = OwnedOffset>,
    ) -> oneshot::Receiver<Result<()>> {
        let (sender, receiver) = oneshot::channel();
        let mut state = self.state();
        // Both under one lock, so that no commit takes the offsets but not the waiter.
        state.offsets.extend(offsets.into_iter().map(|it| (it.offset.partition.key(), it)));
        // Otherwise the sender is dropped, which fails the receiver.
        if !state.has_ended {
            state.waiters.push(sender);
        }
        drop(state);
        self.wake.notify_one();
        receiver
    }

    /// Fails all waiting commits, as the task of the member has stopped.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.has_ended = true;
        state.waiters.clear();
        state.end = None;
    }

    /// Releases partitions after their last commit.
    pub(super) fn release(&self, partitions: impl IntoIterator<Item = (GroupKey, OwnershipId)>) {
        self.state().releases.extend(partitions);
        self.wake.notify_one();
    }

    /// Commits all added offsets, then stops the member.
    pub(super) fn end(&self, request: EndRequest) {
        let mut state = self.state();
        if !state.has_ended {
            state.end = Some(request);
        }
        drop(state);
        self.wake.notify_one();
    }

    /// Runs commits until [`Self::end`] was called.
    pub(super) async fn run(&self) -> FinalCommit {
        let mut last_commit = Instant::now();
        // Time before which a failed commit is not repeated.
        let mut repeat_at: Option<Instant> = None;
        // Error of the last commit, for callers that arrived while it was in flight.
        let mut missed: Option<Error> = None;
        loop {
            let due = self.due(last_commit, repeat_at);
            tokio::select! {
                () = self.wake.notified() => {}
                () = sleep_until(due.unwrap_or(last_commit)), if due.is_some() => {}
            }
            if self.due(last_commit, repeat_at).is_none_or(|due| due > Instant::now()) {
                continue;
            }
            let CommitState { offsets, waiters, releases, end, .. } =
                std::mem::take(&mut *self.state());
            let CommitOutcome { committed, dropped } = self.commit(offsets).await;
            last_commit = Instant::now();
            repeat_at = None;
            let earlier = missed.take();
            {
                let state = self.state();
                let is_awaited = !state.waiters.is_empty() || state.end.is_some();
                missed = dropped.filter(|_| is_awaited);
            }
            match &committed {
                Err(error) if error.retryable && end.is_none() => {
                    warn!(group = self.membership.group, %error, "repeating a failed commit");
                    repeat_at = Some(last_commit + self.membership.client.config().backoff_max);
                    // The member owns the partitions until the repeated commit.
                    self.state().releases.extend(releases);
                }
                _ => {
                    self.forget(&releases);
                    self.membership.release(&releases);
                }
            }
            if let Err(error) = &committed
                && waiters.is_empty()
                && !error.retryable
                && end.is_none()
                && !is_fenced(error)
                && !is_of_gone_topic(error)
            {
                self.membership.fail(error.clone(), false);
            }
            let committed = committed.and(earlier.map_or(Ok(()), Err));
            for waiter in waiters {
                // Ignored: the caller no longer waits.
                let _ = waiter.send(committed.clone());
            }
            if let Some(end) = end {
                return FinalCommit { end, committed };
            }
        }
    }

    /// Returns when to commit; `None` if there is nothing to do.
    fn due(&self, last_commit: Instant, repeat_at: Option<Instant>) -> Option<Instant> {
        let state = self.state();
        if !state.waiters.is_empty() || state.end.is_some() {
            return Some(last_commit);
        }
        if !state.releases.is_empty() || (state.is_urgent && !state.offsets.is_empty()) {
            return Some(repeat_at.unwrap_or(last_commit));
        }
        if state.offsets.is_empty() {
            return None;
        }
        let interval = match self.auto_commit {
            AutoCommit::Every(interval) => Some(interval),
            // Without an interval, only a request or `repeat_at` commits again.
            AutoCommit::Off => None,
        };
        let due = interval.and_then(|interval| last_commit.checked_add(interval));
        due.into_iter().chain(repeat_at).min()
    }

    /// Drops the offsets of partitions that are being released.
    fn forget(&self, releases: &[(GroupKey, OwnershipId)]) {
        let mut state = self.state();
        for (key, ownership) in releases {
            if state.offsets.get(key).is_some_and(|it| it.ownership == *ownership) {
                state.offsets.remove(key);
            }
        }
    }

    /// Keeps offsets of a failed commit for the next one, while the member owns their partitions.
    fn keep(&self, failed: impl IntoIterator<Item = (GroupKey, OwnedOffset)>) {
        let mut state = self.state();
        for (key, offset) in failed {
            let is_wanted =
                !state.removed.contains(&key) && self.membership.holds(key, offset.ownership);
            if is_wanted {
                // A later offset has priority.
                state.offsets.entry(key).or_insert(offset);
            }
        }
    }

    /// Commits offsets, in several requests if necessary.
    ///
    /// Keeps failed offsets while the member owns their partitions, so that no later commit
    /// succeeds without them.
    async fn commit(&self, offsets: BTreeMap<GroupKey, OwnedOffset>) -> CommitOutcome {
        // Read before the ownerships, so that it is not newer than they are.
        let epoch = self.membership.epoch();
        let mut dropped = None;
        let mut is_held = |(key, it): &(GroupKey, OwnedOffset)| {
            let is_held = self.membership.holds(*key, it.ownership);
            if !is_held {
                dropped = Some(not_owned(&it.offset.partition));
            }
            is_held
        };
        let mut rest: Vec<_> = offsets.into_iter().filter(&mut is_held).collect();
        // Error of a single partition.
        let mut failed = None;
        while !rest.is_empty() {
            let count = chunk_len(&rest);
            let error = match self.send(epoch, &rest[..count]).await {
                Ok(()) => {
                    debug!(group = self.membership.group, count, "committed offsets");
                    rest.drain(..count);
                    continue;
                }
                Err(error) => error,
            };
            if let Some(topic_id) = gone_topic(&error, &rest[..count]) {
                warn!(group = self.membership.group, %error, "dropped the offsets of a topic");
                rest.retain(|(key, _)| key.topic_id != topic_id);
                dropped = Some(error);
                continue;
            }
            let is_of_one = !error.retryable && !is_fenced_member(&error);
            if let Some(index) = index_of(&error, &rest[..count]).filter(|_| is_of_one) {
                // Only this partition is affected.
                self.keep([rest.remove(index)]);
                failed = Some(error);
                continue;
            }
            if is_fenced_member(&error) {
                self.membership.lose(epoch, &error);
                dropped = Some(error.clone());
            }
            self.keep(rest);
            return CommitOutcome { committed: Err(error), dropped };
        }
        let committed = failed.or_else(|| dropped.clone()).map_or(Ok(()), Err);
        CommitOutcome { committed, dropped }
    }

    async fn send(&self, epoch: u64, offsets: &[(GroupKey, OwnedOffset)]) -> Result<()> {
        let MemberHandle { client, group, member_id, .. } = &*self.membership;
        let wire = |(_, it): &(GroupKey, OwnedOffset)| CommittedOffset {
            partition: Some(TopicPartition::from(it.offset.partition.clone())),
            offset: it.offset.offset,
            metadata: it.offset.metadata.clone(),
        };
        let request = CommitOffsetsRequest {
            group: group.clone(),
            member_id: member_id.clone(),
            // All attempts have the same epoch and sequence, so a loss or a later commit fences
            // late ones.
            member_epoch: epoch,
            sequence: self.sequence.fetch_add(1, Ordering::Relaxed) + 1,
            offsets: offsets.iter().map(wire).collect(),
            offsets_epoch: None,
        };
        // The coordinator has assigned the partitions, so it knows their topics.
        let rechecks_topics = false;
        let call = CallSpec { rechecks_topics, ..CallSpec::new("commit offsets", Repeat::Always) };
        let committed = client.call_coordinator(group, call, |node| {
            let request = request.clone();
            async move { node.group().commit_offsets(request).await }
        });
        committed.await.map(drop)
    }

    fn state(&self) -> MutexGuard<'_, CommitState> {
        // No code under the lock can panic in the middle of a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the error of an offset whose partition the member no longer owns.
pub(super) fn not_owned(partition: &AssignedPartition) -> Error {
    let message = "the consumer does not own the partition";
    let error = Error::known(ErrorReason::PartitionNotOwned, message);
    error.with_partition(&partition.topic, partition.partition)
}

/// Returns true if the service has removed the member or no longer accepts its epoch.
fn is_fenced_member(error: &Error) -> bool {
    matches!(error.reason, Some(ErrorReason::UnknownMember | ErrorReason::StaleMemberEpoch))
}

/// Returns true if the failure reaches the application as a lost partition.
fn is_fenced(error: &Error) -> bool {
    is_fenced_member(error) || error.is(ErrorReason::PartitionNotOwned)
}

/// Returns true if the topic of an offset was deleted. The service will revoke its partitions.
fn is_of_gone_topic(error: &Error) -> bool {
    use ErrorReason::{PartitionNotFound, TopicDeleted, TopicNotFound, TopicRecreated};
    matches!(error.reason, Some(TopicNotFound | TopicDeleted | PartitionNotFound | TopicRecreated))
}

/// Returns the index of the offset that an error names.
fn index_of(error: &Error, offsets: &[(GroupKey, OwnedOffset)]) -> Option<usize> {
    let (topic, partition) = error.topic_partition.as_ref()?;
    let is_named = |(_, it): &(GroupKey, OwnedOffset)| {
        it.offset.partition.topic == *topic && it.offset.partition.partition == *partition
    };
    offsets.iter().position(is_named)
}

/// Returns the id of the deleted topic that an error names.
fn gone_topic(error: &Error, offsets: &[(GroupKey, OwnedOffset)]) -> Option<u64> {
    if !is_of_gone_topic(error) {
        return None;
    }
    if let Some(recreated) = &error.recreated
        && offsets.iter().any(|(key, _)| key.topic_id == recreated.expected_id)
    {
        return Some(recreated.expected_id);
    }
    index_of(error, offsets).map(|index| offsets[index].0.topic_id)
}

/// Returns how many offsets fit one request.
fn chunk_len(offsets: &[(GroupKey, OwnedOffset)]) -> usize {
    let mut bytes = 0;
    let fits = |(_, it): &&(GroupKey, OwnedOffset)| {
        bytes += it.offset.metadata.len() + it.offset.partition.topic.len() + OFFSET_BYTES;
        bytes <= COMMIT_BYTES_MAX
    };
    offsets.iter().take(OFFSETS_PER_COMMIT_MAX).take_while(fits).count().max(1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt;

    use super::*;
    use crate::client::Client;
    use crate::config::Config;

    #[tokio::test]
    async fn reads_wake_the_commits_once_and_move_their_offset() {
        let client = Client::new(Config::new(["n1:9092"])).unwrap();
        let release = Duration::from_secs(60);
        let member = MemberHandle::new(client, "g".to_owned(), "m".to_owned(), release);
        let committer = Committer::new(Arc::new(member), AutoCommit::default());
        let is_woken = || committer.wake.notified().now_or_never().is_some();
        let key = GroupKey { topic_id: 1, partition: 0 };
        let owned = |ownership, offset| {
            let offset = OffsetToCommit::new(key.with_topic("orders"), offset);
            OwnedOffset { ownership: OwnershipId(ownership), offset }
        };
        assert!(!committer.advance(key, OwnershipId(1), 4), "nothing to move");
        committer.add(owned(1, 5));
        assert!(is_woken());
        committer.add(owned(1, 6));
        assert!(committer.advance(key, OwnershipId(1), 7));
        assert!(!is_woken(), "the time of the next commit is known");
        assert!(!committer.advance(key, OwnershipId(2), 8), "another ownership");
        assert_eq!(committer.state().offsets[&key].offset.offset, 7);
    }

    #[test]
    fn commits_fit_the_limits_of_the_service() {
        let offset = |partition, metadata: usize| {
            let topic = "orders".to_owned();
            let key = GroupKey { topic_id: 1, partition };
            let offset = OffsetToCommit {
                partition: AssignedPartition { topic, partition, topic_id: 1 },
                offset: 7,
                metadata: "x".repeat(metadata),
            };
            (key, OwnedOffset { ownership: OwnershipId(1), offset })
        };
        let small: Vec<_> = (0..1500).map(|number| offset(number, 0)).collect();
        assert_eq!(chunk_len(&small), 1000);
        let large: Vec<_> = (0..50).map(|number| offset(number, 4000)).collect();
        assert_eq!(chunk_len(&large), 10);
        assert_eq!(chunk_len(&[offset(0, 50_000)]), 1, "the service rejects it");
    }
}
