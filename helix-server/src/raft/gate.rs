//! What a replica takes from the others while its log may lack what it once acknowledged: at first
//! nothing, then entries of the leader that was found to be the one, and votes only when it lacks
//! nothing any more. Who opens it has to know that; see `node/repair.rs`.

use std::sync::atomic::{AtomicU64, Ordering};

const OPEN: u64 = u64::MAX;
const SHUT: u64 = 0;

/// A term for as long as only the leader of that term is listened to.
#[derive(Debug)]
pub struct Gate(AtomicU64);

impl Default for Gate {
    /// An open one.
    fn default() -> Self {
        Self(AtomicU64::new(OPEN))
    }
}

impl Gate {
    pub fn shut() -> Self {
        Self(AtomicU64::new(SHUT))
    }

    /// From now on takes entries of the leader of this term. Without effect once it is open.
    pub fn admit(&self, term: u64) {
        // Ignored: whether it was changed is not asked for.
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
            (now != OPEN && term != OPEN).then_some(term)
        });
    }

    /// The term whose leader is listened to, if there is one and it is the only one.
    pub fn admitted(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Acquire)).filter(|now| ![OPEN, SHUT].contains(now))
    }

    pub fn open(&self) {
        self.0.store(OPEN, Ordering::Release);
    }

    /// Whether the replica votes, may stand for election, and serves readers who do not ask for the
    /// leader.
    pub fn is_open(&self) -> bool {
        self.0.load(Ordering::Acquire) == OPEN
    }

    /// Whether it takes entries, heartbeats and snapshots of a leader of this term.
    pub fn lets_in(&self, term: u64) -> bool {
        let now = self.0.load(Ordering::Acquire);
        now == OPEN || (now != SHUT && now == term)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_lets_in_one_term_and_then_everything() {
        let gate = Gate::shut();
        assert!(!gate.lets_in(0) && !gate.lets_in(3) && !gate.is_open());
        gate.admit(3);
        assert!(gate.lets_in(3) && !gate.lets_in(2) && !gate.lets_in(4) && !gate.is_open());
        gate.admit(4);
        assert_eq!(gate.admitted(), Some(4));
        assert!(!gate.lets_in(3));
        gate.open();
        gate.admit(5);
        assert!(gate.is_open() && gate.lets_in(1) && gate.admitted().is_none());
    }
}
