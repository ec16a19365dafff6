//! Rows of the three tables in a footer, which `footer.rs` lays out.
#![deny(clippy::indexing_slicing, clippy::cast_possible_truncation)]

use crate::format::layout::{NUMBERS_END, u32_at, u64_at};
use crate::storage::BLOCK;
use crate::types::LogId;

/// Bytes of a page before its rows.
pub(crate) const PAGE_HEADER: usize = 24;
/// Stream row of an entry without positions.
const VOID: u32 = u32::MAX;

/// A row of one of the three tables.
pub(crate) trait FooterRow: Copy {
    const BYTES: usize;
    fn encode(&self, out: &mut Vec<u8>);
    fn parse(bytes: &[u8]) -> Self;
    /// Returns whether the numbers of the row are in range, so that arithmetic cannot overflow.
    fn is_sound(&self) -> bool;
    /// Rows in one page.
    const PER_PAGE: usize = (BLOCK - PAGE_HEADER) / Self::BYTES;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IndexRow {
    pub id: LogId,
    pub offset: u32,
    pub frame_len: u32,
    /// Row in the stream table; `None` for an entry without positions.
    pub stream_row: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlacedRow {
    pub index: u64,
    pub first: u64,
    pub time: u64,
    pub count: u32,
    pub offset: u32,
    pub frame_len: u32,
}

/// A stream's share of the segment: a run of consecutive entries of the stream.
///
/// A stream may have several shares. Positions between two of them are in other segments, or
/// nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DirectoryRow {
    pub stream: u64,
    pub first: u64,
    pub next: u64,
    pub bytes: u64,
    pub last_time: u64,
    pub entries: u32,
    pub begin: u32,
}

impl FooterRow for IndexRow {
    const BYTES: usize = 32;

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.id.index.to_le_bytes());
        out.extend_from_slice(&self.id.term.to_le_bytes());
        out.extend_from_slice(&self.offset.to_le_bytes());
        out.extend_from_slice(&self.frame_len.to_le_bytes());
        out.extend_from_slice(&self.stream_row.unwrap_or(VOID).to_le_bytes());
        out.extend_from_slice(&[0; 4]);
    }

    fn parse(b: &[u8]) -> Self {
        let stream_row = u32_at(b, 24);
        Self {
            id: LogId { term: u64_at(b, 8), index: u64_at(b, 0) },
            offset: u32_at(b, 16),
            frame_len: u32_at(b, 20),
            stream_row: (stream_row != VOID).then_some(stream_row),
        }
    }

    fn is_sound(&self) -> bool {
        self.id.index < NUMBERS_END
    }
}

impl FooterRow for PlacedRow {
    const BYTES: usize = 40;

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.index.to_le_bytes());
        out.extend_from_slice(&self.first.to_le_bytes());
        out.extend_from_slice(&self.time.to_le_bytes());
        out.extend_from_slice(&self.count.to_le_bytes());
        out.extend_from_slice(&self.offset.to_le_bytes());
        out.extend_from_slice(&self.frame_len.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
    }

    fn parse(b: &[u8]) -> Self {
        Self {
            index: u64_at(b, 0),
            first: u64_at(b, 8),
            time: u64_at(b, 16),
            count: u32_at(b, 24),
            offset: u32_at(b, 28),
            frame_len: u32_at(b, 32),
        }
    }

    fn is_sound(&self) -> bool {
        self.index < NUMBERS_END
            && self.first.checked_add(u64::from(self.count)).is_some_and(|next| next < NUMBERS_END)
    }
}

impl FooterRow for DirectoryRow {
    const BYTES: usize = 48;

    fn encode(&self, out: &mut Vec<u8>) {
        for number in [self.stream, self.first, self.next, self.bytes, self.last_time] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(&self.entries.to_le_bytes());
        out.extend_from_slice(&self.begin.to_le_bytes());
    }

    fn parse(b: &[u8]) -> Self {
        Self {
            stream: u64_at(b, 0),
            first: u64_at(b, 8),
            next: u64_at(b, 16),
            bytes: u64_at(b, 24),
            last_time: u64_at(b, 32),
            entries: u32_at(b, 40),
            begin: u32_at(b, 44),
        }
    }

    fn is_sound(&self) -> bool {
        self.first <= self.next
            && self.next < NUMBERS_END
            && self.begin.checked_add(self.entries).is_some()
    }
}
