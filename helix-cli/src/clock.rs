//! The wall clock, asked in one place: relative positions such as `@-15m` need it.
//! Everything that is measured uses tokio's clock instead.

use std::time::SystemTime;

/// The present time.
#[allow(clippy::disallowed_methods)] // The one place that asks the system.
pub(crate) fn now() -> SystemTime {
    SystemTime::now()
}
