//! Tests that crashed, stopped, partitioned and restarted nodes only cost latency.
//!
//! Scripted elections end long before the timeouts that the client must not wait for.

use std::time::Duration;

use futures_util::future::join_all;
use helix_client::proto::batch::encode;
use helix_client::proto::kafka::KAFKA_BATCH_VERSION;
use helix_client::proto::log::v1::{BatchFormat, ErrorReason};
use helix_client::{
    Ack, AppendOptions, Client, Config, Event, FetchOptions, Position, ProducerOptions,
    ReadOptions, ReadStart, Result, SessionOptions,
};
use tokio::net::TcpListener;
use tokio::time::Instant;

use crate::consume::{check, fill};
use crate::fake_cluster::{FakeCluster, NODES, PARTITIONS, TOPIC};
use crate::{client, config, in_time, record, seed};

/// Duration of the scripted elections.
const ELECTION: Duration = Duration::from_millis(300);

/// Number of faults in the long run.
const FAULTS: u64 = 250;

#[tokio::test]
async fn hundreds_of_retries_leave_no_duplicate_and_no_gap() {
    let cluster = FakeCluster::start(seed(), 0.1).await;
    let client = client(&cluster);
    let writers = (0..PARTITIONS).map(|partition| {
        let (cluster, client) = (&cluster, &client);
        async move {
            match partition % 2 {
                0 => write_unary(cluster, client, partition).await,
                _ => write_session(cluster, client, partition).await,
            }
        }
    });
    for (partition, count) in (0..).zip(join_all(writers).await) {
        let written: Vec<_> = (0..count).map(|number| number.to_string()).collect();
        assert_eq!(cluster.values(partition), written);
    }
    println!("{} faults", cluster.faults());
}

async fn write_unary(cluster: &FakeCluster, client: &Client, partition: u32) -> u64 {
    let producer = client.producer(ProducerOptions::default());
    let mut count = 0;
    while cluster.faults() < FAULTS {
        let records = vec![record(count.to_string())];
        let ack = producer.append(TOPIC, partition, &records).await.unwrap();
        assert_eq!(ack.first_offset, Some(count));
        count += 1;
    }
    count
}

async fn write_session(cluster: &FakeCluster, client: &Client, partition: u32) -> u64 {
    let session = client.session(TOPIC, partition, SessionOptions::default()).await.unwrap();
    let mut acks = Vec::new();
    while cluster.faults() < FAULTS {
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

/// Appends one batch without a producer identity.
async fn append(client: &Client, partition: u32) -> Result<Ack> {
    let batch = encode(&[record("x")]);
    client.append(TOPIC, partition, &batch, &AppendOptions::default()).await
}

/// A client with active writers and readers.
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
        let starts = vec![ReadStart::new(TOPIC, 0, Position::Earliest)];
        let subscription = client.consumer().subscribe(starts, ReadOptions::default());
        let mut traffic = Self { client, producer, session, subscription, written: 0, read: 0 };
        traffic.round_trip().await;
        traffic
    }

    /// Writes and reads one more batch with each writer and reader.
    async fn round_trip(&mut self) {
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
        let start = [ReadStart::new(TOPIC, 1, Position::Offset(self.written - 1))];
        let fetching = self.client.consumer();
        let fetched = in_time(fetching.fetch(&start, &FetchOptions::default())).await.unwrap();
        assert_eq!(fetched[0].next_offset, self.written);
    }

    fn check(&self, cluster: &FakeCluster) {
        let written: Vec<_> = (0..self.written).map(|number| number.to_string()).collect();
        assert_eq!((cluster.values(0), cluster.values(1)), (written.clone(), written));
    }
}

#[tokio::test]
async fn killed_leaders_cost_an_election() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let mut traffic = Traffic::start(client(&cluster)).await;
    for node in 0..NODES {
        cluster.kill(node);
        cluster.elect_after(ELECTION, (node + 1) % NODES);
        traffic.round_trip().await;
        cluster.restart(node, false).await;
        traffic.round_trip().await;
    }
    traffic.check(&cluster);
}

#[tokio::test]
async fn stopped_leaders_cost_an_election() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let mut traffic = Traffic::start(client(&cluster)).await;
    for node in 0..NODES {
        cluster.stop(node);
        cluster.elect_after(ELECTION, (node + 1) % NODES);
        traffic.round_trip().await;
        cluster.resume(node);
        traffic.round_trip().await;
    }
    traffic.check(&cluster);
}

#[tokio::test]
async fn waits_for_a_leader_that_stops_for_a_moment() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let mut traffic = Traffic::start(client(&cluster)).await;
    cluster.stop(0);
    let going_on = async {
        tokio::time::sleep(ELECTION).await;
        cluster.resume(0);
    };
    tokio::join!(traffic.round_trip(), going_on);
    traffic.check(&cluster);
}

#[tokio::test]
async fn leaves_a_partitioned_leader() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    let mut traffic = Traffic::start(client.clone()).await;
    append(&client, 2).await.unwrap();
    cluster.partition(0);
    cluster.elect(1);
    // Must not be retried: the old leader could have replicated it.
    let error = in_time(append(&client, 2)).await.unwrap_err();
    assert!(error.may_have_applied && error.is(ErrorReason::OutcomeUnknown), "{error}");
    traffic.round_trip().await;
    traffic.check(&cluster);
}

#[tokio::test]
async fn reader_leaves_a_partitioned_leader_that_sends_heartbeats() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let reader = client(&cluster);
    let starts = vec![ReadStart::new(TOPIC, 0, Position::Earliest).until(3)];
    let mut subscription = reader.consumer().subscribe(starts, ReadOptions::default());
    assert!(matches!(in_time(subscription.next()).await, Some(Ok(Event::Heartbeat(_)))));
    cluster.partition(0);
    cluster.elect(1);
    let writer = Client::new(Config { endpoints: cluster.addresses(), ..config(&cluster) });
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
async fn unresponsive_addresses_cost_a_hedge() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    // Accepts connections, as the kernel does for a stopped process, and sends nothing.
    let mute = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let refusing = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut endpoints: Vec<_> =
        [&mute, &refusing].map(|it| it.local_addr().unwrap().to_string()).into();
    drop(refusing);
    endpoints.push(cluster.addresses()[2].clone());
    // Metadata queries hedge sooner than the first call to any node.
    let limit = Config::default().connect_timeout - Duration::from_secs(1);
    let mut found_after = Vec::new();
    // One of these is not disturbed by a stall of the process.
    for _ in 0..3 {
        let config = Config { endpoints: endpoints.clone(), ..Config::default() };
        let client = Client::new(config).unwrap();
        let begin = Instant::now();
        assert_eq!(in_time(client.partition_count(TOPIC)).await.unwrap(), PARTITIONS);
        found_after.push(begin.elapsed());
        let producer = client.producer(ProducerOptions::default());
        in_time(producer.append(TOPIC, 0, &vec![record("x")])).await.unwrap();
    }
    assert!(found_after.iter().any(|it| *it < limit), "{found_after:?}");
}

#[tokio::test]
async fn many_silent_calls_share_metadata_requests() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    append(&client, 0).await.unwrap();
    let requests = cluster.metadata_requests();
    cluster.stop(0);
    cluster.elect_after(ELECTION, 1);
    let calls = (0..500).map(|_| append(&client, 0));
    for outcome in in_time(join_all(calls)).await {
        assert!(outcome.unwrap_err().is(ErrorReason::OutcomeUnknown));
    }
    // Two nodes every 100 ms; the machine may be slow.
    let requests = cluster.metadata_requests() - requests;
    assert!(requests < 100, "{requests} requests");
}

#[tokio::test]
async fn retries_unsent_batches_without_identity() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    cluster.kill(0);
    cluster.elect_after(ELECTION, 1);
    let client = client(&cluster);
    assert_eq!(in_time(append(&client, 0)).await.unwrap().first_offset, Some(0));
    cluster.depose();
    cluster.elect_after(ELECTION, 2);
    assert_eq!(in_time(append(&client, 0)).await.unwrap().first_offset, Some(1));
}

#[tokio::test]
async fn survives_a_restart_of_all_nodes() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let mut traffic = Traffic::start(client(&cluster)).await;
    (0..NODES).for_each(|node| cluster.kill(node));
    let coming_back = async {
        tokio::time::sleep(ELECTION).await;
        for node in 0..NODES {
            cluster.restart(node, false).await;
        }
        cluster.elect(2);
    };
    tokio::join!(traffic.round_trip(), coming_back);
    traffic.check(&cluster);
}

#[tokio::test]
async fn finds_a_node_restarted_at_another_address() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let mut traffic = Traffic::start(client(&cluster)).await;
    for node in [0, 1] {
        cluster.kill(node);
        cluster.restart(node, true).await;
        cluster.elect(node);
        traffic.round_trip().await;
    }
    traffic.check(&cluster);
}

#[tokio::test]
async fn follows_a_recreated_cluster() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    let producer = client.producer(ProducerOptions::default());
    let records = vec![record("x")];
    for node in [1, 2, 0] {
        cluster.elect(node);
        in_time(producer.append(TOPIC, 0, &records)).await.unwrap();
    }
    cluster.recreate("another");
    let ack = in_time(producer.append(TOPIC, 0, &records)).await.unwrap();
    assert_eq!(ack.first_offset, Some(0));
}

#[tokio::test]
async fn topic_is_missing_only_if_no_node_knows_it() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    cluster.set_lacks_topics(0, true);
    cluster.set_lacks_topics(1, true);
    assert_eq!(client(&cluster).partition_count(TOPIC).await.unwrap(), PARTITIONS);
    cluster.set_lacks_topics(2, true);
    let error = client(&cluster).partition_count(TOPIC).await.unwrap_err();
    assert!(error.is(ErrorReason::TopicNotFound), "{error}");
}

/// A batch of Helix's version would be refused.
#[tokio::test]
async fn first_append_looks_the_version_of_batches_up_until_a_node_answers() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    cluster.set_batch_format(BatchFormat::Kafka);
    let client = client(&cluster);
    (0..NODES).for_each(|node| cluster.kill(node));
    let appending = tokio::spawn({
        let client = client.clone();
        let records = vec![record("x")];
        async move { client.append(TOPIC, 0, &records, &AppendOptions::default()).await }
    });
    // A lookup after the first one of the append.
    tokio::task::yield_now().await;
    in_time(client.partition_count(TOPIC)).await.unwrap_err();
    for node in 0..NODES {
        cluster.restart(node, false).await;
    }
    in_time(appending).await.unwrap().unwrap();
    assert_eq!(cluster.batch_versions(0), [KAFKA_BATCH_VERSION]);
}

#[tokio::test]
async fn subscription_follows_leaders_during_writes() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    let starts = (0..PARTITIONS)
        .map(|it| ReadStart::new(TOPIC, it, Position::Earliest).until(300))
        .collect();
    let mut subscription = client.consumer().subscribe(starts, ReadOptions::default());
    let reading = async {
        let mut next = [0; PARTITIONS as usize];
        let mut events = 0;
        while let Some(event) = subscription.next().await {
            if let Event::Data(records) = event.unwrap() {
                check(&records, &mut next[records.partition as usize]);
                events += 1;
                if events % 10 == 0 {
                    cluster.elect(events / 10 % NODES);
                }
            }
        }
        next
    };
    let (next, ()) = tokio::join!(reading, fill(&client, 100));
    assert_eq!(next, [300; PARTITIONS as usize]);
}
