//! Outgoing connections: one per peer and lane, and one more for single calls.

pub(super) mod lane;
pub(super) mod outgoing;
pub(super) mod peer;
pub(super) mod session;
pub(super) mod traffic;
