//! Reading what streams still need, by index, from whichever segment holds it: for a replica that
//! lacks entries which have left the Raft log.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use crate::footer::{DirectoryRow, IndexRow, PlacedRow};
use crate::load::{Source, Wanted, load};
use crate::log::Log;
use crate::read::source;
use crate::segment::{Rows, Segment, Stop, unless_blocked};
use crate::shared::Shared;
use crate::wal::Wal;
use crate::{Entry, Error, How, LiveEntries, LiveEntry, LogId, Placement};

/// Most entries of one call, and most slots looked at under one hold of the lock.
const ENTRIES_AT_ONCE: usize = 4096;

impl Wal {
    /// Entries that streams still need with `after < index <= upto`, in index order, also those
    /// that have left the Raft log: about `bytes_max` bytes of them, at least one if any is left.
    /// The last one of all is at `upto` or before it; `LiveEntries::upto` tells how far this call
    /// got. What was trimmed is left out. `Beyond` if `upto` is not placed yet. Blocks.
    pub fn read_live(&self, after: u64, upto: u64, bytes_max: usize) -> Result<LiveEntries, Error> {
        let found = unless_blocked(self.shared.find_live(after, upto, bytes_max))?;
        Ok(found.unwrap_or_default())
    }

    /// About how many bytes of frames [`Wal::read_live`] would give of a range. What was trimmed
    /// and is still on the disk is counted in.
    pub fn live_bytes(&self, after: u64, upto: u64) -> u64 {
        self.shared.lock().log.bytes_between(after, upto)
    }
}

impl Log {
    /// Entries of a segment are taken to be equally large.
    fn bytes_between(&self, after: u64, upto: u64) -> u64 {
        let share = |bytes: u64, first: u64, last: u64| {
            let (from, to) = (first.max(after.saturating_add(1)), last.min(upto));
            let part = to.saturating_add(1).saturating_sub(from);
            let all = (last + 1).saturating_sub(first).max(1);
            u64::try_from(u128::from(bytes) * u128::from(part) / u128::from(all)).unwrap_or(bytes)
        };
        let (mut sum, mut open, mut open_from) = (0, 0, 0);
        for held in self.held.values() {
            match held.entries {
                Some((first, last)) => {
                    sum += share(held.frame_bytes, first, last.index);
                    open_from = open_from.max(last.index + 1);
                }
                None => open += held.frame_bytes,
            }
        }
        for held in self.cold.values() {
            if let Some((first, last)) = held.entries {
                sum += share(held.frame_bytes, first, last.index);
            }
        }
        let front = self.slots.front().map_or(0, |slot| slot.id.index);
        let last = self.last.map_or(0, |last| last.index);
        sum + share(open, open_from.max(front), last)
    }
}

/// A segment that holds some of the range.
struct Part {
    segment: Arc<Segment>,
    first: u64,
    last: u64,
}

/// What the lock had to say about a range.
struct Found {
    /// By their first index.
    parts: Vec<Part>,
    /// Live ones in memory, by index; entries that `parts` hold are not among them.
    slots: Vec<(LogId, Placement, Source)>,
    /// Up to here nothing was left out.
    upto: u64,
}

/// Walks the entries of one segment by index.
struct Cursor<'a> {
    part: &'a Part,
    by_index: Rows<'a, IndexRow>,
    by_stream: Rows<'a, PlacedRow>,
    directory: Rows<'a, DirectoryRow>,
    number: u32,
    row: IndexRow,
    /// The share that was met last.
    share: Option<DirectoryRow>,
}

impl Shared {
    fn find_live(&self, after: u64, upto: u64, bytes_max: usize) -> Result<LiveEntries, Stop> {
        let found = self.look_up(after, upto)?;
        // A segment is not looked into before the walk has come to it: a range may have thousands,
        // and one call gets through one or two.
        let mut parts = found.parts.iter().peekable();
        let mut cursors = Vec::new();
        let mut next = BinaryHeap::new();
        let upto = found.upto;
        let mut slots = found.slots.into_iter().peekable();
        let (mut sources, mut bytes, mut reached) = (Vec::new(), 0_usize, upto);
        loop {
            let on_disk = next.peek().map(|Reverse((index, _))| *index).filter(|i| *i <= upto);
            let in_memory = slots.peek().map(|(id, ..)| id.index).filter(|i| *i <= upto);
            let index = on_disk.into_iter().chain(in_memory).min();
            if let Some(part) = parts.next_if(|part| index.is_none_or(|index| part.first <= index))
            {
                match Cursor::begin(self, part, after + 1) {
                    Ok(Some(cursor)) => {
                        next.push(Reverse((cursor.row.id.index, cursors.len())));
                        cursors.push(cursor);
                    }
                    Ok(None) => {}
                    // It stops the walk where it is met: what comes before can be had.
                    Err(Stop::Failed(Error::Damaged { .. })) if part.first > after + 1 => {
                        reached = reached.min(part.first - 1);
                        break;
                    }
                    Err(stop) => return Err(stop),
                }
                continue;
            }
            let Some(index) = index else { break };
            let (entry, size) = if in_memory == Some(index) {
                let Some((id, placement, source)) = slots.next() else { break };
                let size = source.size();
                (Some((id, placement, source)), size)
            } else {
                let Some(Reverse((_, at))) = next.pop() else { break };
                let Some(cursor) = cursors.get_mut(at) else { break };
                let placement = cursor.placement()?;
                let live = placement.filter(|placement| self.is_live(placement));
                let entry = live.map(|placement| (cursor.row.id, placement, cursor.source()));
                let size = cursor.row.frame_len as usize;
                if cursor.advance()? {
                    next.push(Reverse((cursor.row.id.index, at)));
                }
                (entry, size)
            };
            let Some((id, placement, source)) = entry else { continue };
            let full = bytes + size > bytes_max || sources.len() >= ENTRIES_AT_ONCE;
            if full && !sources.is_empty() {
                reached = index - 1;
                break;
            }
            bytes += size;
            sources.push(((id, placement), source));
        }
        let wanted = sources.len();
        let entries = load(sources, &[], How::Blocking)?;
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

    /// Looks a range up: which segments hold some of it, and what of it is in memory.
    fn look_up(&self, after: u64, upto: u64) -> Result<Found, Stop> {
        let core = self.lock();
        let log = &core.log;
        if upto <= after {
            return Ok(Found { parts: Vec::new(), slots: Vec::new(), upto });
        }
        if log.placed.is_none_or(|placed| placed <= upto) {
            let next = log.placed.unwrap_or(0);
            return Err(Error::Beyond { asked: upto, next }.into());
        }
        let mut found = Found { parts: Vec::new(), slots: Vec::new(), upto };
        // Entries that have a slot are read by it; their segment may be sealed already.
        let in_slots = log.slots.front().map_or(u64::MAX, |slot| slot.id.index);
        let sealed = log.held.values().filter(|held| held.sealed);
        let sealed = sealed.map(|held| (held, in_slots));
        let cold = log.cold.values().map(|held| (held, u64::MAX));
        for (held, limit) in sealed.chain(cold) {
            let (Some((first, last)), Some(segment)) = (held.entries, &held.segment) else {
                continue;
            };
            let last = last.index.min(limit.saturating_sub(1)).min(upto);
            let is_in = first < limit && first.max(after + 1) <= last;
            if held.is_readable_by_index() && is_in {
                found.parts.push(Part { segment: Arc::clone(segment), first, last });
            }
        }
        found.parts.sort_unstable_by_key(|part| part.first);
        let start = log.slots.partition_point(|slot| slot.id.index <= after);
        for (at, slot) in log.slots.range(start..).enumerate() {
            if slot.id.index > upto {
                break;
            }
            if at == ENTRIES_AT_ONCE {
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

impl<'a> Cursor<'a> {
    /// At the first entry from an index on; `None` if there is none in the part.
    fn begin(shared: &'a Shared, part: &'a Part, from: u64) -> Result<Option<Self>, Stop> {
        let (segment, cache) = (&part.segment, &shared.cache);
        let mut by_index = segment.by_index(cache, How::Blocking);
        let number = by_index.find(from)?;
        if number >= by_index.len() {
            return Ok(None);
        }
        let row = by_index.get(number)?;
        let by_stream = segment.by_stream(cache, How::Blocking);
        let directory = segment.directory(cache, How::Blocking);
        let cursor = Self { part, by_index, by_stream, directory, number, row, share: None };
        Ok((row.id.index <= part.last).then_some(cursor))
    }

    /// Goes to the next entry; whether there is one.
    fn advance(&mut self) -> Result<bool, Stop> {
        self.number += 1;
        if self.number >= self.by_index.len() {
            return Ok(false);
        }
        self.row = self.by_index.get(self.number)?;
        Ok(self.row.id.index <= self.part.last)
    }

    /// Where the entry is in its stream; `None` if it counts no positions.
    fn placement(&mut self) -> Result<Option<Placement>, Stop> {
        let Some(number) = self.row.stream_row else { return Ok(None) };
        let holds =
            |share: &DirectoryRow| (share.begin..share.begin + share.entries).contains(&number);
        let share = match self.share.filter(holds) {
            Some(share) => share,
            None => {
                // Shares stand in the order of their rows.
                let all = 0..self.directory.len();
                let behind = self.directory.partition_point(all, |share| share.begin <= number)?;
                let share = self.directory.get(behind.saturating_sub(1))?;
                if !holds(&share) {
                    let segment = &self.part.segment;
                    let what = "the footer's tables do not agree";
                    return Err(segment.damaged(0..segment.len, what).into());
                }
                share
            }
        };
        self.share = Some(share);
        let PlacedRow { first, count, time, .. } = self.by_stream.get(number)?;
        Ok(Some(Placement { stream: share.stream, first, count, time }))
    }

    fn source(&self) -> Source {
        Source::Disk(Wanted::of_index(&self.row, &self.part.segment))
    }
}
