//! Retention by time and by size removes old records for readers, and nothing else.

use std::time::Duration;

use bytes::Bytes;
use helix_proto::batch;
use helix_proto::log::v1::{
    AppendRequest, ErrorReason, FetchRequest, GetTopicRequest, PartitionInfo, Record, TopicConfig,
    UpdateTopicRequest,
};
use helix_server::config::ServerConfig;
use prost_types::FieldMask;
use tokio::time::Instant;

use crate::captured_log::CapturedLog;
use crate::support::{
    PATIENCE, TestServer, append_request, as_batch, earliest, from_offset, reason, soon, values,
};

const AGE: Duration = Duration::from_secs(1);
const SEGMENT_BYTES: u64 = 16 << 20;
const KEPT_BYTES: u64 = 20 << 20;

/// Describes partition 0 of the default topic.
async fn described(server: &TestServer) -> PartitionInfo {
    let get = GetTopicRequest { name: "default".to_owned() };
    let topic = server.topics().get_topic(get).await.unwrap().into_inner().topic.unwrap();
    topic.partitions.into_iter().next().unwrap()
}

fn log_start(partition: &PartitionInfo) -> u64 {
    partition.watermarks.unwrap().log_start_offset
}

/// Waits until the condition holds and returns the partition.
async fn until(server: &TestServer, is_so: impl Fn(&PartitionInfo) -> bool) -> PartitionInfo {
    let begun = Instant::now();
    let mut look = tokio::time::interval(Duration::from_millis(20));
    loop {
        look.tick().await;
        let partition = described(server).await;
        if is_so(&partition) {
            return partition;
        }
        assert!(begun.elapsed() < 2 * PATIENCE, "it stays at {partition:?}");
    }
}

async fn keep_for(server: &TestServer, time: Duration) {
    let config = TopicConfig { retention_time: time.try_into().ok(), ..TopicConfig::default() };
    let request = UpdateTopicRequest {
        name: "default".to_owned(),
        config: Some(config),
        update_mask: Some(FieldMask { paths: vec!["retention_time".to_owned()] }),
        topic_id: 0,
    };
    server.topics().update_topic(request).await.unwrap();
}

async fn stored_values(server: &TestServer) -> Vec<String> {
    let request = FetchRequest { partitions: vec![earliest(0)], ..FetchRequest::default() };
    values(&server.fetch_one(request).await.records)
}

/// Expects three old records to be removed although their segment is far from full.
async fn grow_old(server: &TestServer) {
    server.append(&["a", "b"]).await;
    let begun = Instant::now();
    server.append(&["c"]).await;
    keep_for(server, AGE).await;
    until(server, |partition| log_start(partition) == 3).await;
    assert!(begun.elapsed() >= AGE, "not before the retention time");
    let gone = FetchRequest { partitions: vec![from_offset(0, 0)], ..FetchRequest::default() };
    let status = server.consume().fetch(gone).await.unwrap_err();
    assert_eq!(reason(&status), ErrorReason::OffsetOutOfRange);
    assert!(stored_values(server).await.is_empty());
    // From now on all records are kept.
    keep_for(server, Duration::ZERO).await;
    assert_eq!(server.append(&["d"]).await.ack.unwrap().first_offset, Some(3));
    assert_eq!(stored_values(server).await, ["d"]);
}

#[tokio::test]
async fn idle_memory_partition_drops_old_records() {
    grow_old(&TestServer::in_memory().await).await;
}

#[tokio::test]
async fn idle_partition_drops_old_records_permanently() {
    let (log, _guard) = CapturedLog::capture();
    let server = TestServer::durable().await;
    grow_old(&server).await;
    let trimmed: Vec<String> =
        log.text().lines().filter(|it| it.contains("retention trims")).map(str::to_owned).collect();
    assert_eq!(trimmed.len(), 1, "{trimmed:?}");
    for field in ["partition=0", "first_offset=0", "next_offset=3", "retention_s=1"] {
        assert!(trimmed[0].contains(field), "{field}: {trimmed:?}");
    }
    let server = soon(server.restart()).await;
    assert_eq!(log_start(&described(&server).await), 3);
    assert_eq!(stored_values(&server).await, ["d"]);
    assert_eq!(server.append(&["e"]).await.ack.unwrap().first_offset, Some(4));
}

#[tokio::test]
async fn byte_retention_keeps_its_limit_and_at_most_a_segment_more() {
    let directory = tempfile::tempdir().unwrap();
    let config = ServerConfig {
        segment_bytes: SEGMENT_BYTES,
        tail_bytes: Some(1 << 20),
        default_retention_bytes: KEPT_BYTES,
        ..ServerConfig::in_dir(directory.path())
    };
    let server = TestServer::start(config, None).await;
    let value = Some(Bytes::from(vec![7; 1_000_000]));
    let large = batch::encode(&[Record { value, ..Record::default() }]);
    let count = 4 * SEGMENT_BYTES / 1_000_000;
    for offset in 0..count {
        let batch = as_batch(large.clone());
        let request = AppendRequest { batch, ..append_request(&[]) };
        let ack = soon(server.produce().append(request)).await.unwrap().into_inner().ack.unwrap();
        assert_eq!(ack.first_offset, Some(offset));
    }
    let enough = |it: &PartitionInfo| it.live_bytes() < KEPT_BYTES + SEGMENT_BYTES;
    let partition = until(&server, enough).await;
    assert!(partition.live_bytes() >= KEPT_BYTES, "{partition:?}");
    let mut next = log_start(&partition);
    assert!(next > 0);
    let request = FetchRequest { partitions: vec![earliest(0)], ..FetchRequest::default() };
    assert_eq!(server.fetch_one(request).await.records[0].offset, next);
    while next < count {
        for stored in server.records(0, next).await {
            assert_eq!(stored.offset, next);
            next += 1;
        }
    }
    soon(server.running.shutdown()).await;
}
