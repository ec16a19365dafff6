//! Lists and descriptions show what the caller may see, and open calls follow changes of rules.

use std::sync::Arc;
use std::time::Duration;

use helix_client::{AccessGrant, NewTopic};
use helix_proto::log::v1::append_stream_request::Message as StreamMessage;
use helix_proto::log::v1::cluster_service_client::ClusterServiceClient;
use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::group_service_client::GroupServiceClient;
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_proto::log::v1::*;
use helix_server::config::AuthSetting;
use tokio::time::Instant;
use tokio_stream::StreamExt;
use tonic::Status;

use super::{GuardedServer, expect_within_a_second, expiring_token, role, rule, rules, with_token};
use crate::support::{append_request, earliest, reason, soon};
use crate::trio::until;

async fn with_topics(names: &[&str]) -> GuardedServer {
    let guarded = GuardedServer::start(AuthSetting::Required).await;
    for name in names {
        guarded.admin().create_topic(&NewTopic::new(*name, 1)).await.unwrap();
    }
    guarded
}

fn names(metadata: Option<Metadata>) -> Vec<String> {
    metadata.unwrap().topics.into_iter().map(|route| route.topic).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_and_metadata_show_visible_topics_and_groups() {
    let guarded = with_topics(&["a-1", "a-2", "b-1"]).await;
    let token = guarded.token("reader", &role(AccessRole::Consumer, "a-*")).await;
    let client = guarded.client(&token);
    let listed = client.admin().topics("").await.unwrap();
    assert_eq!(listed.iter().map(|it| it.name.as_str()).collect::<Vec<_>>(), ["a-1", "a-2"]);
    let found = client.admin().metadata(&[]).await.unwrap();
    assert_eq!(names(Some(found)), ["a-1", "a-2"]);
    let found = client.admin().metadata(&["a-1", "b-1", "none"]).await.unwrap();
    assert_eq!(names(Some(found)), ["a-1"]);
    assert_eq!(guarded.admin().topics("").await.unwrap().len(), 4);
    // Pages are full although topics are left out.
    let mut topics =
        topic_service_client::TopicServiceClient::new(with_token(&guarded.server.channel, &token));
    let request = ListTopicsRequest { page_size: 1, ..ListTopicsRequest::default() };
    let page = topics.list_topics(request).await.unwrap().into_inner();
    assert_eq!((page.topics[0].name.as_str(), page.next_page_token.as_str()), ("a-1", "a-1"));

    let mut groups =
        GroupServiceClient::new(with_token(&guarded.server.channel, &guarded.admin_token));
    for (group, topic) in [("g-1", "a-1"), ("g-1", "b-1"), ("h-1", "a-1")] {
        let partition = TopicPartition { topic: topic.to_owned(), ..TopicPartition::default() };
        let offset = CommittedOffset { partition: Some(partition), ..CommittedOffset::default() };
        let request = CommitOffsetsRequest {
            group: group.to_owned(),
            offsets: vec![offset],
            ..CommitOffsetsRequest::default()
        };
        groups.commit_offsets(request).await.unwrap();
    }
    let see = rules(&[rule(ResourceKind::Group, "g-*", &[AccessOperation::Describe])]);
    guarded.admin().allow_access("reader", &see).await.unwrap();
    let mut groups = GroupServiceClient::new(with_token(&guarded.server.channel, &token));
    let listed = groups.list_groups(ListGroupsRequest::default()).await.unwrap().into_inner();
    assert_eq!(listed.groups.iter().map(|it| it.group.as_str()).collect::<Vec<_>>(), ["g-1"]);
    let request = GetOffsetsRequest { group: "g-1".to_owned(), ..GetOffsetsRequest::default() };
    let offsets = groups.get_offsets(request).await.unwrap().into_inner().offsets;
    let topic = |it: &OffsetAndLag| {
        it.committed.as_ref().unwrap().partition.as_ref().unwrap().topic.clone()
    };
    assert_eq!(offsets.iter().map(topic).collect::<Vec<_>>(), ["a-1"]);
    let request =
        DescribeGroupRequest { group: "g-1".to_owned(), ..DescribeGroupRequest::default() };
    let described = groups.describe_group(request.clone()).await.unwrap().into_inner().partitions;
    assert_eq!(described.len(), 1);
    // Patterns of topics that the caller may not see are hidden as names are.
    let join = HeartbeatRequest {
        group: "g-1".to_owned(),
        member_id: "m".to_owned(),
        topics: ["a-*", "a-1", "b-*", "b-1", "*"].map(str::to_owned).to_vec(),
        ..HeartbeatRequest::default()
    };
    let mut admin =
        GroupServiceClient::new(with_token(&guarded.server.channel, &guarded.admin_token));
    admin.heartbeat(join).await.unwrap();
    for (caller, shown, hidden) in
        [(&mut groups, &["a-*", "a-1"][..], 3), (&mut admin, &["*", "a-*", "a-1", "b-*", "b-1"], 0)]
    {
        let described = caller.describe_group(request.clone()).await.unwrap().into_inner();
        let member = &described.members[0];
        assert_eq!(member.topics, shown);
        assert_eq!(member.hidden_topics, hidden);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pattern_needs_a_right_on_its_prefix() {
    let guarded = with_topics(&["a-1", "b-1"]).await;
    let member = rule(ResourceKind::Group, "g", &[AccessOperation::Read]);
    let topics = rule(ResourceKind::Topic, "a-*", &[AccessOperation::Read]);
    let token = guarded.token("member", &rules(&[member, topics])).await;
    let mut groups = GroupServiceClient::new(with_token(&guarded.server.channel, &token));
    let mut join = async |topic: &str| {
        let request = HeartbeatRequest {
            group: "g".to_owned(),
            member_id: "m".to_owned(),
            topics: vec![topic.to_owned()],
            ..HeartbeatRequest::default()
        };
        groups.heartbeat(request).await.map(|response| response.into_inner())
    };
    for topic in ["*", "a*", "b-*", "b-1", "*-1"] {
        assert_eq!(reason(&join(topic).await.unwrap_err()), ErrorReason::PermissionDenied);
    }
    for topic in ["a-*", "a-1", "a-*1"] {
        join(topic).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watched_metadata_follows_the_rules() {
    let guarded = with_topics(&["a-1", "b-1"]).await;
    let token = guarded.token("reader", &role(AccessRole::Consumer, "a-*")).await;
    let mut cluster = ClusterServiceClient::new(with_token(&guarded.server.channel, &token));
    let request = WatchMetadataRequest::default();
    let mut watched = cluster.watch_metadata(request).await.unwrap().into_inner();
    let mut next = async || names(soon(watched.message()).await.unwrap().unwrap().metadata);
    assert_eq!(next().await, ["a-1"]);
    let grant = role(AccessRole::Consumer, "b-*");
    guarded.admin().allow_access("reader", &grant).await.unwrap();
    while next().await != ["a-1", "b-1"] {}
    guarded.admin().remove_access("reader", &grant).await.unwrap();
    while next().await != ["a-1"] {}
    guarded.admin().revoke_tokens("reader").await.unwrap();
    let ended = loop {
        match soon(watched.message()).await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the watch ended without a status"),
            Err(status) => break status,
        }
    };
    assert_eq!(reason(&ended), ErrorReason::Unauthenticated);
}

/// Returns the number of records in the topic.
async fn record_count(guarded: &GuardedServer) -> usize {
    let fetch = FetchRequest {
        partitions: vec![PartitionStart { topic: "a-1".to_owned(), ..earliest(0) }],
        ..FetchRequest::default()
    };
    let admin = with_token(&guarded.server.channel, &guarded.admin_token);
    let found = ConsumeServiceClient::new(admin).fetch(fetch).await.unwrap().into_inner();
    found.partitions[0].records.len()
}

/// Opens streams, and takes the right away that they were opened with. Returns the time until the
/// append stream has ended.
async fn streams_end(guarded: &GuardedServer, grant: &AccessGrant, is_revoked: bool) -> Duration {
    let before = record_count(guarded).await;
    let token = guarded.token("worker", grant).await;
    let channel = with_token(&guarded.server.channel, &token);
    let mut produce = ProduceServiceClient::new(channel.clone());
    let (batches, requests) = tokio::sync::mpsc::channel(8);
    let init = AppendStreamInit { topic: "a-1".to_owned(), ..AppendStreamInit::default() };
    let init = AppendStreamRequest { message: Some(StreamMessage::Init(init)) };
    batches.send(init).await.unwrap();
    let requests = tokio_stream::wrappers::ReceiverStream::new(requests);
    let mut acks = produce.append_stream(requests).await.unwrap().into_inner();
    soon(acks.message()).await.unwrap().unwrap();
    let batch =
        AppendStreamBatch { batch: append_request(&["x"]).batch, ..AppendStreamBatch::default() };
    let batch = AppendStreamRequest { message: Some(StreamMessage::Batch(batch)) };
    batches.send(batch.clone()).await.unwrap();
    soon(acks.message()).await.unwrap().unwrap();

    let mut consume = ConsumeServiceClient::new(channel.clone());
    let start = PartitionStart { topic: "a-1".to_owned(), ..earliest(0) };
    let subscribe =
        SubscribeRequest { partitions: vec![start.clone()], ..SubscribeRequest::default() };
    let mut records = consume.subscribe(subscribe).await.unwrap().into_inner();
    soon(records.message()).await.unwrap().unwrap();
    // Waits for more than there is.
    let fetch = FetchRequest {
        partitions: vec![start],
        min_bytes: 1 << 20,
        max_wait: Some(prost_types::Duration { seconds: 5, nanos: 0 }),
        ..FetchRequest::default()
    };
    let waiting = tokio::spawn(async move { consume.fetch(fetch).await.map(drop) });
    tokio::task::yield_now().await;

    let changed = Instant::now();
    let expected = if is_revoked {
        guarded.admin().revoke_tokens("worker").await.unwrap();
        ErrorReason::Unauthenticated
    } else {
        guarded.admin().remove_access("worker", grant).await.unwrap();
        ErrorReason::PermissionDenied
    };
    // Without a message from the client.
    let ended: Status = soon(acks.message()).await.unwrap_err();
    let took = changed.elapsed();
    assert_eq!(reason(&ended), expected);
    // Ignored: the stream may be closed already.
    let _ = batches.send(batch).await;
    let ended = loop {
        match soon(records.message()).await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the subscription ended without a status"),
            Err(status) => break status,
        }
    };
    assert_eq!(reason(&ended), expected);
    assert_eq!(reason(&soon(waiting).await.unwrap().unwrap_err()), expected);
    assert_eq!(record_count(guarded).await, before + 1, "nothing was appended after the change");
    took
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn open_streams_end_with_the_right_that_they_were_opened_with() {
    let guarded = with_topics(&["a-1"]).await;
    let grant = AccessGrant {
        roles: [role(AccessRole::Consumer, "a-1").roles, role(AccessRole::Producer, "a-1").roles]
            .concat(),
        ..AccessGrant::default()
    };
    for is_revoked in [false, true] {
        expect_within_a_second(async || streams_end(&guarded, &grant, is_revoked).await).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_ends_when_its_token_expires() {
    let guarded = with_topics(&[]).await;
    let watched = until("the watch is open before its token has expired", async || {
        let token = expiring_token(&guarded, "late").await;
        let mut cluster = ClusterServiceClient::new(with_token(&guarded.server.channel, &token));
        let watched = cluster.watch_metadata(WatchMetadataRequest::default()).await;
        Some(watched.ok()?.into_inner())
    })
    .await;
    let ended = soon(watched.filter_map(Result::err).next()).await.unwrap();
    assert!(ended.message().contains("expired"), "{}", ended.message());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_goes_on_with_the_next_token_of_its_source() {
    let guarded = with_topics(&["a-1"]).await;
    let grant = role(AccessRole::Producer, "a-1");
    let tokens = Arc::new(std::sync::Mutex::new(guarded.token("worker", &grant).await));
    let supplied = tokens.clone();
    let source =
        helix_client::TokenSource::callback(move || Some(supplied.lock().unwrap().clone()));
    let client = super::client_of(&guarded.server, source);
    let session = client.session("a-1", 0, helix_client::SessionOptions::default());
    let session = session.await.unwrap();
    let records = crate::support::records(&["x"]);
    session.append(&records[..]).await.unwrap().await.unwrap();
    let old = guarded.admin().tokens(Some("worker")).await.unwrap()[0].token_id.clone();
    *tokens.lock().unwrap() = guarded.token("worker", &grant).await;
    guarded.admin().revoke_token(&old).await.unwrap();
    session.append(&records[..]).await.unwrap().await.unwrap();
    until("both records are there", async || {
        let bounds = guarded.admin().topic("a-1").await.ok()?.partitions[0].watermarks?;
        (bounds.high_watermark == 2).then_some(())
    })
    .await;
}
