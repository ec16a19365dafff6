//! Cases of GroupService. Nothing of them may stay: the groups are as they were afterwards.

use helix_proto::log::v1::group_service_client::GroupServiceClient;
use helix_proto::log::v1::{
    CommitOffsetsRequest, CommittedOffset, DeleteGroupRequest, DescribeGroupRequest,
    ErrorReason as R, ForgetGroupTopicRequest, GetOffsetsRequest, GroupMembership,
    HeartbeatRequest, LeaveRequest, ListGroupsRequest, SeekGroupRequest, SubscribeRequest,
    TopicPartition,
};
use prost_types::Duration;

use super::Expected::{Fine, Refused};
use super::{FieldCase, InvalidCall, gateway_rows};
use crate::support::{TestServer, earliest};

const GROUP: &str = "bad-input";

/// A member that exists, and its epoch.
struct Member(u64);

fn join() -> HeartbeatRequest {
    HeartbeatRequest {
        group: GROUP.to_owned(),
        member_id: "m1".to_owned(),
        topics: vec!["default".to_owned()],
        session_timeout: Some(Duration { seconds: 600, nanos: 0 }),
        ..HeartbeatRequest::default()
    }
}

fn partition(number: u32) -> TopicPartition {
    TopicPartition { topic: "default".to_owned(), partition: number, topic_id: 0 }
}

fn offset(number: u32) -> CommittedOffset {
    CommittedOffset { partition: Some(partition(number)), offset: 0, metadata: String::new() }
}

pub(super) async fn all(server: &TestServer) -> Vec<FieldCase> {
    let mut groups = GroupServiceClient::new(server.channel.clone());
    let joined = groups.heartbeat(join()).await.unwrap().into_inner();
    let member = Member(joined.member_epoch);
    let reports = gateway_rows::all(GROUP);
    let rows =
        [heartbeats(&member), memberships(&member), commits(&member), seeks(), others(), reports];
    rows.into_iter().flatten().collect()
}

/// Checks that the calls have left one group with one member, which has what it had.
pub(super) async fn check_unchanged(server: &TestServer) {
    let mut groups = GroupServiceClient::new(server.channel.clone());
    let listed = groups.list_groups(ListGroupsRequest::default()).await.unwrap().into_inner();
    let names: Vec<_> = listed.groups.iter().map(|group| group.group.as_str()).collect();
    assert_eq!(names, [GROUP]);
    let describe = DescribeGroupRequest {
        group: GROUP.to_owned(),
        include_history: true,
        ..DescribeGroupRequest::default()
    };
    let found = groups.describe_group(describe).await.unwrap().into_inner();
    let members: Vec<_> = found.members.iter().map(|member| member.member_id.as_str()).collect();
    assert_eq!((members, &found.members[0].topics), (vec!["m1"], &vec!["default".to_owned()]));
    assert_eq!(found.members[0].owned.len(), 4);
    assert!(found.partitions.iter().all(|it| it.offset.is_none() && it.history.is_empty()));
}

fn heartbeats(member: &Member) -> Vec<FieldCase> {
    let beat = || HeartbeatRequest { member_epoch: member.0, topics: Vec::new(), ..join() };
    let call = InvalidCall::Heartbeat;
    let owned =
        |partitions: Vec<TopicPartition>| call(HeartbeatRequest { owned: partitions, ..beat() });
    let timeout = |seconds, nanos| {
        let session_timeout = Some(Duration { seconds, nanos });
        call(HeartbeatRequest { session_timeout, ..beat() })
    };
    let topics = |topics: Vec<String>| call(HeartbeatRequest { topics, ..beat() });
    let group = |group: &str| call(HeartbeatRequest { group: group.to_owned(), ..beat() });
    let id = |id: &str| call(HeartbeatRequest { member_id: id.to_owned(), ..beat() });
    let epoch = |member_epoch| call(HeartbeatRequest { member_epoch, ..beat() });
    let many = |count: u32| (0..count).map(partition).collect::<Vec<_>>();
    vec![
        (
            &["HeartbeatRequest.group"],
            group(""),
            Refused(R::InvalidArgument, "group: a group name"),
        ),
        (&["HeartbeatRequest.group"], group("a b"), Refused(R::InvalidArgument, "group: a group")),
        (
            &["HeartbeatRequest.group"],
            group("nowhere"),
            Refused(R::UnknownMember, "does not belong"),
        ),
        (
            &["HeartbeatRequest.member_id"],
            id(""),
            Refused(R::InvalidArgument, "member_id: must have"),
        ),
        (
            &["HeartbeatRequest.member_id"],
            id(&"x".repeat(65)),
            Refused(R::InvalidArgument, "member_id: must have"),
        ),
        (&["HeartbeatRequest.member_id"], id("m 1"), Refused(R::InvalidArgument, "member_id")),
        (&["HeartbeatRequest.member_id"], id("m2"), Refused(R::UnknownMember, "\"m2\"")),
        (
            &["HeartbeatRequest.member_epoch"],
            epoch(u64::MAX),
            Refused(R::StaleMemberEpoch, "epoch"),
        ),
        (&["HeartbeatRequest.member_epoch"], epoch(1), Refused(R::StaleMemberEpoch, "epoch 1 ")),
        (
            &["HeartbeatRequest.topics"],
            call(HeartbeatRequest { topics: Vec::new(), ..join() }),
            Refused(R::InvalidArgument, "topics: is required"),
        ),
        (
            &["HeartbeatRequest.topics"],
            topics(vec!["no/topic".to_owned()]),
            Refused(R::InvalidArgument, "topics: \"no/topic\""),
        ),
        (&["HeartbeatRequest.topics"], topics(vec!["default".to_owned(); 200]), Fine),
        (
            &["HeartbeatRequest.topics"],
            topics((0..10_000).map(|i| format!("t{i}")).collect()),
            Refused(R::InvalidArgument, "topics: must be at most 200"),
        ),
        (
            &["HeartbeatRequest.topics"],
            topics((0..51).map(|i| format!("p{i}*")).collect()),
            Refused(R::GroupLimitReached, "limit of 50 different patterns"),
        ),
        (&["HeartbeatRequest.owned", "TopicPartition.partition"], owned(vec![partition(99)]), Fine),
        (
            &["TopicPartition.topic"],
            owned(vec![TopicPartition { topic: "nowhere".to_owned(), ..partition(0) }]),
            Fine,
        ),
        (
            &["TopicPartition.topic_id"],
            owned(vec![TopicPartition { topic_id: u64::MAX, ..partition(0) }]),
            Fine,
        ),
        (
            &["HeartbeatRequest.owned"],
            owned(vec![partition(0), partition(0)]),
            Refused(R::InvalidArgument, "owned: default/0 is named twice"),
        ),
        (
            &["HeartbeatRequest.owned"],
            owned(many(10_001)),
            Refused(R::InvalidArgument, "owned: must be at most 10000"),
        ),
        (
            &["HeartbeatRequest.paused"],
            call(HeartbeatRequest { paused: many(10_001), ..beat() }),
            Refused(R::InvalidArgument, "paused: must be at most 10000"),
        ),
        (
            &["HeartbeatRequest.static_name"],
            call(HeartbeatRequest { static_name: "s".repeat(65), ..beat() }),
            Refused(R::InvalidArgument, "static_name: must have"),
        ),
        (
            &["HeartbeatRequest.static_name"],
            call(HeartbeatRequest { static_name: "another".to_owned(), ..beat() }),
            Refused(R::InvalidArgument, "cannot be changed"),
        ),
        (
            &["HeartbeatRequest.session_timeout"],
            timeout(0, 999_000_000),
            Refused(R::InvalidArgument, "session_timeout: must be 1s to 600s"),
        ),
        (
            &["HeartbeatRequest.session_timeout"],
            timeout(601, 0),
            Refused(R::InvalidArgument, "600s"),
        ),
        (
            &["HeartbeatRequest.session_timeout"],
            timeout(-1, 0),
            Refused(R::InvalidArgument, "zero"),
        ),
        (
            &["HeartbeatRequest.take_over"],
            call(HeartbeatRequest { take_over: true, ..join() }),
            Refused(R::InvalidArgument, "take_over: is for a join with a static_name"),
        ),
        (
            &["HeartbeatRequest.max_wait"],
            call(HeartbeatRequest { max_wait: Some(Duration { seconds: -1, nanos: 0 }), ..beat() }),
            Refused(R::InvalidArgument, "max_wait"),
        ),
        (
            &["HeartbeatRequest.client_name"],
            call(HeartbeatRequest { client_name: "c".repeat(129), ..beat() }),
            Refused(R::InvalidArgument, "client_name: must have at most 128"),
        ),
    ]
}

fn memberships(member: &Member) -> Vec<FieldCase> {
    let subscribe = |group: &str, member_id: &str, member_epoch| {
        let (group, member_id) = (group.to_owned(), member_id.to_owned());
        InvalidCall::Subscribe(SubscribeRequest {
            partitions: vec![earliest(0)],
            membership: Some(GroupMembership { group, member_id, member_epoch }),
            ..SubscribeRequest::default()
        })
    };
    vec![
        (
            &["GroupMembership.group"],
            subscribe("nowhere", "m1", member.0),
            Refused(R::UnknownMember, "\"m1\""),
        ),
        (
            &["GroupMembership.member_id"],
            subscribe(GROUP, "", member.0),
            Refused(R::InvalidArgument, "membership.member_id: must have"),
        ),
        (
            &["GroupMembership.member_id"],
            subscribe(GROUP, "m2", member.0),
            Refused(R::UnknownMember, "\"m2\""),
        ),
        (&["GroupMembership.member_epoch"], subscribe(GROUP, "m1", 0), Fine),
        (
            &["GroupMembership.member_epoch"],
            subscribe(GROUP, "m1", u64::MAX),
            Refused(R::StaleMemberEpoch, "epoch 18446744073709551615"),
        ),
    ]
}

fn commits(member: &Member) -> Vec<FieldCase> {
    let good = || CommitOffsetsRequest {
        group: GROUP.to_owned(),
        member_id: "m1".to_owned(),
        member_epoch: member.0,
        offsets: vec![offset(0)],
        ..CommitOffsetsRequest::default()
    };
    let call = InvalidCall::CommitOffsets;
    let offsets = |offsets: Vec<CommittedOffset>| call(CommitOffsetsRequest { offsets, ..good() });
    let at = |partition: TopicPartition| {
        offsets(vec![CommittedOffset { partition: Some(partition), ..offset(0) }])
    };
    let metadata =
        |bytes: usize, number| CommittedOffset { metadata: "m".repeat(bytes), ..offset(number) };
    vec![
        (
            &["CommitOffsetsRequest.group"],
            call(CommitOffsetsRequest { group: "..".to_owned(), ..good() }),
            Refused(R::InvalidArgument, "group: a group name"),
        ),
        (
            &["CommitOffsetsRequest.group"],
            call(CommitOffsetsRequest { group: "nowhere".to_owned(), ..good() }),
            Refused(R::UnknownMember, "\"m1\""),
        ),
        (
            &["CommitOffsetsRequest.member_id"],
            call(CommitOffsetsRequest { member_id: "m2".to_owned(), ..good() }),
            Refused(R::UnknownMember, "\"m2\""),
        ),
        (
            &["CommitOffsetsRequest.member_id"],
            call(CommitOffsetsRequest { member_id: String::new(), member_epoch: 0, ..good() }),
            Refused(R::GroupNotEmpty, "\"m1\""),
        ),
        (
            &["CommitOffsetsRequest.member_epoch"],
            call(CommitOffsetsRequest { member_id: String::new(), ..good() }),
            Refused(R::InvalidArgument, "member_epoch: is for a commit with a member_id"),
        ),
        (
            &["CommitOffsetsRequest.member_epoch"],
            call(CommitOffsetsRequest { member_epoch: u64::MAX, ..good() }),
            Refused(R::StaleMemberEpoch, "epoch"),
        ),
        (
            &["CommitOffsetsRequest.member_epoch"],
            call(CommitOffsetsRequest { member_epoch: 0, ..good() }),
            Refused(R::PartitionNotOwned, "default/0: "),
        ),
        (
            &["CommitOffsetsRequest.sequence"],
            call(CommitOffsetsRequest {
                member_id: String::new(),
                member_epoch: 0,
                sequence: 1,
                ..good()
            }),
            Refused(R::InvalidArgument, "sequence: is for a commit with a member_id"),
        ),
        (
            &["CommitOffsetsRequest.offsets_epoch"],
            call(CommitOffsetsRequest { offsets_epoch: Some(1), ..good() }),
            Refused(R::InvalidArgument, "offsets_epoch: is for a commit without a member_id"),
        ),
        (
            &["CommitOffsetsRequest.offsets_epoch"],
            call(CommitOffsetsRequest {
                group: "epochs".to_owned(),
                member_id: String::new(),
                member_epoch: 0,
                offsets_epoch: Some(u64::MAX),
                ..good()
            }),
            Refused(R::StaleCommit, "offsets_epoch 18446744073709551615"),
        ),
        (
            &["CommittedOffset.offset"],
            call(CommitOffsetsRequest {
                group: "epochs".to_owned(),
                member_id: String::new(),
                member_epoch: 0,
                offsets: vec![CommittedOffset { offset: u64::MAX, ..offset(0) }],
                ..good()
            }),
            Refused(R::OffsetOutOfRange, "default/0: offset 18446744073709551615 is out of range"),
        ),
        (
            &["CommitOffsetsRequest.offsets"],
            offsets(Vec::new()),
            Refused(R::InvalidArgument, "offsets: must be 1..=1000, not 0"),
        ),
        (
            &["CommitOffsetsRequest.offsets"],
            offsets((0..1_001).map(offset).collect()),
            Refused(R::InvalidArgument, "offsets: must be 1..=1000, not 1001"),
        ),
        (
            &["CommitOffsetsRequest.offsets"],
            offsets(vec![offset(0), offset(0)]),
            Refused(R::InvalidArgument, "default/0 is named twice"),
        ),
        (
            &["CommittedOffset.partition"],
            offsets(vec![CommittedOffset { partition: None, ..offset(0) }]),
            Refused(R::InvalidArgument, "offsets.partition: is required"),
        ),
        (
            &["TopicPartition.partition"],
            at(partition(9)),
            Refused(R::PartitionNotFound, "default/9: "),
        ),
        (
            &["TopicPartition.topic"],
            at(TopicPartition { topic: "nowhere".to_owned(), ..partition(0) }),
            Refused(R::TopicNotFound, "nowhere/0: "),
        ),
        (
            &["TopicPartition.topic_id"],
            at(TopicPartition { topic_id: u64::MAX, ..partition(0) }),
            Refused(R::TopicRecreated, "default/0: "),
        ),
        (
            &["CommittedOffset.metadata"],
            offsets(vec![metadata(4_097, 0)]),
            Refused(R::InvalidArgument, "offsets.metadata: must have at most 4096"),
        ),
        // Any offset is accepted: a member may know of records that the coordinator does not.
        (
            &["CommittedOffset.offset"],
            InvalidCall::SeekGroup(SeekGroupRequest {
                group: "another".to_owned(),
                offsets: vec![CommittedOffset { offset: u64::MAX, ..offset(2) }],
                ..SeekGroupRequest::default()
            }),
            Refused(R::OffsetOutOfRange, "default/2: "),
        ),
    ]
}

fn seeks() -> Vec<FieldCase> {
    let good = || SeekGroupRequest {
        group: GROUP.to_owned(),
        offsets: vec![offset(0)],
        ..SeekGroupRequest::default()
    };
    let call = InvalidCall::SeekGroup;
    // A group without members, which must not be created.
    let another = |offsets: Vec<CommittedOffset>| {
        call(SeekGroupRequest { group: "another".to_owned(), offsets, ..good() })
    };
    let at = |partition: TopicPartition| {
        another(vec![CommittedOffset { partition: Some(partition), ..offset(0) }])
    };
    vec![
        (
            &["SeekGroupRequest.offsets"],
            another((0..1_001).map(offset).collect()),
            Refused(R::InvalidArgument, "offsets: must be 1..=1000, not 1001"),
        ),
        (
            &["SeekGroupRequest.offsets"],
            another(vec![offset(1), offset(1)]),
            Refused(R::InvalidArgument, "default/1 is named twice"),
        ),
        (
            &["CommittedOffset.partition"],
            another(vec![CommittedOffset { partition: None, ..offset(0) }]),
            Refused(R::InvalidArgument, "offsets.partition: is required"),
        ),
        (
            &["CommittedOffset.metadata"],
            another(vec![CommittedOffset { metadata: "m".repeat(4_097), ..offset(0) }]),
            Refused(R::InvalidArgument, "offsets.metadata: must have at most 4096"),
        ),
        (
            &["TopicPartition.partition"],
            at(partition(9)),
            Refused(R::PartitionNotFound, "default/9: "),
        ),
        (
            &["TopicPartition.topic"],
            at(TopicPartition { topic: "nowhere".to_owned(), ..partition(0) }),
            Refused(R::TopicNotFound, "nowhere/0: "),
        ),
        (
            &["TopicPartition.topic_id"],
            at(TopicPartition { topic_id: u64::MAX, ..partition(0) }),
            Refused(R::TopicRecreated, "default/0: "),
        ),
        (
            &["SeekGroupRequest.group"],
            call(SeekGroupRequest { group: String::new(), ..good() }),
            Refused(R::InvalidArgument, "group: a group name"),
        ),
        (
            &["SeekGroupRequest.group"],
            call(SeekGroupRequest {
                group: "nowhere".to_owned(),
                undo: true,
                offsets: Vec::new(),
                ..good()
            }),
            Refused(R::GroupNotFound, "\"nowhere\""),
        ),
        (&["SeekGroupRequest.offsets"], call(good()), Refused(R::GroupNotEmpty, "\"m1\"")),
        (
            &["SeekGroupRequest.offsets"],
            call(SeekGroupRequest { offsets: Vec::new(), ..good() }),
            Refused(R::InvalidArgument, "offsets: give offsets, or undo"),
        ),
        (
            &["SeekGroupRequest.undo"],
            call(SeekGroupRequest { undo: true, ..good() }),
            Refused(R::InvalidArgument, "offsets: give offsets, or undo"),
        ),
        (
            &["SeekGroupRequest.topics"],
            call(SeekGroupRequest { topics: vec!["default".to_owned()], ..good() }),
            Refused(R::InvalidArgument, "topics: is for an undo"),
        ),
        (
            &["SeekGroupRequest.by"],
            call(SeekGroupRequest { by: "b".repeat(65), ..good() }),
            Refused(R::InvalidArgument, "by: must have at most 64"),
        ),
        (
            &["SeekGroupRequest.validate_only"],
            call(SeekGroupRequest { validate_only: true, ..good() }),
            Refused(R::GroupNotEmpty, "\"m1\""),
        ),
        (
            &["SeekGroupRequest.offsets_epoch"],
            call(SeekGroupRequest {
                group: "another".to_owned(),
                offsets_epoch: Some(u64::MAX),
                ..good()
            }),
            Refused(R::StaleCommit, "offsets_epoch 18446744073709551615"),
        ),
    ]
}

fn others() -> Vec<FieldCase> {
    let group = |group: &str| group.to_owned();
    let leave = |name: &str, id: &str| {
        InvalidCall::Leave(LeaveRequest { group: group(name), member_id: id.to_owned() })
    };
    let get = |name: &str| {
        let request = GetOffsetsRequest { group: group(name), ..GetOffsetsRequest::default() };
        InvalidCall::GetOffsets(request)
    };
    let get_page = |page_size, page_token: &str| {
        let (group, page_token) = (group(GROUP), page_token.to_owned());
        InvalidCall::GetOffsets(GetOffsetsRequest {
            group,
            page_size,
            page_token,
            ..GetOffsetsRequest::default()
        })
    };
    let describe = |name: &str, include_history| {
        InvalidCall::DescribeGroup(DescribeGroupRequest {
            group: group(name),
            include_history,
            ..DescribeGroupRequest::default()
        })
    };
    let describe_page = |page_size, page_token: &str| {
        InvalidCall::DescribeGroup(DescribeGroupRequest {
            group: group(GROUP),
            include_history: false,
            page_size,
            page_token: page_token.to_owned(),
        })
    };
    let list = |prefix: &str, page_size, page_token: &str| {
        let (prefix, page_token) = (prefix.to_owned(), page_token.to_owned());
        let topic = "default".to_owned();
        InvalidCall::ListGroups(ListGroupsRequest { prefix, page_size, page_token, topic })
    };
    let delete_after = |name: &str, offsets_epoch| {
        InvalidCall::DeleteGroup(DeleteGroupRequest { group: group(name), offsets_epoch })
    };
    let delete = |name: &str| delete_after(name, None);
    let forget = |name: &str, topic: &str, topic_id| {
        InvalidCall::ForgetGroupTopic(ForgetGroupTopicRequest {
            group: group(name),
            topic: topic.to_owned(),
            topic_id,
            validate_only: true,
            offsets_epoch: None,
        })
    };
    let topics = vec!["nowhere".to_owned(), String::new()];
    vec![
        (&["LeaveRequest.group"], leave("", "m1"), Refused(R::InvalidArgument, "group")),
        (&["LeaveRequest.group"], leave("nowhere", "m1"), Fine),
        (&["LeaveRequest.member_id"], leave(GROUP, ""), Refused(R::InvalidArgument, "member_id")),
        (&["LeaveRequest.member_id"], leave(GROUP, "m2"), Fine),
        (
            &["LeaveRequest.member_id"],
            leave(GROUP, &"x".repeat(65)),
            Refused(R::InvalidArgument, "member_id: must have"),
        ),
        (
            &["GetOffsetsRequest.group"],
            get(" "),
            Refused(R::InvalidArgument, "group: a group name"),
        ),
        (&["GetOffsetsRequest.group"], get("nowhere"), Refused(R::GroupNotFound, "\"nowhere\"")),
        (
            &["GetOffsetsRequest.topics"],
            InvalidCall::GetOffsets(GetOffsetsRequest {
                group: group(GROUP),
                topics,
                ..GetOffsetsRequest::default()
            }),
            Fine,
        ),
        (
            &["GetOffsetsRequest.topics"],
            InvalidCall::GetOffsets(GetOffsetsRequest {
                group: group(GROUP),
                topics: vec![String::new(); 2_001],
                ..GetOffsetsRequest::default()
            }),
            Refused(R::InvalidArgument, "topics: must be at most 2000"),
        ),
        (
            &["GetOffsetsRequest.page_size"],
            get_page(-1, ""),
            Refused(R::InvalidArgument, "page_size"),
        ),
        (
            &["GetOffsetsRequest.allow_missing"],
            InvalidCall::GetOffsets(GetOffsetsRequest {
                group: group("nowhere"),
                allow_missing: true,
                ..GetOffsetsRequest::default()
            }),
            Fine,
        ),
        (&["GetOffsetsRequest.page_size"], get_page(i32::MAX, ""), Fine),
        (
            &["GetOffsetsRequest.page_token"],
            get_page(0, "p1/-1"),
            Refused(R::InvalidArgument, "page_token: \"p1/-1\" is not"),
        ),
        (
            &["SeekGroupRequest.topics"],
            InvalidCall::SeekGroup(SeekGroupRequest {
                group: group(GROUP),
                undo: true,
                topics: vec![String::new(); 2_001],
                ..SeekGroupRequest::default()
            }),
            Refused(R::InvalidArgument, "topics: must be at most 2000"),
        ),
        (
            &["DescribeGroupRequest.group", "DescribeGroupRequest.include_history"],
            describe("", true),
            Refused(R::InvalidArgument, "group: a group name"),
        ),
        (
            &["DescribeGroupRequest.group"],
            describe("nowhere", false),
            Refused(R::GroupNotFound, "\"nowhere\""),
        ),
        (
            &["DescribeGroupRequest.page_size"],
            describe_page(-1, ""),
            Refused(R::InvalidArgument, "page_size"),
        ),
        (&["DescribeGroupRequest.page_size"], describe_page(i32::MAX, "m\u{0}"), Fine),
        (
            &["DescribeGroupRequest.page_token"],
            describe_page(0, "x"),
            Refused(R::InvalidArgument, "page_token: \"x\" is not"),
        ),
        (
            &["ListGroupsRequest.page_size"],
            list("", -1, ""),
            Refused(R::InvalidArgument, "page_size"),
        ),
        (
            &[
                "ListGroupsRequest.prefix",
                "ListGroupsRequest.page_token",
                "ListGroupsRequest.topic",
            ],
            list("\u{0}", i32::MAX, "\u{0}"),
            Fine,
        ),
        (
            &["ForgetGroupTopicRequest.group"],
            forget("", "default", 0),
            Refused(R::InvalidArgument, "group: a group name"),
        ),
        (
            &["ForgetGroupTopicRequest.group"],
            forget("nowhere", "default", 0),
            Refused(R::GroupNotFound, "\"nowhere\""),
        ),
        (
            &["ForgetGroupTopicRequest.topic"],
            forget(GROUP, "a b", 0),
            Refused(R::InvalidArgument, "topic: \"a b\" is not a topic name"),
        ),
        (
            &["ForgetGroupTopicRequest.topic", "ForgetGroupTopicRequest.topic_id"],
            forget(GROUP, "default", 0),
            Refused(R::GroupNotEmpty, "\"m1\""),
        ),
        (
            &["ForgetGroupTopicRequest.topic_id", "ForgetGroupTopicRequest.validate_only"],
            forget(GROUP, "nowhere", u64::MAX),
            Fine,
        ),
        (&["DeleteGroupRequest.group"], delete(""), Refused(R::InvalidArgument, "group")),
        (
            &["DeleteGroupRequest.group"],
            delete("nowhere"),
            Refused(R::GroupNotFound, "begins with"),
        ),
        (&["DeleteGroupRequest.group"], delete(GROUP), Refused(R::GroupNotEmpty, "\"m1\"")),
        (
            &["DeleteGroupRequest.offsets_epoch"],
            delete_after(GROUP, Some(u64::MAX)),
            Refused(R::GroupNotEmpty, "\"m1\""),
        ),
        (
            &["ForgetGroupTopicRequest.offsets_epoch"],
            InvalidCall::ForgetGroupTopic(ForgetGroupTopicRequest {
                group: group(GROUP),
                topic: "nowhere".to_owned(),
                offsets_epoch: Some(u64::MAX),
                ..ForgetGroupTopicRequest::default()
            }),
            // Nothing to forget.
            Fine,
        ),
    ]
}
