//! The public API over nothing: decodes, checks as a server must, and answers. What it costs is
//! what any server costs that speaks this API, so it is the ceiling for all of them.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use helix_proto::batch;
use helix_proto::error as wire;
use helix_proto::log::v1 as pb;
use helix_proto::log::v1::append_stream_request::Message as StreamRequest;
use helix_proto::log::v1::append_stream_response::Message as StreamAnswer;
use helix_proto::log::v1::cluster_service_server::{ClusterService, ClusterServiceServer};
use helix_proto::log::v1::consume_service_server::{ConsumeService, ConsumeServiceServer};
use helix_proto::log::v1::produce_service_server::{ProduceService, ProduceServiceServer};
use helix_proto::log::v1::topic_service_server::{TopicService, TopicServiceServer};
use helix_proto::log::v1::{EncodedBatch, ErrorReason, Watermarks};
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_stream::Stream;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use crate::target::process_cpu_time;

/// As in the server: `limits.rs` there has the reasons.
const MESSAGE_BYTES_MAX: usize = 16 << 20;
const BATCH_BYTES_MAX: u32 = 4 << 20;
const RECORD_BYTES_MAX: usize = 1 << 20;
const STREAM_BATCHES_IN_FLIGHT_MAX: u32 = 64;
const STREAM_BYTES_IN_FLIGHT_MAX: u64 = 8 << 20;
const FETCH_BYTES_DEFAULT: u64 = 1 << 20;
const FETCH_BYTES_MAX: u64 = 8 << 20;
const STREAMS_PER_CONNECTION_MAX: u32 = 1024;
const STREAM_WINDOW_BYTES: u32 = 8 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 32 << 20;
const FRAME_BYTES: u32 = 1 << 20;

/// Records that each partition seems to have.
const RECORDS: u64 = 1 << 40;
/// Partitions of a topic that nobody has created.
const PARTITIONS_DEFAULT: u32 = 4;
/// Partitions that count offsets of their own; higher ones share.
const COUNTERS: usize = 1 << 12;
const NODE_ID: u64 = 1;

/// Serves until the process ends.
///
/// # Errors
/// Why the connection could not be served.
pub(crate) async fn serve(
    listener: TcpListener,
    batches: Vec<EncodedBatch>,
) -> Result<(), tonic::transport::Error> {
    let address = listener.local_addr().expect("it is bound");
    let ceiling = Ceiling(Arc::new(State::new(address, batches)));
    Server::builder()
        .tcp_nodelay(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .max_concurrent_streams(STREAMS_PER_CONNECTION_MAX)
        .add_service(
            ProduceServiceServer::new(ceiling.clone())
                .max_decoding_message_size(MESSAGE_BYTES_MAX)
                .max_encoding_message_size(MESSAGE_BYTES_MAX),
        )
        .add_service(
            ConsumeServiceServer::new(ceiling.clone())
                .max_decoding_message_size(MESSAGE_BYTES_MAX)
                .max_encoding_message_size(MESSAGE_BYTES_MAX),
        )
        .add_service(TopicServiceServer::new(ceiling.clone()))
        .add_service(ClusterServiceServer::new(ceiling))
        .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)))
        .await
}

#[derive(Debug, Clone)]
struct Ceiling(Arc<State>);

#[derive(Debug)]
struct State {
    endpoint: String,
    started: Instant,
    /// What every fetch gives: one after the other, for ever.
    batches: Vec<EncodedBatch>,
    /// Next offset of each partition, for acks only.
    next_offsets: Vec<AtomicU64>,
    /// Partitions of the topics that were created.
    topics: Mutex<HashMap<String, u32>>,
}

impl State {
    fn new(address: SocketAddr, batches: Vec<EncodedBatch>) -> Self {
        assert!(!batches.is_empty(), "there is something to fetch");
        Self {
            endpoint: address.to_string(),
            started: Instant::now(),
            batches,
            next_offsets: (0..COUNTERS).map(|_| AtomicU64::new(0)).collect(),
            topics: Mutex::default(),
        }
    }

    fn ack(&self, partition: u32, records: u32) -> pb::AppendAck {
        let next_offset = &self.next_offsets[partition as usize % COUNTERS];
        let first = next_offset.fetch_add(u64::from(records), Ordering::Relaxed);
        pb::AppendAck {
            first_offset: Some(first),
            next_offset: Some(first + u64::from(records)),
            duplicate: false,
            durability: pb::Durability::None.into(),
        }
    }

    /// Batches from the one that holds `offset` on, and the offset after them.
    fn fetch(&self, offset: u64, bounds: Bounds) -> (Vec<pb::StoredBatch>, u64) {
        let batch_records = u64::from(self.batches[0].record_count);
        let mut number = offset / batch_records;
        let (mut records, mut bytes) = (0, 0);
        let mut found = Vec::with_capacity(1);
        loop {
            let place = number % self.batches.len() as u64;
            let batch = &self.batches[usize::try_from(place).expect("below a length")];
            let first_offset = number * batch_records;
            let is_full = records >= bounds.records
                || bytes + batch.payload.len() as u64 > bounds.bytes && !found.is_empty();
            if is_full || offset.max(first_offset) >= bounds.until {
                return (found, offset.max(first_offset).min(bounds.until.max(offset)));
            }
            // The first one counts from the asked offset on, as in the server.
            records += first_offset + batch_records - offset.max(first_offset);
            bytes += batch.payload.len() as u64;
            found.push(pb::StoredBatch {
                first_offset,
                append_time: Some(prost_types::Timestamp { seconds: 1_700_000_000, nanos: 1_000 }),
                offset_deltas: Vec::new(),
                batch: Some(batch.clone()),
            });
            number += 1;
        }
    }

    fn read(
        &self,
        start: pb::PartitionStart,
        mut bounds: Bounds,
    ) -> Result<pb::PartitionRecords, Status> {
        let offset = resolve(start.start.as_ref())?;
        bounds.until = bounds.until.min(start.until_offset.unwrap_or(RECORDS));
        let (batches, next_offset) = self.fetch(offset, bounds);
        Ok(pb::PartitionRecords {
            topic: start.topic,
            partition: start.partition,
            records: Vec::new(),
            batches,
            next_offset,
            watermarks: Some(WATERMARKS),
            start_offset: offset,
        })
    }

    fn partitions(&self, topic: &str) -> u32 {
        let topics = self.topics.lock().unwrap_or_else(PoisonError::into_inner);
        topics.get(topic).copied().unwrap_or(PARTITIONS_DEFAULT)
    }

    fn leader(&self) -> pb::LeaderHint {
        pb::LeaderHint { node_id: NODE_ID, endpoint: self.endpoint.clone(), term: 1 }
    }

    fn topic(&self, name: String) -> pb::Topic {
        let partitions = (0..self.partitions(&name)).map(|partition| pb::PartitionInfo {
            partition,
            leader: Some(self.leader()),
            replicas: vec![NODE_ID],
            watermarks: Some(WATERMARKS),
            shard_id: 1,
            ..pb::PartitionInfo::default()
        });
        pb::Topic {
            partitions: partitions.collect(),
            name,
            replication_factor: 1,
            config: Some(pb::TopicConfig {
                default_durability: pb::Durability::None.into(),
                ..pb::TopicConfig::default()
            }),
        }
    }
}

const WATERMARKS: Watermarks = Watermarks { log_start_offset: 0, high_watermark: RECORDS };

/// How much one answer may hold.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    records: u64,
    bytes: u64,
    until: u64,
}

impl Bounds {
    fn new(limits: Option<&pb::ReadLimits>) -> Self {
        let records = limits.and_then(|limits| limits.max_records).unwrap_or(u64::MAX);
        let bytes = limits.and_then(|limits| limits.max_bytes).unwrap_or(FETCH_BYTES_DEFAULT);
        Self { records, bytes: bytes.min(FETCH_BYTES_MAX), until: RECORDS }
    }
}

fn resolve(start: Option<&pb::StartPosition>) -> Result<u64, Status> {
    use pb::start_position::Position;
    match start.and_then(|start| start.position.as_ref()) {
        Some(Position::Offset(offset)) => Ok((*offset).min(RECORDS)),
        Some(Position::Named(named)) => match pb::NamedPosition::try_from(*named) {
            Ok(pb::NamedPosition::Earliest) => Ok(0),
            Ok(pb::NamedPosition::Latest) => Ok(RECORDS),
            _ => Err(refuse(ErrorReason::InvalidArgument, "no position")),
        },
        _ => Err(refuse(ErrorReason::Unimplemented, "the ceiling knows offsets only")),
    }
}

/// What a server has to look at before it may store a batch. Gives the number of records.
fn check(batch: Option<&pb::Batch>) -> Result<u32, Status> {
    use pb::batch::Form;
    let Some(Form::Encoded(batch)) = batch.and_then(|batch| batch.form.as_ref()) else {
        return Err(refuse(ErrorReason::Unimplemented, "the ceiling takes encoded batches only"));
    };
    if !batch::is_intact(batch) {
        return Err(refuse(ErrorReason::CorruptBatch, "checksum mismatch"));
    }
    batch::scan(&batch.payload, batch.record_count, RECORD_BYTES_MAX)
        .map_err(|error| refuse(ErrorReason::RecordCountMismatch, &error.to_string()))?;
    Ok(batch.record_count)
}

fn refuse(reason: ErrorReason, message: &str) -> Status {
    wire::to_status(&wire::detail(reason), message, None)
}

fn no_such_call<T>() -> Result<T, Status> {
    Err(refuse(ErrorReason::Unimplemented, "the ceiling has no such call"))
}

#[tonic::async_trait]
impl ProduceService for Ceiling {
    async fn init_producer(
        &self,
        _request: Request<pb::InitProducerRequest>,
    ) -> Result<Response<pb::InitProducerResponse>, Status> {
        let producer = Some(pb::ProducerIdentity { producer_id: 1, epoch: 1 });
        Ok(Response::new(pb::InitProducerResponse { producer }))
    }

    async fn append(
        &self,
        request: Request<pb::AppendRequest>,
    ) -> Result<Response<pb::AppendResponse>, Status> {
        let request = request.into_inner();
        let records = check(request.batch.as_ref())?;
        let ack = Some(self.0.ack(request.partition, records));
        Ok(Response::new(pb::AppendResponse { ack, watermarks: Some(WATERMARKS) }))
    }

    type AppendStreamStream = Acks;

    async fn append_stream(
        &self,
        request: Request<Streaming<pb::AppendStreamRequest>>,
    ) -> Result<Response<Acks>, Status> {
        let acks = Acks { state: self.0.clone(), batches: request.into_inner(), partition: None };
        Ok(Response::new(acks))
    }
}

/// Answers of one append stream: all acks that are due when the transport asks go in one message.
#[derive(Debug)]
struct Acks {
    state: Arc<State>,
    batches: Streaming<pb::AppendStreamRequest>,
    /// None before the first message.
    partition: Option<u32>,
}

impl Stream for Acks {
    type Item = Result<pb::AppendStreamResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut acks = Vec::new();
        loop {
            let message = match Pin::new(&mut self.batches).poll_next(context) {
                Poll::Ready(Some(Ok(request))) => request.message,
                Poll::Ready(Some(Err(status))) => return Poll::Ready(Some(Err(status))),
                // The end is asked for again once these acks are out.
                Poll::Ready(None) | Poll::Pending if !acks.is_empty() => {
                    return Poll::Ready(Some(Ok(acked(acks))));
                }
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            };
            match (message, self.partition) {
                (Some(StreamRequest::Init(init)), None) => {
                    self.partition = Some(init.partition);
                    return Poll::Ready(Some(Ok(opened())));
                }
                (Some(StreamRequest::Batch(batch)), Some(partition)) => {
                    match check(batch.batch.as_ref()) {
                        Ok(records) => acks.push(self.state.ack(partition, records)),
                        Err(status) => return Poll::Ready(Some(Err(status))),
                    }
                    if acks.len() == STREAM_BATCHES_IN_FLIGHT_MAX as usize {
                        return Poll::Ready(Some(Ok(acked(acks))));
                    }
                }
                _ => {
                    let status = refuse(ErrorReason::InvalidArgument, "message out of turn");
                    return Poll::Ready(Some(Err(status)));
                }
            }
        }
    }
}

fn opened() -> pb::AppendStreamResponse {
    let opened = pb::AppendStreamOpened {
        watermarks: Some(WATERMARKS),
        max_batch_bytes: BATCH_BYTES_MAX,
        next_sequence: None,
        max_in_flight_batches: STREAM_BATCHES_IN_FLIGHT_MAX,
        max_in_flight_bytes: STREAM_BYTES_IN_FLIGHT_MAX,
    };
    pb::AppendStreamResponse { message: Some(StreamAnswer::Opened(opened)) }
}

fn acked(acks: Vec<pb::AppendAck>) -> pb::AppendStreamResponse {
    let acks = pb::AppendAcks { acks, watermarks: Some(WATERMARKS) };
    pb::AppendStreamResponse { message: Some(StreamAnswer::Acks(acks)) }
}

#[tonic::async_trait]
impl ConsumeService for Ceiling {
    async fn fetch(
        &self,
        request: Request<pb::FetchRequest>,
    ) -> Result<Response<pb::FetchResponse>, Status> {
        let request = request.into_inner();
        let bounds = Bounds::new(request.limits.as_ref());
        let reads = request.partitions.into_iter().map(|start| self.0.read(start, bounds));
        let partitions = reads.collect::<Result<_, _>>()?;
        Ok(Response::new(pb::FetchResponse { partitions }))
    }

    type SubscribeStream = Deliveries;

    async fn subscribe(
        &self,
        request: Request<pb::SubscribeRequest>,
    ) -> Result<Response<Deliveries>, Status> {
        let request = request.into_inner();
        let bytes = Bounds::new(None).bytes;
        let most = Bounds::new(request.limits.as_ref()).records;
        let partitions = request.partitions;
        Ok(Response::new(Deliveries { state: self.0.clone(), partitions, bytes, most, turn: 0 }))
    }

    async fn resolve_offsets(
        &self,
        request: Request<pb::ResolveOffsetsRequest>,
    ) -> Result<Response<pb::ResolveOffsetsResponse>, Status> {
        let request = request.into_inner();
        let offset = resolve(request.position.as_ref())?;
        let partitions = match request.partitions {
            empty if empty.is_empty() => (0..self.0.partitions(&request.topic)).collect(),
            asked => asked,
        };
        let offsets = partitions
            .into_iter()
            .map(|partition| pb::ResolvedOffset { partition, offset, watermarks: Some(WATERMARKS) })
            .collect();
        Ok(Response::new(pb::ResolveOffsetsResponse { offsets }))
    }
}

/// One subscription: its partitions in turn, as fast as the reader takes them.
#[derive(Debug)]
struct Deliveries {
    state: Arc<State>,
    /// Those that have not reached their ends.
    partitions: Vec<pb::PartitionStart>,
    bytes: u64,
    /// Records still to be delivered.
    most: u64,
    turn: usize,
}

impl Stream for Deliveries {
    type Item = Result<pb::SubscribeResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.partitions.is_empty() || self.most == 0 {
            return Poll::Ready(None);
        }
        let turn = self.turn % self.partitions.len();
        let start = self.partitions[turn].clone();
        let until = start.until_offset.unwrap_or(RECORDS);
        let bounds = Bounds { records: self.most, bytes: self.bytes, until: RECORDS };
        let data = match self.state.read(start, bounds) {
            Ok(data) => data,
            Err(status) => return Poll::Ready(Some(Err(status))),
        };
        self.most = self.most.saturating_sub(data.next_offset - data.start_offset);
        if data.next_offset >= until {
            self.partitions.swap_remove(turn);
        } else {
            let next = pb::start_position::Position::Offset(data.next_offset);
            self.partitions[turn].start = Some(pb::StartPosition { position: Some(next) });
        }
        self.turn += 1;
        let message = Some(pb::subscribe_response::Message::Data(data));
        Poll::Ready(Some(Ok(pb::SubscribeResponse { message })))
    }
}

#[tonic::async_trait]
impl TopicService for Ceiling {
    async fn create_topic(
        &self,
        request: Request<pb::CreateTopicRequest>,
    ) -> Result<Response<pb::CreateTopicResponse>, Status> {
        let request = request.into_inner();
        let mut topics = self.0.topics.lock().unwrap_or_else(PoisonError::into_inner);
        topics.insert(request.name.clone(), request.partition_count);
        drop(topics);
        let topic = Some(self.0.topic(request.name));
        Ok(Response::new(pb::CreateTopicResponse { topic }))
    }

    async fn get_topic(
        &self,
        request: Request<pb::GetTopicRequest>,
    ) -> Result<Response<pb::GetTopicResponse>, Status> {
        let topic = Some(self.0.topic(request.into_inner().name));
        Ok(Response::new(pb::GetTopicResponse { topic }))
    }

    async fn list_topics(
        &self,
        _: Request<pb::ListTopicsRequest>,
    ) -> Result<Response<pb::ListTopicsResponse>, Status> {
        no_such_call()
    }

    async fn update_topic(
        &self,
        _: Request<pb::UpdateTopicRequest>,
    ) -> Result<Response<pb::UpdateTopicResponse>, Status> {
        no_such_call()
    }

    async fn add_partitions(
        &self,
        _: Request<pb::AddPartitionsRequest>,
    ) -> Result<Response<pb::AddPartitionsResponse>, Status> {
        no_such_call()
    }

    async fn delete_topic(
        &self,
        _: Request<pb::DeleteTopicRequest>,
    ) -> Result<Response<pb::DeleteTopicResponse>, Status> {
        no_such_call()
    }

    async fn trim_partition(
        &self,
        _: Request<pb::TrimPartitionRequest>,
    ) -> Result<Response<pb::TrimPartitionResponse>, Status> {
        no_such_call()
    }

    async fn set_fencing_token(
        &self,
        _: Request<pb::SetFencingTokenRequest>,
    ) -> Result<Response<pb::SetFencingTokenResponse>, Status> {
        no_such_call()
    }
}

/// A stream that nobody gets.
type Never<T> = tokio_stream::Empty<Result<T, Status>>;

#[tonic::async_trait]
impl ClusterService for Ceiling {
    async fn get_metadata(
        &self,
        request: Request<pb::GetMetadataRequest>,
    ) -> Result<Response<pb::GetMetadataResponse>, Status> {
        let state = &self.0;
        let topics = request.into_inner().topics.into_iter().map(|topic| pb::TopicRoute {
            shard_ids: vec![1; state.partitions(&topic) as usize],
            topic,
        });
        let metadata = pb::Metadata {
            cluster_id: "ceiling".to_owned(),
            version: 1,
            nodes: vec![pb::Node {
                node_id: NODE_ID,
                endpoint: state.endpoint.clone(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                ..pb::Node::default()
            }],
            shards: vec![pb::ShardRoute {
                shard_id: 1,
                leader: Some(state.leader()),
                replicas: vec![NODE_ID],
                ..pb::ShardRoute::default()
            }],
            topics: topics.collect(),
        };
        Ok(Response::new(pb::GetMetadataResponse { metadata: Some(metadata) }))
    }

    async fn get_node_status(
        &self,
        _: Request<pb::GetNodeStatusRequest>,
    ) -> Result<Response<pb::GetNodeStatusResponse>, Status> {
        let cpu_time_us = u64::try_from(process_cpu_time().as_micros()).unwrap_or(u64::MAX);
        Ok(Response::new(pb::GetNodeStatusResponse {
            node_id: NODE_ID,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            storage: "none".to_owned(),
            durability: "nothing is stored".to_owned(),
            cpu_time_us,
            uptime: self.0.started.elapsed().try_into().ok(),
            ..pb::GetNodeStatusResponse::default()
        }))
    }

    type WatchMetadataStream = Never<pb::WatchMetadataResponse>;

    async fn watch_metadata(
        &self,
        _: Request<pb::WatchMetadataRequest>,
    ) -> Result<Response<Self::WatchMetadataStream>, Status> {
        no_such_call()
    }

    async fn get_health(
        &self,
        _: Request<pb::GetHealthRequest>,
    ) -> Result<Response<pb::GetHealthResponse>, Status> {
        no_such_call()
    }

    async fn add_node(
        &self,
        _: Request<pb::AddNodeRequest>,
    ) -> Result<Response<pb::AddNodeResponse>, Status> {
        no_such_call()
    }

    async fn remove_node(
        &self,
        _: Request<pb::RemoveNodeRequest>,
    ) -> Result<Response<pb::RemoveNodeResponse>, Status> {
        no_such_call()
    }

    async fn replace_node(
        &self,
        _: Request<pb::ReplaceNodeRequest>,
    ) -> Result<Response<pb::ReplaceNodeResponse>, Status> {
        no_such_call()
    }

    type WatchMembershipChangeStream = Never<pb::WatchMembershipChangeResponse>;

    async fn watch_membership_change(
        &self,
        _: Request<pb::WatchMembershipChangeRequest>,
    ) -> Result<Response<Self::WatchMembershipChangeStream>, Status> {
        no_such_call()
    }

    async fn set_draining(
        &self,
        _: Request<pb::SetDrainingRequest>,
    ) -> Result<Response<pb::SetDrainingResponse>, Status> {
        no_such_call()
    }

    async fn balance_leaders(
        &self,
        _: Request<pb::BalanceLeadersRequest>,
    ) -> Result<Response<pb::BalanceLeadersResponse>, Status> {
        no_such_call()
    }

    async fn transfer_leader(
        &self,
        _: Request<pb::TransferLeaderRequest>,
    ) -> Result<Response<pb::TransferLeaderResponse>, Status> {
        no_such_call()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Payload;
    use crate::payload::Pool;

    fn state() -> State {
        let batches = Pool::new(Payload::Zero, 10, 100, 1).into_batches();
        State::new(([127, 0, 0, 1], 1).into(), batches)
    }

    fn bounds(records: u64) -> Bounds {
        Bounds { records, bytes: FETCH_BYTES_DEFAULT, until: RECORDS }
    }

    #[test]
    fn a_fetch_gives_whole_batches_that_hold_the_offset() {
        let state = state();
        let (batches, next) = state.fetch(200, bounds(100));
        assert_eq!((batches.len(), batches[0].first_offset, next), (1, 200, 300));
        let (batches, next) = state.fetch(250, bounds(100));
        assert_eq!((batches.len(), batches[0].first_offset, next), (2, 200, 400));
        let (batches, next) = state.fetch(0, Bounds { bytes: 1, ..bounds(1000) });
        assert_eq!((batches.len(), next), (1, 100));
        let (batches, next) = state.fetch(200, Bounds { until: 250, ..bounds(1000) });
        assert_eq!((batches.len(), next), (1, 250));
        let (batches, next) = state.fetch(RECORDS, bounds(1));
        assert_eq!((batches.len(), next), (0, RECORDS));
    }

    #[test]
    fn acks_count_per_partition() {
        let state = state();
        assert_eq!(state.ack(3, 100).first_offset, Some(0));
        assert_eq!(state.ack(3, 100).first_offset, Some(100));
        assert_eq!(state.ack(4, 100).first_offset, Some(0));
    }

    #[test]
    fn a_damaged_batch_is_refused() {
        let mut batch = state().batches[0].clone();
        let form = |batch| pb::Batch { form: Some(pb::batch::Form::Encoded(batch)) };
        assert_eq!(check(Some(&form(batch.clone()))).unwrap(), 100);
        batch.crc32 ^= 1;
        assert!(check(Some(&form(batch))).is_err());
        assert!(check(None).is_err());
    }
}
