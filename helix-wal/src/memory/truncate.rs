//! Shortening the log in memory: truncation at the end, purge at the front, and checkpoints.

use bytes::Bytes;

use crate::error::Error;
use crate::format::layout::NUMBERS_END;
use crate::memory::log::Log;
use crate::memory::slot::{PlacementState, Slot};
use crate::types::LogId;

/// Checks that an index is in range and another one can follow.
fn check_index(at: LogId) -> Result<(), Error> {
    if at.index < NUMBERS_END - 1 {
        return Ok(());
    }
    Err(Error::Unusable(format!("index {} is out of range", at.index)))
}

impl Log {
    /// Removes the entries after `last`.
    ///
    /// Returns the first removed index, and the slots to drop outside the lock.
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
        Ok((from, self.remove_from(from)))
    }

    /// Returns whether any entry was placed. Before that, `placed` is only the starting point.
    fn has_placed(&self) -> bool {
        self.checkpoint.is_some()
            || self.purged.is_some()
            || !self.sealed_by_index.is_empty()
            || self.slots.front().is_some_and(|slot| slot.place != PlacementState::Unknown)
    }

    /// Removes the slots from `from` on.
    fn remove_from(&mut self, from: u64) -> Vec<Slot> {
        let keep = self.slots.partition_point(|slot| slot.id.index < from);
        let remove_from: Vec<Slot> = self.slots.drain(keep..).collect();
        for slot in &remove_from {
            self.tail_bytes -= slot.payload.as_ref().map_or(0, |_| slot.cost());
            if let Some(held) = self.chain.get_mut(&slot.segment) {
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
        remove_from
    }

    /// Returns the id of the last entry below `from`, or of the purge point.
    fn last_before(&self, from: u64) -> Option<LogId> {
        let slot = self.slots.back().map(|slot| slot.id);
        let sealed = || {
            let (_, segment) = self.sealed_by_index.range(..from).next_back()?;
            self.chain.get(segment)?.entries.map(|(_, last)| last)
        };
        let last = slot.or_else(sealed);
        last.into_iter().chain(self.purged).max_by_key(|id| id.index)
    }

    /// Removes entries up to `upto` from the Raft log. Returns payloads to drop outside the lock.
    ///
    /// If another entry has the index of `upto`, the entries after it belong to another branch and
    /// are removed too.
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
        self.void_unplaced(upto.index + 1);
        let conflicts = self.slot(upto.index).is_some_and(|slot| slot.id != upto);
        let remove_from = if conflicts { self.remove_from(upto.index) } else { Vec::new() };
        let mut gone: Vec<Bytes> =
            remove_from.into_iter().filter_map(|slot| slot.payload).collect();
        self.purged = Some(upto);
        if self.end() <= upto.index {
            self.last = Some(upto);
        }
        if self.memory {
            gone.extend(self.drop_dead(first, upto.index));
        }
        Ok(gone)
    }

    /// Marks unplaced entries below `next` as void: a snapshot moved the state machine past them.
    fn void_unplaced(&mut self, next: u64) {
        let placed = self.placed.unwrap_or(0);
        if placed >= next && self.placed.is_some() {
            return;
        }
        let start = self.slots.partition_point(|slot| slot.id.index < placed);
        for slot in self.slots.range_mut(start..) {
            if slot.id.index < next && slot.place == PlacementState::Unknown {
                slot.place = PlacementState::Void;
            }
        }
        self.placed = Some(next);
    }

    /// Takes the payloads of an in-memory log that a purge made unneeded.
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

    /// Checks that the state machine may be checkpointed at this entry.
    pub(crate) fn check_checkpoint(&self, at: LogId) -> Result<(), Error> {
        check_index(at)?;
        // A checkpoint is committed: no other entry replaces it, and later terms are not lower.
        let known = self.checkpoint.filter(|old| *old != at);
        if let Some(old) = known.filter(|old| old.index >= at.index || old.term > at.term) {
            let what = format!(
                "checkpoint at entry {} of term {} is not after the current one at entry {} of \
                 term {}",
                at.index, at.term, old.index, old.term
            );
            return Err(Error::Unusable(what));
        }
        let synced = self.state().synced.map_or(0, |id| id.index + 1);
        let placed = self.placed.is_some_and(|placed| at.index < placed);
        // The same checkpoint again, perhaps one ahead of the log.
        let again = self.checkpoint.is_some_and(|old| old.index == at.index);
        // A checkpoint ahead of the placed entries comes from a snapshot and needs nothing of this
        // log.
        if placed && at.index >= synced && !again {
            return Err(Error::Beyond { asked: at.index, next: synced });
        }
        Ok(())
    }

    /// Records a durable checkpoint.
    ///
    /// Must not be called earlier: entries that the checkpoint passed become void, and a footer
    /// must not state that while an older checkpoint may still be recovered.
    pub(crate) fn on_checkpoint(&mut self, at: LogId) {
        self.void_unplaced(at.index + 1);
        self.checkpoint = Some(at);
    }

    /// Removes queued entries that can never be written.
    ///
    /// Returns false if one of them is placed, because the log is then inconsistent with the state
    /// machine.
    pub(crate) fn drop_unwritten(&mut self) -> (bool, Vec<Slot>) {
        let at = self.slots.partition_point(Slot::is_written);
        let Some(first) = self.slots.get(at) else { return (true, Vec::new()) };
        let consistent = first.place == PlacementState::Unknown;
        let first = first.id.index;
        (consistent, self.remove_from(first))
    }
}
