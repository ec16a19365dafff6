//! Walks the groups of an unsealed segment and distinguishes a torn end from damage.
//!
//! Reads bypass the page cache: the content of the device is decisive.
#![deny(clippy::indexing_slicing)]

use crc32fast::Hasher;

use crate::error::Error;
use crate::files::aligned::Aligned;
use crate::files::segment::Segment;
use crate::format::frame::{
    Context, FIRST_GROUP, FrameHeader, FrameKind, GROUP_HEADER, GroupHeader, GroupRef, LogPosition,
    SegmentHeader,
};
use crate::format::layout::{BLOCK_BYTES, OPAQUE_BYTES_MAX, blocks, u32_at, u64_at};
use crate::storage::BLOCK;
use crate::types::LogId;

const WINDOW_BYTES: u64 = 4 << 20;
/// Maximum distance behind the end at which frames of a torn group are searched, for the report.
const TORN_BYTES_MAX: u64 = 4 << 20;

/// Called with the header and the bytes of each frame.
pub(crate) type FrameVisitor<'a> = dyn FnMut(&FrameHeader, &[u8]) -> Result<(), Error> + 'a;

/// Result of scanning the groups of a segment.
#[derive(Debug, Default)]
pub(crate) struct Scanned {
    /// End of the valid groups.
    pub end: u64,
    pub last_group: GroupRef,
    pub committed: Option<LogId>,
    /// Bytes of a torn group behind the end.
    pub torn_bytes: u64,
    /// Damage before the synced end; set only if damage is tolerated.
    pub damage: Option<Error>,
}

impl Scanned {
    /// Begins a scan at the first group.
    pub(crate) fn begin(header: &SegmentHeader) -> Self {
        let Context { last_group, committed, .. } = header.context;
        Self { end: FIRST_GROUP, last_group, committed, torn_bytes: 0, damage: None }
    }
}

/// Facts about a segment from other sources.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ScanBounds {
    /// End of the segment, as its successor states it.
    pub end: Option<u64>,
    /// Everything before this offset was synced.
    pub synced: u64,
    /// Treats damage as the end of the log, even if later bytes were synced.
    pub tolerate_damage: bool,
}

/// Visits every frame of every group in order. Each group is checked as a whole first.
pub(crate) fn scan(
    segment: &Segment,
    header: &SegmentHeader,
    known: ScanBounds,
    visit: &mut FrameVisitor<'_>,
) -> Result<Scanned, Error> {
    let mut window = Window::new(segment);
    let mut scanned = Scanned::begin(header);
    while known.end.is_none_or(|end| scanned.end < end) {
        let Some((group, reference)) = read_group(&mut window, &scanned)? else {
            return end_or_damage(&mut window, scanned, known);
        };
        let bytes = window.get(group.position.at, group.len)?;
        visit_frames(segment, &group, bytes, visit)?;
        scanned.end += blocks(group.len);
        scanned.last_group = reference;
        scanned.committed = group.committed.or(scanned.committed);
    }
    if known.end.is_some_and(|end| scanned.end > end) {
        let range = FIRST_GROUP..scanned.end;
        return Err(
            segment.damaged(range, "the groups extend beyond the end that the next segment states")
        );
    }
    Ok(scanned)
}

/// Checks groups of a sealed segment from `scanned` on, up to `end` or for `bytes_max` bytes.
///
/// Returns whether `end` is reached.
pub(crate) fn check_groups(
    segment: &Segment,
    scanned: &mut Scanned,
    end: u64,
    bytes_max: u64,
) -> Result<bool, Error> {
    let mut window = Window::new(segment);
    let stop = end.min(scanned.end + bytes_max);
    while scanned.end < stop {
        let at = scanned.end;
        let Some((group, reference)) = read_group(&mut window, scanned)? else {
            return Err(segment.damaged(at..end, "a group of a sealed segment does not verify"));
        };
        scanned.end += blocks(group.len);
        scanned.last_group = reference;
    }
    if scanned.end > end {
        return Err(
            segment.damaged(end..scanned.end, "a group extends beyond the end of the segment")
        );
    }
    Ok(scanned.end == end)
}

/// Reads the next group, if it is whole and valid.
fn read_group(
    window: &mut Window<'_>,
    scanned: &Scanned,
) -> Result<Option<(GroupHeader, GroupRef)>, Error> {
    let position = LogPosition { segment: window.segment.id, at: scanned.end };
    if position.at + BLOCK_BYTES > window.segment.len {
        return Ok(None);
    }
    let block = window.get(position.at, BLOCK_BYTES)?;
    let Some((group, reference)) = GroupHeader::parse(block, position) else { return Ok(None) };
    let whole = group.len >= GROUP_HEADER as u64
        && position.at + blocks(group.len) <= window.segment.len
        && group.predecessor == scanned.last_group;
    if !whole {
        return Ok(None);
    }
    let bytes = window.get(position.at, group.len)?;
    Ok(frames_verify(&group, bytes).then_some((group, reference)))
}

/// Returns whether every frame of a group and every payload verifies.
fn frames_verify(group: &GroupHeader, bytes: &[u8]) -> bool {
    let mut at = GROUP_HEADER;
    let mut crc = Hasher::new();
    for _ in 0..group.frames {
        let Some((header, frame)) = frame_at(group, bytes, at) else { return false };
        let payload = frame.get(header.payload());
        let vote_fits = header.kind != FrameKind::Vote || header.head_len <= OPAQUE_BYTES_MAX;
        if !vote_fits || !payload.is_some_and(|payload| header.payload_verifies(payload)) {
            return false;
        }
        crc.update(&header.crc.to_le_bytes());
        at += header.len();
    }
    at as u64 == group.len && crc.finalize() == group.frames_crc
}

fn frame_at<'a>(
    group: &GroupHeader,
    bytes: &'a [u8],
    at: usize,
) -> Option<(FrameHeader, &'a [u8])> {
    let place = LogPosition { at: group.position.at + at as u64, ..group.position };
    let rest = bytes.get(at..)?;
    let header = FrameHeader::parse(rest, place)?;
    Some((header, rest.get(..header.len())?))
}

fn visit_frames(
    segment: &Segment,
    group: &GroupHeader,
    bytes: &[u8],
    visit: &mut FrameVisitor<'_>,
) -> Result<(), Error> {
    let mut at = GROUP_HEADER;
    for _ in 0..group.frames {
        let (header, frame) = frame_at(group, bytes, at).ok_or_else(|| {
            // The group verified a moment ago.
            let start = group.position.at;
            segment.damaged(start..start + group.len, "a group changed while it was read")
        })?;
        visit(&header, frame)?;
        at += header.len();
    }
    Ok(())
}

/// Decides whether the log ends here: it does, unless something shows that more was synced.
fn end_or_damage(
    window: &mut Window<'_>,
    mut scanned: Scanned,
    known: ScanBounds,
) -> Result<Scanned, Error> {
    let segment = window.segment;
    let start = scanned.end;
    let damaged = |end: u64, what: &str| Some(segment.damaged(start..end.max(start + 1), what));
    let damage = if let Some(end) = known.end {
        damaged(end, "a group does not verify, but the next segment follows it")
    } else if known.synced > start {
        damaged(known.synced, "a synced group does not verify")
    } else if let Some(next) = next_group(window, start)? {
        damaged(next, "a group does not verify, but a later one shows that it was synced")
    } else {
        None
    };
    match damage {
        Some(damage) if !known.tolerate_damage => return Err(damage),
        Some(damage) => scanned.damage = Some(damage),
        None => scanned.torn_bytes = torn_bytes(window, start)?,
    }
    Ok(scanned)
}

/// Visits the frames of every valid group from `from` on, skipping everything else.
///
/// Returns the end of the last valid group.
pub(crate) fn scan_beyond(
    segment: &Segment,
    from: u64,
    visit: &mut FrameVisitor<'_>,
) -> Result<u64, Error> {
    let mut window = Window::new(segment);
    let (mut at, mut end) = (from, from);
    while at + BLOCK_BYTES <= segment.len {
        let position = LogPosition { segment: segment.id, at };
        let group = GroupHeader::parse(window.get(at, BLOCK_BYTES)?, position);
        let fits = |len: u64| len >= GROUP_HEADER as u64 && at + blocks(len) <= segment.len;
        if let Some((group, _)) = group.filter(|(group, _)| fits(group.len)) {
            let bytes = window.get(at, group.len)?;
            if frames_verify(&group, bytes) {
                visit_frames(segment, &group, bytes, visit)?;
                at += blocks(group.len);
                end = at;
                continue;
            }
        }
        at += BLOCK_BYTES;
    }
    Ok(end)
}

/// Finds a later group that states that the bytes at `start` were synced before it.
fn next_group(window: &mut Window<'_>, start: u64) -> Result<Option<u64>, Error> {
    let id = window.segment.id;
    let mut at = start + BLOCK_BYTES;
    while at + BLOCK_BYTES <= window.segment.len {
        let position = LogPosition { segment: id, at };
        let block = window.get(at, BLOCK_BYTES)?;
        if let Some((group, _)) = GroupHeader::parse(block, position)
            && group.synced > (LogPosition { segment: id, at: start })
        {
            return Ok(Some(at));
        }
        at += BLOCK_BYTES;
    }
    Ok(None)
}

/// Estimates the visible bytes of the group that was being written at the end, for the report.
fn torn_bytes(window: &mut Window<'_>, start: u64) -> Result<u64, Error> {
    let id = window.segment.id;
    if start + BLOCK_BYTES > window.segment.len {
        return Ok(0);
    }
    let position = LogPosition { segment: id, at: start };
    let block = window.get(start, BLOCK_BYTES)?;
    if let Some((group, _)) = GroupHeader::parse(block, position) {
        return Ok(blocks(group.len).min(window.segment.len - start));
    }
    let mut torn = 0;
    let limit = window.segment.len.min(start + TORN_BYTES_MAX);
    let mut at = start;
    while at + BLOCK_BYTES <= limit {
        let block = window.get(at, BLOCK_BYTES)?;
        for offset in (0..BLOCK - 64).step_by(8) {
            let place = LogPosition { segment: id, at: at + offset as u64 };
            let likely = u64_at(block, offset + 8) == id
                && u64::from(u32_at(block, offset + 16)) == place.at;
            if likely
                && let Some(header) = block.get(offset..).and_then(|b| FrameHeader::parse(b, place))
            {
                torn = place.at + header.len() as u64 - start;
            }
        }
        at += BLOCK_BYTES;
    }
    Ok(blocks(torn).min(window.segment.len - start))
}

/// Reads ahead, so that small groups do not need a read each.
struct Window<'a> {
    segment: &'a Segment,
    bytes: Aligned,
    start: u64,
    len: u64,
}

impl<'a> Window<'a> {
    fn new(segment: &'a Segment) -> Self {
        Self { segment, bytes: Aligned::default(), start: 0, len: 0 }
    }

    /// Returns bytes of the file. The range must lie within the file.
    fn get(&mut self, at: u64, len: u64) -> Result<&[u8], Error> {
        if at < self.start || at + len > self.start + self.len {
            let want = len.max(WINDOW_BYTES).min(self.segment.len.saturating_sub(at));
            if self.bytes.len() as u64 != want {
                self.bytes = Aligned::with_len(want as usize);
            }
            self.len = 0;
            self.segment.read_device(self.bytes.as_mut_slice(), at)?;
            self.start = at;
            self.len = want;
        }
        let start = (at - self.start) as usize;
        self.bytes
            .as_slice()
            .get(start..start + len as usize)
            .ok_or_else(|| self.segment.damaged(at..at + len, "the file is shorter than it was"))
    }
}
