//! One entry in memory: whether it is written, whether it still has its payload, and where the
//! state machine put it.

use bytes::Bytes;

use crate::{Entry, LogId, Payload, Placement};

/// Segment of an entry that is not written yet: after all others.
pub(crate) const UNWRITTEN: u64 = u64::MAX;
/// What a slot costs beside its payload and head.
const SLOT_BYTES: usize = size_of::<Slot>() + 32;

/// What the state machine said about an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Unknown,
    Void,
    At(Placement),
}

impl Place {
    pub(crate) fn placement(self) -> Option<Placement> {
        match self {
            Self::At(placement) => Some(placement),
            Self::Unknown | Self::Void => None,
        }
    }
}

impl From<Option<Placement>> for Place {
    fn from(placement: Option<Placement>) -> Self {
        // Nothing could ever find an entry of no positions.
        placement.filter(|p| p.count > 0).map_or(Self::Void, Self::At)
    }
}

/// An entry in memory, with or without its payload.
#[derive(Debug)]
pub(crate) struct Slot {
    pub id: LogId,
    /// Tells the entry from another one that had the same index before a truncation.
    pub serial: u64,
    pub stream: u64,
    pub head: Bytes,
    pub payload: Option<Bytes>,
    pub payload_len: usize,
    pub payload_crc: u32,
    pub payload_crc_seed: u32,
    /// [`UNWRITTEN`] until the group it is in has been synced.
    pub segment: u64,
    pub offset: u32,
    pub frame_len: u32,
    pub place: Place,
}

impl Slot {
    /// The entry without its payload.
    pub(crate) fn head_entry(&self) -> Entry {
        let payload =
            Payload { bytes: Bytes::new(), crc: self.payload_crc, crc_seed: self.payload_crc_seed };
        Entry { id: self.id, stream: self.stream, head: self.head.clone(), payload }
    }

    pub(crate) fn is_written(&self) -> bool {
        self.segment != UNWRITTEN
    }

    /// What the slot counts for in the tail's budget while it has its payload. Small payloads
    /// must not fill the memory with slots.
    pub(crate) fn cost(&self) -> usize {
        self.payload_len + self.head.len() + SLOT_BYTES
    }
}

/// An entry that has become durable.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Written {
    pub index: u64,
    pub serial: u64,
    pub offset: u32,
}
