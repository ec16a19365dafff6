//! Public API without storage: decodes, makes the checks that a server must make, and answers.
//!
//! Any server with this API pays at least this cost, so its throughput is the ceiling.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use helix_proto::log::v1 as pb;
use helix_proto::log::v1::append_stream_request::Message as StreamRequest;
use helix_proto::log::v1::append_stream_response::Message as StreamResponse;
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::cluster_service_server::{ClusterService, ClusterServiceServer};
use helix_proto::log::v1::consume_service_server::{ConsumeService, ConsumeServiceServer};
use helix_proto::log::v1::produce_service_server::{ProduceService, ProduceServiceServer};
use helix_proto::log::v1::topic_service_server::{TopicService, TopicServiceServer};
use helix_proto::log::v1::{EncodedBatch, ErrorReason};
use helix_transport::{MessageStream, RequestLayer};
use tokio::net::TcpListener;
use tokio_stream::Stream;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use super::fan_out::{LivePartition, LiveStream, PushOutcome, UnsentBatch};
use super::state::{
    CeilingState, FetchBounds, NODE_ID, RECORDS, WATERMARKS, check, error_status, is_at_end,
    resolve, unimplemented_call,
};
use crate::host::process_cpu_time;

/// Same values as in the server's `limits.rs`, which documents the reasons.
const MESSAGE_BYTES_MAX: usize = 16 << 20;
const BATCH_BYTES_MAX: u32 = 3 << 20;
const STREAM_BATCHES_IN_FLIGHT_MAX: u32 = 64;
const STREAM_BYTES_IN_FLIGHT_MAX: u64 = 8 << 20;
const STREAMS_PER_CONNECTION_MAX: u32 = 1024;
const STREAM_WINDOW_BYTES: u32 = 8 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 32 << 20;
const FRAME_BYTES: u32 = 256 << 10;

/// Serves until the process ends.
///
/// # Errors
/// The listener failed.
pub(crate) async fn serve(
    listener: TcpListener,
    batches: Vec<EncodedBatch>,
) -> Result<(), tonic::transport::Error> {
    let address = listener.local_addr().expect("the listener is bound");
    let ceiling = CeilingService(Arc::new(CeilingState::new(address, batches)));
    Server::builder()
        .tcp_nodelay(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .max_concurrent_streams(STREAMS_PER_CONNECTION_MAX)
        .add_service(RequestLayer(
            ProduceServiceServer::new(ceiling.clone())
                .max_decoding_message_size(MESSAGE_BYTES_MAX)
                .max_encoding_message_size(MESSAGE_BYTES_MAX),
        ))
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
struct CeilingService(Arc<CeilingState>);

#[tonic::async_trait]
impl ProduceService for CeilingService {
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
        let request = helix_transport::read_unary(request, MESSAGE_BYTES_MAX).await?;
        let records = check(request.batch.as_ref())?;
        let ack = Some(self.0.ack(request.partition, records));
        let watermarks = Some(WATERMARKS);
        Ok(Response::new(pb::AppendResponse { ack, watermarks, ..Default::default() }))
    }

    type AppendStreamStream = AckStream;

    async fn append_stream(
        &self,
        request: Request<Streaming<pb::AppendStreamRequest>>,
    ) -> Result<Response<AckStream>, Status> {
        let batches = helix_transport::read_messages(&request, MESSAGE_BYTES_MAX);
        let (state, partition) = (self.0.clone(), None);
        let acks = AckStream { state, batches, partition, live: None, unsent: None };
        Ok(Response::new(acks))
    }
}

/// Responses of one append stream. All acks that are ready when polled share one message.
struct AckStream {
    state: Arc<CeilingState>,
    batches: MessageStream<pb::AppendStreamRequest>,
    /// `None` before the first message.
    partition: Option<u32>,
    /// Set at the first message if the partition had been subscribed to at its end.
    live: Option<Arc<LivePartition>>,
    /// Batch that waits for a subscription.
    unsent: Option<UnsentBatch>,
}

impl AckStream {
    /// Passes a checked batch on to the subscriptions. Returns its ack, unless one of them has no
    /// capacity.
    fn pass_on(&mut self, batch: EncodedBatch) -> Option<pb::AppendAck> {
        let outcome = self.live.as_ref()?.push(batch);
        match outcome {
            PushOutcome::Acked(ack) => Some(ack),
            PushOutcome::Full(unsent) => {
                self.unsent = Some(unsent);
                None
            }
        }
    }

    /// Passes the batch on that waits, once the subscription has capacity.
    fn poll_unsent(&mut self, context: &mut Context<'_>) -> Poll<Option<pb::AppendAck>> {
        if let Some(unsent) = &mut self.unsent {
            ready!(unsent.poll_capacity(context));
        }
        let batch = self.unsent.take().map(|unsent| unsent.batch);
        Poll::Ready(batch.and_then(|batch| self.pass_on(batch)))
    }
}

impl Stream for AckStream {
    type Item = Result<pb::AppendStreamResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut acks = Vec::new();
        loop {
            if acks.len() == STREAM_BATCHES_IN_FLIGHT_MAX as usize {
                return Poll::Ready(Some(Ok(acked(acks))));
            }
            if self.unsent.is_some() {
                match self.poll_unsent(context) {
                    Poll::Ready(ack) => acks.extend(ack),
                    Poll::Pending if acks.is_empty() => return Poll::Pending,
                    Poll::Pending => return Poll::Ready(Some(Ok(acked(acks)))),
                }
                continue;
            }
            let message = match self.batches.poll_message(context) {
                Poll::Ready(Ok(Some(request))) => request.message,
                Poll::Ready(Err(status)) => return Poll::Ready(Some(Err(status))),
                // The end is polled again after these acks are sent.
                Poll::Ready(Ok(None)) | Poll::Pending if !acks.is_empty() => {
                    return Poll::Ready(Some(Ok(acked(acks))));
                }
                Poll::Ready(Ok(None)) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            };
            match (message, self.partition) {
                (Some(StreamRequest::Init(init)), None) => {
                    self.partition = Some(init.partition);
                    self.live = self.state.live.find(&init.topic, init.partition);
                    return Poll::Ready(Some(Ok(opened())));
                }
                (Some(StreamRequest::Batch(batch)), Some(partition)) => {
                    let records = match check(batch.batch.as_ref()) {
                        Ok(records) => records,
                        Err(status) => return Poll::Ready(Some(Err(status))),
                    };
                    match batch.batch.and_then(|batch| batch.form) {
                        Some(Form::Encoded(batch)) if self.live.is_some() => {
                            acks.extend(self.pass_on(batch));
                        }
                        _ => acks.push(self.state.ack(partition, records)),
                    }
                }
                _ => {
                    let status = error_status(ErrorReason::InvalidArgument, "message out of turn");
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
        topic_id: 0,
    };
    pb::AppendStreamResponse { message: Some(StreamResponse::Opened(opened)) }
}

fn acked(acks: Vec<pb::AppendAck>) -> pb::AppendStreamResponse {
    let acks = pb::AppendAcks { acks, watermarks: Some(WATERMARKS) };
    pb::AppendStreamResponse { message: Some(StreamResponse::Acks(acks)) }
}

#[tonic::async_trait]
impl ConsumeService for CeilingService {
    async fn fetch(
        &self,
        request: Request<pb::FetchRequest>,
    ) -> Result<Response<pb::FetchResponse>, Status> {
        let request = request.into_inner();
        let bounds = FetchBounds::new(request.limits.as_ref());
        let reads = request.partitions.into_iter().map(|start| self.0.read(start, bounds));
        let partitions = reads.collect::<Result<_, _>>()?;
        Ok(Response::new(pb::FetchResponse { partitions }))
    }

    type SubscribeStream = SubscribedStream;

    async fn subscribe(
        &self,
        request: Request<pb::SubscribeRequest>,
    ) -> Result<Response<SubscribedStream>, Status> {
        let request = request.into_inner();
        if request.partitions.iter().all(is_at_end) {
            let live = self.0.live.subscribe(request.partitions);
            return Ok(Response::new(SubscribedStream::Live(live)));
        }
        let bytes = FetchBounds::new(None).bytes;
        let most = FetchBounds::new(request.limits.as_ref()).records;
        let partitions = request.partitions;
        let state = self.0.clone();
        let stream = DeliveryStream { state, partitions, bytes, most, turn: 0 };
        Ok(Response::new(SubscribedStream::Endless(stream)))
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
        let resolved = |partition| {
            let offset = match offset {
                RECORDS => self.0.live.end(&request.topic, partition),
                offset => offset,
            };
            let high_watermark = offset.max(RECORDS);
            let watermarks = Some(pb::Watermarks { high_watermark, ..WATERMARKS });
            pb::ResolvedOffset { partition, offset, watermarks }
        };
        let offsets = partitions.into_iter().map(resolved).collect();
        Ok(Response::new(pb::ResolveOffsetsResponse { offsets, topic_id: 0 }))
    }
}

/// One subscription: to records that appear to be there, or to what is published.
#[derive(Debug)]
enum SubscribedStream {
    Endless(DeliveryStream),
    Live(LiveStream),
}

impl Stream for SubscribedStream {
    type Item = Result<pb::SubscribeResponse, Status>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match self.get_mut() {
            Self::Endless(stream) => Pin::new(stream).poll_next(context),
            Self::Live(stream) => Pin::new(stream).poll_next(context),
        }
    }
}

/// Serves its partitions in turn, as fast as the reader accepts.
#[derive(Debug)]
struct DeliveryStream {
    state: Arc<CeilingState>,
    /// Partitions that have not reached their end.
    partitions: Vec<pb::PartitionStart>,
    bytes: u64,
    /// Records left to deliver.
    most: u64,
    turn: usize,
}

impl Stream for DeliveryStream {
    type Item = Result<pb::SubscribeResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.partitions.is_empty() || self.most == 0 {
            return Poll::Ready(None);
        }
        let turn = self.turn % self.partitions.len();
        let start = self.partitions[turn].clone();
        let until = start.until_offset.unwrap_or(RECORDS);
        let bounds = FetchBounds { records: self.most, bytes: self.bytes, until: RECORDS };
        let data = match self.state.read(start, bounds) {
            Ok(data) => data,
            Err(status) => return Poll::Ready(Some(Err(status))),
        };
        self.most = self.most.saturating_sub(data.next_offset - data.start_offset);
        if data.next_offset >= until {
            self.partitions.swap_remove(turn);
        } else {
            let next = pb::start_position::Position::Offset(data.next_offset);
            self.partitions[turn].start =
                Some(pb::StartPosition { position: Some(next), ..pb::StartPosition::default() });
        }
        self.turn += 1;
        let message = Some(pb::subscribe_response::Message::Data(data));
        Poll::Ready(Some(Ok(pb::SubscribeResponse { message })))
    }
}

#[tonic::async_trait]
impl TopicService for CeilingService {
    async fn create_topic(
        &self,
        request: Request<pb::CreateTopicRequest>,
    ) -> Result<Response<pb::CreateTopicResponse>, Status> {
        let request = request.into_inner();
        self.0.create(request.name.clone(), request.partition_count);
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
        unimplemented_call()
    }

    async fn update_topic(
        &self,
        _: Request<pb::UpdateTopicRequest>,
    ) -> Result<Response<pb::UpdateTopicResponse>, Status> {
        unimplemented_call()
    }

    async fn add_partitions(
        &self,
        _: Request<pb::AddPartitionsRequest>,
    ) -> Result<Response<pb::AddPartitionsResponse>, Status> {
        unimplemented_call()
    }

    async fn delete_topic(
        &self,
        _: Request<pb::DeleteTopicRequest>,
    ) -> Result<Response<pb::DeleteTopicResponse>, Status> {
        unimplemented_call()
    }

    async fn trim_partition(
        &self,
        _: Request<pb::TrimPartitionRequest>,
    ) -> Result<Response<pb::TrimPartitionResponse>, Status> {
        unimplemented_call()
    }

    async fn set_fencing_token(
        &self,
        _: Request<pb::SetFencingTokenRequest>,
    ) -> Result<Response<pb::SetFencingTokenResponse>, Status> {
        unimplemented_call()
    }
}

/// Response stream type of methods that are not implemented.
type EmptyStream<T> = tokio_stream::Empty<Result<T, Status>>;

#[tonic::async_trait]
impl ClusterService for CeilingService {
    async fn get_metadata(
        &self,
        request: Request<pb::GetMetadataRequest>,
    ) -> Result<Response<pb::GetMetadataResponse>, Status> {
        let state = &self.0;
        let topics = request.into_inner().topics.into_iter().map(|topic| pb::TopicRoute {
            shard_ids: vec![1; state.partitions(&topic) as usize],
            topic,
            topic_id: 0,
            ..pb::TopicRoute::default()
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
        let node_id = NODE_ID;
        Ok(Response::new(pb::GetMetadataResponse { metadata: Some(metadata), node_id }))
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

    type WatchMetadataStream = EmptyStream<pb::WatchMetadataResponse>;

    async fn watch_metadata(
        &self,
        _: Request<pb::WatchMetadataRequest>,
    ) -> Result<Response<Self::WatchMetadataStream>, Status> {
        unimplemented_call()
    }

    async fn get_health(
        &self,
        _: Request<pb::GetHealthRequest>,
    ) -> Result<Response<pb::GetHealthResponse>, Status> {
        unimplemented_call()
    }

    async fn list_slow_calls(
        &self,
        _: Request<pb::ListSlowCallsRequest>,
    ) -> Result<Response<pb::ListSlowCallsResponse>, Status> {
        unimplemented_call()
    }

    async fn add_node(
        &self,
        _: Request<pb::AddNodeRequest>,
    ) -> Result<Response<pb::AddNodeResponse>, Status> {
        unimplemented_call()
    }

    async fn remove_node(
        &self,
        _: Request<pb::RemoveNodeRequest>,
    ) -> Result<Response<pb::RemoveNodeResponse>, Status> {
        unimplemented_call()
    }

    async fn replace_node(
        &self,
        _: Request<pb::ReplaceNodeRequest>,
    ) -> Result<Response<pb::ReplaceNodeResponse>, Status> {
        unimplemented_call()
    }

    type WatchMembershipChangeStream = EmptyStream<pb::WatchMembershipChangeResponse>;

    async fn watch_membership_change(
        &self,
        _: Request<pb::WatchMembershipChangeRequest>,
    ) -> Result<Response<Self::WatchMembershipChangeStream>, Status> {
        unimplemented_call()
    }

    async fn set_draining(
        &self,
        _: Request<pb::SetDrainingRequest>,
    ) -> Result<Response<pb::SetDrainingResponse>, Status> {
        unimplemented_call()
    }

    async fn balance_leaders(
        &self,
        _: Request<pb::BalanceLeadersRequest>,
    ) -> Result<Response<pb::BalanceLeadersResponse>, Status> {
        unimplemented_call()
    }

    async fn transfer_leader(
        &self,
        _: Request<pb::TransferLeaderRequest>,
    ) -> Result<Response<pb::TransferLeaderResponse>, Status> {
        unimplemented_call()
    }

    async fn get_placement(
        &self,
        _: Request<pb::GetPlacementRequest>,
    ) -> Result<Response<pb::GetPlacementResponse>, Status> {
        unimplemented_call()
    }

    async fn set_cordoned(
        &self,
        _: Request<pb::SetCordonedRequest>,
    ) -> Result<Response<pb::SetCordonedResponse>, Status> {
        unimplemented_call()
    }

    async fn set_replicas(
        &self,
        _: Request<pb::SetReplicasRequest>,
    ) -> Result<Response<pb::SetReplicasResponse>, Status> {
        unimplemented_call()
    }

    async fn add_shards(
        &self,
        _: Request<pb::AddShardsRequest>,
    ) -> Result<Response<pb::AddShardsResponse>, Status> {
        unimplemented_call()
    }

    async fn move_shard(
        &self,
        _: Request<pb::MoveShardRequest>,
    ) -> Result<Response<pb::MoveShardResponse>, Status> {
        unimplemented_call()
    }

    async fn set_moves_paused(
        &self,
        _: Request<pb::SetMovesPausedRequest>,
    ) -> Result<Response<pb::SetMovesPausedResponse>, Status> {
        unimplemented_call()
    }

    async fn cancel_move(
        &self,
        _: Request<pb::CancelMoveRequest>,
    ) -> Result<Response<pb::CancelMoveResponse>, Status> {
        unimplemented_call()
    }
}
