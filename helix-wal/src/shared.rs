//! What the handles, the writer and the keeper share: the log under its lock, the queue, the
//! wake-ups, and the one way to poison everything.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tracing::error;

use crate::cold::ColdSegments;
use crate::files::Files;
use crate::frame::Position;
use crate::held::Held;
use crate::layout::check_segment_number;
use crate::log::Log;
use crate::options::Options;
use crate::page_cache::PageCache;
use crate::readers::Readers;
use crate::state_file::{ColdName, Received, State};
use crate::state_io::StateFile;
use crate::storage::{File, Storage};
use crate::sync::{AtomicBool, Condvar, JoinHandle, Mutex, MutexGuard, Ordering, ThreadId};
use crate::tip::stopwatch;
use crate::wal::{Done, Next};
use crate::{Entry, Error, LogId, SYNC_BOUNDS_US};

/// How many sync times are remembered.
const SYNC_TIMES: usize = 1024;

/// A callback that is run whatever happens: at the latest when it is dropped.
pub(crate) struct Waiting(Option<Done>);

impl Waiting {
    pub(crate) fn new(done: Done) -> Self {
        Self(Some(done))
    }

    pub(crate) fn tell(mut self, result: Result<(), Error>) {
        if let Some(done) = self.0.take() {
            done(result);
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // Only a panic on the way to telling leads here.
        if let Some(done) = self.0.take() {
            done(Err(Error::Closed));
        }
    }
}

/// What waits for the writer, in the order of the calls.
pub(crate) enum Request {
    Append {
        entries: Vec<Entry>,
        serial: u64,
        epoch: u64,
        done: Waiting,
    },
    Vote {
        vote: Bytes,
        done: Waiting,
    },
    Truncate {
        from: u64,
        last: Option<LogId>,
        done: Waiting,
    },
    /// `empties`: no entry is left after it.
    Purge {
        upto: LogId,
        empties: bool,
        done: Waiting,
    },
}

impl Request {
    /// Bytes of the payloads that it holds.
    pub(crate) fn payload_bytes(&self) -> u64 {
        match self {
            Self::Append { entries, .. } => {
                entries.iter().map(|entry| entry.payload.bytes.len() as u64).sum()
            }
            Self::Vote { .. } | Self::Truncate { .. } | Self::Purge { .. } => 0,
        }
    }

    pub(crate) fn into_done(self) -> Waiting {
        match self {
            Self::Append { done, .. }
            | Self::Vote { done, .. }
            | Self::Truncate { done, .. }
            | Self::Purge { done, .. } => done,
        }
    }
}

/// A request and when it came.
pub(crate) struct Queued {
    pub request: Request,
    pub since: Duration,
}

/// A file of the pool, not yet part of the log.
#[derive(Debug)]
pub(crate) struct Ready {
    pub name: String,
    pub file: Arc<dyn File>,
    pub len: u64,
}

/// Whether a step is wanted, and whether a thread sleeps until one is.
#[derive(Debug, Default)]
pub(crate) struct Signal {
    /// Changed under the lock alone; a thread that waits awake looks at it without.
    raised: Arc<AtomicBool>,
    waiting: bool,
}

impl Signal {
    /// Asks for a step; whether the thread must be woken. Whoever asked first wakes it for all
    /// that ask before it has come to.
    pub(crate) fn raise(&mut self) -> bool {
        let is_first = !self.raised.swap(true, Ordering::Release);
        is_first && self.waiting
    }

    pub(crate) fn raised(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.raised)
    }
}

/// Who does the work: the two halves that a caller drives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Writer,
    Keeper,
}

/// Figures that only the writer and the keeper change.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub groups: u64,
    pub group_bytes: u64,
    pub syncs: u64,
    pub sync_sum_us: u64,
    /// As in [`crate::Stats::sync_counts`].
    pub sync_counts: [u64; SYNC_BOUNDS_US.len() + 1],
    pub freed_segments: u64,
    pub freed_bytes: u64,
    /// Microseconds of the last syncs, in a ring.
    pub sync_times: Vec<u32>,
    pub rewritten_bytes: u64,
}

impl Counters {
    pub(crate) fn on_group(&mut self, bytes: u64, sync: Duration) {
        self.groups += 1;
        self.group_bytes += bytes;
        let micros = u32::try_from(sync.as_micros()).unwrap_or(u32::MAX);
        self.sync_sum_us += u64::from(micros);
        let class = SYNC_BOUNDS_US.partition_point(|bound| *bound < micros);
        if let Some(count) = self.sync_counts.get_mut(class) {
            *count += 1;
        }
        let place = (self.syncs % SYNC_TIMES as u64) as usize;
        match self.sync_times.get_mut(place) {
            Some(old) => *old = micros,
            None => self.sync_times.push(micros),
        }
        self.syncs += 1;
    }

    pub(crate) fn on_freed(&mut self, bytes: u64) {
        self.freed_segments += 1;
        self.freed_bytes += bytes;
    }

    /// The time that so many percent of the recent syncs did not exceed.
    pub(crate) fn sync_percentile(&self, percent: usize) -> u64 {
        let mut times = self.sync_times.clone();
        times.sort_unstable();
        let place = (times.len() * percent / 100).min(times.len().saturating_sub(1));
        times.get(place).map_or(0, |micros| u64::from(*micros))
    }
}

/// Everything behind the lock.
pub(crate) struct Core {
    pub log: Log,
    pub queue: VecDeque<Queued>,
    /// When the oldest of what the writer has taken from the queue came, until it is durable.
    pub in_hand: Option<Duration>,
    /// The time of the latest step.
    pub now: Duration,
    /// Counts the times that queued appends were refused for want of space.
    pub epoch: u64,
    pub poisoned: Option<Error>,
    pub closing: bool,
    pub on_poisoned: Option<Box<dyn FnOnce(Error) + Send>>,
    /// Truncations that are not durable yet. Until they are, the log in memory is shorter than the
    /// one on disk, and nothing may be sealed by it.
    pub truncations: usize,
    pub writer: Signal,
    pub keeper: Signal,
    pub ready: VecDeque<Ready>,
    pub ready_number: u64,
    pub next_id: u64,
    /// Everything before this is durable.
    pub synced_at: Position,
    /// No segment can be had: free and needed bytes when that was seen.
    pub disk_full: Option<(u64, u64)>,
    pub counters: Counters,
    pub writer_ended: bool,
    pub keeper_ended: bool,
    /// Keeps other processes out until both halves have ended.
    pub guard: Option<Box<dyn Send + Sync>>,
    pub threads: Vec<(ThreadId, JoinHandle<()>)>,
    /// Bytes in the current segment of a memory log.
    pub memory_bytes: u64,
    /// What waits for a snapshot, and outlives the process.
    pub received: Received,
    /// The same as this open found it, until somebody takes it up.
    pub found: Option<ColdSegments>,
}

impl Core {
    pub(crate) fn new(log: Log) -> Self {
        Self {
            log,
            queue: VecDeque::new(),
            in_hand: None,
            now: Duration::ZERO,
            epoch: 0,
            poisoned: None,
            closing: false,
            on_poisoned: None,
            truncations: 0,
            writer: Signal::default(),
            keeper: Signal::default(),
            ready: VecDeque::new(),
            ready_number: 0,
            next_id: 1,
            synced_at: Position::default(),
            disk_full: None,
            counters: Counters::default(),
            writer_ended: false,
            keeper_ended: false,
            guard: None,
            threads: Vec::new(),
            memory_bytes: 0,
            received: Received::default(),
            found: None,
        }
    }

    /// Whether calls are still taken.
    pub(crate) fn check_open(&self) -> Result<(), Error> {
        match &self.poisoned {
            Some(error) => Err(error.clone()),
            None if self.closing => Err(Error::Closed),
            None => Ok(()),
        }
    }

    /// A number for a new segment.
    pub(crate) fn take_segment_number(&mut self) -> Result<u64, Error> {
        let id = self.next_id;
        check_segment_number(id)?;
        self.next_id += 1;
        Ok(id)
    }

    pub(crate) fn signal(&mut self, role: Role) -> &mut Signal {
        match role {
            Role::Writer => &mut self.writer,
            Role::Keeper => &mut self.keeper,
        }
    }

    /// What the state file should say now, with this checkpoint.
    pub(crate) fn state(&self, identity: Bytes, checkpoint: Option<(LogId, Bytes)>) -> State {
        let upto = checkpoint.as_ref().map(|(at, _)| at.index);
        let live = self.log.held.iter().filter(|(_, held)| !held.going);
        State {
            identity,
            next_id: self.next_id,
            synced: self.synced_at,
            purged: self.log.purged.filter(|purged| upto.is_some_and(|upto| purged.index <= upto)),
            committed: self.log.committed,
            vote: self.log.vote.clone(),
            segments: live.map(|(id, held)| (*id, held.sealed)).collect(),
            cold: self.log.cold.values().filter(|held| !held.going).filter_map(cold_name).collect(),
            placements: upto.map_or(Vec::new(), |upto| self.log.unsealed_placements(upto)),
            received: self.received.clone(),
            checkpoint,
        }
    }
}

fn cold_name(held: &Held) -> Option<ColdName> {
    let (first, last) = held.entries?;
    Some(ColdName { id: held.segment.as_ref()?.id, first, last })
}

pub(crate) struct Shared {
    /// `None` for a memory log.
    pub storage: Option<Arc<dyn Storage>>,
    pub files: Option<Arc<Files>>,
    pub options: Options,
    pub identity: Bytes,
    pub cache: PageCache,
    pub readers: Readers,
    /// Taken before `core` by whoever writes the state file.
    pub state_file: Mutex<StateFile>,
    core: Mutex<Core>,
    writer_wake: Condvar,
    keeper_wake: Condvar,
    wakers: Mutex<Option<Arc<Wakers>>>,
    /// Tells the times that steps are given. Without it time passes by the steps themselves.
    clock: OnceLock<Clock>,
}

pub(crate) type Waker = Box<dyn Fn() + Send + Sync>;

/// Each half has its own: what is woken by what it does itself never rests.
pub(crate) struct Wakers {
    pub writer: Waker,
    pub keeper: Waker,
}
type Clock = Box<dyn Fn() -> Duration + Send + Sync>;

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("storage", &self.storage).finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn new(
        storage: Option<Arc<dyn Storage>>,
        files: Option<Arc<Files>>,
        options: Options,
        identity: Bytes,
        state_file: StateFile,
        core: Core,
    ) -> Self {
        Self {
            storage,
            files,
            cache: PageCache::new(options.footer_cache_bytes),
            readers: Readers::default(),
            options,
            identity,
            state_file: Mutex::new(state_file),
            core: Mutex::new(core),
            writer_wake: Condvar::new(),
            keeper_wake: Condvar::new(),
            wakers: Mutex::default(),
            clock: OnceLock::new(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Core> {
        // A thread that panicked here has poisoned the log by its own means.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn condvar(&self, role: Role) -> &Condvar {
        match role {
            Role::Writer => &self.writer_wake,
            Role::Keeper => &self.keeper_wake,
        }
    }

    /// Carries out what `Signal::raise` asked for. Outside the lock.
    pub(crate) fn wake(&self, role: Role, waiting: bool) {
        if waiting {
            self.condvar(role).notify_one();
        }
        // The wakers are only set where no threads wait.
        let wakers = self.wakers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(wakers) = wakers {
            match role {
                Role::Writer => (wakers.writer)(),
                Role::Keeper => (wakers.keeper)(),
            }
        }
    }

    pub(crate) fn raise(&self, role: Role) {
        let waiting = self.lock().signal(role).raise();
        self.wake(role, waiting);
    }

    pub(crate) fn set_clock(&self, clock: Clock) {
        // Ignored: two clocks would contradict each other, so the first one stays.
        let _ = self.clock.set(clock);
    }

    /// The clock of the threads, or whatever was set before them.
    pub(crate) fn clock(&self) -> &Clock {
        self.clock.get_or_init(|| Box::new(stopwatch()))
    }

    fn now(&self, core: &Core) -> Duration {
        self.clock.get().map_or(core.now, |clock| clock())
    }

    pub(crate) fn queue(&self, mut core: MutexGuard<'_, Core>, request: Request) {
        let since = self.now(&core);
        core.queue.push_back(Queued { request, since });
        let waiting = core.writer.raise();
        drop(core);
        self.wake(Role::Writer, waiting);
    }

    /// How long the oldest of what is queued or being written has been waiting to be durable.
    pub(crate) fn unsynced_for(&self) -> Option<Duration> {
        let core = self.lock();
        let since = core.in_hand.or(core.queue.front().map(|queued| queued.since));
        let is_open = core.poisoned.is_none() && !core.writer_ended;
        since.filter(|_| is_open).map(|since| self.now(&core).saturating_sub(since))
    }

    pub(crate) fn set_wakers(&self, wakers: Wakers) {
        let mut held = self.wakers.lock().unwrap_or_else(PoisonError::into_inner);
        *held = Some(Arc::new(wakers));
    }

    /// Waits until a step is wanted or the time has passed. Since when it is wanted, if that is
    /// for what has been queued.
    pub(crate) fn wait(&self, role: Role, next: Next) -> Option<Duration> {
        let mut core = self.lock();
        let is_raised = core.signal(role).raised.load(Ordering::Relaxed);
        if !is_raised && !matches!(next, Next::Now | Next::Done) {
            core.signal(role).waiting = true;
            core = match next {
                Next::After(time) => {
                    let waited = self.condvar(role).wait_timeout(core, time);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                _ => self.condvar(role).wait(core).unwrap_or_else(PoisonError::into_inner),
            };
        }
        let signal = core.signal(role);
        signal.waiting = false;
        signal.raised.store(false, Ordering::Relaxed);
        core.queue.front().map(|queued| queued.since)
    }

    /// The first failure of the disk: everything that waits and everything that comes later fails
    /// with it.
    pub(crate) fn poison(&self, error: &Error) {
        let mut core = self.lock();
        if core.poisoned.is_some() {
            return;
        }
        error!(%error, "log is poisoned");
        core.poisoned = Some(error.clone());
        let queue = std::mem::take(&mut core.queue);
        let report = core.on_poisoned.take();
        let writer = core.writer.raise();
        let keeper = core.keeper.raise();
        drop(core);
        for Queued { request, .. } in queue {
            request.into_done().tell(Err(error.clone()));
        }
        if let Some(report) = report {
            report(error.clone());
        }
        self.wake(Role::Writer, writer);
        self.wake(Role::Keeper, keeper);
    }

    /// Ends one half. The folder is free for others when both have ended.
    pub(crate) fn end(&self, role: Role) {
        let mut core = self.lock();
        match role {
            Role::Writer => core.writer_ended = true,
            Role::Keeper => core.keeper_ended = true,
        }
        let both = core.writer_ended && core.keeper_ended;
        let guard = if both { core.guard.take() } else { None };
        let waiting = core.keeper.raise();
        drop(core);
        drop(guard);
        self.wake(Role::Keeper, waiting);
    }
}
