//! More bytes in flight than a shard permits: appends are throttled, retried and stored once.

use std::time::Duration;

use helix_client::{Client, Config, ProducerOptions};
use helix_proto::error::from_status;
use helix_proto::log::v1::ErrorReason;
use helix_server::limits;
use helix_server::shard::{AppendPermit, Shard};
use tonic::Code;

use crate::append_stream::{AppendSession, first_offsets, init};
use crate::support::{TestServer, append_request, reason, record, soon, values};

/// Takes all permits: a large batch counts for half of the bytes, small ones take the other half.
async fn all_permits(shard: &Shard) -> Vec<AppendPermit> {
    let (_, bytes_max) = shard.flow().bytes();
    let mut permits =
        vec![shard.permit(helix_server::shard::FlowShare::INTERNAL, bytes_max).await.unwrap()];
    for _ in 0..bytes_max / 2 / limits::SMALL_BATCH_BYTES {
        permits.push(
            shard
                .permit(helix_server::shard::FlowShare::INTERNAL, limits::SMALL_BATCH_BYTES)
                .await
                .unwrap(),
        );
    }
    assert_eq!(shard.flow().bytes(), (bytes_max, bytes_max));
    permits
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn throttled_append_waits_and_is_stored_once() {
    let server = TestServer::in_memory().await;
    // All permits are taken and stay taken.
    let located = server.running.node().locate("default", 0).unwrap();
    let permits = all_permits(&located.shard).await;
    let address = server.running.local_addr().to_string();
    let client = Client::new(Config { seed: Some(1), ..Config::new([address]) }).unwrap();
    let producer = client.producer(ProducerOptions::default());
    let appending = tokio::spawn(async move {
        let mut acks = Vec::new();
        for value in ["a", "b"] {
            let ack = producer.append("default", 0, &[record(value)][..]).await.unwrap();
            assert!(!ack.duplicate);
            acks.push(ack.first_offset);
        }
        acks
    });
    // Twice the server's longest wait: by then the client was throttled as well.
    for _ in 0..2 {
        let request = append_request(&["never"]);
        let status = soon(server.produce().append(request)).await.unwrap_err();
        assert_eq!(reason(&status), ErrorReason::Throttled);
        assert_eq!(status.code(), Code::ResourceExhausted);
        let received = from_status(&status).unwrap();
        assert!(received.detail.retryable && !received.detail.may_have_applied);
        assert!(received.retry_after.is_some_and(|wait| wait > Duration::ZERO));
    }
    assert!(!appending.is_finished(), "there is no permit for it");
    drop(permits);
    assert_eq!(soon(appending).await.unwrap(), [Some(0), Some(1)]);
    assert_eq!(values(&server.records(0, 0).await), ["a", "b"]);
}

/// A stream waits instead: its batches are in order anyway.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stream_waits_for_flow_permits() {
    let server = TestServer::in_memory().await;
    let located = server.running.node().locate("default", 0).unwrap();
    let permits = all_permits(&located.shard).await;
    let (mut session, _) = AppendSession::open(&server, init()).await;
    for value in ["a", "b", "c"] {
        session.send_batch(&[value]).await;
    }
    let wait = limits::PERMIT_WAIT_MAX + Duration::from_millis(500);
    let early = tokio::time::timeout(wait, session.acks()).await;
    assert!(early.is_err(), "{early:?} without permits");
    drop(permits);
    let (acks, end) = session.finish().await;
    end.unwrap();
    assert_eq!(first_offsets(&acks), [0, 1, 2]);
    assert_eq!(values(&server.records(0, 0).await), ["a", "b", "c"]);
}
