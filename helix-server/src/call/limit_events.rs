//! Counts of what a limit refused, delayed or closed.

use std::sync::atomic::{AtomicU64, Ordering};

/// Declares the counters once: the field name is the value of the metric's `limit` label.
macro_rules! limit_events {
    ($($(#[$doc:meta])* $field:ident),+ $(,)?) => {
        /// Counts since the process started, one for each limit.
        #[derive(Debug, Default)]
        pub struct LimitEvents {
            $($(#[$doc])* pub $field: EventCounter,)+
        }

        impl LimitEvents {
            /// Returns each counter with its name.
            pub fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($field), self.$field.get())),+].into_iter()
            }
        }
    };
}

limit_events! {
    /// Connections closed at once because the maximum was open.
    connections_refused,
    /// Connections closed because the HTTP/2 handshake took too long.
    handshakes_timed_out,
    /// Calls rejected because the maximum was open, on the node or on their connection.
    calls_refused,
    /// Calls rejected because their principal, or their address without one, had its share of them.
    principal_calls_refused,
    /// Times that a connection was not read for a while because its client cancelled many calls.
    cancelled_calls_paced,
    /// Requests rejected because the request bytes stayed at their limit.
    requests_refused,
    /// Requests rejected because their bytes did not arrive in time.
    requests_timed_out,
    /// Reads rejected because the response bytes stayed at their limit.
    answers_refused,
    /// Connections closed because the client did not read its responses.
    stalled_readers_ended,
    /// Reads rejected because too many partitions were being read.
    partitions_refused,
    /// Appends rejected because their shard had too many bytes in flight for too long.
    appends_throttled,
}

#[derive(Debug, Default)]
pub struct EventCounter(AtomicU64);

impl EventCounter {
    pub fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
