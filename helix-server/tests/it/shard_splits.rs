//! Shards that are split while the cluster runs: topics from before spread over the new shards.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use helix_client::proto::log::v1::{PlacementShard, SplitPhase};
use helix_client::{
    Client, Event, FetchOptions, NewTopic, Position, ProducerOptions, ReadOptions, ReadStart,
    Records,
};
use helix_proto::log::v1::ErrorReason;
use tokio::time::Instant;

use crate::fleet::{AppendLoad, Fleet, PARTITIONS, split, until_long};
use crate::support::{records, soon};

async fn shards(fleet: &Fleet) -> Option<Vec<PlacementShard>> {
    Some(fleet.admin().placement().await.ok()?.shards)
}

/// Waits until this many data shards take partitions and nothing is split or moved.
async fn split_into(fleet: &Fleet, count: usize) -> Vec<PlacementShard> {
    let mut last = String::new();
    until_long("the splits are done", async || {
        let found = shards(fleet).await?;
        let state = format!("{found:?}");
        if state != last {
            println!("{state}");
            last = state;
        }
        let is_done = |it: &&PlacementShard| {
            it.shard_id != 0 && !it.is_opening && it.split.is_none() && it.r#move.is_none()
        };
        (found.iter().filter(is_done).count() == count).then_some(found)
    })
    .await
}

/// Returns how many partitions of a topic each shard has.
async fn spread(fleet: &Fleet, topic: &str) -> BTreeMap<u32, usize> {
    let mut counts = BTreeMap::new();
    let topics = fleet.metadata().await.topics;
    let route = topics.iter().find(|it| it.topic == topic).unwrap();
    for shard in &route.shard_ids {
        *counts.entry(*shard).or_default() += 1;
    }
    counts
}

/// Reads `0..count` of a partition: each once, in order.
async fn expect_numbers(client: &Client, topic: &str, partition: u32, count: u64) {
    let mut next = 0;
    until_long("all records are read once, in order", async || {
        while next < count {
            let start = ReadStart::new(topic, partition, Position::Offset(next));
            let options = FetchOptions::default();
            let found = client.consumer().fetch(&[start], &options).await.ok()?.remove(0);
            if found.records.is_empty() {
                return None;
            }
            for record in found.records.iter().filter(|record| record.offset < count) {
                let value = record.value.as_deref().unwrap_or_default();
                assert_eq!(record.offset, next, "{topic}/{partition}");
                assert_eq!(value, next.to_string().as_bytes(), "{topic}/{partition}");
                next += 1;
            }
        }
        Some(())
    })
    .await;
}

/// Reads all partitions of the topic `old` up to a record `end`, as a member of a group or with a
/// subscription. Each record comes once, in order. Returns the number of records.
fn read_all(client: &Client, in_group: bool) -> impl Future<Output = Vec<u64>> + use<> {
    let client = client.clone();
    async move {
        let mut counts = vec![0; 12];
        let mut ended = 0;
        let mut add = |found: &Records| {
            let count: &mut u64 = &mut counts[found.partition as usize];
            for record in &found.records {
                assert_eq!(record.offset, *count, "partition {}", found.partition);
                *count += 1;
                ended += usize::from(record.value.as_deref() == Some(b"end"));
            }
            ended == 12
        };
        if in_group {
            let mut member = client.consumer_group("readers").topics(["old"]).join();
            while !add(&member.next_records().await.unwrap().unwrap()) {}
            member.commit_sync().await.unwrap();
            member.close().await.unwrap();
        } else {
            let start = |partition| ReadStart::new("old", partition, Position::Earliest);
            let starts = (0..12).map(start).collect();
            let mut subscription = client.consumer().subscribe(starts, ReadOptions::default());
            while let Some(event) = subscription.next().await {
                if let Event::Data(found) = event.unwrap()
                    && add(&found)
                {
                    break;
                }
            }
        }
        counts
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn topic_of_one_shard_is_led_by_all_nodes_after_splits() {
    let mut fleet = Fleet::with_shards(&[1, 2, 3], 1).await;
    let client = fleet.client();
    let admin = client.admin();
    soon(admin.set_replicas(3)).await.unwrap();
    soon(admin.create_topic(&NewTopic::new("old", 12))).await.unwrap();
    let load = AppendLoad::start(&client);
    let producer = client.producer(ProducerOptions::default());
    let readers = [read_all(&client, false), read_all(&client, true)].map(tokio::spawn);
    let mut longest = Duration::ZERO;
    for number in 0..40_u64 {
        for partition in 0..12 {
            let text = number.to_string();
            soon(producer.append("old", partition, &records(&[&text])[..])).await.unwrap();
        }
    }
    for node in 4..=6 {
        fleet.add(node).await;
    }
    soon(admin.add_shards(split(1, 12))).await.unwrap();
    // With appends to one partition after the other, so that each is sealed under an append.
    let mut number = 40;
    until_long("the splits are done", async || {
        for partition in 0..12 {
            let (text, since) = (number.to_string(), Instant::now());
            let ack =
                soon(producer.append("old", partition, &records(&[&text])[..])).await.unwrap();
            assert_eq!(ack.first_offset, Some(number), "partition {partition}");
            longest = longest.max(since.elapsed());
        }
        number += 1;
        let found = shards(&fleet).await?;
        let open = found.iter().filter(|it| it.shard_id != 0 && !it.is_opening).count();
        (open == 12).then_some(())
    })
    .await;
    println!("longest append: {longest:?}");
    for partition in 0..12 {
        soon(producer.append("old", partition, &records(&["end"])[..])).await.unwrap();
    }
    for reader in readers {
        assert_eq!(soon(reader).await.unwrap(), vec![number + 1; 12]);
    }
    let found = split_into(&fleet, 12).await;
    assert!(found[1..].iter().all(|it| it.node_ids.len() == 3), "{found:?}");
    let in_shards = spread(&fleet, "old").await;
    assert!(in_shards.values().all(|count| *count <= 2) && in_shards.len() >= 8, "{in_shards:?}");
    soon(admin.balance_leaders()).await.unwrap();
    until_long("all nodes lead partitions of the topic", async || {
        let metadata = fleet.metadata().await;
        let route = metadata.topics.iter().find(|it| it.topic == "old")?;
        let leader = |shard: &u32| {
            let shard = metadata.shards.iter().find(|it| it.shard_id == *shard)?;
            Some(shard.leader.as_ref()?.node_id)
        };
        let leaders: BTreeSet<u64> = route.shard_ids.iter().filter_map(leader).collect();
        (leaders.len() == 6).then_some(())
    })
    .await;
    let counts = load.stop().await;
    for (partition, count) in (0..PARTITIONS).zip(counts) {
        expect_numbers(&client, "default", partition, count).await;
    }
    for partition in 0..12 {
        // Before the last one.
        expect_numbers(&client, "old", partition, number).await;
    }
    // Settings and deletion of the topic reach its new shards.
    soon(admin.trim("old", 3, 10)).await.unwrap();
    soon(admin.add_partitions("old", 15)).await.unwrap();
    for partition in 12..15 {
        soon(producer.append("old", partition, &records(&["0"])[..])).await.unwrap();
    }
    soon(admin.delete_topic("old")).await.unwrap();
    let gone = producer.append("old", 3, &records(&["x"])[..]).await.unwrap_err();
    assert!(gone.is(ErrorReason::TopicNotFound) || gone.is(ErrorReason::TopicDeleted), "{gone}");
    fleet.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn splits_survive_a_restart_of_all_nodes_in_the_middle() {
    let mut fleet = Fleet::with_shards(&[1, 2, 3], 1).await;
    let client = fleet.client();
    let producer = client.producer(ProducerOptions::default());
    for number in 0..50_u64 {
        for partition in 0..PARTITIONS {
            let text = number.to_string();
            soon(producer.append("default", partition, &records(&[&text])[..])).await.unwrap();
        }
    }
    soon(client.admin().add_shards(split(1, 4))).await.unwrap();
    until_long("a split copies or moves", async || {
        let found = shards(&fleet).await?;
        let is_running = |it: &PlacementShard| {
            let phase = it.split.as_ref().map(|split| split.phase());
            matches!(phase, Some(SplitPhase::Copying | SplitPhase::Moving))
                || (it.shard_id > 1 && !it.is_opening)
        };
        found.iter().any(is_running).then_some(())
    })
    .await;
    let ids = fleet.ids();
    for node in ids.clone() {
        fleet.stop(node).await;
    }
    fleet.start_nodes(&ids, &ids).await;
    split_into(&fleet, 4).await;
    let in_shards = spread(&fleet, "default").await;
    assert!(in_shards.values().all(|count| *count == 1), "{in_shards:?}");
    let client = fleet.client();
    for partition in 0..PARTITIONS {
        expect_numbers(&client, "default", partition, 50).await;
        let producer = client.producer(ProducerOptions::default());
        let ack = soon(producer.append("default", partition, &records(&["50"])[..])).await.unwrap();
        assert_eq!(ack.first_offset, Some(50));
    }
    // And once more from the new logs alone.
    for node in ids.clone() {
        fleet.stop(node).await;
    }
    fleet.start_nodes(&ids, &ids).await;
    let client = fleet.client();
    for partition in 0..PARTITIONS {
        expect_numbers(&client, "default", partition, 51).await;
    }
    fleet.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operator_cancels_a_split() {
    let fleet = Fleet::with_shards(&[1, 2, 3], 1).await;
    let client = fleet.client();
    let admin = client.admin();
    let load = AppendLoad::start(&client);
    soon(admin.add_shards(split(1, 2))).await.unwrap();
    // The split may be done before.
    let cancelled = admin.cancel_move(2).await;
    let count = until_long("the split is over", async || {
        let found = shards(&fleet).await?;
        found.iter().all(|it| it.split.is_none()).then_some(found.len())
    })
    .await;
    let in_shards = spread(&fleet, "default").await;
    match (cancelled, count) {
        (Ok(_), 2) => assert_eq!(in_shards, BTreeMap::from([(1, 4)])),
        (_, 3) => assert_eq!(in_shards, BTreeMap::from([(1, 2), (2, 2)])),
        other => panic!("{other:?}"),
    }
    let unknown = admin.cancel_move(9).await.unwrap_err();
    assert!(unknown.is(ErrorReason::InvalidArgument), "{unknown}");
    let counts = load.stop().await;
    for (partition, count) in (0..PARTITIONS).zip(counts) {
        expect_numbers(&client, "default", partition, count).await;
    }
    fleet.stop_all().await;
}
