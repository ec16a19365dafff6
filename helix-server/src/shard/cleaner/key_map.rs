//! The latest offset of each key in a range of a partition, in bounded memory.

use std::collections::HashMap;

/// Bytes that an entry of the map takes beside its key at most: its part of the table while that
/// grows, when the old one (27 bytes an entry) and one of twice that size exist, and rounding by
/// the allocator.
const ENTRY_EXTRA_BYTES: usize = 112;

/// A map from key to its latest offset. Keys are stored as they are, so no two are ever confused.
#[derive(Debug)]
pub(super) struct KeyMap {
    latest: HashMap<Box<[u8]>, u64>,
    bytes: usize,
    bytes_max: usize,
}

impl KeyMap {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self { latest: HashMap::new(), bytes: 0, bytes_max }
    }

    /// Sets the latest offset of a key; offsets grow from call to call.
    ///
    /// Returns false, and changes nothing, if the key is new and does not fit. An empty map takes
    /// any key, so that every range gets smaller.
    pub(super) fn set(&mut self, key: &[u8], offset: u64) -> bool {
        if let Some(latest) = self.latest.get_mut(key) {
            *latest = offset;
            return true;
        }
        let bytes = key.len() + ENTRY_EXTRA_BYTES;
        if self.bytes + bytes > self.bytes_max && !self.latest.is_empty() {
            return false;
        }
        self.bytes += bytes;
        self.latest.insert(key.into(), offset);
        true
    }

    pub(super) fn latest(&self, key: &[u8]) -> Option<u64> {
        self.latest.get(key).copied()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}
