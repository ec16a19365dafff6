//! Single calls to other nodes, beside the lanes of Raft: who they are, that they join or form a
//! cluster, and what they are asked to do for this one.

use std::time::Duration;

use bytes::Bytes;
use helix_proto::framing::Answers;
use helix_proto::raft::v1 as pb;
use pb::peer_service_client::PeerServiceClient;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::connection::{Peer, status_text};
use super::hub::{Form, Hello, Hub, Join, PeerError};
use super::limits::{FORM_WAIT_MAX, HELLO_WAIT_MAX};
use super::wire;
use crate::protocol::Versions;

impl Hub {
    /// Asks a node who it is. Needs no cluster.
    pub async fn hello(&self, node: u64) -> Result<Hello, PeerError> {
        let client = self.client(node)?;
        self.say_hello(node, client).await
    }

    /// Asks whoever is at an address who it is, as `node`, which need not be a peer.
    pub async fn hello_at(&self, node: u64, address: &str) -> Result<Hello, PeerError> {
        let closed = self.roster.closed.child_token();
        let _closes = closed.clone().drop_guard();
        let dialer = self.roster.dialer.clone();
        let peer = Peer::new(node, address.to_owned(), dialer, closed);
        let client = peer.calls().ok_or_else(|| PeerError::Unreachable {
            node,
            why: format!("{address:?} is no address"),
        })?;
        self.say_hello(node, client).await
    }

    async fn say_hello(
        &self,
        node: u64,
        mut client: PeerServiceClient<Answers<Channel>>,
    ) -> Result<Hello, PeerError> {
        let identity = self.roster.identity();
        let request = pb::HelloRequest {
            from_node: self.roster.node_id,
            to_node: node,
            cluster: identity.map(|it| wire::cluster_bytes(it.cluster)).unwrap_or_default(),
            generation: identity.map_or(0, |it| it.generation),
        };
        let answer = self.bounded(node, HELLO_WAIT_MAX, client.hello(request)).await?;
        // Before it was told there was one version.
        let versions = match (answer.version_min, answer.version_max) {
            (0, 0) => Versions { oldest: 1, newest: 1 },
            (oldest, newest) => Versions { oldest, newest },
        };
        Ok(Hello {
            node_id: answer.node_id,
            cluster: wire::read_cluster(&answer.cluster),
            cluster_name: answer.cluster_name,
            formed: answer.formed,
            members: answer.members,
            detail: answer.detail,
            versions,
            removed: Some(answer.removed).filter(|why| !why.is_empty()),
        })
    }

    /// Makes an empty node part of the cluster. May be repeated.
    pub async fn join(&self, node: u64, join: Join) -> Result<(), PeerError> {
        let neighbours = join.neighbours.into_iter();
        let request = pb::JoinRequest {
            from_node: self.roster.node_id,
            to_node: node,
            cluster: wire::cluster_bytes(join.cluster),
            generation: join.generation,
            shards: join.shards,
            neighbours: neighbours
                .map(|(node_id, address)| pb::Neighbour { node_id, address })
                .collect(),
        };
        let mut client = self.client(node)?;
        self.bounded(node, FORM_WAIT_MAX, client.join(request)).await.map(drop)
    }

    /// Makes an empty node part of a new cluster.
    pub async fn form(&self, node: u64, form: Form) -> Result<(), PeerError> {
        let request = pb::FormRequest {
            from_node: self.roster.node_id,
            to_node: node,
            cluster: wire::cluster_bytes(form.cluster),
            cluster_name: form.cluster_name,
            members: form.members,
            shards: form.shards,
        };
        let mut client = self.client(node)?;
        self.bounded(node, FORM_WAIT_MAX, client.form(request)).await.map(drop)
    }

    /// Asks a node's [`Desk`](super::Desk) for something.
    pub async fn call(
        &self,
        node: u64,
        request: Bytes,
        wait: Duration,
    ) -> Result<Bytes, PeerError> {
        let request = pb::CallRequest { from_node: self.roster.node_id, to_node: node, request };
        let mut client = self.client(node)?;
        Ok(self.bounded(node, wait, client.call(request)).await?.response)
    }

    fn client(&self, node: u64) -> Result<PeerServiceClient<Answers<Channel>>, PeerError> {
        let peer = self.roster.peer(node).ok_or(PeerError::Unknown { node })?;
        peer.calls().ok_or(PeerError::Unknown { node })
    }

    async fn bounded<T>(
        &self,
        node: u64,
        wait: Duration,
        calling: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, PeerError> {
        let answered = tokio::select! {
            answered = timeout(wait, calling) => answered.map_err(|_| PeerError::TimedOut)?,
            () = self.roster.closed.cancelled() => return Err(PeerError::Closed),
        };
        answered.map(Response::into_inner).map_err(|status| call_error(node, &status))
    }
}

fn call_error(node: u64, status: &Status) -> PeerError {
    if status.code() == Code::FailedPrecondition {
        return PeerError::Refused(status.message().to_owned());
    }
    let why = status_text(status);
    if never_sent(status) {
        PeerError::Unreachable { node, why }
    } else {
        PeerError::Lost { node, why }
    }
}

/// Whether there was no connection to send a call over.
fn never_sent(status: &Status) -> bool {
    let mut next = std::error::Error::source(status);
    while let Some(source) = next {
        if source.is::<tonic::ConnectError>() {
            return true;
        }
        next = source.source();
    }
    false
}
