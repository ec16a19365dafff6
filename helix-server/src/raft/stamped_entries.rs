//! Entries whose stages were asked for, until they are committed.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::stages::BatchStamps;
use crate::sync;

/// Entries beyond this number get no stamp of their commit, so that a leader without a majority
/// keeps no more.
const ENTRIES_MAX: usize = 1_024;

/// Stamps of entries in the log that are not committed, by index. Empty for nearly every commit,
/// which then costs one atomic read.
#[derive(Debug, Default)]
pub(super) struct StampedEntries {
    count: AtomicUsize,
    entries: Mutex<VecDeque<(u64, Arc<BatchStamps>)>>,
}

impl StampedEntries {
    pub(super) fn add(&self, index: u64, stamps: Arc<BatchStamps>) {
        let mut entries = sync::lock(&self.entries);
        // Entries of a term that was lost come again with other indexes.
        while entries.back().is_some_and(|(last, _)| *last >= index) {
            entries.pop_back();
        }
        if entries.len() < ENTRIES_MAX {
            entries.push_back((index, stamps));
        }
        self.count.store(entries.len(), Ordering::Relaxed);
    }

    pub(super) fn on_committed(&self, upto: u64) {
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut entries = sync::lock(&self.entries);
        while let Some((_, stamps)) = entries.pop_front_if(|(index, _)| *index <= upto) {
            stamps.stamp_committed();
        }
        self.count.store(entries.len(), Ordering::Relaxed);
    }
}
