//! Shards with replicas on some of the nodes: growing beyond five nodes, moves, and nodes without a
//! replica. No acked record is lost or duplicated, and no append fails at a client that retries.

// Tests list data directories.
#![allow(clippy::disallowed_methods)]

use std::collections::{BTreeMap, BTreeSet};

use helix_client::proto::log::v1::{GetPlacementResponse, PlacementShard};
use helix_client::{Client, Config, ProducerOptions};
use helix_proto::log::v1::{
    ErrorReason, GetPlacementRequest, GroupSummary, ListGroupsRequest, SubscribeResponse,
};
use tonic::{Status, Streaming};

use crate::fleet::{AppendLoad, Fleet, PARTITIONS, all_values, until_long};
use crate::groups::{TestMember, groups, leave};
use crate::support::{append_request, reason, records, soon};

const SHARDS: u64 = 6;

async fn placement(fleet: &Fleet) -> Option<GetPlacementResponse> {
    let node = fleet.node(*fleet.ids().first()?);
    Some(node.cluster().get_placement(GetPlacementRequest {}).await.ok()?.into_inner())
}

async fn shard(fleet: &Fleet, shard_id: u32) -> PlacementShard {
    let found = until_long("the placement is known", async || {
        placement(fleet).await?.shards.into_iter().find(|it| it.shard_id == shard_id)
    });
    found.await
}

/// Waits until each data shard has this many replicas, spread evenly, and nothing moves.
async fn settled(fleet: &Fleet, replicas: usize) -> GetPlacementResponse {
    let mut last = String::new();
    until_long("the replicas are spread", async || {
        let found = placement(fleet).await?;
        let state = format!("{found:?}");
        if state != last {
            println!("{state}");
            last = state;
        }
        let is_placed = |it: &PlacementShard| {
            it.r#move.is_none() && (it.shard_id == 0 || it.node_ids.len() == replicas)
        };
        let counts: Vec<u32> = found.nodes.iter().map(|it| it.replicas).collect();
        let is_even = counts.iter().max()? - counts.iter().min()? <= 1;
        let is_settled = found.shards.iter().all(is_placed) && found.planned.is_empty();
        (is_settled && is_even).then_some(found)
    })
    .await
}

/// Expects all records on each node that has a replica of their shard, by the placement.
async fn expect_all(fleet: &Fleet, counts: &[u64]) {
    let routes = fleet.metadata().await.topics;
    let route = routes.iter().find(|it| it.topic == "default").unwrap();
    for (partition, &count) in (0..).zip(counts) {
        let shard_id = route.shard_ids[partition as usize];
        for node in shard(fleet, shard_id).await.node_ids {
            let found = all_values(fleet.node(node), partition, count).await;
            let expected = (0..count).map(|number| number.to_string());
            assert!(found.iter().cloned().eq(expected), "node {node}, partition {partition}");
        }
    }
}

/// Waits until exactly the nodes of the placement have files of their data shards.
async fn expect_files(fleet: &Fleet, found: &GetPlacementResponse) {
    for shard in found.shards.iter().filter(|it| it.shard_id != 0) {
        let placed: BTreeSet<u64> = shard.node_ids.iter().copied().collect();
        until_long("the files of removed replicas are deleted", async || {
            let has_log = |node: &u64| {
                let directory = fleet.data_dir(*node).join(format!("shard-{}", shard.shard_id));
                std::fs::read_dir(directory).is_ok_and(|mut files| files.next().is_some())
            };
            let holding: BTreeSet<u64> = fleet.ids().into_iter().filter(has_log).collect();
            (holding == placed).then_some(())
        })
        .await;
    }
}

fn generation(fleet: &Fleet, node: u64, shard_id: u64) -> Option<u64> {
    let shard = fleet.node(node).running.node().shard(shard_id)?;
    Some(shard.replica().id() & u64::from(u32::MAX))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_nodes_grow_to_six_and_shrink_under_load() {
    let mut fleet = Fleet::with_shards(&[1, 2, 3], SHARDS).await;
    let client = fleet.client();
    let load = AppendLoad::start(&client);
    soon(client.admin().set_replicas(3)).await.unwrap();
    for node in 4..=6 {
        fleet.add(node).await;
    }
    let found = settled(&fleet, 3).await;
    assert!(found.nodes.iter().all(|it| it.replicas == 3), "{found:?}");
    assert_eq!(found.shards[0].node_ids.len(), 5, "five of six nodes vote in shard 0");
    expect_files(&fleet, &found).await;

    // A node without a replica names the leader, and a client that knows only this node works.
    let routes = fleet.metadata().await.topics;
    let shard_id = routes.iter().find(|it| it.topic == "default").unwrap().shard_ids[0];
    let holders = shard(&fleet, shard_id).await.node_ids;
    let other = fleet.ids().into_iter().find(|node| !holders.contains(node)).unwrap();
    until_long("the node knows the leader", async || {
        let refused = fleet.node(other).produce().append(append_request(&["x"])).await.err()?;
        (reason(&refused) == ErrorReason::NotLeader).then_some(())
    })
    .await;
    let single = Client::new(Config::new([fleet.listen(other)])).unwrap();
    soon(single.admin().create_topic(&helix_client::NewTopic::new("through", 6))).await.unwrap();
    let producer = single.producer(ProducerOptions::default());
    for partition in 0..6 {
        soon(producer.append("through", partition, &records(&["y"])[..])).await.unwrap();
    }

    // A group's coordinator and the leaders of its partitions are different nodes.
    let mut consumer = single.consumer_group("readers").topics(["through"]).join();
    let mut seen = 0;
    while seen < 6 {
        seen += soon(consumer.next_records()).await.unwrap().unwrap().records.len();
    }
    soon(consumer.commit_sync()).await.unwrap();
    soon(consumer.close()).await.unwrap();
    for node in fleet.ids() {
        until_long("each node lists the group without lag", async || {
            let mut service = groups(fleet.node(node));
            let listed = service.list_groups(ListGroupsRequest::default()).await.ok()?;
            let rows = listed.into_inner().groups;
            let is_done = |row: &GroupSummary| {
                row.group == "readers"
                    && (row.total_lag, row.uncommitted_lag, row.unknown_lags) == (0, 0, 0)
            };
            (rows.len() == 1 && rows.iter().all(is_done)).then_some(())
        })
        .await;
    }

    let admin = client.admin();
    soon(admin.set_cordoned(2, true)).await.unwrap();
    let before = found.nodes.iter().find(|it| it.node_id == 2).unwrap().replicas;
    let removed = fleet.remove(6).await;
    let found = until_long("its replicas are elsewhere", async || {
        let found = placement(&fleet).await?;
        let is_whole = |it: &PlacementShard| it.r#move.is_none() && it.node_ids.len() >= 3;
        found.shards.iter().all(is_whole).then_some(found)
    })
    .await;
    assert!(found.shards.iter().all(|it| !it.node_ids.contains(&6)), "{found:?}");
    let cordoned = found.nodes.iter().find(|it| it.node_id == 2).unwrap();
    assert!(cordoned.replicas <= before && cordoned.refusal == "is cordoned", "{found:?}");
    let free = found.shards.iter().find(|it| it.shard_id != 0 && !it.node_ids.contains(&2));
    let free = free.unwrap();
    let refused = admin.move_shard(free.shard_id, free.node_ids[0], 2).await.unwrap_err();
    assert!(refused.to_string().contains("node 2 is cordoned"), "{refused}");
    soon(admin.set_cordoned(2, false)).await.unwrap();
    settled(&fleet, 3).await;
    let counts = load.stop().await;
    assert_eq!(counts.len(), PARTITIONS as usize);
    expect_all(&fleet, &counts).await;
    removed.running.shutdown().await;
    fleet.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replica_moves_away_and_returns_under_a_new_generation() {
    let mut fleet = Fleet::with_shards(&[1, 2, 3], 2).await;
    let admin = fleet.admin();
    let load = AppendLoad::start(&fleet.client());
    soon(admin.set_replicas(3)).await.unwrap();
    fleet.add(4).await;
    let found = settled(&fleet, 3).await;
    let holder = found.shards.iter().find(|it| it.shard_id == 1).unwrap().node_ids[0];
    let refusals = [
        (admin.move_shard(9, 1, 4).await, "there is no shard 9"),
        (admin.move_shard(0, 1, 4).await, "shard 0 has a replica on every node"),
        (admin.move_shard(1, holder, 7).await, "node 7 is not in this cluster"),
    ];
    for (refused, words) in refusals {
        let refused = refused.unwrap_err();
        assert!(refused.to_string().contains(words), "{refused}");
    }
    let row = found.shards.iter().find(|it| it.shard_id == 1).unwrap();
    let away = (1..=4).find(|node| !row.node_ids.contains(node)).unwrap();
    let taken = admin.move_shard(1, row.node_ids[0], row.node_ids[1]).await.unwrap_err();
    assert!(taken.to_string().contains("has a replica of shard 1 already"), "{taken}");

    // The node that leads the shard gives its replica away, and gets it again.
    let leader = fleet.leader(1).await;
    let before = generation(&fleet, leader, 1).unwrap();
    let moved = async |from: u64, to: u64| {
        soon(admin.move_shard(1, from, to)).await.unwrap();
        until_long("the replica has moved", async || {
            let row = shard(&fleet, 1).await;
            let is_done = row.r#move.is_none() && row.node_ids.contains(&to);
            (is_done && !row.node_ids.contains(&from)).then_some(())
        })
        .await;
        until_long("the old replica is gone", async || {
            generation(&fleet, from, 1).is_none().then_some(())
        })
        .await;
    };
    moved(leader, away).await;
    moved(away, leader).await;
    let after = generation(&fleet, leader, 1).unwrap();
    assert!(after > before, "generation {after} after {before}");
    let counts = load.stop().await;
    expect_all(&fleet, &counts).await;
    let found = settled(&fleet, 3).await;
    expect_files(&fleet, &found).await;
    fleet.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn move_continues_after_its_nodes_stop_in_the_middle() {
    let mut fleet = Fleet::with_shards(&[1, 2, 3], 2).await;
    let admin = fleet.admin();
    soon(admin.set_replicas(3)).await.unwrap();
    fleet.add(4).await;
    let load = AppendLoad::start(&fleet.client());
    let found = settled(&fleet, 3).await;
    let row = found.shards.iter().find(|it| it.shard_id == 1).unwrap();
    let to = (1..=4).find(|node| !row.node_ids.contains(node)).unwrap();
    let leader = fleet.leader(1).await;
    let from = row.node_ids.iter().copied().find(|node| *node != leader).unwrap();
    soon(admin.move_shard(1, from, to)).await.unwrap();
    let others: Vec<u64> = (1..=4).collect();
    for stopped in [to, leader] {
        fleet.stop(stopped).await;
        fleet.start_nodes(&[stopped], &others).await;
    }
    until_long("the replica has moved", async || {
        let row = shard(&fleet, 1).await;
        let is_done = row.r#move.is_none() && row.node_ids.contains(&to);
        (is_done && !row.node_ids.contains(&from)).then_some(())
    })
    .await;
    let counts = load.stop().await;
    expect_all(&fleet, &counts).await;
    let found = settled(&fleet, 3).await;
    expect_files(&fleet, &found).await;
    fleet.stop_all().await;
}

/// The node of a reader has no replica of the group, and asks for it while records keep coming.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn busy_readers_far_from_their_group_end_when_partitions_are_revoked() {
    let fleet = Fleet::with_shards(&[1, 2, 3], 3).await;
    let client = fleet.client();
    soon(client.admin().set_replicas(1)).await.unwrap();
    settled(&fleet, 1).await;
    let load = AppendLoad::start(&client);
    let mut a = TestMember::new("a", &["default"]);
    let coordinator = until_long("a node coordinates the group", async || {
        for node in fleet.ids() {
            if a.beat(fleet.node(node)).await.is_ok() {
                return Some(fleet.node(node));
            }
        }
        None
    });
    let coordinator = coordinator.await;
    a.until_owns(coordinator, 4).await;
    let routes = fleet.metadata().await.topics;
    let shard_ids = &routes.iter().find(|it| it.topic == "default").unwrap().shard_ids;
    let mut streams = BTreeMap::new();
    for number in 0..PARTITIONS {
        let server = fleet.node(fleet.leader(shard_ids[number as usize]).await);
        if !std::ptr::eq(server, coordinator) {
            let request = a.subscribe_to(number);
            streams.insert(number, server.consume().subscribe(request).await.unwrap().into_inner());
        }
    }
    assert!(!streams.is_empty(), "each node has one of the three shards");
    let mut b = TestMember::new("b", &["default"]);
    until_long("the members have two partitions each", async || {
        a.beat(coordinator).await.unwrap();
        b.beat(coordinator).await.unwrap();
        (a.numbers().len() == 2 && b.numbers().len() == 2).then_some(())
    })
    .await;
    for number in b.numbers() {
        if let Some(stream) = streams.remove(&number) {
            assert_eq!(reason(&soon(end_of(stream)).await), ErrorReason::PartitionNotOwned);
        }
    }
    leave(coordinator, "a").await;
    for stream in streams.into_values() {
        assert_eq!(reason(&soon(end_of(stream)).await), ErrorReason::UnknownMember);
    }
    load.stop().await;
    fleet.stop_all().await;
}

/// Reads to the error that ends a subscription.
async fn end_of(mut stream: Streaming<SubscribeResponse>) -> Status {
    loop {
        match stream.message().await {
            Ok(message) => assert!(message.is_some(), "it has no other end"),
            Err(status) => return status,
        }
    }
}
