//! Bounded cache of verified footer pages, with second-chance eviction.
//!
//! Segment ids are never reused, so cached pages never become stale.

use std::collections::HashMap;
use std::sync::Mutex;

use bytes::Bytes;

use crate::storage::BLOCK;
use crate::sync::IgnorePoison;

type Key = (u64, u32);

#[derive(Debug)]
pub(crate) struct FooterCache {
    pages_max: usize,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    slots: HashMap<Key, usize>,
    pages: Vec<Cached>,
    clock_hand: usize,
}

#[derive(Debug)]
struct Cached {
    key: Key,
    page: Bytes,
    used: bool,
}

impl FooterCache {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self { pages_max: (bytes_max / BLOCK).max(4), inner: Mutex::default() }
    }

    pub(crate) fn get(&self, segment: u64, page: u32) -> Option<Bytes> {
        let mut inner = self.inner.lock().ignore_poison();
        let place = *inner.slots.get(&(segment, page))?;
        let cached = inner.pages.get_mut(place)?;
        cached.used = true;
        Some(cached.page.clone())
    }

    pub(crate) fn put(&self, segment: u64, page: u32, bytes: Bytes) {
        let mut inner = self.inner.lock().ignore_poison();
        let key = (segment, page);
        if inner.slots.contains_key(&key) {
            return;
        }
        let cached = Cached { key, page: bytes, used: false };
        if inner.pages.len() < self.pages_max {
            inner.pages.push(cached);
            let place = inner.pages.len() - 1;
            inner.slots.insert(key, place);
            return;
        }
        let place = inner.evict();
        if let Some(old) = inner.pages.get_mut(place) {
            let old = std::mem::replace(old, cached);
            inner.slots.remove(&old.key);
            inner.slots.insert(key, place);
        }
    }
}

impl Inner {
    /// Returns the slot of a page that was not used since the clock hand last passed it.
    fn evict(&mut self) -> usize {
        loop {
            self.clock_hand = (self.clock_hand + 1) % self.pages.len();
            match self.pages.get_mut(self.clock_hand) {
                Some(cached) if cached.used => cached.used = false,
                _ => return self.clock_hand,
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn stays_bounded_and_keeps_used_pages() {
        let cache = FooterCache::new(8 * BLOCK);
        let page = |n: u32| Bytes::from(n.to_le_bytes().to_vec());
        for n in 0..100 {
            cache.put(1, n, page(n));
            assert_eq!(cache.get(1, 0).unwrap(), page(0));
        }
        let kept = (0..100).filter(|n| cache.get(1, *n).is_some()).count();
        assert_eq!(kept, 8);
        assert_eq!(cache.get(2, 0), None);
    }
}
