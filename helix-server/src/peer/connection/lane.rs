//! The three lanes between a pair of nodes.

use helix_proto::raft::v1 as pb;

/// Purpose of a stream: `pb::Lane` without its unset value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::peer) enum PeerLane {
    /// Entries for followers that keep up.
    Live,
    /// Votes, heartbeats and leadership transfers.
    Control,
    /// Entries for followers that are behind, snapshots, and the records that snapshots refer to.
    CatchUp,
}

impl PeerLane {
    pub(in crate::peer) const ALL: [Self; 3] = [Self::Live, Self::Control, Self::CatchUp];

    pub(super) fn to_wire(self) -> pb::Lane {
        match self {
            Self::Live => pb::Lane::Live,
            Self::Control => pb::Lane::Control,
            Self::CatchUp => pb::Lane::CatchUp,
        }
    }

    /// Returns `None` for an unset or unknown lane.
    pub(in crate::peer) fn from_wire(lane: i32) -> Option<Self> {
        match pb::Lane::try_from(lane).ok()? {
            pb::Lane::Unspecified => None,
            pb::Lane::Live => Some(Self::Live),
            pb::Lane::Control => Some(Self::Control),
            pb::Lane::CatchUp => Some(Self::CatchUp),
        }
    }
}
