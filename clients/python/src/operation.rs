//! Runs the futures of the Rust client for Python: as awaitables of any event loop, or blocking.
//!
//! A future is polled on the thread that waits for it, without Python's lock. So a cancelled wait
//! drops the future, which has the effect that its documentation states, and a result is never
//! lost between the two sides. Threads of the runtime only wake a loop, through a socket: they
//! never call into Python, and a loop that was closed is no error.

use std::collections::HashMap;
use std::future::Future;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use pyo3::exceptions::{PyRuntimeError, PyStopIteration};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::{IntoPyObjectExt, PyTraverseError, PyVisit, intern};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::failure::Failed;
use crate::process::{OwnedByProcess, runtime};

/// Interval at which a blocking wait looks for signals such as Ctrl-C.
const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Makes the result of a future, with Python's lock.
type Outcome = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

type Work = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// How a handle runs its futures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Returns awaitables.
    Async,
    /// Waits, and returns the result.
    Blocking,
}

impl Mode {
    /// Runs a future whose result has an own conversion.
    pub(crate) fn run_with<T: Send + 'static>(
        self,
        py: Python<'_>,
        future: impl Future<Output = Result<T, Failed>> + Send + 'static,
        convert: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
    ) -> PyResult<Py<PyAny>> {
        let work: Work = Box::pin(async move {
            let result = future.await;
            let outcome: Outcome = Box::new(move |py| convert(py, result?));
            outcome
        });
        match self {
            Self::Async => Operation::new(work).into_py_any(py),
            Self::Blocking => block(py, work),
        }
    }

    /// Runs a future.
    pub(crate) fn run<T>(
        self,
        py: Python<'_>,
        future: impl Future<Output = Result<T, Failed>> + Send + 'static,
    ) -> PyResult<Py<PyAny>>
    where
        T: for<'py> IntoPyObject<'py> + Send + 'static,
    {
        self.run_with(py, future, |py, value| value.into_py_any(py))
    }
}

/// Runs a call on the runtime, and ends it where its caller stops to wait.
///
/// Calls share connections and requests for metadata inside the client, so none may stand still
/// because an event loop is busy or was closed. Waits for records share nothing: Python polls them.
pub(crate) async fn on_runtime<T: Send + 'static>(
    future: impl Future<Output = Result<T, Failed>> + Send + 'static,
) -> Result<T, Failed> {
    let mut task = EndedTask(tokio::spawn(future));
    // A task that does not return has panicked, which the runtime has reported.
    (&mut task.0).await.unwrap_or(Err(Failed::Closed("client")))
}

/// A task that ends when this is dropped.
struct EndedTask<T>(JoinHandle<T>);

impl<T> Drop for EndedTask<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Waits for a future without Python's lock. Signal handlers run meanwhile; an exception of one
/// drops the future.
fn block(py: Python<'_>, mut work: Work) -> PyResult<Py<PyAny>> {
    let runtime = runtime()?;
    if Handle::try_current().is_ok() {
        let message = "a blocking call inside a callback of the client would never return";
        return Err(PyRuntimeError::new_err(message));
    }
    loop {
        let waited = py
            .detach(|| runtime.block_on(async { timeout(SIGNAL_CHECK_INTERVAL, &mut work).await }));
        match waited {
            Ok(outcome) => return outcome(py),
            Err(_) => py.check_signals()?,
        }
    }
}

/// Locks a mutex. No code under these locks can panic in the middle of a change.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An awaitable. Does nothing before it is awaited; ends where its task is cancelled.
#[pyclass(module = "helix._helix", frozen)]
pub(crate) struct Operation {
    /// None while it is polled, and after its end.
    work: Mutex<Option<OwnedByProcess<Work>>>,
    wakeup: Arc<Wakeup>,
    /// Bridge of the loop that awaits it. Not part of `wakeup`, whose last owner may be a thread
    /// of the runtime.
    bridge: PyOnceLock<Py<LoopBridge>>,
}

impl Operation {
    fn new(work: Work) -> Self {
        let work = Mutex::new(Some(OwnedByProcess::new(work)));
        Self { work, wakeup: Arc::default(), bridge: PyOnceLock::new() }
    }

    fn poll(&self, py: Python<'_>, work: &mut Work) -> PyResult<Poll<Outcome>> {
        let runtime = runtime()?;
        self.wakeup.is_woken.store(false, Ordering::SeqCst);
        let waker = Waker::from(self.wakeup.clone());
        Ok(py.detach(|| {
            let _context = runtime.enter();
            work.as_mut().poll(&mut Context::from_waker(&waker))
        }))
    }

    /// Returns a future of the running loop, which completes with the next wake.
    fn wait(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        static RUNNING_BRIDGE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let running = RUNNING_BRIDGE.import(py, "helix._loops", "running")?.call0()?;
        let (event_loop, bridge): (Bound<'_, PyAny>, Bound<'_, LoopBridge>) = running.extract()?;
        let (socket, id) = self.wakeup.target.get_or_init(|| {
            let bridge = bridge.get();
            (bridge.socket.clone(), bridge.next_id.fetch_add(1, Ordering::Relaxed))
        });
        if !Arc::ptr_eq(socket, &bridge.get().socket) {
            let message = "a call that began in one event loop cannot continue in another";
            return Err(PyRuntimeError::new_err(message));
        }
        let bridge = self.bridge.get_or_init(py, || bridge.unbind()).get();
        let future = event_loop.call_method0(intern!(py, "create_future"))?;
        future.setattr(intern!(py, "_asyncio_future_blocking"), true)?;
        lock(&bridge.waiting).insert(*id, future.clone().unbind());
        // A wake from before the future was registered found nothing to complete.
        if self.wakeup.is_woken.load(Ordering::SeqCst) {
            socket.push(*id);
        }
        Ok(future.unbind())
    }

    fn forget(&self, py: Python<'_>) {
        if let (Some((_, id)), Some(bridge)) = (self.wakeup.target.get(), self.bridge.get(py)) {
            // Dropped after the lock is free: it may run Python code.
            let _future = lock(&bridge.get().waiting).remove(id);
        }
    }
}

#[pymethods]
impl Operation {
    fn __await__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Polls the future. Yields an `asyncio.Future` that completes once there is progress.
    fn __next__(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let work = lock(&self.work).take();
        let mut work =
            work.ok_or_else(|| PyRuntimeError::new_err("cannot await the same call twice"))?;
        match self.poll(py, work.get_mut()?)? {
            Poll::Ready(outcome) => Err(PyStopIteration::new_err((outcome(py)?,))),
            Poll::Pending => {
                let waited = self.wait(py)?;
                *lock(&self.work) = Some(work);
                Ok(waited)
            }
        }
    }

    /// Drops the future: its task was cancelled.
    #[pyo3(signature = (kind, value = None, _traceback = None))]
    fn throw(
        &self,
        py: Python<'_>,
        kind: Bound<'_, PyAny>,
        value: Option<Bound<'_, PyAny>>,
        _traceback: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        self.close(py);
        Err(PyErr::from_value(value.unwrap_or(kind)))
    }

    fn close(&self, py: Python<'_>) {
        self.forget(py);
        let work = lock(&self.work).take();
        py.detach(|| drop(work));
    }
}

/// Wakes the loop in which an operation is awaited.
#[derive(Default)]
struct Wakeup {
    is_woken: AtomicBool,
    target: OnceLock<(Arc<LoopSocket>, u64)>,
}

impl Wake for Wakeup {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.is_woken.swap(true, Ordering::SeqCst)
            && let Some((socket, id)) = self.target.get()
        {
            socket.push(*id);
        }
    }
}

/// Operations to wake in a loop, and the socket by which the loop learns of them.
struct LoopSocket {
    woken: Mutex<Vec<u64>>,
    sender: UnixStream,
}

impl LoopSocket {
    fn push(&self, id: u64) {
        let mut woken = lock(&self.woken);
        woken.push(id);
        if woken.len() == 1 {
            // Ignored: a full socket wakes the loop too, and a closed one has no loop.
            let _ = (&self.sender).write(&[1]);
        }
    }
}

/// Completes the futures of one event loop.
#[pyclass(module = "helix._helix", frozen)]
pub(crate) struct LoopBridge {
    socket: Arc<LoopSocket>,
    receiver: UnixStream,
    next_id: AtomicU64,
    waiting: Mutex<HashMap<u64, Py<PyAny>>>,
}

#[pymethods]
impl LoopBridge {
    #[new]
    fn new() -> PyResult<Self> {
        let (sender, receiver) = UnixStream::pair()?;
        sender.set_nonblocking(true)?;
        receiver.set_nonblocking(true)?;
        let socket = Arc::new(LoopSocket { woken: Mutex::default(), sender });
        let (next_id, waiting) = (AtomicU64::new(0), Mutex::default());
        Ok(Self { socket, receiver, next_id, waiting })
    }

    /// Returns the descriptor that becomes readable when `drain` has something to do.
    fn fileno(&self) -> i32 {
        self.receiver.as_raw_fd()
    }

    /// Completes the futures of woken operations.
    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        let mut bytes = [0; 64];
        loop {
            match (&self.receiver).read(&mut bytes) {
                Ok(count) if count == bytes.len() => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                _ => break,
            }
        }
        let woken = std::mem::take(&mut *lock(&self.socket.woken));
        for id in woken {
            let future = lock(&self.waiting).remove(&id);
            if let Some(future) = future
                && !future.call_method0(py, intern!(py, "done"))?.is_truthy(py)?
            {
                future.call_method1(py, intern!(py, "set_result"), (py.None(),))?;
            }
        }
        Ok(())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        if let Ok(waiting) = self.waiting.try_lock() {
            for future in waiting.values() {
                visit.call(future)?;
            }
        }
        Ok(())
    }

    fn __clear__(&self) {
        let waiting = std::mem::take(&mut *lock(&self.waiting));
        drop(waiting);
    }
}

/// An awaitable that is done.
#[pyclass(module = "helix._helix", frozen)]
pub(crate) struct Done;

#[pymethods]
impl Done {
    fn __await__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[allow(clippy::unused_self)]
    fn __next__(&self) -> Option<Py<PyAny>> {
        None
    }
}

impl Done {
    /// Returns the only value of the class.
    pub(crate) fn get(py: Python<'_>) -> PyResult<Py<PyAny>> {
        static DONE: PyOnceLock<Py<Done>> = PyOnceLock::new();
        let done = DONE.get_or_try_init(py, || Py::new(py, Self))?;
        Ok(done.clone_ref(py).into_any())
    }
}
