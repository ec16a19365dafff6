//! Subscribe: existing records, then new ones; heartbeats, and the ends of a subscription.

use std::collections::BTreeMap;

use helix_proto::batch;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::subscribe_response::Message;
use helix_proto::log::v1::{
    DeleteTopicRequest, ErrorReason, GroupMembership, PartitionStart, ReadLimits, SubscribeRequest,
    SubscribeResponse, TrimPartitionRequest,
};
use helix_server::limits::HEARTBEAT_INTERVAL;
use tokio::time::Instant;
use tonic::{Code, Streaming};

use crate::support::{
    TestServer, detail, earliest, from_offset, latest, on_both, reason, soon, start, values,
};

fn subscribe(partitions: Vec<PartitionStart>) -> SubscribeRequest {
    SubscribeRequest { partitions, ..SubscribeRequest::default() }
}

async fn open(server: &TestServer, request: SubscribeRequest) -> Streaming<SubscribeResponse> {
    server.consume().subscribe(request).await.unwrap().into_inner()
}

async fn next(stream: &mut Streaming<SubscribeResponse>) -> Message {
    soon(stream.message()).await.unwrap().expect("the stream continues").message.unwrap()
}

/// Values of the next data message.
async fn next_values(stream: &mut Streaming<SubscribeResponse>) -> Vec<String> {
    loop {
        match next(stream).await {
            Message::Data(data) => return values(&data.records),
            Message::Heartbeat(_) => {}
            other => panic!("{other:?} instead of data"),
        }
    }
}

/// Receives all messages until the server ends the stream with OK.
async fn drain(mut stream: Streaming<SubscribeResponse>) -> Vec<Message> {
    let mut messages = Vec::new();
    while let Some(response) = soon(stream.message()).await.unwrap() {
        messages.push(response.message.unwrap());
    }
    messages
}

#[tokio::test]
async fn existing_records_come_before_caught_up_and_new_records() {
    on_both(async |server: TestServer| {
        server.append(&["a", "b"]).await;
        let mut stream = open(&server, subscribe(vec![earliest(0)])).await;
        assert_eq!(next_values(&mut stream).await, ["a", "b"]);
        let Message::CaughtUp(caught_up) = next(&mut stream).await else { panic!() };
        assert_eq!((caught_up.topic.as_str(), caught_up.partition), ("default", 0));
        assert_eq!(caught_up.watermarks.unwrap().high_watermark, 2);
        for value in ["c", "d", "e"] {
            server.append(&[value]).await;
            assert_eq!(next_values(&mut stream).await, [value]);
        }
    })
    .await;
}

#[tokio::test]
async fn subscription_to_an_empty_partition_is_caught_up_at_once() {
    let server = TestServer::in_memory().await;
    let mut stream = open(&server, subscribe(vec![latest(3)])).await;
    let Message::CaughtUp(caught_up) = next(&mut stream).await else { panic!() };
    assert_eq!((caught_up.partition, caught_up.watermarks.unwrap().high_watermark), (3, 0));
}

#[tokio::test]
async fn many_partitions_share_one_stream() {
    on_both(async |server: TestServer| {
        let partitions =
            (0..4).map(|number| PartitionStart { until_offset: Some(25), ..earliest(number) });
        let stream = open(&server, subscribe(partitions.collect())).await;
        let append = async {
            for round in 0..25 {
                for partition in 0..4 {
                    server.append_to(partition, &[&format!("{partition}-{round}")]).await;
                }
            }
        };
        let (messages, ()) = tokio::join!(drain(stream), append);
        let mut read: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        let mut next_offsets = BTreeMap::from([(0, 0), (1, 0), (2, 0), (3, 0)]);
        for message in messages {
            if let Message::Data(data) = message {
                let next = next_offsets.insert(data.partition, data.next_offset);
                assert_eq!(next, Some(data.start_offset), "no record is missing or duplicated");
                read.entry(data.partition).or_default().extend(values(&data.records));
            }
        }
        for partition in 0..4 {
            let expected: Vec<String> =
                (0..25).map(|round| format!("{partition}-{round}")).collect();
            assert_eq!(read[&partition], expected);
        }
    })
    .await;
}

#[tokio::test]
async fn busy_partition_does_not_starve_a_quiet_one() {
    let server = TestServer::in_memory().await;
    let value = "x".repeat(512 << 10);
    for _ in 0..16 {
        server.append_to(0, &[&value]).await;
    }
    server.append_to(1, &["quiet"]).await;
    let mut stream = open(&server, subscribe(vec![earliest(0), earliest(1)])).await;
    for _ in 0..4 {
        if let Message::Data(data) = next(&mut stream).await
            && data.partition == 1
        {
            return;
        }
    }
    panic!("the quiet partition had no turn");
}

#[tokio::test]
async fn limits_end_the_stream_with_ok() {
    let server = TestServer::in_memory().await;
    server.append(&["a", "b", "c"]).await;
    server.append(&["d"]).await;
    let read = async |request: SubscribeRequest| {
        let messages = drain(open(&server, request).await).await;
        let data = messages.into_iter().filter_map(|message| match message {
            Message::Data(data) => Some(values(&data.records)),
            _ => None,
        });
        data.flatten().collect::<Vec<_>>()
    };
    let until = PartitionStart { until_offset: Some(2), ..earliest(0) };
    assert_eq!(read(subscribe(vec![until])).await, ["a", "b"]);
    let passed = PartitionStart { until_offset: Some(1), ..from_offset(0, 2) };
    assert!(read(subscribe(vec![passed])).await.is_empty());
    let limits = ReadLimits { max_records: Some(3), ..ReadLimits::default() };
    let request = SubscribeRequest { limits: Some(limits), ..subscribe(vec![earliest(0)]) };
    assert_eq!(read(request).await, ["a", "b", "c"]);
    let time = prost_types::Timestamp { seconds: 1, nanos: 0 };
    let limits = ReadLimits { until_timestamp: Some(time), ..ReadLimits::default() };
    let request = SubscribeRequest { limits: Some(limits), ..subscribe(vec![earliest(0)]) };
    assert!(read(request).await.is_empty());
    let request = SubscribeRequest { limits: Some(limits), ..subscribe(vec![earliest(1)]) };
    assert!(read(request).await.is_empty(), "an empty partition has no older records either");
}

#[tokio::test]
async fn idle_subscription_sends_heartbeats() {
    let server = TestServer::in_memory().await;
    server.append(&["a"]).await;
    let mut stream = open(&server, subscribe(vec![latest(0), latest(1)])).await;
    let begin = Instant::now();
    let heartbeat = loop {
        if let Message::Heartbeat(heartbeat) = next(&mut stream).await {
            break heartbeat;
        }
    };
    // Before the second heartbeat could be due.
    let second = HEARTBEAT_INTERVAL * 8 / 5;
    assert!(begin.elapsed() < second, "{:?}", begin.elapsed());
    let high: Vec<(u32, u64)> = heartbeat
        .partitions
        .iter()
        .map(|state| (state.partition, state.watermarks.unwrap().high_watermark))
        .collect();
    assert_eq!(high, [(0, 1), (1, 0)]);
}

#[tokio::test]
async fn deleted_topic_ends_its_subscriptions() {
    on_both(async |server: TestServer| {
        let plain = subscribe(vec![latest(0)]);
        let encoded = SubscribeRequest { accept_encoded: true, ..plain.clone() };
        let mut streams = [open(&server, plain).await, open(&server, encoded).await];
        for stream in &mut streams {
            assert!(matches!(next(stream).await, Message::CaughtUp(_)));
        }
        let request = DeleteTopicRequest { name: "default".to_owned(), topic_id: 0 };
        server.topics().delete_topic(request).await.unwrap();
        for mut stream in streams {
            let status = soon(async {
                loop {
                    match stream.message().await {
                        Ok(Some(_)) => {}
                        Ok(None) => panic!("an end with OK would say that all was read"),
                        Err(status) => return status,
                    }
                }
            })
            .await;
            assert_eq!(status.code(), Code::NotFound);
            assert_eq!(detail(&status).topic, "default");
        }
    })
    .await;
}

#[tokio::test]
async fn trimmed_start_fails_or_moves() {
    let server = TestServer::in_memory().await;
    server.append(&["a", "b", "c"]).await;
    let topic = "default".to_owned();
    let request = TrimPartitionRequest { topic, partition: 0, trim_offset: 2, topic_id: 0 };
    server.topics().trim_partition(request).await.unwrap();
    let request = subscribe(vec![from_offset(0, 0)]);
    let mut stream = open(&server, request.clone()).await;
    let status = soon(stream.message()).await.unwrap_err();
    assert_eq!(reason(&status), ErrorReason::OffsetOutOfRange);
    let mut stream = open(&server, SubscribeRequest { out_of_range: 1, ..request }).await;
    assert_eq!(next_values(&mut stream).await, ["c"]);
}

#[tokio::test]
async fn rejects_unimplemented_and_unknown_targets() {
    let server = TestServer::in_memory().await;
    let member = SubscribeRequest {
        membership: Some(GroupMembership::default()),
        ..subscribe(vec![earliest(0)])
    };
    let group = subscribe(vec![start(0, Position::CommittedGroup("no/group".to_owned()))]);
    let nowhere = PartitionStart { topic: "nowhere".to_owned(), ..earliest(0) };
    let cases = [
        (member, ErrorReason::InvalidArgument),
        (group, ErrorReason::InvalidArgument),
        (subscribe(vec![nowhere]), ErrorReason::TopicNotFound),
        (subscribe(Vec::new()), ErrorReason::InvalidArgument),
    ];
    for (request, expected) in cases {
        let status = server.consume().subscribe(request).await.unwrap_err();
        assert_eq!(reason(&status), expected);
    }
}

#[tokio::test]
async fn subscription_delivers_encoded_batches() {
    let server = TestServer::in_memory().await;
    server.append(&["a", "b"]).await;
    let request = SubscribeRequest { accept_encoded: true, ..subscribe(vec![from_offset(0, 1)]) };
    let mut stream = open(&server, request).await;
    let Message::Data(data) = next(&mut stream).await else { panic!() };
    assert_eq!((data.start_offset, data.next_offset, data.batches.len()), (1, 2, 1));
    assert_eq!(data.batches[0].first_offset, 0);
    assert!(matches!(next(&mut stream).await, Message::CaughtUp(_)));
    // Long batches take another path out of the server, alone and between short ones.
    for lengths in [&[100_000][..], &[1, 5_000, 2, 300_000]] {
        let long: Vec<String> = lengths.iter().map(|length| "x".repeat(*length)).collect();
        for value in &long {
            server.append(&[value]).await;
        }
        let mut found = Vec::new();
        while found.len() < long.len() {
            let Message::Data(data) = next(&mut stream).await else { continue };
            for stored in data.batches {
                let records = batch::decode(&stored.batch.unwrap()).unwrap().records;
                found.extend(records.into_iter().map(|record| record.value.unwrap()));
            }
        }
        assert!(found == long, "the batches differ");
    }
}

/// A trim overtakes a slow subscriber: it gets the remaining records without a gap, or
/// OFFSET_OUT_OF_RANGE; a new subscription continues after the trim.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trim_under_a_slow_subscriber_is_reported() {
    const COUNT: u64 = 2_000;
    let server = TestServer::durable().await;
    let padding = "x".repeat(8_000);
    for first in (0..COUNT).step_by(100) {
        let values: Vec<String> = (first..first + 100).map(|n| format!("{n}:{padding}")).collect();
        server.append(&values.iter().map(String::as_str).collect::<Vec<_>>()).await;
    }
    let (mut next, mut overtaken) = (0, 0);
    while next < COUNT {
        let begin = PartitionStart { until_offset: Some(COUNT), ..from_offset(0, next) };
        let mut stream = open(&server, subscribe(vec![begin])).await;
        // Trims far ahead of the reader, leaving a few records at the end.
        let trim_offset = (next + 900).min(COUNT - 10);
        let topic = "default".to_owned();
        let request = TrimPartitionRequest { topic, partition: 0, trim_offset, topic_id: 0 };
        server.topics().trim_partition(request).await.unwrap();
        loop {
            let data = match soon(stream.message()).await {
                Ok(Some(SubscribeResponse { message: Some(Message::Data(data)) })) => data,
                Ok(Some(_)) => continue,
                Ok(None) => break,
                Err(refused) => {
                    assert_eq!(reason(&refused), ErrorReason::OffsetOutOfRange, "{refused:?}");
                    let marks = detail(&refused).watermarks.unwrap();
                    assert!(marks.log_start_offset > next && next < trim_offset);
                    (next, overtaken) = (marks.log_start_offset, overtaken + 1);
                    break;
                }
            };
            for value in values(&data.records) {
                let number = value.split(':').next().unwrap();
                assert_eq!(number, next.to_string(), "a gap or a duplicate");
                next += 1;
            }
        }
    }
    assert!(overtaken > 0, "no trim came before its reader");
}
