//! How the log in memory gets shorter: truncation at the back, purge at the front, and the
//! checkpoint that allows it.

use bytes::Bytes;

use crate::layout::NUMBERS_END;
use crate::log::Log;
use crate::slot::{Place, Slot};
use crate::{Error, LogId};

/// Whether a log can be at this index, and go on.
fn check_index(at: LogId) -> Result<(), Error> {
    if at.index < NUMBERS_END - 1 {
        return Ok(());
    }
    Err(Error::Unusable(format!("{} is no index of a log", at.index)))
}

impl Log {
    /// Removes the entries after `last`. The first index that is gone, and what to drop outside
    /// the lock.
    pub(crate) fn truncate_after(&mut self, last: Option<u64>) -> Result<(u64, Vec<Slot>), Error> {
        let from = last.map_or(self.first(), |last| last.saturating_add(1)).max(self.first());
        let kept = self.placed.filter(|_| self.has_placed());
        if let Some(placed) = kept
            && from < placed
            && from < self.end()
        {
            let message = format!("entry {from} is placed and cannot be truncated");
            return Err(Error::Unusable(message));
        }
        Ok((from, self.cut(from)))
    }

    /// Whether any entry was ever placed: until then `placed` is only where placing begins.
    fn has_placed(&self) -> bool {
        self.checkpoint.is_some()
            || self.purged.is_some()
            || !self.sealed_by_index.is_empty()
            || self.slots.front().is_some_and(|slot| slot.place != Place::Unknown)
    }

    /// Drops the slots from `from` on.
    fn cut(&mut self, from: u64) -> Vec<Slot> {
        let keep = self.slots.partition_point(|slot| slot.id.index < from);
        let cut: Vec<Slot> = self.slots.drain(keep..).collect();
        for slot in &cut {
            self.tail_bytes -= slot.payload.as_ref().map_or(0, |_| slot.cost());
            if let Some(held) = self.held.get_mut(&slot.segment) {
                held.frame_bytes -= u64::from(slot.frame_len);
            }
        }
        self.evicted = self.evicted.min(keep);
        if self.end() > from {
            self.last = self.last_before(from);
            if self.synced.is_some_and(|synced| synced.index >= from) {
                self.synced = self.last;
            }
        }
        if self.last.is_none() && !self.has_placed() {
            self.placed = None;
        }
        cut
    }

    /// Id of the last entry below `from`, or of the purge point.
    fn last_before(&self, from: u64) -> Option<LogId> {
        let slot = self.slots.back().map(|slot| slot.id);
        let sealed = || {
            let (_, segment) = self.sealed_by_index.range(..from).next_back()?;
            self.held.get(segment)?.entries.map(|(_, last)| last)
        };
        let last = slot.or_else(sealed);
        last.into_iter().chain(self.purged).max_by_key(|id| id.index)
    }

    /// Takes entries up to `upto` out of the Raft log. If another entry stands in its place, what
    /// follows that one is of another branch and goes too. What to drop outside the lock.
    pub(crate) fn purge(&mut self, upto: LogId) -> Result<Vec<Bytes>, Error> {
        if !self.memory && self.checkpoint.is_none_or(|at| at.index < upto.index) {
            let message = format!("entry {} is not checkpointed and cannot be purged", upto.index);
            return Err(Error::Unusable(message));
        }
        check_index(upto)?;
        if self.purged.is_some_and(|purged| purged.index >= upto.index) {
            return Ok(Vec::new());
        }
        let first = self.first();
        self.skip_places(upto.index + 1);
        let conflicts = self.slot(upto.index).is_some_and(|slot| slot.id != upto);
        let cut = if conflicts { self.cut(upto.index) } else { Vec::new() };
        let mut gone: Vec<Bytes> = cut.into_iter().filter_map(|slot| slot.payload).collect();
        self.purged = Some(upto);
        if self.end() <= upto.index {
            self.last = Some(upto);
        }
        if self.memory {
            gone.extend(self.drop_dead(first, upto.index));
        }
        Ok(gone)
    }

    /// Entries below `next` that have no place are void: the state machine went past them by
    /// other means (a snapshot).
    fn skip_places(&mut self, next: u64) {
        let placed = self.placed.unwrap_or(0);
        if placed >= next && self.placed.is_some() {
            return;
        }
        let start = self.slots.partition_point(|slot| slot.id.index < placed);
        for slot in self.slots.range_mut(start..) {
            if slot.id.index < next && slot.place == Place::Unknown {
                slot.place = Place::Void;
            }
        }
        self.placed = Some(next);
    }

    /// Payloads of a memory log that a purge has made useless.
    fn drop_dead(&mut self, first: u64, last: u64) -> Vec<Bytes> {
        let start = self.slots.partition_point(|slot| slot.id.index < first);
        let end = self.slots.partition_point(|slot| slot.id.index <= last);
        let mut gone = Vec::new();
        for at in start..end {
            let dead = self.slots.get(at).is_some_and(|slot| self.is_dead(slot));
            if dead && let Some(slot) = self.slots.get_mut(at) {
                gone.extend(slot.payload.take());
            }
        }
        self.pop_slots(end - start);
        gone
    }

    /// Whether the state machine may be checkpointed at this entry.
    pub(crate) fn check_checkpoint(&self, at: LogId) -> Result<(), Error> {
        check_index(at)?;
        // What is checkpointed is committed: nothing else ever stands in its place, and no term
        // that comes after it is lower.
        let known = self.checkpoint.filter(|old| *old != at);
        if let Some(old) = known.filter(|old| old.index >= at.index || old.term > at.term) {
            let what = format!(
                "a checkpoint at entry {} of term {} would go back: there is one at entry {} of \
                 term {}",
                at.index, at.term, old.index, old.term
            );
            return Err(Error::Unusable(what));
        }
        let synced = self.state().synced.map_or(0, |id| id.index + 1);
        let placed = self.placed.is_some_and(|placed| at.index < placed);
        // The same one again, perhaps one that had run ahead of the log.
        let again = self.checkpoint.is_some_and(|old| old.index == at.index);
        // Ahead of the places it comes from elsewhere, and needs nothing of this log.
        if placed && at.index >= synced && !again {
            return Err(Error::Beyond { asked: at.index, next: synced });
        }
        Ok(())
    }

    /// Notes a checkpoint that is durable. Not earlier: entries that it ran ahead of become void,
    /// and a footer must not say so while an older checkpoint may come back.
    pub(crate) fn on_checkpoint(&mut self, at: LogId) {
        self.skip_places(at.index + 1);
        self.checkpoint = Some(at);
    }

    /// Removes entries that were queued but can never be written. False if one of them is placed:
    /// then nothing consistent is left.
    pub(crate) fn drop_unwritten(&mut self) -> (bool, Vec<Slot>) {
        let at = self.slots.partition_point(Slot::is_written);
        let Some(first) = self.slots.get(at) else { return (true, Vec::new()) };
        let consistent = first.place == Place::Unknown;
        let first = first.id.index;
        (consistent, self.cut(first))
    }
}
