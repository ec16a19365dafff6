//! Reading from replicas that do not lead: what is committed, up to their own end, and no more.

use std::time::Duration;

use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::subscribe_response::Message;
use helix_proto::log::v1::{
    ErrorReason, FetchRequest, ReadSource, SubscribeRequest, SubscribeResponse,
    TrimPartitionRequest,
};
use tokio::time::Instant;
use tonic::Streaming;

use crate::support::{TestServer, detail, earliest, from_offset, reason, soon, start, values};
use crate::three_nodes::{Trio, expect_equal_replicas, from_any, until};

fn wait(millis: i32) -> Option<prost_types::Duration> {
    Some(prost_types::Duration { seconds: 0, nanos: millis * 1_000_000 })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_serves_what_is_committed_and_waits_at_its_end() {
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
    // One that waits on a follower is woken by what the leader appends.
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
async fn subscriptions_of_followers_see_everything_once_and_in_order() {
    let mut trio = Trio::durable().await;
    trio.write(1, &["0"]).await;
    let mut streams = Vec::new();
    for (_, node) in trio.nodes() {
        streams.push(follow(node, 1).await);
    }
    let expected: Vec<String> = (0..60).map(|number| number.to_string()).collect();
    for (count, value) in (1..).zip(&expected[1..]) {
        trio.write(1, &[value]).await;
        // Readers do not care who leads.
        if count % 25 == 0 {
            let (leader, shard) = trio.leader_of(1).await;
            trio.transfer(shard, leader % 3 + 1).await;
        }
    }
    for stream in &mut streams {
        let mut seen = Vec::new();
        while seen.len() < expected.len() {
            let message = soon(stream.message()).await.unwrap().expect("the stream goes on");
            if let Some(Message::Data(data)) = message.message {
                seen.extend(values(&data.records));
            }
        }
        assert_eq!(seen, expected);
    }
    trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trim_is_seen_on_all_replicas() {
    let mut trio = Trio::durable().await;
    for value in ["a", "b", "c", "d"] {
        trio.write(2, &[value]).await;
    }
    let trim = TrimPartitionRequest { topic: "default".to_owned(), partition: 2, trim_offset: 2 };
    let trim = async |node: &TestServer| node.topics().trim_partition(trim.clone()).await;
    trio.ask_leader(2, trim).await.unwrap();
    for (id, node) in trio.nodes() {
        let status = until("the replica has trimmed", async || {
            node.consume().fetch(from_any(2, 1)).await.err()
        })
        .await;
        assert_eq!(reason(&status), ErrorReason::OffsetOutOfRange);
        let watermarks = detail(&status).watermarks.unwrap();
        assert_eq!(watermarks.log_start_offset, 2, "node {id}");
        let request = FetchRequest { partitions: vec![earliest(2)], ..from_any(2, 0) };
        let read = until("the replica has it all", async || {
            let read = node.fetch_one(request.clone()).await;
            (read.records.len() == 2).then_some(read)
        })
        .await;
        assert_eq!(values(&read.records), ["c", "d"]);
    }
    // Only the leader knows the end.
    let beyond = FetchRequest { partitions: vec![from_offset(2, 9)], ..FetchRequest::default() };
    let beyond = async |node: &TestServer| node.consume().fetch(beyond.clone()).await;
    let status = trio.ask_leader(2, beyond).await.unwrap_err();
    assert_eq!(reason(&status), ErrorReason::OffsetOutOfRange);
    trio.stop_all().await;
}
