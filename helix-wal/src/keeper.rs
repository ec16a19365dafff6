//! Housekeeping behind the writer: prepares segments, seals rolled ones, frees and recycles those
//! that nobody needs, and gives compaction its time. One piece of work a step.

use std::fmt;
use std::io;
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::Duration;

use tracing::{debug, warn};

use crate::Error;
use crate::aligned::Aligned;
use crate::compaction::{Compactor, Step};
use crate::error::poison;
use crate::files::Files;
use crate::footer::{SegmentEnd, build};
use crate::layout::ready_name;
use crate::segment::Segment;
use crate::shared::{Ready, Role, Shared};
use crate::storage::Storage;
use crate::threads;
use crate::wal::Next;

/// Bytes of a segment that are written in advance at one time: few, since the writer's next group
/// may have to wait for them.
const CHUNK_BYTES: usize = 256 << 10;
/// Pause between two of them while segments are still at hand: the writer goes first.
const PACE: Duration = Duration::from_millis(1);
/// Where writes go through the page cache they are synced after so many bytes, so that no sync of
/// the writer meets them all. Direct ones are on the device already; a sync of each would be a
/// commit of the file system's journal.
const BUFFERED_SYNC_BYTES: u64 = 1 << 20;
/// Freed segments that are kept beside those that are to be ready, however full the disk is; and
/// how many segments must fit beside its reserve for more to be kept.
const RECYCLED_BESIDE: usize = 2;
const AMPLE_SEGMENTS: u64 = 32;

/// How long a reader may hold a freed segment before it is removed instead of recycled.
const READERS_WAIT: Duration = Duration::from_secs(10);
/// How often freed segments and a full disk are looked at again.
const RETRY: Duration = Duration::from_millis(500);
/// How soon it is looked again for segments to compact, at the earliest.
const LOOK: Duration = Duration::from_millis(10);
/// Entries copied under one hold of the lock.
const ENTRIES_AT_ONCE: usize = 2048;

/// Prepares, seals, frees and recycles segments. Owned by one thread (or one simulated task).
pub struct Keeper {
    shared: Arc<Shared>,
    storage: Arc<dyn Storage>,
    files: Arc<Files>,
    preparing: Option<(Ready, u64)>,
    /// Freed segments that readers may still hold.
    retired: Vec<Retired>,
    compactor: Compactor,
    /// When the next piece of a compaction may be done.
    compact_at: Duration,
    zeroes: Aligned,
    ended: bool,
}

struct Retired {
    segment: Arc<Segment>,
    since: Duration,
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper").finish_non_exhaustive()
    }
}

impl Keeper {
    pub(crate) fn new(shared: Arc<Shared>, storage: Arc<dyn Storage>, files: Arc<Files>) -> Self {
        let compactor = Compactor::new(Arc::clone(&shared), Arc::clone(&storage));
        Self {
            shared,
            storage,
            files,
            compactor,
            compact_at: Duration::ZERO,
            preparing: None,
            retired: Vec::new(),
            zeroes: Aligned::default(),
            ended: false,
        }
    }

    /// Runs the keeper on a thread of its own until the log is closed or poisoned.
    pub fn spawn(mut self) -> Result<(), Error> {
        let shared = Arc::clone(&self.shared);
        threads::spawn(&shared, Role::Keeper, move |now| self.step(now))
    }

    /// Does one piece of work. `now` is the time since any fixed moment.
    pub fn step(&mut self, now: Duration) -> Next {
        if self.ended {
            return Next::Done;
        }
        let (stop, sealable) = {
            let mut core = self.shared.lock();
            core.now = core.now.max(now);
            let sealable = if core.truncations == 0 { core.log.sealable() } else { None };
            (core.poisoned.is_some() || core.closing, sealable)
        };
        if stop {
            self.end();
            return Next::Done;
        }
        let next = match sealable {
            Some(id) => self.seal(id).map(|()| Next::Now),
            None => self.tidy(now),
        };
        next.unwrap_or_else(|error| {
            self.shared.poison(&error);
            self.end();
            Next::Done
        })
    }

    fn tidy(&mut self, now: Duration) -> Result<Next, Error> {
        let freed = self.free(now)?;
        if freed == Next::Now || self.retire(now)? {
            return Ok(Next::Now);
        }
        let prepared = self.prepare()?;
        if prepared == Next::Now {
            return Ok(Next::Now);
        }
        let waiting = if self.retired.is_empty() { freed } else { Next::After(RETRY) };
        Ok(sooner(self.compact(now)?, sooner(prepared, waiting)))
    }

    // Compaction.

    /// Does a piece of a compaction, if it is time for one.
    fn compact(&mut self, now: Duration) -> Result<Next, Error> {
        let rate = self.shared.options.compaction_bytes_per_second;
        if rate == 0 {
            return Ok(Next::Idle);
        }
        if now < self.compact_at {
            return Ok(Next::After(self.compact_at - now));
        }
        let pause = match self.compactor.step()? {
            Step::Nothing => {
                self.compact_at = now + LOOK;
                return Ok(Next::Idle);
            }
            Step::More(bytes) => self.pause(bytes, rate),
            Step::NoSpace => RETRY,
            Step::Done => {
                let replaced = self.compactor.replaced.drain(..);
                self.retired.extend(replaced.map(|segment| Retired { segment, since: now }));
                Duration::ZERO
            }
        };
        self.compact_at = now + pause;
        Ok(if pause.is_zero() { Next::Now } else { Next::After(pause) })
    }

    /// How long a piece of work must last at this rate; twice as long while the writer has work.
    fn pause(&self, bytes: u64, rate: u64) -> Duration {
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
        let pause = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let core = self.shared.lock();
        let is_busy = core.in_hand.is_some() || !core.queue.is_empty();
        if is_busy { pause * 2 } else { pause }
    }

    // Sealing.

    /// Writes a rolled segment's footer: the tables, and the trailer once those are durable.
    fn seal(&mut self, id: u64) -> Result<(), Error> {
        let Some((segment, end)) = self.segment_end(id) else { return Ok(()) };
        let mut entries = Vec::new();
        loop {
            // Placed entries of a rolled segment change no more, so they can be copied in parts.
            let core = self.shared.lock();
            let more = core.log.entries_of(id, entries.len(), ENTRIES_AT_ONCE);
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
        let held = core.log.held.get(&id)?;
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

    /// Takes segments that nobody needs out of the log: first out of the state file.
    fn free(&mut self, now: Duration) -> Result<Next, Error> {
        let shared = &self.shared;
        // Nothing to do is the rule, and it must not wait for a checkpoint that is being written.
        let ids = shared.lock().log.take_freeable();
        if ids.is_empty() {
            return Ok(Next::Idle);
        }
        let mut file = shared.state_file.lock().unwrap_or_else(PoisonError::into_inner);
        let state = shared.lock().state(shared.identity.clone(), file.checkpoint.clone());
        match file.write(self.storage.as_ref(), &state) {
            Ok(()) => {}
            // They stay out of the next state file, whoever writes it.
            Err(Error::DiskFull { .. }) => return Ok(Next::After(RETRY)),
            Err(error) => return Err(error),
        }
        drop(file);
        let mut core = shared.lock();
        for id in ids {
            let Some(segment) = core.log.remove_segment(id).and_then(|held| held.segment) else {
                continue;
            };
            core.counters.on_freed(segment.len);
            self.retired.push(Retired { segment, since: now });
        }
        Ok(Next::Now)
    }

    /// Recycles or removes freed segments that no reader holds any more.
    fn retire(&mut self, now: Duration) -> Result<bool, Error> {
        let done = self.retired.iter().position(|retired| {
            let held = Arc::strong_count(&retired.segment) > 1;
            !held || now.saturating_sub(retired.since) >= READERS_WAIT
        });
        let Some(done) = done else { return Ok(false) };
        let Retired { segment, .. } = self.retired.swap_remove(done);
        let name = segment.name();
        let recycle = segment.len == self.shared.options.segment_bytes && self.has_room_in_pool();
        match (recycle, Arc::try_unwrap(segment)) {
            (true, Ok(segment)) => {
                let file = segment.opened().map_err(|e| poison("open", &name, &e))?;
                segment.close();
                let number = self.ready_number();
                let ready = ready_name(number);
                let renamed = self.storage.rename(&name, &ready);
                renamed.map_err(|e| poison("rename", &name, &e))?;
                // Durable before it can be given another name: one file never has two.
                self.sync_dir()?;
                self.offer(Ready { name: ready, len: segment.len, file });
            }
            (_, segment) => {
                match segment {
                    Ok(segment) => segment.close(),
                    // To whoever still reads it a file that is gone would be damage.
                    Err(held) => held.keep_open().map_err(|e| poison("open", &name, &e))?,
                }
                self.storage.remove(&name).map_err(|e| poison("remove", &name, &e))?;
            }
        }
        Ok(true)
    }

    /// Whether one more freed segment is worth keeping. Compaction frees several at once, and what
    /// is removed would have to be written with zeroes again soon; but on a small disk others need
    /// the space more.
    fn has_room_in_pool(&self) -> bool {
        let options = &self.shared.options;
        let ready = self.shared.lock().ready.len();
        if ready < options.ready_segments + RECYCLED_BESIDE {
            return true;
        }
        let ample = options.reserve_bytes + AMPLE_SEGMENTS * options.segment_bytes;
        ready < options.pool_max() && self.storage.free_bytes().unwrap_or(0) >= ample
    }

    // Preparing.

    /// Writes the next piece of a segment to come.
    fn prepare(&mut self) -> Result<Next, Error> {
        if let Some((ready, at)) = self.preparing.take() {
            return self.prepare_more(ready, at);
        }
        let len = self.shared.options.segment_bytes;
        let needed = len + self.shared.options.reserve_bytes;
        let enough = {
            let core = self.shared.lock();
            core.ready.len() >= self.shared.options.ready_segments.max(1)
        };
        if enough {
            return Ok(Next::Idle);
        }
        let free = self.storage.free_bytes().unwrap_or(u64::MAX);
        if free < needed {
            return Ok(self.on_full(free, needed));
        }
        let name = ready_name(self.ready_number());
        match self.storage.create(&name, len) {
            Ok(file) => {
                self.preparing = Some((Ready { name, file, len }, 0));
                Ok(Next::Now)
            }
            Err(e) if e.kind() == io::ErrorKind::StorageFull => Ok(self.on_full(free, needed)),
            Err(e) => Err(poison("create", &name, &e)),
        }
    }

    fn prepare_more(&mut self, ready: Ready, at: u64) -> Result<Next, Error> {
        let len = (ready.len - at).min(CHUNK_BYTES as u64);
        if self.zeroes.len() < len as usize {
            self.zeroes = Aligned::with_len(len as usize);
        }
        let zeroes = self.zeroes.as_slice().get(..len as usize).unwrap_or_default();
        let end = at + len;
        let is_due = end == ready.len
            || (end.is_multiple_of(BUFFERED_SYNC_BYTES) && !self.storage.direct_io());
        let written = ready.file.write_at(zeroes, at);
        let synced = written.and_then(|()| if is_due { ready.file.sync_data() } else { Ok(()) });
        if let Err(e) = synced {
            // A file that lies about its space: nothing of the log is in it.
            if e.kind() == io::ErrorKind::StorageFull {
                let needed = ready.len + self.shared.options.reserve_bytes;
                let removed = self.storage.remove(&ready.name);
                removed.map_err(|e| poison("remove", &ready.name, &e))?;
                return Ok(self.on_full(0, needed));
            }
            return Err(poison("write", &ready.name, &e));
        }
        if end == ready.len {
            self.sync_dir()?;
            self.offer(ready);
            return Ok(Next::Now);
        }
        let hurry = self.shared.lock().ready.is_empty();
        self.preparing = Some((ready, end));
        Ok(if hurry { Next::Now } else { Next::After(PACE) })
    }

    /// Puts a file into the pool.
    fn offer(&self, ready: Ready) {
        let mut core = self.shared.lock();
        core.ready.push_back(ready);
        core.disk_full = None;
        let waiting = core.writer.raise();
        drop(core);
        self.shared.wake(Role::Writer, waiting);
    }

    /// The disk has no room for another segment; it is looked at again later.
    fn on_full(&self, free: u64, needed: u64) -> Next {
        let mut core = self.shared.lock();
        // Said while the pool still has something: whoever asks `writable` before it appends has
        // room for what it appended before.
        if core.disk_full.is_none() {
            warn!(free_bytes = free, needed_bytes = needed, "no room for another segment");
            core.disk_full = Some((free, needed));
        }
        Next::After(RETRY)
    }

    fn ready_number(&self) -> u64 {
        let mut core = self.shared.lock();
        core.ready_number += 1;
        core.ready_number - 1
    }

    fn sync_dir(&self) -> Result<(), Error> {
        self.storage.sync_dir().map_err(|e| poison("sync", &self.storage.describe(), &e))
    }

    fn end(&mut self) {
        self.ended = true;
        self.shared.end(Role::Keeper);
    }
}

/// The earlier of two wishes.
fn sooner(a: Next, b: Next) -> Next {
    match (a, b) {
        (Next::Now, _) | (_, Next::Now) => Next::Now,
        (Next::After(a), Next::After(b)) => Next::After(a.min(b)),
        (after @ Next::After(_), _) | (_, after @ Next::After(_)) => after,
        _ => Next::Idle,
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
