//! Opening segments, and reading their headers, trailers and directories of streams.

use crate::error::{Error, failed};
use crate::files::aligned::Aligned;
use crate::files::segment::Segment;
use crate::format::footer::{DirectoryRow, Trailer, parse_directory};
use crate::format::frame::SegmentHeader;
use crate::format::layout::{BLOCK_BYTES, Name, parse_name, segment_name};
use crate::storage::{BLOCK, Storage};

pub(crate) fn missing_segment(id: u64) -> Error {
    let what = "is missing".to_owned();
    Error::Damaged { file: segment_name(id), bytes: 0..0, what }
}

pub(crate) fn open_segment(storage: &dyn Storage, id: u64, name: &str) -> Result<Segment, Error> {
    let file = storage.open(name).map_err(|e| failed("open", name, &e))?;
    let len = file.len().map_err(|e| failed("read", name, &e))?;
    let is_cold = matches!(parse_name(name), Name::Cold(_));
    let segment =
        if is_cold { Segment::new_cold(id, file, len) } else { Segment::new(id, file, len) };
    if len < 2 * BLOCK_BYTES || !len.is_multiple_of(BLOCK_BYTES) {
        return Err(segment.damaged(len..len + 1, "the file is shorter than it was"));
    }
    Ok(segment)
}

/// Reads the trailer of a segment, if it has a valid one.
pub(crate) fn read_trailer(segment: &Segment) -> Result<Option<Trailer>, Error> {
    let mut block = Aligned::with_len(BLOCK);
    segment.read_device(block.as_mut_slice(), segment.len - BLOCK_BYTES)?;
    Ok(Trailer::parse(block.as_slice(), segment.id, segment.len))
}

pub(crate) fn read_directory(
    segment: &Segment,
    trailer: &Trailer,
) -> Result<Vec<DirectoryRow>, Error> {
    let start = trailer.footer_start + u64::from(trailer.directory.page) * BLOCK_BYTES;
    let end = start + u64::from(trailer.directory.pages) * BLOCK_BYTES;
    let mut pages = Aligned::with_len((end - start) as usize);
    if start < end {
        segment.read_device(pages.as_mut_slice(), start)?;
    }
    parse_directory(pages.as_slice(), trailer)
        .ok_or_else(|| segment.damaged(start..end, "the directory of streams does not verify"))
}

/// Reads the header of a segment. It was durable before the file got its name.
pub(crate) fn read_header(segment: &Segment) -> Result<SegmentHeader, Error> {
    let mut block = Aligned::with_len(BLOCK);
    segment.read_device(block.as_mut_slice(), 0)?;
    SegmentHeader::parse(block.as_slice())
        .filter(|header| header.id == segment.id)
        .ok_or_else(|| segment.damaged(0..BLOCK_BYTES, "the segment's header does not verify"))
}
