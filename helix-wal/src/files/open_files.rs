//! Open files of sealed segments, opened on first read. The most recently used stay open.
//!
//! A log may have more segments than a process may have open files.

use std::io;
use std::sync::{Arc, Mutex};

use crate::storage::{File, Storage};
use crate::sync::IgnorePoison;
use crate::types::ReadMode;

/// Maximum number of sealed segments of one log that stay open.
pub(crate) const FILES_MAX: usize = 64;

#[derive(Debug)]
pub(crate) struct OpenFiles {
    storage: Arc<dyn Storage>,
    /// By segment, most recently used last.
    open: Mutex<Vec<(u64, Arc<dyn File>)>>,
}

impl OpenFiles {
    pub(crate) fn new(storage: Arc<dyn Storage>) -> Self {
        Self { storage, open: Mutex::default() }
    }

    /// Returns the file of a segment; `None` if it is not open and `mode` forbids opening it.
    pub(crate) fn get(
        &self,
        segment: u64,
        name: &str,
        mode: ReadMode,
    ) -> io::Result<Option<Arc<dyn File>>> {
        if let Some(file) = self.take(segment) {
            self.put(segment, Arc::clone(&file));
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
        let mut open = self.open.lock().ignore_poison();
        // Two readers may have opened the file at the same time.
        open.retain(|(id, _)| *id != segment);
        open.push((segment, file));
        let oldest = if open.len() > FILES_MAX { Some(open.remove(0)) } else { None };
        drop(open);
        drop(oldest);
    }

    /// Removes a file, if it is open.
    pub(crate) fn take(&self, segment: u64) -> Option<Arc<dyn File>> {
        let mut open = self.open.lock().ignore_poison();
        let at = open.iter().position(|(id, _)| *id == segment)?;
        Some(open.remove(at).1)
    }
}
