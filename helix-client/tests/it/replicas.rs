//! Reads from any replica: they spread, go round nodes that fail, need no leader, and leave it to
//! the leader to say that an offset does not exist.

use helix_client::{
    Client, Config, Event, FetchOptions, Position, ReadOptions, ReadSource, Start, Subscription,
};
use tonic::Code;

use crate::consume::{check, fill};
use crate::service::{Service, TOPIC};
use crate::{client, config, in_time, record, seed};

/// Read from this node first.
fn from(node_id: u64) -> ReadOptions {
    let preferred_node = Some(node_id);
    ReadOptions { source: ReadSource::AnyReplica, preferred_node, ..ReadOptions::default() }
}

fn fetching(read: ReadOptions) -> FetchOptions {
    FetchOptions { read, ..FetchOptions::default() }
}

async fn fetch(client: &Client, offset: u64, read: ReadOptions) -> helix_client::Result<u64> {
    let start = [Start::new(TOPIC, 0, Position::Offset(offset))];
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
async fn the_preferred_node_is_read_from_and_lags() {
    let service = Service::start(seed(), 0.0).await;
    let client = client(&service);
    fill(&client, 1).await;
    service.cut_off(2);
    fill(&client, 1).await;
    let mut behind = 0;
    while behind < 3 {
        behind = fetch(&client, behind, from(3)).await.unwrap();
    }
    assert_eq!(fetch(&client, 3, from(3)).await.unwrap(), 3, "it does not know more");
}

#[tokio::test]
async fn an_offset_that_one_replica_does_not_know_is_the_leaders_to_judge() {
    let service = Service::start(seed(), 0.0).await;
    let client = client(&service);
    service.cut_off(2);
    let producer = client.producer(helix_client::ProducerOptions::default());
    for number in 0..6 {
        let records = vec![record(number.to_string())];
        producer.append(TOPIC, 0, &records).await.unwrap();
    }
    assert!(fetch(&client, 5, from(3)).await.unwrap() > 5);
    let error = fetch(&client, 7, from(3)).await.unwrap_err();
    assert_eq!(error.code, Code::OutOfRange);
    let starts = vec![Start::new(TOPIC, 0, Position::Offset(4)).until(6)];
    let mut subscription = client.consumer().subscribe(starts, from(3));
    let mut next = 4;
    read_until(&mut subscription, &mut next, 6).await;
    assert!(in_time(subscription.next()).await.is_none());
}

#[tokio::test]
async fn reads_go_on_without_a_leader() {
    let service = Service::start(seed(), 0.0).await;
    fill(&client(&service), 1).await;
    service.depose();
    let client = client(&service);
    for node_id in 1..=3 {
        assert!(fetch(&client, 0, from(node_id)).await.unwrap() > 0);
    }
}

#[tokio::test]
async fn a_reader_goes_round_nodes_that_die_and_stop() {
    let service = Service::start(seed(), 0.0).await;
    let writer = client(&service);
    let transport = helix_client::Transport {
        keepalive_interval: std::time::Duration::from_millis(200),
        keepalive_timeout: std::time::Duration::from_millis(200),
        ..helix_client::Transport::default()
    };
    let client = Client::new(Config { transport, ..config(&service) }).unwrap();
    let producer = writer.producer(helix_client::ProducerOptions::default());
    let starts = vec![Start::new(TOPIC, 0, Position::Earliest)];
    let mut subscription = client.consumer().subscribe(starts, from(3));
    let mut next = 0;
    for number in 0..4 {
        match number {
            1 => service.kill(2),
            2 => service.stop(1),
            3 => service.restart(2, false).await,
            _ => {}
        }
        let records = vec![record(number.to_string())];
        in_time(producer.append(TOPIC, 0, &records)).await.unwrap();
        read_until(&mut subscription, &mut next, number + 1).await;
    }
}
