//! LZ4 frames, the form that Kafka stores: blocks with a header and checksums.
//!
//! See <https://github.com/lz4/lz4/blob/dev/doc/lz4_Frame_format.md>. Memory grows with what was
//! decoded and is bounded by the caller, whatever a frame states.

use lz4_flex::block::{self, CompressTable};

use super::xxh32::xxh32;

const MAGIC: u32 = 0x184D_2204;

/// Bits of the first descriptor byte.
const VERSION: u8 = 0b0100_0000;
const VERSION_MASK: u8 = 0b1100_0000;
const BLOCKS_INDEPENDENT: u8 = 1 << 5;
const BLOCK_CHECKSUMS: u8 = 1 << 4;
const CONTENT_SIZE: u8 = 1 << 3;
const CONTENT_CHECKSUM: u8 = 1 << 2;
const RESERVED: u8 = 1 << 1;
const DICTIONARY: u8 = 1;

/// Bit of a block's size: the block is not compressed.
const STORED: u32 = 1 << 31;

/// Distance that a block refers back at most.
const HISTORY_BYTES: usize = 64 << 10;

/// A byte extends a match by at most 255 bytes.
const RATIO_MAX: usize = 255;

/// Block sizes that a frame can state, by their number in the descriptor from 4 on.
const BLOCK_BYTES: [usize; 4] = [64 << 10, 256 << 10, 1 << 20, 4 << 20];

/// Reason why a frame is not decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lz4FrameError {
    Malformed,
    TooLarge,
}

/// Decodes one frame, which must be all of `bytes`, to the front of `output`. Returns the decoded
/// bytes, at most `bytes_max`. `output` grows as needed.
pub(super) fn decode(
    bytes: &[u8],
    output: &mut Vec<u8>,
    bytes_max: usize,
) -> Result<usize, Lz4FrameError> {
    let malformed = Lz4FrameError::Malformed;
    let mut input = Input { rest: bytes };
    let header = input.header().ok_or(malformed)?;
    if header.content_bytes.is_some_and(|bytes| bytes > bytes_max as u64) {
        return Err(Lz4FrameError::TooLarge);
    }
    let mut end = 0;
    loop {
        let size = input.number().ok_or(malformed)?;
        if size == 0 {
            break;
        }
        let content = input.take((size & !STORED) as usize).ok_or(malformed)?;
        if header.has_block_checksums && input.number().ok_or(malformed)? != xxh32(content) {
            return Err(malformed);
        }
        // Kafka's own decoder has a buffer of this size.
        if content.len() > header.block_bytes {
            return Err(malformed);
        }
        let decoded_max = match size & STORED {
            0 => header.block_bytes.min(content.len().saturating_mul(RATIO_MAX)),
            _ => content.len(),
        };
        // One byte above the limit shows that there are more.
        let capacity = decoded_max.min(bytes_max + 1 - end);
        if output.len() < end + capacity {
            output.resize(end + capacity, 0);
        }
        let (before, after) = output.split_at_mut(end);
        let target = &mut after[..capacity];
        let decoded = if size & STORED != 0 {
            target.copy_from_slice(&content[..capacity]);
            capacity
        } else {
            let history = if header.is_independent {
                &[]
            } else {
                &before[before.len().saturating_sub(HISTORY_BYTES)..]
            };
            match block::decompress_into_with_dict(content, target, history) {
                Ok(decoded) => decoded,
                Err(block::DecompressError::OutputTooSmall { .. }) if capacity < decoded_max => {
                    return Err(Lz4FrameError::TooLarge);
                }
                Err(_) => return Err(malformed),
            }
        };
        end += decoded;
        if end > bytes_max {
            return Err(Lz4FrameError::TooLarge);
        }
    }
    let decoded = &output[..end];
    let is_content_right = header.content_bytes.is_none_or(|bytes| bytes == end as u64)
        && (!header.has_content_checksum || input.number() == Some(xxh32(decoded)));
    if !is_content_right || !input.rest.is_empty() {
        return Err(malformed);
    }
    Ok(end)
}

/// Encodes `bytes` as one frame of independent blocks at the end of `output`.
pub(super) fn encode(bytes: &[u8], table: &mut CompressTable, output: &mut Vec<u8>) {
    let number = BLOCK_BYTES.iter().position(|block| bytes.len() <= *block).unwrap_or(3);
    let block_bytes = BLOCK_BYTES[number];
    let descriptor = [VERSION | BLOCKS_INDEPENDENT, (number as u8 + 4) << 4];
    output.extend(MAGIC.to_le_bytes());
    output.extend(descriptor);
    output.push((xxh32(&descriptor) >> 8) as u8);
    for plain in bytes.chunks(block_bytes) {
        let start = output.len();
        output.resize(start + 4 + block::get_maximum_output_size(plain.len()), 0);
        let written = block::compress_into_with_table(plain, &mut output[start + 4..], table);
        let stored = match written {
            Ok(written) if written < plain.len() => {
                output.truncate(start + 4 + written);
                written as u32
            }
            // Did not shrink.
            Ok(_) | Err(_) => {
                output.truncate(start + 4);
                output.extend(plain);
                plain.len() as u32 | STORED
            }
        };
        output[start..start + 4].copy_from_slice(&stored.to_le_bytes());
    }
    output.extend([0; 4]);
}

struct FrameHeader {
    is_independent: bool,
    has_block_checksums: bool,
    has_content_checksum: bool,
    content_bytes: Option<u64>,
    block_bytes: usize,
}

struct Input<'a> {
    rest: &'a [u8],
}

impl<'a> Input<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(bytes)?;
        self.rest = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u32> {
        self.take(4)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
    }

    fn header(&mut self) -> Option<FrameHeader> {
        if self.number()? != MAGIC {
            return None;
        }
        let descriptor = self.rest;
        let &[flags, block] = self.take(2)?.first_chunk()?;
        if flags & VERSION_MASK != VERSION || flags & (RESERVED | DICTIONARY) != 0 {
            return None;
        }
        // The other bits of the byte are reserved.
        let number = usize::from(block >> 4).checked_sub(4).filter(|_| block & 0x0F == 0)?;
        let block_bytes = *BLOCK_BYTES.get(number)?;
        let content_bytes = match flags & CONTENT_SIZE {
            0 => None,
            _ => Some(u64::from_le_bytes(*self.take(8)?.first_chunk()?)),
        };
        let hashed = &descriptor[..descriptor.len() - self.rest.len()];
        let checksum = self.take(1)?[0];
        (checksum == (xxh32(hashed) >> 8) as u8).then_some(FrameHeader {
            is_independent: flags & BLOCKS_INDEPENDENT != 0,
            has_block_checksums: flags & BLOCK_CHECKSUMS != 0,
            has_content_checksum: flags & CONTENT_CHECKSUM != 0,
            content_bytes,
            block_bytes,
        })
    }
}
