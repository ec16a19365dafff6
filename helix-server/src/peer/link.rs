//! openraft's network: makes a [`Route`] to each replica of a shard, and asks over the control
//! lane what has one answer. Knows nothing of connections but whether there is one.

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
use pb::answer::Result as Answer;
use pb::exchange_request::Message;
use pb::question::Question;

use super::append::Outbound;
use super::connection::Lane;
use super::hub::Roster;
use super::limits::BACKOFF_MS;
use super::session::{Expected, Session};
use super::wire::{self, AppendRequest, AppendResult, RpcError};
use crate::raft::{ReplicaId, SnapshotData, TypeConfig};

/// The network of one replica.
pub struct Link {
    roster: Arc<Roster>,
    shard_id: u64,
    replica_id: ReplicaId,
    wal: Wal,
}

impl Link {
    pub(super) fn new(roster: Arc<Roster>, shard_id: u64, replica_id: ReplicaId, wal: Wal) -> Self {
        Self { roster, shard_id, replica_id, wal }
    }

    fn route(&self, target: ReplicaId, beats: bool) -> Route {
        Route {
            roster: Arc::clone(&self.roster),
            shard_id: self.shard_id,
            source: self.replica_id,
            target,
            wal: self.wal.clone(),
            beats,
        }
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = formatter.debug_struct("Link");
        debug.field("shard_id", &self.shard_id).field("replica_id", &self.replica_id);
        debug.finish_non_exhaustive()
    }
}

impl RaftNetworkFactory<TypeConfig> for Link {
    type Network = Route;

    async fn new_client(&mut self, target: ReplicaId, _node: &()) -> Route {
        self.route(target, false)
    }

    async fn new_heartbeat_client(&mut self, target: ReplicaId, _node: &()) -> Route {
        self.route(target, true)
    }
}

/// The way from one replica to another one of its shard.
#[derive(Clone)]
pub struct Route {
    pub(super) roster: Arc<Roster>,
    pub(super) shard_id: u64,
    pub(super) source: ReplicaId,
    pub(super) target: ReplicaId,
    pub(super) wal: Wal,
    /// Whether appends are heartbeats, one at a time, which go over the control lane.
    beats: bool,
}

impl fmt::Debug for Route {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = formatter.debug_struct("Route");
        debug.field("shard_id", &self.shard_id).field("source", &self.source);
        debug.field("target", &self.target).finish_non_exhaustive()
    }
}

impl Route {
    /// The open stream of a lane.
    pub(super) fn session(&self, lane: Lane) -> Result<Arc<Session>, RpcError> {
        // Looked up each time: peers come, go and move.
        let node = self.target >> 32;
        let peer = self
            .roster
            .peer(node)
            .ok_or_else(|| wire::unreachable(format!("node {node} is not one of the peers")))?;
        peer.session(lane).map_err(wire::unreachable)
    }

    /// The route as messages carry it.
    pub(super) fn to_wire(&self, id: u64) -> pb::Route {
        pb::Route {
            shard_id: self.shard_id,
            source_replica: self.source,
            target_replica: self.target,
            id,
        }
    }

    /// Sends a question; its answer comes by itself.
    fn ask(&self, question: Question) -> Result<Expected, RpcError> {
        let session = self.session(Lane::Control)?;
        let expected = session.expect_answer(self.roster.next_id()).map_err(wire::unreachable)?;
        let route = Some(self.to_wire(expected.id()));
        let message = pb::Question { route, question: Some(question) };
        session.send(Message::Question(message)).map_err(wire::unreachable)?;
        Ok(expected)
    }

    async fn ask_for_vote(&self, question: Question) -> Result<VoteResponse<TypeConfig>, RpcError> {
        match answered(self.ask(question)?.await)? {
            Answer::Vote(response) => wire::read_vote_response(response).map_err(wire::network),
            other => Err(unfitting(&other)),
        }
    }

    fn beat(&self, request: &AppendRequest) -> Result<Expected, RpcError> {
        self.ask(Question::Beat(wire::append_entries(request)))
    }
}

/// An answer that the peer could give.
pub(super) fn answered<E: ToString>(received: Result<Answer, E>) -> Result<Answer, RpcError> {
    match received {
        Ok(Answer::Failure(failure)) => Err(wire::failed(failure)),
        Ok(answer) => Ok(answer),
        Err(lost) => Err(wire::network(lost)),
    }
}

pub(super) fn unfitting(answer: &Answer) -> RpcError {
    wire::network(format!("an answer to something else: {answer:?}"))
}

async fn beaten(expected: Expected) -> Result<AppendResult, RpcError> {
    let result = match answered(expected.await)? {
        Answer::Matched(matched) => wire::read_matched(matched),
        Answer::Conflict(id) => wire::read_conflict(id),
        Answer::HigherVote(vote) => wire::read_higher_vote(vote),
        other => return Err(unfitting(&other)),
    };
    result.map_err(wire::network)
}

type Results<'s> = BoxStream<'s, Result<AppendResult, RpcError>>;

impl NetStreamAppend<TypeConfig> for Route {
    /// The TTL is no deadline here: a connection that stalls is found out by its keepalive.
    fn stream_append<'s, S>(
        &'s mut self,
        mut input: S,
        _option: RPCOption,
    ) -> BoxFuture<'s, Result<Results<'s>, RpcError>>
    where
        S: Stream<Item = AppendRequest> + Send + Unpin + 'static,
    {
        if !self.beats {
            let results: Results<'s> = Box::pin(Outbound::new(self.clone(), input));
            return Box::pin(std::future::ready(Ok(results)));
        }
        Box::pin(async move {
            let Some(request) = input.next().await else {
                return Ok(Box::pin(stream::empty()) as Results<'s>);
            };
            let expected = self.beat(&request)?;
            Ok(Box::pin(stream::once(beaten(expected))) as Results<'s>)
        })
    }
}

impl NetVote<TypeConfig> for Route {
    async fn vote(
        &mut self,
        request: VoteRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RpcError> {
        self.ask_for_vote(Question::Vote(wire::vote_request(&request))).await
    }

    async fn pre_vote(
        &mut self,
        request: VoteRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RpcError> {
        self.ask_for_vote(Question::PreVote(wire::vote_request(&request))).await
    }
}

impl NetTransferLeader<TypeConfig> for Route {
    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<TransferLeaderResponse<TypeConfig>, RpcError> {
        let question = Question::Transfer(wire::transfer_request(&request));
        match answered(self.ask(question)?.await)? {
            Answer::Transfer(response) => {
                wire::read_transfer_response(response, &request).map_err(wire::network)
            }
            other => Err(unfitting(&other)),
        }
    }
}

impl NetSnapshot<TypeConfig> for Route {
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

impl NetBackoff<TypeConfig> for Route {
    fn backoff(&self) -> Option<Backoff> {
        let [first @ .., last] = BACKOFF_MS;
        let pauses = first.into_iter().chain(std::iter::repeat(last));
        Some(Backoff::new(pauses.map(Duration::from_millis)))
    }
}
