//! Disks of one node, one per shard. They outlive crashes of the node, and become slow, full or
//! faulty on demand.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use helix_server::node::SimulatedDisks;
use helix_wal::storage::{CacheMode, Crash, Fault, SimulatedDisk, Storage};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Properties of a disk.
#[derive(Debug, Clone, Copy)]
pub struct DiskShape {
    pub cache: CacheMode,
    pub direct_io: bool,
    /// Maximum duration of a sync.
    pub pace_max: Duration,
}

/// Disks of a node, by shard. Clones share the disks.
#[derive(Clone)]
pub struct NodeDisks(Arc<Mutex<Inner>>);

struct Inner {
    seed: u64,
    shape: DiskShape,
    by_shard: BTreeMap<u64, SimulatedDisk>,
    /// Draws the duration of syncs.
    random: StdRng,
    /// Extra duration of every sync while the disk stalls.
    stall: Duration,
    free: Option<u64>,
}

impl NodeDisks {
    pub fn new(seed: u64, shape: DiskShape) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            seed,
            shape,
            by_shard: BTreeMap::new(),
            random: StdRng::seed_from_u64(seed ^ 0xd15c),
            stall: Duration::ZERO,
            free: None,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic of a node must not hide the contents of its disks.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loses power: each unsynced sector is kept, lost, torn or garbled, by `seed`.
    pub fn lose_power(&self, seed: u64) {
        for (shard, disk) in &self.lock().by_shard {
            disk.crash(Crash::Seeded(seed ^ shard));
        }
    }

    /// Ends the process: the page cache survives.
    pub fn lose_process(&self) {
        for disk in self.lock().by_shard.values() {
            disk.crash(Crash::KeepAll);
        }
    }

    /// Stops the disk of one shard after `changes` more changes, in the middle of the next one.
    /// That change stays pending. Returns `false` if there is no such disk.
    pub fn stop_soon(&self, shard: u64, changes: u64) -> bool {
        let inner = self.lock();
        let Some(disk) = inner.by_shard.get(&shard) else { return false };
        disk.stop_at_change(Some(disk.changes() + changes));
        true
    }

    pub fn has_stopped(&self) -> bool {
        self.lock().by_shard.values().any(SimulatedDisk::stopped)
    }

    /// Adds a fault to the disk of one shard. Returns `false` if there is no such disk.
    pub fn fail(&self, shard: u64, fault: Fault) -> bool {
        let inner = self.lock();
        let Some(disk) = inner.by_shard.get(&shard) else { return false };
        disk.fail(fault);
        true
    }

    /// Replaces all disks by empty ones while the machine is off.
    pub fn wipe(&self) {
        self.lock().by_shard.clear();
    }

    pub fn set_stall(&self, stall: Duration) {
        self.lock().stall = stall;
    }

    /// Sets the free bytes of each disk; `None` removes the limit.
    pub fn set_free(&self, free: Option<u64>) {
        let mut inner = self.lock();
        inner.free = free;
        for disk in inner.by_shard.values() {
            disk.set_free_bytes(free);
        }
    }

    /// Removes all faults and limits.
    pub fn heal(&self) {
        let inner = self.lock();
        for disk in inner.by_shard.values() {
            disk.heal();
            disk.stop_at_change(None);
        }
        drop(inner);
        self.set_free(None);
        self.set_stall(Duration::ZERO);
    }

    /// Makes syncs fast, for the phase in which everything must recover.
    pub fn speed_up(&self) {
        self.lock().shape.pace_max = Duration::from_millis(2);
    }

    /// Returns the disk of one shard.
    pub fn disk(&self, shard: u64) -> Option<SimulatedDisk> {
        self.lock().by_shard.get(&shard).cloned()
    }

    pub fn shards(&self) -> Vec<u64> {
        self.lock().by_shard.keys().copied().collect()
    }
}

impl SimulatedDisks for NodeDisks {
    fn shards(&self) -> Option<Vec<u64>> {
        Some(Self::shards(self))
    }

    fn open(&self, shard_id: u64) -> Arc<dyn Storage> {
        let mut inner = self.lock();
        let Inner { seed, shape, free, by_shard, .. } = &mut *inner;
        let disk = by_shard.entry(shard_id).or_insert_with(|| {
            let disk = SimulatedDisk::new(*seed ^ shard_id << 8);
            disk.set_cache(shape.cache);
            disk.set_direct_io(shape.direct_io);
            disk.set_free_bytes(*free);
            disk
        });
        Arc::new(disk.reopen())
    }

    fn write_delay(&self, _shard_id: u64) -> Duration {
        let mut inner = self.lock();
        let Inner { shape, random, stall, .. } = &mut *inner;
        let max_us = u64::try_from(shape.pace_max.as_micros()).unwrap_or(0);
        Duration::from_micros(random.random_range(0..=max_us)) + *stall
    }
}

impl fmt::Debug for NodeDisks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disks").field("shards", &self.shards()).finish()
    }
}
