//! The latest offset of each key in a range of a partition, in bounded memory.

use std::io;
use std::sync::{Arc, Mutex};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::key_table::{ENTRY_EXTRA_BYTES, KeyTable};
use crate::sync;

/// Parts into which the memory of a node is divided, and parts with which a pass begins.
const PARTS: usize = 16;
const FIRST_PARTS: u32 = 4;

/// Memory of the key maps of a node's cleaners.
///
/// A pass waits for its first parts in arrival order, while it holds none. It takes further parts
/// only if they are free, and stops at the first record that does not fit. So a pass that runs
/// alone may use all parts, and no two passes wait for each other.
#[derive(Debug, Clone)]
pub struct KeyMapMemory {
    parts: Arc<Semaphore>,
    part_bytes: usize,
}

impl KeyMapMemory {
    /// Creates the memory of a node: about `bytes_max` bytes.
    pub fn new(bytes_max: usize) -> Self {
        Self { parts: Arc::new(Semaphore::new(PARTS)), part_bytes: (bytes_max / PARTS).max(1) }
    }

    /// Waits for the memory that a pass begins with.
    ///
    /// # Errors
    /// The wait fails if the process stops.
    pub(super) async fn begin_pass(&self) -> io::Result<Arc<PassMemory>> {
        let parts = self.parts.clone().acquire_many_owned(FIRST_PARTS).await;
        let parts = parts.map_err(io::Error::other)?;
        let bytes_left = parts.num_permits() * self.part_bytes;
        let taken = Mutex::new(TakenParts { parts, bytes_left });
        Ok(Arc::new(PassMemory { node: self.clone(), taken }))
    }
}

/// Memory that one pass has taken for all of its maps.
#[derive(Debug)]
pub(super) struct PassMemory {
    node: KeyMapMemory,
    taken: Mutex<TakenParts>,
}

#[derive(Debug)]
struct TakenParts {
    parts: OwnedSemaphorePermit,
    /// Bytes of these parts that no entry uses.
    bytes_left: usize,
}

impl PassMemory {
    /// Returns whether one more part is available for another map.
    pub(super) fn has_part(&self) -> bool {
        let mut taken = sync::lock(&self.taken);
        taken.bytes_left >= self.node.part_bytes || self.add_part(&mut taken)
    }

    /// Gives back the parts that no entry uses, once all maps are filled.
    pub(super) fn release_unused(&self) {
        let mut taken = sync::lock(&self.taken);
        let unused = taken.bytes_left / self.node.part_bytes;
        taken.bytes_left %= self.node.part_bytes;
        drop(taken.parts.split(unused));
    }

    /// Takes memory for an entry. Returns the bytes taken; `None` if the entry does not fit.
    ///
    /// With `must`, an entry that does not fit takes all memory that is left.
    fn take(&self, bytes: usize, must: bool) -> Option<usize> {
        let mut taken = sync::lock(&self.taken);
        while taken.bytes_left < bytes {
            if !self.add_part(&mut taken) {
                return must.then(|| std::mem::take(&mut taken.bytes_left));
            }
        }
        taken.bytes_left -= bytes;
        Some(bytes)
    }

    fn give_back(&self, bytes: usize) {
        sync::lock(&self.taken).bytes_left += bytes;
    }

    fn add_part(&self, taken: &mut TakenParts) -> bool {
        let Ok(part) = self.node.parts.clone().try_acquire_owned() else { return false };
        taken.parts.merge(part);
        taken.bytes_left += self.node.part_bytes;
        true
    }
}

/// Maps each key to its latest offset.
#[derive(Debug)]
pub(super) struct KeyMap {
    latest: KeyTable,
    memory: Arc<PassMemory>,
    /// Bytes of the pass's memory that the entries use.
    bytes_taken: usize,
}

impl KeyMap {
    pub(super) fn new(memory: Arc<PassMemory>) -> Self {
        Self { latest: KeyTable::default(), memory, bytes_taken: 0 }
    }

    /// Sets the latest offset of a key; offsets grow from call to call.
    ///
    /// Returns false, and changes nothing, if the key is new and does not fit. An empty map takes
    /// any key, so that every pass makes progress.
    pub(super) fn set(&mut self, key: &[u8], offset: u64) -> bool {
        let hash = self.latest.hash(key);
        if self.latest.replace(hash, key, offset) {
            return true;
        }
        if self.latest.is_full() {
            return false;
        }
        let taken = self.memory.take(key.len() + ENTRY_EXTRA_BYTES, self.latest.is_empty());
        let Some(bytes) = taken else { return false };
        self.bytes_taken += bytes;
        self.latest.insert(hash, key, offset);
        true
    }

    pub(super) fn latest(&self, key: &[u8]) -> Option<u64> {
        self.latest.get(self.latest.hash(key), key)
    }
}

impl Drop for KeyMap {
    /// Returns the memory to the pass for its other maps, for example after this partition failed.
    fn drop(&mut self) {
        self.memory.give_back(self.bytes_taken);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    /// Bytes of one part in these tests, enough for one key.
    const KEY_BYTES: usize = ENTRY_EXTRA_BYTES + 8;

    fn begin(memory: &KeyMapMemory) -> Option<Arc<PassMemory>> {
        memory.begin_pass().now_or_never().map(Result::unwrap)
    }

    /// Fills a map with new keys until it is full. Returns how many it took.
    fn fill(map: &mut KeyMap) -> u64 {
        (0..).take_while(|key: &u64| map.set(&key.to_le_bytes(), *key)).count() as u64
    }

    #[test]
    fn a_pass_that_is_alone_takes_all_and_gives_it_back() {
        let memory = KeyMapMemory::new(PARTS * KEY_BYTES);
        for _ in 0..2 {
            let pass = begin(&memory).unwrap();
            let mut map = KeyMap::new(pass.clone());
            assert_eq!(fill(&mut map), PARTS as u64);
            assert!(map.set(&0_u64.to_le_bytes(), 99), "a known key needs no memory");
            assert!(!pass.has_part());
            assert!(begin(&memory).is_none());
        }
    }

    #[test]
    fn passes_never_wait_for_each_other_with_memory() {
        let memory = KeyMapMemory::new(PARTS * KEY_BYTES);
        let (first, second) = (begin(&memory).unwrap(), begin(&memory).unwrap());
        let (mut one, mut two) = (KeyMap::new(first), KeyMap::new(second));
        // Both maps are full, so their passes would stop here.
        assert_eq!((fill(&mut one), fill(&mut two)), (12, 4));
        // A new pass takes its first parts before the running ones take more.
        let mut third = Box::pin(memory.begin_pass());
        assert!(third.as_mut().now_or_never().is_none());
        drop(two);
        assert!(!one.set(b"new", 100), "what is free belongs to the pass that waits");
        let third = third.now_or_never().unwrap().unwrap();
        assert_eq!(fill(&mut KeyMap::new(third)), 4);
    }

    #[test]
    fn unused_parts_are_free_once_the_maps_are_filled() {
        let memory = KeyMapMemory::new(PARTS * KEY_BYTES);
        let pass = begin(&memory).unwrap();
        let mut maps = [KeyMap::new(pass.clone()), KeyMap::new(pass.clone())];
        for map in &mut maps {
            assert!(map.set(b"12345678", 1));
        }
        pass.release_unused();
        let other = begin(&memory).unwrap();
        assert_eq!(fill(&mut KeyMap::new(other)), PARTS as u64 - 2);
        drop((pass, maps));
        assert!(begin(&memory).is_some());
    }

    #[test]
    fn a_dropped_map_leaves_its_memory_to_the_next_map_of_the_pass() {
        let memory = KeyMapMemory::new(PARTS * KEY_BYTES);
        let pass = begin(&memory).unwrap();
        for _ in 0..2 {
            let mut map = KeyMap::new(pass.clone());
            assert_eq!(fill(&mut map), PARTS as u64);
        }
        // Larger than all of the memory.
        assert!(KeyMap::new(pass.clone()).set(&[7; 10_000], 1));
        assert_eq!(fill(&mut KeyMap::new(pass.clone())), PARTS as u64);
        pass.release_unused();
        assert!(begin(&memory).is_some());
    }

    #[test]
    fn an_empty_map_takes_any_key_and_nothing_else_then() {
        let memory = KeyMapMemory::new(1);
        let pass = begin(&memory).unwrap();
        let mut map = KeyMap::new(pass.clone());
        assert!(map.set(&[7; 10_000], 1));
        assert!(!map.set(b"", 2) && map.set(&[7; 10_000], 3));
        assert_eq!((map.latest(&[7; 10_000]), map.latest(b"")), (Some(3), None));
        assert!(!pass.has_part());
        assert!(KeyMap::new(pass).set(b"", 4), "an empty key is a key");
    }
}
