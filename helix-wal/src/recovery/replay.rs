//! Replays the frames of the unsealed segments: entries, vote and purge point. Writes nothing.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::error::Error;
use crate::files::open_segment::missing_segment;
use crate::files::scan::{ScanBounds, scan};
use crate::files::segment::Segment;
use crate::format::frame::{Context, FrameHeader, FrameKind, SegmentHeader};
use crate::format::layout::segment_name;
use crate::format::state::PersistedState;
use crate::memory::slot::{PlacementState, Slot};
use crate::types::LogId;

/// Returns whether an entry may follow `last`: the next index, or after a gap left by a purge.
fn follows(last: Option<LogId>, purged: Option<LogId>, index: u64) -> bool {
    last.is_none_or(|last| {
        let in_gap = last.index < index && purged.is_some_and(|p| index <= p.index + 1);
        last.index + 1 == index || in_gap
    })
}

/// Result of replaying the frames of the unsealed segments in order.
#[derive(Debug, Default)]
pub(crate) struct Replay {
    pub slots: Vec<Slot>,
    pub vote: Option<Bytes>,
    pub purged: Option<LogId>,
    /// Last entry, or the purge point if it is later.
    pub last: Option<LogId>,
    /// The newest commit point whose entry is still in the log.
    pub committed: Option<LogId>,
    /// Commit points found during the replay.
    commit_hints: Vec<LogId>,
    pub torn_bytes: u64,
    /// File and range of the torn bytes.
    pub torn_tail: Option<(String, Range<u64>)>,
    /// End of each segment.
    pub ends: Vec<u64>,
    /// Treats damage as the end of the log.
    pub tolerate_damage: bool,
    /// The tolerated damage, in the last segment of `ends`.
    pub damage: Option<Error>,
}

impl Replay {
    pub(crate) fn read(
        &mut self,
        unsealed: &[(Arc<Segment>, SegmentHeader)],
        state: &PersistedState,
    ) -> Result<(), Error> {
        if let Some((_, header)) = unsealed.first() {
            let Context { vote, purged, last, committed, .. } = header.context.clone();
            (self.vote, self.purged, self.last) = (vote, purged, last);
            self.commit_hints.extend(committed);
        }
        for (at, (segment, header)) in unsealed.iter().enumerate() {
            if header.file_len != segment.len {
                let bytes = header.file_len.min(segment.len)..header.file_len.max(segment.len);
                return Err(segment.damaged(bytes, "the file size differs from its header"));
            }
            let next = unsealed.get(at + 1).map(|(_, header)| header);
            if let Some(next) = next.filter(|next| next.predecessor.segment != segment.id) {
                return Err(missing_segment(next.predecessor.segment));
            }
            let synced = Some(state.synced).filter(|synced| synced.segment == segment.id);
            let known = ScanBounds {
                end: next.map(|next| next.predecessor.at),
                synced: synced.map_or(0, |synced| synced.at),
                tolerate_damage: self.tolerate_damage,
            };
            let mut visit = |frame: &FrameHeader, bytes: &[u8]| self.apply(segment, frame, bytes);
            let scanned = scan(segment, header, known, &mut visit)?;
            if scanned.damage.is_some() {
                self.commit_hints.extend(scanned.committed);
                self.ends.push(scanned.end);
                self.damage = scanned.damage;
                return Ok(());
            }
            if next.is_some_and(|next| next.context.last_group != scanned.last_group) {
                return Err(
                    segment.damaged(0..scanned.end, "the next segment names another last group")
                );
            }
            self.commit_hints.extend(scanned.committed);
            self.torn_bytes += scanned.torn_bytes;
            if scanned.torn_bytes > 0 {
                let torn = scanned.end..scanned.end + scanned.torn_bytes;
                self.torn_tail = Some((segment.name(), torn));
            }
            self.ends.push(scanned.end);
        }
        Ok(())
    }

    fn apply(&mut self, segment: &Segment, frame: &FrameHeader, bytes: &[u8]) -> Result<(), Error> {
        let head = bytes.get(frame.head()).unwrap_or_default();
        match frame.kind {
            FrameKind::Vote => self.vote = Some(Bytes::copy_from_slice(head)),
            FrameKind::Purge => {
                self.purge(frame.id, head.first() == Some(&1));
            }
            FrameKind::Truncate => {
                let from = frame.id.index;
                if self.last.is_some_and(|last| last.index >= from) {
                    let keep = self.slots.partition_point(|slot| slot.id.index < from);
                    self.slots.truncate(keep);
                    let id = LogId { term: frame.id.term, index: from.saturating_sub(1) };
                    self.last = head.first().is_some_and(|has| *has == 1).then_some(id);
                }
            }
            FrameKind::Entry => self.push(segment, frame, head)?,
        }
        Ok(())
    }

    /// Applies a purge, as the log in memory does.
    ///
    /// If another entry has the index of the purge point, the entries after it belong to another
    /// branch. `empties` reports that conflict if the segment of that entry is gone.
    fn purge(&mut self, upto: LogId, empties: bool) {
        if self.purged.is_some_and(|purged| purged.index >= upto.index) {
            return;
        }
        self.purged = Some(upto);
        let at = self.slots.partition_point(|slot| slot.id.index < upto.index);
        let there = self.slots.get(at).filter(|slot| slot.id.index == upto.index);
        let conflicts = match there {
            Some(slot) => slot.id != upto,
            None => empties,
        };
        if conflicts {
            self.slots.truncate(at);
        }
        if conflicts || self.last.is_none_or(|last| last.index < upto.index) {
            self.last = Some(upto);
        }
    }

    fn push(&mut self, segment: &Segment, frame: &FrameHeader, head: &[u8]) -> Result<(), Error> {
        if !follows(self.last, self.purged, frame.id.index) {
            let range = frame.place.at..frame.place.at + frame.len() as u64;
            return Err(segment.damaged(range, "an entry does not follow the previous one"));
        }
        self.slots.push(Slot {
            id: frame.id,
            serial: 0,
            stream: frame.stream,
            head: Bytes::copy_from_slice(head),
            payload: None,
            payload_len: frame.payload_len,
            payload_crc: frame.payload_crc,
            payload_crc_seed: frame.payload_crc_seed,
            segment: frame.place.segment,
            offset: frame.place.at as u32,
            frame_len: frame.len() as u32,
            place: PlacementState::Unknown,
        });
        self.last = Some(frame.id);
        Ok(())
    }

    /// Applies the placements and the purge point of the state file.
    pub(crate) fn apply_state(&mut self, state: &PersistedState) {
        if let Some((at, _)) = &state.checkpoint {
            let mut placements = state.placements.iter().peekable();
            for slot in self.slots.iter_mut().take_while(|slot| slot.id.index <= at.index) {
                let index = slot.id.index;
                while placements.next_if(|(placed, _)| *placed < index).is_some() {}
                // Entries that the checkpoint passed have no placement.
                let placed = placements.next_if(|(placed, _)| *placed == index);
                slot.place = PlacementState::from(placed.and_then(|(_, placement)| *placement));
            }
        }
        // A purge may have freed segments before its own frame was durable.
        if let Some(purged) = state.purged {
            self.purge(purged, false);
        }
        self.last = self.last.into_iter().chain(self.purged).max_by_key(|id| id.index);
    }

    /// Finds the newest commit point, from the replay and from `sealed`, the last sealed entry.
    ///
    /// Must follow `apply_state`.
    pub(crate) fn find_committed(&mut self, state: &PersistedState, sealed: Option<LogId>) {
        // A segment is sealed after all of its entries are placed, and only committed entries are
        // placed. The groups with the commit points may be torn. Without `sealed`, Raft would
        // replay entries that are already placed, and could never install a snapshot that contains
        // them. Up to the checkpoint `sealed` proves nothing, because a snapshot may have passed
        // entries of another branch.
        let checkpoint = state.checkpoint.as_ref().map(|(at, _)| at.index);
        let sealed = sealed.filter(|last| Some(last.index) > checkpoint);
        let commit_hints = self.commit_hints.iter().copied().chain(state.committed);
        let known = commit_hints.filter(|id| self.holds(*id)).chain(sealed);
        self.committed = known.max_by_key(|id| id.index);
    }

    /// Checks the entries against the last sealed entry, which the copy will follow.
    ///
    /// A copy that could not be read back is rejected before anything is written. A sealed segment
    /// may have fewer entries than when the next one was begun, because of a truncation. If damage
    /// destroyed the truncation, only this check detects it.
    pub(crate) fn check_against_sealed(
        &mut self,
        sealed: Option<LogId>,
        unsealed: &[(Arc<Segment>, SegmentHeader)],
    ) -> Result<(), Error> {
        let mut last = sealed;
        let first_stray = self.slots.iter().position(|slot| {
            let first_stray = !follows(last, self.purged, slot.id.index);
            last = Some(slot.id);
            first_stray
        });
        let damage = match first_stray.and_then(|at| self.slots.get(at)) {
            Some(slot) => {
                let (start, len) = (u64::from(slot.offset), u64::from(slot.frame_len));
                let what = "an entry does not follow those of the previous segments".to_owned();
                let file = segment_name(slot.segment);
                Some(Error::Damaged { file, bytes: start..start + len, what })
            }
            None if self.end(sealed) != self.last => unsealed.last().map(|(segment, _)| {
                let end = self.ends.last().copied().unwrap_or(segment.len);
                segment.damaged(0..end, "the end of the log differs from its last entry")
            }),
            None => None,
        };
        match damage {
            Some(damage) if !self.tolerate_damage => return Err(damage),
            Some(damage) => {
                self.damage.get_or_insert(damage);
            }
            None => return Ok(()),
        }
        // The frames that led there are in the discarded part.
        self.slots.truncate(first_stray.unwrap_or(self.slots.len()));
        self.last = self.end(sealed);
        Ok(())
    }

    /// Returns the end of the log, according to its entries.
    fn end(&self, sealed: Option<LogId>) -> Option<LogId> {
        let entries = self.slots.last().map(|slot| slot.id).or(sealed);
        entries.into_iter().chain(self.purged).max_by_key(|id| id.index)
    }

    /// Returns whether an entry survived.
    ///
    /// A commit point can be durable before its entry. An older entry with that index, or before
    /// it, is not known to be committed.
    fn holds(&self, id: LogId) -> bool {
        match self.slots.binary_search_by_key(&id.index, |slot| slot.id.index) {
            Ok(at) => self.slots.get(at).is_some_and(|slot| slot.id == id),
            // Sealed and purged entries were committed.
            Err(before) => before == 0 && self.last.is_some_and(|last| id.index <= last.index),
        }
    }
}
