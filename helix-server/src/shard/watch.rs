//! Notifies readers of partitions that have grown: one watcher for any number of partitions.
//! Edge-triggered and coalescing: a partition is reported once for any number of changes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use tokio::sync::Notify;

use crate::log::PartitionId;
use crate::sync;

/// A reader's waiter. The reader registers it for partitions under tags of its choice.
#[derive(Debug, Default)]
pub struct Watcher {
    ready: Mutex<Vec<Arc<Registration>>>,
    notify: Notify,
}

#[derive(Debug)]
struct Registration {
    tag: u32,
    queued: AtomicBool,
    watcher: Weak<Watcher>,
}

impl Watcher {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Waits until a tag is ready; at once if one became so since the last call.
    pub async fn changed(&self) {
        self.notify.notified().await;
    }

    /// Returns the tags of the partitions that changed since the last call.
    pub fn take_ready(&self) -> Vec<u32> {
        let ready = std::mem::take(&mut *sync::lock(&self.ready));
        // Cleared before the caller reads the partition, so that a later change is reported.
        ready
            .into_iter()
            .map(|registration| {
                registration.queued.store(false, Ordering::Release);
                registration.tag
            })
            .collect()
    }
}

impl Registration {
    fn wake(self: &Arc<Self>) {
        let Some(watcher) = self.watcher.upgrade() else { return };
        if !self.queued.swap(true, Ordering::AcqRel) {
            sync::lock(&watcher.ready).push(self.clone());
            watcher.notify.notify_one();
        }
    }
}

/// All registered watchers of a shard.
#[derive(Debug, Default)]
pub(super) struct Watchers {
    count: AtomicUsize,
    by_partition: Mutex<BTreeMap<PartitionId, Vec<Arc<Registration>>>>,
}

impl Watchers {
    pub(super) fn add(
        self: &Arc<Self>,
        partition: PartitionId,
        tag: u32,
        watcher: &Arc<Watcher>,
    ) -> WatchGuard {
        let queued = AtomicBool::new(false);
        let registration = Arc::new(Registration { tag, queued, watcher: Arc::downgrade(watcher) });
        self.lock().entry(partition).or_default().push(registration.clone());
        self.count.fetch_add(1, Ordering::SeqCst);
        WatchGuard { watchers: self.clone(), partition, registration }
    }

    /// Notifies the watchers of a partition. Called once its new state can be read.
    pub(super) fn wake(&self, partition: PartitionId) {
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        for registration in self.lock().get(&partition).into_iter().flatten() {
            registration.wake();
        }
    }

    /// Notifies every watcher of the shard.
    pub(super) fn wake_all(&self) {
        for registration in self.lock().values().flatten() {
            registration.wake();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<PartitionId, Vec<Arc<Registration>>>> {
        sync::lock(&self.by_partition)
    }
}

/// Ends a registration when dropped.
#[derive(Debug)]
pub struct WatchGuard {
    watchers: Arc<Watchers>,
    partition: PartitionId,
    registration: Arc<Registration>,
}

impl Drop for WatchGuard {
    fn drop(&mut self) {
        let mut by_partition = self.watchers.lock();
        if let Some(registrations) = by_partition.get_mut(&self.partition) {
            registrations.retain(|other| !Arc::ptr_eq(other, &self.registration));
            if registrations.is_empty() {
                by_partition.remove(&self.partition);
            }
        }
        self.watchers.count.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn reports_a_partition_once_for_many_changes() {
        let watchers = Arc::new(Watchers::default());
        let watcher = Watcher::new();
        let _first = watchers.add(PartitionId(1), 10, &watcher);
        let second = watchers.add(PartitionId(2), 20, &watcher);
        for _ in 0..3 {
            watchers.wake(PartitionId(1));
            watchers.wake(PartitionId(2));
        }
        watcher.changed().await;
        assert_eq!(watcher.take_ready(), [10, 20]);
        assert!(watcher.take_ready().is_empty());
        drop(second);
        watchers.wake(PartitionId(2));
        assert!(watcher.take_ready().is_empty());
        watchers.wake(PartitionId(1));
        assert_eq!(watcher.take_ready(), [10]);
    }
}
