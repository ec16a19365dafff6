//! Tests of the log's guarantees on disks that lose, tear and garble data, fill up and fail.
//! One binary; each module covers one kind of fault.

#![allow(clippy::unwrap_used, clippy::disallowed_methods)]
// A test binary has no users.
#![allow(unreachable_pub)]

mod cleaning;
mod common;
mod compaction;
mod concurrency;
mod corruption;
mod crash;
mod explore;
mod faults;
mod golden;
mod install;
#[cfg(shuttle)]
mod interleavings;
mod matrix;
mod model;
mod quarantine;
mod quarantined_segments;
mod reads;
mod reopened;
mod segment_repair;
mod shortage;
mod truth;
