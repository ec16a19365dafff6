//! The group service of a node: heartbeats of members without partitions.

use std::time::Duration;

use helix_client::proto::log::v1::group_service_server::GroupService;
use helix_client::proto::log::v1::*;
use tonic::{Request, Response, Status};

use super::{FakeCluster, FakeNode, rejection};

/// Epoch of a member that has joined.
const EPOCH: u64 = 5;

/// Heartbeats that the nodes received.
#[derive(Debug, Default)]
pub(super) struct FakeGroups {
    /// State of the member (it had joined), and the longest wait that it allowed.
    seen: Vec<(bool, Duration)>,
    /// Next heartbeats of joined members that fail.
    failing: u32,
}

impl FakeCluster {
    /// Fails the next heartbeats of members that have joined.
    pub(crate) fn fail_heartbeats(&self, count: u32) {
        self.cluster.state().groups.failing = count;
    }

    /// Returns whether the member had joined, and the longest wait that it allowed, for each
    /// heartbeat.
    pub(crate) fn heartbeats(&self) -> Vec<(bool, Duration)> {
        self.cluster.state().groups.seen.clone()
    }
}

#[tonic::async_trait]
impl GroupService for FakeNode {
    async fn heartbeat(
        &self,
        request: Request<HeartbeatRequest>,
    ) -> Result<Response<HeartbeatResponse>, Status> {
        let HeartbeatRequest { member_epoch, max_wait, session_timeout, .. } = request.into_inner();
        let groups = &mut self.cluster.state().groups;
        let wait = max_wait.and_then(|it| it.try_into().ok()).unwrap_or_default();
        groups.seen.push((member_epoch != 0, wait));
        if member_epoch != 0 && groups.failing > 0 {
            groups.failing -= 1;
            return Err(rejection(ErrorReason::NoLeader));
        }
        Ok(Response::new(HeartbeatResponse {
            member_epoch: EPOCH,
            session_timeout,
            settled: true,
            ..HeartbeatResponse::default()
        }))
    }

    async fn leave(&self, _: Request<LeaveRequest>) -> Result<Response<LeaveResponse>, Status> {
        Ok(Response::new(LeaveResponse::default()))
    }

    async fn commit_offsets(
        &self,
        _: Request<CommitOffsetsRequest>,
    ) -> Result<Response<CommitOffsetsResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn get_offsets(
        &self,
        _: Request<GetOffsetsRequest>,
    ) -> Result<Response<GetOffsetsResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn list_groups(
        &self,
        _: Request<ListGroupsRequest>,
    ) -> Result<Response<ListGroupsResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn describe_group(
        &self,
        _: Request<DescribeGroupRequest>,
    ) -> Result<Response<DescribeGroupResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn seek_group(
        &self,
        _: Request<SeekGroupRequest>,
    ) -> Result<Response<SeekGroupResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn forget_group_topic(
        &self,
        _: Request<ForgetGroupTopicRequest>,
    ) -> Result<Response<ForgetGroupTopicResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn report_gateway_members(
        &self,
        _: Request<ReportGatewayMembersRequest>,
    ) -> Result<Response<ReportGatewayMembersResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn delete_group(
        &self,
        _: Request<DeleteGroupRequest>,
    ) -> Result<Response<DeleteGroupResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }
}
