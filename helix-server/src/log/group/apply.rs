//! Applies commands to the groups. A refused command changes nothing.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::command::{
    Assignment, CommittingMember, GroupChange, GroupCommand, MemberSpec, SeekOrigin, TopicOffsets,
};
use super::offsets::{RowChange, committed_by};
use super::order::{CommitPlace, OffsetEpochs};
use super::sorted::{SortedMap, SortedSet};
use super::{
    ConsumerGroup, DROPPED_TOPICS_MAX, GROUPS_PER_SHARD_MAX, GroupMember, GroupRefusal, GroupTable,
    MEMBERS_PER_GROUP_MAX, OFFSETS_PER_GROUP_MAX, OffsetEventKind, PARTITIONS_PER_GROUP_MAX,
    PATTERNS_PER_GROUP_MAX, PartitionKey, TOPICS_PER_GROUP_MAX, is_pattern,
};

type Applied = Result<(), GroupRefusal>;

/// A commit and the index of its entry.
struct CommitStep<'a> {
    index: u64,
    offsets_epoch: Option<u64>,
    topics: &'a [TopicOffsets],
}

impl GroupTable {
    /// Applies the entry at `index`. Adds the group to `changed` if members may learn something
    /// new, a new assignment may be due, or the group was deleted.
    pub fn apply(
        &mut self,
        index: u64,
        command: &GroupCommand,
        changed: &mut Vec<Arc<str>>,
    ) -> Applied {
        let name = command.group.as_str();
        // Permanent: an entry of a leader that does not know the new protocol version yet does not
        // disable the order.
        self.is_ordered |= command.is_ordered;
        let is_commit =
            matches!(command.change, GroupChange::Commit { .. } | GroupChange::Seek { .. });
        let before = self.len_of(name, is_commit);
        let applied = self.change(index, command);
        if let Some((name, group)) = self.groups.get_key_value(name) {
            // A group without members and offsets is removed: only its offsets epoch must be kept.
            // Later members get greater epochs.
            let (name, is_void, epoch) = (name.clone(), group.is_void(), group.epochs.changed);
            if is_void {
                self.groups.remove(&name);
                if epoch > 0 {
                    self.deleted.insert(name.clone(), epoch);
                }
            }
            if applied.is_ok() && !is_commit {
                changed.push(name);
            }
        } else if applied.is_ok() && matches!(command.change, GroupChange::Delete { .. }) {
            changed.push(name.into());
        }
        self.bytes = self.bytes - before + self.len_of(name, is_commit);
        applied
    }

    /// Estimates the bytes of a group in a checkpoint.
    ///
    /// Leaves out the members for a commit or seek: it does not change them, and there may be many.
    fn len_of(&self, name: &str, is_commit: bool) -> usize {
        let group_len = |group: &Arc<ConsumerGroup>| {
            let members_len = if is_commit { 0 } else { group.members_len() };
            name.len() + members_len + group.offsets_len()
        };
        self.groups.get(name).map_or(0, group_len)
    }

    /// Returns a copy of the table with only this group. Later changes do not affect it.
    pub fn only(&self, name: &str) -> Self {
        let mut only = Self {
            deleted: self.deleted.only(name),
            is_ordered: self.is_ordered,
            ..Self::default()
        };
        if let Some((name, group)) = self.groups.get_key_value(name) {
            only.bytes = name.len() + group.estimated_len();
            only.groups.insert(name.clone(), group.clone());
        }
        only
    }

    /// Returns whether a command that puts a member, commits or seeks makes this table larger.
    ///
    /// The table must be the result of [`Self::only`] for the command's group. Returns
    /// `false` for other commands: they follow from these, or free bytes.
    pub fn grows_with(mut self, command: &GroupCommand) -> bool {
        use GroupChange::{Commit, PutMember, Seek};
        if !matches!(command.change, PutMember { .. } | Commit { .. } | Seek { .. }) {
            return false;
        }
        let before = self.bytes;
        // A command that is refused here is still proposed, so that apply states the reason.
        self.apply(u64::MAX, command, &mut Vec::new()).is_ok() && self.bytes > before
    }

    fn change(&mut self, index: u64, command: &GroupCommand) -> Applied {
        let name = command.group.as_str();
        match &command.change {
            GroupChange::PutMember { member, take_over, joined_epoch: 0 } => {
                self.get_or_create(name)?.put_member(index, member, *take_over)?;
            }
            GroupChange::PutMember { member, joined_epoch, .. } => {
                let is_same = |known: &GroupMember| known.joined_epoch == *joined_epoch;
                let group = self.get_mut(name);
                let group =
                    group.filter(|group| group.member(&member.member_id).is_some_and(is_same));
                let unknown =
                    || GroupRefusal::UnknownMember { member_id: member.member_id.clone() };
                group.ok_or_else(unknown)?.put_member(index, member, false)?;
            }
            GroupChange::RemoveMembers { members } => {
                let Some(group) = self.get_mut(name) else { return Ok(()) };
                group.remove_members(index, members);
            }
            GroupChange::Assign(assignment) => {
                let Some(group) = self.get_mut(name) else { return Ok(()) };
                group.assign(index, assignment);
            }
            GroupChange::Release { member_id, epoch, partitions } => {
                let Some(group) = self.get_mut(name) else { return Ok(()) };
                group.release(member_id, *epoch, partitions);
            }
            GroupChange::Commit { member, offsets_epoch, topics, at_us } => {
                let commit = CommitStep { index, offsets_epoch: *offsets_epoch, topics };
                self.commit(name, member.as_ref(), &commit, *at_us)?;
            }
            GroupChange::Seek { origin, topics, at_us } => {
                let is_ordered = self.is_ordered;
                let group = self.get_or_create(name)?;
                group.check_no_members()?;
                if is_ordered {
                    group.check_order_of_seek(origin.offsets_epoch)?;
                }
                group.check_offsets(topics)?;
                let SeekOrigin { by, is_undo, .. } = origin;
                let kind = if *is_undo { OffsetEventKind::Undo } else { OffsetEventKind::Seek };
                let (by, place) = (&committed_by(by), CommitPlace::default());
                group.store(topics, RowChange { kind, by, at_us: *at_us, place });
                if is_ordered {
                    group.epochs = OffsetEpochs::after(index);
                }
            }
            GroupChange::ForgetTopics { topic_ids } => {
                let is_ordered = self.is_ordered;
                let Some(group) = self.get_mut(name) else { return Ok(()) };
                for topic_id in topic_ids {
                    if group.forget_topic(*topic_id) && is_ordered {
                        (group.epochs.fence, group.epochs.changed) = (index, index);
                    }
                }
            }
            GroupChange::ForgetTopic { topic, topic_id, offsets_epoch } => {
                let group = self.get_mut(name).ok_or(GroupRefusal::GroupNotFound)?;
                if group.forget_unread_topic(topic, *topic_id, *offsets_epoch)? {
                    group.epochs = OffsetEpochs::after(index);
                }
            }
            GroupChange::Delete { offsets_epoch } => {
                let group = self.get(name).ok_or(GroupRefusal::GroupNotFound)?;
                group.check_no_members()?;
                if self.is_ordered {
                    group.check_order_of_seek(*offsets_epoch)?;
                }
                if let Some((name, _)) = self.groups.remove_entry(name)
                    && self.is_ordered
                {
                    self.deleted.insert(name, index);
                }
            }
        }
        Ok(())
    }

    fn commit(
        &mut self,
        name: &str,
        member: Option<&CommittingMember>,
        commit: &CommitStep<'_>,
        at_us: u64,
    ) -> Applied {
        let &CommitStep { index, offsets_epoch, topics } = commit;
        let is_ordered = self.is_ordered;
        let group = match member {
            Some(member) => self.get_mut(name).ok_or_else(|| unknown_member(member))?,
            None => self.get_or_create(name)?,
        };
        let (by, place) = match member {
            Some(member) => {
                let by = group.check_commit(member, topics)?;
                if is_ordered {
                    group.check_order_of_member(member, topics)?;
                }
                (Some(by), CommitPlace { epoch: member.epoch, sequence: member.sequence })
            }
            None => {
                group.check_no_members()?;
                if is_ordered && group.check_order_without_member(offsets_epoch, topics)? {
                    return Ok(());
                }
                (None, CommitPlace { epoch: index, sequence: 0 })
            }
        };
        group.check_offsets(topics)?;
        let place = if is_ordered { place } else { CommitPlace::default() };
        group.store(topics, RowChange { kind: OffsetEventKind::Commit, by: &by, at_us, place });
        if is_ordered {
            group.epochs.changed = index;
            if member.is_some() {
                group.epochs.fence = index;
            }
        }
        Ok(())
    }

    /// Checks a commit before it is proposed, so that a refused one writes no entry. Apply decides.
    ///
    /// # Errors
    /// [`GroupRefusal`] if apply would refuse the commit now.
    pub fn check_commit(
        &self,
        name: &str,
        member: Option<&CommittingMember>,
        offsets_epoch: Option<u64>,
        topics: &[TopicOffsets],
    ) -> Result<(), GroupRefusal> {
        match (self.get(name), member) {
            (None, Some(member)) => Err(unknown_member(member)),
            (Some(group), Some(member)) => {
                group.check_commit(member, topics)?;
                match self.is_ordered {
                    true => group.check_order_of_member(member, topics),
                    false => Ok(()),
                }
            }
            (group, None) => {
                let new;
                let group = match group {
                    Some(group) => group,
                    None => {
                        new = self.new_group(name);
                        &new
                    }
                };
                group.check_no_members()?;
                match self.is_ordered {
                    true => group.check_order_without_member(offsets_epoch, topics).map(drop),
                    false => Ok(()),
                }
            }
        }
    }

    /// Returns an empty group with the epochs after the last deletion of its name.
    fn new_group(&self, name: &str) -> ConsumerGroup {
        let epochs = OffsetEpochs::after(self.deleted.epoch_of(name));
        ConsumerGroup { epochs, ..ConsumerGroup::default() }
    }

    /// Creates the group if it does not exist.
    fn get_or_create(&mut self, name: &str) -> Result<&mut ConsumerGroup, GroupRefusal> {
        if !self.groups.contains_key(name) {
            if self.groups.len() >= GROUPS_PER_SHARD_MAX {
                let limit = GROUPS_PER_SHARD_MAX;
                return Err(GroupRefusal::LimitReached { what: "groups of a shard", limit });
            }
            let group = self.new_group(name);
            self.deleted.remove(name);
            self.groups.insert(name.into(), Arc::new(group));
        }
        Ok(self.get_mut(name).expect("it exists now"))
    }
}

fn unknown_member(member: &CommittingMember) -> GroupRefusal {
    GroupRefusal::UnknownMember { member_id: member.member_id.clone() }
}

impl ConsumerGroup {
    fn is_void(&self) -> bool {
        self.members.is_empty() && self.offsets.len() == 0 && self.dropped_topics.is_empty()
    }

    fn put_member(&mut self, index: u64, spec: &MemberSpec, take_over: bool) -> Applied {
        let id: Arc<str> = spec.member_id.as_str().into();
        self.check_patterns(spec)?;
        let settings = self.shared_settings(spec);
        if let Some(member) = self.members.get_mut(&id) {
            let is_other = *member.settings.topics != *settings.topics;
            member.settings = settings;
            if is_other {
                self.epoch = index;
            }
            return Ok(());
        }
        let holder = self.holder(&spec.static_name);
        if let Some(holder) = holder.filter(|_| !take_over) {
            let static_name = spec.static_name.clone();
            return Err(GroupRefusal::NameInUse { static_name, holder });
        }
        let holder = self.holder(&spec.static_name);
        if holder.is_none() && self.members.len() >= MEMBERS_PER_GROUP_MAX {
            let limit = MEMBERS_PER_GROUP_MAX;
            return Err(GroupRefusal::LimitReached { what: "members of a group", limit });
        }
        let mut member = GroupMember {
            static_name: spec.static_name.as_str().into(),
            settings,
            joined_epoch: index,
            owned: SortedMap::default(),
            target: SortedSet::default(),
        };
        let mut is_same_assignment = false;
        if let Some(replaced) = holder.and_then(|holder| self.members.remove(&holder)) {
            is_same_assignment = self.is_assigned() && *replaced.settings.topics == *spec.topics;
            member.owned = replaced.owned;
            member.owned.values_mut().for_each(|since| *since = index);
            member.target = replaced.target;
        }
        self.members.insert(id, member);
        self.epoch = index;
        if is_same_assignment {
            self.assignment_epoch = index;
        }
        // The replaced process no longer reads, so the partitions that it had to release are free.
        self.release_surplus_of(&spec.member_id);
        Ok(())
    }

    /// Frees the partitions that a member owns beyond its target.
    fn release_surplus_of(&mut self, member_id: &str) {
        let Some(member) = self.members.get_mut(member_id) else { return };
        let surplus = member.owned.keys().filter(|partition| !member.target.contains(partition));
        let surplus: Vec<PartitionKey> = surplus.copied().collect();
        let GroupMember { owned, target, .. } = member;
        owned.retain(|partition, _| target.contains(partition));
        self.grant(&surplus);
    }

    /// Returns the member that has a static name.
    pub(super) fn holder(&self, static_name: &str) -> Option<Arc<str>> {
        if static_name.is_empty() {
            return None;
        }
        let mut members = self.members.iter();
        members.find(|(_, member)| *member.static_name == *static_name).map(|(id, _)| id.clone())
    }

    fn check_patterns(&self, spec: &MemberSpec) -> Applied {
        let mut patterns: BTreeSet<&str> =
            spec.topics.iter().map(String::as_str).filter(|topic| is_pattern(topic)).collect();
        if patterns.is_empty() {
            return Ok(());
        }
        let others = self.members.iter().filter(|(id, _)| ***id != *spec.member_id);
        let topics = others.flat_map(|(_, member)| member.settings.topics.iter());
        patterns.extend(topics.map(String::as_str).filter(|topic| is_pattern(topic)));
        if patterns.len() > PATTERNS_PER_GROUP_MAX {
            let limit = PATTERNS_PER_GROUP_MAX;
            let what = "different patterns of a group";
            return Err(GroupRefusal::LimitReached { what, limit });
        }
        Ok(())
    }

    fn remove_members(&mut self, index: u64, members: &[String]) {
        let mut is_changed = false;
        let mut freed = Vec::new();
        for id in members {
            let Some(member) = self.members.remove(id.as_str()) else { continue };
            is_changed = true;
            freed.extend(member.owned.keys().copied());
        }
        if !is_changed {
            return;
        }
        self.epoch = index;
        if self.members.is_empty() {
            self.assignment_epoch = index;
            self.assigned_topics.clear();
        }
        self.grant(&freed);
    }

    fn assign(&mut self, index: u64, assignment: &Assignment) {
        if assignment.group_epoch != self.epoch || !self.fits(assignment) {
            return;
        }
        // Always a new epoch: within an epoch no partition leaves a member's target, so a delayed
        // heartbeat cannot confirm a release that the member does not know of.
        self.epoch = index;
        self.assignment_epoch = index;
        self.assigned_topics = assignment.topics.iter().copied().collect();
        let mut targets = vec![Vec::new(); self.members.len()];
        for (partition, owner) in assignment.partitions() {
            if let Some(member) = owner.checked_sub(1) {
                targets[member as usize].push(partition);
            }
        }
        for (member, target) in self.members.values_mut().zip(targets) {
            member.target = target.into_iter().collect();
        }
        self.grant_free();
    }

    fn fits(&self, assignment: &Assignment) -> bool {
        let Assignment { topics, owners, .. } = assignment;
        let count: u64 = topics.iter().map(|(_, count)| u64::from(*count)).sum();
        !self.members.is_empty()
            && topics.len() <= TOPICS_PER_GROUP_MAX
            && topics.is_sorted_by(|a, b| a.0 < b.0)
            && owners.len() <= PARTITIONS_PER_GROUP_MAX
            && count == owners.len() as u64
            && owners.iter().all(|owner| *owner as usize <= self.members.len())
    }

    /// Gives each partition without an owner to the member whose target has it.
    fn grant_free(&mut self) {
        let owned = self.members.values().flat_map(|member| member.owned.keys().copied());
        let owned: BTreeSet<PartitionKey> = owned.collect();
        for member in self.members.values_mut() {
            let epoch = self.assignment_epoch.max(member.joined_epoch);
            let free = member.target.iter().filter(|partition| !owned.contains(partition));
            member.owned.insert_new(free.map(|partition| (*partition, epoch)).collect());
        }
    }

    /// Gives freed partitions to the members whose targets have them. All other partitions in
    /// targets have owners already.
    fn grant(&mut self, freed: &[PartitionKey]) {
        if freed.is_empty() {
            return;
        }
        for member in self.members.values_mut() {
            let epoch = self.assignment_epoch.max(member.joined_epoch);
            let gained = freed.iter().filter(|partition| member.target.contains(partition));
            member.owned.insert_new(gained.map(|partition| (*partition, epoch)).collect());
        }
    }

    fn release(&mut self, member_id: &str, epoch: u64, partitions: &[PartitionKey]) {
        let Some(member) = self.members.get(member_id) else { return };
        // Within an epoch, a partition outside the target does not return to the member. A
        // confirmation at the current epoch is therefore valid even if it arrives late.
        if epoch != self.member_epoch(member) {
            return;
        }
        let Some(member) = self.members.get_mut(member_id) else { return };
        let GroupMember { owned, target, .. } = member;
        let is_freed =
            |it: &&PartitionKey| !target.contains(it) && owned.contains_key::<PartitionKey>(it);
        let freed: BTreeSet<PartitionKey> = partitions.iter().filter(is_freed).copied().collect();
        owned.retain(|partition, _| !freed.contains(partition));
        self.grant(&freed.into_iter().collect::<Vec<_>>());
    }

    /// Checks that a member owns the partitions at its epoch. Returns the member's id.
    fn check_commit(
        &self,
        committing: &CommittingMember,
        topics: &[TopicOffsets],
    ) -> Result<Arc<str>, GroupRefusal> {
        let CommittingMember { member_id, epoch, .. } = committing;
        let unknown = || GroupRefusal::UnknownMember { member_id: member_id.clone() };
        let (id, member) = self.members.get_key_value(member_id.as_str()).ok_or_else(unknown)?;
        let (epoch, current) = (*epoch, self.member_epoch(member));
        if epoch > current {
            return Err(GroupRefusal::StaleEpoch { epoch, current });
        }
        for (partition, _) in topics.iter().flat_map(TopicOffsets::updates) {
            if member.owned.get(&partition).is_none_or(|since| *since > epoch) {
                return Err(GroupRefusal::NotOwned { partition, epoch, current });
            }
        }
        Ok(id.clone())
    }

    fn check_offsets(&self, topics: &[TopicOffsets]) -> Applied {
        let updates = topics.iter().flat_map(TopicOffsets::updates);
        let new = updates.filter(|(partition, _)| self.offsets.get(*partition).is_none()).count();
        if new > 0 && self.offsets.len() + new > OFFSETS_PER_GROUP_MAX {
            let limit = OFFSETS_PER_GROUP_MAX;
            let what = "committed offsets of a group";
            return Err(GroupRefusal::LimitReached { what, limit });
        }
        Ok(())
    }

    fn store(&mut self, topics: &[TopicOffsets], change: RowChange<'_>) {
        for topic in topics {
            self.offsets.name(topic.topic_id, &topic.name);
            self.dropped_topics.remove(topic.name.as_str());
            self.offsets.store(topic.topic_id, &topic.offsets, change);
        }
    }

    /// Forgets a dropped topic. Returns whether the group had it.
    fn forget_topic(&mut self, topic_id: u64) -> bool {
        let Some((name, had_offset)) = self.offsets.remove(topic_id) else { return false };
        let has_successor = self.offsets.names().any(|(_, other)| *other == name);
        if !had_offset || has_successor {
            return true;
        }
        self.dropped_topics.insert(name, topic_id);
        while self.dropped_topics.len() > DROPPED_TOPICS_MAX {
            let oldest = self.dropped_topics.iter().min_by_key(|(_, topic_id)| **topic_id);
            let Some(oldest) = oldest.map(|(name, _)| name.clone()) else { return true };
            self.dropped_topics.remove(&oldest);
        }
        true
    }

    /// Removes a topic permanently, so that its readers start as in a new group.
    ///
    /// Returns whether the group had the topic.
    fn forget_unread_topic(
        &mut self,
        name: &str,
        topic_id: u64,
        offsets_epoch: Option<u64>,
    ) -> Result<bool, GroupRefusal> {
        self.check_topic_unused(name, topic_id)?;
        let is_meant = |id: &u64| topic_id == 0 || *id == topic_id;
        let ids: Vec<u64> = self.topic_ids(name).into_iter().filter(is_meant).collect();
        if !ids.is_empty() {
            // A repeated command finds no topic, and its old epoch must not fail it.
            self.check_order_of_seek(offsets_epoch)?;
        }
        for id in &ids {
            self.offsets.remove(*id);
        }
        if self.dropped_topic(name).as_ref().is_some_and(is_meant) {
            self.dropped_topics.remove(name);
        }
        Ok(!ids.is_empty())
    }

    /// Checks that no member subscribes to a topic or has partitions of it.
    ///
    /// # Errors
    /// [`GroupRefusal::TopicInUse`], which names some members.
    pub fn check_topic_unused(&self, name: &str, topic_id: u64) -> Result<(), GroupRefusal> {
        let ids = self.topic_ids(name);
        let is_of = |key: &PartitionKey| key.topic_id == topic_id || ids.contains(&key.topic_id);
        let uses = |member: &GroupMember| {
            member.subscribes(name)
                || member.owned.keys().any(is_of)
                || member.target.iter().any(is_of)
        };
        let mut users = self.members.iter().filter(|(_, member)| uses(member));
        let first: Vec<Arc<str>> = users.by_ref().take(10).map(|(id, _)| id.clone()).collect();
        if first.is_empty() {
            return Ok(());
        }
        let count = first.len() + users.count();
        Err(GroupRefusal::TopicInUse { topic: name.to_owned(), count, first })
    }
}

impl Assignment {
    /// Returns each partition with its entry of `owners`.
    pub fn partitions(&self) -> impl Iterator<Item = (PartitionKey, u32)> {
        let keys = self.topics.iter().flat_map(|&(topic_id, count)| {
            (0..count).map(move |number| PartitionKey { topic_id, number })
        });
        keys.zip(self.owners.iter().copied())
    }
}
