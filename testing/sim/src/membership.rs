//! Members of the cluster, shared by the operator and the nemesis: the nemesis must know which
//! node the cluster can lose.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Request of the operator to the nemesis, by node id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MachineOrder {
    /// Start the machine with empty disks.
    Start(u64),
    /// Switch the machine off permanently and wipe its disks.
    Retire(u64),
}

/// Extent of the damage to a member's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DamageExtent {
    /// Any file, so that the log may not open.
    AnyFile,
    /// Entries and group headers of sealed segments: the log opens and keeps its vote.
    SealedOnly,
}

/// Tracks the members and the losses they suffered. Clones share one state.
#[derive(Debug, Clone)]
pub struct MembershipTracker(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    /// Members before the change in progress.
    now: BTreeSet<u64>,
    /// Members after the change in progress.
    next: Option<BTreeSet<u64>>,
    /// Member with wiped disks that must be replaced.
    lost: Option<u64>,
    /// Members with damaged files that are not repaired yet.
    damaged: BTreeMap<u64, DamageExtent>,
    /// Wipes of the disks of each node.
    wipes: BTreeMap<u64, u64>,
    orders: Vec<MachineOrder>,
}

impl MembershipTracker {
    pub fn new(founders: u64) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            now: (1..=founders).collect(),
            next: None,
            lost: None,
            damaged: BTreeMap::new(),
            wipes: BTreeMap::new(),
            orders: Vec::new(),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns all members before and after the change in progress.
    pub fn all(&self) -> BTreeSet<u64> {
        let inner = self.lock();
        inner.now.union(inner.next.as_ref().unwrap_or(&BTreeSet::new())).copied().collect()
    }

    /// Minimum number of nodes that have a committed entry: a majority of the smaller membership if
    /// a change is in progress.
    pub fn majority(&self) -> usize {
        let inner = self.lock();
        let next = inner.next.as_ref().map_or(inner.now.len(), BTreeSet::len);
        inner.now.len().min(next) / 2 + 1
    }

    pub fn begin(&self, next: BTreeSet<u64>) {
        self.lock().next = Some(next);
    }

    pub fn finish(&self) {
        let mut inner = self.lock();
        if let Some(next) = inner.next.take() {
            inner.now = next;
        }
    }

    /// Registers the loss of a member's disks.
    ///
    /// Returns `false` if the cluster cannot tolerate it now: another member is not replaced or
    /// repaired yet, or a change is in progress.
    pub fn lose(&self, node: u64) -> bool {
        let mut inner = self.lock();
        let may = inner.may_lose_copy(node);
        if may {
            inner.lost = Some(node);
        }
        may
    }

    /// Returns whether the cluster tolerates damage to a member's files now.
    pub fn may_damage(&self, node: u64) -> bool {
        self.lock().may_lose_copy(node)
    }

    /// Returns whether sealed segments of a member may be damaged now. Other members may have such
    /// damage too: the caller leaves a whole copy of each entry.
    pub fn may_damage_sealed(&self, node: u64) -> bool {
        let inner = self.lock();
        let is_sealed_only = |extent: &DamageExtent| *extent == DamageExtent::SealedOnly;
        let is_member = inner.now.contains(&node)
            && inner.next.as_ref().is_none_or(|next| next.contains(&node));
        is_member && inner.lost != Some(node) && inner.damaged.values().all(is_sealed_only)
    }

    /// Registers damage to a member.
    pub fn mark_damaged(&self, node: u64, extent: DamageExtent) {
        self.lock().damaged.insert(node, extent);
    }

    /// Returns the extent of a member's damage, if it has any.
    pub fn damage_of(&self, node: u64) -> Option<DamageExtent> {
        self.lock().damaged.get(&node).copied()
    }

    pub fn has_damage(&self) -> bool {
        !self.lock().damaged.is_empty()
    }

    /// Registers that a damaged member is repaired or gone.
    pub fn on_repaired(&self, node: u64) {
        self.lock().damaged.remove(&node);
    }

    /// Returns whether a member is being replaced, or a membership change is in progress.
    pub fn is_changing(&self) -> bool {
        let inner = self.lock();
        inner.lost.is_some() || inner.next.is_some()
    }

    /// Counts a wipe of the disks of a stopped node.
    pub fn on_wipe(&self, node: u64) {
        *self.lock().wipes.entry(node).or_default() += 1;
    }

    pub fn lost(&self) -> Option<u64> {
        self.lock().lost
    }

    pub fn on_replaced(&self) {
        self.lock().lost = None;
    }

    /// Returns how often the disks of a node were wiped.
    pub fn wipes(&self, node: u64) -> u64 {
        self.lock().wipes.get(&node).copied().unwrap_or(0)
    }

    pub fn order(&self, order: MachineOrder) {
        self.lock().orders.push(order);
    }

    pub fn take_orders(&self) -> Vec<MachineOrder> {
        std::mem::take(&mut self.lock().orders)
    }
}

impl Inner {
    /// Returns whether no other member is lost or damaged and no change is in progress, so that at
    /// most one copy of an entry is at risk.
    fn may_lose_copy(&self, node: u64) -> bool {
        let all_well = self.lost.is_none() && self.damaged.is_empty();
        all_well && self.next.is_none() && self.now.contains(&node)
    }
}
