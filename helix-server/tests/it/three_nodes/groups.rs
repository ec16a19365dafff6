//! Consumer groups on three nodes: the coordinator fails, and readers are anywhere.

use std::collections::BTreeSet;
use std::time::Duration;

use helix_client::GroupEvent;
use helix_proto::log::v1::subscribe_response::Message;
use helix_proto::log::v1::{
    CommitFallback, CommitStatus, DeliveryStatus, DescribeGroupRequest, ErrorReason, FetchRequest,
    GetOffsetsRequest, GroupMembership, GroupPartition, HeartbeatRequest, LeaveRequest, ReadSource,
    ResolveOffsetsRequest, SubscribeRequest, SubscribeResponse,
};
use helix_server::log::{GroupChange, OffsetUpdate, TopicOffsets};
use tokio::time::Instant;
use tonic::{Status, Streaming};

use crate::groups::{TestMember, commit_at, describe, fetch_from_group, groups, offsets};
use crate::support::{TestServer, detail, reason, soon, values};
use crate::trio::{NODES, Trio, expect_equal_replicas, is_redirect, until};

/// Returns the node that coordinates the group; the others name it.
async fn coordinator(trio: &Trio) -> u64 {
    until("a node coordinates the group", async || {
        for (id, node) in trio.nodes() {
            let request =
                GetOffsetsRequest { group: "readers".to_owned(), ..GetOffsetsRequest::default() };
            if groups(node).get_offsets(request).await.is_ok() {
                return Some(id);
            }
        }
        None
    })
    .await
}

/// Sends heartbeats to whichever node coordinates, until the member has as many partitions.
async fn until_owns(trio: &Trio, member: &mut TestMember, count: usize) {
    until("the member has its partitions", async || {
        for (_, node) in trio.nodes() {
            match member.beat(node).await {
                Ok(()) => {
                    let is_done = member.numbers().len() == count && member.last.pending.is_empty();
                    return is_done.then_some(());
                }
                Err(status) => assert!(is_redirect(&status), "{status:?}"),
            }
        }
        None
    })
    .await;
}

async fn commit(trio: &Trio, member: &TestMember, number: u32, offset: u64) {
    until("the offset is committed", async || {
        for (_, node) in trio.nodes() {
            match member.commit(node, number, offset).await {
                Ok(()) => return Some(()),
                Err(status) => assert!(
                    is_redirect(&status) || reason(&status) == ErrorReason::OutcomeUnknown,
                    "{status:?}"
                ),
            }
        }
        None
    })
    .await;
}

async fn read_from_group(node: &TestServer) -> Option<u64> {
    let request = fetch_from_group(0, CommitFallback::Fail);
    match node.consume().fetch(request).await {
        Ok(response) => Some(response.into_inner().partitions[0].start_offset),
        Err(status) => {
            assert!(is_redirect(&status), "{status:?}");
            None
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_and_commits_survive_the_coordinator() {
    let mut trio = Trio::durable().await;
    trio.write(0, &["a", "b", "c"]).await;
    let mut member = TestMember::new("a", &["default"]);
    until_owns(&trio, &mut member, 4).await;
    commit(&trio, &member, 0, 2).await;
    let first = coordinator(&trio).await;
    for (id, node) in trio.nodes().filter(|(id, _)| *id != first) {
        let redirected = member.commit(node, 0, 2).await.unwrap_err();
        assert_eq!(detail(&redirected).leader.unwrap().node_id, first, "asked node {id}");
    }
    let (leader, _) = trio.leader_of(0).await;
    assert_eq!(read_from_group(trio.node(leader)).await, Some(2), "also without the coordinator");

    let before = member.last.clone();
    trio.stop(first).await;
    until_owns(&trio, &mut member, 4).await;
    assert_eq!(member.last.member_epoch, before.member_epoch, "a steady group stays as it is");
    assert_eq!(member.last.assigned, before.assigned);
    commit(&trio, &member, 0, 3).await;
    let second = coordinator(&trio).await;
    assert_eq!(offsets(trio.node(second)).await[0].committed.as_ref().unwrap().offset, 3);
    until("readers see the commit", async || {
        for (_, node) in trio.nodes() {
            if let Some(offset) = read_from_group(node).await {
                return (offset == 3).then_some(());
            }
        }
        None
    })
    .await;

    // The restarted node catches up, and the group is the same there.
    trio.start_nodes(&[first]).await;
    trio.settle().await;
    let mut other = TestMember::new("b", &["default"]);
    until("the members have two partitions each", async || {
        until_beats(&trio, &mut member).await;
        until_beats(&trio, &mut other).await;
        (member.numbers().len() == 2 && other.numbers().len() == 2).then_some(())
    })
    .await;
    trio.stop_all().await;
}

async fn until_beats(trio: &Trio, member: &mut TestMember) {
    until("a node takes the heartbeat", async || {
        for (_, node) in trio.nodes() {
            if member.beat(node).await.is_ok() {
                return Some(());
            }
        }
        None
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steady_member_reads_on_while_the_coordinator_fails() {
    let mut trio = Trio::durable().await;
    let client = trio.client();
    let mut consumer = client.consumer_group("readers").topics(["default"]).join();
    while consumer.assignment().len() < 4 {
        soon(consumer.next()).await.unwrap().unwrap();
    }
    let first = coordinator(&trio).await;
    trio.stop(first).await;
    // Partitions of this node's shards have new leaders.
    let mut missing = BTreeSet::new();
    for partition in 0..4 {
        trio.write(partition, &["a", "b"]).await;
        missing.insert(partition);
    }
    while !missing.is_empty() {
        match soon(consumer.next()).await.unwrap().unwrap() {
            GroupEvent::Data(records) => {
                assert_eq!((records.records.len(), records.next_offset), (2, 2));
                assert!(missing.remove(&records.partition), "read twice");
            }
            GroupEvent::CaughtUp { .. } => {}
            event => panic!("{event:?}"),
        }
    }
    soon(consumer.commit_sync()).await.unwrap();
    let second = coordinator(&trio).await;
    let committed = offsets(trio.node(second)).await;
    assert!(committed.iter().all(|it| it.lag == Some(0)) && committed.len() == 4, "{committed:?}");
    soon(consumer.close()).await.unwrap();
    trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_heartbeat_ends_with_the_leadership() {
    let mut trio = Trio::durable().await;
    let seconds = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
    let mut member = TestMember::new("a", &["default"]);
    member.request.session_timeout = seconds(600);
    until_owns(&trio, &mut member, 4).await;
    let first = coordinator(&trio).await;
    // It would wait for a minute.
    let request = HeartbeatRequest { max_wait: seconds(60), ..member.request.clone() };
    let mut node = groups(trio.node(first));
    let sent_at = Instant::now();
    let waiting = tokio::spawn(async move { node.heartbeat(request).await });
    let shard_id = until("the coordinator has heard it", async || {
        let group = "readers".to_owned();
        let request = DescribeGroupRequest { group, ..DescribeGroupRequest::default() };
        let described = groups(trio.node(first)).describe_group(request).await.unwrap();
        let described = described.into_inner();
        let since = described.members[0].since_heartbeat.unwrap();
        (Duration::try_from(since).unwrap() < sent_at.elapsed()).then_some(described.shard_id)
    })
    .await;
    assert!(!waiting.is_finished());
    let other = NODES.into_iter().find(|node| *node != first).unwrap();
    trio.transfer(shard_id, other).await;
    let ended = soon(waiting).await.unwrap().unwrap_err();
    assert!(is_redirect(&ended), "{ended:?}");
    trio.stop_all().await;
}

/// A new coordinator has not heard from the member yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_member_is_silent_also_after_a_change_of_coordinator() {
    let mut trio = Trio::durable().await;
    let mut member = TestMember::new("a", &["default"]);
    member.request.session_timeout = Some(prost_types::Duration { seconds: 6, nanos: 0 });
    until_owns(&trio, &mut member, 4).await;
    let first = coordinator(&trio).await;
    let described = describe(trio.node(first)).await;
    let other = NODES.into_iter().find(|node| *node != first).unwrap();
    trio.transfer(described.shard_id, other).await;
    let silent = until("the partitions have a silent owner", async || {
        let request =
            DescribeGroupRequest { group: "readers".to_owned(), ..DescribeGroupRequest::default() };
        let described = groups(trio.node(other)).describe_group(request).await.ok()?.into_inner();
        let is_silent = |it: &GroupPartition| it.status() == DeliveryStatus::OwnerSilent;
        described.partitions.iter().all(is_silent).then_some(described)
    })
    .await;
    assert!(silent.members[0].since_heartbeat.is_none());
    assert!(silent.partitions[0].detail.contains("has not heard from a"), "{silent:?}");
    trio.stop_all().await;
}

/// Returns the values of the next records of a subscription.
async fn next_values(stream: &mut Streaming<SubscribeResponse>) -> Result<Vec<String>, Status> {
    loop {
        let message = soon(stream.message()).await?.expect("it ends with a status");
        if let Some(Message::Data(data)) = message.message {
            return Ok(values(&data.records));
        }
    }
}

/// Each node finds the group's offset, and ends the member's reads by its own replica.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_node_begins_and_ends_the_reads_of_a_member() {
    let mut trio = Trio::durable().await;
    trio.write(0, &["a", "b", "c"]).await;
    expect_equal_replicas(&trio, 0, 3).await;
    let mut member = TestMember::new("a", &["default"]);
    until_owns(&trio, &mut member, 4).await;
    commit(&trio, &member, 0, 2).await;
    let start = fetch_from_group(0, CommitFallback::Fail).partitions;
    let source = i32::from(ReadSource::AnyReplica);
    let mut streams = Vec::new();
    for (id, node) in trio.nodes() {
        let request = FetchRequest { partitions: start.clone(), source, ..FetchRequest::default() };
        assert_eq!(values(&node.fetch_one(request).await.records), ["c"], "node {id}");
        let epoch = member.last.member_epoch;
        let subscribe = |member_id: &str, member_epoch| SubscribeRequest {
            partitions: start.clone(),
            source,
            membership: Some(GroupMembership {
                group: member.request.group.clone(),
                member_id: member_id.to_owned(),
                member_epoch,
            }),
            ..SubscribeRequest::default()
        };
        // The commit is a later entry of the same log, and no epoch.
        for (member_id, epoch, expected) in [
            ("a", epoch + 1, ErrorReason::StaleMemberEpoch),
            ("b", epoch, ErrorReason::UnknownMember),
            ("b", epoch + 1, ErrorReason::UnknownMember),
        ] {
            let refused = node.consume().subscribe(subscribe(member_id, epoch)).await.unwrap_err();
            assert_eq!(reason(&refused), expected, "node {id}: {member_id} at {epoch}");
        }
        let request = subscribe("a", epoch);
        let mut stream = node.consume().subscribe(request).await.unwrap().into_inner();
        assert_eq!(next_values(&mut stream).await.unwrap(), ["c"], "node {id}");
        streams.push((id, stream));
    }
    let (leader, _) = trio.leader_of(0).await;
    let resolve = ResolveOffsetsRequest {
        topic: "default".to_owned(),
        partitions: vec![0],
        position: start[0].start.clone(),
        ..ResolveOffsetsRequest::default()
    };
    let resolved = trio.node(leader).consume().resolve_offsets(resolve).await.unwrap();
    assert_eq!(resolved.into_inner().offsets[0].offset, 2);

    // The coordinator changes, and the streams continue.
    let first = coordinator(&trio).await;
    let request =
        DescribeGroupRequest { group: "readers".to_owned(), ..DescribeGroupRequest::default() };
    let described = groups(trio.node(first)).describe_group(request).await.unwrap().into_inner();
    let other = NODES.into_iter().find(|node| *node != first).unwrap();
    trio.transfer(described.shard_id, other).await;
    trio.write(0, &["d"]).await;
    for (id, stream) in &mut streams {
        assert_eq!(next_values(stream).await.unwrap(), ["d"], "node {id}");
    }
    until("the member has left", async || {
        for (_, node) in trio.nodes() {
            let (group, member_id) = ("readers".to_owned(), "a".to_owned());
            if groups(node).leave(LeaveRequest { group, member_id }).await.is_ok() {
                return Some(());
            }
        }
        None
    })
    .await;
    for (id, stream) in &mut streams {
        let ended = next_values(stream).await.unwrap_err();
        assert_eq!(reason(&ended), ErrorReason::UnknownMember, "node {id}");
    }
    drop(streams);
    trio.stop_all().await;
}

/// Returns what the group's coordinator says of its offset in a partition.
async fn judged(trio: &Trio, number: u32) -> helix_proto::log::v1::OffsetAndLag {
    let node = trio.node(coordinator(trio).await);
    let found = offsets(node).await.into_iter();
    let is_wanted = |it: &helix_proto::log::v1::OffsetAndLag| {
        let partition = it.committed.as_ref().and_then(|it| it.partition.as_ref());
        partition.is_some_and(|it| it.partition == number)
    };
    found.into_iter().find(is_wanted).expect("the group has an offset there")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn coordinator_judges_offsets_of_partitions_that_it_does_not_lead() {
    let mut trio = Trio::durable().await;
    trio.balanced().await;
    let client = trio.client();
    let admin = client.admin();
    trio.write(0, &["a"]).await;
    admin.commit_group_offsets("readers", &[commit_at(0, 1)]).await.unwrap();
    let coordinator_id = coordinator(&trio).await;
    let mut elsewhere = Vec::new();
    for number in 0..4 {
        if trio.leader_of(number).await.0 != coordinator_id {
            elsewhere.push(number);
        }
    }
    assert!(!elsewhere.is_empty());
    for number in elsewhere {
        // The coordinator's replica may not have the newest records yet.
        let mut end = 0;
        for _ in 0..5 {
            end = trio.write(number, &["a"]).await.first_offset.unwrap() + 1;
            admin.commit_group_offsets("readers", &[commit_at(number, end)]).await.unwrap();
            let found = judged(&trio, number).await;
            let bounds = (found.status(), found.high_watermark, found.lag);
            assert_eq!(bounds, (CommitStatus::Valid, Some(end), Some(0)));
        }
        let refused = admin.commit_group_offsets("readers", &[commit_at(number, end + 1)]).await;
        let refused = refused.unwrap_err();
        assert!(refused.is(ErrorReason::OffsetOutOfRange), "{refused}");
        // An offset that no check has seen, as a log of an earlier version may have it.
        let node = trio.node(coordinator_id).running.node();
        let shard = node.find_group("readers").await.unwrap();
        let topic_id = node.topic("default").unwrap().id;
        for offset in [end + 1, u64::MAX] {
            let update = OffsetUpdate { number, offset: Some(offset), metadata: String::new() };
            let change = GroupChange::Commit {
                member: None,
                offsets_epoch: None,
                topics: vec![TopicOffsets {
                    topic_id,
                    name: "default".to_owned(),
                    offsets: vec![update],
                }],
                at_us: 1,
            };
            shard.change_group("readers", change).await.unwrap();
            let found = judged(&trio, number).await;
            let bounds = (found.status(), found.high_watermark, found.lag);
            assert_eq!(bounds, (CommitStatus::AboveHighWatermark, Some(end), Some(0)));
        }
    }
    trio.stop_all().await;
}
