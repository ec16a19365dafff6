//! State shared by the handles, the writer and the keeper: the lock, the queue and the wake-ups.

pub(crate) mod busy_poll;
pub(crate) mod cleaning;
pub(crate) mod clock;
pub(crate) mod core;
pub(crate) mod counters;
pub(crate) mod disk_use;
pub(crate) mod group_times;
pub(crate) mod options;
pub(crate) mod queue;
pub(crate) mod readahead;
pub(crate) mod signal;
pub(crate) mod threads;

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use tracing::error;

use crate::error::Error;
use crate::files::footer_cache::FooterCache;
use crate::files::open_files::OpenFiles;
use crate::files::state_file::StateFile;
use crate::shared::clock::StepClock;
use crate::shared::clock::monotonic_clock;
use crate::shared::core::Core;
use crate::shared::group_times::GroupStamp;
use crate::shared::options::Options;
use crate::shared::queue::QueuedRequest;
use crate::shared::queue::WriteRequest;
use crate::shared::readahead::Readahead;
use crate::shared::signal::Wakers;
use crate::shared::signal::WalThread;
use crate::storage::Storage;
use crate::sync::{Condvar, IgnorePoison, Mutex, MutexGuard, Ordering};
use crate::types::NextStep;

pub(crate) struct Shared {
    /// `None` for an in-memory log.
    pub storage: Option<Arc<dyn Storage>>,
    pub files: Option<Arc<OpenFiles>>,
    pub options: Options,
    pub identity: Bytes,
    pub cache: FooterCache,
    pub readahead: Readahead,
    /// Locked before `core` by each writer of the state file.
    pub state_file: Mutex<StateFile>,
    core: Mutex<Core>,
    writer_wake: Condvar,
    keeper_wake: Condvar,
    wakers: Mutex<Option<Arc<Wakers>>>,
    /// Clock of the steps. Without it, time advances only with the steps.
    clock: OnceLock<StepClock>,
    pub last_group: Arc<GroupStamp>,
}

/// State of the log at the end of a wait.
pub(crate) struct EndedWait {
    /// Arrival time of the oldest queued request.
    pub oldest: Option<Duration>,
    /// Mean time of writing and syncing a group.
    pub group_time: Duration,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("storage", &self.storage).finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn new(
        storage: Option<Arc<dyn Storage>>,
        files: Option<Arc<OpenFiles>>,
        options: Options,
        identity: Bytes,
        state_file: StateFile,
        core: Core,
    ) -> Self {
        Self {
            storage,
            files,
            cache: FooterCache::new(options.footer_cache_bytes),
            readahead: Readahead::default(),
            options,
            identity,
            state_file: Mutex::new(state_file),
            core: Mutex::new(core),
            writer_wake: Condvar::new(),
            keeper_wake: Condvar::new(),
            wakers: Mutex::default(),
            clock: OnceLock::new(),
            last_group: Arc::default(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Core> {
        // A writer or keeper that panicked has poisoned the log when it was dropped.
        self.core.lock().ignore_poison()
    }

    fn condvar(&self, role: WalThread) -> &Condvar {
        match role {
            WalThread::Writer => &self.writer_wake,
            WalThread::Keeper => &self.keeper_wake,
        }
    }

    /// Wakes a thread after [`signal::WakeSignal::raise`]. Must be called without the lock.
    pub(crate) fn wake(&self, role: WalThread, waiting: bool) {
        if waiting {
            self.condvar(role).notify_one();
        }
        // The wakers are set only if there are no threads.
        let wakers = self.wakers.lock().ignore_poison().clone();
        if let Some(wakers) = wakers {
            match role {
                WalThread::Writer => (wakers.writer)(),
                WalThread::Keeper => (wakers.keeper)(),
            }
        }
    }

    pub(crate) fn raise(&self, role: WalThread) {
        let waiting = self.lock().signal(role).raise();
        self.wake(role, waiting);
    }

    pub(crate) fn set_clock(&self, clock: StepClock) {
        // Ignored: the first clock stays, because two clocks would contradict each other.
        let _ = self.clock.set(clock);
    }

    /// Returns the clock, by default a stopwatch.
    pub(crate) fn clock(&self) -> &StepClock {
        self.clock.get_or_init(|| Box::new(monotonic_clock()))
    }

    /// Returns the time now, for measurements of the disk. `None` without a clock.
    pub(crate) fn time(&self) -> Option<Duration> {
        self.clock.get().map(|clock| clock())
    }

    pub(crate) fn now(&self, core: &Core) -> Duration {
        self.clock.get().map_or(core.now, |clock| clock())
    }

    pub(crate) fn queue(&self, mut core: MutexGuard<'_, Core>, request: WriteRequest) {
        let since = self.now(&core);
        core.queue.push_back(QueuedRequest { request, since });
        let waiting = core.writer.raise();
        drop(core);
        self.wake(WalThread::Writer, waiting);
    }

    /// Returns how long the oldest queued or unsynced request has been waiting.
    pub(crate) fn unsynced_for(&self) -> Option<Duration> {
        let core = self.lock();
        let since = core.in_progress_since.or(core.queue.front().map(|queued| queued.since));
        let is_open = core.poisoned.is_none() && !core.writer_ended;
        since.filter(|_| is_open).map(|since| self.now(&core).saturating_sub(since))
    }

    pub(crate) fn set_wakers(&self, wakers: Wakers) {
        let mut held = self.wakers.lock().ignore_poison();
        *held = Some(Arc::new(wakers));
    }

    /// Waits until a step is wanted or the time has passed.
    pub(crate) fn wait(&self, role: WalThread, next: NextStep) -> EndedWait {
        let mut core = self.lock();
        let is_raised = core.signal(role).raised.load(Ordering::Relaxed);
        if !is_raised && !matches!(next, NextStep::Now | NextStep::Done) {
            core.signal(role).waiting = true;
            core = match next {
                NextStep::After(time) => {
                    let waited = self.condvar(role).wait_timeout(core, time);
                    waited.ignore_poison().0
                }
                _ => self.condvar(role).wait(core).ignore_poison(),
            };
        }
        let signal = core.signal(role);
        signal.waiting = false;
        signal.raised.store(false, Ordering::Relaxed);
        let oldest = core.queue.front().map(|queued| queued.since);
        EndedWait { oldest, group_time: core.disk.group_time() }
    }

    /// Poisons the log after a disk failure: every waiting and every later call fails with the
    /// error.
    pub(crate) fn poison(&self, error: &Error) {
        let mut core = self.lock();
        if core.poisoned.is_some() {
            return;
        }
        core.poisoned = Some(error.clone());
        let queue = std::mem::take(&mut core.queue);
        let report = core.on_poisoned.take();
        let writer = core.writer.raise();
        let keeper = core.keeper.raise();
        drop(core);
        error!(%error, "log is poisoned");
        for QueuedRequest { request, .. } in queue {
            request.into_done().complete(Err(error.clone()));
        }
        if let Some(report) = report {
            report(error.clone());
        }
        self.wake(WalThread::Writer, writer);
        self.wake(WalThread::Keeper, keeper);
    }

    /// Ends one thread. The directory is unlocked when both have ended.
    pub(crate) fn end(&self, role: WalThread) {
        let mut core = self.lock();
        match role {
            WalThread::Writer => core.writer_ended = true,
            WalThread::Keeper => core.keeper_ended = true,
        }
        let both = core.writer_ended && core.keeper_ended;
        let guard = if both { core.guard.take() } else { None };
        let waiting = core.keeper.raise();
        drop(core);
        drop(guard);
        self.wake(WalThread::Keeper, waiting);
    }
}
