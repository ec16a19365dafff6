//! Rights of calls that wait: they are checked again after each wait, before the call has an effect
//! or an answer. A long wait ends when the caller loses them.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

use super::authorize::{GuardedRequest, authorize};
use crate::access::Caller;
use crate::call::CallMemory;
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::limits::TOKEN_EXPIRY_POLL_MAX;
use crate::log::AccessState;
use crate::node::Node;

/// Reads in a row that a change of the caller's rights may repeat.
const READS_MAX: usize = 3;

/// The rights of a call, as a request that needs them.
pub(super) struct HeldRights<'a, T> {
    node: &'a Node,
    call: Option<&'a CallMemory>,
    request: T,
}

impl<'a, T: GuardedRequest> HeldRights<'a, T> {
    pub(super) fn new(node: &'a Node, call: Option<&'a CallMemory>, request: T) -> Self {
        Self { node, call, request }
    }

    /// Checks the rights again, if tokens or rules have changed since the call began.
    ///
    /// # Errors
    /// As of [`authorize`].
    pub(super) fn check(&self) -> Result<()> {
        match caller(self.call) {
            Some(caller) if !self.node.is_current(caller) => {
                authorize(self.node, self.call, &self.request)
            }
            _ => Ok(()),
        }
    }

    /// Waits until the caller loses one of the rights; returns the error.
    pub(super) async fn lost(&self) -> Error {
        lost(self.node, self.call, || self.check()).await
    }
}

/// Waits until a check of rights fails; never completes for a caller without credentials.
pub(super) async fn lost(
    node: &Node,
    call: Option<&CallMemory>,
    mut check: impl FnMut() -> Result<()>,
) -> Error {
    let Some(caller) = caller(call) else { return std::future::pending().await };
    let mut changes = AccessChanges::new(node);
    loop {
        changes.mark();
        if let Err(error) = check() {
            return error;
        }
        changes.changed(node, caller).await;
    }
}

/// Checks the rights of a request and reads. Reads again if the caller's access has changed
/// meanwhile, so that the caller may have the answer when it gets it.
///
/// # Errors
/// As of [`authorize`], and those of the read.
pub(super) async fn read<T, R, E, F>(
    node: &Node,
    call: Option<&CallMemory>,
    request: &T,
    read: impl Fn() -> F,
) -> Result<R, E>
where
    T: GuardedRequest,
    E: From<Error>,
    F: Future<Output = Result<R, E>>,
{
    for _ in 0..READS_MAX {
        authorize(node, call, request)?;
        let Some(caller) = caller(call) else { return read().await };
        let renewed = match node.is_current(caller) {
            true => None,
            false => Some(node.renewed(caller).map_err(Error::from)?),
        };
        let found = read().await;
        if node.is_current(renewed.as_ref().unwrap_or(caller)) {
            return found;
        }
    }
    Err(Error::throttled("changes of rules while a call reads").into())
}

fn caller(call: Option<&CallMemory>) -> Option<&Caller> {
    call?.access()?.caller()
}

/// Changes of tokens, rules and keys, after which the rights of a caller are checked again.
pub(crate) struct AccessChanges {
    access: watch::Receiver<Arc<AccessState>>,
    keys: Option<watch::Receiver<u64>>,
}

impl AccessChanges {
    pub(crate) fn new(node: &Node) -> Self {
        let access = node.cluster().machine().watch_access();
        Self { access, keys: node.jwt().map(|verifier| verifier.watch()) }
    }

    /// Marks all changes so far as seen. To be called before a check, so that a change during the
    /// check triggers another one.
    pub(crate) fn mark(&mut self) {
        self.access.mark_unchanged();
        if let Some(keys) = &mut self.keys {
            keys.mark_unchanged();
        }
    }

    /// Waits for a change, or until the credentials of a caller may have expired.
    pub(crate) async fn changed(&mut self, node: &Node, caller: &Caller) {
        let expires_at_us = caller.credentials().expires_at_us();
        tokio::select! {
            changed = self.access.changed() => if changed.is_err() {
                std::future::pending().await
            },
            () = changed_keys(&mut self.keys) => {}
            () = expiry(node, expires_at_us) => {}
        }
    }
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
