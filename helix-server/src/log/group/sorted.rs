//! Maps and sets in sorted slices without spare capacity, for many small collections.
//!
//! A B-tree node has capacity for eleven entries. A shard has thousands of collections with one
//! entry each, so nodes would take most of the groups' memory.

use std::borrow::Borrow;

/// Map as a slice in the order of its keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SortedMap<K, V>(Box<[(K, V)]>);

/// Set as a slice in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SortedSet<K>(SortedMap<K, ()>);

impl<K, V> Default for SortedMap<K, V> {
    fn default() -> Self {
        Self(Box::default())
    }
}

impl<K: Ord, V> SortedMap<K, V> {
    /// Changes the entries as a vector. Moves none if their number stays the same.
    fn change<T>(&mut self, change: impl FnOnce(&mut Vec<(K, V)>) -> T) -> T {
        let mut entries = std::mem::take(&mut self.0).into_vec();
        let changed = change(&mut entries);
        self.0 = entries.into_boxed_slice();
        changed
    }

    fn insert_at(&mut self, index: usize, key: K, value: V) {
        self.change(|entries| {
            entries.reserve_exact(1);
            entries.insert(index, (key, value));
        });
    }

    fn find<Q: Ord + ?Sized>(&self, key: &Q) -> Result<usize, usize>
    where
        K: Borrow<Q>,
    {
        self.0.binary_search_by(|(known, _)| known.borrow().cmp(key))
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn contains_key<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.find(key).is_ok()
    }

    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.get_key_value(key).map(|(_, value)| value)
    }

    pub fn get_key_value<Q: Ord + ?Sized>(&self, key: &Q) -> Option<(&K, &V)>
    where
        K: Borrow<Q>,
    {
        let index = self.find(key).ok()?;
        self.0.get(index).map(|(key, value)| (key, value))
    }

    pub fn get_mut<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        let index = self.find(key).ok()?;
        self.0.get_mut(index).map(|(_, value)| value)
    }

    /// Returns the value of a key. `new` creates it if the key is missing.
    pub fn get_or_insert_with(&mut self, key: K, new: impl FnOnce() -> V) -> &mut V {
        let index = match self.find(&key) {
            Ok(index) => index,
            Err(index) => {
                self.insert_at(index, key, new());
                index
            }
        };
        &mut self.0[index].1
    }

    /// Inserts an entry, and returns the previous value of the key.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        match self.find(&key) {
            Ok(index) => Some(std::mem::replace(&mut self.0[index].1, value)),
            Err(index) => {
                self.insert_at(index, key, value);
                None
            }
        }
    }

    /// Inserts entries, faster than one by one. Keys that the map already has keep their values.
    pub fn insert_new(&mut self, new: Vec<(K, V)>) {
        self.change(|entries| {
            entries.reserve_exact(new.len());
            entries.extend(new);
            // The sort finds two runs and merges them.
            entries.sort_by(|(one, _), (other, _)| one.cmp(other));
            entries.dedup_by(|(one, _), (other, _)| one == other);
        });
    }

    pub fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let index = self.find(key).ok()?;
        let (_, value) = self.change(|entries| entries.remove(index));
        Some(value)
    }

    pub fn retain(&mut self, mut is_kept: impl FnMut(&K, &V) -> bool) {
        self.change(|entries| entries.retain(|(key, value)| is_kept(key, value)));
    }

    pub fn clear(&mut self) {
        self.0 = Box::default();
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&K, &V)> + DoubleEndedIterator + Clone {
        self.0.iter().map(|(key, value)| (key, value))
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&K, &mut V)> {
        self.0.iter_mut().map(|(key, value)| (&*key, value))
    }

    pub fn keys(&self) -> impl ExactSizeIterator<Item = &K> + Clone {
        self.0.iter().map(|(key, _)| key)
    }

    pub fn values(&self) -> impl ExactSizeIterator<Item = &V> {
        self.0.iter().map(|(_, value)| value)
    }

    pub fn values_mut(&mut self) -> impl ExactSizeIterator<Item = &mut V> {
        self.0.iter_mut().map(|(_, value)| value)
    }
}

/// Keeps the first entry of each key.
impl<K: Ord, V> FromIterator<(K, V)> for SortedMap<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut map = Self::default();
        map.insert_new(entries.into_iter().collect());
        map
    }
}

impl<K> Default for SortedSet<K> {
    fn default() -> Self {
        Self(SortedMap::default())
    }
}

impl<K: Ord> SortedSet<K> {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn contains(&self, key: &K) -> bool {
        self.0.contains_key(key)
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = &K> + Clone {
        self.0.keys()
    }
}

impl<K: Ord> FromIterator<K> for SortedSet<K> {
    fn from_iter<I: IntoIterator<Item = K>>(keys: I) -> Self {
        Self(keys.into_iter().map(|key| (key, ())).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rand::RngExt;

    use super::*;
    use crate::log::testing::seeded;

    #[test]
    fn agrees_with_a_tree() {
        let mut rng = seeded("sorted_map_agrees_with_a_tree");
        for _ in 0..100 {
            let (mut sorted, mut tree) = (SortedMap::default(), BTreeMap::new());
            for value in 0..200_u32 {
                let key = rng.random_range(0..40_u32);
                match rng.random_range(0..5) {
                    0 | 1 => assert_eq!(sorted.insert(key, value), tree.insert(key, value)),
                    2 => assert_eq!(sorted.remove(&key), tree.remove(&key)),
                    3 => {
                        let (new, known) = (|| value, *tree.entry(key).or_insert(value));
                        assert_eq!(*sorted.get_or_insert_with(key, new), known);
                    }
                    _ => {
                        let new: Vec<_> = (40..50).filter(|it| !tree.contains_key(it)).collect();
                        let new: Vec<_> = new.into_iter().rev().map(|it| (it, value)).collect();
                        tree.extend(new.iter().copied());
                        sorted.insert_new(new);
                        sorted.retain(|key, _| *key < 45);
                        tree.retain(|key, _| *key < 45);
                    }
                }
                assert_eq!((sorted.get(&key), sorted.len()), (tree.get(&key), tree.len()));
                assert!(sorted.iter().eq(tree.iter()));
            }
        }
    }
}
