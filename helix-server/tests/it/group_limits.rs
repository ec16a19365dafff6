//! Groups of a shard at their limits, and steps of the coordinator for many groups.

use std::sync::Arc;

use helix_proto::log::v1::{
    CommitOffsetsRequest, CommitStatus, CommittedOffset, CreateTopicRequest, DeleteTopicRequest,
    GetOffsetsRequest, TopicPartition,
};
use helix_server::cluster::TopicSpec;
use helix_server::error::Error;
use helix_server::limits::{DELETED_OFFSETS_KEPT, GROUP_ASSIGNMENT_INTERVAL, GROUP_PROPOSALS_MAX};
use helix_server::log::{
    GroupChange, GroupRefusal, MemberSpec, OffsetUpdate, Refusal, SeekOrigin, TopicOffsets,
};
use helix_server::node::{LogLimits, Node, NodeSettings};
use tokio::time::Instant;

use crate::groups::{TestMember, groups};
use crate::simulation::settings_in;
use crate::support::TestServer;
use crate::trio::{shard_status, until};

fn topics(number: u32, offset: u64, metadata: &str) -> Vec<TopicOffsets> {
    let update = OffsetUpdate { number, offset: Some(offset), metadata: metadata.to_owned() };
    vec![TopicOffsets { topic_id: 1, name: "default".to_owned(), offsets: vec![update] }]
}

fn commit(number: u32, offset: u64, metadata: &str) -> GroupChange {
    let topics = topics(number, offset, metadata);
    GroupChange::Commit { member: None, offsets_epoch: None, topics, at_us: 1 }
}

#[tokio::test]
async fn groups_at_their_limit_of_bytes_do_not_grow() {
    let directory = tempfile::tempdir().unwrap();
    let log_limits = LogLimits { groups_bytes: 1_000, ..LogLimits::DEFAULT };
    let settings = NodeSettings { log_limits, ..settings_in(directory.path(), 1) };
    let node = Node::open(settings).await.unwrap();
    let shard = node.find_or_place_group("readers").await.unwrap();
    let mut count = 0;
    while shard.read_groups(|groups| groups.estimated_len() < 1_000) {
        shard.change_group("readers", commit(count, 1, "")).await.unwrap();
        count += 1;
    }
    let before = (shard.read_groups(Clone::clone), shard.status().last_index);
    let origin = SeekOrigin { by: "operator".to_owned(), is_undo: false, offsets_epoch: None };
    let member = MemberSpec {
        member_id: "a".to_owned(),
        topics: vec!["default".to_owned()],
        ..MemberSpec::default()
    };
    let growing = [
        ("readers", commit(count, 1, "")),
        ("readers", commit(0, 2, "metadata")),
        ("others", commit(0, 1, "")),
        ("readers", GroupChange::Seek { origin, topics: topics(0, 2, ""), at_us: 1 }),
        ("readers", GroupChange::PutMember { member, take_over: false, joined_epoch: 0 }),
    ];
    for (group, change) in growing {
        let refused = shard.change_group(group, change).await.unwrap_err();
        let Error::Refused(Refusal::Group(refusal)) = &refused else { panic!("{refused:?}") };
        assert_eq!(**refusal, GroupRefusal::BytesReached { limit: 1_000 });
    }
    assert_eq!((shard.read_groups(Clone::clone), shard.status().last_index), before);

    shard.change_group("readers", commit(0, 7, "")).await.unwrap();
    shard.change_group("readers", GroupChange::Delete { offsets_epoch: None }).await.unwrap();
    shard.change_group("others", commit(0, 1, "metadata")).await.unwrap();
}

#[tokio::test]
async fn topics_are_taken_once_for_each_version_of_the_state() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::open(settings_in(directory.path(), 1)).await.unwrap();
    let machine = node.cluster().machine();
    let first = machine.topic_snapshot();
    assert!(first.has_match("def*") && !first.has_match("metrics.*"));
    assert!(Arc::ptr_eq(&first, &machine.topic_snapshot()));
    let (name, settings) = ("metrics.cpu".to_owned(), *node.topic_settings());
    let spec = TopicSpec { name, partition_count: 1, replication_factor: 0, settings };
    node.cluster().create_topic(spec, false).await.unwrap();
    let second = machine.topic_snapshot();
    assert!(second.has_match("metrics.*") && !first.has_match("metrics.*"));
    assert!(
        second
            .matched_by(&["def*", "metrics.*"])
            .map(|it| it.name.as_str())
            .eq(["default", "metrics.cpu"])
    );
}

#[tokio::test]
async fn assignments_come_before_the_forgetting_of_deleted_topics() {
    const GROUPS: usize = 2 * GROUP_PROPOSALS_MAX + 5;
    let server = TestServer::in_memory().await;
    let create = CreateTopicRequest {
        name: "gone".to_owned(),
        partition_count: 1,
        ..CreateTopicRequest::default()
    };
    server.topics().create_topic(create).await.unwrap();
    let mut member = TestMember::new("a", &["default", "gone"]);
    member.until_owns(&server, 5).await;
    let (joined, epoch) = (Instant::now(), member.last.member_epoch);
    let names: Vec<String> = (0..GROUPS).map(|number| format!("group-{number}")).collect();
    for group in &names {
        let partition = TopicPartition { topic: "gone".to_owned(), partition: 0, topic_id: 0 };
        let offset = CommittedOffset { partition: Some(partition), ..CommittedOffset::default() };
        let request = CommitOffsetsRequest {
            group: group.clone(),
            offsets: vec![offset],
            ..CommitOffsetsRequest::default()
        };
        groups(&server).commit_offsets(request).await.unwrap();
    }
    // After one interval the coordinator checks the assignment again.
    until("the group may be assigned at once", async || {
        (joined.elapsed() > 3 * GROUP_ASSIGNMENT_INTERVAL).then_some(())
    })
    .await;
    let delete = DeleteTopicRequest { name: "gone".to_owned(), ..Default::default() };
    server.topics().delete_topic(delete).await.unwrap();
    until("the topic is taken from the member", async || {
        member.beat(&server).await.unwrap();
        (member.last.member_epoch > epoch).then_some(())
    })
    .await;
    let offsets = async |group: &String| {
        let request = GetOffsetsRequest { group: group.clone(), ..Default::default() };
        groups(&server).get_offsets(request).await.unwrap().into_inner().offsets
    };
    // The coordinator has noticed the deletion, and goes on saying so.
    for group in &names {
        let found = offsets(group).await;
        assert_eq!(found[0].status(), CommitStatus::TopicDeleted, "{found:?}");
    }
    tokio::time::pause();
    tokio::time::advance(DELETED_OFFSETS_KEPT).await;
    tokio::time::resume();
    for group in names {
        until("the deleted topic is forgotten", async || {
            offsets(&group).await.is_empty().then_some(())
        })
        .await;
    }
    // The epoch of the member is the index of its assignment.
    let last_index = shard_status(&server, 1).await.last_index;
    assert!(last_index >= member.last.member_epoch + GROUPS as u64);
}
