//! The data shards of a node. Each one is open, or has a reason why it is not.

use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};

use crate::shard::Shard;
use crate::sync;

/// State of one shard on this node. A shard that is not open does not affect the others.
#[derive(Debug, Clone)]
pub(super) enum ShardSlot {
    Open(Arc<Shard>),
    /// Its log is damaged and no other node has a replica.
    Damaged(String),
    /// It has stopped and will be reopened.
    Stopped(String),
}

/// The shards of a node, by id.
#[derive(Debug, Default)]
pub(super) struct ShardSlots(RwLock<BTreeMap<u64, ShardSlot>>);

impl ShardSlots {
    pub(super) fn set(&self, shard_id: u64, slot: ShardSlot) {
        sync::write(&self.0).insert(shard_id, slot);
    }

    /// Removes a shard whose replica is no longer here.
    pub(super) fn remove(&self, shard_id: u64) {
        sync::write(&self.0).remove(&shard_id);
    }

    pub(super) fn get(&self, shard_id: u64) -> Option<ShardSlot> {
        sync::read(&self.0).get(&shard_id).cloned()
    }

    pub(super) fn ids(&self) -> Vec<u64> {
        sync::read(&self.0).keys().copied().collect()
    }

    pub(super) fn len(&self) -> usize {
        sync::read(&self.0).len()
    }

    /// Returns the open shards.
    pub(super) fn open(&self) -> Vec<Arc<Shard>> {
        let slots = sync::read(&self.0);
        let open = slots.values().filter_map(|slot| match slot {
            ShardSlot::Open(shard) => Some(shard.clone()),
            ShardSlot::Damaged(_) | ShardSlot::Stopped(_) => None,
        });
        open.collect()
    }

    /// Returns the shards that are not open, with the reason.
    pub(super) fn closed(&self) -> Vec<(u64, ShardSlot)> {
        let slots = sync::read(&self.0);
        let is_closed = |slot: &&ShardSlot| !matches!(slot, ShardSlot::Open(_));
        let closed = slots.iter().filter(|(_, slot)| is_closed(slot));
        closed.map(|(id, slot)| (*id, slot.clone())).collect()
    }
}
