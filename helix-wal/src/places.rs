//! Takes the word of the state machine on where each entry is, in order, and checks it.

use std::sync::Arc;

use crate::layout::is_within_bounds;
use crate::log::Log;
use crate::segment::Segment;
use crate::slot::{Place, UNWRITTEN};
use crate::{Error, Placement};

/// What `place` found out.
#[derive(Debug)]
pub(crate) enum Placed {
    /// Done; whether a rolled segment may have become ready to be sealed.
    Done { may_seal: bool },
    /// The entry is in a sealed segment: its footer says where it must be.
    Sealed(Arc<Segment>),
}

impl Log {
    pub(crate) fn place(
        &mut self,
        index: u64,
        placement: Option<Placement>,
    ) -> Result<Placed, Error> {
        self.check_place(index)?;
        if placement.is_some_and(|placement| !is_within_bounds(&placement)) {
            return Err(Error::Unusable(format!("entry {index} was placed beyond all positions")));
        }
        let place = Place::from(placement);
        let Some(at) = self.find(index) else { return self.place_sealed(index) };
        let next = self.slots.get(at + 1).map_or(UNWRITTEN, |slot| slot.segment);
        if let Place::At(placement) = place {
            self.check_placement(index, &placement)?;
        }
        let Some(slot) = self.slots.get_mut(at) else {
            return Ok(Placed::Done { may_seal: false });
        };
        slot.place = place;
        let (segment, frame_len, written) = (slot.segment, slot.frame_len, slot.is_written());
        self.placed = Some(self.slots.get(at + 1).map_or(index + 1, |slot| slot.id.index));
        if let Place::At(placement) = place {
            self.note_ref(index, placement);
            if written {
                self.note_row(segment, placement, frame_len);
            }
        }
        // A segment that is still written to is asked about again when it is rolled.
        let ends = written && next != segment && self.is_rolled(segment);
        Ok(Placed::Done { may_seal: ends })
    }

    fn check_place(&self, index: u64) -> Result<(), Error> {
        let next = self.placed.unwrap_or(index);
        if index < next {
            return Err(Error::Unusable(format!("entry {index} is placed already")));
        }
        if index >= self.end() {
            return Err(Error::Beyond { asked: index, next: self.end() });
        }
        if index > next {
            let message = format!("entry {index} was placed before entry {next}");
            return Err(Error::Unusable(message));
        }
        Ok(())
    }

    fn place_sealed(&self, index: u64) -> Result<Placed, Error> {
        let held = self.sealed_segment(index);
        held.map(Placed::Sealed)
            .ok_or_else(|| Error::Unusable(format!("there is no entry {index}")))
    }

    /// Counts an entry of a sealed segment as placed, after its footer agreed.
    pub(crate) fn on_sealed_placed(&mut self, index: u64) {
        if self.placed == Some(index) {
            let end = self.sealed_by_index.range(..=index).next_back();
            let last = end.and_then(|(_, id)| self.held.get(id)?.entries).map(|(_, last)| last);
            // After the last entry of a segment comes the first of the next, wherever that is.
            let follows = last.is_some_and(|last| last.index == index).then(|| {
                let slot = self.slots.partition_point(|slot| slot.id.index <= index);
                let slot = self.slots.get(slot).map(|slot| slot.id.index);
                let sealed = self.sealed_by_index.range(index + 1..).next().map(|(i, _)| *i);
                slot.into_iter().chain(sealed).min()
            });
            self.placed = Some(follows.flatten().unwrap_or(index + 1));
        }
    }
}
