//! Requests to one specific node, without routing, retries or proxies.
//!
//! The harness observes the cluster this way; clients under test use `helix-client`.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, anyhow};
use helix_client::{AuthorizedChannel, Error, TokenSource};
use helix_proto::log::v1::cluster_service_client::ClusterServiceClient;
use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::{
    FetchRequest, GetHealthRequest, GetHealthResponse, GetMetadataRequest, GetNodeStatusRequest,
    GetNodeStatusResponse, Metadata, PartitionRecords, PartitionStart, ReadLimits, ReadSource,
    StartPosition,
};
use tokio::time::timeout;
use tonic::transport::Endpoint;

const CONNECT_MAX: Duration = Duration::from_millis(500);

const RESPONSE_MAX: Duration = Duration::from_secs(3);

/// Payload bytes of one response.
const FETCH_BYTES_MAX: u64 = 1 << 20;

/// Connection to one node. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct NodeClient {
    pub(crate) node_id: u64,
    channel: AuthorizedChannel,
}

/// Failure of a fetch.
#[derive(Debug)]
pub(crate) enum NodeFetchError {
    TimedOut,
    Rejected(Error),
}

impl std::fmt::Display for NodeFetchError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::TimedOut => write!(formatter, "no response within {RESPONSE_MAX:?}"),
            Self::Rejected(error) => write!(formatter, "{error}"),
        }
    }
}

impl NodeClient {
    pub(crate) fn new(node_id: u64, address: SocketAddr) -> anyhow::Result<Self> {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
        let channel = endpoint.connect_timeout(CONNECT_MAX).tcp_nodelay(true).connect_lazy();
        let channel = AuthorizedChannel::new(channel, TokenSource::from_env()?);
        Ok(Self { node_id, channel })
    }

    pub(crate) async fn health(&self) -> anyhow::Result<GetHealthResponse> {
        let mut cluster = ClusterServiceClient::new(self.channel.clone());
        let call = cluster.get_health(GetHealthRequest::default());
        Ok(self.bounded("health", call).await?.into_inner())
    }

    pub(crate) async fn metadata(&self) -> anyhow::Result<Metadata> {
        let mut cluster = ClusterServiceClient::new(self.channel.clone());
        let call = cluster.get_metadata(GetMetadataRequest::default());
        let response = self.bounded("metadata", call).await?.into_inner();
        response.metadata.context("the response has no metadata")
    }

    pub(crate) async fn status(&self) -> anyhow::Result<GetNodeStatusResponse> {
        let mut cluster = ClusterServiceClient::new(self.channel.clone());
        let call = cluster.get_node_status(GetNodeStatusRequest {});
        Ok(self.bounded("status", call).await?.into_inner())
    }

    /// Reads what this replica has from an offset on, whether it is the leader or not.
    pub(crate) async fn fetch(
        &self,
        (topic, partition): (&str, u32),
        offset: u64,
        wait: Duration,
    ) -> Result<PartitionRecords, NodeFetchError> {
        let mut consume =
            ConsumeServiceClient::new(self.channel.clone()).max_decoding_message_size(16 << 20);
        let start = PartitionStart {
            topic: topic.to_owned(),
            partition,
            start: Some(StartPosition {
                position: Some(Position::Offset(offset)),
                ..StartPosition::default()
            }),
            until_offset: None,
            topic_id: 0,
        };
        let request = FetchRequest {
            partitions: vec![start],
            limits: Some(ReadLimits { max_bytes: Some(FETCH_BYTES_MAX), ..ReadLimits::default() }),
            max_wait: wait.try_into().ok(),
            source: ReadSource::AnyReplica.into(),
            accept_encoded: true,
            ..FetchRequest::default()
        };
        match timeout(RESPONSE_MAX + wait, consume.fetch(request)).await {
            Ok(Ok(response)) => Ok(response.into_inner().partitions.pop().unwrap_or_default()),
            Ok(Err(status)) => Err(NodeFetchError::Rejected(Error::from_status(&status))),
            Err(_) => Err(NodeFetchError::TimedOut),
        }
    }

    async fn bounded<T>(
        &self,
        what: &str,
        call: impl Future<Output = Result<T, tonic::Status>>,
    ) -> anyhow::Result<T> {
        match timeout(RESPONSE_MAX, call).await {
            Ok(response) => response.map_err(|status| {
                anyhow!("{what} of node {}: {}", self.node_id, Error::from_status(&status))
            }),
            Err(_) => Err(anyhow!("{what} of node {}: no response", self.node_id)),
        }
    }
}
