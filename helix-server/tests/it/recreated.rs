//! A topic that was deleted and created again is another topic: calls that name the old id, and
//! streams that were open meanwhile, do not continue in it.

use helix_proto::log::v1::append_stream_request::Message as Sent;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::subscribe_response::Message;
use helix_proto::log::v1::{
    AddPartitionsRequest, AppendRequest, AppendStreamInit, CreateTopicRequest, DeleteTopicRequest,
    Durability, ErrorReason, FetchRequest, GetMetadataRequest, GetTopicRequest, NamedPosition,
    PartitionStart, ResolveOffsetsRequest, SetFencingTokenRequest, StartPosition, SubscribeRequest,
    Topic, TopicConfig, TrimPartitionRequest, UpdateTopicRequest,
};
use prost_types::FieldMask;
use tonic::{Code, Status};

use crate::append_stream::{AppendSession, init};
use crate::support::{
    TestServer, append_request, detail, earliest, from_offset, latest, on_both, reason, soon,
    values,
};

fn name() -> String {
    "default".to_owned()
}

async fn describe(server: &TestServer) -> Topic {
    let request = GetTopicRequest { name: name() };
    server.topics().get_topic(request).await.unwrap().into_inner().topic.unwrap()
}

async fn topic_id(server: &TestServer) -> u64 {
    describe(server).await.topic_id
}

async fn delete(server: &TestServer, topic_id: u64) -> Result<(), Status> {
    let request = DeleteTopicRequest { name: name(), topic_id };
    server.topics().delete_topic(request).await.map(drop)
}

async fn create(server: &TestServer) -> u64 {
    let request = CreateTopicRequest { name: name(), partition_count: 4, ..Default::default() };
    let response = server.topics().create_topic(request).await.unwrap().into_inner();
    response.topic.unwrap().topic_id
}

/// Deletes and creates the default topic. Returns the old and the new id.
async fn recreate(server: &TestServer) -> (u64, u64) {
    let old = topic_id(server).await;
    delete(server, 0).await.unwrap();
    let new = create(server).await;
    assert!(old > 0 && new > old, "{old} {new}");
    (old, new)
}

fn position(named: NamedPosition) -> Option<StartPosition> {
    Some(StartPosition {
        position: Some(Position::Named(named.into())),
        ..StartPosition::default()
    })
}

/// Makes every call that can name a topic's id, and returns the call's name and error.
async fn failures(server: &TestServer, topic_id: u64) -> Vec<(&'static str, Status)> {
    let mut failures = Vec::new();
    let mut fails = |call, result: Result<(), Status>| {
        failures.push((call, result.expect_err(call)));
    };
    let start = || PartitionStart { topic_id, ..from_offset(0, 1) };
    let request = FetchRequest { partitions: vec![start()], out_of_range: 1, ..Default::default() };
    fails("fetch", server.consume().fetch(request).await.map(drop));
    let request =
        SubscribeRequest { partitions: vec![start()], out_of_range: 1, ..Default::default() };
    fails("subscribe", server.consume().subscribe(request).await.map(drop));
    for partitions in [vec![0], Vec::new()] {
        let request = ResolveOffsetsRequest {
            topic: name(),
            partitions,
            position: position(NamedPosition::Latest),
            topic_id,
        };
        fails("resolve", server.consume().resolve_offsets(request).await.map(drop));
    }
    let request = AppendRequest { topic_id, ..append_request(&["x"]) };
    fails("append", server.produce().append(request).await.map(drop));
    let session = AppendSession::silent(server).await;
    session.send(Sent::Init(AppendStreamInit { topic_id, ..init() })).await;
    fails("append stream", session.finish().await.1);
    let request = TrimPartitionRequest { topic: name(), partition: 0, trim_offset: 1, topic_id };
    fails("trim", server.topics().trim_partition(request).await.map(drop));
    let request = SetFencingTokenRequest {
        topic: name(),
        partition: 0,
        expected_token: None,
        token: "writer".to_owned(),
        topic_id,
    };
    fails("fence", server.topics().set_fencing_token(request).await.map(drop));
    let request = UpdateTopicRequest {
        name: name(),
        config: Some(TopicConfig { retention_bytes: Some(1), ..TopicConfig::default() }),
        update_mask: Some(FieldMask { paths: vec!["retention_bytes".to_owned()] }),
        topic_id,
    };
    fails("update", server.topics().update_topic(request).await.map(drop));
    let request = AddPartitionsRequest { name: name(), topic_id, partition_count: 9 };
    fails("add partitions", server.topics().add_partitions(request).await.map(drop));
    fails("delete", delete(server, topic_id).await);
    failures
}

#[tokio::test]
async fn call_with_the_old_id_is_rejected_and_changes_nothing() {
    on_both(async |server: TestServer| {
        server.append(&["old", "old"]).await;
        let (old, new) = recreate(&server).await;
        server.append(&["new 0", "new 1"]).await;
        let before = describe(&server).await;
        for (call, status) in failures(&server, old).await {
            assert_eq!(reason(&status), ErrorReason::TopicRecreated, "{call}: {status:?}");
            assert_eq!(status.code(), Code::FailedPrecondition, "{call}");
            let detail = detail(&status);
            assert_eq!((detail.expected_topic_id, detail.topic_id), (old, new), "{call}");
            assert_eq!(detail.topic, "default", "{call}");
            assert!(!detail.may_have_applied && !detail.retryable, "{call}");
            let text = status.message();
            assert!(text.contains(&format!("its id is {new}, not {old}")), "{text}");
        }
        assert_eq!(describe(&server).await, before);
        assert_eq!(values(&server.records(0, 0).await), ["new 0", "new 1"]);
    })
    .await;
}

#[tokio::test]
async fn call_with_the_id_of_a_deleted_topic_says_that_it_was_deleted() {
    let server = TestServer::in_memory().await;
    let old = topic_id(&server).await;
    delete(&server, old).await.unwrap();
    // An id that no topic has had.
    for (call, status) in failures(&server, old + 1_000).await {
        assert_eq!(reason(&status), ErrorReason::TopicNotFound, "{call}: {status:?}");
    }
    for (call, status) in failures(&server, old).await {
        assert_eq!(reason(&status), ErrorReason::TopicDeleted, "{call}: {status:?}");
        assert_eq!(status.code(), Code::NotFound, "{call}");
        assert_eq!(detail(&status).expected_topic_id, old, "{call}");
    }
}

#[tokio::test]
async fn responses_have_the_id_of_the_topic() {
    let server = TestServer::in_memory().await;
    let (_, id) = recreate(&server).await;
    let metadata = server.cluster().get_metadata(GetMetadataRequest::default()).await.unwrap();
    assert_eq!(metadata.into_inner().metadata.unwrap().topics[0].topic_id, id);
    let request = AppendRequest { topic_id: id, ..append_request(&["a"]) };
    assert_eq!(server.produce().append(request).await.unwrap().into_inner().topic_id, id);
    let (_, opened) = AppendSession::open(&server, init()).await;
    assert_eq!(opened.topic_id, id);
    let resolve = ResolveOffsetsRequest {
        topic: name(),
        partitions: vec![0],
        position: position(NamedPosition::Latest),
        topic_id: 0,
    };
    let resolved = server.consume().resolve_offsets(resolve).await.unwrap().into_inner();
    assert_eq!((resolved.topic_id, resolved.offsets[0].offset), (id, 1));
    for expected in [0, id] {
        let start = PartitionStart { topic_id: expected, ..earliest(0) };
        let partitions = vec![start];
        let request = FetchRequest { partitions: partitions.clone(), ..FetchRequest::default() };
        assert_eq!(server.fetch_one(request).await.topic_id, id);
        let request = SubscribeRequest { partitions, ..SubscribeRequest::default() };
        let mut stream = server.consume().subscribe(request).await.unwrap().into_inner();
        let mut ids = Vec::new();
        for _ in 0..2 {
            match soon(stream.message()).await.unwrap().unwrap().message.unwrap() {
                Message::Data(data) => ids.push(data.topic_id),
                Message::CaughtUp(caught_up) => ids.push(caught_up.topic_id),
                Message::Heartbeat(_) => {}
            }
        }
        assert_eq!(ids, [id, id]);
    }
}

#[tokio::test]
async fn append_stream_does_not_continue_in_a_new_topic() {
    for durability in [Durability::Unspecified, Durability::LeaderWritten, Durability::None] {
        on_both(async |server: TestServer| {
            let init = AppendStreamInit { durability: durability.into(), ..init() };
            let (mut session, _) = AppendSession::open(&server, init).await;
            session.send_batch(&["old"]).await;
            assert_eq!(session.acks().await.len(), 1);
            let (old, new) = recreate(&server).await;
            session.send_batch(&["not in the new one"]).await;
            let (acks, end) = session.finish().await;
            let status = end.unwrap_err();
            assert!(acks.is_empty(), "{durability:?}: {acks:?}");
            assert_eq!(reason(&status), ErrorReason::TopicRecreated, "{status:?}");
            assert_eq!(detail(&status).expected_topic_id, old);
            assert_eq!(detail(&status).topic_id, new);
            assert!(server.records(0, 0).await.is_empty());
        })
        .await;
    }
}

#[tokio::test]
async fn reads_end_when_their_topic_is_deleted() {
    on_both(async |server: TestServer| {
        server.append(&["old"]).await;
        let id = topic_id(&server).await;
        let partitions = vec![latest(0)];
        let request =
            SubscribeRequest { partitions: partitions.clone(), ..SubscribeRequest::default() };
        let mut stream = server.consume().subscribe(request).await.unwrap().into_inner();
        let first = soon(stream.message()).await.unwrap().unwrap().message;
        assert!(matches!(first, Some(Message::CaughtUp(_))), "{first:?}");
        let wait = prost_types::Duration { seconds: 30, nanos: 0 };
        let request = FetchRequest { partitions, max_wait: Some(wait), ..FetchRequest::default() };
        let mut consume = server.consume();
        let fetch = tokio::spawn(async move { consume.fetch(request).await });
        delete(&server, id).await.unwrap();
        let status = soon(stream.message()).await.unwrap_err();
        assert_eq!(reason(&status), ErrorReason::TopicDeleted, "{status:?}");
        let status = soon(fetch).await.unwrap().unwrap_err();
        assert_eq!(reason(&status), ErrorReason::TopicDeleted, "{status:?}");
        // Readers that continue with the id learn of the successor.
        let new = create(&server).await;
        server.append(&["new", "new"]).await;
        let start = PartitionStart { topic_id: id, ..from_offset(0, 1) };
        let request = SubscribeRequest { partitions: vec![start], ..SubscribeRequest::default() };
        let status = server.consume().subscribe(request).await.unwrap_err();
        assert_eq!(reason(&status), ErrorReason::TopicRecreated, "{status:?}");
        assert_eq!(detail(&status).topic_id, new);
    })
    .await;
}

#[tokio::test]
async fn repeated_delete_spares_the_new_topic() {
    let server = TestServer::in_memory().await;
    let old = topic_id(&server).await;
    delete(&server, old).await.unwrap();
    let new = create(&server).await;
    server.append(&["kept"]).await;
    let repeated = delete(&server, old).await.unwrap_err();
    assert_eq!(reason(&repeated), ErrorReason::TopicRecreated);
    assert_eq!(topic_id(&server).await, new);
    assert_eq!(values(&server.records(0, 0).await), ["kept"]);
}
