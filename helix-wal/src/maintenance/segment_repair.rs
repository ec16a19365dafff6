//! Writes a repaired copy of a sealed segment and puts it in the place of the damaged file.
//!
//! 1. The copy is written to a file with the name of a prepared segment, whose content is
//!    meaningless, and synced.
//! 2. The copy is checked as a whole.
//! 3. It is renamed to the name of the segment, and the directory is synced.
//!
//! A crash leaves the damaged segment or the repaired one. Everything that a checksum covers is as
//! it was first written.
#![deny(clippy::indexing_slicing, clippy::cast_possible_truncation)]

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Error, Shortage, failed, is_no_space, poison};
use crate::files::aligned::Aligned;
use crate::files::open_segment::read_header;
use crate::files::scan::{Scanned, check_groups};
use crate::files::segment::Segment;
use crate::format::footer::IndexRow;
use crate::format::footer::{SealedEntry, SegmentEnd, Trailer, build, page_verifies};
use crate::format::frame::{Context, Frame, FrameHeader, GroupHeader, LogPosition, SegmentHeader};
use crate::format::layout::{BLOCK_BYTES, ready_name};
use crate::maintenance::segment_damage::{
    DamageMap, DamagedGroup, FoundFrame, TolerantReader, directory_of, frames_crc, in_table,
    numbered_rows, placed_rows,
};
use crate::shared::Shared;
use crate::storage::{BLOCK, File, Storage};
use crate::types::{Entry, LogId, Placement};

/// Bytes copied at a time.
const COPY_BYTES: u64 = 1 << 20;
/// Maximum number of commit points tried for a damaged group header.
const COMMITTED_MAX: u64 = 1 << 20;

/// Bytes to write, by offset.
pub(crate) type Patches = BTreeMap<u64, Vec<u8>>;

/// Inputs of the repair of a segment, besides its file.
pub(crate) struct RepairSource<'a> {
    pub entries: &'a BTreeMap<u64, Entry>,
    pub placements: &'a BTreeMap<u64, Placement>,
    /// End and state of the segment before it.
    pub before: Option<(LogPosition, Context)>,
}

/// Builds the bytes of everything that is damaged.
pub(crate) fn patches(
    shared: &Shared,
    segment: &Segment,
    trailer: &Trailer,
    map: &DamageMap,
    source: &RepairSource<'_>,
) -> Result<Patches, Error> {
    let mut patches = Patches::new();
    for group in &map.groups {
        patch_group(segment, group, source.entries, &mut patches)?;
    }
    if map.trailer {
        patches.insert(segment.len - BLOCK_BYTES, trailer.encode().to_vec());
    }
    if !map.pages.is_empty() {
        patch_pages(shared, segment, trailer, map, source, &mut patches)?;
    }
    if map.header {
        let (predecessor, context) = source.before.clone().unwrap_or_default();
        let context = Context { last_group: map.first_predecessor, ..context };
        let header = SegmentHeader {
            id: segment.id,
            predecessor,
            synced: predecessor,
            file_len: segment.len,
            identity: shared.identity.clone(),
            context,
            cold: segment.cold,
        };
        patches.insert(0, header.encode().to_vec());
    }
    Ok(patches)
}

fn patch_group(
    segment: &Segment,
    group: &DamagedGroup,
    entries: &BTreeMap<u64, Entry>,
    patches: &mut Patches,
) -> Result<(), Error> {
    let range = group.at..group.at + group.len;
    let mut crcs = Vec::with_capacity(group.frames.len());
    for frame in &group.frames {
        let row = match frame {
            FoundFrame::Good(crc) => {
                crcs.push(*crc);
                continue;
            }
            FoundFrame::Missing(row) => row,
        };
        let (index, offset) = (row.id.index, u64::from(row.offset));
        let entry = entries.get(&index).ok_or_else(|| missing(segment, index))?;
        let bytes = encode(segment, entry, offset);
        let parsed = FrameHeader::parse(&bytes, LogPosition { segment: segment.id, at: offset });
        let fits = entry.id == row.id
            && bytes.len() as u64 == u64::from(row.frame_len)
            && parsed.is_some_and(|header| {
                crcs.push(header.crc);
                bytes.get(header.payload()).is_some_and(|payload| header.payload_verifies(payload))
            });
        if !fits {
            let what = format!("entry {index} of another replica differs from the damaged one");
            return Err(segment.damaged(offset..offset + u64::from(row.frame_len), &what));
        }
        patches.insert(offset, bytes);
    }
    let frames_crc = frames_crc(crcs.into_iter());
    match &group.header {
        Some(header) if header.frames_crc == frames_crc => Ok(()),
        Some(_) => Err(segment.damaged(range, "the repaired frames do not match their group")),
        None => {
            let header = derive_header(segment, group, frames_crc).ok_or_else(|| {
                segment.damaged(range, "the header of a group cannot be derived from its frames")
            })?;
            patches.insert(group.at, header.to_vec());
            Ok(())
        }
    }
}

fn encode(segment: &Segment, entry: &Entry, offset: u64) -> Vec<u8> {
    let frame = Frame::entry(entry.id, entry.stream, &entry.head, &entry.payload);
    let mut bytes = Vec::with_capacity(frame.len());
    frame.encode(LogPosition { segment: segment.id, at: offset }, &mut bytes);
    bytes
}

fn missing(segment: &Segment, index: u64) -> Error {
    let what = format!("no replica has sent entry {index}, which is damaged here");
    segment.damaged(0..segment.len, &what)
}

/// Finds the header of a group from its frames, by the checksum that the next group states. Only
/// the commit point is unknown; it lies between the commit points of the neighbours.
fn derive_header(segment: &Segment, group: &DamagedGroup, frames_crc: u32) -> Option<Vec<u8>> {
    let position = LogPosition { segment: segment.id, at: group.at };
    let header = |committed| GroupHeader {
        position,
        len: group.len,
        frames: u32::try_from(group.frames.len()).unwrap_or(u32::MAX),
        frames_crc,
        predecessor: group.predecessor,
        synced: position,
        committed,
    };
    let Some(wanted) = group.crc else {
        return segment.cold.then(|| header(None).encode().0.to_vec());
    };
    let try_one = |committed: Option<LogId>| {
        let (bytes, crc) = header(committed).encode();
        (crc == wanted).then(|| bytes.to_vec())
    };
    if let Some(found) = try_one(None) {
        return Some(found);
    }
    let (low, high) = group.committed;
    let low = low.unwrap_or_default();
    let high = high.unwrap_or(LogId { term: low.term + 8, index: low.index + COMMITTED_MAX / 16 });
    let terms = low.term..=high.term.max(low.term).min(low.term + 64);
    let count = terms.clone().count() as u64;
    let indexes = low.index..=high.index.min(low.index + COMMITTED_MAX / count.max(1));
    terms
        .into_iter()
        .find_map(|term| indexes.clone().find_map(|index| try_one(Some(LogId { term, index }))))
}

/// Builds the footer again from the frames and the verified pages.
fn patch_pages(
    shared: &Shared,
    segment: &Segment,
    trailer: &Trailer,
    map: &DamageMap,
    source: &RepairSource<'_>,
    patches: &mut Patches,
) -> Result<(), Error> {
    let footer = trailer.footer_start..segment.len - BLOCK_BYTES;
    let lost = |what: &str| segment.damaged(footer.clone(), what);
    let placed = placed_rows(map, trailer);
    let directory = directory_of(map, trailer);
    // The ends of shares, by stream and first position.
    let shares: BTreeMap<(u64, u64), u64> =
        directory.iter().flatten().map(|share| ((share.stream, share.first), share.next)).collect();
    let mut streams: BTreeMap<u64, u64> =
        map.frames.iter().map(|frame| (frame.id.index, frame.stream)).collect();
    streams.extend(source.entries.iter().map(|(index, entry)| (*index, entry.stream)));
    let rows = index_rows(trailer, map);
    let mut entries = Vec::with_capacity(rows.len());
    for row in &rows {
        let index = row.id.index;
        let stream = streams.get(&index).copied();
        let from_table = placed.get(&index).zip(stream).map(|(row, stream)| Placement {
            stream,
            first: row.first,
            count: row.count,
            time: row.time,
        });
        let placement = from_table.or_else(|| source.placements.get(&index).copied());
        if row.stream_row.is_some() && placement.is_none() {
            return Err(missing(segment, index));
        }
        entries.push(SealedEntry {
            id: row.id,
            offset: row.offset,
            frame_len: row.frame_len,
            placement,
            begins_share: placement.is_some_and(|it| shares.contains_key(&(it.stream, it.first))),
            spans_gap: placement.is_some_and(|it| is_within(&shares, &it)),
        });
    }
    let end = || SegmentEnd {
        segment: segment.id,
        identity_crc: crc32fast::hash(&shared.identity),
        file_len: segment.len,
        data_end: trailer.data_end,
        gathered: trailer.gathered,
        context: trailer.context.clone(),
    };
    let fits =
        |entries: &[SealedEntry]| build(entries, end()).filter(|built| built.trailer == *trailer);
    let built = fits(&entries).or_else(|| {
        // Without the directory, tries shares without gaps, then shares with gaps, as long as
        // possible.
        entries.iter_mut().for_each(|entry| entry.spans_gap = true);
        directory.is_none().then(|| fits(&entries)).flatten()
    });
    let built = built.ok_or_else(|| lost("the footer cannot be derived from the frames"))?;
    for (number, page) in (0..).zip(built.pages.chunks(BLOCK)) {
        if map.good_pages.get(&number).is_some_and(|good| good != page) {
            return Err(lost("a derived page of the footer differs from the verified one"));
        }
        if map.pages.contains(&number) && page_verifies(page, segment.id, number) {
            patches.insert(trailer.footer_start + u64::from(number) * BLOCK_BYTES, page.to_vec());
        }
    }
    Ok(())
}

/// Returns whether a placement continues a share of its stream, also after a gap.
fn is_within(shares: &BTreeMap<(u64, u64), u64>, placement: &Placement) -> bool {
    let Placement { stream, first, .. } = *placement;
    let share = shares.range((stream, 0)..(stream, first)).next_back();
    share.is_some_and(|(_, next)| first < *next)
}

/// Returns the rows of the index table. Rows on damaged pages are derived from the frames.
fn index_rows(trailer: &Trailer, map: &DamageMap) -> Vec<IndexRow> {
    let mut rows: BTreeMap<u64, IndexRow> =
        numbered_rows::<IndexRow>(&map.good_pages, trailer.index)
            .map(|(_, row)| (row.id.index, row))
            .collect();
    if !map.pages.iter().any(|page| in_table(*page, trailer.index)) {
        return rows.into_values().collect();
    }
    let last = trailer.entries.map_or(0, |(_, last)| last.index);
    for frame in map.frames.iter().filter(|frame| frame.id.index <= last) {
        rows.entry(frame.id.index).or_insert(IndexRow {
            id: frame.id,
            offset: u32::try_from(frame.offset).unwrap_or(u32::MAX),
            frame_len: u32::try_from(frame.len).unwrap_or(u32::MAX),
            stream_row: None,
        });
    }
    rows.into_values().collect()
}

/// Writes the copy, checks it, and puts it in the place of the segment.
pub(crate) fn write_copy(
    shared: &Shared,
    storage: &Arc<dyn Storage>,
    segment: &Segment,
    trailer: &Trailer,
    patches: &Patches,
) -> Result<(), Error> {
    let needed_bytes = segment.len + shared.options.reserve_bytes;
    let free_bytes = storage.free_bytes().unwrap_or(u64::MAX);
    let full = Error::DiskFull { free_bytes, needed_bytes };
    if free_bytes < needed_bytes {
        return Err(full);
    }
    let name = {
        let mut core = shared.lock();
        core.check_open()?;
        core.ready_number += 1;
        ready_name(core.ready_number - 1)
    };
    let file = storage
        .create(&name, segment.len)
        .map_err(|e| if is_no_space(&e) { full.clone() } else { failed("create", &name, &e) })?;
    let copied = copy(segment, &file, &name, patches).and_then(|()| check(segment, trailer, &file));
    if let Err(error) = copied {
        // Ignored: the next open takes it for a prepared segment, or removes it.
        let _ = storage.remove(&name);
        return Err(error);
    }
    let to = segment.name();
    if let Err(e) = storage.rename(&name, &to) {
        if Shortage::of(&e).is_none() {
            let error = poison("rename", &to, &e);
            shared.poison(&error);
            return Err(error);
        }
        // Ignored: as above.
        let _ = storage.remove(&name);
        return Err(failed("rename", &to, &e));
    }
    segment.close();
    sync_name(shared, storage, segment)
}

/// Makes the name of a repaired segment durable.
pub(crate) fn sync_name(
    shared: &Shared,
    storage: &Arc<dyn Storage>,
    segment: &Segment,
) -> Result<(), Error> {
    let to = segment.name();
    match storage.sync_dir() {
        // After a crash either file may have the name: the damaged one is repaired again.
        Err(e) if Shortage::of(&e).is_some() => Err(failed("sync", &to, &e)),
        Err(e) => {
            let error = poison("sync", &to, &e);
            shared.poison(&error);
            Err(error)
        }
        Ok(()) => Ok(()),
    }
}

fn copy(
    segment: &Segment,
    file: &Arc<dyn File>,
    name: &str,
    patches: &Patches,
) -> Result<(), Error> {
    let mut reader = TolerantReader::new(segment);
    let mut at = 0;
    while at < segment.len {
        let len = COPY_BYTES.min(segment.len - at);
        let mut piece = Aligned::copy(reader.get(at, len)?);
        overlay(piece.as_mut_slice(), at, patches);
        file.write_at(piece.as_slice(), at).map_err(|e| failed("write", name, &e))?;
        at += len;
        if at % (4 * COPY_BYTES) == 0 {
            // Syncs in parts, so that no sync of the writer has to flush the whole copy.
            file.sync_data().map_err(|e| failed("sync", name, &e))?;
        }
    }
    file.sync_data().map_err(|e| failed("sync", name, &e))
}

/// Writes the patches that meet a piece of the file into it.
fn overlay(piece: &mut [u8], at: u64, patches: &Patches) {
    let end = at + piece.len() as u64;
    for (start, bytes) in patches.range(..end) {
        let (from, to) = ((*start).max(at), (start + bytes.len() as u64).min(end));
        if from >= to {
            continue;
        }
        let offset = |at: u64, of: u64| usize::try_from(at - of).unwrap_or(usize::MAX);
        let target = piece.get_mut(offset(from, at)..offset(to, at));
        let source = bytes.get(offset(from, *start)..offset(to, *start));
        if let (Some(target), Some(source)) = (target, source) {
            target.copy_from_slice(source);
        }
    }
}

/// Checks every byte of the copy.
fn check(segment: &Segment, trailer: &Trailer, file: &Arc<dyn File>) -> Result<(), Error> {
    let new = if segment.cold { Segment::new_cold } else { Segment::new };
    let copy = new(segment.id, Arc::clone(file), segment.len);
    let mut scanned = Scanned::begin(&read_header(&copy)?);
    while !check_groups(&copy, &mut scanned, trailer.data_end, 4 * COPY_BYTES)? {}
    copy.set_trailer(trailer.clone());
    crate::maintenance::scrub::check_footer(&copy)
}
