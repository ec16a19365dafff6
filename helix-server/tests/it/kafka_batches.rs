//! Batches of version 2: stored and served as they came, converted for other readers, refused where
//! they lie or the topic does not take them.

use bytes::Bytes;
use helix_client::{Client, Compression as ClientCompression, NewTopic, Position, ReadStart};
use helix_client::{FetchOptions, ProducerOptions, SessionOptions};
use helix_proto::batch::{self, BATCH_VERSION};
use helix_proto::compression::{BatchCodec, Compressor};
use helix_proto::kafka::{self, KAFKA_BATCH_VERSION, KafkaBatch, KafkaCodec};
use helix_proto::log::v1::subscribe_response::Message;
use helix_proto::log::v1::{
    AppendAck, AppendRequest, BatchFormat, EncodedBatch, ErrorReason, FetchRequest, Header,
    InitProducerRequest, PartitionStart, ProducerIdentity, ReadLimits, Record, RecordList,
    StoredBatch, SubscribeRequest, TopicConfig,
};
use tonic::Status;

use crate::process::patient_client;
use crate::support::{TestServer, as_batch, from_offset, on_both, plain, reason, soon, values};

const TOPIC: &str = "orders";

fn records_of(number: usize, value_bytes: usize) -> Vec<Record> {
    let record = |index: usize| Record {
        key: (index != 1).then(|| Bytes::from(format!("key-{number}"))),
        value: (index != 2).then(|| vec![b'a' + number as u8; value_bytes].into()),
        headers: vec![
            Header { name: "größe".to_owned(), value: Bytes::from_static(b"\0\xFF") };
            index
        ],
        event_time: (index != 3).then(|| kafka::millisecond_time(1_764_288_000_123 + index as i64)),
    };
    (0..4).map(record).collect()
}

fn encode(records: &[Record], codec: Option<BatchCodec>) -> EncodedBatch {
    let mut compressor = Compressor::default();
    kafka::from_records(records, codec.map(|codec| (codec, &mut compressor))).unwrap()
}

/// Creates the topic, and returns a client.
async fn create(server: &TestServer, format: BatchFormat) -> Client {
    let client = patient_client(server.running.local_addr(), 7);
    let config = TopicConfig { batch_format: format.into(), ..TopicConfig::default() };
    let topic = NewTopic { config, ..NewTopic::new(TOPIC, 1) };
    client.admin().create_topic(&topic).await.unwrap();
    client
}

async fn append(server: &TestServer, batch: EncodedBatch) -> Result<AppendAck, Status> {
    let batch = as_batch(batch);
    let request = AppendRequest { topic: TOPIC.to_owned(), batch, ..AppendRequest::default() };
    Ok(server.produce().append(request).await?.into_inner().ack.unwrap())
}

fn starts(offset: u64) -> Vec<PartitionStart> {
    vec![PartitionStart { topic: TOPIC.to_owned(), ..from_offset(0, offset) }]
}

fn fetch(offset: u64, accept_encoded: bool, accept_kafka_batches: bool) -> FetchRequest {
    FetchRequest {
        partitions: starts(offset),
        limits: Some(ReadLimits { max_bytes: Some(8 << 20), ..ReadLimits::default() }),
        accept_encoded,
        accept_kafka_batches,
        ..FetchRequest::default()
    }
}

fn batch_of(stored: &StoredBatch) -> &EncodedBatch {
    stored.batch.as_ref().unwrap()
}

#[tokio::test]
async fn readers_get_the_bytes_that_came_or_the_same_records() {
    on_both(async |server: TestServer| {
        create(&server, BatchFormat::Kafka).await;
        let (mut sent, mut all) = (Vec::new(), Vec::new());
        for (number, bytes) in [(0, 20), (1, 200_000)] {
            for codec in [None, Some(BatchCodec::Lz4), Some(BatchCodec::Zstd)] {
                let records = records_of(number, bytes);
                let batch = encode(&records, codec);
                let ack = append(&server, batch.clone()).await.unwrap();
                assert_eq!(ack.next_offset, Some(all.len() as u64 + 4));
                sent.push(batch);
                all.extend(records);
            }
        }
        let read = server.fetch_one(fetch(0, true, true)).await;
        assert_eq!(read.next_offset, all.len() as u64);
        assert_eq!(read.batches.len(), sent.len());
        for (number, (stored, sent)) in (0..).zip(read.batches.iter().zip(&sent)) {
            let found = batch_of(stored);
            assert_eq!((stored.first_offset, found.version), (number * 4, KAFKA_BATCH_VERSION));
            assert_eq!((&found.payload, found.crc32), (&sent.payload, sent.crc32), "as it came");
            assert!(stored.offset_deltas.is_empty());
            let plain = RecordList { records: kafka::decode(sent).unwrap().records };
            assert_eq!(found.uncompressed_bytes as usize, prost::Message::encoded_len(&plain));
        }
        let converted = server.fetch_one(fetch(0, true, false)).await;
        assert_eq!(converted.batches.len(), sent.len());
        let mut found = Vec::new();
        for stored in &converted.batches {
            let batch = batch_of(stored);
            assert_eq!((batch.version, batch.compression), (BATCH_VERSION, 1));
            assert_eq!(batch.uncompressed_bytes as usize, batch.payload.len());
            found.extend(batch::decode(batch).unwrap().records);
        }
        assert_eq!(found, all);
        let read = server.fetch_one(fetch(0, false, false)).await.records;
        assert!(read.iter().map(|it| it.record.as_ref().unwrap()).eq(&all));
        let within = server.fetch_one(fetch(6, false, true)).await.records;
        assert_eq!((within[0].offset, within.len()), (6, all.len() - 6));

        let request = SubscribeRequest {
            partitions: starts(5),
            accept_encoded: true,
            accept_kafka_batches: true,
            ..SubscribeRequest::default()
        };
        let mut stream = server.consume().subscribe(request).await.unwrap().into_inner();
        let mut payloads = Vec::new();
        while payloads.len() < sent.len() - 1 {
            if let Some(Message::Data(data)) =
                soon(stream.message()).await.unwrap().unwrap().message
            {
                payloads.extend(data.batches.iter().map(|it| batch_of(it).payload.clone()));
            }
        }
        assert!(payloads.iter().eq(sent[1..].iter().map(|batch| &batch.payload)));
    })
    .await;
}

#[tokio::test]
async fn topics_take_the_versions_of_their_setting() {
    for (format, takes_helix, takes_kafka) in [
        (BatchFormat::Helix, true, false),
        (BatchFormat::Kafka, false, true),
        (BatchFormat::Any, true, true),
    ] {
        let server = TestServer::in_memory().await;
        create(&server, format).await;
        let list = records_of(0, 5);
        for (batch, is_taken) in
            [(batch::encode(&list), takes_helix), (encode(&list, None), takes_kafka)]
        {
            match append(&server, batch).await {
                Ok(_) => assert!(is_taken, "{format:?}"),
                Err(status) => {
                    assert!(!is_taken, "{status:?}");
                    assert_eq!(reason(&status), ErrorReason::InvalidArgument);
                    assert!(status.message().contains("batch_format"), "{status:?}");
                }
            }
        }
        // Plain records become what the topic takes.
        let request = AppendRequest {
            topic: TOPIC.to_owned(),
            batch: plain(&["plain"]),
            ..AppendRequest::default()
        };
        server.produce().append(request).await.unwrap();
        let read = server.fetch_one(fetch(0, true, true)).await;
        let expected = if takes_helix { BATCH_VERSION } else { KAFKA_BATCH_VERSION };
        assert_eq!(batch_of(read.batches.last().unwrap()).version, expected);
        let read = server.fetch_one(fetch(0, false, false)).await.records;
        assert_eq!(values(&read[read.len() - 1..]), ["plain"]);
    }
}

#[tokio::test]
async fn lies_are_refused() {
    let server = TestServer::in_memory().await;
    create(&server, BatchFormat::Any).await;
    let good = encode(&records_of(0, 100), None);
    let resealed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = good.payload.to_vec();
        change(&mut bytes);
        let crc = kafka::crc(&bytes).to_be_bytes();
        bytes[17..21].copy_from_slice(&crc);
        batch::from_kafka(4, bytes.into())
    };
    let transactional = resealed(&|bytes| bytes[22] |= 0x10);
    let damaged_record = resealed(&|bytes| bytes[61] ^= 0x40);
    let not_lz4 = resealed(&|bytes| bytes[22] |= 3);
    let miscounted = batch::from_kafka(3, good.payload.clone());
    let gzip = resealed(&|bytes| bytes[22] |= 1);
    let mut flipped = good.payload.to_vec();
    flipped[100] ^= 1;
    let flipped = batch::from_kafka(4, flipped.into());
    let corrupt = ErrorReason::CorruptBatch;
    for (batch, expected) in [
        (transactional, corrupt),
        (damaged_record, corrupt),
        (not_lz4, corrupt),
        (flipped, corrupt),
        (miscounted, ErrorReason::RecordCountMismatch),
        (gzip, ErrorReason::UnsupportedCompression),
    ] {
        let status = append(&server, batch).await.unwrap_err();
        assert_eq!(reason(&status), expected, "{status:?}");
    }
    // The batch in the log is readable, and begins at offset 0.
    assert_eq!(append(&server, good).await.unwrap().first_offset, Some(0));
}

#[tokio::test]
async fn a_retry_makes_no_second_copy() {
    let server = TestServer::in_memory().await;
    create(&server, BatchFormat::Kafka).await;
    let id = server.produce().init_producer(InitProducerRequest::default()).await.unwrap();
    let producer = Some(ProducerIdentity { ..id.into_inner().producer.unwrap() });
    let append = async |batch: EncodedBatch, first_sequence| {
        let request = AppendRequest {
            topic: TOPIC.to_owned(),
            batch: as_batch(batch),
            producer,
            first_sequence: Some(first_sequence),
            ..AppendRequest::default()
        };
        Ok::<_, Status>(server.produce().append(request).await?.into_inner().ack.unwrap())
    };
    let batches = [encode(&records_of(0, 9), None), encode(&records_of(1, 9), None)];
    for _ in 0..2 {
        for (sequence, batch) in [0, 4].into_iter().zip(&batches) {
            let ack = append(batch.clone(), sequence).await.unwrap();
            assert_eq!(ack.first_offset, Some(sequence));
        }
    }
    assert_eq!(server.fetch_one(fetch(0, true, true)).await.batches.len(), 2);
}

/// Appends with the client in each way, and reads all of it with the client.
#[tokio::test]
async fn native_clients_write_the_topics_version_and_read_both() {
    for format in [BatchFormat::Helix, BatchFormat::Kafka, BatchFormat::Any] {
        let server = TestServer::in_memory().await;
        let client = create(&server, format).await;
        let mut all = Vec::new();
        for compression in
            [ClientCompression::None, ClientCompression::Lz4, ClientCompression::Zstd]
        {
            let options = ProducerOptions { compression, ..ProducerOptions::default() };
            let producer = client.producer(options);
            let records = records_of(all.len() % 20, 300);
            producer.append(TOPIC, 0, &records).await.unwrap();
            all.extend(records);
            let records = records_of(all.len() % 20, 300);
            let mut sent = Vec::new();
            for record in &records {
                sent.push(producer.send(TOPIC, record.clone()).await.unwrap());
            }
            for sent in sent {
                soon(sent).await.unwrap();
            }
            all.extend(records);
            let options = SessionOptions { compression, ..SessionOptions::default() };
            let session = client.session(TOPIC, 0, options).await.unwrap();
            let records = records_of(all.len() % 20, 300);
            soon(session.append(&records).await.unwrap()).await.unwrap();
            session.close().await.unwrap();
            all.extend(records);
            // Batches that were built elsewhere, of both versions.
            for batch in [encode(&records_of(5, 9), None), batch::encode(&records_of(6, 9))] {
                producer.append(TOPIC, 0, &batch).await.unwrap();
                all.extend(batch::decode(&batch).unwrap().records);
            }
        }
        let stored = server.fetch_one(fetch(0, true, true)).await.batches;
        let versions: Vec<u32> = stored.iter().map(|it| batch_of(it).version).collect();
        match format {
            BatchFormat::Helix => assert!(versions.iter().all(|it| *it == BATCH_VERSION)),
            BatchFormat::Kafka => {
                assert!(versions.iter().all(|it| *it == KAFKA_BATCH_VERSION));
                let codec =
                    |it: &StoredBatch| KafkaBatch::parse(&batch_of(it).payload).unwrap().codec();
                assert!(stored.iter().any(|it| codec(it) == KafkaCodec::Lz4));
                assert!(stored.iter().any(|it| codec(it) == KafkaCodec::Zstd));
            }
            _ => assert_eq!(versions.iter().filter(|it| **it == KAFKA_BATCH_VERSION).count(), 3),
        }
        let start = ReadStart::new(TOPIC, 0, Position::Offset(0));
        let fetched = client.consumer().fetch(&[start], &FetchOptions::default()).await.unwrap();
        let found = fetched.into_iter().flat_map(|it| it.records);
        let found: Vec<_> = found.map(|it| (it.offset, it.key, it.value, it.headers)).collect();
        let expected: Vec<_> =
            (0..).zip(all).map(|(at, it)| (at, it.key, it.value, it.headers)).collect();
        assert_eq!(found, expected);
    }
}
