//! Single rules of groups.

use super::*;

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
    assert_eq!(log.group().offset(moved).unwrap().offset(), Some(7));
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
    let standalone = GroupChange::Commit {
        member: None,
        offsets_epoch: None,
        topics: offsets(&[(key(1, 0), Some(4))]),
        at_us: 1,
    };
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
    assert_eq!(log.group().offset(key(1, 0)).unwrap().offset(), Some(4));
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
    let moved = *log.group().member("a1").unwrap().target.iter().next().unwrap();
    let kept = *log.group().member("c").unwrap().target.iter().next().unwrap();
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
    assert_eq!(log.group().member("a").unwrap().settings.topics[..], ["t1"]);
}

#[test]
fn topic_beyond_the_limit_is_truncated() {
    let mut log = Log::new();
    log.join("a", &["t*"]);
    let max = u32::try_from(PARTITIONS_PER_GROUP_MAX).unwrap();
    let topics = [topic(1, max + 5), topic(2, 3)];
    assert!(log.assign(&topics));
    assert_eq!(log.group().owners().len(), PARTITIONS_PER_GROUP_MAX);
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
        origin: SeekOrigin { by: "operator".to_owned(), is_undo, offsets_epoch: None },
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
    assert_eq!(log.group().offset(at).unwrap().offset(), None);
    log.restart().unwrap();
    log.join("a", &["t1"]);
    let refused = log.apply(seek(Some(1), false));
    assert!(matches!(refused, Err(GroupRefusal::NotEmpty { first, .. }) if *first[0] == *"a"));
    let refused = log.apply(GroupChange::Delete { offsets_epoch: None });
    assert!(matches!(refused, Err(GroupRefusal::NotEmpty { .. })));
}

#[test]
fn a_deletion_changes_the_group_and_a_refused_one_does_not() {
    let topics = offsets(&[(key(1, 0), Some(4))]);
    let mut table = GroupTable::default();
    let mut changed = Vec::new();
    let mut apply = |index, change| {
        let command = GroupCommand { group: GROUP.to_owned(), change, is_ordered: true };
        changed.clear();
        let applied = table.apply(index, &command, &mut changed);
        (applied, changed.iter().map(|name| name.to_string()).collect::<Vec<_>>())
    };
    let commit = GroupChange::Commit { member: None, offsets_epoch: None, topics, at_us: 1 };
    assert_eq!(apply(1, commit), (Ok(()), Vec::new()));
    assert_eq!(
        apply(2, GroupChange::Delete { offsets_epoch: None }),
        (Ok(()), vec![GROUP.to_owned()])
    );
    let refused = apply(3, GroupChange::Delete { offsets_epoch: None });
    assert_eq!(refused, (Err(GroupRefusal::GroupNotFound), Vec::new()));
}

#[test]
fn history_is_bounded_and_joins_commits_of_one_member() {
    let mut log = Log::new();
    let at = key(1, 0);
    let commit = |offset| GroupChange::Commit {
        member: None,
        offsets_epoch: None,
        topics: offsets(&[(at, Some(offset))]),
        at_us: offset,
    };
    (1..=20).for_each(|offset| log.apply(commit(offset)).unwrap());
    let history: Vec<_> = log.group().offset(at).unwrap().history().collect();
    assert_eq!(history.len(), 1);
    assert_eq!((history[0].from, history[0].to), (None, Some(20)));
    assert_eq!((history[0].since_us, history[0].until_us), (1, 20));
    for round in 0..20 {
        let origin = SeekOrigin { by: String::new(), is_undo: false, offsets_epoch: None };
        let topics = offsets(&[(at, Some(round))]);
        log.apply(GroupChange::Seek { origin, topics, at_us: 0 }).unwrap();
    }
    let history: Vec<_> = log.group().offset(at).unwrap().history().collect();
    assert_eq!(history.len(), OFFSET_HISTORY_MAX);
    assert_eq!(history[0].since_us, 20, "times never decrease");
}

#[test]
fn dropped_topic_is_remembered_by_name_until_the_next_commit() {
    let mut log = Log::new();
    let commit = |topic_id: u64| GroupChange::Commit {
        member: None,
        offsets_epoch: None,
        topics: vec![TopicOffsets {
            topic_id,
            name: "orders".to_owned(),
            offsets: vec![OffsetUpdate { number: 0, offset: Some(9), metadata: String::new() }],
        }],
        at_us: 0,
    };
    log.apply(commit(1)).unwrap();
    log.apply(GroupChange::ForgetTopics { topic_ids: vec![1, 7] }).unwrap();
    assert_eq!((log.group().offset_count(), log.group().offsets().count()), (0, 0));
    assert_eq!(log.group().dropped_topic("orders"), Some(1));
    log.restart().unwrap();
    assert_eq!(log.group().earlier_topic(2, "orders"), Some(1));
    assert_eq!(log.group().earlier_topic(2, "others"), None);
    log.apply(commit(2)).unwrap();
    assert_eq!(log.group().earlier_topic(2, "orders"), None);
    assert_eq!(log.group().earlier_topic(3, "orders"), Some(2), "it is not forgotten yet");
    assert_eq!(log.group().dropped_topic("orders"), None);
    assert_eq!(log.group().offset(key(2, 0)).unwrap().offset(), Some(9));
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
        let command = GroupCommand { group: "g".repeat(249), change, is_ordered: true };
        let head = Head::Shard(ShardCommand::Group(Box::new(command)));
        let bytes = head.encode();
        assert!(bytes.len() <= crate::log::HEAD_BYTES_MAX, "{head}: {}", bytes.len());
        assert_eq!(Head::decode(&bytes).unwrap(), head);
    }
}

#[test]
fn checkpoint_of_groups_is_stable() {
    let mut log = Log::new();
    log.join("a", &["t1"]);
    log.assign(&[topic(1, 1)]);
    log.commit("a", 2, key(1, 0), 300).unwrap();
    let record = log.state.groups().records().next().unwrap();
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
    expected.extend([58, 23, 8, 1, 24, 172, 2, 40, 2, 50, 12, 8, 1, 18, 1, b'a', 32, 172, 2]);
    // The place of its commit.
    expected.extend([40, 2, 48, 2, 56, 2]);
    expected.extend([66, 6, 8, 1, 18, 2, b't', b'1']);
    // Epochs of the offsets.
    expected.extend([88, 3, 96, 3]);
    assert_eq!(bytes, expected);
    let name: Arc<str> = GROUP.into();
    let mut table = GroupTable::default();
    table.restore(record.clone()).unwrap();
    assert_eq!(table.get(&name), Some(log.group()));
    assert!(table.restore(record).is_err(), "a duplicate group is refused");
}

/// Returns a group with commits of one member in the partitions of a topic.
fn group_with_offsets(partitions: u32) -> Log {
    let mut log = Log::new();
    let view = log.join("a", &["t1"]);
    log.assign(&[topic(1, partitions)]);
    let epoch = log.report("a", view.epoch, &[]).epoch;
    for round in 1..=20 {
        for number in 0..partitions {
            log.commit("a", epoch, key(1, number), round).unwrap();
        }
    }
    log
}

#[test]
fn offset_takes_the_documented_memory() {
    let mut log = group_with_offsets(12);
    for _ in 0..2 {
        let rows = log.group().offsets.of_topic(1);
        let bytes: usize = rows.iter().map(CommittedRow::memory).sum();
        assert_eq!((rows.len(), bytes), (12, 12 * 80), "one event is part of the row");
        log.restart().unwrap();
    }
    log.apply(GroupChange::RemoveMembers { members: vec!["a".to_owned()] }).unwrap();
    for offset in 1..=20 {
        let origin = SeekOrigin { by: String::new(), is_undo: false, offsets_epoch: None };
        let topics = offsets(&[(key(1, 0), Some(offset))]);
        log.apply(GroupChange::Seek { origin, topics, at_us: log.index }).unwrap();
    }
    for _ in 0..2 {
        let row = log.group().offset(key(1, 0)).unwrap();
        assert_eq!((row.history().count(), row.memory()), (8, 80 + 40 + 7 * 48));
        log.restart().unwrap();
    }
}

#[test]
fn member_takes_the_documented_memory() {
    let mut log = Log::new();
    let ids = ["a", "b", "c"];
    for id in ids {
        log.join(id, &["t1", "t2"]);
    }
    log.assign(&[topic(1, 30)]);
    for _ in 0..2 {
        let group = log.group();
        assert!(size_of::<ConsumerGroup>() <= 124, "{}", size_of::<ConsumerGroup>());
        assert!(size_of::<(Arc<str>, GroupMember)>() <= 80);
        let settings = &group.member("a").unwrap().settings;
        for id in ids {
            let member = group.member(id).unwrap();
            assert!(Arc::ptr_eq(&member.settings, settings), "members share settings");
            assert_eq!(member.owned.len(), 10);
        }
        log.restart().unwrap();
    }
}

#[test]
fn offsets_are_stored_in_any_order_and_keep_metadata() {
    let mut log = Log::new();
    let update = |number, offset, metadata: &str| OffsetUpdate {
        number,
        offset: Some(offset),
        metadata: metadata.to_owned(),
    };
    let commit = |offsets| GroupChange::Commit {
        member: None,
        offsets_epoch: None,
        topics: vec![TopicOffsets { topic_id: 1, name: "t1".to_owned(), offsets }],
        at_us: 1,
    };
    log.apply(commit(vec![update(5, 1, ""), update(3, 2, "x"), update(5, 3, "y")])).unwrap();
    log.apply(commit(vec![update(4, 4, ""), update(3, 5, ""), update(0, 6, "")])).unwrap();
    let rows: Vec<_> = log.group().offsets().collect();
    let rows: Vec<_> =
        rows.iter().map(|(key, row)| (key.number, row.offset(), row.metadata())).collect();
    assert_eq!(
        rows,
        [(0, Some(6), ""), (3, Some(5), ""), (4, Some(4), ""), (5, Some(3), "y")],
        "the later one of two updates counts"
    );
    let row = log.group().offset(key(1, 3)).unwrap();
    assert_eq!(row.memory(), 80, "removed metadata takes nothing");
    log.restart().unwrap();
    assert_eq!(log.group().offset_count(), 4);
}

#[test]
fn checkpoint_has_the_bytes_of_one_record() {
    use prost::Message;
    let mut log = group_with_offsets(3);
    let topics = offsets(&[(key(1, 0), Some(1))]);
    let change = GroupChange::Commit { member: None, offsets_epoch: None, topics, at_us: 1 };
    let command = GroupCommand { group: "others".to_owned(), change, is_ordered: true };
    let head = Head::Shard(ShardCommand::Group(Box::new(command)));
    let applied = log.state.apply(log.index + 1, &head, &mut Effects::default());
    assert!(matches!(applied, Verdict::Changed), "{applied:?}");
    let bytes = log.state.encode();
    let record = crate::records::ShardStateRecord::decode(bytes.clone()).unwrap();
    assert_eq!(record.groups.len(), 2);
    assert_eq!(record.encode_to_vec(), bytes);
}

#[test]
fn checkpoint_whose_history_does_not_lead_to_its_offset_is_refused() {
    use prost::Message;
    let log = group_with_offsets(1);
    let bytes = log.state.groups().records().next().unwrap().encode_to_vec();
    // The offset of the row, which its only event ends at.
    let at = bytes.windows(2).position(|it| it == [24, 20]).unwrap();
    let mut wrong = bytes.clone();
    wrong[at + 1] = 21;
    let restored = |bytes: &[u8]| {
        GroupTable::default().restore(crate::records::GroupRecord::decode(bytes).unwrap())
    };
    assert_eq!(restored(&bytes), Ok(()));
    assert!(restored(&wrong).unwrap_err().contains("does not lead to its offset"));
}

#[test]
fn checkpoint_takes_at_most_seven_quarters_of_its_estimate() {
    const FIRST: u64 = 1 << 40;
    const TOPIC: u64 = 1 << 28;
    let seek = |number, offset| GroupChange::Seek {
        origin: SeekOrigin { by: String::new(), is_undo: false, offsets_epoch: None },
        topics: offsets(&[(key(TOPIC, number), Some(offset))]),
        at_us: 1 << 52,
    };
    let one = |change| (GROUP.to_owned(), change);
    let rows = (90_000..91_000).map(|number| one(seek(number, u64::MAX)));
    let rounds = (0..8).flat_map(|round| (0..100).map(move |number| (number, round)));
    let events = rounds.map(|(number, round)| one(seek(number, u64::MAX - round)));
    let groups = (0..100).map(|number| (number.to_string(), seek(number, u64::MAX)));
    let join = |id: String| GroupChange::PutMember {
        member: spec(&id, &["t"]),
        take_over: false,
        joined_epoch: 0,
    };
    let assign = GroupChange::Assign(Assignment {
        group_epoch: FIRST + 49,
        topics: vec![(TOPIC, 5_000)],
        owners: (0..5_000).map(|number| number % 50 + 1).collect(),
    });
    let members = (0..50).map(|number| one(join(number.to_string())));
    let cases: [Vec<(String, GroupChange)>; 5] = [
        rows.collect(),
        events.collect(),
        groups.collect(),
        members.clone().collect(),
        members.chain([one(assign)]).collect(),
    ];
    for case in cases {
        let mut state = ShardState::new(StateLimits::default());
        for (index, (group, change)) in (FIRST..).zip(case) {
            let command = Box::new(GroupCommand { group, change, is_ordered: true });
            let head = Head::Shard(ShardCommand::Group(command));
            assert_eq!(state.apply(index, &head, &mut Effects::default()), Verdict::Changed);
        }
        let (bytes, estimate) = (state.encode().len(), state.groups().estimated_len());
        assert!(bytes * 4 <= estimate * 7, "{bytes} bytes, estimated {estimate}");
        assert_eq!(ShardState::decode(&state.encode()).unwrap(), state);
    }
}
