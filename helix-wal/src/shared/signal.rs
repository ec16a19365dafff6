//! Wake-ups of the writer and the keeper.

use std::sync::Arc;

use crate::sync::{AtomicBool, Ordering};

/// Requests a step of a thread and tracks whether the thread sleeps.
#[derive(Debug, Default)]
pub(crate) struct WakeSignal {
    /// Changed only under the lock; a busy-polling thread reads it without.
    pub raised: Arc<AtomicBool>,
    pub waiting: bool,
}

impl WakeSignal {
    /// Requests a step. Returns whether the thread must be woken.
    ///
    /// Only the first request wakes it, for all requests before it runs.
    pub(crate) fn raise(&mut self) -> bool {
        let is_first = !self.raised.swap(true, Ordering::Release);
        is_first && self.waiting
    }

    pub(crate) fn raised(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.raised)
    }
}

/// The threads of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WalThread {
    Writer,
    Keeper,
}

pub(crate) type Waker = Box<dyn Fn() + Send + Sync>;

/// Separate wakers: a thread must not wake itself with its own work.
pub(crate) struct Wakers {
    pub writer: Waker,
    pub keeper: Waker,
}
