//! Sizes of segments and of their contents.

use super::footer::footer_bytes_max;
use super::frame::{FIRST_GROUP, GROUP_HEADER};
use super::layout::{BLOCK_BYTES, blocks};

/// Approximate size of the groups of a cold segment.
///
/// Each group is synced before the next is written, so a sync of the writer never waits for more
/// than this.
pub(crate) const COLD_GROUP_BYTES: usize = 512 << 10;

/// Returns the space at the end of a segment reserved for control frames and sync markers.
pub(crate) fn control_reserve(segment_len: u64) -> u64 {
    blocks(segment_len / 64).min(64 << 10)
}

/// Returns the maximum bytes of a frame in a segment of this size.
pub(crate) fn frame_bytes_max(segment_len: u64) -> u64 {
    let fixed = FIRST_GROUP
        + GROUP_HEADER as u64
        + footer_bytes_max(1)
        + control_reserve(segment_len)
        + BLOCK_BYTES;
    (segment_len / 2).min(segment_len.saturating_sub(fixed))
}

/// Returns the bytes of a cold segment for entries with `frame_bytes` bytes of frames in total.
pub(crate) fn cold_bytes(entries: u64, frame_bytes: u64) -> u64 {
    // Every group but the last is at least half full: one frame less than the bound.
    let groups = 1 + 2 * frame_bytes / COLD_GROUP_BYTES as u64;
    let data = blocks(frame_bytes) + groups * (GROUP_HEADER as u64 + BLOCK_BYTES);
    let fixed = FIRST_GROUP + footer_bytes_max(entries);
    // The active segment checks for the control reserve, although there are no control frames here.
    let len = blocks(fixed + data);
    blocks(len + control_reserve(len + len / 32) + BLOCK_BYTES)
}
