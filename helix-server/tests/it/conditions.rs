//! Expected offsets and fencing tokens on one node: admitted and refused appends, and the details
//! of the errors.

use std::collections::BTreeSet;

use helix_client::{AppendOptions, Client, Config, ProducerOptions, SessionOptions};
use helix_proto::log::v1::append_stream_request::Message as Sent;
use helix_proto::log::v1::{
    AppendCondition, AppendRequest, AppendResponse, AppendStreamBatch, AppendStreamInit,
    Durability, ErrorReason, InitProducerRequest, SetFencingTokenRequest, SetFencingTokenResponse,
    TopicConfig, UpdateTopicRequest,
};
use prost_types::FieldMask;
use tonic::{Code, Status};

use crate::append_stream::{AppendSession, first_offsets, init};
use crate::support::{
    TestServer, append_request, detail, encoded, on_both, reason, record, records, values,
};

pub(crate) fn expecting(offset: u64) -> AppendCondition {
    AppendCondition { expected_offset: Some(offset), fencing_token: None }
}

pub(crate) fn demanding(token: &str) -> AppendCondition {
    AppendCondition { expected_offset: None, fencing_token: Some(token.to_owned()) }
}

pub(crate) async fn append_if(
    server: &TestServer,
    value: &str,
    condition: AppendCondition,
) -> Result<AppendResponse, Status> {
    let request = AppendRequest { condition: Some(condition), ..append_request(&[value]) };
    Ok(server.produce().append(request).await?.into_inner())
}

pub(crate) async fn fence(
    server: &TestServer,
    expected: Option<&str>,
    token: &str,
) -> Result<SetFencingTokenResponse, Status> {
    let request = SetFencingTokenRequest {
        topic: "default".to_owned(),
        partition: 0,
        expected_token: expected.map(str::to_owned),
        token: token.to_owned(),
        topic_id: 0,
    };
    Ok(server.topics().set_fencing_token(request).await?.into_inner())
}

fn first_offset(appended: &AppendResponse) -> u64 {
    appended.ack.unwrap().first_offset.unwrap()
}

fn expect_mismatch(status: &Status, next_offset: u64) {
    assert_eq!(reason(status), ErrorReason::ExpectedOffsetMismatch);
    assert_eq!(status.code(), Code::Aborted);
    let detail = detail(status);
    assert_eq!(detail.next_offset, Some(next_offset));
    assert_eq!(detail.watermarks.unwrap().high_watermark, next_offset);
    assert!(!detail.may_have_applied && !detail.retryable);
}

fn expect_fenced(status: &Status, in_force: &str) {
    assert_eq!(reason(status), ErrorReason::Fenced);
    assert_eq!(status.code(), Code::FailedPrecondition);
    let detail = detail(status);
    assert_eq!(detail.fencing_token.as_deref(), Some(in_force));
    assert!(!detail.may_have_applied && !detail.retryable);
}

#[tokio::test]
async fn batch_is_appended_at_its_expected_offset_or_refused() {
    on_both(async |server: TestServer| {
        expect_mismatch(&append_if(&server, "early", expecting(1)).await.unwrap_err(), 0);
        assert_eq!(first_offset(&append_if(&server, "a", expecting(0)).await.unwrap()), 0);
        expect_mismatch(&append_if(&server, "late", expecting(0)).await.unwrap_err(), 1);
        server.append(&["b", "c"]).await;
        expect_mismatch(&append_if(&server, "late", expecting(1)).await.unwrap_err(), 3);
        assert_eq!(first_offset(&append_if(&server, "d", expecting(3)).await.unwrap()), 3);
        // An empty condition admits everything.
        append_if(&server, "e", AppendCondition::default()).await.unwrap();
        assert_eq!(values(&server.records(0, 0).await), ["a", "b", "c", "d", "e"]);
    })
    .await;
}

#[tokio::test]
async fn retry_returns_the_first_offset() {
    on_both(async |server: TestServer| {
        let request = InitProducerRequest::default();
        let producer = server.produce().init_producer(request).await.unwrap().into_inner().producer;
        let request = AppendRequest {
            producer,
            first_sequence: Some(0),
            condition: Some(expecting(0)),
            ..append_request(&["a"])
        };
        let first = server.produce().append(request.clone()).await.unwrap().into_inner();
        server.append(&["b"]).await;
        let again = server.produce().append(request.clone()).await.unwrap().into_inner();
        assert_eq!(first_offset(&again), first_offset(&first));
        assert!(again.ack.unwrap().duplicate);
        // The producer's next batch is no retry.
        let next = AppendRequest { first_sequence: Some(1), ..request };
        expect_mismatch(&server.produce().append(next.clone()).await.unwrap_err(), 2);
        let next = AppendRequest { condition: Some(expecting(2)), ..next };
        let next = server.produce().append(next).await.unwrap().into_inner();
        assert_eq!(first_offset(&next), 2);
    })
    .await;
}

#[tokio::test]
async fn fencing_token_admits_matching_appends() {
    on_both(async |server: TestServer| {
        append_if(&server, "a", demanding("")).await.unwrap();
        expect_fenced(&append_if(&server, "no", demanding("one")).await.unwrap_err(), "");
        let set = fence(&server, Some(""), "one").await.unwrap();
        assert_eq!(set.watermarks.unwrap().high_watermark, 1);
        append_if(&server, "b", demanding("one")).await.unwrap();
        expect_fenced(&append_if(&server, "no", demanding("")).await.unwrap_err(), "one");
        expect_fenced(&append_if(&server, "no", demanding("two")).await.unwrap_err(), "one");
        // Both must hold; the token is checked first.
        let both = |offset, token: &str| AppendCondition {
            expected_offset: Some(offset),
            fencing_token: Some(token.to_owned()),
        };
        expect_fenced(&append_if(&server, "no", both(9, "two")).await.unwrap_err(), "one");
        expect_mismatch(&append_if(&server, "no", both(9, "one")).await.unwrap_err(), 2);
        append_if(&server, "c", both(2, "one")).await.unwrap();
        // An append without a condition is admitted.
        server.append(&["d"]).await;
        fence(&server, None, "").await.unwrap();
        append_if(&server, "e", demanding("")).await.unwrap();
        assert_eq!(values(&server.records(0, 0).await), ["a", "b", "c", "d", "e"]);
    })
    .await;
}

#[tokio::test]
async fn one_of_two_concurrent_token_changes_is_refused() {
    on_both(async |server: TestServer| {
        fence(&server, Some(""), "one").await.unwrap();
        expect_fenced(&fence(&server, Some(""), "two").await.unwrap_err(), "one");
        let (a, b) =
            tokio::join!(fence(&server, Some("one"), "a"), fence(&server, Some("one"), "b"));
        let (lost, in_force) = match (a, b) {
            (Ok(_), Err(lost)) => (lost, "a"),
            (Err(lost), Ok(_)) => (lost, "b"),
            other => panic!("{other:?}"),
        };
        expect_fenced(&lost, in_force);
    })
    .await;
}

#[tokio::test]
async fn token_has_at_most_64_bytes_and_a_partition() {
    let server = TestServer::in_memory().await;
    let longest = "x".repeat(64);
    fence(&server, None, &longest).await.unwrap();
    append_if(&server, "a", demanding(&longest)).await.unwrap();
    let longer = "é".repeat(33);
    for status in [
        fence(&server, None, &longer).await.unwrap_err(),
        fence(&server, Some(&longer), "").await.unwrap_err(),
        append_if(&server, "no", demanding(&longer)).await.unwrap_err(),
    ] {
        assert_eq!(reason(&status), ErrorReason::InvalidArgument);
    }
    let nowhere = SetFencingTokenRequest {
        topic: "default".to_owned(),
        partition: 4,
        ..SetFencingTokenRequest::default()
    };
    let status = server.topics().set_fencing_token(nowhere).await.unwrap_err();
    assert_eq!(reason(&status), ErrorReason::PartitionNotFound);
}

#[tokio::test]
async fn condition_needs_an_ack_after_the_verdict() {
    let server = TestServer::in_memory().await;
    let refused = |status: Status| assert_eq!(reason(&status), ErrorReason::InvalidArgument);
    for durability in [Durability::LeaderWritten, Durability::None] {
        let durability = i32::from(durability);
        for condition in [expecting(0), demanding("")] {
            let condition = Some(condition);
            let request = AppendRequest { durability, condition, ..append_request(&["no"]) };
            refused(server.produce().append(request).await.unwrap_err());
        }
        let fencing_token = Some(String::new());
        let fenced = AppendStreamInit { durability, fencing_token, ..init() };
        let session = AppendSession::silent(&server).await;
        session.send(Sent::Init(fenced)).await;
        refused(session.finish().await.1.unwrap_err());
        let plain = AppendStreamInit { durability, ..init() };
        let (session, _) = AppendSession::open(&server, plain).await;
        session.send(batch("no", 0)).await;
        refused(session.finish().await.1.unwrap_err());
    }
    // A stronger minimum of the topic makes the ack wait for the verdict.
    let config =
        TopicConfig { min_durability: Durability::QuorumSynced.into(), ..TopicConfig::default() };
    let update = UpdateTopicRequest {
        name: "default".to_owned(),
        config: Some(config),
        update_mask: Some(FieldMask { paths: vec!["min_durability".to_owned()] }),
        topic_id: 0,
    };
    server.topics().update_topic(update).await.unwrap();
    let request = AppendRequest {
        durability: Durability::None.into(),
        condition: Some(expecting(0)),
        ..append_request(&["a"])
    };
    server.produce().append(request).await.unwrap();
    assert_eq!(values(&server.records(0, 0).await), ["a"]);
}

fn batch(value: &str, expected_offset: u64) -> Sent {
    Sent::Batch(AppendStreamBatch {
        batch: encoded(&[value]),
        first_sequence: None,
        expected_offset: Some(expected_offset),
    })
}

#[tokio::test]
async fn stream_drops_batches_after_a_failed_condition() {
    on_both(async |server: TestServer| {
        let (session, _) = AppendSession::open(&server, init()).await;
        for offset in 0..10 {
            session.send(batch("a", offset)).await;
        }
        session.send(batch("mismatch", 11)).await;
        // Each would be admitted if the batch before it did not exist.
        for offset in 10..20 {
            session.send(batch("behind", offset)).await;
        }
        let (acks, end) = session.finish().await;
        assert_eq!(first_offsets(&acks), (0..10).collect::<Vec<_>>());
        expect_mismatch(&end.unwrap_err(), 10);
        server.append(&["after"]).await;
        let read = values(&server.records(0, 0).await);
        assert_eq!((read.len(), read[10].as_str()), (11, "after"));
    })
    .await;
}

#[tokio::test]
async fn stream_reuses_a_sequence_only_after_the_verdict() {
    on_both(async |server: TestServer| {
        let request = InitProducerRequest::default();
        let producer = server.produce().init_producer(request).await.unwrap().into_inner().producer;
        let batch = |value: &str, expected_offset| {
            Sent::Batch(AppendStreamBatch {
                batch: encoded(&[value]),
                first_sequence: Some(0),
                expected_offset: Some(expected_offset),
            })
        };
        let (session, _) =
            AppendSession::open(&server, AppendStreamInit { producer, ..init() }).await;
        session.send(batch("mismatch", 7)).await;
        session.send(batch("behind", 0)).await;
        let (acks, end) = session.finish().await;
        assert!(acks.is_empty());
        expect_mismatch(&end.unwrap_err(), 0);
        server.append(&["after"]).await;
        assert_eq!(values(&server.records(0, 0).await), ["after"]);
    })
    .await;
}

#[tokio::test]
async fn open_stream_is_fenced() {
    on_both(async |server: TestServer| {
        fence(&server, None, "one").await.unwrap();
        let fencing_token = Some("one".to_owned());
        let (mut session, _) =
            AppendSession::open(&server, AppendStreamInit { fencing_token, ..init() }).await;
        session.send_batch(&["a"]).await;
        assert_eq!(first_offsets(&session.acks().await), [0]);
        fence(&server, Some("one"), "two").await.unwrap();
        session.send_batch(&["b"]).await;
        session.send_batch(&["c"]).await;
        let (acks, end) = session.finish().await;
        assert!(acks.is_empty());
        expect_fenced(&end.unwrap_err(), "two");
        assert_eq!(values(&server.records(0, 0).await), ["a"]);
    })
    .await;
}

#[tokio::test]
async fn tokens_and_verdicts_survive_a_restart() {
    let server = TestServer::durable().await;
    append_if(&server, "a", expecting(0)).await.unwrap();
    append_if(&server, "no", expecting(5)).await.unwrap_err();
    fence(&server, None, "one").await.unwrap();
    append_if(&server, "no", demanding("zero")).await.unwrap_err();
    let server = server.restart().await;
    assert_eq!(values(&server.records(0, 0).await), ["a"]);
    expect_fenced(&append_if(&server, "no", demanding("")).await.unwrap_err(), "one");
    expect_mismatch(&append_if(&server, "no", expecting(0)).await.unwrap_err(), 1);
    append_if(&server, "b", demanding("one")).await.unwrap();
    assert_eq!(values(&server.records(0, 0).await), ["a", "b"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_session_and_producer_send_conditions() {
    let server = TestServer::in_memory().await;
    let address = server.running.local_addr().to_string();
    let client = Client::new(Config::new([address])).unwrap();
    client.admin().set_fencing_token("default", 0, Some(""), "one").await.unwrap();
    let options = SessionOptions { fencing_token: Some("one".to_owned()), ..Default::default() };
    let session = client.session("default", 0, options).await.unwrap();
    let batch = records(&["a"]);
    let first = session.append_expecting(&batch, Some(0)).await.unwrap();
    let second = session.append_expecting(&batch, Some(1)).await.unwrap();
    assert_eq!(first.await.unwrap().first_offset, Some(0));
    assert_eq!(second.await.unwrap().first_offset, Some(1));
    let third = session.append_expecting(&batch, Some(7)).await.unwrap().await.unwrap_err();
    assert!(third.is(ErrorReason::ExpectedOffsetMismatch) && !third.may_have_applied, "{third}");
    assert_eq!(third.next_offset, Some(2));

    let options = ProducerOptions { fencing_token: Some("one".to_owned()), ..Default::default() };
    let producer = client.producer(options);
    producer.append("default", 0, &batch).await.unwrap();
    let sent = producer.send_to("default", 0, record("b")).await.unwrap();
    assert_eq!(sent.await.unwrap().first_offset, Some(3));
    client.admin().set_fencing_token("default", 0, Some("one"), "two").await.unwrap();
    // The session's token is sent with each condition unless the condition names another.
    let here = AppendOptions::default().expecting(4);
    let fenced = producer.append_with("default", 0, &batch, &here).await.unwrap_err();
    assert!(fenced.is(ErrorReason::Fenced) && !fenced.may_have_applied, "{fenced}");
    assert_eq!(fenced.fencing_token.as_deref(), Some("two"));
    let named = here.fenced_by("two");
    let ack = producer.append_with("default", 0, &batch, &named).await.unwrap();
    assert_eq!(ack.first_offset, Some(4));
}

/// Each writer reads the end and appends there: each offset has one winner, which knows it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_several_racing_writers_wins_each_offset() {
    on_both(async |server: TestServer| {
        let write = async |writer: u64| {
            let (mut won, mut lost, mut at) = (Vec::new(), 0, 0);
            while won.len() < 25 {
                match append_if(&server, &format!("{writer}/{at}"), expecting(at)).await {
                    Ok(appended) => {
                        assert_eq!(first_offset(&appended), at);
                        won.push(at);
                        at += 1;
                    }
                    Err(status) => {
                        assert_eq!(reason(&status), ErrorReason::ExpectedOffsetMismatch);
                        let next = detail(&status).next_offset.unwrap();
                        assert!(next > at, "{next} after {at}");
                        (at, lost) = (next, lost + 1);
                    }
                }
            }
            (writer, won, lost)
        };
        let writers = futures_util::future::join_all((0..4).map(write)).await;
        let lost: u64 = writers.iter().map(|(.., lost)| *lost).sum();
        println!("100 wins, {lost} losses");
        assert!(lost > 0, "the writers never competed");
        let mut seen = BTreeSet::new();
        let read = values(&server.records(0, 0).await);
        for (writer, won, _) in writers {
            for offset in won {
                assert!(seen.insert(offset), "offset {offset} was won twice");
                let index = usize::try_from(offset).unwrap();
                assert_eq!(read[index], format!("{writer}/{offset}"));
            }
        }
        assert_eq!((seen.len(), read.len()), (100, 100));
    })
    .await;
}
