//! Counts the open calls of one principal, or of one address of clients without credentials.
//!
//! `call/call_shares.rs` holds each of them to its share of the node's calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Number of the open calls of one principal or address, over all of its connections.
#[derive(Debug)]
pub struct CallShare {
    /// Names the calls in a refusal.
    what: &'static str,
    open: AtomicUsize,
    /// Turn of the one request that waits for the node's memory. The others wait for this turn, so
    /// the memory goes around between shares however many requests each of them has.
    memory_turn: Arc<Semaphore>,
}

impl CallShare {
    pub fn of_principal() -> Arc<Self> {
        Self::new("calls of this principal while few are free on this node")
    }

    /// For clients without credentials.
    pub fn of_address() -> Arc<Self> {
        Self::new("calls from this client address while few are free on this node")
    }

    fn new(what: &'static str) -> Arc<Self> {
        let memory_turn = Arc::new(Semaphore::new(1));
        Arc::new(Self { what, open: AtomicUsize::new(0), memory_turn })
    }

    /// Counts a call until the slot is dropped. Returns the number of open calls with it, too.
    pub fn open(self: &Arc<Self>) -> (CallSlot, usize) {
        let open = self.open.fetch_add(1, Ordering::Relaxed) + 1;
        (CallSlot(self.clone()), open)
    }

    /// Waits until no other request of this share waits for the node's memory. The turn lasts
    /// until the permit is dropped.
    pub async fn memory_turn(&self) -> Option<OwnedSemaphorePermit> {
        self.memory_turn.clone().acquire_owned().await.ok()
    }

    /// Returns the text that names the calls in a refusal.
    pub fn what(&self) -> &'static str {
        self.what
    }
}

/// RAII slot of one open call.
#[derive(Debug)]
pub struct CallSlot(Arc<CallShare>);

impl CallSlot {
    pub fn share(&self) -> &Arc<CallShare> {
        &self.0
    }
}

impl Drop for CallSlot {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}
