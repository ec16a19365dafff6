//! Calls that wait for the service, for programs that show them to people.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use helix_proto::log::v1::ErrorReason;
use tokio::time::Instant;

use crate::call_spec::{CallSpec, Repeat};
use crate::error::Error;

/// Time after a failure for which a call that waits on request counts as in trouble. A later
/// attempt of it may wait as requested.
const TROUBLE_MAX: Duration = Duration::from_secs(5);

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
    /// The call may change something. Its outcome is open until it ends.
    pub is_change: bool,
    /// Failure of the last attempt, if one has failed. An attempt with a reason of the service goes
    /// before later ones without.
    pub last_error: Option<Error>,
}

#[derive(Debug, Default)]
struct PendingTable {
    next_id: u64,
    calls: BTreeMap<u64, TableRow>,
}

#[derive(Debug)]
struct TableRow {
    call: PendingCall,
    /// The call waits on request, which is no sign of trouble.
    waits: bool,
    failed_at: Option<Instant>,
}

impl TableRow {
    /// Returns the call, unless it waits on request and nothing has failed of late.
    fn in_trouble(&self) -> Option<&PendingCall> {
        let has_failed = self.failed_at.is_some_and(|at| at.elapsed() < TROUBLE_MAX);
        (!self.waits || has_failed).then_some(&self.call)
    }
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

    /// Returns true if calls are registered.
    pub fn is_watched(&self) -> bool {
        self.0.is_some()
    }

    /// Returns the call that is in progress for the longest time.
    pub fn longest(&self) -> Option<PendingCall> {
        let table = lock(self.0.as_ref()?);
        // Ids grow with time.
        table.calls.values().find_map(TableRow::in_trouble).cloned()
    }

    /// Returns the error of a caller that stops to wait for its calls: the failure that says most,
    /// or a timeout if none has failed. None if no call is in progress.
    pub fn abandon(&self) -> Option<Error> {
        let table = lock(self.0.as_ref()?);
        let calls = || table.calls.values().filter_map(TableRow::in_trouble);
        let longest = calls().next()?;
        let failures = || calls().filter_map(|call| call.last_error.as_ref());
        let explained = failures().find(|error| is_explained(error));
        let error = explained.or_else(|| failures().next()).cloned();
        let error = error.unwrap_or_else(|| Error::timed_out(longest.name));
        Some(error.with_may_have_applied(calls().any(|call| call.is_change)))
    }

    /// Registers a call, if this table is on.
    pub(crate) fn begin(&self, call: &CallSpec) -> Option<PendingGuard> {
        let shared = self.0.as_ref()?;
        let mut table = lock(shared);
        let id = table.next_id;
        table.next_id += 1;
        let waits = !call.wait.is_zero();
        // A call that waits on request, such as the heartbeat of a group's member, changes nothing
        // that its caller asks for.
        let is_change = call.repeat != Repeat::Read && !waits;
        let since = Instant::now();
        let call = PendingCall { name: call.name, since, is_change, last_error: None };
        table.calls.insert(id, TableRow { call, waits, failed_at: None });
        Some(PendingGuard { table: shared.clone(), id })
    }
}

impl PendingGuard {
    /// Records the failure of an attempt.
    pub(crate) fn on_failure(&self, error: &Error) {
        if let Some(TableRow { call, failed_at, .. }) = lock(&self.table).calls.get_mut(&self.id) {
            *failed_at = Some(Instant::now());
            // A timeout or a broken connection says less than the failure before it.
            if is_explained(error) || !call.last_error.as_ref().is_some_and(is_explained) {
                call.last_error = Some(error.clone());
            }
        }
    }
}

impl Drop for PendingGuard {
    fn drop(&mut self) {
        lock(&self.table).calls.remove(&self.id);
    }
}

/// Returns true if the service gave a reason that a later failure should not hide. A leader that
/// has moved is no reason to fail.
fn is_explained(error: &Error) -> bool {
    error.reason.is_some_and(|reason| reason != ErrorReason::NotLeader)
}

fn lock(table: &Mutex<PendingTable>) -> std::sync::MutexGuard<'_, PendingTable> {
    // No code under the lock can panic in the middle of a change.
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    fn read(name: &'static str) -> CallSpec {
        CallSpec::new(name, Repeat::Read)
    }

    #[test]
    fn longest_call_is_the_first_that_has_not_ended() {
        let pending = PendingCalls::watched();
        let first = pending.begin(&read("one")).unwrap();
        let second = pending.begin(&read("two")).unwrap();
        first.on_failure(&Error::client(Code::Unavailable, "down"));
        let longest = pending.longest().unwrap();
        assert_eq!((longest.name, longest.last_error.unwrap().message.as_str()), ("one", "down"));
        drop(first);
        assert_eq!(pending.longest().unwrap().name, "two");
        drop(second);
        assert!(pending.longest().is_none());
        assert!(PendingCalls::default().begin(&read("one")).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn call_that_waits_on_request_counts_only_after_a_failure() {
        let pending = PendingCalls::watched();
        let wait = Duration::from_secs(60);
        let heartbeat = CallSpec { wait, ..CallSpec::new("heartbeat", Repeat::Always) };
        let guard = pending.begin(&heartbeat).unwrap();
        assert!(pending.longest().is_none() && pending.abandon().is_none());
        guard.on_failure(&Error::known(ErrorReason::NoLeader, "no leader"));
        assert_eq!(pending.longest().unwrap().name, "heartbeat");
        assert!(!pending.abandon().unwrap().may_have_applied);
        tokio::time::advance(TROUBLE_MAX).await;
        assert!(pending.longest().is_none(), "the next attempt waits as requested");
    }

    #[test]
    fn caller_that_stops_to_wait_learns_the_reason() {
        let pending = PendingCalls::watched();
        assert!(pending.abandon().is_none());
        let first = pending.begin(&read("one")).unwrap();
        let error = pending.abandon().unwrap();
        assert_eq!((error.code, error.may_have_applied), (Code::DeadlineExceeded, false));
        first.on_failure(&Error::client(Code::Unavailable, "down"));
        assert_eq!(pending.abandon().unwrap().message, "down");
        let second = pending.begin(&CallSpec::new("two", Repeat::Always)).unwrap();
        second.on_failure(&Error::known(ErrorReason::NoLeader, "no leader"));
        second.on_failure(&Error::timed_out("two"));
        let error = pending.abandon().unwrap();
        assert!(error.is(ErrorReason::NoLeader) && error.may_have_applied, "{error}");
        drop((first, second));
        assert!(pending.abandon().is_none());
    }
}
