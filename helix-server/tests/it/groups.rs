//! Consumer groups on one node: members, commits, seeks, and readers that start at a group's
//! offsets.

use std::time::Duration;

use helix_proto::log::v1::group_service_client::GroupServiceClient;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::subscribe_response::Message;
use helix_proto::log::v1::{
    AddPartitionsRequest, CommitFallback, CommitOffsetsRequest, CommitStatus, CommittedOffset,
    CreateTopicRequest, DeleteGroupRequest, DeleteTopicRequest, DeliveryStatus,
    DescribeGroupRequest, DescribeGroupResponse, ErrorReason as R, FetchRequest, GetOffsetsRequest,
    GroupMembership, GroupPartition, GroupState, HeartbeatRequest, HeartbeatResponse, LeaveRequest,
    ListGroupsRequest, OffsetAndLag, OffsetChangeKind, PartitionStart, ResolveOffsetsRequest,
    SeekGroupRequest, StartPosition, SubscribeRequest, TopicPartition, TrimPartitionRequest,
};
use tonic::Status;
use tonic::transport::Channel;

use crate::support::{TestServer, detail, on_both, reason, soon, values};
use crate::trio::until;

const GROUP: &str = "readers";

pub(crate) fn groups(server: &TestServer) -> GroupServiceClient<Channel> {
    GroupServiceClient::new(server.channel.clone())
}

pub(crate) fn partition(number: u32) -> TopicPartition {
    TopicPartition { topic: "default".to_owned(), partition: number, topic_id: 0 }
}

pub(crate) fn commit_at(number: u32, offset: u64) -> CommittedOffset {
    CommittedOffset { partition: Some(partition(number)), offset, metadata: String::new() }
}

/// A member as a client keeps it.
#[derive(Debug, Clone)]
pub(crate) struct TestMember {
    pub(crate) request: HeartbeatRequest,
    pub(crate) last: HeartbeatResponse,
}

impl TestMember {
    pub(crate) fn new(id: &str, topics: &[&str]) -> Self {
        let request = HeartbeatRequest {
            group: GROUP.to_owned(),
            member_id: id.to_owned(),
            topics: topics.iter().map(|topic| (*topic).to_owned()).collect(),
            session_timeout: Some(prost_types::Duration { seconds: 20, nanos: 0 }),
            ..HeartbeatRequest::default()
        };
        Self { request, last: HeartbeatResponse::default() }
    }

    fn with_timeout(mut self, seconds: i64) -> Self {
        self.request.session_timeout = Some(prost_types::Duration { seconds, nanos: 0 });
        self
    }

    /// Sends one heartbeat, and reads what it was given.
    pub(crate) async fn beat(&mut self, server: &TestServer) -> Result<(), Status> {
        self.last = groups(server).heartbeat(self.request.clone()).await?.into_inner();
        self.request.member_epoch = self.last.member_epoch;
        self.request.owned.clone_from(&self.last.assigned);
        Ok(())
    }

    /// A subscription to a partition that ends when the member loses it.
    pub(crate) fn subscribe_to(&self, number: u32) -> SubscribeRequest {
        SubscribeRequest {
            partitions: fetch_from_group(number, CommitFallback::Unspecified).partitions,
            membership: Some(GroupMembership {
                group: GROUP.to_owned(),
                member_id: self.request.member_id.clone(),
                member_epoch: self.request.member_epoch,
            }),
            ..SubscribeRequest::default()
        }
    }

    pub(crate) fn numbers(&self) -> Vec<u32> {
        self.last.assigned.iter().map(|it| it.partition).collect()
    }

    /// Sends heartbeats until the member has as many partitions.
    pub(crate) async fn until_owns(&mut self, server: &TestServer, count: usize) {
        until("the member has its partitions", async || {
            self.beat(server).await.unwrap();
            (self.last.assigned.len() == count && self.last.pending.is_empty()).then_some(())
        })
        .await;
    }

    pub(crate) async fn commit(
        &self,
        server: &TestServer,
        number: u32,
        offset: u64,
    ) -> Result<(), Status> {
        let request = CommitOffsetsRequest {
            group: self.request.group.clone(),
            member_id: self.request.member_id.clone(),
            member_epoch: self.request.member_epoch,
            offsets: vec![commit_at(number, offset)],
            ..CommitOffsetsRequest::default()
        };
        groups(server).commit_offsets(request).await.map(drop)
    }
}

pub(crate) async fn leave(server: &TestServer, id: &str) {
    let request = LeaveRequest { group: GROUP.to_owned(), member_id: id.to_owned() };
    groups(server).leave(request).await.unwrap();
}

async fn commit_alone(server: &TestServer, number: u32, offset: u64) -> Result<(), Status> {
    let request = CommitOffsetsRequest {
        group: GROUP.to_owned(),
        offsets: vec![commit_at(number, offset)],
        ..CommitOffsetsRequest::default()
    };
    groups(server).commit_offsets(request).await.map(drop)
}

pub(crate) async fn offsets(server: &TestServer) -> Vec<OffsetAndLag> {
    let request = GetOffsetsRequest { group: GROUP.to_owned(), ..GetOffsetsRequest::default() };
    groups(server).get_offsets(request).await.unwrap().into_inner().offsets
}

pub(crate) async fn describe(server: &TestServer) -> DescribeGroupResponse {
    let request = DescribeGroupRequest {
        group: GROUP.to_owned(),
        include_history: true,
        ..DescribeGroupRequest::default()
    };
    groups(server).describe_group(request).await.unwrap().into_inner()
}

/// A fetch that starts at the group's offset.
pub(crate) fn fetch_from_group(number: u32, fallback: CommitFallback) -> FetchRequest {
    let start = PartitionStart {
        topic: "default".to_owned(),
        partition: number,
        start: Some(StartPosition {
            position: Some(Position::CommittedGroup(GROUP.to_owned())),
            commit_fallback: fallback.into(),
            ..StartPosition::default()
        }),
        ..PartitionStart::default()
    };
    FetchRequest { partitions: vec![start], ..FetchRequest::default() }
}

#[tokio::test]
async fn members_divide_partitions_and_a_leave_moves_them_at_once() {
    on_both(async |server: TestServer| {
        let mut a = TestMember::new("a", &["default"]);
        a.until_owns(&server, 4).await;
        let mut b = TestMember::new("b", &["default"]);
        b.beat(&server).await.unwrap();
        until("the members have two partitions each", async || {
            a.beat(&server).await.unwrap();
            b.beat(&server).await.unwrap();
            (a.numbers().len() == 2 && b.numbers().len() == 2).then_some(())
        })
        .await;
        assert!(a.numbers().iter().all(|number| !b.numbers().contains(number)));
        assert_eq!(describe(&server).await.state(), GroupState::Stable);
        // The leave ends the other's long poll.
        b.request.max_wait = Some(prost_types::Duration { seconds: 5, nanos: 0 });
        let left = async {
            tokio::task::yield_now().await;
            leave(&server, "a").await;
            leave(&server, "a").await;
        };
        let (beat, ()) = tokio::join!(b.beat(&server), left);
        beat.unwrap();
        b.until_owns(&server, 4).await;
        let gone = a.beat(&server).await.unwrap_err();
        assert_eq!(reason(&gone), R::UnknownMember);
    })
    .await;
}

/// A join may be answered before its assignment exists, or while another member has to release.
#[tokio::test]
async fn settled_member_has_its_part_of_the_current_assignment() {
    let server = TestServer::in_memory().await;
    let until_settled = async |member: &mut TestMember| {
        until("the member is settled", async || {
            member.beat(&server).await.unwrap();
            member.last.settled.then(|| member.numbers().len())
        })
        .await
    };
    let mut a = TestMember::new("a", &["default"]);
    assert_eq!(until_settled(&mut a).await, 4);
    let mut b = TestMember::new("b", &["default"]);
    until("the first member has to release", async || {
        b.beat(&server).await.unwrap();
        assert!(!b.last.settled, "{:?}", b.last);
        (b.last.pending.len() == 2).then_some(())
    })
    .await;
    assert_eq!(until_settled(&mut a).await, 2);
    assert_eq!(until_settled(&mut b).await, 2);
}

#[tokio::test]
async fn heartbeats_of_a_steady_group_write_nothing() {
    let server = TestServer::in_memory().await;
    let mut member = TestMember::new("a", &["default"]);
    member.until_owns(&server, 4).await;
    let before = crate::trio::shard_status(&server, 1).await.last_index;
    for _ in 0..20 {
        member.beat(&server).await.unwrap();
    }
    assert_eq!(crate::trio::shard_status(&server, 1).await.last_index, before);
}

#[tokio::test]
async fn refused_joins_and_commits_write_nothing() {
    let server = TestServer::in_memory().await;
    let named = |id: &str| {
        let mut member = TestMember::new(id, &["default"]);
        member.request.static_name = "worker-1".to_owned();
        member
    };
    let mut member = named("a");
    member.until_owns(&server, 4).await;
    let before = crate::trio::shard_status(&server, 1).await.last_index;
    for _ in 0..5 {
        let refused = named("b").beat(&server).await.unwrap_err();
        assert_eq!(reason(&refused), R::MemberNameInUse);
        let refused = named("b").commit(&server, 0, 0).await.unwrap_err();
        assert_eq!(reason(&refused), R::UnknownMember);
        let refused = commit_alone(&server, 0, 0).await.unwrap_err();
        assert_eq!(reason(&refused), R::GroupNotEmpty);
    }
    assert_eq!(crate::trio::shard_status(&server, 1).await.last_index, before);
}

#[tokio::test]
async fn commits_are_fenced() {
    let server = TestServer::in_memory().await;
    server.append(&["a", "b"]).await;
    let mut a = TestMember::new("a", &["default"]);
    a.until_owns(&server, 4).await;
    a.commit(&server, 0, 1).await.unwrap();
    let alone = commit_alone(&server, 0, 2).await.unwrap_err();
    assert_eq!(reason(&alone), R::GroupNotEmpty);
    assert_eq!(detail(&alone).member_ids, ["a"]);
    let mut b = TestMember::new("b", &["default"]);
    b.beat(&server).await.unwrap();
    let early = b.commit(&server, 0, 2).await.unwrap_err();
    assert_eq!(reason(&early), R::PartitionNotOwned);
    assert_eq!((detail(&early).topic.as_str(), detail(&early).partition), ("default", Some(0)));
    // An older epoch is accepted while the member owns the partition.
    let old = a.clone();
    until("the epoch has changed", async || {
        a.beat(&server).await.unwrap();
        (a.last.member_epoch > old.last.member_epoch && a.numbers().len() == 2).then_some(())
    })
    .await;
    old.commit(&server, a.numbers()[0], 2).await.unwrap();
    let mut future = a.clone();
    future.request.member_epoch += 1_000;
    let refused = future.commit(&server, a.numbers()[0], 3).await.unwrap_err();
    assert_eq!(reason(&refused), R::StaleMemberEpoch);
    assert_eq!(detail(&refused).member_epoch, a.last.member_epoch);
    leave(&server, "a").await;
    let left = a.commit(&server, a.numbers()[0], 3).await.unwrap_err();
    assert_eq!(reason(&left), R::UnknownMember);
    let committed: Vec<_> =
        offsets(&server).await.into_iter().map(|it| it.committed.unwrap().offset).collect();
    assert!(committed.iter().all(|offset| *offset <= 2), "{committed:?}");
}

#[tokio::test]
async fn commit_with_too_much_metadata_changes_nothing() {
    let server = TestServer::in_memory().await;
    let add = AddPartitionsRequest {
        name: "default".to_owned(),
        partition_count: 13,
        ..AddPartitionsRequest::default()
    };
    server.topics().add_partitions(add).await.unwrap();
    commit_alone(&server, 0, 0).await.unwrap();
    let metadata = "m".repeat(4 << 10);
    let request = CommitOffsetsRequest {
        group: GROUP.to_owned(),
        offsets: (0..13)
            .map(|number| CommittedOffset { metadata: metadata.clone(), ..commit_at(number, 0) })
            .collect(),
        ..CommitOffsetsRequest::default()
    };
    let refused = groups(&server).commit_offsets(request).await.unwrap_err();
    assert_eq!(reason(&refused), R::InvalidArgument);
    assert!(refused.message().contains("the limit is 49152"), "{refused:?}");
    let found = offsets(&server).await;
    assert_eq!(found.len(), 1);
    assert!(found[0].committed.as_ref().unwrap().metadata.is_empty());
}

#[tokio::test]
async fn silent_member_is_removed_at_its_session_timeout() {
    let server = TestServer::in_memory().await;
    let mut silent = TestMember::new("silent", &["default"]).with_timeout(4);
    silent.until_owns(&server, 4).await;
    until("the partitions have a silent owner", async || {
        let described = describe(&server).await;
        let is_silent = |it: &GroupPartition| it.status() == DeliveryStatus::OwnerSilent;
        described.partitions.iter().all(is_silent).then_some(())
    })
    .await;
    let mut other = TestMember::new("other", &["default"]);
    other.until_owns(&server, 4).await;
    let gone = silent.beat(&server).await.unwrap_err();
    assert_eq!(reason(&gone), R::UnknownMember);
    // A member that was removed joins again with the same id.
    silent.request.member_epoch = 0;
    silent.request.owned.clear();
    silent.request.session_timeout = Some(prost_types::Duration { seconds: 20, nanos: 0 });
    until("the members have two partitions each", async || {
        silent.beat(&server).await.unwrap();
        other.beat(&server).await.unwrap();
        (silent.numbers().len() == 2 && other.numbers().len() == 2).then_some(())
    })
    .await;
}

#[tokio::test]
async fn new_partitions_and_topics_are_picked_up() {
    let server = TestServer::in_memory().await;
    let mut member = TestMember::new("a", &["default", "metrics.*", "later"]);
    member.until_owns(&server, 4).await;
    assert_eq!(member.last.unmatched_topics, ["later", "metrics.*"]);
    let add = AddPartitionsRequest {
        name: "default".to_owned(),
        partition_count: 6,
        ..AddPartitionsRequest::default()
    };
    server.topics().add_partitions(add).await.unwrap();
    member.until_owns(&server, 6).await;
    for name in ["metrics.cpu", "metrics", "later"] {
        let create = CreateTopicRequest {
            name: name.to_owned(),
            partition_count: 1,
            ..CreateTopicRequest::default()
        };
        server.topics().create_topic(create).await.unwrap();
    }
    member.until_owns(&server, 8).await;
    assert!(member.last.unmatched_topics.is_empty());
    let delete = DeleteTopicRequest { name: "metrics.cpu".to_owned(), ..Default::default() };
    server.topics().delete_topic(delete).await.unwrap();
    member.until_owns(&server, 7).await;
}

#[tokio::test]
async fn static_name_is_taken_over_on_request_only() {
    let server = TestServer::in_memory().await;
    let named = |id: &str, take_over| {
        let mut member = TestMember::new(id, &["default"]);
        member.request.static_name = "worker-1".to_owned();
        member.request.take_over = take_over;
        member
    };
    let mut first = named("p1", false);
    first.until_owns(&server, 4).await;
    let refused = named("p2", false).beat(&server).await.unwrap_err();
    assert_eq!(reason(&refused), R::MemberNameInUse);
    assert_eq!(detail(&refused).member_ids, ["p1"]);
    let mut second = named("p2", true);
    second.beat(&server).await.unwrap();
    assert_eq!(second.numbers(), [0, 1, 2, 3], "nothing moves");
    second.commit(&server, 3, 0).await.unwrap();
    assert_eq!(reason(&first.commit(&server, 3, 0).await.unwrap_err()), R::UnknownMember);
    assert_eq!(reason(&first.beat(&server).await.unwrap_err()), R::UnknownMember);
}

#[tokio::test]
async fn offsets_and_members_survive_a_restart() {
    let server = TestServer::durable().await;
    server.append(&["a", "b", "c"]).await;
    let mut member = TestMember::new("a", &["default"]);
    member.until_owns(&server, 4).await;
    member.commit(&server, 0, 2).await.unwrap();
    let server = server.restart().await;
    let before = member.last.clone();
    member.beat(&server).await.unwrap();
    assert_eq!(
        (member.last.member_epoch, &member.last.assigned),
        (before.member_epoch, &before.assigned)
    );
    member.commit(&server, 1, 0).await.unwrap();
    let found = offsets(&server).await;
    assert_eq!(found.len(), 2);
    assert_eq!((found[0].committed.as_ref().unwrap().offset, found[0].lag), (2, Some(1)));
    assert_eq!(found[0].status(), CommitStatus::Valid);
}

#[tokio::test]
async fn seeks_need_an_empty_group_and_can_be_taken_back() {
    let server = TestServer::in_memory().await;
    server.append(&["a", "b", "c"]).await;
    commit_alone(&server, 0, 3).await.unwrap();
    let seek = |offset| SeekGroupRequest {
        group: GROUP.to_owned(),
        offsets: vec![commit_at(0, offset)],
        by: "operator".to_owned(),
        ..SeekGroupRequest::default()
    };
    let preview = SeekGroupRequest { validate_only: true, ..seek(1) };
    let preview = groups(&server).seek_group(preview).await.unwrap().into_inner().offsets;
    assert_eq!((preview[0].from, preview[0].to), (Some(3), Some(1)));
    assert_eq!(offsets(&server).await[0].committed.as_ref().unwrap().offset, 3);
    groups(&server).seek_group(seek(1)).await.unwrap();
    assert_eq!(offsets(&server).await[0].committed.as_ref().unwrap().offset, 1);
    let beyond = groups(&server).seek_group(seek(9)).await.unwrap_err();
    assert_eq!(reason(&beyond), R::OffsetOutOfRange);
    let undo =
        SeekGroupRequest { group: GROUP.to_owned(), undo: true, ..SeekGroupRequest::default() };
    let undone = groups(&server).seek_group(undo.clone()).await.unwrap().into_inner().offsets;
    assert_eq!((undone[0].from, undone[0].to), (Some(1), Some(3)));
    let history = &describe(&server).await.partitions[0].history;
    let kinds: Vec<_> = history.iter().map(|change| change.kind()).collect();
    assert_eq!(kinds, [OffsetChangeKind::Commit, OffsetChangeKind::Seek, OffsetChangeKind::Undo]);
    assert_eq!(history[1].by, "operator");
    TestMember::new("a", &["default"]).beat(&server).await.unwrap();
    for refused in [seek(1), undo] {
        let refused = groups(&server).seek_group(refused).await.unwrap_err();
        assert_eq!(
            (reason(&refused), detail(&refused).member_ids),
            (R::GroupNotEmpty, vec!["a".to_owned()])
        );
    }
    let delete = DeleteGroupRequest { group: GROUP.to_owned(), ..DeleteGroupRequest::default() };
    let refused = groups(&server).delete_group(delete.clone()).await.unwrap_err();
    assert_eq!(reason(&refused), R::GroupNotEmpty);
    leave(&server, "a").await;
    groups(&server).delete_group(delete.clone()).await.unwrap();
    assert_eq!(reason(&groups(&server).delete_group(delete).await.unwrap_err()), R::GroupNotFound);
}

#[tokio::test]
async fn lists_groups_in_pages() {
    let server = TestServer::in_memory().await;
    server.append(&["a", "b", "c"]).await;
    server.append_to(2, &["d", "e"]).await;
    for name in ["b", "a", "c"] {
        let request = CommitOffsetsRequest {
            group: name.to_owned(),
            offsets: vec![commit_at(0, 1)],
            ..CommitOffsetsRequest::default()
        };
        groups(&server).commit_offsets(request).await.unwrap();
    }
    let mut names = Vec::new();
    let mut page_token = String::new();
    loop {
        let request = ListGroupsRequest { page_size: 2, page_token, ..Default::default() };
        let page = groups(&server).list_groups(request).await.unwrap().into_inner();
        assert!(page.groups.iter().all(|it| it.total_lag == 2 && it.member_count == 0));
        // Partition 2 has no committed offset.
        assert!(page.groups.iter().all(|it| it.uncommitted_lag == 2), "{page:?}");
        for group in &page.groups {
            let group = group.group.clone();
            let request = DescribeGroupRequest { group, ..DescribeGroupRequest::default() };
            let described = groups(&server).describe_group(request).await.unwrap().into_inner();
            assert_eq!(described.uncommitted_lag, 2);
        }
        names.extend(page.groups.into_iter().map(|group| group.group));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(names, ["a", "b", "c"]);
}

#[tokio::test]
async fn readers_start_at_the_committed_offset() {
    on_both(async |server: TestServer| {
        server.append(&["a", "b", "c"]).await;
        // A group without commits starts at the earliest record.
        let fetched = server.fetch_one(fetch_from_group(0, CommitFallback::Unspecified)).await;
        assert_eq!(values(&fetched.records), ["a", "b", "c"]);
        let failing = server.consume().fetch(fetch_from_group(0, CommitFallback::Fail)).await;
        assert_eq!(reason(&failing.unwrap_err()), R::NoCommittedOffset);
        let latest = server.fetch_one(fetch_from_group(0, CommitFallback::Latest)).await;
        assert_eq!(latest.next_offset, 3);
        commit_alone(&server, 0, 2).await.unwrap();
        let fetched = server.fetch_one(fetch_from_group(0, CommitFallback::Fail)).await;
        assert_eq!(values(&fetched.records), ["c"]);
        let resolve = ResolveOffsetsRequest {
            topic: "default".to_owned(),
            partitions: vec![0],
            position: fetch_from_group(0, CommitFallback::Fail).partitions[0].start.clone(),
            ..ResolveOffsetsRequest::default()
        };
        let resolved = server.consume().resolve_offsets(resolve).await.unwrap().into_inner();
        assert_eq!(resolved.offsets[0].offset, 2);
    })
    .await;
}

#[tokio::test]
async fn overtaken_and_recreated_offsets_are_never_reset_silently() {
    let server = TestServer::in_memory().await;
    server.append(&["a", "b", "c"]).await;
    commit_alone(&server, 0, 1).await.unwrap();
    let trim = TrimPartitionRequest {
        topic: "default".to_owned(),
        partition: 0,
        trim_offset: 2,
        ..TrimPartitionRequest::default()
    };
    server.topics().trim_partition(trim).await.unwrap();
    let default = fetch_from_group(0, CommitFallback::Unspecified);
    let overtaken = server.consume().fetch(default.clone()).await.unwrap_err();
    assert_eq!(reason(&overtaken), R::OffsetOutOfRange);
    assert_eq!(detail(&overtaken).watermarks.unwrap().log_start_offset, 2);
    assert_eq!(offsets(&server).await[0].status(), CommitStatus::BelowLogStart);
    let chosen = server.fetch_one(fetch_from_group(0, CommitFallback::Earliest)).await;
    assert_eq!(values(&chosen.records), ["c"]);

    let delete = DeleteTopicRequest { name: "default".to_owned(), ..Default::default() };
    server.topics().delete_topic(delete).await.unwrap();
    let create = CreateTopicRequest {
        name: "default".to_owned(),
        partition_count: 4,
        ..CreateTopicRequest::default()
    };
    server.topics().create_topic(create).await.unwrap();
    server.append(&["new"]).await;
    let recreated = server.consume().fetch(default.clone()).await.unwrap_err();
    assert_eq!(reason(&recreated), R::TopicRecreated);
    let chosen = server.fetch_one(fetch_from_group(0, CommitFallback::Earliest)).await;
    assert_eq!(values(&chosen.records), ["new"]);
    until("the earlier topic's offsets are forgotten", async || {
        offsets(&server).await.is_empty().then_some(())
    })
    .await;
    let recreated = server.consume().fetch(default.clone()).await.unwrap_err();
    assert_eq!(reason(&recreated), R::TopicRecreated);
    // Without its id, the topic may be the earlier one.
    let unnamed = commit_alone(&server, 0, 1).await.unwrap_err();
    assert_eq!(reason(&unnamed), R::TopicRecreated);
    let topic_id = detail(&unnamed).topic_id;
    let partition = TopicPartition { topic_id, ..partition(0) };
    let commit = CommitOffsetsRequest {
        group: GROUP.to_owned(),
        offsets: vec![CommittedOffset { partition: Some(partition), ..commit_at(0, 1) }],
        ..CommitOffsetsRequest::default()
    };
    groups(&server).commit_offsets(commit).await.unwrap();
    assert_eq!(server.fetch_one(default).await.next_offset, 1);
}

#[tokio::test]
async fn describe_says_why_nothing_arrives() {
    let server = TestServer::in_memory().await;
    server.append(&["a"]).await;
    commit_alone(&server, 0, 1).await.unwrap();
    let of = async |number: usize| {
        let described = describe(&server).await;
        let partition = &described.partitions[number];
        (partition.status(), partition.waiting_for.clone())
    };
    assert_eq!(of(0).await.0, DeliveryStatus::Unassigned);
    let mut a = TestMember::new("a", &["default"]);
    a.until_owns(&server, 4).await;
    assert_eq!(of(0).await.0, DeliveryStatus::NoNewRecords);
    assert_eq!(of(1).await.0, DeliveryStatus::NoNewRecords, "it has no records and no commit");
    server.append_to(1, &["x"]).await;
    assert_eq!(of(1).await.0, DeliveryStatus::Flowing, "it has no commit");
    server.append(&["b"]).await;
    assert_eq!(of(0).await.0, DeliveryStatus::Flowing);
    a.request.paused = vec![partition(0)];
    a.beat(&server).await.unwrap();
    assert_eq!(of(0).await.0, DeliveryStatus::Paused);
    let trim = TrimPartitionRequest {
        topic: "default".to_owned(),
        partition: 0,
        trim_offset: 2,
        ..TrimPartitionRequest::default()
    };
    server.topics().trim_partition(trim).await.unwrap();
    a.request.paused.clear();
    a.beat(&server).await.unwrap();
    assert_eq!(of(0).await.0, DeliveryStatus::OffsetOutOfRange);
    let mut b = TestMember::new("b", &["default"]);
    b.beat(&server).await.unwrap();
    until("b waits for a", async || {
        let described = describe(&server).await;
        let waiting = |it: &&GroupPartition| it.waiting_for == "a";
        let waiting = described.partitions.iter().filter(waiting);
        let statuses: Vec<_> = waiting.map(|it| it.status()).collect();
        (statuses == [DeliveryStatus::WaitingForRelease; 2]).then_some(())
    })
    .await;
    let described = describe(&server).await;
    assert_eq!(described.state(), GroupState::Reconciling);
    assert_eq!(described.members.len(), 2);
    assert_eq!((described.members[0].owned.len(), described.members[0].target.len()), (4, 2));
    leave(&server, "a").await;
    leave(&server, "b").await;
    until("the group knows since when it has no members", async || {
        let described = describe(&server).await;
        let is_known = |it: &GroupPartition| {
            assert_eq!(it.status(), DeliveryStatus::Unassigned);
            it.detail.starts_with("the group has had no members for ")
        };
        described.partitions.iter().all(is_known).then_some(())
    })
    .await;
}

#[tokio::test]
async fn subscription_of_a_member_ends_when_a_partition_is_revoked() {
    let server = TestServer::in_memory().await;
    server.append(&["a"]).await;
    let mut a = TestMember::new("a", &["default"]);
    a.until_owns(&server, 4).await;
    let mut streams = Vec::new();
    for number in 0..4 {
        let stream = server.consume().subscribe(a.subscribe_to(number)).await.unwrap();
        streams.push(stream.into_inner());
    }
    let first = soon(streams[0].message()).await.unwrap().unwrap().message.unwrap();
    assert!(matches!(first, Message::Data(_)));
    let mut b = TestMember::new("b", &["default"]);
    b.beat(&server).await.unwrap();
    until("the members have two partitions each", async || {
        a.beat(&server).await.unwrap();
        b.beat(&server).await.unwrap();
        (a.numbers().len() == 2 && b.numbers().len() == 2).then_some(())
    })
    .await;
    for number in b.numbers() {
        let stream = &mut streams[number as usize];
        let ended = loop {
            match soon(stream.message()).await {
                Ok(message) => assert!(message.is_some()),
                Err(status) => break status,
            }
        };
        assert_eq!(reason(&ended), R::PartitionNotOwned);
        let refused = async {
            server.consume().subscribe(a.subscribe_to(number)).await?.into_inner().message().await
        };
        assert_eq!(reason(&refused.await.unwrap_err()), R::PartitionNotOwned);
    }
    leave(&server, "a").await;
    let kept = a.numbers()[0];
    let ended = loop {
        match soon(streams[kept as usize].message()).await {
            Ok(message) => assert!(message.is_some()),
            Err(status) => break status,
        }
    };
    assert_eq!(reason(&ended), R::UnknownMember);
}

#[tokio::test]
async fn groups_are_quick_to_join() {
    let server = TestServer::in_memory().await;
    let mut member = TestMember::new("a", &["default"]);
    member.request.max_wait = Some(prost_types::Duration { seconds: 5, nanos: 0 });
    let since = tokio::time::Instant::now();
    member.beat(&server).await.unwrap();
    assert_eq!(member.numbers(), [0, 1, 2, 3], "the join waits for the assignment");
    assert!(since.elapsed() < Duration::from_secs(5));
}
