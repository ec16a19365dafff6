//! The memory limit of the gateway: bytes of requests and responses.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of a permit.
const UNIT_BYTES: usize = 1 << 10;

/// Bytes that all connections share.
#[derive(Debug, Clone)]
pub(crate) struct MemoryBudget {
    units: Arc<Semaphore>,
    bytes_max: usize,
}

/// Bytes taken from the budget until it is dropped.
#[derive(Debug)]
pub(crate) struct MemoryPermit(Option<OwnedSemaphorePermit>);

impl MemoryBudget {
    /// Returns a budget of this many bytes.
    pub(crate) fn new(bytes_max: usize) -> Self {
        let units = (bytes_max / UNIT_BYTES).min(Semaphore::MAX_PERMITS);
        Self { units: Arc::new(Semaphore::new(units)), bytes_max: units * UNIT_BYTES }
    }

    /// Waits for this many bytes, or for all of the budget if it is less.
    pub(crate) async fn take(&self, bytes: usize) -> MemoryPermit {
        let units = bytes.min(self.bytes_max).div_ceil(UNIT_BYTES).max(1);
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        // The semaphore is never closed.
        MemoryPermit(self.units.clone().acquire_many_owned(units).await.ok())
    }

    /// Returns the bytes in use.
    pub(crate) fn used(&self) -> usize {
        self.bytes_max - self.units.available_permits() * UNIT_BYTES
    }
}

impl MemoryPermit {
    /// Gives back all but this many bytes.
    pub(crate) fn shrink_to(&mut self, bytes: usize) {
        let Some(permit) = &mut self.0 else { return };
        let keep = bytes.div_ceil(UNIT_BYTES).max(1);
        let excess = permit.num_permits().saturating_sub(keep);
        drop(permit.split(excess));
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn waits_for_bytes_and_gives_them_back() {
        let budget = MemoryBudget::new(10 << 10);
        let mut first = budget.take(8 << 10).await;
        assert!(budget.take(4 << 10).now_or_never().is_none());
        first.shrink_to(1);
        assert_eq!(budget.used(), 1 << 10);
        let second = budget.take(4 << 10).await;
        drop((first, second));
        assert_eq!(budget.used(), 0);
        let _all = budget.take(1 << 30).await;
        assert_eq!(budget.used(), 10 << 10);
    }
}
