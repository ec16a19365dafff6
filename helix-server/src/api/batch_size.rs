//! Counts of a batch, kept until its acknowledgement.

use std::time::Duration;

use helix_proto::compression::BatchCodec;
use helix_proto::kafka::{KAFKA_BATCH_VERSION, KafkaBatch};
use tokio::time::Instant;

use crate::metrics::Metrics;
use crate::shard::NewBatch;

/// Counts of a batch, and its arrival time.
#[derive(Debug, Clone, Copy)]
pub(super) struct BatchSize {
    pub(super) records: u32,
    pub(super) bytes: usize,
    /// Codec and decompressed size, if the batch is compressed.
    compressed: Option<(BatchCodec, u32)>,
    pub(super) since: Instant,
}

impl BatchSize {
    pub(super) fn of(batch: &NewBatch, since: Instant) -> Self {
        // Admitted batches have a known compression.
        let codec = match batch.version {
            KAFKA_BATCH_VERSION => {
                let kafka = KafkaBatch::parse_unverified(&batch.payload).ok();
                kafka.and_then(|kafka| kafka.codec().as_batch_codec().flatten())
            }
            _ => BatchCodec::from_wire(batch.compression).ok().flatten(),
        };
        Self {
            records: batch.record_count,
            bytes: batch.payload.len(),
            compressed: codec.map(|codec| (codec, batch.uncompressed_bytes)),
            since,
        }
    }

    /// Counts the batch as acknowledged. Returns the time since its arrival.
    pub(super) fn count_ack(&self, metrics: &Metrics, is_duplicate: bool) -> Duration {
        let took = self.since.elapsed();
        metrics.on_ack(self.records, self.bytes, is_duplicate, took);
        if let Some((codec, uncompressed_bytes)) = self.compressed.filter(|_| !is_duplicate) {
            metrics.on_compressed(codec.name(), self.bytes as u64, uncompressed_bytes.into());
        }
        took
    }
}
