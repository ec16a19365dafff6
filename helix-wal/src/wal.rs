//! The public handle of the log. Writes go through one queue and one writer; reads bypass both.

mod clean;
mod repair;
pub(crate) mod segment_repair;
mod snapshot;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::error::Error;
use crate::files::open_files::OpenFiles;
use crate::files::segment::unless_blocked;
use crate::files::state_file::StateFile;
use crate::format::frame::frame_len;
use crate::format::layout::{HEAD_BYTES_MAX, OPAQUE_BYTES_MAX};
use crate::maintenance::keeper::Keeper;
use crate::memory::live_segment::LiveSegment;
use crate::memory::log::Log;
use crate::memory::placement::PlaceOutcome;
use crate::memory::slot::WrittenEntry;
use crate::recovery::open::open;
use crate::shared::Shared;
use crate::shared::core::Core;
use crate::shared::group_times::GroupStamp;
use crate::shared::options::{Options, RESERVED_SEGMENTS};
use crate::shared::queue::{PendingCallback, WriteRequest};
use crate::shared::signal::{Wakers, WalThread};
use crate::storage::Storage;
use crate::sync::{MutexGuard, current};
use crate::types::{DurableCallback, SYNC_BOUNDS_US};
use crate::types::{
    Entry, LogId, LogState, Placement, ReadMode, Recovered, StoredEntry, StreamRow, WalStats,
};
use crate::write::writer::Writer;

/// Handle to the log; cheap to clone. Dropping the last handle closes the log.
#[derive(Clone)]
pub struct Wal {
    shared: Arc<Shared>,
    closer: Arc<Closer>,
}

/// Closes the log with the last handle.
struct Closer(Arc<Shared>);

impl Drop for Closer {
    fn drop(&mut self) {
        close(&self.0);
    }
}

impl fmt::Debug for Wal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}

impl Wal {
    /// Opens the log in a data directory and recovers it.
    ///
    /// The caller must run the writer and the keeper: with `Writer::spawn` and `Keeper::spawn` on
    /// threads, or with `step`.
    ///
    /// # Errors
    /// [`Error::Unusable`] if the directory is in use, newer or of another replica.
    /// [`Error::Damaged`] if the log is damaged.
    pub fn open(
        storage: Arc<dyn Storage>,
        options: Options,
    ) -> Result<(Wal, Writer, Keeper, Recovered), Error> {
        options.check()?;
        let files = Arc::new(OpenFiles::new(Arc::clone(&storage), options.files.clone()));
        let (shared, active, recovered) = open(Arc::clone(&storage), &files, options, false)?;
        let writer = Writer::new(Arc::clone(&shared), Arc::clone(&storage), active);
        let keeper = Keeper::new(Arc::clone(&shared), storage, files);
        Ok((Self::new(shared), writer, keeper, recovered))
    }

    /// Creates an in-memory log.
    ///
    /// Appends complete inside `append`. Payloads are kept until they are trimmed. There is no
    /// writer and no keeper.
    pub fn open_memory(options: Options) -> Wal {
        let mut log = Log::new(true, 0);
        log.chain.insert(1, LiveSegment::new(None));
        let core = Core { writer_ended: true, keeper_ended: true, next_id: 2, ..Core::new(log) };
        let identity = options.identity.clone();
        let state_file = StateFile::default();
        Self::new(Arc::new(Shared::new(None, None, options, identity, state_file, core)))
    }

    fn new(shared: Arc<Shared>) -> Self {
        let closer = Arc::new(Closer(Arc::clone(&shared)));
        Self { shared, closer }
    }

    /// Returns whether the log is in-memory: appends complete inside `append`.
    pub fn is_memory(&self) -> bool {
        self.shared.lock().log.is_memory()
    }

    // Writing.

    /// Queues entries with consecutive indexes after the last one; any index for the first entry.
    ///
    /// They are readable at once; `done` runs when they are durable. An append that fails with
    /// `DiskFull` leaves nothing behind. Exception: of an append larger than a segment, a first
    /// part may stay; `state` shows it.
    pub fn append(&self, entries: Vec<Entry>, done: DurableCallback) {
        let mut core = self.shared.lock();
        let checked = core
            .check_open()
            .and_then(|()| self.check_sizes(&entries))
            .and_then(|()| core.log.check_append(&entries));
        if let Err(error) = checked {
            // The preceding append may just have been refused, before the caller was notified.
            let beyond = entries.first().is_some_and(|entry| entry.id.index > core.log.end());
            let error = match core.disk_full.filter(|_| beyond && core.check_open().is_ok()) {
                Some((free_bytes, needed_bytes)) => Error::DiskFull { free_bytes, needed_bytes },
                None => error,
            };
            drop(core);
            return done(Err(error));
        }
        if core.log.is_memory() {
            self.append_to_memory(&mut core, entries);
            drop(core);
            return done(Ok(()));
        }
        let serial = core.log.next_serial();
        for entry in &entries {
            core.log.push(entry.clone());
        }
        let epoch = core.epoch;
        self.shared.queue(
            core,
            WriteRequest::Append { entries, serial, epoch, done: PendingCallback::new(done) },
        );
    }

    /// Runs `done` once everything that was queued before is durable. Writes nothing itself.
    pub fn sync(&self, done: DurableCallback) {
        // The writer takes requests in their order and syncs one group before it fills the next.
        self.append(Vec::new(), done);
    }

    fn check_sizes(&self, entries: &[Entry]) -> Result<(), Error> {
        let max = self.shared.options.entry_bytes_max();
        for Entry { id, head, payload, .. } in entries {
            let bytes = frame_len(head.len(), payload.bytes.len()) as u64;
            if bytes > max || head.len() > HEAD_BYTES_MAX {
                let index = id.index;
                let message = format!("entry {index} has {bytes} bytes, its head {}", head.len());
                let limits = format!("the limits are {max} and {HEAD_BYTES_MAX}");
                return Err(Error::Unusable(format!("{message}: {limits}")));
            }
        }
        Ok(())
    }

    fn append_to_memory(&self, core: &mut Core, entries: Vec<Entry>) {
        for entry in entries {
            let bytes = frame_len(entry.head.len(), entry.payload.bytes.len()) as u64;
            let index = entry.id.index;
            let serial = core.log.next_serial();
            core.log.push(entry);
            if core.memory_bytes + bytes > self.shared.options.segment_bytes {
                core.memory_bytes = 0;
                core.log.roll_memory(core.next_id);
                core.next_id += 1;
            }
            core.memory_bytes += bytes;
            let segment = core.next_id - 1;
            core.log.on_written(segment, &[WrittenEntry { index, serial, offset: 0 }]);
        }
    }

    /// Queues a vote (opaque, at most 256 bytes).
    pub fn save_vote(&self, vote: Bytes, done: DurableCallback) {
        let mut core = self.shared.lock();
        let checked = core.check_open().and_then(|()| {
            if vote.len() <= OPAQUE_BYTES_MAX {
                return Ok(());
            }
            let len = vote.len();
            Err(Error::Unusable(format!("vote has {len} bytes; the limit is {OPAQUE_BYTES_MAX}")))
        });
        if let Err(error) = checked {
            drop(core);
            return done(Err(error));
        }
        core.log.vote = Some(vote.clone());
        if core.log.is_memory() {
            drop(core);
            return done(Ok(()));
        }
        self.shared.queue(core, WriteRequest::Vote { vote, done: PendingCallback::new(done) });
    }

    /// Queues the removal of all entries after `last` (`None`: all above the purge point).
    ///
    /// Readers see it at once. Fails for placed entries.
    pub fn truncate_after(&self, last: Option<u64>, done: DurableCallback) {
        let mut core = self.shared.lock();
        let cut = core.check_open().and_then(|()| core.log.truncate_after(last));
        let (from, gone) = match cut {
            Ok(cut) => cut,
            Err(error) => {
                drop(core);
                return done(Err(error));
            }
        };
        if core.log.is_memory() {
            drop(core);
            drop(gone);
            return done(Ok(()));
        }
        let last = core.log.last;
        core.truncations += 1;
        self.shared
            .queue(core, WriteRequest::Truncate { from, last, done: PendingCallback::new(done) });
        drop(gone);
    }

    /// Queues the removal of entries up to `upto` from the Raft log. `upto` must be checkpointed.
    ///
    /// The entries stay readable by stream until trimmed. If `upto` is above the last entry, the
    /// log becomes empty and continues after it.
    pub fn purge(&self, upto: LogId, done: DurableCallback) {
        let mut core = self.shared.lock();
        let gone = match core.check_open().and_then(|()| core.log.purge(upto)) {
            Ok(gone) => gone,
            Err(error) => {
                drop(core);
                return done(Err(error));
            }
        };
        if core.log.is_memory() {
            core.log.drop_empty_memory_segments();
            drop(core);
            drop(gone);
            return done(Ok(()));
        }
        let waiting = core.keeper.raise();
        let empties = core.log.last == Some(upto);
        self.shared
            .queue(core, WriteRequest::Purge { upto, empties, done: PendingCallback::new(done) });
        self.shared.wake(WalThread::Keeper, waiting);
    }

    /// Records the commit point, which is written with the next group. Does not cause a write.
    pub fn set_committed(&self, committed: LogId) {
        let mut core = self.shared.lock();
        if core.log.committed.is_none_or(|old| old.index < committed.index) {
            core.log.committed = Some(committed);
        }
    }

    // Placement.

    /// Records the placement of an entry; `None` if it takes no positions.
    ///
    /// Entries are placed in order, without gaps, once after each open. An entry above the
    /// checkpoint that is in a sealed segment must have the same placement as before, which may
    /// need a disk read.
    ///
    /// # Errors
    /// [`Error::Unusable`] if the entry is out of order. [`Error::Damaged`] if the footer
    /// disagrees.
    pub fn place(&self, index: u64, placement: Option<Placement>) -> Result<(), Error> {
        let mut core = self.shared.lock();
        core.check_open()?;
        let segment = match core.log.place(index, placement)? {
            PlaceOutcome::Done { may_seal } => {
                self.after_place(core, may_seal);
                return Ok(());
            }
            PlaceOutcome::Sealed(segment) => segment,
        };
        drop(core);
        let placement = placement.filter(|placement| placement.count > 0);
        let agrees = match unless_blocked(self.shared.sealed_agrees(&segment, index, placement)) {
            // Only a check, which the next open repeats. The caller could not repeat the call.
            Err(Error::Exhausted { .. }) => Some(true),
            agrees => agrees?,
        };
        if agrees != Some(true) {
            let what = format!("the footer has another placement for entry {index}");
            return Err(segment.damaged(0..segment.len, &what));
        }
        self.shared.lock().log.on_sealed_placed(index);
        Ok(())
    }

    fn after_place(&self, mut core: MutexGuard<'_, Core>, may_seal: bool) {
        if !may_seal {
            return;
        }
        if core.log.is_memory() {
            core.log.seal_memory_segments();
            return;
        }
        let waiting = core.keeper.raise();
        drop(core);
        self.shared.wake(WalThread::Keeper, waiting);
    }

    /// Trims the stream: positions below `position` are no longer needed.
    pub fn trim(&self, stream: u64, position: u64) {
        let freed = self.shared.lock().log.trim(stream, position);
        if freed {
            self.shared.raise(WalThread::Keeper);
        }
    }

    /// Drops the stream: none of its positions is needed, and its number is never used again.
    pub fn drop_stream(&self, stream: u64) {
        let freed = {
            let mut core = self.shared.lock();
            if core.clean_marks.contains_key(&stream) {
                Arc::make_mut(&mut core.clean_marks).remove(&stream);
            }
            core.log.drop_stream(stream)
        };
        if freed {
            self.shared.raise(WalThread::Keeper);
        }
    }

    // Reading.

    /// Returns the Raft view of the log.
    pub fn state(&self) -> LogState {
        self.shared.lock().log.state()
    }

    /// Returns the first index of the Raft log, or the next one. A log need not begin at 0.
    pub fn first_index(&self) -> u64 {
        self.shared.lock().log.first_present()
    }

    /// Replaces `Direct` by `Blocking` if the storage has no direct I/O.
    fn supported_mode(&self, mode: ReadMode) -> ReadMode {
        let has_direct_io = || self.shared.storage.as_ref().is_some_and(|it| it.direct_io());
        if mode == ReadMode::Direct && !has_direct_io() { ReadMode::Blocking } else { mode }
    }

    /// Reads entries of an index range with payloads.
    ///
    /// Returns at least one entry if there is one, then up to `bytes_max`; possibly fewer.
    ///
    /// # Errors
    /// [`Error::Trimmed`] if the range starts at or below the purge point.
    pub fn read(
        &self,
        range: Range<u64>,
        bytes_max: usize,
        mode: ReadMode,
    ) -> Result<Option<Vec<Entry>>, Error> {
        unless_blocked(self.shared.read_entries(range, bytes_max, self.supported_mode(mode)))
    }

    /// Reads entries without payloads (crc and seed are kept), up to `entries_max`; possibly fewer.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn heads(
        &self,
        range: Range<u64>,
        entries_max: usize,
        mode: ReadMode,
    ) -> Result<Option<Vec<Entry>>, Error> {
        unless_blocked(self.shared.read_heads(range, entries_max, self.supported_mode(mode)))
    }

    /// Returns the id of an entry of the Raft log or of the purge point; `Some(None)` outside.
    ///
    /// # Errors
    /// [`Error::Damaged`] or [`Error::Io`] if the footer cannot be read.
    pub fn log_id(&self, index: u64, mode: ReadMode) -> Result<Option<Option<LogId>>, Error> {
        unless_blocked(self.shared.read_log_id(index, self.supported_mode(mode)))
    }

    /// Reads entries of a stream from the one with `position` on, up to positions below `below`.
    ///
    /// Returns at least one entry if there is one, then up to `bytes_max`; possibly fewer. Returns
    /// no entries if `position` does not exist yet.
    ///
    /// # Errors
    /// [`Error::Trimmed`] if `position` is below the first one kept.
    pub fn read_stream(
        &self,
        stream: u64,
        position: u64,
        below: u64,
        bytes_max: usize,
        mode: ReadMode,
    ) -> Result<Option<Vec<StoredEntry>>, Error> {
        unless_blocked(self.shared.read_positions(
            stream,
            position..below,
            bytes_max,
            self.supported_mode(mode),
        ))
    }

    /// Returns the first position of the first entry at or after `time`; `Some(None)` if there is
    /// none.
    ///
    /// # Errors
    /// [`Error::Damaged`] or [`Error::Io`] if the footer cannot be read.
    pub fn search_time(
        &self,
        stream: u64,
        time: u64,
        mode: ReadMode,
    ) -> Result<Option<Option<u64>>, Error> {
        unless_blocked(self.shared.find_time(stream, time, self.supported_mode(mode)))
    }

    /// Returns the stream's shares of segments, oldest first, without trimmed ones.
    ///
    /// Entries that are not written yet are in no share.
    pub fn stream_rows(&self, stream: u64) -> Vec<StreamRow> {
        let core = self.shared.lock();
        let stream = core.log.streams.get(&stream);
        stream.map_or(Vec::new(), |stream| stream.rows.iter().map(|row| row.row).collect())
    }

    /// Returns the streams that have entries in the log.
    pub fn streams(&self) -> Vec<u64> {
        let core = self.shared.lock();
        let streams = core.log.streams.iter();
        let present = streams.filter(|(_, s)| !s.rows.is_empty() || !s.refs.is_empty());
        present.map(|(id, _)| *id).collect()
    }

    /// Returns statistics.
    pub fn stats(&self) -> WalStats {
        let storage = self.shared.storage.as_ref();
        let free_bytes = storage.and_then(|s| s.free_bytes().ok()).unwrap_or(0);
        let core = self.shared.lock();
        let held = || core.log.chain.values().chain(core.log.cold.values());
        let bytes = |held: &LiveSegment| held.segment.as_ref().map_or(held.frame_bytes, |s| s.len);
        WalStats {
            segments: held().count() as u64,
            segment_bytes: self.shared.options.segment_bytes,
            held_bytes: held().map(bytes).sum(),
            ready_segments: core.ready.len() as u64,
            zeroed_segments: core.counters.zeroed_segments,
            zeroed_bytes: core.counters.zeroed_bytes,
            allocated_segments: core.counters.allocated_segments,
            free_bytes,
            queued_requests: core.queue.len() as u64,
            queued_bytes: core.queue.iter().map(|queued| queued.request.payload_bytes()).sum(),
            freed_segments: core.counters.freed_segments,
            freed_bytes: core.counters.freed_bytes,
            syncs: core.counters.syncs,
            sync_sum_us: core.counters.sync_sum_us,
            sync_counts: core.counters.sync_counts,
            sync_p50_us: core.counters.sync_percentile(50),
            sync_p99_us: core.counters.sync_percentile(99),
            groups: core.counters.groups,
            group_bytes: core.counters.group_bytes,
            direct_io: storage.is_some_and(|s| s.direct_io()),
            cold_segments: core.log.cold.len() as u64,
            live_bytes: held().map(|held| held.live_bytes).sum(),
            rewritten_bytes: core.counters.rewritten_bytes,
        }
    }

    /// Returns the histogram of sync times alone; see [`WalStats::sync_counts`].
    pub fn sync_counts(&self) -> [u64; SYNC_BOUNDS_US.len() + 1] {
        self.shared.lock().counters.sync_counts
    }

    /// Checks whether the log accepts another append.
    ///
    /// # Errors
    /// [`Error::DiskFull`] or [`Error::Exhausted`] while the log has to wait, or the error that
    /// poisoned it.
    pub fn writable(&self) -> Result<(), Error> {
        let mut core = self.shared.lock();
        core.check_open()?;
        if let Some(lack) = &core.waiting {
            return Err(lack.clone());
        }
        let Some((found_bytes, needed_bytes)) = core.disk_full else { return Ok(()) };
        let storage = self.shared.storage.as_ref();
        let free_bytes = storage.and_then(|s| s.free_bytes().ok()).unwrap_or(0);
        // If the file system refused a segment for which it stated enough space, only another
        // attempt of the keeper can tell.
        if free_bytes < needed_bytes || found_bytes >= needed_bytes {
            return Err(Error::DiskFull { free_bytes, needed_bytes });
        }
        core.disk_full = None;
        // Lets the keeper take the space now, or report again that there is none. Otherwise the
        // writer could fill the active segment before the next check, and find no other segment.
        let waiting = core.keeper.raise();
        drop(core);
        self.shared.wake(WalThread::Keeper, waiting);
        Ok(())
    }

    /// Checks whether the log accepts an append from its leader.
    ///
    /// Unlike [`Self::writable`], it fails only when no ready segment is left for appends: a
    /// follower must not refuse entries that others had space for. One more request then still fits
    /// into the active segment.
    ///
    /// # Errors
    /// As [`Self::writable`].
    pub fn check_spare(&self) -> Result<(), Error> {
        let has_spare = {
            let core = self.shared.lock();
            core.check_open()?;
            let spared = core.ready.len() > RESERVED_SEGMENTS;
            core.waiting.is_none() && (core.disk_full.is_none() || spared)
        };
        if has_spare { Ok(()) } else { self.writable() }
    }

    /// Returns how long the oldest request that is not durable has been waiting; it grows if the
    /// disk stalls.
    ///
    /// `None` if no request waits, and for an in-memory log. Never waits for the disk.
    pub fn unsynced_for(&self) -> Option<Duration> {
        self.shared.unsynced_for()
    }

    /// Returns the times of the last group. Within a `DurableCallback` it is the callback's own.
    pub fn last_group(&self) -> Arc<GroupStamp> {
        self.shared.last_group.clone()
    }

    /// Returns the time by the clock of `GroupTimes`; `None` without a clock.
    pub fn time(&self) -> Option<Duration> {
        self.shared.time()
    }

    /// Sets the clock of the steps, for drivers without threads. The first clock set stays.
    ///
    /// Without a clock, time advances only with the steps.
    pub fn set_clock(&self, clock: Box<dyn Fn() -> Duration + Send + Sync>) {
        self.shared.set_clock(clock);
    }

    /// Sets the wakers of the writer and the keeper, for drivers without threads.
    ///
    /// Each is called, from any thread, when its half has work.
    pub fn set_wakers(
        &self,
        writer: Box<dyn Fn() + Send + Sync>,
        keeper: Box<dyn Fn() + Send + Sync>,
    ) {
        self.shared.set_wakers(Wakers { writer, keeper });
    }

    /// Sets a callback for the poisoning of the log. Runs at once if the log is poisoned already.
    pub fn on_poisoned(&self, report: Box<dyn FnOnce(Error) + Send>) {
        let mut core = self.shared.lock();
        match core.poisoned.clone() {
            Some(error) => {
                drop(core);
                report(error);
            }
            None => core.on_poisoned = Some(report),
        }
    }

    /// Returns whether the log accepts requests: it is neither closed nor poisoned.
    ///
    /// The last entries and the vote of a log that is not open may never have been written.
    pub fn is_open(&self) -> bool {
        self.shared.lock().check_open().is_ok()
    }

    /// Returns whether the log is closed and has ended, so that its directory can be opened again.
    pub fn has_ended(&self) -> bool {
        let core = self.shared.lock();
        core.writer_ended && core.keeper_ended && core.guard.is_none()
    }

    /// Closes the log: finishes queued requests, writes a last sync marker, and ends the threads.
    ///
    /// Waits for the threads, except from one of their own callbacks.
    pub fn close(&self) {
        close(&self.closer.0);
        let threads = std::mem::take(&mut self.shared.lock().threads);
        for (id, thread) in threads {
            if id != current().id() {
                // Ignored: a panic has poisoned the log, and every caller got the error.
                let _ = thread.join();
            }
        }
    }
}

fn close(shared: &Shared) {
    let mut core = shared.lock();
    core.closing = true;
    let writer = core.writer.raise();
    let keeper = core.keeper.raise();
    drop(core);
    shared.wake(WalThread::Writer, writer);
    shared.wake(WalThread::Keeper, keeper);
}

#[cfg(test)]
mod tests;
