//! A log service in memory: two nodes over the same partitions, one of which leads at a time.
//! Simple where the real one is fast, and honest about sequences, duplicates and offsets.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use helix_client::proto::log::v1::append_stream_request::Message as AppendMessage;
use helix_client::proto::log::v1::append_stream_response::Message as AppendAnswer;
use helix_client::proto::log::v1::batch::Form;
use helix_client::proto::log::v1::cluster_service_server::{ClusterService, ClusterServiceServer};
use helix_client::proto::log::v1::consume_service_server::{ConsumeService, ConsumeServiceServer};
use helix_client::proto::log::v1::produce_service_server::{ProduceService, ProduceServiceServer};
use helix_client::proto::log::v1::start_position::Position;
use helix_client::proto::log::v1::subscribe_response::Message as SubscribeMessage;
use helix_client::proto::log::v1::{Node as NodeEntry, *};
use helix_client::proto::{batch, error as wire};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

pub(crate) const TOPIC: &str = "orders";
pub(crate) const PARTITIONS: u32 = 4;
const SHARD: u32 = 1;

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// What goes wrong with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// Nothing is done, and the caller does not learn that.
    LostRequest,
    /// It is done, and the caller does not learn that.
    LostAnswer,
    /// The other node leads from now on.
    NewLeader,
    /// Nothing is done, and the caller learns that.
    Throttled,
}

/// The running service. Its nodes live as long as the test's runtime.
pub(crate) struct Service {
    cluster: Arc<Cluster>,
}

struct Cluster {
    state: Mutex<State>,
    addresses: Vec<String>,
    /// Counts appends, for readers that wait.
    appended: watch::Sender<u64>,
}

struct State {
    rng: StdRng,
    /// Chance of a fault per call or message.
    fault_rate: f64,
    /// The next subscriptions say nothing at all.
    silent_subscriptions: u32,
    /// Appends are never answered.
    is_stuck: bool,
    leader: usize,
    term: u64,
    next_producer: u64,
    logs: HashMap<u32, Log>,
}

#[derive(Default)]
struct Log {
    batches: Vec<(u64, EncodedBatch)>,
    end: u64,
    /// Next sequence by producer, and the first offset of each sequence that was applied.
    producers: HashMap<(u64, u32), (u64, HashMap<u64, u64>)>,
}

impl Service {
    pub(crate) async fn start(seed: u64, fault_rate: f64) -> Self {
        let mut listeners = Vec::new();
        for _ in 0..2 {
            listeners.push(TcpListener::bind("127.0.0.1:0").await.unwrap());
        }
        let addresses =
            listeners.iter().map(|listener| listener.local_addr().unwrap().to_string()).collect();
        let state = State {
            rng: StdRng::seed_from_u64(seed),
            fault_rate,
            silent_subscriptions: 0,
            is_stuck: false,
            leader: 0,
            term: 1,
            next_producer: 1,
            logs: (0..PARTITIONS).map(|partition| (partition, Log::default())).collect(),
        };
        let state = Mutex::new(state);
        let cluster = Arc::new(Cluster { state, addresses, appended: watch::Sender::new(0) });
        for (id, listener) in listeners.into_iter().enumerate() {
            let node = Node { id, cluster: cluster.clone() };
            let serving = tonic::transport::Server::builder()
                .add_service(ProduceServiceServer::new(node.clone()))
                .add_service(ConsumeServiceServer::new(node.clone()))
                .add_service(ClusterServiceServer::new(node))
                .serve_with_incoming(TcpListenerStream::new(listener));
            tokio::spawn(serving);
        }
        Self { cluster }
    }

    pub(crate) fn addresses(&self) -> Vec<String> {
        self.cluster.addresses.clone()
    }

    pub(crate) fn set_fault_rate(&self, fault_rate: f64) {
        self.cluster.state().fault_rate = fault_rate;
    }

    pub(crate) fn silence_subscriptions(&self, count: u32) {
        self.cluster.state().silent_subscriptions = count;
    }

    pub(crate) fn get_stuck(&self) {
        self.cluster.state().is_stuck = true;
    }

    /// Forgets all producers, as a partition does with old ones.
    pub(crate) fn forget_producers(&self) {
        for log in self.cluster.state().logs.values_mut() {
            log.producers.clear();
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
}

impl Cluster {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn hint(&self, state: &State) -> LeaderHint {
        LeaderHint {
            node_id: state.leader as u64 + 1,
            endpoint: self.addresses[state.leader].clone(),
            term: state.term,
        }
    }
}

impl State {
    fn draw_fault(&mut self) -> Option<Fault> {
        if !self.rng.random_bool(self.fault_rate) {
            return None;
        }
        let faults = [Fault::LostRequest, Fault::LostAnswer, Fault::NewLeader, Fault::Throttled];
        Some(faults[self.rng.random_range(0..faults.len())])
    }

    fn append(
        &mut self,
        partition: u32,
        batch: EncodedBatch,
        producer: Option<ProducerIdentity>,
        first_sequence: Option<u64>,
    ) -> Result<AppendAck, Status> {
        assert!(batch::is_intact(&batch));
        let log = self.logs.get_mut(&partition).unwrap();
        let count = u64::from(batch.record_count);
        let ack = |first, duplicate| AppendAck {
            first_offset: Some(first),
            next_offset: Some(first + count),
            duplicate,
            durability: Durability::QuorumSynced.into(),
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
                return Err(refusal(ErrorReason::OutOfOrderSequence));
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

impl Node {
    /// The state, if this node leads. Draws whether something goes wrong, and does it.
    fn lead(&self) -> Result<(MutexGuard<'_, State>, bool), Status> {
        let mut state = self.cluster.state();
        let fault = state.draw_fault();
        if fault == Some(Fault::NewLeader) {
            state.leader = 1 - state.leader;
            state.term += 1;
        }
        if state.leader != self.id {
            let leader = Some(self.cluster.hint(&state));
            let detail = ErrorDetail { leader, ..wire::detail(ErrorReason::NotLeader) };
            return Err(wire::to_status(&detail, "not the leader", None));
        }
        match fault {
            Some(Fault::LostRequest) => Err(broken()),
            Some(Fault::Throttled) => Err(refusal(ErrorReason::Throttled)),
            fault => Ok((state, fault == Some(Fault::LostAnswer))),
        }
    }

    fn append(
        &self,
        partition: u32,
        batch: Option<Batch>,
        producer: Option<ProducerIdentity>,
        first_sequence: Option<u64>,
    ) -> Result<AppendAck, Status> {
        let (mut state, is_answer_lost) = self.lead()?;
        let ack = state.append(partition, encoded(batch), producer, first_sequence)?;
        drop(state);
        self.cluster.appended.send_modify(|count| *count += 1);
        if is_answer_lost { Err(broken()) } else { Ok(ack) }
    }

    fn read(&self, start: &PartitionStart) -> Result<PartitionRecords, Status> {
        let (mut state, is_answer_lost) = self.lead()?;
        if is_answer_lost {
            return Err(broken());
        }
        let batches_max = state.rng.random_range(1..4);
        let log = &state.logs[&start.partition];
        let position = start.start.as_ref().and_then(|start| start.position.as_ref());
        let from = match position {
            Some(Position::Offset(offset)) => *offset,
            Some(Position::Named(named)) if *named == NamedPosition::Latest as i32 => log.end,
            Some(Position::Named(_)) => 0,
            Some(Position::TailRecords(records)) => log.end.saturating_sub(*records),
            other => panic!("not a position that the tests use: {other:?}"),
        };
        if from > log.end {
            return Err(refusal(ErrorReason::OffsetOutOfRange));
        }
        let end_of = |(first, batch): &(u64, EncodedBatch)| first + u64::from(batch.record_count);
        let until = start.until_offset.unwrap_or(u64::MAX);
        let batches: Vec<_> = log
            .batches
            .iter()
            .filter(|stored| end_of(stored) > from && stored.0 < until)
            .take(batches_max)
            .collect();
        Ok(PartitionRecords {
            topic: start.topic.clone(),
            partition: start.partition,
            records: Vec::new(),
            next_offset: batches.last().map_or(from, |last| end_of(last)).min(until),
            batches: batches
                .into_iter()
                .map(|(first_offset, batch)| StoredBatch {
                    first_offset: *first_offset,
                    append_time: None,
                    offset_deltas: Vec::new(),
                    batch: Some(batch.clone()),
                })
                .collect(),
            watermarks: Some(Watermarks { log_start_offset: 0, high_watermark: log.end }),
            start_offset: from,
        })
    }
}

#[tonic::async_trait]
impl ProduceService for Node {
    async fn init_producer(
        &self,
        _: Request<InitProducerRequest>,
    ) -> Result<Response<InitProducerResponse>, Status> {
        let mut state = self.cluster.state();
        let producer = ProducerIdentity { producer_id: state.next_producer, epoch: 0 };
        state.next_producer += 1;
        Ok(Response::new(InitProducerResponse { producer: Some(producer) }))
    }

    async fn append(
        &self,
        request: Request<AppendRequest>,
    ) -> Result<Response<AppendResponse>, Status> {
        let is_stuck = self.cluster.state().is_stuck;
        if is_stuck {
            std::future::pending::<()>().await;
        }
        let AppendRequest { partition, batch, producer, first_sequence, .. } = request.into_inner();
        let ack = self.append(partition, batch, producer, first_sequence)?;
        Ok(Response::new(AppendResponse { ack: Some(ack), watermarks: None }))
    }

    type AppendStreamStream = Answers<AppendStreamResponse>;

    async fn append_stream(
        &self,
        request: Request<Streaming<AppendStreamRequest>>,
    ) -> Result<Response<Self::AppendStreamStream>, Status> {
        let mut requests = request.into_inner();
        let first = requests.message().await?.and_then(|first| first.message);
        let Some(AppendMessage::Init(init)) = first else { panic!("began with {first:?}") };
        let opened = {
            let (state, _) = self.lead()?;
            let key = init.producer.map(|producer| (producer.producer_id, producer.epoch));
            let known = key.and_then(|key| state.logs[&init.partition].producers.get(&key));
            AppendStreamOpened {
                next_sequence: known.map(|(next, _)| *next),
                max_batch_bytes: 1 << 20,
                max_in_flight_batches: 8,
                max_in_flight_bytes: 1 << 20,
                watermarks: None,
            }
        };
        let (sender, answers) = mpsc::channel(64);
        let answer = |message| Ok(AppendStreamResponse { message: Some(message) });
        sender.send(answer(AppendAnswer::Opened(opened))).await.unwrap();
        let node = self.clone();
        tokio::spawn(async move {
            while let Ok(Some(request)) = requests.message().await {
                let Some(AppendMessage::Batch(batch)) = request.message else { panic!("no batch") };
                let is_stuck = node.cluster.state().is_stuck;
                if is_stuck {
                    continue;
                }
                let appended =
                    node.append(init.partition, batch.batch, init.producer, batch.first_sequence);
                let is_end = appended.is_err();
                let message = appended.and_then(|ack| {
                    answer(AppendAnswer::Acks(AppendAcks { acks: vec![ack], watermarks: None }))
                });
                if sender.send(message).await.is_err() || is_end {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(answers))))
    }
}

#[tonic::async_trait]
impl ConsumeService for Node {
    async fn fetch(
        &self,
        request: Request<FetchRequest>,
    ) -> Result<Response<FetchResponse>, Status> {
        let starts = request.into_inner().partitions;
        let partitions = starts.iter().map(|start| self.read(start)).collect::<Result<_, _>>()?;
        Ok(Response::new(FetchResponse { partitions }))
    }

    type SubscribeStream = Answers<SubscribeResponse>;

    async fn subscribe(
        &self,
        request: Request<SubscribeRequest>,
    ) -> Result<Response<Self::SubscribeStream>, Status> {
        let is_silent = {
            let mut state = self.cluster.state();
            let is_silent = state.silent_subscriptions > 0;
            state.silent_subscriptions = state.silent_subscriptions.saturating_sub(1);
            is_silent
        };
        if is_silent {
            return Ok(Response::new(Box::pin(tokio_stream::pending())));
        }
        let (sender, answers) = mpsc::channel(1);
        let node = self.clone();
        let starts = request.into_inner().partitions;
        tokio::spawn(async move { node.push(starts, sender).await });
        let answers = ReceiverStream::new(answers)
            .map(|message| message.map(|message| SubscribeResponse { message: Some(message) }));
        Ok(Response::new(Box::pin(answers)))
    }

    async fn resolve_offsets(
        &self,
        _: Request<ResolveOffsetsRequest>,
    ) -> Result<Response<ResolveOffsetsResponse>, Status> {
        Err(refusal(ErrorReason::Unimplemented))
    }
}

impl Node {
    /// Sends what there is of each partition, then waits for more.
    async fn push(
        &self,
        mut starts: Vec<PartitionStart>,
        sender: mpsc::Sender<Result<SubscribeMessage, Status>>,
    ) {
        let mut appended = self.cluster.appended.subscribe();
        loop {
            let mut is_idle = true;
            for start in &mut starts {
                let records = match self.read(start) {
                    Ok(records) => records,
                    Err(status) => {
                        let _ = sender.send(Err(status)).await;
                        return;
                    }
                };
                let position = Position::Offset(records.next_offset);
                start.start = Some(StartPosition { position: Some(position) });
                if !records.batches.is_empty() {
                    is_idle = false;
                    if sender.send(Ok(SubscribeMessage::Data(records))).await.is_err() {
                        return;
                    }
                }
            }
            starts.retain(|start| {
                let next = start.start.as_ref().and_then(|start| start.position.as_ref());
                let Some(Position::Offset(next)) = next else { panic!("set above") };
                start.until_offset.is_none_or(|until| *next < until)
            });
            if starts.is_empty() {
                return;
            }
            let beat = Heartbeat::default();
            if is_idle && sender.send(Ok(SubscribeMessage::Heartbeat(beat))).await.is_err() {
                return;
            }
            if is_idle {
                let _ = tokio::time::timeout(Duration::from_millis(50), appended.changed()).await;
            }
        }
    }
}

#[tonic::async_trait]
impl ClusterService for Node {
    async fn get_metadata(
        &self,
        _: Request<GetMetadataRequest>,
    ) -> Result<Response<GetMetadataResponse>, Status> {
        let state = self.cluster.state();
        let nodes = self.cluster.addresses.iter().zip(1..);
        let metadata = Metadata {
            cluster_id: "test".to_owned(),
            version: state.term,
            nodes: nodes
                .map(|(endpoint, node_id)| NodeEntry {
                    node_id,
                    endpoint: endpoint.clone(),
                    ..NodeEntry::default()
                })
                .collect(),
            shards: vec![ShardRoute {
                shard_id: SHARD,
                leader: Some(self.cluster.hint(&state)),
                replicas: vec![1, 2],
            }],
            topics: vec![TopicRoute {
                topic: TOPIC.to_owned(),
                shard_ids: vec![SHARD; PARTITIONS as usize],
            }],
        };
        Ok(Response::new(GetMetadataResponse { metadata: Some(metadata) }))
    }

    type WatchMetadataStream = Answers<WatchMetadataResponse>;

    async fn watch_metadata(
        &self,
        _: Request<WatchMetadataRequest>,
    ) -> Result<Response<Self::WatchMetadataStream>, Status> {
        Err(refusal(ErrorReason::Unimplemented))
    }

    async fn get_health(
        &self,
        _: Request<GetHealthRequest>,
    ) -> Result<Response<GetHealthResponse>, Status> {
        Err(refusal(ErrorReason::Unimplemented))
    }

    async fn get_node_status(
        &self,
        _: Request<GetNodeStatusRequest>,
    ) -> Result<Response<GetNodeStatusResponse>, Status> {
        Err(refusal(ErrorReason::Unimplemented))
    }

    async fn add_node(
        &self,
        _: Request<AddNodeRequest>,
    ) -> Result<Response<AddNodeResponse>, Status> {
        Err(refusal(ErrorReason::Unimplemented))
    }

    async fn remove_node(
        &self,
        _: Request<RemoveNodeRequest>,
    ) -> Result<Response<RemoveNodeResponse>, Status> {
        Err(refusal(ErrorReason::Unimplemented))
    }

    async fn replace_node(
        &self,
        _: Request<ReplaceNodeRequest>,
    ) -> Result<Response<ReplaceNodeResponse>, Status> {
        Err(refusal(ErrorReason::Unimplemented))
    }

    type WatchMembershipChangeStream = Answers<WatchMembershipChangeResponse>;

    async fn watch_membership_change(
        &self,
        _: Request<WatchMembershipChangeRequest>,
    ) -> Result<Response<Self::WatchMembershipChangeStream>, Status> {
        Err(refusal(ErrorReason::Unimplemented))
    }

    async fn set_draining(
        &self,
        _: Request<SetDrainingRequest>,
    ) -> Result<Response<SetDrainingResponse>, Status> {
        Err(refusal(ErrorReason::Unimplemented))
    }

    async fn transfer_leader(
        &self,
        _: Request<TransferLeaderRequest>,
    ) -> Result<Response<TransferLeaderResponse>, Status> {
        Err(refusal(ErrorReason::Unimplemented))
    }
}
