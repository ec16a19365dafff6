//! The gRPC services of one in-memory node, over the state that all nodes share.
//!
//! Calls that no test uses return UNIMPLEMENTED.

use std::pin::Pin;
use std::time::Duration;

use helix_client::proto::log::v1::append_stream_request::Message as StreamRequest;
use helix_client::proto::log::v1::append_stream_response::Message as StreamResponse;
use helix_client::proto::log::v1::cluster_service_server::ClusterService;
use helix_client::proto::log::v1::consume_service_server::ConsumeService;
use helix_client::proto::log::v1::produce_service_server::ProduceService;
use helix_client::proto::log::v1::start_position::Position;
use helix_client::proto::log::v1::subscribe_response::Message as SubscribeMessage;
use helix_client::proto::log::v1::{Node as RegisteredNode, *};
use rand::RngExt;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

use super::{Delivery, FakeNode, SHARD, State, TOPIC, broken, rejection};

type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl ProduceService for FakeNode {
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
        let AppendRequest {
            partition, batch, producer, first_sequence, durability, topic_id, ..
        } = request.into_inner();
        let current_id = self.current_topic(topic_id)?;
        match self.append(partition, batch, producer, first_sequence, durability)? {
            Some(ack) => {
                let topic_id = current_id;
                Ok(Response::new(AppendResponse { ack: Some(ack), topic_id, ..Default::default() }))
            }
            None => Err(self.wait_until_reelected().await),
        }
    }

    type AppendStreamStream = ResponseStream<AppendStreamResponse>;

    async fn append_stream(
        &self,
        request: Request<Streaming<AppendStreamRequest>>,
    ) -> Result<Response<Self::AppendStreamStream>, Status> {
        let mut requests = request.into_inner();
        let first = requests.message().await?.and_then(|first| first.message);
        let Some(StreamRequest::Init(init)) = first else { panic!("began with {first:?}") };
        let topic_id = self.current_topic(init.topic_id)?;
        let opened = {
            let (state, _) = self.check_and_draw_fault()?;
            let key = init.producer.map(|producer| (producer.producer_id, producer.epoch));
            let known = key.and_then(|key| state.logs[&init.partition].producers.get(&key));
            AppendStreamOpened {
                next_sequence: known.map(|(next, _)| *next),
                max_batch_bytes: 1 << 20,
                max_in_flight_batches: 8,
                max_in_flight_bytes: 1 << 20,
                watermarks: None,
                topic_id,
            }
        };
        let (sender, responses) = mpsc::channel(64);
        let response = |message| Ok(AppendStreamResponse { message: Some(message) });
        sender.send(response(StreamResponse::Opened(opened))).await.unwrap();
        let node = self.clone();
        tokio::spawn(async move {
            while let Ok(Some(request)) = requests.message().await {
                let Some(StreamRequest::Batch(batch)) = request.message else { panic!("no batch") };
                let AppendStreamBatch { batch, first_sequence, .. } = batch;
                let AppendStreamInit { partition, producer, durability, .. } = init;
                let appended = node.current_topic(topic_id).and_then(|_| {
                    node.append(partition, batch, producer, first_sequence, durability)
                });
                let is_end = !matches!(appended, Ok(Some(_)));
                let message = match appended {
                    // Later batches get no response either.
                    Ok(None) => Err(node.wait_until_reelected().await),
                    Ok(Some(ack)) => response(StreamResponse::Acks(AppendAcks {
                        acks: vec![ack],
                        watermarks: None,
                    })),
                    Err(status) => Err(status),
                };
                if sender.send(message).await.is_err() || is_end {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(responses))))
    }
}

#[tonic::async_trait]
impl ConsumeService for FakeNode {
    async fn fetch(
        &self,
        request: Request<FetchRequest>,
    ) -> Result<Response<FetchResponse>, Status> {
        let FetchRequest { partitions: starts, source, .. } = request.into_inner();
        let read = |start| self.read(start, source);
        let partitions = starts.iter().map(read).collect::<Result<_, _>>()?;
        Ok(Response::new(FetchResponse { partitions }))
    }

    type SubscribeStream = ResponseStream<SubscribeResponse>;

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
        let (sender, responses) = mpsc::channel(1);
        let node = self.clone();
        let SubscribeRequest { partitions: mut starts, source, .. } = request.into_inner();
        for start in &mut starts {
            // An open subscription stays with its topic.
            start.topic_id = self.current_topic(start.topic_id)?;
        }
        tokio::spawn(async move { node.push(starts, source, sender).await });
        let responses = ReceiverStream::new(responses)
            .map(|message| message.map(|message| SubscribeResponse { message: Some(message) }));
        Ok(Response::new(Box::pin(responses)))
    }

    async fn resolve_offsets(
        &self,
        _: Request<ResolveOffsetsRequest>,
    ) -> Result<Response<ResolveOffsetsResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }
}

impl FakeNode {
    /// Checks the expected id of the topic; returns its id.
    fn current_topic(&self, expected_id: u64) -> Result<u64, Status> {
        let state = self.cluster.state();
        state.check_topic(expected_id)?;
        Ok(state.topic_id)
    }

    fn metadata(&self, state: &State) -> Metadata {
        let node = |(endpoint, node_id): (&String, u64)| RegisteredNode {
            node_id,
            endpoint: endpoint.clone(),
            ..RegisteredNode::default()
        };
        let topic = TopicRoute {
            topic: TOPIC.to_owned(),
            shard_ids: vec![SHARD; state.partition_count as usize],
            topic_id: state.topic_id,
            batch_format: state.batch_format.into(),
        };
        Metadata {
            cluster_id: state.cluster_id.clone(),
            version: state.views[self.id].version,
            nodes: state.addresses.iter().zip(1..).map(node).collect(),
            shards: vec![ShardRoute {
                shard_id: SHARD,
                leader: state.hint(self.id),
                replicas: vec![1, 2, 3],
                ..ShardRoute::default()
            }],
            topics: if state.lacks_topics[self.id] { Vec::new() } else { vec![topic] },
        }
    }

    fn read(&self, start: &PartitionStart, source: i32) -> Result<PartitionRecords, Status> {
        let (mut state, delivery) = if source == i32::from(ReadSource::AnyReplica) {
            (self.cluster.state(), Delivery::Arrives)
        } else {
            self.check_and_draw_fault()?
        };
        if delivery == Delivery::Lost {
            return Err(broken());
        }
        state.check_topic(start.topic_id)?;
        if start.partition >= state.partition_count {
            return Err(rejection(ErrorReason::PartitionNotFound));
        }
        let batches_max = state.rng.random_range(1..4);
        let log = &state.logs[&start.partition];
        let end =
            state.partitioned_ends[self.id].as_ref().map_or(log.end, |ends| ends[&start.partition]);
        let position = start.start.as_ref().and_then(|start| start.position.as_ref());
        let from = match position {
            Some(Position::Offset(offset)) => *offset,
            Some(Position::Named(named)) if *named == NamedPosition::Latest as i32 => end,
            Some(Position::Named(_)) => 0,
            Some(Position::TailRecords(records)) => end.saturating_sub(*records),
            other => panic!("not a position that the tests use: {other:?}"),
        };
        if from > end {
            return Err(rejection(ErrorReason::OffsetOutOfRange));
        }
        let end_of = |(first, batch): &(u64, EncodedBatch)| first + u64::from(batch.record_count);
        let until = start.until_offset.unwrap_or(u64::MAX);
        let batches: Vec<_> = log
            .batches
            .iter()
            .filter(|stored| end_of(stored) > from && stored.0 < until && end_of(stored) <= end)
            .take(batches_max)
            .collect();
        Ok(PartitionRecords {
            topic: start.topic.clone(),
            partition: start.partition,
            records: Vec::new(),
            next_offset: batches.last().map_or(from, |last| end_of(last).min(until)),
            batches: batches
                .into_iter()
                .map(|(first_offset, batch)| StoredBatch {
                    first_offset: *first_offset,
                    append_time: None,
                    offset_deltas: Vec::new(),
                    batch: Some(batch.clone()),
                })
                .collect(),
            watermarks: Some(Watermarks { log_start_offset: 0, high_watermark: end }),
            start_offset: from,
            topic_id: state.topic_id,
        })
    }

    /// Sends the existing records of each partition, then waits for more.
    async fn push(
        &self,
        mut starts: Vec<PartitionStart>,
        source: i32,
        sender: mpsc::Sender<Result<SubscribeMessage, Status>>,
    ) {
        let mut appended = self.cluster.appended.subscribe();
        loop {
            let mut is_idle = true;
            for start in &mut starts {
                let records = match self.read(start, source) {
                    Ok(records) => records,
                    Err(status) => {
                        let _ = sender.send(Err(status)).await;
                        return;
                    }
                };
                let position = Position::Offset(records.next_offset);
                start.start =
                    Some(StartPosition { position: Some(position), ..StartPosition::default() });
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
impl ClusterService for FakeNode {
    async fn get_metadata(
        &self,
        _: Request<GetMetadataRequest>,
    ) -> Result<Response<GetMetadataResponse>, Status> {
        let mut state = self.cluster.state();
        state.metadata_requests[self.id] += 1;
        let metadata = self.metadata(&state);
        let node_id = self.id as u64 + 1;
        Ok(Response::new(GetMetadataResponse { metadata: Some(metadata), node_id }))
    }

    type WatchMetadataStream = ResponseStream<WatchMetadataResponse>;

    async fn watch_metadata(
        &self,
        _: Request<WatchMetadataRequest>,
    ) -> Result<Response<Self::WatchMetadataStream>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn get_health(
        &self,
        _: Request<GetHealthRequest>,
    ) -> Result<Response<GetHealthResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn get_node_status(
        &self,
        _: Request<GetNodeStatusRequest>,
    ) -> Result<Response<GetNodeStatusResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn list_slow_calls(
        &self,
        _: Request<ListSlowCallsRequest>,
    ) -> Result<Response<ListSlowCallsResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn add_node(
        &self,
        _: Request<AddNodeRequest>,
    ) -> Result<Response<AddNodeResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn remove_node(
        &self,
        _: Request<RemoveNodeRequest>,
    ) -> Result<Response<RemoveNodeResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn replace_node(
        &self,
        _: Request<ReplaceNodeRequest>,
    ) -> Result<Response<ReplaceNodeResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    type WatchMembershipChangeStream = ResponseStream<WatchMembershipChangeResponse>;

    async fn watch_membership_change(
        &self,
        _: Request<WatchMembershipChangeRequest>,
    ) -> Result<Response<Self::WatchMembershipChangeStream>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn set_draining(
        &self,
        _: Request<SetDrainingRequest>,
    ) -> Result<Response<SetDrainingResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn balance_leaders(
        &self,
        _: Request<BalanceLeadersRequest>,
    ) -> Result<Response<BalanceLeadersResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn transfer_leader(
        &self,
        _: Request<TransferLeaderRequest>,
    ) -> Result<Response<TransferLeaderResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn get_placement(
        &self,
        _: Request<GetPlacementRequest>,
    ) -> Result<Response<GetPlacementResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn set_cordoned(
        &self,
        _: Request<SetCordonedRequest>,
    ) -> Result<Response<SetCordonedResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn set_replicas(
        &self,
        _: Request<SetReplicasRequest>,
    ) -> Result<Response<SetReplicasResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn add_shards(
        &self,
        _: Request<AddShardsRequest>,
    ) -> Result<Response<AddShardsResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn move_shard(
        &self,
        _: Request<MoveShardRequest>,
    ) -> Result<Response<MoveShardResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn set_moves_paused(
        &self,
        _: Request<SetMovesPausedRequest>,
    ) -> Result<Response<SetMovesPausedResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn cancel_move(
        &self,
        _: Request<CancelMoveRequest>,
    ) -> Result<Response<CancelMoveResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }
}
