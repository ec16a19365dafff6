//! The cleanup setting of topics: which records a compacted topic accepts, and who may set it.

use bytes::Bytes;
use helix_proto::batch;
use helix_proto::compression::{BatchCodec, Compressor};
use helix_proto::log::v1::append_stream_request::Message as Sent;
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::{
    AppendRequest, AppendStreamBatch, AppendStreamInit, Batch, CleanupPolicy, CreateTopicRequest,
    ErrorReason, GetTopicRequest, Record, TopicConfig, UpdateTopicRequest,
};
use helix_proto::plain::PlainRecords;
use helix_server::protocol::COMPACTION;
use prost_types::{Duration, FieldMask};
use tonic::Status;

use crate::append_stream::AppendSession;
use crate::support::{PATIENCE, TestServer, as_batch, on_both, reason};

pub(crate) async fn wait_compaction(server: &TestServer) {
    let cluster = server.running.node().cluster();
    assert!(cluster.wait_protocol(COMPACTION, PATIENCE).await);
}

pub(crate) fn policy(cleanup: CleanupPolicy) -> TopicConfig {
    TopicConfig { cleanup: cleanup.into(), ..TopicConfig::default() }
}

pub(crate) fn keyed(key: &str, value: Option<&str>) -> Record {
    Record {
        key: Some(Bytes::copy_from_slice(key.as_bytes())),
        value: value.map(|value| Bytes::copy_from_slice(value.as_bytes())),
        ..Record::default()
    }
}

fn keyless(value: &str) -> Record {
    Record { value: Some(Bytes::copy_from_slice(value.as_bytes())), ..Record::default() }
}

fn create(name: &str, config: TopicConfig) -> CreateTopicRequest {
    CreateTopicRequest {
        name: name.to_owned(),
        partition_count: 1,
        config: Some(config),
        ..CreateTopicRequest::default()
    }
}

/// Appends the records in each form; returns the results.
async fn append_in_all_forms(server: &TestServer, records: &[Record]) -> Vec<Result<(), Status>> {
    let encoded = batch::encode(records);
    let mut forms = vec![
        Some(Batch { form: Some(Form::Records(PlainRecords::from(records))) }),
        as_batch(encoded.clone()),
    ];
    for codec in BatchCodec::ALL {
        let sent = Compressor::default().compress(codec, &encoded, usize::MAX);
        forms.push(as_batch(sent.expect("it shrinks")));
    }
    let mut results = Vec::new();
    for batch in forms {
        let request = AppendRequest { topic: "table".to_owned(), batch, ..Default::default() };
        results.push(server.produce().append(request).await.map(drop));
    }
    results
}

#[tokio::test]
async fn compacted_topics_refuse_records_without_a_key() {
    on_both(async |server: TestServer| {
        wait_compaction(&server).await;
        for (name, cleanup) in
            [("table", CleanupPolicy::Compact), ("both", CleanupPolicy::CompactAndDelete)]
        {
            let topic = create(name, policy(cleanup));
            let created = server.topics().create_topic(topic.clone()).await.unwrap().into_inner();
            let config = created.topic.unwrap().config.unwrap();
            assert_eq!(config.cleanup(), cleanup);
            assert_eq!(config.tombstone_retention_time.unwrap().seconds, 24 * 3600);
            server.topics().create_topic(topic).await.unwrap();
        }
        let other = create("table", TopicConfig::default());
        let status = server.topics().create_topic(other).await.unwrap_err();
        assert!(status.message().contains("cleanup is 2, not 0"), "{status:?}");

        let long = "v".repeat(200);
        let good = [keyed("a", Some(&long)), keyed("", Some(&long)), keyed("a", None)];
        for result in append_in_all_forms(&server, &good).await {
            result.unwrap();
        }
        let bad = [keyed("a", Some(&long)), keyless(&long)];
        for result in append_in_all_forms(&server, &bad).await {
            let status = result.unwrap_err();
            assert_eq!(reason(&status), ErrorReason::KeyRequired, "{status:?}");
            assert!(status.message().contains("record 1 of the batch has no key"), "{status:?}");
        }
        let request = GetTopicRequest { name: "table".to_owned() };
        let found = server.topics().get_topic(request).await.unwrap().into_inner().topic.unwrap();
        let marks = found.partitions[0].watermarks.unwrap();
        assert_eq!(marks.high_watermark, 4 * 3, "nothing of a refused batch is stored");
    })
    .await;
}

#[tokio::test]
async fn a_changed_policy_holds_for_open_streams() {
    let server = TestServer::in_memory().await;
    wait_compaction(&server).await;
    server.topics().create_topic(create("table", TopicConfig::default())).await.unwrap();
    let init = AppendStreamInit { topic: "table".to_owned(), ..AppendStreamInit::default() };
    let (mut session, _) = AppendSession::open(&server, init).await;
    let send = |record: Record| {
        let batch = as_batch(batch::encode(&[record]));
        Sent::Batch(AppendStreamBatch { batch, ..AppendStreamBatch::default() })
    };
    session.send(send(keyless("before"))).await;
    session.acks().await;
    let update = |config: TopicConfig, fields: &[&str]| UpdateTopicRequest {
        name: "table".to_owned(),
        config: Some(config),
        update_mask: Some(FieldMask { paths: fields.iter().map(ToString::to_string).collect() }),
        topic_id: 0,
    };
    let config = TopicConfig {
        tombstone_retention_time: Some(Duration { seconds: 60, nanos: 0 }),
        ..policy(CleanupPolicy::Compact)
    };
    let fields = ["cleanup", "tombstone_retention_time"];
    let updated = server.topics().update_topic(update(config, &fields)).await.unwrap();
    let found = updated.into_inner().topic.unwrap().config.unwrap();
    assert_eq!(found.cleanup(), CleanupPolicy::Compact);
    assert_eq!(found.tombstone_retention_time.unwrap().seconds, 60);
    session.send(send(keyed("k", Some("after")))).await;
    session.acks().await;
    session.send(send(keyless("after"))).await;
    let (_, end) = session.finish().await;
    assert_eq!(reason(&end.unwrap_err()), ErrorReason::KeyRequired);

    // A reset returns to the default.
    let reset = update(TopicConfig::default(), &fields);
    let found = server.topics().update_topic(reset).await.unwrap().into_inner();
    let found = found.topic.unwrap().config.unwrap();
    assert_eq!(found.cleanup(), CleanupPolicy::Delete);
    let request = AppendRequest {
        topic: "table".to_owned(),
        batch: as_batch(batch::encode(&[keyless("again")])),
        ..AppendRequest::default()
    };
    server.produce().append(request).await.unwrap();
}
