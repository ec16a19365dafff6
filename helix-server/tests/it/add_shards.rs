//! Data shards that are added while the cluster runs.

use helix_client::NewTopic;
use helix_client::proto::log::v1::{GetPlacementRequest, PlacementShard};
use helix_proto::log::v1::ErrorReason;

use crate::fleet::{AppendLoad, Fleet, added, until_long};
use crate::support::{records, soon};

async fn shards(fleet: &Fleet) -> Option<Vec<PlacementShard>> {
    let node = fleet.node(*fleet.ids().first()?);
    Some(node.cluster().get_placement(GetPlacementRequest {}).await.ok()?.into_inner().shards)
}

/// Waits until this many data shards take partitions.
async fn open(fleet: &Fleet, count: usize) -> Vec<PlacementShard> {
    let mut last = String::new();
    until_long("the shards take partitions", async || {
        let found = shards(fleet).await?;
        let state = format!("{found:?}");
        if state != last {
            println!("{state}");
            last = state;
        }
        let open = found.iter().filter(|it| it.shard_id != 0 && !it.is_opening).count();
        (open == count).then_some(found)
    })
    .await
}

/// Returns the shard of each partition of a topic.
async fn shards_of(fleet: &Fleet, topic: &str) -> Vec<u32> {
    let routes = fleet.metadata().await.topics;
    routes.iter().find(|it| it.topic == topic).unwrap().shard_ids.clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_topics_use_shards_that_were_added_under_load() {
    let mut fleet = Fleet::with_shards(&[1, 2, 3], 1).await;
    let client = fleet.client();
    let admin = client.admin();
    let load = AppendLoad::start(&client);
    soon(admin.set_replicas(3)).await.unwrap();
    soon(admin.create_topic(&NewTopic::new("old", 3))).await.unwrap();
    for node in 4..=6 {
        fleet.add(node).await;
    }
    soon(admin.add_shards(added(1, 6))).await.unwrap();
    let found = open(&fleet, 6).await;
    assert!(found[1..].iter().all(|it| it.node_ids.len() == 3), "{found:?}");

    // A repeated request, another operator's, and a number beyond the limit.
    soon(admin.add_shards(added(1, 6))).await.unwrap();
    let meanwhile = admin.add_shards(added(1, 9)).await.unwrap_err();
    assert!(meanwhile.is(ErrorReason::MembershipChangeInProgress), "{meanwhile}");
    let beyond = admin.add_shards(added(6, 65)).await.unwrap_err();
    assert!(beyond.is(ErrorReason::InvalidArgument), "{beyond}");

    soon(admin.create_topic(&NewTopic::new("new", 12))).await.unwrap();
    let mut in_shards = shards_of(&fleet, "new").await;
    in_shards.sort_unstable();
    assert_eq!(in_shards, [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]);
    soon(admin.add_partitions("old", 13)).await.unwrap();
    let of_old = shards_of(&fleet, "old").await;
    assert_eq!(of_old[..3], [1, 1, 1], "existing partitions stay");
    assert!(of_old[3..].iter().all(|shard| *shard > 1), "{of_old:?}");
    let producer = client.producer(helix_client::ProducerOptions::default());
    for (topic, count) in [("new", 12), ("old", 13)] {
        for partition in 0..count {
            soon(producer.append(topic, partition, &records(&["x"])[..])).await.unwrap();
        }
    }
    // Every node leads some of the new topic's partitions.
    until_long("all nodes lead partitions of the new topic", async || {
        // Fails for a shard whose next leader is not caught up yet.
        let _ = soon(admin.balance_leaders()).await;
        let metadata = fleet.metadata().await;
        let route = metadata.topics.iter().find(|it| it.topic == "new")?;
        let leader = |shard: &u32| {
            let shard = metadata.shards.iter().find(|it| it.shard_id == *shard)?;
            Some(shard.leader.as_ref()?.node_id)
        };
        let leaders: std::collections::BTreeSet<u64> =
            route.shard_ids.iter().filter_map(leader).collect();
        (leaders.len() == 6).then_some(())
    })
    .await;
    load.stop().await;
    fleet.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn added_shards_survive_a_restart_of_all_nodes_in_the_middle() {
    let mut fleet = Fleet::with_shards(&[1, 2, 3], 1).await;
    let admin = fleet.admin();
    soon(admin.add_shards(added(1, 8))).await.unwrap();
    let ids = fleet.ids();
    // Some have a first replica by then, some have none.
    until_long("a shard has a replica", async || {
        let found = shards(&fleet).await?;
        found.iter().any(|it| it.shard_id > 1 && !it.node_ids.is_empty()).then_some(())
    })
    .await;
    for node in ids.clone() {
        fleet.stop(node).await;
    }
    fleet.start_nodes(&ids, &ids).await;
    let found = open(&fleet, 8).await;
    assert!(found[1..].iter().all(|it| it.node_ids.len() == 3), "{found:?}");
    let client = fleet.client();
    soon(client.admin().create_topic(&NewTopic::new("new", 16))).await.unwrap();
    let producer = client.producer(helix_client::ProducerOptions::default());
    for partition in 0..16 {
        soon(producer.append("new", partition, &records(&["x"])[..])).await.unwrap();
    }
    fleet.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_that_leaves_gives_up_the_first_replica_of_a_new_shard() {
    let mut fleet = Fleet::with_shards(&[1, 2, 3], 1).await;
    soon(fleet.admin().set_replicas(1)).await.unwrap();
    fleet.add(4).await;
    // With one replica each, some new shards are on the node that leaves.
    soon(fleet.admin().add_shards(added(1, 12))).await.unwrap();
    let removed = fleet.remove(4).await;
    let found = open(&fleet, 12).await;
    assert!(found.iter().all(|it| !it.node_ids.contains(&4)), "{found:?}");
    let client = fleet.client();
    soon(client.admin().create_topic(&NewTopic::new("new", 12))).await.unwrap();
    let producer = client.producer(helix_client::ProducerOptions::default());
    for partition in 0..12 {
        soon(producer.append("new", partition, &records(&["x"])[..])).await.unwrap();
    }
    removed.running.shutdown().await;
    fleet.stop_all().await;
}
