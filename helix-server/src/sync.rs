//! Takes locks, and panics on a poisoned one.
//! A thread that panics while it holds a lock may leave its data half changed.

use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

const POISONED: &str = "a thread panicked while it held this lock";

/// Locks the mutex.
///
/// # Panics
/// Panics if another thread panicked while it held the mutex.
#[track_caller]
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect(POISONED)
}

/// Locks for shared access; panics as [`lock`] does.
#[track_caller]
pub(crate) fn read<T: ?Sized>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().expect(POISONED)
}

/// Locks for exclusive access; panics as [`lock`] does.
#[track_caller]
pub(crate) fn write<T: ?Sized>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().expect(POISONED)
}
