//! Wall-clock time, from one place, so that a simulation can own it.
//! Nothing about safety depends on it: it stamps records and drives retention.

use std::fmt::Debug;
use std::sync::Arc;

/// Microseconds since the Unix epoch.
pub trait Clock: Debug + Send + Sync + 'static {
    fn now_us(&self) -> u64;
}

/// The system's clock.
#[derive(Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[allow(clippy::disallowed_methods)] // The one place that asks the system.
    fn now_us(&self) -> u64 {
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |elapsed| u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX))
    }
}

/// Wall-clock time that follows tokio's clock from a given start: stands still and jumps with it.
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
