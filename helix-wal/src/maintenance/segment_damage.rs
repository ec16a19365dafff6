//! Finds every damaged part of a sealed segment, and what is needed to write it again.
//!
//! The index table states the position and the length of each entry's frame. A damaged frame can
//! therefore be written again, bit by bit, from the entry of another replica. A damaged group
//! header follows from its frames and is checked against the checksum in the next group.
#![deny(clippy::indexing_slicing, clippy::cast_possible_truncation)]

use std::collections::BTreeMap;
use std::ops::Range;

use crate::error::Error;
use crate::files::aligned::Aligned;
use crate::files::segment::Segment;
use crate::format::footer::{
    DirectoryRow, FooterRow, FooterTable, IndexRow, PlacedRow, Trailer, page_verifies, row_of,
};
use crate::format::frame::{
    FIRST_GROUP, FrameHeader, FrameKind, GROUP_HEADER, GroupHeader, GroupRef, LogPosition,
    SegmentHeader,
};
use crate::format::layout::{BLOCK_BYTES, blocks};
use crate::storage::BLOCK;
use crate::types::LogId;

/// Bytes of one read.
const WINDOW_BYTES: u64 = 1 << 20;

/// A frame of a damaged group, by its offset.
#[derive(Debug, Clone, Copy)]
pub(crate) enum FoundFrame {
    /// Verified; with the checksum of its header.
    Good(u32),
    /// To be written again from this entry of the index table.
    Missing(IndexRow),
}

/// A group with a damaged part.
#[derive(Debug, Clone)]
pub(crate) struct DamagedGroup {
    pub at: u64,
    pub len: u64,
    pub frames: Vec<FoundFrame>,
    /// The header if it verifies.
    pub header: Option<GroupHeader>,
    pub predecessor: GroupRef,
    /// Range of commit points that the header may state.
    pub committed: (Option<LogId>, Option<LogId>),
    /// Checksum of the header, as the next group or the trailer states it.
    pub crc: Option<u32>,
}

/// A verified frame of an entry in the segment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EntryFrame {
    pub id: LogId,
    pub offset: u64,
    pub len: u64,
    pub stream: u64,
}

/// The damaged parts of a sealed segment.
#[derive(Debug, Clone, Default)]
pub(crate) struct DamageMap {
    pub groups: Vec<DamagedGroup>,
    /// The first block does not verify.
    pub header: bool,
    pub trailer: bool,
    /// Numbers of the damaged pages of the footer.
    pub pages: Vec<u32>,
    /// Verified pages, only if others are damaged.
    pub good_pages: BTreeMap<u32, Vec<u8>>,
    /// Frames of entries that survived, only if pages are damaged.
    pub frames: Vec<EntryFrame>,
    /// First group, for a damaged segment header.
    pub first_predecessor: GroupRef,
}

impl DamageMap {
    pub(crate) fn is_clean(&self) -> bool {
        self.groups.is_empty() && !self.header && !self.trailer && self.pages.is_empty()
    }
}

/// Reads a segment in large pieces. Bytes that cannot be read are zeroes, which never verify.
///
/// A shortage is an error, because the bytes may be good.
pub(crate) struct TolerantReader<'a> {
    segment: &'a Segment,
    start: u64,
    bytes: Aligned,
    len: u64,
}

impl<'a> TolerantReader<'a> {
    pub(crate) fn new(segment: &'a Segment) -> Self {
        Self { segment, start: 0, bytes: Aligned::default(), len: 0 }
    }

    /// Returns bytes of the file. The range must lie within the file.
    pub(crate) fn get(&mut self, at: u64, len: u64) -> Result<&[u8], Error> {
        if at < self.start || at + len > self.start + self.len {
            let start = at - at % BLOCK_BYTES;
            let end = (at + len).next_multiple_of(BLOCK_BYTES).max(start + WINDOW_BYTES);
            self.fill(start, end.min(self.segment.len))?;
        }
        let from = usize::try_from(at - self.start).unwrap_or(usize::MAX);
        let range = from..from.saturating_add(usize::try_from(len).unwrap_or(usize::MAX));
        let beyond = || self.segment.damaged(at..at + len, "lies beyond the end of the file");
        self.bytes.as_slice().get(range).ok_or_else(beyond)
    }

    fn fill(&mut self, start: u64, end: u64) -> Result<(), Error> {
        let len = end.saturating_sub(start);
        let beyond = || self.segment.damaged(start..end, "lies beyond the end of the file");
        self.bytes = Aligned::with_len(usize::try_from(len).map_err(|_| beyond())?);
        self.start = start;
        self.len = len;
        match self.segment.read_device(self.bytes.as_mut_slice(), start) {
            Ok(()) => return Ok(()),
            Err(error) if error.is_shortage() => {
                self.len = 0;
                return Err(error);
            }
            Err(_) => {}
        }
        // One bad sector fails the whole read: only its block is lost.
        for (at, block) in (start..).step_by(BLOCK).zip(self.bytes.as_mut_slice().chunks_mut(BLOCK))
        {
            match self.segment.read_device(block, at) {
                Ok(()) => {}
                Err(error) if error.is_shortage() => {
                    self.len = 0;
                    return Err(error);
                }
                Err(_) => block.fill(0),
            }
        }
        Ok(())
    }
}

/// Checks a sealed segment as a whole. `rows` are the entries of its index table.
///
/// Fails if a damaged part cannot be repaired in place.
pub(crate) fn examine(segment: &Segment, trailer: &Trailer) -> Result<DamageMap, Error> {
    let mut reader = TolerantReader::new(segment);
    let mut map = DamageMap::default();
    let block = reader.get(segment.len - BLOCK_BYTES, BLOCK_BYTES)?;
    map.trailer = Trailer::parse(block, segment.id, segment.len).as_ref() != Some(trailer);
    let used = [trailer.index, trailer.streams, trailer.directory];
    let used = used.iter().map(|table| table.page + table.pages).max().unwrap_or(0);
    for number in 0..used {
        let at = trailer.footer_start + u64::from(number) * BLOCK_BYTES;
        let page = reader.get(at, BLOCK_BYTES)?;
        if page_verifies(page, segment.id, number) {
            map.good_pages.insert(number, page.to_vec());
        } else {
            map.pages.push(number);
        }
    }
    let rows: BTreeMap<u64, IndexRow> = rows_of::<IndexRow>(&map.good_pages, trailer.index)
        .map(|row| (u64::from(row.offset), row))
        .collect();
    let is_indexed = !map.pages.iter().any(|page| in_table(*page, trailer.index));
    let header = SegmentHeader::parse(reader.get(0, BLOCK_BYTES)?);
    let header = header.filter(|header| header.id == segment.id);
    map.header = header.is_none();
    let last_group = header.as_ref().map(|header| header.context.last_group);
    let committed = header.and_then(|header| header.context.committed);
    let mut walk = GroupWalk {
        segment,
        reader,
        rows: &rows,
        is_indexed,
        end: trailer.data_end,
        last_group,
        committed,
        damaged: Vec::new(),
        frames: Vec::new(),
    };
    walk.run(trailer)?;
    map.first_predecessor = walk.first_predecessor(trailer)?;
    map.groups = walk.damaged;
    map.frames = walk.frames;
    if map.pages.is_empty() {
        map.good_pages = BTreeMap::new();
        map.frames = Vec::new();
    }
    Ok(map)
}

pub(crate) fn in_table(page: u32, table: FooterTable) -> bool {
    (table.page..table.page + table.pages).contains(&page)
}

/// Returns the rows of the verified pages of a table.
pub(crate) fn rows_of<R: FooterRow>(
    pages: &BTreeMap<u32, Vec<u8>>,
    table: FooterTable,
) -> impl Iterator<Item = R> {
    let pages = pages.range(table.page..table.page + table.pages);
    pages.flat_map(|(_, page)| (0..R::PER_PAGE).map_while(|row| row_of::<R>(page, row)))
}

/// Returns the rows of a table with their numbers, without those of damaged pages.
pub(crate) fn numbered_rows<R: FooterRow>(
    pages: &BTreeMap<u32, Vec<u8>>,
    table: FooterTable,
) -> impl Iterator<Item = (u32, R)> {
    let pages = pages.range(table.page..table.page + table.pages);
    pages.flat_map(move |(number, page)| {
        let per_page = u32::try_from(R::PER_PAGE).unwrap_or(u32::MAX);
        let first = (number - table.page) * per_page;
        (first..).zip((0..R::PER_PAGE).map_while(|row| row_of::<R>(page, row)))
    })
}

/// Returns the rows of the directory, if all of its pages verify.
pub(crate) fn directory_of(map: &DamageMap, trailer: &Trailer) -> Option<Vec<DirectoryRow>> {
    let is_whole = !map.pages.iter().any(|page| in_table(*page, trailer.directory));
    is_whole.then(|| rows_of(&map.good_pages, trailer.directory).collect())
}

/// Returns the placed rows of the verified pages, by index.
pub(crate) fn placed_rows(map: &DamageMap, trailer: &Trailer) -> BTreeMap<u64, PlacedRow> {
    rows_of::<PlacedRow>(&map.good_pages, trailer.streams).map(|row| (row.index, row)).collect()
}

/// Walks over the groups of a segment, also over damaged ones.
struct GroupWalk<'a> {
    segment: &'a Segment,
    reader: TolerantReader<'a>,
    /// Entries by offset.
    rows: &'a BTreeMap<u64, IndexRow>,
    /// `rows` has every entry.
    is_indexed: bool,
    end: u64,
    last_group: Option<GroupRef>,
    committed: Option<LogId>,
    damaged: Vec<DamagedGroup>,
    frames: Vec<EntryFrame>,
}

impl GroupWalk<'_> {
    fn lost(&self, bytes: Range<u64>, what: &str) -> Error {
        self.segment.damaged(bytes, what)
    }

    fn run(&mut self, trailer: &Trailer) -> Result<(), Error> {
        let mut at = FIRST_GROUP;
        while at < self.end {
            at = self.group(at)?;
        }
        if at > self.end {
            return Err(self.lost(self.end..at, "a group extends beyond the end of the segment"));
        }
        // The trailer states the checksum of the last group's header, which no later group states.
        if let Some(last) = self.damaged.last_mut()
            && last.header.is_none()
            && last.at + blocks(last.len) == self.end
            && trailer.context.last_group.position.at == last.at
        {
            last.crc = Some(trailer.context.last_group.crc);
            last.committed.1 = trailer.context.committed.or(last.committed.1);
        }
        let unknown =
            self.damaged.iter().find(|group| group.header.is_none() && group.crc.is_none());
        match unknown {
            // The trailer of a cold segment does not name its last group, but all fields of the
            // group's header are known: there is no commit point.
            Some(group) if self.segment.cold && group.at + blocks(group.len) == self.end => Ok(()),
            Some(group) => {
                let range = group.at..group.at + group.len;
                Err(self.lost(range, "the header of a group cannot be derived from the next group"))
            }
            None => Ok(()),
        }
    }

    /// Checks one group and returns the position of the next.
    fn group(&mut self, at: u64) -> Result<u64, Error> {
        let position = LogPosition { segment: self.segment.id, at };
        let block = self.reader.get(at, GROUP_HEADER as u64)?;
        let parsed = GroupHeader::parse(block, position).filter(|(header, _)| {
            header.len >= GROUP_HEADER as u64 && at + blocks(header.len) <= self.end
        });
        let Some((header, reference)) = parsed else { return self.headless(at) };
        if let Some(before) = self.damaged.last_mut()
            && before.header.is_none()
            && before.at + blocks(before.len) == at
        {
            if header.predecessor.position.at != before.at {
                return Err(self.lost(at..at + header.len, "the groups do not follow each other"));
            }
            before.crc = Some(header.predecessor.crc);
            before.committed.1 = header.committed;
        } else if self.last_group.is_some_and(|last| last != header.predecessor) {
            return Err(self.lost(at..at + header.len, "the groups do not follow each other"));
        }
        let (frames, end) = self.frames_of(at, Some(at + header.len))?;
        if end != at + header.len || frames.len() != header.frames as usize {
            return Err(self.lost(at..at + header.len, "the frames of a group do not add up"));
        }
        if frames.iter().any(|frame| matches!(frame, FoundFrame::Missing(_))) {
            self.damaged.push(DamagedGroup {
                at,
                len: header.len,
                frames,
                header: Some(header),
                predecessor: header.predecessor,
                committed: (None, None),
                crc: None,
            });
        } else if frames_crc(frames.iter().map(good_crc)) != header.frames_crc {
            return Err(self.lost(at..at + header.len, "the frames of a group are of another one"));
        }
        self.last_group = Some(reference);
        self.committed = header.committed.or(self.committed);
        Ok(at + blocks(header.len))
    }

    /// Checks a group whose header does not verify.
    fn headless(&mut self, at: u64) -> Result<u64, Error> {
        let what = "a group's header and the state before it do not verify";
        let Some(predecessor) = self.last_group else { return Err(self.lost(at..self.end, what)) };
        if !self.is_indexed {
            return Err(self.lost(at..self.end, "a group's header and the index do not verify"));
        }
        let (frames, end) = self.frames_of(at, None)?;
        self.damaged.push(DamagedGroup {
            at,
            len: end - at,
            frames,
            header: None,
            predecessor,
            committed: (self.committed, None),
            crc: None,
        });
        self.last_group = None;
        Ok(at + blocks(end - at))
    }

    /// Checks the frames of the group at `at`, up to its end, or as far as there are frames.
    fn frames_of(&mut self, at: u64, end: Option<u64>) -> Result<(Vec<FoundFrame>, u64), Error> {
        let mut frames = Vec::new();
        let mut next = at + GROUP_HEADER as u64;
        while next < end.unwrap_or(self.end) {
            if let Some(row) = self.rows.get(&next).copied() {
                frames.push(self.entry(&row)?);
                next += u64::from(row.frame_len);
                continue;
            }
            match self.unlisted(next)? {
                Some((crc, len)) => {
                    frames.push(FoundFrame::Good(crc));
                    next += len;
                }
                None if end.is_none() => break,
                None => {
                    return Err(
                        self.lost(next..self.end, "a frame without an entry does not verify")
                    );
                }
            }
        }
        Ok((frames, next))
    }

    /// Checks the frame of an entry.
    fn entry(&mut self, row: &IndexRow) -> Result<FoundFrame, Error> {
        let offset = u64::from(row.offset);
        let place = LogPosition { segment: self.segment.id, at: offset };
        let frame = self.reader.get(offset, u64::from(row.frame_len))?;
        let header = FrameHeader::parse(frame, place).filter(|header| {
            header.kind == FrameKind::Entry
                && header.id == row.id
                && header.len() as u64 == u64::from(row.frame_len)
                && frame
                    .get(header.payload())
                    .is_some_and(|payload| header.payload_verifies(payload))
        });
        Ok(match header {
            Some(header) => {
                self.found(&header);
                FoundFrame::Good(header.crc)
            }
            None => FoundFrame::Missing(*row),
        })
    }

    /// Returns checksum and length of a frame that the index does not list: a vote, a truncation, a
    /// purge, or a truncated entry.
    fn unlisted(&mut self, at: u64) -> Result<Option<(u32, u64)>, Error> {
        let place = LogPosition { segment: self.segment.id, at };
        let space = self.end - at;
        let prefix = self.reader.get(at, space.min(BLOCK_BYTES))?;
        let prefix = FrameHeader::prefix_len(prefix).filter(|len| *len as u64 <= space);
        let Some(prefix) = prefix else { return Ok(None) };
        let Some(header) = FrameHeader::parse(self.reader.get(at, prefix as u64)?, place) else {
            return Ok(None);
        };
        let len = header.len() as u64;
        if len > space {
            return Ok(None);
        }
        let frame = self.reader.get(at, len)?;
        if !frame.get(header.payload()).is_some_and(|payload| header.payload_verifies(payload)) {
            return Ok(None);
        }
        if header.kind == FrameKind::Entry {
            self.found(&header);
        }
        if header.kind == FrameKind::Truncate {
            self.frames.retain(|frame| frame.id.index < header.id.index);
        }
        Ok(Some((header.crc, len)))
    }

    fn found(&mut self, header: &FrameHeader) {
        let (offset, len) = (header.place.at, header.len() as u64);
        self.frames.push(EntryFrame { id: header.id, offset, len, stream: header.stream });
    }

    /// Returns the predecessor that the header of the first group states.
    fn first_predecessor(&mut self, trailer: &Trailer) -> Result<GroupRef, Error> {
        if trailer.data_end == FIRST_GROUP {
            return Ok(trailer.context.last_group);
        }
        let position = LogPosition { segment: self.segment.id, at: FIRST_GROUP };
        let block = self.reader.get(FIRST_GROUP, GROUP_HEADER as u64)?;
        let parsed = GroupHeader::parse(block, position);
        Ok(parsed.map(|(header, _)| header.predecessor).unwrap_or_default())
    }
}

fn good_crc(frame: &FoundFrame) -> u32 {
    match frame {
        FoundFrame::Good(crc) => *crc,
        FoundFrame::Missing(_) => 0,
    }
}

/// Returns the checksum of a group's frames.
pub(crate) fn frames_crc(crcs: impl Iterator<Item = u32>) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    for crc in crcs {
        hasher.update(&crc.to_le_bytes());
    }
    hasher.finalize()
}
