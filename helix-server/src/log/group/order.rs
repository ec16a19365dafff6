//! Order of commits: detects commits that are older than the offsets of the group.
//!
//! Epochs are indexes of the shard's log, so they never repeat, even if a group is deleted and
//! created again. A commit without a member names the epoch of the offsets that it follows; a seek
//! or a deletion may name one. A commit of a member has a place: the epoch of the member and a
//! sequence within it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::command::{CommittingMember, TopicOffsets};
use super::offsets::named_topic_len;
use super::{ConsumerGroup, GroupRefusal, PartitionKey, StaleCommit};

/// Limit of deleted groups of a shard whose epochs are kept by name. Changing it needs a new
/// protocol version.
pub const DELETED_GROUPS_MAX: usize = 4_096;

/// Epochs of a group's offsets; 0 means never. `sought <= fence <= changed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct OffsetEpochs {
    /// Last seek, undo or `ForgetTopic`, or the deletion before the group was created. The removal
    /// of a dropped topic does not count.
    pub(super) sought: u64,
    /// Last change that is not a commit without a member.
    pub(super) fence: u64,
    /// Last change.
    pub(super) changed: u64,
}

impl OffsetEpochs {
    /// Returns the epochs after a seek, a removal of offsets or a deletion at this index.
    pub(super) fn after(deleted: u64) -> Self {
        Self { sought: deleted, fence: deleted, changed: deleted }
    }

    pub(super) fn is_sound(self) -> bool {
        self.sought <= self.fence && self.fence <= self.changed
    }
}

/// Place of the commit that set an offset, compared field by field.
///
/// A commit of a member has the epoch of the member and its sequence. A commit without a member has
/// the index of its entry, and 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct CommitPlace {
    pub epoch: u64,
    pub sequence: u64,
}

/// Why a commit is stale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StaleReason {
    /// Offsets of the group were changed after the epoch that the commit names.
    Epoch { given: u64 },
    /// The commit names no epoch, but the group was deleted, sought, or has forgotten a topic.
    NoEpoch,
    /// A later commit without a member has set the offset.
    Moved { given: u64 },
    /// A later commit of the member has set the offset, or another commit has the same sequence.
    Sequence { given: CommitPlace, last: CommitPlace },
    /// The topic was deleted.
    Topic,
}

impl fmt::Display for StaleReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Epoch { given } => write!(
                f,
                "the group was sought, deleted or given to members after its offsets_epoch {given}"
            ),
            Self::NoEpoch => {
                f.write_str("the group was sought or deleted, so it needs an offsets_epoch")
            }
            Self::Moved { given } => {
                write!(f, "a later commit than its offsets_epoch {given} has set the offset")
            }
            Self::Sequence { given, last } if given == last => write!(
                f,
                "sequence {} of member epoch {} belongs to a commit of another offset",
                given.sequence, given.epoch
            ),
            Self::Sequence { given, last } => write!(
                f,
                "sequence {} of member epoch {} is older than sequence {} of member epoch {}, \
                 which has set the offset",
                given.sequence, given.epoch, last.sequence, last.epoch
            ),
            Self::Topic => f.write_str("the topic was deleted, and the group has forgotten it"),
        }
    }
}

/// Groups of a shard that were deleted, with the indexes of their deletions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct DeletedGroups {
    by_name: BTreeMap<Arc<str>, u64>,
    /// Greatest index of a deletion that is no longer remembered by name.
    forgotten: u64,
    /// Estimated bytes in a checkpoint.
    bytes: usize,
}

impl DeletedGroups {
    /// Returns the index of the last deletion of a group with this name.
    ///
    /// For a name that is not kept: the greatest index of the deletions that are no longer kept.
    pub(super) fn epoch_of(&self, name: &str) -> u64 {
        self.by_name.get(name).copied().unwrap_or(self.forgotten)
    }

    pub(super) fn insert(&mut self, name: Arc<str>, index: u64) {
        self.bytes += named_topic_len(&name);
        if self.by_name.insert(name.clone(), index).is_some() {
            self.bytes -= named_topic_len(&name);
        }
        while self.by_name.len() > DELETED_GROUPS_MAX {
            let oldest = self.by_name.iter().min_by_key(|(_, index)| **index);
            let Some((oldest, index)) = oldest.map(|(name, index)| (name.clone(), *index)) else {
                return;
            };
            self.remove(&oldest);
            self.forgotten = self.forgotten.max(index);
        }
    }

    /// Removes a deletion: the group exists again and keeps its epoch.
    pub(super) fn remove(&mut self, name: &str) {
        if self.by_name.remove(name).is_some() {
            self.bytes -= named_topic_len(name);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Arc<str>, u64)> {
        self.by_name.iter().map(|(name, index)| (name, *index))
    }

    pub(super) fn forgotten(&self) -> u64 {
        self.forgotten
    }

    /// Restores the deletions of a checkpoint.
    pub(super) fn from_parts(
        names: Vec<String>,
        epochs: Vec<u64>,
        forgotten: u64,
    ) -> Result<Self, &'static str> {
        if names.len() != epochs.len() || names.len() > DELETED_GROUPS_MAX {
            return Err("deleted groups are out of bounds");
        }
        if !names.is_sorted_by(|a, b| a < b) {
            return Err("deleted groups are not in order");
        }
        let bytes = names.iter().map(|name| named_topic_len(name)).sum();
        let by_name = names.into_iter().map(Into::into).zip(epochs).collect();
        Ok(Self { by_name, forgotten, bytes })
    }

    pub(super) fn estimated_len(&self) -> usize {
        self.bytes
    }

    /// Returns a table with the deletion of only this group.
    pub(super) fn only(&self, name: &str) -> Self {
        let mut only = Self { forgotten: self.forgotten, ..Self::default() };
        if let Some((name, index)) = self.by_name.get_key_value(name) {
            only.insert(name.clone(), *index);
        }
        only
    }
}

impl ConsumerGroup {
    /// Checks the order of a commit of a member, which owns the partitions.
    pub(super) fn check_order_of_member(
        &self,
        committing: &CommittingMember,
        topics: &[TopicOffsets],
    ) -> Result<(), GroupRefusal> {
        self.check_topics(topics)?;
        let CommittingMember { member_id, epoch, sequence } = committing;
        let given = CommitPlace { epoch: *epoch, sequence: *sequence };
        for (partition, update) in topics.iter().flat_map(TopicOffsets::updates) {
            let Some(row) = self.offset(partition) else { continue };
            // Another owner's commits are fenced by the epoch of the ownership.
            let Some(last) = row.place_of(member_id) else { continue };
            // A repeated commit has the same number and content.
            let is_other = given == last && *sequence != 0 && !row.is_set_to(update);
            if given < last || is_other {
                let why = StaleReason::Sequence { given, last };
                return Err(self.stale(Some(partition), why));
            }
        }
        Ok(())
    }

    /// Checks the order of a commit without a member.
    ///
    /// Returns whether this is a repeated commit that was already applied.
    pub(super) fn check_order_without_member(
        &self,
        epoch: Option<u64>,
        topics: &[TopicOffsets],
    ) -> Result<bool, GroupRefusal> {
        self.check_topics(topics)?;
        let OffsetEpochs { sought, fence, changed } = self.epochs;
        let Some(given) = epoch else {
            // Before the first seek, clients without epochs commit as they always did.
            return match sought {
                0 => Ok(false),
                _ => Err(self.stale(None, StaleReason::NoEpoch)),
            };
        };
        let updates = || topics.iter().flat_map(TopicOffsets::updates);
        let later = updates().find(|(partition, _)| {
            let place = self.offset(*partition).and_then(|row| row.place_of(""));
            place.is_some_and(|place| place.epoch > given)
        });
        if given <= changed && given >= fence && later.is_none() {
            return Ok(false);
        }
        // A repeated commit that was already applied succeeds without a change.
        let is_applied = updates().all(|(partition, update)| {
            let row = self.offset(partition);
            row.is_some_and(|row| row.place_of("").is_some() && row.is_set_to(update))
        });
        match (is_applied, later) {
            (true, _) => Ok(true),
            (false, Some((partition, _))) if given >= fence => {
                Err(self.stale(Some(partition), StaleReason::Moved { given }))
            }
            (false, _) => Err(self.stale(None, StaleReason::Epoch { given })),
        }
    }

    /// Checks the order of a seek, an undo, a forgotten topic or a deletion. Without an epoch its
    /// last arrival counts.
    pub fn check_order_of_seek(&self, epoch: Option<u64>) -> Result<(), GroupRefusal> {
        let OffsetEpochs { fence, changed, .. } = self.epochs;
        match epoch {
            Some(given) if !(fence..=changed).contains(&given) => {
                Err(self.stale(None, StaleReason::Epoch { given }))
            }
            _ => Ok(()),
        }
    }

    /// Returns the epoch for the next commit without a member.
    ///
    /// Called after a commit of these offsets with the epoch `given` was applied.
    pub fn epoch_after_commit(&self, given: Option<u64>, topics: &[TopicOffsets]) -> Option<u64> {
        let mut updates = topics.iter().flat_map(TopicOffsets::updates);
        let set = updates.try_fold(u64::MAX, |least, (partition, update)| {
            let row = self.offset(partition).filter(|row| row.is_set_to(update));
            row.and_then(|row| row.place_of("")).map(|place| least.min(place.epoch))
        });
        // The offsets have changed since. The client keeps its epoch, so that it learns of the
        // change.
        set.or(given)
    }

    /// Refuses deleted topics: the group has forgotten them, or has offsets in a later topic of the
    /// name.
    fn check_topics(&self, topics: &[TopicOffsets]) -> Result<(), GroupRefusal> {
        for topic in topics.iter().filter(|topic| !self.offsets.has_topic(topic.topic_id)) {
            let name = topic.name.as_str();
            let is_dropped = self.dropped_topic(name).is_some_and(|id| id >= topic.topic_id);
            // A later topic has a greater id.
            let mut others = self.topic_names().filter(|(_, other)| &***other == name);
            if is_dropped || others.any(|(id, _)| id > topic.topic_id) {
                let number = topic.offsets.first().map_or(0, |update| update.number);
                let partition = PartitionKey { topic_id: topic.topic_id, number };
                return Err(self.stale(Some(partition), StaleReason::Topic));
            }
        }
        Ok(())
    }

    fn stale(&self, partition: Option<PartitionKey>, why: StaleReason) -> GroupRefusal {
        GroupRefusal::StaleCommit(StaleCommit { partition, current: self.epochs.changed, why })
    }
}
