//! Tests of the server as its clients see it, and of the rules its source keeps.
//! One binary: each module is one subject.

// In a test, what must not fail is unwrapped: the panic is the report. Clippy's own exception
// covers the test functions, not what they share.
#![allow(clippy::unwrap_used)]

mod append_stream;
mod binary;
mod cluster;
mod consume;
mod disk_failure;
mod kill;
mod peer;
mod peer_nodes;
mod peer_wire;
mod process;
mod produce;
mod services;
mod shutdown;
mod simulation;
mod subscribe;
mod suite;
mod support;
mod three_nodes;
mod three_nodes_calls;
mod three_nodes_catch_up;
mod three_nodes_failover;
mod three_nodes_forming;
mod three_nodes_reads;
mod tidy;
mod topics;
