//! The only source of wall-clock time, so that a simulation can replace it.
//! It stamps records and drives retention; safety does not depend on it.

mod agreed;

use std::fmt::Debug;
use std::sync::Arc;

pub use agreed::{AgreedClock, CLOCK_CONFIRMATION, ClockOffset, ClockReading};

/// Source of wall-clock time.
pub trait Clock: Debug + Send + Sync + 'static {
    /// Returns the microseconds since the Unix epoch.
    fn now_us(&self) -> u64;

    /// Returns the time by which retention drops records; `None` while it drops none by time.
    fn retention_us(&self) -> Option<u64> {
        Some(self.now_us())
    }
}

/// The operating system's clock.
#[derive(Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[allow(clippy::disallowed_methods)] // The only use of the system's clock.
    fn now_us(&self) -> u64 {
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |elapsed| u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX))
    }
}

/// Wall-clock time that follows tokio's clock, which a test can pause and advance.
#[derive(Debug)]
pub struct TokioClock {
    start_us: u64,
    start: tokio::time::Instant,
}

impl TokioClock {
    pub fn new(start_us: u64) -> Arc<Self> {
        Arc::new(Self { start_us, start: tokio::time::Instant::now() })
    }
}

impl Clock for TokioClock {
    fn now_us(&self) -> u64 {
        self.start_us + u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX / 2)
    }
}
