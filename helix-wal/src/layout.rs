//! Sizes, file names and the few helpers that every byte format here shares.
//! All numbers on disk are little endian.

use crate::storage::BLOCK;
use crate::{Error, Placement};

/// One block as a number of bytes in a file.
pub(crate) const BLOCK_BYTES: u64 = BLOCK as u64;
/// Version written into new files.
pub(crate) const FORMAT_VERSION: u16 = 1;
/// Oldest version whose readers understand what is written now.
pub(crate) const MIN_READER_VERSION: u16 = 1;
/// Version of the state file: 2 names cold segments, 3 those that wait for a snapshot. One without
/// cold segments can be read by version 1.
pub(crate) const STATE_VERSION: u16 = 3;
/// Most bytes of an identity or of a vote: both must fit into the header of a segment.
pub(crate) const OPAQUE_BYTES_MAX: usize = 256;
/// Indexes, positions in a stream and numbers of segments are below this. No log gets there; a file
/// or a caller that says otherwise is wrong, and nothing that counts on from one can overflow.
pub(crate) const NUMBERS_END: u64 = 1 << 62;
/// Most bytes of an entry's head.
pub(crate) const HEAD_BYTES_MAX: usize = 64 << 10;

/// Whether a number is left for one more segment: the state file names the one after it, too.
pub(crate) fn check_segment_number(id: u64) -> Result<(), Error> {
    if id < NUMBERS_END - 1 {
        return Ok(());
    }
    Err(Error::Unusable(format!("{id} is no number of a segment: the log has used up all of them")))
}

/// Whether a placement ends within bounds: a footer that names the position after it verifies.
pub(crate) fn is_within_bounds(placement: &Placement) -> bool {
    let next = placement.first.checked_add(u64::from(placement.count));
    next.is_some_and(|next| next < NUMBERS_END)
}

pub(crate) const STATE: &str = "state";
pub(crate) const STATE_TMP: &str = "state.tmp";

pub(crate) fn segment_name(id: u64) -> String {
    format!("{id:016x}.seg")
}

/// A copied tail that the state file may not name yet.
pub(crate) fn new_name(id: u64) -> String {
    format!("{id:016x}.new")
}

/// A segment that was written at once. It counts only where the state file names it.
pub(crate) fn cold_name(id: u64) -> String {
    format!("{id:016x}.cold")
}

pub(crate) fn ready_name(number: u64) -> String {
    format!("ready-{number}")
}

/// A file of a log that was put aside.
pub(crate) fn aside_name(number: u64, name: &str) -> String {
    format!("aside-{number}-{name}")
}

/// The number in such a name.
pub(crate) fn aside_number(name: &str) -> Option<u64> {
    name.strip_prefix("aside-")?.split_once('-')?.0.parse().ok()
}

/// What a file of the folder is, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Name {
    Segment(u64),
    New(u64),
    Cold(u64),
    Ready(u64),
    Other,
}

pub(crate) fn parse_name(name: &str) -> Name {
    let id = |hex: &str| {
        let id = u64::from_str_radix(hex, 16).ok().filter(|id| *id < NUMBERS_END);
        // A sign is taken too, and is no digit.
        id.filter(|_| hex.len() == 16 && !hex.starts_with('+'))
    };
    let number = |text: &str| text.parse().ok().filter(|number| *number < NUMBERS_END);
    if let Some(id) = name.strip_suffix(".seg").and_then(id) {
        Name::Segment(id)
    } else if let Some(id) = name.strip_suffix(".new").and_then(id) {
        Name::New(id)
    } else if let Some(id) = name.strip_suffix(".cold").and_then(id) {
        Name::Cold(id)
    } else if let Some(number) = name.strip_prefix("ready-").and_then(number) {
        Name::Ready(number)
    } else {
        Name::Other
    }
}

/// The number at `at`; zero where the bytes end, which no checksum will accept.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    array_at(bytes, at).map_or(0, u16::from_le_bytes)
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    array_at(bytes, at).map_or(0, u32::from_le_bytes)
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    array_at(bytes, at).map_or(0, u64::from_le_bytes)
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// Rounds up to whole blocks.
pub(crate) fn blocks(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart() {
        assert_eq!(parse_name(&segment_name(0x1f)), Name::Segment(0x1f));
        assert_eq!(parse_name(&new_name(NUMBERS_END - 1)), Name::New(NUMBERS_END - 1));
        assert_eq!(parse_name(&cold_name(0x20)), Name::Cold(0x20));
        assert_eq!(parse_name(&ready_name(7)), Name::Ready(7));
        let others =
            ["state", "1.seg", "ready-", "ready-x", ".seg", "lock", "+000000000000001.seg"];
        for other in others {
            assert_eq!(parse_name(other), Name::Other, "{other}");
        }
        // After these no other one could come.
        for number in [NUMBERS_END, u64::MAX] {
            for name in [segment_name(number), cold_name(number), ready_name(number)] {
                assert_eq!(parse_name(&name), Name::Other, "{name}");
            }
        }
        let aside = aside_name(3, &segment_name(7));
        assert_eq!((parse_name(&aside), aside_number(&aside)), (Name::Other, Some(3)));
        assert_eq!(aside_number("state"), None);
    }
}
