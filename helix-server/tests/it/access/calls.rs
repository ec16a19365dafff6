//! A valid request of each method, with the rules that it needs.

use std::time::Duration;

use helix_client::AccessGrant;
use helix_proto::log::v1::append_stream_request::Message as StreamMessage;
use helix_proto::log::v1::*;
use prost::Message;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::{Request, Status};

use super::{WithToken, rule, rules};
use crate::support::{append_request, earliest};

/// A request, and the rules that its caller needs.
pub(crate) struct ExampleCall {
    pub(crate) method: &'static str,
    pub(crate) request: Vec<u8>,
    /// Empty if every principal may make the call.
    pub(crate) needs: AccessGrant,
}

fn example(method: &'static str, request: impl Message, needs: &[AccessRule]) -> ExampleCall {
    ExampleCall { method, request: request.encode_to_vec(), needs: rules(needs) }
}

/// Returns a request of each method; `topic` may exist or not.
pub(crate) fn examples(topic: &str) -> Vec<ExampleCall> {
    use AccessOperation as O;
    let on_topic = |operations: &[O]| rule(ResourceKind::Topic, topic, operations);
    let on_group = |operations: &[O]| rule(ResourceKind::Group, "g", operations);
    let cluster = |operation: O| [rule(ResourceKind::Cluster, "", &[operation])];
    let (name, group) = (topic.to_owned(), "g".to_owned());
    let start = PartitionStart { topic: name.clone(), ..earliest(0) };
    let from_group = PartitionStart {
        start: Some(StartPosition {
            position: Some(start_position::Position::CommittedGroup(group.clone())),
            ..StartPosition::default()
        }),
        ..start.clone()
    };
    let partition = TopicPartition { topic: name.clone(), ..TopicPartition::default() };
    let offset = CommittedOffset { partition: Some(partition), ..CommittedOffset::default() };
    let append = AppendRequest { topic: name.clone(), ..append_request(&["x"]) };
    let init = AppendStreamInit { topic: name.clone(), ..AppendStreamInit::default() };
    let init = AppendStreamRequest { message: Some(StreamMessage::Init(init)) };
    let named = rule(ResourceKind::Producer, "p", &[O::Write]);
    let reads = [on_topic(&[O::Read]), on_group(&[O::Read])];
    let heartbeat = HeartbeatRequest {
        group: group.clone(),
        member_id: "m".to_owned(),
        topics: vec![name.clone()],
        ..HeartbeatRequest::default()
    };
    let update = UpdateTopicRequest { name: name.clone(), ..UpdateTopicRequest::default() };
    let add = AddPartitionsRequest {
        name: name.clone(),
        partition_count: 5,
        ..AddPartitionsRequest::default()
    };
    let delete = DeleteTopicRequest { name: name.clone(), ..DeleteTopicRequest::default() };
    let trim = TrimPartitionRequest { topic: name.clone(), ..TrimPartitionRequest::default() };
    let fence = SetFencingTokenRequest { topic: name.clone(), ..SetFencingTokenRequest::default() };
    let subscribe = SubscribeRequest {
        partitions: vec![start.clone()],
        limits: Some(ReadLimits { max_records: Some(1), ..ReadLimits::default() }),
        ..SubscribeRequest::default()
    };
    let commit = CommitOffsetsRequest {
        group: group.clone(),
        offsets: vec![offset.clone()],
        ..CommitOffsetsRequest::default()
    };
    let seek = SeekGroupRequest {
        group: group.clone(),
        offsets: vec![offset],
        validate_only: true,
        ..SeekGroupRequest::default()
    };
    let access = rule(ResourceKind::Topic, "other", &[O::Read]);
    vec![
        example(
            "ProduceService/InitProducer",
            InitProducerRequest { producer_name: "p".to_owned() },
            &[named],
        ),
        example(
            "ProduceService/InitProducer",
            InitProducerRequest::default(),
            &[on_topic(&[O::Write])],
        ),
        example("ProduceService/Append", append, &[on_topic(&[O::Write])]),
        example("ProduceService/AppendStream", init, &[on_topic(&[O::Write])]),
        example(
            "ConsumeService/Fetch",
            FetchRequest { partitions: vec![start], ..FetchRequest::default() },
            &reads[..1],
        ),
        example(
            "ConsumeService/Fetch",
            FetchRequest { partitions: vec![from_group], ..FetchRequest::default() },
            &reads,
        ),
        example("ConsumeService/Subscribe", subscribe, &reads[..1]),
        example(
            "ConsumeService/ResolveOffsets",
            ResolveOffsetsRequest { topic: name.clone(), ..ResolveOffsetsRequest::default() },
            &reads[..1],
        ),
        example(
            "TopicService/CreateTopic",
            CreateTopicRequest {
                name: name.clone(),
                partition_count: 4,
                validate_only: true,
                ..CreateTopicRequest::default()
            },
            &[on_topic(&[O::Create])],
        ),
        example("TopicService/GetTopic", GetTopicRequest { name }, &[on_topic(&[O::Describe])]),
        example("TopicService/ListTopics", ListTopicsRequest::default(), &[]),
        example("TopicService/UpdateTopic", update, &[on_topic(&[O::Alter])]),
        example("TopicService/AddPartitions", add, &[on_topic(&[O::Alter])]),
        example("TopicService/TrimPartition", trim, &[on_topic(&[O::Delete])]),
        example("TopicService/SetFencingToken", fence, &[on_topic(&[O::Write])]),
        example("GroupService/Heartbeat", heartbeat, &reads),
        example(
            "GroupService/Leave",
            LeaveRequest { group: group.clone(), member_id: "m".to_owned() },
            &[on_group(&[O::Read])],
        ),
        example(
            "GroupService/CommitOffsets",
            commit,
            &[on_group(&[O::Commit]), on_topic(&[O::Read])],
        ),
        example(
            "GroupService/GetOffsets",
            GetOffsetsRequest { group: group.clone(), ..GetOffsetsRequest::default() },
            &[on_group(&[O::Describe])],
        ),
        example("GroupService/ListGroups", ListGroupsRequest::default(), &[]),
        example(
            "GroupService/DescribeGroup",
            DescribeGroupRequest { group: group.clone(), ..DescribeGroupRequest::default() },
            &[on_group(&[O::Describe])],
        ),
        example("GroupService/SeekGroup", seek, &[on_group(&[O::Alter]), on_topic(&[O::Describe])]),
        example(
            "GroupService/ForgetGroupTopic",
            ForgetGroupTopicRequest {
                group: group.clone(),
                topic: topic.to_owned(),
                validate_only: true,
                ..ForgetGroupTopicRequest::default()
            },
            &[on_group(&[O::Alter]), on_topic(&[O::Describe])],
        ),
        example(
            "GroupService/ReportGatewayMembers",
            ReportGatewayMembersRequest {
                group: group.clone(),
                gateway: "gw:9292".to_owned(),
                ..ReportGatewayMembersRequest::default()
            },
            &[on_group(&[O::Read])],
        ),
        example(
            "GroupService/DeleteGroup",
            DeleteGroupRequest { group, ..DeleteGroupRequest::default() },
            &[on_group(&[O::Delete])],
        ),
        example("ClusterService/GetMetadata", GetMetadataRequest::default(), &[]),
        example("ClusterService/WatchMetadata", WatchMetadataRequest::default(), &[]),
        example("ClusterService/GetHealth", GetHealthRequest::default(), &cluster(O::Describe)),
        example("ClusterService/GetNodeStatus", GetNodeStatusRequest {}, &cluster(O::Describe)),
        example("ClusterService/ListSlowCalls", ListSlowCallsRequest {}, &cluster(O::Describe)),
        example("ClusterService/AddNode", AddNodeRequest::default(), &cluster(O::Alter)),
        example("ClusterService/RemoveNode", RemoveNodeRequest::default(), &cluster(O::Alter)),
        example("ClusterService/ReplaceNode", ReplaceNodeRequest::default(), &cluster(O::Alter)),
        example(
            "ClusterService/WatchMembershipChange",
            WatchMembershipChangeRequest::default(),
            &cluster(O::Describe),
        ),
        example("ClusterService/SetDraining", SetDrainingRequest::default(), &cluster(O::Alter)),
        example("ClusterService/BalanceLeaders", BalanceLeadersRequest {}, &cluster(O::Alter)),
        example(
            "ClusterService/TransferLeader",
            TransferLeaderRequest::default(),
            &cluster(O::Alter),
        ),
        example("ClusterService/GetPlacement", GetPlacementRequest {}, &cluster(O::Describe)),
        example("ClusterService/SetCordoned", SetCordonedRequest::default(), &cluster(O::Alter)),
        example("ClusterService/SetReplicas", SetReplicasRequest::default(), &cluster(O::Alter)),
        example("ClusterService/MoveShard", MoveShardRequest::default(), &cluster(O::Alter)),
        example("ClusterService/AddShards", AddShardsRequest::default(), &cluster(O::Alter)),
        example(
            "ClusterService/SetMovesPaused",
            SetMovesPausedRequest::default(),
            &cluster(O::Alter),
        ),
        example("ClusterService/CancelMove", CancelMoveRequest::default(), &cluster(O::Alter)),
        example("AccessService/WhoAmI", WhoAmIRequest {}, &[]),
        example("AccessService/CreateToken", CreateTokenRequest::default(), &cluster(O::Admin)),
        example("AccessService/ListTokens", ListTokensRequest::default(), &cluster(O::Admin)),
        example("AccessService/RevokeToken", RevokeTokenRequest::default(), &cluster(O::Admin)),
        example(
            "AccessService/AllowAccess",
            AllowAccessRequest {
                principal: "other".to_owned(),
                rules: vec![access.clone()],
                ..AllowAccessRequest::default()
            },
            &cluster(O::Admin),
        ),
        example(
            "AccessService/RemoveAccess",
            RemoveAccessRequest {
                principal: "other".to_owned(),
                rules: vec![access],
                ..RemoveAccessRequest::default()
            },
            &cluster(O::Admin),
        ),
        example("AccessService/ListAccess", ListAccessRequest::default(), &cluster(O::Admin)),
        example("AccessService/TestAccess", TestAccessRequest::default(), &cluster(O::Admin)),
        example("AccessService/SetQuota", SetQuotaRequest::default(), &cluster(O::Admin)),
        example("AccessService/ListQuotas", ListQuotasRequest::default(), &cluster(O::Admin)),
        example("AccessService/ListRefusedCalls", ListRefusedCallsRequest {}, &cluster(O::Admin)),
        // Last, since it deletes the topic.
        example("TopicService/DeleteTopic", delete, &[on_topic(&[O::Delete])]),
    ]
}

/// A codec of messages that were encoded before.
struct EncodedCodec;

impl Codec for EncodedCodec {
    type Encode = Vec<u8>;
    type Decode = ();
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for EncodedCodec {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        bytes::BufMut::put_slice(into, &item);
        Ok(())
    }
}

impl Decoder for EncodedCodec {
    type Item = ();
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<()>, Status> {
        bytes::Buf::advance(from, bytes::Buf::remaining(from));
        Ok(Some(()))
    }
}

/// Makes a call, and waits for its first response or its failure.
pub(crate) async fn call(service: WithToken, call: &ExampleCall) -> Result<(), Status> {
    call_path(service, &format!("/helix.log.v1.{}", call.method), &call.request).await
}

pub(crate) async fn call_path(
    service: WithToken,
    path: &str,
    request: &[u8],
) -> Result<(), Status> {
    let mut client = Grpc::new(service);
    client.ready().await.unwrap();
    // The client's stream stays open after its first message.
    let requests = tokio_stream::StreamExt::chain(
        tokio_stream::once(request.to_vec()),
        tokio_stream::pending(),
    );
    let path: PathAndQuery = path.parse().unwrap();
    let is_client_stream = path.path().ends_with("/AppendStream");
    let mut responses = if is_client_stream {
        client.streaming(Request::new(requests), path, EncodedCodec).await?.into_inner()
    } else {
        let once = Request::new(tokio_stream::once(request.to_vec()));
        client.streaming(once, path, EncodedCodec).await?.into_inner()
    };
    match tokio::time::timeout(Duration::from_secs(10), responses.message()).await {
        Ok(first) => first.map(drop),
        Err(_) => panic!("no response to {request:?}"),
    }
}
