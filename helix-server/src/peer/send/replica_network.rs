//! openraft's network: creates a [`ReplicaRoute`] to each replica of a shard, and implements
//! openraft's calls on it. Appends and snapshots have modules of their own.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt, stream};
use helix_proto::raft::v1 as pb;
use helix_wal::Wal;
use openraft::alias::{SnapshotOf, VoteOf};
use openraft::base::{BoxFuture, BoxStream};
use openraft::errors::{ReplicationClosed, StreamingError};
use openraft::network::{
    Backoff, NetBackoff, NetSnapshot, NetStreamAppend, NetTransferLeader, NetVote, RPCOption,
    RaftNetworkFactory,
};
use openraft::raft::{
    SnapshotResponse, TransferLeaderRequest, TransferLeaderResponse, VoteRequest, VoteResponse,
};
use pb::answer::Result as UnaryResult;
use pb::question::Question as UnaryRequest;

use super::appends::AppendSender;
use super::route::{ReplicaRoute, received, unexpected};
use crate::peer::connection::session::PendingResponse;
use crate::peer::limits::BACKOFF_MS;
use crate::peer::table::PeerTable;
use crate::peer::wire::{self, AppendRequest, AppendResult, RpcError};
use crate::raft::{ReplicaId, SnapshotData, TypeConfig};

/// openraft's network factory for one local replica.
pub struct ReplicaNetwork {
    table: Arc<PeerTable>,
    shard_id: u64,
    replica_id: ReplicaId,
    wal: Wal,
}

impl ReplicaNetwork {
    pub(in crate::peer) fn new(
        table: Arc<PeerTable>,
        shard_id: u64,
        replica_id: ReplicaId,
        wal: Wal,
    ) -> Self {
        Self { table, shard_id, replica_id, wal }
    }

    fn route(&self, target: ReplicaId, is_heartbeat: bool) -> ReplicaRoute {
        ReplicaRoute {
            table: Arc::clone(&self.table),
            shard_id: self.shard_id,
            source: self.replica_id,
            target,
            wal: self.wal.clone(),
            is_heartbeat,
        }
    }
}

impl fmt::Debug for ReplicaNetwork {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = formatter.debug_struct("ReplicaNetwork");
        debug.field("shard_id", &self.shard_id).field("replica_id", &self.replica_id);
        debug.finish_non_exhaustive()
    }
}

impl RaftNetworkFactory<TypeConfig> for ReplicaNetwork {
    type Network = ReplicaRoute;

    async fn new_client(&mut self, target: ReplicaId, _node: &()) -> ReplicaRoute {
        self.route(target, false)
    }

    async fn new_heartbeat_client(&mut self, target: ReplicaId, _node: &()) -> ReplicaRoute {
        self.route(target, true)
    }
}

impl ReplicaRoute {
    async fn request_vote(
        &self,
        request: UnaryRequest,
    ) -> Result<VoteResponse<TypeConfig>, RpcError> {
        match received(self.request(request)?.await)? {
            UnaryResult::Vote(response) => {
                wire::read_vote_response(response).map_err(wire::network)
            }
            other => Err(unexpected(&other)),
        }
    }
}

async fn heartbeat_result(pending: PendingResponse) -> Result<AppendResult, RpcError> {
    let result = match received(pending.await)? {
        UnaryResult::Matched(matched) => wire::read_matched(matched),
        UnaryResult::Conflict(id) => wire::read_conflict(id),
        UnaryResult::HigherVote(vote) => wire::read_higher_vote(vote),
        other => return Err(unexpected(&other)),
    };
    result.map_err(wire::network)
}

type Results<'s> = BoxStream<'s, Result<AppendResult, RpcError>>;

impl NetStreamAppend<TypeConfig> for ReplicaRoute {
    /// Ignores the TTL of `_option`: keepalive detects a stalled connection.
    fn stream_append<'s, S>(
        &'s mut self,
        mut input: S,
        _option: RPCOption,
    ) -> BoxFuture<'s, Result<Results<'s>, RpcError>>
    where
        S: Stream<Item = AppendRequest> + Send + Unpin + 'static,
    {
        if !self.is_heartbeat {
            let results: Results<'s> = Box::pin(AppendSender::new(self.clone(), input));
            return Box::pin(std::future::ready(Ok(results)));
        }
        Box::pin(async move {
            let Some(request) = input.next().await else {
                return Ok(Box::pin(stream::empty()) as Results<'s>);
            };
            let pending = self.request(UnaryRequest::Beat(wire::append_entries(&request)))?;
            Ok(Box::pin(stream::once(heartbeat_result(pending))) as Results<'s>)
        })
    }
}

impl NetVote<TypeConfig> for ReplicaRoute {
    async fn vote(
        &mut self,
        request: VoteRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RpcError> {
        self.request_vote(UnaryRequest::Vote(wire::vote_request(&request))).await
    }

    async fn pre_vote(
        &mut self,
        request: VoteRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RpcError> {
        self.request_vote(UnaryRequest::PreVote(wire::vote_request(&request))).await
    }
}

impl NetTransferLeader<TypeConfig> for ReplicaRoute {
    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<TransferLeaderResponse<TypeConfig>, RpcError> {
        let message = UnaryRequest::Transfer(wire::transfer_request(&request));
        match received(self.request(message)?.await)? {
            UnaryResult::Transfer(response) => {
                wire::read_transfer_response(response, &request).map_err(wire::network)
            }
            other => Err(unexpected(&other)),
        }
    }
}

impl NetSnapshot<TypeConfig> for ReplicaRoute {
    type SnapshotData = SnapshotData;

    async fn full_snapshot(
        &mut self,
        vote: VoteOf<TypeConfig>,
        snapshot: SnapshotOf<TypeConfig, SnapshotData>,
        cancel: impl Future<Output = ReplicationClosed> + Send + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        tokio::select! {
            sent = super::snapshot::send(self, vote, snapshot) => Ok(sent?),
            closed = cancel => Err(StreamingError::Closed(closed)),
        }
    }
}

impl NetBackoff<TypeConfig> for ReplicaRoute {
    fn backoff(&self) -> Option<Backoff> {
        let [first @ .., last] = BACKOFF_MS;
        let pauses = first.into_iter().chain(std::iter::repeat(last));
        Some(Backoff::new(pauses.map(Duration::from_millis)))
    }
}
