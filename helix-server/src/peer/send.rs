//! The leader's side: openraft's network, appends, and snapshots.

pub(super) mod appends;
pub(super) mod replica_network;
pub(super) mod route;
pub(super) mod snapshot;
