//! Compressor and decompressor of the cleaners.

use std::sync::{Arc, Mutex};

use helix_proto::compaction::Codecs;

use crate::sync;

/// Codecs of all cleaners of a node, which take turns: their buffers have the size of the largest
/// batch.
#[derive(Debug, Clone, Default)]
pub struct CleanerCodecs(Arc<Mutex<Option<Codecs>>>);

impl CleanerCodecs {
    /// Runs work on one batch.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut Codecs) -> T) -> T {
        work(sync::lock(&self.0).get_or_insert_default())
    }

    /// Frees the buffers.
    pub(super) fn clear(&self) {
        *sync::lock(&self.0) = None;
    }
}
