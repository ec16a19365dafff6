//! Freed space on every replica, also on a replica that was absent when the topic was deleted.

use std::time::Duration;

use bytes::Bytes;
use helix_client::{NewTopic, ProducerOptions};
use helix_proto::log::v1::Record;

use crate::support::TestServer;
use crate::trio::{Trio, TrioPlan, shard_of, until, until_within};

const RECORD_BYTES: usize = 1_000_000;
const SEGMENT_BYTES: u64 = 16 << 20;

fn large() -> [Record; 1] {
    [Record { value: Some(Bytes::from(vec![7; RECORD_BYTES])), ..Record::default() }]
}

fn held_bytes(node: &TestServer, shard: u32) -> u64 {
    node.running.node().shard(shard.into()).map_or(0, |shard| shard.status().wal.held_bytes)
}

/// One replica is absent while a topic is deleted and the others purge the log with the deletion.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleted_topic_frees_space_on_absent_replicas_too() {
    let mut trio = Trio::start(TrioPlan::new().with_short_logs()).await;
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
    until("every replica has the topic on its disk", async || {
        trio.nodes().all(|(_, node)| held_bytes(node, shard) > before).then_some(())
    })
    .await;
    let (leader, _) = trio.leader_of(beside).await;
    let away = (1..=3).find(|id| *id != leader).unwrap();
    trio.stop(away).await;
    client.admin().delete_topic("doomed").await.unwrap();
    // Enough log after it for the deletion to be purged.
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
    is_free(&trio, "the running replicas have freed the space").await;
    trio.start_nodes(&[away]).await;
    is_free(&trio, "the absent replica has freed the space").await;
    trio.settle().await;
    trio.stop_all().await;
}
