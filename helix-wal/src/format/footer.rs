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

use super::footer_row::PAGE_HEADER;
pub(crate) use super::footer_row::{DirectoryRow, FooterRow, IndexRow, PlacedRow};
pub(crate) use super::trailer::{FooterTable, Trailer};
use crate::format::frame::Context;
use crate::format::layout::{BLOCK_BYTES, u32_at, u64_at};
use crate::storage::BLOCK;
use crate::types::{LogId, Placement};

const PAGE_MAGIC: u32 = u32::from_le_bytes(*b"HLXP");

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
