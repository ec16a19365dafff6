//! What the frames of the unsealed segments come to: entries, vote, purge point. In memory only;
//! nothing is written here.

use std::sync::Arc;

use bytes::Bytes;

use crate::frame::{Context, FrameHeader, Kind, SegmentHeader};
use crate::layout::segment_name;
use crate::recovery::missing;
use crate::scan::{Known, scan};
use crate::segment::Segment;
use crate::slot::{Place, Slot};
use crate::state_file::State;
use crate::{Error, LogId};

/// Whether an entry may stand behind `last`: next to it, or behind a gap that a purge left.
fn follows(last: Option<LogId>, purged: Option<LogId>, index: u64) -> bool {
    last.is_none_or(|last| {
        let in_gap = last.index < index && purged.is_some_and(|p| index <= p.index + 1);
        last.index + 1 == index || in_gap
    })
}

/// What the frames of the unsealed segments come to, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Replay {
    pub slots: Vec<Slot>,
    pub vote: Option<Bytes>,
    pub purged: Option<LogId>,
    /// Last entry, or the purge point if a purge went beyond it.
    pub last: Option<LogId>,
    /// The newest commit point whose entry is still in the log.
    pub committed: Option<LogId>,
    /// Commit points that were met on the way.
    hints: Vec<LogId>,
    pub cut_bytes: u64,
    /// Where each of the segments ended.
    pub ends: Vec<u64>,
    /// Whether damage is taken for the end of the log.
    pub forgive: bool,
    /// What that was, in the last segment of `ends`.
    pub damage: Option<Error>,
}

impl Replay {
    pub(crate) fn read(
        &mut self,
        unsealed: &[(Arc<Segment>, SegmentHeader)],
        state: &State,
    ) -> Result<(), Error> {
        if let Some((_, header)) = unsealed.first() {
            let Context { vote, purged, last, committed, .. } = header.context.clone();
            (self.vote, self.purged, self.last) = (vote, purged, last);
            self.hints.extend(committed);
        }
        for (at, (segment, header)) in unsealed.iter().enumerate() {
            if header.file_len != segment.len {
                let bytes = header.file_len.min(segment.len)..header.file_len.max(segment.len);
                return Err(segment.damaged(bytes, "the file has not the size it was made with"));
            }
            let next = unsealed.get(at + 1).map(|(_, header)| header);
            if let Some(next) = next.filter(|next| next.predecessor.segment != segment.id) {
                return Err(missing(next.predecessor.segment));
            }
            let synced = Some(state.synced).filter(|synced| synced.segment == segment.id);
            let known = Known {
                end: next.map(|next| next.predecessor.at),
                synced: synced.map_or(0, |synced| synced.at),
                forgive: self.forgive,
            };
            let mut visit = |frame: &FrameHeader, bytes: &[u8]| self.apply(segment, frame, bytes);
            let scanned = scan(segment, header, known, &mut visit)?;
            if scanned.damage.is_some() {
                self.hints.extend(scanned.committed);
                self.ends.push(scanned.end);
                self.damage = scanned.damage;
                return Ok(());
            }
            if next.is_some_and(|next| next.context.last_group != scanned.last_group) {
                return Err(
                    segment.damaged(0..scanned.end, "the next segment follows another group")
                );
            }
            self.hints.extend(scanned.committed);
            self.cut_bytes += scanned.cut_bytes;
            self.ends.push(scanned.end);
        }
        Ok(())
    }

    fn apply(&mut self, segment: &Segment, frame: &FrameHeader, bytes: &[u8]) -> Result<(), Error> {
        let head = bytes.get(frame.head()).unwrap_or_default();
        match frame.kind {
            Kind::Vote => self.vote = Some(Bytes::copy_from_slice(head)),
            Kind::Purge => {
                self.purge(frame.id, head.first() == Some(&1));
            }
            Kind::Truncate => {
                let from = frame.id.index;
                if self.last.is_some_and(|last| last.index >= from) {
                    let keep = self.slots.partition_point(|slot| slot.id.index < from);
                    self.slots.truncate(keep);
                    let id = LogId { term: frame.id.term, index: from.saturating_sub(1) };
                    self.last = head.first().is_some_and(|has| *has == 1).then_some(id);
                }
            }
            Kind::Entry => self.push(segment, frame, head)?,
        }
        Ok(())
    }

    /// As in the log: if another entry stands in the place of the purge point, what follows it is
    /// of another branch. `empties` says so where that entry's segment is gone.
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
            return Err(segment.damaged(range, "an entry does not follow the one before it"));
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
            place: Place::Unknown,
        });
        self.last = Some(frame.id);
        Ok(())
    }

    /// Gives the entries up to the checkpoint their places and brings the rest in line.
    pub(crate) fn settle(&mut self, state: &State) {
        if let Some((at, _)) = &state.checkpoint {
            let mut placements = state.placements.iter().peekable();
            for slot in self.slots.iter_mut().take_while(|slot| slot.id.index <= at.index) {
                let index = slot.id.index;
                while placements.next_if(|(placed, _)| *placed < index).is_some() {}
                // Entries that the checkpoint ran ahead of have none.
                let placed = placements.next_if(|(placed, _)| *placed == index);
                slot.place = Place::from(placed.and_then(|(_, placement)| *placement));
            }
        }
        // A purge may have freed segments before its own frame was durable.
        if let Some(purged) = state.purged {
            self.purge(purged, false);
        }
        self.last = self.last.into_iter().chain(self.purged).max_by_key(|id| id.index);
    }

    /// Finds the newest commit point: among those that were met, and by what the sealed segments,
    /// of which `sealed` is the last entry, hold. Once the entries are settled.
    pub(crate) fn find_committed(&mut self, state: &State, sealed: Option<LogId>) {
        // A segment is sealed once all of its entries are placed, and only what is committed is.
        // The groups that said so may be torn: who went by them alone would ask for entries that
        // are placed, and could never install a snapshot that brings them again. Up to the
        // checkpoint it tells nothing: a snapshot may have gone past entries of another branch.
        let checkpoint = state.checkpoint.as_ref().map(|(at, _)| at.index);
        let sealed = sealed.filter(|last| Some(last.index) > checkpoint);
        let hints = self.hints.iter().copied().chain(state.committed);
        let known = hints.filter(|id| self.holds(*id)).chain(sealed);
        self.committed = known.max_by_key(|id| id.index);
    }

    /// Holds the entries against those of the sealed segments, of which `sealed` is the last. What
    /// is copied begins there, and whoever reads the copy must find the same: what could not be
    /// read back is refused before anything is written. A sealed segment may have fewer entries
    /// than it was left with: where damage has taken the truncation, this is all that tells of it.
    pub(crate) fn join(
        &mut self,
        sealed: Option<LogId>,
        unsealed: &[(Arc<Segment>, SegmentHeader)],
    ) -> Result<(), Error> {
        let mut last = sealed;
        let stray = self.slots.iter().position(|slot| {
            let stray = !follows(last, self.purged, slot.id.index);
            last = Some(slot.id);
            stray
        });
        let damage = match stray.and_then(|at| self.slots.get(at)) {
            Some(slot) => {
                let (start, len) = (u64::from(slot.offset), u64::from(slot.frame_len));
                let what = "an entry does not follow those of the segments before it".to_owned();
                let file = segment_name(slot.segment);
                Some(Error::Damaged { file, bytes: start..start + len, what })
            }
            None if self.end(sealed) != self.last => unsealed.last().map(|(segment, _)| {
                let end = self.ends.last().copied().unwrap_or(segment.len);
                segment.damaged(0..end, "the log ends elsewhere than its entries")
            }),
            None => None,
        };
        match damage {
            Some(damage) if !self.forgive => return Err(damage),
            Some(damage) => {
                self.damage.get_or_insert(damage);
            }
            None => return Ok(()),
        }
        // What would have led there is among what is given up.
        self.slots.truncate(stray.unwrap_or(self.slots.len()));
        self.last = self.end(sealed);
        Ok(())
    }

    /// Where the log ends by its entries.
    fn end(&self, sealed: Option<LogId>) -> Option<LogId> {
        let entries = self.slots.last().map(|slot| slot.id).or(sealed);
        entries.into_iter().chain(self.purged).max_by_key(|id| id.index)
    }

    /// Whether an entry survived. A commit point can be durable before its entry is: an older
    /// entry in that place, or before it, is not known to be committed.
    fn holds(&self, id: LogId) -> bool {
        match self.slots.binary_search_by_key(&id.index, |slot| slot.id.index) {
            Ok(at) => self.slots.get(at).is_some_and(|slot| slot.id == id),
            // Whatever is sealed or purged was committed.
            Err(before) => before == 0 && self.last.is_some_and(|last| id.index <= last.index),
        }
    }
}
