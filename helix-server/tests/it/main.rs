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
mod process;
mod produce;
mod services;
mod shutdown;
mod simulation;
mod subscribe;
mod suite;
mod support;
mod tidy;
mod topics;
