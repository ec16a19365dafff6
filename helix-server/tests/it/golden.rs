//! A node's data directory as each released version wrote it; every later version must read it
//! through the API.
//!
//! `HELIX_GOLDEN=3` rewrites the directory of format 3, `3-kafka` the one with Kafka batches. Both
//! are allowed only until its release.
//! Later, a change of any format adds a directory.

// The test reads and writes files.
#![allow(clippy::disallowed_methods)]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes};
use helix_proto::batch;
use helix_proto::compression::{BatchCodec, Compressor};
use helix_proto::kafka::{self, KAFKA_BATCH_VERSION};
use helix_proto::log::v1::{
    AppendCondition, AppendRequest, BatchFormat, CommitOffsetsRequest, CommittedOffset,
    CreateTopicRequest, DeleteGroupRequest, EncodedBatch, ErrorReason, FetchRequest,
    GetOffsetsRequest, GetTopicRequest, Header, InitProducerRequest, PartitionStart,
    ProducerIdentity, Record, SeekGroupRequest, TopicConfig,
};
use helix_server::cluster::TopicSpec;
use helix_server::config::ServerConfig;
use helix_server::error::Error;
use helix_server::log::{
    BatchChecksum, Condition, FencingToken, PartitionId, PartitionSettings, ProducerOwner,
    ProducerStamp, Refusal,
};
use helix_server::node::{LogLimits, Node, NodeSettings};
use helix_server::protocol::{COMMIT_ORDER, COMPACTION, KAFKA_BATCHES};
use helix_server::shard::{BatchAck, Durability, NewBatch};

use crate::cleanup::keyed;
use crate::groups::{TestMember, commit_at, groups, offsets};
use crate::simulation::settings_in;
use crate::support::{
    PATIENCE, TestServer, append_request, as_batch, detail, earliest, encoded, from_offset, reason,
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

/// Ids of the producers in the directory of format 3, from two leases, and an epoch of its groups.
const OWNED: u64 = 1;
const CHECKED: u64 = 1_001;
const LATE_EPOCH: u64 = 1;

/// Topic with Kafka batches, and their number.
const KAFKA: &str = "kafka";
const KAFKA_BATCHES_WRITTEN: usize = 6;

/// Record of the table at an offset.
fn update(offset: u64) -> Record {
    keyed(&format!("key-{}", offset % KEYS), Some(&text(0, offset)))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn serves_and_continues_a_data_directory_of_format_1() {
    let server = start("1", write).await;
    expect_all(&server, 0).await;
    // The placement is taken over once the cluster uses this release's protocol version.
    until("the placement is known", async || {
        server.running.node().cluster().machine().read(|state| {
            let shards = state.members().placement()?.shards();
            let nodes: Vec<Vec<u64>> =
                shards.map(|(_, it)| it.replicas.keys().copied().collect()).collect();
            (nodes.len() > 1 && nodes.iter().all(|it| *it == [1])).then_some(())
        })
    })
    .await;
    let server = server.restart().await;
    expect_all(&server, 1).await;
}

/// Also has a topic that is compacted by key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn serves_and_continues_a_data_directory_of_format_2() {
    let server = start("2", write_table).await;
    expect_table(&server, UPDATES).await;
    let server = server.restart().await;
    expect_table(&server, UPDATES + 1).await;
}

/// Also has owners of producers, checksums of batches, and groups with ordered commits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn serves_and_continues_a_data_directory_of_format_3() {
    let server = start("3", write_owners).await;
    expect_owners(&server, 0).await;
    let server = server.restart().await;
    expect_owners(&server, 1).await;
}

/// Has Kafka batches with each codec.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn serves_and_continues_kafka_batches_of_format_3() {
    let server = start("3-kafka", write_kafka).await;
    expect_kafka(&server, 0).await;
    let server = server.restart().await;
    expect_kafka(&server, 1).await;
}

/// Starts a node on a copy of the directory of a format. First rewrites that directory if
/// `HELIX_GOLDEN` is its number.
async fn start(format: &str, write: impl AsyncFn(&Path)) -> TestServer {
    let directory = tempfile::tempdir().unwrap();
    let kept = format!("tests/golden/node-v{format}.pack");
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join(kept);
    if std::env::var("HELIX_GOLDEN").is_ok_and(|value| value == format) {
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

/// Batch of a principal's producer on the default topic.
async fn append_of(node: &Node, sequence: u64, principal: &str) -> Result<BatchAck, Error> {
    let made = batch::encode(&records(&["owned"]));
    let producer = ProducerStamp {
        owner: ProducerOwner::of(principal),
        checksum: Some(BatchChecksum::of_crc(made.crc32)),
        ..ProducerStamp::new(OWNED, 0, sequence)
    };
    let located = node.locate("default", 0).unwrap();
    let new = new_batch(located.partition, made, Some(producer));
    let permit = located
        .shard
        .permit(helix_server::shard::FlowShare::INTERNAL, new.payload.len())
        .await
        .unwrap();
    located.shard.append(new, Durability::QuorumSynced, permit).await
}

/// Commit of the member; its epoch is in the metadata, for the next one.
fn member_commit(member_epoch: u64, sequence: u64, offset: u64) -> CommitOffsetsRequest {
    let metadata = member_epoch.to_string();
    CommitOffsetsRequest {
        group: "readers".to_owned(),
        member_id: "a".to_owned(),
        member_epoch,
        sequence,
        offsets: vec![CommittedOffset { metadata, ..commit_at(0, offset) }],
        ..CommitOffsetsRequest::default()
    }
}

fn commit_alone(group: &str, offset: u64, offsets_epoch: Option<u64>) -> CommitOffsetsRequest {
    CommitOffsetsRequest {
        group: group.to_owned(),
        offsets: vec![commit_at(0, offset)],
        offsets_epoch,
        ..CommitOffsetsRequest::default()
    }
}

async fn epoch_of(server: &TestServer, group: &str) -> Option<u64> {
    let request = GetOffsetsRequest {
        group: group.to_owned(),
        allow_missing: true,
        ..GetOffsetsRequest::default()
    };
    groups(server).get_offsets(request).await.unwrap().into_inner().offsets_epoch
}

/// Expects that owners, checksums and the order of commits are known; each visit adds a record.
async fn expect_owners(server: &TestServer, visits: u64) {
    let node = server.running.node();
    // The owner, the checksum and the sequence of a batch from before.
    let refused = append_of(node, 1 + visits, "bob").await.unwrap_err();
    assert!(matches!(refused, Error::Refused(Refusal::ProducerNotOwned { .. })), "{refused}");
    let next = append_of(node, 1 + visits, "alice").await.unwrap();
    assert!(!next.duplicate);
    let again = append_of(node, 0, "alice").await.unwrap();
    assert_eq!((again.duplicate, again.offsets), (true, Some((0, 1))));
    let own = ProducerIdentity { producer_id: CHECKED, epoch: 0 };
    for (value, expected) in [("checked", None), ("changed", Some(ErrorReason::SequenceReused))] {
        let request = AppendRequest {
            partition: 1,
            producer: Some(own),
            first_sequence: Some(0),
            ..append_request(&[value])
        };
        let outcome = server.produce().append(request).await;
        assert_eq!(outcome.as_ref().err().map(reason), expected, "{value}");
        let duplicate = outcome.ok().map(|it| it.into_inner().ack.unwrap().duplicate);
        assert!(duplicate.is_none_or(|it| it));
    }

    // The member's commits go on where they were.
    let committed = offsets(server).await[0].committed.clone().unwrap();
    let epoch = committed.metadata.parse().unwrap();
    let late = groups(server).commit_offsets(member_commit(epoch, 1, 1)).await.unwrap_err();
    assert_eq!(reason(&late), ErrorReason::StaleCommit);
    assert_eq!(detail(&late).next_sequence, Some(3 + visits));
    let commit = member_commit(epoch, 3 + visits, 1);
    groups(server).commit_offsets(commit).await.unwrap();
    // A seek and a deletion are not undone by commits from before them.
    for group in ["sought", "deleted"] {
        let epoch = epoch_of(server, group).await;
        let late = commit_alone(group, 0, Some(LATE_EPOCH));
        let late = groups(server).commit_offsets(late).await.unwrap_err();
        assert_eq!(reason(&late), ErrorReason::StaleCommit, "{group}");
        assert_eq!(detail(&late).offsets_epoch, epoch);
    }
    let sought = GetOffsetsRequest { group: "sought".to_owned(), ..GetOffsetsRequest::default() };
    let sought = groups(server).get_offsets(sought).await.unwrap().into_inner().offsets;
    assert_eq!(sought[0].committed.as_ref().unwrap().offset, 1);
    let deleted = GetOffsetsRequest { group: "deleted".to_owned(), ..GetOffsetsRequest::default() };
    let deleted = groups(server).get_offsets(deleted).await.unwrap_err();
    assert_eq!(reason(&deleted), ErrorReason::GroupNotFound);
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

/// Fills a directory: a producer of a principal, an anonymous producer whose batch has a checksum,
/// a member with numbered commits, a group that was sought, and a deleted group.
async fn write_owners(directory: &Path) {
    let server = TestServer::start(ServerConfig::in_dir(directory), None).await;
    let node = server.running.node();
    assert!(node.cluster().wait_protocol(COMMIT_ORDER, PATIENCE).await);
    let mut producers = Vec::new();
    for owner in [ProducerOwner::of("alice"), ProducerOwner::ANONYMOUS] {
        producers.push(node.cluster().next_producer_id(owner).await.unwrap());
    }
    assert_eq!(producers, [OWNED, CHECKED]);
    append_of(node, 0, "alice").await.unwrap();
    let producer = Some(ProducerIdentity { producer_id: CHECKED, epoch: 0 });
    let checked = AppendRequest {
        partition: 1,
        producer,
        first_sequence: Some(0),
        ..append_request(&["checked"])
    };
    server.produce().append(checked).await.unwrap();
    let mut member = TestMember::new("a", &["default"]);
    // Sessions begin again when the directory is opened.
    member.request.session_timeout = Some(prost_types::Duration { seconds: 600, nanos: 0 });
    member.until_owns(&server, 4).await;
    for sequence in [1, 2] {
        let commit = member_commit(member.last.member_epoch, sequence, sequence - 1);
        groups(&server).commit_offsets(commit).await.unwrap();
    }
    for group in ["sought", "deleted"] {
        let epoch = epoch_of(&server, group).await;
        let made = groups(&server).commit_offsets(commit_alone(group, 0, epoch)).await.unwrap();
        let epoch = made.into_inner().offsets_epoch;
        assert!(epoch >= Some(LATE_EPOCH), "{epoch:?}");
    }
    let seek = SeekGroupRequest {
        group: "sought".to_owned(),
        offsets: vec![commit_at(0, 1)],
        ..SeekGroupRequest::default()
    };
    groups(&server).seek_group(seek).await.unwrap();
    let delete =
        DeleteGroupRequest { group: "deleted".to_owned(), ..DeleteGroupRequest::default() };
    groups(&server).delete_group(delete).await.unwrap();
    for shard in node.shards() {
        shard.replica().checkpoint().await;
    }
    node.cluster().replica().checkpoint().await;
    let TestServer { running, channel, .. } = server;
    drop(channel);
    running.shutdown().await;
}

/// Records of the Kafka batch with a number.
fn kafka_records(number: usize) -> Vec<Record> {
    let record = |index: usize| Record {
        key: (index != 1).then(|| Bytes::from(format!("key-{number}"))),
        value: (index != 2).then(|| text(0, (10 * number + index) as u64).into()),
        headers: vec![Header { name: "h".to_owned(), value: Bytes::from_static(b"\0") }; index],
        event_time: Some(kafka::millisecond_time(1_764_288_000_123 + index as i64)),
    };
    (0..4).map(record).collect()
}

fn kafka_batch(number: usize) -> EncodedBatch {
    let codec = [None, Some(BatchCodec::Lz4), Some(BatchCodec::Zstd)][number % 3];
    let mut compressor = Compressor::default();
    kafka::from_records(&kafka_records(number), codec.map(|codec| (codec, &mut compressor)))
        .unwrap()
}

async fn append_kafka(server: &TestServer, number: usize) -> u64 {
    let request = AppendRequest {
        topic: KAFKA.to_owned(),
        batch: as_batch(kafka_batch(number)),
        ..AppendRequest::default()
    };
    let ack = server.produce().append(request).await.unwrap().into_inner().ack.unwrap();
    ack.first_offset.unwrap()
}

/// Fills a directory: Kafka batches with each codec, in the log and below a checkpoint.
async fn write_kafka(directory: &Path) {
    let server = TestServer::start(ServerConfig::in_dir(directory), None).await;
    let node = server.running.node();
    assert!(node.cluster().wait_protocol(KAFKA_BATCHES, PATIENCE).await);
    let config = TopicConfig { batch_format: BatchFormat::Kafka.into(), ..TopicConfig::default() };
    let create = CreateTopicRequest {
        name: KAFKA.to_owned(),
        partition_count: 1,
        config: Some(config),
        ..CreateTopicRequest::default()
    };
    server.topics().create_topic(create).await.unwrap();
    for number in 0..KAFKA_BATCHES_WRITTEN {
        if number == 3 {
            for shard in node.shards() {
                shard.replica().checkpoint().await;
            }
        }
        append_kafka(&server, number).await;
    }
    let TestServer { running, channel, .. } = server;
    drop(channel);
    running.shutdown().await;
}

/// Expects the records of all batches, as they came and converted; each visit adds a batch.
async fn expect_kafka(server: &TestServer, visits: usize) {
    let count = KAFKA_BATCHES_WRITTEN + visits;
    let (mut stored, mut next) = (Vec::new(), 0);
    while stored.len() < count {
        let request = FetchRequest {
            partitions: vec![PartitionStart { topic: KAFKA.to_owned(), ..from_offset(0, next) }],
            accept_encoded: true,
            accept_kafka_batches: true,
            ..FetchRequest::default()
        };
        let read = server.fetch_one(request).await;
        assert!(!read.batches.is_empty(), "nothing at {next}");
        next = read.next_offset;
        stored.extend(read.batches);
    }
    for (number, stored) in stored.iter().enumerate() {
        let batch = stored.batch.as_ref().unwrap();
        assert_eq!((stored.first_offset, batch.version), (4 * number as u64, KAFKA_BATCH_VERSION));
        assert_eq!(kafka::decode(batch).unwrap().records, kafka_records(number));
    }
    assert_eq!(append_kafka(server, count).await, 4 * count as u64);
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
    let new = new_batch(located.partition, batch::encode(records), producer);
    let permit = located
        .shard
        .permit(helix_server::shard::FlowShare::INTERNAL, new.payload.len())
        .await
        .unwrap();
    located.shard.append(new, Durability::QuorumSynced, permit).await.unwrap();
}

fn new_batch(
    partition: PartitionId,
    made: EncodedBatch,
    producer: Option<ProducerStamp>,
) -> NewBatch {
    NewBatch {
        partition,
        record_count: made.record_count,
        version: batch::BATCH_VERSION,
        compression: made.compression,
        uncompressed_bytes: 0,
        crc: made.crc32,
        payload: made.payload,
        producer,
        condition: Condition::default(),
        stamps: None,
    }
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
