//! The tokio runtime of this process, and values that belong to one process.
//!
//! Threads do not survive `fork`. A process therefore has a runtime of its own, and values of
//! another process are neither used nor dropped.

use std::sync::OnceLock;

use pyo3::PyResult;
use pyo3::exceptions::PyRuntimeError;
use tokio::runtime::{Builder, Runtime};

use crate::failure::Failed;

/// Threads of the runtime. They run connections and batches; Python's threads run the rest.
const WORKER_THREADS: usize = 2;

/// Longest chain of processes that forked from each other and each use a client.
const FORKS_MAX: usize = 64;

/// Runtimes with their process. Locks held by other threads at a fork are never taken again.
static RUNTIMES: [OnceLock<(u32, Runtime)>; FORKS_MAX] = [const { OnceLock::new() }; FORKS_MAX];

/// Returns the runtime of this process.
///
/// # Errors
/// Fails if its threads cannot be started.
pub(crate) fn runtime() -> PyResult<&'static Runtime> {
    let process = std::process::id();
    for slot in &RUNTIMES {
        let found = match slot.get() {
            Some(found) => found,
            None => {
                let started = start()?;
                // If another thread was faster, the runtime started here ends unused.
                slot.get_or_init(|| (process, started))
            }
        };
        if found.0 == process {
            return Ok(&found.1);
        }
    }
    Err(PyRuntimeError::new_err("too many processes that forked from each other use a client"))
}

fn start() -> PyResult<Runtime> {
    let runtime = Builder::new_multi_thread()
        .worker_threads(WORKER_THREADS)
        .thread_name("helix-client")
        .enable_all()
        .build();
    runtime.map_err(|error| PyRuntimeError::new_err(format!("cannot start threads: {error}")))
}

/// A value that only the process that made it may use or drop.
#[derive(Debug)]
pub(crate) struct OwnedByProcess<T> {
    process: u32,
    /// Always set, except while it is dropped.
    value: Option<T>,
}

impl<T> OwnedByProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { process: std::process::id(), value: Some(value) }
    }

    /// Returns the value.
    ///
    /// # Errors
    /// Fails in a process that was forked since the value was made.
    pub(crate) fn get(&self) -> Result<&T, Failed> {
        match &self.value {
            Some(value) if self.process == std::process::id() => Ok(value),
            _ => Err(Failed::Forked),
        }
    }

    /// Returns the value to use it.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub(crate) fn get_mut(&mut self) -> Result<&mut T, Failed> {
        match &mut self.value {
            Some(value) if self.process == std::process::id() => Ok(value),
            _ => Err(Failed::Forked),
        }
    }
}

impl<T> Drop for OwnedByProcess<T> {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // Its tasks and their locks are those of the other process.
            std::mem::forget(self.value.take());
        }
    }
}
