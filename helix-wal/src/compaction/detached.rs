//! Judging entries on another thread: that takes most of the CPU time of a cleaning.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

use crate::compaction::compactor::CompactionStep;
use crate::compaction::job::CompactionJob;
use crate::error::Error;
use crate::shared::Shared;
use crate::shared::cleaning::BackgroundWorker;
use crate::shared::signal::WalThread;

/// A job and the result of its step.
type SteppedJob = (CompactionJob, CompactionStep);

/// A step that runs on another thread, which has the job until then.
pub(super) struct DetachedStep(Receiver<SteppedJob>);

impl DetachedStep {
    /// Lets a worker judge loaded entries. It wakes the keeper at the end.
    pub(super) fn start(
        shared: &Arc<Shared>,
        worker: &dyn BackgroundWorker,
        job: CompactionJob,
    ) -> Self {
        let (sender, receiver) = channel();
        let keeper = JobSender { sender: Some(sender), shared: Arc::clone(shared) };
        worker.submit(Box::new(move || judge(keeper, job)));
        Self(receiver)
    }

    /// Returns the job and its result; `None` while the step runs.
    ///
    /// Fails if the step panicked or was never run.
    pub(super) fn poll(&self, directory: &str) -> Result<Option<SteppedJob>, Error> {
        match self.0.try_recv() {
            Ok(stepped) => Ok(Some(stepped)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => {
                let reason = "a step of a cleaning was lost".to_owned();
                let file = directory.to_owned();
                Err(Error::Poisoned { operation: "compact", file, reason })
            }
        }
    }

    /// Waits for the end of the step, and drops the job.
    pub(super) fn wait(self) {
        // Ignored: a lost job needs no wait.
        drop(self.0.recv());
    }
}

/// Runs the step. The job is dropped before the sender, also in a panic, so that no file of it is
/// removed once the keeper has learned of the end.
fn judge(keeper: JobSender, mut job: CompactionJob) {
    let step = job.filter_some();
    keeper.send((job, step));
}

/// Returns a job to the keeper, and wakes the keeper even if the job is lost.
struct JobSender {
    sender: Option<Sender<SteppedJob>>,
    shared: Arc<Shared>,
}

impl JobSender {
    fn send(self, stepped: SteppedJob) {
        if let Some(sender) = &self.sender {
            // Ignored: a keeper ends only after the step.
            drop(sender.send(stepped));
        }
    }
}

impl Drop for JobSender {
    fn drop(&mut self) {
        // First, so that a woken keeper finds that the job is lost.
        self.sender = None;
        self.shared.raise(WalThread::Keeper);
    }
}
