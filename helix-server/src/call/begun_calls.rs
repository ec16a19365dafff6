//! Counts the calls of a connection between their acceptance and their first turn.
//!
//! Each accepted call is a task, and tasks wait in the runtime's queues, which have no bound. A
//! connection is therefore read only while few of its calls have not begun.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use super::ClientConnection;
use crate::limits;

/// Calls of one connection that HTTP/2 has accepted.
#[derive(Debug, Default)]
pub(super) struct AcceptedCalls {
    count: AtomicU64,
    /// Calls that have not begun, and handles of the connection that are no calls.
    unbegun: AtomicUsize,
    /// These handles.
    idle_handles: AtomicUsize,
    /// True if the connection is read again when all calls have begun.
    is_awaited: AtomicBool,
}

/// Handle of a connection in its service, which HTTP/2 clones for each call that it accepts, and
/// drops when the call begins.
#[derive(Debug)]
pub(crate) struct AcceptedCall(Arc<ClientConnection>);

impl AcceptedCall {
    pub(crate) fn new(connection: &Arc<ClientConnection>) -> Self {
        connection.accepted.unbegun.fetch_add(1, Ordering::SeqCst);
        connection.accepted.count.fetch_add(1, Ordering::Relaxed);
        Self(connection.clone())
    }

    pub(crate) fn connection(&self) -> &Arc<ClientConnection> {
        &self.0
    }
}

impl Deref for AcceptedCall {
    type Target = Arc<ClientConnection>;

    fn deref(&self) -> &Arc<ClientConnection> {
        &self.0
    }
}

impl Clone for AcceptedCall {
    fn clone(&self) -> Self {
        Self::new(&self.0)
    }
}

impl Drop for AcceptedCall {
    fn drop(&mut self) {
        let accepted = &self.0.accepted;
        let left = accepted.unbegun.fetch_sub(1, Ordering::SeqCst) - 1;
        if left <= accepted.idle_handles.load(Ordering::Relaxed)
            && accepted.is_awaited.load(Ordering::SeqCst)
        {
            accepted.is_awaited.store(false, Ordering::SeqCst);
            self.0.wake_reader();
        }
    }
}

impl ClientConnection {
    /// Notes that no call is accepted yet: the handles so far are no calls.
    pub fn begin_calls(&self) {
        let handles = self.accepted.unbegun.load(Ordering::SeqCst);
        self.accepted.idle_handles.store(handles, Ordering::Relaxed);
    }

    /// Returns a number that changes with each accepted call.
    pub fn accepted_calls(&self) -> u64 {
        self.accepted.count.load(Ordering::Relaxed)
    }

    /// Returns the number of accepted calls that have not begun.
    pub fn unbegun_calls(&self) -> usize {
        let handles = self.accepted.idle_handles.load(Ordering::Relaxed);
        self.accepted.unbegun.load(Ordering::SeqCst).saturating_sub(handles)
    }

    /// Pending while [`limits::CALLS_UNBEGUN_MAX`] accepted calls have not begun.
    pub fn poll_begun(&self, context: &Context<'_>) -> Poll<()> {
        if self.unbegun_calls() < limits::CALLS_UNBEGUN_MAX {
            return Poll::Ready(());
        }
        self.register_reader(context.waker());
        self.accepted.is_awaited.store(true, Ordering::SeqCst);
        // They may have begun before.
        if self.unbegun_calls() == 0 { Poll::Ready(()) } else { Poll::Pending }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::super::ClientLoad;
    use super::*;
    use crate::memory::{MEMORY_LIMIT_MIN, MemoryShares};

    #[test]
    fn a_connection_is_read_again_once_its_calls_have_begun() {
        let load = ClientLoad::new(MemoryShares::of(MEMORY_LIMIT_MIN));
        let connection = load.connect().unwrap();
        let handle = AcceptedCall::new(&connection);
        let (waker, wakes) = counting_waker();
        let context = Context::from_waker(&waker);
        connection.begin_calls();
        let mut calls: Vec<_> = (1..limits::CALLS_UNBEGUN_MAX).map(|_| handle.clone()).collect();
        assert!(connection.poll_begun(&context).is_ready());
        calls.push(handle.clone());
        assert_eq!(connection.unbegun_calls(), limits::CALLS_UNBEGUN_MAX);
        assert!(connection.poll_begun(&context).is_pending());
        let last = calls.pop();
        calls.clear();
        assert_eq!(wakes.load(Ordering::SeqCst), 0);
        drop(last);
        assert_eq!(wakes.load(Ordering::SeqCst), 1);
        assert!(connection.poll_begun(&Context::from_waker(Waker::noop())).is_ready());
        drop(handle);
    }

    fn counting_waker() -> (Waker, Arc<AtomicUsize>) {
        struct Count(Arc<AtomicUsize>);
        impl std::task::Wake for Count {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }
        let wakes = Arc::new(AtomicUsize::new(0));
        (Waker::from(Arc::new(Count(wakes.clone()))), wakes)
    }
}
