//! An in-memory cluster of three nodes over the same partitions, with one leader at a time.
//!
//! Simple, but correct about terms, sequences, duplicates and offsets.

mod groups;
mod rpc;
mod socket_gate;
mod topics;

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use helix_client::proto::log::v1::batch::Form;
use helix_client::proto::log::v1::cluster_service_server::ClusterServiceServer;
use helix_client::proto::log::v1::consume_service_server::ConsumeServiceServer;
use helix_client::proto::log::v1::group_service_server::GroupServiceServer;
use helix_client::proto::log::v1::produce_service_server::ProduceServiceServer;
use helix_client::proto::log::v1::topic_service_server::TopicServiceServer;
use helix_client::proto::log::v1::*;
use helix_client::proto::{batch, error as wire};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::Status;

use groups::FakeGroups;
use socket_gate::{GateMode, GatedStream, SocketGate};

pub(crate) const TOPIC: &str = "orders";
pub(crate) const PARTITIONS: u32 = 4;
pub(crate) const NODES: usize = 3;
const SHARD: u32 = 1;

/// A fault of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// The request is lost; the caller sees a broken connection.
    LostRequest,
    /// The request is applied and its response lost.
    LostResponse,
    /// The request is applied, another node becomes leader, and no response comes. The connection
    /// breaks when the node leads again.
    Silence,
    /// Another node becomes leader.
    NewLeader,
    /// There is no leader for a moment, and then another node leads.
    Election,
    /// The request is rejected as throttled.
    Throttled,
}

const FAULTS: [Fault; 6] = [
    Fault::LostRequest,
    Fault::LostResponse,
    Fault::Silence,
    Fault::NewLeader,
    Fault::Election,
    Fault::Throttled,
];

/// Time without a leader in a [`Fault::Election`].
const ELECTION: Duration = Duration::from_millis(15);

/// A running cluster. Its nodes live as long as the test's runtime.
pub(crate) struct FakeCluster {
    cluster: Arc<SharedCluster>,
    servers: Mutex<Vec<NodeServer>>,
}

/// The sockets and the server task of a node.
struct NodeServer {
    gate: Arc<SocketGate>,
    serving: JoinHandle<()>,
}

struct SharedCluster {
    state: Mutex<State>,
    /// Counts appends, for readers that wait.
    appended: watch::Sender<u64>,
}

struct State {
    rng: StdRng,
    groups: FakeGroups,
    /// Probability of a fault per call or message.
    fault_rate: f64,
    faults: u64,
    /// Number of next subscriptions that send nothing.
    silent_subscriptions: u32,
    /// Appends get no response.
    are_appends_blocked: bool,
    /// An append was blocked.
    has_blocked_append: bool,
    /// Versions of batches that the topic takes.
    batch_format: BatchFormat,
    /// Nodes whose metadata has no topics yet.
    lacks_topics: [bool; NODES],
    cluster_id: String,
    addresses: Vec<String>,
    actual: ClusterView,
    /// View of each node; that of a partitioned node is outdated.
    views: [ClusterView; NODES],
    /// Ends of the partitions as known to partitioned nodes.
    partitioned_ends: [Option<HashMap<u32, u64>>; NODES],
    /// Metadata requests, by node.
    metadata_requests: [u64; NODES],
    next_producer: u64,
    /// Id of the topic.
    topic_id: u64,
    /// Number of partitions that the topic has, up to [`PARTITIONS`].
    partition_count: u32,
    /// The response to the next deletion is lost.
    loses_deletion: bool,
    logs: HashMap<u32, Log>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ClusterView {
    leader: Option<usize>,
    term: u64,
    /// Version of the metadata.
    version: u64,
}

#[derive(Default)]
struct Log {
    batches: Vec<(u64, EncodedBatch)>,
    end: u64,
    /// Next sequence by producer, and the first offset of each applied sequence.
    producers: HashMap<(u64, u32), (u64, HashMap<u64, u64>)>,
}

impl State {
    fn check_topic(&self, expected_id: u64) -> Result<(), Status> {
        if expected_id == 0 || expected_id == self.topic_id {
            return Ok(());
        }
        let detail = ErrorDetail {
            topic: TOPIC.to_owned(),
            topic_id: self.topic_id,
            expected_topic_id: expected_id,
            ..wire::detail(ErrorReason::TopicRecreated)
        };
        Err(wire::to_status(&detail, "", None))
    }
}

impl FakeCluster {
    /// Starts three nodes, of which the first one leads.
    pub(crate) async fn start(seed: u64, fault_rate: f64) -> Self {
        let mut listeners = Vec::new();
        for _ in 0..NODES {
            listeners.push(listen().await);
        }
        let address = |listener: &TcpListener| listener.local_addr().unwrap().to_string();
        let actual = ClusterView { leader: Some(0), term: 1, version: 1 };
        let state = State {
            rng: StdRng::seed_from_u64(seed),
            groups: FakeGroups::default(),
            fault_rate,
            faults: 0,
            silent_subscriptions: 0,
            are_appends_blocked: false,
            has_blocked_append: false,
            batch_format: BatchFormat::Unspecified,
            lacks_topics: [false; NODES],
            cluster_id: "test".to_owned(),
            addresses: listeners.iter().map(address).collect(),
            actual,
            views: [actual; NODES],
            partitioned_ends: [const { None }; NODES],
            metadata_requests: [0; NODES],
            next_producer: 1,
            topic_id: 7,
            partition_count: PARTITIONS,
            loses_deletion: false,
            logs: (0..PARTITIONS).map(|partition| (partition, Log::default())).collect(),
        };
        let state = Mutex::new(state);
        let cluster = Arc::new(SharedCluster { state, appended: watch::Sender::new(0) });
        let servers = (0..).zip(listeners).map(|(id, listener)| serve_node(&cluster, id, listener));
        let servers = Mutex::new(servers.collect());
        Self { cluster, servers }
    }

    pub(crate) fn addresses(&self) -> Vec<String> {
        self.cluster.state().addresses.clone()
    }

    pub(crate) fn set_fault_rate(&self, fault_rate: f64) {
        self.cluster.state().fault_rate = fault_rate;
    }

    /// Returns the number of faults so far.
    pub(crate) fn faults(&self) -> u64 {
        self.cluster.state().faults
    }

    pub(crate) fn silence_subscriptions(&self, count: u32) {
        self.cluster.state().silent_subscriptions = count;
    }

    pub(crate) fn block_appends(&self) {
        self.cluster.state().are_appends_blocked = true;
    }

    /// Sets whether this node lacks the topic in its metadata.
    /// Lets the topic take Kafka batches.
    pub(crate) fn set_batch_format(&self, batch_format: BatchFormat) {
        self.cluster.state().batch_format = batch_format;
    }

    pub(crate) fn set_lacks_topics(&self, node: usize, lacks_topics: bool) {
        self.cluster.state().lacks_topics[node] = lacks_topics;
    }

    /// Returns the number of metadata requests to all nodes so far.
    pub(crate) fn metadata_requests(&self) -> u64 {
        self.cluster.state().metadata_requests.iter().sum()
    }

    /// Forgets all producers, as a partition does with old ones.
    pub(crate) fn forget_producers(&self) {
        for log in self.cluster.state().logs.values_mut() {
            log.producers.clear();
        }
    }

    pub(crate) fn topic_id(&self) -> u64 {
        self.cluster.state().topic_id
    }

    /// Sets the number of partitions of the topic.
    pub(crate) fn set_partition_count(&self, partition_count: u32) {
        let mut state = self.cluster.state();
        state.partition_count = partition_count;
        state.actual.version += 1;
        state.publish();
    }

    /// Returns the ids of all producers of a partition, in order.
    pub(crate) fn producers(&self, partition: u32) -> Vec<u64> {
        let state = self.cluster.state();
        let mut ids: Vec<_> = state.logs[&partition].producers.keys().map(|key| key.0).collect();
        ids.sort_unstable();
        ids
    }

    /// Waits until a node has an append whose response is blocked.
    pub(crate) async fn blocked_append(&self) {
        crate::within_deadline(async || self.cluster.state().has_blocked_append.then_some(())).await
    }

    pub(crate) fn unblock_appends(&self) {
        self.cluster.state().are_appends_blocked = false;
    }

    /// Loses the response to the next deletion of the topic.
    pub(crate) fn lose_deletion(&self) {
        self.cluster.state().loses_deletion = true;
    }

    /// Deletes the topic and creates it again. Returns the old and the new id.
    pub(crate) fn recreate_topic(&self) -> (u64, u64) {
        let mut state = self.cluster.state();
        let old = state.topic_id;
        state.topic_id += 1;
        state.actual.version += 1;
        state.publish();
        for log in state.logs.values_mut() {
            *log = Log::default();
        }
        (old, state.topic_id)
    }

    /// Loses the last batch of a partition, as a crashing leader does.
    pub(crate) fn lose_last_batch(&self, partition: u32) {
        let mut state = self.cluster.state();
        let log = state.logs.get_mut(&partition).unwrap();
        let (first, _) = log.batches.pop().unwrap();
        log.end = first;
        for (next, applied) in log.producers.values_mut() {
            if let Some((&sequence, _)) = applied.iter().find(|(_, offset)| **offset == first) {
                applied.remove(&sequence);
                *next = sequence;
            }
        }
    }

    /// Returns all values of a partition, as text.
    pub(crate) fn values(&self, partition: u32) -> Vec<String> {
        let state = self.cluster.state();
        let batches = state.logs[&partition].batches.iter();
        batches
            .flat_map(|(_, batch)| batch::decode(batch).unwrap().records)
            .map(|record| String::from_utf8(record.value.unwrap().to_vec()).unwrap())
            .collect()
    }

    /// Returns the versions of the batches in a partition.
    pub(crate) fn batch_versions(&self, partition: u32) -> Vec<u32> {
        let state = self.cluster.state();
        state.logs[&partition].batches.iter().map(|(_, batch)| batch.version).collect()
    }

    /// Stops a node as SIGSTOP does.
    pub(crate) fn stop(&self, node: usize) {
        self.servers.lock().unwrap()[node].gate.set(GateMode::Stopped);
    }

    pub(crate) fn resume(&self, node: usize) {
        self.servers.lock().unwrap()[node].gate.set(GateMode::Open);
    }

    /// Kills a node: its connections break, and new ones are refused.
    pub(crate) fn kill(&self, node: usize) {
        let servers = self.servers.lock().unwrap();
        servers[node].serving.abort();
        servers[node].gate.set(GateMode::Broken);
    }

    /// Starts a killed node where it was, or at a new address.
    pub(crate) async fn restart(&self, node: usize, at_new_address: bool) {
        let listener = if at_new_address {
            listen().await
        } else {
            let address = self.addresses()[node].clone();
            crate::within_deadline(async || TcpListener::bind(&address).await.ok()).await
        };
        if at_new_address {
            let mut state = self.cluster.state();
            state.addresses[node] = listener.local_addr().unwrap().to_string();
            state.actual.version += 1;
            state.publish();
        }
        self.servers.lock().unwrap()[node] = serve_node(&self.cluster, node, listener);
    }

    /// Removes the leader.
    pub(crate) fn depose(&self) {
        self.cluster.state().depose();
    }

    /// Makes this node the leader.
    pub(crate) fn elect(&self, node: usize) {
        self.cluster.state().elect(node);
    }

    /// Like [`FakeCluster::elect`], after `time`.
    pub(crate) fn elect_after(&self, time: Duration, node: usize) {
        let cluster = self.cluster.clone();
        tokio::spawn(async move {
            tokio::time::sleep(time).await;
            cluster.state().elect(node);
        });
    }

    /// Partitions a node from the other nodes, but not from the clients.
    pub(crate) fn partition(&self, node: usize) {
        let mut state = self.cluster.state();
        let ends = state.logs.iter().map(|(partition, log)| (*partition, log.end)).collect();
        state.partitioned_ends[node] = Some(ends);
    }

    /// Deletes all data and re-creates the cluster.
    pub(crate) fn recreate(&self, cluster_id: &str) {
        let mut state = self.cluster.state();
        state.cluster_id = cluster_id.to_owned();
        state.actual = ClusterView { leader: Some(1), term: 1, version: 1 };
        state.logs.values_mut().for_each(|log| *log = Log::default());
        state.next_producer = 1000;
        state.publish();
    }
}

/// Listens on a free port below the ephemeral ones: no client takes it while its node is down.
async fn listen() -> TcpListener {
    const FIRST: u32 = 10_000;
    const COUNT: u32 = 2_000;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Test processes start at different ports so that they do not collide.
    let offset = std::process::id().wrapping_mul(61) % COUNT;
    for _ in 0..COUNT {
        let place = (offset + NEXT.fetch_add(1, Ordering::Relaxed)) % COUNT;
        let port = u16::try_from(FIRST + place).unwrap();
        if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await {
            return listener;
        }
    }
    panic!("no free port on 127.0.0.1");
}

fn serve_node(cluster: &Arc<SharedCluster>, id: usize, listener: TcpListener) -> NodeServer {
    let node = FakeNode { id, cluster: cluster.clone() };
    let gate = SocketGate::new();
    let incoming = TcpListenerStream::new(listener).map({
        let gate = gate.clone();
        move |stream| stream.map(|stream| GatedStream { stream, gate: gate.clone() })
    });
    let serving = tonic::transport::Server::builder()
        .add_service(ProduceServiceServer::new(node.clone()))
        .add_service(ConsumeServiceServer::new(node.clone()))
        .add_service(TopicServiceServer::new(node.clone()))
        .add_service(GroupServiceServer::new(node.clone()))
        .add_service(ClusterServiceServer::new(node))
        .serve_with_incoming(incoming);
    let serving = tokio::spawn(async move { serving.await.unwrap() });
    NodeServer { gate, serving }
}

impl SharedCluster {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

impl State {
    fn draw_fault(&mut self) -> Option<Fault> {
        if !self.rng.random_bool(self.fault_rate) {
            return None;
        }
        self.faults += 1;
        Some(FAULTS[self.rng.random_range(0..FAULTS.len())])
    }

    fn depose(&mut self) {
        self.actual.leader = None;
        self.publish();
    }

    fn elect(&mut self, node: usize) {
        self.actual.leader = Some(node);
        self.actual.term += 1;
        self.publish();
    }

    /// Returns the node after the current or last leader.
    fn next_leader(&self, node: usize) -> usize {
        (node + 1) % NODES
    }

    /// Publishes the actual state to all nodes that are not partitioned.
    fn publish(&mut self) {
        for (view, partitioned_ends) in self.views.iter_mut().zip(&self.partitioned_ends) {
            if partitioned_ends.is_none() {
                *view = self.actual;
            }
        }
    }

    fn hint(&self, node: usize) -> Option<LeaderHint> {
        let ClusterView { leader, term, .. } = self.views[node];
        leader.map(|leader| LeaderHint {
            node_id: leader as u64 + 1,
            endpoint: self.addresses[leader].clone(),
            term,
        })
    }

    fn append(
        &mut self,
        partition: u32,
        batch: EncodedBatch,
        producer: Option<ProducerIdentity>,
        first_sequence: Option<u64>,
        durability: i32,
    ) -> Result<AppendAck, Status> {
        assert!(batch::is_intact(&batch));
        let log = self.logs.get_mut(&partition).unwrap();
        let count = u64::from(batch.record_count);
        let is_weak = durability == i32::from(Durability::LeaderWritten);
        let ack = |first, duplicate| match is_weak {
            true => AppendAck { durability, ..AppendAck::default() },
            false => AppendAck {
                first_offset: Some(first),
                next_offset: Some(first + count),
                duplicate,
                durability: Durability::QuorumSynced.into(),
            },
        };
        if let Some(producer) = producer {
            let sequence = first_sequence.unwrap();
            let key = (producer.producer_id, producer.epoch);
            if sequence > 0 && !log.producers.contains_key(&key) {
                return Err(rejection(ErrorReason::UnknownProducer));
            }
            let (next, applied) = log.producers.entry(key).or_default();
            if let Some(&first) = applied.get(&sequence) {
                return Ok(ack(first, true));
            }
            if sequence != *next {
                let reason = ErrorReason::OutOfOrderSequence;
                let detail = ErrorDetail { next_sequence: Some(*next), ..wire::detail(reason) };
                return Err(wire::to_status(&detail, "rejected", None));
            }
            *next += count;
            applied.insert(sequence, log.end);
        }
        let first = log.end;
        log.batches.push((first, batch));
        log.end += count;
        Ok(ack(first, false))
    }
}

fn rejection(reason: ErrorReason) -> Status {
    wire::to_status(&wire::detail(reason), "rejected", None)
}

/// Returns the status that a client sees when the connection breaks.
fn broken() -> Status {
    Status::unavailable("connection lost")
}

fn encoded(batch: Option<Batch>) -> EncodedBatch {
    match batch.and_then(|batch| batch.form) {
        Some(Form::Encoded(batch)) => batch,
        other => panic!("the client sends encoded batches, not {other:?}"),
    }
}

#[derive(Clone)]
struct FakeNode {
    id: usize,
    cluster: Arc<SharedCluster>,
}

/// Delivery of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Delivery {
    Arrives,
    Lost,
    /// No response comes.
    Silence,
}

impl FakeNode {
    /// Draws a fault and returns the state if this node considers itself the leader.
    fn check_and_draw_fault(&self) -> Result<(MutexGuard<'_, State>, Delivery), Status> {
        let mut state = self.cluster.state();
        let fault = state.draw_fault();
        let next = state.next_leader(self.id);
        match fault {
            Some(Fault::NewLeader) => state.elect(next),
            Some(Fault::Election) if state.actual.leader.is_some() => {
                state.depose();
                let cluster = self.cluster.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(ELECTION).await;
                    cluster.state().elect(next);
                });
            }
            _ => {}
        }
        self.check_leader(&state)?;
        match fault {
            Some(Fault::LostRequest) => Err(broken()),
            Some(Fault::Throttled) => Err(rejection(ErrorReason::Throttled)),
            Some(Fault::LostResponse) => Ok((state, Delivery::Lost)),
            Some(Fault::Silence) => Ok((state, Delivery::Silence)),
            _ if state.views[self.id].term != state.actual.term => Ok((state, Delivery::Silence)),
            _ => Ok((state, Delivery::Arrives)),
        }
    }

    fn check_leader(&self, state: &State) -> Result<(), Status> {
        let ClusterView { leader, .. } = state.views[self.id];
        if leader == Some(self.id) {
            return Ok(());
        }
        let reason = match leader {
            Some(_) => ErrorReason::NotLeader,
            None => ErrorReason::NoLeader,
        };
        let detail = ErrorDetail { leader: state.hint(self.id), ..wire::detail(reason) };
        Err(wire::to_status(&detail, "not the leader", None))
    }

    /// Returns `None` if no response comes: see [`FakeNode::wait_until_reelected`].
    fn append(
        &self,
        partition: u32,
        batch: Option<Batch>,
        producer: Option<ProducerIdentity>,
        first_sequence: Option<u64>,
        durability: i32,
    ) -> Result<Option<AppendAck>, Status> {
        let (mut state, delivery) = self.check_and_draw_fault()?;
        if state.are_appends_blocked || state.views[self.id] != state.actual {
            // A leader without followers never commits.
            state.has_blocked_append = true;
            return Ok(None);
        }
        let batch = encoded(batch);
        let ack = state.append(partition, batch, producer, first_sequence, durability)?;
        if delivery == Delivery::Silence {
            let next = state.next_leader(self.id);
            state.elect(next);
        }
        drop(state);
        self.cluster.appended.send_modify(|count| *count += 1);
        match delivery {
            Delivery::Arrives => Ok(Some(ack)),
            Delivery::Lost => Err(broken()),
            Delivery::Silence => Ok(None),
        }
    }

    /// Sends nothing until the node is elected again: clients would ask it about the outcome then.
    async fn wait_until_reelected(&self) -> Status {
        let term = self.cluster.state().actual.term;
        let is_elected = || {
            let ClusterView { leader, term: now, .. } = self.cluster.state().actual;
            leader == Some(self.id) && now > term
        };
        while !is_elected() {
            tokio::time::sleep(ELECTION).await;
        }
        broken()
    }
}
