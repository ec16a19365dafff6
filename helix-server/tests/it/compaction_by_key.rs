//! Compaction by key on a running node: the latest record of each key stays at its offset, readers
//! step over gaps in every form, and tombstones go once their retention has passed.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use helix_client::{Client, NewTopic, Producer, ProducerOptions};
use helix_proto::batch;
use helix_proto::kafka::{self, KafkaBatch};
use helix_proto::log::v1::subscribe_response::Message;
use helix_proto::log::v1::{
    AppendCondition, AppendRequest, BatchFormat, CleanupPolicy, ErrorReason, FetchRequest,
    GetTopicRequest, InitProducerRequest, PartitionStart, ReadSource, Record, StartPosition,
    SubscribeRequest, TopicConfig, start_position,
};
use helix_server::config::ServerConfig;
use helix_server::log::CleanupState;
use helix_server::shard::{CleanerStats, PartitionCleanup};

use crate::cleanup::{keyed, policy, wait_compaction};
use crate::conditions::expecting;
use crate::fleet::{Fleet, until_long};
use crate::process::patient_client;
use crate::support::{PATIENCE, TestServer, as_batch, reason, soon};
use crate::trio::{NODES, Trio, TrioPlan};

const TOPIC: &str = "table";

/// Appended records: key and value by offset.
type Appended = BTreeMap<u64, (String, Option<String>)>;

pub(crate) fn config(directory: &Path) -> ServerConfig {
    ServerConfig {
        segment_bytes: 16 << 20,
        tail_bytes: Some(1 << 20),
        checkpoint_bytes: 1 << 20,
        ..ServerConfig::in_dir(directory)
    }
}

struct Table {
    server: TestServer,
    client: Client,
    appended: Appended,
    round: u64,
}

impl Table {
    async fn create(config: ServerConfig, topic: TopicConfig) -> Self {
        let server = TestServer::start(config, None).await;
        wait_compaction(&server).await;
        let client = patient_client(server.running.local_addr(), 7);
        let topic = NewTopic { config: topic, ..NewTopic::new(TOPIC, 1) };
        client.admin().create_topic(&topic).await.unwrap();
        Self { server, client, appended: Appended::new(), round: 0 }
    }

    /// Appends batches of ten records of thirty keys. Every fifth record is a tombstone.
    async fn append(&mut self, batches: u64) {
        let producer = self.client.producer(ProducerOptions::default());
        for _ in 0..batches {
            let record = |number: u64| {
                let key = format!("key-{}", (self.round * 7 + number * 3) % 30);
                let value = !(self.round + number).is_multiple_of(5);
                let value =
                    value.then(|| format!("{}-{number}-{}", self.round, "v".repeat(10_000)));
                (key, value)
            };
            let sent: Vec<_> = (0..10).map(record).collect();
            let records: Vec<Record> =
                sent.iter().map(|(key, value)| keyed(key, value.as_deref())).collect();
            let first = producer.append(TOPIC, 0, &records[..]).await.unwrap();
            let first = first.first_offset.unwrap();
            self.appended.extend((first..).zip(sent));
            self.round += 1;
        }
    }

    /// Appends until the segments of the earlier records are sealed and have left the Raft log.
    async fn push_out(&mut self) {
        let producer = self.client.producer(ProducerOptions::default());
        for _ in 0..24 {
            let value = "y".repeat(1_000_000);
            let records = [keyed("filler", Some(&value))];
            let ack = producer.append(TOPIC, 0, &records[..]).await.unwrap();
            self.appended.insert(ack.first_offset.unwrap(), ("filler".to_owned(), Some(value)));
        }
    }

    async fn described(&self) -> helix_proto::log::v1::PartitionInfo {
        let request = GetTopicRequest { name: TOPIC.to_owned() };
        let found = self.server.topics().get_topic(request).await.unwrap().into_inner();
        found.topic.unwrap().partitions.remove(0)
    }

    async fn shard_id(&self) -> u64 {
        self.described().await.shard_id.into()
    }

    async fn stats(&self) -> CleanerStats {
        let shard = self.server.running.node().shard(self.shard_id().await).unwrap();
        shard.cleaner_stats()
    }

    /// Waits until the partition's compaction is as wanted.
    async fn until(&self, what: &str, is_wanted: impl Fn(&PartitionCleanup) -> bool) {
        let shard = self.server.running.node().shard(self.shard_id().await).unwrap();
        let partition = shard.compacted_partitions()[0].id;
        let reached = async {
            while !shard.cleanup(partition).is_some_and(|cleanup| is_wanted(&cleanup)) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let reached = tokio::time::timeout(2 * PATIENCE, reached).await;
        assert!(reached.is_ok(), "{what}: {:?} {:?}", shard.cleanup(partition), shard.status());
    }

    fn start(offset: u64) -> Vec<PartitionStart> {
        let position = Some(start_position::Position::Offset(offset));
        let start = Some(StartPosition { position, ..StartPosition::default() });
        vec![PartitionStart { topic: TOPIC.to_owned(), start, ..PartitionStart::default() }]
    }

    /// Reads everything from an offset on, as plain records or encoded batches.
    async fn read(&self, from: u64, accept_encoded: bool) -> (Appended, u64) {
        let (mut found, mut offset) = (Appended::new(), from);
        loop {
            let request = FetchRequest {
                partitions: Self::start(offset),
                accept_encoded,
                accept_kafka_batches: accept_encoded,
                ..FetchRequest::default()
            };
            let read = self.server.fetch_one(request).await;
            let mut records: Vec<(u64, Record)> = Vec::new();
            for stored in read.records {
                records.push((stored.offset, stored.record.unwrap()));
            }
            for stored in read.batches {
                let decoded = batch::decode(stored.batch.as_ref().unwrap()).unwrap().records;
                let deltas = match stored.offset_deltas.as_slice() {
                    [] => (0..decoded.len() as u64).collect(),
                    deltas => deltas.iter().map(|delta| u64::from(*delta)).collect::<Vec<_>>(),
                };
                assert_eq!(deltas.len(), decoded.len());
                let offsets = deltas.into_iter().map(|delta| stored.first_offset + delta);
                records.extend(offsets.zip(decoded).filter(|(at, _)| *at >= read.start_offset));
            }
            for (at, record) in records {
                assert!(at >= offset && at < read.next_offset, "{at} in {offset}..");
                let text = |bytes: bytes::Bytes| String::from_utf8(bytes.to_vec()).unwrap();
                let record = (text(record.key.unwrap()), record.value.map(text));
                assert!(found.insert(at, record).is_none(), "{at} twice");
            }
            let end = read.watermarks.unwrap().high_watermark;
            if read.next_offset >= end {
                return (found, end);
            }
            assert!(read.next_offset > offset, "no progress at {offset}");
            offset = read.next_offset;
        }
    }

    /// Checks what a reader may rely on; `forgets`: tombstones may be gone.
    async fn check(&self, forgets: bool) -> Appended {
        let (found, end) = self.read_both().await;
        assert_eq!(end, self.appended.len() as u64, "offsets never change");
        for (offset, record) in &found {
            assert_eq!(self.appended.get(offset), Some(record), "a record never changes");
        }
        let latest = |all: &Appended| -> BTreeMap<String, (u64, Option<String>)> {
            all.iter().map(|(at, (key, value))| (key.clone(), (*at, value.clone()))).collect()
        };
        let seen = latest(&found);
        for (key, expected) in latest(&self.appended) {
            match seen.get(&key) {
                Some(found) => assert_eq!(*found, expected, "the latest record of {key}"),
                None => {
                    assert!(forgets && expected.1.is_none(), "the latest record of {key} is lost")
                }
            }
        }
        found
    }

    /// Reads everything in both forms, which must agree. Records may go between two reads, so it
    /// repeats them until none has.
    async fn read_both(&self) -> (Appended, u64) {
        loop {
            let (found, end) = self.read(0, false).await;
            let (encoded, _) = self.read(0, true).await;
            if self.read(0, false).await.0 == found {
                assert_eq!(encoded, found, "both forms");
                return (found, end);
            }
        }
    }

    async fn restart(self, config: ServerConfig) -> Self {
        let Self { server, client, appended, round } = self;
        drop(client);
        soon(server.running.shutdown()).await;
        let server = TestServer::start(config, None).await;
        let client = patient_client(server.running.local_addr(), 7);
        Self { server, client, appended, round }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_batches_keep_their_offsets_when_records_go() {
    let directory = tempfile::tempdir().unwrap();
    let config = config(directory.path());
    let kafka =
        TopicConfig { batch_format: BatchFormat::Kafka.into(), ..policy(CleanupPolicy::Compact) };
    let mut table = Table::create(config.clone(), kafka).await;
    table.append(300).await;
    // The last three batches have all keys. Each of them loses some of its records.
    let sent: Vec<_> =
        (0..6).map(|number| (format!("key-{number}"), Some("late".to_owned()))).collect();
    let records: Vec<Record> =
        sent.iter().map(|(key, value)| keyed(key, value.as_deref())).collect();
    let producer = table.client.producer(ProducerOptions::default());
    let first = producer.append(TOPIC, 0, &records[..]).await.unwrap().first_offset.unwrap();
    table.appended.extend((first..).zip(sent));
    table.push_out().await;
    table.until("compacted", |it| it.clean_offset >= 2_500).await;
    let found = table.check(false).await;
    assert!(found.len() < 900, "{} of 3000 records", found.len());
    let missing: Vec<u64> = (0..2_500).filter(|at| !found.contains_key(at)).collect();
    for at in [missing[0], missing[missing.len() / 2]] {
        let (rest, _) = table.read(at, true).await;
        assert!(rest.iter().eq(found.range(at..)), "from {at}");
    }
    // A Kafka reader sees whole batches, in order, with the offsets that they had.
    let (mut offset, mut compacted) = (0, 0);
    let mut offsets = Vec::new();
    while offset < table.appended.len() as u64 {
        let request = FetchRequest {
            partitions: Table::start(offset),
            accept_encoded: true,
            accept_kafka_batches: true,
            ..FetchRequest::default()
        };
        let read = table.server.fetch_one(request).await;
        for stored in &read.batches {
            let batch = stored.batch.as_ref().unwrap();
            let header = KafkaBatch::parse(&batch.payload).unwrap();
            assert_eq!(header.record_count(), batch.record_count);
            let deltas = kafka::decode(batch).unwrap().offset_deltas;
            compacted += u64::from(deltas.len() <= header.last_offset_delta() as usize);
            assert!(stored.offset_deltas.is_empty() || stored.offset_deltas == deltas);
            offsets.extend(deltas.iter().map(|delta| stored.first_offset + u64::from(*delta)));
            let end = stored.first_offset + u64::from(header.last_offset_delta()) + 1;
            assert!(end <= read.next_offset, "{end} of {}", read.next_offset);
        }
        assert!(read.next_offset > offset, "no progress at {offset}");
        offset = read.next_offset;
    }
    assert!(compacted >= 3 && offsets.iter().eq(found.keys()), "{compacted} batches compacted");
    let table = table.restart(config).await;
    assert_eq!(table.check(false).await, found);
    soon(table.server.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_latest_record_of_each_key_stays_at_its_offset() {
    let directory = tempfile::tempdir().unwrap();
    let config = config(directory.path());
    let mut table = Table::create(config.clone(), policy(CleanupPolicy::Compact)).await;
    table.append(300).await;
    table.push_out().await;
    table.until("compacted", |it| it.clean_offset >= 2_500).await;
    let found = table.check(false).await;
    assert!(found.len() < 900, "{} of 3000 records", found.len());
    let described = table.described().await;
    assert!(described.clean_offset >= Some(2_500) && !described.is_uncleanable);
    assert!(described.live_bytes() < 28_000_000, "{described:?}");

    // A read from within a gap begins with the next record.
    let missing: Vec<u64> = (0..2_500).filter(|at| !found.contains_key(at)).collect();
    for at in [missing[0], missing[missing.len() / 2], *missing.last().unwrap()] {
        for encoded in [false, true] {
            let (rest, _) = table.read(at, encoded).await;
            assert!(rest.iter().eq(found.range(at..)), "from {at}");
        }
    }
    // A subscription reaches the end, and the next record.
    let request = SubscribeRequest { partitions: Table::start(0), ..SubscribeRequest::default() };
    let mut stream = table.server.consume().subscribe(request).await.unwrap().into_inner();
    let mut count = 0;
    loop {
        match soon(stream.message()).await.unwrap().unwrap().message.unwrap() {
            Message::Data(data) => count += data.records.len(),
            Message::CaughtUp(_) => break,
            Message::Heartbeat(_) => {}
        }
    }
    assert_eq!(count, found.len());
    table.append(1).await;
    loop {
        if let Message::Data(data) = soon(stream.message()).await.unwrap().unwrap().message.unwrap()
        {
            assert_eq!(data.records[0].offset, 3_024);
            break;
        }
    }
    drop(stream);

    // A restart neither loses anything nor begins again.
    let before = table.check(false).await;
    let mut table = table.restart(config.clone()).await;
    assert_eq!(table.check(false).await, before);
    let stats = table.stats().await;
    assert_eq!((stats.behind_partitions, stats.passes), (0, 0), "{stats:?}");

    // A second round, over what the first has left.
    table.append(300).await;
    table.push_out().await;
    table.until("compacted again", |it| it.clean_offset >= 5_525).await;
    let found = table.check(false).await;
    assert!(found.len() < 900, "{} of 6058 records", found.len());
    soon(table.server.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tombstones_go_after_their_retention_and_nothing_older_reappears() {
    let directory = tempfile::tempdir().unwrap();
    let topic = TopicConfig {
        tombstone_retention_time: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
        ..policy(CleanupPolicy::Compact)
    };
    let mut table = Table::create(config(directory.path()), topic).await;
    table.append(300).await;
    table.push_out().await;
    table.until("compacted", |it| it.clean_offset >= 2_500).await;
    let gone = async {
        loop {
            let found = table.check(true).await;
            let old = found.range(..2_500).filter(|(_, (_, value))| value.is_none()).count();
            if old == 0 {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let found = tokio::time::timeout(2 * PATIENCE, gone).await.expect("tombstones go");
    assert!(!found.is_empty());
    soon(table.server.running.shutdown()).await;
}

/// A table that is always written to is compacted more often than its tombstones have to stay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tombstones_of_a_busy_table_go_after_their_retention() {
    let directory = tempfile::tempdir().unwrap();
    let config = ServerConfig { cleaner_lag: Duration::from_secs(1), ..config(directory.path()) };
    let topic = TopicConfig {
        tombstone_retention_time: Some(prost_types::Duration { seconds: 10, nanos: 0 }),
        ..policy(CleanupPolicy::Compact)
    };
    let mut table = Table::create(config, topic).await;
    let shard = table.server.running.node().shard(table.shard_id().await).unwrap();
    let deadline = tokio::time::Instant::now() + 4 * PATIENCE;
    loop {
        table.append(1).await;
        let state = shard.compacted_partitions()[0].state;
        if state.tombstones_below > 0 {
            break;
        }
        assert!(tokio::time::Instant::now() < deadline, "{state:?} {:?}", shard.status());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    table.check(true).await;
    drop(shard);
    soon(table.server.running.shutdown()).await;
}

/// Few records in a segment that never fills are compacted once they have waited long enough.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_of_an_idle_partition_are_compacted_within_the_lag() {
    let directory = tempfile::tempdir().unwrap();
    let config = ServerConfig { cleaner_lag: Duration::from_secs(1), ..config(directory.path()) };
    let mut table = Table::create(config, policy(CleanupPolicy::Compact)).await;
    table.append(30).await;
    table.until("all is compacted", |it| it.clean_offset == 300).await;
    let found = table.check(false).await;
    assert_eq!(found.len(), 30, "one record of each key");
    let shard = table.server.running.node().shard(table.shard_id().await).unwrap();
    let sizes = shard.table_sizes().await;
    assert_eq!((sizes.dirty_bytes, sizes.lag), (0, Duration::ZERO), "{sizes:?}");
    assert!(sizes.bytes > 0);
    drop(shard);
    table.append(1).await;
    table.until("the next records are compacted", |it| it.clean_offset == 310).await;
    assert_eq!(table.check(false).await.len(), 30);
    soon(table.server.running.shutdown()).await;
}

/// A long poll for more than one segment has does not wait at the gaps between them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_poll_does_not_wait_at_gaps() {
    const ROUNDS: u64 = 4;
    let directory = tempfile::tempdir().unwrap();
    let config = ServerConfig { cleaner_lag: Duration::from_secs(1), ..config(directory.path()) };
    let table = Table::create(config, policy(CleanupPolicy::Compact)).await;
    let producer = table.client.producer(ProducerOptions::default());
    let value = "v".repeat(10_000);
    // Each round has a segment of its own, which keeps its first record only.
    for round in 0..ROUNDS {
        for key in [&*format!("key-{round}"), "again"] {
            producer.append(TOPIC, 0, &[keyed(key, Some(&value))][..]).await.unwrap();
        }
        table.until("all is compacted", |it| it.clean_offset == 2 * round + 2).await;
    }
    let request = FetchRequest {
        partitions: Table::start(0),
        min_bytes: ROUNDS as u32 * 10_000,
        max_wait: Some(prost_types::Duration { seconds: 3_600, nanos: 0 }),
        ..FetchRequest::default()
    };
    let read = soon(table.server.fetch_one(request)).await;
    let offsets: Vec<u64> = read.records.iter().map(|stored| stored.offset).collect();
    assert_eq!(offsets[..ROUNDS as usize - 1], [0, 2, 4]);
    assert!(offsets.len() >= ROUNDS as usize, "{offsets:?}");
    soon(table.server.running.shutdown()).await;
}

/// Every read passes a gap at the end of a partition, and says so, so that its lag is 0.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gap_at_the_end_is_passed() {
    let directory = tempfile::tempdir().unwrap();
    let config = ServerConfig { cleaner_lag: Duration::from_secs(1), ..config(directory.path()) };
    let topic = TopicConfig {
        tombstone_retention_time: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
        ..policy(CleanupPolicy::Compact)
    };
    let table = Table::create(config, topic).await;
    let producer = table.client.producer(ProducerOptions::default());
    for record in [keyed("kept", Some("1")), keyed("gone", Some("2")), keyed("gone", None)] {
        producer.append(TOPIC, 0, &[record][..]).await.unwrap();
    }
    until_long("the tombstone is gone", async || {
        (table.read(0, false).await.0.len() == 1).then_some(())
    })
    .await;
    for until_offset in [None, Some(2)] {
        let mut partitions = Table::start(0);
        partitions[0].until_offset = until_offset;
        let request = SubscribeRequest { partitions, ..SubscribeRequest::default() };
        let mut stream = table.server.consume().subscribe(request).await.unwrap().into_inner();
        let mut next_offset = 0;
        while let Some(response) = soon(stream.message()).await.unwrap() {
            match response.message.unwrap() {
                Message::Data(data) => {
                    assert_eq!(data.start_offset, next_offset);
                    next_offset = data.next_offset;
                }
                Message::CaughtUp(_) => break,
                Message::Heartbeat(_) => {}
            }
        }
        assert_eq!(next_offset, until_offset.unwrap_or(3));
    }
    soon(table.server.running.shutdown()).await;
}

/// Sequences, dedup windows and expected offsets count positions, also those of removed records.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retries_and_conditions_hold_across_compaction() {
    const RETRIED: u64 = 4;
    let directory = tempfile::tempdir().unwrap();
    let config = ServerConfig { cleaner_lag: Duration::from_secs(1), ..config(directory.path()) };
    let mut table = Table::create(config.clone(), policy(CleanupPolicy::Compact)).await;
    let init = table.server.produce().init_producer(InitProducerRequest::default()).await;
    let producer = init.unwrap().into_inner().producer;
    let text = |number: u64| format!("value {number}");
    let send = async |table: &Table, number: u64, condition: AppendCondition| {
        let records = [keyed("counter", Some(&text(number)))];
        let request = AppendRequest {
            topic: TOPIC.to_owned(),
            batch: as_batch(batch::encode(&records)),
            producer,
            first_sequence: Some(number),
            condition: Some(condition),
            ..AppendRequest::default()
        };
        let appended = table.server.produce().append(request).await?;
        Ok::<_, tonic::Status>(appended.into_inner().ack.unwrap())
    };
    for number in 0..RETRIED {
        let ack = send(&table, number, expecting(number)).await.unwrap();
        assert_eq!((ack.first_offset, ack.duplicate), (Some(number), false));
        table.appended.insert(number, ("counter".to_owned(), Some(text(number))));
    }
    table.until("all is compacted", |it| it.clean_offset == RETRIED).await;
    for restarted in [false, true] {
        if restarted {
            table = table.restart(config.clone()).await;
        }
        let found = table.check(false).await;
        assert!((0..RETRIED - 1).all(|offset| !found.contains_key(&offset)), "{found:?}");
        for number in 0..RETRIED {
            let ack = send(&table, number, expecting(number)).await.unwrap();
            assert_eq!((ack.first_offset, ack.duplicate), (Some(number), true));
        }
        let next = table.appended.len() as u64;
        let status = send(&table, next, expecting(next - 1)).await.unwrap_err();
        assert_eq!(reason(&status), ErrorReason::ExpectedOffsetMismatch);
        let ack = send(&table, next, expecting(next)).await.unwrap();
        assert_eq!((ack.first_offset, ack.duplicate), (Some(next), false));
        table.appended.insert(next, ("counter".to_owned(), Some(text(next))));
    }
    table.check(false).await;
    soon(table.server.running.shutdown()).await;
}

/// Returns how far a node's replica has compacted the table, and whether it may have tombstones
/// below an offset.
async fn node_view(node: &TestServer, below: u64) -> (u64, bool, Appended) {
    let request = GetTopicRequest { name: TOPIC.to_owned() };
    let found = node.topics().get_topic(request).await.unwrap().into_inner().topic.unwrap();
    let clean_offset = found.partitions[0].clean_offset.unwrap_or(0);
    let (mut records, mut offset) = (Appended::new(), 0);
    loop {
        let request = FetchRequest {
            partitions: Table::start(offset),
            source: ReadSource::AnyReplica.into(),
            ..FetchRequest::default()
        };
        // A replica that is not clean enough refuses, and is asked again.
        let Ok(read) = node.consume().fetch(request).await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let read = read.into_inner().partitions.remove(0);
        for stored in read.records {
            let record = stored.record.unwrap();
            let text = |bytes: bytes::Bytes| String::from_utf8(bytes.to_vec()).unwrap();
            records.insert(stored.offset, (text(record.key.unwrap()), record.value.map(text)));
        }
        offset = read.next_offset;
        if offset >= read.watermarks.unwrap().high_watermark {
            let has_tombstones = records.range(..below).any(|(_, (_, value))| value.is_none());
            return (clean_offset, has_tombstones, records);
        }
    }
}

/// Expects that a reader of any replica sees the latest value of each key, unless it was deleted.
/// The replica was clean below `clean` when the read began.
///
/// A read that takes longer than the retention may have passed an old value that was not removed
/// yet, and then miss its tombstone.
fn expect_latest(appended: &Appended, found: &Appended, clean: u64) {
    let latest = |all: &Appended| -> BTreeMap<String, (u64, Option<String>)> {
        all.iter().map(|(at, (key, value))| (key.clone(), (*at, value.clone()))).collect()
    };
    let (expected, seen) = (latest(appended), latest(found));
    for (key, (at, value)) in &expected {
        if value.is_some() || *at < clean || found.contains_key(at) {
            let seen = seen.get(key).and_then(|(_, value)| value.clone());
            assert_eq!(seen, *value, "the latest value of {key}, at {at}; clean below {clean}");
        }
    }
    for (offset, record) in found {
        assert_eq!(appended.get(offset), Some(record), "a record never changes");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_absent_replica_keeps_tombstones_but_not_old_records() {
    let mut trio = Trio::start(TrioPlan::new().with_short_logs()).await;
    wait_compaction(trio.node(1)).await;
    let client = trio.client();
    let config = TopicConfig {
        tombstone_retention_time: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
        ..policy(CleanupPolicy::Compact)
    };
    let topic = NewTopic { config, ..NewTopic::new(TOPIC, 1) };
    let created = client.admin().create_topic(&topic).await.unwrap();
    let leader = created.partitions[0].leader.as_ref().map_or(0, |leader| leader.node_id);
    let away = NODES.into_iter().rev().find(|node| *node != leader).unwrap();
    let producer = client.producer(ProducerOptions::default());
    let mut appended = Appended::new();
    let mut append = async |from: u64, rounds: u64| {
        for round in from..from + rounds {
            // The first twenty keys are deleted and never written again.
            let is_early = round < 50;
            let number = if is_early { round % 20 } else { 100 + round * 7 % 40 };
            let key = format!("key-{number}");
            let is_deleted = if is_early { round >= 30 } else { round % 3 == 0 };
            let value = (!is_deleted).then(|| format!("{round}-{}", "v".repeat(50_000)));
            let records = [keyed(&key, value.as_deref())];
            let ack = producer.append(TOPIC, 0, &records[..]).await.unwrap();
            appended.insert(ack.first_offset.unwrap(), (key, value));
        }
        appended.clone()
    };
    append(0, 50).await;
    trio.stop(away).await;
    let all = append(50, 1_000).await;
    let until = async |trio: &Trio, all: &Appended, what: &str, nodes: &[u64], has: bool| {
        let reached = async {
            loop {
                let mut count = 0;
                for node in nodes {
                    let (clean, has_tombstones, found) = node_view(trio.node(*node), 200).await;
                    if found.last_key_value() < all.last_key_value() {
                        // It has not caught up yet.
                        continue;
                    }
                    expect_latest(all, &found, clean);
                    count += usize::from(clean >= 400 && has_tombstones == has);
                }
                if count == nodes.len() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        if tokio::time::timeout(3 * PATIENCE, reached).await.is_err() {
            let of_shard = |node: u64, shard: &helix_server::shard::Shard| {
                let tables = shard.compacted_partitions();
                let clean = tables.iter().map(|table| shard.cleanup(table.id)).collect::<Vec<_>>();
                (node, tables, clean, shard.cleanup_report(), shard.cleaner_stats())
            };
            let of_node = |node: &u64| {
                let shards = trio.node(*node).running.node().shards();
                shards.iter().map(|shard| of_shard(*node, shard)).collect::<Vec<_>>()
            };
            let state: Vec<_> =
                nodes.iter().flat_map(of_node).filter(|it| !it.1.is_empty()).collect();
            panic!("{what}, leader {leader}, away {away}: {state:#?}");
        }
    };
    let present: Vec<u64> = NODES.into_iter().filter(|node| *node != away).collect();
    until(&trio, &all, "the others compact", &present, true).await;
    // Longer than the retention, with rounds of the leader.
    let agreed_us = || {
        let shards = trio.node(leader).running.node().shards();
        shards.iter().filter_map(|shard| shard.agreed_time_us()).max()
    };
    let start_us = until_long("the time is known", async || agreed_us()).await;
    until_long("the retention has passed", async || {
        agreed_us().filter(|now_us| *now_us > start_us + 3_000_000)
    })
    .await;
    until(&trio, &all, "tombstones stay", &present, true).await;
    // Nothing is appended from here on: each replica seals what its rounds wait for.
    trio.start_nodes(&[away]).await;
    until(&trio, &all, "tombstones go everywhere", &NODES, false).await;
    drop((producer, client));
    trio.stop_all().await;
}

/// A new replica has no tombstones that others forgot, and no mark of what is clean. It compacts
/// what it has fetched, without new records, and serves everything then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_replica_serves_a_table_once_it_has_compacted_it() {
    let mut fleet = Fleet::with_short_logs(&[1, 2, 3]).await;
    let producer = create_on(&fleet).await;
    let mut appended = Appended::new();
    for round in 0..900 {
        let value = (round % 5 > 0).then(|| format!("{round}-{}", "v".repeat(50_000)));
        update(&producer, &mut appended, round * 7 % 40, value).await;
    }
    until_forgotten(&fleet, 200).await;
    fleet.grow(4).await;
    until_long("the new replica serves everything", async || {
        let node = fleet.node(4);
        (table_states(node).any(|state| state.cleaned >= 200) && blocked(node) == 0).then_some(())
    })
    .await;
    let (clean_offset, _, found) = node_view(fleet.node(4), 200).await;
    assert!(clean_offset >= 200);
    expect_latest(&appended, &found, clean_offset);
    drop(producer);
    fleet.stop_all().await;
}

/// The last records of the table were tombstones, so a new replica never gets its end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_replica_serves_a_table_whose_end_was_forgotten() {
    let mut fleet = Fleet::with_short_logs(&[1, 2, 3]).await;
    let producer = create_on(&fleet).await;
    let mut appended = Appended::new();
    for round in 0..400 {
        let value = format!("{round}-{}", "v".repeat(50_000));
        update(&producer, &mut appended, round % 40, Some(value)).await;
    }
    for key in 0..40 {
        update(&producer, &mut appended, key, None).await;
    }
    until_forgotten(&fleet, 440).await;
    fleet.grow(4).await;
    until_long("the new replica serves the empty table", async || {
        let node = fleet.node(4);
        (table_states(node).any(|state| state.cleaned >= 440) && blocked(node) == 0).then_some(())
    })
    .await;
    assert_eq!(node_view(fleet.node(4), 440).await, (440, false, Appended::new()));
    update(&producer, &mut appended, 7, Some("new".to_owned())).await;
    until_long("the new replica has the next record", async || {
        let (.., found) = node_view(fleet.node(4), 440).await;
        found.iter().eq(appended.range(440..)).then_some(())
    })
    .await;
    drop(producer);
    fleet.stop_all().await;
}

/// Creates the table on a cluster, with a short retention of tombstones.
async fn create_on(fleet: &Fleet) -> Producer {
    wait_compaction(fleet.node(1)).await;
    let client = fleet.client();
    let config = TopicConfig {
        tombstone_retention_time: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
        ..policy(CleanupPolicy::Compact)
    };
    let topic = NewTopic { config, ..NewTopic::new(TOPIC, 1) };
    client.admin().create_topic(&topic).await.unwrap();
    client.producer(ProducerOptions::default())
}

async fn update(producer: &Producer, appended: &mut Appended, key: u64, value: Option<String>) {
    let key = format!("key-{key}");
    let ack = producer.append(TOPIC, 0, &[keyed(&key, value.as_deref())][..]).await.unwrap();
    appended.insert(ack.first_offset.unwrap(), (key, value));
}

/// Waits until no replica has tombstones below an offset.
async fn until_forgotten(fleet: &Fleet, offset: u64) {
    until_long("tombstones are forgotten", async || {
        let is_done = |node: u64| {
            let node = fleet.node(node);
            let mut shards = node.running.node().shards().into_iter();
            table_states(node).any(|state| state.tombstones_below >= offset)
                && shards.all(|shard| shard.cleaner_stats().behind_partitions == 0)
        };
        fleet.ids().into_iter().all(is_done).then_some(())
    })
    .await;
}

fn table_states(node: &TestServer) -> impl Iterator<Item = CleanupState> {
    let shards = node.running.node().shards();
    let tables = shards.into_iter().flat_map(|shard| shard.compacted_partitions());
    tables.map(|table| table.state)
}

/// Counts the partitions that a node may not serve completely.
fn blocked(node: &TestServer) -> u64 {
    node.running.node().shards().iter().map(|shard| shard.blocked_partitions()).sum()
}
