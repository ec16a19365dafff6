//! The writer, checkpoints, and segments of entries from other replicas.

mod checkpoint;
pub(crate) mod cold_writer;
mod space;
pub(crate) mod writer;
