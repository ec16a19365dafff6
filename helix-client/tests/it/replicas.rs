//! Tests of reads from any replica: failed nodes, no leader, and lagging replicas.

use std::time::Duration;

use helix_client::{
    Client, Config, Event, FetchOptions, Position, ReadOptions, ReadSource, ReadStart, Subscription,
};
use tonic::Code;

use crate::consume::{check, fill};
use crate::fake_cluster::{FakeCluster, TOPIC};
use crate::{client, config, in_time, record, seed};

/// Returns options that prefer this node.
fn from(node_id: u64) -> ReadOptions {
    let preferred_node = Some(node_id);
    ReadOptions { source: ReadSource::AnyReplica, preferred_node, ..ReadOptions::default() }
}

fn fetching(read: ReadOptions) -> FetchOptions {
    FetchOptions { read, ..FetchOptions::default() }
}

async fn fetch(client: &Client, offset: u64, read: ReadOptions) -> helix_client::Result<u64> {
    let start = [ReadStart::new(TOPIC, 0, Position::Offset(offset))];
    let fetched = in_time(client.consumer().fetch(&start, &fetching(read))).await?;
    let mut next = offset;
    check(&fetched[0], &mut next);
    Ok(next)
}

async fn read_until(subscription: &mut Subscription, next: &mut u64, end: u64) {
    while *next < end {
        if let Event::Data(records) = in_time(subscription.next()).await.unwrap().unwrap() {
            check(&records, next);
        }
    }
}

#[tokio::test]
async fn reads_from_the_preferred_node_that_lags() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    fill(&client, 1).await;
    cluster.partition(2);
    fill(&client, 1).await;
    let mut behind = 0;
    while behind < 3 {
        behind = fetch(&client, behind, from(3)).await.unwrap();
    }
    assert_eq!(fetch(&client, 3, from(3)).await.unwrap(), 3, "the partitioned replica has no more");
}

#[tokio::test]
async fn leader_confirms_an_out_of_range_offset() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    cluster.partition(2);
    let producer = client.producer(helix_client::ProducerOptions::default());
    for number in 0..6 {
        let records = vec![record(number.to_string())];
        producer.append(TOPIC, 0, &records).await.unwrap();
    }
    assert!(fetch(&client, 5, from(3)).await.unwrap() > 5);
    let error = fetch(&client, 7, from(3)).await.unwrap_err();
    assert_eq!(error.code, Code::OutOfRange);
    let starts = vec![ReadStart::new(TOPIC, 0, Position::Offset(4)).until(6)];
    let mut subscription = client.consumer().subscribe(starts, from(3));
    let mut next = 4;
    read_until(&mut subscription, &mut next, 6).await;
    assert!(in_time(subscription.next()).await.is_none());
}

#[tokio::test]
async fn read_with_an_end_moves_on_from_a_lagging_replica() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    fill(&client, 1).await;
    cluster.partition(2);
    fill(&client, 1).await;
    // Node 3 has three of the six records.
    let starts = vec![ReadStart::new(TOPIC, 0, Position::Earliest).until(6)];
    let mut subscription = client.consumer().subscribe(starts, from(3));
    let mut records = 0;
    while let Some(event) = in_time(subscription.next()).await {
        if let Event::Data(data) = event.unwrap() {
            records += data.records.len();
        }
    }
    assert_eq!(records, 6);
}

#[tokio::test]
async fn read_beyond_every_replica_says_which_one_lags() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    fill(&client, 1).await;
    let starts = vec![ReadStart::new(TOPIC, 0, Position::Earliest).until(9)];
    let options = ReadOptions { lag_max: Some(Duration::from_secs(2)), ..from(3) };
    let mut subscription = client.consumer().subscribe(starts, options);
    let error = loop {
        match in_time(subscription.next()).await.expect("an error") {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(error.code, Code::Unavailable);
    let said = "has no records at offset 3, before the end 9";
    assert!(error.message.contains(said) && error.message.contains("node"), "{error}");
}

#[tokio::test]
async fn new_partitions_are_read_from_their_beginning() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    fill(&client, 2).await;
    // The partitions above the highest start count as added.
    let starts = vec![ReadStart::new(TOPIC, 1, Position::Latest)];
    let options = ReadOptions { new_partitions: true, ..ReadOptions::default() };
    let mut subscription = client.consumer().subscribe(starts, options);
    let mut next = [0; 4];
    while next != [0, 0, 6, 6] {
        if let Event::Data(records) = in_time(subscription.next()).await.unwrap().unwrap() {
            check(&records, &mut next[records.partition as usize]);
        }
    }
}

#[tokio::test]
async fn reads_work_without_a_leader() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    fill(&client(&cluster), 1).await;
    cluster.depose();
    let client = client(&cluster);
    for node_id in 1..=3 {
        assert!(fetch(&client, 0, from(node_id)).await.unwrap() > 0);
    }
}

#[tokio::test]
async fn reader_avoids_dead_and_stopped_nodes() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let writer = client(&cluster);
    let transport = helix_client::Transport {
        keepalive_interval: Duration::from_millis(200),
        keepalive_timeout: Duration::from_millis(200),
        ..helix_client::Transport::default()
    };
    let client = Client::new(Config { transport, ..config(&cluster) }).unwrap();
    let producer = writer.producer(helix_client::ProducerOptions::default());
    let starts = vec![ReadStart::new(TOPIC, 0, Position::Earliest)];
    let mut subscription = client.consumer().subscribe(starts, from(3));
    let mut next = 0;
    for number in 0..4 {
        match number {
            1 => cluster.kill(2),
            2 => cluster.stop(1),
            3 => cluster.restart(2, false).await,
            _ => {}
        }
        let records = vec![record(number.to_string())];
        in_time(producer.append(TOPIC, 0, &records)).await.unwrap();
        read_until(&mut subscription, &mut next, number + 1).await;
    }
}
