//! The files of sealed segments: opened when they are read, the latest kept open. A log may have
//! more segments than a process may have open files.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use crate::How;
use crate::storage::{File, Storage};

/// Sealed segments of one log that are kept open.
pub(crate) const FILES_MAX: usize = 64;

#[derive(Debug)]
pub(crate) struct Files {
    storage: Arc<dyn Storage>,
    /// By segment, the latest used last.
    open: Mutex<Vec<(u64, Arc<dyn File>)>>,
}

impl Files {
    pub(crate) fn new(storage: Arc<dyn Storage>) -> Self {
        Self { storage, open: Mutex::default() }
    }

    /// The file of a segment; `None` if it would have to be opened first.
    pub(crate) fn get(
        &self,
        segment: u64,
        name: &str,
        how: How,
    ) -> io::Result<Option<Arc<dyn File>>> {
        if let Some(file) = self.take(segment) {
            self.put(segment, Arc::clone(&file));
            return Ok(Some(file));
        }
        if matches!(how, How::Memory | How::Cached) {
            return Ok(None);
        }
        let file = self.storage.open(name)?;
        self.put(segment, Arc::clone(&file));
        Ok(Some(file))
    }

    /// Keeps a file open in place of the one that was not used for longest.
    pub(crate) fn put(&self, segment: u64, file: Arc<dyn File>) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        // Two readers may have opened it at the same time.
        open.retain(|(id, _)| *id != segment);
        open.push((segment, file));
        let oldest = if open.len() > FILES_MAX { Some(open.remove(0)) } else { None };
        drop(open);
        drop(oldest);
    }

    /// Gives up a file, if it is open.
    pub(crate) fn take(&self, segment: u64) -> Option<Arc<dyn File>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let at = open.iter().position(|(id, _)| *id == segment)?;
        Some(open.remove(at).1)
    }
}
