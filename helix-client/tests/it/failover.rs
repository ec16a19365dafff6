//! Nodes die, stop, are cut off and come back: the application notices latency and nothing else.
//! Every scripted election is over long before the timeouts that must not be waited for.

use std::time::Duration;

use futures_util::future::join_all;
use helix_client::proto::batch::encode;
use helix_client::proto::log::v1::ErrorReason;
use helix_client::{
    Ack, AppendOptions, Client, Config, Event, FetchOptions, Position, ProducerOptions,
    ReadOptions, Result, SessionOptions, Start,
};
use tokio::net::TcpListener;

use crate::consume::{check, fill};
use crate::service::{NODES, PARTITIONS, Service, TOPIC};
use crate::{client, config, in_time, record, seed};

/// How long the scripted elections take.
const ELECTION: Duration = Duration::from_millis(300);

/// Faults that the long run must survive.
const FAULTS: u64 = 250;

#[tokio::test]
async fn hundreds_of_forced_retries_leave_no_second_copy_and_no_gap() {
    let service = Service::start(seed(), 0.1).await;
    let client = client(&service);
    let writers = (0..PARTITIONS).map(|partition| {
        let (service, client) = (&service, &client);
        async move {
            match partition % 2 {
                0 => write_unary(service, client, partition).await,
                _ => write_session(service, client, partition).await,
            }
        }
    });
    for (partition, count) in (0..).zip(join_all(writers).await) {
        let written: Vec<_> = (0..count).map(|number| number.to_string()).collect();
        assert_eq!(service.values(partition), written);
    }
    println!("{} faults", service.faults());
}

async fn write_unary(service: &Service, client: &Client, partition: u32) -> u64 {
    let producer = client.producer(ProducerOptions::default());
    let mut count = 0;
    while service.faults() < FAULTS {
        let records = vec![record(count.to_string())];
        let ack = producer.append(TOPIC, partition, &records).await.unwrap();
        assert_eq!(ack.first_offset, Some(count));
        count += 1;
    }
    count
}

async fn write_session(service: &Service, client: &Client, partition: u32) -> u64 {
    let session = client.session(TOPIC, partition, SessionOptions::default()).await.unwrap();
    let mut acks = Vec::new();
    while service.faults() < FAULTS {
        let records = vec![record(acks.len().to_string())];
        acks.push(session.append(&records).await.unwrap());
    }
    let count = acks.len() as u64;
    for (offset, acked) in (0..).zip(acks) {
        assert_eq!(acked.await.unwrap().first_offset, Some(offset));
    }
    session.close().await.unwrap();
    count
}

/// One batch without identity.
async fn append(client: &Client, partition: u32) -> Result<Ack> {
    let batch = encode(&[record("x")]);
    client.append(TOPIC, partition, &batch, &AppendOptions::default()).await
}

/// A client with writers and readers that are well under way, and what they have to go through.
struct Traffic {
    client: Client,
    producer: helix_client::Producer,
    session: helix_client::Session,
    subscription: helix_client::Subscription,
    written: u64,
    read: u64,
}

impl Traffic {
    async fn start(client: Client) -> Self {
        let producer = client.producer(ProducerOptions::default());
        let session = client.session(TOPIC, 1, SessionOptions::default()).await.unwrap();
        let starts = vec![Start::new(TOPIC, 0, Position::Earliest)];
        let subscription = client.consumer().subscribe(starts, ReadOptions::default());
        let mut traffic = Self { client, producer, session, subscription, written: 0, read: 0 };
        traffic.go_on().await;
        traffic
    }

    /// One more batch through everything.
    async fn go_on(&mut self) {
        let records = vec![record(self.written.to_string())];
        let acks = async {
            let unary = self.producer.append(TOPIC, 0, &records);
            let session = async { self.session.append(&records).await?.await };
            tokio::join!(unary, session)
        };
        let (unary, session): (Result<Ack>, Result<Ack>) = in_time(acks).await;
        assert_eq!(unary.unwrap().first_offset, Some(self.written));
        assert_eq!(session.unwrap().first_offset, Some(self.written));
        self.written += 1;
        let reading = async {
            while self.read < self.written {
                let event = self.subscription.next().await.unwrap();
                if let Event::Data(records) = event.unwrap() {
                    check(&records, &mut self.read);
                }
            }
        };
        in_time(reading).await;
        let start = [Start::new(TOPIC, 1, Position::Offset(self.written - 1))];
        let fetching = self.client.consumer();
        let fetched = in_time(fetching.fetch(&start, &FetchOptions::default())).await.unwrap();
        assert_eq!(fetched[0].next_offset, self.written);
    }

    fn check(&self, service: &Service) {
        let written: Vec<_> = (0..self.written).map(|number| number.to_string()).collect();
        assert_eq!((service.values(0), service.values(1)), (written.clone(), written));
    }
}

#[tokio::test]
async fn killed_leaders_cost_an_election() {
    let service = Service::start(seed(), 0.0).await;
    let mut traffic = Traffic::start(client(&service)).await;
    for node in 0..NODES {
        service.kill(node);
        service.elect_after(ELECTION, (node + 1) % NODES);
        traffic.go_on().await;
        service.restart(node, false).await;
        traffic.go_on().await;
    }
    traffic.check(&service);
}

#[tokio::test]
async fn stopped_leaders_cost_an_election() {
    let service = Service::start(seed(), 0.0).await;
    let mut traffic = Traffic::start(client(&service)).await;
    for node in 0..NODES {
        service.stop(node);
        service.elect_after(ELECTION, (node + 1) % NODES);
        traffic.go_on().await;
        service.go_on(node);
        traffic.go_on().await;
    }
    traffic.check(&service);
}

#[tokio::test]
async fn a_leader_that_stops_for_a_moment_is_waited_for() {
    let service = Service::start(seed(), 0.0).await;
    let mut traffic = Traffic::start(client(&service)).await;
    service.stop(0);
    let going_on = async {
        tokio::time::sleep(ELECTION).await;
        service.go_on(0);
    };
    tokio::join!(traffic.go_on(), going_on);
    traffic.check(&service);
}

#[tokio::test]
async fn a_leader_that_is_cut_off_is_left() {
    let service = Service::start(seed(), 0.0).await;
    let client = client(&service);
    let mut traffic = Traffic::start(client.clone()).await;
    append(&client, 2).await.unwrap();
    service.cut_off(0);
    service.elect(1);
    // Nobody may send this one again: the old leader could have passed it on.
    let error = in_time(append(&client, 2)).await.unwrap_err();
    assert!(error.may_have_applied && error.is(ErrorReason::OutcomeUnknown), "{error}");
    traffic.go_on().await;
    traffic.check(&service);
}

#[tokio::test]
async fn a_reader_leaves_a_leader_that_is_cut_off_and_gives_signs_of_life() {
    let service = Service::start(seed(), 0.0).await;
    let reader = client(&service);
    let starts = vec![Start::new(TOPIC, 0, Position::Earliest).until(3)];
    let mut subscription = reader.consumer().subscribe(starts, ReadOptions::default());
    assert!(matches!(in_time(subscription.next()).await, Some(Ok(Event::Heartbeat(_)))));
    service.cut_off(0);
    service.elect(1);
    let writer = Client::new(Config { endpoints: service.addresses(), ..config(&service) });
    let writer = writer.unwrap();
    let filling = fill(&writer, 1);
    let reading = async {
        let mut next = 0;
        while let Some(event) = subscription.next().await {
            if let Event::Data(records) = event.unwrap() {
                check(&records, &mut next);
            }
        }
        assert_eq!(next, 3);
    };
    in_time(async { tokio::join!(filling, reading) }).await;
}

#[tokio::test]
async fn addresses_where_nobody_answers_cost_a_hedge() {
    let service = Service::start(seed(), 0.0).await;
    // Takes connections, as the kernel does for a stopped process, and says nothing.
    let mute = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let refusing = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut endpoints: Vec<_> =
        [&mute, &refusing].map(|it| it.local_addr().unwrap().to_string()).into();
    drop(refusing);
    endpoints.push(service.addresses()[2].clone());
    let client = Client::new(Config { endpoints, ..Config::default() }).unwrap();
    let producer = client.producer(ProducerOptions::default());
    // The first call that any node answers has more patience, the routes have not.
    let limit = Config::default().connect_timeout - Duration::from_secs(1);
    let count = tokio::time::timeout(limit, client.partition_count(TOPIC)).await.unwrap();
    assert_eq!(count.unwrap(), PARTITIONS);
    in_time(producer.append(TOPIC, 0, &vec![record("x")])).await.unwrap();
}

#[tokio::test]
async fn many_silent_calls_ask_no_more_than_one() {
    let service = Service::start(seed(), 0.0).await;
    let client = client(&service);
    append(&client, 0).await.unwrap();
    let asked = service.asked();
    service.stop(0);
    service.elect_after(ELECTION, 1);
    let calls = (0..500).map(|_| append(&client, 0));
    for outcome in in_time(join_all(calls)).await {
        assert!(outcome.unwrap_err().is(ErrorReason::OutcomeUnknown));
    }
    // Two nodes every 100 ms; the machine may be slow.
    let asked = service.asked() - asked;
    assert!(asked < 100, "{asked} questions");
}

#[tokio::test]
async fn what_was_never_sent_is_sent_without_identity_too() {
    let service = Service::start(seed(), 0.0).await;
    service.kill(0);
    service.elect_after(ELECTION, 1);
    let client = client(&service);
    assert_eq!(in_time(append(&client, 0)).await.unwrap().first_offset, Some(0));
    service.depose();
    service.elect_after(ELECTION, 2);
    assert_eq!(in_time(append(&client, 0)).await.unwrap().first_offset, Some(1));
}

#[tokio::test]
async fn all_nodes_go_and_come_back() {
    let service = Service::start(seed(), 0.0).await;
    let mut traffic = Traffic::start(client(&service)).await;
    (0..NODES).for_each(|node| service.kill(node));
    let coming_back = async {
        tokio::time::sleep(ELECTION).await;
        for node in 0..NODES {
            service.restart(node, false).await;
        }
        service.elect(2);
    };
    tokio::join!(traffic.go_on(), coming_back);
    traffic.check(&service);
}

#[tokio::test]
async fn a_node_comes_back_at_another_address() {
    let service = Service::start(seed(), 0.0).await;
    let mut traffic = Traffic::start(client(&service)).await;
    for node in [0, 1] {
        service.kill(node);
        service.restart(node, true).await;
        service.elect(node);
        traffic.go_on().await;
    }
    traffic.check(&service);
}

#[tokio::test]
async fn a_cluster_that_was_made_anew_is_a_new_one() {
    let service = Service::start(seed(), 0.0).await;
    let client = client(&service);
    let producer = client.producer(ProducerOptions::default());
    let records = vec![record("x")];
    for node in [1, 2, 0] {
        service.elect(node);
        in_time(producer.append(TOPIC, 0, &records)).await.unwrap();
    }
    service.make_anew("another");
    let ack = in_time(producer.append(TOPIC, 0, &records)).await.unwrap();
    assert_eq!(ack.first_offset, Some(0));
}

#[tokio::test]
async fn a_topic_is_missing_only_if_nobody_knows_it() {
    let service = Service::start(seed(), 0.0).await;
    service.set_ignorant(0, true);
    service.set_ignorant(1, true);
    assert_eq!(client(&service).partition_count(TOPIC).await.unwrap(), PARTITIONS);
    service.set_ignorant(2, true);
    let error = client(&service).partition_count(TOPIC).await.unwrap_err();
    assert!(error.is(ErrorReason::TopicNotFound), "{error}");
}

#[tokio::test]
async fn a_subscription_follows_leaders_while_it_is_written_to() {
    let service = Service::start(seed(), 0.0).await;
    let client = client(&service);
    let starts =
        (0..PARTITIONS).map(|it| Start::new(TOPIC, it, Position::Earliest).until(300)).collect();
    let mut subscription = client.consumer().subscribe(starts, ReadOptions::default());
    let reading = async {
        let mut next = [0; PARTITIONS as usize];
        let mut events = 0;
        while let Some(event) = subscription.next().await {
            if let Event::Data(records) = event.unwrap() {
                check(&records, &mut next[records.partition as usize]);
                events += 1;
                if events % 10 == 0 {
                    service.elect(events / 10 % NODES);
                }
            }
        }
        next
    };
    let (next, ()) = tokio::join!(reading, fill(&client, 100));
    assert_eq!(next, [300; PARTITIONS as usize]);
}
