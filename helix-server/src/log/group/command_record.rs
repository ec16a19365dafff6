//! Encodes commands of groups as protobuf messages.

use super::command::{Assignment, CommittingMember, GroupChange, GroupCommand, SeekOrigin};
use super::{PartitionKey, TOPICS_PER_GROUP_MAX};
use crate::records::group_command_record::{
    Assign, Change as Record, Commit, ForgetTopic, ForgetTopics, PutMember, ReleasePartitions,
    RemoveMembers, Seek,
};
use crate::records::{GroupCommandRecord, PartitionKeys};

impl PartitionKeys {
    pub(super) fn new(partitions: impl IntoIterator<Item = PartitionKey>) -> Self {
        let rows = partitions.into_iter().map(|it| (it.topic_id, it.number));
        let (topic_ids, numbers) = rows.unzip();
        Self { topic_ids, numbers }
    }

    /// Returns the partitions; `None` if the columns differ in length.
    pub(super) fn into_keys(self) -> Option<impl ExactSizeIterator<Item = PartitionKey>> {
        let is_whole = self.topic_ids.len() == self.numbers.len();
        let rows = self.topic_ids.into_iter().zip(self.numbers);
        is_whole.then(|| rows.map(|(topic_id, number)| PartitionKey { topic_id, number }))
    }
}

impl From<GroupCommand> for GroupCommandRecord {
    fn from(command: GroupCommand) -> Self {
        let offsets_epoch = match &command.change {
            GroupChange::Seek { origin, .. } => origin.offsets_epoch,
            GroupChange::ForgetTopic { offsets_epoch, .. }
            | GroupChange::Delete { offsets_epoch } => *offsets_epoch,
            _ => None,
        };
        let change = match command.change {
            GroupChange::PutMember { member, take_over, joined_epoch } => {
                let member = Some(member);
                Record::PutMember(PutMember { member, take_over, joined_epoch })
            }
            GroupChange::RemoveMembers { members } => {
                Record::RemoveMembers(RemoveMembers { members })
            }
            GroupChange::Assign(Assignment { group_epoch, topics, owners }) => {
                let (topic_ids, partition_counts) = topics.into_iter().unzip();
                Record::Assign(Assign { group_epoch, topic_ids, partition_counts, owners })
            }
            GroupChange::Release { member_id, epoch, partitions } => {
                let partitions = Some(PartitionKeys::new(partitions));
                Record::Release(ReleasePartitions { member_id, epoch, partitions })
            }
            GroupChange::Commit { member, offsets_epoch, topics, at_us } => {
                let (member_id, epoch, sequence) = member
                    .map_or_else(Default::default, |it| (it.member_id, it.epoch, it.sequence));
                Record::Commit(Commit { member_id, epoch, topics, at_us, sequence, offsets_epoch })
            }
            GroupChange::Seek { origin: SeekOrigin { by, is_undo, .. }, topics, at_us } => {
                Record::Seek(Seek { by, is_undo, topics, at_us })
            }
            GroupChange::ForgetTopics { topic_ids } => {
                Record::ForgetTopics(ForgetTopics { topic_ids })
            }
            GroupChange::ForgetTopic { topic, topic_id, .. } => {
                Record::ForgetTopic(ForgetTopic { topic, topic_id })
            }
            GroupChange::Delete { .. } => Record::Delete(true),
        };
        let (group, ordered) = (command.group, command.is_ordered);
        Self { group, change: Some(change), ordered, offsets_epoch }
    }
}

impl TryFrom<GroupCommandRecord> for GroupCommand {
    /// Names the part of the command that is wrong.
    type Error = &'static str;

    fn try_from(record: GroupCommandRecord) -> Result<Self, &'static str> {
        let offsets_epoch = record.offsets_epoch;
        let change = match record.change.ok_or("the change of the group is unknown")? {
            Record::PutMember(it) => GroupChange::PutMember {
                member: it.member.ok_or("the member is missing")?,
                take_over: it.take_over,
                joined_epoch: it.joined_epoch,
            },
            Record::RemoveMembers(it) => GroupChange::RemoveMembers { members: it.members },
            Record::Assign(it) => {
                if it.topic_ids.len() != it.partition_counts.len()
                    || it.topic_ids.len() > TOPICS_PER_GROUP_MAX
                {
                    return Err("the topics of an assignment are out of bounds");
                }
                let topics = it.topic_ids.into_iter().zip(it.partition_counts).collect();
                let (group_epoch, owners) = (it.group_epoch, it.owners);
                GroupChange::Assign(Assignment { group_epoch, topics, owners })
            }
            Record::Release(it) => {
                let partitions = it.partitions.ok_or("the released partitions are missing")?;
                let partitions = partitions.into_keys();
                let partitions = partitions.ok_or("columns of partitions differ in length")?;
                let (member_id, epoch, partitions) = (it.member_id, it.epoch, partitions.collect());
                GroupChange::Release { member_id, epoch, partitions }
            }
            Record::Commit(it) => {
                let Commit { member_id, epoch, sequence, offsets_epoch, topics, at_us } = it;
                if member_id.is_empty() && (epoch != 0 || sequence != 0) {
                    return Err("a commit without a member has an epoch or a sequence");
                }
                let member = (!member_id.is_empty()).then_some(CommittingMember {
                    member_id,
                    epoch,
                    sequence,
                });
                GroupChange::Commit { member, offsets_epoch, topics, at_us }
            }
            Record::Seek(it) => GroupChange::Seek {
                origin: SeekOrigin { by: it.by, is_undo: it.is_undo, offsets_epoch },
                topics: it.topics,
                at_us: it.at_us,
            },
            Record::ForgetTopics(it) => GroupChange::ForgetTopics { topic_ids: it.topic_ids },
            Record::ForgetTopic(it) => {
                let (topic, topic_id) = (it.topic, it.topic_id);
                GroupChange::ForgetTopic { topic, topic_id, offsets_epoch }
            }
            Record::Delete(true) => GroupChange::Delete { offsets_epoch },
            Record::Delete(false) => return Err("the change of the group is unknown"),
        };
        Ok(Self { group: record.group, change, is_ordered: record.ordered })
    }
}
