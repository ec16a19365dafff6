//! Membership changes of a shard, made by its leader.
//! A new replica joins as a learner, catches up, and becomes a voter by joint consensus. A voter
//! leaves the same way.

use std::collections::BTreeSet;

use openraft::ChangeMembers;
use openraft::async_runtime::WatchReceiver;
use openraft::errors::{ClientWriteError, RaftError};

use super::Replica;
use super::types::{ReplicaId, TypeConfig};

/// The replicas of a shard, as one of them knows them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Membership {
    /// Sets of voters, each of which needs a majority: one, or two during a change.
    pub configs: Vec<BTreeSet<ReplicaId>>,
    /// Replicas that follow the log without a vote.
    pub learners: BTreeSet<ReplicaId>,
    pub is_committed: bool,
}

impl Membership {
    /// Returns whether exactly these are the voters and learners, and that is committed.
    pub fn is(&self, voters: &BTreeSet<ReplicaId>, learners: &BTreeSet<ReplicaId>) -> bool {
        self.is_committed && self.learners == *learners && self.configs == [voters.clone()]
    }

    /// Returns whether a replica votes, in any set of voters.
    pub fn has_voter(&self, id: ReplicaId) -> bool {
        self.configs.iter().any(|voters| voters.contains(&id))
    }
}

type ChangeError = RaftError<TypeConfig, ClientWriteError<TypeConfig>>;

fn text(error: ChangeError) -> String {
    error.to_string()
}

impl Replica {
    /// Returns the effective membership, which is the last one in the log.
    pub fn membership(&self) -> Membership {
        let metrics = self.raft.server_metrics();
        let metrics = metrics.borrow_watched();
        let committed = metrics.committed_membership_config.log_id();
        let membership = metrics.membership_config.membership();
        Membership {
            configs: membership.get_joint_config().clone(),
            learners: membership.learner_ids().collect(),
            is_committed: metrics.membership_config.log_id() == committed,
        }
    }

    /// Returns the voters in the order of their ids.
    pub fn voters(&self) -> Vec<ReplicaId> {
        let metrics = self.raft.server_metrics();
        let metrics = metrics.borrow_watched();
        let voters: BTreeSet<_> = metrics.membership_config.membership().voter_ids().collect();
        voters.into_iter().collect()
    }

    /// Waits for the voters of a formed shard, which openraft publishes shortly after its start.
    pub async fn known_voters(&self) -> Vec<ReplicaId> {
        let mut changes = self.watch_leadership();
        loop {
            let voters = self.voters();
            if !voters.is_empty() || !changes.changed().await {
                return voters;
            }
        }
    }

    /// Adds a replica that follows the log without a vote.
    ///
    /// # Errors
    /// Returns, like every change here, why it was not made or is not complete.
    pub async fn add_learner(&self, id: ReplicaId) -> Result<(), String> {
        self.raft.add_learner(id, (), false).await.map(drop).map_err(text)
    }

    /// Replaces the voters. Replicas that no longer vote are removed, or remain as learners.
    ///
    /// # Errors
    /// As [`Self::add_learner`].
    pub async fn set_voters(
        &self,
        ids: BTreeSet<ReplicaId>,
        others_learn: bool,
    ) -> Result<(), String> {
        let change = ChangeMembers::ReplaceAllVoters(ids);
        self.raft.change_membership(change, others_learn).await.map(drop).map_err(text)
    }

    /// Completes a joint-consensus change that another leader left unfinished.
    ///
    /// # Errors
    /// As [`Self::add_learner`].
    pub async fn leave_joint(&self) -> Result<(), String> {
        let change = ChangeMembers::AddVoterIds(BTreeSet::new());
        self.raft.change_membership(change, false).await.map(drop).map_err(text)
    }

    /// Removes learners.
    ///
    /// # Errors
    /// As [`Self::add_learner`].
    pub async fn drop_learners(&self, ids: BTreeSet<ReplicaId>) -> Result<(), String> {
        let change = ChangeMembers::RemoveNodes(ids);
        self.raft.change_membership(change, false).await.map(drop).map_err(text)
    }
}
