//! The peer port: handshakes and single calls. What is no peer of this cluster is refused here,
//! before anything of Raft is looked at.

use std::io;
use std::sync::Arc;

use futures_util::Stream;
use helix_proto::framing::Requests;
use helix_proto::messages;
use helix_proto::raft::v1 as pb;
use pb::exchange_request::Message;
use pb::peer_service_server::{PeerService, PeerServiceServer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::codegen::BoxStream;
use tonic::transport::Server;
use tonic::transport::server::Connected;
use tonic::{Request, Response, Status, Streaming, async_trait};

use super::connection::Lane;
use super::hub::{Asker, Desk, Form, Hub, Join};
use super::inbound::Inbound;
use super::limits::{
    ACCEPTED_KEEPALIVE_INTERVAL, CLOSE_WAIT_MAX, CONNECTION_WINDOW_BYTES, FRAME_BYTES,
    HANDSHAKE_WAIT_MAX, KEEPALIVE_WAIT_MAX, MESSAGE_BYTES_MAX, REFUSAL_BYTES_MAX,
    STREAM_WINDOW_BYTES, STREAMS_PER_CONNECTION_MAX, WINDOW_BYTES,
};
use super::network::Network;
use super::wire;
use crate::protocol::Versions;

/// Answers the peers until `stop` is cancelled or the hub is closed. Connections that do not end
/// by themselves then are cut.
pub async fn serve(
    hub: Arc<Hub>,
    listener: TcpListener,
    stop: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    Network::from(listener).serve(hub, stop).await
}

/// As [`serve`], on connections of any kind.
pub(super) async fn serve_incoming<I, C>(
    hub: Arc<Hub>,
    incoming: I,
    stop: CancellationToken,
) -> Result<(), tonic::transport::Error>
where
    I: Stream<Item = io::Result<C>>,
    C: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    let ending = stop.child_token();
    let _ended = ending.clone().drop_guard();
    let closed = hub.roster.closed.clone();
    let service = PeerServiceServer::new(Service { hub, ending: ending.clone() })
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let serving = Server::builder()
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .max_concurrent_streams(STREAMS_PER_CONNECTION_MAX)
        .http2_keepalive_interval(Some(ACCEPTED_KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_WAIT_MAX))
        .add_service(Requests(service))
        .serve_with_incoming_shutdown(incoming, ending.clone().cancelled_owned());
    let cut = async {
        tokio::select! {
            () = closed.cancelled() => ending.cancel(),
            () = ending.cancelled() => {}
        }
        sleep(CLOSE_WAIT_MAX).await;
    };
    tokio::select! {
        served = serving => served,
        () = cut => Ok(()),
    }
}

struct Service {
    hub: Arc<Hub>,
    /// Ends every stream and call.
    ending: CancellationToken,
}

/// A no that the caller's operator should read.
fn refused(why: impl Into<String>) -> Status {
    let mut why = why.into();
    if why.len() > REFUSAL_BYTES_MAX {
        let end = (0..=REFUSAL_BYTES_MAX).rev().find(|at| why.is_char_boundary(*at));
        why.truncate(end.unwrap_or(0));
    }
    Status::failed_precondition(why)
}

impl Service {
    /// Checks a handshake; the answer to it.
    fn check(&self, opening: &pb::Opening) -> Result<(Lane, pb::Opened), String> {
        let us = self.hub.roster.node_id;
        let pb::Opening { version_min, version_max, from_node, to_node, .. } = *opening;
        let theirs = Versions { oldest: version_min, newest: version_max };
        let version = self.hub.roster.agree(from_node, theirs)?;
        self.check_target(to_node)?;
        let theirs = wire::read_cluster(&opening.cluster);
        let Some(cluster) = self.hub.roster.cluster() else {
            self.hub.note_caller(theirs.map(|cluster| (from_node, cluster)));
            return Err(format!("node {us} is in no cluster yet"));
        };
        match theirs {
            Some(theirs) if theirs == cluster => {}
            Some(theirs) => {
                return Err(format!(
                    "node {us} is in cluster {cluster:032x}, node {from_node} in {theirs:032x}"
                ));
            }
            None => return Err("a cluster id has 16 bytes".to_owned()),
        }
        self.check_member(from_node, opening.generation)?;
        let lane = Lane::from_wire(opening.lane);
        let lane = lane.ok_or_else(|| format!("lane {} is not known", opening.lane))?;
        let opened = pb::Opened {
            version,
            cluster: wire::cluster_bytes(cluster),
            node: us,
            window_bytes: WINDOW_BYTES,
        };
        Ok((lane, opened))
    }

    fn check_target(&self, to_node: u64) -> Result<(), String> {
        let us = self.hub.roster.node_id;
        if to_node != us {
            return Err(format!("this is node {us}, not node {to_node}"));
        }
        Ok(())
    }

    /// Whoever knows the cluster's id may be a member of whom this node has not heard yet; it is
    /// refused only if this node has heard that it is none any more.
    fn check_member(&self, from_node: u64, generation: u32) -> Result<(), String> {
        if from_node == 0 || from_node == self.hub.roster.node_id {
            return Err(format!("the caller says that it is node {from_node}"));
        }
        let refusal = self.hub.desk().and_then(|desk| desk.refusal(from_node, generation));
        refusal.map_or(Ok(()), Err)
    }

    fn refuse(&self, from: u64, why: String) -> Status {
        self.hub.note_refusal(from, &why);
        refused(why)
    }

    /// The desk, for whoever means this node.
    fn desk_for(&self, from_node: u64, to_node: u64) -> Result<Arc<dyn Desk>, Status> {
        self.check_target(to_node).map_err(|why| self.refuse(from_node, why))?;
        self.hub.desk().ok_or_else(closing)
    }

    /// The desk, for a peer that means this node.
    fn desk_for_peer(&self, from_node: u64, to_node: u64) -> Result<Arc<dyn Desk>, Status> {
        let desk = self.desk_for(from_node, to_node)?;
        let us = self.hub.roster.node_id;
        let why = match desk.refusal(from_node, 0) {
            None if self.hub.roster.peer(from_node).is_some() => return Ok(desk),
            None => format!("node {from_node} is not one of the peers of node {us}"),
            Some(refusal) => refusal,
        };
        Err(self.refuse(from_node, why))
    }

    /// What comes of a call, unless everything ends first.
    async fn unless_ending<T>(
        &self,
        working: impl Future<Output = Result<T, String>>,
    ) -> Result<Response<T>, Status> {
        tokio::select! {
            worked = working => worked.map(Response::new).map_err(refused),
            () = self.ending.cancelled() => Err(closing()),
        }
    }
}

fn closing() -> Status {
    Status::unavailable("the node is closing its connections")
}

#[async_trait]
impl PeerService for Service {
    type ExchangeStream = BoxStream<pb::ExchangeResponse>;

    async fn exchange(
        &self,
        request: Request<Streaming<pb::ExchangeRequest>>,
    ) -> Result<Response<Self::ExchangeStream>, Status> {
        let mut requests = messages::stream(&request, MESSAGE_BYTES_MAX);
        let first = timeout(HANDSHAKE_WAIT_MAX, requests.message())
            .await
            .map_err(|_| Status::deadline_exceeded("no handshake came"))??;
        let Some(Message::Opening(opening)) = first.and_then(|first| first.message) else {
            return Err(Status::invalid_argument("a stream begins with a handshake"));
        };
        let from = opening.from_node;
        let (lane, opened) = self.check(&opening).map_err(|why| self.refuse(from, why))?;
        if let Some(peer) = self.hub.roster.peer(from) {
            peer.on_heard();
        }
        let stop = self.hub.admit(from, lane, &self.ending).cancelled_owned();
        let hub = Arc::clone(&self.hub);
        Ok(Response::new(Box::pin(Inbound::new(hub, from, requests, opened, stop))))
    }

    async fn hello(
        &self,
        request: Request<pb::HelloRequest>,
    ) -> Result<Response<pb::HelloResponse>, Status> {
        let pb::HelloRequest { from_node, to_node, cluster, generation } = request.into_inner();
        let identity = wire::read_cluster(&cluster).map(|cluster| (cluster, generation));
        let asker = Asker { node_id: from_node, identity };
        let hello = self.desk_for(from_node, to_node)?.hello(asker);
        Ok(Response::new(pb::HelloResponse {
            node_id: hello.node_id,
            cluster: hello.cluster.map(wire::cluster_bytes).unwrap_or_default(),
            cluster_name: hello.cluster_name,
            formed: hello.formed,
            members: hello.members,
            detail: hello.detail,
            version_min: self.hub.versions().oldest,
            version_max: self.hub.versions().newest,
            removed: hello.removed.unwrap_or_default(),
        }))
    }

    async fn form(
        &self,
        request: Request<pb::FormRequest>,
    ) -> Result<Response<pb::FormResponse>, Status> {
        let request = request.into_inner();
        let desk = self.desk_for_peer(request.from_node, request.to_node)?;
        let cluster = wire::read_cluster(&request.cluster)
            .ok_or_else(|| refused("a cluster id has 16 bytes"))?;
        let form = Form {
            cluster,
            cluster_name: request.cluster_name,
            members: request.members,
            shards: request.shards,
        };
        let forming = async { desk.form(form).await.map(|()| pb::FormResponse {}) };
        self.unless_ending(forming).await
    }

    async fn join(
        &self,
        request: Request<pb::JoinRequest>,
    ) -> Result<Response<pb::JoinResponse>, Status> {
        let request = request.into_inner();
        let desk = self.desk_for(request.from_node, request.to_node)?;
        let cluster = wire::read_cluster(&request.cluster)
            .ok_or_else(|| refused("a cluster id has 16 bytes"))?;
        let neighbours = request.neighbours.into_iter();
        let join = Join {
            cluster,
            generation: request.generation,
            shards: request.shards,
            neighbours: neighbours.map(|it| (it.node_id, it.address)).collect(),
        };
        let joining = async { desk.join(join).await.map(|()| pb::JoinResponse {}) };
        self.unless_ending(joining).await
    }

    async fn call(
        &self,
        request: Request<pb::CallRequest>,
    ) -> Result<Response<pb::CallResponse>, Status> {
        let pb::CallRequest { from_node, to_node, request } = request.into_inner();
        let desk = self.desk_for_peer(from_node, to_node)?;
        let calling = async {
            let response = desk.call(from_node, request).await?;
            Ok(pb::CallResponse { response })
        };
        self.unless_ending(calling).await
    }
}
