//! The log: what callers hold. Writing is one queue and one writer; reading takes no part in it.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::aside::REPAIR;
use crate::files::Files;
use crate::frame::frame_len;
use crate::held::Held;
use crate::keeper::Keeper;
use crate::layout::{HEAD_BYTES_MAX, Name, OPAQUE_BYTES_MAX, STATE, parse_name};
use crate::log::Log;
use crate::options::Options;
use crate::places::Placed;
use crate::recovery;
use crate::segment::unless_blocked;
use crate::shared::{Core, Request, Role, Shared, Waiting, Wakers};
use crate::slot::Written;
use crate::state_io::StateFile;
use crate::storage::Storage;
use crate::sync::{MutexGuard, current};
use crate::writer::Writer;
use crate::{
    Entry, Error, How, LogId, LogState, Placement, Recovered, Stats, StoredEntry, StreamRow,
};

/// Called once, from the writer, when everything queued up to and including the call is durable,
/// or will never be.
pub type Done = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// Handle to the log; cheap to clone. When the last one goes, the log is closed.
#[derive(Clone)]
pub struct Wal {
    pub(crate) shared: Arc<Shared>,
    closer: Arc<Closer>,
}

/// Ends the threads with the last handle.
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

/// When a step wants to run again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// At once: there is more to do.
    Now,
    /// When woken, or at the latest after this time.
    After(Duration),
    /// When woken.
    Idle,
    /// Never: closed or poisoned.
    Done,
}

impl Wal {
    /// Opens the log in a folder and recovers it. The writer and the keeper must be run by the
    /// caller: `Writer::spawn`/`Keeper::spawn` on threads, or `step` by hand.
    pub fn open(
        storage: Arc<dyn Storage>,
        options: Options,
    ) -> Result<(Wal, Writer, Keeper, Recovered), Error> {
        options.check()?;
        let files = Arc::new(Files::new(Arc::clone(&storage)));
        let (shared, tip, recovered) =
            recovery::open(Arc::clone(&storage), &files, options, false)?;
        let writer = Writer::new(Arc::clone(&shared), Arc::clone(&storage), tip);
        let keeper = Keeper::new(Arc::clone(&shared), storage, files);
        Ok((Self::new(shared), writer, keeper, recovered))
    }

    /// Whether the folder holds a log, of whomever and in whatever state.
    pub fn exists(storage: &dyn Storage) -> Result<bool, Error> {
        let names = storage.list().map_err(|error| Error::Io {
            operation: "list",
            file: storage.describe(),
            reason: error.to_string(),
        })?;
        let part = |name: &str| {
            name == STATE || name == REPAIR || matches!(parse_name(name), Name::Segment(_))
        };
        Ok(names.iter().any(|name| part(name)))
    }

    /// A log that lives in memory only. Appends complete inside `append`; payloads are kept as they
    /// came until they are trimmed. Needs no writer and no keeper.
    pub fn open_memory(options: Options) -> Wal {
        let mut log = Log::new(true, 0);
        log.held.insert(1, Held::new(None));
        let core = Core { writer_ended: true, keeper_ended: true, next_id: 2, ..Core::new(log) };
        let identity = options.identity.clone();
        let state_file = StateFile::default();
        Self::new(Arc::new(Shared::new(None, None, options, identity, state_file, core)))
    }

    fn new(shared: Arc<Shared>) -> Self {
        let closer = Arc::new(Closer(Arc::clone(&shared)));
        Self { shared, closer }
    }

    /// Whether the log lives in memory only: appends complete inside `append`.
    pub fn is_memory(&self) -> bool {
        self.shared.lock().log.is_memory()
    }

    // Writing.

    /// Queues entries with consecutive indexes that follow the last one (any index if there has
    /// been none). They can be read at once; `done` runs when they are durable. An append that
    /// fails with `DiskFull` leaves nothing behind, except that of one larger than a segment a
    /// first part may stay: `state` tells.
    pub fn append(&self, entries: Vec<Entry>, done: Done) {
        let mut core = self.shared.lock();
        let checked = core
            .check_open()
            .and_then(|()| self.check_sizes(&entries))
            .and_then(|()| core.log.check_append(&entries));
        if let Err(error) = checked {
            // What it follows may just have been refused, before the caller could hear of it.
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
        self.shared
            .queue(core, Request::Append { entries, serial, epoch, done: Waiting::new(done) });
    }

    fn check_sizes(&self, entries: &[Entry]) -> Result<(), Error> {
        let max = self.shared.options.entry_bytes_max();
        for Entry { id, head, payload, .. } in entries {
            let bytes = frame_len(head.len(), payload.bytes.len()) as u64;
            if bytes > max || head.len() > HEAD_BYTES_MAX {
                let index = id.index;
                let message = format!("entry {index} takes {bytes} bytes, its head {}", head.len());
                let limits = format!("at most {max} and {HEAD_BYTES_MAX}");
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
            core.log.on_written(segment, &[Written { index, serial, offset: 0 }]);
        }
    }

    /// Queues a vote (opaque, at most 256 bytes).
    pub fn save_vote(&self, vote: Bytes, done: Done) {
        let mut core = self.shared.lock();
        let checked = core.check_open().and_then(|()| {
            if vote.len() <= OPAQUE_BYTES_MAX {
                return Ok(());
            }
            Err(Error::Unusable(format!("a vote has at most {OPAQUE_BYTES_MAX} bytes")))
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
        self.shared.queue(core, Request::Vote { vote, done: Waiting::new(done) });
    }

    /// Queues the removal of all entries after `last` (`None`: all above the purge point). Readers
    /// see it at once. Never below a placed entry.
    pub fn truncate_after(&self, last: Option<u64>, done: Done) {
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
        self.shared.queue(core, Request::Truncate { from, last, done: Waiting::new(done) });
        drop(gone);
    }

    /// Queues that entries up to `upto` are no longer part of the Raft log. They stay readable by
    /// stream until trimmed. `upto` must be checkpointed. If `upto` is above the last entry, the
    /// log becomes empty and continues after it.
    pub fn purge(&self, upto: LogId, done: Done) {
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
        self.shared.queue(core, Request::Purge { upto, empties, done: Waiting::new(done) });
        self.shared.wake(Role::Keeper, waiting);
    }

    /// Notes the commit point; it travels with the next group. Not durable by itself.
    pub fn set_committed(&self, committed: LogId) {
        let mut core = self.shared.lock();
        if core.log.committed.is_none_or(|old| old.index < committed.index) {
            core.log.committed = Some(committed);
        }
    }

    // What the state machine says.

    /// Tells where the state machine put the entry: in order, without gaps, each entry once after
    /// an open (again for entries above the checkpoint: must equal what a footer says, which may
    /// take a read from disk). `None`: the entry counts no positions.
    pub fn place(&self, index: u64, placement: Option<Placement>) -> Result<(), Error> {
        let mut core = self.shared.lock();
        core.check_open()?;
        let segment = match core.log.place(index, placement)? {
            Placed::Done { may_seal } => {
                self.after_place(core, may_seal);
                return Ok(());
            }
            Placed::Sealed(segment) => segment,
        };
        drop(core);
        let placement = placement.filter(|placement| placement.count > 0);
        let agrees = unless_blocked(self.shared.sealed_agrees(&segment, index, placement))?;
        if agrees != Some(true) {
            let what = format!("the footer has another place for entry {index}");
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
        self.shared.wake(Role::Keeper, waiting);
    }

    /// Positions of the stream below `position` are no longer needed.
    pub fn trim(&self, stream: u64, position: u64) {
        let freed = self.shared.lock().log.trim(stream, position);
        if freed {
            self.shared.raise(Role::Keeper);
        }
    }

    /// No position of the stream is needed any more; its number is never used again.
    pub fn drop_stream(&self, stream: u64) {
        let freed = self.shared.lock().log.drop_stream(stream);
        if freed {
            self.shared.raise(Role::Keeper);
        }
    }

    // Reading.

    /// The log as Raft sees it.
    pub fn state(&self) -> LogState {
        self.shared.lock().log.state()
    }

    /// First index that the Raft log has, or would have. A log need not begin at 0.
    pub fn first_index(&self) -> u64 {
        self.shared.lock().log.first_present()
    }

    /// Past the page cache only where that takes nothing from it.
    fn possible(&self, how: How) -> How {
        let has_direct_io = || self.shared.storage.as_ref().is_some_and(|it| it.direct_io());
        if how == How::Passing && !has_direct_io() { How::Blocking } else { how }
    }

    /// Entries of an index range with payloads: at least one if any, then up to `bytes_max`; it
    /// may be fewer. `Trimmed` if the range starts at or below the purge point.
    pub fn read(
        &self,
        range: Range<u64>,
        bytes_max: usize,
        how: How,
    ) -> Result<Option<Vec<Entry>>, Error> {
        unless_blocked(self.shared.read_entries(range, bytes_max, self.possible(how)))
    }

    /// The same with empty payloads (crc and seed kept), up to `entries_max`; it may be fewer.
    pub fn heads(
        &self,
        range: Range<u64>,
        entries_max: usize,
        how: How,
    ) -> Result<Option<Vec<Entry>>, Error> {
        unless_blocked(self.shared.read_heads(range, entries_max, self.possible(how)))
    }

    /// Id of an entry of the Raft log, of the purge point, or `None` outside.
    pub fn log_id(&self, index: u64, how: How) -> Result<Option<Option<LogId>>, Error> {
        unless_blocked(self.shared.read_log_id(index, self.possible(how)))
    }

    /// Entries of a stream from the one that holds `position` on, while their first position is
    /// below `below`: at least one if any, then up to `bytes_max`; it may be fewer. `Trimmed` if
    /// `position` is below what is kept; nothing if it is not there yet.
    pub fn read_stream(
        &self,
        stream: u64,
        position: u64,
        below: u64,
        bytes_max: usize,
        how: How,
    ) -> Result<Option<Vec<StoredEntry>>, Error> {
        unless_blocked(self.shared.read_positions(
            stream,
            position..below,
            bytes_max,
            self.possible(how),
        ))
    }

    /// First position of the first entry of the stream whose time is at or after `time`;
    /// `Some(None)` if there is none.
    pub fn search_time(
        &self,
        stream: u64,
        time: u64,
        how: How,
    ) -> Result<Option<Option<u64>>, Error> {
        unless_blocked(self.shared.find_time(stream, time, self.possible(how)))
    }

    /// The stream's share of each segment, oldest first, trimmed ones left out. Entries that are
    /// not written yet are in none.
    pub fn stream_rows(&self, stream: u64) -> Vec<StreamRow> {
        let core = self.shared.lock();
        let stream = core.log.streams.get(&stream);
        stream.map_or(Vec::new(), |stream| stream.rows.iter().map(|row| row.row).collect())
    }

    /// Streams that have entries in the log.
    pub fn streams(&self) -> Vec<u64> {
        let core = self.shared.lock();
        let streams = core.log.streams.iter();
        let present = streams.filter(|(_, s)| !s.rows.is_empty() || !s.refs.is_empty());
        present.map(|(id, _)| *id).collect()
    }

    /// Figures for people and metrics.
    pub fn stats(&self) -> Stats {
        let storage = self.shared.storage.as_ref();
        let free_bytes = storage.and_then(|s| s.free_bytes().ok()).unwrap_or(0);
        let core = self.shared.lock();
        let held = || core.log.held.values().chain(core.log.cold.values());
        let bytes = |held: &Held| held.segment.as_ref().map_or(held.frame_bytes, |s| s.len);
        Stats {
            segments: held().count() as u64,
            segment_bytes: self.shared.options.segment_bytes,
            held_bytes: held().map(bytes).sum(),
            ready_segments: core.ready.len() as u64,
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

    /// Whether the log can take another append now: `DiskFull` while no segment can be had, or the
    /// error that poisoned it.
    pub fn writable(&self) -> Result<(), Error> {
        let mut core = self.shared.lock();
        core.check_open()?;
        let Some((_, needed_bytes)) = core.disk_full else { return Ok(()) };
        let storage = self.shared.storage.as_ref();
        let free_bytes = storage.and_then(|s| s.free_bytes().ok()).unwrap_or(0);
        if free_bytes < needed_bytes {
            return Err(Error::DiskFull { free_bytes, needed_bytes });
        }
        core.disk_full = None;
        // The keeper takes that room now, or says again that there is none. Until it looks by
        // itself a writer could fill the segment in use, and find nothing behind it.
        let waiting = core.keeper.raise();
        drop(core);
        self.shared.wake(Role::Keeper, waiting);
        Ok(())
    }

    /// As [`Self::writable`] for who must not be the first to give up, a replica that is sent what
    /// others took while they had room: `DiskFull` only once no segment is left that was made
    /// ready before. What comes in one piece after that still fits into the segment in use.
    pub fn spare(&self) -> Result<(), Error> {
        let has_spare = {
            let core = self.shared.lock();
            core.check_open()?;
            core.disk_full.is_none() || !core.ready.is_empty()
        };
        if has_spare { Ok(()) } else { self.writable() }
    }

    /// For how long the oldest of what was queued and is not durable yet has been waiting; `None`
    /// if nothing waits, and in a memory log. While the disk stalls it grows. Takes no part in
    /// appending, and never waits for the disk.
    pub fn unsynced_for(&self) -> Option<Duration> {
        self.shared.unsynced_for()
    }

    /// Where the times that steps are given come from, for drivers other than the threads: what
    /// waits is timed by it. Without it time stands still between two steps. The first one stays.
    pub fn set_clock(&self, clock: Box<dyn Fn() -> Duration + Send + Sync>) {
        self.shared.set_clock(clock);
    }

    /// Called (from any thread) whenever the writer or the keeper, each its own, has something to
    /// do. For drivers other than the threads.
    pub fn set_wakers(
        &self,
        writer: Box<dyn Fn() + Send + Sync>,
        keeper: Box<dyn Fn() + Send + Sync>,
    ) {
        self.shared.set_wakers(Wakers { writer, keeper });
    }

    /// Called once when the log is poisoned; at once if it is already.
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

    /// Whether it takes work: nobody closed it, and no error ended it. What one that does not says
    /// of its last entries and its vote may never have been written.
    pub fn is_open(&self) -> bool {
        self.shared.lock().check_open().is_ok()
    }

    /// Whether the log is closed and nothing of it runs any more: another one may be opened in its
    /// folder.
    pub fn has_ended(&self) -> bool {
        let core = self.shared.lock();
        core.writer_ended && core.keeper_ended && core.guard.is_none()
    }

    /// Takes no more work, finishes what is queued, writes a last mark, and ends the threads.
    /// Waits for them where there are any (but not from a callback of theirs).
    pub fn close(&self) {
        close(&self.closer.0);
        let threads = std::mem::take(&mut self.shared.lock().threads);
        for (id, thread) in threads {
            if id != current().id() {
                // Ignored: a panic has poisoned the log, and everyone was told.
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
    shared.wake(Role::Writer, writer);
    shared.wake(Role::Keeper, keeper);
}

#[cfg(test)]
#[path = "wal_tests.rs"]
mod tests;
