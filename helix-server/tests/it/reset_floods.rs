//! Floods of calls that are reset: the process keeps to its memory limit, and another client is
//! served. Each mix of calls, bodies and connections has a part of the time.

// The tests read the memory of a process.
#![allow(clippy::disallowed_methods)]

use std::net::SocketAddr;
use std::time::Duration;

use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_proto::log::v1::{FetchRequest, WhoAmIRequest};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::Child;
use tokio::runtime::{Builder, Runtime};
use tokio::time::{Instant, timeout};
use tonic::transport::{Channel, Endpoint};

use crate::limits::HELLO;
use crate::process;
use crate::raw_http2::{DATA, END_HEADERS, END_STREAM, HEADERS, call_block, frame, message, reset};
use crate::support::{PATIENCE, append_request, latest, soon};
use crate::trio::until;

/// Memory limit of the node, the smallest one, and what the process may have at most. The tests'
/// build is larger and slower than a release.
const LIMIT_MIB: u64 = 256;
const MOST_MIB: u64 = LIMIT_MIB + LIMIT_MIB / 10;

const MIX_TIME: Duration = Duration::from_millis(1500);

/// Streams in one write of a flooding client.
const STREAMS: u32 = 512;

const FETCH: &str = "/helix.log.v1.ConsumeService/Fetch";
const PATHS: [&str; 6] = [
    FETCH,
    "/helix.log.v1.ProduceService/Append",
    "/helix.log.v1.ProduceService/AppendStream",
    "/helix.log.v1.ConsumeService/Subscribe",
    "/helix.log.v1.AccessService/WhoAmI",
    "/helix.log.v1.NoService/NoMethod",
];

/// Parts of each request that a flooding client sends before it resets the call.
#[derive(Debug, Clone, Copy)]
enum Body {
    /// Headers only; the request is open.
    None,
    /// Headers that end the request.
    Ended,
    /// A message that ends the request.
    Whole,
    /// The start of a message.
    Part,
}

#[derive(Debug, Clone, Copy)]
struct Mix {
    connections: usize,
    body: Body,
    /// Reads what the server sends.
    reads: bool,
    /// Resets calls after all of a write were begun, not each at once.
    resets_late: bool,
}

const MIXES: [Mix; 6] = [
    Mix { connections: 1, body: Body::None, reads: true, resets_late: false },
    Mix { connections: 4, body: Body::None, reads: true, resets_late: false },
    Mix { connections: 4, body: Body::Whole, reads: false, resets_late: false },
    Mix { connections: 4, body: Body::Ended, reads: false, resets_late: true },
    Mix { connections: 16, body: Body::Part, reads: true, resets_late: true },
    Mix { connections: 64, body: Body::None, reads: false, resets_late: true },
];

fn call(stream: u32, path: &str, body: Body) -> Vec<u8> {
    let flags = if matches!(body, Body::Ended) { END_STREAM } else { 0 };
    let mut frames = frame(HEADERS, END_HEADERS | flags, stream, &call_block(path, &[]));
    let whole = if path == FETCH {
        message(&FetchRequest {
            partitions: vec![latest(0)],
            max_wait: Some(prost_types::Duration { seconds: 60, nanos: 0 }),
            ..FetchRequest::default()
        })
    } else {
        message(&WhoAmIRequest::default())
    };
    match body {
        Body::None | Body::Ended => {}
        Body::Whole => frames.extend(frame(DATA, END_STREAM, stream, &whole)),
        Body::Part => frames.extend(frame(DATA, 0, stream, &[0, 0, 0, 0x10, 0])),
    }
    frames
}

/// Floods on new connections until it is dropped: the node may close one.
async fn flood(address: SocketAddr, mix: Mix, path: &str) {
    loop {
        let Ok(stream) = TcpStream::connect(address).await else { continue };
        let (mut reader, mut writer) = stream.into_split();
        let sending = async {
            writer.write_all(HELLO).await?;
            let mut next = 1;
            loop {
                let streams = (0..STREAMS).map(|number| next + 2 * number);
                let mut frames = Vec::new();
                for stream in streams.clone() {
                    frames.extend(call(stream, path, mix.body));
                    if !mix.resets_late {
                        frames.extend(reset(stream));
                    }
                }
                if mix.resets_late {
                    frames.extend(streams.flat_map(reset));
                }
                next += 2 * STREAMS;
                writer.write_all(&frames).await?;
            }
            #[expect(unreachable_code, reason = "the type of the block")]
            Ok::<(), std::io::Error>(())
        };
        let reading = async {
            let mut sink = [0; 4096];
            if !mix.reads {
                std::future::pending::<()>().await;
            }
            while matches!(reader.read(&mut sink).await, Ok(1..)) {}
        };
        tokio::select! {
            _ = sending => {}
            () = reading => {}
        }
    }
}

/// Floods from a thread of their own, so that the other client does not wait for them here.
fn start_floods(address: SocketAddr, mix: Mix, number: usize) -> Runtime {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    for connection in 0..mix.connections {
        let path = PATHS[(number + connection) % PATHS.len()];
        runtime.spawn(flood(address, mix, path));
    }
    runtime
}

/// Returns the most memory that a process has had, in MiB.
fn peak_mib(server: &Child) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.id().unwrap())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() >> 10
}

async fn append(produce: &mut ProduceServiceClient<Channel>) -> Duration {
    let begun = Instant::now();
    soon(produce.append(append_request(&["another"]))).await.unwrap();
    begun.elapsed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_mix_of_reset_calls_takes_memory_or_stops_other_clients() {
    let directory = tempfile::tempdir().unwrap();
    let address = process::free_address();
    let mut arguments = process::arguments(address, directory.path());
    arguments.push(format!("--memory-limit={}", LIMIT_MIB << 20));
    let server = process::start(&arguments);
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let channel = until("the server accepts", async || endpoint.connect().await.ok()).await;
    let mut produce = ProduceServiceClient::new(channel);
    let append_once = async || produce.clone().append(append_request(&["first"])).await.ok();
    until("the server appends", append_once).await;
    for (number, mix) in MIXES.into_iter().enumerate() {
        let floods = start_floods(address, mix, number);
        let end = Instant::now() + MIX_TIME;
        let (mut slowest, mut count) = (Duration::ZERO, 0);
        while Instant::now() < end {
            slowest = slowest.max(append(&mut produce).await);
            count += 1;
        }
        floods.shutdown_background();
        let peak = peak_mib(&server);
        println!("{mix:?}: {count} appends, slowest {slowest:?}, peak {peak} MiB");
        assert!(peak <= MOST_MIB, "{mix:?}: {peak} MiB of {LIMIT_MIB}");
        assert!(slowest < PATIENCE / 2, "{mix:?}: {slowest:?}");
    }
    // All that the flooding clients left behind ends.
    timeout(PATIENCE, append(&mut produce)).await.unwrap();
    process::kill(server).await;
}
