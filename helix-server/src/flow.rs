//! Flow control: limits the bytes of batches in flight in one shard.
//!
//! Small batches do not queue behind large ones, nor a principal's batches behind all those of
//! another one. While small ones arrive, large ones are limited to what keeps the log busy. The
//! module knows only the sizes of batches and their principals.

mod pacer;
mod shares;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::limits;
use crate::sync;
use pacer::Pacer;
pub use shares::FlowShare;
use shares::{FairQueue, ShareWindow};

/// Limits the bytes in flight of one shard.
#[derive(Debug)]
pub struct FlowControl {
    state: Mutex<FlowState>,
    bytes_max: usize,
}

/// RAII permit for the bytes of one batch: releases them on drop.
#[derive(Debug)]
pub struct FlowPermit {
    /// `None` in a permit that its waiter never received.
    flow: Option<Arc<FlowControl>>,
    bytes: usize,
    size: SizeClass,
    share: FlowShare,
    since: Instant,
    is_synced: AtomicBool,
}

/// A permit, or the wait for one. Dropping it gives up the permit or the place in the queue.
#[derive(Debug)]
pub enum Acquired {
    Now(FlowPermit),
    Later(oneshot::Receiver<FlowPermit>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SizeClass {
    Small,
    Large,
}

#[derive(Debug)]
struct FlowState {
    small: Lane,
    large: Lane,
    pacer: Pacer,
    shares: ShareWindow,
}

#[derive(Debug, Default)]
struct Lane {
    in_flight: usize,
    waiting: FairQueue,
}

#[derive(Debug)]
struct Waiter {
    bytes: usize,
    grant: oneshot::Sender<FlowPermit>,
}

impl FlowControl {
    /// Creates a limit of `bytes_max` bytes; `pace` is [`crate::config::ServerConfig::pace`].
    pub fn new(bytes_max: usize, pace: u32) -> Arc<Self> {
        let reserve = bytes_max / limits::SMALL_BATCHES_RESERVE_PART;
        let now = Instant::now();
        let pacer = Pacer::new(bytes_max - reserve, pace, now);
        let shares = ShareWindow::new(now);
        let state = FlowState { small: Lane::default(), large: Lane::default(), pacer, shares };
        Arc::new(Self { state: Mutex::new(state), bytes_max })
    }

    /// Acquires a permit for `bytes` of a principal. They count as at most half the limit, so that
    /// every batch fits.
    pub fn acquire(self: &Arc<Self>, share: FlowShare, bytes: usize) -> Acquired {
        let size =
            if bytes <= limits::SMALL_BATCH_BYTES { SizeClass::Small } else { SizeClass::Large };
        let bytes = bytes.clamp(1, self.bytes_max / 2);
        let now = Instant::now();
        let mut state = self.lock();
        state.shares.on_arrival(share, now);
        if size == SizeClass::Small {
            state.pacer.on_small(now);
        }
        let goes_first = match state.lane(size).waiting.is_empty() {
            true => true,
            // The others wait for their share of the log, which this one has not used.
            false => {
                size == SizeClass::Small
                    && !state.small.waiting.has(share)
                    && state.shares.is_below_floor(share)
            }
        };
        if goes_first && state.has_capacity(self.bytes_max, size, share, bytes, now) {
            state.count(size, share, bytes);
            return Acquired::Now(self.permit(bytes, size, share, now));
        }
        let (grant, granted) = oneshot::channel();
        state.lane(size).waiting.push(share, Waiter { bytes, grant });
        Acquired::Later(granted)
    }

    /// Returns the bytes in flight and their limit.
    pub fn bytes(&self) -> (usize, usize) {
        let state = self.lock();
        (state.small.in_flight + state.large.in_flight, self.bytes_max)
    }

    /// Returns the current limit of the bytes of large batches.
    pub fn large_bytes_max(&self) -> usize {
        self.lock().pacer.window(Instant::now())
    }

    fn permit(
        self: &Arc<Self>,
        bytes: usize,
        size: SizeClass,
        share: FlowShare,
        since: Instant,
    ) -> FlowPermit {
        let is_synced = AtomicBool::new(false);
        FlowPermit { flow: Some(self.clone()), bytes, size, share, since, is_synced }
    }

    fn release(self: &Arc<Self>, permit: &FlowPermit) {
        let now = Instant::now();
        let mut state = self.lock();
        let FlowPermit { bytes, size, share, since, .. } = *permit;
        if permit.is_synced.load(Ordering::Relaxed) {
            state.pacer.on_done(now, since, bytes);
            if size == SizeClass::Small {
                state.shares.on_done(now, since);
            }
        }
        state.lane(size).in_flight -= bytes;
        if size == SizeClass::Small {
            state.shares.remove(share, now);
        }
        let large = state.large.in_flight;
        state.pacer.on_large_in_flight(now, large);
        // Large batches get what small ones leave, which is at least half.
        for size in [SizeClass::Small, SizeClass::Large] {
            while let Some((share, bytes)) = state.lane(size).waiting.next()
                && state.has_capacity(self.bytes_max, size, share, bytes, now)
            {
                self.grant(&mut state, size, share, now);
            }
        }
        // The share whose turn it is may be at its limit, and the share of this permit below it.
        while size == SizeClass::Small
            && state.shares.is_below_floor(share)
            && let Some(bytes) = state.small.waiting.next_of(share)
            && state.has_capacity(self.bytes_max, size, share, bytes, now)
        {
            self.grant(&mut state, size, share, now);
        }
    }

    /// Grants the oldest waiting batch of a share its permit.
    fn grant(
        self: &Arc<Self>,
        state: &mut FlowState,
        size: SizeClass,
        share: FlowShare,
        now: Instant,
    ) {
        let Some(Waiter { bytes, grant }) = state.lane(size).waiting.pop(share) else { return };
        match grant.send(self.permit(bytes, size, share, now)) {
            Ok(()) => state.count(size, share, bytes),
            // The waiter is gone. Its permit is not counted yet, and its drop must not take the
            // lock, which is held here.
            Err(mut permit) => permit.flow = None,
        }
    }

    fn lock(&self) -> MutexGuard<'_, FlowState> {
        sync::lock(&self.state)
    }
}

impl FlowState {
    fn lane(&mut self, size: SizeClass) -> &mut Lane {
        match size {
            SizeClass::Small => &mut self.small,
            SizeClass::Large => &mut self.large,
        }
    }

    /// Counts a batch as in flight.
    fn count(&mut self, size: SizeClass, share: FlowShare, bytes: usize) {
        self.lane(size).in_flight += bytes;
        if size == SizeClass::Small {
            self.shares.add(share);
        }
    }

    fn has_capacity(
        &mut self,
        bytes_max: usize,
        size: SizeClass,
        share: FlowShare,
        bytes: usize,
        now: Instant,
    ) -> bool {
        let fits = match size {
            SizeClass::Small => {
                self.small.in_flight + bytes <= bytes_max / 2
                    && self.shares.has_capacity(share, now)
            }
            // A single large batch is always let through, since it may exceed the window.
            SizeClass::Large if self.large.in_flight == 0 => true,
            SizeClass::Large => self.large.in_flight + bytes <= self.pacer.window(now),
        };
        fits && self.small.in_flight + self.large.in_flight + bytes <= bytes_max
    }
}

impl FlowPermit {
    /// Marks the batch as synced to the local disk, so that its time in flight is measured.
    pub fn mark_synced(&self) {
        self.is_synced.store(true, Ordering::Relaxed);
    }
}

impl Drop for FlowPermit {
    fn drop(&mut self) {
        if let Some(flow) = self.flow.take() {
            flow.release(self);
        }
    }
}

#[cfg(test)]
mod tests;
