//! The trailer: the last block of a sealed segment, which locates the tables of its footer.
#![deny(clippy::indexing_slicing, clippy::cast_possible_truncation)]

use super::footer_row::{DirectoryRow, FooterRow, IndexRow, PlacedRow};
use crate::format::frame::{Context, parse_context};
use crate::format::layout::{BLOCK_BYTES, FORMAT_VERSION, NUMBERS_END, u16_at, u32_at, u64_at};
use crate::storage::BLOCK;
use crate::types::LogId;

const TRAILER_MAGIC: [u8; 8] = *b"HLXTRAIL";

/// Location of a table: the number of its first page, its pages and its rows.
///
/// Pages are counted from the start of the footer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct FooterTable {
    pub page: u32,
    pub pages: u32,
    pub rows: u32,
}

/// The last block of a sealed segment.
///
/// ```text
///   0 magic [8]     8 crc u32 (over 12..4096)   12 version u16   16 segment u64
///  24 identity_crc u32   28 flags u32 (1: has entries, 2: gathered)
///  32 first index u64   40 last: term u64, index u64   56 data end u64   64 frame bytes u64
///  72 footer start u64  80 tables: index, stream, directory (page u32, pages u32, rows u32 each)
/// 116 directory_crc u32  120 context as of the end of the segment (336)
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Trailer {
    pub segment: u64,
    pub identity_crc: u32,
    /// First index and last id of the entries in the segment; `None` if it has no entries.
    pub entries: Option<(u64, LogId)>,
    /// End of the groups.
    pub data_end: u64,
    pub frame_bytes: u64,
    /// Offset of page 0.
    pub footer_start: u64,
    pub index: FooterTable,
    pub streams: FooterTable,
    pub directory: FooterTable,
    pub directory_crc: u32,
    /// Written from segments with very many streams: holds few streams, with much of each.
    pub gathered: bool,
    pub context: Context,
}

impl Trailer {
    /// Creates a trailer for a segment whose footer cannot be read.
    ///
    /// States the entries that it may hold, the end of its groups and the state of the log there.
    pub(crate) fn outline(
        segment: u64,
        entries: Option<(u64, LogId)>,
        data_end: u64,
        context: Context,
    ) -> Self {
        Self {
            segment,
            identity_crc: 0,
            entries,
            data_end,
            frame_bytes: 0,
            footer_start: 0,
            index: FooterTable::default(),
            streams: FooterTable::default(),
            directory: FooterTable::default(),
            directory_crc: 0,
            gathered: false,
            context,
        }
    }

    pub(crate) fn encode(&self) -> [u8; BLOCK] {
        let mut b = [0u8; BLOCK];
        b[0..8].copy_from_slice(&TRAILER_MAGIC);
        b[12..14].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        b[16..24].copy_from_slice(&self.segment.to_le_bytes());
        b[24..28].copy_from_slice(&self.identity_crc.to_le_bytes());
        let flags = u32::from(self.entries.is_some()) | u32::from(self.gathered) << 1;
        b[28..32].copy_from_slice(&flags.to_le_bytes());
        let (first, last) = self.entries.unwrap_or_default();
        b[32..40].copy_from_slice(&first.to_le_bytes());
        b[40..48].copy_from_slice(&last.term.to_le_bytes());
        b[48..56].copy_from_slice(&last.index.to_le_bytes());
        b[56..64].copy_from_slice(&self.data_end.to_le_bytes());
        b[64..72].copy_from_slice(&self.frame_bytes.to_le_bytes());
        b[72..80].copy_from_slice(&self.footer_start.to_le_bytes());
        let tables = [self.index, self.streams, self.directory];
        let numbers = tables.iter().flat_map(|t| [t.page, t.pages, t.rows]);
        for (out, number) in b[80..116].chunks_exact_mut(4).zip(numbers) {
            out.copy_from_slice(&number.to_le_bytes());
        }
        b[116..120].copy_from_slice(&self.directory_crc.to_le_bytes());
        b[120..456].copy_from_slice(&self.context.encode());
        let crc = crc32fast::hash(&b[12..]);
        b[8..12].copy_from_slice(&crc.to_le_bytes());
        b
    }

    /// Parses the trailer in a block if it verifies, belongs to the segment and fits the file.
    pub(crate) fn parse(bytes: &[u8], segment: u64, file_len: u64) -> Option<Self> {
        let b: &[u8; BLOCK] = bytes.first_chunk()?;
        let truthful = b[..8] == TRAILER_MAGIC
            && crc32fast::hash(&b[12..]) == u32_at(b, 8)
            && u16_at(b, 12) == FORMAT_VERSION
            && u64_at(b, 16) == segment;
        if !truthful {
            return None;
        }
        let table = |at| FooterTable {
            page: u32_at(b, at),
            pages: u32_at(b, at + 4),
            rows: u32_at(b, at + 8),
        };
        let last = LogId { term: u64_at(b, 40), index: u64_at(b, 48) };
        let trailer = Self {
            segment,
            identity_crc: u32_at(b, 24),
            entries: (u32_at(b, 28) & 1 != 0).then_some((u64_at(b, 32), last)),
            data_end: u64_at(b, 56),
            frame_bytes: u64_at(b, 64),
            footer_start: u64_at(b, 72),
            index: table(80),
            streams: table(92),
            directory: table(104),
            directory_crc: u32_at(b, 116),
            gathered: u32_at(b, 28) & 2 != 0,
            context: parse_context(&b[120..])?,
        };
        trailer.fits(file_len).then_some(trailer)
    }

    fn fits(&self, file_len: u64) -> bool {
        let tables = [self.index, self.streams, self.directory];
        let pages: u64 = tables.iter().map(|table| u64::from(table.pages)).sum();
        // The tables are adjacent, as they are written.
        let in_a_row = tables.iter().try_fold(0_u32, |next, table| {
            if table.page == next { next.checked_add(table.pages) } else { None }
        });
        let whole = |table: FooterTable, per_page: usize| {
            (table.rows as usize).div_ceil(per_page) == table.pages as usize
        };
        let entries = self.entries.map_or(0, |(first, last)| {
            let sound = first <= last.index && last.index < NUMBERS_END;
            if sound { last.index - first + 1 } else { 0 }
        });
        // Each index occurs once, and each entry occurs at most once in the stream table.
        in_a_row.is_some()
            && (entries > 0) == self.entries.is_some()
            && (self.index.rows > 0) == self.entries.is_some()
            && u64::from(self.index.rows) <= entries
            && self.streams.rows <= self.index.rows
            && self.directory.rows <= self.streams.rows
            && self.frame_bytes <= self.data_end
            && self.data_end <= self.footer_start
            && self.footer_start.is_multiple_of(BLOCK_BYTES)
            && self.footer_start.checked_add((pages + 1) * BLOCK_BYTES) == Some(file_len)
            && whole(self.index, IndexRow::PER_PAGE)
            && whole(self.streams, PlacedRow::PER_PAGE)
            && whole(self.directory, DirectoryRow::PER_PAGE)
    }
}
