//! What the log keeps in memory about each live segment, and when a segment may go.

use std::sync::Arc;

use crate::footer::{DirectoryRow, SealedEntry, Trailer};
use crate::frame::Context;
use crate::log::Log;
use crate::segment::Segment;
use crate::slot::{Place, Slot};
use crate::{LogId, Placement};

/// A live segment: one that the state file names, or a later one.
#[derive(Debug)]
pub(crate) struct Held {
    /// `None` in a memory log, whose segments are only a unit of retention.
    pub segment: Option<Arc<Segment>>,
    /// Where its groups end and how the log stood there, once the next segment is begun.
    pub rolled: Option<(u64, Context)>,
    pub sealed: bool,
    /// First index and last id, once sealed; `None` if no entry survived in it.
    pub entries: Option<(u64, LogId)>,
    pub frame_bytes: u64,
    /// Streams that have had a row in it since it was begun. Emptied by sealing.
    pub streams: Vec<u64>,
    /// Streams' rows that are not trimmed yet.
    pub live_rows: usize,
    /// No longer live as far as the state file is concerned.
    pub going: bool,
}

impl Held {
    pub(crate) fn new(segment: Option<Arc<Segment>>) -> Self {
        Self {
            segment,
            rolled: None,
            sealed: false,
            entries: None,
            frame_bytes: 0,
            streams: Vec::new(),
            live_rows: 0,
            going: false,
        }
    }
}

impl Log {
    /// Begins a segment; the one before it gets no more groups.
    pub(crate) fn on_rolled(&mut self, end: u64, context: Context, segment: Option<Arc<Segment>>) {
        if let Some((_, held)) = self.held.iter_mut().next_back() {
            held.rolled = Some((end, context));
        }
        if let Some(segment) = segment {
            self.held.insert(segment.id, Held::new(Some(segment)));
        }
    }

    /// The oldest segment that is not sealed, if all of its entries are placed.
    pub(crate) fn sealable(&self) -> Option<u64> {
        let (id, held) = self.held.iter().find(|(_, held)| !held.sealed)?;
        held.rolled.as_ref()?;
        let end = self.slots.partition_point(|slot| slot.segment <= *id);
        let last = end.checked_sub(1).and_then(|at| self.slots.get(at));
        last.is_none_or(|slot| slot.place != Place::Unknown).then_some(*id)
    }

    /// Entries of a segment, some at a time: from slot number `skip` within it on.
    pub(crate) fn entries_of(&self, segment: u64, skip: usize, max: usize) -> Vec<SealedEntry> {
        let start = self.slots.partition_point(|slot| slot.segment < segment) + skip;
        let end = self.slots.partition_point(|slot| slot.segment <= segment).min(start + max);
        let row = |slot: &Slot| SealedEntry {
            id: slot.id,
            offset: slot.offset,
            frame_len: slot.frame_len,
            placement: slot.place.placement(),
        };
        if start >= end { Vec::new() } else { self.slots.range(start..end).map(row).collect() }
    }

    /// Placements of entries up to `upto` that are in no sealed segment, for the state file.
    pub(crate) fn unsealed_placements(&self, upto: u64) -> Vec<(u64, Option<Placement>)> {
        let sealed = |slot: &Slot| self.held.get(&slot.segment).is_none_or(|h| h.sealed);
        let start = self.slots.partition_point(|slot| slot.is_written() && sealed(slot));
        let end = self.slots.partition_point(|slot| slot.id.index <= upto);
        if start >= end {
            return Vec::new();
        }
        let slots = self.slots.range(start..end).filter(|slot| slot.is_written());
        slots.map(|slot| (slot.id.index, slot.place.placement())).collect()
    }

    /// Notes that a segment's footer is durable.
    pub(crate) fn on_sealed(&mut self, id: u64, trailer: &Trailer, directory: &[DirectoryRow]) {
        let Some(held) = self.held.get_mut(&id) else { return };
        held.sealed = true;
        held.entries = trailer.entries;
        held.streams = Vec::new();
        if let Some(segment) = &held.segment {
            segment.set_trailer(trailer.clone());
        }
        if let Some((first, _)) = trailer.entries {
            self.sealed_by_index.insert(first, id);
        }
        for share in directory {
            if let Some(stream) = self.streams.get_mut(&share.stream) {
                stream.on_sealed(id, share);
            }
            self.drop_trimmed_rows(share.stream);
        }
        self.pop_slots(0);
    }

    /// Takes a sealed segment found at open.
    pub(crate) fn restore_sealed(
        &mut self,
        segment: Arc<Segment>,
        trailer: &Trailer,
        directory: &[DirectoryRow],
    ) {
        let id = segment.id;
        segment.set_trailer(trailer.clone());
        let mut held = Held::new(Some(segment));
        held.sealed = true;
        held.entries = trailer.entries;
        held.frame_bytes = trailer.frame_bytes;
        held.live_rows = directory.len();
        self.held.insert(id, held);
        if let Some((first, _)) = trailer.entries {
            self.sealed_by_index.insert(first, id);
        }
        for share in directory {
            self.streams.entry(share.stream).or_default().restore_row(id, share);
        }
    }

    /// Takes a sealed segment whose footer is damaged. It is never freed here: what it holds is
    /// for a repair to say.
    pub(crate) fn restore_withheld(&mut self, segment: Arc<Segment>, trailer: &Trailer) {
        let id = segment.id;
        self.withheld.push(Arc::clone(&segment));
        self.restore_sealed(segment, trailer, &[]);
        if let Some(held) = self.held.get_mut(&id) {
            held.live_rows = 1;
        }
    }

    /// Begins a segment of a memory log.
    pub(crate) fn roll_memory(&mut self, id: u64) {
        self.on_rolled(0, Context::default(), None);
        self.held.insert(id, Held::new(None));
        self.seal_memory_segments();
    }

    /// Seals the segments of a memory log whose entries are all placed.
    pub(crate) fn seal_memory_segments(&mut self) {
        while let Some(id) = self.sealable() {
            self.seal_memory(id);
        }
    }

    fn seal_memory(&mut self, id: u64) {
        let Some(held) = self.held.get_mut(&id) else { return };
        held.sealed = true;
        for stream in std::mem::take(&mut held.streams) {
            if let Some(stream) = self.streams.get_mut(&stream) {
                stream.mark_sealed(id);
            }
            self.drop_trimmed_rows(stream);
        }
    }

    /// Sealed segments that neither the Raft log nor any stream needs. They count as gone from now
    /// on as far as the state file is concerned.
    pub(crate) fn take_freeable(&mut self) -> Vec<u64> {
        let upto = self.purged.min_by_index(self.checkpoint);
        let free = self.held.iter_mut().filter(|(_, held)| {
            let purged = held.entries.is_none_or(|(_, last)| upto.is_some_and(|u| last.index <= u));
            held.sealed && purged && held.live_rows == 0
        });
        free.map(|(id, held)| {
            held.going = true;
            *id
        })
        .collect()
    }

    /// Forgets a segment. Its entries can no longer be asked for.
    pub(crate) fn remove_segment(&mut self, id: u64) -> Option<Held> {
        let held = self.held.remove(&id)?;
        if let Some((first, _)) = held.entries {
            self.sealed_by_index.remove(&first);
        }
        Some(held)
    }

    /// Forgets the sealed segments of a memory log whose entries have all gone.
    pub(crate) fn drop_empty_memory_segments(&mut self) {
        let oldest = self.slots.front().map_or(u64::MAX, |slot| slot.segment);
        while let Some(entry) = self.held.first_entry()
            && entry.get().sealed
            && entry.get().live_rows == 0
            && *entry.key() < oldest
        {
            entry.remove();
        }
    }
}

trait MinByIndex {
    fn min_by_index(self, other: Self) -> Option<u64>;
}

impl MinByIndex for Option<LogId> {
    fn min_by_index(self, other: Self) -> Option<u64> {
        Some(self?.index.min(other?.index))
    }
}
