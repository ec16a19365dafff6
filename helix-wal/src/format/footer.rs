//! Bytes of a sealed segment's footer: two tables, the directory of streams, and the trailer.
//!
//! ```text
//! page (4096)  = crc u32 (over 4..4096), magic u32, segment u64, page u32, rows u32, rows…
//! index table  = rows of 32: index u64, term u64, offset u32, frame_len u32, stream row u32, 0
//! stream table = rows of 40: index u64, first u64, time u64, count u32, offset u32,
//!                frame_len u32, 0
//! directory    = rows of 48: stream u64, first u64, next u64, bytes u64, last_time u64,
//!                            entries u32, first row in the stream table u32
//! trailer      = the file's last block
//! ```
//!
//! The tables follow each other and end right before the trailer. The index table is sorted by
//! index. The stream table and the directory are sorted by stream and position. Gaps in the index
//! are allowed. A stream has one share (a row of the directory) for each run of positions without a
//! gap. A cold segment keeps the shares of the segments that it was made from.
#![deny(clippy::indexing_slicing, clippy::cast_possible_truncation)]

use crate::format::frame::{Context, parse_context};
use crate::format::layout::{BLOCK_BYTES, FORMAT_VERSION, NUMBERS_END, u16_at, u32_at, u64_at};
use crate::storage::BLOCK;
use crate::types::{LogId, Placement};

const PAGE_HEADER: usize = 24;
const PAGE_MAGIC: u32 = u32::from_le_bytes(*b"HLXP");
const TRAILER_MAGIC: [u8; 8] = *b"HLXTRAIL";
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

/// An entry of a segment that is being sealed. Sorted by index.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SealedEntry {
    pub id: LogId,
    pub offset: u32,
    pub frame_len: u32,
    pub placement: Option<Placement>,
    /// Begins a new share even if it follows the previous entry.
    pub begins_share: bool,
    /// Continues the share of the previous entry even after a gap, which cleaning left.
    pub spans_gap: bool,
}

/// A footer to be written.
///
/// The pages go to `trailer.footer_start`. The trailer's block is written after they are synced.
pub(crate) struct Footer {
    pub pages: Vec<u8>,
    pub trailer_block: [u8; BLOCK],
    pub trailer: Trailer,
    pub directory: Vec<DirectoryRow>,
}

/// End of a segment's groups, and the other fields of its trailer.
pub(crate) struct SegmentEnd {
    pub segment: u64,
    pub identity_crc: u32,
    pub file_len: u64,
    pub data_end: u64,
    pub gathered: bool,
    pub context: Context,
}

/// Returns the rows in one page of the stream table.
pub(crate) fn placed_rows_per_page() -> u32 {
    u32::try_from(PlacedRow::PER_PAGE).unwrap_or(u32::MAX)
}

/// Returns the maximum bytes of the footer of a segment with `entries` entries, with the trailer.
pub(crate) fn footer_bytes_max(entries: u64) -> u64 {
    let pages = |per_page: usize| entries.div_ceil(per_page as u64);
    let pages =
        pages(IndexRow::PER_PAGE) + pages(PlacedRow::PER_PAGE) + pages(DirectoryRow::PER_PAGE);
    (pages + 1) * BLOCK_BYTES
}

/// Builds the footer. `None` if it does not fit, which the writer's reserve rules out.
pub(crate) fn build(entries: &[SealedEntry], end: SegmentEnd) -> Option<Footer> {
    let (placed, directory) = by_stream(entries)?;
    let mut stream_rows = vec![None; entries.len()];
    let mut placed_rows = Vec::with_capacity(placed.len());
    for (row, at) in placed.iter().enumerate() {
        *stream_rows.get_mut(*at)? = Some(u32::try_from(row).ok()?);
        let entry = entries.get(*at)?;
        let placement = entry.placement?;
        placed_rows.push(PlacedRow {
            index: entry.id.index,
            first: placement.first,
            time: placement.time,
            count: placement.count,
            offset: entry.offset,
            frame_len: entry.frame_len,
        });
    }
    let index_rows: Vec<_> = entries
        .iter()
        .zip(stream_rows)
        .map(|(e, stream_row)| IndexRow {
            id: e.id,
            offset: e.offset,
            frame_len: e.frame_len,
            stream_row,
        })
        .collect();
    let mut pages = Vec::new();
    let index = put_table(&index_rows, end.segment, &mut pages)?;
    let streams = put_table(&placed_rows, end.segment, &mut pages)?;
    let directory_start = pages.len();
    let table = put_table(&directory, end.segment, &mut pages)?;
    let trailer = Trailer {
        segment: end.segment,
        identity_crc: end.identity_crc,
        entries: entries.first().zip(entries.last()).map(|(a, b)| (a.id.index, b.id)),
        data_end: end.data_end,
        frame_bytes: entries.iter().map(|e| u64::from(e.frame_len)).sum(),
        footer_start: end.file_len.checked_sub(pages.len() as u64 + BLOCK_BYTES)?,
        index,
        streams,
        directory: table,
        directory_crc: crc32fast::hash(pages.get(directory_start..)?),
        gathered: end.gathered,
        context: end.context,
    };
    if trailer.footer_start < trailer.data_end {
        return None;
    }
    Some(Footer { pages, trailer_block: trailer.encode(), trailer, directory })
}

/// Sorts the placed entries (as indexes into `entries`) by stream and position, and forms the
/// shares.
fn by_stream(entries: &[SealedEntry]) -> Option<(Vec<usize>, Vec<DirectoryRow>)> {
    let key = |at: &usize| entries.get(*at).and_then(|e| e.placement).map(|p| (p.stream, p.first));
    let mut placed: Vec<usize> = (0..entries.len()).filter(|at| key(at).is_some()).collect();
    placed.sort_by_key(key);
    let mut directory: Vec<DirectoryRow> = Vec::new();
    for (row, at) in placed.iter().enumerate() {
        let entry = entries.get(*at)?;
        let placement = entry.placement?;
        let follows = |last: &DirectoryRow| {
            let is_next =
                last.next == placement.first || entry.spans_gap && last.next < placement.first;
            last.stream == placement.stream && is_next && !entry.begins_share
        };
        if !directory.last().is_some_and(follows) {
            directory.push(DirectoryRow {
                stream: placement.stream,
                first: placement.first,
                next: placement.first,
                bytes: 0,
                last_time: 0,
                entries: 0,
                begin: u32::try_from(row).ok()?,
            });
        }
        let share = directory.last_mut()?;
        share.next = placement.first + u64::from(placement.count);
        share.bytes += u64::from(entry.frame_len);
        share.last_time = placement.time;
        share.entries += 1;
    }
    Some((placed, directory))
}

fn put_table<R: FooterRow>(rows: &[R], segment: u64, pages: &mut Vec<u8>) -> Option<FooterTable> {
    let first = u32::try_from(pages.len() / BLOCK).ok()?;
    let mut page = Vec::with_capacity(BLOCK);
    for (number, rows) in (first..).zip(rows.chunks(R::PER_PAGE)) {
        page.clear();
        page.extend_from_slice(&PAGE_MAGIC.to_le_bytes());
        page.extend_from_slice(&segment.to_le_bytes());
        page.extend_from_slice(&number.to_le_bytes());
        page.extend_from_slice(&u32::try_from(rows.len()).ok()?.to_le_bytes());
        for row in rows {
            row.encode(&mut page);
        }
        page.resize(BLOCK - 4, 0);
        pages.extend_from_slice(&crc32fast::hash(&page).to_le_bytes());
        pages.extend_from_slice(&page);
    }
    Some(FooterTable {
        page: first,
        pages: u32::try_from(pages.len() / BLOCK).ok()? - first,
        rows: u32::try_from(rows.len()).ok()?,
    })
}

/// Returns whether a page verifies and has this segment and number.
pub(crate) fn page_verifies(page: &[u8], segment: u64, number: u32) -> bool {
    page.len() == BLOCK
        && u32_at(page, 4) == PAGE_MAGIC
        && u64_at(page, 8) == segment
        && u32_at(page, 16) == number
        && page.get(4..).is_some_and(|covered| crc32fast::hash(covered) == u32_at(page, 0))
}

/// Returns a row of a verified page; `None` past its last row or if the row is out of range.
pub(crate) fn row_of<R: FooterRow>(page: &[u8], row: usize) -> Option<R> {
    let rows = (u32_at(page, 20) as usize).min(R::PER_PAGE);
    let start = PAGE_HEADER + row.checked_mul(R::BYTES)?;
    let row = (row < rows).then(|| page.get(start..start + R::BYTES).map(R::parse))?;
    row.filter(R::is_sound)
}

/// Parses the rows of the directory if all of its pages verify.
pub(crate) fn parse_directory(pages: &[u8], trailer: &Trailer) -> Option<Vec<DirectoryRow>> {
    if crc32fast::hash(pages) != trailer.directory_crc {
        return None;
    }
    let mut rows = Vec::new();
    for (page, number) in pages.chunks(BLOCK).zip(trailer.directory.page..) {
        if !page_verifies(page, trailer.segment, number) {
            return None;
        }
        rows.extend((0..DirectoryRow::PER_PAGE).map_while(|row| row_of::<DirectoryRow>(page, row)));
    }
    let whole = rows.len() == trailer.directory.rows as usize && is_in_order(&rows, trailer);
    whole.then_some(rows)
}

/// Returns whether the shares are sorted, do not overlap, and cover all rows of the stream table.
fn is_in_order(shares: &[DirectoryRow], trailer: &Trailer) -> bool {
    let (mut begin, mut bytes) = (0, 0u64);
    let mut before: Option<&DirectoryRow> = None;
    for share in shares {
        let follows = before.is_none_or(|before| {
            let apart = before.stream == share.stream && before.next <= share.first;
            before.stream < share.stream || apart
        });
        if !follows || share.begin != begin || share.entries == 0 || share.first == share.next {
            return false;
        }
        begin += share.entries;
        bytes = bytes.saturating_add(share.bytes);
        before = Some(share);
    }
    begin == trailer.streams.rows && bytes <= trailer.frame_bytes
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::cast_possible_truncation)]
mod tests {
    use super::*;

    fn entries(count: u64) -> Vec<SealedEntry> {
        let placement = |i: u64| {
            let place = Placement { stream: 7 - i % 3, first: i / 3 * 2, count: 2, time: 100 + i };
            (i % 5 != 4).then_some(place)
        };
        (0..count)
            .map(|i| SealedEntry {
                id: LogId { term: 2, index: 10 + i },
                offset: 4096 + 128 + i as u32 * 72,
                frame_len: 72,
                placement: placement(i),
                begins_share: false,
                spans_gap: false,
            })
            .collect()
    }

    fn end() -> SegmentEnd {
        SegmentEnd {
            segment: 3,
            identity_crc: 1,
            file_len: 1 << 20,
            data_end: 500_000,
            gathered: false,
            context: Context::default(),
        }
    }

    #[test]
    fn finds_every_entry_by_index_and_by_stream() {
        let entries = entries(1000);
        let footer = build(&entries, end()).unwrap();
        assert!(footer.pages.len() as u64 + BLOCK_BYTES <= footer_bytes_max(1000));
        let trailer = Trailer::parse(&footer.trailer_block, 3, 1 << 20).unwrap();
        assert_eq!(trailer, footer.trailer);
        assert_eq!(trailer.entries, Some((10, LogId { term: 2, index: 1009 })));
        let page = |table: FooterTable, row: usize, per: usize| {
            let at = (table.page as usize + row / per) * BLOCK;
            assert!(page_verifies(&footer.pages[at..at + BLOCK], 3, (at / BLOCK) as u32));
            &footer.pages[at..at + BLOCK]
        };
        for (i, entry) in entries.iter().enumerate() {
            let per = IndexRow::PER_PAGE;
            let row: IndexRow = row_of(page(trailer.index, i, per), i % per).unwrap();
            assert_eq!(row.id, entry.id);
            assert_eq!(row.stream_row.is_some(), entry.placement.is_some());
            if let (Some(at), Some(placement)) = (row.stream_row, entry.placement) {
                let per = PlacedRow::PER_PAGE;
                let at = at as usize;
                let row: PlacedRow = row_of(page(trailer.streams, at, per), at % per).unwrap();
                assert_eq!((row.index, row.first), (entry.id.index, placement.first));
                let holds = |d: &&DirectoryRow| {
                    d.stream == placement.stream && (d.first..d.next).contains(&placement.first)
                };
                let share = footer.directory.iter().find(holds).unwrap();
                let rows = share.begin as usize..(share.begin + share.entries) as usize;
                assert!(rows.contains(&at));
            }
        }
        let start = trailer.directory.page as usize * BLOCK;
        let directory = parse_directory(&footer.pages[start..], &trailer).unwrap();
        assert_eq!(directory, footer.directory);
    }

    #[test]
    fn share_ends_at_gap_or_forced_start() {
        let entry = |i: u64, first, begins_share| SealedEntry {
            id: LogId { term: 1, index: i },
            offset: 4096 + i as u32 * 72,
            frame_len: 72,
            placement: Some(Placement { stream: 5, first, count: 2, time: i }),
            begins_share,
            spans_gap: false,
        };
        let entries = [
            entry(0, 0, false),
            entry(1, 2, false),
            entry(2, 8, false),
            entry(3, 10, true),
            entry(4, 12, false),
        ];
        let footer = build(&entries, end()).unwrap();
        let shares: Vec<_> =
            footer.directory.iter().map(|d| (d.first, d.next, d.begin, d.entries)).collect();
        assert_eq!(shares, [(0, 4, 0, 2), (8, 10, 2, 1), (10, 14, 3, 2)]);
        assert_eq!(footer.directory.iter().map(|d| d.bytes).sum::<u64>(), 5 * 72);
        let cleaned = entries.map(|entry| SealedEntry { spans_gap: true, ..entry });
        let footer = build(&cleaned, end()).unwrap();
        let shares: Vec<_> =
            footer.directory.iter().map(|d| (d.first, d.next, d.begin, d.entries)).collect();
        assert_eq!(shares, [(0, 10, 0, 3), (10, 14, 3, 2)]);
        let directory_page = footer.trailer.directory.page as usize * BLOCK;
        let parsed = parse_directory(&footer.pages[directory_page..], &footer.trailer);
        assert_eq!(parsed, Some(footer.directory));
    }

    #[test]
    fn detects_damage_to_trailer_and_pages() {
        let footer = build(&entries(300), end()).unwrap();
        for bit in (0..BLOCK * 8).step_by(37) {
            let mut block = footer.trailer_block;
            block[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Trailer::parse(&block, 3, 1 << 20), None, "bit {bit}");
            let mut page = footer.pages[..BLOCK].to_vec();
            page[bit / 8] ^= 1 << (bit % 8);
            assert!(!page_verifies(&page, 3, 0), "bit {bit}");
        }
        assert_eq!(Trailer::parse(&footer.trailer_block, 4, 1 << 20), None);
        assert_eq!(Trailer::parse(&footer.trailer_block, 3, 2 << 20), None);
    }

    #[test]
    fn rejects_trailer_with_misplaced_tables() {
        let footer = build(&entries(300), end()).unwrap();
        let forged = |change: fn(&mut Trailer)| {
            let mut trailer = footer.trailer.clone();
            change(&mut trailer);
            Trailer::parse(&trailer.encode(), 3, 1 << 20)
        };
        assert_eq!(forged(|_| {}).as_ref(), Some(&footer.trailer));
        assert_eq!(forged(|it| it.index.page = u32::MAX), None);
        assert_eq!(forged(|it| it.streams.page += 1), None);
        assert_eq!(forged(|it| it.directory.page -= 1), None);
    }

    #[test]
    fn empty_footer_is_only_a_trailer() {
        let footer = build(&[], end()).unwrap();
        assert!(footer.pages.is_empty());
        let trailer = Trailer::parse(&footer.trailer_block, 3, 1 << 20).unwrap();
        assert_eq!(trailer.entries, None);
        assert_eq!(parse_directory(&[], &trailer), Some(Vec::new()));
    }
}
