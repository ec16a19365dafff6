//! Target `peer`: messages of a faulty peer. Its entries are always those of one log, as Raft
//! demands; everything else is arbitrary. The replica must keep a prefix of that log, and accept
//! the rest from a correct leader.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt, stream};
use helix_proto::batch;
use helix_proto::raft::v1 as pb;
use helix_server::log::{BatchHead, Condition, Head, PartitionId, Verdict};
use helix_server::peer::{
    Dialer, FormCluster, Hello, HelloRequest, Hub, HubSettings, JoinCluster, Network, PeerHandler,
};
use helix_server::protocol::ProtocolVersions;
use helix_server::raft::{
    DiskReads, ElectionTiming, LogStore, Machine, StateMachine, TypeConfig, replica_id,
    seed_this_thread,
};
use helix_wal::{Options, Payload, ReadMode, Wal};
use hyper_util::rt::TokioIo;
use openraft::async_runtime::WatchReceiver;
use openraft::{Config, Raft, SnapshotPolicy};
use pb::ack::Result as Acked;
use pb::exchange_request::Message;
use pb::exchange_response::Message as PeerMessage;
use pb::peer_service_client::PeerServiceClient;
use pb::question::Question;
use prost::Message as _;
use tokio::io::DuplexStream;
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint, Error};
use tower::service_fn;

use crate::input::Input;

const CLUSTER: u128 = 7;
const SHARD: u64 = 0;
/// Entries of the log, four per term.
const ENTRIES: u64 = 24;
/// Term of the correct leader, above all others.
const CORRECT_TERM: u64 = 9;
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

/// State machine that only counts applied entries.
#[derive(Debug)]
struct NoopStateMachine(Wal);

impl Machine for NoopStateMachine {
    fn apply(&self, id: helix_wal::LogId, _head: Option<&Head>) -> io::Result<Verdict> {
        self.0.place(id.index, None).map_err(io::Error::other)?;
        Ok(Verdict::Nothing)
    }

    fn encode(&self) -> Bytes {
        Bytes::from_static(b"state")
    }

    fn restore(&self, bytes: &[u8]) -> io::Result<()> {
        self.check(bytes)
    }

    fn check(&self, bytes: &[u8]) -> io::Result<()> {
        if bytes == b"state" { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }
}

#[derive(Debug)]
struct RejectAll;

impl PeerHandler for RejectAll {
    fn hello(&self, _request: HelloRequest) -> Hello {
        Hello::default()
    }

    fn refusal(&self, node: u64, _generation: u32) -> Option<String> {
        (node > 3).then(|| "removed".to_owned())
    }

    fn join(&self, _join: JoinCluster) -> BoxFuture<'static, Result<(), String>> {
        async { Err("no".to_owned()) }.boxed()
    }

    fn form(&self, _form: FormCluster) -> BoxFuture<'static, Result<(), String>> {
        async { Err("no".to_owned()) }.boxed()
    }

    fn call(&self, _from: u64, request: Bytes) -> BoxFuture<'static, Result<Bytes, String>> {
        async { Ok(request) }.boxed()
    }
}

impl Dialer for RejectAll {
    fn connect(&self, endpoint: Endpoint) -> BoxFuture<'static, Result<Channel, Error>> {
        async move { endpoint.connect_with_connector(service_fn(refuse_connection)).await }.boxed()
    }

    fn connect_lazily(&self, endpoint: &Endpoint) -> Channel {
        endpoint.connect_with_connector_lazy(service_fn(refuse_connection))
    }
}

async fn refuse_connection(_uri: tonic::codegen::http::Uri) -> io::Result<TokioIo<DuplexStream>> {
    Err(io::ErrorKind::ConnectionRefused.into())
}

/// Node 2, with the test as its peer.
struct FuzzNode {
    wal: Wal,
    hub: Arc<Hub>,
    raft: Raft<TypeConfig, StateMachine>,
    stop: CancellationToken,
    /// Accepts new connections.
    connections_in: UnboundedSender<io::Result<DuplexStream>>,
}

impl FuzzNode {
    async fn start() -> Self {
        let peers = [(1, "one:1".to_owned()), (2, "two:1".to_owned())];
        let peers = BTreeMap::from(peers);
        let (versions, timing) = (ProtocolVersions::OWN, ElectionTiming::default());
        let settings = HubSettings { node_id: 2, peers, versions, timing };
        let hub = Hub::new(settings, Arc::new(RejectAll));
        hub.set_identity(CLUSTER, 1);
        let options = Options { segment_bytes: 1 << 20, reserve_bytes: 0, ..Options::default() };
        let wal = Wal::open_memory(options);
        let reads = DiskReads::new(true);
        let mut store = LogStore::new(wal.clone(), reads.clone());
        let state_machine = Arc::new(NoopStateMachine(wal.clone())) as Arc<dyn Machine>;
        let machine =
            StateMachine::recover(state_machine.clone(), wal.clone(), reads, None, &mut store);
        let machine = machine.await.unwrap();
        let link = hub.network(SHARD, replica_id(2, 1), wal.clone());
        let config = Config {
            heartbeat_interval: 100,
            election_timeout_min: 300,
            election_timeout_max: 600,
            snapshot_policy: SnapshotPolicy::Never,
            install_snapshot_timeout: 5_000,
            ..Config::default()
        };
        let config = Arc::new(config.validate().unwrap());
        let raft = Raft::new(replica_id(2, 1), config, link, store, machine).await.unwrap();
        hub.serve_shard(SHARD, replica_id(2, 1), raft.clone(), state_machine, wal.clone());
        let (connections_in, connections) = mpsc::unbounded_channel();
        let incoming = stream::unfold(connections, |mut connections| async move {
            connections.recv().await.map(|connection| (connection, connections))
        });
        let stop = CancellationToken::new();
        let network = Network::new(Arc::new(RejectAll), incoming);
        tokio::spawn(network.serve(Arc::clone(&hub), stop.clone()).map(drop));
        Self { wal, hub, raft, stop, connections_in }
    }

    async fn connect(&self) -> Channel {
        let connections_in = self.connections_in.clone();
        let connect = service_fn(move |_uri: tonic::codegen::http::Uri| {
            let (near, far) = tokio::io::duplex(1 << 16);
            let accepted = connections_in.send(Ok(far)).map_err(io::Error::other);
            async move { accepted.map(|()| TokioIo::new(near)) }
        });
        let endpoint = Endpoint::from_static("http://two:1");
        endpoint.connect_with_connector(connect).await.unwrap()
    }

    async fn stop(self) {
        self.hub.close();
        self.stop.cancel();
        self.raft.shutdown().await.unwrap();
        self.wal.close();
    }
}

/// A stream to the node: requests and responses.
struct PeerStream {
    outgoing: UnboundedSender<pb::ExchangeRequest>,
    incoming: Streaming<pb::ExchangeResponse>,
}

impl PeerStream {
    async fn open(node: &FuzzNode, opening: pb::Opening) -> Option<Self> {
        let mut client = PeerServiceClient::new(node.connect().await);
        let (outgoing, queue) = mpsc::unbounded_channel();
        let queue = stream::unfold(queue, |mut queue| async move {
            queue.recv().await.map(|message| (message, queue))
        });
        outgoing.send(exchange(Message::Opening(opening))).ok()?;
        let incoming = client.exchange(queue).await.ok()?.into_inner();
        let mut opened = Self { outgoing, incoming };
        matches!(opened.next().await, Some(PeerMessage::Opened(_))).then_some(opened)
    }

    async fn next(&mut self) -> Option<PeerMessage> {
        let next = tokio::time::timeout(RESPONSE_TIMEOUT, self.incoming.next()).await;
        next.expect("a response within the timeout")?.ok()?.message
    }

    /// Waits for the ack of this epoch; `None` if the stream ends before it.
    async fn ack(&mut self, epoch: u64) -> Option<Acked> {
        loop {
            let PeerMessage::Results(results) = self.next().await? else { return None };
            if let Some(ack) = results.acks.into_iter().rfind(|ack| ack.epoch == epoch) {
                return ack.result;
            }
        }
    }
}

fn exchange(message: Message) -> pb::ExchangeRequest {
    pb::ExchangeRequest { message: Some(message) }
}

fn opening() -> pb::Opening {
    pb::Opening {
        generation: 1,
        version_min: ProtocolVersions::OWN.oldest,
        version_max: ProtocolVersions::OWN.newest,
        cluster: Bytes::copy_from_slice(&CLUSTER.to_be_bytes()),
        from_node: 1,
        to_node: 2,
        lane: pb::Lane::Live.into(),
    }
}

fn route(id: u64) -> pb::Route {
    let (source_replica, target_replica) = (replica_id(1, 1), replica_id(2, 1));
    pb::Route { shard_id: SHARD, source_replica, target_replica, id }
}

fn vote(term: u64, committed: bool) -> pb::Vote {
    pb::Vote { term, voted_for: replica_id(1, 1), committed }
}

// The log.

fn id(index: u64) -> pb::LogId {
    pb::LogId { term: 1 + index / 4, index }
}

fn entry(index: u64) -> pb::Entry {
    let id = id(index);
    let (head, payload) = if index.is_multiple_of(3) {
        (Bytes::from_static(&[0]), Payload::default())
    } else {
        let bytes = Bytes::from(vec![index as u8; 20 * index as usize]);
        let head = BatchHead {
            partition: PartitionId(1),
            record_count: 1,
            version: batch::BATCH_VERSION,
            compression: 0,
            payload_bytes: bytes.len() as u32,
            uncompressed_bytes: 0,
            proposed_us: index,
            producer: None,
            condition: Condition::default(),
            kept: None,
        };
        let crc = batch::crc(head.version, head.record_count, head.compression, &bytes);
        let crc_seed = batch::crc_seed(head.version, head.record_count, head.compression);
        let head = [&[2], &Head::Batch(head).encode()[..]].concat().into();
        (head, Payload { crc, crc_seed, bytes })
    };
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&id.term.to_le_bytes());
    hasher.update(&id.index.to_le_bytes());
    hasher.update(&payload.crc.to_le_bytes());
    hasher.update(&payload.crc_seed.to_le_bytes());
    hasher.update(&head);
    pb::Entry {
        id: Some(id),
        head,
        payload: payload.bytes,
        payload_crc32: payload.crc,
        payload_crc32_seed: payload.crc_seed,
        head_crc32: hasher.finalize(),
    }
}

/// Generates an append that a leader of this term may send. It has all entries up to its term.
fn entries(term: u64, input: &mut Input<'_>) -> pb::AppendEntries {
    let end = (4 * term).min(ENTRIES);
    let first = input.below(end as usize + 1) as u64;
    let count = (input.below(6) as u64).min(end - first);
    let committed = input.below(end as usize + 1) as u64;
    pb::AppendEntries {
        vote: Some(vote(term, true)),
        previous: first.checked_sub(1).map(id),
        committed: committed.checked_sub(1).map(id),
        entries: (first..first + count).map(entry).collect(),
    }
}

/// Applies a change that a checksum or a protocol check must detect.
fn corrupt(request: &mut pb::AppendEntries, input: &mut Input<'_>) {
    let which = input.below(request.entries.len().max(1));
    let number = input.number();
    match input.below(24) {
        0 => request.vote = None,
        1 => request.vote = Some(pb::Vote { voted_for: number, ..vote(1, true) }),
        2 => request.vote = Some(vote(0, true)),
        3 => request.vote = Some(vote(1 + number % 7, false)),
        4 if request.entries.len() > 1 => request.entries.swap(0, which.max(1)),
        n @ 5..14 => {
            let Some(entry) = request.entries.get_mut(which) else { return };
            match n {
                5 => entry.id = None,
                6 => entry.id = Some(pb::LogId { term: number, index: number }),
                7 => entry.head = Bytes::copy_from_slice(input.some_bytes()),
                8 => entry.payload = Bytes::copy_from_slice(input.some_bytes()),
                9 => entry.payload_crc32 ^= number as u32 | 1,
                10 => entry.payload_crc32_seed ^= number as u32 | 1,
                11 => entry.head_crc32 ^= number as u32 | 1,
                12 => entry.head = Bytes::from(vec![2; 70 << 10]),
                _ => drop(request.entries.remove(which)),
            }
        }
        _ => {}
    }
}

fn message(input: &mut Input<'_>) -> Option<Message> {
    let mut route = route(input.below(6) as u64);
    match input.below(20) {
        0 => route.shard_id = input.number(),
        1 => route.source_replica = input.number(),
        2 => route.target_replica = input.number(),
        3 => route.id = input.number(),
        _ => {}
    }
    let route = Some(route).filter(|_| !input.one_in(60));
    let term = 1 + input.below(7) as u64;
    let (which, sequence) = (input.below(20), input.below(6) as u64);
    let last = input.below(ENTRIES as usize + 1).checked_sub(1).map(|index| id(index as u64));
    Some(match which {
        0..7 => {
            let mut request = entries(term, input);
            corrupt(&mut request, input);
            Message::Append(pb::Append { route, sequence, entries: Some(request) })
        }
        7 => {
            let mut beat = entries(term, input);
            beat.entries.truncate(sequence as usize / 5);
            let question = Some(Question::Beat(beat));
            Message::Question(pb::Question { route, question })
        }
        8..11 => {
            let committed = input.one_in(16);
            let request = pb::VoteRequest {
                vote: Some(vote(term, committed)),
                last,
                leadership_transfer: input.one_in(4),
            };
            let question = if which == 8 { Question::PreVote } else { Question::Vote };
            Message::Question(pb::Question { route, question: Some(question(request)) })
        }
        11 => {
            let from_leader = Some(vote(term, true));
            let transfer = pb::TransferRequest { from_leader, to_replica: input.number(), last };
            let question = Some(Question::Transfer(transfer));
            Message::Question(pb::Question { route, question })
        }
        12 | 13 => {
            let request = pb::RecordsRequest {
                after: input.number(),
                upto: input.number(),
                bytes_max: input.number(),
                with_all_entries: false,
                from_first: false,
            };
            let question = Some(Question::Records(request));
            Message::Question(pb::Question { route, question })
        }
        14..17 => {
            let data = Bytes::copy_from_slice(input.some_bytes());
            let mut chunk = pb::SnapshotChunk {
                route,
                vote: Some(vote(term, true)),
                // A leader commits only entries that it has.
                last: last.filter(|last| last.term <= term),
                total_bytes: data.len() as u64,
                crc32: crc32fast::hash(&data),
                offset: 0,
                data,
            };
            match input.below(6) {
                0 => chunk.total_bytes = input.number(),
                1 => chunk.offset = input.number(),
                2 => chunk.crc32 ^= 1,
                _ => {}
            }
            Message::Chunk(chunk)
        }
        17 => Message::Ending(pb::Ending { route }),
        18 => Message::Opening(opening()),
        _ => foreign(pb::ExchangeRequest::decode(input.some_bytes()).ok()?.message?),
    })
}

/// Changes the votes of an arbitrary message, because this sender's votes must obey Raft.
fn foreign(mut message: Message) -> Message {
    let corrupt = |vote: &mut Option<pb::Vote>| {
        if let Some(vote) = vote.as_mut().filter(|vote| vote.voted_for == replica_id(1, 1)) {
            vote.voted_for += 1;
        }
    };
    match &mut message {
        Message::Append(append) => {
            append.entries.iter_mut().for_each(|entries| corrupt(&mut entries.vote));
        }
        Message::Chunk(chunk) => corrupt(&mut chunk.vote),
        Message::Question(question) => match &mut question.question {
            Some(Question::Beat(beat)) => corrupt(&mut beat.vote),
            Some(Question::Vote(vote) | Question::PreVote(vote)) => corrupt(&mut vote.vote),
            Some(Question::Transfer(transfer)) => corrupt(&mut transfer.from_leader),
            _ => {}
        },
        _ => {}
    }
    message
}

pub(crate) fn peer(input: &[u8]) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    seed_this_thread(1);
    runtime.unwrap().block_on(run(Input(input)));
}

async fn run(mut input: Input<'_>) {
    let node = FuzzNode::start().await;
    if input.one_in(8) {
        let invalid_opening = pb::Opening {
            version_min: input.number() as u32,
            version_max: input.number() as u32,
            cluster: Bytes::copy_from_slice(input.some_bytes()),
            from_node: input.number(),
            to_node: input.number(),
            lane: input.number() as i32,
            generation: input.number() as u32,
        };
        drop(PeerStream::open(&node, invalid_opening).await);
    }
    let mut sent = 0;
    while !input.is_empty() && sent < 400 {
        let mut exchange_open =
            PeerStream::open(&node, opening()).await.expect("the peer is accepted");
        for _ in 0..50 {
            if input.is_empty() {
                break;
            }
            sent += 1;
            if let Some(message) = message(&mut input) {
                // Ignored: the node may have ended the stream.
                drop(exchange_open.outgoing.send(exchange(message)));
            }
        }
        // Waits until all messages are processed. The stream may have ended, but not the node.
        let unknown_route = pb::Route { shard_id: 77, ..route(u64::MAX) };
        let marker = pb::Append { route: Some(unknown_route), sequence: 0, entries: None };
        drop(exchange_open.outgoing.send(exchange(Message::Append(marker))));
        exchange_open.ack(u64::MAX).await;
        check(&node.wal);
    }
    // A correct leader sends the whole log.
    let mut correct = PeerStream::open(&node, opening()).await.expect("the peer is accepted");
    let first = node.wal.state().purged.map_or(0, |purged| purged.index + 1);
    let request = pb::AppendEntries {
        vote: Some(vote(CORRECT_TERM, true)),
        previous: first.checked_sub(1).map(id),
        committed: Some(id(ENTRIES - 1)),
        entries: (first..ENTRIES).map(entry).collect(),
    };
    let append = pb::Append { route: Some(route(1 << 40)), sequence: 0, entries: Some(request) };
    correct.outgoing.send(exchange(Message::Append(append))).unwrap();
    let acked = correct.ack(1 << 40).await.expect("the append has a result");
    let Acked::Matched(matched) = acked else {
        let state = node.raft.metrics().borrow_watched().running_state.clone();
        panic!("a correct leader is rejected: {acked:?}, {state:?}");
    };
    assert_eq!(matched.last, Some(id(ENTRIES - 1)));
    assert_eq!(node.wal.state().last.map(|last| last.index), Some(ENTRIES - 1));
    check(&node.wal);
    node.stop().await;
}

/// Checks that the replica has only entries of the log.
fn check(wal: &Wal) {
    let state = wal.state();
    let first = state.purged.map_or(0, |purged| purged.index + 1);
    let next = state.last.map_or(0, |last| last.index + 1);
    if first >= next {
        return;
    }
    let found = wal.read(first..next, usize::MAX, ReadMode::Blocking).unwrap().unwrap();
    for (found, index) in found.iter().zip(first..) {
        let wanted = entry(index);
        assert_eq!(found.id.index, index);
        assert_eq!(Some(pb::LogId { term: found.id.term, index }), wanted.id, "entry {index}");
        assert_eq!((&found.head, &found.payload.bytes), (&wanted.head, &wanted.payload));
    }
}
