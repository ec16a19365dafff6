//! Group commit: all requests queued during the last sync become one write and one sync.
//!
//! The writer has one owner and runs one step at a time, on a thread or in a simulator.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bytes::Bytes;

use crate::error::{Error, poison};
use crate::files::active_segment::ActiveSegment;
use crate::format::frame::{Frame, FrameKind, SegmentHeader, frame_len};
use crate::format::layout::{ready_name, segment_name};
use crate::memory::slot::WrittenEntry;
use crate::shared::Shared;
use crate::shared::clock::monotonic_clock;
use crate::shared::core::{Core, ReadySegment};
use crate::shared::queue::{PendingCallback, QueuedRequest, WriteRequest};
use crate::shared::signal::WalThread;
use crate::shared::threads::spawn;
use crate::storage::Storage;
use crate::types::{Entry, LogId, NextStep};

/// Interval at which a vote or a truncation checks again for disk space.
const SPACE_RETRY: Duration = Duration::from_millis(100);

/// Writes and syncs the log. Owned by one thread or one simulated task.
pub struct Writer {
    shared: Arc<Shared>,
    storage: Arc<dyn Storage>,
    active: ActiveSegment,
    /// Requests taken from the queue that are not completely in a group yet.
    work: VecDeque<QueuedRequest>,
    /// Number of entries of the first request that are already in groups.
    taken: usize,
    /// Entries of the current group.
    written: Vec<WrittenEntry>,
    /// Number of truncations in the current group.
    truncations: usize,
    /// Callbacks of the current group, oldest first.
    done: Vec<PendingCallback>,
    /// Callbacks of appends that found no disk space, oldest first.
    refused: Vec<PendingCallback>,
    /// The file for the next segment, if it was needed early.
    next: Option<ReadySegment>,
    /// Sync time of the last group, until another group or a sync marker follows it.
    unmarked_since: Option<Duration>,
    committed: Option<LogId>,
    /// Appends of earlier epochs are refused.
    epoch: u64,
    ended: bool,
}

/// Result of adding a request to the group.
enum AddOutcome {
    Whole,
    /// The group has reached its maximum size.
    Full(WriteRequest),
    /// The segment has no space left for it.
    Roll(WriteRequest),
    /// The disk has no space left for it.
    Refused(WriteRequest),
}

/// Purpose of a new segment, which decides how much of the disk reserve it may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SegmentPurpose {
    Append,
    Control,
    SyncMarker,
}

impl fmt::Debug for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writer").field("at", &self.active.position()).finish_non_exhaustive()
    }
}

impl Writer {
    pub(crate) fn new(
        shared: Arc<Shared>,
        storage: Arc<dyn Storage>,
        active: ActiveSegment,
    ) -> Self {
        Self {
            shared,
            storage,
            active,
            work: VecDeque::new(),
            taken: 0,
            written: Vec::new(),
            truncations: 0,
            done: Vec::new(),
            refused: Vec::new(),
            next: None,
            unmarked_since: None,
            committed: None,
            epoch: 0,
            ended: false,
        }
    }

    /// Runs the writer on a thread of its own until the log is closed or poisoned.
    ///
    /// # Errors
    /// Fails if the thread cannot be spawned.
    pub fn spawn(mut self) -> Result<(), Error> {
        let shared = Arc::clone(&self.shared);
        spawn(&shared, WalThread::Writer, move |now| self.step(now))
    }

    /// Writes and syncs at most one group. `now` is the time since any fixed moment.
    pub fn step(&mut self, now: Duration) -> NextStep {
        if self.ended {
            return NextStep::Done;
        }
        let next = self.take_work(now).and_then(|closing| {
            if self.work.is_empty() {
                self.on_idle(now, closing)
            } else {
                self.commit(now, closing)
            }
        });
        next.unwrap_or_else(|error| self.fail(&error))
    }

    /// Moves queued requests into `work`. Returns whether the log is being closed.
    fn take_work(&mut self, now: Duration) -> Result<bool, Error> {
        let mut core = self.shared.lock();
        core.now = core.now.max(now);
        if let Some(error) = &core.poisoned {
            return Err(error.clone());
        }
        self.work.append(&mut core.queue);
        self.note_oldest(&mut core);
        self.committed = core.log.committed;
        Ok(core.closing)
    }

    /// Records since when the oldest request has been waiting to be durable.
    fn note_oldest(&self, core: &mut Core) {
        core.in_progress_since = self.work.front().map(|oldest| oldest.since);
    }

    /// Handles an empty queue: writes a sync marker after the last group has waited long enough.
    fn on_idle(&mut self, now: Duration, closing: bool) -> Result<NextStep, Error> {
        let mark_delay = self.mark_delay();
        if let Some(since) = self.unmarked_since {
            let waited = now.saturating_sub(since);
            if !closing && waited < mark_delay {
                return Ok(NextStep::After(mark_delay - waited));
            }
            self.write_sync_marker()?;
        }
        if closing {
            self.end();
            return Ok(NextStep::Done);
        }
        Ok(NextStep::Idle)
    }

    fn mark_delay(&self) -> Duration {
        self.shared.options.mark_delay
    }

    /// Writes an empty group, which states that everything before it is durable.
    fn write_sync_marker(&mut self) -> Result<(), Error> {
        if self.active.fits_control(0) {
            self.active.write(self.committed)?;
            self.active.sync()?;
        } else if self.find_next(SegmentPurpose::SyncMarker)? {
            // The header of the new segment states the same.
            self.roll_segment()?;
        }
        self.unmarked_since = None;
        self.shared.lock().synced_at = self.active.position();
        Ok(())
    }

    /// Builds a group from the waiting requests, writes it, syncs it and runs the callbacks.
    fn commit(&mut self, now: Duration, closing: bool) -> Result<NextStep, Error> {
        if !self.fill_group()? {
            self.complete_refused();
            if closing {
                // No space will become free: the log is closing.
                self.fail_all(&Error::Closed);
                return self.on_idle(now, closing);
            }
            return Ok(NextStep::After(SPACE_RETRY));
        }
        let mut more = !self.work.is_empty();
        // Evicted payloads. They are freed after all callbacks have run, because that takes a
        // while.
        let mut evicted_payloads = Vec::new();
        if !self.active.is_empty() {
            self.active.write(self.committed)?;
            let watch = monotonic_clock();
            self.active.sync()?;
            more |= self.record_synced(watch(), &mut evicted_payloads)?;
            self.unmarked_since = Some(now);
        } else {
            self.note_oldest(&mut self.shared.lock());
        }
        // Newest first: a caller that waits for the last callback has then waited for all.
        while let Some(done) = self.done.pop() {
            done.complete(Ok(()));
        }
        self.complete_refused();
        // Closing has raised this step already, and waits for the sync marker.
        let next = if more || closing { NextStep::Now } else { NextStep::After(self.mark_delay()) };
        Ok(next)
    }

    /// Adds requests to the group until it is full.
    ///
    /// Returns false if the group stays empty because even a vote finds no space.
    fn fill_group(&mut self) -> Result<bool, Error> {
        while let Some(QueuedRequest { request, since }) = self.work.pop_front() {
            let (request, refused) = match self.add(request)? {
                AddOutcome::Whole => continue,
                AddOutcome::Full(request) => {
                    self.work.push_front(QueuedRequest { request, since });
                    break;
                }
                AddOutcome::Roll(request) => (request, false),
                AddOutcome::Refused(request) => (request, true),
            };
            let is_append = matches!(request, WriteRequest::Append { .. });
            let need = if is_append { SegmentPurpose::Append } else { SegmentPurpose::Control };
            self.work.push_front(QueuedRequest { request, since });
            if !self.active.is_empty() {
                // Writes the present group first: a segment ends with a whole group.
                break;
            }
            if !refused && self.find_next(need)? {
                self.roll_segment()?;
            } else if is_append {
                self.refuse_appends()?;
            } else {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn add(&mut self, request: WriteRequest) -> Result<AddOutcome, Error> {
        match request {
            WriteRequest::Append { entries, serial, epoch, done } => {
                self.add_entries(entries, serial, epoch, done)
            }
            WriteRequest::Vote { vote, done } => {
                let frame = Frame::control(FrameKind::Vote, LogId::default(), &vote);
                if !self.active.fits_control(frame.len() as u64) {
                    return Ok(AddOutcome::Roll(WriteRequest::Vote { vote, done }));
                }
                self.active.push(&frame);
                self.active.context.vote = Some(vote);
                self.done.push(done);
                Ok(AddOutcome::Whole)
            }
            WriteRequest::Truncate { from, last, done } => {
                let head = [u8::from(last.is_some())];
                let id = LogId { term: last.map_or(0, |last| last.term), index: from };
                let frame = Frame::control(FrameKind::Truncate, id, &head);
                if !self.active.fits_control(frame.len() as u64) {
                    return Ok(AddOutcome::Roll(WriteRequest::Truncate { from, last, done }));
                }
                self.active.push(&frame);
                self.truncations += 1;
                // Unchanged if it lies beyond the written entries: an append before it may have
                // been refused.
                if self.active.context.last.is_some_and(|written| written.index >= from) {
                    self.active.context.last = last;
                }
                self.done.push(done);
                Ok(AddOutcome::Whole)
            }
            WriteRequest::Purge { upto, empties, done } => {
                // Replay may no longer have the entry that the purge point replaced.
                let head: &[u8] = if empties { &[1] } else { &[] };
                let frame = Frame::control(FrameKind::Purge, upto, head);
                if !self.active.fits_control(frame.len() as u64) {
                    return Ok(AddOutcome::Roll(WriteRequest::Purge { upto, empties, done }));
                }
                self.active.push(&frame);
                let context = &mut self.active.context;
                context.purged = newer(context.purged, upto);
                // The entries may also have been refused for lack of space.
                if empties || context.last.is_none_or(|last| last.index < upto.index) {
                    context.last = Some(upto);
                }
                self.done.push(done);
                Ok(AddOutcome::Whole)
            }
        }
    }

    fn add_entries(
        &mut self,
        entries: Vec<Entry>,
        serial: u64,
        epoch: u64,
        done: PendingCallback,
    ) -> Result<AddOutcome, Error> {
        if epoch != self.epoch {
            self.taken = 0;
            self.refused.push(done);
            return Ok(AddOutcome::Whole);
        }
        // Space for all of it is found before any of it is written.
        if self.taken == 0 && !self.fits_all(&entries) {
            match self.find_next(SegmentPurpose::Append) {
                Ok(true) => {}
                Ok(false) => {
                    return Ok(AddOutcome::Refused(WriteRequest::Append {
                        entries,
                        serial,
                        epoch,
                        done,
                    }));
                }
                Err(error) => {
                    self.done.push(done);
                    return Err(error);
                }
            }
        }
        for entry in entries.iter().skip(self.taken) {
            let frame = Frame::entry(entry.id, entry.stream, &entry.head, &entry.payload);
            let full = self.active.group_len() + frame.len() > self.shared.options.group_bytes;
            if full && !self.active.is_empty() {
                return Ok(AddOutcome::Full(WriteRequest::Append { entries, serial, epoch, done }));
            }
            if !self.active.fits_entries(1, frame.len() as u64) {
                return Ok(AddOutcome::Roll(WriteRequest::Append { entries, serial, epoch, done }));
            }
            let place = self.active.push(&frame);
            self.written.push(WrittenEntry {
                index: entry.id.index,
                serial: serial + self.taken as u64,
                offset: place.at as u32,
            });
            self.taken += 1;
        }
        self.taken = 0;
        self.done.push(done);
        Ok(AddOutcome::Whole)
    }

    /// Returns whether all entries fit into the segment, in one or several groups.
    fn fits_all(&self, entries: &[Entry]) -> bool {
        let len = |entry: &Entry| frame_len(entry.head.len(), entry.payload.bytes.len());
        self.active.fits_groups(entries.iter().map(len), self.shared.options.group_bytes)
    }

    /// Records what the sync made durable. Returns whether more requests are queued.
    fn record_synced(
        &mut self,
        sync: Duration,
        evicted_payloads: &mut Vec<Bytes>,
    ) -> Result<bool, Error> {
        let position = self.active.position();
        let mut core = self.shared.lock();
        *evicted_payloads = core.log.on_written(position.segment, &self.written);
        let bytes = position.at - core.synced_at.at.min(position.at);
        core.counters.on_group(bytes, sync);
        core.synced_at = position;
        self.note_oldest(&mut core);
        core.truncations -= self.truncations;
        // Sealing may have waited for the truncations.
        let truncated = std::mem::take(&mut self.truncations) > 0;
        let waiting = truncated && core.keeper.raise();
        let more = !core.queue.is_empty();
        let poisoned = core.poisoned.clone();
        drop(core);
        if truncated {
            self.shared.wake(WalThread::Keeper, waiting);
        }
        self.written.clear();
        poisoned.map_or(Ok(more), Err)
    }

    /// Begins the next segment in the file that was found for it.
    fn roll_segment(&mut self) -> Result<(), Error> {
        let Some(ready) = self.next.take() else { return Ok(()) };
        let id = self.shared.lock().take_segment_number()?;
        let end = self.active.position();
        let context = self.active.context.clone();
        let header = SegmentHeader {
            id,
            predecessor: end,
            synced: end,
            file_len: ready.len,
            identity: self.shared.identity.clone(),
            context: context.clone(),
            cold: false,
        };
        // The header must be durable before the name, and the name before anything else.
        self.active.roll(ready.file, &ready.name, &header)?;
        let name = segment_name(id);
        self.storage.rename(&ready.name, &name).map_err(|e| poison("rename", &name, &e))?;
        let directory = self.storage.describe();
        self.storage.sync_dir().map_err(|e| poison("sync", &directory, &e))?;
        let mut core = self.shared.lock();
        core.log.on_rolled(end.at, context, Some(Arc::clone(&self.active.segment)));
        core.synced_at = self.active.position();
        let waiting = core.keeper.raise();
        drop(core);
        self.shared.wake(WalThread::Keeper, waiting);
        self.unmarked_since = None;
        Ok(())
    }

    /// Finds a file for the next segment. Returns false if the disk has no space for one.
    fn find_next(&mut self, need: SegmentPurpose) -> Result<bool, Error> {
        if self.next.is_some() {
            return Ok(true);
        }
        let mut core = self.shared.lock();
        self.next = core.ready.pop_front();
        let waiting = core.keeper.raise();
        let number = core.ready_number;
        core.ready_number += 1;
        drop(core);
        self.shared.wake(WalThread::Keeper, waiting);
        if self.next.is_some() || need == SegmentPurpose::SyncMarker {
            return Ok(self.next.is_some());
        }
        let options = &self.shared.options;
        let len = options.segment_bytes;
        // Appends may use half of the reserve, votes all of it. Callers that check `writable` first
        // use none.
        let reserve = if need == SegmentPurpose::Append { options.reserve_bytes / 2 } else { 0 };
        let free = self.storage.free_bytes().unwrap_or(u64::MAX);
        let name = ready_name(number);
        let made = if free < len + reserve {
            Err(io::ErrorKind::StorageFull.into())
        } else {
            self.storage.create(&name, len)
        };
        match made {
            Ok(file) => {
                self.next = Some(ReadySegment { name, file, len });
                Ok(true)
            }
            Err(e) if e.kind() == io::ErrorKind::StorageFull => {
                self.shared.lock().disk_full = Some((free, len + options.reserve_bytes));
                Ok(false)
            }
            Err(e) => Err(poison("create", &name, &e)),
        }
    }

    /// Refuses the first append and all later ones, because each follows the one before.
    fn refuse_appends(&mut self) -> Result<(), Error> {
        let mut core = self.shared.lock();
        core.epoch += 1;
        self.epoch = core.epoch;
        let (consistent, evicted_payloads) = core.log.drop_unwritten();
        drop(core);
        drop(evicted_payloads);
        if consistent {
            return Ok(());
        }
        // The state machine already has an entry that cannot be written here. The log ends with its
        // durable entries, and can be opened again once there is space.
        let (free_bytes, needed_bytes) = self.shared.lock().disk_full.unwrap_or_default();
        Err(Error::DiskFull { free_bytes, needed_bytes })
    }

    fn complete_refused(&mut self) {
        if self.refused.is_empty() {
            return;
        }
        let (free_bytes, needed_bytes) = self.shared.lock().disk_full.unwrap_or_default();
        while let Some(done) = self.refused.pop() {
            done.complete(Err(Error::DiskFull { free_bytes, needed_bytes }));
        }
    }

    fn end(&mut self) {
        self.ended = true;
        self.shared.end(WalThread::Writer);
    }

    fn fail(&mut self, error: &Error) -> NextStep {
        self.shared.poison(error);
        self.fail_all(error);
        self.end();
        NextStep::Done
    }

    /// Fails all callbacks.
    fn fail_all(&mut self, error: &Error) {
        while let Some(done) = self.done.pop() {
            done.complete(Err(error.clone()));
        }
        while let Some(done) = self.refused.pop() {
            done.complete(Err(error.clone()));
        }
        while let Some(QueuedRequest { request, .. }) = self.work.pop_back() {
            request.into_done().complete(Err(error.clone()));
        }
    }
}

/// Returns the later purge point: it never moves back.
fn newer(purged: Option<LogId>, upto: LogId) -> Option<LogId> {
    purged.filter(|purged| purged.index > upto.index).or(Some(upto))
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let error = if thread::panicking() {
            let reason = "the writer panicked".to_owned();
            let error =
                Error::Poisoned { operation: "write", file: self.storage.describe(), reason };
            self.shared.poison(&error);
            error
        } else {
            Error::Closed
        };
        let queue = {
            let mut core = self.shared.lock();
            core.closing = true;
            std::mem::take(&mut core.queue)
        };
        self.work.extend(queue);
        self.fail_all(&error);
        self.end();
    }
}
