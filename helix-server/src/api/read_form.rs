//! The form in which a reader gets batches: as they are stored, or decompressed.

use std::sync::Arc;

use bytes::Bytes;
use helix_proto::batch;
use helix_proto::compression::{BatchCodec, DecompressError, Decompressor};
use helix_proto::log::v1::Compression;

use super::decompressors::Decompressors;
use crate::error::{Error, Result};
use crate::limits::PLAIN_FACTOR;
use crate::shard::{ReadBatch, Shard};
use crate::transport::ClientLoad;

/// Memory and decompressors for the reads of a node.
#[derive(Debug, Clone)]
pub(super) struct ReadSources {
    pub(super) load: Arc<ClientLoad>,
    pub(super) decompressors: Arc<Decompressors>,
}

/// Form of the records that a call returns.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReadForm {
    is_encoded: bool,
    /// Codecs that the reader can decode.
    lz4: bool,
    zstd: bool,
}

impl ReadForm {
    /// Creates the form that a request asks for; ignores codecs that this version does not know.
    pub(super) fn new(is_encoded: bool, accepted: &[i32]) -> Self {
        let accepts = |codec: BatchCodec| is_encoded && accepted.contains(&codec.to_wire().into());
        Self { is_encoded, lz4: accepts(BatchCodec::Lz4), zstd: accepts(BatchCodec::Zstd) }
    }

    pub(super) fn is_encoded(self) -> bool {
        self.is_encoded
    }

    /// Returns the codec with which a batch must be decompressed for the reader, if any.
    fn codec_to_decode(self, batch: &ReadBatch) -> Option<BatchCodec> {
        // An unknown compression is of a later version, and is sent as it is stored.
        let codec = BatchCodec::from_wire(batch.compression).ok().flatten()?;
        let is_accepted = match codec {
            BatchCodec::Lz4 => self.lz4,
            BatchCodec::Zstd => self.zstd,
        };
        (!is_accepted).then_some(codec)
    }

    pub(super) fn must_decompress(self, batch: &ReadBatch) -> bool {
        self.codec_to_decode(batch).is_some()
    }

    /// Returns the bytes of a batch as it is sent: its payload, and the distances of its offsets.
    pub(super) fn sent_bytes(self, batch: &ReadBatch) -> usize {
        let payload = match self.codec_to_decode(batch) {
            Some(_) => batch.uncompressed_bytes as usize,
            None => batch.payload.len(),
        };
        // Plain records have their offsets instead.
        if self.is_encoded { payload + batch.offset_delta_bytes() } else { payload }
    }

    /// Returns the memory that a batch takes until its response is sent.
    pub(super) fn memory(self, batch: &ReadBatch) -> usize {
        let sent = self.sent_bytes(batch).saturating_mul(self.memory_factor());
        // The stored bytes are kept until they are decompressed. They are hardly larger, so the
        // factor of plain records covers them.
        let is_counted = self.is_encoded && self.must_decompress(batch);
        if is_counted { sent.saturating_add(batch.payload.len()) } else { sent }
    }

    /// Returns the memory of sent bytes, as a multiple of them.
    pub(super) fn memory_factor(self) -> usize {
        if self.is_encoded { 1 } else { PLAIN_FACTOR }
    }

    /// Decompresses a batch, unless the reader can.
    ///
    /// The log verified the producer's checksum when it read the batch. An encoded batch gets a new
    /// one over the bytes that are sent.
    ///
    /// # Errors
    /// [`Error::CorruptLog`]: the batch was decompressed once when it was appended.
    pub(super) async fn decompress(
        self,
        mut batch: ReadBatch,
        decompressors: &Arc<Decompressors>,
        shard: &Shard,
    ) -> Result<ReadBatch> {
        let Some(codec) = self.codec_to_decode(&batch) else { return Ok(batch) };
        let stored = batch.payload.clone();
        let bytes = batch.uncompressed_bytes;
        let compression = i32::from(Compression::None);
        let (version, record_count) = (batch.version, batch.record_count);
        let is_encoded = self.is_encoded;
        let work = move |decompressor: &mut Decompressor| -> Result<(Bytes, u32), DecompressError> {
            let payload = decompressor.decompress_to_bytes(codec, &stored, bytes as usize)?;
            let crc = |payload: &Bytes| batch::crc(version, record_count, compression, payload);
            let crc = if is_encoded { crc(&payload) } else { 0 };
            Ok((payload, crc))
        };
        let decoded = decompressors.run(shard, bytes, work).await?;
        let (payload, crc) = decoded.map_err(|error| Error::CorruptLog {
            what: format!("the batch at offset {}: {error}", batch.first_offset),
        })?;
        batch.compression = compression;
        batch.uncompressed_bytes = 0;
        batch.payload = payload;
        batch.crc = crc;
        Ok(batch)
    }
}
