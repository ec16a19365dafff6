//! Order of commits across seeks, deletions, forgotten topics and later commits.

use super::*;

const AT: PartitionKey = PartitionKey { topic_id: 1, number: 0 };
const OTHER: PartitionKey = PartitionKey { topic_id: 1, number: 1 };

/// A commit without a member.
fn manual(at: PartitionKey, offset: u64, offsets_epoch: Option<u64>) -> GroupChange {
    let topics = offsets(&[(at, Some(offset))]);
    GroupChange::Commit { member: None, offsets_epoch, topics, at_us: 1 }
}

fn numbered(epoch: u64, sequence: u64, offset: u64) -> GroupChange {
    let member = Some(CommittingMember { member_id: "a".to_owned(), epoch, sequence });
    let topics = offsets(&[(AT, Some(offset))]);
    GroupChange::Commit { member, offsets_epoch: None, topics, at_us: 1 }
}

fn seek(offset: u64, is_undo: bool) -> GroupChange {
    let origin = SeekOrigin { by: "operator".to_owned(), is_undo, offsets_epoch: None };
    GroupChange::Seek { origin, topics: offsets(&[(AT, Some(offset))]), at_us: 1 }
}

fn remove() -> GroupChange {
    GroupChange::RemoveMembers { members: vec!["a".to_owned()] }
}

impl Log {
    fn epoch(&self) -> Option<u64> {
        Some(self.state.groups().offsets_epoch(GROUP))
    }

    fn committed(&self) -> Option<u64> {
        self.state.groups().get(GROUP)?.offset(AT)?.offset()
    }

    /// Applies a commit that must be refused, also before it is proposed and after a restart.
    fn refuses(&mut self, commit: &GroupChange) -> StaleReason {
        let before = self.state.groups().clone();
        self.restart().unwrap();
        let GroupChange::Commit { member, offsets_epoch, topics, .. } = commit else { panic!() };
        let checked =
            before.check_commit(GROUP, member.as_ref(), *offsets_epoch, topics).unwrap_err();
        let refused = self.apply(commit.clone()).unwrap_err();
        assert_eq!(refused, checked);
        assert_eq!(*self.state.groups(), before, "a refused commit changes nothing");
        let GroupRefusal::StaleCommit(stale) = refused else { panic!("{refused:?}") };
        assert_eq!(Some(stale.current), self.epoch());
        stale.why
    }
}

#[test]
fn late_commit_without_a_member_undoes_no_seek_and_no_commit() {
    let mut log = Log::new();
    assert_eq!(log.epoch(), Some(0), "a group that does not exist has an epoch");
    log.apply(manual(AT, 10, Some(0))).unwrap();
    let first = log.epoch();
    log.apply(manual(AT, 20, first)).unwrap();
    let late = manual(AT, 10, Some(0));
    assert_eq!(log.refuses(&late), StaleReason::Moved { given: 0 });
    // Another reader commits in another partition with what it knows.
    log.apply(manual(OTHER, 3, first)).unwrap();
    assert_eq!(log.committed(), Some(20));

    let held = manual(AT, 40, log.epoch());
    log.apply(held.clone()).unwrap();
    log.apply(held.clone()).expect("a copy changes nothing");
    let topics = offsets(&[(AT, Some(40))]);
    assert!(log.group().epoch_after_commit(None, &topics) > first);
    for change in [seek(5, false), seek(20, true)] {
        log.apply(change).unwrap();
        assert!(matches!(log.refuses(&held), StaleReason::Epoch { .. }));
        let absent = manual(AT, 40, None);
        assert_eq!(log.refuses(&absent), StaleReason::NoEpoch);
    }
    assert_eq!(log.committed(), Some(20));
    let future = manual(AT, 40, log.epoch().map(|epoch| epoch + 1));
    assert!(matches!(log.refuses(&future), StaleReason::Epoch { .. }));
    log.apply(manual(AT, 40, log.epoch())).unwrap();
    assert_eq!(log.committed(), Some(40));
}

#[test]
fn late_commit_revives_no_deleted_group() {
    let mut log = Log::new();
    log.apply(manual(AT, 10, None)).unwrap();
    let held = manual(AT, 40, log.epoch());
    let (absent, first) = (manual(AT, 10, None), manual(AT, 10, Some(0)));
    log.apply(GroupChange::Delete { offsets_epoch: None }).unwrap();
    for late in [&held, &absent, &first] {
        log.refuses(late);
        assert!(log.state.groups().is_empty());
    }
    // The group begins again.
    log.apply(manual(OTHER, 1, log.epoch())).unwrap();
    for late in [&held, &absent, &first] {
        log.refuses(late);
    }
    assert_eq!(log.committed(), None);
    // By members, too.
    log.apply(GroupChange::Delete { offsets_epoch: None }).unwrap();
    log.join("a", &["t1"]);
    log.apply(remove()).unwrap();
    for late in [&held, &absent, &first] {
        log.refuses(late);
    }
}

#[test]
fn deletions_are_remembered_in_bounds() {
    let mut table = GroupTable::default();
    let mut index = 0;
    let mut apply = |table: &mut GroupTable, name: &str, change| {
        index += 1;
        let command = GroupCommand { group: name.to_owned(), change, is_ordered: true };
        table.apply(index, &command, &mut Vec::new())
    };
    let count = DELETED_GROUPS_MAX + 3;
    for number in 0..count {
        let name = format!("g{number:05}");
        apply(&mut table, &name, seek(5, false)).unwrap();
        apply(&mut table, &name, GroupChange::Delete { offsets_epoch: None }).unwrap();
    }
    assert!(table.is_empty() && table.estimated_len() < DELETED_GROUPS_MAX * 20);
    for name in ["g00000", "g04098", "never"] {
        let late = apply(&mut table, name, manual(AT, 40, None));
        assert!(matches!(late, Err(GroupRefusal::StaleCommit(_))), "{name}: {late:?}");
        let epoch = Some(table.offsets_epoch(name));
        apply(&mut table, name, manual(AT, 40, epoch)).unwrap();
    }
}

#[test]
fn commits_of_a_member_are_ordered_by_epoch_and_sequence() {
    let mut log = Log::new();
    let topics = [topic(1, 1)];
    let joined = log.join("a", &["t1"]).epoch;
    log.assign(&topics);
    let epoch = log.report("a", joined, &[]).epoch;
    log.apply(numbered(epoch, 1, 40)).unwrap();
    log.apply(numbered(epoch, 1, 40)).expect("a copy changes nothing");
    log.apply(numbered(epoch, 2, 30)).expect("a lower offset on purpose");
    assert!(matches!(log.refuses(&numbered(epoch, 1, 40)), StaleReason::Sequence { .. }));
    assert!(matches!(log.refuses(&numbered(epoch, 2, 41)), StaleReason::Sequence { .. }));
    assert!(matches!(log.refuses(&numbered(epoch, 0, 41)), StaleReason::Sequence { .. }));
    // Another assignment keeps the partition, and the numbers begin again.
    log.join("b", &["t2"]);
    log.assign(&topics);
    let later = log.report("a", epoch, &[AT]).epoch;
    assert!(later > epoch);
    log.apply(numbered(later, 1, 50)).unwrap();
    for late in [numbered(epoch, 2, 30), numbered(epoch, 9, 60), numbered(epoch, 0, 60)] {
        log.refuses(&late);
    }
    assert_eq!(log.committed(), Some(50));
    // Commits of a member without numbers: the last one counts, within an epoch.
    log.apply(numbered(later, 2, 51)).unwrap();
    // A commit from before the members changes nothing after them.
    let members = vec!["a".to_owned(), "b".to_owned()];
    log.apply(GroupChange::RemoveMembers { members }).unwrap();
    assert!(matches!(log.refuses(&manual(AT, 7, Some(0))), StaleReason::Epoch { .. }));
    log.apply(manual(AT, 52, log.epoch())).unwrap();
}

#[test]
fn forgotten_topic_has_no_offsets_until_a_later_commit() {
    let mut log = Log::new();
    log.apply(manual(AT, 10, None)).unwrap();
    log.apply(manual(key(2, 0), 10, None)).unwrap();
    let held = manual(AT, 40, log.epoch());
    let forget =
        || GroupChange::ForgetTopic { topic: "t1".to_owned(), topic_id: 0, offsets_epoch: None };
    let joined = log.join("a", &["t1"]).epoch;
    log.assign(&[topic(1, 1)]);
    let epoch = log.report("a", joined, &[]).epoch;
    let refused = log.apply(forget()).unwrap_err();
    assert!(matches!(refused, GroupRefusal::TopicInUse { count: 1, .. }), "{refused:?}");
    // It no longer subscribes, but still has the partition.
    let spec = spec("a", &["t2"]);
    log.heartbeat(&MemberReport {
        spec,
        epoch,
        owned: [AT].into_iter().collect(),
        take_over: false,
    })
    .unwrap();
    assert!(matches!(log.apply(forget()), Err(GroupRefusal::TopicInUse { .. })));
    assert!(log.group().has_left("t1") && !log.group().has_left("t2"));
    log.apply(remove()).unwrap();
    assert!(!log.group().has_left("t1"), "a group without members may be read by any");
    log.apply(forget()).unwrap();
    log.apply(forget()).expect("a repeated one changes nothing");
    assert_eq!((log.committed(), log.group().offset_count()), (None, 1));
    assert!(matches!(log.refuses(&held), StaleReason::Epoch { .. }));
    assert_eq!(log.group().earlier_topic(3, "t1"), None, "its readers start as in a new group");
    // A deleted topic can be forgotten, too.
    log.apply(GroupChange::ForgetTopics { topic_ids: vec![2] }).unwrap();
    assert_eq!(log.group().topic_ids("t2"), [2]);
    log.apply(GroupChange::ForgetTopic {
        topic: "t2".to_owned(),
        topic_id: 2,
        offsets_epoch: None,
    })
    .unwrap();
    assert!(log.state.groups().is_empty(), "nothing is left");
    assert!(matches!(log.refuses(&held), StaleReason::Epoch { .. }));
}

#[test]
fn late_seek_or_deletion_changes_no_later_state() {
    let mut log = Log::new();
    log.apply(manual(AT, 10, None)).unwrap();
    let first = log.epoch();
    let seek_after = |offset, is_undo, offsets_epoch| {
        let origin = SeekOrigin { by: String::new(), is_undo, offsets_epoch };
        GroupChange::Seek { origin, topics: offsets(&[(AT, Some(offset))]), at_us: 1 }
    };
    let late = [
        seek_after(40, false, first),
        seek_after(40, true, first),
        GroupChange::ForgetTopic { topic: "t1".to_owned(), topic_id: 0, offsets_epoch: first },
        GroupChange::Delete { offsets_epoch: first },
    ];
    let refuses = |log: &mut Log| {
        let before = log.state.groups().clone();
        for change in &late {
            log.restart().unwrap();
            let refused = log.apply(change.clone()).unwrap_err();
            let GroupRefusal::StaleCommit(stale) = refused else { panic!("{refused:?}") };
            assert!(matches!(stale.why, StaleReason::Epoch { .. }));
            assert_eq!(*log.state.groups(), before, "a refused change changes nothing");
        }
    };
    // A commit without a member is not one to follow.
    log.apply(manual(AT, 20, first)).unwrap();
    log.apply(seek_after(5, false, first)).unwrap();
    refuses(&mut log);
    // Members had the group.
    log.apply(GroupChange::Delete { offsets_epoch: log.epoch() }).unwrap();
    let joined = log.join("a", &["t1"]).epoch;
    log.assign(&[topic(1, 1)]);
    let epoch = log.report("a", joined, &[]).epoch;
    log.apply(numbered(epoch, 1, 7)).unwrap();
    log.apply(remove()).unwrap();
    refuses(&mut log);
    assert_eq!(log.committed(), Some(7));
    // A repeated one finds nothing, and a missing group has an epoch.
    let forget = GroupChange::ForgetTopic {
        topic: "t1".to_owned(),
        topic_id: 0,
        offsets_epoch: log.epoch(),
    };
    log.apply(manual(OTHER, 1, log.epoch())).unwrap();
    log.apply(manual(key(2, 0), 1, log.epoch())).unwrap();
    log.apply(forget.clone()).unwrap();
    log.apply(forget).expect("nothing is left to forget");
    log.apply(GroupChange::Delete { offsets_epoch: log.epoch() }).unwrap();
    log.apply(seek_after(3, false, log.epoch())).unwrap();
    refuses(&mut log);
    assert_eq!(log.committed(), Some(3));
}

#[test]
fn commit_of_a_deleted_topic_is_refused() {
    let mut log = Log::new();
    log.apply(manual(AT, 10, None)).unwrap();
    log.apply(GroupChange::ForgetTopics { topic_ids: vec![1] }).unwrap();
    for epoch in [None, log.epoch()] {
        assert_eq!(log.refuses(&manual(AT, 40, epoch)), StaleReason::Topic);
    }
    assert_eq!(log.group().dropped_topic("t1"), Some(1));
}

#[test]
fn entries_of_earlier_versions_are_applied_as_before() {
    let mut table = GroupTable::default();
    let mut index = 0;
    let mut apply = |is_ordered, change| {
        index += 1;
        let command = GroupCommand { group: GROUP.to_owned(), change, is_ordered };
        table.apply(index, &command, &mut Vec::new())
    };
    apply(false, seek(5, false)).unwrap();
    apply(false, manual(AT, 40, None)).unwrap();
    apply(false, GroupChange::Delete { offsets_epoch: None }).unwrap();
    apply(false, manual(AT, 40, None)).unwrap();
    apply(true, seek(5, false)).unwrap();
    let late = apply(false, manual(AT, 40, None));
    assert!(late.is_err(), "the order holds from the first entry that has it on: {late:?}");
}
