//! The log by stream: which entries hold which positions, in memory by entry and on disk by
//! segment.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::footer::DirectoryRow;
use crate::log::Log;
use crate::segment::Segment;
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

/// A stream's share of one segment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub row: StreamRow,
    /// Rows in the segment's table by stream, once it is sealed.
    pub begin: u32,
    pub entries: u32,
}

/// Invariants: `refs` and `rows` stand by position; `refs` are the newest entries, those of every
/// unsealed segment among them; a row is made of entries that are placed and written.
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
    pub(crate) fn sealed_row(&self, position: u64) -> Option<&Row> {
        let row = self.rows.get(self.rows.partition_point(|row| row.row.next <= position))?;
        let memory = self.refs.front().map_or(u64::MAX, |r| r.first);
        (row.row.sealed && position.max(row.row.first) < memory).then_some(row)
    }

    /// Forgets the reference to an entry that lost its slot.
    pub(crate) fn forget(&mut self, index: u64) {
        if self.refs.front().is_some_and(|r| r.index == index) {
            self.refs.pop_front();
        }
    }

    fn row_of(&mut self, segment: u64) -> Option<&mut Row> {
        let at = self.rows.binary_search_by_key(&segment, |row| row.row.segment).ok()?;
        self.rows.get_mut(at)
    }

    pub(crate) fn on_sealed(&mut self, segment: u64, share: &DirectoryRow) {
        if let Some(row) = self.row_of(segment) {
            row.row.sealed = true;
            row.begin = share.begin;
            row.entries = share.entries;
        }
    }

    pub(crate) fn mark_sealed(&mut self, segment: u64) {
        if let Some(row) = self.row_of(segment) {
            row.row.sealed = true;
        }
    }

    pub(crate) fn restore_row(&mut self, segment: u64, share: &DirectoryRow) {
        let row = StreamRow {
            segment,
            sealed: true,
            first: share.first,
            next: share.next,
            bytes: share.bytes,
            last_time: share.last_time,
        };
        self.rows.push_back(Row { row, begin: share.begin, entries: share.entries });
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
        let before = row.checked_sub(1).and_then(|row| stream.rows.get(row));
        let after = before.map_or(0, |row| row.row.segment);
        let until = stream.rows.get(row).map_or(u64::MAX, |row| row.row.segment);
        let may_hold = |segment: &&Arc<Segment>| after < segment.id && segment.id < until;
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
        if let Some(Row { row, .. }) = stream.rows.back_mut()
            && row.segment == segment
        {
            row.next = next;
            row.bytes += u64::from(frame_len);
            row.last_time = p.time;
            return;
        }
        let bytes = u64::from(frame_len);
        let row =
            StreamRow { segment, sealed: false, first: p.first, next, bytes, last_time: p.time };
        stream.rows.push_back(Row { row, begin: 0, entries: 0 });
        if let Some(held) = self.held.get_mut(&segment) {
            held.streams.push(p.stream);
            held.live_rows += 1;
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

    fn drop_trimmed(&mut self, id: u64) -> bool {
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
        let freed = self.drop_trimmed_rows(id);
        if self.is_memory() {
            self.pop_slots(0);
            self.drop_empty_memory_segments();
        }
        freed
    }

    /// Drops a stream's rows that are wholly trimmed. Whether a segment lost its last one.
    pub(crate) fn drop_trimmed_rows(&mut self, id: u64) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        let mut freed = false;
        while let Some(front) = stream.rows.front() {
            // A row that may still grow stays, unless the whole stream goes.
            let gone = stream.dropped || (front.row.sealed && front.row.next <= stream.trim);
            if !gone {
                break;
            }
            if let Some(held) = self.held.get_mut(&front.row.segment) {
                held.live_rows = held.live_rows.saturating_sub(1);
                freed |= held.live_rows == 0;
            }
            stream.rows.pop_front();
        }
        freed
    }
}
