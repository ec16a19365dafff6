//! Groups against a second, simple implementation, and with members that behave as clients do.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rand::RngExt;
use rand::rngs::StdRng;

use super::*;
use crate::log::testing::seeded;
use crate::log::{CheckpointError, Effects, Head, ShardCommand, ShardState, StateLimits, Verdict};

const GROUP: &str = "readers";

fn key(topic_id: u64, number: u32) -> PartitionKey {
    PartitionKey { topic_id, number }
}

fn spec(member_id: &str, topics: &[&str]) -> MemberSpec {
    MemberSpec {
        member_id: member_id.to_owned(),
        session_timeout_ms: 10_000,
        topics: topics.iter().map(|topic| (*topic).to_owned()).collect(),
        ..MemberSpec::default()
    }
}

fn topic(topic_id: u64, partition_count: u32) -> MatchedTopic {
    MatchedTopic { topic_id, name: format!("t{topic_id}"), partition_count }
}

fn offsets(rows: &[(PartitionKey, Option<u64>)]) -> Vec<TopicOffsets> {
    let topic = |(key, offset): &(PartitionKey, Option<u64>)| TopicOffsets {
        topic_id: key.topic_id,
        name: format!("t{}", key.topic_id),
        offsets: vec![OffsetUpdate {
            number: key.number,
            offset: *offset,
            metadata: String::new(),
        }],
    };
    rows.iter().map(topic).collect()
}

/// A shard's state with one group, at a growing index.
struct Log {
    state: ShardState,
    index: u64,
}

impl Log {
    fn new() -> Self {
        Self { state: ShardState::new(StateLimits::default()), index: 0 }
    }

    fn apply(&mut self, change: GroupChange) -> Result<(), GroupRefusal> {
        self.index += 1;
        let command = GroupCommand { group: GROUP.to_owned(), change };
        let head = Head::Shard(ShardCommand::Group(Box::new(command)));
        let head = Head::decode(&head.encode()).unwrap();
        match self.state.apply(self.index, &head, &mut Effects::default()) {
            Verdict::Changed => Ok(()),
            Verdict::Refused(crate::log::Refusal::Group(refusal)) => Err(*refusal),
            other => panic!("{other:?}"),
        }
    }

    fn group(&self) -> &ConsumerGroup {
        self.state.groups().get(GROUP).expect("the group exists")
    }

    /// Judges a report and applies what follows, as the coordinator does.
    fn heartbeat(&mut self, report: &MemberReport) -> Result<MemberView, GroupRefusal> {
        let mut may_put = true;
        loop {
            match self.state.groups().judge(GROUP, report, may_put)? {
                ReportStep::Propose(change) => {
                    may_put &= !matches!(change, GroupChange::PutMember { .. });
                    self.apply(change)?;
                }
                ReportStep::Settled(view) => return Ok(view),
            }
        }
    }

    fn assign(&mut self, topics: &[MatchedTopic]) -> bool {
        let next = self.state.groups().get(GROUP).and_then(|it| it.next_assignment(topics));
        let is_due = next.is_some();
        if let Some(next) = next {
            self.apply(GroupChange::Assign(next)).unwrap();
        }
        is_due
    }

    fn join(&mut self, id: &str, topics: &[&str]) -> MemberView {
        let spec = spec(id, topics);
        self.heartbeat(&MemberReport { spec, ..MemberReport::default() }).unwrap()
    }

    /// Reports these partitions at an epoch.
    fn report(&mut self, id: &str, epoch: u64, owned: &[PartitionKey]) -> MemberView {
        let spec = MemberSpec { member_id: id.to_owned(), ..MemberSpec::default() };
        let owned = owned.iter().copied().collect();
        self.heartbeat(&MemberReport { spec, epoch, owned, take_over: false }).unwrap()
    }

    fn commit(
        &mut self,
        id: &str,
        epoch: u64,
        at: PartitionKey,
        offset: u64,
    ) -> Result<(), GroupRefusal> {
        let member = Some(CommittingMember { member_id: id.to_owned(), epoch });
        let topics = offsets(&[(at, Some(offset))]);
        self.apply(GroupChange::Commit { member, topics, at_us: self.index })
    }

    fn restart(&mut self) -> Result<(), CheckpointError> {
        let bytes = self.state.encode();
        let restored = ShardState::decode(&bytes)?;
        assert_eq!(restored, self.state);
        assert_eq!(restored.encode(), bytes);
        self.state = restored;
        Ok(())
    }
}

#[test]
fn partition_moves_only_after_its_owner_released_it() {
    let mut log = Log::new();
    let topics = [topic(1, 2)];
    let (kept, moved) = (key(1, 0), key(1, 1));
    log.join("a", &["t1"]);
    assert!(log.assign(&topics));
    let first = log.report("a", 1, &[]);
    assert_eq!(first.assigned, [kept, moved]);
    let second = log.join("b", &["t1"]);
    assert_eq!(second.assigned, []);
    assert!(log.assign(&topics));
    let waiting = log.report("b", second.epoch, &[]);
    assert_eq!((waiting.assigned.as_slice(), waiting.pending.as_slice()), (&[][..], &[moved][..]));
    // A copy of an earlier heartbeat confirms nothing, nor does a member that still reads both.
    log.report("a", first.epoch, &[]);
    let told = log.report("a", first.epoch, &[moved, kept]);
    assert_eq!(told.assigned, [kept]);
    log.report("a", told.epoch, &[moved, kept]);
    assert_eq!(log.report("b", waiting.epoch, &[]).assigned, []);
    // The owner may commit until it confirms.
    log.commit("a", first.epoch, moved, 7).unwrap();
    log.report("a", told.epoch, &[kept]);
    let granted = log.report("b", waiting.epoch, &[]);
    assert_eq!((granted.assigned, granted.is_settled), (vec![moved], true));
    let refused = log.commit("a", told.epoch, moved, 8);
    assert!(matches!(refused, Err(GroupRefusal::NotOwned { .. })), "{refused:?}");
    assert_eq!(log.group().offset(moved).unwrap().offset, Some(7));
    assert!(log.group().is_stable());
    assert!(!log.assign(&topics), "a stable group is quiet");
}

#[test]
fn repeated_heartbeat_has_the_same_answer_and_no_effect() {
    let mut log = Log::new();
    let joined = log.join("a", &["t1"]);
    let at = log.index;
    assert_eq!(log.join("a", &["t1"]), joined);
    assert_eq!(log.index, at, "a repeated join proposes nothing");
    log.assign(&[topic(1, 1)]);
    let at = log.index;
    let view = log.report("a", joined.epoch, &[]);
    assert_eq!(log.report("a", joined.epoch, &[]), view);
    assert_eq!(log.report("a", view.epoch, &[key(1, 0)]), view);
    assert_eq!(log.index, at, "steady heartbeats propose nothing");
}

#[test]
fn commits_are_fenced_by_owner_and_epoch() {
    let mut log = Log::new();
    let topics = [topic(1, 2)];
    let joined = log.join("a", &["t1"]).epoch;
    log.assign(&topics);
    let epoch = log.report("a", joined, &[]).epoch;
    log.commit("a", epoch, key(1, 0), 3).unwrap();
    let standalone =
        GroupChange::Commit { member: None, topics: offsets(&[(key(1, 0), Some(4))]), at_us: 1 };
    assert!(matches!(log.apply(standalone.clone()), Err(GroupRefusal::NotEmpty { count: 1, .. })));
    let unknown = log.commit("b", epoch, key(1, 0), 4);
    assert!(matches!(unknown, Err(GroupRefusal::UnknownMember { .. })));
    let future = log.commit("a", epoch + 50, key(1, 0), 4);
    assert_eq!(future, Err(GroupRefusal::StaleEpoch { epoch: epoch + 50, current: epoch }));
    let early = log.commit("a", epoch - 1, key(1, 0), 4);
    assert!(matches!(early, Err(GroupRefusal::NotOwned { .. })), "{early:?}");
    let foreign = log.commit("a", epoch, key(2, 0), 4);
    assert!(matches!(foreign, Err(GroupRefusal::NotOwned { .. })));
    // An older epoch counts while the member has owned the partition since.
    log.join("b", &["t1"]);
    log.assign(&topics);
    log.commit("a", epoch, key(1, 1), 5).unwrap();
    log.apply(GroupChange::RemoveMembers { members: vec!["a".to_owned(), "b".to_owned()] })
        .unwrap();
    log.apply(standalone).unwrap();
    assert_eq!(log.group().offset(key(1, 0)).unwrap().offset, Some(4));
    log.restart().unwrap();
}

#[test]
fn static_name_is_taken_over_without_moves() {
    let mut log = Log::new();
    let topics = [topic(1, 4)];
    for id in ["a1", "b1"] {
        let static_name = id[..1].to_owned();
        let spec = MemberSpec { static_name, ..spec(id, &["t1"]) };
        log.heartbeat(&MemberReport { spec, ..MemberReport::default() }).unwrap();
    }
    log.assign(&topics);
    let spec = MemberSpec { static_name: "a".to_owned(), ..spec("a2", &["t1"]) };
    let join = MemberReport { spec, ..MemberReport::default() };
    let refused = log.heartbeat(&join).unwrap_err();
    assert!(matches!(refused, GroupRefusal::NameInUse { holder, .. } if &*holder == "a1"));
    let before = log.group().member("b1").unwrap().clone();
    let view = log.heartbeat(&MemberReport { take_over: true, ..join }).unwrap();
    assert_eq!(view.assigned.len(), 2);
    assert!(log.group().is_stable());
    assert_eq!(*log.group().member("b1").unwrap(), before);
    assert!(!log.assign(&topics), "nothing is left to assign");
    log.commit("a2", view.epoch, view.assigned[0], 1).unwrap();
    let replaced = log.commit("a1", view.epoch, view.assigned[0], 1);
    assert!(matches!(replaced, Err(GroupRefusal::UnknownMember { .. })));
}

#[test]
fn delayed_heartbeat_after_a_takeover_releases_nothing() {
    let mut log = Log::new();
    let topics = [topic(1, 2)];
    log.join("c", &["t1"]);
    log.assign(&topics);
    let named = |id: &str| MemberSpec { static_name: "a".to_owned(), ..spec(id, &["t1"]) };
    let join = MemberReport { spec: named("a1"), ..MemberReport::default() };
    log.heartbeat(&join).unwrap();
    log.assign(&topics);
    let moved = *log.group().member("a1").unwrap().target.first().unwrap();
    let kept = *log.group().member("c").unwrap().target.first().unwrap();
    let join = MemberReport { spec: named("a2"), take_over: true, ..MemberReport::default() };
    log.join("b", &["t1"]);
    let taken = log.heartbeat(&join).unwrap();
    assert_eq!((taken.assigned.as_slice(), taken.pending.as_slice()), (&[][..], &[moved][..]));
    let epoch = log.group().assignment_epoch();
    log.report("c", epoch, &[kept]);
    assert_eq!(log.report("a2", taken.epoch, &[]).assigned, [moved]);
    // The partition goes to b. A heartbeat from before its grant arrives late.
    let owners = (0..2).map(|number| if key(1, number) == moved { 2 } else { 3 }).collect();
    let group_epoch = log.group().epoch();
    log.apply(GroupChange::Assign(Assignment { group_epoch, topics: vec![(1, 2)], owners }))
        .unwrap();
    let told = log.report("a2", taken.epoch, &[]);
    assert!(told.epoch > taken.epoch);
    assert_eq!(log.group().owner(moved).map(|id| &**id), Some("a2"));
    log.report("a2", told.epoch, &[]);
    assert_eq!(log.group().owner(moved).map(|id| &**id), Some("b"));
}

#[test]
fn request_that_was_judged_before_adds_no_member_and_no_settings() {
    let mut log = Log::new();
    let join = MemberReport { spec: spec("a", &["t1"]), ..MemberReport::default() };
    log.heartbeat(&join).unwrap();
    let update = MemberReport { spec: spec("a", &["t2"]), ..MemberReport::default() };
    log.heartbeat(&update).unwrap();
    let judged = log.state.groups().judge(GROUP, &join, false);
    assert!(matches!(judged, Ok(ReportStep::Settled(_))), "{judged:?}");
    log.apply(GroupChange::RemoveMembers { members: vec!["a".to_owned()] }).unwrap();
    let judged = log.state.groups().judge(GROUP, &join, false);
    assert!(matches!(judged, Err(GroupRefusal::UnknownMember { .. })), "{judged:?}");
}

#[test]
fn update_that_races_with_a_removal_adds_no_member() {
    let mut log = Log::new();
    log.join("a", &["t1"]);
    let update = MemberReport { spec: spec("a", &["t2"]), ..MemberReport::default() };
    let judged = log.state.groups().judge(GROUP, &update, true).unwrap();
    let ReportStep::Propose(update) = judged else { panic!("{judged:?}") };
    let remove = || GroupChange::RemoveMembers { members: vec!["a".to_owned()] };
    log.apply(remove()).unwrap();
    let refused = log.apply(update.clone());
    assert!(matches!(refused, Err(GroupRefusal::UnknownMember { .. })), "{refused:?}");
    assert!(log.state.groups().is_empty());
    log.join("a", &["t1"]);
    let refused = log.apply(update);
    assert!(matches!(refused, Err(GroupRefusal::UnknownMember { .. })), "{refused:?}");
    assert_eq!(log.group().member("a").unwrap().spec.topics, ["t1"]);
}

#[test]
fn topic_beyond_the_limit_is_truncated() {
    let mut log = Log::new();
    log.join("a", &["t*"]);
    let max = u32::try_from(PARTITIONS_PER_GROUP_MAX).unwrap();
    let topics = [topic(1, max + 5), topic(2, 3)];
    assert!(log.assign(&topics));
    assert_eq!(log.group().owners.len(), PARTITIONS_PER_GROUP_MAX);
    assert!(!log.assign(&topics), "the same topics need no assignment");
    assert!(log.assign(&[topic(1, max - 2), topic(2, 3)]));
    assert_eq!(log.group().assigned_topics().values().copied().collect::<Vec<_>>(), [max - 2, 2]);
}

#[test]
fn group_that_ends_and_begins_again_has_greater_epochs() {
    let mut log = Log::new();
    let first = log.join("a", &["t1"]).epoch;
    log.assign(&[topic(1, 1)]);
    log.apply(GroupChange::RemoveMembers { members: vec!["a".to_owned()] }).unwrap();
    assert!(log.state.groups().is_empty(), "a group without members and offsets is removed");
    let again = log.join("a", &["t1"]);
    assert!(again.epoch > first);
    let spec = MemberSpec { member_id: "a".to_owned(), ..MemberSpec::default() };
    let stale = MemberReport { spec, epoch: first, ..MemberReport::default() };
    assert!(matches!(log.heartbeat(&stale), Err(GroupRefusal::StaleEpoch { .. })));
}

#[test]
fn refused_change_of_a_new_group_leaves_no_group() {
    let mut log = Log::new();
    let topics: Vec<String> = (0..=PATTERNS_PER_GROUP_MAX).map(|i| format!("p{i:03}*")).collect();
    let spec = MemberSpec { topics, ..spec("a", &[]) };
    let refused = log.heartbeat(&MemberReport { spec, ..MemberReport::default() });
    assert!(matches!(refused, Err(GroupRefusal::LimitReached { .. })));
    assert!(log.state.groups().is_empty());
}

#[test]
fn seek_is_refused_with_members_and_can_be_taken_back() {
    let mut log = Log::new();
    let at = key(1, 0);
    let seek = |to, is_undo| GroupChange::Seek {
        origin: SeekOrigin { by: "operator".to_owned(), is_undo },
        topics: offsets(&[(at, to)]),
        at_us: 5,
    };
    log.apply(seek(Some(10), false)).unwrap();
    log.apply(seek(Some(3), false)).unwrap();
    let row = log.group().offset(at).unwrap();
    assert_eq!(row.before_last_seek(), Some(Some(10)));
    log.apply(seek(Some(10), true)).unwrap();
    assert_eq!(log.group().offset(at).unwrap().before_last_seek(), Some(Some(3)));
    log.apply(seek(None, true)).unwrap();
    assert_eq!(log.group().offset(at).unwrap().offset, None);
    log.restart().unwrap();
    log.join("a", &["t1"]);
    let refused = log.apply(seek(Some(1), false));
    assert!(matches!(refused, Err(GroupRefusal::NotEmpty { first, .. }) if *first[0] == *"a"));
    let refused = log.apply(GroupChange::Delete);
    assert!(matches!(refused, Err(GroupRefusal::NotEmpty { .. })));
}

#[test]
fn history_is_bounded_and_joins_commits_of_one_member() {
    let mut log = Log::new();
    let at = key(1, 0);
    let commit = |offset| GroupChange::Commit {
        member: None,
        topics: offsets(&[(at, Some(offset))]),
        at_us: offset,
    };
    (1..=20).for_each(|offset| log.apply(commit(offset)).unwrap());
    let history = &log.group().offset(at).unwrap().history;
    assert_eq!(history.len(), 1);
    assert_eq!((history[0].from, history[0].to), (None, Some(20)));
    assert_eq!((history[0].since_us, history[0].until_us), (1, 20));
    for round in 0..20 {
        let origin = SeekOrigin { by: String::new(), is_undo: false };
        let topics = offsets(&[(at, Some(round))]);
        log.apply(GroupChange::Seek { origin, topics, at_us: 0 }).unwrap();
    }
    let history = &log.group().offset(at).unwrap().history;
    assert_eq!(history.len(), OFFSET_HISTORY_MAX);
    assert_eq!(history[0].since_us, 20, "times never decrease");
}

#[test]
fn dropped_topic_is_remembered_by_name_until_the_next_commit() {
    let mut log = Log::new();
    let commit = |topic_id: u64| GroupChange::Commit {
        member: None,
        topics: vec![TopicOffsets {
            topic_id,
            name: "orders".to_owned(),
            offsets: vec![OffsetUpdate { number: 0, offset: Some(9), metadata: String::new() }],
        }],
        at_us: 0,
    };
    log.apply(commit(1)).unwrap();
    log.apply(GroupChange::ForgetTopics { topic_ids: vec![1, 7] }).unwrap();
    assert_eq!(log.group().offsets().len(), 0);
    assert_eq!(log.group().dropped_topic("orders"), Some(1));
    log.restart().unwrap();
    log.apply(commit(2)).unwrap();
    assert_eq!(log.group().dropped_topic("orders"), None);
    assert_eq!(log.group().offset(key(2, 0)).unwrap().offset, Some(9));
}

#[test]
fn assignment_for_an_older_epoch_or_out_of_bounds_changes_nothing() {
    let mut log = Log::new();
    log.join("a", &["t1"]);
    let next = log.group().next_assignment(&[topic(1, 2)]).unwrap();
    log.join("b", &["t1"]);
    let before = log.group().clone();
    log.apply(GroupChange::Assign(next.clone())).unwrap();
    let group_epoch = log.group().epoch();
    let wrong = [
        Assignment { group_epoch, owners: vec![1], ..next.clone() },
        Assignment { group_epoch, owners: vec![1, 3], ..next.clone() },
        Assignment { group_epoch, topics: vec![(2, 1), (1, 1)], ..next },
    ];
    for assignment in wrong {
        log.apply(GroupChange::Assign(assignment)).unwrap();
        assert_eq!(*log.group(), before);
    }
}

#[test]
fn largest_commands_fit_into_one_head() {
    let id = |i: usize| format!("{i:064}");
    let topics = (0..TOPICS_PER_GROUP_MAX as u64).map(|i| (u64::MAX - i, 5)).rev().collect();
    let owners = vec![MEMBERS_PER_GROUP_MAX as u32; PARTITIONS_PER_GROUP_MAX];
    let partitions = vec![key(u64::MAX, 99_999); crate::log::ROWS_PER_ENTRY_MAX];
    let names = (0..200).map(|i| format!("{i:0249}")).collect();
    let client_name = "x".repeat(128);
    let member = MemberSpec { static_name: id(1), client_name, topics: names, ..spec(&id(1), &[]) };
    for change in [
        GroupChange::Assign(Assignment { group_epoch: u64::MAX, topics, owners }),
        GroupChange::Release { member_id: id(1), epoch: u64::MAX, partitions },
        GroupChange::PutMember { member, take_over: true, joined_epoch: u64::MAX },
        GroupChange::RemoveMembers { members: (0..500).map(id).collect() },
    ] {
        let command = GroupCommand { group: "g".repeat(249), change };
        let head = Head::Shard(ShardCommand::Group(Box::new(command)));
        let bytes = head.encode();
        assert!(bytes.len() <= crate::log::HEAD_BYTES_MAX, "{head}: {}", bytes.len());
        assert_eq!(Head::decode(&bytes).unwrap(), head);
    }
}

/// A second implementation: one row for each partition, searched from end to end.
#[derive(Default)]
struct SimpleGroup {
    epoch: u64,
    assignment_epoch: u64,
    /// Id, topics, joined, static name.
    members: Vec<(String, Vec<String>, u64, String)>,
    rows: BTreeMap<PartitionKey, SimpleRow>,
}

#[derive(Default, Clone, Debug, PartialEq)]
struct SimpleRow {
    owner: Option<(String, u64)>,
    target: Option<String>,
    offset: Option<u64>,
}

impl SimpleGroup {
    fn member_epoch(&self, id: &str) -> Option<u64> {
        let (_, _, joined, _) = self.members.iter().find(|(other, ..)| other == id)?;
        Some(self.assignment_epoch.max(*joined))
    }

    fn apply(&mut self, index: u64, change: &GroupChange) -> bool {
        match change {
            GroupChange::PutMember { member, take_over, .. } => {
                let at = self.members.iter().position(|(id, ..)| *id == member.member_id);
                match at {
                    Some(at) if self.members[at].1 != member.topics => {
                        self.members[at].1.clone_from(&member.topics);
                        self.epoch = index;
                    }
                    Some(_) => {}
                    None => {
                        let mut is_same = false;
                        let name = &member.static_name;
                        let holder =
                            self.members.iter().position(|it| !name.is_empty() && it.3 == *name);
                        if let Some(at) = holder {
                            if !take_over {
                                return false;
                            }
                            let (replaced, topics, ..) = self.members.remove(at);
                            is_same =
                                self.assignment_epoch == self.epoch && topics == member.topics;
                            self.replace(index, &replaced, &member.member_id);
                        }
                        let id = member.member_id.clone();
                        self.members.push((id, member.topics.clone(), index, name.clone()));
                        self.members.sort();
                        self.epoch = index;
                        if is_same {
                            self.assignment_epoch = index;
                        }
                    }
                }
            }
            GroupChange::RemoveMembers { members } => {
                let before = self.members.len();
                self.members.retain(|(id, ..)| !members.contains(id));
                if self.members.len() < before {
                    self.epoch = index;
                    if self.members.is_empty() {
                        self.assignment_epoch = index;
                    }
                    for row in self.rows.values_mut() {
                        row.owner.take_if(|(id, _)| members.contains(id));
                        row.target.take_if(|id| members.contains(id));
                    }
                }
            }
            GroupChange::Assign(next) if next.group_epoch == self.epoch => {
                (self.epoch, self.assignment_epoch) = (index, index);
                self.rows.values_mut().for_each(|row| row.target = None);
                for (partition, owner) in next.partitions().filter(|(_, owner)| *owner > 0) {
                    let member = self.members[owner as usize - 1].0.clone();
                    self.rows.entry(partition).or_default().target = Some(member);
                }
            }
            GroupChange::Release { member_id, epoch, partitions }
                if self.member_epoch(member_id) == Some(*epoch) =>
            {
                for (_, row) in self.rows.iter_mut().filter(|(it, _)| partitions.contains(it)) {
                    if row.target.as_ref() != Some(member_id) {
                        row.owner.take_if(|(id, _)| id == member_id);
                    }
                }
            }
            GroupChange::Commit { member, topics, .. } => {
                let current = member.as_ref().and_then(|it| self.member_epoch(&it.member_id));
                let is_allowed = |partition: PartitionKey| match member {
                    None => self.members.is_empty(),
                    Some(it) => {
                        let owner = self.rows.get(&partition).and_then(|row| row.owner.as_ref());
                        owner.is_some_and(|(id, since)| *id == it.member_id && *since <= it.epoch)
                            && current >= Some(it.epoch)
                    }
                };
                let updates = topics.iter().flat_map(TopicOffsets::updates);
                let updates: Vec<_> = updates.map(|(it, update)| (it, update.offset)).collect();
                if !updates.iter().all(|(partition, _)| is_allowed(*partition)) {
                    return false;
                }
                for (partition, offset) in updates {
                    self.rows.entry(partition).or_default().offset = offset;
                }
            }
            _ => {}
        }
        let epochs: BTreeMap<String, u64> = self
            .members
            .iter()
            .map(|(id, _, joined, _)| (id.clone(), self.assignment_epoch.max(*joined)))
            .collect();
        for row in self.rows.values_mut().filter(|row| row.owner.is_none()) {
            row.owner = row.target.clone().map(|id| (id.clone(), epochs[&id]));
        }
        true
    }

    /// Gives a member's target to another, and the partitions in it that the member owns.
    fn replace(&mut self, index: u64, replaced: &str, by: &str) {
        for row in self.rows.values_mut() {
            let is_target = row.target.as_deref() == Some(replaced);
            if row.owner.take_if(|(id, _)| id == replaced).is_some() && is_target {
                row.owner = Some((by.to_owned(), index));
            }
            if is_target {
                row.target = Some(by.to_owned());
            }
        }
    }

    fn agrees_with(&self, group: Option<&ConsumerGroup>) {
        let Some(group) = group else {
            assert!(self.members.is_empty() && self.rows.values().all(|row| row.offset.is_none()));
            return;
        };
        assert_eq!((self.epoch, self.assignment_epoch), (group.epoch, group.assignment_epoch));
        assert!(
            self.members
                .iter()
                .map(|(id, ..)| id.as_str())
                .eq(group.members.keys().map(|id| &**id))
        );
        let mut rows: BTreeMap<PartitionKey, SimpleRow> = BTreeMap::new();
        for (id, member) in group.members() {
            for (partition, since) in &member.owned {
                let row = rows.entry(*partition).or_default();
                assert_eq!(row.owner.replace((id.to_string(), *since)), None, "two owners");
                assert_eq!(group.owner(*partition), Some(id));
            }
            for partition in &member.target {
                let row = rows.entry(*partition).or_default();
                assert_eq!(row.target.replace(id.to_string()), None, "two targets");
            }
        }
        assert_eq!(group.owners.len(), rows.values().filter(|row| row.owner.is_some()).count());
        for (partition, row) in group.offsets() {
            rows.entry(partition).or_default().offset = row.offset;
        }
        let mine = self.rows.iter().filter(|(_, row)| **row != SimpleRow::default());
        assert!(mine.map(|(it, row)| (*it, row.clone())).eq(rows));
    }
}

/// A client as the protocol has it: it reads what it was given, stops, and then reports.
#[derive(Default, Clone)]
struct Client {
    static_name: String,
    takes_over: bool,
    epoch: u64,
    reading: BTreeSet<PartitionKey>,
    /// Requests that may arrive again, at any time.
    sent: Vec<MemberReport>,
}

struct Simulation {
    rng: StdRng,
    log: Log,
    model: SimpleGroup,
    topics: Vec<MatchedTopic>,
    clients: BTreeMap<String, Client>,
    next_client: u32,
}

impl Simulation {
    fn apply(&mut self, change: GroupChange) -> Result<(), GroupRefusal> {
        let (epoch, assigned) =
            self.log.state.groups().get(GROUP).map_or((0, 0), |it| (it.epoch, it.assignment_epoch));
        let applied = self.log.apply(change.clone());
        let accepted = self.model.apply(self.log.index, &change);
        assert_eq!(accepted, applied.is_ok(), "{change:?}: {applied:?}");
        let group = self.log.state.groups().get(GROUP);
        self.model.agrees_with(group);
        if let Some(group) = group {
            assert!(
                group.epoch >= epoch && group.assignment_epoch >= assigned,
                "epochs never fall"
            );
            assert!(!group.members.is_empty() || group.is_assigned(), "an empty group is quiet");
        } else {
            self.model = SimpleGroup::default();
        }
        applied
    }

    fn heartbeat(&mut self, report: &MemberReport) -> Result<MemberView, GroupRefusal> {
        let mut may_put = true;
        loop {
            match self.log.state.groups().judge(GROUP, report, may_put)? {
                ReportStep::Propose(change) => {
                    may_put &= !matches!(change, GroupChange::PutMember { .. });
                    self.apply(change)?;
                }
                ReportStep::Settled(view) => return Ok(view),
            }
        }
    }

    fn subscription(&mut self) -> Vec<String> {
        let all = [vec!["t*"], vec!["t1", "t2"], vec!["t2"], vec!["t*", "t3"]];
        all[self.rng.random_range(0..all.len())].iter().map(|it| (*it).to_owned()).collect()
    }

    /// Sends a client's next heartbeat; the response may be lost.
    fn beat(&mut self, id: &str, may_lose: bool) {
        let mut client = self.clients[id].clone();
        let mut spec = MemberSpec { member_id: id.to_owned(), ..MemberSpec::default() };
        if client.epoch == 0 || (may_lose && self.rng.random_bool(0.02)) {
            spec.topics = self.subscription();
        }
        if client.epoch == 0 {
            spec.static_name.clone_from(&client.static_name);
        }
        let report = MemberReport {
            spec,
            epoch: client.epoch,
            owned: client.reading.clone(),
            take_over: client.epoch == 0 && client.takes_over,
        };
        let answer = self.heartbeat(&report);
        client.sent.push(report);
        match answer {
            _ if may_lose && self.rng.random_bool(0.1) => {}
            Ok(view) => {
                client.epoch = view.epoch;
                client.reading = view.assigned.into_iter().collect();
            }
            Err(GroupRefusal::UnknownMember { .. } | GroupRefusal::StaleEpoch { .. }) => {
                client.epoch = 0;
                client.reading.clear();
            }
            Err(other) => panic!("{other}"),
        }
        self.clients.insert(id.to_owned(), client);
        self.check_readers();
    }

    /// No two members of the group read a partition. A client that was removed is another matter:
    /// it stops at its session timeout.
    fn check_readers(&self) {
        let Some(group) = self.log.state.groups().get(GROUP) else { return };
        let mut readers: BTreeMap<PartitionKey, &str> = BTreeMap::new();
        for (id, client) in &self.clients {
            let Some(member) = group.member(id) else { continue };
            if client.epoch < member.joined_epoch {
                continue;
            }
            for partition in &client.reading {
                assert_eq!(readers.insert(*partition, id), None, "two readers of {partition:?}");
                assert_eq!(group.owner(*partition).map(|owner| &**owner), Some(id.as_str()));
            }
        }
    }

    fn pick(&mut self) -> Option<String> {
        let ids: Vec<&String> = self.clients.keys().collect();
        if ids.is_empty() {
            return None;
        }
        Some(ids[self.rng.random_range(0..ids.len())].clone())
    }

    fn step(&mut self) {
        match self.rng.random_range(0..100) {
            0..8 if self.clients.len() < 6 => {
                self.next_client += 1;
                let static_name = format!("s{:03}", self.next_client);
                let client = Client { static_name, ..Client::default() };
                self.clients.insert(format!("m{:03}", self.next_client), client);
            }
            8..12 => {
                // A leave, or an expiry of a client that may live on.
                let Some(id) = self.pick() else { return };
                self.apply(GroupChange::RemoveMembers { members: vec![id.clone()] }).unwrap();
                if self.rng.random() {
                    self.clients.remove(&id);
                }
            }
            12..15 => {
                let at = self.rng.random_range(0..self.topics.len());
                self.topics[at].partition_count += self.rng.random_range(0..3);
            }
            15..16 if self.topics.len() > 1 => {
                let at = self.rng.random_range(0..self.topics.len());
                self.topics.remove(at);
            }
            16..18 if self.topics.len() < 4 => {
                let id = self.topics.last().map_or(1, |topic| topic.topic_id + 1);
                self.topics.push(topic(id, 2));
            }
            18..40 => self.assign(),
            40..48 => {
                // A copy of an earlier heartbeat arrives; its response reaches no client. A join of
                // a client that has left since makes a ghost, so it is left out.
                let Some(id) = self.pick() else { return };
                let sent = &self.clients[&id].sent;
                let Some(report) = sent.last().filter(|it| it.epoch != 0) else { return };
                let report =
                    sent.iter().rev().nth(self.rng.random_range(0..3)).unwrap_or(report).clone();
                if report.epoch != 0 && report.spec.topics.is_empty() {
                    drop(self.heartbeat(&report));
                    self.check_readers();
                }
            }
            48..60 => {
                let Some(id) = self.pick() else { return };
                let client = &self.clients[&id];
                let number = self.rng.random_range(0..4);
                let at = client.reading.iter().nth(number).copied().unwrap_or(key(1, 0));
                let epoch = client.epoch.saturating_sub(self.rng.random_range(0..3));
                let member = Some(CommittingMember { member_id: id, epoch });
                let member = member.filter(|_| self.rng.random_bool(0.9));
                let topics = offsets(&[(at, Some(self.log.index))]);
                drop(self.apply(GroupChange::Commit { member, topics, at_us: 0 }));
            }
            60..62 => self.log.restart().unwrap(),
            62..65 => {
                // Another process takes a client's name over.
                let Some(id) = self.pick() else { return };
                let replaced = self.clients.remove(&id).unwrap();
                self.next_client += 1;
                let static_name = replaced.static_name;
                let client = Client { static_name, takes_over: true, ..Client::default() };
                self.clients.insert(format!("m{:03}", self.next_client), client);
            }
            _ => {
                let Some(id) = self.pick() else { return };
                self.beat(&id, true);
            }
        }
    }

    fn matched(&self) -> Vec<MatchedTopic> {
        let Some(group) = self.log.state.groups().get(GROUP) else { return Vec::new() };
        let subscribed = group.subscriptions();
        let is_matched = |topic: &&MatchedTopic| {
            subscribed.iter().any(|text| pattern_matches(text, &topic.name))
        };
        self.topics.iter().filter(is_matched).cloned().collect()
    }

    fn assign(&mut self) {
        let topics = self.matched();
        let group = self.log.state.groups().get(GROUP);
        if let Some(next) = group.and_then(|it| it.next_assignment(&topics)) {
            self.apply(GroupChange::Assign(next)).unwrap();
            self.check_readers();
        }
    }

    /// Within six heartbeats of each member, every partition with a subscriber has its owner.
    fn settle(&mut self) {
        let members: Vec<String> = match self.log.state.groups().get(GROUP) {
            Some(group) => group.members.keys().map(|id| id.to_string()).collect(),
            None => return,
        };
        let gone = members.iter().filter(|id| !self.clients.contains_key(*id)).cloned().collect();
        self.apply(GroupChange::RemoveMembers { members: gone }).unwrap();
        let ids: Vec<String> = self.clients.keys().cloned().collect();
        for _ in 0..6 {
            self.assign();
            ids.iter().for_each(|id| self.beat(id, false));
        }
        let Some(group) = self.log.state.groups().get(GROUP) else { return };
        assert!(group.is_stable());
        for topic in self.matched() {
            for number in 0..topic.partition_count {
                let owner = group.owner(key(topic.topic_id, number)).expect("it has an owner");
                assert!(self.clients[&**owner].reading.contains(&key(topic.topic_id, number)));
            }
        }
        assert_eq!(group.next_assignment(&self.matched()), None, "a stable group is quiet");
    }
}

#[test]
fn groups_agree_with_a_simple_implementation_and_settle() {
    let mut rng = seeded("groups_agree_with_a_simple_implementation_and_settle");
    for _ in 0..60 {
        let rng: StdRng = rand::SeedableRng::seed_from_u64(rng.random());
        let mut simulation = Simulation {
            rng,
            log: Log::new(),
            model: SimpleGroup::default(),
            topics: vec![topic(1, 4), topic(2, 3)],
            clients: BTreeMap::new(),
            next_client: 0,
        };
        for step in 0..400 {
            simulation.step();
            if step % 100 == 99 {
                simulation.settle();
            }
        }
    }
}

#[test]
fn checkpoint_of_groups_is_stable() {
    let mut log = Log::new();
    log.join("a", &["t1"]);
    log.assign(&[topic(1, 1)]);
    log.commit("a", 2, key(1, 0), 300).unwrap();
    let record = log.state.groups().records().remove(0);
    let bytes = prost::Message::encode_to_vec(&record);
    let mut expected = vec![10, 7];
    expected.extend(b"readers");
    expected.extend([16, 2, 24, 2]);
    // The member: settings, joined, owned with epochs, target.
    expected.extend([34, 33, 10, 10, 10, 1, b'a', 32, 144, 78, 42, 2, b't', b'1', 16, 1]);
    expected.extend([26, 6, 10, 1, 1, 18, 1, 0, 34, 1, 2, 42, 6, 10, 1, 1, 18, 1, 0]);
    // Assigned topics.
    expected.extend([42, 1, 1, 50, 1, 1]);
    // The offset, with one event.
    expected.extend([58, 21, 8, 1, 24, 172, 2, 40, 2, 50, 12, 8, 1, 18, 1, b'a', 32, 172, 2]);
    expected.extend([40, 2, 48, 2]);
    expected.extend([66, 6, 8, 1, 18, 2, b't', b'1']);
    assert_eq!(bytes, expected);
    let name: Arc<str> = GROUP.into();
    let mut table = GroupTable::default();
    table.restore(record.clone()).unwrap();
    assert_eq!(table.get(&name), Some(log.group()));
    assert!(table.restore(record).is_err(), "a duplicate group is refused");
}
