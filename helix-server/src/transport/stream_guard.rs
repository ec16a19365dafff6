//! Ends an open stream when its caller loses its token or JWT, or the right that it was opened
//! with.

use std::pin::Pin;
use std::sync::Arc;

use helix_proto::log::v1::AppendStreamInit;
use tonic::Status;

use crate::api::{AccessChanges, GuardedRequest, early_end, reauthorize};
use crate::call::CallMemory;
use crate::node::Node;

/// Resolves when the stream must end.
pub(super) type StreamGuard = Pin<Box<dyn Future<Output = Status> + Send>>;

/// Returns the guard of a call's stream; `None` for a caller without credentials.
pub(super) fn guard(
    node: &Arc<Node>,
    call: &Arc<CallMemory>,
    method: &'static str,
) -> Option<StreamGuard> {
    call.access()?.caller()?;
    let (node, call) = (node.clone(), call.clone());
    Some(Box::pin(async move {
        let mut changes = AccessChanges::new(&node);
        loop {
            changes.mark();
            let Some(access) = call.access() else { return std::future::pending().await };
            if let Err(error) = reauthorize(&node, access, method) {
                return early_end(&error, method == AppendStreamInit::METHOD);
            }
            let Some(caller) = access.caller() else { return std::future::pending().await };
            changes.changed(&node, caller).await;
        }
    }))
}
