//! Clocks of the log's threads.

use std::time::Duration;

/// Returns the time since some fixed moment.
pub(crate) type StepClock = Box<dyn Fn() -> Duration + Send + Sync>;

/// Returns a clock that starts now. For measurements only, never for decisions.
#[allow(clippy::disallowed_methods)]
pub(crate) fn monotonic_clock() -> impl Fn() -> Duration {
    let start = std::time::Instant::now();
    move || start.elapsed()
}
