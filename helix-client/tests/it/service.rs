//! A log service in memory: three nodes over the same partitions, one of which leads at a time.
//! Simple where the real one is fast, and honest about terms, sequences, duplicates and offsets.

mod gate;
mod rpc;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use helix_client::proto::log::v1::batch::Form;
use helix_client::proto::log::v1::cluster_service_server::ClusterServiceServer;
use helix_client::proto::log::v1::consume_service_server::ConsumeServiceServer;
use helix_client::proto::log::v1::produce_service_server::ProduceServiceServer;
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

use gate::{Gate, Gated, Mode};

pub(crate) const TOPIC: &str = "orders";
pub(crate) const PARTITIONS: u32 = 4;
pub(crate) const NODES: usize = 3;
const SHARD: u32 = 1;

/// What goes wrong with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// Nothing is done, and the caller does not learn that.
    LostRequest,
    /// It is done, and the caller does not learn that.
    LostAnswer,
    /// It is done, another node leads from now on, and the answer does not come: the connection
    /// breaks when the node leads again.
    Silence,
    /// Another node leads from now on.
    NewLeader,
    /// Nobody leads for a moment, and then another node.
    Election,
    /// Nothing is done, and the caller learns that.
    Throttled,
}

const FAULTS: [Fault; 6] = [
    Fault::LostRequest,
    Fault::LostAnswer,
    Fault::Silence,
    Fault::NewLeader,
    Fault::Election,
    Fault::Throttled,
];

/// How long nobody leads in an [`Fault::Election`].
const ELECTION: Duration = Duration::from_millis(15);

/// The running service. Its nodes live as long as the test's runtime.
pub(crate) struct Service {
    cluster: Arc<Cluster>,
    hosts: Mutex<Vec<Host>>,
}

/// What a node runs in.
struct Host {
    gate: Arc<Gate>,
    serving: JoinHandle<()>,
}

struct Cluster {
    state: Mutex<State>,
    /// Counts appends, for readers that wait.
    appended: watch::Sender<u64>,
}

struct State {
    rng: StdRng,
    /// Chance of a fault per call or message.
    fault_rate: f64,
    faults: u64,
    /// The next subscriptions say nothing at all.
    silent_subscriptions: u32,
    /// Appends are never answered.
    is_stuck: bool,
    /// Metadata has no topics on this node: it has not heard of them yet.
    is_ignorant: [bool; NODES],
    cluster_id: String,
    addresses: Vec<String>,
    truth: View,
    /// What each node believes; that of a node that is cut off is an old truth.
    views: [View; NODES],
    /// The ends of the partitions that nodes know which are cut off.
    known_ends: [Option<HashMap<u32, u64>>; NODES],
    /// Calls for metadata, by node.
    asked: [u64; NODES],
    next_producer: u64,
    logs: HashMap<u32, Log>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct View {
    leader: Option<usize>,
    term: u64,
    /// Version of the metadata.
    version: u64,
}

#[derive(Default)]
struct Log {
    batches: Vec<(u64, EncodedBatch)>,
    end: u64,
    /// Next sequence by producer, and the first offset of each sequence that was applied.
    producers: HashMap<(u64, u32), (u64, HashMap<u64, u64>)>,
}

impl Service {
    /// Three nodes, of which the first one leads.
    pub(crate) async fn start(seed: u64, fault_rate: f64) -> Self {
        let mut listeners = Vec::new();
        for _ in 0..NODES {
            listeners.push(TcpListener::bind("127.0.0.1:0").await.unwrap());
        }
        let address = |listener: &TcpListener| listener.local_addr().unwrap().to_string();
        let truth = View { leader: Some(0), term: 1, version: 1 };
        let state = State {
            rng: StdRng::seed_from_u64(seed),
            fault_rate,
            faults: 0,
            silent_subscriptions: 0,
            is_stuck: false,
            is_ignorant: [false; NODES],
            cluster_id: "test".to_owned(),
            addresses: listeners.iter().map(address).collect(),
            truth,
            views: [truth; NODES],
            known_ends: [const { None }; NODES],
            asked: [0; NODES],
            next_producer: 1,
            logs: (0..PARTITIONS).map(|partition| (partition, Log::default())).collect(),
        };
        let state = Mutex::new(state);
        let cluster = Arc::new(Cluster { state, appended: watch::Sender::new(0) });
        let hosts = (0..).zip(listeners).map(|(id, listener)| host(&cluster, id, listener));
        let hosts = Mutex::new(hosts.collect());
        Self { cluster, hosts }
    }

    pub(crate) fn addresses(&self) -> Vec<String> {
        self.cluster.state().addresses.clone()
    }

    pub(crate) fn set_fault_rate(&self, fault_rate: f64) {
        self.cluster.state().fault_rate = fault_rate;
    }

    /// Faults so far.
    pub(crate) fn faults(&self) -> u64 {
        self.cluster.state().faults
    }

    pub(crate) fn silence_subscriptions(&self, count: u32) {
        self.cluster.state().silent_subscriptions = count;
    }

    pub(crate) fn get_stuck(&self) {
        self.cluster.state().is_stuck = true;
    }

    /// Whether this node knows of the topic.
    pub(crate) fn set_ignorant(&self, node: usize, is_ignorant: bool) {
        self.cluster.state().is_ignorant[node] = is_ignorant;
    }

    /// Calls for metadata so far, of all nodes.
    pub(crate) fn asked(&self) -> u64 {
        self.cluster.state().asked.iter().sum()
    }

    /// Forgets all producers, as a partition does with old ones.
    pub(crate) fn forget_producers(&self) {
        for log in self.cluster.state().logs.values_mut() {
            log.producers.clear();
        }
    }

    /// Loses the last batch of a partition, as a leader does that crashes.
    pub(crate) fn lose_last(&self, partition: u32) {
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

    /// Everything in a partition, as text.
    pub(crate) fn values(&self, partition: u32) -> Vec<String> {
        let state = self.cluster.state();
        let batches = state.logs[&partition].batches.iter();
        batches
            .flat_map(|(_, batch)| batch::decode(batch).unwrap().records)
            .map(|record| String::from_utf8(record.value.unwrap().to_vec()).unwrap())
            .collect()
    }

    /// Stops a node as SIGSTOP does.
    pub(crate) fn stop(&self, node: usize) {
        self.hosts.lock().unwrap()[node].gate.set(Mode::Stopped);
    }

    pub(crate) fn go_on(&self, node: usize) {
        self.hosts.lock().unwrap()[node].gate.set(Mode::Open);
    }

    /// Kills a node: its connections break, and new ones are refused.
    pub(crate) fn kill(&self, node: usize) {
        let hosts = self.hosts.lock().unwrap();
        hosts[node].serving.abort();
        hosts[node].gate.set(Mode::Broken);
    }

    /// Starts a killed node where it was, or at a new address.
    pub(crate) async fn restart(&self, node: usize, is_elsewhere: bool) {
        let address = match is_elsewhere {
            true => "127.0.0.1:0".to_owned(),
            false => self.addresses()[node].clone(),
        };
        let listener = crate::within_deadline(async || TcpListener::bind(&address).await.ok());
        let listener = listener.await;
        if is_elsewhere {
            let mut state = self.cluster.state();
            state.addresses[node] = listener.local_addr().unwrap().to_string();
            state.truth.version += 1;
            state.spread();
        }
        self.hosts.lock().unwrap()[node] = host(&self.cluster, node, listener);
    }

    /// Nobody leads from now on.
    pub(crate) fn depose(&self) {
        self.cluster.state().depose();
    }

    /// This node leads from now on.
    pub(crate) fn elect(&self, node: usize) {
        self.cluster.state().elect(node);
    }

    /// As [`Service::elect`], when the election is over.
    pub(crate) fn elect_after(&self, time: Duration, node: usize) {
        let cluster = self.cluster.clone();
        tokio::spawn(async move {
            tokio::time::sleep(time).await;
            cluster.state().elect(node);
        });
    }

    /// Cuts a node off from the others, and not from the clients.
    pub(crate) fn cut_off(&self, node: usize) {
        let mut state = self.cluster.state();
        let ends = state.logs.iter().map(|(partition, log)| (*partition, log.end)).collect();
        state.known_ends[node] = Some(ends);
    }

    /// All data is lost, and the cluster is made anew.
    pub(crate) fn make_anew(&self, cluster_id: &str) {
        let mut state = self.cluster.state();
        state.cluster_id = cluster_id.to_owned();
        state.truth = View { leader: Some(1), term: 1, version: 1 };
        state.logs.values_mut().for_each(|log| *log = Log::default());
        state.next_producer = 1000;
        state.spread();
    }
}

fn host(cluster: &Arc<Cluster>, id: usize, listener: TcpListener) -> Host {
    let node = Node { id, cluster: cluster.clone() };
    let gate = Gate::new();
    let incoming = TcpListenerStream::new(listener).map({
        let gate = gate.clone();
        move |stream| stream.map(|stream| Gated { stream, gate: gate.clone() })
    });
    let serving = tonic::transport::Server::builder()
        .add_service(ProduceServiceServer::new(node.clone()))
        .add_service(ConsumeServiceServer::new(node.clone()))
        .add_service(ClusterServiceServer::new(node))
        .serve_with_incoming(incoming);
    let serving = tokio::spawn(async move { serving.await.unwrap() });
    Host { gate, serving }
}

impl Cluster {
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
        self.truth.leader = None;
        self.spread();
    }

    fn elect(&mut self, node: usize) {
        self.truth.leader = Some(node);
        self.truth.term += 1;
        self.spread();
    }

    /// The node after the present or the last leader.
    fn next_leader(&self, node: usize) -> usize {
        (node + 1) % NODES
    }

    /// Everybody who can hear it learns the truth.
    fn spread(&mut self) {
        for (view, known_ends) in self.views.iter_mut().zip(&self.known_ends) {
            if known_ends.is_none() {
                *view = self.truth;
            }
        }
    }

    fn hint(&self, node: usize) -> Option<LeaderHint> {
        let View { leader, term, .. } = self.views[node];
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
                return Err(refusal(ErrorReason::UnknownProducer));
            }
            let (next, applied) = log.producers.entry(key).or_default();
            if let Some(&first) = applied.get(&sequence) {
                return Ok(ack(first, true));
            }
            if sequence != *next {
                let reason = ErrorReason::OutOfOrderSequence;
                let detail = ErrorDetail { next_sequence: Some(*next), ..wire::detail(reason) };
                return Err(wire::to_status(&detail, "refused", None));
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

fn refusal(reason: ErrorReason) -> Status {
    wire::to_status(&wire::detail(reason), "refused", None)
}

/// What a broken connection looks like from the other side.
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
struct Node {
    id: usize,
    cluster: Arc<Cluster>,
}

/// What becomes of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Arrives,
    Lost,
    /// It does not come.
    Silence,
}

impl Node {
    /// The state, if this node leads as far as it knows. Draws whether something goes wrong, and
    /// does it.
    fn lead(&self) -> Result<(MutexGuard<'_, State>, Fate), Status> {
        let mut state = self.cluster.state();
        let fault = state.draw_fault();
        let next = state.next_leader(self.id);
        match fault {
            Some(Fault::NewLeader) => state.elect(next),
            Some(Fault::Election) if state.truth.leader.is_some() => {
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
            Some(Fault::Throttled) => Err(refusal(ErrorReason::Throttled)),
            Some(Fault::LostAnswer) => Ok((state, Fate::Lost)),
            Some(Fault::Silence) => Ok((state, Fate::Silence)),
            _ if state.views[self.id].term != state.truth.term => Ok((state, Fate::Silence)),
            _ => Ok((state, Fate::Arrives)),
        }
    }

    fn check_leader(&self, state: &State) -> Result<(), Status> {
        let View { leader, .. } = state.views[self.id];
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

    /// None: no answer comes, see [`Node::silence`].
    fn append(
        &self,
        partition: u32,
        batch: Option<Batch>,
        producer: Option<ProducerIdentity>,
        first_sequence: Option<u64>,
        durability: i32,
    ) -> Result<Option<AppendAck>, Status> {
        let (mut state, fate) = self.lead()?;
        if state.is_stuck || state.views[self.id] != state.truth {
            // What a leader without followers takes is never committed.
            return Ok(None);
        }
        let batch = encoded(batch);
        let ack = state.append(partition, batch, producer, first_sequence, durability)?;
        if fate == Fate::Silence {
            let next = state.next_leader(self.id);
            state.elect(next);
        }
        drop(state);
        self.cluster.appended.send_modify(|count| *count += 1);
        match fate {
            Fate::Arrives => Ok(Some(ack)),
            Fate::Lost => Err(broken()),
            Fate::Silence => Ok(None),
        }
    }

    /// Says nothing until the node is elected again: it would be asked about the outcome then.
    async fn silence(&self) -> Status {
        let term = self.cluster.state().truth.term;
        let is_elected = || {
            let View { leader, term: now, .. } = self.cluster.state().truth;
            leader == Some(self.id) && now > term
        };
        while !is_elected() {
            tokio::time::sleep(ELECTION).await;
        }
        broken()
    }
}
