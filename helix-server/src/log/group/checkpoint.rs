//! Encodes groups for checkpoints of the shard. Equal groups give equal bytes.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{
    CommittedRow, ConsumerGroup, GroupMember, GroupTable, OFFSET_HISTORY_MAX, OffsetEvent,
    OffsetEventKind, PartitionKey,
};
use crate::records::{
    GroupMemberRecord as MemberRecord, GroupRecord, NamedTopic, OffsetEventRecord as EventRecord,
    OffsetRecord, PartitionKeys,
};

impl GroupTable {
    /// Returns the groups in the order of their names.
    pub(in crate::log) fn records(&self) -> Vec<GroupRecord> {
        self.groups.iter().map(|(name, group)| group_record(name, group)).collect()
    }

    /// Restores one group, or returns what is wrong with it.
    pub(in crate::log) fn restore(&mut self, record: GroupRecord) -> Result<(), String> {
        let name: Arc<str> = record.name.as_str().into();
        let broken = |what: &str| format!("group {name:?}: {what}");
        let group = into_group(record).map_err(broken)?;
        match self.groups.insert(name.clone(), Arc::new(group)) {
            None => Ok(()),
            Some(_) => Err(broken("duplicate group")),
        }
    }
}

fn group_record(name: &str, group: &ConsumerGroup) -> GroupRecord {
    let named = |(topic_id, name): (&u64, &Arc<str>)| NamedTopic {
        topic_id: *topic_id,
        name: name.to_string(),
    };
    GroupRecord {
        name: name.to_owned(),
        epoch: group.epoch,
        assignment_epoch: group.assignment_epoch,
        members: group.members.values().map(member_record).collect(),
        assigned_topics: group.assigned_topics.keys().copied().collect(),
        assigned_counts: group.assigned_topics.values().copied().collect(),
        offsets: group.offsets.iter().map(|(key, row)| offset_record(*key, row)).collect(),
        topic_names: group.topic_names.iter().map(named).collect(),
        dropped_topics: group.dropped_topics.iter().map(|(name, id)| named((id, name))).collect(),
    }
}

fn member_record(member: &GroupMember) -> MemberRecord {
    MemberRecord {
        spec: Some(member.spec.clone()),
        joined_epoch: member.joined_epoch,
        owned: Some(PartitionKeys::new(member.owned.keys().copied())),
        owned_since: member.owned.values().copied().collect(),
        target: Some(PartitionKeys::new(member.target.iter().copied())),
    }
}

fn offset_record(key: PartitionKey, row: &CommittedRow) -> OffsetRecord {
    let event = |event: &OffsetEvent| EventRecord {
        kind: match event.kind {
            OffsetEventKind::Commit => 1,
            OffsetEventKind::Seek => 2,
            OffsetEventKind::Undo => 3,
        },
        by: event.by.to_string(),
        from: event.from,
        to: event.to,
        since_us: event.since_us,
        until_us: event.until_us,
    };
    OffsetRecord {
        topic_id: key.topic_id,
        number: key.number,
        offset: row.offset,
        metadata: row.metadata.to_string(),
        changed_us: row.changed_us,
        history: row.history.iter().map(event).collect(),
    }
}

fn into_group(record: GroupRecord) -> Result<ConsumerGroup, &'static str> {
    let mut group = ConsumerGroup {
        epoch: record.epoch,
        assignment_epoch: record.assignment_epoch,
        ..ConsumerGroup::default()
    };
    if group.assignment_epoch > group.epoch {
        return Err("its assignment is newer than the group");
    }
    if record.assigned_topics.len() != record.assigned_counts.len() {
        return Err("columns of topics differ in length");
    }
    group.assigned_topics =
        record.assigned_topics.into_iter().zip(record.assigned_counts).collect();
    for member in record.members {
        restore_member(&mut group, member)?;
    }
    // Events of one member share its name.
    let mut names: BTreeSet<Arc<str>> = group.members.keys().cloned().collect();
    for row in record.offsets {
        let key = PartitionKey { topic_id: row.topic_id, number: row.number };
        if group.offsets.insert(key, into_row(row, &mut names)?).is_some() {
            return Err("duplicate offset");
        }
    }
    for NamedTopic { topic_id, name } in record.topic_names {
        group.topic_names.insert(topic_id, name.into());
    }
    for NamedTopic { topic_id, name } in record.dropped_topics {
        group.dropped_topics.insert(name.into(), topic_id);
    }
    let has_name = |key: &PartitionKey| group.topic_names.contains_key(&key.topic_id);
    if !group.offsets.keys().all(has_name) {
        return Err("a topic has no name");
    }
    Ok(group)
}

fn restore_member(group: &mut ConsumerGroup, record: MemberRecord) -> Result<(), &'static str> {
    let spec = record.spec.ok_or("a member has no settings")?;
    let id: Arc<str> = spec.member_id.as_str().into();
    let lengths = "columns of partitions differ in length";
    let owned = record.owned.unwrap_or_default().into_keys().ok_or(lengths)?;
    if owned.len() != record.owned_since.len() {
        return Err(lengths);
    }
    let owned = owned.zip(record.owned_since).collect();
    let target = record.target.unwrap_or_default().into_keys().ok_or(lengths)?.collect();
    let member = GroupMember { spec, joined_epoch: record.joined_epoch, owned, target };
    for partition in member.owned.keys() {
        if group.owners.insert(*partition, id.clone()).is_some() {
            return Err("a partition has two owners");
        }
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
    if record.history.len() > OFFSET_HISTORY_MAX {
        return Err("a history is too long");
    }
    let mut history = std::collections::VecDeque::with_capacity(record.history.len());
    for event in record.history {
        let by = match names.get(event.by.as_str()) {
            Some(name) => name.clone(),
            None => {
                let name: Arc<str> = event.by.into();
                names.insert(name.clone());
                name
            }
        };
        history.push_back(OffsetEvent {
            kind: match event.kind {
                1 => OffsetEventKind::Commit,
                2 => OffsetEventKind::Seek,
                3 => OffsetEventKind::Undo,
                _ => return Err("a change of an offset is unknown"),
            },
            by,
            from: event.from,
            to: event.to,
            since_us: event.since_us,
            until_us: event.until_us,
        });
    }
    Ok(CommittedRow {
        offset: record.offset,
        metadata: record.metadata.into(),
        changed_us: record.changed_us,
        history,
    })
}
