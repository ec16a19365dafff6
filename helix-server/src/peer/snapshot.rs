//! The receiver's side of a snapshot: its chunks, and the records that it refers to.
//! A snapshot holds bookkeeping only. A data shard's replica fetches the records that it lacks from
//! the sender, before it installs the snapshot.

pub(super) mod assembly;
pub(super) mod fetcher;
pub(super) mod records;
pub(super) mod source;
pub(super) mod split_log;
mod staged;
