//! Checkpoints of the state machine, and snapshots with their entries.
//!
//! One replacement of the state file makes either of them effective.

use std::collections::HashMap;

use bytes::Bytes;

use crate::error::Error;
use crate::files::cold_segment::{ColdSegment, ColdSegments};
use crate::files::state_file::StateFile;
use crate::format::state::PersistedState;
use crate::format::state::StagedSegments;
use crate::memory::log::Log;
use crate::memory::slot::Slot;
use crate::shared::Shared;
use crate::shared::core::Core;
use crate::shared::queue::{PendingCallback, WriteRequest};
use crate::shared::signal::WalThread;
use crate::sync::{IgnorePoison, MutexGuard};
use crate::types::{LiveEntry, LogId};

impl Shared {
    /// Stores a checkpoint and, with `cold`, makes those segments part of the log.
    pub(crate) fn store_checkpoint(
        &self,
        at: LogId,
        state: Bytes,
        cold: Option<&mut ColdSegments>,
    ) -> Result<(), Error> {
        let Some(storage) = &self.storage else {
            let mut core = self.lock();
            core.check_open()?;
            core.log.check_checkpoint(at)?;
            if let Some(cold) = cold {
                check_install(&core.log, at, cold)?;
                return install_in_memory(&mut core, at, std::mem::take(&mut cold.memory));
            }
            core.log.on_checkpoint(at);
            return Ok(());
        };
        // Locked until memory agrees with the file, so that no other writer comes between.
        let mut file = self.state_file.lock().ignore_poison();
        let named = {
            let core = self.lock();
            core.check_open()?;
            core.log.check_checkpoint(at)?;
            let mut named = core.state(self.identity.clone(), Some((at, state)));
            if let Some(cold) = &cold {
                check_install(&core.log, at, cold)?;
                named.cold.extend(cold.made.iter().map(ColdSegment::info));
                named.staged = StagedSegments::default();
                named.purged = Some(at);
            }
            named
        };
        match file.write(storage.as_ref(), &named) {
            Ok(()) => {}
            Err(error) if error.is_shortage() => {
                if file.is_last_named() {
                    // The state file may list the segments, and a crash may find it.
                    let made = cold.into_iter().flat_map(|cold| &mut cold.made);
                    made.for_each(ColdSegment::pin_file);
                }
                return Err(error);
            }
            Err(error) => {
                drop(file);
                // The state file may list the segments: only an open can tell.
                for cold in cold.into_iter().flat_map(|cold| cold.made.drain(..)) {
                    drop(cold.into_parts());
                }
                self.poison(&error);
                return Err(error);
            }
        }
        let mut core = self.lock();
        core.log.on_checkpoint(at);
        let waiting = core.keeper.raise();
        let Some(cold) = cold else {
            drop(core);
            self.wake(WalThread::Keeper, waiting);
            return Ok(());
        };
        core.staged = StagedSegments::default();
        for cold in cold.made.drain(..) {
            let (segment, trailer, directory) = cold.into_parts();
            if let Some(files) = &self.files {
                segment.open_on_demand(files);
            }
            core.log.insert_cold(segment, &trailer, &directory);
        }
        let gone = core.log.purge(at)?;
        let empties = core.log.last == Some(at);
        // Ignored: the state file already states the purge.
        let done = PendingCallback::new(Box::new(|_| {}));
        self.queue(core, WriteRequest::Purge { upto: at, empties, done });
        drop(file);
        drop(gone);
        self.wake(WalThread::Keeper, waiting);
        Ok(())
    }

    /// Lists staged segments in the state file, so that the next open returns them.
    pub(crate) fn retain(&self, after: u64, segments: &mut ColdSegments) -> Result<(), Error> {
        let Some(storage) = &self.storage else { return self.lock().check_open() };
        let received = StagedSegments {
            after,
            segments: segments.made.iter().map(ColdSegment::info).collect(),
        };
        let mut file = self.state_file.lock().ignore_poison();
        let named = {
            let core = self.lock();
            core.check_open()?;
            let state = core.state(self.identity.clone(), file.checkpoint.clone());
            PersistedState { staged: received.clone(), ..state }
        };
        let written = file.write(storage.as_ref(), &named);
        if file.is_unsynced() || !written.as_ref().is_err_and(Error::is_shortage) {
            // Even after a failure: the state file may list them, and only an open can tell.
            segments.made.iter_mut().for_each(ColdSegment::retain_file);
        }
        match written {
            Ok(()) => self.lock().staged = received,
            Err(error) => return Err(self.not_replaced(file, error)),
        }
        Ok(())
    }

    /// Poisons the log after a failed replacement of the state file. Not after a shortage: then the
    /// call can be repeated.
    fn not_replaced(&self, file: MutexGuard<'_, StateFile>, error: Error) -> Error {
        drop(file);
        if !error.is_shortage() {
            self.poison(&error);
        }
        error
    }

    /// Raises the version of what the entries mean, durably.
    pub(crate) fn raise_entries_version(&self, version: u32) -> Result<(), Error> {
        // Locked until memory agrees with the file, so that no other writer comes between.
        let mut file = self.state_file.lock().ignore_poison();
        let state = {
            let mut core = self.lock();
            core.check_open()?;
            if core.entries_version >= version {
                return Ok(());
            }
            let Some(_) = &self.storage else {
                core.entries_version = version;
                return Ok(());
            };
            core.state(self.identity.clone(), file.checkpoint.clone())
        };
        let Some(storage) = &self.storage else { return Ok(()) };
        let raised = PersistedState { entries_version: version, ..state };
        match file.write(storage.as_ref(), &raised) {
            Ok(()) => self.lock().entries_version = version,
            Err(error) => return Err(self.not_replaced(file, error)),
        }
        Ok(())
    }

    /// Returns the staged segments of an earlier process, and the index that they start after.
    /// Once.
    pub(crate) fn take_staged(&self) -> Option<(u64, ColdSegments)> {
        let mut core = self.lock();
        let found = core.staged_found.take()?;
        Some((core.staged.after, found))
    }
}

/// Checks that the entries of a snapshot may join the log: it has none of them.
fn check_install(log: &Log, at: LogId, cold: &ColdSegments) -> Result<(), Error> {
    let refused = |what: String| Err(Error::Unusable(what));
    let (Some(first), Some(last)) = (cold.first(), cold.last()) else { return Ok(()) };
    let placed = log.placed.unwrap_or(0);
    if log.placed.is_some() && first < placed {
        let what = format!("entries up to {} are already placed", placed - 1);
        return refused(format!("snapshot contains entry {first}, but {what}"));
    }
    if last > at.index {
        return refused(format!("snapshot at index {} contains the later entry {last}", at.index));
    }
    let shares = || cold.made.iter().flat_map(|cold| &cold.directory);
    let shared = shares().map(|share| (share.stream, share.first..share.next));
    let held = cold.memory.iter().map(|e| e.placement);
    let held = held.map(|p| (p.stream, p.first..p.first + u64::from(p.count)));
    let mut ends: HashMap<u64, u64> = HashMap::new();
    for (stream, positions) in shared.chain(held) {
        let end = ends.insert(stream, positions.end);
        if end.is_some_and(|end| positions.start < end) {
            let first = positions.start;
            return refused(format!("position {first} of stream {stream} occurs twice"));
        }
    }
    let on_disk = shares().map(|share| (share.stream, share.first));
    let in_memory = cold.memory.iter().map(|e| (e.placement.stream, e.placement.first));
    let behind = |(stream, first): &(u64, u64)| {
        log.streams.get(stream).is_some_and(|s| !s.dropped && *first < s.next())
    };
    match on_disk.chain(in_memory).find(behind) {
        None => Ok(()),
        Some((stream, first)) => refused(format!(
            "position {first} of stream {stream} is below the next position of the stream"
        )),
    }
}

/// Replaces the unplaced entries of an in-memory log by the entries of a snapshot.
fn install_in_memory(core: &mut Core, at: LogId, entries: Vec<LiveEntry>) -> Result<(), Error> {
    let log = &mut core.log;
    let placed = log.placed.unwrap_or(0);
    let start = log.slots.partition_point(|slot| slot.id.index < placed);
    let mut later: Vec<Slot> = log.slots.drain(start..).collect();
    for slot in &later {
        log.tail_bytes -= slot.cost();
        if let Some(held) = log.chain.get_mut(&slot.segment) {
            held.frame_bytes -= u64::from(slot.frame_len);
        }
    }
    // If another entry has the index of `at`, the entries after it belong to another branch.
    let continues = later.iter().any(|slot| slot.id == at);
    later.retain(|slot| continues && slot.id.index > at.index);
    if !continues {
        (log.last, log.synced) = (Some(at), Some(at));
    }
    let segment = core.next_id;
    core.next_id += 1;
    core.memory_bytes = 0;
    log.roll_memory(segment);
    for slot in entries.into_iter().map(Slot::placed).chain(later) {
        log.tail_bytes += slot.cost();
        log.restore(Slot { segment, ..slot });
    }
    log.evicted = 0;
    log.on_checkpoint(at);
    drop(log.purge(at)?);
    log.drop_empty_memory_segments();
    Ok(())
}
