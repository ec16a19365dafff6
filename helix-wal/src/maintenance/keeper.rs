//! Housekeeping: prepares segments, seals rolled ones, recycles freed ones, and runs compaction.
//!
//! Each step does one piece of work.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tracing::{debug, warn};

use crate::compaction::compactor::{CompactionStep, Compactor};
use crate::error::{Error, changing, poison};
use crate::files::aligned::Aligned;
use crate::files::open_files::OpenFiles;
use crate::files::segment::Segment;
use crate::format::footer::{SegmentEnd, build};
use crate::format::layout::ready_name;
use crate::shared::Shared;
use crate::shared::core::ReadySegment;
use crate::shared::options::Preparation;
use crate::shared::signal::WalThread;
use crate::shared::threads::spawn;
use crate::storage::Storage;
use crate::sync::IgnorePoison;
use crate::types::NextStep;

/// Bytes of a prepared segment written at a time. Small, because the writer may have to wait for
/// it.
const CHUNK_BYTES: usize = 256 << 10;
/// Maximum pause between two chunks while segments are available, which gives the writer priority.
const PREPARE_PAUSE_MAX: Duration = Duration::from_millis(1);
/// Minimum of prepared bytes per byte of the log; it limits the pauses.
const PREPARE_PACE: u64 = 4;
/// Bytes between two syncs of a prepared file that is written through the page cache, so that a
/// sync of the writer does not have to flush all of them.
///
/// Direct writes need no such syncs: they are on the device already, and each sync would only
/// commit the file system's journal.
const BUFFERED_SYNC_BYTES: u64 = 1 << 20;
/// Freed segments kept in addition to the ready ones, even if the disk is full.
///
/// More are kept only if `AMPLE_FREE_SEGMENTS` segments fit beside the disk reserve.
const RECYCLED_EXTRA: usize = 2;
const AMPLE_FREE_SEGMENTS: u64 = 32;

/// Time that readers may hold a freed segment before it is removed instead of recycled.
const READER_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which freed segments and a full disk are checked again.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Minimum interval between two searches for segments to compact.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);
/// Interval at which a step on another thread is polled.
///
/// That thread does not wake the keeper. It has a low priority, and the log would wait for a lock
/// that the thread holds.
const DETACHED_INTERVAL: Duration = Duration::from_millis(2);
/// Number of entries copied per lock acquisition.
const ENTRIES_PER_LOCK: usize = 2048;

/// Prepares, seals, frees and recycles segments. Owned by one thread or one simulated task.
pub struct Keeper {
    shared: Arc<Shared>,
    storage: Arc<dyn Storage>,
    files: Arc<OpenFiles>,
    preparing: Option<(ReadySegment, u64)>,
    /// Freed segments that readers may still hold.
    retired: Vec<RetiredSegment>,
    /// A freed segment with the name of a ready one, which is not durable yet.
    renamed: Option<ReadySegment>,
    compactor: Compactor,
    /// Earliest time of the next piece of a compaction.
    compact_at: Duration,
    /// Earliest time of the next seal, after a shortage.
    seal_at: Duration,
    zeroes: Aligned,
    /// The last piece of work found a shortage.
    is_short: bool,
    ended: bool,
}

struct RetiredSegment {
    segment: Arc<Segment>,
    since: Duration,
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper").finish_non_exhaustive()
    }
}

impl Keeper {
    pub(crate) fn new(
        shared: Arc<Shared>,
        storage: Arc<dyn Storage>,
        files: Arc<OpenFiles>,
    ) -> Self {
        let is_allocated = allocates(Preparation::Allocate, false, storage.as_ref());
        if shared.options.preparation == Preparation::Allocate && !is_allocated {
            let directory = storage.describe();
            warn!(directory, "the file system cannot allocate segments; they are zero-filled");
        }
        let compactor = Compactor::new(Arc::clone(&shared), Arc::clone(&storage));
        Self {
            shared,
            storage,
            files,
            compactor,
            compact_at: Duration::ZERO,
            seal_at: Duration::ZERO,
            preparing: None,
            retired: Vec::new(),
            renamed: None,
            zeroes: Aligned::default(),
            is_short: false,
            ended: false,
        }
    }

    /// Runs the keeper on a separate thread until the log is closed or poisoned.
    ///
    /// # Errors
    /// Fails if the thread cannot be spawned.
    pub fn spawn(mut self) -> Result<(), Error> {
        let shared = Arc::clone(&self.shared);
        spawn(&shared, WalThread::Keeper, move |now| self.step(now))
    }

    /// Does one piece of work. `now` is the time since any fixed moment.
    pub fn step(&mut self, now: Duration) -> NextStep {
        if self.ended {
            return NextStep::Done;
        }
        let (stop, sealable) = {
            let mut core = self.shared.lock();
            core.now = core.now.max(now);
            let is_due = core.truncations == 0 && now >= self.seal_at;
            let sealable = if is_due { core.log.sealable() } else { None };
            (core.poisoned.is_some() || core.closing, sealable)
        };
        if stop {
            self.end();
            return NextStep::Done;
        }
        let next = self.seal_or_housekeep(sealable, now);
        self.unless_short(next).unwrap_or_else(|error| {
            self.shared.poison(&error);
            self.end();
            NextStep::Done
        })
    }

    /// Seals a segment, or else does housekeeping. After a shortage, the seal waits for resources
    /// that housekeeping may free.
    fn seal_or_housekeep(
        &mut self,
        sealable: Option<u64>,
        now: Duration,
    ) -> Result<NextStep, Error> {
        if let Some(id) = sealable {
            let sealed = self.seal(id).map(|()| NextStep::Now);
            if self.unless_short(sealed)? == NextStep::Now {
                return Ok(NextStep::Now);
            }
            self.seal_at = now + RETRY_INTERVAL;
        }
        let worked = self.do_housekeeping(now);
        let worked = self.unless_short(worked)?;
        let is_waiting = now < self.seal_at;
        let seal = if is_waiting { NextStep::After(self.seal_at - now) } else { NextStep::Idle };
        Ok(earlier(worked, seal))
    }

    /// Postpones a piece of work after a shortage. Logs it once until the pool grows again.
    fn unless_short(&mut self, step: Result<NextStep, Error>) -> Result<NextStep, Error> {
        match step {
            Err(error) if error.is_shortage() => {
                if !std::mem::replace(&mut self.is_short, true) {
                    warn!(%error, "cannot prepare or delete files yet, retrying");
                }
                Ok(NextStep::After(RETRY_INTERVAL))
            }
            step => step,
        }
    }

    fn do_housekeeping(&mut self, now: Duration) -> Result<NextStep, Error> {
        let freed = self.free(now)?;
        if freed == NextStep::Now {
            return Ok(NextStep::Now);
        }
        let retired = self.retire(now);
        if self.unless_short(retired)? == NextStep::Now {
            return Ok(NextStep::Now);
        }
        let prepared = self.prepare();
        let prepared = self.unless_short(prepared)?;
        if prepared == NextStep::Now {
            return Ok(NextStep::Now);
        }
        let is_done = self.retired.is_empty() && self.renamed.is_none();
        let waiting = if is_done { freed } else { NextStep::After(RETRY_INTERVAL) };
        Ok(earlier(self.compact(now)?, earlier(prepared, waiting)))
    }

    // Compaction.

    /// Does one piece of a compaction, if it is due.
    fn compact(&mut self, now: Duration) -> Result<NextStep, Error> {
        let rate = self.shared.options.compaction_bytes_per_second;
        if rate == 0 {
            return Ok(NextStep::Idle);
        }
        if now < self.compact_at {
            return Ok(NextStep::After(self.compact_at - now));
        }
        let pause = match self.compactor.step()? {
            CompactionStep::Nothing => {
                self.compact_at = now + CHECK_INTERVAL;
                return Ok(NextStep::Idle);
            }
            CompactionStep::Detached => return Ok(NextStep::After(DETACHED_INTERVAL)),
            CompactionStep::More(bytes) => self.pause(bytes, rate),
            CompactionStep::NoSpace | CompactionStep::Refused => RETRY_INTERVAL,
            CompactionStep::Done => {
                let replaced = self.compactor.replaced.drain(..);
                self.retired.extend(replaced.map(|segment| RetiredSegment { segment, since: now }));
                Duration::ZERO
            }
        };
        self.compact_at = now + pause;
        Ok(if pause.is_zero() { NextStep::Now } else { NextStep::After(pause) })
    }

    /// Returns how long a piece of work must last at this rate; twice as long if the writer is
    /// busy.
    fn pause(&self, bytes: u64, rate: u64) -> Duration {
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
        let pause = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let core = self.shared.lock();
        let is_busy = core.in_progress_since.is_some() || !core.queue.is_empty();
        if is_busy { pause * 2 } else { pause }
    }

    // Sealing.

    /// Writes the footer of a rolled segment: first the tables, then the trailer.
    fn seal(&mut self, id: u64) -> Result<(), Error> {
        let Some((segment, end)) = self.segment_end(id) else { return Ok(()) };
        let mut entries = Vec::new();
        loop {
            // Placed entries of a rolled segment no longer change, so they can be copied in parts.
            let core = self.shared.lock();
            let more = core.log.entries_of(id, entries.len(), ENTRIES_PER_LOCK);
            drop(core);
            if more.is_empty() {
                break;
            }
            entries.extend(more);
        }
        let name = segment.name();
        let footer = build(&entries, end)
            .ok_or_else(|| poison("seal", &name, &io::Error::other("the footer does not fit")))?;
        segment.write_footer(&footer)?;
        debug!(segment = id, entries = entries.len(), "sealed");
        self.shared.lock().log.on_sealed(id, &footer.trailer, &footer.directory);
        segment.open_on_demand(&self.files);
        Ok(())
    }

    fn segment_end(&self, id: u64) -> Option<(Arc<Segment>, SegmentEnd)> {
        let core = self.shared.lock();
        let held = core.log.chain.get(&id)?;
        let (data_end, context) = held.rolled.clone()?;
        let segment = held.segment.clone()?;
        let end = SegmentEnd {
            segment: id,
            identity_crc: crc32fast::hash(&self.shared.identity),
            file_len: segment.len,
            data_end,
            gathered: false,
            context,
        };
        Some((segment, end))
    }

    // Freeing.

    /// Frees segments that are no longer needed. They leave the state file first.
    fn free(&mut self, now: Duration) -> Result<NextStep, Error> {
        let shared = Arc::clone(&self.shared);
        // Usually there is nothing to free, and that must not wait for a checkpoint being written.
        let ids = shared.lock().log.take_freeable();
        if ids.is_empty() {
            return Ok(NextStep::Idle);
        }
        let mut file = shared.state_file.lock().ignore_poison();
        let state = shared.lock().state(shared.identity.clone(), file.checkpoint.clone());
        match file.write(self.storage.as_ref(), &state) {
            Ok(()) => {}
            // The next state file omits them, whichever component writes it.
            Err(error) => {
                drop(file);
                return self.unless_short(Err(error));
            }
        }
        drop(file);
        let mut core = shared.lock();
        for id in ids {
            let Some(segment) = core.log.remove_segment(id).and_then(|held| held.segment) else {
                continue;
            };
            core.counters.on_freed(segment.len);
            self.retired.push(RetiredSegment { segment, since: now });
        }
        Ok(NextStep::Now)
    }

    /// Recycles or removes freed segments that readers no longer hold.
    fn retire(&mut self, now: Duration) -> Result<NextStep, Error> {
        if self.renamed.is_some() {
            // The new name must be durable before the next rename: a file never has two names.
            self.sync_dir()?;
            if let Some(ready) = self.renamed.take() {
                self.add_to_pool(ready);
            }
            return Ok(NextStep::Now);
        }
        let done = self.retired.iter().position(|retired| {
            let held = Arc::strong_count(&retired.segment) > 1;
            !held || now.saturating_sub(retired.since) >= READER_TIMEOUT
        });
        let Some(done) = done else { return Ok(NextStep::Idle) };
        let RetiredSegment { segment, since } = self.retired.swap_remove(done);
        self.retire_one(&segment).inspect_err(|error| {
            if error.is_shortage() {
                self.retired.push(RetiredSegment { segment, since });
            }
        })?;
        Ok(NextStep::Now)
    }

    /// Recycles or removes one segment. After a shortage it can be repeated.
    fn retire_one(&mut self, segment: &Arc<Segment>) -> Result<(), Error> {
        let name = segment.name();
        let is_held = Arc::strong_count(segment) > 1;
        if !is_held && segment.len == self.shared.options.segment_bytes && self.pool_has_capacity()
        {
            let file = segment.opened().map_err(|e| changing("open", &name, &e))?;
            let ready = ready_name(self.ready_number());
            let renamed = self.storage.rename(&name, &ready);
            renamed.map_err(|e| changing("rename", &name, &e))?;
            segment.close();
            let (len, file) = (segment.len, Some(file));
            let ready = ReadySegment { name: ready, len, file, is_written: true };
            self.renamed = Some(ready);
            return Ok(());
        }
        if is_held {
            // Kept open for its readers, which would report a missing file as damage.
            segment.keep_open().map_err(|e| changing("open", &name, &e))?;
        } else {
            segment.close();
        }
        self.storage.remove(&name).map_err(|e| changing("remove", &name, &e))
    }

    /// Returns whether another freed segment is worth keeping.
    ///
    /// Compaction frees several at once, and a removed segment would have to be filled with zeroes
    /// again soon. On a small disk the space is needed more elsewhere.
    fn pool_has_capacity(&self) -> bool {
        let options = &self.shared.options;
        let ready = self.shared.lock().ready.len();
        if ready < options.ready_segments + RECYCLED_EXTRA {
            return true;
        }
        let ample = options.reserve_bytes + AMPLE_FREE_SEGMENTS * options.segment_bytes;
        ready < options.pool_max() && self.storage.free_bytes().unwrap_or(0) >= ample
    }

    // Preparing.

    /// Does the next piece of preparing a segment.
    fn prepare(&mut self) -> Result<NextStep, Error> {
        if let Some((ready, at)) = self.preparing.take() {
            return self.prepare_more(ready, at);
        }
        let len = self.shared.options.segment_bytes;
        let needed = len + self.shared.options.reserve_bytes;
        let enough = {
            let mut core = self.shared.lock();
            let enough = core.ready.len() >= self.shared.options.ready_target();
            if enough {
                // Freed segments filled the pool after the disk had no space for another one.
                core.disk_full = None;
            }
            enough
        };
        if enough {
            return Ok(NextStep::Idle);
        }
        let free = self.storage.free_bytes().unwrap_or(u64::MAX);
        if free < needed {
            return Ok(self.on_full(free, needed));
        }
        let name = ready_name(self.ready_number());
        match self.storage.create(&name, len) {
            Ok(file) => {
                self.shared.lock().preparing = true;
                let ready = ReadySegment { name, file: Some(file), len, is_written: false };
                self.preparing = Some((ready, 0));
                Ok(NextStep::Now)
            }
            Err(e) => self.on_shortage(free, changing("create", &name, &e)),
        }
    }

    /// Writes the next chunk of zeroes, or leaves the rest of the segment allocated.
    fn prepare_more(&mut self, mut ready: ReadySegment, at: u64) -> Result<NextStep, Error> {
        let chunk = self.next_chunk();
        let len = chunk.map_or(0, |_| (ready.len - at).min(CHUNK_BYTES as u64));
        if self.zeroes.len() < len as usize {
            self.zeroes = Aligned::with_len(len as usize);
        }
        let zeroes = self.zeroes.as_slice().get(..len as usize).unwrap_or_default();
        let end = at + len;
        let is_last = end == ready.len || chunk.is_none();
        let is_due =
            is_last || (end.is_multiple_of(BUFFERED_SYNC_BYTES) && !self.storage.direct_io());
        let Some(file) = &ready.file else { return Ok(NextStep::Now) };
        let written = if len > 0 { file.write_at(zeroes, at) } else { Ok(()) };
        let synced = written.and_then(|()| if is_due { file.sync_data() } else { Ok(()) });
        if let Err(e) = synced {
            self.shared.lock().preparing = false;
            // The file system promised space that it does not have. The file holds nothing of the
            // log yet.
            let error = changing("write", &ready.name, &e);
            if error.is_shortage() {
                // Ignored: the next open uses the file as a ready segment, which is safe.
                let _ = self.storage.remove(&ready.name);
            }
            let free = self.storage.free_bytes().unwrap_or(u64::MAX);
            return self.on_shortage(free, error);
        }
        self.shared.lock().counters.zeroed_bytes += len;
        let pause = match chunk {
            Some(pause) if !is_last => pause,
            _ => {
                if let Err(error) = self.sync_dir() {
                    // Only the sync is repeated.
                    self.preparing = Some((ready, end));
                    return Err(error);
                }
                ready.is_written = end == ready.len;
                self.count_prepared(ready.is_written);
                self.add_to_pool(ready);
                return Ok(NextStep::Now);
            }
        };
        self.preparing = Some((ready, end));
        Ok(if pause.is_zero() { NextStep::Now } else { NextStep::After(pause) })
    }

    fn count_prepared(&self, is_written: bool) {
        let counters = &mut self.shared.lock().counters;
        if is_written {
            counters.zeroed_segments += 1;
        } else {
            counters.allocated_segments += 1;
        }
    }

    /// Returns the pause after the next chunk of zeroes. `None` if the rest of the segment is only
    /// allocated.
    fn next_chunk(&self) -> Option<Duration> {
        let mut core = self.shared.lock();
        let now = self.shared.now(&core);
        let rate = core.disk.bytes_per_second(now);
        let is_scarce = core.disk.is_bandwidth_scarce(now);
        let (preparation, storage) = (self.shared.options.preparation, &self.storage);
        if allocates(preparation, is_scarce, storage.as_ref()) {
            return None;
        }
        if core.ready.is_empty() {
            // The writer allocates a segment itself if it needs one before this one is filled.
            return Some(Duration::ZERO);
        }
        let nanos = CHUNK_BYTES as u64 * 1_000_000_000 / rate.saturating_mul(PREPARE_PACE).max(1);
        Some(Duration::from_nanos(nanos).min(PREPARE_PAUSE_MAX))
    }

    /// Adds a file to the pool.
    fn add_to_pool(&mut self, mut ready: ReadySegment) {
        self.is_short = false;
        let mut core = self.shared.lock();
        let is_beyond = core.ready.len() >= self.shared.options.ready_target();
        // Closed after the lock is released.
        let unneeded = if is_beyond { ready.file.take() } else { None };
        core.ready.push_back(ready);
        core.preparing = self.preparing.is_some();
        core.disk_full = None;
        let waiting = core.writer.raise();
        drop(core);
        drop(unneeded);
        self.shared.wake(WalThread::Writer, waiting);
    }

    /// Handles a failure to prepare a segment. A shortage of space is recorded.
    fn on_shortage(&self, free: u64, error: Error) -> Result<NextStep, Error> {
        let Error::DiskFull { .. } = error else { return Err(error) };
        let options = &self.shared.options;
        Ok(self.on_full(free, options.segment_bytes + options.reserve_bytes))
    }

    /// Records that the disk has no space for another segment, and retries later.
    fn on_full(&self, free: u64, needed: u64) -> NextStep {
        // Recorded while the pool still has segments, so that a caller that checks `writable` has
        // space for its previous appends.
        let is_new = {
            let mut core = self.shared.lock();
            let is_new = core.disk_full.is_none();
            if is_new || free >= needed {
                core.disk_full = Some((free, needed));
            }
            is_new
        };
        if is_new {
            let error = Error::DiskFull { free_bytes: free, needed_bytes: needed };
            warn!(%error, "cannot prepare another segment");
        }
        NextStep::After(RETRY_INTERVAL)
    }

    fn ready_number(&self) -> u64 {
        let mut core = self.shared.lock();
        core.ready_number += 1;
        core.ready_number - 1
    }

    fn sync_dir(&self) -> Result<(), Error> {
        self.storage.sync_dir().map_err(|e| changing("sync", &self.storage.describe(), &e))
    }

    fn end(&mut self) {
        self.ended = true;
        self.compactor.cancel_detached();
        let cleaning = self.shared.lock().cleaning.take();
        if let Some(cleaning) = cleaning {
            cleaning.request.finish(Err(Error::Closed));
        }
        self.shared.end(WalThread::Keeper);
    }
}

/// Returns whether a segment is left allocated rather than filled with zeroes. If an allocation
/// reserves no disk space, the segment must be filled.
fn allocates(preparation: Preparation, is_scarce: bool, storage: &dyn Storage) -> bool {
    let writes_elsewhere = storage.writes_elsewhere();
    let wants = match preparation {
        Preparation::Allocate => true,
        // Overwriting zeroes is not faster on such storage.
        Preparation::Auto => is_scarce || writes_elsewhere,
        Preparation::Zero => false,
    };
    wants && (storage.reserves_space() || writes_elsewhere)
}

/// Returns the earlier of two next steps.
fn earlier(a: NextStep, b: NextStep) -> NextStep {
    match (a, b) {
        (NextStep::Now, _) | (_, NextStep::Now) => NextStep::Now,
        (NextStep::After(a), NextStep::After(b)) => NextStep::After(a.min(b)),
        (after @ NextStep::After(_), _) | (_, after @ NextStep::After(_)) => after,
        _ => NextStep::Idle,
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        if thread::panicking() {
            let reason = "the keeper panicked".to_owned();
            let file = self.storage.describe();
            self.shared.poison(&Error::Poisoned { operation: "keep", file, reason });
        }
        self.end();
    }
}
