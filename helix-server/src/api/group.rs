//! Consumer groups: part of the contract, not yet served.
//! The service answers, so that a client can tell "not yet" from "not Helix".

use helix_proto::log::v1::group_service_server::GroupService;
use helix_proto::log::v1::{
    CommitOffsetsRequest, CommitOffsetsResponse, DeleteGroupRequest, DeleteGroupResponse,
    GetOffsetsRequest, GetOffsetsResponse, HeartbeatRequest, HeartbeatResponse, LeaveRequest,
    LeaveResponse, ListGroupsRequest, ListGroupsResponse,
};
use tonic::{Request, Response, Status};

use crate::error::Error;

pub(super) struct Groups;

fn refused<T>() -> Result<Response<T>, Status> {
    Err(Error::Unimplemented { what: "a consumer group" }.into())
}

#[tonic::async_trait]
impl GroupService for Groups {
    async fn heartbeat(
        &self,
        _: Request<HeartbeatRequest>,
    ) -> Result<Response<HeartbeatResponse>, Status> {
        refused()
    }

    async fn leave(&self, _: Request<LeaveRequest>) -> Result<Response<LeaveResponse>, Status> {
        refused()
    }

    async fn commit_offsets(
        &self,
        _: Request<CommitOffsetsRequest>,
    ) -> Result<Response<CommitOffsetsResponse>, Status> {
        refused()
    }

    async fn get_offsets(
        &self,
        _: Request<GetOffsetsRequest>,
    ) -> Result<Response<GetOffsetsResponse>, Status> {
        refused()
    }

    async fn list_groups(
        &self,
        _: Request<ListGroupsRequest>,
    ) -> Result<Response<ListGroupsResponse>, Status> {
        refused()
    }

    async fn delete_group(
        &self,
        _: Request<DeleteGroupRequest>,
    ) -> Result<Response<DeleteGroupResponse>, Status> {
        refused()
    }
}
