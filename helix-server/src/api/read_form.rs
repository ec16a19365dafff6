//! The form in which a reader gets batches: as they are stored, decompressed, or converted.

use std::sync::Arc;

use bytes::Bytes;
use helix_proto::batch::{self, BATCH_VERSION, DecodeError};
use helix_proto::compression::{BatchCodec, Decompressor, UNCOMPRESSED_BYTES_MAX};
use helix_proto::kafka::{self, KAFKA_BATCH_VERSION, KafkaBatch};
use helix_proto::log::v1::Compression;

use super::decompressors::Decompressors;
use crate::call::ClientLoad;
use crate::error::{Error, Result};
use crate::limits::PLAIN_FACTOR;
use crate::shard::{ReadBatch, Shard};

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
    /// The reader decodes batches of version 2.
    kafka: bool,
}

/// Work on a batch for a reader that cannot decode it as it is stored.
#[derive(Debug, Clone, Copy)]
enum Conversion {
    Decompress(BatchCodec),
    FromKafka,
}

impl ReadForm {
    /// Creates the form that a request asks for; ignores codecs that this version does not know.
    pub(super) fn new(is_encoded: bool, accepted: &[i32], kafka: bool) -> Self {
        let accepts = |codec: BatchCodec| is_encoded && accepted.contains(&codec.to_wire().into());
        let (lz4, zstd) = (accepts(BatchCodec::Lz4), accepts(BatchCodec::Zstd));
        Self { is_encoded, lz4, zstd, kafka: is_encoded && kafka }
    }

    pub(super) fn is_encoded(self) -> bool {
        self.is_encoded
    }

    /// Returns what must be done with a batch for the reader, if anything.
    fn conversion(self, batch: &ReadBatch) -> Option<Conversion> {
        if batch.version == KAFKA_BATCH_VERSION {
            return (!self.kafka).then_some(Conversion::FromKafka);
        }
        // An unknown compression is of a later version, and is sent as it is stored.
        let codec = BatchCodec::from_wire(batch.compression).ok().flatten()?;
        let is_accepted = match codec {
            BatchCodec::Lz4 => self.lz4,
            BatchCodec::Zstd => self.zstd,
        };
        (!is_accepted).then_some(Conversion::Decompress(codec))
    }

    pub(super) fn must_convert(self, batch: &ReadBatch) -> bool {
        self.conversion(batch).is_some()
    }

    /// Returns the bytes of a batch as it is sent: its payload, and the distances of its offsets.
    pub(super) fn sent_bytes(self, batch: &ReadBatch) -> usize {
        let payload = match self.conversion(batch) {
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
        let is_counted = self.is_encoded && self.must_convert(batch);
        if is_counted { sent.saturating_add(batch.payload.len()) } else { sent }
    }

    /// Returns the memory of sent bytes, as a multiple of them.
    pub(super) fn memory_factor(self) -> usize {
        if self.is_encoded { 1 } else { PLAIN_FACTOR }
    }

    /// Decompresses or converts a batch, unless the reader can decode it.
    ///
    /// The log verified the producer's checksum when it read the batch. An encoded batch gets a new
    /// one over the bytes that are sent.
    ///
    /// # Errors
    /// [`Error::CorruptLog`]: the batch was decompressed once when it was appended.
    pub(super) async fn convert(
        self,
        mut batch: ReadBatch,
        decompressors: &Arc<Decompressors>,
        shard: &Shard,
    ) -> Result<ReadBatch> {
        let Some(conversion) = self.conversion(&batch) else { return Ok(batch) };
        let stored = batch.payload.clone();
        let bytes = batch.uncompressed_bytes;
        let compression = i32::from(Compression::None);
        let record_count = batch.record_count;
        let is_encoded = self.is_encoded;
        let work = move |decompressor: &mut Decompressor| -> Result<(Bytes, u32), DecodeError> {
            let bytes = bytes as usize;
            let payload = match conversion {
                Conversion::Decompress(codec) => {
                    decompressor.decompress_to_bytes(codec, &stored, bytes)?
                }
                Conversion::FromKafka => {
                    let kafka = KafkaBatch::parse_unverified(&stored)?;
                    let section = decompressor.decompress_kafka(&kafka, UNCOMPRESSED_BYTES_MAX)?;
                    kafka::to_plain_payload(&kafka, section, bytes.min(UNCOMPRESSED_BYTES_MAX))?
                }
            };
            let crc =
                |payload: &Bytes| batch::crc(BATCH_VERSION, record_count, compression, payload);
            let crc = if is_encoded { crc(&payload) } else { 0 };
            Ok((payload, crc))
        };
        let decoded = decompressors.run(shard, bytes, work).await?;
        let (payload, crc) = decoded.map_err(|error| Error::CorruptLog {
            what: format!("the batch at offset {}: {error}", batch.first_offset),
        })?;
        batch.version = BATCH_VERSION;
        batch.compression = compression;
        batch.uncompressed_bytes = 0;
        batch.payload = payload;
        batch.crc = crc;
        Ok(batch)
    }
}
