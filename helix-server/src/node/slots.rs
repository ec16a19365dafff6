//! The data shards of a node: each is served, or it is said why it is not.

use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};

use crate::shard::Shard;

/// A shard's place in the node: one that is not served does not keep the others from it.
#[derive(Debug, Clone)]
pub(super) enum Slot {
    Open(Arc<Shard>),
    /// Its log is damaged, and nobody else has what is in it.
    Withheld(String),
    /// It will be started again.
    Stopped(String),
}

#[derive(Debug, Default)]
pub(super) struct Slots(RwLock<BTreeMap<u64, Slot>>);

impl Slots {
    pub(super) fn set(&self, shard_id: u64, slot: Slot) {
        self.0.write().expect("no panic while it is held").insert(shard_id, slot);
    }

    pub(super) fn get(&self, shard_id: u64) -> Option<Slot> {
        self.0.read().expect("no panic while it is held").get(&shard_id).cloned()
    }

    pub(super) fn ids(&self) -> Vec<u64> {
        self.0.read().expect("no panic while it is held").keys().copied().collect()
    }

    pub(super) fn len(&self) -> usize {
        self.0.read().expect("no panic while it is held").len()
    }

    /// Those that are served.
    pub(super) fn open(&self) -> Vec<Arc<Shard>> {
        let slots = self.0.read().expect("no panic while it is held");
        let open = slots.values().filter_map(|slot| match slot {
            Slot::Open(shard) => Some(shard.clone()),
            Slot::Withheld(_) | Slot::Stopped(_) => None,
        });
        open.collect()
    }

    /// Those that are not, and why.
    pub(super) fn closed(&self) -> Vec<(u64, Slot)> {
        let slots = self.0.read().expect("no panic while it is held");
        let is_closed = |slot: &&Slot| !matches!(slot, Slot::Open(_));
        let closed = slots.iter().filter(|(_, slot)| is_closed(slot));
        closed.map(|(id, slot)| (*id, slot.clone())).collect()
    }
}
