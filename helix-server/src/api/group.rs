//! GroupService: part of the API, not implemented yet.
//! The service answers with UNIMPLEMENTED, so that a client can distinguish it from
//! another server.

use helix_proto::log::v1::group_service_server::GroupService;
use helix_proto::log::v1::{
    CommitOffsetsRequest, CommitOffsetsResponse, DeleteGroupRequest, DeleteGroupResponse,
    DescribeGroupRequest, DescribeGroupResponse, GetOffsetsRequest, GetOffsetsResponse,
    HeartbeatRequest, HeartbeatResponse, LeaveRequest, LeaveResponse, ListGroupsRequest,
    ListGroupsResponse, SeekGroupRequest, SeekGroupResponse,
};
use tonic::{Request, Response, Status};

use crate::error::Error;

pub(crate) struct GroupHandler;

fn unimplemented<T>() -> Result<Response<T>, Status> {
    Err(Error::Unimplemented { what: "a consumer group" }.into())
}

#[tonic::async_trait]
impl GroupService for GroupHandler {
    async fn heartbeat(
        &self,
        _: Request<HeartbeatRequest>,
    ) -> Result<Response<HeartbeatResponse>, Status> {
        unimplemented()
    }

    async fn leave(&self, _: Request<LeaveRequest>) -> Result<Response<LeaveResponse>, Status> {
        unimplemented()
    }

    async fn commit_offsets(
        &self,
        _: Request<CommitOffsetsRequest>,
    ) -> Result<Response<CommitOffsetsResponse>, Status> {
        unimplemented()
    }

    async fn get_offsets(
        &self,
        _: Request<GetOffsetsRequest>,
    ) -> Result<Response<GetOffsetsResponse>, Status> {
        unimplemented()
    }

    async fn list_groups(
        &self,
        _: Request<ListGroupsRequest>,
    ) -> Result<Response<ListGroupsResponse>, Status> {
        unimplemented()
    }

    async fn describe_group(
        &self,
        _: Request<DescribeGroupRequest>,
    ) -> Result<Response<DescribeGroupResponse>, Status> {
        unimplemented()
    }

    async fn seek_group(
        &self,
        _: Request<SeekGroupRequest>,
    ) -> Result<Response<SeekGroupResponse>, Status> {
        unimplemented()
    }

    async fn delete_group(
        &self,
        _: Request<DeleteGroupRequest>,
    ) -> Result<Response<DeleteGroupResponse>, Status> {
        unimplemented()
    }
}
