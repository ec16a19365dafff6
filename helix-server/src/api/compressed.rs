//! Verifies a compressed batch of a producer by decompressing it once.
//! The records stay as they were sent; the decompressed bytes are dropped.

use std::ops::ControlFlow;
use std::sync::Arc;

use helix_proto::compression::{
    BatchCodec, Decompressor, UNCOMPRESSED_BYTES_MAX, with_decompressor,
};

use super::batch::check_records;
use super::decompressors::Decompressors;
use super::kafka_batch::check_records as check_kafka_records;
use super::keys::check_keys;
use super::settings::allowed_compressions;
use crate::error::{Error, Result};
use crate::limits::{BATCH_BYTES_MAX, COMPRESSION_WAIT_MAX, DECOMPRESS_IN_PLACE_BYTES};
use crate::log::PartitionSettings;
use crate::node::{LocatedPartition, Node};
use crate::protocol;
use crate::shard::{NewBatch, Shard};

// Every batch that a topic can allow can be compressed.
const _: () = assert!(BATCH_BYTES_MAX as usize <= UNCOMPRESSED_BYTES_MAX);

/// A batch whose checksum is verified.
pub(super) enum AdmittedBatch {
    Uncompressed(NewBatch),
    /// Its record count and its uncompressed size are not verified yet.
    Compressed(CompressedBatch),
}

impl AdmittedBatch {
    pub(super) fn batch_mut(&mut self) -> &mut NewBatch {
        match self {
            Self::Uncompressed(batch) => batch,
            Self::Compressed(compressed) => &mut compressed.batch,
        }
    }

    /// Returns the batch, verified.
    ///
    /// # Errors
    /// As [`CompressedBatch::verify`].
    pub(super) async fn verified(
        self,
        node: &Node,
        decompressors: &Arc<Decompressors>,
        located: &LocatedPartition,
    ) -> Result<NewBatch> {
        let compressed = match self {
            Self::Uncompressed(batch) => return Ok(batch),
            Self::Compressed(compressed) => compressed,
        };
        match compressed.verify_now(node) {
            ControlFlow::Break(verified) => verified,
            // Boxed because it is rare, to keep the common future small.
            ControlFlow::Continue(large) => {
                Box::pin(large.verify(node, decompressors, &located.shard)).await
            }
        }
    }
}

/// Codec of a compressed batch, by its version.
#[derive(Debug, Clone, Copy)]
pub(super) enum PayloadCodec {
    Helix(BatchCodec),
    /// The batch itself states it, but not its uncompressed size.
    Kafka,
}

/// A compressed batch of a producer before its contents are verified.
pub(super) struct CompressedBatch {
    pub(super) batch: NewBatch,
    pub(super) codec: PayloadCodec,
    pub(super) settings: PartitionSettings,
}

impl CompressedBatch {
    /// Verifies a small batch on this thread. Returns a large one, and any that must wait for the
    /// protocol version, for [`Self::verify`].
    pub(super) fn verify_now(self, node: &Node) -> ControlFlow<Result<NewBatch>, Self> {
        if node.cluster().protocol() < protocol::COMPRESSION {
            return ControlFlow::Continue(self);
        }
        with_decompressor(|decompressor| self.verify_in_place(decompressor))
    }

    /// Verifies a small batch with this decompressor; returns a large one.
    pub(super) fn verify_in_place(
        mut self,
        decompressor: &mut Decompressor,
    ) -> ControlFlow<Result<NewBatch>, Self> {
        let (in_place, limit) = (DECOMPRESS_IN_PLACE_BYTES, self.settings.max_batch_bytes as usize);
        match self.codec {
            PayloadCodec::Helix(_) if Decompressors::is_in_place(self.batch.uncompressed_bytes) => {
                ControlFlow::Break(self.verify_with(decompressor))
            }
            PayloadCodec::Helix(_) => ControlFlow::Continue(self),
            PayloadCodec::Kafka => {
                let bytes_max = in_place.min(limit);
                let batch = &mut self.batch;
                match check_kafka_records(batch, &self.settings, decompressor, bytes_max) {
                    Err(Error::BatchTooLarge { .. }) if limit > in_place => {
                        ControlFlow::Continue(self)
                    }
                    checked => ControlFlow::Break(checked.map(|()| self.batch)),
                }
            }
        }
    }

    /// Verifies the batch.
    ///
    /// # Errors
    /// [`Error::UnsupportedCompression`] while the cluster has nodes that cannot read it;
    /// [`Error::CorruptBatch`] for payloads of another size than stated, and the errors of
    /// uncompressed batches.
    pub(super) async fn verify(
        self,
        node: &Node,
        decompressors: &Arc<Decompressors>,
        shard: &Shard,
    ) -> Result<NewBatch> {
        if !node.cluster().wait_protocol(protocol::COMPRESSION, COMPRESSION_WAIT_MAX).await {
            return Err(self.is_too_early(node.cluster().protocol()));
        }
        let bytes = match self.codec {
            PayloadCodec::Helix(_) => self.batch.uncompressed_bytes,
            // Larger than what is verified in place.
            PayloadCodec::Kafka => u32::MAX,
        };
        let work = move |decompressor: &mut Decompressor| self.verify_with(decompressor);
        decompressors.run(shard, bytes, work).await?
    }

    /// Verifies the batch with this decompressor.
    pub(super) fn verify_with(self, decompressor: &mut Decompressor) -> Result<NewBatch> {
        let Self { mut batch, codec, settings } = self;
        let PayloadCodec::Helix(codec) = codec else {
            let bytes_max = settings.max_batch_bytes as usize;
            check_kafka_records(&mut batch, &settings, decompressor, bytes_max)?;
            return Ok(batch);
        };
        let payload = decompressor
            .decompress(codec, &batch.payload, batch.uncompressed_bytes as usize)
            .map_err(|error| Error::CorruptBatch { what: error.to_string() })?;
        check_records(payload, batch.record_count, &settings)?;
        check_keys(payload, &settings)?;
        Ok(batch)
    }

    fn is_too_early(&self, protocol: u32) -> Error {
        let codec = match self.codec {
            PayloadCodec::Helix(codec) => codec.name(),
            PayloadCodec::Kafka => "of a Kafka batch",
        };
        let needed = protocol::COMPRESSION;
        Error::UnsupportedCompression {
            what: format!(
                "compression {codec} needs protocol version {needed}, but the cluster uses \
                 {protocol} until all nodes are upgraded; send uncompressed batches until then"
            ),
            allowed: allowed_compressions(None),
        }
    }
}
