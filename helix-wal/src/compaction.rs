//! Rewriting live entries of sealed segments into cold ones.

mod cleaning;
pub(crate) mod compactor;
mod detached;
mod job;
mod policy;
mod reading;
mod replacing;
mod writing;
