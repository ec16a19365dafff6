//! Space for the writer: the next segment, and waiting while the disk has no space.
//!
//! Appends for which no segment can be created are refused before anything is written. A group that
//! finds no space in a segment waits and is written again, unchanged and at the same position: the
//! file system had promised the space, and entries of the group may be on other replicas.

use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use crate::error::{Error, changing, is_no_space};
use crate::files::active_segment::ActiveSegment;
use crate::format::frame::{Context, LogPosition, SegmentHeader};
use crate::format::layout::{ready_name, segment_name};
use crate::shared::core::ReadySegment;
use crate::shared::options::RESERVED_SEGMENTS;
use crate::shared::signal::WalThread;
use crate::storage::File;
use crate::types::NextStep;
use crate::write::writer::Writer;

/// Interval at which the writer checks again for disk space.
pub(super) const SPACE_RETRY: Duration = Duration::from_millis(100);

/// Purpose of a new segment, which decides how much of the disk reserve it may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SegmentPurpose {
    Append,
    Control,
    SyncMarker,
}

/// Outcome of an attempt to begin the next segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NextSegment {
    Begun,
    /// The disk has no space for another segment.
    NoSpace,
    /// The writer waits, and retries later.
    Waits,
}

/// A segment that has its name, and follows the active one.
pub(super) struct RolledSegment {
    active: ActiveSegment,
    is_written: bool,
    /// End and state of the segment before it.
    end: LogPosition,
    context: Context,
}

impl Writer {
    /// Begins the next segment, if there is a file for it.
    pub(super) fn begin_next(&mut self, need: SegmentPurpose) -> Result<NextSegment, Error> {
        let begun = match self.find_next(need) {
            Ok(true) => self.roll_segment(),
            Ok(false) => return Ok(NextSegment::NoSpace),
            Err(error) => Err(error),
        };
        match begun {
            Ok(()) => Ok(NextSegment::Begun),
            Err(error) => self.wait_for(error, false).map(|_| NextSegment::Waits),
        }
    }

    /// Begins the next segment before the active one is full, so that it can be sealed.
    ///
    /// Takes only a file that is ready and not reserved. Without one the caller has to ask again.
    pub(super) fn roll_early(&mut self) -> Result<NextStep, Error> {
        match self.begin_next(SegmentPurpose::SyncMarker)? {
            NextSegment::Begun | NextSegment::NoSpace => Ok(NextStep::Now),
            NextSegment::Waits => Ok(NextStep::After(SPACE_RETRY)),
        }
    }

    /// Begins the next segment in the file that was found for it.
    ///
    /// After a shortage the call can be repeated, or [`Self::finish_roll`] if the segment has its
    /// name.
    pub(super) fn roll_segment(&mut self) -> Result<(), Error> {
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
        let name = segment_name(id);
        let is_written = ready.is_written;
        let begun = self.open_ready(&ready).and_then(|file| {
            let began = self.shared.time();
            let active = ActiveSegment::begin(file, &ready.name, &header)?;
            if let Some(took) = self.since(began) {
                self.shared.lock().disk.on_block(took, is_written);
            }
            let renamed = self.storage.rename(&ready.name, &name);
            renamed.map_err(|e| changing("rename", &name, &e)).map(|()| active)
        });
        match begun {
            Ok(active) => self.finish_roll(RolledSegment { active, is_written, end, context }),
            Err(error) => {
                self.next = Some(ready);
                Err(error)
            }
        }
    }

    /// Makes the name of the next segment durable, and continues in it.
    pub(super) fn finish_roll(&mut self, named: RolledSegment) -> Result<(), Error> {
        if let Err(e) = self.storage.sync_dir() {
            // The header states where this segment ends, so nothing may be added to it.
            self.named = Some(named);
            return Err(changing("sync", &self.storage.describe(), &e));
        }
        let RolledSegment { active, is_written, end, context } = named;
        self.active.roll(active);
        self.is_written = is_written;
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
    ///
    /// After any other shortage the call can be repeated.
    pub(super) fn find_next(&mut self, need: SegmentPurpose) -> Result<bool, Error> {
        if self.next.is_some() {
            return Ok(true);
        }
        let options = &self.shared.options;
        let len = options.segment_bytes;
        let free = self.storage.free_bytes().unwrap_or(u64::MAX);
        let mut core = self.shared.lock();
        // The last ready segment is for an open on a full disk. It may be used if another one is
        // being prepared, or if there is space for one.
        let has_space = core.preparing
            || core.disk_full.is_none() && free >= 2 * len + options.reserve_bytes / 2;
        let spared = if has_space { 0 } else { RESERVED_SEGMENTS };
        if core.ready.len() > spared {
            self.next = core.ready.pop_front();
        }
        let waiting = core.keeper.raise();
        let number = core.ready_number;
        core.ready_number += 1;
        drop(core);
        self.shared.wake(WalThread::Keeper, waiting);
        if self.next.is_some() || need == SegmentPurpose::SyncMarker {
            return Ok(self.next.is_some());
        }
        // Appends may use half of the reserve, votes all of it. Callers that check `writable` first
        // use none.
        let reserve = if need == SegmentPurpose::Append { options.reserve_bytes / 2 } else { 0 };
        let name = ready_name(number);
        let needed = len + options.reserve_bytes;
        if free >= len + reserve {
            match self.storage.create(&name, len) {
                Ok(file) => {
                    self.shared.lock().counters.allocated_segments += 1;
                    self.next =
                        Some(ReadySegment { name, file: Some(file), len, is_written: false });
                    return Ok(true);
                }
                Err(e) if is_no_space(&e) => {}
                Err(e) => return Err(changing("create", &name, &e)),
            }
        }
        let mut core = self.shared.lock();
        core.disk_full = Some((free, needed));
        if need == SegmentPurpose::Control {
            // Elections, trims and purges continue, and may free space.
            self.next = core.ready.pop_front();
        }
        // The keeper may have found space meanwhile. Then only it can withdraw what is recorded
        // here.
        let waiting = core.keeper.raise();
        drop(core);
        self.shared.wake(WalThread::Keeper, waiting);
        Ok(self.next.is_some())
    }

    fn open_ready(&self, ready: &ReadySegment) -> Result<Arc<dyn File>, Error> {
        match &ready.file {
            Some(file) => Ok(Arc::clone(file)),
            None => {
                let opened = self.storage.open(&ready.name);
                opened.map_err(|e| changing("open", &ready.name, &e))
            }
        }
    }

    /// Waits after a shortage, and reports any other error.
    pub(super) fn wait_for(&mut self, error: Error, closing: bool) -> Result<NextStep, Error> {
        let error = match error {
            Error::DiskFull { .. } => {
                let free_bytes = self.storage.free_bytes().unwrap_or(0);
                Error::DiskFull { free_bytes, needed_bytes: self.shared.options.reserve_bytes }
            }
            error @ Error::Exhausted { .. } => error,
            error => return Err(error),
        };
        self.shared.lock().waiting = Some(error.clone());
        if self.lack.is_none() {
            warn!(%error, "writes wait");
        }
        self.lack = Some(error);
        if closing {
            // No space will become free: the log is closing. The group was not acknowledged.
            self.fail_all(&Error::Closed);
            self.end();
            return Ok(NextStep::Done);
        }
        Ok(NextStep::After(SPACE_RETRY))
    }

    /// Ends a wait: what was short is there again.
    pub(super) fn end_wait(&mut self) {
        if self.lack.take().is_none() {
            return;
        }
        self.shared.lock().waiting = None;
        info!("writes continue");
    }

    /// Refuses the first append and all later ones, because each follows the one before.
    pub(super) fn refuse_appends(&mut self) -> Result<(), Error> {
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

    pub(super) fn complete_refused(&mut self) {
        if self.refused.is_empty() {
            return;
        }
        let (free_bytes, needed_bytes) = self.shared.lock().disk_full.unwrap_or_default();
        while let Some(done) = self.refused.pop() {
            done.complete(Err(Error::DiskFull { free_bytes, needed_bytes }));
        }
    }
}
