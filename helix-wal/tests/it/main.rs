//! What the log promises, held against disks that forget, tear, garble, fill up and fail.
//! One binary; each module is one kind of trouble.

#![allow(clippy::unwrap_used, clippy::disallowed_methods)]
// Nothing outside can reach into a test binary.
#![allow(unreachable_pub)]

mod aside;
mod cold;
mod common;
mod compaction;
mod concurrency;
mod corruption;
mod crash;
mod explore;
mod faults;
mod golden;
#[cfg(shuttle)]
mod interleavings;
mod matrix;
mod model;
mod reads;
mod reopened;
mod segment_repair;
mod truth;
mod withheld;
