//! The streams of the log in memory: which entries and segments hold which positions.

use std::sync::Arc;

use crate::error::Error;
use crate::files::segment::Segment;
use crate::format::footer::{DirectoryRow, Trailer};
use crate::format::layout::segment_name;
use crate::memory::live_segment::LiveSegment;
use crate::memory::log::Log;
use crate::memory::slot::Slot;
use crate::memory::stream::{EntryRef, Stream, StreamShare};
use crate::types::{Placement, StreamRow};

impl Log {
    /// Finds a quarantined segment that may hold positions of a stream between `from` and `first`.
    ///
    /// `row` is the first share of the stream that may hold `from`. `first` is the first position
    /// of that share or of the entry in memory.
    pub(crate) fn quarantined_before(
        &self,
        stream: &Stream,
        from: u64,
        row: usize,
        first: Option<u64>,
    ) -> Option<&Error> {
        if self.quarantined.is_empty() || first.is_some_and(|first| first <= from) {
            return None;
        }
        // Positions of a stream grow with the index. The indexes of the shares on both sides
        // therefore limit what the quarantined segment can hold.
        let entries = |row: Option<&StreamShare>| self.segment(row?.row.segment)?.entries;
        let before = entries(row.checked_sub(1).and_then(|row| stream.rows.get(row)));
        let after = entries(stream.rows.get(row));
        let may_hold = |segment: &&Arc<Segment>| {
            let entries = self.segment(segment.id).and_then(|held| held.entries);
            entries.is_some_and(|(first, last)| {
                before.is_none_or(|(before, _)| before <= last.index)
                    && after.is_none_or(|(_, after)| first <= after.index)
            })
        };
        self.quarantined.iter().find(may_hold)?.quarantined()
    }

    /// Checks that a placement follows the last position of the stream.
    pub(crate) fn check_placement(&self, index: u64, p: &Placement) -> Result<(), Error> {
        let refused = |what: &str| {
            let Placement { stream, first, .. } = p;
            Err(Error::Unusable(format!("entry {index} at {first} of stream {stream}: {what}")))
        };
        if p.first.checked_add(u64::from(p.count)).is_none() {
            return refused("positions out of range");
        }
        let Some(stream) = self.streams.get(&p.stream).filter(|s| !s.dropped) else {
            return Ok(());
        };
        if p.first < stream.next() {
            refused("below the next position of the stream")
        } else {
            Ok(())
        }
    }

    /// Makes a placed entry readable by position.
    pub(crate) fn add_entry_ref(&mut self, index: u64, p: Placement) {
        let stream = self.streams.entry(p.stream).or_default();
        if !stream.is_trimmed(&p) {
            let Placement { first, count, time, .. } = p;
            stream.refs.push_back(EntryRef { index, first, count, time });
        }
    }

    /// Adds an entry that is placed and written to its segment's share of the stream.
    pub(crate) fn add_to_share(&mut self, segment: u64, p: Placement, frame_len: u32) {
        let stream = self.streams.entry(p.stream).or_default();
        if stream.dropped {
            return;
        }
        let next = p.first + u64::from(p.count);
        let bytes = u64::from(frame_len);
        let at = stream.row_at(p.first);
        let before = at.checked_sub(1).and_then(|before| stream.rows.get_mut(before));
        // A share has no gap, as in the footer.
        let grows = before.filter(|b| b.row.segment == segment && b.row.next == p.first);
        let is_new = grows.is_none();
        if let Some(StreamShare { row, entries, live_bytes, .. }) = grows {
            row.next = next;
            row.bytes += bytes;
            row.last_time = p.time;
            *entries += 1;
            *live_bytes += bytes;
        } else {
            let (first, last_time) = (p.first, p.time);
            let row = StreamRow { segment, sealed: false, first, next, bytes, last_time };
            stream.rows.insert(at, StreamShare { row, begin: 0, entries: 1, live_bytes: bytes });
        }
        if let Some(held) = self.chain.get_mut(&segment) {
            held.live_bytes += bytes;
            held.live_entries += 1;
            if is_new {
                held.streams.push(p.stream);
                held.live_rows += 1;
            }
        }
    }

    /// Checks that every position occurs once in the sorted shares and in the entries to be added.
    pub(crate) fn check_positions(&self, slots: &[Slot]) -> Result<(), Error> {
        let twice = |segment: u64, stream: u64, position: u64| {
            let what = format!("position {position} of stream {stream} occurs twice");
            let held = self.segment(segment).and_then(|held| held.segment.as_ref());
            let file = held.map_or_else(|| segment_name(segment), |segment| segment.name());
            Err(Error::Damaged { file, bytes: 0..0, what })
        };
        for (id, stream) in &self.streams {
            let mut pairs = stream.rows.iter().zip(stream.rows.iter().skip(1));
            if let Some((_, later)) = pairs.find(|(row, later)| later.row.first < row.row.next) {
                return twice(later.row.segment, *id, later.row.first);
            }
        }
        let placed = slots.iter().filter_map(|slot| Some((slot.place.placement()?, slot.segment)));
        let range = |(p, segment): (Placement, u64)| {
            (p.stream, p.first, p.first + u64::from(p.count), segment)
        };
        let mut placed: Vec<(u64, u64, u64, u64)> = placed.map(range).collect();
        placed.sort_unstable();
        let mut before = None;
        for (id, first, next, segment) in placed {
            let row = self.streams.get(&id).and_then(|stream| {
                stream.rows.get(stream.rows.partition_point(|row| row.row.next <= first))
            });
            let meets = row.is_some_and(|row| row.row.first < next);
            if meets || before.is_some_and(|(stream, end)| stream == id && first < end) {
                return twice(segment, id, first);
            }
            before = Some((id, next));
        }
        Ok(())
    }

    /// Sorts the shares of all streams, after segments were added out of order.
    pub(crate) fn sort_rows(&mut self) {
        for stream in self.streams.values_mut() {
            stream.rows.make_contiguous().sort_unstable_by_key(|row| row.row.first);
        }
    }

    /// Trims positions below `position`. Returns whether a segment may have become free.
    pub(crate) fn trim(&mut self, stream: u64, position: u64) -> bool {
        let entry = self.streams.entry(stream).or_default();
        if position <= entry.trim {
            return false;
        }
        entry.trim = position;
        self.drop_trimmed(stream)
    }

    pub(crate) fn drop_stream(&mut self, stream: u64) -> bool {
        let entry = self.streams.entry(stream).or_default();
        entry.dropped = true;
        self.drop_trimmed(stream)
    }

    pub(crate) fn drop_trimmed(&mut self, id: u64) -> bool {
        while let Some(stream) = self.streams.get_mut(&id)
            && let Some(front) = stream.refs.front()
            && (stream.dropped || front.next() <= stream.trim)
        {
            let index = front.index;
            stream.refs.pop_front();
            if self.is_memory() {
                self.drop_dead_payload(index);
            }
        }
        let mut freed = self.drop_trimmed_rows(id);
        freed |= self.count_trimmed(id);
        if self.is_memory() {
            self.pop_slots(0);
            self.drop_empty_memory_segments();
        }
        freed
    }

    /// Removes the trimmed shares of a stream. Returns whether a sealed segment lost a share.
    pub(crate) fn drop_trimmed_rows(&mut self, id: u64) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        let (mut freed, mut at) = (false, 0);
        while let Some(front) = stream.rows.get(at) {
            if !stream.dropped && front.row.next > stream.trim {
                break;
            }
            // A share that may still grow stays, unless the stream is dropped.
            if !stream.dropped && !front.row.sealed {
                at += 1;
                continue;
            }
            let held = self.chain.get_mut(&front.row.segment);
            if let Some(held) = held.or_else(|| self.cold.get_mut(&front.row.segment)) {
                held.live_rows = held.live_rows.saturating_sub(1);
                held.live_bytes = held.live_bytes.saturating_sub(front.live_bytes);
                held.live_entries = held.live_entries.saturating_sub(u64::from(front.entries));
                freed |= held.sealed;
            }
            stream.rows.remove(at);
        }
        freed
    }

    /// Subtracts the trimmed part of a share from its live bytes.
    ///
    /// Returns whether that changed a sealed segment.
    pub(crate) fn count_trimmed(&mut self, id: u64) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        let trim = stream.trim;
        let at = stream.rows.partition_point(|row| row.row.next <= trim);
        let Some(front) = stream.rows.get_mut(at).filter(|front| front.row.sealed) else {
            return false;
        };
        let live_bytes = front.live_bytes_above(trim).min(front.live_bytes);
        let gone = front.live_bytes - live_bytes;
        front.live_bytes = live_bytes;
        let segment = front.row.segment;
        if let Some(held) = self.segment_mut(segment).filter(|_| gone > 0) {
            held.live_bytes = held.live_bytes.saturating_sub(gone);
            return true;
        }
        false
    }
    /// Returns the position below which a stream needs nothing.
    pub(crate) fn trim_of(&self, stream: u64) -> u64 {
        let stream = self.streams.get(&stream);
        stream.map_or(0, |stream| if stream.dropped { u64::MAX } else { stream.trim })
    }

    /// Adds a cold segment whose entries are new to this log.
    pub(crate) fn insert_cold(
        &mut self,
        segment: Arc<Segment>,
        trailer: &Trailer,
        directory: &[DirectoryRow],
    ) {
        let id = segment.id;
        self.cold.insert(id, LiveSegment::cold(segment, trailer, directory));
        for share in directory {
            let stream = self.streams.entry(share.stream).or_default();
            stream.insert_row(StreamShare::sealed(id, share));
        }
        // Trims and drops may have arrived before the entries.
        for share in directory {
            self.drop_trimmed(share.stream);
        }
    }

    /// Replaces a share, or the first part of it, by the share of a new segment made from it.
    ///
    /// Does nothing if the share was trimmed meanwhile.
    pub(crate) fn move_row(
        &mut self,
        segment: u64,
        share: &DirectoryRow,
        is_old: impl Fn(u64) -> bool,
    ) {
        let Some(stream) = self.streams.get_mut(&share.stream) else { return };
        let Some((old, is_moved)) = stream.replace(segment, share, is_old) else { return };
        if let Some(held) = self.segment_mut(old) {
            held.live_rows = held.live_rows.saturating_sub(usize::from(is_moved));
            held.live_bytes = held.live_bytes.saturating_sub(share.bytes);
        }
        if let Some(held) = self.cold.get_mut(&segment) {
            held.live_rows += 1;
            held.live_bytes += share.bytes;
            held.live_entries += u64::from(share.entries);
        }
        // The share may have been trimmed while it was written. It would count as live until the
        // next trim, and remain when its new segment is compacted in turn.
        self.drop_trimmed_rows(share.stream);
    }

    /// Removes the shares of a cleaned stream in replaced segments, whose entries all went away.
    pub(crate) fn remove_replaced(&mut self, stream: u64, is_old: impl Fn(u64) -> bool) {
        let Some(held) = self.streams.get_mut(&stream) else { return };
        let is_gone = |share: &StreamShare| is_old(share.row.segment);
        let gone: Vec<u64> = held
            .rows
            .iter()
            .filter(|share| is_gone(share))
            .map(|share| share.row.segment)
            .collect();
        held.rows.retain(|share| !is_gone(share));
        for segment in gone {
            if let Some(held) = self.segment_mut(segment) {
                held.live_rows = held.live_rows.saturating_sub(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_trimmed_during_compaction_is_not_live() {
        let share = |first: u64, next: u64| DirectoryRow {
            stream: 7,
            first,
            next,
            bytes: next - first,
            last_time: 0,
            entries: 1,
            begin: 0,
        };
        let mut log = Log::new(false, 0);
        let sealed = |live_rows| LiveSegment { sealed: true, live_rows, ..LiveSegment::new(None) };
        log.chain.insert(1, sealed(1));
        log.cold.insert(2, sealed(0));
        log.cold.insert(3, sealed(0));
        let stream = log.streams.entry(7).or_default();
        stream.rows.push_back(StreamShare::sealed(1, &share(0, 30)));
        stream.trim = 20;
        // The new segments meet in the middle of it.
        log.move_row(2, &share(0, 12), |id| id == 1);
        log.move_row(3, &share(19, 30), |id| id == 1);
        let rows: Vec<u64> = log.streams[&7].rows.iter().map(|row| row.row.segment).collect();
        assert_eq!(rows, [3]);
        let live = |held: Option<&LiveSegment>| held.map(|held| held.live_rows);
        assert_eq!(live(log.chain.get(&1)), Some(0));
        assert_eq!([live(log.cold.get(&2)), live(log.cold.get(&3))], [Some(0), Some(1)]);
    }
}
