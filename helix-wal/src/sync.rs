//! What the log's threads are made of and meet at: the standard library's, or with `--cfg shuttle`
//! those of a scheduler that tries orders of steps (`tests/it/interleavings.rs`). Locks under which
//! nothing waits and no other lock is taken need not come from here.

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
