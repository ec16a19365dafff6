//! Invalid values in every field of every request: the documented error is returned, and other
//! clients are served. The descriptors list the fields, so that none is left out.

mod access_rows;
mod gateway_rows;
mod group_rows;
mod record_forms;
mod rows;
mod wire;

use std::collections::BTreeSet;

use helix_proto::FILE_DESCRIPTOR_SET;
use helix_proto::log::v1::access_service_client::AccessServiceClient;
use helix_proto::log::v1::append_stream_request::Message as Streamed;
use helix_proto::log::v1::cluster_service_client::ClusterServiceClient;
use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::group_service_client::GroupServiceClient;
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_proto::log::v1::topic_service_client::TopicServiceClient;
use helix_proto::log::v1::{
    AddNodeRequest, AddPartitionsRequest, AddShardsRequest, AllowAccessRequest, AppendRequest,
    AppendStreamRequest, CancelMoveRequest, CommitOffsetsRequest, CreateTokenRequest,
    CreateTopicRequest, DeleteGroupRequest, DeleteTopicRequest, DescribeGroupRequest, ErrorReason,
    FetchRequest, ForgetGroupTopicRequest, GetHealthRequest, GetMetadataRequest, GetOffsetsRequest,
    GetTopicRequest, HeartbeatRequest, InitProducerRequest, LeaveRequest, ListAccessRequest,
    ListGroupsRequest, ListQuotasRequest, ListTokensRequest, ListTopicsRequest, MoveShardRequest,
    RemoveAccessRequest, RemoveNodeRequest, ReplaceNodeRequest, ReportGatewayMembersRequest,
    ResolveOffsetsRequest, RevokeTokenRequest, SeekGroupRequest, SetCordonedRequest,
    SetDrainingRequest, SetFencingTokenRequest, SetMovesPausedRequest, SetQuotaRequest,
    SetReplicasRequest, SubscribeRequest, TestAccessRequest, TransferLeaderRequest,
    TrimPartitionRequest, UpdateTopicRequest, WatchMembershipChangeRequest, WatchMetadataRequest,
};
use prost::Message;
use prost_types::{FileDescriptorSet, MethodDescriptorProto};
use tonic::Status;
use tonic::transport::Channel;

use crate::support::{TestServer, append_request, connect, detail, from_offset, soon};

/// A call with an invalid value.
#[derive(Debug, Clone)]
enum InvalidCall {
    InitProducer(InitProducerRequest),
    Append(Box<AppendRequest>),
    AppendStream(Vec<Option<Streamed>>),
    Fetch(FetchRequest),
    Subscribe(SubscribeRequest),
    ResolveOffsets(ResolveOffsetsRequest),
    CreateTopic(CreateTopicRequest),
    GetTopic(GetTopicRequest),
    SetFencingToken(SetFencingTokenRequest),
    ListTopics(ListTopicsRequest),
    UpdateTopic(UpdateTopicRequest),
    AddPartitions(AddPartitionsRequest),
    DeleteTopic(DeleteTopicRequest),
    TrimPartition(TrimPartitionRequest),
    GetMetadata(GetMetadataRequest),
    WatchMetadata(WatchMetadataRequest),
    TransferLeader(TransferLeaderRequest),
    AddNode(AddNodeRequest),
    RemoveNode(RemoveNodeRequest),
    ReplaceNode(ReplaceNodeRequest),
    SetDraining(SetDrainingRequest),
    SetCordoned(SetCordonedRequest),
    SetReplicas(SetReplicasRequest),
    MoveShard(MoveShardRequest),
    AddShards(AddShardsRequest),
    CancelMove(CancelMoveRequest),
    GetHealth(GetHealthRequest),
    PauseMoves(SetMovesPausedRequest),
    WatchMembershipChange(WatchMembershipChangeRequest),
    Heartbeat(HeartbeatRequest),
    Leave(LeaveRequest),
    CommitOffsets(CommitOffsetsRequest),
    GetOffsets(GetOffsetsRequest),
    ListGroups(ListGroupsRequest),
    DescribeGroup(DescribeGroupRequest),
    SeekGroup(SeekGroupRequest),
    ForgetGroupTopic(ForgetGroupTopicRequest),
    DeleteGroup(DeleteGroupRequest),
    ReportGatewayMembers(ReportGatewayMembersRequest),
    CreateToken(CreateTokenRequest),
    ListTokens(ListTokensRequest),
    RevokeToken(RevokeTokenRequest),
    AllowAccess(AllowAccessRequest),
    RemoveAccess(RemoveAccessRequest),
    ListAccess(ListAccessRequest),
    TestAccess(TestAccessRequest),
    SetQuota(SetQuotaRequest),
    ListQuotas(ListQuotasRequest),
}

impl InvalidCall {
    /// Sends the call and waits for the first response.
    async fn send(self, channel: &Channel) -> Result<(), Status> {
        let mut produce = ProduceServiceClient::new(channel.clone());
        let mut consume = ConsumeServiceClient::new(channel.clone());
        let mut topics = TopicServiceClient::new(channel.clone());
        let mut cluster = ClusterServiceClient::new(channel.clone());
        let mut groups = GroupServiceClient::new(channel.clone());
        let mut access = AccessServiceClient::new(channel.clone());
        match self {
            Self::InitProducer(request) => produce.init_producer(request).await.map(drop),
            Self::Append(request) => produce.append(*request).await.map(drop),
            Self::AppendStream(messages) => {
                let requests = messages.into_iter().map(|message| AppendStreamRequest { message });
                let requests = tokio_stream::iter(requests.collect::<Vec<_>>());
                let mut answers = produce.append_stream(requests).await?.into_inner();
                while answers.message().await?.is_some() {}
                Ok(())
            }
            Self::Fetch(request) => consume.fetch(request).await.map(drop),
            Self::Subscribe(request) => {
                let mut answers = consume.subscribe(request).await?.into_inner();
                answers.message().await.map(drop)
            }
            Self::ResolveOffsets(request) => consume.resolve_offsets(request).await.map(drop),
            Self::CreateTopic(request) => topics.create_topic(request).await.map(drop),
            Self::SetFencingToken(request) => topics.set_fencing_token(request).await.map(drop),
            Self::GetTopic(request) => topics.get_topic(request).await.map(drop),
            Self::ListTopics(request) => topics.list_topics(request).await.map(drop),
            Self::UpdateTopic(request) => topics.update_topic(request).await.map(drop),
            Self::AddPartitions(request) => topics.add_partitions(request).await.map(drop),
            Self::DeleteTopic(request) => topics.delete_topic(request).await.map(drop),
            Self::TrimPartition(request) => topics.trim_partition(request).await.map(drop),
            Self::GetMetadata(request) => cluster.get_metadata(request).await.map(drop),
            Self::WatchMetadata(request) => {
                let mut answers = cluster.watch_metadata(request).await?.into_inner();
                answers.message().await.map(drop)
            }
            Self::TransferLeader(request) => cluster.transfer_leader(request).await.map(drop),
            Self::Heartbeat(request) => groups.heartbeat(request).await.map(drop),
            Self::Leave(request) => groups.leave(request).await.map(drop),
            Self::CommitOffsets(request) => groups.commit_offsets(request).await.map(drop),
            Self::GetOffsets(request) => groups.get_offsets(request).await.map(drop),
            Self::ListGroups(request) => groups.list_groups(request).await.map(drop),
            Self::DescribeGroup(request) => groups.describe_group(request).await.map(drop),
            Self::SeekGroup(request) => groups.seek_group(request).await.map(drop),
            Self::ForgetGroupTopic(request) => groups.forget_group_topic(request).await.map(drop),
            Self::DeleteGroup(request) => groups.delete_group(request).await.map(drop),
            Self::ReportGatewayMembers(request) => {
                groups.report_gateway_members(request).await.map(drop)
            }
            Self::CreateToken(request) => access.create_token(request).await.map(drop),
            Self::ListTokens(request) => access.list_tokens(request).await.map(drop),
            Self::RevokeToken(request) => access.revoke_token(request).await.map(drop),
            Self::AllowAccess(request) => access.allow_access(request).await.map(drop),
            Self::RemoveAccess(request) => access.remove_access(request).await.map(drop),
            Self::ListAccess(request) => access.list_access(request).await.map(drop),
            Self::TestAccess(request) => access.test_access(request).await.map(drop),
            Self::SetQuota(request) => access.set_quota(request).await.map(drop),
            Self::ListQuotas(request) => access.list_quotas(request).await.map(drop),
            Self::AddNode(request) => cluster.add_node(request).await.map(drop),
            Self::RemoveNode(request) => cluster.remove_node(request).await.map(drop),
            Self::ReplaceNode(request) => cluster.replace_node(request).await.map(drop),
            Self::SetDraining(request) => cluster.set_draining(request).await.map(drop),
            Self::SetCordoned(request) => cluster.set_cordoned(request).await.map(drop),
            Self::SetReplicas(request) => cluster.set_replicas(request).await.map(drop),
            Self::MoveShard(request) => cluster.move_shard(request).await.map(drop),
            Self::AddShards(request) => cluster.add_shards(request).await.map(drop),
            Self::PauseMoves(request) => cluster.set_moves_paused(request).await.map(drop),
            Self::GetHealth(request) => cluster.get_health(request).await.map(drop),
            Self::CancelMove(request) => cluster.cancel_move(request).await.map(drop),
            Self::WatchMembershipChange(request) => {
                let mut answers = cluster.watch_membership_change(request).await?.into_inner();
                answers.message().await.map(drop)
            }
        }
    }
}

/// The expected result of a call.
#[derive(Debug, Clone, Copy)]
enum Expected {
    /// Any value is valid.
    Fine,
    /// Refused for this reason, with these words in the message.
    Refused(ErrorReason, &'static str),
    /// Refused for one of these reasons, with or without the optional feature.
    RefusedFor(&'static [ErrorReason]),
}

/// Fields as "Message.field", a call with an invalid value in them, and its expected result.
type FieldCase = (&'static [&'static str], InvalidCall, Expected);

fn check(place: &str, outcome: &Result<(), Status>, expected: Expected) {
    match (outcome, expected) {
        (Ok(()), Expected::Fine) => {}
        (Err(status), Expected::Refused(reason, words)) => {
            let found = detail(status);
            assert_eq!(found.reason(), reason, "{place}: {status:?}");
            assert_eq!(status.code(), helix_proto::error::code(reason), "{place}");
            assert!(status.message().contains(words), "{place}: no {words:?} in {status:?}");
            assert!(!found.may_have_applied, "{place}: {status:?}");
        }
        (Err(status), Expected::RefusedFor(reasons)) => {
            assert!(reasons.contains(&detail(status).reason()), "{place}: {status:?}");
        }
        _ => panic!("{place}: {outcome:?} instead of {expected:?}"),
    }
}

/// Checks that another client can append and read a record.
async fn others_are_served(channel: &Channel, written: &mut u64, place: &str) {
    let mut produce = ProduceServiceClient::new(channel.clone());
    let request = AppendRequest { partition: 3, ..append_request(&["another"]) };
    let ack = soon(produce.append(request)).await.expect(place).into_inner().ack.unwrap();
    assert_eq!(ack.first_offset, Some(*written), "{place}");
    let partitions = vec![from_offset(3, *written)];
    let mut consume = ConsumeServiceClient::new(channel.clone());
    let fetch = FetchRequest { partitions, ..FetchRequest::default() };
    let read = soon(consume.fetch(fetch)).await.expect(place).into_inner();
    assert_eq!(read.partitions[0].records.len(), 1, "{place}");
    *written += 1;
}

#[tokio::test]
async fn invalid_values_get_documented_errors_and_other_clients_are_served() {
    let server = TestServer::in_memory().await;
    server.append(&["a", "b", "c"]).await;
    let another = connect(&server.running).await;
    let mut written = 0;
    for (fields, call, expected) in rows::all(&server).await {
        let place = format!("{fields:?} in {call:?}");
        let place = place.chars().take(400).collect::<String>();
        let outcome = soon(call.send(&server.channel)).await;
        check(&place, &outcome, expected);
        others_are_served(&another, &mut written, &place).await;
    }
    let stored = server.records(0, 0).await.len();
    assert_eq!(stored, 3 + rows::APPENDED, "no refused record is stored");
    group_rows::check_unchanged(&server).await;
}

/// Well-known messages that are fields of our messages.
const LEAVES: [&str; 3] =
    [".google.protobuf.Timestamp", ".google.protobuf.Duration", ".google.protobuf.FieldMask"];

fn fields_of(set: &FileDescriptorSet, type_name: &str, into: &mut BTreeSet<String>) {
    let name = type_name.strip_prefix(".helix.log.v1.").expect("a message of ours");
    let mut messages = set.file.iter().flat_map(|file| &file.message_type);
    let message =
        messages.find(|message| message.name() == name).expect("the message is described");
    for field in &message.field {
        if into.insert(format!("{name}.{}", field.name()))
            && field.type_name.as_deref().is_some_and(|it| !it.is_empty())
            && field.r#type() == prost_types::field_descriptor_proto::Type::Message
            && !LEAVES.contains(&field.type_name())
        {
            fields_of(set, field.type_name(), into);
        }
    }
}

fn methods(set: &FileDescriptorSet) -> Vec<(String, MethodDescriptorProto)> {
    let ours = set.file.iter().filter(|file| file.package() == "helix.log.v1");
    let services = ours.flat_map(|file| &file.service);
    let methods = services.flat_map(|service| {
        let path = |method: &MethodDescriptorProto| {
            format!("/helix.log.v1.{}/{}", service.name(), method.name())
        };
        service.method.iter().map(move |method| (path(method), method.clone()))
    });
    methods.collect()
}

#[tokio::test]
async fn every_request_field_has_a_case() {
    let server = TestServer::in_memory().await;
    let set = FileDescriptorSet::decode(FILE_DESCRIPTOR_SET).unwrap();
    let rows = rows::all(&server).await;
    let covered = rows.iter().flat_map(|(fields, ..)| fields.iter().copied());
    let covered: BTreeSet<&str> = covered.collect();
    let mut known = BTreeSet::new();
    let mut missing = Vec::new();
    for (path, method) in methods(&set) {
        let mut fields = BTreeSet::new();
        fields_of(&set, method.input_type(), &mut fields);
        let is_built = soon(wire::call(&server.channel, &path, bytes::Bytes::new())).await;
        known.extend(fields.iter().cloned());
        if is_built.is_err_and(|status| status.code() == tonic::Code::Unimplemented) {
            continue;
        }
        missing.extend(fields.into_iter().filter(|field| !covered.contains(field.as_str())));
    }
    assert!(missing.is_empty(), "no case has an invalid value in {missing:?}");
    let gone: Vec<_> = covered.iter().filter(|field| !known.contains(**field)).collect();
    assert!(gone.is_empty(), "there are no such fields: {gone:?}");
}
