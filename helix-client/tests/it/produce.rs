//! Tests that appends are stored once and in order under random faults.
//!
//! Scripted faults are in `failover`.

use std::time::Duration;

use helix_client::config::Transport;
use helix_client::proto::batch::encode;
use helix_client::proto::log::v1::{Durability, ErrorReason};
use helix_client::{AppendOptions, Client, Config, Error, ProducerOptions, SessionOptions};
use tokio::time::Instant;
use tonic::Code;

use crate::fake_cluster::{FakeCluster, PARTITIONS, TOPIC};
use crate::{client, config, record, seed};

#[tokio::test]
async fn session_keeps_order_under_faults() {
    let cluster = FakeCluster::start(seed(), 0.05).await;
    let session = client(&cluster).session(TOPIC, 0, SessionOptions::default()).await.unwrap();
    let mut acks = Vec::new();
    let mut written = Vec::new();
    for number in 0..1000u32 {
        let values: Vec<_> = (0..number % 3 + 1).map(|index| format!("{number}.{index}")).collect();
        let records: Vec<_> = values.iter().map(record).collect();
        acks.push((written.len() as u64, session.append(&records).await.unwrap()));
        written.extend(values);
    }
    for (first_offset, acked) in acks {
        assert_eq!(acked.await.unwrap().first_offset, Some(first_offset));
    }
    session.close().await.unwrap();
    assert_eq!(cluster.values(0), written);
}

#[tokio::test]
async fn producer_stores_every_batch_once_under_faults() {
    let cluster = FakeCluster::start(seed(), 0.2).await;
    let producer = client(&cluster).producer(ProducerOptions::default());
    let writers = (0..PARTITIONS).map(|partition| {
        let producer = producer.clone();
        async move {
            for number in 0..200 {
                let records = vec![record(number.to_string())];
                let ack = producer.append(TOPIC, partition, &records).await.unwrap();
                assert_eq!(ack.first_offset, Some(number));
            }
        }
    });
    futures_util::future::join_all(writers).await;
    let written: Vec<_> = (0..200).map(|number| number.to_string()).collect();
    for partition in 0..PARTITIONS {
        assert_eq!(cluster.values(partition), written);
    }
}

#[tokio::test]
async fn records_reach_added_partitions() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    cluster.set_partition_count(1);
    let age_max = Duration::ZERO;
    let options =
        ProducerOptions { partition_count_age_max: age_max, ..ProducerOptions::default() };
    let producer = client(&cluster).producer(options);
    let keyed = |number: u32| helix_client::proto::log::v1::Record {
        key: Some(number.to_string().into()),
        ..record(number.to_string())
    };
    for number in 0..10 {
        let acked = producer.send(TOPIC, keyed(number)).await.unwrap().await.unwrap();
        assert_eq!(acked.first_offset, Some(u64::from(number)), "one partition");
    }
    cluster.set_partition_count(PARTITIONS);
    let reached = async {
        for number in 10.. {
            producer.send(TOPIC, keyed(number)).await.unwrap().await.unwrap();
            if (1..PARTITIONS).all(|partition| !cluster.values(partition).is_empty()) {
                break;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(30), reached).await.unwrap();
}

#[tokio::test]
async fn batches_sent_records_and_acks_each() {
    let cluster = FakeCluster::start(seed(), 0.1).await;
    let options = ProducerOptions { batch_records: 10, ..ProducerOptions::default() };
    let producer = client(&cluster).producer(options);
    let mut sent = Vec::new();
    for number in 0..500 {
        let record = helix_client::proto::log::v1::Record {
            key: Some("one key".into()),
            ..record(number.to_string())
        };
        sent.push(producer.send(TOPIC, record).await.unwrap());
    }
    producer.flush().await;
    for (number, sent) in (0..).zip(sent) {
        let ack = sent.await.unwrap();
        assert_eq!((ack.first_offset, ack.next_offset), (Some(number), Some(number + 1)));
    }
    let partition = helix_client::partitioner::of_key(b"one key", PARTITIONS);
    let written: Vec<_> = (0..500).map(|number| number.to_string()).collect();
    assert_eq!(cluster.values(partition), written);
}

#[tokio::test]
async fn does_not_retry_an_unknown_outcome_without_identity() {
    let cluster = FakeCluster::start(seed(), 0.3).await;
    let client = client(&cluster);
    let batch = encode(&[record("x")]);
    let (mut acked, mut unknown) = (0, 0);
    for _ in 0..200 {
        match client.append(TOPIC, 0, &batch, &AppendOptions::default()).await {
            Ok(_) => acked += 1,
            Err(error) => {
                assert!(error.may_have_applied, "{error}");
                unknown += 1;
            }
        }
    }
    let written = cluster.values(0).len();
    assert!(unknown > 0 && acked > 0);
    assert!((acked..=acked + unknown).contains(&written), "{acked} acked, {written} written");
}

#[tokio::test]
async fn forgotten_producer_continues_only_without_batches_in_flight() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    let producer = client.producer(ProducerOptions::default());
    let session = client.session(TOPIC, 1, SessionOptions::default()).await.unwrap();
    let records = vec![record("x")];
    for _ in 0..3 {
        producer.append(TOPIC, 0, &records).await.unwrap();
        cluster.forget_producers();
    }
    assert_eq!(cluster.values(0).len(), 3);

    session.append(&records).await.unwrap().await.unwrap();
    cluster.forget_producers();
    let error = session.append(&records).await.unwrap().await.unwrap_err();
    assert!(error.is(ErrorReason::UnknownProducer), "{error}");
    let error = session.append(&records).await.unwrap_err();
    assert!(error.message.contains("an earlier batch"), "{error}");
    assert_eq!(cluster.values(1).len(), 1);
}

#[tokio::test]
async fn stores_batches_after_a_lost_weak_ack() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    let options = SessionOptions { durability: Durability::LeaderWritten, ..Default::default() };
    let session = client.session(TOPIC, 0, options).await.unwrap();
    let options = ProducerOptions { durability: Durability::LeaderWritten, ..Default::default() };
    let producer = client.producer(options);
    for round in 0..3 {
        for number in 0..4 {
            let records = vec![record(format!("{round}.{number}"))];
            let ack = session.append(&records).await.unwrap().await.unwrap();
            assert_eq!(ack.first_offset, None);
            producer.append(TOPIC, 1, &records).await.unwrap();
        }
        if round == 1 {
            // In the other rounds the session keeps its stream, and the producer sees no failure.
            cluster.kill(0);
            cluster.elect(1);
        }
        cluster.lose_last_batch(0);
        cluster.lose_last_batch(1);
    }
    let records = vec![record("last")];
    session.append(&records).await.unwrap().await.unwrap();
    producer.append(TOPIC, 1, &records).await.unwrap();
    session.close().await.unwrap();
    let kept = (0..3).flat_map(|round| (0..3).map(move |number| format!("{round}.{number}")));
    let kept: Vec<_> = kept.chain(["last".to_owned()]).collect();
    assert_eq!(cluster.values(0), kept);
    assert_eq!(cluster.values(1), kept);
}

#[tokio::test]
async fn queued_batches_fail_with_the_first() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    // The first append must not outlast it, even if the process stalls.
    let timeout = Duration::from_secs(3);
    let client = Client::new(Config { request_timeout: timeout, ..config(&cluster) }).unwrap();
    let options = ProducerOptions { batch_records: 1, ..ProducerOptions::default() };
    let producer = client.producer(options);
    producer.send_to(TOPIC, 0, record("x")).await.unwrap().await.unwrap();
    cluster.block_appends();
    let started = Instant::now();
    let mut sent = Vec::new();
    for _ in 0..20 {
        sent.push(producer.send_to(TOPIC, 0, record("x")).await.unwrap());
    }
    let mut may_have_applied = Vec::new();
    for sent in sent {
        may_have_applied.push(sent.await.unwrap_err().may_have_applied);
    }
    // One after the other they would take twenty times as long.
    assert!(started.elapsed() < timeout * 10, "{:?}", started.elapsed());
    assert!(may_have_applied[0], "{may_have_applied:?}");
    assert!(!may_have_applied[1..].contains(&true), "{may_have_applied:?}");
}

#[tokio::test]
async fn stops_at_the_first_failure_if_configured() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let options =
        ProducerOptions { batch_records: 1, stops_at_failure: true, ..ProducerOptions::default() };
    let config = Config { transport: small_messages(), ..config(&cluster) };
    let producer = Client::new(config).unwrap().producer(options);
    let mut sent = Vec::new();
    for value in ["a".to_owned(), "b".repeat(100_000), "c".to_owned()] {
        sent.push(producer.send_to(TOPIC, 0, record(value)).await.unwrap());
    }
    producer.flush().await;
    let mut outcomes = Vec::new();
    for sent in sent {
        outcomes.push(sent.await);
    }
    assert!(outcomes[0].is_ok());
    for (outcome, is_first) in [(&outcomes[1], true), (&outcomes[2], false)] {
        let error = outcome.as_ref().unwrap_err();
        assert!(error.is(ErrorReason::BatchTooLarge) && !error.may_have_applied, "{error}");
        assert_eq!(error.message.starts_with("an earlier batch failed"), !is_first, "{error}");
    }
    let error = producer.send_to(TOPIC, 1, record("d")).await.unwrap_err();
    assert!(error.message.starts_with("an earlier batch failed"), "{error}");
    assert_eq!(cluster.values(0), ["a"]);
}

#[tokio::test]
async fn rejects_batch_over_limit_before_sending() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = Client::new(Config { transport: small_messages(), ..config(&cluster) }).unwrap();
    let session = client.session(TOPIC, 0, SessionOptions::default()).await.unwrap();
    let (small, large) = (vec![record("x")], vec![record("x".repeat(2 << 20))]);
    let rejections = [
        session.append(&large).await.map(drop).unwrap_err(),
        client.append(TOPIC, 0, &large, &AppendOptions::default()).await.unwrap_err(),
    ];
    for error in rejections {
        assert!(error.is(ErrorReason::BatchTooLarge), "{error}");
        assert!(!error.may_have_applied && !error.retryable && error.limit.is_some(), "{error}");
    }
    session.append(&small).await.unwrap().await.unwrap();
    assert_eq!(cluster.values(0), ["x"]);
}

fn small_messages() -> Transport {
    Transport { message_bytes_max: 64 << 10, ..Transport::default() }
}

#[tokio::test]
async fn unresponsive_service_is_an_unknown_outcome() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let config = Config {
        attempt_timeout: Duration::from_secs(1),
        request_timeout: Duration::from_secs(3),
        ..Config::new(cluster.addresses())
    };
    let client = Client::new(config).unwrap();
    let session = client.session(TOPIC, 1, SessionOptions::default()).await.unwrap();
    cluster.block_appends();
    let records = vec![record("x")];
    let producer = client.producer(ProducerOptions::default());
    let error = producer.append(TOPIC, 0, &records).await.unwrap_err();
    // The code depends on the attempt that was running at the deadline.
    let is_unknown = |error: &Error| {
        error.may_have_applied && matches!(error.code, Code::DeadlineExceeded | Code::Unavailable)
    };
    assert!(is_unknown(&error), "{error}");
    let acked = session.append(&records).await.unwrap();
    let error = acked.await.unwrap_err();
    assert!(is_unknown(&error), "{error}");
    assert!(session.close().await.is_err());
}

#[tokio::test]
async fn missing_topic_fails_at_once() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    let error = client.session("none", 0, SessionOptions::default()).await.unwrap_err();
    assert!(error.is(ErrorReason::TopicNotFound), "{error}");
    let producer = client.producer(ProducerOptions::default());
    let error = producer.append(TOPIC, PARTITIONS, &vec![record("x")]).await.unwrap_err();
    assert!(error.is(ErrorReason::PartitionNotFound), "{error}");
}

#[tokio::test]
async fn unreachable_cluster_fails_by_the_deadline() {
    let config = Config { request_timeout: Duration::from_secs(2), ..Config::new(["127.0.0.1:1"]) };
    let error = Client::connect(config).await.unwrap_err();
    assert_eq!(error.code, Code::Unavailable);
    assert!(!error.may_have_applied);
}
