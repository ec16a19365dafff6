//! The peer port: handshakes and single calls. Refuses nodes of other clusters, and removed ones,
//! before it reads any Raft message; those with a certificate of another cluster, before it reads
//! anything.

use std::io;
use std::sync::Arc;

use futures_util::Stream;
use helix_proto::raft::v1 as pb;
use helix_transport::RequestLayer;
use pb::exchange_request::Message;
use pb::peer_service_server::{PeerService, PeerServiceServer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::codegen::{BoxStream, InterceptedService};
use tonic::transport::Server;
use tonic::transport::server::Connected;
use tonic::{Request, Response, Status, Streaming, async_trait};

use super::inbound::InboundStream;
use crate::peer::connection::lane::PeerLane;
use crate::peer::handler::{FormCluster, HelloRequest, JoinCluster, PeerHandler};
use crate::peer::hub::Hub;
use crate::peer::limits::{
    ACCEPTED_KEEPALIVE_INTERVAL, CLOSE_WAIT_MAX, CONNECTION_WINDOW_BYTES, FRAME_BYTES,
    HANDSHAKE_WAIT_MAX, KEEPALIVE_WAIT_MAX, MESSAGE_BYTES_MAX, REFUSAL_BYTES_MAX,
    STREAM_WINDOW_BYTES, STREAMS_PER_CONNECTION_MAX, WINDOW_BYTES,
};
use crate::peer::tls::{CallerIdentity, CallerRule};
use crate::peer::wire;
use crate::protocol::ProtocolVersions;

/// Serves peers on `incoming` until `stop` is cancelled or the hub is closed.
/// Closes connections that are still open [`CLOSE_WAIT_MAX`] later.
pub(in crate::peer) async fn serve_incoming<I, C>(
    hub: Arc<Hub>,
    incoming: I,
    callers: CallerRule,
    stop: CancellationToken,
) -> Result<(), tonic::transport::Error>
where
    I: Stream<Item = io::Result<C>>,
    C: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    let ending = stop.child_token();
    let _ended = ending.clone().drop_guard();
    let closed = hub.table.closed.clone();
    let refusals = hub.clone();
    // A certificate of another cluster is refused by its connection alone: before the body of the
    // request, which names the node, takes memory.
    let check = move |request: Request<()>| -> Result<Request<()>, Status> {
        callers.check_cluster(request.extensions().get()).map_err(|why| {
            refusals.log_refusal(0, &why);
            refused(why)
        })?;
        Ok(request)
    };
    let service = PeerServiceServer::new(Service { hub, callers, ending: ending.clone() })
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let serving = Server::builder()
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .max_concurrent_streams(STREAMS_PER_CONNECTION_MAX)
        .http2_keepalive_interval(Some(ACCEPTED_KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_WAIT_MAX))
        .add_service(InterceptedService::new(RequestLayer(service), check))
        .serve_with_incoming_shutdown(incoming, ending.clone().cancelled_owned());
    let deadline = async {
        tokio::select! {
            () = closed.cancelled() => ending.cancel(),
            () = ending.cancelled() => {}
        }
        sleep(CLOSE_WAIT_MAX).await;
    };
    tokio::select! {
        served = serving => served,
        () = deadline => Ok(()),
    }
}

const CLUSTER_ID_BYTES: &str = "the cluster id does not have 16 bytes";

struct Service {
    hub: Arc<Hub>,
    callers: CallerRule,
    /// Ends every stream and call.
    ending: CancellationToken,
}

/// Returns the status of a refusal, which the caller's operator reads.
fn refused(why: impl Into<String>) -> Status {
    let mut why = why.into();
    if why.len() > REFUSAL_BYTES_MAX {
        let end = (0..=REFUSAL_BYTES_MAX).rev().find(|at| why.is_char_boundary(*at));
        why.truncate(end.unwrap_or(0));
    }
    Status::failed_precondition(why)
}

impl Service {
    /// Checks a handshake and returns the response to it.
    fn check(&self, opening: &pb::Opening) -> Result<(PeerLane, pb::Opened), String> {
        let us = self.hub.table.local.node_id;
        let pb::Opening { version_min, version_max, from_node, to_node, .. } = *opening;
        let theirs = ProtocolVersions { oldest: version_min, newest: version_max };
        let version = self.hub.table.local.agree(from_node, theirs)?;
        self.check_target(to_node)?;
        let theirs = wire::read_cluster(&opening.cluster);
        let Some(cluster) = self.hub.table.local.cluster() else {
            self.hub.record_caller(theirs.map(|cluster| (from_node, cluster)));
            return Err(format!("node {us} {}", wire::IN_NO_CLUSTER));
        };
        match theirs {
            Some(theirs) if theirs == cluster => {}
            Some(theirs) => {
                return Err(format!(
                    "node {us} is in cluster {cluster:032x}, node {from_node} in {theirs:032x}"
                ));
            }
            None => return Err(CLUSTER_ID_BYTES.to_owned()),
        }
        self.check_member(from_node, opening.generation)?;
        let lane = PeerLane::from_wire(opening.lane);
        let lane = lane.ok_or_else(|| format!("unknown lane {}", opening.lane))?;
        let opened = pb::Opened {
            version,
            cluster: wire::cluster_bytes(cluster),
            node: us,
            window_bytes: WINDOW_BYTES,
            election_timeout_ms: self.hub.table.local.timing.timeout_ms(),
        };
        Ok((lane, opened))
    }

    fn check_target(&self, to_node: u64) -> Result<(), String> {
        let us = self.hub.table.local.node_id;
        if to_node != us {
            return Err(format!("this is node {us}, not node {to_node}"));
        }
        Ok(())
    }

    /// Refuses a node that was removed from the cluster.
    /// Admits an unknown node with the right cluster id: it may be a member that this node does not
    /// know yet.
    fn check_member(&self, from_node: u64, generation: u32) -> Result<(), String> {
        if from_node == 0 || from_node == self.hub.table.local.node_id {
            return Err(format!(
                "the caller says that it is node {from_node}; give it a node id of its own"
            ));
        }
        let refusal = self.hub.handler().and_then(|handler| handler.refusal(from_node, generation));
        refusal.map_or(Ok(()), Err)
    }

    /// Refuses a caller whose certificate is for another node or another cluster.
    fn check_caller(&self, caller: Option<&CallerIdentity>, from_node: u64) -> Result<(), Status> {
        self.callers.check(caller, from_node).map_err(|why| self.refuse(from_node, why))
    }

    fn refuse(&self, from: u64, why: String) -> Status {
        self.hub.log_refusal(from, &why);
        refused(why)
    }

    /// Returns the handler for a caller that addresses this node.
    fn handler_for(&self, from_node: u64, to_node: u64) -> Result<Arc<dyn PeerHandler>, Status> {
        self.check_target(to_node).map_err(|why| self.refuse(from_node, why))?;
        self.hub.handler().ok_or_else(closing)
    }

    /// Returns the handler for a peer that addresses this node.
    fn handler_for_peer(
        &self,
        from_node: u64,
        to_node: u64,
    ) -> Result<Arc<dyn PeerHandler>, Status> {
        let handler = self.handler_for(from_node, to_node)?;
        let us = self.hub.table.local.node_id;
        let why = match handler.refusal(from_node, 0) {
            None if self.hub.table.peer(from_node).is_some() => return Ok(handler),
            None => format!("node {from_node} is not one of the peers of node {us}"),
            Some(refusal) => refusal,
        };
        Err(self.refuse(from_node, why))
    }

    /// Runs a call until it completes or the server ends.
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
        let caller = request.extensions().get::<CallerIdentity>().cloned();
        let mut requests = helix_transport::read_messages(&request, MESSAGE_BYTES_MAX);
        let first = timeout(HANDSHAKE_WAIT_MAX, requests.message())
            .await
            .map_err(|_| Status::deadline_exceeded("the handshake did not arrive in time"))??;
        let Some(Message::Opening(opening)) = first.and_then(|first| first.message) else {
            return Err(Status::invalid_argument("the first message is not a handshake"));
        };
        let from = opening.from_node;
        self.check_caller(caller.as_ref(), from)?;
        let (lane, opened) = self.check(&opening).map_err(|why| self.refuse(from, why))?;
        if let Some(peer) = self.hub.table.peer(from) {
            peer.retry_now();
        }
        let stop = self.hub.admit(from, lane, &self.ending).cancelled_owned();
        let hub = Arc::clone(&self.hub);
        Ok(Response::new(Box::pin(InboundStream::new(hub, (from, lane), requests, opened, stop))))
    }

    async fn hello(
        &self,
        request: Request<pb::HelloRequest>,
    ) -> Result<Response<pb::HelloResponse>, Status> {
        let from_node = request.get_ref().from_node;
        self.check_caller(request.extensions().get(), from_node)?;
        let pb::HelloRequest { to_node, cluster, generation, .. } = request.into_inner();
        let identity = wire::read_cluster(&cluster).map(|cluster| (cluster, generation));
        let request = HelloRequest { node_id: from_node, identity };
        let hello = self.handler_for(from_node, to_node)?.hello(request);
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
            wall_time_us: hello.wall_time_us,
        }))
    }

    async fn form(
        &self,
        request: Request<pb::FormRequest>,
    ) -> Result<Response<pb::FormResponse>, Status> {
        self.check_caller(request.extensions().get(), request.get_ref().from_node)?;
        let request = request.into_inner();
        let handler = self.handler_for_peer(request.from_node, request.to_node)?;
        let cluster =
            wire::read_cluster(&request.cluster).ok_or_else(|| refused(CLUSTER_ID_BYTES))?;
        let form = FormCluster {
            cluster,
            cluster_name: request.cluster_name,
            members: request.members,
            shards: request.shards,
        };
        let forming = async { handler.form(form).await.map(|()| pb::FormResponse {}) };
        self.unless_ending(forming).await
    }

    async fn join(
        &self,
        request: Request<pb::JoinRequest>,
    ) -> Result<Response<pb::JoinResponse>, Status> {
        self.check_caller(request.extensions().get(), request.get_ref().from_node)?;
        let request = request.into_inner();
        let handler = self.handler_for(request.from_node, request.to_node)?;
        let cluster =
            wire::read_cluster(&request.cluster).ok_or_else(|| refused(CLUSTER_ID_BYTES))?;
        let peer_addrs = request.neighbours.into_iter();
        let join = JoinCluster {
            cluster,
            generation: request.generation,
            shards: request.shards,
            peer_addrs: peer_addrs.map(|it| (it.node_id, it.address)).collect(),
        };
        let joining = async { handler.join(join).await.map(|()| pb::JoinResponse {}) };
        self.unless_ending(joining).await
    }

    async fn call(
        &self,
        request: Request<pb::CallRequest>,
    ) -> Result<Response<pb::CallResponse>, Status> {
        self.check_caller(request.extensions().get(), request.get_ref().from_node)?;
        let pb::CallRequest { from_node, to_node, request } = request.into_inner();
        let handler = self.handler_for_peer(from_node, to_node)?;
        let calling = async {
            let response = handler.call(from_node, request).await?;
            Ok(pb::CallResponse { response })
        };
        self.unless_ending(calling).await
    }
}
