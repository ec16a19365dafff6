//! Threads and locks: those of the standard library, or of shuttle with `--cfg shuttle`.
//!
//! shuttle explores the interleavings of threads (`tests/it/interleavings.rs`). Locks under which
//! no thread waits and no other lock is taken may use the standard library directly.

use std::sync::{LockResult, PoisonError};

#[cfg(not(shuttle))]
pub(crate) use std::{
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread::{Builder, JoinHandle, ThreadId, current, yield_now},
};

#[cfg(shuttle)]
pub(crate) use shuttle::{
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread::{Builder, JoinHandle, ThreadId, current, yield_now},
};

/// Ignores that a lock is poisoned by a panic of another thread.
///
/// The log has its own poisoning: a writer or a keeper that panics poisons the log when it is
/// dropped, and every later call fails. The other locks protect values that are consistent between
/// any two changes.
pub(crate) trait IgnorePoison {
    type Guard;
    fn ignore_poison(self) -> Self::Guard;
}

impl<G> IgnorePoison for LockResult<G> {
    type Guard = G;

    fn ignore_poison(self) -> G {
        self.unwrap_or_else(PoisonError::into_inner)
    }
}
