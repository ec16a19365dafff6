//! The commands: each maps its arguments to client calls and the response to a result.
//! `output` and `report` print results and errors.

pub(crate) mod access;
pub(crate) mod cert;
pub(crate) mod cheat;
pub(crate) mod check;
pub(crate) mod cluster;
pub(crate) mod compression_sample;
pub(crate) mod config;
pub(crate) mod confirm;
pub(crate) mod consume;
pub(crate) mod consume_group;
pub(crate) mod context;
pub(crate) mod debug;
pub(crate) mod explain;
pub(crate) mod group;
pub(crate) mod offsets;
pub(crate) mod produce;
pub(crate) mod quota;
pub(crate) mod records;
pub(crate) mod server;
mod skipped;
pub(crate) mod tail;
pub(crate) mod top;
pub(crate) mod topic;
pub(crate) mod trace;
pub(crate) mod version;
pub(crate) mod wal;
