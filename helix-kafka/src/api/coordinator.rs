//! FindCoordinator, and the check that this gateway coordinates a group.

use futures_util::future::join_all;
use helix_client::proto::log::v1::{AccessOperation, ResourceKind};
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::find_coordinator_response::Coordinator;
use kafka_protocol::messages::{BrokerId, FindCoordinatorRequest, FindCoordinatorResponse};
use kafka_protocol::protocol::StrBytes;

use crate::brokers::GatewayOfNode;
use crate::context::{RequestContext, text};
use crate::errors::{CallTarget, code_of};

/// Kind of a coordinator: consumer groups; 1 is transactions.
const GROUP: i8 = 0;

/// First version with several groups.
const SEVERAL_SINCE: i16 = 4;

/// Returns the gateway that coordinates a group.
///
/// # Errors
/// The code of the failure.
pub(crate) async fn gateway_of_group<'a>(
    context: &'a RequestContext,
    group: &str,
) -> Result<&'a GatewayOfNode, ResponseError> {
    let brokers = &context.state.brokers;
    if group.is_empty() {
        return Err(ResponseError::InvalidGroupId);
    }
    check_group_right(context, group, AccessOperation::Describe).await?;
    Ok(brokers.of_group(group))
}

/// Checks that this gateway coordinates a group, at most every two seconds.
///
/// # Errors
/// NOT_COORDINATOR, or the code of the failure.
pub(crate) async fn check_coordinator(
    context: &RequestContext,
    group: &str,
) -> Result<(), ResponseError> {
    let groups = &context.state.groups;
    if groups.has_members(group) && !groups.needs_confirmation(group) {
        return Ok(());
    }
    let gateway = match gateway_of_group(context, group).await {
        Ok(gateway) => gateway,
        // While the cluster does not answer, members stay.
        Err(ResponseError::CoordinatorNotAvailable) if groups.has_members(group) => return Ok(()),
        Err(code) => return Err(code),
    };
    if gateway.node_id != context.state.brokers.own().node_id {
        groups.give_up(group);
        return Err(ResponseError::NotCoordinator);
    }
    groups.confirm(group);
    Ok(())
}

/// Checks a right to a group.
///
/// # Errors
/// GROUP_AUTHORIZATION_FAILED, or the code of the failure.
pub(crate) async fn check_group_right(
    context: &RequestContext,
    group: &str,
    operation: AccessOperation,
) -> Result<(), ResponseError> {
    match context.upstream.may(ResourceKind::Group, group, operation).await {
        Ok(true) => Ok(()),
        Ok(false) => Err(ResponseError::GroupAuthorizationFailed),
        Err(error) => Err(match code_of(&error, CallTarget::Group) {
            code @ ResponseError::GroupAuthorizationFailed => code,
            // The client asks again.
            _ => ResponseError::CoordinatorNotAvailable,
        }),
    }
}

/// Answers a request for coordinators.
pub(crate) async fn find_coordinator(
    context: &RequestContext,
    request: FindCoordinatorRequest,
) -> FindCoordinatorResponse {
    let key_type = request.key_type;
    let keys = match context.version >= SEVERAL_SINCE {
        true => request.coordinator_keys,
        false => vec![request.key],
    };
    let coordinators = keys.into_iter().map(|key| coordinator(context, key, key_type));
    let mut coordinators = join_all(coordinators).await;
    if context.version >= SEVERAL_SINCE {
        return FindCoordinatorResponse::default().with_coordinators(coordinators);
    }
    let only = coordinators.pop().unwrap_or_default();
    FindCoordinatorResponse::default()
        .with_error_code(only.error_code)
        .with_error_message(only.error_message)
        .with_node_id(only.node_id)
        .with_host(only.host)
        .with_port(only.port)
}

async fn coordinator(context: &RequestContext, key: StrBytes, key_type: i8) -> Coordinator {
    let found = match key_type {
        GROUP => gateway_of_group(context, &key).await.map_err(|code| (code, code.to_string())),
        // Clients take this code for final, and say so at once.
        _ => {
            let what = "transactions are not supported; leave out transactional.id";
            Err((ResponseError::TransactionalIdAuthorizationFailed, what.to_owned()))
        }
    };
    let response = Coordinator::default().with_key(key);
    match found {
        Ok(gateway) => response
            .with_node_id(BrokerId(gateway.node_id))
            .with_host(text(gateway.address.host.clone()))
            .with_port(i32::from(gateway.address.port)),
        Err((code, what)) => response
            .with_error_code(code.code())
            .with_error_message(Some(text(what)))
            .with_node_id(BrokerId(-1))
            .with_port(-1),
    }
}
