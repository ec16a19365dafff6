//! Topics with their own number of replicas.

use std::collections::BTreeSet;

use helix_client::proto::log::v1::{
    GetPlacementRequest, GetTopicRequest, PartitionInfo, PlacementShard,
};
use helix_client::{NewTopic, ProducerOptions};
use helix_proto::log::v1::ErrorReason;

use crate::fleet::{Fleet, added, until_long};
use crate::support::{records, soon};

const PARTITIONS: u32 = 7;

fn topic(name: &str, replicas: u32) -> NewTopic {
    let mut new = NewTopic::new(name, PARTITIONS);
    new.replication_factor = replicas;
    new
}

async fn data_shards(fleet: &Fleet) -> Vec<PlacementShard> {
    let node = fleet.node(*fleet.ids().first().unwrap());
    let response = node.cluster().get_placement(GetPlacementRequest {}).await.unwrap();
    response.into_inner().shards.into_iter().filter(|it| it.shard_id != 0).collect()
}

/// Returns the shards of a topic.
async fn shards_of(fleet: &Fleet, topic: &str) -> BTreeSet<u32> {
    let routes = fleet.metadata().await.topics;
    routes.iter().find(|it| it.topic == topic).unwrap().shard_ids.iter().copied().collect()
}

/// Waits until the shards of a topic have this many replicas.
async fn has_replicas(fleet: &Fleet, topic: &str, replicas: usize) {
    let shards = shards_of(fleet, topic).await;
    until_long(&format!("{topic} has {replicas} replicas"), async || {
        let placed = data_shards(fleet).await;
        let of_topic = || placed.iter().filter(|it| shards.contains(&it.shard_id));
        let is_placed = |it: &PlacementShard| it.node_ids.len() == replicas && it.r#move.is_none();
        (of_topic().count() == shards.len() && of_topic().all(is_placed)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn topics_have_as_many_replicas_as_they_ask_for() {
    let fleet = Fleet::with_shards(&[1, 2, 3, 4, 5], 1).await;
    let client = fleet.client();
    let admin = client.admin();
    soon(admin.create_topic(&topic("plain", 0))).await.unwrap();

    let check = NewTopic { validate_only: true, ..topic("checked", 3) };
    soon(admin.create_topic(&check)).await.unwrap();
    assert_eq!(data_shards(&fleet).await.len(), 1, "a check adds no shards");
    let none = admin.create_topic(&topic("odd", 2)).await.unwrap_err();
    assert!(none.is(ErrorReason::InvalidArgument), "{none}");
    assert!(none.to_string().contains("2 is not one of 1, 3 and 5"), "{none}");

    // Two at once: the shards are added once, one for each node.
    let (first, second) = (topic("three", 3), topic("also-three", 3));
    let both = tokio::join!(admin.create_topic(&first), admin.create_topic(&second));
    assert_eq!(both.0.unwrap().replication_factor, 3);
    assert_eq!(both.1.unwrap().replication_factor, 3);
    let threes = shards_of(&fleet, "three").await;
    assert_eq!((data_shards(&fleet).await.len(), threes.len()), (6, 5));
    assert_eq!(shards_of(&fleet, "also-three").await, threes);
    has_replicas(&fleet, "three", 3).await;
    soon(admin.create_topic(&topic("one", 1))).await.unwrap();
    assert_eq!(data_shards(&fleet).await.len(), 11);
    has_replicas(&fleet, "one", 1).await;
    has_replicas(&fleet, "plain", 5).await;

    // The same again, with another number, and without a wish.
    soon(admin.create_topic(&topic("three", 3))).await.unwrap();
    let differs = admin.create_topic(&topic("three", 5)).await.unwrap_err();
    assert!(differs.is(ErrorReason::TopicAlreadyExists), "{differs}");
    assert!(differs.to_string().contains("replication_factor is 3, not 5"), "{differs}");
    assert_eq!(admin.create_topic(&topic("three", 0)).await.unwrap().replication_factor, 3);
    let plain = shards_of(&fleet, "plain").await;
    soon(admin.create_topic(&topic("plain-again", 0))).await.unwrap();
    assert_eq!(shards_of(&fleet, "plain-again").await, plain);

    // More partitions, and another number of the cluster.
    soon(admin.add_partitions("three", PARTITIONS + 5)).await.unwrap();
    assert_eq!(shards_of(&fleet, "three").await, threes);
    soon(admin.set_replicas(3)).await.unwrap();
    has_replicas(&fleet, "plain", 3).await;
    has_replicas(&fleet, "one", 1).await;
    let own = admin.topic("one").await.unwrap().replication_factor;
    assert_eq!(own, 1);
    let producer = client.producer(ProducerOptions::default());
    for name in ["plain", "three", "also-three", "one"] {
        for partition in 0..PARTITIONS {
            soon(producer.append(name, partition, &records(&["x"])[..])).await.unwrap();
        }
    }
    // Any node describes them, also those whose shards are on other nodes.
    for node in fleet.ids() {
        until_long("the node describes all partitions", async || {
            let request = GetTopicRequest { name: "one".to_owned() };
            let described = fleet.node(node).topics().get_topic(request).await.ok()?;
            let is_known = |it: &PartitionInfo| {
                it.watermarks.is_some_and(|it| it.high_watermark == 1)
                    && it.live_bytes.is_some_and(|bytes| bytes > 0)
            };
            described.into_inner().topic?.partitions.iter().all(is_known).then_some(())
        })
        .await;
    }
    fleet.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shards_with_their_own_number_keep_it() {
    let mut fleet = Fleet::with_shards(&[1, 2, 3], 1).await;
    let admin = fleet.admin();
    let mut request = added(1, 3);
    request.replicas = 5;
    let refused = admin.add_shards(request).await.unwrap_err();
    assert!(refused.to_string().contains("above the number of nodes"), "{refused}");
    request.replicas = 1;
    let both = helix_proto::log::v1::AddShardsRequest { split: true, ..request };
    let refused = admin.add_shards(both).await.unwrap_err();
    assert!(refused.is(ErrorReason::InvalidArgument), "{refused}");
    soon(admin.add_shards(request)).await.unwrap();
    until_long("the shards have their replica", async || {
        let placed = data_shards(&fleet).await;
        placed.iter().all(|it| !it.is_opening).then_some(())
    })
    .await;
    let counts: Vec<(u32, usize)> = data_shards(&fleet)
        .await
        .iter()
        .map(|it| (it.replication_factor, it.node_ids.len()))
        .collect();
    assert_eq!(counts, [(0, 3), (1, 1), (1, 1)]);
    // A restart reads the number back.
    let ids = fleet.ids();
    for node in ids.clone() {
        fleet.stop(node).await;
    }
    fleet.start_nodes(&ids, &ids).await;
    let admin = fleet.admin();
    soon(admin.create_topic(&topic("one", 1))).await.unwrap();
    has_replicas(&fleet, "one", 1).await;
    assert_eq!(data_shards(&fleet).await.len(), 3, "these shards are used");
    fleet.stop_all().await;
}
