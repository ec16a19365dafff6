//! Settings of a client, with the defaults that the benchmarks use.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use tonic::transport::{Channel, Endpoint};

use crate::connector::{self, ClientTls};
use crate::pending::PendingCalls;
use crate::refusal::RefusalNote;
use crate::tls_options::TlsOptions;
use crate::token::TokenSource;

/// Settings of a [`Client`](crate::Client).
#[derive(Debug, Clone)]
pub struct Config {
    /// Bootstrap addresses, "host:port" or "http://host:port" without a path, or "unix:PATH" for
    /// the Unix domain socket of a node on this machine; at least one. The client learns the other
    /// addresses. An unresponsive one costs at most `hedge_after`. Default: "127.0.0.1:9092".
    pub endpoints: Vec<String>,
    /// Connections to each node, at least 1. Calls rotate over them; a stream stays on one.
    /// Default: 1.
    pub connections_per_node: usize,
    /// Timeout of a connect, and of one node's response to a metadata request. Above zero.
    /// Default: 3 s.
    pub connect_timeout: Duration,
    /// Timeout of one call with all its retries, and of one batch of a session from its append to
    /// its ack. Above zero. Default: 30 s.
    pub request_timeout: Duration,
    /// Timeout of one attempt of a call, within `request_timeout`. For a session's stream, the
    /// longest silence while batches wait for their acks. Above zero. Default: 10 s.
    pub attempt_timeout: Duration,
    /// Upper bound of the random wait before the first retry; doubles with each. Default: 10 ms.
    pub backoff_min: Duration,
    /// Largest upper bound of the random wait before a retry. Default: 1 s.
    pub backoff_max: Duration,
    /// Largest upper bound of that wait while a shard has no reachable leader, if it is less than
    /// `backoff_max`. Short, because an election takes about half a second. All calls of a client
    /// share their metadata requests, so many calls send no more of them than one. Default: 50 ms.
    pub failover_backoff_max: Duration,
    /// Silence of a node after which a request that any node can serve goes to the next one too.
    /// Default: 300 ms.
    pub hedge_after: Duration,
    /// Silence of a leader after which the client asks other nodes whether it has been replaced.
    /// If it has, the attempt ends at once; a slow leader that still leads gets the rest of
    /// `attempt_timeout`. Long polls and subscriptions, where silence is normal, wait twice as
    /// long, with growing intervals. Use at least 100 ms. Default: 500 ms.
    pub stall_after: Duration,
    /// Silence after which a subscription is reopened. Use more than 5 s, the longest interval of
    /// the service's heartbeats. Default: 15 s.
    pub heartbeat_timeout: Duration,
    /// Rack or zone of the client. Reads with [`AnyReplica`](crate::ReadSource::AnyReplica) prefer
    /// replicas on nodes of the same rack. Default: none.
    pub rack: Option<String>,
    /// Seed of the retry jitter. Default: none, a random seed.
    pub seed: Option<u64>,
    /// HTTP/2 settings.
    pub transport: Transport,
    /// Encrypts connections and verifies nodes, except over Unix domain sockets. Default: none,
    /// connections without TLS.
    pub tls: Option<TlsOptions>,
    /// Connects to nodes. A custom function excludes `tls` and "unix:PATH". Default: over TCP, or
    /// over the Unix domain socket that an address names.
    pub dial: Dial,
    /// Source of the token that each call carries. Default: none.
    pub token: TokenSource,
    /// Table in which calls are registered while they wait. Default: off.
    pub pending: PendingCalls,
    /// Continue at the node that a removed one names, if no address of a member is known. Default:
    /// true. Else the calls fail with `NOT_LEADER`, as the removed node does.
    pub leave_removed_nodes: bool,
}

type Connect = dyn Fn(&Endpoint) -> Channel + Send + Sync;

/// Connects to nodes: over TCP, or with a custom function, as simulations do.
#[derive(Clone, Default)]
pub struct Dial(Option<Arc<Connect>>);

impl Dial {
    /// Connects with `connect`.
    pub fn with(connect: impl Fn(&Endpoint) -> Channel + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(connect)))
    }

    /// Returns a channel that connects on first use: to the Unix domain socket at `socket`, or to
    /// the address of the endpoint.
    pub(crate) fn lazily(
        &self,
        endpoint: &Endpoint,
        socket: Option<&str>,
        tls: Option<&Arc<ClientTls>>,
        refusal: &RefusalNote,
    ) -> Channel {
        match (&self.0, socket) {
            (Some(connect), _) => connect(endpoint),
            (None, Some(path)) => connector::connect_unix_lazily(endpoint, path),
            (None, None) => connector::connect_lazily(endpoint, tls, refusal),
        }
    }

    pub(crate) fn is_custom(&self) -> bool {
        self.0.is_some()
    }
}

impl fmt::Debug for Dial {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(if self.0.is_some() { "custom" } else { "tcp" })
    }
}

impl Config {
    /// Returns the defaults with these bootstrap addresses.
    pub fn new<E: Into<String>>(endpoints: impl IntoIterator<Item = E>) -> Self {
        Self { endpoints: endpoints.into_iter().map(Into::into).collect(), ..Self::default() }
    }

    /// Encrypts the connections.
    #[must_use]
    pub fn with_tls(self, tls: TlsOptions) -> Self {
        Self { tls: Some(tls), ..self }
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
            failover_backoff_max: Duration::from_millis(50),
            hedge_after: Duration::from_millis(300),
            stall_after: Duration::from_millis(500),
            heartbeat_timeout: Duration::from_secs(15),
            rack: None,
            seed: None,
            transport: Transport::default(),
            tls: None,
            dial: Dial::default(),
            token: TokenSource::none(),
            pending: PendingCalls::default(),
            leave_removed_nodes: true,
        }
    }
}

/// HTTP/2 settings of each connection. Throughput is at most window / round trip.
#[derive(Debug, Clone)]
pub struct Transport {
    /// Flow-control window of one stream in bytes, 64 KiB to 2 GiB - 1.
    /// Default: 8 MiB.
    pub stream_window_bytes: u32,
    /// Flow-control window of one connection in bytes, 64 KiB to 2 GiB - 1.
    /// Default: 32 MiB.
    pub connection_window_bytes: u32,
    /// Largest HTTP/2 frame, in bytes, 16 KiB to 16 MiB - 1. Default: 1 MiB.
    pub frame_bytes_max: u32,
    /// Largest message received or sent, in bytes. Default: 16 MiB.
    pub message_bytes_max: usize,
    /// Silence after which a connection with open calls is pinged. Default: 2 s.
    pub keepalive_interval: Duration,
    /// Timeout of that ping; then the connection is closed and its calls move to another node. Must
    /// cover the data queued before the ping, so a slow network needs more. Default: 4 s.
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

/// Draws a seed from the operating system, the only source of randomness in a client.
pub(crate) fn draw_seed() -> u64 {
    RandomState::new().hash_one(0)
}
