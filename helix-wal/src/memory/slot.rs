//! An entry in memory: its payload, its location on disk and its placement.

use bytes::Bytes;

use crate::format::frame::frame_len;
use crate::types::{Entry, LiveEntry, LogId, Payload, Placement};

/// Segment of an unwritten entry; sorts after all others.
pub(crate) const UNWRITTEN: u64 = u64::MAX;
/// Memory cost of a slot, besides its payload and head.
const SLOT_BYTES: usize = size_of::<Slot>() + 32;

/// Placement of an entry by the state machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PlacementState {
    Unknown,
    Void,
    At(Placement),
}

impl PlacementState {
    pub(crate) fn placement(self) -> Option<Placement> {
        match self {
            Self::At(placement) => Some(placement),
            Self::Unknown | Self::Void => None,
        }
    }
}

impl From<Option<Placement>> for PlacementState {
    fn from(placement: Option<Placement>) -> Self {
        // An entry without positions cannot be found by position.
        placement.filter(|p| p.count > 0).map_or(Self::Void, Self::At)
    }
}

/// An entry in memory, with or without its payload.
#[derive(Debug)]
pub(crate) struct Slot {
    pub id: LogId,
    /// Distinguishes the entry from an earlier one with the same index, before a truncation.
    pub serial: u64,
    pub stream: u64,
    pub head: Bytes,
    pub payload: Option<Bytes>,
    pub payload_len: usize,
    pub payload_crc: u32,
    pub payload_crc_seed: u32,
    /// [`UNWRITTEN`] until the group of the entry is synced.
    pub segment: u64,
    pub offset: u32,
    pub frame_len: u32,
    pub place: PlacementState,
}

impl Slot {
    /// Returns the entry without its payload.
    pub(crate) fn head_entry(&self) -> Entry {
        let payload =
            Payload { bytes: Bytes::new(), crc: self.payload_crc, crc_seed: self.payload_crc_seed };
        Entry { id: self.id, stream: self.stream, head: self.head.clone(), payload }
    }

    pub(crate) fn is_written(&self) -> bool {
        self.segment != UNWRITTEN
    }

    /// Returns the memory cost of the slot while it has its payload.
    ///
    /// Includes the slot itself, so that small payloads cannot fill the memory with slots.
    pub(crate) fn cost(&self) -> usize {
        self.payload_len + self.head.len() + SLOT_BYTES
    }

    /// Creates a placed slot of an in-memory log.
    pub(crate) fn placed(entry: LiveEntry) -> Self {
        let LiveEntry { id, placement, head, payload } = entry;
        let payload_len = payload.bytes.len();
        Self {
            id,
            serial: 0,
            stream: placement.stream,
            frame_len: frame_len(head.len(), payload_len) as u32,
            head,
            payload: Some(payload.bytes),
            payload_len,
            payload_crc: payload.crc,
            payload_crc_seed: payload.crc_seed,
            segment: 0,
            offset: 0,
            place: PlacementState::At(placement),
        }
    }
}

/// An entry that has become durable.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WrittenEntry {
    pub index: u64,
    pub serial: u64,
    pub offset: u32,
}
