//! Compression of a batch's payload: LZ4 and Zstandard, with bounds that are checked first.
//!
//! The payload of a compressed batch states its uncompressed size, as does the batch. Both sizes
//! and the ratio are checked before a byte is decoded, so a batch never needs more memory than its
//! stated size, and that is at most [`UNCOMPRESSED_BYTES_MAX`]. Contexts are reused.

use std::cell::RefCell;
use std::fmt;

use bytes::Bytes;
use lz4_flex::block::{self, CompressTable};
use zstd::bulk;
use zstd::zstd_safe::{self, CParameter};

use crate::batch;
use crate::log::v1::{Compression, EncodedBatch};

/// Largest uncompressed payload of a compressed batch, in bytes.
pub const UNCOMPRESSED_BYTES_MAX: usize = 8 << 20;

/// Bytes before an LZ4 block: the uncompressed size as a 32-bit little-endian integer.
pub const LZ4_HEADER_BYTES: usize = 4;

/// Level of Zstandard: its own default.
pub const ZSTD_LEVEL: i32 = 3;

/// Level of the smallest form; above it, levels differ only in windows.
const ZSTD_HARDEST_LEVEL: i32 = 19;

/// Shortest window of Zstandard, and the largest tables of the smallest form.
const ZSTD_WINDOW_LOG_MIN: u32 = 10;
const ZSTD_HASH_LOG_MAX: u32 = 20;
const ZSTD_CHAIN_LOG_MAX: u32 = 22;

/// Bound of the memory that the smallest form is searched with: tables of 4-byte entries, and the
/// state of the match finders.
pub const HARDEST_CONTEXT_BYTES_MAX: usize =
    (4 << ZSTD_HASH_LOG_MAX) + (4 << ZSTD_CHAIN_LOG_MAX) + (8 << 20);

/// Bound of LZ4's ratio: one byte extends a match by at most 255 bytes.
const LZ4_RATIO_MAX: usize = 255;

/// A Zstandard block takes at least a header of three bytes and one byte of content.
const ZSTD_BLOCK_BYTES_MIN: usize = 4;

/// Most bytes that a Zstandard block decodes to.
const ZSTD_BLOCK_DECODED_MAX: usize = 128 << 10;

/// A codec that compresses payloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BatchCodec {
    /// LZ4 block behind its uncompressed size ([`LZ4_HEADER_BYTES`]).
    Lz4,
    /// One Zstandard frame that states its content size, without a dictionary.
    Zstd,
}

/// The number of a compression that this version does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("compression {0} is unknown to this version")]
pub struct UnknownCompression(pub i32);

impl BatchCodec {
    /// All codecs.
    pub const ALL: [Self; 2] = [Self::Lz4, Self::Zstd];

    /// Returns the codec of an `EncodedBatch.compression`, or `None` if it means uncompressed.
    ///
    /// # Errors
    /// The number, if it is unknown.
    pub fn from_wire(compression: i32) -> Result<Option<Self>, UnknownCompression> {
        match Compression::try_from(compression) {
            Ok(Compression::Unspecified | Compression::None) => Ok(None),
            Ok(Compression::Lz4) => Ok(Some(Self::Lz4)),
            Ok(Compression::Zstd) => Ok(Some(Self::Zstd)),
            Err(_) => Err(UnknownCompression(compression)),
        }
    }

    /// Returns the codec's value in `EncodedBatch.compression`.
    pub fn to_wire(self) -> Compression {
        match self {
            Self::Lz4 => Compression::Lz4,
            Self::Zstd => Compression::Zstd,
        }
    }

    /// Returns the codec's name in commands, metrics and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        }
    }
}

/// The reason why a compressed payload is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecompressError {
    /// The batch does not state its uncompressed size.
    #[error("uncompressed_bytes is not set")]
    NoSize,
    /// The stated uncompressed size is above the limit.
    #[error("uncompressed_bytes is {bytes}; the limit is {bytes_max}")]
    TooLarge {
        /// Stated size.
        bytes: usize,
        /// Limit.
        bytes_max: usize,
    },
    /// The payload has no header that states the uncompressed size.
    #[error("the {} payload does not begin with a header that states its size", .0.name())]
    Header(BatchCodec),
    /// The batch and the payload state different sizes.
    #[error("uncompressed_bytes is {stated} but the payload states {found}")]
    Size {
        /// `uncompressed_bytes` of the batch.
        stated: usize,
        /// Size in the payload's header, or the number of bytes that it decodes to.
        found: u64,
    },
    /// The codec cannot reach the stated ratio.
    #[error("{payload} bytes of {} cannot decode to {stated}", .codec.name())]
    Ratio {
        /// Codec.
        codec: BatchCodec,
        /// Bytes of the payload.
        payload: usize,
        /// `uncompressed_bytes` of the batch.
        stated: usize,
    },
    /// The payload is larger than the codec ever makes it.
    #[error("{payload} bytes of {} are too many for {stated}", .codec.name())]
    Padded {
        /// Codec.
        codec: BatchCodec,
        /// Bytes of the payload.
        payload: usize,
        /// `uncompressed_bytes` of the batch.
        stated: usize,
    },
    /// The payload is truncated, damaged, or followed by other bytes.
    #[error("the payload is not valid {}", .0.name())]
    Malformed(BatchCodec),
}

/// Checks the sizes that a batch and its compressed payload state, without decoding.
///
/// Takes constant time for LZ4, and reads the block headers of Zstandard.
///
/// # Errors
/// See [`DecompressError`].
pub fn check_sizes(
    codec: BatchCodec,
    payload: &[u8],
    uncompressed_bytes: usize,
) -> Result<(), DecompressError> {
    let stated = uncompressed_bytes;
    if stated == 0 {
        return Err(DecompressError::NoSize);
    }
    if stated > UNCOMPRESSED_BYTES_MAX {
        return Err(DecompressError::TooLarge { bytes: stated, bytes_max: UNCOMPRESSED_BYTES_MAX });
    }
    // Zstandard has empty blocks, which would hide a large payload behind a small size.
    if payload.len() > payload_bytes_max(stated) {
        return Err(DecompressError::Padded { codec, payload: payload.len(), stated });
    }
    let found = match codec {
        BatchCodec::Lz4 => payload.first_chunk().map(|size| u64::from(u32::from_le_bytes(*size))),
        BatchCodec::Zstd => zstd_safe::get_frame_content_size(payload).ok().flatten(),
    };
    let found = found.ok_or(DecompressError::Header(codec))?;
    if found != stated as u64 {
        return Err(DecompressError::Size { stated, found });
    }
    let most = match codec {
        BatchCodec::Lz4 => (payload.len() - LZ4_HEADER_BYTES).saturating_mul(LZ4_RATIO_MAX),
        BatchCodec::Zstd => {
            (payload.len() / ZSTD_BLOCK_BYTES_MIN).saturating_mul(ZSTD_BLOCK_DECODED_MAX)
        }
    };
    if stated > most {
        return Err(DecompressError::Ratio { codec, payload: payload.len(), stated });
    }
    // One frame and nothing else: several would make the header's size a part of the whole.
    if codec == BatchCodec::Zstd
        && zstd_safe::find_frame_compressed_size(payload) != Ok(payload.len())
    {
        return Err(DecompressError::Malformed(codec));
    }
    Ok(())
}

/// Returns the largest payload for an uncompressed size, above what either codec needs for bytes
/// that do not shrink: a 255th and 20 bytes for LZ4, a 256th and 64 bytes for Zstandard.
fn payload_bytes_max(uncompressed_bytes: usize) -> usize {
    uncompressed_bytes + uncompressed_bytes / 128 + 512
}

/// Decompresses payloads; reuses its context and its buffer.
#[derive(Default)]
pub struct Decompressor {
    /// Created with the first Zstandard payload.
    zstd: Option<bulk::Decompressor<'static>>,
    pub(crate) buffer: Vec<u8>,
}

impl Decompressor {
    /// Decompresses into the reused buffer, which grows to the largest size so far.
    ///
    /// # Errors
    /// See [`DecompressError`]; sizes out of bounds are rejected before the buffer grows.
    pub fn decompress(
        &mut self,
        codec: BatchCodec,
        payload: &[u8],
        uncompressed_bytes: usize,
    ) -> Result<&[u8], DecompressError> {
        check_sizes(codec, payload, uncompressed_bytes)?;
        if self.buffer.len() < uncompressed_bytes {
            self.buffer.resize(uncompressed_bytes, 0);
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        let decoded = self.decode(codec, payload, &mut buffer[..uncompressed_bytes]);
        self.buffer = buffer;
        decoded.map(|()| &self.buffer[..uncompressed_bytes])
    }

    /// Decompresses into a buffer of its own.
    ///
    /// # Errors
    /// See [`DecompressError`]; sizes out of bounds are rejected before the buffer is allocated.
    pub fn decompress_to_bytes(
        &mut self,
        codec: BatchCodec,
        payload: &[u8],
        uncompressed_bytes: usize,
    ) -> Result<Bytes, DecompressError> {
        check_sizes(codec, payload, uncompressed_bytes)?;
        let mut decoded = vec![0; uncompressed_bytes];
        self.decode(codec, payload, &mut decoded)?;
        Ok(decoded.into())
    }

    /// Fills `output`, whose length is the size that the payload must decode to.
    fn decode(
        &mut self,
        codec: BatchCodec,
        payload: &[u8],
        output: &mut [u8],
    ) -> Result<(), DecompressError> {
        let malformed = DecompressError::Malformed(codec);
        let found = match codec {
            BatchCodec::Lz4 => {
                let block = payload.get(LZ4_HEADER_BYTES..).ok_or(malformed)?;
                block::decompress_into(block, output).map_err(|_| malformed)?
            }
            BatchCodec::Zstd => self.zstd_into(payload, output).ok_or(malformed)?,
        };
        if found == output.len() {
            return Ok(());
        }
        Err(DecompressError::Size { stated: output.len(), found: found as u64 })
    }

    /// Decodes frames of Zstandard to the front of `output`. Returns the decoded bytes, or `None`
    /// if they are malformed or do not fit.
    pub(crate) fn zstd_into(&mut self, payload: &[u8], output: &mut [u8]) -> Option<usize> {
        let context = match &mut self.zstd {
            Some(context) => context,
            // Fails only without memory.
            none => none.insert(bulk::Decompressor::new().ok()?),
        };
        context.decompress_to_buffer(payload, output).ok()
    }
}

impl fmt::Debug for Decompressor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decompressor").field("buffer_bytes", &self.buffer.len()).finish()
    }
}

thread_local! {
    static DECOMPRESSOR: RefCell<Decompressor> = RefCell::default();
}

/// Runs `work` with the decompressor of this thread. `work` must not call this function.
pub fn with_decompressor<T>(work: impl FnOnce(&mut Decompressor) -> T) -> T {
    DECOMPRESSOR.with_borrow_mut(work)
}

/// Compresses payloads; reuses its contexts and its buffer.
pub struct Compressor {
    lz4: CompressTable,
    /// Created with the first batch for Zstandard.
    zstd: Option<bulk::Compressor<'static>>,
    buffer: Vec<u8>,
}

impl Default for Compressor {
    fn default() -> Self {
        Self { lz4: CompressTable::large(), zstd: None, buffer: Vec::new() }
    }
}

impl fmt::Debug for Compressor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compressor").field("buffer_bytes", &self.buffer.len()).finish()
    }
}

impl Compressor {
    /// Compresses an uncompressed batch. Returns `None` if its payload would take more than
    /// `payload_bytes_max` bytes or does not shrink: then it is to be sent as it is.
    pub fn compress(
        &mut self,
        codec: BatchCodec,
        batch: &EncodedBatch,
        payload_bytes_max: usize,
    ) -> Option<EncodedBatch> {
        if !batch::is_uncompressed(batch.compression) {
            return None;
        }
        let payload = self.compress_bytes(codec, &batch.payload)?;
        if payload.len() > payload_bytes_max || payload.len() >= batch.payload.len() {
            return None;
        }
        let payload = Bytes::copy_from_slice(payload);
        compressed_batch(codec, batch, payload)
    }

    /// Compresses an uncompressed batch, also if it does not shrink.
    pub(crate) fn recompress(
        &mut self,
        codec: BatchCodec,
        batch: &EncodedBatch,
    ) -> Option<EncodedBatch> {
        let payload = Bytes::copy_from_slice(self.compress_bytes(codec, &batch.payload)?);
        compressed_batch(codec, batch, payload)
    }

    /// Compresses an uncompressed batch with the slowest levels of Zstandard and a window as long
    /// as the payload, in a context for this call. It takes up to [`HARDEST_CONTEXT_BYTES_MAX`].
    pub(crate) fn compress_hardest(&mut self, batch: &EncodedBatch) -> Option<EncodedBatch> {
        let payload = compress_bytes_hardest(&batch.payload)?;
        compressed_batch(BatchCodec::Zstd, batch, payload.into())
    }

    /// Returns the table of LZ4, and the buffer for the result, unless there are too many bytes.
    pub(crate) fn lz4_parts(&mut self, bytes: usize) -> Option<(&mut CompressTable, &mut Vec<u8>)> {
        let is_within = (1..=UNCOMPRESSED_BYTES_MAX).contains(&bytes);
        is_within.then_some((&mut self.lz4, &mut self.buffer))
    }

    /// Compresses bytes into the reused buffer. Returns `None` if there are none, or more than
    /// [`UNCOMPRESSED_BYTES_MAX`].
    pub fn compress_bytes(&mut self, codec: BatchCodec, bytes: &[u8]) -> Option<&[u8]> {
        if !(1..=UNCOMPRESSED_BYTES_MAX).contains(&bytes.len()) {
            return None;
        }
        let bound = match codec {
            BatchCodec::Lz4 => LZ4_HEADER_BYTES + block::get_maximum_output_size(bytes.len()),
            BatchCodec::Zstd => zstd_safe::compress_bound(bytes.len()),
        };
        if self.buffer.len() < bound {
            self.buffer.resize(bound, 0);
        }
        let written = match codec {
            BatchCodec::Lz4 => {
                let (header, block) = self.buffer.split_at_mut(LZ4_HEADER_BYTES);
                header.copy_from_slice(&u32::try_from(bytes.len()).ok()?.to_le_bytes());
                let written = block::compress_into_with_table(bytes, block, &mut self.lz4).ok()?;
                LZ4_HEADER_BYTES + written
            }
            BatchCodec::Zstd => {
                let context = match &mut self.zstd {
                    Some(context) => context,
                    // Fails only without memory; the batch is then sent uncompressed.
                    none => none.insert(bulk::Compressor::new(ZSTD_LEVEL).ok()?),
                };
                context.compress_to_buffer(bytes, &mut self.buffer[..]).ok()?
            }
        };
        Some(&self.buffer[..written])
    }
}

/// Compresses bytes with the slowest levels of Zstandard: see [`Compressor::compress_hardest`].
pub(crate) fn compress_bytes_hardest(bytes: &[u8]) -> Option<Vec<u8>> {
    if !(1..=UNCOMPRESSED_BYTES_MAX).contains(&bytes.len()) {
        return None;
    }
    let mut context = bulk::Compressor::new(ZSTD_HARDEST_LEVEL).ok()?;
    let window = bytes.len().next_power_of_two().ilog2().max(ZSTD_WINDOW_LOG_MIN);
    for parameter in [
        CParameter::WindowLog(window),
        CParameter::HashLog(window.min(ZSTD_HASH_LOG_MAX)),
        CParameter::ChainLog(window.min(ZSTD_CHAIN_LOG_MAX)),
        CParameter::EnableLongDistanceMatching(true),
    ] {
        context.set_parameter(parameter).ok()?;
    }
    let payload = context.compress(bytes).ok()?;
    Some(payload)
}

/// Returns a batch with its compressed payload.
fn compressed_batch(
    codec: BatchCodec,
    plain: &EncodedBatch,
    payload: Bytes,
) -> Option<EncodedBatch> {
    let compression = codec.to_wire().into();
    Some(EncodedBatch {
        version: plain.version,
        record_count: plain.record_count,
        compression,
        crc32: batch::crc(plain.version, plain.record_count, compression, &payload),
        uncompressed_bytes: u32::try_from(plain.payload.len()).ok()?,
        payload,
    })
}

#[cfg(test)]
#[path = "compression_tests.rs"]
mod tests;
