//! The log by stream: which entries hold which positions, in memory by entry and on disk by
//! segment.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use crate::footer::DirectoryRow;
use crate::layout::segment_name;
use crate::log::Log;
use crate::segment::Segment;
use crate::slot::Slot;
use crate::{Error, Placement, StreamRow};

/// A placed entry that has a slot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ref {
    pub index: u64,
    pub first: u64,
    pub count: u32,
    pub time: u64,
}

impl Ref {
    pub(crate) fn next(&self) -> u64 {
        self.first + u64::from(self.count)
    }
}

/// A stream's share of one segment: positions without a gap. A segment may have several of them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub row: StreamRow,
    /// Rows in the segment's table by stream, once it is sealed.
    pub begin: u32,
    pub entries: u32,
    /// So much of it counts as live: without what a trim has cut off, as far as that can be
    /// estimated by positions.
    pub live_bytes: u64,
}

impl Row {
    /// Estimates what is left of a row above a trim, as if its bytes were spread evenly. A row of
    /// one entry is needed whole.
    fn live_bytes_above(&self, trim: u64) -> u64 {
        let StreamRow { first, next, bytes, .. } = self.row;
        if trim <= first || self.entries <= 1 {
            return bytes;
        }
        let kept = u128::from(next.saturating_sub(trim)) * u128::from(bytes);
        (kept / u128::from(next - first).max(1)) as u64
    }

    pub(crate) fn sealed(segment: u64, share: &DirectoryRow) -> Self {
        let row = StreamRow {
            segment,
            sealed: true,
            first: share.first,
            next: share.next,
            bytes: share.bytes,
            last_time: share.last_time,
        };
        Self { row, begin: share.begin, entries: share.entries, live_bytes: share.bytes }
    }
}

/// Invariants: `refs` and `rows` stand by position and do not overlap; entries of every unsealed
/// segment are among the `refs`, and where a position is in no ref although a later one is, a
/// sealed row holds it; a row is made of entries that are placed and written.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    pub refs: VecDeque<Ref>,
    pub rows: VecDeque<Row>,
    /// Positions below are not needed.
    pub trim: u64,
    pub dropped: bool,
}

impl Stream {
    /// One past the last position.
    pub(crate) fn next(&self) -> u64 {
        let rows = self.rows.back().map_or(0, |row| row.row.next);
        self.refs.back().map_or(rows, |r| r.next().max(rows))
    }

    /// First position that is there.
    pub(crate) fn first(&self) -> Option<u64> {
        let rows = self.rows.front().map(|row| row.row.first);
        rows.into_iter().chain(self.refs.front().map(|r| r.first)).min()
    }

    pub(crate) fn is_trimmed(&self, placement: &Placement) -> bool {
        self.dropped || placement.first + u64::from(placement.count) <= self.trim
    }

    /// The number of the first row that ends behind `position`, and where the positions from there
    /// on begin, on disk or in memory.
    pub(crate) fn from(&self, position: u64) -> (usize, Option<u64>) {
        let at = self.rows.partition_point(|row| row.row.next <= position);
        let row = self.rows.get(at).map(|row| row.row.first);
        let r = self.refs.get(self.refs.partition_point(|r| r.next() <= position));
        (at, row.into_iter().chain(r.map(|r| r.first)).min())
    }

    /// The sealed row to read `position` from, unless the entry is in memory.
    pub(crate) fn sealed_row(&self, position: u64) -> Option<usize> {
        let at = self.rows.partition_point(|row| row.row.next <= position);
        let row = self.rows.get(at)?;
        let r = self.refs.get(self.refs.partition_point(|r| r.next() <= position));
        let memory = r.map_or(u64::MAX, |r| r.first);
        (row.row.sealed && position.max(row.row.first) < memory).then_some(at)
    }

    /// Whether a row begins within a range of positions.
    pub(crate) fn has_row_in(&self, range: Range<u64>) -> bool {
        let at = self.rows.partition_point(|row| row.row.first < range.start);
        self.rows.get(at).is_some_and(|row| row.row.first < range.end)
    }

    /// Where a row that begins at `first` stands or belongs.
    fn row_at(&self, first: u64) -> usize {
        match self.rows.back() {
            // Nearly always: the newest one.
            Some(back) if back.row.first < first => self.rows.len(),
            _ => self.rows.partition_point(|row| row.row.first < first),
        }
    }

    /// The row of a segment that holds a position.
    pub(crate) fn row_of(&self, segment: u64, position: u64) -> Option<&Row> {
        let at = self.rows.partition_point(|row| row.row.next <= position);
        self.rows.get(at).filter(|row| row.row.segment == segment && row.row.first <= position)
    }

    /// Forgets the reference to an entry that lost its slot.
    pub(crate) fn forget(&mut self, index: u64) {
        if self.refs.front().is_some_and(|r| r.index == index) {
            self.refs.pop_front();
        }
    }

    pub(crate) fn insert_row(&mut self, row: Row) {
        let at = self.row_at(row.row.first);
        self.rows.insert(at, row);
    }

    /// Puts a share of a new segment in the place of the row of an old one that it was made from,
    /// or of the first part of that. The old segment, and whether the row is gone.
    pub(crate) fn replace(
        &mut self,
        segment: u64,
        share: &DirectoryRow,
        is_old: impl Fn(u64) -> bool,
    ) -> Option<(u64, bool)> {
        let at = self.rows.partition_point(|row| row.row.next <= share.first);
        let is_source = |row: &&mut Row| is_old(row.row.segment) && row.row.first <= share.first;
        let row = self.rows.get_mut(at).filter(is_source)?;
        let old = row.row.segment;
        if share.next >= row.row.next {
            *row = Row::sealed(segment, share);
            return Some((old, true));
        }
        // Its rows in the table stay; what was moved is never looked for there again.
        row.row.first = share.next;
        row.row.bytes = row.row.bytes.saturating_sub(share.bytes);
        row.live_bytes = row.live_bytes.saturating_sub(share.bytes);
        self.rows.insert(at, Row::sealed(segment, share));
        Some((old, false))
    }

    pub(crate) fn on_sealed(&mut self, segment: u64, share: &DirectoryRow) {
        let at = self.row_at(share.first);
        if let Some(row) = self.rows.get_mut(at).filter(|row| row.row.segment == segment) {
            row.row.sealed = true;
            row.begin = share.begin;
            row.entries = share.entries;
        }
    }

    pub(crate) fn mark_sealed(&mut self, segment: u64) {
        for row in self.rows.iter_mut().filter(|row| row.row.segment == segment) {
            row.row.sealed = true;
        }
    }
}

impl Log {
    /// A withheld segment that may hold positions of a stream, from `from` on, that come before
    /// the one that was found: `row` is the first of the stream's rows that may hold it, `first`
    /// the position where that row, or the entry in memory, begins.
    pub(crate) fn withheld_before(
        &self,
        stream: &Stream,
        from: u64,
        row: usize,
        first: Option<u64>,
    ) -> Option<&Error> {
        if self.withheld.is_empty() || first.is_some_and(|first| first <= from) {
            return None;
        }
        // A stream's positions grow with the index: by their indexes, what is in the withheld
        // segment can only be where the rows on both sides allow it.
        let entries = |row: Option<&Row>| self.segment(row?.row.segment)?.entries;
        let before = entries(row.checked_sub(1).and_then(|row| stream.rows.get(row)));
        let after = entries(stream.rows.get(row));
        let may_hold = |segment: &&Arc<Segment>| {
            let entries = self.segment(segment.id).and_then(|held| held.entries);
            entries.is_some_and(|(first, last)| {
                before.is_none_or(|(before, _)| before <= last.index)
                    && after.is_none_or(|(_, after)| first <= after.index)
            })
        };
        self.withheld.iter().find(may_hold)?.withheld()
    }

    /// Whether a placement may follow what the stream has.
    pub(crate) fn check_placement(&self, index: u64, p: &Placement) -> Result<(), Error> {
        let refused = |what: &str| {
            let Placement { stream, first, .. } = p;
            Err(Error::Unusable(format!("entry {index} at {first} of stream {stream}: {what}")))
        };
        if p.first.checked_add(u64::from(p.count)).is_none() {
            return refused("positions end before that");
        }
        let Some(stream) = self.streams.get(&p.stream).filter(|s| !s.dropped) else {
            return Ok(());
        };
        if p.first < stream.next() { refused("the stream is further on") } else { Ok(()) }
    }

    /// Makes a placed entry readable by position.
    pub(crate) fn note_ref(&mut self, index: u64, p: Placement) {
        let stream = self.streams.entry(p.stream).or_default();
        if !stream.is_trimmed(&p) {
            let Placement { first, count, time, .. } = p;
            stream.refs.push_back(Ref { index, first, count, time });
        }
    }

    /// Counts an entry that is both placed and written into its segment's share of the stream.
    pub(crate) fn note_row(&mut self, segment: u64, p: Placement, frame_len: u32) {
        let stream = self.streams.entry(p.stream).or_default();
        if stream.dropped {
            return;
        }
        let next = p.first + u64::from(p.count);
        let bytes = u64::from(frame_len);
        let at = stream.row_at(p.first);
        let before = at.checked_sub(1).and_then(|before| stream.rows.get_mut(before));
        // As in the footer to come: a row has no gap.
        let grows = before.filter(|b| b.row.segment == segment && b.row.next == p.first);
        let is_new = grows.is_none();
        if let Some(Row { row, entries, live_bytes, .. }) = grows {
            row.next = next;
            row.bytes += bytes;
            row.last_time = p.time;
            *entries += 1;
            *live_bytes += bytes;
        } else {
            let (first, last_time) = (p.first, p.time);
            let row = StreamRow { segment, sealed: false, first, next, bytes, last_time };
            stream.rows.insert(at, Row { row, begin: 0, entries: 1, live_bytes: bytes });
        }
        if let Some(held) = self.held.get_mut(&segment) {
            held.live_bytes += bytes;
            held.live_entries += 1;
            if is_new {
                held.streams.push(p.stream);
                held.live_rows += 1;
            }
        }
    }

    /// Whether every position is in one place only: in the rows of the segments, once they are in
    /// order, and in the entries that will join them.
    pub(crate) fn check_positions(&self, slots: &[Slot]) -> Result<(), Error> {
        let twice = |segment: u64, stream: u64, position: u64| {
            let what = format!("position {position} of stream {stream} is in another place, too");
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

    /// Puts the rows of all streams in order, after segments were taken in another one.
    pub(crate) fn sort_rows(&mut self) {
        for stream in self.streams.values_mut() {
            stream.rows.make_contiguous().sort_unstable_by_key(|row| row.row.first);
        }
    }

    /// Gives up positions below `position`. Whether a segment may have become free.
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

    /// Drops a stream's rows that are wholly trimmed. Whether a segment lost its last one.
    pub(crate) fn drop_trimmed_rows(&mut self, id: u64) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        let (mut freed, mut at) = (false, 0);
        while let Some(front) = stream.rows.get(at) {
            if !stream.dropped && front.row.next > stream.trim {
                break;
            }
            // A row that may still grow stays, unless the whole stream goes.
            if !stream.dropped && !front.row.sealed {
                at += 1;
                continue;
            }
            let held = self.held.get_mut(&front.row.segment);
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

    /// Counts what a trim has cut off a row as no longer live. Whether that makes
    /// a difference to a sealed segment.
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
}
