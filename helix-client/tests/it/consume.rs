//! Tests that readers get every record once and in order under random faults.
//!
//! Scripted faults are in `failover`.

use std::time::Duration;

use helix_client::{
    Client, Config, Event, FetchOptions, Position, ProducerOptions, ReadOptions, ReadStart, Records,
};

use crate::fake_cluster::{FakeCluster, PARTITIONS, TOPIC};
use crate::{client, config, in_time, record, seed};

/// Appends batches of three records, with values "0".."n" in each partition.
pub(crate) async fn fill(client: &Client, batches: u64) {
    let producer = client.producer(ProducerOptions::default());
    for partition in 0..PARTITIONS {
        for batch in 0..batches {
            let records: Vec<_> =
                (0..3).map(|index| record((batch * 3 + index).to_string())).collect();
            producer.append(TOPIC, partition, &records).await.unwrap();
        }
    }
}

/// Checks that records continue at `next` without gap or repeat, and advances it.
pub(crate) fn check(records: &Records, next: &mut u64) {
    for record in &records.records {
        assert_eq!(record.offset, *next);
        assert_eq!(record.value.as_deref(), Some(next.to_string().as_bytes()));
        *next += 1;
    }
    assert_eq!(records.next_offset, *next);
}

#[tokio::test]
async fn fetches_read_every_record_once_under_faults() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    fill(&client, 50).await;
    cluster.set_fault_rate(0.1);
    let consumer = client.consumer();
    let mut next = [1; PARTITIONS as usize];
    while next.iter().any(|next| *next < 149) {
        let starts: Vec<_> = (0..PARTITIONS)
            .map(|partition| {
                let from = Position::Offset(next[partition as usize]);
                ReadStart::new(TOPIC, partition, from).until(149)
            })
            .collect();
        let fetched = consumer.fetch(&starts, &FetchOptions::default()).await.unwrap();
        for records in fetched {
            check(&records, &mut next[records.partition as usize]);
        }
    }
}

#[tokio::test]
async fn tail_position_starts_within_a_batch() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    fill(&client, 5).await;
    let starts = [ReadStart::new(TOPIC, 2, Position::Tail(2))];
    let fetched = client.consumer().fetch(&starts, &FetchOptions::default()).await.unwrap();
    let mut next = 13;
    check(&fetched[0], &mut next);
    assert_eq!(next, 15);
}

#[tokio::test]
async fn subscription_reads_to_its_end_under_faults() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    fill(&client, 100).await;
    cluster.set_fault_rate(0.05);
    let starts = (0..PARTITIONS)
        .map(|partition| ReadStart::new(TOPIC, partition, Position::Earliest).until(290))
        .collect();
    let mut subscription = client.consumer().subscribe(starts, ReadOptions::default());
    let mut next = [0; PARTITIONS as usize];
    while let Some(event) = subscription.next().await {
        if let Event::Data(records) = event.unwrap() {
            check(&records, &mut next[records.partition as usize]);
        }
    }
    assert_eq!(next, [290; PARTITIONS as usize]);
}

#[tokio::test]
async fn subscription_receives_later_records() {
    let cluster = FakeCluster::start(seed(), 0.05).await;
    let client = client(&cluster);
    let starts = vec![ReadStart::new(TOPIC, 0, Position::Earliest).until(300)];
    let mut subscription = client.consumer().subscribe(starts, ReadOptions::default());
    let writer = tokio::spawn(async move { fill(&client, 100).await });
    let mut next = 0;
    while let Some(event) = subscription.next().await {
        if let Event::Data(records) = event.unwrap() {
            check(&records, &mut next);
        }
    }
    assert_eq!(next, 300);
    writer.await.unwrap();
}

#[tokio::test]
async fn reopens_a_silent_subscription() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let config = Config { heartbeat_timeout: Duration::from_millis(300), ..config(&cluster) };
    let client = Client::new(config).unwrap();
    fill(&client, 1).await;
    cluster.silence_subscriptions(2);
    let starts = vec![ReadStart::new(TOPIC, 0, Position::Earliest).until(3)];
    let mut subscription = client.consumer().subscribe(starts, ReadOptions::default());
    let event = subscription.next().await.unwrap().unwrap();
    assert!(matches!(event, Event::Data(records) if records.records.len() == 3));
    assert!(subscription.next().await.is_none());
}

#[tokio::test]
async fn rejection_ends_a_subscription() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let starts = vec![ReadStart::new(TOPIC, 0, Position::Offset(7))];
    let mut subscription = client(&cluster).consumer().subscribe(starts, ReadOptions::default());
    let error = subscription.next().await.unwrap().unwrap_err();
    assert_eq!(error.code, tonic::Code::OutOfRange);
    assert!(subscription.next().await.is_none());
}

#[tokio::test]
async fn start_at_or_after_until_reads_nothing() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    fill(&client, 1).await;
    for (position, until) in
        [(Position::Latest, 2), (Position::Earliest, 0), (Position::Offset(2), 2)]
    {
        let start = ReadStart::new(TOPIC, 0, position).until(until);
        let (consumer, start) = (client.consumer(), [start]);
        let fetched = in_time(consumer.fetch(&start, &FetchOptions::default())).await.unwrap();
        assert!(fetched[0].records.is_empty());
        let mut subscription = consumer.subscribe(start.into(), ReadOptions::default());
        assert!(in_time(subscription.next()).await.is_none());
    }
}
