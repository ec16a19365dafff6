//! The thread of a node's cleaners, which judges records: most of the CPU time of a cleaning.
//!
//! It has a low priority and rests half of the time, since appends need the CPUs. It takes none of
//! the log's locks, since it could lose its CPU while it holds one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use std::{io, thread};

use helix_proto::compaction::Codecs;
use helix_wal::BackgroundWorker;
use tokio::sync::oneshot;

use crate::process::{lower_thread_priority, thread_cpu_time};
use crate::sync;

type Work = Box<dyn FnOnce() + Send>;

/// Thread and codecs that the cleaners of a node share.
#[derive(Debug, Clone)]
pub struct CleanerWorker(Arc<WorkerState>);

#[derive(Debug)]
struct WorkerState {
    in_place: bool,
    /// Queue of the thread, which runs from the first work until this value is dropped; `None` if
    /// the thread cannot be started.
    queue: OnceLock<Option<Sender<Work>>>,
    /// Compressor and decompressor. Their buffers grow to the size of the largest batch.
    codecs: Mutex<Option<Codecs>>,
}

impl CleanerWorker {
    /// Creates the worker of a node. `in_place`: callers do the work themselves, for simulations.
    pub fn new(in_place: bool) -> Self {
        let (queue, codecs) = (OnceLock::new(), Mutex::default());
        Self(Arc::new(WorkerState { in_place, queue, codecs }))
    }

    /// Returns the thread for the log's work; `None` if the log does the work itself.
    pub(super) fn thread(&self) -> Option<&dyn BackgroundWorker> {
        (!self.0.in_place).then_some(self as &dyn BackgroundWorker)
    }

    /// Runs work in the order of the calls. One call should take a few milliseconds at most.
    ///
    /// # Errors
    /// If the work panicked.
    pub(super) async fn run<T, F>(&self, work: F) -> io::Result<T>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        if self.0.in_place {
            return Ok(work());
        }
        let (sender, done) = oneshot::channel();
        // Ignored: the caller is gone if its shard has closed.
        self.submit(Box::new(move || drop(sender.send(work()))));
        done.await.map_err(io::Error::other)
    }

    /// Runs work on one batch with the codecs.
    pub(super) fn with_codecs<T>(&self, work: impl FnOnce(&mut Codecs) -> T) -> T {
        // A panic drops the codecs, which it may have left half changed.
        let taken = sync::lock(&self.0.codecs).take();
        let mut codecs = taken.unwrap_or_default();
        let done = work(&mut codecs);
        *sync::lock(&self.0.codecs) = Some(codecs);
        done
    }

    /// Frees the buffers of the codecs, once the queued work is done.
    pub(super) fn clear_codecs(&self) {
        if self.0.in_place {
            *sync::lock(&self.0.codecs) = None;
            return;
        }
        let worker = self.clone();
        self.submit(Box::new(move || *sync::lock(&worker.0.codecs) = None));
    }
}

impl BackgroundWorker for CleanerWorker {
    fn submit(&self, work: Work) {
        let warn = |error: &io::Error| tracing::warn!(%error, "cleaning without a thread");
        match self.0.queue.get_or_init(|| start().inspect_err(warn).ok()) {
            // Ignored: the thread takes work as long as there is a sender.
            Some(sender) => drop(sender.send(work)),
            None => run_one(work),
        }
    }
}

fn start() -> io::Result<Sender<Work>> {
    let (sender, queue) = channel();
    thread::Builder::new().name("cleaner".to_owned()).spawn(move || run_all(&queue))?;
    Ok(sender)
}

fn run_all(queue: &Receiver<Work>) {
    lower_thread_priority();
    for work in queue {
        let before = thread_cpu_time();
        run_one(work);
        rest(thread_cpu_time().saturating_sub(before));
    }
}

fn run_one(work: Work) {
    // Ignored: the caller finds the work lost, and the thread continues.
    drop(catch_unwind(AssertUnwindSafe(work)));
}

/// Leaves the CPU to other threads for as long as the work took.
#[allow(clippy::disallowed_methods)] // There is no condition: only time has to pass.
fn rest(time: Duration) {
    thread::sleep(time);
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::process::background_nice;

    #[tokio::test]
    async fn work_runs_in_order_and_survives_a_panic() {
        for in_place in [false, true] {
            let worker = CleanerWorker::new(in_place);
            assert_eq!(worker.thread().is_none(), in_place);
            let done = Arc::new(Mutex::new(Vec::new()));
            let works = (0..20).map(|number| {
                let done = done.clone();
                worker.run(move || {
                    sync::lock(&done).push(number);
                    thread::current().id()
                })
            });
            let ids = futures_util::future::try_join_all(works).await.unwrap();
            assert_eq!(*sync::lock(&done), (0..20).collect::<Vec<_>>());
            let is_here = |id: &thread::ThreadId| *id == thread::current().id();
            assert!(ids.iter().all(|id| is_here(id) == in_place));
        }
        let worker = CleanerWorker::new(false);
        let other = worker.clone();
        worker.run::<(), _>(move || other.with_codecs(|_| panic!("planted"))).await.unwrap_err();
        let other = worker.clone();
        assert_eq!(worker.run(move || other.with_codecs(|_| 7)).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn work_survives_a_panic_without_a_thread() {
        let (queue, codecs) = (OnceLock::from(None), Mutex::default());
        let worker = CleanerWorker(Arc::new(WorkerState { in_place: false, queue, codecs }));
        worker.run::<(), _>(|| panic!("planted")).await.unwrap_err();
        let id = worker.run(|| thread::current().id()).await.unwrap();
        assert_eq!(id, thread::current().id());
    }

    #[tokio::test]
    async fn the_thread_has_a_lower_priority_and_ends_with_its_node() {
        let worker = CleanerWorker::new(false);
        if cfg!(target_os = "linux") {
            let nice = || rustix::process::getpriority_process(None).unwrap();
            assert_eq!(worker.run(nice).await.unwrap(), background_nice(nice()));
        }
        let (sender, ended) = oneshot::channel::<()>();
        worker.submit(Box::new(move || {
            thread_local! {
                static HELD: Cell<Option<oneshot::Sender<()>>> = const { Cell::new(None) };
            }
            HELD.set(Some(sender));
        }));
        drop(worker);
        // Dropped by the end of the thread.
        ended.await.unwrap_err();
    }
}
