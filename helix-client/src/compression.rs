//! Compression of batches before they are sent.

use std::sync::{Mutex, PoisonError};

use helix_proto::batch::{self, BATCH_VERSION};
use helix_proto::compression::{BatchCodec, Compressor};
use helix_proto::kafka::{self, KAFKA_BATCH_VERSION, KafkaBatch};
use helix_proto::log::v1::{BatchFormat, EncodedBatch, ErrorReason};

use crate::append::IntoBatch;
use crate::error::{Error, Result};

/// Bytes of the sample by which [`Compression::Adaptive`] recognizes data that does not shrink.
const SAMPLE_BYTES: usize = 4 << 10;

/// [`Compression::Adaptive`] compresses if this part of a batch is saved: one eighth.
const SAVED_PART: usize = 8;

/// Compression of the batches that a producer or a session builds from records.
///
/// A batch that would not shrink is sent uncompressed with every setting. Batches are compressed on
/// the caller's thread: LZ4 takes about 2 ms for each MiB, Zstandard some times that.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Compression {
    /// Send batches uncompressed.
    #[default]
    None,
    /// LZ4: fast, for logs and other text.
    Lz4,
    /// Zstandard, level 3: smaller, at several times the CPU time.
    Zstd,
    /// LZ4 for batches that shrink by at least an eighth; others are sent uncompressed. In a batch
    /// of more than 8 KiB, a sample of 4 KiB from its middle must shrink by as much, so that random
    /// or packed data costs little.
    Adaptive,
}

/// Compresses batches; reuses its contexts.
///
/// Producers and sessions have one each. Use it for batches that are built elsewhere, which they
/// send as they are. Threads may share it: each call takes a context of its own.
#[derive(Debug, Default)]
pub struct BatchCompressor {
    compression: Compression,
    /// As many as were ever in use at once.
    idle: Mutex<Vec<Compressor>>,
}

impl BatchCompressor {
    /// Creates a compressor; contexts are created on first use.
    pub fn new(compression: Compression) -> Self {
        Self { compression, idle: Mutex::default() }
    }

    /// Returns the batch compressed, or unchanged if that does not make it smaller.
    ///
    /// A batch that is compressed already, larger than 8 MiB, or of version 2 is unchanged too.
    pub fn compress(&self, batch: EncodedBatch) -> EncodedBatch {
        let is_plain = batch.version == BATCH_VERSION && batch::is_uncompressed(batch.compression);
        if self.compression == Compression::None || !is_plain {
            return batch;
        }
        let compressed = self.with_compressor(|compressor| match self.compression {
            Compression::None => None,
            Compression::Lz4 => compressor.compress(BatchCodec::Lz4, &batch, usize::MAX),
            Compression::Zstd => compressor.compress(BatchCodec::Zstd, &batch, usize::MAX),
            Compression::Adaptive => adaptive(compressor, &batch),
        });
        compressed.unwrap_or(batch)
    }

    /// Builds a batch of a version that the topic takes; compresses it if it is built from records.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a batch that cannot be converted.
    pub(crate) fn build<B: IntoBatch>(
        &self,
        batch: B,
        format: BatchFormat,
    ) -> Result<EncodedBatch> {
        let batch = batch.into_batch();
        match (format, batch.version) {
            (BatchFormat::Kafka, BATCH_VERSION) => self.to_kafka(&batch, B::IS_ENCODED),
            (BatchFormat::Helix, KAFKA_BATCH_VERSION) => self.to_plain(&batch),
            // The size of a batch that was read; the service finds it itself.
            (_, KAFKA_BATCH_VERSION) => Ok(EncodedBatch { uncompressed_bytes: 0, ..batch }),
            _ if B::IS_ENCODED => Ok(batch),
            _ => Ok(self.compress(batch)),
        }
    }

    fn to_kafka(&self, batch: &EncodedBatch, is_encoded: bool) -> Result<EncodedBatch> {
        let records = batch::decode(batch).map_err(|error| inconvertible(&error))?.records;
        // A batch that was built elsewhere keeps its codec.
        let codec = match self.compression {
            _ if is_encoded => BatchCodec::from_wire(batch.compression).ok().flatten(),
            Compression::None => None,
            Compression::Lz4 | Compression::Adaptive => Some(BatchCodec::Lz4),
            Compression::Zstd => Some(BatchCodec::Zstd),
        };
        let built = self.with_compressor(|compressor| {
            kafka::from_records(&records, codec.map(|codec| (codec, compressor)))
        });
        built.map_err(|error| inconvertible(&error))
    }

    fn to_plain(&self, batch: &EncodedBatch) -> Result<EncodedBatch> {
        let kafka = KafkaBatch::parse(&batch.payload).map_err(|error| inconvertible(&error))?;
        let payload = batch::uncompressed_payload(batch).map_err(|error| inconvertible(&error))?;
        let plain = batch::from_payload(batch.record_count, payload);
        let codec = kafka.codec().as_batch_codec().flatten();
        let compress = |codec| {
            self.with_compressor(|compressor| compressor.compress(codec, &plain, usize::MAX))
        };
        Ok(codec.and_then(compress).unwrap_or(plain))
    }

    fn with_compressor<T>(&self, work: impl FnOnce(&mut Compressor) -> T) -> T {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let mut compressor = idle().pop().unwrap_or_default();
        let result = work(&mut compressor);
        idle().push(compressor);
        result
    }
}

fn inconvertible(error: &dyn std::fmt::Display) -> Error {
    let message = format!("the batch cannot be converted to the topic's batch_format: {error}");
    Error::known(ErrorReason::InvalidArgument, message)
}

fn adaptive(compressor: &mut Compressor, batch: &EncodedBatch) -> Option<EncodedBatch> {
    let payload = &batch.payload;
    if payload.len() > 2 * SAMPLE_BYTES {
        let start = (payload.len() - SAMPLE_BYTES) / 2;
        let sample = &payload[start..start + SAMPLE_BYTES];
        let bytes = compressor.compress_bytes(BatchCodec::Lz4, sample)?.len();
        if bytes > bytes_max(sample.len()) {
            return None;
        }
    }
    compressor.compress(BatchCodec::Lz4, batch, bytes_max(payload.len()))
}

/// Returns the most bytes that a payload may take for compression to be worth it.
fn bytes_max(uncompressed_bytes: usize) -> usize {
    uncompressed_bytes - uncompressed_bytes / SAVED_PART
}

/// Returns the compressions that this client decodes, as numbers of the wire.
pub(crate) fn accepted() -> Vec<i32> {
    BatchCodec::ALL.map(|codec| codec.to_wire().into()).to_vec()
}

#[cfg(test)]
mod tests {
    use helix_proto::log::v1::{Compression as WireCompression, Record};

    use super::*;

    /// Returns bytes without repetitions.
    fn noise(bytes: usize) -> Vec<u8> {
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3]
        };
        std::iter::repeat_with(next).take(bytes).collect()
    }

    fn text(bytes: usize) -> Vec<u8> {
        b"GET /index.html 200 ".iter().copied().cycle().take(bytes).collect()
    }

    fn compressed(compression: Compression, value: Vec<u8>) -> WireCompression {
        let records = [Record { value: Some(value.into()), ..Record::default() }];
        let compressor = BatchCompressor::new(compression);
        let batch = compressor.build(&records[..], BatchFormat::Any).unwrap();
        assert_eq!(batch::decode(&batch).unwrap().records, records);
        batch.compression()
    }

    #[test]
    fn text_is_compressed_and_noise_is_not() {
        use Compression as C;
        use WireCompression as W;

        for bytes in [200, 7_000, 9_000, 100_000] {
            for (compression, expected) in
                [(C::None, W::None), (C::Lz4, W::Lz4), (C::Zstd, W::Zstd), (C::Adaptive, W::Lz4)]
            {
                assert_eq!(compressed(compression, text(bytes)), expected, "{compression:?}");
                assert_eq!(compressed(compression, noise(bytes)), W::None, "{compression:?}");
            }
        }
    }

    #[test]
    fn adaptive_demands_an_eighth() {
        // A tenth is saved.
        for bytes in [5_000, 50_000] {
            let value = [noise(bytes * 9 / 10), text(bytes / 10)].concat();
            assert_eq!(compressed(Compression::Adaptive, value.clone()), WireCompression::None);
            assert_eq!(compressed(Compression::Lz4, value), WireCompression::Lz4);
        }
        // The sample shrinks, the batch does not: only a small part around the middle does.
        let mut value = noise(106_000);
        value[50_000..56_000].copy_from_slice(&text(6_000));
        assert_eq!(compressed(Compression::Adaptive, value), WireCompression::None);
    }

    #[test]
    fn batches_built_elsewhere_are_sent_as_they_are() {
        let records = [Record { value: Some(text(1_000).into()), ..Record::default() }];
        let batch = batch::encode(&records);
        let compressor = BatchCompressor::new(Compression::Zstd);
        assert_eq!(compressor.build(&batch, BatchFormat::Helix).unwrap(), batch);
        assert_eq!(compressor.build(batch.clone(), BatchFormat::Any).unwrap(), batch);
        let once = compressor.compress(batch);
        assert_eq!(once.compression(), WireCompression::Zstd);
        assert_eq!(BatchCompressor::new(Compression::Lz4).compress(once.clone()), once);
    }
}
