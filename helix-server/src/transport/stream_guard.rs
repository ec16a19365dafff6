//! Ends an open stream when its caller loses its token or JWT, or the right that it was opened
//! with.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use helix_proto::log::v1::AppendStreamInit;
use tokio::sync::watch;
use tokio::time::sleep;
use tonic::Status;

use super::load::CallMemory;
use crate::api::{GuardedRequest, early_end, reauthorize};
use crate::clock::Clock;
use crate::limits::TOKEN_EXPIRY_POLL_MAX;
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
        let mut changes = node.cluster().machine().watch_access();
        let mut keys = node.jwt().map(|verifier| verifier.watch());
        loop {
            // Marked first, so that a change during the check triggers another one.
            changes.mark_unchanged();
            if let Some(keys) = &mut keys {
                keys.mark_unchanged();
            }
            let Some(access) = call.access() else { return std::future::pending().await };
            if let Err(error) = reauthorize(&node, access, method) {
                return early_end(&error, method == AppendStreamInit::METHOD);
            }
            let expires_at_us = access.caller().and_then(|it| it.credentials().expires_at_us());
            tokio::select! {
                changed = changes.changed() => if changed.is_err() {
                    return std::future::pending().await;
                },
                () = changed_keys(&mut keys) => {}
                () = expiry(&node, expires_at_us) => {}
            }
        }
    }))
}

/// Waits until the keys of JWTs change.
async fn changed_keys(keys: &mut Option<watch::Receiver<u64>>) {
    if let Some(keys) = keys
        && keys.changed().await.is_ok()
    {
        return;
    }
    std::future::pending().await
}

/// Waits until a token may have expired. The clock may jump, so a long wait is cut.
async fn expiry(node: &Node, expires_at_us: Option<u64>) {
    let Some(expires_at_us) = expires_at_us else { return std::future::pending().await };
    let left = Duration::from_micros(expires_at_us.saturating_sub(node.clock().now_us()));
    sleep(left.min(TOKEN_EXPIRY_POLL_MAX)).await;
}
