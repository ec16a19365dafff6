//! A node that was absent catches up from the logs of the others, which keep enough of them, or for
//! shard 0 by a snapshot of the cluster state.

use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use helix_client::{NewTopic, ProducerOptions};
use helix_proto::log::v1::{InitProducerRequest, ProducerIdentity, Record};
use helix_server::limits::{CHECKPOINT_BYTES, CLUSTER_CHECKPOINT_ENTRIES, MAINTENANCE_INTERVAL};

use crate::support::TestServer;
use crate::trio::{Trio, expect_equal_replicas, from_any, metadata, shard_status, topic, until};

/// A little less than the largest record.
const RECORD_BYTES: usize = 1_000_000;

/// A record with bytes derived from its number.
fn large(number: u64) -> [Record; 1] {
    let mut value = vec![u8::try_from(number % 251).unwrap(); RECORD_BYTES];
    value[..8].copy_from_slice(&number.to_le_bytes());
    [Record { value: Some(Bytes::from(value)), ..Record::default() }]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn absent_node_catches_up_from_the_logs() {
    let mut trio = Trio::durable().await;
    trio.write(0, &["before"]).await;
    expect_equal_replicas(&trio, 0, 1).await;
    let (_, shard) = trio.leader_of(0).await;
    let away = trio.followers_of(0).await[0];
    let had = shard_status(trio.node(away), shard).await.last_index;
    trio.stop(away).await;

    let count = CHECKPOINT_BYTES / RECORD_BYTES as u64 + 4;
    let producer = trio.client().producer(ProducerOptions::default());
    for number in 0..count {
        producer.append("default", 0, &large(number)[..]).await.unwrap();
    }
    let (leader, _) = trio.leader_of(0).await;
    let status = shard_status(trio.node(leader), shard).await;
    assert!(status.purged_index <= had, "{status:?} is purged of what node {away} lacks");
    assert!(status.segment_count > 4, "{status:?}");
    // One maintenance round writes the checkpoint, the next releases log.
    let shard_of_leader = trio.node(leader).running.node().shard(u64::from(shard)).unwrap();
    let released = async {
        let mut look = tokio::time::interval(Duration::from_millis(20));
        while shard_of_leader.released() <= had {
            look.tick().await;
        }
    };
    let is_released = tokio::time::timeout(4 * MAINTENANCE_INTERVAL, released).await.is_ok();
    assert!(!is_released, "node {away} still needs the released log");
    drop(shard_of_leader);

    trio.start_nodes(&[away]).await;
    trio.settle().await;
    expect_equal_replicas(&trio, 0, count + 1).await;
    for (_, node) in trio.nodes() {
        until("the log is purged once all nodes have it", async || {
            (shard_status(node, shard).await.purged_index > had).then_some(())
        })
        .await;
    }
    // Records that were purged from the log are still readable.
    let read = trio.node(away).fetch_one(from_any(0, 0)).await;
    assert_eq!(read.records[0].offset, 0);
    trio.stop_all().await;
}

/// Index up to which a node's log of shard 0 is purged.
fn purged(node: &TestServer) -> u64 {
    node.running.node().cluster().replica().checkpointed().1
}

fn last_index(node: &TestServer) -> u64 {
    node.running.node().cluster().replica().status().last_index
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn absent_node_catches_up_by_cluster_snapshot() {
    let mut trio = Trio::durable().await;
    let admin = trio.client().admin();
    admin.create_topic(&NewTopic::new("doomed", 2)).await.unwrap();
    let away = trio.leaders().await[&0] % 3 + 1;
    let init = InitProducerRequest { producer_name: "worker".to_owned() };
    let first = trio.node(away).produce().init_producer(init.clone()).await.unwrap();
    let ProducerIdentity { producer_id, epoch } = first.into_inner().producer.unwrap();
    let had = last_index(trio.node(away));
    trio.stop(away).await;

    admin.create_topic(&NewTopic::new("early", 2)).await.unwrap();
    admin.delete_topic("doomed").await.unwrap();
    let leader = trio.leaders().await[&0];
    let produce = trio.node(leader).produce();
    let commands = stream::iter(0..2 * CLUSTER_CHECKPOINT_ENTRIES + 100).map(|number| {
        let mut produce = produce.clone();
        let name = format!("producer-{}", number % 50);
        async move {
            let request = InitProducerRequest { producer_name: name };
            produce.init_producer(request).await.unwrap();
        }
    });
    commands.buffer_unordered(64).collect::<Vec<()>>().await;
    admin.create_topic(&NewTopic::new("late", 3)).await.unwrap();
    for (_, node) in trio.nodes() {
        until("the entries that the node lacks are purged", async || {
            (purged(node) > had).then_some(())
        })
        .await;
    }

    trio.start_nodes(&[away]).await;
    trio.settle().await;
    let node = trio.node(away);
    assert_eq!(topic(node, "early").await.unwrap().partitions.len(), 2);
    assert_eq!(topic(node, "late").await.unwrap().partitions.len(), 3);
    assert!(topic(node, "doomed").await.is_err());
    until("its state equals that of the others", async || {
        let own = metadata(node).await;
        let other = metadata(trio.node(leader)).await;
        (own.version == other.version && own.topics == other.topics).then_some(())
    })
    .await;
    let next = ProducerIdentity { producer_id, epoch: epoch + 1 };
    let again = node.produce().init_producer(init).await.unwrap().into_inner().producer;
    assert_eq!(again, Some(next), "the producers are kept");
    // State from a snapshot survives a restart.
    trio.stop(away).await;
    trio.start_nodes(&[away]).await;
    trio.settle().await;
    assert_eq!(topic(trio.node(away), "late").await.unwrap().partitions.len(), 3);
    trio.stop_all().await;
}
