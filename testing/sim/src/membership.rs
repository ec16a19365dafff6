//! Who is a member of the cluster, and what the operator and the nemesis ask of each other about
//! it: who breaks machines must know which of them the cluster can lose.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What the operator wants done to a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// It is to start, with empty disks.
    Start(u64),
    /// It is to be switched off for good, and its disks emptied.
    Retire(u64),
}

/// See the module. Clones are the same.
#[derive(Debug, Clone)]
pub struct Members(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    /// Members, apart from what changes just now.
    now: BTreeSet<u64>,
    /// What the members will be when the change that runs is done.
    next: Option<BTreeSet<u64>>,
    /// A member whose disks were emptied, and that is to be replaced.
    lost: Option<u64>,
    /// A member whose files were damaged, and that has not got over it.
    harmed: Option<u64>,
    /// How often the disks of each node were emptied.
    wipes: BTreeMap<u64, u64>,
    orders: Vec<Order>,
}

impl Members {
    pub fn new(founders: u64) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            now: (1..=founders).collect(),
            next: None,
            lost: None,
            harmed: None,
            wipes: BTreeMap::new(),
            orders: Vec::new(),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whoever is a member before, during or after the change that runs.
    pub fn all(&self) -> BTreeSet<u64> {
        let inner = self.lock();
        inner.now.union(inner.next.as_ref().unwrap_or(&BTreeSet::new())).copied().collect()
    }

    /// How many must at least have what is committed: a majority, and of two memberships the one
    /// that takes fewer.
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

    /// A member is to lose its disks. False where the cluster cannot bear it now:
    /// another one is not replaced yet, or something else changes.
    pub fn lose(&self, node: u64) -> bool {
        let mut inner = self.lock();
        let may = inner.may_suffer(node);
        if may {
            inner.lost = Some(node);
        }
        may
    }

    /// Whether the cluster can bear that a member's files are damaged now.
    pub fn may_harm(&self, node: u64) -> bool {
        self.lock().may_suffer(node)
    }

    /// A member's files were damaged: what it has beside another one counts for nothing.
    pub fn harm(&self, node: u64) {
        self.lock().harmed = Some(node);
    }

    pub fn harmed(&self) -> Option<u64> {
        self.lock().harmed
    }

    /// Whoever was harmed has got over it, or is gone.
    pub fn on_whole(&self) {
        self.lock().harmed = None;
    }

    /// The disks of a node, which is off, are emptied.
    pub fn on_wipe(&self, node: u64) {
        *self.lock().wipes.entry(node).or_default() += 1;
    }

    pub fn lost(&self) -> Option<u64> {
        self.lock().lost
    }

    pub fn on_replaced(&self) {
        self.lock().lost = None;
    }

    /// How often the disks of a node were emptied.
    pub fn wipes(&self, node: u64) -> u64 {
        self.lock().wipes.get(&node).copied().unwrap_or(0)
    }

    pub fn order(&self, order: Order) {
        self.lock().orders.push(order);
    }

    pub fn take_orders(&self) -> Vec<Order> {
        std::mem::take(&mut self.lock().orders)
    }
}

impl Inner {
    /// Whether all others are well, and nothing changes: what one member alone has beside this one
    /// must not be at stake twice.
    fn may_suffer(&self, node: u64) -> bool {
        let all_well = self.lost.is_none() && self.harmed.is_none();
        all_well && self.next.is_none() && self.now.contains(&node)
    }
}
