//! Limits on what clients can make a node hold: connections, calls, requests, responses. One client
//! exceeds each limit while another client is served.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use helix_proto::batch;
use helix_proto::log::v1::cluster_service_client::ClusterServiceClient;
use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::{
    CreateTopicRequest, ErrorReason, FetchRequest, GetMetadataRequest, GetTopicRequest,
    ListTopicsRequest, NamedPosition, Record, ResolveOffsetsRequest, StartPosition,
    SubscribeRequest, WatchMetadataRequest,
};
use helix_server::config::ServerConfig;
use helix_server::limits::{
    CALLS_PER_CONNECTION_MIN, CALLS_RESERVE_PART, HANDSHAKE_WAIT_MAX, HEADER_LIST_BYTES_MAX,
    PARTITIONS_PER_CALL_MAX, PARTITIONS_PER_PAGE_MAX, PARTITIONS_PER_TURN,
    STREAMS_PER_CONNECTION_MAX,
};
use helix_server::memory::MEMORY_LIMIT_MIN;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tonic::codegen::http;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request};

use crate::captured_log::CapturedLog;
use crate::process::patient_client;
use crate::support::{
    PATIENCE, TestServer, append_request, as_batch, connect, earliest, from_offset, latest, plain,
    reason, soon, values,
};

/// HTTP/2 preface with an empty settings frame.
pub(crate) const HELLO: &[u8] =
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";

async fn small() -> TestServer {
    let config = ServerConfig { memory_limit: MEMORY_LIMIT_MIN, ..ServerConfig::in_memory() };
    TestServer::start(config, None).await
}

fn count(server: &TestServer, name: &str) -> u64 {
    let mut counts = server.running.load().events().counts();
    counts.find(|(it, _)| *it == name).expect("there is such a counter").1
}

/// Polls until the condition holds.
async fn until(what: &str, is_so: impl Fn() -> bool) {
    let wait = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(3 * PATIENCE, wait).await.unwrap_or_else(|_| panic!("never: {what}"));
}

/// Checks that another client, with its own connection, is served.
async fn others_are_served(server: &TestServer) {
    let channel = soon(connect(&server.running)).await;
    let mut produce = ProduceServiceClient::new(channel);
    soon(produce.append(append_request(&["another"]))).await.unwrap();
}

/// Reads until the server closes the connection; false if it does not.
async fn is_closed(stream: &mut TcpStream) -> bool {
    let mut sink = [0; 4096];
    let end = async {
        loop {
            match stream.read(&mut sink).await {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
        }
    };
    tokio::time::timeout(2 * PATIENCE, end).await.is_ok()
}

async fn dial(address: SocketAddr) -> TcpStream {
    TcpStream::connect(address).await.unwrap()
}

#[tokio::test]
async fn closes_connections_over_the_limit() {
    let (log, _guard) = CapturedLog::capture();
    let server = small().await;
    let load = server.running.load().clone();
    // The test's own connection is the other one.
    load.limit_connections(2);
    let mut first = dial(server.running.local_addr()).await;
    first.write_all(HELLO).await.unwrap();
    until("two are open", || load.connection_count() == 2).await;
    let mut beyond = dial(server.running.local_addr()).await;
    assert!(is_closed(&mut beyond).await, "it is closed at once");
    let mut another = dial(server.running.local_addr()).await;
    assert!(is_closed(&mut another).await);
    assert_eq!(count(&server, "connections_refused"), 2);
    let lines: Vec<String> = log
        .text()
        .lines()
        .filter(|line| line.contains("refused connections over the limit"))
        .map(str::to_owned)
        .collect();
    assert_eq!(lines.len(), 1, "one log line for all of them: {lines:?}");
    let words = ["refused=1", "allowed=2", "--memory-limit"];
    assert!(words.iter().all(|word| lines[0].contains(word)), "{lines:?}");
    drop(first);
    until("one connection is closed", || load.connection_count() < 2).await;
    others_are_served(&server).await;
}

#[tokio::test]
async fn drops_connections_without_a_handshake() {
    let server = small().await;
    let begun = tokio::time::Instant::now();
    let mut silent = dial(server.running.local_addr()).await;
    let mut half = dial(server.running.local_addr()).await;
    half.write_all(&HELLO[..20]).await.unwrap();
    let mut idle = dial(server.running.local_addr()).await;
    idle.write_all(HELLO).await.unwrap();
    others_are_served(&server).await;
    assert!(is_closed(&mut silent).await && is_closed(&mut half).await);
    assert!(begun.elapsed() >= HANDSHAKE_WAIT_MAX, "they were given the full wait");
    until("both are counted", || count(&server, "handshakes_timed_out") == 2).await;
    // A connection after its handshake may be idle.
    idle.write_all(b"\x00\x00\x08\x06\x00\x00\x00\x00\x0012345678").await.unwrap();
    let mut answer = [0; 64];
    assert!(soon(idle.read(&mut answer)).await.unwrap() > 0);
}

#[tokio::test]
async fn rejects_oversized_headers() {
    let server = small().await;
    let big = "x".repeat(HEADER_LIST_BYTES_MAX as usize);
    let mut request = Request::new(append_request(&["a"]));
    request.metadata_mut().insert("x-big", big.parse().unwrap());
    soon(server.produce().append(request)).await.unwrap_err();
    others_are_served(&server).await;
    soon(server.produce().append(append_request(&["b"]))).await.unwrap();
    assert_eq!(values(&server.records(0, 0).await), ["another", "b"]);
}

#[tokio::test]
async fn accepts_a_request_in_many_tiny_frames() {
    let server = small().await;
    let channel = connect(&server.running).await;
    let request = append_request(&["in little pieces"]);
    let message = prost::Message::encode_to_vec(&request);
    let head = [&[0][..], &u32::try_from(message.len()).unwrap().to_be_bytes()].concat();
    let body = [head, message].concat();
    let pieces = body.into_iter().map(|byte| Ok::<_, tonic::Status>(vec![byte].into()));
    let answer = soon(post(channel, "ProduceService/Append", Chunks::of(pieces))).await;
    assert_eq!(answer.headers().get("grpc-status"), None, "{answer:?}");
    assert_eq!(values(&server.records(0, 0).await), ["in little pieces"]);
}

#[tokio::test]
async fn throttles_calls_over_the_limit() {
    let server = small().await;
    let load = server.running.load();
    let calls = load.shares().calls;
    let reserve = calls / CALLS_RESERVE_PART;
    let subscribe = async |channel: &Channel| {
        let mut consume = ConsumeServiceClient::new(channel.clone());
        let request =
            SubscribeRequest { partitions: vec![latest(0)], ..SubscribeRequest::default() };
        soon(consume.subscribe(request)).await
    };
    let mut open = Vec::new();
    // Each connection gets at most half of the free calls, and so leaves some for the next one. All
    // connections of this machine leave half of the reserve.
    for connection in 0.. {
        let channel = connect(&server.running).await;
        let free = calls - open.len();
        let before = open.len();
        let refused = loop {
            // One less than its streams: the last call waits for a stream at the client.
            if open.len() - before + 1 == STREAMS_PER_CONNECTION_MAX as usize {
                break None;
            }
            match subscribe(&channel).await {
                Ok(answer) => open.push(answer),
                Err(refused) => break Some(refused),
            }
        };
        let opened = open.len() - before;
        assert!(opened <= free.div_ceil(2).max(CALLS_PER_CONNECTION_MIN), "{opened} of {free}");
        if let Some(refused) = refused {
            assert_eq!(reason(&refused), ErrorReason::Throttled, "{refused:?}");
            assert_eq!(refused.code(), Code::ResourceExhausted);
            if opened == 0 {
                assert!(refused.message().contains("calls from this client address"), "{refused}");
                break;
            }
        }
        assert!(opened > 0 && connection < 100, "{} of {calls} are open", open.len());
        if open.len() + reserve + 8 < calls {
            others_are_served(&server).await;
        }
    }
    assert!(count(&server, "principal_calls_refused") > 0);
    let reserve = reserve / 2;
    assert!(open.len() + reserve <= calls && open.len() + reserve + 8 >= calls, "{}", open.len());
    // The reserve is free for other addresses.
    load.acquire_call(reserve - 1).unwrap();
    open.truncate(calls / 2);
    until("half of the calls have ended", || load.acquire_call(calls * 3 / 8).is_ok()).await;
    others_are_served(&server).await;
}

#[tokio::test]
async fn limits_partitions_being_read() {
    let server = small().await;
    let load = server.running.load();
    let most = load.acquire_partitions(usize::MAX).unwrap();
    let fetch = FetchRequest { partitions: vec![earliest(0)], ..FetchRequest::default() };
    let status = soon(server.consume().fetch(fetch.clone())).await.unwrap_err();
    assert_eq!(reason(&status), ErrorReason::Throttled, "{status:?}");
    drop(most);
    soon(server.consume().fetch(fetch)).await.unwrap();
    assert_eq!(count(&server, "partitions_refused"), 1);
}

/// Creates a topic with so many partitions that its description is long.
async fn create_wide(server: &TestServer, name: &str) {
    let name = name.to_owned();
    let request = CreateTopicRequest { name, partition_count: WIDE, ..Default::default() };
    soon(server.topics().create_topic(request)).await.unwrap();
}

const WIDE: u32 = 6_000;

#[tokio::test]
async fn descriptions_of_many_partitions_reserve_memory_first() {
    let server = small().await;
    create_wide(&server, "wide").await;
    let load = server.running.load().clone();
    until("the response of the creation is sent", || load.response_bytes() == 0).await;
    let all = load.try_acquire_response(usize::MAX).unwrap();
    let get = GetTopicRequest { name: "wide".to_owned() };
    let (mut get_one, mut get_all) = (server.topics(), server.topics());
    let (mut routes, mut watch) = (server.cluster(), server.cluster());
    let mut resolve = server.consume();
    let offsets = ResolveOffsetsRequest {
        topic: "wide".to_owned(),
        partitions: Vec::new(),
        position: earliest(0).start,
        topic_id: 0,
    };
    let refusals = tokio::join!(
        async { get_one.get_topic(get.clone()).await.unwrap_err() },
        async { get_all.list_topics(ListTopicsRequest::default()).await.unwrap_err() },
        async { routes.get_metadata(GetMetadataRequest::default()).await.unwrap_err() },
        async {
            let answers = watch.watch_metadata(WatchMetadataRequest::default()).await;
            answers.unwrap().into_inner().message().await.unwrap_err()
        },
        async { resolve.resolve_offsets(offsets.clone()).await.unwrap_err() },
    );
    for refused in <[_; 5]>::from(refusals) {
        assert_eq!(reason(&refused), ErrorReason::Throttled, "{refused:?}");
        assert_eq!(refused.code(), Code::ResourceExhausted);
    }
    assert_eq!(count(&server, "answers_refused"), 5);
    drop(all);
    let resolved = soon(server.consume().resolve_offsets(offsets)).await.unwrap().into_inner();
    assert_eq!(resolved.offsets.len(), WIDE as usize);
    let topic = soon(server.topics().get_topic(get)).await.unwrap().into_inner().topic.unwrap();
    assert_eq!(topic.partitions.len(), WIDE as usize);
    until("all response memory is free", || load.response_bytes() == 0).await;
}

/// Each message is larger than the window of a stream, and none is read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watchers_share_the_memory_of_one_message() {
    let server = small().await;
    let create = CreateTopicRequest {
        name: "widest".to_owned(),
        partition_count: 100_000,
        ..Default::default()
    };
    soon(server.topics().create_topic(create)).await.unwrap();
    let load = server.running.load().clone();
    until("the response of the creation is sent", || load.response_bytes() == 0).await;
    let mut unread = Vec::new();
    for _ in 0..4 {
        let channel = connect(&server.running).await;
        let mut cluster = ClusterServiceClient::new(channel);
        for _ in 0..100 {
            let watch = cluster.watch_metadata(WatchMetadataRequest::default());
            unread.push(soon(watch).await.unwrap());
        }
    }
    // Another client is served while the state changes. A stall of the machine delays one or two.
    let mut times = Vec::new();
    for number in 0..10 {
        let name = format!("later-{number}");
        let create = CreateTopicRequest { name, partition_count: 1, ..Default::default() };
        soon(server.topics().create_topic(create)).await.unwrap();
        let since = tokio::time::Instant::now();
        soon(server.produce().append(append_request(&["a"]))).await.unwrap();
        times.push(since.elapsed());
    }
    times.sort_unstable();
    assert!(times[7] < Duration::from_secs(2), "{times:?}");
    // A byte for each partition; few states at a time. Separate copies would take 40 MB.
    let held = load.response_bytes();
    assert!(held > 0 && held < 8 << 20, "{held}");
    // A watcher that reads gets the newest state.
    let mut watch = server.cluster().max_decoding_message_size(64 << 20);
    let mut states = watch.watch_metadata(WatchMetadataRequest::default()).await.unwrap();
    let first = soon(states.get_mut().message()).await.unwrap().unwrap().metadata.unwrap();
    assert_eq!(first.topics.len(), 12);
    drop((unread, states));
    until("all response memory is free", || load.response_bytes() == 0).await;
}

#[tokio::test]
async fn topic_pages_are_limited_by_partitions() {
    let server = small().await;
    for name in ["a", "b", "c"] {
        create_wide(&server, name).await;
    }
    let mut pages = Vec::new();
    let mut page_token = String::new();
    loop {
        let request = ListTopicsRequest { page_token, ..ListTopicsRequest::default() };
        let answer = soon(server.topics().list_topics(request)).await.unwrap().into_inner();
        let partitions: usize = answer.topics.iter().map(|topic| topic.partitions.len()).sum();
        assert!(partitions as u64 <= PARTITIONS_PER_PAGE_MAX, "{partitions}");
        pages.push(answer.topics.into_iter().map(|topic| topic.name).collect::<Vec<_>>());
        page_token = answer.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(pages, [vec!["a"], vec!["b"], vec!["c", "default"]]);
    // The client's list has all topics.
    let client = patient_client(server.running.local_addr(), 7);
    let topics = soon(client.admin().topics("")).await.unwrap();
    let names: Vec<_> = topics.iter().map(|topic| topic.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c", "default"]);
}

#[tokio::test]
async fn counting_many_partitions_yields_to_other_tasks() {
    let server = small().await;
    create_wide(&server, "wide").await;
    for shard in server.running.node().shards() {
        let partitions = shard.status().partition_count as usize;
        let mut counting = Box::pin(shard.live_bytes());
        let mut turns = 0;
        while futures_util::poll!(&mut counting).is_pending() {
            turns += 1;
        }
        assert!(turns >= partitions / PARTITIONS_PER_TURN && turns > 0, "{turns} of {partitions}");
    }
}

#[tokio::test]
async fn topic_named_twice_is_returned_once() {
    let server = small().await;
    let topics = vec!["default".to_owned(); 3];
    let answer = soon(server.cluster().get_metadata(GetMetadataRequest { topics })).await.unwrap();
    assert_eq!(answer.into_inner().metadata.unwrap().topics.len(), 1);
}

#[tokio::test]
async fn long_poll_holds_partitions_but_not_request_memory() {
    let server = small().await;
    let load = server.running.load().clone();
    let max_wait = Some(prost_types::Duration { seconds: 60, nanos: 0 });
    let partitions = vec![latest(0), latest(1)];
    let mut consume = server.consume();
    let poll = tokio::spawn(async move {
        consume.fetch(FetchRequest { partitions, max_wait, ..FetchRequest::default() }).await
    });
    until("the poll waits", || load.partition_count() == 2 && load.request_bytes() == 0).await;
    server.append(&["a"]).await;
    soon(poll).await.unwrap().unwrap();
    until("no partition is held", || load.partition_count() == 0).await;
}

/// The first bytes of an append of 12 MiB.
fn begun(bytes: usize) -> impl Iterator<Item = Bytes> {
    let head = Bytes::from_static(&[0, 0, 0xC0, 0, 0]);
    std::iter::once(head).chain((0..bytes >> 16).map(|_| Bytes::from(vec![0xFF; 64 << 10])))
}

#[tokio::test]
async fn incomplete_request_releases_its_memory() {
    let server = small().await;
    let channel = connect(&server.running).await;
    // Twelve MiB are announced, one arrives, and the rest never does.
    let body = Chunks::and_then_none(begun(1 << 20));
    let waiting = tokio::spawn(post(channel, "ProduceService/Append", body));
    let load = server.running.load().clone();
    until("what has arrived is counted", || load.request_bytes() >= 1_000_000).await;
    assert!(load.request_bytes() < 2 << 20, "{}", load.request_bytes());
    others_are_served(&server).await;
    until("its memory is released", || load.request_bytes() == 0).await;
    let answer = soon(waiting).await.unwrap();
    assert_eq!(answer.headers().get("grpc-status").unwrap(), "4", "{answer:?}");
    assert_eq!(count(&server, "requests_timed_out"), 1);
}

#[tokio::test]
async fn announced_messages_take_no_memory() {
    let server = small().await;
    let load = server.running.load().clone();
    let mut hogs = JoinSet::new();
    // Each would be all of the memory for requests.
    let append = Bytes::from_static(&[0, 0, 0xFF, 0xFF, 0, 0]);
    let fetch = Bytes::from_static(&[0, 0, 0x10, 0, 0]);
    for _ in 0..8 {
        let channel = connect(&server.running).await;
        for (call, head) in [("ProduceService/Append", &append), ("ConsumeService/Fetch", &fetch)] {
            let body = Chunks::and_then_none(std::iter::once(head.clone()));
            hogs.spawn(post(channel.clone(), call, body));
        }
    }
    until("the calls are open", || load.acquire_call(load.shares().calls - 16).is_err()).await;
    fill(&server, 8).await;
    others_are_served(&server).await;
    assert!(load.request_bytes() < 64 << 10, "{}", load.request_bytes());
    assert_eq!(count(&server, "requests_refused"), 0);
    hogs.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_messages_end_while_others_wait() {
    let server = small().await;
    let load = server.running.load().clone();
    let mut hogs = JoinSet::new();
    // More than the memory for messages of which a part has arrived.
    for _ in 0..load.shares().arriving_bytes / (3 << 20) + 3 {
        let channel = connect(&server.running).await;
        let body = Chunks::and_then_none(begun(3 << 20));
        hogs.spawn(post(channel, "ProduceService/Append", body));
    }
    // One of them waits for the others, which do not arrive.
    let refused = soon(hogs.join_next()).await.unwrap().unwrap();
    assert_eq!(refused.headers().get("helix-reason").unwrap(), "THROTTLED", "{refused:?}");
    // Messages of which all arrives are served meanwhile.
    let mut writers = JoinSet::new();
    let value = Some(Bytes::from(vec![7; 1_000_000]));
    let encoded = batch::encode(&vec![Record { value, ..Record::default() }; 3]);
    for _ in 0..8 {
        let channel = connect(&server.running).await;
        let request = helix_proto::log::v1::AppendRequest {
            batch: as_batch(encoded.clone()),
            ..append_request(&[])
        };
        writers.spawn(async move {
            let mut produce = ProduceServiceClient::new(channel);
            // THROTTLED is retried, as clients do.
            let mut outcome = produce.append(request.clone()).await;
            while outcome.as_ref().is_err_and(|it| reason(it) == ErrorReason::Throttled) {
                outcome = produce.append(request.clone()).await;
            }
            outcome.unwrap();
        });
    }
    while let Some(written) = soon(writers.join_next()).await {
        written.unwrap();
    }
    assert!(load.request_bytes() <= load.shares().request_bytes + load.shares().arriving_bytes);
    hogs.shutdown().await;
    until("the request memory is free", || load.request_bytes() == 0).await;
}

#[tokio::test]
async fn rejects_a_million_empty_items_before_decoding() {
    let server = small().await;
    let request = ResolveOffsetsRequest {
        topic: "default".to_owned(),
        partitions: vec![0; 2 << 20],
        position: None,
        topic_id: 0,
    };
    let status = soon(server.consume().resolve_offsets(request)).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange, "{status:?}");
    // Within the size limit, over the number limit.
    let position = Some(Position::Named(NamedPosition::Latest.into()));
    let request = ResolveOffsetsRequest {
        topic: "default".to_owned(),
        partitions: vec![0; PARTITIONS_PER_CALL_MAX + 1],
        position: Some(StartPosition { position, ..StartPosition::default() }),
        topic_id: 0,
    };
    let status = soon(server.consume().resolve_offsets(request)).await.unwrap_err();
    assert_eq!(reason(&status), ErrorReason::InvalidArgument);
}

#[tokio::test]
async fn accepts_a_batch_of_plain_records_that_are_empty() {
    let server = small().await;
    let empty = vec![""; 750_000];
    let request =
        helix_proto::log::v1::AppendRequest { batch: plain(&empty), ..append_request(&[]) };
    soon(server.produce().append(request)).await.unwrap();
    let fetch = FetchRequest { partitions: vec![from_offset(0, 749_999)], ..Default::default() };
    assert_eq!(server.fetch_one(fetch).await.next_offset, 750_000);
}

/// Appends batches of 1 MiB.
async fn fill(server: &TestServer, batches: usize) {
    let value = Some(Bytes::from(vec![7; 512 << 10]));
    let one = Record { value, ..Record::default() };
    let encoded = batch::encode(&[one.clone(), one]);
    for _ in 0..batches {
        let batch = as_batch(encoded.clone());
        let request = helix_proto::log::v1::AppendRequest { batch, ..append_request(&[]) };
        soon(server.produce().append(request)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_readers_are_ended_when_others_wait() {
    let server = small().await;
    fill(&server, 4).await;
    let load = server.running.load().clone();
    let mut stalled = Vec::new();
    // Each holds at least a batch of 1 MiB, and together more than the limit.
    for _ in 0..load.shares().response_bytes / (1 << 20) + 8 {
        let address = format!("http://{}", server.running.local_addr());
        // A window that takes only the start of a response.
        let endpoint = Endpoint::from_shared(address).unwrap();
        let channel = endpoint.initial_stream_window_size(Some(65_535)).connect().await.unwrap();
        let mut consume = ConsumeServiceClient::new(channel);
        let request = SubscribeRequest {
            partitions: vec![earliest(0)],
            accept_encoded: true,
            ..SubscribeRequest::default()
        };
        stalled.push(soon(consume.subscribe(request)).await.unwrap());
    }
    until("some readers are ended", || count(&server, "stalled_readers_ended") > 0).await;
    assert!(load.response_bytes() <= load.shares().response_bytes);
    let fetch = FetchRequest {
        partitions: vec![earliest(0)],
        accept_encoded: true,
        ..FetchRequest::default()
    };
    let channel = connect(&server.running).await;
    let mut reader = ConsumeServiceClient::new(channel).max_decoding_message_size(64 << 20);
    let read = tokio::time::timeout(3 * PATIENCE, reader.fetch(fetch)).await.unwrap().unwrap();
    assert!(!read.into_inner().partitions[0].batches.is_empty());
    drop(stalled);
    until("their response memory is free", || load.response_bytes() == 0).await;
}

/// A body of chunks, each its own frame; it may never end.
struct Chunks {
    pieces: std::collections::VecDeque<Bytes>,
    ends: bool,
}

impl Chunks {
    fn of(pieces: impl Iterator<Item = Result<Bytes, tonic::Status>>) -> Self {
        Self { pieces: pieces.map(Result::unwrap).collect(), ends: true }
    }

    fn and_then_none(pieces: impl Iterator<Item = Bytes>) -> Self {
        Self { pieces: pieces.collect(), ends: false }
    }
}

impl hyper::body::Body for Chunks {
    type Data = Bytes;
    type Error = tonic::Status;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Bytes>, tonic::Status>>> {
        match self.pieces.pop_front() {
            Some(piece) => std::task::Poll::Ready(Some(Ok(hyper::body::Frame::data(piece)))),
            None if self.ends => std::task::Poll::Ready(None),
            None => std::task::Poll::Pending,
        }
    }
}

/// Sends a raw body and returns the head of the response.
async fn post(mut channel: Channel, call: &str, body: Chunks) -> http::Response<tonic::body::Body> {
    use tonic::codegen::Service;

    let request = http::Request::builder()
        .method("POST")
        .uri(format!("/helix.log.v1.{call}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(tonic::body::Body::new(body))
        .unwrap();
    std::future::poll_fn(|context| channel.poll_ready(context)).await.unwrap();
    channel.call(request).await.unwrap()
}
