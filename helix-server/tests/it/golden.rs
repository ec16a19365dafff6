//! A node's data directory as each released version wrote it; every later version must read it
//! through the API.
//!
//! `HELIX_GOLDEN=2` rewrites the directory of format 2, which is allowed only until its release.
//! Later, a change of any format adds a directory.

// The test reads and writes files.
#![allow(clippy::disallowed_methods)]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes};
use helix_proto::batch;
use helix_proto::log::v1::{
    AppendCondition, AppendRequest, ErrorReason, FetchRequest, GetTopicRequest,
    InitProducerRequest, PartitionStart, ProducerIdentity, Record,
};
use helix_server::cluster::TopicSpec;
use helix_server::config::ServerConfig;
use helix_server::log::{Condition, FencingToken, PartitionSettings, ProducerOwner, ProducerStamp};
use helix_server::node::{LogLimits, Node, NodeSettings};
use helix_server::protocol::COMPACTION;
use helix_server::shard::{Durability, NewBatch};

use crate::cleanup::keyed;
use crate::simulation::settings_in;
use crate::support::{
    PATIENCE, TestServer, append_request, as_batch, earliest, encoded, from_offset, reason,
    records, values,
};
use crate::trio::until;

/// Batches of the default topic's first partition, and of the deleted topic.
const ROUNDS: u64 = 30;
const TRIMMED: u64 = 20;

/// Value of the record at an offset of the default topic.
fn text(partition: u32, offset: u64) -> String {
    format!("record {offset} of partition {partition} {}", "x".repeat(2_000))
}

const TABLE: &str = "table";
const UPDATES: u64 = 90;
const KEYS: u64 = 3;
/// Offset below which the table is compacted at least.
const COMPACTED: u64 = 60;

/// Record of the table at an offset.
fn update(offset: u64) -> Record {
    keyed(&format!("key-{}", offset % KEYS), Some(&text(0, offset)))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn serves_and_continues_a_data_directory_of_format_1() {
    let server = start(1, write).await;
    expect_all(&server, 0).await;
    let server = server.restart().await;
    expect_all(&server, 1).await;
}

/// Also has a topic that is compacted by key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn serves_and_continues_a_data_directory_of_format_2() {
    let server = start(2, write_table).await;
    expect_table(&server, UPDATES).await;
    let server = server.restart().await;
    expect_table(&server, UPDATES + 1).await;
}

/// Starts a node on a copy of the directory of a format. First rewrites that directory if
/// `HELIX_GOLDEN` is its number.
async fn start(format: u32, write: impl AsyncFn(&Path)) -> TestServer {
    let directory = tempfile::tempdir().unwrap();
    let kept = format!("tests/golden/node-v{format}.pack");
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join(kept);
    if std::env::var("HELIX_GOLDEN").is_ok_and(|value| value == format.to_string()) {
        let made = tempfile::tempdir().unwrap();
        write(made.path()).await;
        fs::create_dir_all(kept.parent().unwrap()).unwrap();
        fs::write(&kept, pack(made.path())).unwrap();
    }
    unpack(&fs::read(&kept).unwrap(), directory.path());
    TestServer::start(ServerConfig::in_dir(directory.path()), Some(directory)).await
}

/// Expects everything that was written, and one more record per visit.
async fn expect_all(server: &TestServer, visits: u64) {
    for (partition, first) in [(0, 0), (2, TRIMMED)] {
        let mut next = first;
        while next < ROUNDS + visits {
            let found = values(&server.records(partition, next).await);
            assert!(!found.is_empty(), "nothing at {next} of partition {partition}");
            for value in found {
                assert_eq!(value, text(partition, next));
                next += 1;
            }
        }
        let appended = server.append_to(partition, &[&text(partition, next)]).await.ack.unwrap();
        assert_eq!(appended.first_offset, Some(next));
    }
    let trimmed = FetchRequest { partitions: vec![from_offset(2, 0)], ..FetchRequest::default() };
    let refused = server.consume().fetch(trimmed).await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::OffsetOutOfRange);

    // The token is in force.
    let get = GetTopicRequest { name: "default".to_owned() };
    let topic = server.topics().get_topic(get).await.unwrap().into_inner().topic.unwrap();
    let tokens: Vec<_> = topic.partitions.iter().map(|it| it.fencing_token.as_deref()).collect();
    assert_eq!(tokens, [None, Some("writer-1"), None, None]);
    let fenced = |token: &str| AppendRequest {
        partition: 1,
        condition: Some(AppendCondition {
            fencing_token: Some(token.to_owned()),
            ..AppendCondition::default()
        }),
        ..append_request(&["fenced"])
    };
    server.produce().append(fenced("writer-1")).await.unwrap();
    let refused = server.produce().append(fenced("writer-2")).await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::Fenced);

    // All producers are known.
    let known = ProducerIdentity { producer_id: 7_000, epoch: 0 };
    let again = AppendRequest {
        batch: encoded(&[&text(0, ROUNDS - 1)]),
        producer: Some(known),
        first_sequence: Some(ROUNDS - 1),
        ..append_request(&[])
    };
    let ack = server.produce().append(again).await.unwrap().into_inner().ack.unwrap();
    assert_eq!((ack.first_offset, ack.duplicate), (Some(ROUNDS - 1), true));
    let init = InitProducerRequest { producer_name: "golden".to_owned() };
    let named = server.produce().init_producer(init).await.unwrap().into_inner();
    assert_eq!(u64::from(named.producer.unwrap().epoch), 1 + visits, "one more than before");

    // One topic exists, the deleted one does not.
    let orders = PartitionStart { topic: "orders".to_owned(), ..earliest(1) };
    let orders = FetchRequest { partitions: vec![orders], ..FetchRequest::default() };
    assert_eq!(values(&server.fetch_one(orders).await.records), ["a", "b", "c"]);
    let get = GetTopicRequest { name: "gone".to_owned() };
    let refused = server.topics().get_topic(get).await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::TopicNotFound);
}

/// Expects the latest record of each key, and no record that was compacted away. Adds a record.
async fn expect_table(server: &TestServer, next: u64) {
    let get = GetTopicRequest { name: TABLE.to_owned() };
    let topic = server.topics().get_topic(get).await.unwrap().into_inner().topic.unwrap();
    assert!(topic.partitions[0].clean_offset >= Some(COMPACTED), "{:?}", topic.partitions);
    let (mut offsets, mut offset) = (Vec::new(), 0);
    while offset < next {
        let start = PartitionStart { topic: TABLE.to_owned(), ..from_offset(0, offset) };
        let request = FetchRequest { partitions: vec![start], ..FetchRequest::default() };
        let read = server.fetch_one(request).await;
        assert!(read.next_offset > offset, "no progress at {offset}");
        offset = read.next_offset;
        for stored in read.records {
            assert_eq!(stored.record.unwrap(), update(stored.offset));
            offsets.push(stored.offset);
        }
    }
    assert_eq!(offset, next);
    assert!((next - KEYS..next).all(|offset| offsets.contains(&offset)), "{offsets:?}");
    let is_removed = |offset: &u64| *offset + KEYS < COMPACTED;
    assert!(!offsets.iter().any(is_removed), "{offsets:?}");
    let request = AppendRequest {
        topic: TABLE.to_owned(),
        batch: as_batch(batch::encode(&[update(next)])),
        ..AppendRequest::default()
    };
    let ack = server.produce().append(request).await.unwrap().into_inner().ack.unwrap();
    assert_eq!(ack.first_offset, Some(next));
}

/// A node with small segments, so that kilobytes suffice to roll, seal and compact.
fn settings(directory: &Path) -> NodeSettings {
    NodeSettings {
        segment_bytes: 64 << 10,
        preparation: helix_wal::Preparation::Auto,
        log_limits: LogLimits {
            checkpoint_bytes: 32 << 10,
            catch_up_bytes: 32 << 10,
            ..LogLimits::DEFAULT
        },
        ..settings_in(directory, 1)
    }
}

/// Fills a directory: named and numbered producers, a token, a trim, a deleted topic, sealed and
/// cold segments, a purged log, and an active segment.
async fn write(directory: &Path) {
    let node = Node::open(settings(directory)).await.unwrap();
    for (name, partition_count) in [("gone", 1), ("orders", 2)] {
        let (name, settings) = (name.to_owned(), *node.topic_settings());
        let spec = TopicSpec { name, partition_count, replication_factor: 0, settings };
        node.cluster().create_topic(spec, false).await.unwrap();
    }
    assert_eq!(
        node.cluster().init_producer("golden", ProducerOwner::ANONYMOUS).await.unwrap().1,
        0
    );
    for number in 0..ROUNDS {
        let stamp = ProducerStamp::new(7_000, 0, number);
        append(&node, "default", 0, &[&text(0, number)], Some(stamp)).await;
        append(&node, "default", 2, &[&text(2, number)], None).await;
        append(&node, "gone", 0, &[&"y".repeat(8_000)], None).await;
    }
    append(&node, "orders", 1, &["a", "b", "c"], None).await;
    node.cluster().delete_topic("gone", 0).await.unwrap();
    let shard = node.shard(1).unwrap();
    let partition = |number| node.locate("default", number).unwrap().partition;
    shard.trim(partition(2), TRIMMED).await.unwrap();
    let token = FencingToken::new("writer-1").unwrap();
    shard.set_fencing_token(partition(1), None, token).await.unwrap();
    until("a cold segment was written", async || {
        (shard.status().wal.cold_segments > 0).then_some(())
    })
    .await;
    drop(shard);
    node.close().await;
}

/// Fills a directory: updates of a few keys, most of them compacted away.
async fn write_table(directory: &Path) {
    let settings = settings(directory);
    let cleaner_lag = Duration::from_secs(1);
    let log_limits = LogLimits { cleaner_lag, ..settings.log_limits };
    let node = Node::open(NodeSettings { log_limits, ..settings }).await.unwrap();
    assert!(node.cluster().wait_protocol(COMPACTION, PATIENCE).await);
    // The number of `CleanupPolicy` for compaction by key.
    let settings = PartitionSettings { cleanup: 2, ..*node.topic_settings() };
    let name = TABLE.to_owned();
    let spec = TopicSpec { name, partition_count: 1, replication_factor: 0, settings };
    node.cluster().create_topic(spec, false).await.unwrap();
    for offset in 0..UPDATES {
        append_records(&node, TABLE, 0, &[update(offset)], None).await;
    }
    let located = node.locate(TABLE, 0).unwrap();
    until("the updates are compacted", async || {
        let cleanup = located.shard.cleanup(located.partition);
        cleanup.is_some_and(|it| it.clean_offset >= COMPACTED).then_some(())
    })
    .await;
    drop(located);
    node.close().await;
}

async fn append(
    node: &Node,
    topic: &str,
    number: u32,
    values: &[&str],
    producer: Option<ProducerStamp>,
) {
    append_records(node, topic, number, &records(values), producer).await;
}

async fn append_records(
    node: &Node,
    topic: &str,
    number: u32,
    records: &[Record],
    producer: Option<ProducerStamp>,
) {
    let located = node.locate(topic, number).unwrap();
    let made = batch::encode(records);
    let new = NewBatch {
        partition: located.partition,
        record_count: made.record_count,
        version: batch::BATCH_VERSION,
        compression: made.compression,
        uncompressed_bytes: 0,
        crc: made.crc32,
        payload: made.payload,
        producer,
        condition: Condition::default(),
    };
    let permit = located.shard.permit(new.payload.len()).await.unwrap();
    located.shard.append(new, Durability::QuorumSynced, permit).await.unwrap();
}

// The functions below pack a directory in one file, without the zero blocks of segments.

const BLOCK: usize = 4096;

/// Relevant files, relative to the directory.
fn files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(next) = directories.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            let is_needed = !name.starts_with("ready-") && !["lock", "state.tmp"].contains(&name);
            if path.is_dir() {
                directories.push(path);
            } else if is_needed {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn pack(directory: &Path) -> Vec<u8> {
    let mut packed = Vec::new();
    for path in files(directory) {
        let name = path.strip_prefix(directory).unwrap().to_str().unwrap();
        let bytes = fs::read(&path).unwrap();
        let blocks: Vec<_> = bytes.chunks(BLOCK).zip(0_u32..).collect();
        let used = || blocks.iter().filter(|(block, _)| block.iter().any(|byte| *byte != 0));
        packed.put_u16_le(name.len().try_into().unwrap());
        packed.put_slice(name.as_bytes());
        packed.put_u64_le(bytes.len() as u64);
        packed.put_u32_le(used().count().try_into().unwrap());
        for (block, number) in used() {
            packed.put_u32_le(*number);
            packed.put_u16_le(block.len().try_into().unwrap());
            packed.put_slice(block);
        }
    }
    packed
}

fn unpack(packed: &[u8], directory: &Path) {
    let mut packed = Bytes::copy_from_slice(packed);
    while packed.has_remaining() {
        let name = usize::from(packed.get_u16_le());
        let name = String::from_utf8(packed.split_to(name).to_vec()).unwrap();
        let mut bytes = vec![0; packed.get_u64_le().try_into().unwrap()];
        for _ in 0..packed.get_u32_le() {
            let start = packed.get_u32_le() as usize * BLOCK;
            let len = usize::from(packed.get_u16_le());
            bytes[start..start + len].copy_from_slice(&packed.split_to(len));
        }
        let path = directory.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
}
