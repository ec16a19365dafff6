//! The live segments of the log in memory: rolling, sealing and freeing.

use std::ops::RangeInclusive;
use std::sync::Arc;

use crate::files::segment::Segment;
use crate::format::footer::{DirectoryRow, SealedEntry, Trailer};
use crate::format::frame::Context;
use crate::memory::live_segment::{LiveSegment, streams_in};
use crate::memory::log::Log;
use crate::memory::slot::{PlacementState, Slot};
use crate::memory::stream::StreamShare;
use crate::types::{LogId, Placement};

impl Log {
    /// Returns a live segment, of the chain or cold.
    pub(crate) fn segment(&self, id: u64) -> Option<&LiveSegment> {
        self.chain.get(&id).or_else(|| self.cold.get(&id))
    }

    pub(crate) fn segment_mut(&mut self, id: u64) -> Option<&mut LiveSegment> {
        self.chain.get_mut(&id).or_else(|| self.cold.get_mut(&id))
    }

    /// Returns the last entry of the sealed segments of the chain.
    pub(crate) fn last_sealed(&self) -> Option<LogId> {
        let id = self.sealed_by_index.values().next_back()?;
        self.chain.get(id)?.entries.map(|(_, last)| last)
    }

    /// Begins a segment; the previous one receives no more groups.
    pub(crate) fn on_rolled(&mut self, end: u64, context: Context, segment: Option<Arc<Segment>>) {
        if let Some((_, held)) = self.chain.iter_mut().next_back() {
            held.rolled = Some((end, context));
        }
        if let Some(segment) = segment {
            self.chain.insert(segment.id, LiveSegment::new(Some(segment)));
        }
    }

    /// Returns whether a segment receives no more groups.
    pub(crate) fn is_rolled(&self, segment: u64) -> bool {
        self.chain.get(&segment).is_some_and(|held| held.rolled.is_some())
    }

    /// Returns the oldest unsealed segment, if all of its entries are placed.
    pub(crate) fn sealable(&self) -> Option<u64> {
        // Segments are sealed in order, so the unsealed ones are the last.
        let (id, held) = self.chain.iter().rev().take_while(|(_, held)| !held.sealed).last()?;
        held.rolled.as_ref()?;
        let end = self.slots.partition_point(|slot| slot.segment <= *id);
        let last = end.checked_sub(1).and_then(|at| self.slots.get(at));
        last.is_none_or(|slot| slot.place != PlacementState::Unknown).then_some(*id)
    }

    /// Returns up to `max` entries of a segment, from its slot number `skip` on.
    pub(crate) fn entries_of(&self, segment: u64, skip: usize, max: usize) -> Vec<SealedEntry> {
        let start = self.slots.partition_point(|slot| slot.segment < segment) + skip;
        let end = self.slots.partition_point(|slot| slot.segment <= segment).min(start + max);
        let row = |slot: &Slot| SealedEntry {
            id: slot.id,
            offset: slot.offset,
            frame_len: slot.frame_len,
            placement: slot.place.placement(),
            begins_share: false,
            spans_gap: false,
        };
        if start >= end { Vec::new() } else { self.slots.range(start..end).map(row).collect() }
    }

    /// Returns the placements of entries up to `upto` in unsealed segments, for the state file.
    pub(crate) fn unsealed_placements(&self, upto: u64) -> Vec<(u64, Option<Placement>)> {
        let sealed = |slot: &Slot| self.chain.get(&slot.segment).is_none_or(|h| h.sealed);
        let start = self.slots.partition_point(|slot| slot.is_written() && sealed(slot));
        let end = self.slots.partition_point(|slot| slot.id.index <= upto);
        if start >= end {
            return Vec::new();
        }
        let slots = self.slots.range(start..end).filter(|slot| slot.is_written());
        slots.map(|slot| (slot.id.index, slot.place.placement())).collect()
    }

    /// Marks a segment as sealed, after its footer is durable.
    pub(crate) fn on_sealed(&mut self, id: u64, trailer: &Trailer, directory: &[DirectoryRow]) {
        let Some(held) = self.chain.get_mut(&id) else { return };
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

    /// Adds a sealed segment found at open.
    pub(crate) fn restore_sealed(
        &mut self,
        segment: Arc<Segment>,
        trailer: &Trailer,
        directory: &[DirectoryRow],
    ) {
        let id = segment.id;
        segment.set_trailer(trailer.clone());
        let mut held = LiveSegment::new(Some(segment));
        held.sealed = true;
        held.entries = trailer.entries;
        held.frame_bytes = trailer.frame_bytes;
        held.count_shares(directory);
        self.chain.insert(id, held);
        if let Some((first, _)) = trailer.entries {
            self.sealed_by_index.insert(first, id);
        }
        self.restore_rows(id, directory);
    }

    /// Adds a cold segment that the state file lists.
    ///
    /// Its entries are interleaved with those of other segments, so `sort_rows` must follow.
    pub(crate) fn restore_cold(
        &mut self,
        segment: Arc<Segment>,
        trailer: &Trailer,
        directory: &[DirectoryRow],
    ) {
        let id = segment.id;
        self.cold.insert(id, LiveSegment::cold(segment, trailer, directory));
        self.restore_rows(id, directory);
    }

    /// Adds the shares of a segment to the ends of their streams.
    fn restore_rows(&mut self, id: u64, directory: &[DirectoryRow]) {
        for share in directory {
            let rows = &mut self.streams.entry(share.stream).or_default().rows;
            rows.push_back(StreamShare::sealed(id, share));
        }
    }

    /// Adds a sealed segment with a damaged footer. It is never freed: a repair decides about it.
    pub(crate) fn restore_quarantined(&mut self, segment: Arc<Segment>, trailer: &Trailer) {
        let id = segment.id;
        self.quarantined.push(Arc::clone(&segment));
        self.restore_sealed(segment, trailer, &[]);
        if let Some(held) = self.chain.get_mut(&id) {
            held.live_rows = 1;
        }
    }

    /// Adds a cold segment with a damaged footer.
    pub(crate) fn restore_quarantined_cold(&mut self, segment: Arc<Segment>, trailer: &Trailer) {
        let id = segment.id;
        self.quarantined.push(Arc::clone(&segment));
        let mut held = LiveSegment::cold(segment, trailer, &[]);
        held.live_rows = 1;
        self.cold.insert(id, held);
    }

    /// Begins a segment of an in-memory log.
    pub(crate) fn roll_memory(&mut self, id: u64) {
        self.on_rolled(0, Context::default(), None);
        self.chain.insert(id, LiveSegment::new(None));
        self.seal_memory_segments();
    }

    /// Seals the segments of an in-memory log whose entries are all placed.
    pub(crate) fn seal_memory_segments(&mut self) {
        while let Some(id) = self.sealable() {
            self.seal_memory(id);
        }
    }

    fn seal_memory(&mut self, id: u64) {
        let Some(held) = self.chain.get_mut(&id) else { return };
        held.sealed = true;
        for stream in std::mem::take(&mut held.streams) {
            if let Some(stream) = self.streams.get_mut(&stream) {
                stream.mark_sealed(id);
            }
            self.drop_trimmed_rows(stream);
        }
    }

    /// Returns the sealed segments that neither the Raft log nor a stream needs.
    ///
    /// The next state file no longer lists them.
    pub(crate) fn take_freeable(&mut self) -> Vec<u64> {
        let upto = self.purged.min_by_index(self.checkpoint);
        let all = self.chain.iter_mut().chain(&mut self.cold);
        let free =
            all.filter(|(_, held)| held.is_purged(upto) && held.live_rows == 0 && !held.busy);
        free.map(|(id, held)| {
            held.removing = true;
            *id
        })
        .collect()
    }

    /// Removes a segment. Its entries are no longer readable.
    pub(crate) fn remove_segment(&mut self, id: u64) -> Option<LiveSegment> {
        let Some(held) = self.chain.remove(&id) else { return self.cold.remove(&id) };
        if let Some((first, _)) = held.entries {
            self.sealed_by_index.remove(&first);
        }
        Some(held)
    }

    /// Removes the sealed segments of an in-memory log that have no entries left.
    pub(crate) fn drop_empty_memory_segments(&mut self) {
        let oldest = self.slots.front().map_or(u64::MAX, |slot| slot.segment);
        while let Some(entry) = self.chain.first_entry()
            && entry.get().sealed
            && entry.get().live_rows == 0
            && *entry.key() < oldest
        {
            entry.remove();
        }
    }

    /// Estimates the bytes of frames in a range, as if all entries of a segment had the same size.
    pub(crate) fn bytes_between(&self, after: u64, upto: u64) -> u64 {
        let (mut sum, mut open) = (0, 0);
        for held in self.chain.values().chain(self.cold.values()) {
            match held.entries {
                Some((first, last)) => {
                    sum += part_of(held.frame_bytes, first..=last.index, after, upto);
                }
                None => open += held.frame_bytes,
            }
        }
        sum + part_of(open, self.open_entries(), after, upto)
    }

    /// Estimates the bytes of the live frames of streams in a range, as if the entries of a stream
    /// were spread evenly over each segment.
    pub(crate) fn bytes_of(&self, streams: &[u64], after: u64, upto: u64) -> u64 {
        let open = self.open_entries();
        let streams = streams.iter().filter_map(|stream| self.streams.get(stream));
        let bytes = streams.flat_map(|stream| &stream.rows).map(|share| {
            let entries = self.segment(share.row.segment).and_then(|held| held.entries);
            let entries = entries.map_or_else(|| open.clone(), |(first, last)| first..=last.index);
            part_of(share.live_bytes, entries, after, upto)
        });
        bytes.sum()
    }

    /// Returns the indexes of the entries in segments that are not sealed.
    fn open_entries(&self) -> RangeInclusive<u64> {
        let sealed = self.chain.values().filter_map(|held| held.entries);
        let sealed_upto = sealed.map(|(_, last)| last.index + 1).max().unwrap_or(0);
        let front = self.slots.front().map_or(0, |slot| slot.id.index);
        sealed_upto.max(front)..=self.last.map_or(0, |last| last.index)
    }
}

/// Returns the part of `bytes`, spread evenly over `entries`, with `after < index <= upto`.
fn part_of(bytes: u64, entries: RangeInclusive<u64>, after: u64, upto: u64) -> u64 {
    let (first, last) = entries.into_inner();
    let (from, to) = (first.max(after.saturating_add(1)), last.min(upto));
    let part = to.saturating_add(1).saturating_sub(from);
    let all = (last + 1).saturating_sub(first).max(1);
    u64::try_from(u128::from(bytes) * u128::from(part) / u128::from(all)).unwrap_or(bytes)
}

trait MinByIndex {
    fn min_by_index(self, other: Self) -> Option<u64>;
}

impl MinByIndex for Option<LogId> {
    fn min_by_index(self, other: Self) -> Option<u64> {
        Some(self?.index.min(other?.index))
    }
}
