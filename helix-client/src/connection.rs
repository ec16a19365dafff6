//! Connections to nodes by address: a few HTTP/2 channels each, opened on first use and kept.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use helix_proto::address;
use helix_proto::log::v1::access_service_client::AccessServiceClient;
use helix_proto::log::v1::cluster_service_client::ClusterServiceClient;
use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::group_service_client::GroupServiceClient;
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_proto::log::v1::topic_service_client::TopicServiceClient;
use helix_transport::ResponseLayer;
use tonic::Code;
use tonic::transport::Endpoint;

use crate::authorized_channel::AuthorizedChannel;
use crate::config::Config;
use crate::connector::ClientTls;
use crate::error::{Error, Result};
use crate::refusal::RefusalNote;

/// The connections of one client, by address.
#[derive(Debug)]
pub(crate) struct ConnectionCache {
    config: Config,
    tls: Option<Arc<ClientTls>>,
    /// By address. The connection of a node that is reached over a Unix domain socket has its other
    /// address as a second key.
    nodes: Mutex<HashMap<String, Connection>>,
}

impl ConnectionCache {
    /// # Errors
    /// `INVALID_ARGUMENT` if the files of TLS are not valid.
    pub(crate) fn new(config: Config) -> Result<Self> {
        if config.tls.is_some() && config.dial.is_custom() {
            let what = "a custom dial function makes its own TLS; leave out the TLS options";
            return Err(Error::client(Code::InvalidArgument, what));
        }
        let tls = config.tls.as_ref().map(ClientTls::open).transpose()?;
        Ok(Self { config, tls, nodes: Mutex::default() })
    }

    /// Uses a connection over a Unix domain socket for its node, whose other address is `address`.
    ///
    /// Other nodes and the metadata name the other address.
    pub(crate) fn prefer(&self, connection: &Connection, address: &str) {
        let mut nodes = self.lock();
        if nodes.get(address).is_some_and(|known| known.address() == connection.address()) {
            return;
        }
        // Another node may listen on the socket now, or the node may have another address.
        forget_uses(&mut nodes, connection.address());
        nodes.insert(address.to_owned(), connection.clone());
    }

    /// Stops using a Unix domain socket for the other address of its node: it did not respond.
    pub(crate) fn forget_socket(&self, address: &str) {
        let mut nodes = self.lock();
        if let Some(socket) = nodes.get(address).filter(|it| it.is_unix()).cloned() {
            forget_uses(&mut nodes, socket.address());
        }
    }

    /// Returns the address of the Unix domain socket that is used for this address, if any.
    pub(crate) fn preferred(&self, address: &str) -> Option<String> {
        let nodes = self.lock();
        let used = nodes.get(address).map(Connection::address);
        used.filter(|used| *used != address).map(str::to_owned)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Connection>> {
        // A panic elsewhere cannot have left the map inconsistent.
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the connection to an address without waiting; the first call connects.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if `address` is malformed.
    pub(crate) fn get(&self, address: &str) -> Result<Connection> {
        let mut nodes = self.lock();
        if let Some(connection) = nodes.get(address) {
            return Ok(connection.clone());
        }
        let connection = Connection::new(address, &self.config, self.tls.as_ref())?;
        nodes.insert(address.to_owned(), connection.clone());
        Ok(connection)
    }
}

/// Removes the other addresses for which the connection at `used` is used.
fn forget_uses(nodes: &mut HashMap<String, Connection>, used: &str) {
    nodes.retain(|key, known| key == known.address() || known.address() != used);
}

/// A connection to one node, over one or more channels that calls rotate over. Cheap to clone.
#[derive(Clone)]
pub struct Connection(Arc<ChannelPool>);

struct ChannelPool {
    address: String,
    /// At least one.
    channels: Box<[ServiceClients]>,
    next: AtomicUsize,
}

/// The service clients of one channel, kept so that a call only clones one.
struct ServiceClients {
    produce: ProduceServiceClient<ResponseLayer<AuthorizedChannel>>,
    consume: ConsumeServiceClient<ResponseLayer<AuthorizedChannel>>,
    topic: TopicServiceClient<ResponseLayer<AuthorizedChannel>>,
    group: GroupServiceClient<ResponseLayer<AuthorizedChannel>>,
    cluster: ClusterServiceClient<ResponseLayer<AuthorizedChannel>>,
    access: AccessServiceClient<ResponseLayer<AuthorizedChannel>>,
}

impl Connection {
    fn new(address: &str, config: &Config, tls: Option<&Arc<ClientTls>>) -> Result<Self> {
        let parsed = parse_address(address)?;
        let endpoint = endpoint(&parsed, config)?;
        let socket = address::unix_path(&parsed);
        if socket.is_some() && config.dial.is_custom() {
            let what = "a custom dial function cannot dial a Unix domain socket";
            return Err(invalid(address, &what));
        }
        let count = config.connections_per_node.max(1);
        let bytes_max = config.transport.message_bytes_max;
        let connect = |_| {
            let refusal = RefusalNote::default();
            let channel = config.dial.lazily(&endpoint, socket, tls, &refusal);
            let channel = AuthorizedChannel::new(channel, config.token.clone());
            ServiceClients::new(channel.with_refusal(refusal), bytes_max)
        };
        let channels = (0..count).map(connect).collect();
        let address = address.to_owned();
        Ok(Self(Arc::new(ChannelPool { address, channels, next: AtomicUsize::new(0) })))
    }

    /// Returns the address as configured or learned.
    pub fn address(&self) -> &str {
        &self.0.address
    }

    /// Returns true if the node is reached over a Unix domain socket.
    pub(crate) fn is_unix(&self) -> bool {
        address::unix_path(self.address()).is_some()
    }

    /// Returns the generated client of the produce service.
    pub fn produce(&self) -> ProduceServiceClient<ResponseLayer<AuthorizedChannel>> {
        self.channel_clients().produce.clone()
    }

    /// Returns the generated client of the consume service.
    pub fn consume(&self) -> ConsumeServiceClient<ResponseLayer<AuthorizedChannel>> {
        self.channel_clients().consume.clone()
    }

    /// Returns the generated client of the topic service.
    pub fn topic(&self) -> TopicServiceClient<ResponseLayer<AuthorizedChannel>> {
        self.channel_clients().topic.clone()
    }

    /// Returns the generated client of the group service.
    pub fn group(&self) -> GroupServiceClient<ResponseLayer<AuthorizedChannel>> {
        self.channel_clients().group.clone()
    }

    /// Returns the generated client of the cluster service.
    pub fn cluster(&self) -> ClusterServiceClient<ResponseLayer<AuthorizedChannel>> {
        self.channel_clients().cluster.clone()
    }

    /// Returns the generated client of the access service.
    pub fn access(&self) -> AccessServiceClient<ResponseLayer<AuthorizedChannel>> {
        self.channel_clients().access.clone()
    }

    fn channel_clients(&self) -> &ServiceClients {
        let ChannelPool { channels, next, .. } = &*self.0;
        match &**channels {
            [only] => only,
            channels => &channels[next.fetch_add(1, Ordering::Relaxed) % channels.len()],
        }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Connection").field(&self.0.address).finish()
    }
}

impl ServiceClients {
    fn new(channel: AuthorizedChannel, bytes_max: usize) -> Self {
        let channel = ResponseLayer(channel);
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
            group: GroupServiceClient::new(channel.clone())
                .max_decoding_message_size(bytes_max)
                .max_encoding_message_size(bytes_max),
            cluster: ClusterServiceClient::new(channel.clone())
                .max_decoding_message_size(bytes_max)
                .max_encoding_message_size(bytes_max),
            access: AccessServiceClient::new(channel)
                .max_decoding_message_size(bytes_max)
                .max_encoding_message_size(bytes_max),
        }
    }
}

/// Returns an address as `host:port` or `unix:PATH`.
///
/// # Errors
/// `INVALID_ARGUMENT` if it is malformed.
pub(crate) fn parse_address(text: &str) -> Result<String> {
    address::parse(text, None).map_err(|what| invalid(text, &what))
}

fn invalid(address: &str, what: &dyn fmt::Display) -> Error {
    Error::client(Code::InvalidArgument, format!("address {address:?}: {what}"))
}

/// Returns the endpoint of a parsed address.
fn endpoint(address: &str, config: &Config) -> Result<Endpoint> {
    let transport = &config.transport;
    let uri = match (address::unix_path(address), &config.tls) {
        // A path is no host; the name is that of the requests only.
        (Some(_), _) => "http://localhost".to_owned(),
        (None, None) => format!("http://{address}"),
        (None, Some(_)) => format!("https://{address}"),
    };
    let endpoint = Endpoint::from_shared(uri).map_err(|error| invalid(address, &error))?;
    Ok(endpoint
        .connect_timeout(config.connect_timeout)
        .tcp_nodelay(true)
        .initial_stream_window_size(transport.stream_window_bytes)
        .initial_connection_window_size(transport.connection_window_bytes)
        .max_frame_size(transport.frame_bytes_max)
        .http2_keep_alive_interval(transport.keepalive_interval)
        .keep_alive_timeout(transport.keepalive_timeout)
        // An idle connection has no waiting call; the next call detects a dead one.
        .keep_alive_while_idle(false))
}
