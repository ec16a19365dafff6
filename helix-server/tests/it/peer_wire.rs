//! The peer port against a faulty or hostile peer, message by message.
//! Its messages must not reach openraft, end the server, or delay another shard.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::StreamExt;
use helix_proto::raft::v1 as pb;
use helix_server::protocol::ProtocolVersions;
use helix_server::raft::{DiskReads, LogStore, Machine, StateMachine, replica_id};
use helix_transport::{ChunkedBody, ChunkedWriter};
use helix_transport::{DetachedBody, ResponseLayer};
use helix_wal::storage::{FaultyStorage, Operation, SimulatedDisk};
use helix_wal::{Options, Wal};
use openraft::Raft;
use pb::ack::Result as AckResult;
use pb::answer::Result as UnaryResult;
use pb::exchange_request::Message;
use pb::exchange_response::Message as ResponseMessage;
use pb::peer_service_client::PeerServiceClient;
use pb::question::Question as UnaryRequest;
use prost::Message as _;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::body::Body;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status, Streaming};

use crate::peer_nodes::{
    CLUSTER, CountingMachine, PeerNode, SHARD, command, listeners, memory_wal,
};
use crate::support::PATIENCE;

const LIVE: i32 = pb::Lane::Live as i32;
const CONTROL: i32 = pb::Lane::Control as i32;

/// Starts node 2, which is under test. The test is node 1, whose address has no listener.
async fn node() -> PeerNode {
    let (listeners, peers) = listeners(2).await;
    let listener = listeners.into_iter().nth(1).unwrap();
    PeerNode::start(2, &peers, listener, memory_wal()).await
}

async fn channel(node: &PeerNode) -> Channel {
    let address = node.port.as_ref().unwrap().address;
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    endpoint.connect().await.unwrap()
}

async fn client(node: &PeerNode) -> PeerServiceClient<Channel> {
    PeerServiceClient::new(channel(node).await).max_encoding_message_size(16 << 20)
}

/// A stream to the node under test, for arbitrary messages.
struct RawStream {
    outgoing: mpsc::UnboundedSender<pb::ExchangeRequest>,
    results: Streaming<pb::ExchangeResponse>,
}

fn opening() -> pb::Opening {
    pb::Opening {
        generation: 1,
        version_min: ProtocolVersions::OWN.oldest,
        version_max: ProtocolVersions::OWN.newest,
        cluster: Bytes::copy_from_slice(&CLUSTER.to_be_bytes()),
        from_node: 1,
        to_node: 2,
        lane: LIVE,
    }
}

impl RawStream {
    async fn open(node: &PeerNode, opening: pb::Opening) -> Result<Self, Status> {
        let mut client = client(node).await;
        let (outgoing, queue) = mpsc::unbounded_channel();
        let raw = |results| Self { outgoing: outgoing.clone(), results };
        let first = pb::ExchangeRequest { message: Some(Message::Opening(opening)) };
        outgoing.send(first).unwrap();
        let queue = UnboundedReceiverStream::new(queue);
        let mut raw = raw(client.exchange(queue).await?.into_inner());
        let Some(ResponseMessage::Opened(opened)) = raw.next().await?.message else {
            panic!("the first message is the handshake");
        };
        assert_eq!((opened.version, opened.node), (ProtocolVersions::OWN.newest, 2));
        Ok(raw)
    }

    fn send(&self, message: Message) {
        self.outgoing.send(pb::ExchangeRequest { message: Some(message) }).unwrap();
    }

    async fn next(&mut self) -> Result<pb::ExchangeResponse, Status> {
        let next = timeout(PATIENCE, self.results.next()).await;
        next.expect("something comes").expect("the stream goes on")
    }

    async fn results(&mut self) -> pb::Results {
        match self.next().await.unwrap().message {
            Some(ResponseMessage::Results(results)) => results,
            other => panic!("{other:?}"),
        }
    }

    /// Returns the last ack of the next message. All its acks must be of this epoch.
    async fn ack(&mut self, epoch: u64) -> (u64, AckResult) {
        let mut acks = self.results().await.acks;
        assert!(acks.iter().all(|ack| ack.epoch == epoch), "{acks:?}");
        let ack = acks.pop().unwrap();
        (ack.sequence, ack.result.unwrap())
    }

    async fn append(&mut self, epoch: u64, entries: pb::AppendEntries) -> AckResult {
        self.send(append(route(epoch), 0, entries));
        self.ack(epoch).await.1
    }

    async fn expect_refused(&mut self, epoch: u64, entries: pb::AppendEntries, text: &str) {
        match self.append(epoch, entries).await {
            AckResult::Failure(failure) => assert!(failure.text.contains(text), "{}", failure.text),
            other => panic!("expected {text:?}, not {other:?}"),
        }
    }
}

fn route(id: u64) -> pb::Route {
    let (source_replica, target_replica) = (replica_id(1, 1), replica_id(2, 1));
    pb::Route { shard_id: SHARD, source_replica, target_replica, id }
}

fn append(route: pb::Route, sequence: u64, entries: pb::AppendEntries) -> Message {
    Message::Append(pb::Append { route: Some(route), sequence, entries: Some(entries) })
}

fn vote(term: u64, committed: bool) -> Option<pb::Vote> {
    Some(pb::Vote { term, voted_for: replica_id(1, 1), committed })
}

fn seal(entry: &mut pb::Entry) {
    let id = entry.id.unwrap();
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&id.term.to_le_bytes());
    hasher.update(&id.index.to_le_bytes());
    hasher.update(&entry.payload_crc32.to_le_bytes());
    hasher.update(&entry.payload_crc32_seed.to_le_bytes());
    hasher.update(&entry.head);
    entry.head_crc32 = hasher.finalize();
}

fn entry(index: u64, head: Bytes, payload: helix_wal::Payload) -> pb::Entry {
    let mut entry = pb::Entry {
        id: Some(pb::LogId { term: 1, index }),
        head,
        payload: payload.bytes,
        payload_crc32: payload.crc,
        payload_crc32_seed: payload.crc_seed,
        head_crc32: 0,
    };
    seal(&mut entry);
    entry
}

fn blank(index: u64) -> pb::Entry {
    entry(index, Bytes::from_static(&[0]), helix_wal::Payload::default())
}

fn batch(index: u64, payload: Bytes) -> pb::Entry {
    let command = command(index, payload);
    let head = [&[2], &command.head.encode()[..]].concat();
    entry(index, head.into(), command.payload)
}

/// Returns a leader's append from the start of the log.
fn entries(entries: Vec<pb::Entry>) -> pb::AppendEntries {
    pb::AppendEntries { vote: vote(1, true), previous: None, committed: None, entries }
}

fn matched(index: u64) -> AckResult {
    AckResult::Matched(pb::Matched { last: Some(pb::LogId { term: 1, index }) })
}

#[tokio::test]
async fn rejects_flipped_bit_and_accepts_retry() {
    let node = node().await;
    let mut raw = RawStream::open(&node, opening()).await.unwrap();
    let good = entries(vec![blank(0), batch(1, Bytes::from_static(b"payload"))]);

    let mut flipped = good.clone();
    flipped.entries[1].payload = Bytes::from_static(b"paxload");
    raw.expect_refused(1, flipped, "the payload of entry 1").await;
    let mut flipped = good.clone();
    flipped.entries[1].id.as_mut().unwrap().term = 0;
    raw.expect_refused(2, flipped, "entry 1").await;
    let mut flipped = good.clone();
    let head = flipped.entries[1].head.clone();
    flipped.entries[1].head = [&head[..20], &[head[20] ^ 1], &head[21..]].concat().into();
    raw.expect_refused(3, flipped, "the head of entry 1").await;
    assert_eq!(node.last_index(), 0);
    assert_eq!(node.wal.state().last, None);

    assert_eq!(raw.append(4, good).await, matched(1));
    assert_eq!(node.last_index(), 1);
    // Later requests of a failed or replaced epoch are dropped without a response.
    raw.send(append(route(3), 1, entries(vec![blank(0)])));
    let mut next = entries(vec![batch(2, Bytes::from_static(b"next"))]);
    next.previous = Some(pb::LogId { term: 1, index: 1 });
    raw.send(append(route(4), 1, next));
    assert_eq!(raw.ack(4).await, (1, matched(2)));
    node.stop().await;
}

#[tokio::test]
async fn rejects_invalid_appends_before_openraft() {
    let node = node().await;
    let mut raw = RawStream::open(&node, opening()).await.unwrap();
    let mut epoch = 0;
    let mut refused = async |text: &str, corrupt: &dyn Fn(&mut pb::AppendEntries)| {
        epoch += 1;
        let mut request = entries(vec![blank(0), batch(1, Bytes::from_static(b"x"))]);
        corrupt(&mut request);
        request.entries.iter_mut().filter(|entry| entry.id.is_some()).for_each(seal);
        raw.expect_refused(epoch, request, text).await;
    };
    refused("a vote is missing", &|r| r.vote = None).await;
    refused("term 0", &|r| r.vote = vote(0, true)).await;
    refused("not committed", &|r| r.vote = vote(1, false)).await;
    let foreign = Some(pb::Vote { term: 1, voted_for: replica_id(3, 1), committed: true });
    refused("from replica", &|r| r.vote = foreign).await;
    refused("out of order", &|r| r.entries.swap(0, 1)).await;
    refused("out of order", &|r| r.entries = vec![blank(7)]).await;
    refused("out of order", &|r| r.previous = Some(pb::LogId { term: 1, index: 4 })).await;
    let end = pb::LogId { term: 1, index: u64::MAX };
    refused("exceeds the limit", &|r| r.previous = Some(end)).await;
    refused("out of order", &|r| r.committed = Some(pb::LogId { term: 2, index: 0 })).await;
    refused("out of order", &|r| r.entries[1].id = Some(pb::LogId { term: 9, index: 1 })).await;
    refused("the id of an entry is missing", &|r| r.entries[1].id = None).await;
    refused("empty", &|r| r.entries[1].head = Bytes::new()).await;
    refused("is unknown", &|r| r.entries[1].head = Bytes::from_static(&[9, 9])).await;
    refused("bytes", &|r| r.entries[1].head = Bytes::from(vec![2; 70 << 10])).await;
    refused("the length in its head", &|r| {
        let head = r.entries[1].head.clone();
        r.entries[1] = batch(1, Bytes::from_static(b"longer"));
        r.entries[1].head = head;
    })
    .await;
    assert_eq!(node.wal.state().last, None);
    node.stop().await;
}

#[tokio::test]
async fn rejects_messages_for_other_replicas() {
    let node = node().await;
    let mut raw = RawStream::open(&node, opening()).await.unwrap();
    let wrong = [
        ("is not here", pb::Route { target_replica: replica_id(2, 2), ..route(1) }),
        ("is not open here", pb::Route { shard_id: 5, ..route(2) }),
        ("is not on node 1", pb::Route { source_replica: replica_id(3, 1), ..route(3) }),
    ];
    for (text, route) in wrong {
        raw.send(append(route, 0, entries(vec![blank(0)])));
        match raw.ack(route.id).await.1 {
            AckResult::Failure(failure) => {
                assert!(failure.text.contains(text) && failure.back_off, "{failure:?}");
            }
            other => panic!("{other:?}"),
        }
        let last = None;
        let vote = pb::VoteRequest { vote: vote(1, false), last, leadership_transfer: false };
        let request = Some(UnaryRequest::Vote(vote));
        raw.send(Message::Question(pb::Question { route: Some(route), question: request }));
        let response = raw.results().await.answers.pop().unwrap();
        assert_eq!(response.id, route.id);
        assert!(matches!(response.result, Some(UnaryResult::Failure(_))), "{response:?}");
    }
    assert_eq!(node.wal.state().vote, None);
    node.stop().await;
}

#[tokio::test]
async fn refuses_invalid_handshakes() {
    let node = node().await;
    let speaks = format!("speaks protocol {}", ProtocolVersions::OWN);
    let next = ProtocolVersions::OWN.newest + 1;
    let later = pb::Opening { version_min: next, version_max: next + 1, ..opening() };
    let wrong = [
        (speaks.as_str(), later),
        ("none in common", pb::Opening { version_min: 1, version_max: 1, ..opening() }),
        ("none in common", pb::Opening { version_min: 3, version_max: 2, ..opening() }),
        ("this is node 2", pb::Opening { to_node: 3, ..opening() }),
        ("node 9 was removed", pb::Opening { from_node: 9, ..opening() }),
        ("says that it is node 2", pb::Opening { from_node: 2, ..opening() }),
        ("in cluster", pb::Opening { cluster: Bytes::from(vec![1; 16]), ..opening() }),
        ("16 bytes", pb::Opening { cluster: Bytes::from_static(b"x"), ..opening() }),
        ("lane", pb::Opening { lane: 0, ..opening() }),
    ];
    for (text, opening) in wrong {
        let status = RawStream::open(&node, opening).await.err().unwrap();
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(status.message().contains(text), "{status:?}");
    }
    // Accepts a later version that still speaks this one.
    let newer = pb::Opening { version_max: next, ..opening() };
    RawStream::open(&node, newer).await.unwrap();
    node.stop().await;
}

#[tokio::test]
async fn invalid_message_ends_only_its_stream() {
    let node = node().await;
    for invalid in [None, Some(Message::Opening(opening()))] {
        let mut raw = RawStream::open(&node, opening()).await.unwrap();
        raw.outgoing.send(pb::ExchangeRequest { message: invalid }).unwrap();
        assert_eq!(raw.next().await.unwrap_err().code(), Code::InvalidArgument);
    }
    let mut old = RawStream::open(&node, opening()).await.unwrap();
    let mut new = RawStream::open(&node, opening()).await.unwrap();
    assert_eq!(old.next().await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(new.append(1, entries(vec![blank(0)])).await, matched(0));
    node.stop().await;
}

/// Serves a replica whose disk never completes a write.
async fn serve_stalled_replica(node: &PeerNode, shard_id: u64) {
    let disk = Arc::new(SimulatedDisk::new(7));
    let options = Options { segment_bytes: 64 << 20, reserve_bytes: 0, ..Options::default() };
    // The writer never runs.
    let (wal, writer, keeper, _) = Wal::open(disk, options).unwrap();
    let reads = DiskReads::new(false);
    let mut store = LogStore::new(wal.clone(), reads.clone());
    let counter = Arc::new(CountingMachine::new(wal.clone())) as Arc<dyn Machine>;
    let machine = StateMachine::recover(counter.clone(), wal.clone(), reads, None, &mut store);
    let link = node.hub.network(shard_id, replica_id(2, 1), wal.clone());
    let config = Arc::new(openraft::Config::default().validate().unwrap());
    let machine = machine.await.unwrap();
    let raft = Raft::new(replica_id(2, 1), config, link, store, machine).await.unwrap();
    node.hub.serve_shard(shard_id, replica_id(2, 1), raft, counter, wal);
    std::mem::forget((writer, keeper));
}

#[tokio::test]
async fn exceeding_the_window_ends_only_the_epoch() {
    let node = node().await;
    serve_stalled_replica(&node, 9).await;
    let mut raw = RawStream::open(&node, opening()).await.unwrap();
    let shard_9 = pb::Route { shard_id: 9, ..route(1) };
    let payload = Bytes::from(vec![7; 1 << 20]);
    for index in 0..6 {
        let mut request = entries(vec![batch(index, payload.clone())]);
        request.previous = index.checked_sub(1).map(|index| pb::LogId { term: 1, index });
        raw.send(append(shard_9, index, request));
    }
    match raw.ack(1).await {
        (3, AckResult::Failure(failure)) => assert!(failure.text.contains("in flight")),
        other => panic!("{other:?}"),
    }
    // The stream still serves other shards.
    assert_eq!(raw.append(2, entries(vec![blank(0)])).await, matched(0));
    // A single request of any size fits the window.
    let large = Bytes::from(vec![7; 8 << 20]);
    let mut request = entries(vec![batch(1, large)]);
    request.previous = Some(pb::LogId { term: 1, index: 0 });
    assert_eq!(raw.append(3, request).await, matched(1));
    node.hub.stop_shard(9);
    node.hub.close();
}

/// A leader counts the response to a snapshot as a match, and panics if the log is shorter later.
#[tokio::test]
async fn snapshot_of_known_entries_waits_until_they_are_synced() {
    let storage = FaultyStorage::new(Arc::new(SimulatedDisk::new(7)));
    let options = Options { segment_bytes: 64 << 20, reserve_bytes: 0, ..Options::default() };
    let (wal, writer, keeper, _) = Wal::open(Arc::new(storage.clone()), options).unwrap();
    writer.spawn().unwrap();
    keeper.spawn().unwrap();
    let (listeners, peers) = listeners(2).await;
    let node = PeerNode::start(2, &peers, listeners.into_iter().nth(1).unwrap(), wal).await;
    let mut raw = RawStream::open(&node, opening()).await.unwrap();
    assert_eq!(raw.append(1, entries(vec![blank(0)])).await, matched(0));

    storage.stall(Operation::Sync);
    let last = pb::LogId { term: 1, index: 1 };
    let mut request = entries(vec![blank(1)]);
    (request.previous, request.committed) = (Some(pb::LogId { index: 0, ..last }), Some(last));
    raw.send(append(route(1), 1, request));
    // Committed by the others, so it is applied before it is synced here.
    node.wait_applied(1).await;
    let chunk = pb::SnapshotChunk {
        route: Some(route(2)),
        vote: vote(1, true),
        last: Some(last),
        ..pb::SnapshotChunk::default()
    };
    raw.send(Message::Chunk(chunk));
    // The stall lasts for several calls of openraft after the snapshot.
    for id in 3..20 {
        let request = pb::VoteRequest { vote: vote(1, false), last: None, ..Default::default() };
        let question = Some(UnaryRequest::PreVote(request));
        raw.send(Message::Question(pb::Question { route: Some(route(id)), question }));
        let results = raw.results().await;
        assert!(results.acks.is_empty(), "{results:?}");
        assert_eq!(results.answers.iter().map(|it| it.id).collect::<Vec<_>>(), [id]);
    }
    storage.heal();
    let (mut is_matched, mut is_installed) = (false, false);
    while !(is_matched && is_installed) {
        let results = raw.results().await;
        is_matched |= results.acks.iter().any(|ack| ack.result == Some(matched(1)));
        for answer in results.answers {
            assert_eq!(answer.id, 2);
            assert!(matches!(answer.result, Some(UnaryResult::Snapshot(_))), "{answer:?}");
            assert_eq!(node.wal.state().synced.map(|id| id.index), Some(1));
            is_installed = true;
        }
    }
    node.stop().await;
}

/// Returns a random message. Its numbers are small, so that some messages match each other.
fn random_message(random: &mut StdRng) -> Message {
    let mut small = || random.random_range(0..4_u64);
    let route = pb::Route {
        shard_id: small() / 2,
        source_replica: replica_id(small(), 1),
        target_replica: replica_id(2, 1),
        id: small() * 100 + small(),
    };
    // Never a valid vote: a peer that lies within Raft's rules is out of scope.
    let vote = Some(pb::Vote { term: small(), voted_for: small(), committed: small() > 1 });
    let id = Some(pb::LogId { term: small(), index: small() });
    let head = Bytes::from(vec![small() as u8; small() as usize * 30]);
    let entry = pb::Entry { id, head, ..blank(0) };
    let entries = pb::AppendEntries { vote, previous: id, committed: id, entries: vec![entry] };
    let (sequence, kind) = (small(), small() + small());
    let route = Some(route);
    match kind {
        0 => Message::Append(pb::Append { route, sequence, entries: Some(entries) }),
        1 => {
            let request = Some(UnaryRequest::Beat(entries));
            Message::Question(pb::Question { route, question: request })
        }
        2 => {
            let last = id;
            let request = pb::VoteRequest { vote, last, leadership_transfer: small() > 1 };
            Message::Question(pb::Question { route, question: Some(UnaryRequest::Vote(request)) })
        }
        3 => {
            let data = Bytes::from_static(b"abcdef");
            let (total_bytes, offset) = (small() * 5, small() * 6);
            let chunk = pb::SnapshotChunk {
                route,
                vote,
                last: id,
                total_bytes,
                crc32: crc32fast::hash(&data),
                offset,
                data,
            };
            Message::Chunk(chunk)
        }
        4 => Message::Ending(pb::Ending { route }),
        5 => {
            let request = pb::RecordsRequest {
                after: small(),
                upto: small(),
                bytes_max: u64::MAX,
                with_all_entries: false,
                from_first: false,
            };
            Message::Question(pb::Question {
                route,
                question: Some(UnaryRequest::Records(request)),
            })
        }
        _ => Message::Append(pb::Append { route: None, sequence, entries: None }),
    }
}

#[tokio::test]
async fn survives_random_messages() {
    let seed = std::env::var("HELIX_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or(20_261_121);
    eprintln!("HELIX_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let node = node().await;
    for _ in 0..20 {
        let mut raw = RawStream::open(&node, opening()).await.unwrap();
        for _ in 0..200 {
            raw.send(random_message(&mut random));
        }
        // Reads past all of them. The stream may have ended, but not the node.
        while let Ok(response) = raw.next().await {
            let Some(ResponseMessage::Results(results)) = response.message else {
                panic!("{response:?}")
            };
            if results.acks.iter().any(|ack| ack.epoch == u64::MAX) {
                break;
            }
            let unknown = pb::Route { shard_id: 77, ..route(u64::MAX) };
            raw.send(append(unknown, 0, entries(Vec::new())));
        }
    }
    assert_eq!(node.wal.state().last, None);
    let mut raw = RawStream::open(&node, opening()).await.unwrap();
    assert_eq!(raw.append(1, entries(vec![blank(0)])).await, matched(0));
    node.stop().await;
}

#[tokio::test]
async fn handshake_of_silent_caller_times_out() {
    let node = node().await;
    let mut client = client(&node).await;
    let (_silent, queue) = mpsc::unbounded_channel::<pb::ExchangeRequest>();
    let status = client.exchange(UnboundedReceiverStream::new(queue)).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded);
    node.stop().await;
}

/// A peer that lost track of message boundaries sends an arbitrary length.
#[tokio::test]
async fn stalled_message_ends_the_stream() {
    let node = node().await;
    let mut idle =
        RawStream::open(&node, pb::Opening { lane: CONTROL, ..opening() }).await.unwrap();
    let mut first = Some(pb::ExchangeRequest { message: Some(Message::Opening(opening())) });
    let mut length = Some(1 << 20);
    let body = ChunkedBody::new(move |_: &mut Context<'_>, writer: &mut ChunkedWriter| {
        if let Some(first) = first.take() {
            writer.begin_message(first.encoded_len())?;
            first.encode_raw(writer.buffer());
            return Poll::Ready(Some(Ok(())));
        }
        length
            .take()
            .map_or(Poll::Pending, |length| Poll::Ready(Some(writer.begin_message(length))))
    });
    let mut request = Request::new(futures_util::stream::empty());
    request.extensions_mut().insert(DetachedBody::new(Body::new(body)));
    let mut client = PeerServiceClient::new(ResponseLayer(channel(&node).await));
    let mut results = client.exchange(request).await.unwrap().into_inner();
    assert!(matches!(
        results.message().await.unwrap().unwrap().message,
        Some(ResponseMessage::Opened(_))
    ));
    let status = timeout(PATIENCE + PATIENCE, results.message()).await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded);
    // A stream between two messages may stay idle.
    assert_eq!(idle.append(1, entries(vec![blank(0)])).await, matched(0));
    node.stop().await;
}

/// The configured peers may include the node itself, which must not dial itself.
#[tokio::test]
async fn node_does_not_dial_itself() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let peers = BTreeMap::from([(2, address)]);
    let node = PeerNode::start(2, &peers, listener, memory_wal()).await;
    assert!(node.hub.peers().is_empty());
    node.stop().await;
}

#[test]
fn reflection_hides_peer_services() {
    let set = prost_types::FileDescriptorSet::decode(helix_proto::FILE_DESCRIPTOR_SET).unwrap();
    let names: Vec<_> = set.file.iter().map(|file| file.name()).collect();
    assert!(names.iter().any(|name| name.starts_with("helix/log/v1/")));
    assert!(!names.iter().any(|name| name.starts_with("helix/raft/")), "{names:?}");
}
