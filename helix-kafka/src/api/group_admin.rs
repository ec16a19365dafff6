//! ListGroups, DescribeGroups and DeleteGroups.

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream;
use helix_client::proto::log::v1::{AccessOperation, ErrorReason, GroupState};
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::delete_groups_response::DeletableGroupResult;
use kafka_protocol::messages::describe_groups_response::{DescribedGroup, DescribedGroupMember};
use kafka_protocol::messages::list_groups_response::ListedGroup;
use kafka_protocol::messages::{
    DeleteGroupsRequest, DeleteGroupsResponse, DescribeGroupsRequest, DescribeGroupsResponse,
    GroupId, ListGroupsRequest, ListGroupsResponse,
};

use super::coordinator::{check_coordinator, check_group_right, gateway_of_group};
use crate::context::{RequestContext, text};
use crate::errors::{CallTarget, code_of};

/// Coordinators that are looked up at once.
const LOOKUPS: usize = 16;

/// First versions of ListGroups with states.
const STATES_SINCE: i16 = 4;

/// Type of protocol of groups whose members read topics.
const CONSUMER: &str = "consumer";

fn native_state(state: GroupState) -> &'static str {
    match state {
        GroupState::Stable => "Stable",
        GroupState::Assigning => "PreparingRebalance",
        GroupState::Reconciling => "CompletingRebalance",
        GroupState::Empty | GroupState::Unspecified => "Empty",
    }
}

/// Answers a request for the groups that this gateway coordinates.
pub(crate) async fn list_groups(
    context: &RequestContext,
    request: ListGroupsRequest,
) -> ListGroupsResponse {
    let known = match context.upstream.client().admin().groups().await {
        Ok(groups) => groups,
        Err(error) => {
            let code = match code_of(&error, CallTarget::Group) {
                code @ ResponseError::GroupAuthorizationFailed => code,
                _ => ResponseError::CoordinatorNotAvailable,
            };
            return ListGroupsResponse::default().with_error_code(code.code());
        }
    };
    let brokers = &context.state.brokers;
    let own = brokers.own().node_id;
    let mut here = context.state.groups.list();
    let mut listed: Vec<(String, String, &'static str)> = Vec::new();
    let mut others = Vec::new();
    for group in known {
        match here.iter().position(|(name, _, _)| *name == group.group) {
            Some(index) => {
                let (name, kind, state) = here.swap_remove(index);
                listed.push((name, kind, state.name()));
            }
            None => others.push(group),
        }
    }
    // Without a commit, the cluster does not know them yet.
    for (name, kind, state) in here {
        if check_group_right(context, &name, AccessOperation::Describe).await.is_ok() {
            listed.push((name, kind, state.name()));
        }
    }
    let coordinated = stream::iter(others)
        .map(|group| async move {
            let is_here = brokers.is_single()
                || gateway_of_group(context, &group.group).await.is_ok_and(|it| it.node_id == own);
            is_here.then_some(group)
        })
        .buffer_unordered(LOOKUPS);
    let coordinated: Vec<_> = coordinated.filter_map(std::future::ready).collect().await;
    for group in coordinated {
        let state = native_state(group.state());
        listed.push((group.group, CONSUMER.to_owned(), state));
    }
    listed.sort();
    let filter = request.states_filter;
    let is_wanted = |state: &str| {
        filter.is_empty() || filter.iter().any(|wanted| wanted.eq_ignore_ascii_case(state))
    };
    let groups = listed.into_iter().filter(|(_, _, state)| is_wanted(state));
    let groups = groups.map(|(name, kind, state)| {
        let group = ListedGroup::default()
            .with_group_id(GroupId(text(name)))
            .with_protocol_type(text(kind));
        match context.version >= STATES_SINCE {
            true => group.with_group_state(text(state)),
            false => group,
        }
    });
    ListGroupsResponse::default().with_groups(groups.collect())
}

/// Answers a request for descriptions.
pub(crate) async fn describe_groups(
    context: &RequestContext,
    request: DescribeGroupsRequest,
) -> DescribeGroupsResponse {
    let groups = request.groups.into_iter().map(|group_id| async move {
        let described = DescribedGroup::default().with_group_id(group_id.clone());
        match describe(context, &group_id).await {
            Ok(Described { state, kind, protocol, members }) => described
                .with_group_state(text(state))
                .with_protocol_type(text(kind))
                .with_protocol_data(text(protocol))
                .with_members(members),
            Err(code) => described.with_error_code(code.code()),
        }
    });
    DescribeGroupsResponse::default().with_groups(join_all(groups).await)
}

struct Described {
    state: &'static str,
    kind: String,
    protocol: String,
    members: Vec<DescribedGroupMember>,
}

async fn describe(context: &RequestContext, name: &str) -> Result<Described, ResponseError> {
    check_coordinator(context, name).await?;
    check_group_right(context, name, AccessOperation::Describe).await?;
    let here = context.state.groups.with(name, |group, _| {
        let member = |(id, member): (&String, &crate::groups::KafkaMember)| {
            let described = DescribedGroupMember::default()
                .with_member_id(text(id.clone()))
                .with_client_id(text(member.client_id.clone()))
                .with_client_host(text(member.client_host.clone()))
                .with_member_metadata(group.metadata_of(member))
                .with_member_assignment(member.assignment.clone());
            match context.version >= 4 {
                true => described.with_group_instance_id(member.instance_id.clone().map(text)),
                false => described,
            }
        };
        Ok(Described {
            state: group.state.name(),
            kind: group.protocol_type.clone(),
            protocol: group.protocol.clone(),
            members: group.members.iter().map(member).collect(),
        })
    });
    if let Ok(here) = here
        && !here.members.is_empty()
    {
        return Ok(here);
    }
    let plain = |state| Described {
        state,
        kind: CONSUMER.to_owned(),
        protocol: String::new(),
        members: Vec::new(),
    };
    match context.upstream.client().admin().describe_group(name, false).await {
        Ok(group) => {
            let members = group.members.iter().map(|member| {
                DescribedGroupMember::default()
                    .with_member_id(text(member.member_id.clone()))
                    .with_client_id(text(member.client_name.clone()))
            });
            Ok(Described { members: members.collect(), ..plain(native_state(group.state())) })
        }
        Err(error) if error.is(ErrorReason::GroupNotFound) => {
            Ok(Described { kind: String::new(), ..plain("Dead") })
        }
        Err(error) => Err(code_of(&error, CallTarget::Group)),
    }
}

/// Answers a request to delete groups.
pub(crate) async fn delete_groups(
    context: &RequestContext,
    request: DeleteGroupsRequest,
) -> DeleteGroupsResponse {
    let results = request.groups_names.into_iter().map(|group_id| async move {
        let code = match delete(context, &group_id).await {
            Ok(()) => 0,
            Err(code) => code.code(),
        };
        DeletableGroupResult::default().with_group_id(group_id).with_error_code(code)
    });
    DeleteGroupsResponse::default().with_results(join_all(results).await)
}

async fn delete(context: &RequestContext, name: &str) -> Result<(), ResponseError> {
    check_coordinator(context, name).await?;
    if context.state.groups.has_members(name) {
        return Err(ResponseError::NonEmptyGroup);
    }
    let deleted = context.upstream.client().admin().delete_group(name).await;
    deleted.map_err(|error| code_of(&error, CallTarget::Group))
}
