//! Append and InitProducer: accepted and refused batches, and the contents of acks.

use futures_util::StreamExt;
use helix_proto::log::v1::append_stream_request::Message as Sent;
use helix_proto::log::v1::{
    AppendRequest, AppendStreamInit, AppendStreamRequest, Durability, ErrorReason,
    InitProducerRequest, ProducerIdentity, TopicConfig, UpdateTopicRequest,
};
use prost_types::FieldMask;
use tonic::{Code, Status};

use crate::support::{TestServer, append_request, detail, on_both, plain, reason, values};

#[tokio::test]
async fn offsets_are_dense_and_records_are_readable() {
    on_both(async |server: TestServer| {
        let first = server.append(&["a", "b", "c"]).await;
        let ack = first.ack.unwrap();
        assert_eq!((ack.first_offset, ack.next_offset), (Some(0), Some(3)));
        assert!(!ack.duplicate);
        assert_eq!(first.watermarks.unwrap().high_watermark, 3);
        let second = server.append(&["d"]).await.ack.unwrap();
        assert_eq!((second.first_offset, second.next_offset), (Some(3), Some(4)));
        let read = server.records(0, 0).await;
        assert_eq!(values(&read), ["a", "b", "c", "d"]);
        let offsets: Vec<u64> = read.iter().map(|record| record.offset).collect();
        assert_eq!(offsets, [0, 1, 2, 3]);
        // Other partitions have offsets of their own.
        let other = server.append_to(1, &["x"]).await.ack.unwrap();
        assert_eq!(other.first_offset, Some(0));
    })
    .await;
}

#[tokio::test]
async fn ack_reports_the_reached_durability() {
    let reached = async |server: &TestServer, asked: Durability| {
        let request = AppendRequest { durability: asked.into(), ..append_request(&["a"]) };
        server.produce().append(request).await.unwrap().into_inner().ack.unwrap()
    };
    let durable = TestServer::durable().await;
    let default = reached(&durable, Durability::Unspecified).await;
    assert_eq!(default.durability(), Durability::QuorumSynced);
    let memory = TestServer::in_memory().await;
    let most = reached(&memory, Durability::QuorumSynced).await;
    assert_eq!(most.durability(), Durability::QuorumWritten, "memory is never synced");
    for weak in [Durability::LeaderWritten, Durability::None] {
        let ack = reached(&durable, weak).await;
        assert_eq!(ack.durability(), weak);
        assert_eq!((ack.first_offset, ack.next_offset), (None, None));
    }
}

#[tokio::test]
async fn topic_minimum_raises_weaker_durability() {
    let server = TestServer::durable().await;
    let config =
        TopicConfig { min_durability: Durability::QuorumSynced.into(), ..TopicConfig::default() };
    let update = UpdateTopicRequest {
        name: "default".to_owned(),
        config: Some(config),
        update_mask: Some(FieldMask { paths: vec!["min_durability".to_owned()] }),
        topic_id: 0,
    };
    server.topics().update_topic(update).await.unwrap();
    let request = AppendRequest { durability: Durability::None.into(), ..append_request(&["a"]) };
    let ack = server.produce().append(request).await.unwrap().into_inner().ack.unwrap();
    assert_eq!(ack.durability(), Durability::QuorumSynced);
    assert_eq!(ack.first_offset, Some(0));
}

#[tokio::test]
async fn plain_records_are_stored_as_an_encoded_batch() {
    let server = TestServer::in_memory().await;
    let request = AppendRequest { batch: plain(&["a", "b"]), ..append_request(&[]) };
    server.produce().append(request).await.unwrap();
    server.append(&["c"]).await;
    assert_eq!(values(&server.records(0, 0).await), ["a", "b", "c"]);
}

#[tokio::test]
async fn duplicate_returns_its_offsets_at_every_durability() {
    let server = TestServer::durable().await;
    let request = InitProducerRequest::default();
    let producer = server.produce().init_producer(request).await.unwrap().into_inner().producer;
    for (durability, duplicate) in [
        (Durability::QuorumSynced, false),
        (Durability::LeaderWritten, true),
        (Durability::None, true),
    ] {
        let request = AppendRequest {
            producer,
            first_sequence: Some(0),
            durability: durability.into(),
            ..append_request(&["a"])
        };
        let ack = server.produce().append(request).await.unwrap().into_inner().ack.unwrap();
        // A known duplicate is applied, so its ack may state more than the request asked for.
        assert_eq!((ack.duplicate, ack.durability()), (duplicate, Durability::QuorumSynced));
        assert_eq!((ack.first_offset, ack.next_offset), (Some(0), Some(1)));
    }
}

#[tokio::test]
async fn retried_batch_is_stored_once() {
    on_both(async |server: TestServer| {
        let producer = anonymous(&server).await;
        let send = async |first_sequence, values: &[&str]| {
            let request = AppendRequest {
                producer: Some(producer),
                first_sequence: Some(first_sequence),
                ..append_request(values)
            };
            server.produce().append(request).await
        };
        let first = send(0, &["a", "b"]).await.unwrap().into_inner().ack.unwrap();
        let again = send(0, &["a", "b"]).await.unwrap().into_inner().ack.unwrap();
        assert!(again.duplicate && !first.duplicate);
        assert_eq!(again.first_offset, first.first_offset);
        assert_eq!(again.next_offset, first.next_offset);
        let status = send(5, &["f"]).await.unwrap_err();
        assert_eq!(reason(&status), ErrorReason::OutOfOrderSequence);
        assert_eq!(detail(&status).next_sequence, Some(2));
        send(2, &["c"]).await.unwrap();
        assert_eq!(values(&server.records(0, 0).await), ["a", "b", "c"]);
    })
    .await;
}

#[tokio::test]
async fn sequence_gap_is_refused_even_with_early_acks() {
    on_both(async |server: TestServer| {
        for weak in [Durability::LeaderWritten, Durability::None] {
            let producer = anonymous(&server).await;
            let send = async |first_sequence, value: &str| {
                let request = AppendRequest {
                    producer: Some(producer),
                    first_sequence: Some(first_sequence),
                    durability: weak.into(),
                    ..append_request(&[value])
                };
                server.produce().append(request).await
            };
            for first_sequence in 0..3 {
                let ack = send(first_sequence, "a").await.unwrap().into_inner().ack.unwrap();
                assert_eq!((ack.durability(), ack.first_offset), (weak, None));
            }
            // As if the batches up to here had been lost after their acks.
            for _ in 0..2 {
                let status = send(5, "f").await.unwrap_err();
                assert_eq!(reason(&status), ErrorReason::OutOfOrderSequence);
                assert_eq!(detail(&status).next_sequence, Some(3));
            }
            let stranger = AppendRequest {
                producer: Some(anonymous(&server).await),
                first_sequence: Some(7),
                durability: weak.into(),
                ..append_request(&["g"])
            };
            let status = server.produce().append(stranger).await.unwrap_err();
            assert_eq!(reason(&status), ErrorReason::UnknownProducer);
        }
    })
    .await;
}

#[tokio::test]
async fn new_instance_of_a_named_producer_fences_the_old_one() {
    let server = TestServer::in_memory().await;
    let init = async |producer_name: &str| {
        let request = InitProducerRequest { producer_name: producer_name.to_owned() };
        server.produce().init_producer(request).await
    };
    let old = init("billing").await.unwrap().into_inner().producer.unwrap();
    let send = async |producer, first_sequence| {
        let request = AppendRequest {
            producer: Some(producer),
            first_sequence: Some(first_sequence),
            ..append_request(&["a"])
        };
        server.produce().append(request).await
    };
    send(old, 0).await.unwrap();
    let new = init("billing").await.unwrap().into_inner().producer.unwrap();
    assert_eq!(new.producer_id, old.producer_id);
    assert!(new.epoch > old.epoch);
    send(new, 0).await.unwrap();
    let status = send(old, 1).await.unwrap_err();
    assert_eq!(reason(&status), ErrorReason::ProducerFenced);
    assert_eq!(status.code(), Code::FailedPrecondition);
    let status = init(&"x".repeat(256)).await.unwrap_err();
    assert_eq!(reason(&status), ErrorReason::InvalidArgument);
    assert_ne!(anonymous(&server).await.producer_id, anonymous(&server).await.producer_id);
}

/// Such an epoch would fence every later instance of the producer permanently.
#[tokio::test]
async fn rejects_an_epoch_that_was_never_issued() {
    let server = TestServer::in_memory().await;
    let request = InitProducerRequest { producer_name: "billing".to_owned() };
    let init = async || {
        let response = server.produce().init_producer(request.clone()).await.unwrap();
        response.into_inner().producer.unwrap()
    };
    let send = async |partition, producer| {
        let request = AppendRequest {
            partition,
            producer: Some(producer),
            first_sequence: Some(0),
            ..append_request(&["a"])
        };
        server.produce().append(request).await
    };
    let named = init().await;
    // One partition knows the producer, the other does not.
    send(0, named).await.unwrap();
    for partition in [0, 1] {
        for epoch in [named.epoch + 1, u32::MAX] {
            let made_up = ProducerIdentity { epoch, ..named };
            let refused = send(partition, made_up).await.unwrap_err();
            assert_eq!(reason(&refused), ErrorReason::UnknownProducer);
            let init = AppendStreamInit {
                topic: "default".to_owned(),
                partition,
                producer: Some(made_up),
                ..AppendStreamInit::default()
            };
            let refused = open_stream(&server, init).await.unwrap_err();
            assert_eq!(reason(&refused), ErrorReason::UnknownProducer);
        }
    }
    let next = init().await;
    assert_eq!(next.epoch, named.epoch + 1);
    for partition in [0, 1] {
        send(partition, next).await.unwrap();
    }
    assert_eq!(values(&server.records(0, 0).await), ["a", "a"]);
}

/// Kafka's clients begin an epoch on their side after a gap in their sequence (KIP-360).
#[tokio::test]
async fn owner_counts_the_epochs_of_an_id_without_a_name() {
    let server = TestServer::in_memory().await;
    let producer = anonymous(&server).await;
    let send = async |epoch, first_sequence, value| {
        let request = AppendRequest {
            producer: Some(ProducerIdentity { epoch, ..producer }),
            first_sequence: Some(first_sequence),
            ..append_request(&[value])
        };
        server.produce().append(request).await.map_err(|status| reason(&status))
    };
    send(0, 0, "a").await.unwrap();
    assert_eq!(send(0, 2, "gap").await.unwrap_err(), ErrorReason::OutOfOrderSequence);
    for value in ["b", "b"] {
        send(1, 0, value).await.unwrap();
    }
    assert_eq!(send(0, 1, "late").await.unwrap_err(), ErrorReason::ProducerFenced);
    send(1, 1, "c").await.unwrap();
    assert_eq!(values(&server.records(0, 0).await), ["a", "b", "c"]);
}

#[tokio::test]
async fn acked_records_survive_a_restart() {
    let server = TestServer::durable().await;
    let producer = anonymous(&server).await;
    let request = AppendRequest {
        producer: Some(producer),
        first_sequence: Some(0),
        ..append_request(&["a", "b"])
    };
    server.produce().append(request.clone()).await.unwrap();
    let server = server.restart().await;
    assert_eq!(values(&server.records(0, 0).await), ["a", "b"]);
    let again = server.produce().append(request).await.unwrap().into_inner().ack.unwrap();
    assert!(again.duplicate, "the dedup window survives the restart");
    assert_eq!(server.append(&["c"]).await.ack.unwrap().first_offset, Some(2));
}

/// A shard remembers 16,384 pairs of producer and partition. Beyond that a retried first batch must
/// not count as new.
#[tokio::test]
async fn retry_of_first_batch_is_refused_after_its_producer_was_forgotten() {
    const ROWS: u64 = 16_384;
    let server = TestServer::in_memory().await;
    let first = |partition, producer| AppendRequest {
        partition,
        producer: Some(producer),
        first_sequence: Some(0),
        ..append_request(&["x"])
    };
    let producer = anonymous(&server).await;
    server.produce().append(first(0, producer)).await.unwrap();
    let idle = anonymous(&server).await;
    let crowd = (0..=ROWS).map(|_| async {
        let other = anonymous(&server).await;
        server.produce().append(first(1, other)).await.unwrap();
    });
    let crowd: Vec<_> = crowd.collect();
    futures_util::stream::iter(crowd).buffer_unordered(64).collect::<()>().await;

    for again in [producer, idle] {
        let refused = server.produce().append(first(0, again)).await.unwrap_err();
        assert_eq!(reason(&refused), ErrorReason::UnknownProducer);
        assert!(!detail(&refused).may_have_applied);
        let init = AppendStreamInit {
            topic: "default".to_owned(),
            producer: Some(again),
            ..AppendStreamInit::default()
        };
        let refused = open_stream(&server, init).await.unwrap_err();
        assert_eq!(reason(&refused), ErrorReason::UnknownProducer);
    }
    assert_eq!(values(&server.records(0, 0).await), ["x"], "no duplicate");
    // A new identity has a higher id than all forgotten ones.
    let new = anonymous(&server).await;
    server.produce().append(first(0, new)).await.unwrap();
    // An id that was never issued would be higher than all others.
    let made_up = ProducerIdentity { producer_id: new.producer_id + 1_000_000, epoch: 0 };
    let refused = server.produce().append(first(0, made_up)).await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::UnknownProducer);
}

async fn open_stream(server: &TestServer, init: AppendStreamInit) -> Result<(), Status> {
    let init = AppendStreamRequest { message: Some(Sent::Init(init)) };
    let mut stream = server.produce().append_stream(tokio_stream::iter([init])).await?.into_inner();
    stream.message().await.map(drop)
}

async fn anonymous(server: &TestServer) -> ProducerIdentity {
    let request = InitProducerRequest::default();
    let response = server.produce().init_producer(request).await.unwrap().into_inner();
    response.producer.unwrap()
}
