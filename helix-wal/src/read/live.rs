//! Reading live entries by index from all segments, for a replica that lacks purged entries.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use crate::error::Error;
use crate::files::segment::{ReadStop, Segment, TableReader};
use crate::format::footer::{DirectoryRow, IndexRow, PlacedRow};
use crate::memory::log::Log;
use crate::read::by_index::source;
use crate::read::load::load_entries;
use crate::read::load::{EntrySource, FrameRef};
use crate::shared::Shared;
use crate::types::{Entry, LiveEntries, LiveEntry, LogId, Placement, ReadMode};

/// Maximum number of entries per call, and of slots checked per lock acquisition.
const ENTRIES_PER_LOCK: usize = 4096;
/// Number of index rows after which a call returns what it has, also without an entry.
const ROWS_PER_READ: usize = 64 << 10;
/// Cost of opening a segment's tables, in index rows.
const ROWS_PER_SEGMENT: usize = 1 << 10;

/// A segment that holds a part of the range.
struct SegmentRange {
    segment: Arc<Segment>,
    first: u64,
    last: u64,
}

/// Result of looking up a range under the lock.
struct LiveLookup {
    /// By first index.
    parts: Vec<SegmentRange>,
    /// Live entries in memory, by index. Excludes entries of `parts`.
    slots: Vec<(LogId, Placement, EntrySource)>,
    /// Everything up to this index is included.
    upto: u64,
}

/// Iterates over the entries of one segment by index.
struct Cursor<'a> {
    part: &'a SegmentRange,
    by_index: TableReader<'a, IndexRow>,
    by_stream: TableReader<'a, PlacedRow>,
    directory: TableReader<'a, DirectoryRow>,
    number: u32,
    row: IndexRow,
    /// The share found last.
    share: Option<DirectoryRow>,
}

impl Shared {
    /// Reads live entries of the streams that `wants` accepts. Calls it outside the lock.
    pub(crate) fn find_live(
        &self,
        after: u64,
        upto: u64,
        bytes_max: usize,
        wants: &dyn Fn(u64) -> bool,
    ) -> Result<LiveEntries, ReadStop> {
        let found = self.look_up(after, upto)?;
        // Segments are opened when the iteration reaches them. A range may have thousands, and one
        // call reads only one or two.
        let mut parts = found.parts.iter().peekable();
        let mut cursors = Vec::new();
        let mut next = BinaryHeap::new();
        let upto = found.upto;
        let slots = found.slots.into_iter().filter(|(_, placement, _)| wants(placement.stream));
        let mut slots = slots.peekable();
        let (mut sources, mut bytes, mut reached) = (Vec::new(), 0_usize, upto);
        let mut rows = 0;
        loop {
            let on_disk = next.peek().map(|Reverse((index, _))| *index).filter(|i| *i <= upto);
            let in_memory = slots.peek().map(|(id, ..)| id.index).filter(|i| *i <= upto);
            let index = on_disk.into_iter().chain(in_memory).min();
            let part = parts.next_if(|part| index.is_none_or(|index| part.first <= index));
            let Some(first) = part.map(|part| part.first).or(index) else { break };
            if rows >= ROWS_PER_READ && first > after + 1 {
                reached = first - 1;
                break;
            }
            if let Some(part) = part {
                rows += ROWS_PER_SEGMENT;
                match Cursor::begin(self, part, after + 1, wants) {
                    Ok(Some(cursor)) => {
                        next.push(Reverse((cursor.row.id.index, cursors.len())));
                        cursors.push(cursor);
                    }
                    Ok(None) => {}
                    // Damage stops the iteration at this segment. Earlier entries are still
                    // returned.
                    Err(ReadStop::Failed(Error::Damaged { .. })) if part.first > after + 1 => {
                        reached = reached.min(part.first - 1);
                        break;
                    }
                    Err(stop) => return Err(stop),
                }
                continue;
            }
            let Some(index) = index else { break };
            rows += 1;
            let (entry, size) = if in_memory == Some(index) {
                let Some((id, placement, source)) = slots.next() else { break };
                let size = source.size();
                (Some((id, placement, source)), size)
            } else {
                let Some(Reverse((_, at))) = next.pop() else { break };
                let Some(cursor) = cursors.get_mut(at) else { break };
                let placement = cursor.placement(wants)?;
                let live = placement.filter(|placement| self.is_live(placement));
                let entry = live.map(|placement| (cursor.row.id, placement, cursor.source()));
                let size = cursor.row.frame_len as usize;
                if cursor.advance()? {
                    next.push(Reverse((cursor.row.id.index, at)));
                }
                (entry, size)
            };
            let Some((id, placement, source)) = entry else { continue };
            let full = bytes + size > bytes_max || sources.len() >= ENTRIES_PER_LOCK;
            if full && !sources.is_empty() {
                reached = index - 1;
                break;
            }
            bytes += size;
            sources.push(((id, placement), source));
        }
        let wanted = sources.len();
        let entries = load_entries(sources, &[], ReadMode::Blocking)?;
        if entries.len() < wanted {
            reached = entries.last().map_or(after, |((id, _), _)| id.index);
        }
        let live = |((id, placement), entry): ((LogId, Placement), Entry)| {
            let Entry { head, payload, .. } = entry;
            LiveEntry { id, placement, head, payload }
        };
        Ok(LiveEntries { entries: entries.into_iter().map(live).collect(), upto: reached })
    }

    fn is_live(&self, placement: &Placement) -> bool {
        let core = self.lock();
        core.log.streams.get(&placement.stream).is_none_or(|s| !s.is_trimmed(placement))
    }

    /// Looks up the segments that hold a part of the range, and its entries in memory.
    fn look_up(&self, after: u64, upto: u64) -> Result<LiveLookup, ReadStop> {
        let core = self.lock();
        let log = &core.log;
        if upto <= after {
            return Ok(LiveLookup { parts: Vec::new(), slots: Vec::new(), upto });
        }
        if log.placed.is_none_or(|placed| placed <= upto) {
            let next = log.placed.unwrap_or(0);
            return Err(Error::Beyond { asked: upto, next }.into());
        }
        let mut found = LiveLookup { parts: Vec::new(), slots: Vec::new(), upto };
        // Entries with a slot are read through it; their segment may be sealed already.
        let in_slots = log.slots.front().map_or(u64::MAX, |slot| slot.id.index);
        let sealed = log.chain.values().filter(|held| held.sealed);
        let sealed = sealed.map(|held| (held, in_slots));
        let cold = log.cold.values().map(|held| (held, u64::MAX));
        for (held, limit) in sealed.chain(cold) {
            let (Some((first, last)), Some(segment)) = (held.entries, &held.segment) else {
                continue;
            };
            let last = last.index.min(limit.saturating_sub(1)).min(upto);
            let is_in = first < limit && first.max(after + 1) <= last;
            if held.is_readable_by_index() && is_in {
                found.parts.push(SegmentRange { segment: Arc::clone(segment), first, last });
            }
        }
        found.parts.sort_unstable_by_key(|part| part.first);
        let start = log.slots.partition_point(|slot| slot.id.index <= after);
        for (at, slot) in log.slots.range(start..).enumerate() {
            if slot.id.index > upto {
                break;
            }
            if at == ENTRIES_PER_LOCK {
                found.upto = slot.id.index - 1;
                break;
            }
            let live = slot.place.placement().filter(|p| is_live(log, p));
            if let Some((placement, source)) = live.and_then(|p| Some((p, source(log, slot)?))) {
                found.slots.push((slot.id, placement, source));
            }
        }
        Ok(found)
    }
}

fn is_live(log: &Log, placement: &Placement) -> bool {
    log.streams.get(&placement.stream).is_none_or(|stream| !stream.is_trimmed(placement))
}

/// Returns whether a segment has a share of a wanted stream.
fn holds_any(
    directory: &mut TableReader<'_, DirectoryRow>,
    wants: &dyn Fn(u64) -> bool,
) -> Result<bool, ReadStop> {
    for number in 0..directory.len() {
        if wants(directory.get(number)?.stream) {
            return Ok(true);
        }
    }
    Ok(false)
}

impl<'a> Cursor<'a> {
    /// Creates a cursor at the first entry from an index on; `None` if the part has none, or the
    /// segment none of a wanted stream.
    fn begin(
        shared: &'a Shared,
        part: &'a SegmentRange,
        from: u64,
        wants: &dyn Fn(u64) -> bool,
    ) -> Result<Option<Self>, ReadStop> {
        let (segment, cache) = (&part.segment, &shared.cache);
        let mut by_index = segment.by_index(cache, ReadMode::Blocking);
        let number = by_index.find(from)?;
        if number >= by_index.len() {
            return Ok(None);
        }
        let row = by_index.get(number)?;
        let mut directory = segment.directory(cache, ReadMode::Blocking);
        if row.id.index > part.last || !holds_any(&mut directory, wants)? {
            return Ok(None);
        }
        let by_stream = segment.by_stream(cache, ReadMode::Blocking);
        Ok(Some(Self { part, by_index, by_stream, directory, number, row, share: None }))
    }

    /// Advances to the next entry. Returns whether there is one.
    fn advance(&mut self) -> Result<bool, ReadStop> {
        self.number += 1;
        if self.number >= self.by_index.len() {
            return Ok(false);
        }
        self.row = self.by_index.get(self.number)?;
        Ok(self.row.id.index <= self.part.last)
    }

    /// Returns the placement of the entry; `None` if it has no positions in a wanted stream.
    fn placement(&mut self, wants: &dyn Fn(u64) -> bool) -> Result<Option<Placement>, ReadStop> {
        let Some(number) = self.row.stream_row else { return Ok(None) };
        let holds =
            |share: &DirectoryRow| (share.begin..share.begin + share.entries).contains(&number);
        let share = match self.share.filter(holds) {
            Some(share) => share,
            None => {
                // Shares are sorted by their rows.
                let all = 0..self.directory.len();
                let behind = self.directory.partition_point(all, |share| share.begin <= number)?;
                let share = self.directory.get(behind.saturating_sub(1))?;
                if !holds(&share) {
                    let segment = &self.part.segment;
                    let what = "the footer's tables disagree";
                    return Err(segment.damaged(0..segment.len, what).into());
                }
                share
            }
        };
        self.share = Some(share);
        if !wants(share.stream) {
            return Ok(None);
        }
        let PlacedRow { first, count, time, .. } = self.by_stream.get(number)?;
        Ok(Some(Placement { stream: share.stream, first, count, time }))
    }

    fn source(&self) -> EntrySource {
        EntrySource::Disk(FrameRef::of_index(&self.row, &self.part.segment))
    }
}
