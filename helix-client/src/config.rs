//! Everything about a client that can be set, with the defaults that the benchmarks use.
//! Plain data; what the numbers do is said where they are used.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use tonic::transport::{Channel, Endpoint};

use crate::connector;

/// Settings of a [`Client`](crate::Client).
#[derive(Debug, Clone)]
pub struct Config {
    /// Addresses to begin with, "host:port" or "http://host:port"; at least one. The others of the
    /// cluster are learned, and one of these that does not answer costs `hedge_after` at most.
    /// Default: "127.0.0.1:9092".
    pub endpoints: Vec<String>,
    /// TCP connections to each node, at least 1. Calls take turns; a stream stays on one.
    /// Default: 1.
    pub connections_per_node: usize,
    /// Longest wait for a TCP connection, and for one node's answer about routes. Above zero.
    /// Default: 3 s.
    pub connect_timeout: Duration,
    /// Longest time for one call with all its retries, and for one batch of a session from being
    /// handed over to its ack. Above zero. Default: 30 s.
    pub request_timeout: Duration,
    /// Longest time for one attempt of a call, within `request_timeout`; for a session's stream,
    /// longest silence while batches wait for their acks. Above zero. Default: 10 s.
    pub attempt_timeout: Duration,
    /// First bound of the random wait before a retry; doubles with each. Default: 10 ms.
    pub backoff_min: Duration,
    /// Last bound of the random wait before a retry. Default: 1 s.
    pub backoff_max: Duration,
    /// Last bound of that wait where the cause is a leader that is gone or not elected yet, if it
    /// is less than `backoff_max`: an election is over in about a second. All calls of a client
    /// share their questions, so that many of them ask no more often than one. Default: 100 ms.
    pub failover_backoff_max: Duration,
    /// Silence of a node after which the next one is asked as well, for what any node can answer.
    /// Default: 300 ms.
    pub hedge_after: Duration,
    /// Silence of a leader after which the other nodes are asked whether it has been replaced; if
    /// it has, it is given up at once. Twice that where silence is normal (long polls and
    /// subscriptions), and then more and more seldom. A leader that is slow and still the leader
    /// is waited for, up to `attempt_timeout`. At least 100 ms is sensible. Default: 500 ms.
    pub stall_after: Duration,
    /// Silence after which a subscription is given up and opened again. The service sends a sign
    /// of life at least every 5 s, so it should be more than that. Default: 15 s.
    pub heartbeat_timeout: Duration,
    /// Seed of the retries' jitter. Default: none, which draws one.
    pub seed: Option<u64>,
    /// HTTP/2 settings.
    pub transport: Transport,
    /// How connections are made. Default: over TCP.
    pub dial: Dial,
}

type Connect = dyn Fn(&Endpoint) -> Channel + Send + Sync;

/// How connections are made: over TCP unless something else is given, as simulations do.
#[derive(Clone, Default)]
pub struct Dial(Option<Arc<Connect>>);

impl Dial {
    /// Connections that `connect` makes.
    pub fn with(connect: impl Fn(&Endpoint) -> Channel + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(connect)))
    }

    /// A channel that connects when it is first used.
    pub(crate) fn lazily(&self, endpoint: &Endpoint) -> Channel {
        match &self.0 {
            Some(connect) => connect(endpoint),
            None => connector::connect_lazily(endpoint),
        }
    }
}

impl fmt::Debug for Dial {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(if self.0.is_some() { "given" } else { "tcp" })
    }
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
            failover_backoff_max: Duration::from_millis(100),
            hedge_after: Duration::from_millis(300),
            stall_after: Duration::from_millis(500),
            heartbeat_timeout: Duration::from_secs(15),
            seed: None,
            transport: Transport::default(),
            dial: Dial::default(),
        }
    }
}

/// HTTP/2 settings of each connection. Throughput is at most window / round trip.
#[derive(Debug, Clone)]
pub struct Transport {
    /// Bytes that a peer may send on one stream before it waits for us, 64 KiB to 2 GiB - 1.
    /// Default: 8 MiB.
    pub stream_window_bytes: u32,
    /// Bytes that a peer may send on one connection before it waits for us, 64 KiB to 2 GiB - 1.
    /// Default: 32 MiB.
    pub connection_window_bytes: u32,
    /// Largest HTTP/2 frame, in bytes, 16 KiB to 16 MiB - 1. Default: 1 MiB.
    pub frame_bytes_max: u32,
    /// Largest message taken or sent, in bytes. Default: 16 MiB.
    pub message_bytes_max: usize,
    /// Silence after which a connection with calls under way is tried. Default: 2 s.
    pub keepalive_interval: Duration,
    /// How long an answer to that may take before the connection is given up, and every call on it
    /// goes elsewhere. It must be enough for what waits in the network's buffers before it: a slow
    /// line needs more. Default: 4 s.
    pub keepalive_timeout: Duration,
}

impl Default for Transport {
    fn default() -> Self {
        Self {
            stream_window_bytes: 8 << 20,
            connection_window_bytes: 32 << 20,
            frame_bytes_max: 1 << 20,
            message_bytes_max: 16 << 20,
            keepalive_interval: Duration::from_secs(2),
            keepalive_timeout: Duration::from_secs(4),
        }
    }
}

/// Draws a seed from the operating system: the one place where chance enters a client.
pub(crate) fn draw_seed() -> u64 {
    RandomState::new().hash_one(0)
}
