//! Appends arrive once, in order, whatever happens to the calls that carry them.
//! The faults are drawn; those that are scripted are in `failover`.

use std::time::Duration;

use helix_client::proto::batch::encode;
use helix_client::proto::log::v1::ErrorReason;
use helix_client::{AppendOptions, Client, Config, Error, ProducerOptions, SessionOptions};
use tonic::Code;

use crate::service::{PARTITIONS, Service, TOPIC};
use crate::{client, record, seed};

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
