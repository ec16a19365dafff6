//! A topic that is compacted by key: producers of updates and deletions, readers of all replicas,
//! and a model of the latest records.

mod repeater;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use helix_client::{Client, NewTopic, Producer, ProducerOptions};
use helix_proto::batch;
use helix_proto::compression::{BatchCodec, Compressor};
use helix_proto::kafka;
use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::topic_service_client::TopicServiceClient;
use helix_proto::log::v1::{
    BatchFormat, CleanupPolicy, EncodedBatch, FetchRequest, GetTopicRequest, Header,
    PartitionRecords, PartitionStart, ReadSource, Record, StartPosition, TopicConfig,
};
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tonic::transport::{Channel, Endpoint};

use crate::coverage::CoverageMark;
use crate::net::{CLIENT_PORT, channel};
use crate::plan::SimulationPlan;
use crate::workload::{ClientContext, RETRY_PAUSE, TOPIC_IS_THERE};
use repeater::TableRepeater;

/// Name of the compacted topic, which groups do not read.
pub const NAME: &str = "table";
const PARTITIONS: u32 = 2;
const KEYS: u8 = 24;
/// Keys that a writer updates at a time, and its records until it goes on to the next ones.
const TURN_KEYS: u8 = 8;
const TURN_RECORDS: u64 = 1_500;

/// Retention of tombstones. A read that takes more than half of it proves nothing.
const TOMBSTONE_RETENTION: Duration = Duration::from_secs(3);

/// Mean pause between two batches, and between two reads.
const WRITE_PAUSE: Duration = Duration::from_millis(20);
const READ_PAUSE: Duration = Duration::from_millis(400);
/// Pause between two batches at the end, when every replica has to serve everything.
const SLOW_WRITE_PAUSE: Duration = Duration::from_millis(500);

const RESPONSE_TIMEOUT: Duration = Duration::from_secs(3);

/// Time limit for each replica to serve everything, after all faults. It may have to compact first.
const SERVED_MAX: Duration = Duration::from_secs(70);

/// A record of the model. Each has a number of its own, in the order of sending.
#[derive(Debug, Clone, Copy)]
struct SentRecord {
    key: u8,
    is_tombstone: bool,
    /// Known once it is acknowledged.
    offset: Option<u64>,
}

/// Records sent to one partition, by number.
type SentRecords = BTreeMap<u64, SentRecord>;

/// Records that all producers have sent, by partition.
#[derive(Debug, Clone, Default)]
struct TableModel(Arc<Mutex<BTreeMap<u32, SentRecords>>>);

/// The latest acknowledged records of a partition when a read began: number and offset by key.
type LatestRecords = BTreeMap<u8, (u64, u64)>;

impl TableModel {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, SentRecords>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn on_sent(&self, partition: u32, number: u64, key: u8, is_tombstone: bool) {
        let sent = SentRecord { key, is_tombstone, offset: None };
        self.lock().entry(partition).or_default().insert(number, sent);
    }

    fn on_acked(&self, partition: u32, number: u64, offset: u64) {
        if let Some(sent) = self.lock().entry(partition).or_default().get_mut(&number) {
            sent.offset = Some(offset);
        }
    }

    fn latest(&self, partition: u32) -> LatestRecords {
        let mut latest = LatestRecords::new();
        for (number, sent) in self.lock().entry(partition).or_default().iter() {
            let Some(offset) = sent.offset else { continue };
            let last = latest.entry(sent.key).or_insert((*number, offset));
            if offset >= last.1 {
                *last = (*number, offset);
            }
        }
        latest
    }

    /// Checks a record that a reader has seen, and returns its key.
    fn check_record(&self, partition: u32, offset: u64, record: &Record) -> Result<u8, String> {
        let number = record.headers.first().and_then(|header| header.value.first_chunk());
        let number = number.map(|bytes| u64::from_le_bytes(*bytes));
        let model = self.lock();
        let sent = number.and_then(|number| model.get(&partition)?.get(&number));
        let Some(sent) = sent else {
            return Err(format!("offset {offset} has a record that was never sent: {record:?}"));
        };
        let is_same = record.key.as_deref() == Some(&key_bytes(sent.key)[..])
            && record.value.is_none() == sent.is_tombstone
            && sent.offset.is_none_or(|acked| acked == offset);
        match is_same {
            true => Ok(sent.key),
            false => Err(format!("offset {offset} has {record:?}, but {sent:?} was sent")),
        }
    }

    /// Returns whether a tombstone of a key was sent that may follow a record.
    fn may_be_deleted(&self, partition: u32, key: u8, since: (u64, u64)) -> bool {
        let model = self.lock();
        let (number, offset) = since;
        let follows = |(at, sent): (&u64, &SentRecord)| {
            let is_later = sent.offset.is_none_or(|acked| acked >= offset);
            sent.key == key && sent.is_tombstone && (*at == number || is_later)
        };
        model.get(&partition).is_some_and(|sent| sent.iter().any(follows))
    }

    /// Checks what a whole read of a partition has found: the greatest offset of each key.
    fn check_read(
        &self,
        partition: u32,
        before: &LatestRecords,
        found: &BTreeMap<u8, u64>,
    ) -> Result<Vec<u8>, String> {
        let mut forgotten = Vec::new();
        for (key, (number, offset)) in before {
            match found.get(key) {
                Some(seen) if seen >= offset => {}
                Some(seen) => {
                    return Err(format!(
                        "key {key} has offset {offset}, but a reader ended with its record {seen}"
                    ));
                }
                None if self.may_be_deleted(partition, *key, (*number, *offset)) => {
                    forgotten.push(*key);
                }
                None => return Err(format!("the latest record of key {key}, {offset}, is lost")),
            }
        }
        Ok(forgotten)
    }
}

fn key_bytes(key: u8) -> Vec<u8> {
    vec![b'a' + key % 26; 1 + usize::from(key)]
}

/// Runs all clients of the table.
pub async fn run(context: ClientContext) -> turmoil::Result {
    context.wait_for_phase(TOPIC_IS_THERE).await;
    let model = TableModel::default();
    let client = context.client()?;
    let config = TopicConfig {
        cleanup: CleanupPolicy::Compact.into(),
        tombstone_retention_time: Some(prost_types::Duration {
            seconds: TOMBSTONE_RETENTION.as_secs().cast_signed(),
            nanos: 0,
        }),
        batch_format: BatchFormat::Any.into(),
        ..TopicConfig::default()
    };
    let topic = NewTopic { config, ..NewTopic::new(NAME, PARTITIONS) };
    // Refused until the cluster uses the protocol version that knows the setting.
    while client.admin().create_topic(&topic).await.is_err() {
        if context.is_stopped() {
            context.on_end();
            return Ok(());
        }
        sleep(RETRY_PAUSE).await;
    }
    let mut tasks: JoinSet<Result<(), String>> = JoinSet::new();
    for _ in 0..2 {
        tasks.spawn(TableWriter::new(&context, &model)?.run());
    }
    for _ in 0..2 {
        tasks.spawn(TableReader::new(&context, &model)?.run());
    }
    tasks.spawn(TableRepeater::new(&context, &model)?.run());
    while let Some(task) = tasks.join_next().await {
        task??;
    }
    let writer = TableWriter::new(&context, &model)?;
    tokio::select! {
        biased;
        read = TableReader::new(&context, &model)?.read_every_replica() => read?,
        () = writer.write_slowly() => {}
    }
    context.on_end();
    Ok(())
}

struct TableWriter {
    context: ClientContext,
    model: TableModel,
    client: Client,
    id: u32,
    next: u64,
    rng: StdRng,
}

impl TableWriter {
    fn new(context: &ClientContext, model: &TableModel) -> turmoil::Result<Self> {
        let id = context.id();
        let (client, rng) = (context.client()?, context.rng(id));
        Ok(Self { context: context.clone(), model: model.clone(), client, id, next: 0, rng })
    }

    async fn run(mut self) -> Result<(), String> {
        let producer = self.client.producer(ProducerOptions::default());
        while self.context.pause(WRITE_PAUSE, &mut self.rng).await {
            self.append(&producer).await;
        }
        Ok(())
    }

    /// Writes until it is dropped, so that the tables are compacted again and again.
    async fn write_slowly(mut self) {
        let producer = self.client.producer(ProducerOptions::default());
        loop {
            self.append(&producer).await;
            sleep(SLOW_WRITE_PAUSE).await;
        }
    }

    async fn append(&mut self, producer: &Producer) {
        let partition = self.rng.random_range(0..PARTITIONS);
        let mut numbers = Vec::new();
        let mut records = Vec::new();
        for _ in 0..self.rng.random_range(1..=6) {
            let number = u64::from(self.id) << 32 | self.next;
            self.next += 1;
            // Keys that rest keep their tombstones until those are forgotten.
            let turn = (self.next / TURN_RECORDS % u64::from(KEYS / TURN_KEYS)) as u8;
            let key = turn * TURN_KEYS + self.rng.random_range(0..TURN_KEYS);
            let is_tombstone = self.rng.random_bool(0.3);
            self.model.on_sent(partition, number, key, is_tombstone);
            numbers.push(number);
            let length = self.rng.random_range(1..2_000);
            records.push(Record {
                key: Some(key_bytes(key).into()),
                value: (!is_tombstone).then(|| Bytes::from(vec![b'v'; length])),
                headers: vec![Header {
                    name: "number".to_owned(),
                    value: number.to_le_bytes().to_vec().into(),
                }],
                ..Record::default()
            });
        }
        let codec = [None, Some(BatchCodec::Lz4), Some(BatchCodec::Zstd)].choose(&mut self.rng);
        let batch = match self.rng.random_bool(0.5) {
            true => kafka_batch(&records, codec.copied().flatten()),
            false => batch::encode(&records),
        };
        match producer.append(NAME, partition, &batch).await {
            Ok(ack) => {
                let first = ack.first_offset.unwrap_or_default();
                for (offset, number) in (first..).zip(numbers) {
                    self.model.on_acked(partition, number, offset);
                }
            }
            Err(error) => self.context.recorder.note(&format!("an update failed: {error}")),
        }
    }
}

struct TableReader {
    context: ClientContext,
    model: TableModel,
    nodes: BTreeMap<u64, Channel>,
    rng: StdRng,
}

impl TableReader {
    fn new(context: &ClientContext, model: &TableModel) -> turmoil::Result<Self> {
        let rng = context.rng(context.id());
        let mut nodes = BTreeMap::new();
        for node in 1..=context.plan.machines() {
            let host = SimulationPlan::host(node);
            let endpoint = Endpoint::from_shared(format!("http://{host}:{CLIENT_PORT}"))?;
            nodes.insert(node, channel(&endpoint));
        }
        Ok(Self { context: context.clone(), model: model.clone(), nodes, rng })
    }

    /// Reads whole partitions, each response from a random replica.
    async fn run(mut self) -> Result<(), String> {
        while self.context.pause(READ_PAUSE, &mut self.rng).await {
            let partition = self.rng.random_range(0..PARTITIONS);
            self.read(partition, None).await?;
        }
        Ok(())
    }

    /// Reads everything from each replica, which all serve everything in the end.
    async fn read_every_replica(mut self) -> Result<(), String> {
        let start = Instant::now();
        for node in self.context.members.all() {
            for partition in 0..PARTITIONS {
                while !self.read(partition, Some(node)).await? {
                    if start.elapsed() > SERVED_MAX {
                        return Err(format!("node {node} does not serve table {partition}"));
                    }
                    sleep(RETRY_PAUSE).await;
                }
            }
        }
        Ok(())
    }

    /// Reads a partition from its start up to everything that was acknowledged before. Returns
    /// false if it could not. A given node must have one record of a key where it says it is clean.
    async fn read(&mut self, partition: u32, node: Option<u64>) -> Result<bool, String> {
        let start = Instant::now();
        let clean_offset = match node {
            None => 0,
            Some(node) => match self.clean_offset(node, partition).await {
                Some(offset) => offset,
                None => return Ok(false),
            },
        };
        let before = self.model.latest(partition);
        let end = before.values().map(|(_, offset)| offset + 1).max().unwrap_or(0);
        let (mut offset, mut records, mut found) = (0, 0, BTreeMap::new());
        while offset < end {
            let node = match node {
                Some(node) => node,
                None => self.context.random_member(&mut self.rng) as u64 + 1,
            };
            let Some(read) = self.fetch(node, partition, offset).await else {
                return Ok(false);
            };
            let (seen, next_offset) = decode(read)?;
            if next_offset <= offset {
                // The replica is behind.
                return Ok(false);
            }
            for (at, record) in seen.into_iter().filter(|(at, _)| *at >= offset) {
                let key = self.model.check_record(partition, at, &record)?;
                let last = found.insert(key, at);
                if at >= next_offset || last.is_some_and(|last| last >= at) {
                    return Err(format!("offset {at} does not follow in a read at {offset}"));
                }
                // Batches are not compressed, so each gets smaller without its replaced records.
                if let Some(last) = last.filter(|_| at < clean_offset) {
                    // A replica that is rebuilt meanwhile is no longer clean.
                    if self.clean_offset(node, partition).await < Some(clean_offset) {
                        return Ok(false);
                    }
                    return Err(format!(
                        "node {node} says that table {partition} is clean below {clean_offset}, \
                         but has records {last} and {at} of key {key}"
                    ));
                }
                records += 1;
            }
            offset = next_offset;
        }
        if start.elapsed() >= TOMBSTONE_RETENTION / 2 {
            return Ok(false);
        }
        let forgotten = self.model.check_read(partition, &before, &found);
        let forgotten = forgotten.map_err(|what| format!("table {partition}: {what}"))?;
        if records < offset {
            self.context.marks.hit(CoverageMark::TableCompacted);
        }
        if !forgotten.is_empty() {
            self.context.marks.hit(CoverageMark::TombstoneForgotten);
        }
        Ok(true)
    }

    async fn fetch(&mut self, node: u64, partition: u32, offset: u64) -> Option<PartitionRecords> {
        let position = Some(Position::Offset(offset));
        let start = PartitionStart {
            topic: NAME.to_owned(),
            partition,
            start: Some(StartPosition { position, ..StartPosition::default() }),
            ..PartitionStart::default()
        };
        let request = FetchRequest {
            partitions: vec![start],
            source: ReadSource::AnyReplica.into(),
            accept_encoded: self.rng.random_bool(0.5),
            accept_kafka_batches: self.rng.random_bool(0.5),
            ..FetchRequest::default()
        };
        let client = ConsumeServiceClient::new(self.nodes.get(&node)?.clone());
        let mut client = client.max_decoding_message_size(16 << 20);
        let response = timeout(RESPONSE_TIMEOUT, client.fetch(request)).await.ok()?.ok()?;
        response.into_inner().partitions.pop()
    }

    /// Asks a node below which offset it has only the latest record of each key.
    async fn clean_offset(&self, node: u64, partition: u32) -> Option<u64> {
        let mut client = TopicServiceClient::new(self.nodes.get(&node)?.clone());
        let request = GetTopicRequest { name: NAME.to_owned() };
        let response = timeout(RESPONSE_TIMEOUT, client.get_topic(request)).await.ok()?.ok()?;
        let described = response.into_inner().topic?.partitions;
        described.get(partition as usize).map(|it| it.clean_offset.unwrap_or(0))
    }
}

/// Returns a batch of version 2.
fn kafka_batch(records: &[Record], codec: Option<BatchCodec>) -> EncodedBatch {
    let mut compressor = Compressor::default();
    let built = kafka::from_records(records, codec.map(|codec| (codec, &mut compressor)));
    built.expect("records without event times")
}

/// Returns the records of a response with their offsets, and where the next one begins.
fn decode(read: PartitionRecords) -> Result<(Vec<(u64, Record)>, u64), String> {
    let mut records: Vec<(u64, Record)> = Vec::new();
    for stored in read.records {
        records.push((stored.offset, stored.record.unwrap_or_default()));
    }
    for stored in read.batches {
        let encoded = stored.batch.unwrap_or_default();
        let decoded = batch::decode(&encoded).map_err(|error| error.to_string())?.records;
        let deltas: Vec<u64> = match stored.offset_deltas.as_slice() {
            [] => (0..decoded.len() as u64).collect(),
            deltas => deltas.iter().map(|delta| u64::from(*delta)).collect(),
        };
        if deltas.len() != decoded.len() {
            return Err(format!("{} offsets of {} records", deltas.len(), decoded.len()));
        }
        let offsets = deltas.into_iter().map(|delta| stored.first_offset + delta);
        records.extend(offsets.zip(decoded));
    }
    Ok((records, read.next_offset))
}
