//! Encodes groups for checkpoints of the shard. Equal groups give equal bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use prost::Message;

use super::command::MemberSpec;
use super::offsets::{CommittedBy, committed_by, named_topic_len};
use super::order::DeletedGroups;
use super::sorted::SortedSet;
use super::{
    CommitPlace, CommittedRow, ConsumerGroup, GroupMember, GroupTable, OffsetEpochs, OffsetEvent,
    OffsetEventKind, PartitionKey,
};
use crate::records::{
    GroupMemberRecord as MemberRecord, GroupRecord, NamedTopic, OffsetEventRecord as EventRecord,
    OffsetRecord, PartitionKeys,
};

/// Estimated bytes of a record, without its texts and rows.
const GROUP_BYTES: usize = 84;
const MEMBER_BYTES: usize = 48;
/// Estimated bytes of a partition that a member owns or has in its target.
const PARTITION_BYTES: usize = 8;

impl GroupTable {
    /// Returns the groups in the order of their names. A record takes several times the memory of
    /// its group, so only one at a time should be kept.
    pub(in crate::log) fn records(&self) -> impl Iterator<Item = GroupRecord> {
        self.groups.iter().map(|(name, group)| group_record(name, group))
    }

    /// Returns the names of deleted groups, their epochs, and the greatest epoch of the others.
    pub(in crate::log) fn deletions(&self) -> (Vec<String>, Vec<u64>, u64) {
        let (names, epochs) = self.deleted.iter().map(|(name, at)| (name.to_string(), at)).unzip();
        (names, epochs, self.deleted.forgotten())
    }

    /// Restores the order of commits and the deletions, or returns what is wrong with them.
    pub(in crate::log) fn restore_order(
        &mut self,
        is_ordered: bool,
        names: Vec<String>,
        epochs: Vec<u64>,
        forgotten: u64,
    ) -> Result<(), &'static str> {
        self.is_ordered = is_ordered;
        self.deleted = DeletedGroups::from_parts(names, epochs, forgotten)?;
        Ok(())
    }

    /// Estimates the bytes of all records, so that a buffer for them rarely grows.
    pub fn estimated_len(&self) -> usize {
        self.bytes + self.deleted.estimated_len()
    }

    /// Restores one group, or returns what is wrong with it.
    pub(in crate::log) fn restore(&mut self, record: GroupRecord) -> Result<(), String> {
        let name: Arc<str> = record.name.as_str().into();
        let broken = |what: &str| format!("group {name:?}: {what}");
        let group = into_group(record).map_err(broken)?;
        self.bytes += name.len() + group.estimated_len();
        match self.groups.insert(name.clone(), Arc::new(group)) {
            None => Ok(()),
            Some(_) => Err(broken("duplicate group")),
        }
    }
}

impl ConsumerGroup {
    /// Encodes the group with its name, for a node without a replica of its shard.
    pub fn encode(&self, name: &str) -> Vec<u8> {
        group_record(name, self).encode_to_vec()
    }

    /// Decodes the name and the state of a group.
    ///
    /// # Errors
    /// What is wrong with the bytes.
    pub fn decode(bytes: &[u8]) -> Result<(String, Self), String> {
        let record = GroupRecord::decode(bytes).map_err(|error| error.to_string())?;
        let name = record.name.clone();
        let group = into_group(record).map_err(|what| format!("group {name:?}: {what}"))?;
        Ok((name, group))
    }

    /// Estimates the bytes of the group's record, without its name.
    pub(super) fn estimated_len(&self) -> usize {
        self.members_len() + self.offsets_len()
    }

    /// Estimates the bytes of the members and assigned topics, which commits and seeks do not
    /// change.
    pub(super) fn members_len(&self) -> usize {
        let of_member = |(id, member): (&Arc<str>, &GroupMember)| {
            let settings = &member.settings;
            let texts = member.static_name.len() + settings.client_name.len() + settings.topics_len;
            let partitions = member.owned.len() + member.target.len();
            MEMBER_BYTES + id.len() + texts + partitions * PARTITION_BYTES
        };
        self.members.iter().map(of_member).sum::<usize>()
            + self.assigned_topics.len() * PARTITION_BYTES
    }

    /// Estimates the bytes of the offsets and dropped topics.
    pub(super) fn offsets_len(&self) -> usize {
        let dropped = self.dropped_topics.keys().map(|name| named_topic_len(name));
        GROUP_BYTES + self.offsets.estimated_len() + dropped.sum::<usize>()
    }
}

fn group_record(name: &str, group: &ConsumerGroup) -> GroupRecord {
    let named =
        |(topic_id, name): (u64, &Arc<str>)| NamedTopic { topic_id, name: name.to_string() };
    GroupRecord {
        name: name.to_owned(),
        epoch: group.epoch,
        assignment_epoch: group.assignment_epoch,
        members: group.members.iter().map(member_record).collect(),
        assigned_topics: group.assigned_topics.keys().copied().collect(),
        assigned_counts: group.assigned_topics.values().copied().collect(),
        offsets: group.offsets.iter().map(|(key, row)| offset_record(key, row)).collect(),
        topic_names: group.offsets.names().map(named).collect(),
        dropped_topics: group.dropped_topics.iter().map(|(name, id)| named((*id, name))).collect(),
        sought_epoch: group.epochs.sought,
        fence_epoch: group.epochs.fence,
        changed_epoch: group.epochs.changed,
    }
}

fn member_record((id, member): (&Arc<str>, &GroupMember)) -> MemberRecord {
    let spec = MemberSpec {
        member_id: id.to_string(),
        static_name: member.static_name.to_string(),
        client_name: member.settings.client_name.to_string(),
        session_timeout_ms: member.settings.session_timeout_ms,
        topics: member.settings.topics.to_vec(),
    };
    MemberRecord {
        spec: Some(spec),
        joined_epoch: member.joined_epoch,
        owned: Some(PartitionKeys::new(member.owned.keys().copied())),
        owned_since: member.owned.values().copied().collect(),
        target: Some(PartitionKeys::new(member.target.iter().copied())),
    }
}

fn offset_record(key: PartitionKey, row: &CommittedRow) -> OffsetRecord {
    let event = |event: OffsetEvent<'_>| EventRecord {
        kind: match event.kind {
            OffsetEventKind::Commit => 1,
            OffsetEventKind::Seek => 2,
            OffsetEventKind::Undo => 3,
        },
        by: event.by.to_owned(),
        from: event.from,
        to: event.to,
        since_us: event.since_us,
        until_us: event.until_us,
    };
    OffsetRecord {
        topic_id: key.topic_id,
        number: key.number,
        offset: row.offset(),
        metadata: row.metadata().to_owned(),
        changed_us: row.changed_us(),
        history: row.history().map(event).collect(),
        commit_epoch: row.place().epoch,
        commit_sequence: row.place().sequence,
    }
}

fn into_group(record: GroupRecord) -> Result<ConsumerGroup, &'static str> {
    let mut group = ConsumerGroup {
        epoch: record.epoch,
        assignment_epoch: record.assignment_epoch,
        epochs: OffsetEpochs {
            sought: record.sought_epoch,
            fence: record.fence_epoch,
            changed: record.changed_epoch,
        },
        ..ConsumerGroup::default()
    };
    if !group.epochs.is_sound() {
        return Err("its epochs of offsets are out of order");
    }
    if group.assignment_epoch > group.epoch {
        return Err("its assignment is newer than the group");
    }
    if record.assigned_topics.len() != record.assigned_counts.len() {
        return Err("columns of topics differ in length");
    }
    group.assigned_topics =
        record.assigned_topics.into_iter().zip(record.assigned_counts).collect();
    let mut owned = BTreeSet::new();
    for member in record.members {
        restore_member(&mut group, member, &mut owned)?;
    }
    // Events of one member share its name.
    let mut names: BTreeSet<Arc<str>> = group.members.keys().cloned().collect();
    let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
    for row in &record.offsets {
        *counts.entry(row.topic_id).or_default() += 1;
    }
    for NamedTopic { topic_id, name } in record.topic_names {
        group.offsets.name(topic_id, &name);
        group.offsets.reserve(topic_id, counts.get(&topic_id).copied().unwrap_or_default());
    }
    for row in record.offsets {
        group.offsets.restore(row.topic_id, into_row(row, &mut names)?)?;
    }
    for NamedTopic { topic_id, name } in record.dropped_topics {
        group.dropped_topics.insert(name.into(), topic_id);
    }
    Ok(group)
}

fn restore_member(
    group: &mut ConsumerGroup,
    record: MemberRecord,
    owned_by_any: &mut BTreeSet<PartitionKey>,
) -> Result<(), &'static str> {
    let spec = record.spec.ok_or("a member has no settings")?;
    let id: Arc<str> = spec.member_id.as_str().into();
    let lengths = "columns of partitions differ in length";
    let owned = record.owned.unwrap_or_default().into_keys().ok_or(lengths)?;
    if owned.len() != record.owned_since.len() {
        return Err(lengths);
    }
    let owned = owned.zip(record.owned_since).collect();
    let target: SortedSet<_> =
        record.target.unwrap_or_default().into_keys().ok_or(lengths)?.collect();
    let member = GroupMember {
        settings: group.shared_settings(&spec),
        static_name: spec.static_name.into(),
        joined_epoch: record.joined_epoch,
        owned,
        target,
    };
    if !member.owned.keys().all(|partition| owned_by_any.insert(*partition)) {
        return Err("a partition has two owners");
    }
    match group.members.insert(id, member) {
        None => Ok(()),
        Some(_) => Err("duplicate member"),
    }
}

fn into_row(
    record: OffsetRecord,
    names: &mut BTreeSet<Arc<str>>,
) -> Result<CommittedRow, &'static str> {
    let mut events = Vec::new();
    for event in &record.history {
        let known = names.get(event.by.as_str()).cloned();
        let by: CommittedBy = known.or_else(|| committed_by(&event.by));
        names.extend(by.clone());
        let kind = match event.kind {
            1 => OffsetEventKind::Commit,
            2 => OffsetEventKind::Seek,
            3 => OffsetEventKind::Undo,
            _ => return Err("a change of an offset is unknown"),
        };
        let EventRecord { from, to, since_us, until_us, .. } = *event;
        events.push((OffsetEvent { kind, by: &event.by, from, to, since_us, until_us }, by));
    }
    let OffsetRecord { number, offset, changed_us, .. } = record;
    let place = CommitPlace { epoch: record.commit_epoch, sequence: record.commit_sequence };
    CommittedRow::from_parts(number, offset, changed_us, place, &record.metadata, events)
}
