//! Counts proposals without an outcome, and refuses new ones while leadership is transferred.
//! A leader that settles its proposals first leaves none with an unknown outcome.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

/// One closer, in the upper half of the state; the lower half counts tickets.
const CLOSER: u64 = 1 << 32;

/// The gate that every proposal of a replica passes.
#[derive(Debug, Default)]
pub(super) struct ProposalGate {
    /// Closers in the upper half, tickets in the lower one: a ticket is never taken unseen.
    state: AtomicU64,
    settled: Notify,
}

fn tickets(state: u64) -> u64 {
    state % CLOSER
}

impl ProposalGate {
    /// Returns the ticket of a proposal, to be dropped with its outcome. `None` while closed.
    pub(super) fn enter(self: &Arc<Self>) -> Option<ProposalTicket> {
        let before = self.state.fetch_add(1, Ordering::AcqRel);
        let ticket = ProposalTicket(Arc::clone(self));
        (before < CLOSER).then_some(ticket)
    }

    /// Refuses further proposals until the returned guard is dropped.
    pub(super) fn close(self: &Arc<Self>) -> ClosedGate {
        self.state.fetch_add(CLOSER, Ordering::AcqRel);
        ClosedGate(Arc::clone(self))
    }
}

/// Stands for a proposal without an outcome.
#[derive(Debug)]
pub(super) struct ProposalTicket(Arc<ProposalGate>);

impl Drop for ProposalTicket {
    fn drop(&mut self) {
        let before = self.0.state.fetch_sub(1, Ordering::AcqRel);
        if before >= CLOSER && tickets(before) == 1 {
            self.0.settled.notify_waiters();
        }
    }
}

/// Keeps a gate closed until it is dropped.
#[derive(Debug)]
pub(super) struct ClosedGate(Arc<ProposalGate>);

impl ClosedGate {
    /// Waits until every proposal has its outcome.
    pub(super) async fn settled(&self) {
        loop {
            // Registered before the check, so that no notification is lost.
            let mut settled = std::pin::pin!(self.0.settled.notified());
            settled.as_mut().enable();
            if tickets(self.0.state.load(Ordering::Acquire)) == 0 {
                return;
            }
            settled.await;
        }
    }
}

impl Drop for ClosedGate {
    fn drop(&mut self) {
        self.0.state.fetch_sub(CLOSER, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn closed_gate_refuses_proposals_until_it_is_dropped() {
        let gate = Arc::<ProposalGate>::default();
        assert!(gate.enter().is_some());
        let (one, other) = (gate.close(), gate.close());
        assert!(gate.enter().is_none());
        drop(one);
        assert!(gate.enter().is_none(), "the other transfer keeps it closed");
        drop(other);
        assert!(gate.enter().is_some());
    }

    #[tokio::test]
    async fn settles_when_the_last_outcome_is_known() {
        let gate = Arc::<ProposalGate>::default();
        let (first, second) = (gate.enter(), gate.enter());
        let closed = gate.close();
        assert!(closed.settled().now_or_never().is_none());
        let settled = tokio::spawn(async move { closed.settled().await });
        tokio::task::yield_now().await;
        drop(first);
        assert!(gate.enter().is_none());
        tokio::task::yield_now().await;
        assert!(!settled.is_finished());
        drop(second);
        settled.await.unwrap();
        assert_eq!(gate.state.load(Ordering::Relaxed), 0);
    }
}
