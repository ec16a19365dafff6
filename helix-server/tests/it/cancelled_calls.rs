//! Clients that cancel calls keep their connections; floods of resets are slowed down. The frames
//! are written by hand, so that the server reads a call and its reset together.

use std::time::Duration;

use helix_proto::log::v1::FetchRequest;
use helix_server::limits::{
    CANCELLED_BURST, CANCELLED_PER_SECOND, RESETS_BY_ERROR_MAX, STREAMS_PER_CONNECTION_MAX,
};
use tokio::io::AsyncWriteExt;
use tokio::time::Instant;

use crate::raw_http2::{
    DATA, END_HEADERS, END_STREAM, HEADERS, RawClient, WINDOW_UPDATE, call_block, frame, message,
    reset,
};
use crate::support::{PATIENCE, TestServer, append_request, latest, soon};
use crate::trio::until;

const FETCH: &str = "/helix.log.v1.ConsumeService/Fetch";

/// Headers of a fetch.
fn headers(stream: u32, timeout: Option<&str>) -> Vec<u8> {
    let timeout = timeout.map(|timeout| ("grpc-timeout", timeout));
    frame(HEADERS, END_HEADERS, stream, &call_block(FETCH, timeout.as_slice()))
}

/// A fetch that waits at the end of a partition.
fn body(stream: u32) -> Vec<u8> {
    let fetch = FetchRequest {
        partitions: vec![latest(0)],
        max_wait: Some(prost_types::Duration { seconds: 60, nanos: 0 }),
        ..FetchRequest::default()
    };
    frame(DATA, END_STREAM, stream, &message(&fetch))
}

#[tokio::test]
async fn calls_with_short_deadlines_keep_their_connection() {
    let server = TestServer::in_memory().await;
    let mut client = RawClient::connect(&server).await;
    let kept = client.next_stream();
    client.send(&[headers(kept, None), body(kept)].concat()).await;
    for _ in 0..20 {
        let mut frames = Vec::new();
        // As many as a connection may have at a time, each reset before the server accepts it.
        for _ in 0..STREAMS_PER_CONNECTION_MAX {
            let stream = client.next_stream();
            frames.extend([headers(stream, None), body(stream), reset(stream)].concat());
        }
        client.send(&frames).await;
        client.ping().await;
    }
    // The call beside them gets its response.
    server.append(&["a"]).await;
    loop {
        let (kind, flags, stream) = client.read().await;
        if stream == kept && kind == HEADERS && flags & END_STREAM != 0 {
            break;
        }
    }
}

/// The server has not accepted any of the calls when it reads them, so it cannot know yet that the
/// client cancels calls.
#[tokio::test]
async fn first_burst_may_exceed_the_open_streams() {
    let server = TestServer::in_memory().await;
    let mut client = RawClient::connect(&server).await;
    client.ping().await;
    let mut frames = Vec::new();
    for _ in 0..4 * STREAMS_PER_CONNECTION_MAX {
        let stream = client.next_stream();
        frames.extend([headers(stream, None), body(stream), reset(stream)].concat());
    }
    client.send(&frames).await;
    client.ping().await;
}

#[tokio::test]
async fn requests_that_arrive_after_their_deadline_keep_the_connection() {
    let server = TestServer::in_memory().await;
    let mut client = RawClient::connect(&server).await;
    let streams = 500;
    for _ in 0..2 + RESETS_BY_ERROR_MAX / streams {
        let ids: Vec<u32> = (0..streams).map(|_| client.next_stream()).collect();
        let begun: Vec<u8> = ids.iter().flat_map(|id| headers(*id, Some("1m"))).collect();
        client.send(&begun).await;
        let mut open = streams;
        while open > 0 {
            let (kind, flags, _) = client.read().await;
            open -= usize::from(kind == HEADERS && flags & END_STREAM != 0);
        }
        let rest: Vec<u8> = ids.iter().flat_map(|id| [body(*id), reset(*id)].concat()).collect();
        client.send(&rest).await;
        client.ping().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn floods_of_resets_are_slowed_down() {
    let server = TestServer::in_memory().await;
    let load = server.running.load().clone();
    let mut client = RawClient::connect(&server).await;
    let burst = CANCELLED_PER_SECOND * u32::try_from(CANCELLED_BURST.as_secs()).unwrap();
    let begun = Instant::now();
    let flood = tokio::spawn(async move {
        // Twice the burst, in parts that the connection may have open.
        for _ in 0..2 * burst / 500 {
            let mut frames = Vec::new();
            for _ in 0..500 {
                let stream = client.next_stream();
                frames.extend([headers(stream, None), body(stream), reset(stream)].concat());
            }
            client.send(&frames).await;
        }
        client.ping().await;
    });
    // Another client is served meanwhile.
    let mut slowest = Duration::ZERO;
    while !flood.is_finished() {
        let since = Instant::now();
        soon(server.produce().append(append_request(&["another"]))).await.unwrap();
        slowest = slowest.max(since.elapsed());
        assert!(begun.elapsed() < PATIENCE, "the flood takes too long");
    }
    flood.await.unwrap();
    // Far less, unless the machine stalls.
    assert!(slowest < Duration::from_secs(6), "{slowest:?}");
    let least = Duration::from_secs(1) * burst / CANCELLED_PER_SECOND;
    assert!(begun.elapsed() >= least * 9 / 10, "{:?}", begun.elapsed());
    // The last cancelled calls end after the connection has answered the ping.
    until("the cancelled calls have returned their permits", async || {
        let held = (load.partition_count(), load.request_bytes());
        (held == (0, 0)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn endless_resets_leave_other_clients_served() {
    let server = TestServer::in_memory().await;
    let mut client = RawClient::connect(&server).await;
    // Without requests: as many as possible in each turn.
    let mut frames = frame(WINDOW_UPDATE, 0, 0, &[0, 0, 1, 0]);
    for _ in 0..100_000 {
        let stream = client.next_stream();
        frames.extend([headers(stream, None), reset(stream)].concat());
    }
    // The server closes the connection, or slows it down.
    let sending = async {
        let _ = client.stream.write_all(&frames).await;
    };
    let _ = tokio::time::timeout(Duration::from_secs(1), sending).await;
    soon(server.produce().append(append_request(&["another"]))).await.unwrap();
    until("no request holds memory", async || {
        (server.running.load().request_bytes() == 0).then_some(())
    })
    .await;
}
