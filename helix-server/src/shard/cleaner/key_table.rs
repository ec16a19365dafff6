//! A table from keys to numbers with little memory per key.
//!
//! Keys are stored one after another in chunks, which never move. So keys need no separate
//! allocations, and growth never needs twice the memory of all keys. An open-addressed table holds
//! the hashes and addresses.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

/// Bytes before a key in its chunk: its number and its length.
const HEADER_BYTES: usize = 12;
/// Limits of a chunk's size, which is a quarter of the size of all chunks.
const CHUNK_BYTES_MIN: usize = 512;
const CHUNK_BYTES_MAX: usize = 64 << 10;
/// Entries larger than a chunk divided by this get a separate chunk, so that little space is left
/// unused at the end of shared chunks.
const SHARED_PART_MAX: usize = 16;
/// An address has 16 bits for the chunk and 16 bits for the position in it.
const CHUNKS_MAX: usize = 1 << 16;
const SLOTS_MIN: usize = 8;
/// Marks an empty slot. No address is all ones, since a header does not fit there.
const EMPTY: u64 = u64::MAX;

/// Maximum bytes that a key takes in addition to its own bytes.
///
/// These are its header, its part of the slots (32 bytes), and unused ends of chunks. During growth
/// old and new slots exist, of 8 bytes each, and three quarters of the old ones are in use. Large
/// keys leave up to a sixteenth of their size unused at these ends, in addition.
pub(super) const ENTRY_EXTRA_BYTES: usize = 56;

/// A table from keys to numbers. Compares whole keys, so that equal hashes do no harm.
#[derive(Debug, Default)]
pub(super) struct KeyTable {
    /// Hash and address of each key, at the slot of its hash or after it. A power of two in size.
    slots: Vec<u64>,
    chunks: Vec<Vec<u8>>,
    /// The chunk that takes further small entries.
    open_chunk: Option<usize>,
    /// Capacity of all chunks.
    chunk_bytes: usize,
    count: usize,
    hasher: RandomState,
}

impl KeyTable {
    /// Returns the hash of a key, which the other methods take.
    pub(super) fn hash(&self, key: &[u8]) -> u32 {
        (self.hasher.hash_one(key) >> 32) as u32
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns whether no further key can be addressed, however much memory is left.
    pub(super) fn is_full(&self) -> bool {
        self.chunks.len() >= CHUNKS_MAX
    }

    pub(super) fn get(&self, hash: u32, key: &[u8]) -> Option<u64> {
        let (chunk, at) = place(self.find(hash, key)?);
        let number = self.chunks[chunk][at..].first_chunk()?;
        Some(u64::from_le_bytes(*number))
    }

    /// Sets the number of a key. Returns false, and changes nothing, if the key is new.
    pub(super) fn replace(&mut self, hash: u32, key: &[u8], number: u64) -> bool {
        let Some(address) = self.find(hash, key) else { return false };
        let (chunk, at) = place(address);
        self.chunks[chunk][at..at + 8].copy_from_slice(&number.to_le_bytes());
        true
    }

    /// Adds a new key. The table must not be full.
    pub(super) fn insert(&mut self, hash: u32, key: &[u8], number: u64) {
        if 4 * (self.count + 1) > 3 * self.slots.len() {
            self.grow();
        }
        let chunk = self.chunk_for(HEADER_BYTES + key.len());
        let bytes = &mut self.chunks[chunk];
        let address = ((chunk << 16) | bytes.len()) as u64;
        bytes.extend_from_slice(&number.to_le_bytes());
        bytes.extend_from_slice(&(key.len() as u32).to_le_bytes());
        bytes.extend_from_slice(key);
        self.fill_slot((u64::from(hash) << 32) | address);
        self.count += 1;
    }

    /// Returns the address of a key.
    fn find(&self, hash: u32, key: &[u8]) -> Option<u32> {
        let mask = self.slots.len().checked_sub(1)?;
        let mut at = hash as usize & mask;
        // Terminates, since a quarter of the slots is empty.
        loop {
            let slot = self.slots[at];
            if slot == EMPTY {
                return None;
            }
            if (slot >> 32) as u32 == hash && self.key(slot as u32) == key {
                return Some(slot as u32);
            }
            at = (at + 1) & mask;
        }
    }

    fn key(&self, address: u32) -> &[u8] {
        let (chunk, at) = place(address);
        let entry = &self.chunks[chunk][at + 8..];
        let len = entry.first_chunk().map_or(0, |len| u32::from_le_bytes(*len));
        &entry[4..4 + len as usize]
    }

    /// Returns the number of a chunk that has space for an entry.
    fn chunk_for(&mut self, bytes: usize) -> usize {
        let usual = (self.chunk_bytes / 4).clamp(CHUNK_BYTES_MIN, CHUNK_BYTES_MAX);
        if bytes > usual / SHARED_PART_MAX {
            return self.add_chunk(bytes);
        }
        let has_space = |open: &usize| {
            let chunk = &self.chunks[*open];
            chunk.len() + bytes <= chunk.capacity().min(CHUNK_BYTES_MAX)
        };
        if let Some(open) = self.open_chunk.filter(has_space) {
            return open;
        }
        let open = self.add_chunk(usual);
        self.open_chunk = Some(open);
        open
    }

    fn add_chunk(&mut self, capacity: usize) -> usize {
        self.chunks.push(Vec::with_capacity(capacity));
        self.chunk_bytes += capacity;
        self.chunks.len() - 1
    }

    /// Doubles the slots. Slots contain the hashes, so no key has to be read.
    fn grow(&mut self) {
        let count = (2 * self.slots.len()).max(SLOTS_MIN);
        let old = std::mem::replace(&mut self.slots, vec![EMPTY; count]);
        old.into_iter().filter(|slot| *slot != EMPTY).for_each(|slot| self.fill_slot(slot));
    }

    /// Puts a hash and its address into the next empty slot.
    fn fill_slot(&mut self, new: u64) {
        let mask = self.slots.len() - 1;
        let mut at = (new >> 32) as usize & mask;
        while self.slots[at] != EMPTY {
            at = (at + 1) & mask;
        }
        self.slots[at] = new;
    }
}

/// Returns the chunk of an address, and the position in it.
fn place(address: u32) -> (usize, usize) {
    ((address >> 16) as usize, (address & 0xffff) as usize)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn set(table: &mut KeyTable, key: &[u8], number: u64) {
        let hash = table.hash(key);
        if !table.replace(hash, key, number) {
            table.insert(hash, key, number);
        }
    }

    fn get(table: &KeyTable, key: &[u8]) -> Option<u64> {
        table.get(table.hash(key), key)
    }

    #[test]
    fn a_table_has_what_a_map_has() {
        let mut table = KeyTable::default();
        let mut map = HashMap::new();
        let mut random = 7_u64;
        for number in 0..30_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let key_number = (random >> 33) % 9_000;
            // One key is empty, and some are so large that they get a separate chunk.
            let len = match key_number % 100 {
                0 => 9_000 + (key_number % 7) as usize,
                _ => 8 + (key_number % 90) as usize,
            };
            let mut key = key_number.to_le_bytes().repeat(len.div_ceil(8));
            key.truncate(if key_number == 1 { 0 } else { len });
            assert_eq!(get(&table, &key), map.get(&key).copied());
            set(&mut table, &key, number);
            map.insert(key, number);
        }
        assert_eq!(table.count, map.len());
        assert!(map.len() > 8_000 && map.contains_key(&[][..]));
        for (key, number) in &map {
            assert_eq!(get(&table, key), Some(*number));
        }
        assert_eq!(get(&table, b"another key"), None);
    }

    #[test]
    fn keys_of_one_hash_are_not_confused() {
        let mut table = KeyTable::default();
        for number in 0..100_u64 {
            // All begin at the last slot, so that the search continues at the first one.
            table.insert(u32::MAX, &number.to_le_bytes(), number);
        }
        for number in 0..100_u64 {
            assert_eq!(table.get(u32::MAX, &number.to_le_bytes()), Some(number));
        }
        assert_eq!(table.get(u32::MAX, b"another"), None);
        assert!(table.replace(u32::MAX, &99_u64.to_le_bytes(), 7));
        assert_eq!(table.get(u32::MAX, &99_u64.to_le_bytes()), Some(7));
    }

    #[test]
    fn memory_is_what_is_counted() {
        for len in [4_usize, 16, 60, 1_000, 4_096, 4_097, 70_000] {
            let mut table = KeyTable::default();
            let mut counted = 0;
            for number in 0..(20_000_000 / (len + 500)).min(50_000) as u64 {
                let slots_before = table.slots.len();
                let mut key = number.to_le_bytes().repeat(len.div_ceil(8));
                key.truncate(len);
                set(&mut table, &key, number);
                if table.is_full() {
                    break;
                }
                counted = table.count * (len + ENTRY_EXTRA_BYTES);
                // Growth keeps the old slots beside the new ones.
                let grown = if slots_before < table.slots.len() { slots_before } else { 0 };
                let held = 8 * (table.slots.len() + grown) + table.chunk_bytes;
                let chunks = table.chunks.capacity() * size_of::<Vec<u8>>();
                // The last chunk may have unused space.
                let last = (counted / 4).clamp(1_024, CHUNK_BYTES_MAX);
                let most = counted + counted / 16 + last;
                assert!(held + chunks <= most, "{held} + {chunks} of {counted} at {len}");
            }
            assert!(counted > 1 << 20, "{counted} at {len}");
        }
    }
}
