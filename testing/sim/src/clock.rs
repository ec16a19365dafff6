//! A node's wall clock: simulated time plus an error per node that can jump.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use helix_server::clock::Clock;

/// Wall time at the start of a simulation, in microseconds (November 2023).
const BEGIN_US: u64 = 1_700_000_000_000_000;

/// Returns the right wall time, in microseconds, after this much simulated time.
pub fn right_us(elapsed: Duration) -> u64 {
    BEGIN_US + u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX / 2)
}

/// Simulated wall clock with an adjustable error.
#[derive(Debug, Default)]
pub struct SkewedClock {
    error_us: AtomicI64,
    /// Last time returned, for calls from outside the simulation.
    last_us: AtomicU64,
}

impl SkewedClock {
    pub fn new(error_us: i64) -> Arc<Self> {
        Arc::new(Self { error_us: AtomicI64::new(error_us), last_us: AtomicU64::new(BEGIN_US) })
    }

    /// Returns the error in microseconds.
    pub fn error_us(&self) -> i64 {
        self.error_us.load(Ordering::Relaxed)
    }

    /// Lets the clock jump: sets its error to `error_us`.
    pub fn set_error(&self, error_us: i64) {
        self.error_us.store(error_us, Ordering::Relaxed);
    }
}

impl Clock for SkewedClock {
    fn now_us(&self) -> u64 {
        let Some(elapsed) = turmoil::sim_elapsed() else {
            return self.last_us.load(Ordering::Relaxed);
        };
        let now = right_us(elapsed).saturating_add_signed(self.error_us());
        self.last_us.store(now, Ordering::Relaxed);
        now
    }
}
