//! The log's data directory: its lock and the files in it.

use std::io;

use crate::error::{Error, changing, failed};
use crate::format::layout::{Name, parse_name};
use crate::storage::Storage;

pub(crate) fn lock_dir(storage: &dyn Storage) -> Result<Box<dyn Send + Sync>, Error> {
    storage.lock().map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock => {
            let directory = storage.describe();
            let what = "is in use by another process; stop it or use another data directory";
            Error::Unusable(format!("{directory} {what}"))
        }
        _ => failed("lock", &storage.describe(), &e),
    })
}

pub(crate) fn sync_dir(storage: &dyn Storage) -> Result<(), Error> {
    storage.sync_dir().map_err(|e| changing("sync", &storage.describe(), &e))
}

/// Segment files in the data directory, by kind.
#[derive(Debug, Default)]
pub(crate) struct DirListing {
    pub segments: Vec<u64>,
    pub new: Vec<u64>,
    pub cold: Vec<u64>,
    pub ready: Vec<u64>,
}

impl DirListing {
    pub(crate) fn list(storage: &dyn Storage) -> Result<Self, Error> {
        let all = storage.list().map_err(|e| failed("list", &storage.describe(), &e))?;
        let mut names = Self::default();
        for name in all {
            match parse_name(&name) {
                Name::Segment(id) => names.segments.push(id),
                Name::New(id) => names.new.push(id),
                Name::Cold(id) => names.cold.push(id),
                Name::Ready(number) => names.ready.push(number),
                Name::Other => {}
            }
        }
        names.segments.sort_unstable();
        names.ready.sort_unstable();
        Ok(names)
    }

    /// Returns an id above all ids in use.
    pub(crate) fn next_id(&self) -> u64 {
        self.segments.iter().chain(&self.new).chain(&self.cold).max().map_or(1, |id| id + 1)
    }
}
