//! Minimal nodes for tests of the peer transport: a hub, a peer port, and a replica of shard 0 over
//! an in-memory log.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_util::future::{BoxFuture, select_all};
use futures_util::{FutureExt, StreamExt, stream};
use helix_proto::batch;
use helix_server::log::{BatchHead, Condition, Head, PartitionId, Verdict};
use helix_server::peer::{
    self, FormCluster, Hello, HelloRequest, Hub, HubSettings, JoinCluster, PeerHandler,
};
use helix_server::protocol::ProtocolVersions;
use helix_server::raft::{
    Command, DiskReads, ElectionTiming, LogStore, Machine, ProposalResponder, ReplicaId,
    StateMachine, TypeConfig, replica_id,
};
use helix_wal::{Options, ReadMode, Wal};
use openraft::async_runtime::WatchReceiver;
use openraft::{Config, Raft, ReadPolicy, SnapshotPolicy};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::support::PATIENCE;
use crate::trio::{STEADY, free_port};

pub(crate) const CLUSTER: u128 = 7;
pub(crate) const SHARD: u64 = 0;
/// A node that every handler here reports as removed.
const REMOVED: u64 = 9;

/// Counts the applied commands and hashes their heads, to compare two replicas.
#[derive(Debug)]
pub(crate) struct CountingMachine {
    wal: Wal,
    sums: Mutex<(u64, u64)>,
}

impl CountingMachine {
    pub(crate) fn new(wal: Wal) -> Self {
        Self { wal, sums: Mutex::default() }
    }

    pub(crate) fn sums(&self) -> (u64, u64) {
        *self.sums.lock().unwrap()
    }
}

impl Machine for CountingMachine {
    fn apply(&self, id: helix_wal::LogId, head: Option<&Head>) -> io::Result<Verdict> {
        self.wal.place(id.index, None).map_err(io::Error::other)?;
        if let Some(head) = head {
            let mut sums = self.sums.lock().unwrap();
            sums.0 += 1;
            let crc = u64::from(crc32fast::hash(&head.encode()));
            sums.1 = sums.1.wrapping_mul(31).wrapping_add(crc);
        }
        Ok(Verdict::Nothing)
    }

    fn encode(&self) -> Bytes {
        let (count, sum) = self.sums();
        let mut bytes = [count.to_le_bytes(), sum.to_le_bytes()].concat();
        // Large enough for several snapshot chunks.
        bytes.resize(5 << 19, 7);
        bytes.into()
    }

    fn restore(&self, bytes: &[u8]) -> io::Result<()> {
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        *self.sums.lock().unwrap() = (number(0), number(8));
        Ok(())
    }

    fn check(&self, _bytes: &[u8]) -> io::Result<()> {
        Ok(())
    }
}

/// Returns preset responses.
#[derive(Debug, Default)]
pub(crate) struct TestPeerHandler {
    pub(crate) hello: Hello,
    pub(crate) formed: Arc<Mutex<Option<FormCluster>>>,
}

impl PeerHandler for TestPeerHandler {
    fn hello(&self, _request: HelloRequest) -> Hello {
        self.hello.clone()
    }

    fn refusal(&self, node: u64, _generation: u32) -> Option<String> {
        (node == REMOVED).then(|| format!("node {node} was removed"))
    }

    fn join(&self, join: JoinCluster) -> BoxFuture<'static, Result<(), String>> {
        let text = format!("not called into cluster {}", join.cluster);
        async move { Err(text) }.boxed()
    }

    fn form(&self, form: FormCluster) -> BoxFuture<'static, Result<(), String>> {
        let formed = Arc::clone(&self.formed);
        async move {
            match formed.lock().unwrap().replace(form) {
                None => Ok(()),
                Some(_) => Err("this node is not empty".to_owned()),
            }
        }
        .boxed()
    }

    fn call(&self, from: u64, request: Bytes) -> BoxFuture<'static, Result<Bytes, String>> {
        async move {
            match &request[..] {
                b"never" => std::future::pending().await,
                b"no" => Err(format!("not for node {from}")),
                _ => Ok([format!("{from}:").as_bytes(), &request].concat().into()),
            }
        }
        .boxed()
    }
}

/// A peer port that can be closed and opened again.
pub(crate) struct Port {
    pub(crate) address: SocketAddr,
    stop: CancellationToken,
    serving: JoinHandle<()>,
}

impl Port {
    pub(crate) fn open(hub: &Arc<Hub>, listener: TcpListener) -> Self {
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let serving = peer::serve(Arc::clone(hub), listener, stop.clone());
        let serving = tokio::spawn(async move { serving.await.unwrap() });
        Self { address, stop, serving }
    }

    pub(crate) async fn close(self) {
        self.stop.cancel();
        self.ended().await;
    }

    pub(crate) async fn ended(self) {
        tokio::time::timeout(PATIENCE, self.serving).await.unwrap().unwrap();
    }
}

pub(crate) fn hub(node_id: u64, peers: &BTreeMap<u64, String>) -> Arc<Hub> {
    let peers = peers.clone();
    let hello = Hello { node_id, detail: "waiting".to_owned(), ..Hello::default() };
    let handler = TestPeerHandler { hello, ..TestPeerHandler::default() };
    let versions = ProtocolVersions::OWN;
    let settings = HubSettings { node_id, peers, versions, timing: ElectionTiming::new(STEADY) };
    Hub::new(settings, Arc::new(handler))
}

pub(crate) fn memory_wal() -> Wal {
    Wal::open_memory(Options { segment_bytes: 64 << 20, reserve_bytes: 0, ..Options::default() })
}

fn config() -> Arc<Config> {
    let config = Config {
        // As `STEADY`.
        heartbeat_interval: 500,
        election_timeout_min: 1_500,
        election_timeout_max: 3_000,
        enable_pre_vote: Some(true),
        enable_leader_restore: Some(false),
        max_payload_entries: 1024,
        max_append_entries: Some(1024),
        snapshot_policy: SnapshotPolicy::Never,
        max_in_snapshot_log_to_keep: 0,
        purge_batch_size: 1,
        install_snapshot_timeout: 5_000,
        ..Config::default()
    };
    Arc::new(config.validate().unwrap())
}

pub(crate) struct PeerNode {
    pub(crate) id: u64,
    pub(crate) hub: Arc<Hub>,
    pub(crate) wal: Wal,
    pub(crate) counter: Arc<CountingMachine>,
    pub(crate) raft: Raft<TypeConfig, StateMachine>,
    pub(crate) port: Option<Port>,
}

impl PeerNode {
    pub(crate) async fn start(
        id: u64,
        peers: &BTreeMap<u64, String>,
        listener: TcpListener,
        wal: Wal,
    ) -> Self {
        let hub = hub(id, peers);
        hub.set_identity(CLUSTER, 1);
        let reads = DiskReads::new(false);
        let mut store = LogStore::new(wal.clone(), reads.clone());
        let counter = Arc::new(CountingMachine::new(wal.clone()));
        let held = Arc::clone(&counter) as Arc<dyn Machine>;
        let machine = StateMachine::recover(held.clone(), wal.clone(), reads, None, &mut store);
        let machine = machine.await.unwrap();
        let replica = replica_id(id, 1);
        let link = hub.network(SHARD, replica, wal.clone());
        let raft = Raft::new(replica, config(), link, store, machine).await.unwrap();
        hub.serve_shard(SHARD, replica, raft.clone(), held, wal.clone());
        let port = Some(Port::open(&hub, listener));
        Self { id, hub, wal, counter, raft, port }
    }

    pub(crate) fn replica(&self) -> ReplicaId {
        replica_id(self.id, 1)
    }

    pub(crate) async fn wait_applied(&self, index: u64) {
        let wait = self.raft.wait(Some(PATIENCE));
        wait.applied_index_at_least(Some(index), "it has applied").await.unwrap();
    }

    pub(crate) fn last_index(&self) -> u64 {
        self.wal.state().last.map_or(0, |id| id.index)
    }

    pub(crate) async fn stop(self) {
        self.hub.close();
        if let Some(port) = self.port {
            port.close().await;
        }
        self.raft.shutdown().await.unwrap();
        self.wal.close();
    }
}

/// Returns listeners on free ports, and their addresses by node id.
pub(crate) async fn listeners(nodes: u64) -> (Vec<TcpListener>, BTreeMap<u64, String>) {
    let mut listeners = Vec::new();
    let mut peers = BTreeMap::new();
    for id in 1..=nodes {
        let listener = TcpListener::bind(("127.0.0.1", free_port())).await.unwrap();
        peers.insert(id, listener.local_addr().unwrap().to_string());
        listeners.push(listener);
    }
    (listeners, peers)
}

/// Starts three nodes that form shard 0.
pub(crate) async fn three_nodes() -> Vec<PeerNode> {
    let (listeners, peers) = listeners(3).await;
    let mut nodes = Vec::new();
    for (id, listener) in (1..).zip(listeners) {
        nodes.push(PeerNode::start(id, &peers, listener, memory_wal()).await);
    }
    form(&nodes[0], 3).await;
    nodes
}

pub(crate) async fn form(first: &PeerNode, nodes: u64) {
    let members: BTreeSet<ReplicaId> = (1..=nodes).map(|id| replica_id(id, 1)).collect();
    first.raft.initialize(members).await.unwrap();
}

/// Waits for a leader that a majority of `nodes` confirms, and returns it.
pub(crate) async fn leader(nodes: &[PeerNode]) -> &PeerNode {
    let confirmed = async {
        loop {
            for node in nodes.iter().filter(|node| node.raft.is_leader()) {
                if node.raft.get_read_linearizer(ReadPolicy::ReadIndex).await.is_ok() {
                    return node;
                }
            }
            // Retries after the next change of any node's metrics.
            let changes = nodes.iter().map(|node| {
                let mut metrics = node.raft.metrics();
                async move { metrics.changed().await }.boxed()
            });
            select_all(changes).await.0.unwrap();
        }
    };
    tokio::time::timeout(PATIENCE, confirmed).await.expect("one of them leads")
}

pub(crate) fn command(number: u64, payload: Bytes) -> Command {
    let head = BatchHead {
        partition: PartitionId(1),
        record_count: 1,
        version: batch::BATCH_VERSION,
        compression: 0,
        payload_bytes: u32::try_from(payload.len()).unwrap(),
        uncompressed_bytes: 0,
        proposed_us: number,
        producer: None,
        condition: Condition::default(),
        kept: None,
    };
    let payload = helix_wal::Payload {
        crc: batch::crc(head.version, head.record_count, head.compression, &payload),
        crc_seed: batch::crc_seed(head.version, head.record_count, head.compression),
        bytes: payload,
    };
    Command { head: Head::Batch(head), payload, guard: None }
}

/// Writes `count` batches, `at_once` of them in flight. Returns the last index.
pub(crate) async fn write(node: &PeerNode, count: u64, at_once: usize, payload: &Bytes) -> u64 {
    let writes = stream::iter(0..count).map(|number| {
        let (raft, payload) = (node.raft.clone(), payload.clone());
        async move {
            let (reply, written) = ProposalResponder::new(None);
            raft.write(command(number, payload)).responder(reply).await.unwrap();
            written.await.unwrap().0.unwrap().log_id.index
        }
    });
    let mut last = 0;
    let mut writes = writes.buffered(at_once);
    while let Some(index) = writes.next().await {
        last = index;
    }
    last
}

/// Waits until every peer of the hub is connected (or disconnected).
pub(crate) async fn wait_connected(hub: &Hub, connected: bool) {
    let mut changes: watch::Receiver<u64> = hub.watch_peers();
    let all = async {
        while !hub.peers().iter().all(|peer| peer.connected == connected) {
            changes.changed().await.unwrap();
        }
    };
    tokio::time::timeout(PATIENCE, all).await.expect("the peers connect or disconnect");
}

/// Asserts that both logs have the same entries from `start` on, bit by bit.
pub(crate) fn expect_equal_logs(a: &PeerNode, b: &PeerNode, start: u64) {
    let end = a.last_index() + 1;
    assert_eq!(end, b.last_index() + 1, "nodes {} and {}", a.id, b.id);
    for index in start..end {
        let read = |node: &PeerNode| {
            let mut found = node.wal.read(index..index + 1, 1 << 20, ReadMode::Blocking);
            found.as_mut().unwrap().as_mut().unwrap().pop().unwrap()
        };
        let (left, right) = (read(a), read(b));
        assert_eq!((left.id, &left.head), (right.id, &right.head));
        assert_eq!(left.payload.bytes, right.payload.bytes);
        assert_eq!(left.payload.crc, right.payload.crc);
    }
}
