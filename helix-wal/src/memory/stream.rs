//! A stream: its positions in memory by entry, and on disk by segment.

use std::collections::VecDeque;
use std::ops::Range;

use crate::format::footer::DirectoryRow;
use crate::types::{Placement, StreamRow};

/// Reference to a placed entry that has a slot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EntryRef {
    pub index: u64,
    pub first: u64,
    pub count: u32,
    pub time: u64,
}

impl EntryRef {
    pub(crate) fn next(&self) -> u64 {
        self.first + u64::from(self.count)
    }
}

/// A stream's share of a segment: a range of positions, with gaps only where cleaning removed
/// entries. A segment may hold several of them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StreamShare {
    pub row: StreamRow,
    /// First row in the segment's stream table, once it is sealed.
    pub begin: u32,
    pub entries: u32,
    /// Live bytes, without the trimmed part as estimated from its positions.
    pub live_bytes: u64,
}

impl StreamShare {
    /// Estimates the bytes above a trim, as if the bytes were spread evenly.
    ///
    /// A share with one entry is live as a whole.
    pub(crate) fn live_bytes_above(&self, trim: u64) -> u64 {
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

/// The positions of a stream. Invariants:
///
/// - `refs` and `rows` are sorted by position and do not overlap.
/// - Every entry of an unsealed segment is in `refs`. A position that is missing in `refs`,
///   although a later one is present, is in a sealed row, or cleaning removed its entry.
/// - A row consists of entries that are placed and written. While a cleaned segment is replaced, a
///   row of it may still have removed entries.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    pub refs: VecDeque<EntryRef>,
    pub rows: VecDeque<StreamShare>,
    /// Positions below are no longer needed.
    pub trim: u64,
    pub dropped: bool,
}

impl Stream {
    /// Returns the position after the last one.
    pub(crate) fn next(&self) -> u64 {
        let rows = self.rows.back().map_or(0, |row| row.row.next);
        self.refs.back().map_or(rows, |r| r.next().max(rows))
    }

    /// Returns the first position present.
    pub(crate) fn first(&self) -> Option<u64> {
        let rows = self.rows.front().map(|row| row.row.first);
        rows.into_iter().chain(self.refs.front().map(|r| r.first)).min()
    }

    pub(crate) fn is_trimmed(&self, placement: &Placement) -> bool {
        self.dropped || placement.first + u64::from(placement.count) <= self.trim
    }

    /// Returns the number of the first row that ends after `position`, and the first position
    /// present from there on, on disk or in memory.
    pub(crate) fn from(&self, position: u64) -> (usize, Option<u64>) {
        let at = self.rows.partition_point(|row| row.row.next <= position);
        let row = self.rows.get(at).map(|row| row.row.first);
        let r = self.refs.get(self.refs.partition_point(|r| r.next() <= position));
        (at, row.into_iter().chain(r.map(|r| r.first)).min())
    }

    /// Returns the sealed row to read `position` from, unless the entry is in memory.
    pub(crate) fn sealed_row(&self, position: u64) -> Option<usize> {
        let at = self.rows.partition_point(|row| row.row.next <= position);
        let row = self.rows.get(at)?;
        let r = self.refs.get(self.refs.partition_point(|r| r.next() <= position));
        let memory = r.map_or(u64::MAX, |r| r.first);
        (row.row.sealed && position.max(row.row.first) < memory).then_some(at)
    }

    /// Returns whether a row begins within a range of positions.
    pub(crate) fn has_row_in(&self, range: Range<u64>) -> bool {
        let at = self.rows.partition_point(|row| row.row.first < range.start);
        self.rows.get(at).is_some_and(|row| row.row.first < range.end)
    }

    /// Returns the index in `rows` of a row that begins at `first`, or its insertion point.
    pub(crate) fn row_at(&self, first: u64) -> usize {
        match self.rows.back() {
            // The usual case: the newest row.
            Some(back) if back.row.first < first => self.rows.len(),
            _ => self.rows.partition_point(|row| row.row.first < first),
        }
    }

    /// Returns the row of a segment that holds a position.
    pub(crate) fn row_of(&self, segment: u64, position: u64) -> Option<&StreamShare> {
        let at = self.rows.partition_point(|row| row.row.next <= position);
        self.rows.get(at).filter(|row| row.row.segment == segment && row.row.first <= position)
    }

    /// Removes the reference to an entry that lost its slot.
    pub(crate) fn forget(&mut self, index: u64) {
        if self.refs.front().is_some_and(|r| r.index == index) {
            self.refs.pop_front();
        }
    }

    pub(crate) fn insert_row(&mut self, row: StreamShare) {
        let at = self.row_at(row.row.first);
        self.rows.insert(at, row);
    }

    /// Replaces an old row, or the first part of it, by the share of a new segment made from it.
    ///
    /// Returns the old segment, and whether the whole row was replaced.
    pub(crate) fn replace(
        &mut self,
        segment: u64,
        share: &DirectoryRow,
        is_old: impl Fn(u64) -> bool,
    ) -> Option<(u64, bool)> {
        let at = self.rows.partition_point(|row| row.row.next <= share.first);
        let is_source =
            |row: &&mut StreamShare| is_old(row.row.segment) && row.row.first <= share.first;
        let row = self.rows.get_mut(at).filter(is_source)?;
        let old = row.row.segment;
        if share.next >= row.row.next {
            *row = StreamShare::sealed(segment, share);
            return Some((old, true));
        }
        // The remaining row keeps its table rows. Lookups begin at its first position, so they
        // no longer find the moved ones there.
        row.row.first = share.next;
        row.row.bytes = row.row.bytes.saturating_sub(share.bytes);
        row.live_bytes = row.live_bytes.saturating_sub(share.bytes);
        self.rows.insert(at, StreamShare::sealed(segment, share));
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
