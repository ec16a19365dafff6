//! Fetch and ResolveOffsets: positions, limits, long polls, and offsets out of range.

use std::time::Duration;

use helix_proto::batch;
use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::subscribe_response::Message;
use helix_proto::log::v1::{
    AppendRequest, ErrorReason, FetchRequest, OutOfRangePolicy, PartitionRecords, PartitionStart,
    ReadLimits, Record, ResolveOffsetsRequest, StartPosition, SubscribeRequest, TopicConfig,
    TrimPartitionRequest, UpdateTopicRequest,
};
use prost_types::FieldMask;
use tokio::time::Instant;
use tonic::Code;

use crate::support::{
    TestServer, append_request, as_batch, detail, earliest, from_offset, latest, on_both, reason,
    records, soon, values,
};

fn fetch(partitions: Vec<PartitionStart>) -> FetchRequest {
    FetchRequest { partitions, ..FetchRequest::default() }
}

fn limited(partition: PartitionStart, limits: ReadLimits) -> FetchRequest {
    FetchRequest { limits: Some(limits), ..fetch(vec![partition]) }
}

async fn trim(server: &TestServer, trim_offset: u64) {
    let topic = "default".to_owned();
    let request = TrimPartitionRequest { topic, partition: 0, trim_offset, topic_id: 0 };
    server.topics().trim_partition(request).await.unwrap();
}

#[tokio::test]
async fn fetch_returns_encoded_batches_unchanged() {
    on_both(async |server: TestServer| {
        server.append(&["a", "b", "c"]).await;
        server.append(&["d", "e"]).await;
        let request = FetchRequest { accept_encoded: true, ..fetch(vec![from_offset(0, 1)]) };
        let read = server.fetch_one(request).await;
        assert!(read.records.is_empty());
        assert_eq!((read.start_offset, read.next_offset), (1, 5));
        let firsts: Vec<u64> = read.batches.iter().map(|stored| stored.first_offset).collect();
        assert_eq!(firsts, [0, 3], "the reader skips records below its start");
        let times: Vec<_> = read.batches.iter().map(|stored| stored.append_time.unwrap()).collect();
        assert!(times[0].seconds > 0);
        assert!((times[0].seconds, times[0].nanos) <= (times[1].seconds, times[1].nanos));
        for stored in read.batches {
            assert!(stored.offset_deltas.is_empty());
            batch::decode(&stored.batch.unwrap()).unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn clients_with_default_limits_read_the_largest_batch() {
    let server = TestServer::in_memory().await;
    let batch = |last: usize| {
        let lengths = [1_000_000, 1_000_000, 1_000_000, last];
        let record = |bytes| Record { value: Some(vec![b'x'; bytes].into()), ..Record::default() };
        batch::encode(&lengths.map(record))
    };
    let largest = batch(100_000 + (3 << 20) - batch(100_000).payload.len());
    assert_eq!(largest.payload.len(), 3 << 20, "the default of max_batch_bytes");
    let request =
        AppendRequest { partition: 0, batch: as_batch(largest), ..append_request(&["replaced"]) };
    server.produce().append(request).await.unwrap();
    // The limit of the generated client: 4 MiB, as in most languages.
    let mut client = ConsumeServiceClient::new(server.channel.clone());
    for accept_encoded in [true, false] {
        let partitions = vec![earliest(0)];
        let request = FetchRequest { accept_encoded, ..fetch(partitions.clone()) };
        let read = client.fetch(request).await.unwrap().into_inner().partitions.remove(0);
        assert_eq!(read.batches.len() + read.records.len(), 1);
        let request = SubscribeRequest { partitions, accept_encoded, ..Default::default() };
        let mut messages = client.subscribe(request).await.unwrap().into_inner();
        let mut next_offset = 0;
        while next_offset < 4 {
            let message = messages.message().await.unwrap().unwrap().message;
            if let Some(Message::Data(data)) = message {
                next_offset = data.next_offset;
            }
        }
    }
}

#[tokio::test]
async fn plain_records_start_and_end_at_the_requested_offsets() {
    on_both(async |server: TestServer| {
        server.append(&["a", "b", "c"]).await;
        server.append(&["d", "e", "f"]).await;
        let until = PartitionStart { until_offset: Some(5), ..from_offset(0, 1) };
        let read = server.fetch_one(fetch(vec![until.clone()])).await;
        assert_eq!(values(&read.records), ["b", "c", "d", "e"]);
        assert_eq!((read.start_offset, read.next_offset), (1, 5));
        let limits = ReadLimits { max_records: Some(1), ..ReadLimits::default() };
        let read = server.fetch_one(limited(until, limits)).await;
        assert_eq!((values(&read.records), read.next_offset), (vec!["b".to_owned()], 2));
        let limits = ReadLimits { max_bytes: Some(0), ..ReadLimits::default() };
        let read = server.fetch_one(limited(from_offset(0, 4), limits)).await;
        assert_eq!((values(&read.records), read.next_offset), (vec!["e".to_owned()], 5));
    })
    .await;
}

#[tokio::test]
async fn encoded_read_limits_round_up_to_a_batch() {
    let server = TestServer::in_memory().await;
    for _ in 0..3 {
        server.append(&["aaaa", "bbbb", "cccc"]).await;
    }
    let read = async |limits, until_offset| {
        let start = PartitionStart { until_offset, ..from_offset(0, 0) };
        let request = FetchRequest { accept_encoded: true, ..limited(start, limits) };
        let read = server.fetch_one(request).await;
        (read.batches.len(), read.next_offset)
    };
    let none = ReadLimits::default();
    assert_eq!(read(ReadLimits { max_records: Some(1), ..none }, None).await, (1, 3));
    assert_eq!(read(ReadLimits { max_records: Some(4), ..none }, None).await, (2, 6));
    assert_eq!(read(ReadLimits { max_bytes: Some(1), ..none }, None).await, (1, 3));
    assert_eq!(read(ReadLimits { max_bytes: Some(0), ..none }, None).await, (1, 3));
    assert_eq!(read(none, Some(4)).await, (2, 4), "the next offset is never beyond the end");
    assert_eq!(read(ReadLimits { max_records: Some(0), ..none }, None).await, (0, 0));
}

#[tokio::test]
async fn invalid_record_fails_only_its_own_read() {
    on_both(async |server: TestServer| {
        // Field number 0 is invalid in every message.
        let garbage = [0x0A, 2, 0, 0];
        let records = batch::encode(&records(&["a", "b"])).payload;
        let payload = [&records[..], &garbage].concat();
        let batch = as_batch(batch::from_payload(3, payload.into()));
        let request = AppendRequest { batch, ..append_request(&[]) };
        let validate = async |is_on: bool| {
            let update = UpdateTopicRequest {
                name: "default".to_owned(),
                config: Some(TopicConfig {
                    validate_records: Some(is_on),
                    ..TopicConfig::default()
                }),
                update_mask: Some(FieldMask { paths: vec!["validate_records".to_owned()] }),
                topic_id: 0,
            };
            let updated = server.topics().update_topic(update).await.unwrap().into_inner();
            assert_eq!(updated.topic.unwrap().config.unwrap().validate_records, Some(is_on));
        };
        // It is on already. The call waits for the protocol version from which on it counts.
        validate(true).await;
        let refused = server.produce().append(request.clone()).await.unwrap_err();
        assert_eq!(reason(&refused), ErrorReason::CorruptBatch);
        assert!(refused.message().contains("record 2 at byte"), "{refused}");
        validate(false).await;
        server.produce().append(request).await.unwrap();
        server.append(&["d"]).await;
        server.append_to(1, &["e"]).await;
        let read = server.fetch_one(fetch(vec![earliest(0)])).await;
        assert_eq!((values(&read.records), read.next_offset), (vec!["a".into(), "b".into()], 2));
        let both = fetch(vec![earliest(0), earliest(1)]);
        // A larger minimum: it reads again and meets the invalid record again.
        let wait = prost_types::Duration { seconds: 0, nanos: 50_000_000 };
        let both = FetchRequest { min_bytes: 1_000_000, max_wait: Some(wait), ..both };
        let read = server.consume().fetch(both).await.unwrap().into_inner().partitions;
        assert_eq!(values(&read[0].records), ["a", "b"]);
        assert_eq!(values(&read[1].records), ["e"]);
        let refused = server.consume().fetch(fetch(vec![from_offset(0, 2)])).await.unwrap_err();
        assert_eq!(reason(&refused), ErrorReason::UndecodableBatch);
        assert!(refused.message().contains("invalid record at offset 2"), "{refused}");
        assert_eq!(values(&server.records(0, 3).await), ["d"], "the record after it");
        let encoded = FetchRequest { accept_encoded: true, ..fetch(vec![from_offset(0, 2)]) };
        assert_eq!(server.fetch_one(encoded).await.batches.len(), 2, "as they are");
        let request =
            SubscribeRequest { partitions: vec![earliest(0)], ..SubscribeRequest::default() };
        let mut stream = server.consume().subscribe(request).await.unwrap().into_inner();
        let first = soon(stream.message()).await.unwrap().unwrap().message;
        let Some(Message::Data(data)) = first else { panic!("{first:?}") };
        assert_eq!(values(&data.records), ["a", "b"]);
        let refused = soon(stream.message()).await.unwrap_err();
        assert_eq!(reason(&refused), ErrorReason::UndecodableBatch);
    })
    .await;
}

#[tokio::test]
async fn one_fetch_reads_many_partitions_within_one_budget() {
    let server = TestServer::in_memory().await;
    for partition in 0..4 {
        server.append_to(partition, &["aaaaaaaa"]).await;
    }
    let all: Vec<_> = (0..4).map(earliest).collect();
    let response = server.consume().fetch(fetch(all.clone())).await.unwrap().into_inner();
    let numbers: Vec<u32> = response.partitions.iter().map(|read| read.partition).collect();
    assert_eq!(numbers, [0, 1, 2, 3], "in the order asked");
    assert!(response.partitions.iter().all(|read| read.records.len() == 1));
    let limits = ReadLimits { max_records: Some(2), ..ReadLimits::default() };
    let request = FetchRequest { limits: Some(limits), ..fetch(all) };
    let response = server.consume().fetch(request).await.unwrap().into_inner();
    let count = |read: &PartitionRecords| read.records.len();
    assert_eq!(response.partitions.iter().map(count).sum::<usize>(), 2);
}

#[tokio::test]
async fn long_poll_returns_when_records_arrive() {
    on_both(async |server: TestServer| {
        let wait = prost_types::Duration { seconds: 15, nanos: 0 };
        let all = || fetch(vec![earliest(0), earliest(1), earliest(2)]);
        let request = FetchRequest { max_wait: Some(wait), ..all() };
        let mut consume = server.consume();
        let poll = consume.fetch(request);
        let append = async {
            // On the same connection: the poll, sent earlier, has arrived before this response.
            assert!(server.consume().fetch(all()).await.is_ok());
            server.append_to(1, &["news"]).await;
        };
        let (response, ()) = soon(async { tokio::join!(poll, append) }).await;
        let partitions = response.unwrap().into_inner().partitions;
        assert_eq!(values(&partitions[1].records), ["news"]);
        assert!(partitions[0].records.is_empty());
    })
    .await;
}

#[tokio::test]
async fn long_poll_waits_for_min_bytes_until_its_deadline() {
    let server = TestServer::in_memory().await;
    server.append(&["a"]).await;
    let request = FetchRequest {
        max_wait: Some(prost_types::Duration { seconds: 0, nanos: 200_000_000 }),
        min_bytes: 1000,
        ..fetch(vec![earliest(0)])
    };
    let begin = Instant::now();
    let read = server.fetch_one(request).await;
    assert_eq!(values(&read.records), ["a"], "available records are returned at the deadline");
    assert!(begin.elapsed() >= Duration::from_millis(200));
    let at_once = server.fetch_one(fetch(vec![latest(0)])).await;
    assert!(at_once.records.is_empty());
    assert_eq!(at_once.next_offset, 1);
}

#[tokio::test]
async fn out_of_range_follows_the_clients_policy() {
    on_both(async |server: TestServer| {
        server.append(&["a", "b", "c"]).await;
        server.append(&["d"]).await;
        trim(&server, 3).await;
        for offset in [0, 2, 5] {
            let request = fetch(vec![from_offset(0, offset)]);
            let status = server.consume().fetch(request.clone()).await.unwrap_err();
            assert_eq!(reason(&status), ErrorReason::OffsetOutOfRange, "{offset}");
            assert_eq!(status.code(), Code::OutOfRange);
            let detail = detail(&status);
            assert_eq!((detail.topic.as_str(), detail.partition), ("default", Some(0)));
            let watermarks = detail.watermarks.unwrap();
            assert_eq!((watermarks.log_start_offset, watermarks.high_watermark), (3, 4));
            let clamp = FetchRequest { out_of_range: OutOfRangePolicy::Clamp.into(), ..request };
            let read = server.fetch_one(clamp).await;
            let (expected, begin): (&[&str], u64) = if offset < 4 { (&["d"], 3) } else { (&[], 4) };
            assert_eq!(values(&read.records), expected);
            assert_eq!(read.start_offset, begin);
        }
    })
    .await;
}

#[tokio::test]
async fn positions_resolve_to_offsets() {
    on_both(async |server: TestServer| {
        server.append(&["a", "b", "c"]).await;
        tokio::time::sleep(Duration::from_millis(5)).await;
        let second = server.append(&["d", "e"]).await.ack.unwrap().first_offset.unwrap();
        let request = FetchRequest { accept_encoded: true, ..fetch(vec![earliest(0)]) };
        let stored = server.fetch_one(request).await.batches;
        let time = stored[1].append_time.unwrap();
        let later = prost_types::Timestamp { seconds: time.seconds + 3600, ..time };
        trim(&server, 1).await;
        let cases = [
            (Position::Named(1), 1),
            (Position::Named(2), 5),
            (Position::Offset(4), 4),
            (Position::Offset(0), 1),
            (Position::Offset(99), 5),
            (Position::TailRecords(2), 3),
            (Position::TailRecords(99), 1),
            (Position::Timestamp(time), second),
            (Position::Timestamp(later), 5),
            (Position::Timestamp(prost_types::Timestamp { seconds: -1, nanos: 0 }), 1),
        ];
        for (position, expected) in cases {
            let request = ResolveOffsetsRequest {
                topic: "default".to_owned(),
                partitions: vec![0],
                position: Some(StartPosition {
                    position: Some(position.clone()),
                    ..StartPosition::default()
                }),
                topic_id: 0,
            };
            let response = server.consume().resolve_offsets(request).await.unwrap().into_inner();
            assert_eq!(response.offsets.len(), 1);
            assert_eq!(response.offsets[0].offset, expected, "{position:?}");
            assert_eq!(response.offsets[0].watermarks.unwrap().high_watermark, 5);
        }
    })
    .await;
}

#[tokio::test]
async fn resolve_without_partitions_returns_all() {
    let server = TestServer::in_memory().await;
    server.append_to(2, &["a", "b"]).await;
    let resolve = |topic: &str, position| ResolveOffsetsRequest {
        topic: topic.to_owned(),
        partitions: Vec::new(),
        position: Some(StartPosition { position, ..StartPosition::default() }),
        topic_id: 0,
    };
    let request = resolve("default", Some(Position::Named(2)));
    let response = server.consume().resolve_offsets(request).await.unwrap().into_inner();
    let offsets: Vec<(u32, u64)> =
        response.offsets.iter().map(|resolved| (resolved.partition, resolved.offset)).collect();
    assert_eq!(offsets, [(0, 0), (1, 0), (2, 2), (3, 0)]);
    let unset = server.consume().resolve_offsets(resolve("default", None)).await.unwrap_err();
    assert_eq!(reason(&unset), ErrorReason::InvalidArgument);
    let nowhere = resolve("nowhere", Some(Position::Named(2)));
    let nowhere = server.consume().resolve_offsets(nowhere).await.unwrap_err();
    assert_eq!(reason(&nowhere), ErrorReason::TopicNotFound);
}
