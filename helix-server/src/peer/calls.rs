//! Single calls to other nodes, over a connection of their own: hello, join, form, and calls to
//! the peer's [`PeerHandler`](super::PeerHandler).

use std::time::Duration;

use bytes::Bytes;
use helix_proto::raft::v1 as pb;
use helix_transport::ResponseLayer;
use pb::peer_service_client::PeerServiceClient;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::connection::peer::{Peer, status_text};
use super::handler::{FormCluster, Hello, JoinCluster};
use super::hub::Hub;
use super::limits::{FORM_WAIT_MAX, HELLO_WAIT_MAX};
use super::wire;
use crate::protocol::ProtocolVersions;

/// Reason why a call to a peer has no response.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    #[error("node {node} is not one of the peers")]
    Unknown { node: u64 },
    /// Nothing was sent: the peer did not see the call.
    #[error("node {node} cannot be reached: {why}")]
    Unreachable { node: u64, why: String },
    /// The connection ended after the call was sent: the peer may have acted.
    #[error("lost the connection to node {node} before it responded: {why}")]
    Lost { node: u64, why: String },
    /// The deadline passed: the peer may have acted, or may still act.
    #[error("no response in time")]
    TimedOut,
    /// The peer refused the call.
    #[error("{0}")]
    Refused(String),
    #[error("this node is closing its connections")]
    Closed,
}

impl PeerError {
    /// Returns `true` if the peer may have acted in spite of the error, or may still act.
    pub fn may_have_acted(&self) -> bool {
        match self {
            Self::Unknown { .. } | Self::Unreachable { .. } | Self::Refused(_) => false,
            Self::Lost { .. } | Self::TimedOut | Self::Closed => true,
        }
    }
}

impl Hub {
    /// Asks a node for its description. Works before this node is in a cluster.
    ///
    /// # Errors
    /// The peer is unknown or unreachable, did not respond in time, or refused the call.
    pub async fn hello(&self, node: u64) -> Result<Hello, PeerError> {
        let client = self.client(node)?;
        self.say_hello(node, client).await
    }

    /// Asks the node at `address`, expected to be `node`, for its description.
    /// It need not be a peer.
    ///
    /// # Errors
    /// As [`Self::hello`].
    pub async fn hello_at(&self, node: u64, address: &str) -> Result<Hello, PeerError> {
        let closed = self.table.closed.child_token();
        let _closes = closed.clone().drop_guard();
        let dialer = self.table.dialer.clone();
        let peer = Peer::new(node, address.to_owned(), dialer, closed);
        let client = peer.call_client().ok_or_else(|| PeerError::Unreachable {
            node,
            why: format!("{address:?} is not an address; use host:port"),
        })?;
        self.say_hello(node, client).await
    }

    async fn say_hello(
        &self,
        node: u64,
        mut client: PeerServiceClient<ResponseLayer<Channel>>,
    ) -> Result<Hello, PeerError> {
        let identity = self.table.local.identity();
        let request = pb::HelloRequest {
            from_node: self.table.local.node_id,
            to_node: node,
            cluster: identity.map(|it| wire::cluster_bytes(it.cluster)).unwrap_or_default(),
            generation: identity.map_or(0, |it| it.generation),
        };
        let response = self.bounded(node, HELLO_WAIT_MAX, client.hello(request)).await?;
        // Releases that do not send their versions speak version 1 only.
        let versions = match (response.version_min, response.version_max) {
            (0, 0) => ProtocolVersions { oldest: 1, newest: 1 },
            (oldest, newest) => ProtocolVersions { oldest, newest },
        };
        Ok(Hello {
            node_id: response.node_id,
            cluster: wire::read_cluster(&response.cluster),
            cluster_name: response.cluster_name,
            formed: response.formed,
            members: response.members,
            detail: response.detail,
            versions,
            removed: Some(response.removed).filter(|why| !why.is_empty()),
            wall_time_us: response.wall_time_us,
        })
    }

    /// Makes an empty node part of the cluster. Idempotent.
    ///
    /// # Errors
    /// As [`Self::hello`]; see [`PeerError::may_have_acted`].
    pub async fn join(&self, node: u64, join: JoinCluster) -> Result<(), PeerError> {
        let peer_addrs = join.peer_addrs.into_iter();
        let request = pb::JoinRequest {
            from_node: self.table.local.node_id,
            to_node: node,
            cluster: wire::cluster_bytes(join.cluster),
            generation: join.generation,
            shards: join.shards,
            neighbours: peer_addrs
                .map(|(node_id, address)| pb::PeerAddress { node_id, address })
                .collect(),
        };
        let mut client = self.client(node)?;
        self.bounded(node, FORM_WAIT_MAX, client.join(request)).await.map(drop)
    }

    /// Makes an empty node part of a new cluster.
    ///
    /// # Errors
    /// As [`Self::hello`]; see [`PeerError::may_have_acted`].
    pub async fn form(&self, node: u64, form: FormCluster) -> Result<(), PeerError> {
        let request = pb::FormRequest {
            from_node: self.table.local.node_id,
            to_node: node,
            cluster: wire::cluster_bytes(form.cluster),
            cluster_name: form.cluster_name,
            members: form.members,
            shards: form.shards,
        };
        let mut client = self.client(node)?;
        self.bounded(node, FORM_WAIT_MAX, client.form(request)).await.map(drop)
    }

    /// Sends a request to a node's [`PeerHandler`](super::PeerHandler) and waits for the response.
    ///
    /// # Errors
    /// As [`Self::hello`]; see [`PeerError::may_have_acted`].
    pub async fn call(
        &self,
        node: u64,
        request: Bytes,
        wait: Duration,
    ) -> Result<Bytes, PeerError> {
        let from_node = self.table.local.node_id;
        let request = pb::CallRequest { from_node, to_node: node, request };
        let mut client = self.client(node)?;
        Ok(self.bounded(node, wait, client.call(request)).await?.response)
    }

    fn client(&self, node: u64) -> Result<PeerServiceClient<ResponseLayer<Channel>>, PeerError> {
        let peer = self.table.peer(node).ok_or(PeerError::Unknown { node })?;
        peer.call_client().ok_or(PeerError::Unknown { node })
    }

    /// Runs a call until `wait` has passed or the hub is closed.
    async fn bounded<T>(
        &self,
        node: u64,
        wait: Duration,
        calling: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, PeerError> {
        let responded = tokio::select! {
            responded = timeout(wait, calling) => responded.map_err(|_| PeerError::TimedOut)?,
            () = self.table.closed.cancelled() => return Err(PeerError::Closed),
        };
        responded.map(Response::into_inner).map_err(|status| call_error(node, &status))
    }
}

fn call_error(node: u64, status: &Status) -> PeerError {
    if status.code() == Code::FailedPrecondition {
        return PeerError::Refused(status.message().to_owned());
    }
    let why = status_text(status);
    if was_not_sent(status) {
        PeerError::Unreachable { node, why }
    } else {
        PeerError::Lost { node, why }
    }
}

/// Returns `true` if there was no connection over which to send the call.
fn was_not_sent(status: &Status) -> bool {
    let mut next = std::error::Error::source(status);
    while let Some(source) = next {
        if source.is::<tonic::ConnectError>() {
            return true;
        }
        next = source.source();
    }
    false
}
