//! Changing the replicas of a shard, which its leader does: learners come, catch up, and become
//! voters by joint consensus; voters go the same way.

use std::collections::BTreeSet;

use openraft::ChangeMembers;
use openraft::async_runtime::WatchReceiver;
use openraft::errors::{ClientWriteError, RaftError};

use super::Replica;
use super::types::{ReplicaId, TypeConfig};

/// The replicas of a shard as one of them knows them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Membership {
    /// Sets of voters, each of which needs a majority: one, or two while they change.
    pub configs: Vec<BTreeSet<ReplicaId>>,
    /// Replicas that do not vote.
    pub learners: BTreeSet<ReplicaId>,
    /// Nothing can take it back.
    pub is_committed: bool,
}

impl Membership {
    /// Whether these vote and nobody else is there, for good.
    pub fn is(&self, voters: &BTreeSet<ReplicaId>) -> bool {
        self.is_committed && self.learners.is_empty() && self.configs == [voters.clone()]
    }
}

type Failure = RaftError<TypeConfig, ClientWriteError<TypeConfig>>;

fn text(error: Failure) -> String {
    error.to_string()
}

impl Replica {
    /// The membership in force, which is the last one in the log.
    pub fn membership(&self) -> Membership {
        let raft = self.raft();
        let metrics = raft.server_metrics();
        let metrics = metrics.borrow_watched();
        let committed = metrics.committed_membership_config.log_id();
        let membership = metrics.membership_config.membership();
        Membership {
            configs: membership.get_joint_config().clone(),
            learners: membership.learner_ids().collect(),
            is_committed: metrics.membership_config.log_id() == committed,
        }
    }

    /// The voters of a shard that is formed, once openraft has said who they are: just after a
    /// start, or the forming, it has not yet.
    pub async fn known_voters(&self) -> Vec<ReplicaId> {
        let mut changes = self.watch_leadership();
        loop {
            let voters = self.voters();
            if !voters.is_empty() || !changes.changed().await {
                return voters;
            }
        }
    }

    /// Has a replica follow the log without a vote.
    ///
    /// # Errors
    /// As of every change here: why it was not made, or not yet, for people.
    pub async fn add_learner(&self, id: ReplicaId) -> Result<(), String> {
        self.raft().add_learner(id, (), false).await.map(drop).map_err(text)
    }

    /// Makes these replicas the voters. Those that vote no more are dropped.
    pub async fn set_voters(&self, ids: BTreeSet<ReplicaId>) -> Result<(), String> {
        let change = ChangeMembers::ReplaceAllVoters(ids);
        self.raft().change_membership(change, false).await.map(drop).map_err(text)
    }

    /// Finishes a change of voters that another leader left half done.
    pub async fn leave_joint(&self) -> Result<(), String> {
        let change = ChangeMembers::AddVoterIds(BTreeSet::new());
        self.raft().change_membership(change, false).await.map(drop).map_err(text)
    }

    pub async fn drop_learners(&self, ids: BTreeSet<ReplicaId>) -> Result<(), String> {
        let change = ChangeMembers::RemoveNodes(ids);
        self.raft().change_membership(change, false).await.map(drop).map_err(text)
    }
}
