//! Clients that cancel calls keep their connections; floods of resets are slowed down. The frames
//! are written by hand, so that the server reads a call and its reset together.

use std::time::Duration;

use helix_proto::log::v1::FetchRequest;
use helix_server::limits::{
    CANCELLED_BURST, CANCELLED_PER_SECOND, RESETS_BY_ERROR_MAX, STREAMS_PER_CONNECTION_MAX,
};
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::limits::HELLO;
use crate::support::{PATIENCE, TestServer, append_request, latest, soon};
use crate::trio::until;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const PING: u8 = 6;
const GO_AWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// CANCEL
const CANCEL: [u8; 4] = [0, 0, 0, 8];

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Headers of a fetch, in HPACK without a dynamic table.
fn headers(stream: u32, timeout: Option<&str>) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    let named = |name: &str, value: &str| [vec![0], text(name), text(value)].concat();
    // POST, http, then the path by its name's index.
    let mut block = vec![0x83, 0x86, 0x04];
    block.extend(text("/helix.log.v1.ConsumeService/Fetch"));
    block.extend(named("content-type", "application/grpc"));
    block.extend(named("te", "trailers"));
    if let Some(timeout) = timeout {
        block.extend(named("grpc-timeout", timeout));
    }
    frame(HEADERS, END_HEADERS, stream, &block)
}

/// A fetch that waits at the end of a partition.
fn body(stream: u32) -> Vec<u8> {
    let fetch = FetchRequest {
        partitions: vec![latest(0)],
        max_wait: Some(prost_types::Duration { seconds: 60, nanos: 0 }),
        ..FetchRequest::default()
    };
    let message = fetch.encode_to_vec();
    let prefix = u32::try_from(message.len()).unwrap().to_be_bytes();
    frame(DATA, END_STREAM, stream, &[&[0], &prefix[..], &message].concat())
}

fn reset(stream: u32) -> Vec<u8> {
    frame(RESET, 0, stream, &CANCEL)
}

struct RawClient {
    stream: TcpStream,
    next: u32,
}

impl RawClient {
    async fn connect(server: &TestServer) -> Self {
        let mut stream = TcpStream::connect(server.running.local_addr()).await.unwrap();
        stream.write_all(HELLO).await.unwrap();
        Self { stream, next: 1 }
    }

    fn next_stream(&mut self) -> u32 {
        self.next += 2;
        self.next - 2
    }

    async fn send(&mut self, frames: &[u8]) {
        self.stream.write_all(frames).await.unwrap();
    }

    /// Reads the next frame: kind, flags, stream.
    async fn read(&mut self) -> (u8, u8, u32) {
        let mut head = [0; 9];
        soon(self.stream.read_exact(&mut head)).await.expect("the connection is open");
        let [a, b, c, kind, flags, stream @ ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        soon(self.stream.read_exact(&mut payload)).await.unwrap();
        assert_ne!(kind, GO_AWAY, "{}", String::from_utf8_lossy(&payload));
        (kind, flags, u32::from_be_bytes(stream))
    }

    /// Waits until the server has handled everything that was sent.
    async fn ping(&mut self) {
        self.send(&frame(PING, 0, 0, b"12345678")).await;
        while self.read().await.0 != PING {}
    }
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
