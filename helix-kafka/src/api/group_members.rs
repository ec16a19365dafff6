//! JoinGroup, SyncGroup, Heartbeat and LeaveGroup.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use helix_client::proto::log::v1::{AccessOperation, ErrorReason};
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::join_group_response::JoinGroupResponseMember;
use kafka_protocol::messages::leave_group_response::MemberResponse;
use kafka_protocol::messages::{
    HeartbeatRequest, HeartbeatResponse, JoinGroupRequest, JoinGroupResponse, LeaveGroupRequest,
    LeaveGroupResponse, SyncGroupRequest, SyncGroupResponse,
};

use super::coordinator::{check_coordinator, check_group_right};
use crate::context::{RequestContext, text};
use crate::errors::{CallTarget, code_of};
use crate::groups::{JoinSpec, Joined, Reply, gateway_name, is_unknown_call};

/// First version of JoinGroup in which new members learn their ids before they join.
const KNOWN_ID_SINCE: i16 = 4;

/// First version of JoinGroup that states the type of protocols, and of LeaveGroup with several
/// members.
const PROTOCOL_TYPE_SINCE: i16 = 7;
const SEVERAL_SINCE: i16 = 3;

fn millis(millis: i32) -> Duration {
    Duration::from_millis(u64::try_from(millis).unwrap_or(0))
}

/// Draws a number that others cannot guess, from the operating system.
fn draw() -> u64 {
    RandomState::new().hash_one(0)
}

/// Answers a request to join, once the generation has begun.
pub(crate) async fn join_group(
    context: &RequestContext,
    request: JoinGroupRequest,
) -> JoinGroupResponse {
    match joined(context, request).await {
        Ok(joined) => join_response(context, joined),
        Err((code, member_id)) => JoinGroupResponse::default()
            .with_error_code(code.code())
            .with_generation_id(-1)
            .with_protocol_name((context.version < PROTOCOL_TYPE_SINCE).then(|| text("")))
            .with_member_id(text(member_id)),
    }
}

async fn joined(
    context: &RequestContext,
    request: JoinGroupRequest,
) -> Result<Joined, (ResponseError, String)> {
    let group = request.group_id.to_string();
    let member_id = request.member_id.to_string();
    let refused = |code| (code, member_id.clone());
    check_coordinator(context, &group).await.map_err(refused)?;
    let right = check_group_right(context, &group, AccessOperation::Read);
    right.await.map_err(refused)?;
    announce(context, &group).await.map_err(refused)?;
    let session_timeout = millis(request.session_timeout_ms);
    let rebalance_timeout = match context.version {
        0 => session_timeout,
        _ => millis(request.rebalance_timeout_ms),
    };
    let prefix: String = match &request.group_instance_id {
        Some(name) => name.chars().take(64).collect(),
        None => context.client_id.chars().take(64).collect(),
    };
    let protocols = request.protocols.into_iter();
    let spec = JoinSpec {
        member_id: member_id.clone(),
        new_id: format!("{prefix}-{:016x}{:016x}", draw(), draw()),
        must_know_id: context.version >= KNOWN_ID_SINCE,
        instance_id: request.group_instance_id.map(|name| name.to_string()),
        client_id: context.client_id.clone(),
        client_host: format!("/{}", context.peer.ip()),
        session_timeout,
        rebalance_timeout,
        protocol_type: request.protocol_type.to_string(),
        protocols: protocols.map(|it| (it.name.to_string(), it.metadata)).collect(),
    };
    match context.state.groups.join(&group, spec, &context.upstream) {
        Reply::Now(result) => result,
        Reply::Later(result) => {
            // The group was given up.
            let gone = |_| refused(ResponseError::NotCoordinator);
            result.await.map_err(gone)?
        }
    }
}

/// Reports a group to the cluster, which refuses native members from then on.
///
/// # Errors
/// INCONSISTENT_GROUP_PROTOCOL if the group has native members: the two protocols cannot share
/// partitions. Otherwise the code of the failure.
async fn announce(context: &RequestContext, group: &str) -> Result<(), ResponseError> {
    let report = context.state.groups.report(group, gateway_name(&context.state));
    let Err(error) = context.upstream.client().admin().report_gateway_members(report).await else {
        return Ok(());
    };
    if error.is(ErrorReason::GroupNotEmpty) {
        tracing::warn!(group, %error, "refused a Kafka client: use another group");
        return Err(ResponseError::InconsistentGroupProtocol);
    }
    // The cluster works without the report, and its commits are fenced.
    if is_unknown_call(&error) || error.is(ErrorReason::GroupLimitReached) {
        return check_not_native(context, group).await;
    }
    Err(report_code(&error))
}

/// Returns the code of a failed report. After CoordinatorNotAvailable the client asks again.
fn report_code(error: &helix_client::Error) -> ResponseError {
    match code_of(error, CallTarget::Group) {
        code @ ResponseError::GroupAuthorizationFailed => code,
        // Only the name can be wrong.
        ResponseError::InvalidRequest => ResponseError::InvalidGroupId,
        _ => ResponseError::CoordinatorNotAvailable,
    }
}

/// Checks that the group has no native members.
async fn check_not_native(context: &RequestContext, group: &str) -> Result<(), ResponseError> {
    let admin = context.upstream.client().admin();
    match admin.describe_group_page(group, false, 1, "").await {
        Ok(it) if it.members.is_empty() || !it.gateway.is_empty() => Ok(()),
        Ok(description) => {
            let member = description.members.first().map(|member| member.member_id.clone());
            tracing::warn!(
                group,
                member = member.unwrap_or_default(),
                "refused a Kafka client: the group has native members; use another group"
            );
            Err(ResponseError::InconsistentGroupProtocol)
        }
        Err(error) if error.is(ErrorReason::GroupNotFound) => Ok(()),
        Err(error) => match code_of(&error, CallTarget::Group) {
            code @ ResponseError::GroupAuthorizationFailed => Err(code),
            _ => Err(ResponseError::CoordinatorNotAvailable),
        },
    }
}

fn join_response(context: &RequestContext, joined: Joined) -> JoinGroupResponse {
    let member = |(id, instance_id, metadata): (String, Option<String>, bytes::Bytes)| {
        JoinGroupResponseMember::default()
            .with_member_id(text(id))
            .with_group_instance_id(instance_id.map(text))
            .with_metadata(metadata)
    };
    let mut response = JoinGroupResponse::default()
        .with_generation_id(joined.generation)
        .with_protocol_name(Some(text(joined.protocol)))
        .with_leader(text(joined.leader))
        .with_member_id(text(joined.member_id))
        .with_members(joined.members.into_iter().map(member).collect());
    if context.version >= PROTOCOL_TYPE_SINCE {
        response.protocol_type = Some(text(joined.protocol_type));
    }
    response
}

/// Answers a request for an assignment, once the leader has sent it.
pub(crate) async fn sync_group(
    context: &RequestContext,
    request: SyncGroupRequest,
) -> SyncGroupResponse {
    let group = request.group_id.to_string();
    let (kind, protocol) = (request.protocol_type.clone(), request.protocol_name.clone());
    match synced(context, &group, request).await {
        Ok(assignment) => SyncGroupResponse::default()
            .with_protocol_type(kind)
            .with_protocol_name(protocol)
            .with_assignment(assignment),
        Err(code) => SyncGroupResponse::default().with_error_code(code.code()),
    }
}

async fn synced(
    context: &RequestContext,
    group: &str,
    request: SyncGroupRequest,
) -> Result<bytes::Bytes, ResponseError> {
    check_coordinator(context, group).await?;
    let groups = &context.state.groups;
    let member_id = request.member_id.to_string();
    let instance_id = request.group_instance_id.map(|name| name.to_string());
    let generation = request.generation_id;
    let differs = |stated: &Option<kafka_protocol::protocol::StrBytes>, known: &str| {
        stated.as_ref().is_some_and(|stated| **stated != *known)
    };
    let is_leader = groups.with(group, |group, _| {
        group.check_member(&member_id, instance_id.as_deref(), generation)?;
        if differs(&request.protocol_type, &group.protocol_type)
            || differs(&request.protocol_name, &group.protocol)
        {
            return Err(ResponseError::InconsistentGroupProtocol);
        }
        Ok(group.awaits_assignment_of(&member_id))
    })?;
    if is_leader {
        // Members read their offsets after this, so their commits follow this state.
        read_epoch(context, group).await?;
    }
    let assignments = request.assignments.into_iter();
    let assignments = assignments.map(|it| (it.member_id.to_string(), it.assignment)).collect();
    let reply = groups.with(group, |group, now| {
        group.check_member(&member_id, instance_id.as_deref(), generation)?;
        Ok(group.sync(&member_id, assignments, now))
    })?;
    match reply {
        Reply::Now(result) => result,
        Reply::Later(result) => result.await.map_err(|_| ResponseError::NotCoordinator)?,
    }
}

/// Reads the state of the group's offsets.
async fn read_epoch(context: &RequestContext, group: &str) -> Result<(), ResponseError> {
    let Some(offsets) = context.state.groups.offsets(group) else {
        return Err(ResponseError::UnknownMemberId);
    };
    let mut epoch = offsets.epoch.lock().await;
    let read = context.upstream.client().admin().group_offsets_epoch(group).await;
    *epoch = read.map_err(|error| match code_of(&error, CallTarget::Group) {
        code @ ResponseError::GroupAuthorizationFailed => code,
        _ => ResponseError::CoordinatorNotAvailable,
    })?;
    Ok(())
}

/// Answers a heartbeat.
pub(crate) async fn heartbeat(
    context: &RequestContext,
    request: HeartbeatRequest,
) -> HeartbeatResponse {
    let group = request.group_id.to_string();
    let instance_id = request.group_instance_id.map(|name| name.to_string());
    context.state.groups.heard(&group, &context.upstream);
    let result = match check_coordinator(context, &group).await {
        Ok(()) => context.state.groups.with(&group, |group, now| {
            let generation = request.generation_id;
            group.check_member(&request.member_id, instance_id.as_deref(), generation)?;
            group.heartbeat(&request.member_id, now)
        }),
        Err(code) => Err(code),
    };
    HeartbeatResponse::default().with_error_code(result.err().map_or(0, |code| code.code()))
}

/// Answers a request to leave.
pub(crate) async fn leave_group(
    context: &RequestContext,
    request: LeaveGroupRequest,
) -> LeaveGroupResponse {
    let group = request.group_id.to_string();
    if let Err(code) = check_coordinator(context, &group).await {
        return LeaveGroupResponse::default().with_error_code(code.code());
    }
    let leave = |member_id: &str, instance_id: Option<&str>| {
        let result = context
            .state
            .groups
            .with(&group, |group, now| group.leave(member_id, instance_id, now));
        result.err().map_or(0, |code| code.code())
    };
    if context.version < SEVERAL_SINCE {
        return LeaveGroupResponse::default().with_error_code(leave(&request.member_id, None));
    }
    let member = |member: kafka_protocol::messages::leave_group_request::MemberIdentity| {
        let code = leave(&member.member_id, member.group_instance_id.as_deref());
        MemberResponse::default()
            .with_member_id(member.member_id)
            .with_group_instance_id(member.group_instance_id)
            .with_error_code(code)
    };
    LeaveGroupResponse::default().with_members(request.members.into_iter().map(member).collect())
}

#[cfg(test)]
mod tests {
    use helix_client::Error;
    use helix_proto::error as wire;

    use super::*;

    #[test]
    fn a_group_with_an_invalid_name_is_not_asked_for_again() {
        let code = |reason| {
            let status = wire::to_status(&wire::detail(reason), "", None);
            report_code(&Error::from_status(&status))
        };
        assert_eq!(code(ErrorReason::InvalidArgument), ResponseError::InvalidGroupId);
        let refused = code(ErrorReason::PermissionDenied);
        assert_eq!(refused, ResponseError::GroupAuthorizationFailed);
        assert_eq!(code(ErrorReason::NotLeader), ResponseError::CoordinatorNotAvailable);
    }
}
