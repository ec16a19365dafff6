//! Replaces a leader whose process is gone: when its connections have ended and new ones are
//! refused, its followers ask for votes at the end of their promise, in the order of their ranks.
//!
//! A refused connection is no proof that the leader is gone, so the promise is kept: pre-vote asks
//! nothing before it ends, here and on the voters. openraft's own random timer remains for leaders
//! that are silent without a refusal, and for elections that fail.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use helix_wal::Wal;
use openraft::alias::WatchReceiverOf;
use openraft::async_runtime::WatchReceiver;
use openraft::metrics::RaftServerMetrics;
use openraft::{Raft, RaftState};
use openraft_rt::Instant as _;
use openraft_rt_tokio::TokioInstant;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::handler::PeerHandler;
use super::snapshot::fetcher::RecordFetcher;
use super::table::PeerTable;
use crate::raft::{
    DiskReads, ElectionRank, RepairGuard, ReplicaId, StateMachine, TypeConfig, node_of,
};

/// After this many election timeouts the random timer is left to find a leader.
const CAMPAIGN_TIMEOUTS: u32 = 2;

/// A local replica that may take over from a leader that is gone.
pub(super) struct FailoverWatch {
    pub(super) table: Arc<PeerTable>,
    pub(super) shard_id: u64,
    pub(super) replica_id: ReplicaId,
    pub(super) raft: Raft<TypeConfig, StateMachine>,
    pub(super) wal: Wal,
    pub(super) reads: DiskReads,
    pub(super) fetcher: Option<Arc<RecordFetcher>>,
    pub(super) repair_guard: Arc<RepairGuard>,
    pub(super) handler: Option<Arc<dyn PeerHandler>>,
    /// A candidate with a shorter log has asked for this replica's vote.
    pub(super) outranked: Arc<Notify>,
}

/// The promise of a follower, and its leader.
struct Promise {
    leader: ReplicaId,
    term: u64,
    /// Time since the leader was last heard from.
    age: Duration,
    voters: BTreeSet<ReplicaId>,
    /// The log has everything that the leader said is committed.
    has_committed: bool,
}

type ServerMetrics = WatchReceiverOf<TypeConfig, RaftServerMetrics<TypeConfig>>;

/// Events that end a wait early.
struct Changes {
    peers: watch::Receiver<u64>,
    metrics: ServerMetrics,
}

impl Changes {
    /// Returns `false` once openraft has stopped.
    async fn next(&mut self) -> bool {
        tokio::select! {
            changed = self.peers.changed() => changed.is_ok(),
            changed = self.metrics.changed() => changed.is_ok(),
        }
    }
}

impl FailoverWatch {
    /// Runs until the replica is no longer served, or openraft has stopped.
    pub(super) async fn run(self, stopped: CancellationToken) {
        let changes =
            Changes { peers: self.table.local.watch_peers(), metrics: self.raft.server_metrics() };
        tokio::select! {
            () = self.watch(changes) => {}
            () = stopped.cancelled() => {}
        }
    }

    async fn watch(&self, mut changes: Changes) {
        loop {
            if let Some(leader) = self.lost_leader(&changes.metrics) {
                self.campaign(leader, &mut changes).await;
            }
            if !changes.next().await {
                return;
            }
        }
    }

    /// Returns the leader that this replica follows, with its term, if its process is gone.
    fn lost_leader(&self, metrics: &ServerMetrics) -> Option<(ReplicaId, u64)> {
        let vote = metrics.borrow_watched().vote;
        let leader = vote.leader_id.voted_for;
        let is_lost = vote.committed
            && leader != self.replica_id
            && self.repair_guard.is_open()
            && self.table.peer(node_of(leader)).is_some_and(|peer| peer.is_gone());
        is_lost.then_some((leader, vote.leader_id.term))
    }

    /// Asks for votes when it is this replica's turn, until something else is known.
    async fn campaign(&self, lost: (ReplicaId, u64), changes: &mut Changes) {
        let timing = &self.table.local.timing;
        let gone_since = Instant::now();
        let mut round = 0;
        loop {
            let Some(promise) = self.promise().await else { return };
            if (promise.leader, promise.term) != lost
                || self.lost_leader(&changes.metrics) != Some(lost)
            {
                return;
            }
            let is_fit = self.is_fit(&promise);
            let (shard_id, own) = (self.shard_id, self.replica_id);
            let rank = ElectionRank::of(shard_id, &promise.voters, promise.leader, own, is_fit);
            let Some(rank) = rank else { return };
            // Counted from the end of the promise, or from the refusal if that came later.
            let ended = promise.age.checked_sub(timing.promise_to_gone());
            let elapsed = ended.map(|ended| ended.min(gone_since.elapsed()));
            let due = rank.due(round, timing);
            if due > timing.timeout() * CAMPAIGN_TIMEOUTS {
                return;
            }
            let wait = match elapsed {
                Some(elapsed) => due.saturating_sub(elapsed),
                None => due + timing.promise_to_gone().saturating_sub(promise.age),
            };
            if !wait.is_zero() {
                let is_outranked = tokio::select! {
                    () = sleep(wait) => false,
                    () = self.outranked.notified() => ended.is_some(),
                    is_running = changes.next() => {
                        if !is_running {
                            return;
                        }
                        false
                    }
                };
                if !is_outranked {
                    continue;
                }
            } else {
                round += 1;
            }
            tracing::info!(
                shard_id,
                leader = node_of(promise.leader),
                silent = ?promise.age,
                ?rank,
                "leader is gone, asking for votes"
            );
            if self.raft.trigger().elect(true).await.is_err() {
                return;
            }
        }
    }

    /// Returns whether this replica would make a good leader, as far as it knows.
    fn is_fit(&self, promise: &Promise) -> bool {
        let stalls_after = self.table.local.timing.stalled_after() / 2;
        promise.has_committed
            && self.wal.writable().is_ok()
            && self.wal.unsynced_for().is_none_or(|unsynced| unsynced < stalls_after)
            && self.reads.damage().is_empty()
            && self.fetcher.as_ref().is_none_or(|fetcher| fetcher.status().is_none())
            && self.handler.as_ref().is_none_or(|handler| handler.may_lead())
    }

    /// Returns the promise in force. `None` without one: this replica has heard from no leader
    /// since it was opened, or has voted for another candidate.
    async fn promise(&self) -> Option<Promise> {
        let read = |state: &RaftState<TypeConfig>| {
            let vote = state.vote_ref();
            let heard_at = state.vote_last_modified().filter(|_| vote.committed)?;
            let membership = &state.membership_state;
            let committed = membership.committed().voter_ids();
            Some(Promise {
                leader: vote.leader_id.voted_for,
                term: vote.leader_id.term,
                age: TokioInstant::now().saturating_duration_since(heard_at),
                voters: committed.chain(membership.effective().voter_ids()).collect(),
                has_committed: state.local_committed() >= state.cluster_committed(),
            })
        };
        self.raft.with_raft_state(read).await.ok().flatten()
    }
}
