//! Sizes of Zstandard frames, read from their headers before anything is decoded: RFC 8878.

const MAGIC: u32 = 0xFD2F_B528;

/// Most bytes that a block decodes to.
const BLOCK_BYTES_MAX: usize = 128 << 10;

/// Largest window that decoders take by default, as a power of two.
const WINDOW_LOG_MAX: u32 = 27;

const BLOCK_RAW: u32 = 0;
const BLOCK_RLE: u32 = 1;
const BLOCK_COMPRESSED: u32 = 2;

/// Returns a bound of the bytes that `bytes` decode to, which is exact if all frames state their
/// sizes. Stops above `bytes_max`.
///
/// Accepts one or more whole frames without dictionaries, and nothing else.
pub(super) fn decoded_bytes_max(mut bytes: &[u8], bytes_max: usize) -> Option<usize> {
    let mut total = 0_usize;
    loop {
        total = total.checked_add(frame(&mut bytes)?)?;
        if bytes.is_empty() || total > bytes_max {
            return Some(total);
        }
    }
}

/// Removes a frame from the front and returns a bound of its decoded size.
fn frame(bytes: &mut &[u8]) -> Option<usize> {
    if number(bytes, 4)? != u64::from(MAGIC) {
        return None;
    }
    let descriptor = number(bytes, 1)?;
    let is_single_segment = descriptor & 0x20 != 0;
    if descriptor & 0x03 != 0 {
        // A dictionary.
        return None;
    }
    if !is_single_segment {
        let window = number(bytes, 1)?;
        if (window >> 3) as u32 + 10 > WINDOW_LOG_MAX {
            return None;
        }
    }
    let stated = match (descriptor >> 6, is_single_segment) {
        (0, false) => None,
        (0, true) => Some(number(bytes, 1)?),
        (1, _) => Some(number(bytes, 2)? + 256),
        (2, _) => Some(number(bytes, 4)?),
        _ => Some(number(bytes, 8)?),
    };
    let mut bound = 0_usize;
    loop {
        let header = number(bytes, 3)? as u32;
        let size = (header >> 3) as usize;
        let (stored, decoded) = match (header >> 1) & 3 {
            BLOCK_RAW => (size, size),
            BLOCK_RLE => (1, size),
            BLOCK_COMPRESSED => (size, BLOCK_BYTES_MAX),
            _ => return None,
        };
        *bytes = bytes.get(stored..)?;
        bound = bound.checked_add(decoded)?;
        if header & 1 != 0 {
            break;
        }
    }
    if descriptor & 0x04 != 0 {
        // The checksum, which the decoder verifies.
        number(bytes, 4)?;
    }
    match stated {
        None => Some(bound),
        // More than the blocks can decode to is wrong.
        Some(stated) => usize::try_from(stated).ok().filter(|stated| *stated <= bound),
    }
}

/// Removes a little-endian number of up to 8 bytes from the front.
fn number(bytes: &mut &[u8], length: usize) -> Option<u64> {
    let (number, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some(number.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}
