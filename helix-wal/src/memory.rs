//! The log in memory. Performs no I/O and never waits.

pub(crate) mod live_segment;
pub(crate) mod log;
mod log_segments;
mod log_streams;
pub(crate) mod placement;
pub(crate) mod slot;
pub(crate) mod stream;
mod truncate;
