//! Appends arrive once, in order, whatever happens to the calls that carry them.
//! The faults are drawn; those that are scripted are in `failover`.

use std::time::Duration;

use helix_client::config::Transport;
use helix_client::proto::batch::encode;
use helix_client::proto::log::v1::{Durability, ErrorReason};
use helix_client::{AppendOptions, Client, Config, Error, ProducerOptions, SessionOptions};
use tokio::time::Instant;
use tonic::Code;

use crate::service::{PARTITIONS, Service, TOPIC};
use crate::{client, config, record, seed};

#[tokio::test]
async fn a_session_keeps_its_order_through_faults() {
    let service = Service::start(seed(), 0.05).await;
    let session = client(&service).session(TOPIC, 0, SessionOptions::default()).await.unwrap();
    let mut acks = Vec::new();
    let mut written = Vec::new();
    for number in 0..1000u32 {
        let values: Vec<_> = (0..number % 3 + 1).map(|place| format!("{number}.{place}")).collect();
        let records: Vec<_> = values.iter().map(record).collect();
        acks.push((written.len() as u64, session.append(&records).await.unwrap()));
        written.extend(values);
    }
    for (first_offset, acked) in acks {
        assert_eq!(acked.await.unwrap().first_offset, Some(first_offset));
    }
    session.close().await.unwrap();
    assert_eq!(service.values(0), written);
}

#[tokio::test]
async fn a_producer_writes_every_batch_once_through_faults() {
    let service = Service::start(seed(), 0.2).await;
    let producer = client(&service).producer(ProducerOptions::default());
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
        assert_eq!(service.values(partition), written);
    }
}

#[tokio::test]
async fn sent_records_are_gathered_and_acked_one_by_one() {
    let service = Service::start(seed(), 0.1).await;
    let options = ProducerOptions { batch_records: 10, ..ProducerOptions::default() };
    let producer = client(&service).producer(options);
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
    assert_eq!(service.values(partition), written);
}

#[tokio::test]
async fn without_identity_a_lost_answer_is_not_repeated() {
    let service = Service::start(seed(), 0.3).await;
    let client = client(&service);
    let batch = encode(&[record("x")]);
    let (mut acked, mut open) = (0, 0);
    for _ in 0..200 {
        match client.append(TOPIC, 0, &batch, &AppendOptions::default()).await {
            Ok(_) => acked += 1,
            Err(error) => {
                assert!(error.may_have_applied, "{error}");
                open += 1;
            }
        }
    }
    let written = service.values(0).len();
    assert!(open > 0 && acked > 0);
    assert!((acked..=acked + open).contains(&written), "{acked} acked, {written} written");
}

#[tokio::test]
async fn a_forgotten_producer_goes_on_only_when_nothing_is_in_danger() {
    let service = Service::start(seed(), 0.0).await;
    let client = client(&service);
    let producer = client.producer(ProducerOptions::default());
    let session = client.session(TOPIC, 1, SessionOptions::default()).await.unwrap();
    let records = vec![record("x")];
    for _ in 0..3 {
        producer.append(TOPIC, 0, &records).await.unwrap();
        service.forget_producers();
    }
    assert_eq!(service.values(0).len(), 3);

    session.append(&records).await.unwrap().await.unwrap();
    service.forget_producers();
    let error = session.append(&records).await.unwrap().await.unwrap_err();
    assert!(error.is(ErrorReason::UnknownProducer), "{error}");
    let error = session.append(&records).await.unwrap_err();
    assert!(error.message.contains("an earlier batch"), "{error}");
    assert_eq!(service.values(1).len(), 1);
}

#[tokio::test]
async fn what_comes_behind_a_lost_weak_ack_is_stored() {
    let service = Service::start(seed(), 0.0).await;
    let client = client(&service);
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
            // The session keeps its stream, and the producer never learns of any failure.
            service.kill(0);
            service.elect(1);
        }
        service.lose_last(0);
        service.lose_last(1);
    }
    let records = vec![record("last")];
    session.append(&records).await.unwrap().await.unwrap();
    producer.append(TOPIC, 1, &records).await.unwrap();
    session.close().await.unwrap();
    let kept = (0..3).flat_map(|round| (0..3).map(move |number| format!("{round}.{number}")));
    let kept: Vec<_> = kept.chain(["last".to_owned()]).collect();
    assert_eq!(service.values(0), kept);
    assert_eq!(service.values(1), kept);
}

#[tokio::test]
async fn what_is_queued_fails_with_the_first() {
    let service = Service::start(seed(), 0.0).await;
    let timeout = Duration::from_millis(600);
    let client = Client::new(Config { request_timeout: timeout, ..config(&service) }).unwrap();
    let options = ProducerOptions { batch_records: 1, ..ProducerOptions::default() };
    let producer = client.producer(options);
    producer.send_to(TOPIC, 0, record("x")).await.unwrap().await.unwrap();
    service.get_stuck();
    let started = Instant::now();
    let mut sent = Vec::new();
    for _ in 0..20 {
        sent.push(producer.send_to(TOPIC, 0, record("x")).await.unwrap());
    }
    let mut are_open = Vec::new();
    for sent in sent {
        are_open.push(sent.await.unwrap_err().may_have_applied);
    }
    // Each in its turn they would take twenty times as long.
    assert!(started.elapsed() < timeout * 10, "{:?}", started.elapsed());
    assert!(are_open[0] && are_open[1..].iter().all(|is_open| !is_open), "{are_open:?}");
}

#[tokio::test]
async fn the_first_failure_ends_a_producer_that_is_to_stop_there() {
    let service = Service::start(seed(), 0.0).await;
    let options =
        ProducerOptions { batch_records: 1, stops_at_failure: true, ..ProducerOptions::default() };
    let config = Config { transport: small_messages(), ..config(&service) };
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
    for (outcome, is_own) in [(&outcomes[1], true), (&outcomes[2], false)] {
        let error = outcome.as_ref().unwrap_err();
        assert!(error.is(ErrorReason::BatchTooLarge) && !error.may_have_applied, "{error}");
        assert_eq!(error.message.starts_with("an earlier batch failed"), !is_own, "{error}");
    }
    let error = producer.send_to(TOPIC, 1, record("d")).await.unwrap_err();
    assert!(error.message.starts_with("an earlier batch failed"), "{error}");
    assert_eq!(service.values(0), ["a"]);
}

#[tokio::test]
async fn a_batch_that_cannot_be_taken_is_refused_before_it_is_sent() {
    let service = Service::start(seed(), 0.0).await;
    let client = Client::new(Config { transport: small_messages(), ..config(&service) }).unwrap();
    let session = client.session(TOPIC, 0, SessionOptions::default()).await.unwrap();
    let (small, large) = (vec![record("x")], vec![record("x".repeat(2 << 20))]);
    let refusals = [
        session.append(&large).await.map(drop).unwrap_err(),
        client.append(TOPIC, 0, &large, &AppendOptions::default()).await.unwrap_err(),
    ];
    for error in refusals {
        assert!(error.is(ErrorReason::BatchTooLarge), "{error}");
        assert!(!error.may_have_applied && !error.retryable && error.limit.is_some(), "{error}");
    }
    session.append(&small).await.unwrap().await.unwrap();
    assert_eq!(service.values(0), ["x"]);
}

fn small_messages() -> Transport {
    Transport { message_bytes_max: 64 << 10, ..Transport::default() }
}

#[tokio::test]
async fn a_service_that_does_not_answer_is_an_open_outcome() {
    let service = Service::start(seed(), 0.0).await;
    let config = Config {
        attempt_timeout: Duration::from_millis(400),
        request_timeout: Duration::from_millis(1_200),
        ..Config::new(service.addresses())
    };
    let client = Client::new(config).unwrap();
    let session = client.session(TOPIC, 1, SessionOptions::default()).await.unwrap();
    service.get_stuck();
    let records = vec![record("x")];
    let producer = client.producer(ProducerOptions::default());
    let error = producer.append(TOPIC, 0, &records).await.unwrap_err();
    // Which of the two depends on what was being tried when the time was up.
    let is_open = |error: &Error| {
        error.may_have_applied && matches!(error.code, Code::DeadlineExceeded | Code::Unavailable)
    };
    assert!(is_open(&error), "{error}");
    let acked = session.append(&records).await.unwrap();
    let error = acked.await.unwrap_err();
    assert!(is_open(&error), "{error}");
    assert!(session.close().await.is_err());
}

#[tokio::test]
async fn a_topic_that_is_not_there_is_an_error_at_once() {
    let service = Service::start(seed(), 0.0).await;
    let client = client(&service);
    let error = client.session("none", 0, SessionOptions::default()).await.unwrap_err();
    assert!(error.is(ErrorReason::TopicNotFound), "{error}");
    let producer = client.producer(ProducerOptions::default());
    let error = producer.append(TOPIC, PARTITIONS, &vec![record("x")]).await.unwrap_err();
    assert!(error.is(ErrorReason::PartitionNotFound), "{error}");
}

#[tokio::test]
async fn nobody_there_is_an_error_by_the_deadline() {
    let config =
        Config { request_timeout: Duration::from_millis(200), ..Config::new(["127.0.0.1:1"]) };
    let error = Client::connect(config).await.unwrap_err();
    assert_eq!(error.code, Code::Unavailable);
    assert!(!error.may_have_applied);
}
