//! The wall clock, for relative positions such as `@-15m`.
//! Measurements use tokio's clock instead.

use std::time::SystemTime;

/// Returns the current time.
#[allow(clippy::disallowed_methods)] // The only use of the system clock.
pub(crate) fn now() -> SystemTime {
    SystemTime::now()
}
