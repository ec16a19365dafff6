//! Group commit: all requests queued during the last sync become one write and one sync.
//!
//! The writer has one owner and runs one step at a time, on a thread or in a simulator.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bytes::Bytes;

use crate::error::Error;
use crate::files::active_segment::ActiveSegment;
use crate::format::frame::{Frame, FrameKind, frame_len};
use crate::memory::slot::WrittenEntry;
use crate::shared::Shared;
use crate::shared::clock::monotonic_clock;
use crate::shared::core::{Core, ReadySegment};
use crate::shared::group_times::GroupTimes;
use crate::shared::queue::{PendingCallback, QueuedRequest, WriteRequest};
use crate::shared::signal::WalThread;
use crate::shared::threads::spawn;
use crate::storage::Storage;
use crate::types::{Entry, LogId, NextStep};
use crate::write::space::{NextSegment, RolledSegment, SPACE_RETRY, SegmentPurpose};

/// Writes and syncs the log. Owned by one thread or one simulated task.
pub struct Writer {
    pub(super) shared: Arc<Shared>,
    pub(super) storage: Arc<dyn Storage>,
    pub(super) active: ActiveSegment,
    /// Every byte of the active segment's file was written before.
    pub(super) is_written: bool,
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
    pub(super) refused: Vec<PendingCallback>,
    /// The file for the next segment, if it was needed early.
    pub(super) next: Option<ReadySegment>,
    /// The next segment, whose name is not durable yet. Nothing is written before it is.
    pub(super) named: Option<RolledSegment>,
    /// The shortage that the writer waits for.
    pub(super) lack: Option<Error>,
    /// Arrival time of the oldest request of a group that waits.
    group_since: Option<Duration>,
    /// Sync time of the last group, until another group or a sync marker follows it.
    pub(super) unmarked_since: Option<Duration>,
    committed: Option<LogId>,
    /// Appends of earlier epochs are refused.
    pub(super) epoch: u64,
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
            // Recovery has just created it.
            is_written: false,
            work: VecDeque::new(),
            taken: 0,
            written: Vec::new(),
            truncations: 0,
            done: Vec::new(),
            refused: Vec::new(),
            next: None,
            named: None,
            lack: None,
            group_since: None,
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
            if self.active.is_waiting() || self.named.is_some() {
                self.resume(now, closing)
            } else if self.work.is_empty() {
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
        core.in_progress_since = self.group_since.or(self.work.front().map(|it| it.since));
    }

    /// Handles an empty queue: writes a sync marker after the last group has waited long enough.
    fn on_idle(&mut self, now: Duration, closing: bool) -> Result<NextStep, Error> {
        let mark_delay = self.mark_delay();
        if let Some(since) = self.unmarked_since {
            let waited = now.saturating_sub(since);
            if !closing && waited < mark_delay {
                return Ok(NextStep::After(mark_delay - waited));
            }
            if let Err(error) = self.write_sync_marker() {
                return self.wait_for(error, closing);
            }
            self.end_wait();
        }
        if closing {
            self.end();
            return Ok(NextStep::Done);
        }
        if std::mem::take(&mut self.shared.lock().rolls_early) {
            return self.roll_early();
        }
        Ok(NextStep::Idle)
    }

    fn mark_delay(&self) -> Duration {
        self.shared.options.mark_delay
    }

    /// Writes an empty group, which states that everything before it is durable.
    fn write_sync_marker(&mut self) -> Result<(), Error> {
        if self.active.fits_control(0) {
            let began = self.shared.time();
            self.active.write(self.committed)?;
            self.active.sync()?;
            if let Some(took) = self.since(began) {
                self.shared.lock().disk.on_block(took, self.is_written);
            }
        } else if self.find_next(SegmentPurpose::SyncMarker)? {
            // The header of the new segment states the same.
            self.roll_segment()?;
        }
        self.unmarked_since = None;
        self.shared.lock().synced_at = self.active.position();
        Ok(())
    }

    /// Continues with what found no space.
    fn resume(&mut self, now: Duration, closing: bool) -> Result<NextStep, Error> {
        let resumed = if let Some(named) = self.named.take() {
            self.finish_roll(named)
        } else if !self.active.is_empty() {
            let more = !self.work.is_empty();
            return self.write_group(now, closing, self.group_since, more);
        } else {
            // The sync marker.
            self.active.write(self.committed).and_then(|()| self.active.sync())
        };
        if let Err(error) = resumed {
            return self.wait_for(error, closing);
        }
        self.unmarked_since = None;
        self.shared.lock().synced_at = self.active.position();
        self.end_wait();
        Ok(NextStep::Now)
    }

    /// Builds a group from the waiting requests, writes it, syncs it and runs the callbacks.
    fn commit(&mut self, now: Duration, closing: bool) -> Result<NextStep, Error> {
        let oldest = self.work.front().map(|oldest| oldest.since);
        if !self.fill_group()? {
            self.complete_refused();
            if closing {
                // No space will become free: the log is closing.
                self.fail_all(&Error::Closed);
                if self.named.is_some() {
                    self.end();
                    return Ok(NextStep::Done);
                }
                return self.on_idle(now, closing);
            }
            return Ok(NextStep::After(SPACE_RETRY));
        }
        let more = !self.work.is_empty();
        if self.active.is_empty() {
            self.end_wait();
            self.note_oldest(&mut self.shared.lock());
            return Ok(self.complete(closing, more));
        }
        self.write_group(now, closing, oldest, more)
    }

    /// Writes and syncs the group, and runs its callbacks. Without disk space the group waits.
    ///
    /// `oldest` is the arrival time of its oldest request, and `more` whether others wait.
    fn write_group(
        &mut self,
        now: Duration,
        closing: bool,
        oldest: Option<Duration>,
        more: bool,
    ) -> Result<NextStep, Error> {
        let began = self.shared.time();
        let written = self.active.write(self.committed);
        let watch = monotonic_clock();
        if let Err(error) = written.and_then(|()| self.active.sync()) {
            self.group_since = oldest;
            return self.wait_for(error, closing);
        }
        let sync = watch();
        let took = self.since(began);
        if let Some((began, took)) = began.zip(took) {
            let write = took.saturating_sub(sync);
            self.shared.last_group.set(GroupTimes::new(began, write, sync));
        }
        self.end_wait();
        self.group_since = None;
        // Evicted payloads. They are freed after all callbacks have run, because that takes a
        // while.
        let mut evicted_payloads = Vec::new();
        let more = self.record_synced(sync, took, &mut evicted_payloads)? || more;
        self.unmarked_since = Some(now);
        Ok(self.complete(closing, more))
    }

    /// Runs the callbacks of the group and of refused appends.
    fn complete(&mut self, closing: bool, more: bool) -> NextStep {
        // Newest first: a caller that waits for the last callback has then waited for all.
        while let Some(done) = self.done.pop() {
            done.complete(Ok(()));
        }
        self.complete_refused();
        // Closing has raised this step already, and waits for the sync marker.
        if more || closing { NextStep::Now } else { NextStep::After(self.mark_delay()) }
    }

    /// Adds requests to the group until it is full.
    ///
    /// Returns false if the group stays empty because even a vote finds no space, or because the
    /// writer waits.
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
            let next = if refused { NextSegment::NoSpace } else { self.begin_next(need)? };
            match next {
                NextSegment::Begun => {}
                NextSegment::NoSpace if is_append => self.refuse_appends()?,
                NextSegment::NoSpace | NextSegment::Waits => return Ok(false),
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
                // Found again, and waited for, once the group so far is written.
                Err(error) if error.is_shortage() => {
                    return Ok(AddOutcome::Roll(WriteRequest::Append {
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

    /// Returns the time since `began`.
    pub(super) fn since(&self, began: Option<Duration>) -> Option<Duration> {
        self.shared.time().zip(began).map(|(now, began)| now.saturating_sub(began))
    }

    /// Records what the sync made durable. Returns whether more requests are queued.
    fn record_synced(
        &mut self,
        sync: Duration,
        took: Option<Duration>,
        evicted_payloads: &mut Vec<Bytes>,
    ) -> Result<bool, Error> {
        let position = self.active.position();
        let mut core = self.shared.lock();
        *evicted_payloads = core.log.on_written(position.segment, &self.written);
        let bytes = position.at - core.synced_at.at.min(position.at);
        core.counters.on_group(bytes, sync);
        if let Some(took) = took {
            let now = self.shared.now(&core);
            core.disk.on_group(now, bytes, took, self.is_written);
        }
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

    pub(super) fn end(&mut self) {
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
    pub(super) fn fail_all(&mut self, error: &Error) {
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
