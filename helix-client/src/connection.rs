//! Connections to nodes: a few HTTP/2 channels each, made when first used and kept.
//! Knows addresses; which node to ask is decided by `routing`.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use helix_proto::framing::Answers;
use helix_proto::log::v1::cluster_service_client::ClusterServiceClient;
use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_proto::log::v1::topic_service_client::TopicServiceClient;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use crate::config::Config;
use crate::error::{Error, Result};

/// The connections of one client, by address.
#[derive(Debug)]
pub(crate) struct Pool {
    config: Config,
    nodes: Mutex<HashMap<String, Connection>>,
}

impl Pool {
    pub(crate) fn new(config: Config) -> Self {
        Self { config, nodes: Mutex::default() }
    }

    /// The connection to an address. Returns at once; the first call over it connects.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if `address` is not an address.
    pub(crate) fn to(&self, address: &str) -> Result<Connection> {
        // A panic elsewhere cannot have left the map half changed.
        let mut nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(connection) = nodes.get(address) {
            return Ok(connection.clone());
        }
        let connection = Connection::new(address, &self.config)?;
        nodes.insert(address.to_owned(), connection.clone());
        Ok(connection)
    }
}

/// The channels to one node. Cheap to clone; calls take turns over the channels.
#[derive(Clone)]
pub struct Connection(Arc<Lines>);

struct Lines {
    address: String,
    /// At least one.
    lines: Box<[Line]>,
    turn: AtomicUsize,
}

/// The services over one channel, kept so that a call costs a clone and no set-up.
struct Line {
    produce: ProduceServiceClient<Answers<Channel>>,
    consume: ConsumeServiceClient<Answers<Channel>>,
    topic: TopicServiceClient<Answers<Channel>>,
    cluster: ClusterServiceClient<Answers<Channel>>,
}

impl Connection {
    fn new(address: &str, config: &Config) -> Result<Self> {
        let endpoint = endpoint(address, config)?;
        let count = config.connections_per_node.max(1);
        let bytes_max = config.transport.message_bytes_max;
        let line = |_| Line::new(config.dial.lazily(&endpoint), bytes_max);
        let lines = (0..count).map(line).collect();
        let address = address.to_owned();
        Ok(Self(Arc::new(Lines { address, lines, turn: AtomicUsize::new(0) })))
    }

    /// The address as it was given.
    pub fn address(&self) -> &str {
        &self.0.address
    }

    /// The produce service, as generated.
    pub fn produce(&self) -> ProduceServiceClient<Answers<Channel>> {
        self.line().produce.clone()
    }

    /// The consume service, as generated.
    pub fn consume(&self) -> ConsumeServiceClient<Answers<Channel>> {
        self.line().consume.clone()
    }

    /// The topic service, as generated.
    pub fn topic(&self) -> TopicServiceClient<Answers<Channel>> {
        self.line().topic.clone()
    }

    /// The cluster service, as generated.
    pub fn cluster(&self) -> ClusterServiceClient<Answers<Channel>> {
        self.line().cluster.clone()
    }

    fn line(&self) -> &Line {
        let Lines { lines, turn, .. } = &*self.0;
        match &**lines {
            [only] => only,
            lines => &lines[turn.fetch_add(1, Ordering::Relaxed) % lines.len()],
        }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Connection").field(&self.0.address).finish()
    }
}

impl Line {
    fn new(channel: Channel, bytes_max: usize) -> Self {
        let channel = Answers(channel);
        Self {
            produce: ProduceServiceClient::new(channel.clone())
                .max_decoding_message_size(bytes_max)
                .max_encoding_message_size(bytes_max),
            consume: ConsumeServiceClient::new(channel.clone())
                .max_decoding_message_size(bytes_max)
                .max_encoding_message_size(bytes_max),
            topic: TopicServiceClient::new(channel.clone())
                .max_decoding_message_size(bytes_max)
                .max_encoding_message_size(bytes_max),
            cluster: ClusterServiceClient::new(channel)
                .max_decoding_message_size(bytes_max)
                .max_encoding_message_size(bytes_max),
        }
    }
}

fn endpoint(address: &str, config: &Config) -> Result<Endpoint> {
    let uri =
        if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
    let invalid = |why: &dyn fmt::Display| {
        Error::client(Code::InvalidArgument, format!("address {address:?}: {why}"))
    };
    if !uri.starts_with("http://") {
        return Err(invalid(&"only http:// is spoken"));
    }
    let transport = &config.transport;
    let endpoint = Endpoint::from_shared(uri).map_err(|error| invalid(&error))?;
    Ok(endpoint
        .connect_timeout(config.connect_timeout)
        .tcp_nodelay(true)
        .initial_stream_window_size(transport.stream_window_bytes)
        .initial_connection_window_size(transport.connection_window_bytes)
        .max_frame_size(transport.frame_bytes_max)
        .http2_keep_alive_interval(transport.keepalive_interval)
        .keep_alive_timeout(transport.keepalive_timeout)
        // Nobody waits for an idle one; it is tried with the next call.
        .keep_alive_while_idle(false))
}
