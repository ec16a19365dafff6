//! Leadership of a replica: its leader, its lease, transfers, and linearizable reads.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use openraft::alias::WatchReceiverOf;
use openraft::async_runtime::WatchReceiver;
use openraft::errors::{LinearizableReadError, RaftError};
use openraft::metrics::RaftServerMetrics;
use openraft::{RaftState, ReadPolicy};
use openraft_rt::Instant as _;
use openraft_rt_tokio::TokioInstant;
use tokio::sync::watch;

use super::replica::{ProposeError, Replica};
use super::types::{ReplicaId, TypeConfig, node_of};
use crate::limits;
use crate::metrics::Counter;

/// The leader of a shard, as far as this replica knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ShardLeadership {
    pub leader: Option<ReplicaId>,
    pub term: u64,
}

/// Notifies of changes of the leader.
pub struct LeadershipWatch(WatchReceiverOf<TypeConfig, RaftServerMetrics<TypeConfig>>);

impl LeadershipWatch {
    /// Waits for a change since the last call; `false` when there will be no more changes.
    pub async fn changed(&mut self) -> bool {
        self.0.changed().await.is_ok()
    }

    /// Returns the current leader and the term.
    pub fn leadership(&self) -> ShardLeadership {
        let metrics = self.0.borrow_watched();
        ShardLeadership { leader: metrics.current_leader, term: metrics.vote.leader_id.term }
    }
}

/// A replica's own view of its role and of its log's end, from openraft's current state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ElectionState {
    pub role: ReplicaRole,
    /// Index of the last log entry.
    pub last_index: u64,
}

/// A replica's term, role and voters, from openraft's current state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaRole {
    /// Term of the replica's vote.
    pub term: u64,
    pub is_leader: bool,
    /// Voters of the committed membership and of the effective one, which may not be committed.
    pub voters: BTreeSet<ReplicaId>,
    /// True if the effective membership is committed and has a single set of voters.
    pub is_settled: bool,
}

/// Reason why leadership was not transferred, or may not have been.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    #[error("no matching voter can be reached")]
    NoTarget,
    /// This replica is still the leader.
    #[error("open appends did not settle within {:?}; retry", limits::SETTLE_WAIT_MAX)]
    Unsettled,
    #[error("{0}")]
    Unknown(String),
}

impl Replica {
    /// Returns the current leader and this replica's term.
    pub fn leadership(&self) -> ShardLeadership {
        let metrics = self.raft.server_metrics();
        let metrics = metrics.borrow_watched();
        // Once openraft has stopped, its last metrics are stale.
        let leader = metrics.current_leader.filter(|_| self.stopped.borrow().is_none());
        ShardLeadership { leader, term: metrics.vote.leader_id.term }
    }

    /// Watches changes of [`Self::leadership`].
    pub fn watch_leadership(&self) -> LeadershipWatch {
        LeadershipWatch(self.raft.server_metrics())
    }

    /// Returns whether this replica is the leader, as far as it knows.
    pub fn is_leader(&self) -> bool {
        self.leadership().leader == Some(self.id)
    }

    /// Returns the leader that a majority elected and its term, while this replica follows one.
    pub fn follows(&self) -> Option<(ReplicaId, u64)> {
        let metrics = self.raft.server_metrics();
        let vote = metrics.borrow_watched().vote;
        vote.committed.then_some((vote.leader_id.voted_for, vote.leader_id.term))
    }

    /// Returns the number of leader changes that this replica has seen.
    pub fn leader_changes(&self) -> u64 {
        self.leader_changes.get()
    }

    /// Returns the time since a majority last confirmed this replica as the leader.
    /// `None` where it is not the leader or has not been confirmed yet.
    pub fn confirmed_ago(&self) -> Option<Duration> {
        let data = self.raft.data_metrics();
        let data = data.borrow_watched();
        data.last_quorum_acked
            .map(|at| TokioInstant::now().saturating_duration_since(at.into_inner()))
    }

    /// Returns whether this replica holds the leader lease.
    ///
    /// A majority has confirmed it so recently that no other leader can be elected yet, unless
    /// clocks drift too far: followers that confirmed it do not vote for an election timeout.
    /// A replica that has asked another one to take over has no lease, since then they do vote.
    pub fn is_confirmed(&self) -> bool {
        // Read first, so that the leadership read below is not older.
        let ago = self.confirmed_ago();
        let metrics = self.raft.server_metrics();
        let metrics = metrics.borrow_watched();
        if self.transferred_in.load(Ordering::Relaxed) == metrics.vote.leader_id.term {
            return false;
        }
        let voters = metrics.membership_config.membership().get_joint_config();
        let is_alone =
            matches!(voters.as_slice(), [only] if only.len() == 1 && only.contains(&self.id));
        is_alone || ago.is_some_and(|ago| ago < self.timing.read_lease())
    }

    /// Returns whether this replica is the leader and has applied the first entry of its own term.
    /// It has then applied everything that any earlier leader may have acknowledged.
    pub fn is_ready(&self) -> bool {
        let leadership = self.leadership();
        leadership.leader == Some(self.id) && *self.applied_term.borrow() == leadership.term
    }

    /// Waits until [`Self::is_ready`].
    /// Returns `false` after `wait`, and at once where another replica is the leader.
    pub async fn wait_ready(&self, wait: Duration) -> bool {
        if self.is_ready() {
            return true;
        }
        let mut metrics = self.raft.server_metrics();
        let mut applied_term = self.applied_term.clone();
        let ready = async {
            while !self.is_ready() {
                if self.leadership().leader.is_some_and(|leader| leader != self.id) {
                    return false;
                }
                let changed = tokio::select! {
                    biased;
                    changed = metrics.changed() => changed.is_ok(),
                    changed = applied_term.changed() => changed.is_ok(),
                };
                if !changed {
                    return false;
                }
            }
            true
        };
        tokio::time::timeout(wait, ready).await.unwrap_or(false)
    }

    /// Waits until everything that was committed anywhere before the call is applied here.
    ///
    /// # Errors
    /// [`ProposeError::NotLeader`] where no majority confirms this leader, and
    /// [`ProposeError::Stopped`] once openraft has stopped.
    pub async fn read_index(&self) -> Result<(), ProposeError> {
        let linearizer = self.raft.get_read_linearizer(ReadPolicy::ReadIndex).await;
        let linearizer = linearizer.map_err(|error| match error {
            RaftError::APIError(LinearizableReadError::ForwardToLeader(forward)) => {
                ProposeError::NotLeader { leader: forward.leader_id }
            }
            // No majority confirms this leader: another one may have been elected.
            RaftError::APIError(LinearizableReadError::QuorumNotEnough(_)) => {
                ProposeError::NotLeader { leader: None }
            }
            other => ProposeError::Stopped(other.to_string()),
        })?;
        linearizer
            .await_ready(&self.raft)
            .await
            .map(drop)
            .map_err(|fatal| ProposeError::Stopped(fatal.to_string()))
    }

    /// Starts an election at once. A single voter need not wait out its election timeout.
    ///
    /// # Errors
    /// Fails once openraft has stopped.
    pub async fn elect(&self) -> std::io::Result<()> {
        self.raft.trigger().elect(false).await.map_err(std::io::Error::other)
    }

    /// Transfers leadership to the replica on `node`, and waits until the new leader has committed
    /// an entry of its term, as far as this replica has applied it.
    ///
    /// Without `node` it goes to the most caught-up voter on a node in `reached`. Proposals are
    /// refused from now on until the other replica leads, or has been silent for an election
    /// timeout. Earlier ones get their outcome before the transfer, so that none ends as unknown.
    ///
    /// # Errors
    /// [`TransferError::NoTarget`] where no voter can take over, [`TransferError::Unsettled`] where
    /// a proposal is not applied, or not on the other replica, within
    /// [`limits::SETTLE_WAIT_MAX`], and [`TransferError::Unknown`] where the other replica did not
    /// take over in time.
    pub async fn transfer_leadership(
        &self,
        node: Option<u64>,
        reached: &[u64],
    ) -> Result<(), TransferError> {
        self.transfer(node, reached, false).await
    }

    /// Transfers leadership as [`Self::transfer_leadership`] does, also where proposals do not
    /// settle in time: for a replica that is about to stop, or whose disk stalls.
    ///
    /// # Errors
    /// [`TransferError::NoTarget`] and [`TransferError::Unknown`].
    pub async fn abandon_leadership(
        &self,
        node: Option<u64>,
        reached: &[u64],
    ) -> Result<(), TransferError> {
        self.transfer(node, reached, true).await
    }

    async fn transfer(
        &self,
        node: Option<u64>,
        reached: &[u64],
        even_unsettled: bool,
    ) -> Result<(), TransferError> {
        let voters = self.voters();
        let to = match node {
            Some(node) => voters.into_iter().find(|id| node_of(*id) == node),
            None => {
                let matched = self.matched().into_iter();
                let live = matched
                    .filter(|(id, _)| voters.contains(id) && reached.contains(&node_of(*id)));
                live.max_by_key(|(_, index)| *index).map(|(id, _)| id)
            }
        };
        let to = to.ok_or(TransferError::NoTarget)?;
        if to == self.id {
            return Ok(());
        }
        let closed = self.gate.close();
        let settling = async {
            closed.settled().await;
            self.wait_matched(to).await;
        };
        let settled = tokio::time::timeout(limits::SETTLE_WAIT_MAX, settling).await;
        if settled.is_err() && !even_unsettled {
            return Err(TransferError::Unsettled);
        }
        let (mut leadership, term) = (self.watch_leadership(), self.leadership().term);
        let mut applied_term = self.applied_term.clone();
        // Stored before the request, and kept for the rest of the term: see `is_confirmed`.
        self.transferred_in.store(term, Ordering::Relaxed);
        let transfer = self.raft.trigger().transfer_leader(to).await;
        transfer.map_err(|fatal| TransferError::Unknown(fatal.to_string()))?;
        // Another leader may have returned it meanwhile, in a later term.
        let still_leads = || self.leadership() == ShardLeadership { leader: Some(self.id), term };
        let taken_over = async {
            while still_leads() && leadership.changed().await {}
            // Ignored: the sender is dropped only with openraft, and then the wait ends too.
            let _ = applied_term.wait_for(|of| *of > term).await;
        };
        let in_time = tokio::time::timeout(limits::TRANSFER_WAIT_MAX, taken_over).await.is_ok();
        let node = node_of(to);
        if in_time {
            return Ok(());
        }
        Err(TransferError::Unknown(if still_leads() {
            format!("node {node} did not take over in time")
        } else {
            format!("node {node} was asked to take over, but has committed nothing yet")
        }))
    }

    /// Waits until another replica has this leader's whole log, or this one is not the leader.
    async fn wait_matched(&self, other: ReplicaId) {
        let last_index = self.wal.state().last.map_or(0, |id| id.index);
        let mut data = self.raft.data_metrics();
        while self.is_leader()
            && self.matched().get(&other).is_none_or(|matched| *matched < last_index)
        {
            if data.changed().await.is_err() {
                return;
            }
        }
    }

    /// Returns openraft's current state rather than its last published metrics.
    /// `None` once openraft has stopped, or while its role changes.
    pub async fn election_state(&self) -> Option<ElectionState> {
        let role = self.role().await?;
        let last_index = self.wal.state().last.map_or(0, |id| id.index);
        // Read again: the last index of a leader counts only if it was the leader throughout.
        let is_same = self.role().await? == role;
        is_same.then_some(ElectionState { role, last_index })
    }

    async fn role(&self) -> Option<ReplicaRole> {
        let id = self.id;
        let role = move |state: &RaftState<TypeConfig>| {
            let vote = state.vote_ref();
            let committed = state.membership_state.committed();
            let in_force = state.membership_state.effective();
            ReplicaRole {
                term: vote.leader_id.term,
                is_leader: vote.committed && vote.leader_id.voted_for == id,
                voters: committed.voter_ids().chain(in_force.voter_ids()).collect(),
                is_settled: in_force.log_id() == committed.log_id()
                    && in_force.membership().get_joint_config().len() == 1,
            }
        };
        self.raft.with_raft_state(role).await.ok()
    }
}

/// Counts leader changes until openraft stops, also by a panic; then publishes the reason.
pub(super) async fn watch_metrics(
    mut server: WatchReceiverOf<TypeConfig, RaftServerMetrics<TypeConfig>>,
    all: WatchReceiverOf<TypeConfig, openraft::RaftMetrics<TypeConfig>>,
    leader_changes: Arc<Counter>,
    stopped: watch::Sender<Option<String>>,
) {
    let mut last_leader = None;
    loop {
        {
            let metrics = server.borrow_watched();
            if let Some(leader) = metrics.current_leader {
                let now = (metrics.vote.leader_id.term, leader);
                if last_leader.replace(now).is_some_and(|before| before != now) {
                    leader_changes.add(1);
                }
            }
        }
        if server.changed().await.is_err() {
            break;
        }
    }
    let failure = all.borrow_watched().running_state.as_ref().err().map(ToString::to_string);
    stopped.send_replace(Some(failure.unwrap_or_else(|| "it panicked".to_owned())));
}
