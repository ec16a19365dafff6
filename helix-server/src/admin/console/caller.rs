//! Calls of the public API on behalf of a browser: at this node over a connection within the
//! process, at other nodes over the network. Each call carries the token of the session, if any.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use helix_proto::error::{from_status, reason_name};
use helix_proto::log::v1::access_service_client::AccessServiceClient;
use helix_proto::log::v1::cluster_service_client::ClusterServiceClient;
use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::group_service_client::GroupServiceClient;
use helix_proto::log::v1::topic_service_client::TopicServiceClient;
use helix_proto::log::v1::{ErrorReason, LeaderHint};
use helix_tls::{Connector, HandshakeError};
use hyper::StatusCode;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Response, Status};

use crate::sync;
use crate::transport::InProcessConnector;

/// Time for a call; a page fails after it.
const CALL_WAIT_MAX: Duration = Duration::from_secs(8);

/// Time to connect to another node.
const CONNECT_WAIT_MAX: Duration = Duration::from_secs(2);

/// Nodes that a call is sent to: leadership may move once while it is under way.
const ATTEMPTS_MAX: usize = 3;

/// Bytes of a response. The limits of the API bound them, not the codec: a topic of 100,000
/// partitions has about 20 MB.
const RESPONSE_BYTES_MAX: usize = 64 << 20;

/// Age from which on a new connection reads the CA file again.
const FILES_AGE_MAX: Duration = Duration::from_secs(1);

/// How the console connects to the clients' ports of other nodes.
#[derive(Debug, Clone, Default)]
pub enum ConsoleDial {
    /// Without TLS, since this node has none.
    #[default]
    Plain,
    Tls(Arc<Connector>),
    /// Not at all, for this reason: a token must not be sent without TLS.
    Never(&'static str),
}

/// A failed call, as a page shows it.
#[derive(Debug)]
pub(super) struct FailedCall {
    pub(super) status: StatusCode,
    /// Reason of the API, or the code of gRPC.
    pub(super) reason: String,
    pub(super) message: String,
    pub(super) detail: Option<ErrorReason>,
}

/// Calls the API with one token.
#[derive(Debug)]
pub(super) struct ConsoleCaller {
    local: Channel,
    authorization: Option<MetadataValue<Ascii>>,
    dial: ConsoleDial,
    /// By address.
    others: Mutex<HashMap<String, Channel>>,
}

impl ConsoleCaller {
    /// Creates a caller for a browser at `peer`. Connects on the first call.
    ///
    /// # Errors
    /// The token has bytes that no header can have.
    pub(super) fn new(
        connector: InProcessConnector,
        peer: SocketAddr,
        token: Option<&str>,
        dial: ConsoleDial,
    ) -> Result<Self, String> {
        let bearer = |token: &str| MetadataValue::try_from(format!("Bearer {token}"));
        let authorization = token.map(bearer).transpose();
        let mut authorization =
            authorization.map_err(|_| "the token has characters that no token has".to_owned())?;
        if let Some(value) = &mut authorization {
            value.set_sensitive(true);
        }
        let endpoint = endpoint("console").map_err(|error| error.to_string())?;
        let local = endpoint.connect_with_connector_lazy(Dialer::InProcess(connector, peer));
        Ok(Self { local, authorization, dial, others: Mutex::default() })
    }

    /// Returns the channel to this node.
    pub(super) fn local(&self) -> Channel {
        self.local.clone()
    }

    /// Returns a request with the session's token and a deadline.
    pub(super) fn request<T>(&self, message: T) -> Request<T> {
        let mut request = self.stream_request(message);
        request.set_timeout(CALL_WAIT_MAX);
        request
    }

    /// Returns a request with the session's token, for a stream.
    pub(super) fn stream_request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(authorization) = &self.authorization {
            request.metadata_mut().insert("authorization", authorization.clone());
        }
        request
    }

    /// Returns the channel to another node.
    ///
    /// # Errors
    /// The reason why the console does not call other nodes, or the address is malformed.
    pub(super) fn other(&self, address: &str) -> Result<Channel, String> {
        if let ConsoleDial::Never(why) = self.dial {
            return Err(why.to_owned());
        }
        let mut others = sync::lock(&self.others);
        if let Some(channel) = others.get(address) {
            return Ok(channel.clone());
        }
        let endpoint = endpoint(address).map_err(|error| error.to_string())?;
        let dialer = Dialer::Network(self.dial.clone(), address.to_owned());
        let channel = endpoint.connect_with_connector_lazy(dialer);
        others.insert(address.to_owned(), channel.clone());
        Ok(channel)
    }

    /// Makes a call at this node, or at the node that leads what it is about.
    ///
    /// # Errors
    /// The failure of the last attempt.
    pub(super) async fn routed<Q: Clone, R, F>(
        &self,
        message: Q,
        call: impl Fn(Channel, Request<Q>) -> F,
    ) -> Result<R, FailedCall>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let mut channel = self.local();
        let mut attempts = 1;
        loop {
            let status = match call(channel, self.request(message.clone())).await {
                Ok(response) => return Ok(response.into_inner()),
                Err(status) => status,
            };
            let Some(leader) = leader_of(&status).filter(|_| attempts < ATTEMPTS_MAX) else {
                return Err(status.into());
            };
            attempts += 1;
            channel = self.other(&leader.endpoint).map_err(|why| FailedCall {
                message: format!(
                    "node {} at {} leads this, and the console of this node cannot call it: \
                     {why}; open the console of that node, on its admin port",
                    leader.node_id, leader.endpoint
                ),
                ..FailedCall::from(status)
            })?;
        }
    }
}

impl From<Status> for FailedCall {
    fn from(status: Status) -> Self {
        let detail = from_status(&status).map(|it| it.detail.reason());
        let reason = match detail {
            Some(reason) => reason_name(reason).to_owned(),
            None => format!("{:?}", status.code()),
        };
        let code = match status.code() {
            Code::InvalidArgument | Code::OutOfRange => StatusCode::BAD_REQUEST,
            Code::NotFound => StatusCode::NOT_FOUND,
            Code::AlreadyExists | Code::Aborted | Code::FailedPrecondition => StatusCode::CONFLICT,
            Code::PermissionDenied => StatusCode::FORBIDDEN,
            Code::Unauthenticated => StatusCode::UNAUTHORIZED,
            Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let message = match status.message() {
            "" => format!("the call failed with {:?}", status.code()),
            message => message.to_owned(),
        };
        Self { status: code, reason, message, detail }
    }
}

/// Returns the leader to call instead, if the status names its address.
fn leader_of(status: &Status) -> Option<LeaderHint> {
    let detail = from_status(status)?.detail;
    let is_elsewhere = detail.reason() == ErrorReason::NotLeader;
    detail.leader.filter(|leader| is_elsewhere && !leader.endpoint.is_empty())
}

/// Returns the endpoint of an address. The connector decides about TLS, not the scheme.
fn endpoint(address: &str) -> Result<Endpoint, tonic::transport::Error> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
    let agent = concat!("helix-console/", env!("CARGO_PKG_VERSION"));
    Ok(endpoint.user_agent(agent)?.connect_timeout(CONNECT_WAIT_MAX))
}

/// Opens the connections of a channel.
enum Dialer {
    InProcess(InProcessConnector, SocketAddr),
    /// To an address "host:port".
    Network(ConsoleDial, String),
}

/// A connection of any kind.
trait Socket: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Socket for S {}

impl Service<Uri> for Dialer {
    type Response = TokioIo<Box<dyn Socket>>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let socket: BoxFuture<'static, io::Result<Box<dyn Socket>>> = match self {
            Self::InProcess(connector, peer) => {
                let (connector, peer) = (connector.clone(), *peer);
                Box::pin(async move {
                    let socket: Box<dyn Socket> = Box::new(connector.connect(peer).await?);
                    Ok(socket)
                })
            }
            Self::Network(dial, address) => {
                let host = uri.host().unwrap_or_default().to_owned();
                Box::pin(connect(dial.clone(), address.clone(), host))
            }
        };
        Box::pin(async move { Ok(TokioIo::new(socket.await?)) })
    }
}

async fn connect(dial: ConsoleDial, address: String, host: String) -> io::Result<Box<dyn Socket>> {
    let late = |_| io::Error::new(io::ErrorKind::TimedOut, "the node does not answer");
    timeout(CONNECT_WAIT_MAX, async {
        let tcp = TcpStream::connect(&address).await?;
        tcp.set_nodelay(true)?;
        let socket: Box<dyn Socket> = match dial {
            ConsoleDial::Plain => Box::new(tcp),
            ConsoleDial::Tls(connector) => {
                connector.store().refresh_if_older(FILES_AGE_MAX).await;
                let socket = connector.connect(tcp, &host).await;
                Box::new(socket.map_err(HandshakeError::into_io)?)
            }
            ConsoleDial::Never(why) => return Err(io::Error::other(why)),
        };
        Ok(socket)
    })
    .await
    .map_err(late)?
}

/// Returns the generated client of a service, on a channel.
pub(super) fn topics(channel: Channel) -> TopicServiceClient<Channel> {
    TopicServiceClient::new(channel).max_decoding_message_size(RESPONSE_BYTES_MAX)
}

pub(super) fn cluster(channel: Channel) -> ClusterServiceClient<Channel> {
    ClusterServiceClient::new(channel).max_decoding_message_size(RESPONSE_BYTES_MAX)
}

pub(super) fn consume(channel: Channel) -> ConsumeServiceClient<Channel> {
    ConsumeServiceClient::new(channel).max_decoding_message_size(RESPONSE_BYTES_MAX)
}

pub(super) fn groups(channel: Channel) -> GroupServiceClient<Channel> {
    GroupServiceClient::new(channel).max_decoding_message_size(RESPONSE_BYTES_MAX)
}

pub(super) fn access(channel: Channel) -> AccessServiceClient<Channel> {
    AccessServiceClient::new(channel).max_decoding_message_size(RESPONSE_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_token_is_not_sent_where_tls_is_missing() {
        let (connector, _listener) = crate::transport::in_process();
        let peer = SocketAddr::from(([127, 0, 0, 1], 1));
        let dial = ConsoleDial::Never("there is no CA");
        let caller = ConsoleCaller::new(connector.clone(), peer, Some("hlx_1"), dial).unwrap();
        assert_eq!(caller.other("n2:9092").unwrap_err(), "there is no CA");
        let plain = ConsoleCaller::new(connector.clone(), peer, None, ConsoleDial::Plain).unwrap();
        plain.other("n2:9092").unwrap();
        assert!(plain.other("n2 9092").is_err(), "a malformed address");
        assert!(ConsoleCaller::new(connector, peer, Some("a\nb"), ConsoleDial::Plain).is_err());
    }
}
