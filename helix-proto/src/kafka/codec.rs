//! Codecs of Kafka batches: decompression within a limit, and compression.

use super::lz4_frame::{self, Lz4FrameError};
use super::{ATTRIBUTE_CODEC, KafkaBatch, KafkaBatchError, zstd_frame};
use crate::compression::{BatchCodec, Compressor, Decompressor};

/// Codec of the records in a Kafka batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KafkaCodec {
    /// Not compressed.
    None,
    /// Gzip. Decoded with the feature `kafka-codecs` only.
    Gzip,
    /// Snappy, raw or in the framing of the Java library. Decoded with the feature `kafka-codecs`
    /// only.
    Snappy,
    /// LZ4 frame.
    Lz4,
    /// Zstandard.
    Zstd,
}

impl KafkaCodec {
    /// Returns the codec in a batch's attributes.
    ///
    /// # Errors
    /// [`KafkaBatchError::UnknownCodec`].
    pub fn from_attributes(attributes: i16) -> Result<Self, KafkaBatchError> {
        Ok(match attributes & ATTRIBUTE_CODEC {
            0 => Self::None,
            1 => Self::Gzip,
            2 => Self::Snappy,
            3 => Self::Lz4,
            4 => Self::Zstd,
            unknown => return Err(KafkaBatchError::UnknownCodec(unknown as u8)),
        })
    }

    /// Returns the codec's bits in a batch's attributes.
    pub fn to_attributes(self) -> i16 {
        match self {
            Self::None => 0,
            Self::Gzip => 1,
            Self::Snappy => 2,
            Self::Lz4 => 3,
            Self::Zstd => 4,
        }
    }

    /// Returns Kafka's name of the codec.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Gzip => "gzip",
            Self::Snappy => "snappy",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        }
    }

    /// Returns the codec as one of Helix's own batches: `Some(None)` for no compression, and `None`
    /// for codecs that these do not have.
    pub fn as_batch_codec(self) -> Option<Option<BatchCodec>> {
        match self {
            Self::None => Some(None),
            Self::Lz4 => Some(Some(BatchCodec::Lz4)),
            Self::Zstd => Some(Some(BatchCodec::Zstd)),
            Self::Gzip | Self::Snappy => None,
        }
    }
}

impl From<Option<BatchCodec>> for KafkaCodec {
    fn from(codec: Option<BatchCodec>) -> Self {
        match codec {
            None => Self::None,
            Some(BatchCodec::Lz4) => Self::Lz4,
            Some(BatchCodec::Zstd) => Self::Zstd,
        }
    }
}

impl Decompressor {
    /// Returns the records of a Kafka batch: those in the batch, or decompressed into the reused
    /// buffer, which grows to the largest size so far.
    ///
    /// # Errors
    /// [`KafkaBatchError::TooLarge`] above `bytes_max`, before more memory is taken;
    /// [`KafkaBatchError::Malformed`]; [`KafkaBatchError::CodecDisabled`].
    pub fn decompress_kafka<'s>(
        &'s mut self,
        batch: &KafkaBatch<'s>,
        bytes_max: usize,
    ) -> Result<&'s [u8], KafkaBatchError> {
        let section = batch.record_section();
        let codec = batch.codec();
        let too_large = KafkaBatchError::TooLarge { bytes_max };
        let decoded = match codec {
            KafkaCodec::None if section.len() > bytes_max => return Err(too_large),
            KafkaCodec::None => return Ok(section),
            KafkaCodec::Lz4 => lz4_frame::decode(section, &mut self.buffer, bytes_max).map_err(
                |error| match error {
                    Lz4FrameError::TooLarge => too_large,
                    Lz4FrameError::Malformed => KafkaBatchError::Malformed(codec),
                },
            )?,
            KafkaCodec::Zstd => self.decompress_zstd(section, bytes_max)?,
            #[cfg(feature = "kafka-codecs")]
            KafkaCodec::Gzip | KafkaCodec::Snappy => {
                super::legacy_codecs::decode(codec, section, &mut self.buffer, bytes_max)?
            }
            #[cfg(not(feature = "kafka-codecs"))]
            KafkaCodec::Gzip | KafkaCodec::Snappy => {
                return Err(KafkaBatchError::CodecDisabled(codec));
            }
        };
        Ok(&self.buffer[..decoded])
    }

    fn decompress_zstd(
        &mut self,
        section: &[u8],
        bytes_max: usize,
    ) -> Result<usize, KafkaBatchError> {
        let malformed = KafkaBatchError::Malformed(KafkaCodec::Zstd);
        let bound = zstd_frame::decoded_bytes_max(section, bytes_max).ok_or(malformed)?;
        // Blocks that do not state their sizes may decode to less than their bound.
        let capacity = bound.min(bytes_max);
        if self.buffer.len() < capacity {
            self.buffer.resize(capacity, 0);
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        let decoded = self.zstd_into(section, &mut buffer[..capacity]);
        self.buffer = buffer;
        // The decoder does not say whether the bytes are malformed or too many.
        decoded.ok_or(match bound > bytes_max {
            true => KafkaBatchError::TooLarge { bytes_max },
            false => malformed,
        })
    }
}

impl Compressor {
    /// Compresses records for a Kafka batch, also if they do not shrink. Returns `None` if there
    /// are none, or more than
    /// [`UNCOMPRESSED_BYTES_MAX`](crate::compression::UNCOMPRESSED_BYTES_MAX).
    pub fn compress_kafka(&mut self, codec: BatchCodec, records: &[u8]) -> Option<&[u8]> {
        if codec == BatchCodec::Zstd {
            return self.compress_bytes(codec, records);
        }
        let (table, buffer) = self.lz4_parts(records.len())?;
        buffer.clear();
        lz4_frame::encode(records, table, buffer);
        Some(buffer)
    }
}
