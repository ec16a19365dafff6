//! Limits what a replica accepts from its peers while its log may lack acknowledged entries.
//!
//! At first it accepts nothing, then entries of one leader, and votes only once it lacks nothing.
//! `node/repair.rs` decides when each step is safe.

use std::sync::atomic::{AtomicU64, Ordering};

const OPEN: u64 = u64::MAX;
const SHUT: u64 = 0;

/// The only term whose leader may write to this replica; `OPEN` accepts any.
#[derive(Debug)]
pub struct RepairGuard(AtomicU64);

impl Default for RepairGuard {
    /// Returns an open guard.
    fn default() -> Self {
        Self(AtomicU64::new(OPEN))
    }
}

impl RepairGuard {
    /// Returns a guard that accepts nothing.
    pub fn shut() -> Self {
        Self(AtomicU64::new(SHUT))
    }

    /// Accepts entries of the leader of this term only. Without effect on an open guard.
    pub fn admit(&self, term: u64) {
        // Ignored: the caller does not ask whether the term was changed.
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
            (now != OPEN && term != OPEN).then_some(term)
        });
    }

    /// Accepts everything, permanently.
    pub fn open(&self) {
        self.0.store(OPEN, Ordering::Release);
    }

    /// Returns whether the replica may vote, be a candidate, and serve reads that any replica may
    /// serve.
    pub fn is_open(&self) -> bool {
        self.0.load(Ordering::Acquire) == OPEN
    }

    /// Returns whether it accepts entries, heartbeats and snapshots of a leader of this term.
    pub fn accepts(&self, term: u64) -> bool {
        let now = self.0.load(Ordering::Acquire);
        now == OPEN || (now != SHUT && now == term)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_one_term_until_it_is_opened() {
        let guard = RepairGuard::shut();
        assert!(!guard.accepts(0) && !guard.accepts(3) && !guard.is_open());
        guard.admit(3);
        assert!(guard.accepts(3) && !guard.accepts(2) && !guard.accepts(4) && !guard.is_open());
        guard.admit(4);
        assert!(guard.accepts(4) && !guard.accepts(3));
        guard.open();
        guard.admit(5);
        assert!(guard.is_open() && guard.accepts(1));
    }
}
