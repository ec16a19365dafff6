//! Helix's server: partitioned, replicated, append-only logs over gRPC.
//! Modules in reading order, top down; `docs/ARCHITECTURE.md` draws the way of a record.

pub mod daemon;
pub mod server;

pub mod config;
pub mod limits;
pub mod memory;

pub mod flow;
pub mod load;

pub mod admin;
pub mod api;
pub mod peer;

pub mod node;

mod drive;

pub mod cluster;

pub mod shard;

pub mod raft;

pub mod log;

pub mod clock;
pub mod error;
#[cfg(test)]
mod made_docs;
pub mod metrics;
mod process;
pub mod protocol;
pub mod random;
