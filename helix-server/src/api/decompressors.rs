//! Decompressors of a node: their number and their buffers are bounded.
//! Small batches are decompressed on the async thread, larger ones on a blocking thread.

use std::sync::{Arc, Mutex};

use helix_proto::compression::{Decompressor, with_decompressor};
use tokio::sync::Semaphore;

use crate::error::{Error, Result};
use crate::limits::DECOMPRESS_IN_PLACE_BYTES;
use crate::shard::Shard;
use crate::sync;

/// Decompressors for large batches; each keeps the buffer of its largest one.
#[derive(Debug)]
pub(crate) struct Decompressors {
    permits: Arc<Semaphore>,
    /// At most as many as there are permits.
    idle: Mutex<Vec<Decompressor>>,
}

impl Decompressors {
    pub(crate) fn new(count: usize) -> Arc<Self> {
        let permits = Arc::new(Semaphore::new(count.clamp(1, Semaphore::MAX_PERMITS)));
        Arc::new(Self { permits, idle: Mutex::default() })
    }

    /// Returns true if a batch of this uncompressed size is decompressed on the async thread.
    pub(super) fn is_in_place(uncompressed_bytes: u32) -> bool {
        uncompressed_bytes as usize <= DECOMPRESS_IN_PLACE_BYTES
    }

    /// Runs `work`, which decompresses a batch of this size, with a decompressor.
    ///
    /// # Errors
    /// [`Error::Draining`] if the process stops.
    pub(super) async fn run<T, F>(
        self: &Arc<Self>,
        shard: &Shard,
        uncompressed_bytes: u32,
        work: F,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&mut Decompressor) -> T + Send + 'static,
    {
        if Self::is_in_place(uncompressed_bytes) {
            return Ok(with_decompressor(work));
        }
        let permit = self.permits.clone().acquire_owned().await.map_err(|_| Error::Draining)?;
        let mut decompressor = sync::lock(&self.idle).pop().unwrap_or_default();
        let pool = self.clone();
        let worked = shard.run_blocking(move || {
            let result = work(&mut decompressor);
            sync::lock(&pool.idle).push(decompressor);
            drop(permit);
            result
        });
        worked.await.map_err(|_| Error::Draining)
    }
}
