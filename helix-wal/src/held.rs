//! What the log keeps in memory about each live segment, and when a segment may go.

use std::sync::Arc;

use crate::footer::{DirectoryRow, SealedEntry, Trailer};
use crate::frame::Context;
use crate::log::Log;
use crate::segment::Segment;
use crate::slot::{Place, Slot};
use crate::streams::Row;
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
    /// Streams that have had a row in it since it was begun, once for each row. Emptied by sealing.
    pub streams: Vec<u64>,
    /// Streams' rows that are not trimmed yet.
    pub live_rows: usize,
    /// What those hold: bytes of frames, without the trimmed part of a row, and entries.
    pub live_bytes: u64,
    pub live_entries: u64,
    /// Streams that it holds, once sealed.
    pub stream_count: u32,
    /// No longer live as far as the state file is concerned.
    pub going: bool,
    /// Read or written by a compaction that has not ended: nobody else frees it.
    pub busy: bool,
    /// Takes the rows of other segments over, one after the other.
    pub joining: bool,
    /// A compaction found damage in it: it stays as it is.
    pub spoiled: bool,
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
            live_bytes: 0,
            live_entries: 0,
            stream_count: 0,
            going: false,
            busy: false,
            joining: false,
            spoiled: false,
        }
    }
}

/// Streams of a directory, whose rows stand by stream.
fn streams_in(directory: &[DirectoryRow]) -> u32 {
    directory.chunk_by(|a, b| a.stream == b.stream).count() as u32
}

impl Held {
    /// A cold segment is sealed from the first.
    pub(crate) fn cold(
        segment: Arc<Segment>,
        trailer: &Trailer,
        directory: &[DirectoryRow],
    ) -> Self {
        segment.set_trailer(trailer.clone());
        let mut held = Self::new(Some(segment));
        held.sealed = true;
        held.entries = trailer.entries;
        held.frame_bytes = trailer.frame_bytes;
        held.count_shares(directory);
        held
    }

    /// A cold segment that the rows of others are to be moved to.
    pub(crate) fn joining(
        segment: Arc<Segment>,
        trailer: &Trailer,
        directory: &[DirectoryRow],
    ) -> Self {
        let stream_count = streams_in(directory);
        let held = Self::cold(segment, trailer, &[]);
        Self { stream_count, busy: true, joining: true, ..held }
    }

    fn count_shares(&mut self, directory: &[DirectoryRow]) {
        self.stream_count = streams_in(directory);
        self.live_rows = directory.len();
        self.live_bytes = directory.iter().map(|share| share.bytes).sum();
        self.live_entries = directory.iter().map(|share| u64::from(share.entries)).sum();
    }

    /// Whether a walk by index meets its entries here: those of a segment that is joining are met
    /// in the ones that it replaces.
    pub(crate) fn is_readable_by_index(&self) -> bool {
        !self.joining
    }

    /// Whether it is sealed and the Raft log, which begins after `upto`, needs nothing of it.
    pub(crate) fn is_purged(&self, upto: Option<u64>) -> bool {
        let below = |(_, last): (u64, LogId)| upto.is_some_and(|upto| last.index <= upto);
        self.sealed && self.entries.is_none_or(below)
    }
}

impl Log {
    /// A live segment of either kind.
    pub(crate) fn segment(&self, id: u64) -> Option<&Held> {
        self.held.get(&id).or_else(|| self.cold.get(&id))
    }

    pub(crate) fn segment_mut(&mut self, id: u64) -> Option<&mut Held> {
        self.held.get_mut(&id).or_else(|| self.cold.get_mut(&id))
    }

    /// Begins a segment; the one before it gets no more groups.
    pub(crate) fn on_rolled(&mut self, end: u64, context: Context, segment: Option<Arc<Segment>>) {
        if let Some((_, held)) = self.held.iter_mut().next_back() {
            held.rolled = Some((end, context));
        }
        if let Some(segment) = segment {
            self.held.insert(segment.id, Held::new(Some(segment)));
        }
    }

    /// Whether nothing is written to a segment any more.
    pub(crate) fn is_rolled(&self, segment: u64) -> bool {
        self.held.get(&segment).is_some_and(|held| held.rolled.is_some())
    }

    /// The oldest segment that is not sealed, if all of its entries are placed.
    pub(crate) fn sealable(&self) -> Option<u64> {
        // Segments are sealed in order, so those that are not are the newest few of many.
        let (id, held) = self.held.iter().rev().take_while(|(_, held)| !held.sealed).last()?;
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
            begins_share: false,
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
        held.stream_count = streams_in(directory);
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
            self.count_trimmed(share.stream);
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
        held.count_shares(directory);
        self.held.insert(id, held);
        if let Some((first, _)) = trailer.entries {
            self.sealed_by_index.insert(first, id);
        }
        for share in directory {
            self.streams.entry(share.stream).or_default().rows.push_back(Row::sealed(id, share));
        }
    }

    /// Takes a cold segment that the state file names. Its entries stand between those of other
    /// segments, so the rows have to be put in order once all of them are there.
    pub(crate) fn restore_cold(
        &mut self,
        segment: Arc<Segment>,
        trailer: &Trailer,
        directory: &[DirectoryRow],
    ) {
        let id = segment.id;
        self.cold.insert(id, Held::cold(segment, trailer, directory));
        for share in directory {
            self.streams.entry(share.stream).or_default().rows.push_back(Row::sealed(id, share));
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

    /// The same of a cold segment.
    pub(crate) fn restore_withheld_cold(&mut self, segment: Arc<Segment>, trailer: &Trailer) {
        let id = segment.id;
        self.withheld.push(Arc::clone(&segment));
        let mut held = Held::cold(segment, trailer, &[]);
        held.live_rows = 1;
        self.cold.insert(id, held);
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
        let all = self.held.iter_mut().chain(&mut self.cold);
        let free =
            all.filter(|(_, held)| held.is_purged(upto) && held.live_rows == 0 && !held.busy);
        free.map(|(id, held)| {
            held.going = true;
            *id
        })
        .collect()
    }

    /// Forgets a segment. Its entries can no longer be asked for.
    pub(crate) fn remove_segment(&mut self, id: u64) -> Option<Held> {
        let Some(held) = self.held.remove(&id) else { return self.cold.remove(&id) };
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
