//! The network of a shard with a single voter: every other replica is unreachable.
//! openraft asks for a network even where it never sends anything.

use std::future::Future;

use openraft::AnyError;
use openraft::alias::{SnapshotOf, VoteOf};
use openraft::errors::{RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::{RPCOption, RaftNetworkFactory, RaftNetworkV2};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, VoteRequest, VoteResponse,
};

use crate::raft::{ReplicaId, SnapshotData, TypeConfig};

#[derive(Debug, Clone, Copy, Default)]
pub struct Solitary;

fn alone() -> Unreachable<TypeConfig> {
    Unreachable::new(&AnyError::error("this shard has a single voter"))
}

impl RaftNetworkFactory<TypeConfig> for Solitary {
    type Network = Self;

    async fn new_client(&mut self, _target: ReplicaId, _node: &()) -> Self {
        *self
    }
}

impl RaftNetworkV2<TypeConfig> for Solitary {
    type SnapshotData = SnapshotData;

    async fn append_entries(
        &mut self,
        _request: AppendEntriesRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<AppendEntriesResponse<TypeConfig>, RPCError<TypeConfig>> {
        Err(RPCError::Unreachable(alone()))
    }

    async fn vote(
        &mut self,
        _request: VoteRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        Err(RPCError::Unreachable(alone()))
    }

    async fn pre_vote(
        &mut self,
        _request: VoteRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        Err(RPCError::Unreachable(alone()))
    }

    async fn full_snapshot(
        &mut self,
        _vote: VoteOf<TypeConfig>,
        _snapshot: SnapshotOf<TypeConfig, SnapshotData>,
        _cancel: impl Future<Output = ReplicationClosed> + Send + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        Err(StreamingError::Unreachable(alone()))
    }
}
