//! Everything about a client that can be set, with the defaults that the benchmarks use.
//! Plain data; what the numbers do is said where they are used.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// Settings of a [`Client`](crate::Client).
#[derive(Debug, Clone)]
pub struct Config {
    /// Addresses to begin with, "host:port" or "http://host:port"; at least one. The others of the
    /// cluster are learned.
    pub endpoints: Vec<String>,
    /// TCP connections to each node, at least 1. Calls take turns; a stream stays on one.
    pub connections_per_node: usize,
    /// Longest wait for a TCP connection.
    pub connect_timeout: Duration,
    /// Longest time for one call with all its retries, and for one batch of a session from being
    /// handed over to its ack.
    pub request_timeout: Duration,
    /// Longest time for one attempt of a call, within `request_timeout`.
    pub attempt_timeout: Duration,
    /// First bound of the random wait before a retry; doubles with each.
    pub backoff_min: Duration,
    /// Last bound of the random wait before a retry.
    pub backoff_max: Duration,
    /// Silence after which a subscription is given up and opened again. The service sends a sign
    /// of life at least every 5 s, so this is three of them missed.
    pub heartbeat_timeout: Duration,
    /// Seed of the retries' jitter. None draws one.
    pub seed: Option<u64>,
    /// HTTP/2 settings.
    pub transport: Transport,
}

impl Config {
    /// Defaults, with these addresses to begin with.
    pub fn new<E: Into<String>>(endpoints: impl IntoIterator<Item = E>) -> Self {
        Self { endpoints: endpoints.into_iter().map(Into::into).collect(), ..Self::default() }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            endpoints: vec!["127.0.0.1:9092".to_owned()],
            connections_per_node: 1,
            connect_timeout: Duration::from_secs(3),
            request_timeout: Duration::from_secs(30),
            attempt_timeout: Duration::from_secs(10),
            backoff_min: Duration::from_millis(10),
            backoff_max: Duration::from_secs(1),
            heartbeat_timeout: Duration::from_secs(15),
            seed: None,
            transport: Transport::default(),
        }
    }
}

/// HTTP/2 settings of each connection. Throughput is at most window / round trip.
#[derive(Debug, Clone)]
pub struct Transport {
    /// Bytes that a peer may send on one stream before it waits for us.
    pub stream_window_bytes: u32,
    /// Bytes that a peer may send on one connection before it waits for us.
    pub connection_window_bytes: u32,
    /// Largest HTTP/2 frame, in bytes, 16 KiB to 16 MiB.
    pub frame_bytes_max: u32,
    /// Largest message taken or sent, in bytes.
    pub message_bytes_max: usize,
    /// How often an idle connection is tried.
    pub keepalive_interval: Duration,
    /// How long an answer to that may take before the connection is given up.
    pub keepalive_timeout: Duration,
}

impl Default for Transport {
    fn default() -> Self {
        Self {
            stream_window_bytes: 8 << 20,
            connection_window_bytes: 32 << 20,
            frame_bytes_max: 1 << 20,
            message_bytes_max: 16 << 20,
            keepalive_interval: Duration::from_secs(10),
            keepalive_timeout: Duration::from_secs(5),
        }
    }
}

/// Draws a seed from the operating system: the one place where chance enters a client.
pub(crate) fn draw_seed() -> u64 {
    RandomState::new().hash_one(0)
}
