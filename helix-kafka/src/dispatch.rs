//! Decodes requests, calls their handlers and encodes the responses.

use bytes::Bytes;
use kafka_protocol::messages::{
    ApiKey, CreatePartitionsRequest, CreateTopicsRequest, DeleteGroupsRequest,
    DeleteRecordsRequest, DeleteTopicsRequest, DescribeAclsRequest, DescribeClusterRequest,
    DescribeConfigsRequest, DescribeGroupsRequest, FetchRequest, FindCoordinatorRequest,
    HeartbeatRequest, IncrementalAlterConfigsRequest, InitProducerIdRequest, JoinGroupRequest,
    LeaveGroupRequest, ListGroupsRequest, ListOffsetsRequest, MetadataRequest, OffsetCommitRequest,
    OffsetDeleteRequest, OffsetFetchRequest, OffsetForLeaderEpochRequest, SyncGroupRequest,
};
use kafka_protocol::protocol::Decodable;

use crate::api::{
    acls, cluster, configs, coordinator, fetch, group_admin, group_members, group_offsets,
    metadata, offsets, producer_id, topics, versions,
};
use crate::connection::ConnectionEnd;
use crate::context::RequestContext;
use crate::frame::{RequestHeader, ResponseFrame, encode_response};
use crate::memory::MemoryPermit;

/// A response, and memory that it holds.
pub(crate) struct Answer {
    pub(crate) frame: ResponseFrame,
    pub(crate) permit: Option<MemoryPermit>,
}

/// Decodes a request whose bytes were checked.
///
/// # Errors
/// A value that the schema does not show: a null that is not allowed, or text that is not UTF-8.
pub(crate) fn decode<T: Decodable>(mut body: Bytes, version: i16) -> Result<T, ConnectionEnd> {
    let error = |error| ConnectionEnd::Message(format!("a request is not valid: {error:#}"));
    T::decode(&mut body, version).map_err(error)
}

/// Answers a request, except for Produce and SASL.
///
/// # Errors
/// The reason to close the connection.
pub(crate) async fn answer(
    context: &RequestContext,
    header: &RequestHeader,
    body: Bytes,
) -> Result<Answer, ConnectionEnd> {
    macro_rules! serve {
        ($request:ty, $handler:path) => {{
            let request: $request = decode(body, header.version)?;
            // The handlers of rare requests would make every request's future large.
            let response = Box::pin($handler(context, request)).await;
            context.state.metrics.on_response(header.api.key, &response);
            encode_response(header, &response)
        }};
    }
    let frame = match header.api.key {
        ApiKey::Fetch => {
            let request: FetchRequest = decode(body, header.version)?;
            let fetching = Box::pin(fetch::fetch(context, header, request));
            let (frame, permit) = fetching.await.map_err(ConnectionEnd::Message)?;
            return Ok(Answer { frame, permit: Some(permit) });
        }
        ApiKey::ApiVersions => encode_response(header, &versions::api_versions()),
        ApiKey::Metadata => serve!(MetadataRequest, metadata::metadata),
        ApiKey::ListOffsets => serve!(ListOffsetsRequest, offsets::list_offsets),
        ApiKey::OffsetForLeaderEpoch => {
            serve!(OffsetForLeaderEpochRequest, offsets::offset_for_leader_epoch)
        }
        ApiKey::InitProducerId => serve!(InitProducerIdRequest, producer_id::init_producer_id),
        ApiKey::FindCoordinator => serve!(FindCoordinatorRequest, coordinator::find_coordinator),
        ApiKey::JoinGroup => serve!(JoinGroupRequest, group_members::join_group),
        ApiKey::SyncGroup => serve!(SyncGroupRequest, group_members::sync_group),
        ApiKey::Heartbeat => serve!(HeartbeatRequest, group_members::heartbeat),
        ApiKey::LeaveGroup => serve!(LeaveGroupRequest, group_members::leave_group),
        ApiKey::OffsetCommit => serve!(OffsetCommitRequest, group_offsets::offset_commit),
        ApiKey::OffsetFetch => serve!(OffsetFetchRequest, group_offsets::offset_fetch),
        ApiKey::OffsetDelete => serve!(OffsetDeleteRequest, group_offsets::offset_delete),
        ApiKey::ListGroups => serve!(ListGroupsRequest, group_admin::list_groups),
        ApiKey::DescribeGroups => serve!(DescribeGroupsRequest, group_admin::describe_groups),
        ApiKey::DeleteGroups => serve!(DeleteGroupsRequest, group_admin::delete_groups),
        ApiKey::CreateTopics => serve!(CreateTopicsRequest, topics::create_topics),
        ApiKey::DeleteTopics => serve!(DeleteTopicsRequest, topics::delete_topics),
        ApiKey::CreatePartitions => serve!(CreatePartitionsRequest, topics::create_partitions),
        ApiKey::DeleteRecords => serve!(DeleteRecordsRequest, topics::delete_records),
        ApiKey::DescribeConfigs => serve!(DescribeConfigsRequest, configs::describe_configs),
        ApiKey::IncrementalAlterConfigs => {
            serve!(IncrementalAlterConfigsRequest, configs::alter_configs)
        }
        ApiKey::DescribeCluster => serve!(DescribeClusterRequest, cluster::describe_cluster),
        ApiKey::DescribeAcls => serve!(DescribeAclsRequest, acls::describe_acls),
        key => Err(format!("{key:?} has no handler")),
    };
    Ok(Answer { frame: frame.map_err(ConnectionEnd::Message)?, permit: None })
}
