//! Bounds the open handshakes of a port. At the limit the oldest one makes way: a client that
//! completes its handshake in time is never it, unless more than the limit arrive meanwhile.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Open handshakes, oldest first.
#[derive(Debug)]
pub(crate) struct HandshakeSlots {
    max: usize,
    open: Mutex<OpenHandshakes>,
}

#[derive(Debug, Default)]
struct OpenHandshakes {
    next: u64,
    /// Dropping a sender ends its handshake.
    by_age: BTreeMap<u64, oneshot::Sender<()>>,
}

/// A handshake that is counted until it is dropped.
#[derive(Debug)]
pub(crate) struct HandshakeSlot<'a> {
    slots: &'a HandshakeSlots,
    number: u64,
    displaced: oneshot::Receiver<()>,
}

impl HandshakeSlots {
    pub(crate) fn new(max: usize) -> Self {
        Self { max: max.max(1), open: Mutex::default() }
    }

    pub(crate) fn enter(&self) -> HandshakeSlot<'_> {
        let (keep, displaced) = oneshot::channel();
        let mut open = self.open();
        if open.by_age.len() >= self.max {
            open.by_age.pop_first();
        }
        let number = open.next;
        open.next += 1;
        open.by_age.insert(number, keep);
        HandshakeSlot { slots: self, number, displaced }
    }

    fn open(&self) -> MutexGuard<'_, OpenHandshakes> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HandshakeSlot<'_> {
    /// Waits until a newer handshake takes this one's place.
    pub(crate) async fn displaced(&mut self) {
        // Only the end of the sender counts.
        let _ = (&mut self.displaced).await;
    }
}

impl Drop for HandshakeSlot<'_> {
    fn drop(&mut self) {
        self.slots.open().by_age.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn the_oldest_handshake_makes_way_at_the_limit() {
        let slots = HandshakeSlots::new(2);
        let mut first = slots.enter();
        let mut second = slots.enter();
        assert!(first.displaced().now_or_never().is_none());
        let mut third = slots.enter();
        assert!(first.displaced().now_or_never().is_some());
        assert!(second.displaced().now_or_never().is_none());
        drop(second);
        let _fourth = slots.enter();
        assert!(third.displaced().now_or_never().is_none());
    }
}
