//! Open files of sealed segments, opened on first read. The most recently used stay open.
//!
//! A log may have more segments than a process may have open files. All logs of a process can
//! share one cache, so that its size bounds the files of all of them.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex};

use crate::storage::{File, Storage};
use crate::sync::IgnorePoison;
use crate::types::ReadMode;

/// Default maximum number of sealed segments that stay open.
const FILES_MAX: usize = 64;

/// Cache of the open files of sealed segments. Clones share it.
#[derive(Clone)]
pub struct FileCache {
    inner: Arc<Mutex<CachedFiles>>,
    files_max: usize,
}

impl fmt::Debug for FileCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileCache").field("files_max", &self.files_max).finish_non_exhaustive()
    }
}

impl Default for FileCache {
    fn default() -> Self {
        Self::new(FILES_MAX)
    }
}

impl FileCache {
    /// Creates a cache of at most `files_max` files; at least 1.
    pub fn new(files_max: usize) -> Self {
        Self { inner: Arc::default(), files_max: files_max.max(1) }
    }

    /// Returns the number of open files.
    pub fn len(&self) -> usize {
        self.inner.lock().ignore_poison().files.len()
    }

    /// Returns whether no file is open.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of a log, which its files are kept under.
    fn add_log(&self) -> u64 {
        let mut inner = self.inner.lock().ignore_poison();
        inner.logs += 1;
        inner.logs
    }

    fn remove_log(&self, log: u64) {
        let mut inner = self.inner.lock().ignore_poison();
        let CachedFiles { files, by_use, .. } = &mut *inner;
        let keys: Vec<FileKey> =
            files.range((log, 0)..=(log, u64::MAX)).map(|(key, _)| *key).collect();
        let mut gone = Vec::with_capacity(keys.len());
        for key in keys {
            if let Some((used, file)) = files.remove(&key) {
                by_use.remove(&used);
                gone.push(file);
            }
        }
        drop(inner);
        // The files are closed without the lock.
        drop(gone);
    }
}

/// Log and segment of a file.
type FileKey = (u64, u64);

#[derive(Default)]
struct CachedFiles {
    files: BTreeMap<FileKey, (u64, Arc<dyn File>)>,
    /// By the number of their last use.
    by_use: BTreeMap<u64, FileKey>,
    uses: u64,
    logs: u64,
}

impl CachedFiles {
    fn get(&mut self, key: FileKey) -> Option<Arc<dyn File>> {
        let (used, file) = self.files.get_mut(&key)?;
        self.by_use.remove(used);
        self.uses += 1;
        *used = self.uses;
        self.by_use.insert(self.uses, key);
        Some(Arc::clone(file))
    }

    fn take(&mut self, key: FileKey) -> Option<Arc<dyn File>> {
        let (used, file) = self.files.remove(&key)?;
        self.by_use.remove(&used);
        Some(file)
    }

    fn put(&mut self, key: FileKey, file: Arc<dyn File>) -> Option<Arc<dyn File>> {
        self.uses += 1;
        let before = self.files.insert(key, (self.uses, file));
        self.by_use.insert(self.uses, key);
        let (used, before) = before?;
        self.by_use.remove(&used);
        Some(before)
    }

    fn pop_oldest(&mut self) -> Option<Arc<dyn File>> {
        let (_, key) = self.by_use.pop_first()?;
        self.files.remove(&key).map(|(_, file)| file)
    }
}

/// Open files of one log, in a cache that it may share with others.
#[derive(Debug)]
pub(crate) struct OpenFiles {
    storage: Arc<dyn Storage>,
    cache: FileCache,
    log: u64,
}

impl Drop for OpenFiles {
    fn drop(&mut self) {
        self.cache.remove_log(self.log);
    }
}

impl OpenFiles {
    pub(crate) fn new(storage: Arc<dyn Storage>, cache: FileCache) -> Self {
        let log = cache.add_log();
        Self { storage, cache, log }
    }

    /// Returns the file of a segment; `None` if it is not open and `mode` forbids opening it.
    pub(crate) fn get(
        &self,
        segment: u64,
        name: &str,
        mode: ReadMode,
    ) -> io::Result<Option<Arc<dyn File>>> {
        if let Some(file) = self.cache.inner.lock().ignore_poison().get((self.log, segment)) {
            return Ok(Some(file));
        }
        if matches!(mode, ReadMode::MemoryOnly | ReadMode::CachedOnly) {
            return Ok(None);
        }
        let file = self.storage.open(name)?;
        self.put(segment, Arc::clone(&file));
        Ok(Some(file))
    }

    /// Keeps a file open and closes the least recently used one.
    pub(crate) fn put(&self, segment: u64, file: Arc<dyn File>) {
        let mut inner = self.cache.inner.lock().ignore_poison();
        // Two readers may have opened the file at the same time.
        let before = inner.put((self.log, segment), file);
        let is_full = inner.files.len() > self.cache.files_max;
        let oldest = if is_full { inner.pop_oldest() } else { None };
        drop(inner);
        drop((before, oldest));
    }

    /// Removes a file, if it is open.
    pub(crate) fn take(&self, segment: u64) -> Option<Arc<dyn File>> {
        self.cache.inner.lock().ignore_poison().take((self.log, segment))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::storage::{BLOCK, SimulatedDisk};

    #[test]
    fn logs_share_the_files_of_a_cache() {
        let disk = SimulatedDisk::new(1);
        let storage: Arc<dyn Storage> = Arc::new(disk.clone());
        for name in ["a", "b", "c", "d"] {
            disk.write_file(name, vec![0; BLOCK]);
        }
        let cache = FileCache::new(2);
        let one = OpenFiles::new(Arc::clone(&storage), cache.clone());
        let two = OpenFiles::new(storage, cache.clone());
        let is_open = |files: &OpenFiles, segment| {
            files.get(segment, "?", ReadMode::CachedOnly).unwrap().is_some()
        };
        one.get(1, "a", ReadMode::Blocking).unwrap();
        two.get(1, "b", ReadMode::Blocking).unwrap();
        assert!(is_open(&one, 1), "used last");
        two.get(2, "c", ReadMode::Blocking).unwrap();
        assert_eq!((cache.len(), disk.open_files()), (2, 2));
        assert!(is_open(&one, 1) && !is_open(&two, 1) && is_open(&two, 2));
        drop(one);
        assert_eq!((cache.len(), disk.open_files()), (1, 1), "a closed log keeps none");
        assert!(two.take(2).is_some() && two.take(2).is_none() && cache.is_empty());
    }
}
