//! Walks the groups of a segment that is not sealed, and tells a torn end from damage.
//! Reads past the page cache: what matters is what the device holds.
#![deny(clippy::indexing_slicing)]

use crc32fast::Hasher;

use crate::aligned::Aligned;
use crate::frame::{
    Context, FIRST_GROUP, FrameHeader, GROUP_HEADER, GroupHeader, GroupRef, Kind, Position,
    SegmentHeader,
};
use crate::layout::{BLOCK_BYTES, OPAQUE_BYTES_MAX, blocks, u32_at, u64_at};
use crate::segment::Segment;
use crate::storage::BLOCK;
use crate::{Error, LogId};

const WINDOW_BYTES: u64 = 4 << 20;
/// How far behind the end frames of a torn group are looked for, to report them.
const TORN_BYTES_MAX: u64 = 4 << 20;

/// Gets each frame's header and bytes in turn.
pub(crate) type Visit<'a> = dyn FnMut(&FrameHeader, &[u8]) -> Result<(), Error> + 'a;

/// What a segment's groups came to.
#[derive(Debug, Default)]
pub(crate) struct Scanned {
    /// Where they end.
    pub end: u64,
    pub last_group: GroupRef,
    pub committed: Option<LogId>,
    /// Bytes of a torn group behind the end.
    pub cut_bytes: u64,
    /// Why they end here although more had been synced; only where that is forgiven.
    pub damage: Option<Error>,
}

impl Scanned {
    /// Of none yet.
    pub(crate) fn begin(header: &SegmentHeader) -> Self {
        let Context { last_group, committed, .. } = header.context;
        Self { end: FIRST_GROUP, last_group, committed, cut_bytes: 0, damage: None }
    }
}

/// What is known about a segment from elsewhere.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Known {
    /// Where its successor says that it ends.
    pub end: Option<u64>,
    /// Everything before this byte was once synced.
    pub synced: u64,
    /// What does not verify is the end, whatever shows that it was not.
    pub forgive: bool,
}

/// The header of a segment. It was durable before the file got its name.
pub(crate) fn read_header(segment: &Segment) -> Result<SegmentHeader, Error> {
    let mut block = Aligned::with_len(BLOCK);
    segment.read_device(block.as_mut_slice(), 0)?;
    SegmentHeader::parse(block.as_slice())
        .filter(|header| header.id == segment.id)
        .ok_or_else(|| segment.damaged(0..BLOCK_BYTES, "the segment's header does not verify"))
}

/// Visits every frame of every group in order; each group is checked whole before it is visited.
pub(crate) fn scan(
    segment: &Segment,
    header: &SegmentHeader,
    known: Known,
    visit: &mut Visit<'_>,
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
        return Err(segment.damaged(range, "the next segment says that this one is shorter"));
    }
    Ok(scanned)
}

/// Checks the groups of a sealed segment from `scanned` on, up to `end` or until so many bytes have
/// been; whether `end` is reached.
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
        return Err(segment.damaged(end..scanned.end, "a group beyond the end of the segment"));
    }
    Ok(scanned.end == end)
}

/// The group at the end of what was scanned, if there is a whole one.
fn read_group(
    window: &mut Window<'_>,
    scanned: &Scanned,
) -> Result<Option<(GroupHeader, GroupRef)>, Error> {
    let position = Position { segment: window.segment.id, at: scanned.end };
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

/// Whether every frame of a group and every payload verifies.
fn frames_verify(group: &GroupHeader, bytes: &[u8]) -> bool {
    let mut at = GROUP_HEADER;
    let mut crc = Hasher::new();
    for _ in 0..group.frames {
        let Some((header, frame)) = frame_at(group, bytes, at) else { return false };
        let payload = frame.get(header.payload());
        let vote_fits = header.kind != Kind::Vote || header.head_len <= OPAQUE_BYTES_MAX;
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
    let place = Position { at: group.position.at + at as u64, ..group.position };
    let rest = bytes.get(at..)?;
    let header = FrameHeader::parse(rest, place)?;
    Some((header, rest.get(..header.len())?))
}

fn visit_frames(
    segment: &Segment,
    group: &GroupHeader,
    bytes: &[u8],
    visit: &mut Visit<'_>,
) -> Result<(), Error> {
    let mut at = GROUP_HEADER;
    for _ in 0..group.frames {
        let (header, frame) = frame_at(group, bytes, at).ok_or_else(|| {
            // It verified a moment ago.
            let start = group.position.at;
            segment.damaged(start..start + group.len, "a group changes while it is read")
        })?;
        visit(&header, frame)?;
        at += header.len();
    }
    Ok(())
}

/// The log seems to end here. It does unless anything shows that more had been synced.
fn end_or_damage(
    window: &mut Window<'_>,
    mut scanned: Scanned,
    known: Known,
) -> Result<Scanned, Error> {
    let segment = window.segment;
    let start = scanned.end;
    let damaged = |end: u64, what: &str| Some(segment.damaged(start..end.max(start + 1), what));
    let damage = if let Some(end) = known.end {
        damaged(end, "a group does not verify, and the next segment follows it")
    } else if known.synced > start {
        damaged(known.synced, "a group does not verify that was once synced")
    } else if let Some(next) = next_group(window, start)? {
        damaged(next, "a group does not verify, and a later one shows that it was synced")
    } else {
        None
    };
    match damage {
        Some(damage) if !known.forgive => return Err(damage),
        Some(damage) => scanned.damage = Some(damage),
        None => scanned.cut_bytes = torn_bytes(window, start)?,
    }
    Ok(scanned)
}

/// Visits the frames of every whole group from a byte on, whatever lies between them; where the
/// last of them ends.
pub(crate) fn scan_beyond(
    segment: &Segment,
    from: u64,
    visit: &mut Visit<'_>,
) -> Result<u64, Error> {
    let mut window = Window::new(segment);
    let (mut at, mut end) = (from, from);
    while at + BLOCK_BYTES <= segment.len {
        let position = Position { segment: segment.id, at };
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

/// A later group that says that what stands at `start` was synced before it.
fn next_group(window: &mut Window<'_>, start: u64) -> Result<Option<u64>, Error> {
    let id = window.segment.id;
    let mut at = start + BLOCK_BYTES;
    while at + BLOCK_BYTES <= window.segment.len {
        let position = Position { segment: id, at };
        let block = window.get(at, BLOCK_BYTES)?;
        if let Some((group, _)) = GroupHeader::parse(block, position)
            && group.synced > (Position { segment: id, at: start })
        {
            return Ok(Some(at));
        }
        at += BLOCK_BYTES;
    }
    Ok(None)
}

/// How much of a group that was being written at the end can be seen. Only for the report.
fn torn_bytes(window: &mut Window<'_>, start: u64) -> Result<u64, Error> {
    let id = window.segment.id;
    if start + BLOCK_BYTES > window.segment.len {
        return Ok(0);
    }
    let position = Position { segment: id, at: start };
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
            let place = Position { segment: id, at: at + offset as u64 };
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

/// Reads ahead, so that small groups do not cost a read each.
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

    /// Bytes of the file. The range must lie within it.
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
