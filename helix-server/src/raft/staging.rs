//! Records that were fetched from another replica, on their way from the peers' room, which
//! fetches them, to the state machine, which makes them part of the log together with the snapshot
//! that speaks of them.

use std::sync::{Arc, Mutex, MutexGuard};

use helix_wal::{ColdSegments, Wal};

use super::blocking::DiskReads;

/// All live records of the entries above `after`, up to `at`.
#[derive(Debug)]
pub struct Fetched {
    /// Last entry that this replica has applied by itself; 0 if none.
    pub after: u64,
    /// Last entry that the snapshot covers.
    pub at: u64,
    pub segments: ColdSegments,
}

/// Where fetched records wait for their snapshot: openraft carries that one, and may refuse it.
#[derive(Debug, Clone, Default)]
pub struct Staging(Arc<Mutex<Option<Fetched>>>);

impl Staging {
    fn lock(&self) -> MutexGuard<'_, Option<Fetched>> {
        self.0.lock().expect("no panic while it is held")
    }

    pub fn put(&self, fetched: Fetched) {
        *self.lock() = Some(fetched);
    }

    pub fn take(&self) -> Option<Fetched> {
        self.lock().take()
    }
}

/// The parts of a replica that take part when records are copied to it, or from it.
#[derive(Debug, Clone)]
pub struct RecordStore {
    pub wal: Wal,
    pub reads: DiskReads,
    pub staging: Staging,
}
