//! The log's files: segments, the state file and the data directory.

pub(crate) mod active_segment;
pub(crate) mod aligned;
pub(crate) mod cold_segment;
pub(crate) mod data_dir;
pub(crate) mod footer_cache;
pub(crate) mod open_files;
pub(crate) mod open_segment;
pub(crate) mod read_buffers;
pub(crate) mod scan;
pub(crate) mod segment;
pub(crate) mod state_file;
