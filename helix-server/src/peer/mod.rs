//! Node to node. With `raft` the only room that knows openraft.
//! Shards have one voter in this version, so there is nobody to talk to.

mod solitary;

pub use solitary::Solitary;
