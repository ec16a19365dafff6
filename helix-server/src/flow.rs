//! Bytes of batches in flight in one shard: small batches pass by large ones that wait, and while
//! there are small ones the large are held back to what keeps the log busy. Knows nothing of what
//! a batch is.

mod pacer;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::limits;
use pacer::Pacer;

/// The bytes in flight of one shard.
#[derive(Debug)]
pub struct Flow {
    state: Mutex<State>,
    bytes_max: usize,
}

/// A batch's share of the bytes in flight, until it is dropped.
#[derive(Debug)]
pub struct Share {
    /// None in a share that was never handed out.
    flow: Option<Arc<Flow>>,
    bytes: usize,
    size: Size,
    since: Instant,
    has_synced: AtomicBool,
}

/// A share, or the wait for one. Dropping it gives either up.
#[derive(Debug)]
pub enum Taken {
    Now(Share),
    Later(oneshot::Receiver<Share>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Size {
    Small,
    Large,
}

#[derive(Debug)]
struct State {
    small: Lane,
    large: Lane,
    pacer: Pacer,
}

#[derive(Debug, Default)]
struct Lane {
    in_flight: usize,
    /// First come, first served.
    waiting: VecDeque<Waiter>,
}

#[derive(Debug)]
struct Waiter {
    bytes: usize,
    grant: oneshot::Sender<Share>,
}

impl Flow {
    /// Of so many bytes in all; `pace` as [`crate::config::Config::pace`] says.
    pub fn new(bytes_max: usize, pace: u32) -> Arc<Self> {
        let reserve = bytes_max / limits::SMALL_BATCHES_RESERVE_PART;
        let pacer = Pacer::new(bytes_max - reserve, pace, Instant::now());
        let state = State { small: Lane::default(), large: Lane::default(), pacer };
        Arc::new(Self { state: Mutex::new(state), bytes_max })
    }

    /// A share of so many bytes: of half of all at most, so that no batch is too large.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Taken {
        let size = if bytes <= limits::SMALL_BATCH_BYTES { Size::Small } else { Size::Large };
        let bytes = bytes.clamp(1, self.bytes_max / 2);
        let now = Instant::now();
        let mut state = self.lock();
        if size == Size::Small {
            state.pacer.on_small(now);
        }
        if state.lane(size).waiting.is_empty() && state.has_room(self.bytes_max, size, bytes, now) {
            state.lane(size).in_flight += bytes;
            return Taken::Now(self.share(bytes, size, now));
        }
        let (grant, granted) = oneshot::channel();
        state.lane(size).waiting.push_back(Waiter { bytes, grant });
        Taken::Later(granted)
    }

    /// Bytes in flight, and how many may be.
    pub fn bytes(&self) -> (usize, usize) {
        let state = self.lock();
        (state.small.in_flight + state.large.in_flight, self.bytes_max)
    }

    /// How many of them large batches may have now.
    pub fn large_bytes_max(&self) -> usize {
        self.lock().pacer.window(Instant::now())
    }

    fn share(self: &Arc<Self>, bytes: usize, size: Size, since: Instant) -> Share {
        Share { flow: Some(self.clone()), bytes, size, since, has_synced: AtomicBool::new(false) }
    }

    fn give_back(self: &Arc<Self>, share: &Share) {
        let now = Instant::now();
        let mut state = self.lock();
        if share.has_synced.load(Ordering::Relaxed) {
            state.pacer.on_done(now, share.since, share.bytes);
        }
        state.lane(share.size).in_flight -= share.bytes;
        let large = state.large.in_flight;
        state.pacer.on_large_in_flight(now, large);
        // What the small ones leave is the large ones' in any case: they have half at most.
        for size in [Size::Small, Size::Large] {
            while let Some(bytes) = state.lane(size).waiting.front().map(|it| it.bytes)
                && state.has_room(self.bytes_max, size, bytes, now)
                && let Some(Waiter { bytes, grant }) = state.lane(size).waiting.pop_front()
            {
                match grant.send(self.share(bytes, size, now)) {
                    Ok(()) => state.lane(size).in_flight += bytes,
                    // Whoever waited has gone. Its share counted nothing, and must not be given
                    // back: the lock is held.
                    Err(mut share) => share.flow = None,
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while it is held")
    }
}

impl State {
    fn lane(&mut self, size: Size) -> &mut Lane {
        match size {
            Size::Small => &mut self.small,
            Size::Large => &mut self.large,
        }
    }

    fn has_room(&mut self, bytes_max: usize, size: Size, bytes: usize, now: Instant) -> bool {
        let fits = match size {
            Size::Small => self.small.in_flight + bytes <= bytes_max / 2,
            // Alone, it goes on: it may be larger than the window.
            Size::Large if self.large.in_flight == 0 => true,
            Size::Large => self.large.in_flight + bytes <= self.pacer.window(now),
        };
        fits && self.small.in_flight + self.large.in_flight + bytes <= bytes_max
    }
}

impl Share {
    /// What it was taken for is on stable storage here: how long that took says something.
    pub fn has_synced(&self) {
        self.has_synced.store(true, Ordering::Relaxed);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if let Some(flow) = self.flow.take() {
            flow.give_back(self);
        }
    }
}

#[cfg(test)]
mod tests;
