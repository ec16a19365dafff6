//! Sizes, file names and helpers shared by all byte formats. All numbers on disk are little endian.

use crate::error::Error;
use crate::storage::BLOCK;
use crate::types::Placement;

/// Size of one block, as a number of bytes in a file.
pub(crate) const BLOCK_BYTES: u64 = BLOCK as u64;
/// Version written into new files.
pub(crate) const FORMAT_VERSION: u16 = 1;
/// Oldest format version whose readers understand the files written now.
pub(crate) const MIN_READER_VERSION: u16 = 1;
/// Newest version of the state file. Version 2 added cold segments, version 3 staged segments,
/// version 4 clean streams, and is only written if there are some.
///
/// A version 1 reader can read a state file without cold segments.
pub(crate) const STATE_VERSION: u16 = 5;
/// Maximum bytes of an identity or a vote. Both must fit into the header of a segment.
pub(crate) const OPAQUE_BYTES_MAX: usize = 256;
/// Exclusive upper bound of indexes, stream positions and segment ids.
///
/// No real log reaches it, so a larger number in a file or a call is wrong. The bound rules out
/// overflows in later arithmetic.
pub(crate) const NUMBERS_END: u64 = 1 << 62;
/// Maximum bytes of an entry's head.
pub(crate) const HEAD_BYTES_MAX: usize = 64 << 10;

/// Checks that a segment id is in range. The state file also stores the id after it.
pub(crate) fn check_segment_number(id: u64) -> Result<(), Error> {
    if id < NUMBERS_END - 1 {
        return Ok(());
    }
    let limit = NUMBERS_END - 1;
    Err(Error::Unusable(format!("segment id {id} is out of range; the limit is {limit}")))
}

/// Returns whether the position after a placement is in range. A footer stores that position.
pub(crate) fn is_within_bounds(placement: &Placement) -> bool {
    let next = placement.first.checked_add(u64::from(placement.count));
    next.is_some_and(|next| next < NUMBERS_END)
}

pub(crate) const STATE: &str = "state";
pub(crate) const STATE_TMP: &str = "state.tmp";
/// Name of one file of a log while the log is being removed.
pub(crate) const REMOVED: &str = "removed";

pub(crate) fn segment_name(id: u64) -> String {
    format!("{id:016x}.seg")
}

/// Returns the name of a copied segment that the state file may not list yet.
pub(crate) fn new_name(id: u64) -> String {
    format!("{id:016x}.new")
}

/// Returns the name of a cold segment. Such a file belongs to the log only if the state file lists
/// it.
pub(crate) fn cold_name(id: u64) -> String {
    format!("{id:016x}.cold")
}

pub(crate) fn ready_name(number: u64) -> String {
    format!("ready-{number}")
}

/// Returns the new name of a file of a quarantined log.
pub(crate) fn quarantine_name(number: u64, name: &str) -> String {
    format!("aside-{number}-{name}")
}

/// Returns the number in the name of a quarantined file.
pub(crate) fn quarantine_number(name: &str) -> Option<u64> {
    name.strip_prefix("aside-")?.split_once('-')?.0.parse().ok()
}

/// Kind of a file in the data directory, parsed from its name.
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
        // `from_str_radix` accepts a sign, which is not a digit.
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

/// Returns the number at `at`, or 0 past the end of the bytes, which no checksum accepts.
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
    fn parses_file_names() {
        assert_eq!(parse_name(&segment_name(0x1f)), Name::Segment(0x1f));
        assert_eq!(parse_name(&new_name(NUMBERS_END - 1)), Name::New(NUMBERS_END - 1));
        assert_eq!(parse_name(&cold_name(0x20)), Name::Cold(0x20));
        assert_eq!(parse_name(&ready_name(7)), Name::Ready(7));
        let others =
            ["state", "1.seg", "ready-", "ready-x", ".seg", "lock", "+000000000000001.seg"];
        for other in others {
            assert_eq!(parse_name(other), Name::Other, "{other}");
        }
        // No number could follow these.
        for number in [NUMBERS_END, u64::MAX] {
            for name in [segment_name(number), cold_name(number), ready_name(number)] {
                assert_eq!(parse_name(&name), Name::Other, "{name}");
            }
        }
        let aside = quarantine_name(3, &segment_name(7));
        assert_eq!((parse_name(&aside), quarantine_number(&aside)), (Name::Other, Some(3)));
        assert_eq!(quarantine_number("state"), None);
    }
}
