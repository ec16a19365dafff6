//! Group commit: everything that queued up while the last sync ran becomes one write and one sync.
//! One owner, one step at a time; a thread or a simulator drives it.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bytes::Bytes;

use crate::error::poison;
use crate::frame::{Frame, Kind, SegmentHeader, frame_len};
use crate::layout::{ready_name, segment_name};
use crate::shared::{Core, Queued, Ready, Request, Role, Shared, Waiting};
use crate::slot::Written;
use crate::storage::Storage;
use crate::threads;
use crate::tip::{Tip, stopwatch};
use crate::wal::Next;
use crate::{Entry, Error, LogId};

/// How long a vote or a truncation waits before it looks for space again.
const SPACE_RETRY: Duration = Duration::from_millis(100);

/// Writes and syncs. Owned by one thread (or one simulated task).
pub struct Writer {
    shared: Arc<Shared>,
    storage: Arc<dyn Storage>,
    tip: Tip,
    /// Taken from the queue, not yet wholly in a group.
    work: VecDeque<Queued>,
    /// Entries of the first request that are in groups already.
    taken: usize,
    /// Entries of the group that is being put together.
    written: Vec<Written>,
    /// Truncations in it.
    truncations: usize,
    /// What it will complete, oldest first.
    done: Vec<Waiting>,
    /// Appends that found no space, oldest first.
    refused: Vec<Waiting>,
    /// The file for the next segment, if it was needed early.
    next: Option<Ready>,
    /// When the last group that nothing has followed yet was synced.
    unmarked: Option<Duration>,
    committed: Option<LogId>,
    /// Appends of earlier epochs are refused.
    epoch: u64,
    ended: bool,
}

/// Whether a request went into the group.
enum Added {
    Whole,
    /// The group has reached its size.
    Full(Request),
    /// The segment has no room for it.
    Roll(Request),
    /// The disk has no room for it.
    Refused(Request),
}

/// What a new segment is needed for: how much of the disk may be used for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    Append,
    Note,
    Mark,
}

impl fmt::Debug for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writer").field("at", &self.tip.position()).finish_non_exhaustive()
    }
}

impl Writer {
    pub(crate) fn new(shared: Arc<Shared>, storage: Arc<dyn Storage>, tip: Tip) -> Self {
        Self {
            shared,
            storage,
            tip,
            work: VecDeque::new(),
            taken: 0,
            written: Vec::new(),
            truncations: 0,
            done: Vec::new(),
            refused: Vec::new(),
            next: None,
            unmarked: None,
            committed: None,
            epoch: 0,
            ended: false,
        }
    }

    /// Runs the writer on a thread of its own until the log is closed or poisoned.
    pub fn spawn(mut self) -> Result<(), Error> {
        let shared = Arc::clone(&self.shared);
        threads::spawn(&shared, Role::Writer, move |now| self.step(now))
    }

    /// Writes and syncs at most one group. `now` is the time since any fixed moment.
    pub fn step(&mut self, now: Duration) -> Next {
        if self.ended {
            return Next::Done;
        }
        let next = self.take_work(now).and_then(|closing| {
            if self.work.is_empty() { self.rest(now, closing) } else { self.commit(now, closing) }
        });
        next.unwrap_or_else(|error| self.fail(&error))
    }

    /// Moves what is queued into `work`; whether the log is being closed.
    fn take_work(&mut self, now: Duration) -> Result<bool, Error> {
        let mut core = self.shared.lock();
        core.now = core.now.max(now);
        if let Some(error) = &core.poisoned {
            return Err(error.clone());
        }
        self.work.append(&mut core.queue);
        self.note_in_hand(&mut core);
        self.committed = core.log.committed;
        Ok(core.closing)
    }

    /// Notes since when the oldest of what is not durable has been waiting.
    fn note_in_hand(&self, core: &mut Core) {
        core.in_hand = self.work.front().map(|oldest| oldest.since);
    }

    /// Nothing is queued: marks the last group once it has waited long enough.
    fn rest(&mut self, now: Duration, closing: bool) -> Result<Next, Error> {
        let mark_delay = self.mark_delay();
        if let Some(since) = self.unmarked {
            let waited = now.saturating_sub(since);
            if !closing && waited < mark_delay {
                return Ok(Next::After(mark_delay - waited));
            }
            self.mark()?;
        }
        if closing {
            self.end();
            return Ok(Next::Done);
        }
        Ok(Next::Idle)
    }

    fn mark_delay(&self) -> Duration {
        self.shared.options.mark_delay
    }

    /// Writes an empty group, which says that everything before it is durable.
    fn mark(&mut self) -> Result<(), Error> {
        if self.tip.fits_note(0) {
            self.tip.write(self.committed)?;
            self.tip.sync()?;
        } else if self.find_next(Need::Mark)? {
            // The header of the new segment says the same.
            self.roll()?;
        }
        self.unmarked = None;
        self.shared.lock().synced_at = self.tip.position();
        Ok(())
    }

    /// Puts a group together from what waits, writes it, syncs it and tells everyone.
    fn commit(&mut self, now: Duration, closing: bool) -> Result<Next, Error> {
        if !self.fill()? {
            self.run_refused();
            if closing {
                // Nothing makes room any more.
                self.fail_all(&Error::Closed);
                return self.rest(now, closing);
            }
            return Ok(Next::After(SPACE_RETRY));
        }
        let mut more = !self.work.is_empty();
        // Payloads that leave the memory. Given back when all have been told: that takes a while.
        let mut gone = Vec::new();
        if !self.tip.is_empty() {
            self.tip.write(self.committed)?;
            let watch = stopwatch();
            self.tip.sync()?;
            more |= self.publish(watch(), &mut gone)?;
            self.unmarked = Some(now);
        } else {
            self.note_in_hand(&mut self.shared.lock());
        }
        // Newest first: who waits for the last of them has then waited for all.
        while let Some(done) = self.done.pop() {
            done.tell(Ok(()));
        }
        self.run_refused();
        // Whoever closes the log has woken this step already, and waits for the mark.
        let next = if more || closing { Next::Now } else { Next::After(self.mark_delay()) };
        Ok(next)
    }

    /// Moves requests into the group until it is full. False if it stays empty because not even a
    /// vote finds space.
    fn fill(&mut self) -> Result<bool, Error> {
        while let Some(Queued { request, since }) = self.work.pop_front() {
            let (request, refused) = match self.add(request)? {
                Added::Whole => continue,
                Added::Full(request) => {
                    self.work.push_front(Queued { request, since });
                    break;
                }
                Added::Roll(request) => (request, false),
                Added::Refused(request) => (request, true),
            };
            let is_append = matches!(request, Request::Append { .. });
            let need = if is_append { Need::Append } else { Need::Note };
            self.work.push_front(Queued { request, since });
            if !self.tip.is_empty() {
                // First what is there: a segment ends with a whole group.
                break;
            }
            if !refused && self.find_next(need)? {
                self.roll()?;
            } else if is_append {
                self.refuse()?;
            } else {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn add(&mut self, request: Request) -> Result<Added, Error> {
        match request {
            Request::Append { entries, serial, epoch, done } => {
                self.add_entries(entries, serial, epoch, done)
            }
            Request::Vote { vote, done } => {
                let frame = Frame::note(Kind::Vote, LogId::default(), &vote);
                if !self.tip.fits_note(frame.len() as u64) {
                    return Ok(Added::Roll(Request::Vote { vote, done }));
                }
                self.tip.push(&frame);
                self.tip.context.vote = Some(vote);
                self.done.push(done);
                Ok(Added::Whole)
            }
            Request::Truncate { from, last, done } => {
                let head = [u8::from(last.is_some())];
                let id = LogId { term: last.map_or(0, |last| last.term), index: from };
                let frame = Frame::note(Kind::Truncate, id, &head);
                if !self.tip.fits_note(frame.len() as u64) {
                    return Ok(Added::Roll(Request::Truncate { from, last, done }));
                }
                self.tip.push(&frame);
                self.truncations += 1;
                // Not if it lies beyond what was written: an append before it may have been
                // refused.
                if self.tip.context.last.is_some_and(|written| written.index >= from) {
                    self.tip.context.last = last;
                }
                self.done.push(done);
                Ok(Added::Whole)
            }
            Request::Purge { upto, empties, done } => {
                // Whoever reads it back may have nothing left of what it took the place of.
                let head: &[u8] = if empties { &[1] } else { &[] };
                let frame = Frame::note(Kind::Purge, upto, head);
                if !self.tip.fits_note(frame.len() as u64) {
                    return Ok(Added::Roll(Request::Purge { upto, empties, done }));
                }
                self.tip.push(&frame);
                let context = &mut self.tip.context;
                context.purged = newer(context.purged, upto);
                // The entries may also have been refused for want of room.
                if empties || context.last.is_none_or(|last| last.index < upto.index) {
                    context.last = Some(upto);
                }
                self.done.push(done);
                Ok(Added::Whole)
            }
        }
    }

    fn add_entries(
        &mut self,
        entries: Vec<Entry>,
        serial: u64,
        epoch: u64,
        done: Waiting,
    ) -> Result<Added, Error> {
        if epoch != self.epoch {
            self.taken = 0;
            self.refused.push(done);
            return Ok(Added::Whole);
        }
        // Room for all of it is found before any of it is written.
        if self.taken == 0 && !self.fits_all(&entries) {
            match self.find_next(Need::Append) {
                Ok(true) => {}
                Ok(false) => {
                    return Ok(Added::Refused(Request::Append { entries, serial, epoch, done }));
                }
                Err(error) => {
                    self.done.push(done);
                    return Err(error);
                }
            }
        }
        for entry in entries.iter().skip(self.taken) {
            let frame = Frame::entry(entry.id, entry.stream, &entry.head, &entry.payload);
            let full = self.tip.group_len() + frame.len() > self.shared.options.group_bytes;
            if full && !self.tip.is_empty() {
                return Ok(Added::Full(Request::Append { entries, serial, epoch, done }));
            }
            if !self.tip.fits_entries(1, frame.len() as u64) {
                return Ok(Added::Roll(Request::Append { entries, serial, epoch, done }));
            }
            let place = self.tip.push(&frame);
            self.written.push(Written {
                index: entry.id.index,
                serial: serial + self.taken as u64,
                offset: place.at as u32,
            });
            self.taken += 1;
        }
        self.taken = 0;
        self.done.push(done);
        Ok(Added::Whole)
    }

    /// Whether all of them fit into the segment, also if they go into several groups.
    fn fits_all(&self, entries: &[Entry]) -> bool {
        let len = |entry: &Entry| frame_len(entry.head.len(), entry.payload.bytes.len());
        self.tip.fits_groups(entries.iter().map(len), self.shared.options.group_bytes)
    }

    /// Notes what the sync has made durable; whether more is queued.
    fn publish(&mut self, sync: Duration, gone: &mut Vec<Bytes>) -> Result<bool, Error> {
        let position = self.tip.position();
        let mut core = self.shared.lock();
        *gone = core.log.on_written(position.segment, &self.written);
        let bytes = position.at - core.synced_at.at.min(position.at);
        core.counters.on_group(bytes, sync);
        core.synced_at = position;
        self.note_in_hand(&mut core);
        core.truncations -= self.truncations;
        // Sealing may have waited for them.
        let truncated = std::mem::take(&mut self.truncations) > 0;
        let waiting = truncated && core.keeper.raise();
        let more = !core.queue.is_empty();
        let poisoned = core.poisoned.clone();
        drop(core);
        if truncated {
            self.shared.wake(Role::Keeper, waiting);
        }
        self.written.clear();
        poisoned.map_or(Ok(more), Err)
    }

    /// Begins the next segment in the file that was found for it.
    fn roll(&mut self) -> Result<(), Error> {
        let Some(ready) = self.next.take() else { return Ok(()) };
        let id = self.shared.lock().take_segment_number()?;
        let end = self.tip.position();
        let context = self.tip.context.clone();
        let header = SegmentHeader {
            id,
            predecessor: end,
            synced: end,
            file_len: ready.len,
            identity: self.shared.identity.clone(),
            context: context.clone(),
            cold: false,
        };
        // The header is durable before the name, and the name before anything else.
        self.tip.roll(ready.file, &ready.name, &header)?;
        let name = segment_name(id);
        self.storage.rename(&ready.name, &name).map_err(|e| poison("rename", &name, &e))?;
        let folder = self.storage.describe();
        self.storage.sync_dir().map_err(|e| poison("sync", &folder, &e))?;
        let mut core = self.shared.lock();
        core.log.on_rolled(end.at, context, Some(Arc::clone(&self.tip.segment)));
        core.synced_at = self.tip.position();
        let waiting = core.keeper.raise();
        drop(core);
        self.shared.wake(Role::Keeper, waiting);
        self.unmarked = None;
        Ok(())
    }

    /// Finds a file for the next segment; false if the disk has no room for one.
    fn find_next(&mut self, need: Need) -> Result<bool, Error> {
        if self.next.is_some() {
            return Ok(true);
        }
        let mut core = self.shared.lock();
        self.next = core.ready.pop_front();
        let waiting = core.keeper.raise();
        let number = core.ready_number;
        core.ready_number += 1;
        drop(core);
        self.shared.wake(Role::Keeper, waiting);
        if self.next.is_some() || need == Need::Mark {
            return Ok(self.next.is_some());
        }
        let options = &self.shared.options;
        let len = options.segment_bytes;
        // Appends leave half of the reserve to votes; whoever asks `writable` leaves all of it.
        let reserve = if need == Need::Append { options.reserve_bytes / 2 } else { 0 };
        let free = self.storage.free_bytes().unwrap_or(u64::MAX);
        let name = ready_name(number);
        let made = if free < len + reserve {
            Err(io::ErrorKind::StorageFull.into())
        } else {
            self.storage.create(&name, len)
        };
        match made {
            Ok(file) => {
                self.next = Some(Ready { name, file, len });
                Ok(true)
            }
            Err(e) if e.kind() == io::ErrorKind::StorageFull => {
                self.shared.lock().disk_full = Some((free, len + options.reserve_bytes));
                Ok(false)
            }
            Err(e) => Err(poison("create", &name, &e)),
        }
    }

    /// Refuses the first append and every one queued after it: each follows the one before.
    fn refuse(&mut self) -> Result<(), Error> {
        let mut core = self.shared.lock();
        core.epoch += 1;
        self.epoch = core.epoch;
        let (consistent, gone) = core.log.drop_unwritten();
        drop(core);
        drop(gone);
        if consistent {
            return Ok(());
        }
        // The state machine already has an entry that cannot be written here. The log ends, with
        // what is durable of it, and can be opened again once there is room.
        let (free_bytes, needed_bytes) = self.shared.lock().disk_full.unwrap_or_default();
        Err(Error::DiskFull { free_bytes, needed_bytes })
    }

    fn run_refused(&mut self) {
        if self.refused.is_empty() {
            return;
        }
        let (free_bytes, needed_bytes) = self.shared.lock().disk_full.unwrap_or_default();
        while let Some(done) = self.refused.pop() {
            done.tell(Err(Error::DiskFull { free_bytes, needed_bytes }));
        }
    }

    fn end(&mut self) {
        self.ended = true;
        self.shared.end(Role::Writer);
    }

    fn fail(&mut self, error: &Error) -> Next {
        self.shared.poison(error);
        self.fail_all(error);
        self.end();
        Next::Done
    }

    /// No callback is ever lost.
    fn fail_all(&mut self, error: &Error) {
        while let Some(done) = self.done.pop() {
            done.tell(Err(error.clone()));
        }
        while let Some(done) = self.refused.pop() {
            done.tell(Err(error.clone()));
        }
        while let Some(Queued { request, .. }) = self.work.pop_back() {
            request.into_done().tell(Err(error.clone()));
        }
    }
}

/// A purge point never goes back.
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
