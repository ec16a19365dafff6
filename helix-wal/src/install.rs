//! Checkpoints: the state machine's own, and one that came as a snapshot together with the records
//! that it speaks of. Either becomes true with one state file.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};

use bytes::Bytes;

use crate::cold::{Cold, ColdSegments};
use crate::footer::{DirectoryRow, Trailer};
use crate::held::Held;
use crate::log::Log;
use crate::segment::Segment;
use crate::shared::{Core, Request, Role, Waiting};
use crate::slot::{Place, Slot};
use crate::state_file::{ColdName, Received};
use crate::streams::Row;
use crate::wal::Wal;
use crate::{Error, LiveEntry, LogId};

impl Wal {
    /// Stores a checkpoint of the state machine durably: all entries up to `at` are in it. Blocks.
    /// `at` must be synced, and below it nothing is replayed at open. If `at` is above the last
    /// placed entry, the state machine went on by other means (a snapshot): the entries between
    /// count no positions. `DiskFull` leaves the checkpoint before it in place.
    pub fn checkpoint(&self, at: LogId, state: Bytes) -> Result<(), Error> {
        self.store(at, state, None)
    }

    /// The same for a state that came as a snapshot with the live entries that this log lacks: at
    /// once the state is the checkpoint, the segments are part of the log, what the log had
    /// between the last placed entry and `at` is gone, and it continues after `at`. Blocks.
    ///
    /// The entries must lie above the last placed one, and at or below `at`. Where the call fails
    /// nothing has changed, and after `DiskFull` it can be made again with the same segments.
    pub fn install(&self, at: LogId, state: Bytes, cold: &mut ColdSegments) -> Result<(), Error> {
        self.store(at, state, Some(cold))
    }

    fn store(&self, at: LogId, state: Bytes, cold: Option<&mut ColdSegments>) -> Result<(), Error> {
        let Some(storage) = &self.shared.storage else {
            let mut core = self.shared.lock();
            core.check_open()?;
            core.log.check_checkpoint(at)?;
            if let Some(cold) = cold {
                core.log.check_install(at, cold)?;
                return core.install_in_memory(at, std::mem::take(&mut cold.memory));
            }
            core.log.on_checkpoint(at);
            return Ok(());
        };
        // Held until memory says the same as the file: nobody writes it in between.
        let mut file = self.shared.state_file.lock().unwrap_or_else(PoisonError::into_inner);
        let named = {
            let core = self.shared.lock();
            core.check_open()?;
            core.log.check_checkpoint(at)?;
            let mut named = core.state(self.shared.identity.clone(), Some((at, state)));
            if let Some(cold) = &cold {
                core.log.check_install(at, cold)?;
                named.cold.extend(cold.made.iter().map(name_of));
                named.received = Received::default();
                named.purged = Some(at);
            }
            named
        };
        match file.write(storage.as_ref(), &named) {
            Ok(()) => {}
            Err(error @ Error::DiskFull { .. }) => return Err(error),
            Err(error) => {
                drop(file);
                // Perhaps it names them: only an open can tell.
                for cold in cold.into_iter().flat_map(|cold| cold.made.drain(..)) {
                    drop(cold.keep());
                }
                self.shared.poison(&error);
                return Err(error);
            }
        }
        let mut core = self.shared.lock();
        core.log.on_checkpoint(at);
        let waiting = core.keeper.raise();
        let Some(cold) = cold else {
            drop(core);
            self.shared.wake(Role::Keeper, waiting);
            return Ok(());
        };
        core.received = Received::default();
        for cold in cold.made.drain(..) {
            let (segment, trailer, directory) = cold.keep();
            if let Some(files) = &self.shared.files {
                segment.open_on_demand(files);
            }
            core.log.join(segment, &trailer, &directory);
        }
        let gone = core.log.purge(at)?;
        let empties = core.log.last == Some(at);
        // Ignored: the state file has said it already.
        let done = Waiting::new(Box::new(|_| {}));
        self.shared.queue(core, Request::Purge { upto: at, empties, done });
        drop(file);
        drop(gone);
        self.shared.wake(Role::Keeper, waiting);
        Ok(())
    }
}

pub(crate) fn name_of(cold: &Cold) -> ColdName {
    let (first, last) = cold.entries();
    ColdName { id: cold.segment.id, first, last }
}

impl Log {
    /// Whether entries from elsewhere may join the log at this point: it has none of them.
    fn check_install(&self, at: LogId, cold: &ColdSegments) -> Result<(), Error> {
        let refused = |what: String| Err(Error::Unusable(what));
        let (Some(first), Some(last)) = (cold.first(), cold.last()) else { return Ok(()) };
        let placed = self.placed.unwrap_or(0);
        if self.placed.is_some() && first < placed {
            let what = format!("entries up to {} are placed here already", placed - 1);
            return refused(format!("a snapshot brings entry {first}: {what}"));
        }
        if last > at.index {
            return refused(format!("a snapshot at {} brings entry {last}", at.index));
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
                return refused(format!("position {first} of stream {stream} comes twice"));
            }
        }
        let on_disk = shares().map(|share| (share.stream, share.first));
        let in_memory = cold.memory.iter().map(|e| (e.placement.stream, e.placement.first));
        let behind = |(stream, first): &(u64, u64)| {
            self.streams.get(stream).is_some_and(|s| !s.dropped && *first < s.next())
        };
        match on_disk.chain(in_memory).find(behind) {
            None => Ok(()),
            Some((stream, first)) => {
                refused(format!("position {first} of stream {stream}: the stream is further on"))
            }
        }
    }

    /// Makes a cold segment with entries that are new to it part of the log.
    fn join(&mut self, segment: Arc<Segment>, trailer: &Trailer, directory: &[DirectoryRow]) {
        let id = segment.id;
        self.cold.insert(id, Held::cold(segment, trailer, directory));
        for share in directory {
            let stream = self.streams.entry(share.stream).or_default();
            stream.insert_row(Row::sealed(id, share));
        }
        // Trims and drops may have been told before.
        for share in directory {
            self.drop_trimmed(share.stream);
        }
    }
}

impl Core {
    /// Entries from elsewhere take the place of those that were not placed yet.
    fn install_in_memory(&mut self, at: LogId, entries: Vec<LiveEntry>) -> Result<(), Error> {
        let log = &mut self.log;
        let placed = log.placed.unwrap_or(0);
        let start = log.slots.partition_point(|slot| slot.id.index < placed);
        let mut later: Vec<Slot> = log.slots.drain(start..).collect();
        for slot in &later {
            log.tail_bytes -= slot.cost();
            if let Some(held) = log.held.get_mut(&slot.segment) {
                held.frame_bytes -= u64::from(slot.frame_len);
            }
        }
        // What follows another entry in that place is of another branch.
        let continues = later.iter().any(|slot| slot.id == at);
        later.retain(|slot| continues && slot.id.index > at.index);
        if !continues {
            (log.last, log.synced) = (Some(at), Some(at));
        }
        let segment = self.next_id;
        self.next_id += 1;
        self.memory_bytes = 0;
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
}

impl Slot {
    /// Of a memory log.
    fn placed(entry: LiveEntry) -> Self {
        let LiveEntry { id, placement, head, payload } = entry;
        let payload_len = payload.bytes.len();
        Self {
            id,
            serial: 0,
            stream: placement.stream,
            frame_len: crate::frame::frame_len(head.len(), payload_len) as u32,
            head,
            payload: Some(payload.bytes),
            payload_len,
            payload_crc: payload.crc,
            payload_crc_seed: payload.crc_seed,
            segment: 0,
            offset: 0,
            place: Place::At(placement),
        }
    }
}
