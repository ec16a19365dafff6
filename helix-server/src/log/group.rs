//! Consumer groups of a data shard: members, assignments and committed offsets.
//! They are part of the shard's state, so they depend only on its log.
//!
//! Epochs are indexes of the shard's log. The group epoch is the index of the last change of
//! members, subscriptions or topics. The assignment epoch is the group epoch that the targets were
//! computed for.

mod apply;
mod assignor;
mod checkpoint;
mod command;
mod command_record;
mod lag;
mod offsets;
mod order;
mod report;
mod sorted;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use assignor::{MatchedTopic, is_pattern, pattern_matches, within_limits};
pub use command::{
    Assignment, CommittingMember, GroupChange, GroupCommand, MemberSpec, OffsetUpdate, SeekOrigin,
    TopicOffsets,
};
pub use lag::OffsetLag;
use offsets::OffsetTable;
pub use offsets::{CommittedRow, OffsetEvent, OffsetEventKind};
use order::DeletedGroups;
use order::{CommitPlace, OffsetEpochs};
pub use order::{DELETED_GROUPS_MAX, StaleReason};
pub use report::{MemberReport, MemberView, ReportStep};
pub use sorted::{SortedMap, SortedSet};

/// Limits that apply enforces. Changing one needs a new protocol version.
pub const GROUPS_PER_SHARD_MAX: usize = 20_000;
pub const MEMBERS_PER_GROUP_MAX: usize = 1_000;
/// Partitions and topics of an assignment, which fits into one entry.
pub const PARTITIONS_PER_GROUP_MAX: usize = 10_000;
pub const TOPICS_PER_GROUP_MAX: usize = 2_000;
/// Partitions with a committed offset or a history.
pub const OFFSETS_PER_GROUP_MAX: usize = 20_000;
/// Different patterns of all members: each is compared with every topic of the cluster.
pub const PATTERNS_PER_GROUP_MAX: usize = 50;
/// Changes that are kept for each committed offset.
pub const OFFSET_HISTORY_MAX: usize = 8;
/// Dropped topics whose names a group remembers.
const DROPPED_TOPICS_MAX: usize = 200;

/// A partition, by topic id and number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartitionKey {
    pub topic_id: u64,
    pub number: u32,
}

/// All groups of a shard, by name.
///
/// Groups are copied on write: a reader may keep a group's state while others change it. Requests
/// that read a large group therefore do not hold the shard's lock.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GroupTable {
    groups: BTreeMap<Arc<str>, Arc<ConsumerGroup>>,
    /// Deletions that later commits must follow.
    deleted: DeletedGroups,
    /// True once an applied entry has enabled the order of commits; never reset.
    is_ordered: bool,
    /// Estimated bytes of all groups in a checkpoint.
    bytes: usize,
}

/// State of a consumer group.
///
/// Invariants: at most one member owns a partition, and at most one has it in its target.
/// `assignment_epoch <= epoch`, and both are equal in a group without members. Epochs only grow.
///
/// # Memory
/// A group takes 232 bytes and its name. A member takes 80 bytes, its id with 16 more, its static
/// name, 24 bytes for each partition that it owns and 16 for each in its target. Members with equal
/// settings share them. `offsets.rs` has the arithmetic of offsets.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ConsumerGroup {
    epoch: u64,
    assignment_epoch: u64,
    members: SortedMap<Arc<str>, GroupMember>,
    /// Partition counts of the topics that the targets were computed for, by topic id.
    assigned_topics: SortedMap<u64, u32>,
    offsets: OffsetTable,
    epochs: OffsetEpochs,
    /// Dropped topics that had offsets, until the first commit to another topic of the same name.
    dropped_topics: SortedMap<Arc<str>, u64>,
}

/// A member of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupMember {
    /// Empty for a dynamic member.
    pub static_name: Box<str>,
    pub settings: Arc<GroupMemberSettings>,
    /// Index of the entry that added it.
    pub joined_epoch: u64,
    /// Partitions that it may read or has not released yet, with the epochs at which it got them.
    pub owned: SortedMap<PartitionKey, u64>,
    /// Partitions that the assignment gives it.
    pub target: SortedSet<PartitionKey>,
}

impl GroupMember {
    fn subscribes(&self, topic: &str) -> bool {
        self.settings.topics.iter().any(|text| pattern_matches(text, topic))
    }
}

/// Settings that a member may change. Members of a group usually have the same ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupMemberSettings {
    pub client_name: Box<str>,
    pub session_timeout_ms: u32,
    /// Names and patterns, sorted and without duplicates.
    pub topics: Arc<[String]>,
    /// Estimated bytes of `topics` in a checkpoint.
    topics_len: usize,
}

/// Reason why a change of a group was refused. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GroupRefusal {
    #[error("the group does not exist; it begins with its first member or committed offset")]
    GroupNotFound,
    #[error("member {member_id:?} does not belong to the group; join again with epoch 0")]
    UnknownMember { member_id: String },
    #[error("epoch {epoch} is not one of the member, {current} is current; join with epoch 0")]
    StaleEpoch { epoch: u64, current: u64 },
    #[error(
        "member {holder:?} has the static name {static_name:?}; stop it, or join with take_over"
    )]
    NameInUse { static_name: String, holder: Arc<str> },
    #[error("the static name of a member cannot be changed, it is {current:?}")]
    StaticNameFixed { current: String },
    #[error(
        "partition {} of topic id {} is not owned by the member since epoch {epoch}, its current \
         epoch is {current}; send a heartbeat",
        partition.number,
        partition.topic_id
    )]
    NotOwned { partition: PartitionKey, epoch: u64, current: u64 },
    #[error("the group has {count} members, such as {first:?}; stop them first")]
    NotEmpty { count: usize, first: Vec<Arc<str>> },
    #[error(
        "{count} members, such as {first:?}, subscribe to topic {topic:?} or still have partitions \
         of it; stop them, or change their subscriptions first"
    )]
    TopicInUse { topic: String, count: usize, first: Vec<Arc<str>> },
    #[error(transparent)]
    StaleCommit(StaleCommit),
    #[error("the limit of {limit} {what} is reached")]
    LimitReached { what: &'static str, limit: usize },
    #[error(
        "the groups of the shard take {limit} bytes, which is their limit; delete groups that are \
         not needed, or commit smaller metadata"
    )]
    BytesReached { limit: usize },
}

/// A commit, seek or deletion that is older than what the group has. Nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the commit, seek or deletion is stale: {why}; read the group's offsets again, and send only \
     what is newer"
)]
pub struct StaleCommit {
    /// Partition whose order was violated; `None` for the whole group.
    pub partition: Option<PartitionKey>,
    /// Current epoch of the group's offsets.
    pub current: u64,
    pub why: StaleReason,
}

impl StaleCommit {
    /// Returns the least sequence that the member may use next.
    pub fn next_sequence(&self) -> Option<u64> {
        match self.why {
            StaleReason::Sequence { last, .. } => Some(last.sequence.saturating_add(1)),
            _ => None,
        }
    }
}

impl GroupTable {
    pub fn get(&self, name: &str) -> Option<&ConsumerGroup> {
        self.groups.get(name).map(|group| &**group)
    }

    /// Returns the current state of a group. Later changes do not affect it.
    pub fn snapshot(&self, name: &str) -> Option<Arc<ConsumerGroup>> {
        self.groups.get(name).cloned()
    }

    fn get_mut(&mut self, name: &str) -> Option<&mut ConsumerGroup> {
        self.groups.get_mut(name).map(Arc::make_mut)
    }

    /// Iterates over the groups in the order of their names.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&Arc<str>, &ConsumerGroup)> {
        self.groups.iter().map(|(name, group)| (name, &**group))
    }

    /// Returns the groups after `name`, in order.
    pub fn after(&self, name: &str) -> impl Iterator<Item = (&Arc<str>, &ConsumerGroup)> {
        use std::ops::Bound::{Excluded, Unbounded};
        let later = self.groups.range::<str, _>((Excluded(name), Unbounded));
        later.map(|(name, group)| (name, &**group))
    }

    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Returns whether apply enforces the order of commits.
    pub fn is_ordered(&self) -> bool {
        self.is_ordered
    }

    /// Returns the epoch that the next commit without a member has to name.
    ///
    /// A group that does not exist also has one.
    pub fn offsets_epoch(&self, name: &str) -> u64 {
        self.get(name).map_or_else(|| self.deleted.epoch_of(name), |group| group.epochs.changed)
    }
}

impl ConsumerGroup {
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    pub fn assignment_epoch(&self) -> u64 {
        self.assignment_epoch
    }

    /// Iterates over the members in the order of their ids.
    pub fn members(&self) -> impl ExactSizeIterator<Item = (&Arc<str>, &GroupMember)> {
        self.members.iter()
    }

    pub fn member(&self, id: &str) -> Option<&GroupMember> {
        self.members.get(id)
    }

    /// Returns a member with its id, whose memory can be shared.
    pub fn member_entry(&self, id: &str) -> Option<(&Arc<str>, &GroupMember)> {
        self.members.get_key_value(id)
    }

    /// Partition counts of the topics that the targets were computed for, by topic id.
    pub fn assigned_topics(&self) -> &SortedMap<u64, u32> {
        &self.assigned_topics
    }

    /// Returns the owner of each partition that has one.
    pub fn owners(&self) -> BTreeMap<PartitionKey, &Arc<str>> {
        let mut owners = BTreeMap::new();
        for (id, member) in self.members.iter() {
            owners.extend(member.owned.keys().map(|partition| (*partition, id)));
        }
        owners
    }

    #[cfg(test)]
    fn owner(&self, partition: PartitionKey) -> Option<&Arc<str>> {
        self.owners().get(&partition).copied()
    }

    /// Returns whether a member subscribes to a topic of this name.
    pub fn subscribes(&self, topic: &str) -> bool {
        self.members.values().any(|member| member.subscribes(topic))
    }

    /// Returns whether the group has members, and none subscribes to a topic of this name.
    pub fn has_left(&self, topic: &str) -> bool {
        !self.members.is_empty() && !self.subscribes(topic)
    }

    /// Iterates over the partitions with a committed offset or a history, in order.
    pub fn offsets(&self) -> impl Iterator<Item = (PartitionKey, &CommittedRow)> {
        self.offsets.iter()
    }

    /// Returns the ids of the topics of this name with offsets, including dropped topics.
    pub fn topic_ids(&self, name: &str) -> Vec<u64> {
        let named = self.topic_names().filter(|(_, other)| &***other == name);
        named.map(|(id, _)| id).chain(self.dropped_topic(name)).collect()
    }

    /// Returns the number of partitions with a committed offset or a history.
    pub fn offset_count(&self) -> usize {
        self.offsets.len()
    }

    pub fn offset(&self, partition: PartitionKey) -> Option<&CommittedRow> {
        self.offsets.get(partition)
    }

    /// Iterates over the ids and names of the topics with offsets.
    pub fn topic_names(&self) -> impl Iterator<Item = (u64, &Arc<str>)> {
        self.offsets.names()
    }

    /// Returns whether the group has an offset in a topic.
    pub fn has_offsets(&self, topic_id: u64) -> bool {
        self.offsets.of_topic(topic_id).iter().any(|row| row.offset().is_some())
    }

    /// Returns the id of a dropped topic of this name that had committed offsets.
    ///
    /// `None` once the group has committed to a later topic of the name.
    pub fn dropped_topic(&self, name: &str) -> Option<u64> {
        self.dropped_topics.get(name).copied()
    }

    /// Returns the id of the earlier topic of this name that the group's offsets belong to.
    ///
    /// `None` once the group has committed to the topic itself.
    pub fn earlier_topic(&self, topic_id: u64, name: &str) -> Option<u64> {
        if self.offsets.has_topic(topic_id) {
            return None;
        }
        if let Some(dropped) = self.dropped_topic(name) {
            return Some(dropped);
        }
        // The coordinator may not have removed the offsets of the earlier topic yet.
        let named = self.topic_names().filter(|(_, other)| &***other == name);
        named.map(|(id, _)| id).find(|id| self.has_offsets(*id))
    }

    /// Returns whether the targets belong to the current members, subscriptions and topics.
    pub fn is_assigned(&self) -> bool {
        self.assignment_epoch == self.epoch
    }

    /// Returns whether every member owns exactly its target.
    pub fn is_stable(&self) -> bool {
        let is_settled = |member: &GroupMember| member.owned.keys().eq(member.target.iter());
        self.is_assigned() && self.members.values().all(is_settled)
    }

    /// Returns these settings in an allocation that members with equal settings share.
    fn shared_settings(&self, spec: &MemberSpec) -> Arc<GroupMemberSettings> {
        let mut known = self.members.values().map(|member| &member.settings);
        let shared = known.find(|known| {
            *known.client_name == *spec.client_name
                && known.session_timeout_ms == spec.session_timeout_ms
                && *known.topics == *spec.topics
        });
        if let Some(shared) = shared {
            return shared.clone();
        }
        let mut known = self.members.values().map(|member| &member.settings.topics);
        let topics = known.find(|known| ***known == *spec.topics);
        Arc::new(GroupMemberSettings {
            client_name: spec.client_name.as_str().into(),
            session_timeout_ms: spec.session_timeout_ms,
            topics: topics.map_or_else(|| spec.topics.as_slice().into(), Arc::clone),
            topics_len: spec.topics.iter().map(|topic| topic.len() + 2).sum(),
        })
    }

    /// Returns the epoch that responses to a member state.
    pub fn member_epoch(&self, member: &GroupMember) -> u64 {
        self.assignment_epoch.max(member.joined_epoch)
    }

    /// Checks that the group has no members.
    ///
    /// # Errors
    /// [`GroupRefusal::NotEmpty`], which names some of the members.
    pub fn check_no_members(&self) -> Result<(), GroupRefusal> {
        if self.members.is_empty() {
            return Ok(());
        }
        let first = self.members.keys().take(10).cloned().collect();
        Err(GroupRefusal::NotEmpty { count: self.members.len(), first })
    }
}
