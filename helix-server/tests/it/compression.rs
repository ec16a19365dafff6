//! Compressed batches: stored and served as sent, decompressed for readers that cannot, and refused
//! where they lie or the topic does not allow their codec.

use bytes::Bytes;
use helix_client::{Compression as ClientCompression, ProducerOptions, SessionOptions};
use helix_proto::batch;
use helix_proto::compression::{BatchCodec, Compressor};
use helix_proto::log::v1::append_stream_request::Message as Sent;
use helix_proto::log::v1::subscribe_response::Message;
use helix_proto::log::v1::{
    AllowedCompression, AppendRequest, AppendStreamBatch, AppendStreamInit, Compression,
    CreateTopicRequest, EncodedBatch, ErrorReason, FetchRequest, ReadLimits, Record, StoredBatch,
    SubscribeRequest, TopicConfig, UpdateTopicRequest,
};
use helix_server::protocol::COMPRESSION;
use prost_types::FieldMask;
use tonic::Status;

use crate::append_stream::AppendSession;
use crate::support::{
    PATIENCE, TestServer, as_batch, detail, earliest, from_offset, on_both, reason, record,
    records, soon, values,
};
use crate::trio::{Trio, expect_equal_replicas, from_any, replica_batches, until};

/// Returns a value of this size that shrinks well, and differs by its number.
fn text(number: usize, bytes: usize) -> String {
    let line = format!("{number} 2026-11-26 GET /orders/{number} 200 in 3 ms; ");
    line.chars().cycle().take(bytes).collect()
}

fn compressed(codec: BatchCodec, values: &[String]) -> EncodedBatch {
    let records: Vec<Record> = values.iter().map(|value| record(value)).collect();
    let plain = batch::encode(&records);
    Compressor::default().compress(codec, &plain, usize::MAX).expect("it shrinks")
}

async fn wait_allowed(server: &TestServer) {
    let cluster = server.running.node().cluster();
    assert!(cluster.wait_protocol(COMPRESSION, PATIENCE).await);
}

async fn append(server: &TestServer, batch: EncodedBatch) -> Result<u64, Status> {
    append_to(server, "default", batch).await
}

async fn append_to(server: &TestServer, topic: &str, batch: EncodedBatch) -> Result<u64, Status> {
    let topic = topic.to_owned();
    let request = AppendRequest { topic, batch: as_batch(batch), ..AppendRequest::default() };
    let ack = server.produce().append(request).await?.into_inner().ack.unwrap();
    Ok(ack.next_offset.unwrap())
}

fn encoded_fetch(offset: u64, accept: &[Compression]) -> FetchRequest {
    FetchRequest {
        partitions: vec![from_offset(0, offset)],
        accept_encoded: true,
        accept_compression: accept.iter().map(|codec| (*codec).into()).collect(),
        ..FetchRequest::default()
    }
}

fn batches(stored: Vec<StoredBatch>) -> Vec<EncodedBatch> {
    stored.into_iter().map(|stored| stored.batch.unwrap()).collect()
}

/// Appends one batch of each codec, small and large. Returns the batches and all values.
async fn append_some(server: &TestServer) -> (Vec<EncodedBatch>, Vec<String>) {
    wait_allowed(server).await;
    let (mut sent, mut all) = (Vec::new(), Vec::new());
    for (number, bytes) in [(0, 100), (1, 200_000)] {
        for codec in BatchCodec::ALL {
            let values: Vec<_> = (0..3).map(|index| text(number * 10 + index, bytes)).collect();
            let batch = compressed(codec, &values);
            append(server, batch.clone()).await.unwrap();
            sent.push(batch);
            all.extend(values);
        }
    }
    (sent, all)
}

#[tokio::test]
async fn readers_get_stored_bytes_if_they_know_the_codec_and_records_in_any_case() {
    on_both(async |server: TestServer| {
        let (sent, all) = append_some(&server).await;
        let both = [Compression::Lz4, Compression::Zstd];
        let limits = ReadLimits { max_bytes: Some(8 << 20), ..ReadLimits::default() };
        let read = async |accept: &[Compression]| {
            let request = FetchRequest { limits: Some(limits), ..encoded_fetch(0, accept) };
            let read = server.fetch_one(request).await;
            assert_eq!(read.next_offset, all.len() as u64);
            batches(read.batches)
        };
        assert_eq!(read(&both).await, sent, "byte for byte, with the producer's checksum");
        for (accept, kept) in [(&[][..], None), (&both[..1], Some(Compression::Lz4))] {
            let read = read(accept).await;
            assert_eq!(read.len(), sent.len());
            for (read, sent) in read.iter().zip(&sent) {
                if Some(sent.compression()) == kept {
                    assert_eq!(read, sent);
                    continue;
                }
                assert_eq!(read.compression(), Compression::None);
                assert_eq!(read.uncompressed_bytes as usize, read.payload.len());
                assert_eq!(batch::decode(read).unwrap(), batch::decode(sent).unwrap());
            }
        }
        let plain = FetchRequest {
            partitions: vec![earliest(0)],
            limits: Some(limits),
            ..FetchRequest::default()
        };
        assert_eq!(values(&server.fetch_one(plain).await.records), all);
        assert_eq!(values(&server.records(0, 4).await[..1]), all[4..5], "from within a batch");
    })
    .await;
}

#[tokio::test]
async fn subscriptions_get_the_same_forms() {
    let server = TestServer::durable().await;
    let (sent, all) = append_some(&server).await;
    for (accept_encoded, accept) in [(false, &[][..]), (true, &[]), (true, &[2, 3])] {
        let request = SubscribeRequest {
            partitions: vec![earliest(0)],
            accept_encoded,
            accept_compression: accept.to_vec(),
            ..SubscribeRequest::default()
        };
        let mut stream = server.consume().subscribe(request).await.unwrap().into_inner();
        let (mut found, mut stored) = (Vec::new(), Vec::new());
        while found.len() < all.len() {
            let message = soon(stream.message()).await.unwrap().unwrap().message;
            let Some(Message::Data(data)) = message else { continue };
            found.extend(values(&data.records));
            for batch in batches(data.batches) {
                let list = batch::decode(&batch).unwrap();
                let value = |record: &Record| record.value.clone().unwrap().to_vec();
                let texts = list.records.iter().map(|it| String::from_utf8(value(it)).unwrap());
                found.extend(texts);
                stored.push(batch);
            }
        }
        assert_eq!(found, all);
        if !accept.is_empty() {
            assert_eq!(stored, sent);
        }
    }
}

#[tokio::test]
async fn streams_keep_the_order_of_small_and_large_batches() {
    let server = TestServer::durable().await;
    wait_allowed(&server).await;
    let init = AppendStreamInit { topic: "default".to_owned(), ..AppendStreamInit::default() };
    let (session, _) = AppendSession::open(&server, init).await;
    let mut all = Vec::new();
    for (number, bytes) in [100, 300_000, 100, 200_000, 100].into_iter().enumerate() {
        let value = text(number, bytes);
        let codec = BatchCodec::ALL[number % 2];
        let batch = if bytes == 100 && number > 2 {
            batch::encode(&[record(&value)])
        } else {
            compressed(codec, std::slice::from_ref(&value))
        };
        let batch = AppendStreamBatch { batch: as_batch(batch), ..AppendStreamBatch::default() };
        session.send(Sent::Batch(batch)).await;
        all.push(value);
    }
    let (acks, end) = session.finish().await;
    assert!(end.is_ok());
    let offsets: Vec<_> = acks.iter().map(|ack| ack.first_offset.unwrap()).collect();
    assert_eq!(offsets, [0, 1, 2, 3, 4]);
    assert_eq!(values(&server.records(0, 0).await), all);
}

#[tokio::test]
async fn lies_and_bombs_are_rejected_with_their_reason() {
    let server = TestServer::in_memory().await;
    wait_allowed(&server).await;
    let rebuilt = |batch: EncodedBatch| EncodedBatch {
        crc32: batch::crc(batch.version, batch.record_count, batch.compression, &batch.payload),
        ..batch
    };
    // Small and large: on the async thread and on a blocking thread.
    for bytes in [100, 200_000] {
        for codec in BatchCodec::ALL {
            let good = compressed(codec, &[text(1, bytes), text(2, bytes)]);
            let reject = async |batch: EncodedBatch, expected: ErrorReason| {
                let status = append(&server, batch).await.unwrap_err();
                assert_eq!(reason(&status), expected, "{status:?}");
            };
            for count in [1, 3] {
                let counted = rebuilt(EncodedBatch { record_count: count, ..good.clone() });
                reject(counted, ErrorReason::RecordCountMismatch).await;
            }
            for size in [0, good.uncompressed_bytes - 1, good.uncompressed_bytes + 1] {
                let sized = EncodedBatch { uncompressed_bytes: size, ..good.clone() };
                reject(sized, ErrorReason::CorruptBatch).await;
            }
            let bomb = EncodedBatch { uncompressed_bytes: u32::MAX, ..good.clone() };
            reject(bomb, ErrorReason::BatchTooLarge).await;
            let half = good.payload.slice(..good.payload.len() / 2);
            let truncated = rebuilt(EncodedBatch { payload: half, ..good.clone() });
            reject(truncated, ErrorReason::CorruptBatch).await;
        }
    }
    // A header of 3 MiB before five bytes.
    let uncompressed_bytes = 3_u32 << 20;
    let payload = [&uncompressed_bytes.to_le_bytes()[..], &[0x1F, 0, 1, 0, 255]].concat();
    let bomb = EncodedBatch {
        version: 1,
        record_count: 1,
        compression: Compression::Lz4.into(),
        crc32: 0,
        uncompressed_bytes,
        payload: Bytes::from(payload),
    };
    let status = append(&server, rebuilt(bomb)).await.unwrap_err();
    assert!(status.message().contains("cannot decode to 3145728"), "{status:?}");
    assert!(server.records(0, 0).await.is_empty());
}

#[tokio::test]
async fn topics_name_the_codecs_that_they_accept() {
    let server = TestServer::in_memory().await;
    wait_allowed(&server).await;
    let config = |allowed: AllowedCompression| TopicConfig {
        allowed_compression: allowed.into(),
        ..TopicConfig::default()
    };
    let create = CreateTopicRequest {
        name: "logs".to_owned(),
        partition_count: 1,
        config: Some(config(AllowedCompression::Lz4)),
        ..CreateTopicRequest::default()
    };
    let created = server.topics().create_topic(create.clone()).await.unwrap().into_inner();
    let found = created.topic.unwrap().config.unwrap();
    assert_eq!(found.allowed_compression(), AllowedCompression::Lz4);
    server.topics().create_topic(create.clone()).await.unwrap();
    let other = CreateTopicRequest { config: None, ..create };
    let status = server.topics().create_topic(other).await.unwrap_err();
    assert_eq!(reason(&status), ErrorReason::TopicAlreadyExists);
    assert!(status.message().contains("allowed_compression is 3, not 0"), "{status:?}");

    let values = [text(1, 500)];
    let lz4 = compressed(BatchCodec::Lz4, &values);
    let zstd = compressed(BatchCodec::Zstd, &values);
    append_to(&server, "logs", lz4.clone()).await.unwrap();
    append_to(&server, "logs", batch::encode(&records(&["plain"]))).await.unwrap();
    let status = append_to(&server, "logs", zstd.clone()).await.unwrap_err();
    assert_eq!(reason(&status), ErrorReason::UnsupportedCompression);
    let allowed: [i32; 2] = [Compression::None.into(), Compression::Lz4.into()];
    assert_eq!(detail(&status).allowed_compressions, allowed);
    assert!(status.message().contains("it accepts none, lz4"), "{status:?}");

    // The setting holds for open streams too.
    let init = AppendStreamInit { topic: "logs".to_owned(), ..AppendStreamInit::default() };
    let (mut session, _) = AppendSession::open(&server, init).await;
    let send = |batch: &EncodedBatch| {
        let batch = as_batch(batch.clone());
        Sent::Batch(AppendStreamBatch { batch, ..AppendStreamBatch::default() })
    };
    session.send(send(&lz4)).await;
    session.acks().await;
    let update = UpdateTopicRequest {
        name: "logs".to_owned(),
        config: Some(config(AllowedCompression::Zstd)),
        update_mask: Some(FieldMask { paths: vec!["allowed_compression".to_owned()] }),
        topic_id: 0,
    };
    server.topics().update_topic(update).await.unwrap();
    session.send(send(&zstd)).await;
    session.acks().await;
    session.send(send(&lz4)).await;
    let (_, end) = session.finish().await;
    assert_eq!(reason(&end.unwrap_err()), ErrorReason::UnsupportedCompression);
}

#[tokio::test]
async fn batches_beyond_a_readers_bound_come_alone_and_readers_progress() {
    let server = TestServer::in_memory().await;
    wait_allowed(&server).await;
    let value = |number| text(number, 400_000);
    for number in 0..8 {
        append(&server, compressed(BatchCodec::Zstd, &[value(number), value(100)])).await.unwrap();
    }
    let limits = Some(ReadLimits { max_bytes: Some(100), ..ReadLimits::default() });
    for accept in [&[][..], &[Compression::Zstd]] {
        let mut offset = 0;
        while offset < 16 {
            let request = FetchRequest { limits, ..encoded_fetch(offset, accept) };
            let read = server.fetch_one(request).await;
            let [stored] = &read.batches[..] else { panic!("{} batches", read.batches.len()) };
            batch::decode(stored.batch.as_ref().unwrap()).unwrap();
            assert_eq!(read.next_offset, offset + 2);
            offset = read.next_offset;
        }
    }
    // Stored, all fit into the default bound; decompressed, one and a half do.
    let (mut offset, mut found) = (0, Vec::new());
    while offset < 16 {
        let request =
            FetchRequest { partitions: vec![from_offset(0, offset)], ..FetchRequest::default() };
        let read = server.fetch_one(request).await;
        assert!((1..=2).contains(&read.records.len()), "{}", read.records.len());
        found.extend(values(&read.records));
        offset = read.next_offset;
    }
    let all: Vec<_> = (0..8).flat_map(|number| [value(number), value(100)]).collect();
    assert_eq!(found, all);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_nodes_store_and_serve_what_the_producer_sent() {
    let mut trio = Trio::durable().await;
    for (_, node) in trio.nodes() {
        wait_allowed(node).await;
    }
    let client = trio.client();
    let mut all = Vec::new();
    for (number, compression) in
        [ClientCompression::Lz4, ClientCompression::Zstd, ClientCompression::Adaptive]
            .into_iter()
            .enumerate()
    {
        let options = ProducerOptions { compression, ..ProducerOptions::default() };
        let values = [text(number, 200_000), text(number, 300)];
        let batch: Vec<Record> = values.iter().map(|value| record(value)).collect();
        client.producer(options).append("default", 0, &batch).await.unwrap();
        all.extend(values);
        let options = SessionOptions { compression, ..SessionOptions::default() };
        let session = client.session("default", 0, options).await.unwrap();
        let value = text(number + 10, 3_000);
        session.append(&[record(&value)][..]).await.unwrap().await.unwrap();
        session.close().await.unwrap();
        all.push(value);
    }
    let end = all.len() as u64;
    expect_equal_replicas(&trio, 0, end).await;
    let mut first: Option<Vec<EncodedBatch>> = None;
    for (id, node) in trio.nodes() {
        let accept_compression = vec![Compression::Lz4.into(), Compression::Zstd.into()];
        let request = FetchRequest { accept_encoded: true, accept_compression, ..from_any(0, 0) };
        let stored = batches(node.fetch_one(request).await.batches);
        assert!(stored.iter().all(|batch| batch.compression() != Compression::None));
        match &first {
            Some(first) => assert!(*first == stored, "node {id} has other bytes"),
            None => first = Some(stored),
        }
        let mut found = Vec::new();
        until("the replica serves all records", async || {
            let read = node.fetch_one(from_any(0, found.len() as u64)).await;
            found.extend(values(&read.records));
            (found.len() == all.len()).then_some(())
        })
        .await;
        assert_eq!(found, all, "node {id}");
    }
    // They are still there after a restart, and on the replica that missed them.
    let (leader, _) = trio.leader_of(0).await;
    trio.stop(leader).await;
    let value = text(99, 50_000);
    let options =
        ProducerOptions { compression: ClientCompression::Zstd, ..ProducerOptions::default() };
    client.producer(options).append("default", 0, &[record(&value)][..]).await.unwrap();
    trio.start_nodes(&[leader]).await;
    let stored = replica_batches(trio.node(leader), 0, end, end + 1).await;
    assert_eq!(batch::decode(stored[0].batch.as_ref().unwrap()).unwrap().records.len(), 1);
    trio.stop_all().await;
}
