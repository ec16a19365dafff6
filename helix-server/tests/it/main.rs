//! Tests of the server as its clients see it, and of the rules its source keeps.
//! One binary: each module is one subject.

// In a test, what must not fail is unwrapped: the panic is the report. Clippy's own exception
// covers the test functions, not what they share.
#![allow(clippy::unwrap_used)]

mod admin;
mod append_stream;
mod bad_input;
mod bad_start;
mod binary;
mod captured_log;
mod cluster;
mod compaction;
mod conditions;
mod consume;
mod disk_failure;
mod disk_full;
mod fleet;
mod golden;
mod kill;
mod limits;
mod peer;
mod peer_nodes;
mod peer_records;
mod peer_wire;
mod process;
mod produce;
mod recipes;
mod reflection;
mod retention;
mod services;
mod shutdown;
mod simulated_trio;
mod simulation;
mod small_disk;
mod subscribe;
mod suite;
mod support;
mod three_nodes;
mod throttled;
mod tidy;
mod topics;
mod trio;
mod versions;
