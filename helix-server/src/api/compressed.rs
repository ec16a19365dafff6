//! Verifies a compressed batch of a producer by decompressing it once.
//! The records stay as they were sent; the decompressed bytes are dropped.

use std::ops::ControlFlow;
use std::sync::Arc;

use helix_proto::compression::{
    BatchCodec, Decompressor, UNCOMPRESSED_BYTES_MAX, with_decompressor,
};

use super::batch::check_records;
use super::decompressors::Decompressors;
use super::keys::check_keys;
use super::settings::allowed_compressions;
use crate::error::{Error, Result};
use crate::limits::{BATCH_BYTES_MAX, COMPRESSION_WAIT_MAX};
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

/// A compressed batch of a producer before its contents are verified.
pub(super) struct CompressedBatch {
    pub(super) batch: NewBatch,
    pub(super) codec: BatchCodec,
    pub(super) settings: PartitionSettings,
}

impl CompressedBatch {
    /// Verifies a small batch on this thread. Returns a large one, and any that must wait for the
    /// protocol version, for [`Self::verify`].
    pub(super) fn verify_now(self, node: &Node) -> ControlFlow<Result<NewBatch>, Self> {
        let is_allowed = node.cluster().protocol() >= protocol::COMPRESSION;
        if !is_allowed || !Decompressors::is_in_place(self.batch.uncompressed_bytes) {
            return ControlFlow::Continue(self);
        }
        ControlFlow::Break(with_decompressor(|decompressor| self.verify_with(decompressor)))
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
        let bytes = self.batch.uncompressed_bytes;
        let work = move |decompressor: &mut Decompressor| self.verify_with(decompressor);
        decompressors.run(shard, bytes, work).await?
    }

    /// Verifies the batch with this decompressor.
    pub(super) fn verify_with(self, decompressor: &mut Decompressor) -> Result<NewBatch> {
        let Self { batch, codec, settings } = self;
        let payload = decompressor
            .decompress(codec, &batch.payload, batch.uncompressed_bytes as usize)
            .map_err(|error| Error::CorruptBatch { what: error.to_string() })?;
        check_records(payload, batch.record_count, &settings)?;
        check_keys(payload, &settings)?;
        Ok(batch)
    }

    fn is_too_early(&self, protocol: u32) -> Error {
        let (codec, needed) = (self.codec.name(), protocol::COMPRESSION);
        Error::UnsupportedCompression {
            what: format!(
                "compression {codec} needs protocol version {needed}, but the cluster uses \
                 {protocol} until all nodes are upgraded; send uncompressed batches until then"
            ),
            allowed: allowed_compressions(None),
        }
    }
}
