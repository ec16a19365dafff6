//! Commands that change a group, as entries of the shard's log.

use super::PartitionKey;
pub use crate::records::{MemberSpec, OffsetUpdate, TopicOffsets};

/// A change of one group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupCommand {
    pub group: String,
    pub change: GroupChange,
    /// True to enforce the order of commits from this entry on. Set from protocol
    /// [`COMMIT_ORDER`](crate::protocol::COMMIT_ORDER) on.
    pub is_ordered: bool,
}

/// Change of a group. A repeated command has no further effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GroupChange {
    /// Adds a member or updates its settings.
    ///
    /// A join has `joined_epoch` 0. With `take_over`, it replaces the member that has the same
    /// static name and keeps the partitions of that member. An update names the `joined_epoch` of
    /// the member, so that it cannot add a member that was removed.
    PutMember { member: MemberSpec, take_over: bool, joined_epoch: u64 },
    /// Removes members that left, or were silent for their session timeouts.
    RemoveMembers { members: Vec<String> },
    /// Sets the targets, if the group still has the epoch that they were computed for.
    Assign(Assignment),
    /// Confirms that the member no longer reads these partitions, at this epoch.
    Release { member_id: String, epoch: u64, partitions: Vec<PartitionKey> },
    /// Stores offsets, all or none.
    ///
    /// Without a member, the group must have no members, and `offsets_epoch` is the epoch of the
    /// offsets that the commit follows.
    Commit {
        member: Option<CommittingMember>,
        offsets_epoch: Option<u64>,
        topics: Vec<TopicOffsets>,
        at_us: u64,
    },
    /// Sets offsets of a group without members.
    Seek { origin: SeekOrigin, topics: Vec<TopicOffsets>, at_us: u64 },
    /// Removes the offsets of dropped topics.
    ForgetTopics { topic_ids: Vec<u64> },
    /// Removes the offsets of a topic that no member subscribes to.
    ///
    /// Id 0 means every topic of the name. `offsets_epoch` is the epoch of the offsets that the
    /// command follows. Proposed from protocol [`COMMIT_ORDER`](crate::protocol::COMMIT_ORDER) on.
    ForgetTopic { topic: String, topic_id: u64, offsets_epoch: Option<u64> },
    /// Deletes a group without members.
    Delete { offsets_epoch: Option<u64> },
}

/// Targets of all members.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Assignment {
    /// Group epoch that it was computed for.
    pub group_epoch: u64,
    /// Topics and their partition counts, in the order of their ids.
    pub topics: Vec<(u64, u32)>,
    /// For each partition of these topics: 0 if it has no owner, else 1 plus the position of the
    /// member in the order of member ids.
    pub owners: Vec<u32>,
}

/// The member that commits, with the epoch of its last heartbeat response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommittingMember {
    pub member_id: String,
    pub epoch: u64,
    /// Number of the commit within the epoch; 0 if the member does not number its commits.
    pub sequence: u64,
}

/// Origin of a seek.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeekOrigin {
    pub by: String,
    /// True for the undo of an earlier seek.
    pub is_undo: bool,
    /// Epoch of the offsets that the seek follows.
    pub offsets_epoch: Option<u64>,
}

impl GroupChange {
    pub fn name(&self) -> &'static str {
        match self {
            Self::PutMember { .. } => "put group member",
            Self::RemoveMembers { .. } => "remove group members",
            Self::Assign(_) => "assign group partitions",
            Self::Release { .. } => "release group partitions",
            Self::Commit { .. } => "commit group offsets",
            Self::Seek { .. } => "seek group offsets",
            Self::ForgetTopics { .. } => "forget group topics",
            Self::ForgetTopic { .. } => "forget group topic",
            Self::Delete { .. } => "delete group",
        }
    }
}

impl TopicOffsets {
    /// Returns each partition with its new offset.
    pub fn updates(&self) -> impl Iterator<Item = (PartitionKey, &OffsetUpdate)> {
        let topic_id = self.topic_id;
        let key = move |number| PartitionKey { topic_id, number };
        self.offsets.iter().map(move |update| (key(update.number), update))
    }
}
