//! Judges entries on another thread, since that takes most of the CPU time of a cleaning.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex};

use crate::compaction::compactor::CompactionStep;
use crate::compaction::job::CompactionJob;
use crate::error::Error;
use crate::shared::cleaning::BackgroundWorker;
use crate::sync::IgnorePoison;

/// A job and the result of its step.
type SteppedJob = (CompactionJob, CompactionStep);

/// A step on another thread, which owns the job while the step runs.
pub(super) struct DetachedStep {
    step: Arc<JudgingStep>,
    stepped: Receiver<SteppedJob>,
}

/// State of a step that both threads share.
struct JudgingStep {
    /// The job until the step begins.
    job: Mutex<Option<CompactionJob>>,
    /// The step was cancelled, so its result is not needed.
    is_cancelled: AtomicBool,
}

impl DetachedStep {
    /// Lets a worker judge loaded entries.
    pub(super) fn start(worker: &dyn BackgroundWorker, job: CompactionJob) -> Self {
        let (job, is_cancelled) = (Mutex::new(Some(job)), AtomicBool::new(false));
        let step = Arc::new(JudgingStep { job, is_cancelled });
        let (sender, stepped) = channel();
        let begun = Arc::clone(&step);
        worker.submit(Box::new(move || judge(&begun, &sender)));
        Self { step, stepped }
    }

    /// Returns the job and its result; `None` while the step waits or runs.
    ///
    /// Fails if the step panicked or was never run.
    pub(super) fn poll(&self, directory: &str) -> Result<Option<SteppedJob>, Error> {
        match self.stepped.try_recv() {
            Ok(stepped) => Ok(Some(stepped)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => {
                let reason = "a step of a cleaning was lost".to_owned();
                let file = directory.to_owned();
                Err(Error::Poisoned { operation: "compact", file, reason })
            }
        }
    }

    /// Cancels the step and drops its job. Waits for the result if the step has begun.
    pub(super) fn cancel(self) {
        self.step.is_cancelled.store(true, Ordering::Relaxed);
        if self.step.take_job().is_none() {
            // Ignored: a lost job needs no wait.
            drop(self.stepped.recv());
        }
    }
}

impl JudgingStep {
    fn take_job(&self) -> Option<CompactionJob> {
        self.job.lock().ignore_poison().take()
    }
}

/// Runs the step and sends its result.
///
/// The job is dropped before the sender, also in a panic. So the keeper sees the closed channel
/// only once no file of the job can be removed any longer.
fn judge(begun: &JudgingStep, sender: &Sender<SteppedJob>) {
    let Some(mut job) = begun.take_job() else { return };
    let step = job.filter_some(&begun.is_cancelled);
    // Ignored: the keeper waits for a running step before it stops.
    drop(sender.send((job, step)));
}
