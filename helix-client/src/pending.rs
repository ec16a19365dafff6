//! Calls that wait for the service, for programs that show them to people.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::time::Instant;

use crate::error::Error;

/// The calls of a client that are in progress. Clones share them. The default is off.
#[derive(Debug, Clone, Default)]
pub struct PendingCalls(Option<Arc<Mutex<PendingTable>>>);

/// A call in progress.
#[derive(Debug, Clone)]
pub struct PendingCall {
    /// Name of the call.
    pub name: &'static str,
    /// Start of the call.
    pub since: Instant,
    /// Failure of the last attempt, if one has failed.
    pub last_error: Option<Error>,
}

#[derive(Debug, Default)]
struct PendingTable {
    next_id: u64,
    calls: BTreeMap<u64, PendingCall>,
}

/// A registered call; dropping it ends the registration.
#[derive(Debug)]
pub(crate) struct PendingGuard {
    table: Arc<Mutex<PendingTable>>,
    id: u64,
}

impl PendingCalls {
    /// Returns a table that registers the calls of every client that has it in its settings.
    pub fn watched() -> Self {
        Self(Some(Arc::default()))
    }

    /// Returns the call that is in progress for the longest time.
    pub fn longest(&self) -> Option<PendingCall> {
        let table = lock(self.0.as_ref()?);
        // Ids grow with time.
        table.calls.values().next().cloned()
    }

    /// Registers a call, if this table is on.
    pub(crate) fn begin(&self, name: &'static str) -> Option<PendingGuard> {
        let shared = self.0.as_ref()?;
        let mut table = lock(shared);
        let id = table.next_id;
        table.next_id += 1;
        let call = PendingCall { name, since: Instant::now(), last_error: None };
        table.calls.insert(id, call);
        Some(PendingGuard { table: shared.clone(), id })
    }
}

impl PendingGuard {
    /// Records the failure of an attempt.
    pub(crate) fn on_failure(&self, error: &Error) {
        if let Some(call) = lock(&self.table).calls.get_mut(&self.id) {
            call.last_error = Some(error.clone());
        }
    }
}

impl Drop for PendingGuard {
    fn drop(&mut self) {
        lock(&self.table).calls.remove(&self.id);
    }
}

fn lock(table: &Mutex<PendingTable>) -> std::sync::MutexGuard<'_, PendingTable> {
    // No code under the lock can panic in the middle of a change.
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[test]
    fn longest_call_is_the_first_that_has_not_ended() {
        let pending = PendingCalls::watched();
        let first = pending.begin("one").unwrap();
        let second = pending.begin("two").unwrap();
        first.on_failure(&Error::client(Code::Unavailable, "down"));
        let longest = pending.longest().unwrap();
        assert_eq!((longest.name, longest.last_error.unwrap().message.as_str()), ("one", "down"));
        drop(first);
        assert_eq!(pending.longest().unwrap().name, "two");
        drop(second);
        assert!(pending.longest().is_none());
        assert!(PendingCalls::default().begin("one").is_none());
    }
}
