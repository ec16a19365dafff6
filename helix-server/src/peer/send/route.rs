//! The route from a local replica to one remote replica of its shard.

use std::fmt;
use std::sync::Arc;

use helix_proto::raft::v1 as pb;
use helix_wal::Wal;
use pb::answer::Result as UnaryResult;
use pb::exchange_request::Message;
use pb::question::Question as UnaryRequest;

use crate::peer::connection::lane::PeerLane;
use crate::peer::connection::session::{PeerSession, PendingResponse};
use crate::peer::table::PeerTable;
use crate::peer::wire::{self, RpcError};
use crate::raft::{ReplicaId, node_of};

/// Sends messages of one replica to another one of the same shard. openraft's network client.
#[derive(Clone)]
pub struct ReplicaRoute {
    pub(super) table: Arc<PeerTable>,
    pub(super) shard_id: u64,
    pub(super) source: ReplicaId,
    pub(super) target: ReplicaId,
    pub(super) wal: Wal,
    /// `true` if appends are heartbeats: one at a time, over the control lane.
    pub(super) is_heartbeat: bool,
}

impl fmt::Debug for ReplicaRoute {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = formatter.debug_struct("ReplicaRoute");
        debug.field("shard_id", &self.shard_id).field("source", &self.source);
        debug.field("target", &self.target).finish_non_exhaustive()
    }
}

impl ReplicaRoute {
    /// Returns the open stream of a lane to the target's node.
    pub(super) fn session(&self, lane: PeerLane) -> Result<Arc<PeerSession>, RpcError> {
        // Looked up each time: peers are added, removed, and change their address.
        let node = node_of(self.target);
        let peer = self
            .table
            .peer(node)
            .ok_or_else(|| wire::unreachable(format!("node {node} is not one of the peers")))?;
        peer.session(lane).map_err(wire::unreachable)
    }

    pub(super) fn to_wire(&self, id: u64) -> pb::Route {
        pb::Route {
            shard_id: self.shard_id,
            source_replica: self.source,
            target_replica: self.target,
            id,
        }
    }

    /// Sends a unary request over the control lane.
    pub(super) fn request(&self, request: UnaryRequest) -> Result<PendingResponse, RpcError> {
        let session = self.session(PeerLane::Control)?;
        let id = self.table.local.next_id();
        let pending = session.expect_response(id).map_err(wire::unreachable)?;
        let route = Some(self.to_wire(pending.id()));
        let message = pb::Question { route, question: Some(request) };
        session.send(Message::Question(message)).map_err(wire::unreachable)?;
        Ok(pending)
    }
}

/// Converts a lost response and a failure of the peer to openraft's errors.
pub(super) fn received<E: ToString>(
    received: Result<UnaryResult, E>,
) -> Result<UnaryResult, RpcError> {
    match received {
        Ok(UnaryResult::Failure(failure)) => Err(wire::failed(failure)),
        Ok(result) => Ok(result),
        Err(lost) => Err(wire::network(lost)),
    }
}

pub(super) fn unexpected(result: &UnaryResult) -> RpcError {
    wire::network(format!("unexpected kind of response: {result:?}"))
}
