//! Readers get every record once, in order, whatever happens to the calls that carry them.
//! The faults are drawn; those that are scripted are in `failover`.

use std::time::Duration;

use helix_client::{
    Client, Config, Event, FetchOptions, Position, ProducerOptions, ReadOptions, Records, Start,
};

use crate::service::{PARTITIONS, Service, TOPIC};
use crate::{client, config, in_time, record, seed};

/// Three records per batch, "0".."n" in each partition.
pub(crate) async fn fill(client: &Client, batches: u64) {
    let producer = client.producer(ProducerOptions::default());
    for partition in 0..PARTITIONS {
        for batch in 0..batches {
            let records: Vec<_> =
                (0..3).map(|place| record((batch * 3 + place).to_string())).collect();
            producer.append(TOPIC, partition, &records).await.unwrap();
        }
    }
}

/// Checks that records go on at `next` without gap or repeat, and moves it.
pub(crate) fn check(records: &Records, next: &mut u64) {
    for record in &records.records {
        assert_eq!(record.offset, *next);
        assert_eq!(record.value.as_deref(), Some(next.to_string().as_bytes()));
        *next += 1;
    }
    assert_eq!(records.next_offset, *next);
}

#[tokio::test]
async fn fetches_go_through_every_partition_through_faults() {
    let service = Service::start(seed(), 0.0).await;
    let client = client(&service);
    fill(&client, 50).await;
    service.set_fault_rate(0.1);
    let consumer = client.consumer();
    let mut next = [1; PARTITIONS as usize];
    while next.iter().any(|next| *next < 149) {
        let starts: Vec<_> = (0..PARTITIONS)
            .map(|partition| {
                let from = Position::Offset(next[partition as usize]);
                Start::new(TOPIC, partition, from).until(149)
            })
            .collect();
        let fetched = consumer.fetch(&starts, &FetchOptions::default()).await.unwrap();
        for records in fetched {
            check(&records, &mut next[records.partition as usize]);
        }
    }
}

#[tokio::test]
async fn a_tail_begins_within_a_batch() {
    let service = Service::start(seed(), 0.0).await;
    let client = client(&service);
    fill(&client, 5).await;
    let starts = [Start::new(TOPIC, 2, Position::Tail(2))];
    let fetched = client.consumer().fetch(&starts, &FetchOptions::default()).await.unwrap();
    let mut next = 13;
    check(&fetched[0], &mut next);
    assert_eq!(next, 15);
}

#[tokio::test]
async fn a_subscription_goes_on_through_faults_up_to_its_end() {
    let service = Service::start(seed(), 0.0).await;
    let client = client(&service);
    fill(&client, 100).await;
    service.set_fault_rate(0.05);
    let starts = (0..PARTITIONS)
        .map(|partition| Start::new(TOPIC, partition, Position::Earliest).until(290))
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
async fn a_subscription_hears_what_comes_later() {
    let service = Service::start(seed(), 0.05).await;
    let client = client(&service);
    let starts = vec![Start::new(TOPIC, 0, Position::Earliest).until(300)];
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
async fn a_silent_subscription_is_taken_for_dead() {
    let service = Service::start(seed(), 0.0).await;
    let config = Config { heartbeat_timeout: Duration::from_millis(300), ..config(&service) };
    let client = Client::new(config).unwrap();
    fill(&client, 1).await;
    service.silence_subscriptions(2);
    let starts = vec![Start::new(TOPIC, 0, Position::Earliest).until(3)];
    let mut subscription = client.consumer().subscribe(starts, ReadOptions::default());
    let event = subscription.next().await.unwrap().unwrap();
    assert!(matches!(event, Event::Data(records) if records.records.len() == 3));
    assert!(subscription.next().await.is_none());
}

#[tokio::test]
async fn a_refusal_ends_a_subscription() {
    let service = Service::start(seed(), 0.0).await;
    let starts = vec![Start::new(TOPIC, 0, Position::Offset(7))];
    let mut subscription = client(&service).consumer().subscribe(starts, ReadOptions::default());
    let error = subscription.next().await.unwrap().unwrap_err();
    assert_eq!(error.code, tonic::Code::OutOfRange);
    assert!(subscription.next().await.is_none());
}

#[tokio::test]
async fn a_start_at_or_behind_its_end_is_the_end() {
    let service = Service::start(seed(), 0.0).await;
    let client = client(&service);
    fill(&client, 1).await;
    for (position, until) in
        [(Position::Latest, 2), (Position::Earliest, 0), (Position::Offset(2), 2)]
    {
        let start = Start::new(TOPIC, 0, position).until(until);
        let (consumer, start) = (client.consumer(), [start]);
        let fetched = in_time(consumer.fetch(&start, &FetchOptions::default())).await.unwrap();
        assert!(fetched[0].records.is_empty());
        let mut subscription = consumer.subscribe(start.into(), ReadOptions::default());
        assert!(in_time(subscription.next()).await.is_none());
    }
}
