//! Space that comes back on every replica, also on one that was away when it was given up.

use std::time::Duration;

use bytes::Bytes;
use helix_client::{NewTopic, ProducerOptions};
use helix_proto::log::v1::Record;

use crate::support::TestServer;
use crate::trio::{Plan, Trio, shard_of, until, until_within};

const RECORD_BYTES: usize = 1_000_000;
const SEGMENT_BYTES: u64 = 16 << 20;

fn large() -> [Record; 1] {
    [Record { value: Some(Bytes::from(vec![7; RECORD_BYTES])), ..Record::default() }]
}

fn held_bytes(node: &TestServer, shard: u32) -> u64 {
    node.running.node().shard(shard.into()).map_or(0, |shard| shard.status().wal.held_bytes)
}

/// One replica has the topic on its disk and is away while it is deleted, and while the others
/// purge the log that says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_topic_gives_its_space_back_also_where_a_replica_was_away() {
    let mut trio = Trio::start(Plan::new().with_short_logs()).await;
    let client = trio.client();
    client.admin().create_topic(&NewTopic::new("doomed", 1)).await.unwrap();
    let producer = client.producer(ProducerOptions::default());
    for _ in 0..80 {
        producer.append("doomed", 0, &large()[..]).await.unwrap();
    }
    let metadata = crate::trio::metadata(trio.node(1)).await;
    let shard = shard_of(&metadata, "doomed", 0);
    let beside = (0..4).find(|it| shard_of(&metadata, "default", *it) == shard);
    let beside = beside.expect("the default topic has a partition in every shard");
    let before = 80 * RECORD_BYTES as u64;
    until("every replica has it on its disk", async || {
        trio.nodes().all(|(_, node)| held_bytes(node, shard) > before).then_some(())
    })
    .await;
    let (leader, _) = trio.leader_of(beside).await;
    let away = (1..=3).find(|id| *id != leader).unwrap();
    trio.stop(away).await;
    client.admin().delete_topic("doomed").await.unwrap();
    // What the log needs to go on from, so that its beginning is purged.
    for _ in 0..8 {
        producer.append("default", beside, &large()[..]).await.unwrap();
    }
    let few = 3 * SEGMENT_BYTES;
    let is_free = async |trio: &Trio, what: &str| {
        until_within(Duration::from_secs(60), what, async || {
            trio.nodes().all(|(_, node)| held_bytes(node, shard) <= few).then_some(())
        })
        .await;
    };
    is_free(&trio, "those that are there have their space back").await;
    trio.start_nodes(&[away]).await;
    is_free(&trio, "the one that was away has its space back").await;
    trio.settle().await;
    trio.stop_all().await;
}
