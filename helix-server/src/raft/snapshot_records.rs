//! Records that were fetched from another replica and wait for their snapshot.
//! `peer` fetches them; the state machine installs them together with the snapshot.

use std::sync::{Arc, Mutex, MutexGuard};

use helix_wal::{ColdSegments, Wal};

use super::blocking::DiskReads;
use crate::sync;

/// All live records of the entries above `after`, up to `at`.
#[derive(Debug)]
pub struct FetchedRecords {
    /// Last entry that this replica has applied itself; 0 if none.
    pub after: u64,
    /// Last entry that the snapshot covers.
    pub at: u64,
    pub segments: ColdSegments,
}

/// Holds fetched records until openraft installs their snapshot, which it may refuse.
#[derive(Debug, Clone, Default)]
pub struct SnapshotRecords(Arc<Mutex<Option<FetchedRecords>>>);

impl SnapshotRecords {
    fn lock(&self) -> MutexGuard<'_, Option<FetchedRecords>> {
        sync::lock(&self.0)
    }

    /// Stores the records, in place of earlier ones.
    pub fn put(&self, fetched: FetchedRecords) {
        *self.lock() = Some(fetched);
    }

    /// Removes and returns the records.
    pub fn take(&self) -> Option<FetchedRecords> {
        self.lock().take()
    }
}

/// The parts of a replica that copy records to it, or from it.
#[derive(Debug, Clone)]
pub struct RecordStore {
    pub wal: Wal,
    pub reads: DiskReads,
    pub fetched: SnapshotRecords,
}
