//! Reads from followers: they serve committed records up to their own end.

use std::time::Duration;

use helix_client::ProducerOptions;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::subscribe_response::Message;
use helix_proto::log::v1::{
    ErrorReason, FetchRequest, ReadSource, SubscribeRequest, SubscribeResponse,
    TrimPartitionRequest,
};
use tokio::time::Instant;
use tonic::Streaming;

use crate::support::{
    TestServer, detail, earliest, from_offset, reason, record, soon, start, values,
};
use crate::trio::{Trio, expect_equal_replicas, from_any, until};

fn wait(millis: i32) -> Option<prost_types::Duration> {
    Some(prost_types::Duration { seconds: 0, nanos: millis * 1_000_000 })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follower_serves_committed_records_and_waits_at_its_end() {
    let mut trio = Trio::durable().await;
    trio.write(0, &["a", "b", "c"]).await;
    expect_equal_replicas(&trio, 0, 3).await;
    for follower in trio.followers_of(0).await {
        let node = trio.node(follower);
        let read = node.fetch_one(from_any(0, 1)).await;
        assert_eq!(values(&read.records), ["b", "c"]);
        assert_eq!(read.watermarks.unwrap().high_watermark, 3);
        for offset in [3, 4, 1_000] {
            let began = Instant::now();
            let request = FetchRequest { max_wait: wait(150), ..from_any(0, offset) };
            let read = node.fetch_one(request).await;
            assert!(read.records.is_empty(), "nothing is there yet");
            assert_eq!(read.next_offset, offset);
            assert!(began.elapsed() >= Duration::from_millis(150), "it waits");
        }
        for (position, first) in [(Position::TailRecords(1), "c"), (Position::TailRecords(9), "a")]
        {
            let request = FetchRequest { partitions: vec![start(0, position)], ..from_any(0, 0) };
            let read = node.fetch_one(request).await;
            assert_eq!(values(&read.records)[0], first);
        }
    }
    // A fetch that waits on a follower returns when the leader appends.
    let follower = trio.followers_of(0).await[0];
    let mut consume = trio.node(follower).consume();
    let seconds = Some(prost_types::Duration { seconds: 30, nanos: 0 });
    let waiting = FetchRequest { max_wait: seconds, ..from_any(0, 3) };
    let waiting = tokio::spawn(async move { consume.fetch(waiting).await });
    trio.write(0, &["d"]).await;
    let read = soon(waiting).await.unwrap().unwrap().into_inner();
    assert_eq!(values(&read.partitions[0].records), ["d"]);
    trio.stop_all().await;
}

async fn follow(node: &TestServer, partition: u32) -> Streaming<SubscribeResponse> {
    let request = SubscribeRequest {
        partitions: vec![earliest(partition)],
        source: ReadSource::AnyReplica.into(),
        ..SubscribeRequest::default()
    };
    node.consume().subscribe(request).await.unwrap().into_inner()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follower_subscriptions_deliver_all_records_once_in_order() {
    let mut trio = Trio::durable().await;
    trio.write(1, &["0"]).await;
    let mut streams = Vec::new();
    for (_, node) in trio.nodes() {
        streams.push(follow(node, 1).await);
    }
    let expected: Vec<String> = (0..60).map(|number| number.to_string()).collect();
    for (count, value) in (1..).zip(&expected[1..]) {
        trio.write(1, &[value]).await;
        // Leader changes do not disturb the readers.
        if count % 25 == 0 {
            let (leader, shard) = trio.leader_of(1).await;
            trio.transfer(shard, leader % 3 + 1).await;
        }
    }
    for stream in &mut streams {
        let mut seen = Vec::new();
        while seen.len() < expected.len() {
            let message = soon(stream.message()).await.unwrap().expect("the stream continues");
            if let Some(Message::Data(data)) = message.message {
                seen.extend(values(&data.records));
            }
        }
        assert_eq!(seen, expected);
    }
    trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trim_is_seen_on_all_replicas() {
    let mut trio = Trio::durable().await;
    for value in ["a", "b", "c", "d"] {
        trio.write(2, &[value]).await;
    }
    let trim = TrimPartitionRequest {
        topic: "default".to_owned(),
        partition: 2,
        trim_offset: 2,
        topic_id: 0,
    };
    let trim = async |node: &TestServer| node.topics().trim_partition(trim.clone()).await;
    trio.call_leader(2, trim).await.unwrap();
    for (id, node) in trio.nodes() {
        let status = until("the replica has trimmed", async || {
            node.consume().fetch(from_any(2, 1)).await.err()
        })
        .await;
        assert_eq!(reason(&status), ErrorReason::OffsetOutOfRange);
        let watermarks = detail(&status).watermarks.unwrap();
        assert_eq!(watermarks.log_start_offset, 2, "node {id}");
        let request = FetchRequest { partitions: vec![earliest(2)], ..from_any(2, 0) };
        let read = until("the replica has all records", async || {
            let read = node.fetch_one(request.clone()).await;
            (read.records.len() == 2).then_some(read)
        })
        .await;
        assert_eq!(values(&read.records), ["c", "d"]);
    }
    // Only the leader knows the end.
    let beyond = FetchRequest { partitions: vec![from_offset(2, 9)], ..FetchRequest::default() };
    let beyond = async |node: &TestServer| node.consume().fetch(beyond.clone()).await;
    let status = trio.call_leader(2, beyond).await.unwrap_err();
    assert_eq!(reason(&status), ErrorReason::OffsetOutOfRange);
    trio.stop_all().await;
}

/// Reads a partition of one node from its start: each record has its number or has been trimmed.
///
/// Returns the offset reached and how many trims overtook the reader.
async fn read_under_trims(node: &TestServer, partition: u32, end: u64) -> (u64, u64) {
    let (mut offset, mut overtaken) = (0, 0);
    while offset < end {
        let request = FetchRequest { max_wait: wait(100), ..from_any(partition, offset) };
        match node.consume().fetch(request).await {
            Ok(response) => {
                let [read] = response.into_inner().partitions.try_into().unwrap();
                for (record, value) in read.records.iter().zip(values(&read.records)) {
                    assert_eq!((record.offset, value), (offset, offset.to_string()));
                    offset += 1;
                }
            }
            Err(status) => {
                assert_eq!(reason(&status), ErrorReason::OffsetOutOfRange);
                let log_start = detail(&status).watermarks.unwrap().log_start_offset;
                assert!(log_start > offset, "{log_start} is no reason to refuse {offset}");
                (offset, overtaken) = (log_start, overtaken + 1);
            }
        }
    }
    (offset, overtaken)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trims_under_readers_leave_all_replicas_equal() {
    const END: u64 = 300;
    let mut trio = Trio::durable().await;
    let trim = async |trim_offset| {
        let topic = "default".to_owned();
        let request = TrimPartitionRequest { topic, partition: 1, trim_offset, topic_id: 0 };
        let trim = async |node: &TestServer| {
            let answer = node.topics().trim_partition(request.clone()).await?.into_inner();
            Ok(answer.watermarks.unwrap().log_start_offset)
        };
        trio.call_leader(1, trim).await
    };
    let writing = async {
        let producer = trio.client().producer(ProducerOptions::default());
        for number in 0..END {
            let batch = [record(&number.to_string())];
            let ack = producer.append("default", 1, &batch[..]).await.unwrap();
            assert_eq!(ack.first_offset, Some(number));
            if number % 40 == 39 {
                assert_eq!(trim(number - 10).await.unwrap(), number - 10);
                // A repeated and a late trim leave the log start unchanged.
                assert_eq!(trim(number - 10).await.unwrap(), number - 10);
                assert_eq!(trim(0).await.unwrap(), number - 10);
            }
            if number == END / 2 {
                let (leader, shard) = trio.leader_of(1).await;
                trio.transfer(shard, leader % 3 + 1).await;
            }
        }
    };
    let readers = trio.nodes().map(|(_, node)| read_under_trims(node, 1, END));
    let ((), readers) = tokio::join!(writing, futures_util::future::join_all(readers));
    for (offset, overtaken) in readers {
        println!("read to {offset}, overtaken {overtaken} times");
        assert_eq!(offset, END);
    }
    let mut kept = Vec::new();
    for (id, node) in trio.nodes() {
        let request = FetchRequest { partitions: vec![earliest(1)], ..from_any(1, 0) };
        let read = until("the replica is up to date", async || {
            let read = node.fetch_one(request.clone()).await;
            let marks = read.watermarks.unwrap();
            (marks.log_start_offset == 269 && marks.high_watermark == END).then_some(read)
        })
        .await;
        assert_eq!(read.records.len(), 31, "node {id}");
        kept.push(read.records);
    }
    assert!(kept.iter().all(|records| *records == kept[0]));
    trio.stop_all().await;
}
