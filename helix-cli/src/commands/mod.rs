//! The commands: each turns its arguments into calls of the client and its answer into a result.
//! How results and errors look is decided in `output` and `report`.

pub(crate) mod cheat;
pub(crate) mod check;
pub(crate) mod cluster;
pub(crate) mod config;
pub(crate) mod consume;
pub(crate) mod context;
pub(crate) mod explain;
pub(crate) mod offsets;
pub(crate) mod produce;
pub(crate) mod records;
pub(crate) mod results;
pub(crate) mod server;
pub(crate) mod spans;
pub(crate) mod tail;
pub(crate) mod topic;
pub(crate) mod version;
pub(crate) mod wal;
