//! Verified footer pages, bounded. Old ones go by second chance.
//! Segment ids are never used twice, so nothing in here can become wrong.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;

use crate::storage::BLOCK;

type Key = (u64, u32);

#[derive(Debug)]
pub(crate) struct PageCache {
    pages_max: usize,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    places: HashMap<Key, usize>,
    pages: Vec<Cached>,
    hand: usize,
}

#[derive(Debug)]
struct Cached {
    key: Key,
    page: Bytes,
    used: bool,
}

impl PageCache {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self { pages_max: (bytes_max / BLOCK).max(4), inner: Mutex::default() }
    }

    pub(crate) fn get(&self, segment: u64, page: u32) -> Option<Bytes> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let place = *inner.places.get(&(segment, page))?;
        let cached = inner.pages.get_mut(place)?;
        cached.used = true;
        Some(cached.page.clone())
    }

    pub(crate) fn put(&self, segment: u64, page: u32, bytes: Bytes) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (segment, page);
        if inner.places.contains_key(&key) {
            return;
        }
        let cached = Cached { key, page: bytes, used: false };
        if inner.pages.len() < self.pages_max {
            inner.pages.push(cached);
            let place = inner.pages.len() - 1;
            inner.places.insert(key, place);
            return;
        }
        let place = inner.evict();
        if let Some(old) = inner.pages.get_mut(place) {
            let old = std::mem::replace(old, cached);
            inner.places.remove(&old.key);
            inner.places.insert(key, place);
        }
    }
}

impl Inner {
    /// The place of a page that was not asked for since the hand last passed it.
    fn evict(&mut self) -> usize {
        loop {
            self.hand = (self.hand + 1) % self.pages.len();
            match self.pages.get_mut(self.hand) {
                Some(cached) if cached.used => cached.used = false,
                _ => return self.hand,
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn stays_within_its_bound_and_keeps_what_is_asked_for() {
        let cache = PageCache::new(8 * BLOCK);
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
