//! Topics whose cleanup policy changes later, and tables that cannot be compacted.

use std::fs::OpenOptions;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use helix_client::{Producer, ProducerOptions};
use helix_proto::log::v1::{
    CleanupPolicy, CreateTopicRequest, FetchRequest, GetHealthRequest, GetTopicRequest,
    HealthReason, PartitionInfo, Record, TopicConfig, UpdateTopicRequest,
};
use helix_server::config::{AdminAddr, ServerConfig};
use prost_types::FieldMask;

use crate::admin::metrics;
use crate::cleanup::{keyed, policy, wait_compaction};
use crate::compaction_by_key::config;
use crate::process::patient_client;
use crate::support::{PATIENCE, TestServer, from_offset, record, soon};
use crate::trio::until_within;

const TOPIC: &str = "default";

async fn start(config: ServerConfig) -> TestServer {
    let server = TestServer::start(config, None).await;
    wait_compaction(&server).await;
    server
}

fn producer(server: &TestServer) -> Producer {
    patient_client(server.running.local_addr(), 7).producer(ProducerOptions::default())
}

/// Describes partition 0 of a topic.
async fn described(server: &TestServer, topic: &str) -> PartitionInfo {
    let request = GetTopicRequest { name: topic.to_owned() };
    let found = server.topics().get_topic(request).await.unwrap().into_inner();
    found.topic.unwrap().partitions.remove(0)
}

async fn update(server: &TestServer, topic: &str, config: TopicConfig, fields: &[&str]) {
    let request = UpdateTopicRequest {
        name: topic.to_owned(),
        config: Some(config),
        update_mask: Some(FieldMask { paths: fields.iter().map(ToString::to_string).collect() }),
        topic_id: 0,
    };
    server.topics().update_topic(request).await.unwrap();
}

/// Returns the offsets of the records in partition 0 of the default topic.
async fn offsets(server: &TestServer) -> Vec<u64> {
    let mut found = Vec::new();
    let mut next = described(server, TOPIC).await.watermarks.unwrap().log_start_offset;
    loop {
        let request =
            FetchRequest { partitions: vec![from_offset(0, next)], ..FetchRequest::default() };
        let read = server.fetch_one(request).await;
        found.extend(read.records.iter().map(|stored| stored.offset));
        next = read.next_offset;
        if next >= read.watermarks.unwrap().high_watermark {
            return found;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_follows_each_later_cleanup_policy() {
    let directory = tempfile::tempdir().unwrap();
    let lag = Duration::from_secs(1);
    let server = start(ServerConfig { cleaner_lag: lag, ..config(directory.path()) }).await;
    let producer = producer(&server);
    let append = async |records: &[Record]| {
        let ack = producer.append(TOPIC, 0, records).await.unwrap();
        ack.first_offset.unwrap()
    };
    let first = [
        keyed("a", Some("1")),
        record("without a key"),
        keyed("b", Some("1")),
        keyed("a", Some("2")),
    ];
    assert_eq!(append(&first).await, 0);
    assert_eq!(described(&server, TOPIC).await.clean_offset, None);

    // Records from before the change are compacted, too. Those without a key stay.
    let second = prost_types::Duration { seconds: 1, nanos: 0 };
    let compact = TopicConfig { retention_time: Some(second), ..policy(CleanupPolicy::Compact) };
    update(&server, TOPIC, compact, &["cleanup", "retention_time"]).await;
    let until = async |what: &str, is_so: fn(&PartitionInfo) -> bool| {
        until_within(2 * PATIENCE, what, async || {
            let partition = described(&server, TOPIC).await;
            is_so(&partition).then_some(partition)
        })
        .await
    };
    let partition = until("all is compacted", |it| it.clean_offset == Some(4)).await;
    assert_eq!(offsets(&server).await, [1, 2, 3]);
    let log_start = partition.watermarks.unwrap().log_start_offset;
    assert_eq!(log_start, 0, "retention deletes nothing of a compacted topic");

    assert_eq!(append(&[keyed("b", Some("2"))]).await, 4);
    update(&server, TOPIC, policy(CleanupPolicy::CompactAndDelete), &["cleanup"]).await;
    until("retention deletes also latest records", |it| {
        it.watermarks.unwrap().log_start_offset == 5
    })
    .await;
    assert!(offsets(&server).await.is_empty());

    let unlimited = TopicConfig {
        retention_time: Some(prost_types::Duration::default()),
        ..policy(CleanupPolicy::Delete)
    };
    update(&server, TOPIC, unlimited, &["cleanup", "retention_time"]).await;
    assert_eq!(append(&[record("again"), record("without a key")]).await, 5);
    assert_eq!(offsets(&server).await, [5, 6]);
    drop(producer);
    soon(server.running.shutdown()).await;
}

/// The keys together take three times the memory of a node's maps.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_with_more_keys_than_memory_takes_several_passes() {
    const KEYS: u64 = 60;
    let directory = tempfile::tempdir().unwrap();
    let server = start(ServerConfig { memory_limit: 256 << 20, ..config(directory.path()) }).await;
    update(&server, TOPIC, policy(CleanupPolicy::Compact), &["cleanup"]).await;
    let producer = producer(&server);
    for number in 0..2 * KEYS {
        let key = format!("{:03}{}", number % KEYS, "k".repeat(200_000));
        producer.append(TOPIC, 0, &[keyed(&key, Some("v"))][..]).await.unwrap();
    }
    // Seals their segments, and pushes them out of the Raft log.
    for _ in 0..24 {
        let filler = [keyed("filler", Some(&"y".repeat(1_000_000)))];
        producer.append(TOPIC, 0, &filler[..]).await.unwrap();
    }
    let partition = until_within(2 * PATIENCE, "all keys are compacted", async || {
        let partition = described(&server, TOPIC).await;
        (partition.clean_offset >= Some(2 * KEYS)).then_some(partition)
    })
    .await;
    let found = offsets(&server).await.into_iter().filter(|offset| *offset < 2 * KEYS);
    assert!(found.eq(KEYS..2 * KEYS), "the latest record of each key stays");
    let shard = server.running.node().shard(partition.shard_id.into()).unwrap();
    let stats = shard.cleaner_stats();
    assert!(stats.passes >= 3, "{stats:?}");
    drop((producer, shard));
    soon(server.running.shutdown()).await;
}

/// Changes a byte of the first record that consists of this byte, in the log of a stopped node.
#[expect(clippy::disallowed_methods, reason = "a test damages files")]
fn damage(directory: &Path, shard_id: u32, byte: u8) {
    let files = std::fs::read_dir(directory.join(format!("shard-{shard_id}"))).unwrap();
    let mut segments: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
    segments.retain(|path| path.extension().is_some_and(|it| it == "seg"));
    segments.sort();
    for segment in segments {
        let bytes = std::fs::read(&segment).unwrap();
        let is_record = |run: &[u8]| run.iter().all(|it| *it == byte);
        let Some(at) = bytes.windows(4_000).position(is_record) else { continue };
        let file = OpenOptions::new().write(true).open(&segment).unwrap();
        file.write_all_at(&[byte ^ 1], at as u64 + 2_000).unwrap();
        return;
    }
    panic!("no segment has a record of byte {byte}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_table_says_that_it_is_not_compacted_and_stops_no_other() {
    let directory = tempfile::tempdir().unwrap();
    let config = ServerConfig {
        admin_addr: Some(AdminAddr::At(SocketAddr::from(([127, 0, 0, 1], 0)))),
        ..config(directory.path())
    };
    let server = start(config.clone()).await;
    let appending = producer(&server);
    // The records of the first topic begin the log. Those of the second one fill segments of their
    // own, and push all of these out of the Raft log.
    for (topic, byte, count) in [("damaged", "d", 20), ("sound", "s", 60)] {
        let create = CreateTopicRequest {
            name: topic.to_owned(),
            partition_count: 1,
            ..CreateTopicRequest::default()
        };
        server.topics().create_topic(create).await.unwrap();
        for number in 0..count {
            let value = byte.repeat(1_000_000);
            let records = [keyed(&format!("key-{}", number % 5), Some(&value))];
            appending.append(topic, 0, &records[..]).await.unwrap();
        }
    }
    let shard_id = described(&server, "damaged").await.shard_id;
    assert_eq!(described(&server, "sound").await.shard_id, shard_id);
    drop(appending);
    soon(server.running.shutdown()).await;
    damage(directory.path(), shard_id, b'd');

    let server = start(config).await;
    for topic in ["damaged", "sound"] {
        update(&server, topic, policy(CleanupPolicy::Compact), &["cleanup"]).await;
    }
    let (damaged, sound) =
        until_within(2 * PATIENCE, "only the other one is compacted", async || {
            let damaged = described(&server, "damaged").await;
            let sound = described(&server, "sound").await;
            (damaged.is_uncleanable && sound.clean_offset >= Some(20)).then_some((damaged, sound))
        })
        .await;
    assert_eq!(damaged.clean_offset, Some(0), "{damaged:?}");
    assert!(!sound.is_uncleanable, "{sound:?}");
    let health =
        server.cluster().get_health(GetHealthRequest::default()).await.unwrap().into_inner();
    let issue = health.issues.iter().find(|it| it.reason() == HealthReason::Uncleanable);
    let issue = issue.unwrap_or_else(|| panic!("{health:?}"));
    assert_eq!(issue.shard_id, Some(shard_id));
    let expected = format!("cannot compact 1 partitions of shard {shard_id} by key");
    assert!(issue.message.contains(&expected), "{issue:?}");
    let page = metrics(server.running.admin_addr().unwrap()).await;
    let series = format!("helix_cleaner_uncleanable_partitions{{shard=\"{shard_id}\"}}");
    assert_eq!(page[&series], 1.0);
    soon(server.running.shutdown()).await;
}
