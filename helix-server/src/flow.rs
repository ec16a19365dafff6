//! Flow control: limits the bytes of batches in flight in one shard.
//!
//! Small batches do not queue behind large ones. While small ones arrive, large ones are limited
//! to what keeps the log busy. The module knows only the sizes of batches.

mod pacer;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::limits;
use crate::sync;
use pacer::Pacer;

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
}

#[derive(Debug, Default)]
struct Lane {
    in_flight: usize,
    /// In the order of arrival.
    waiting: VecDeque<Waiter>,
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
        let pacer = Pacer::new(bytes_max - reserve, pace, Instant::now());
        let state = FlowState { small: Lane::default(), large: Lane::default(), pacer };
        Arc::new(Self { state: Mutex::new(state), bytes_max })
    }

    /// Acquires a permit for `bytes`, counted as at most half the limit so that every batch fits.
    pub fn acquire(self: &Arc<Self>, bytes: usize) -> Acquired {
        let size =
            if bytes <= limits::SMALL_BATCH_BYTES { SizeClass::Small } else { SizeClass::Large };
        let bytes = bytes.clamp(1, self.bytes_max / 2);
        let now = Instant::now();
        let mut state = self.lock();
        if size == SizeClass::Small {
            state.pacer.on_small(now);
        }
        if state.lane(size).waiting.is_empty()
            && state.has_capacity(self.bytes_max, size, bytes, now)
        {
            state.lane(size).in_flight += bytes;
            return Acquired::Now(self.permit(bytes, size, now));
        }
        let (grant, granted) = oneshot::channel();
        state.lane(size).waiting.push_back(Waiter { bytes, grant });
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

    fn permit(self: &Arc<Self>, bytes: usize, size: SizeClass, since: Instant) -> FlowPermit {
        FlowPermit {
            flow: Some(self.clone()),
            bytes,
            size,
            since,
            is_synced: AtomicBool::new(false),
        }
    }

    fn release(self: &Arc<Self>, permit: &FlowPermit) {
        let now = Instant::now();
        let mut state = self.lock();
        if permit.is_synced.load(Ordering::Relaxed) {
            state.pacer.on_done(now, permit.since, permit.bytes);
        }
        state.lane(permit.size).in_flight -= permit.bytes;
        let large = state.large.in_flight;
        state.pacer.on_large_in_flight(now, large);
        // Large batches get what small ones leave, which is at least half.
        for size in [SizeClass::Small, SizeClass::Large] {
            while let Some(bytes) = state.lane(size).waiting.front().map(|it| it.bytes)
                && state.has_capacity(self.bytes_max, size, bytes, now)
                && let Some(Waiter { bytes, grant }) = state.lane(size).waiting.pop_front()
            {
                match grant.send(self.permit(bytes, size, now)) {
                    Ok(()) => state.lane(size).in_flight += bytes,
                    // The waiter is gone. Its permit is not counted yet, and its drop must not
                    // take the lock, which is held here.
                    Err(mut permit) => permit.flow = None,
                }
            }
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

    fn has_capacity(
        &mut self,
        bytes_max: usize,
        size: SizeClass,
        bytes: usize,
        now: Instant,
    ) -> bool {
        let fits = match size {
            SizeClass::Small => self.small.in_flight + bytes <= bytes_max / 2,
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
