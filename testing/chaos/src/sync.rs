//! Locks of the standard library.

use std::sync::{Mutex, MutexGuard};

/// Locks a mutex.
///
/// # Panics
/// Panics if a thread panicked while it held the lock: its data may be inconsistent.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no panic while it is locked")
}
