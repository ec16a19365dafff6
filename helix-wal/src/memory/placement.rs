//! Placement of entries by the state machine, in index order.

use std::sync::Arc;

use crate::error::Error;
use crate::files::segment::Segment;
use crate::format::layout::is_within_bounds;
use crate::memory::log::Log;
use crate::memory::slot::{PlacementState, UNWRITTEN};
use crate::types::Placement;

/// Result of placing an entry.
#[derive(Debug)]
pub(crate) enum PlaceOutcome {
    /// The entry is placed. `may_seal`: a rolled segment may be ready to be sealed.
    Done { may_seal: bool },
    /// The entry is in a sealed segment, whose footer states its placement.
    Sealed(Arc<Segment>),
}

impl Log {
    pub(crate) fn place(
        &mut self,
        index: u64,
        placement: Option<Placement>,
    ) -> Result<PlaceOutcome, Error> {
        self.check_place(index)?;
        if placement.is_some_and(|placement| !is_within_bounds(&placement)) {
            return Err(Error::Unusable(format!("entry {index} has positions out of range")));
        }
        let place = PlacementState::from(placement);
        let Some(at) = self.find(index) else { return self.place_sealed(index) };
        let next = self.slots.get(at + 1).map_or(UNWRITTEN, |slot| slot.segment);
        if let PlacementState::At(placement) = place {
            self.check_placement(index, &placement)?;
        }
        let Some(slot) = self.slots.get_mut(at) else {
            return Ok(PlaceOutcome::Done { may_seal: false });
        };
        slot.place = place;
        let (segment, frame_len, written) = (slot.segment, slot.frame_len, slot.is_written());
        self.placed = Some(self.slots.get(at + 1).map_or(index + 1, |slot| slot.id.index));
        if let PlacementState::At(placement) = place {
            self.add_entry_ref(index, placement);
            if written {
                self.add_to_share(segment, placement, frame_len);
            }
        }
        // A segment that still receives groups is checked again when it is rolled.
        let ends = written && next != segment && self.is_rolled(segment);
        Ok(PlaceOutcome::Done { may_seal: ends })
    }

    fn check_place(&self, index: u64) -> Result<(), Error> {
        let next = self.placed.unwrap_or(index);
        if index < next {
            return Err(Error::Unusable(format!("entry {index} is already placed")));
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

    fn place_sealed(&self, index: u64) -> Result<PlaceOutcome, Error> {
        let held = self.sealed_segment(index);
        held.map(PlaceOutcome::Sealed)
            .ok_or_else(|| Error::Unusable(format!("entry {index} does not exist")))
    }

    /// Marks an entry of a sealed segment as placed, after its footer agreed.
    pub(crate) fn on_sealed_placed(&mut self, index: u64) {
        if self.placed == Some(index) {
            let end = self.sealed_by_index.range(..=index).next_back();
            let last = end.and_then(|(_, id)| self.chain.get(id)?.entries).map(|(_, last)| last);
            // The last entry of a segment is followed by the first entry of the next one.
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
