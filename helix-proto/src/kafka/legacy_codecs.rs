//! Gzip and Snappy, for programs that receive batches of Kafka producers.

use std::io::Read;

use flate2::bufread::MultiGzDecoder;
use snap::raw;

use super::{KafkaBatchError, KafkaCodec};

/// Begins the framing of the Java library for Snappy; two versions of 4 bytes follow.
const JAVA_MAGIC: &[u8] = b"\x82SNAPPY\0";
const JAVA_HEADER_BYTES: usize = 16;

/// Bytes by which the output grows while gzip is decoded.
const GROWTH_BYTES: usize = 64 << 10;

/// Decodes `bytes` to the front of `output`. Returns the decoded bytes, at most `bytes_max`.
pub(super) fn decode(
    codec: KafkaCodec,
    bytes: &[u8],
    output: &mut Vec<u8>,
    bytes_max: usize,
) -> Result<usize, KafkaBatchError> {
    match codec {
        KafkaCodec::Gzip => gunzip(bytes, output, bytes_max),
        _ if bytes.starts_with(JAVA_MAGIC) => unsnap_java(bytes, output, bytes_max),
        _ => unsnap(bytes, output, 0, bytes_max),
    }
}

fn gunzip(bytes: &[u8], output: &mut Vec<u8>, bytes_max: usize) -> Result<usize, KafkaBatchError> {
    let mut decoder = MultiGzDecoder::new(bytes);
    let mut end = 0;
    loop {
        // One byte above the limit shows that there are more.
        let capacity = (end + GROWTH_BYTES).min(bytes_max + 1);
        if output.len() < capacity {
            output.resize(capacity, 0);
        }
        let read = decoder.read(&mut output[end..capacity]);
        match read.map_err(|_| KafkaBatchError::Malformed(KafkaCodec::Gzip))? {
            0 => return Ok(end),
            read => end += read,
        }
        if end > bytes_max {
            return Err(KafkaBatchError::TooLarge { bytes_max });
        }
    }
}

/// Decodes one block behind the `start` bytes of `output` that are used. Returns their new number.
fn unsnap(
    block: &[u8],
    output: &mut Vec<u8>,
    start: usize,
    bytes_max: usize,
) -> Result<usize, KafkaBatchError> {
    let malformed = |_| KafkaBatchError::Malformed(KafkaCodec::Snappy);
    let stated = raw::decompress_len(block).map_err(malformed)?;
    let end = start.saturating_add(stated);
    if end > bytes_max {
        return Err(KafkaBatchError::TooLarge { bytes_max });
    }
    if output.len() < end {
        output.resize(end, 0);
    }
    let decoded = raw::Decoder::new().decompress(block, &mut output[start..end]);
    Ok(start + decoded.map_err(malformed)?)
}

fn unsnap_java(
    bytes: &[u8],
    output: &mut Vec<u8>,
    bytes_max: usize,
) -> Result<usize, KafkaBatchError> {
    let malformed = KafkaBatchError::Malformed(KafkaCodec::Snappy);
    let mut rest = bytes.get(JAVA_HEADER_BYTES..).ok_or(malformed)?;
    let mut end = 0;
    while !rest.is_empty() {
        let (length, after) = rest.split_first_chunk().ok_or(malformed)?;
        let length = usize::try_from(u32::from_be_bytes(*length)).map_err(|_| malformed)?;
        let (block, after) = after.split_at_checked(length).ok_or(malformed)?;
        end = unsnap(block, output, end, bytes_max)?;
        rest = after;
    }
    Ok(end)
}
