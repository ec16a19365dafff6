//! Placement of shard leaders: round-robin over the nodes, except those that drain or leave.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::join_all;

use super::client::Cluster;
use super::peer_messages::{PeerRequest, PeerResponse};
use crate::error::Result;
use crate::limits;
use crate::raft::{ReplicaId, node_of};
use crate::shard::Shard;

/// Returns the preferred leader of a shard: round-robin by shard id, over the nodes that may lead.
fn preferred_leader(
    shard_id: u64,
    replicas: &[u64],
    may_lead: impl Fn(u64) -> bool,
) -> Option<u64> {
    let first = usize::try_from(shard_id).ok()?.checked_sub(1)?;
    let count = replicas.len();
    let turns = (0..count).filter_map(|more| replicas.get((first + more) % count));
    turns.copied().find(|node| may_lead(*node))
}

impl Cluster {
    /// Returns whether a node drains or leaves, and so must not lead.
    pub fn is_draining(&self, node_id: u64) -> bool {
        self.machine().read(|state| state.members().is_draining(node_id))
    }

    /// Returns a shard that this node leads but should not, with its preferred leader.
    /// That leader is connected and caught up.
    pub fn misplaced_leadership(&self) -> Option<(Arc<Shard>, u64)> {
        let own = self.node_id();
        self.open_shards().iter().find_map(|shard| {
            let may_lead = |node| !self.is_draining(node);
            let to = preferred_leader(shard.id(), &shard.replicas(), may_lead)?;
            let caught_up = |(id, lag): &(u64, u64)| *id == to && *lag <= limits::BALANCE_LAG_MAX;
            let is_due = to != own
                && shard.is_leader()
                && !shard.is_isolated()
                && self.hub.is_connected(to)
                && shard.lags().iter().any(caught_up);
            is_due.then(|| (shard.clone(), to))
        })
    }

    /// Transfers the shards that this node leads to their preferred leaders. Returns the ids of the
    /// transferred shards.
    pub async fn balance_local(&self) -> Vec<u64> {
        let mut moved = Vec::new();
        while let Some((shard, to)) =
            self.misplaced_leadership().filter(|it| !moved.contains(&it.0.id()))
        {
            let shard_id = shard.id();
            match shard.transfer(Some(to)).await {
                Ok(()) => moved.push(shard_id),
                Err(error) => {
                    tracing::info!(shard_id, to, %error, "leadership transfer failed");
                    break;
                }
            }
        }
        moved
    }

    /// Runs [`Self::balance_local`] on all connected nodes. Returns the transferred shards, sorted.
    pub async fn balance(&self) -> Result<Vec<u64>> {
        self.catch_up().await?;
        let peers = self.hub.peers().into_iter().filter(|peer| peer.connected);
        let requests = peers.map(|peer| async move {
            let wait = limits::COMMIT_WAIT_MAX;
            let response =
                self.hub.call(peer.node_id, PeerRequest::Balance.encode(), wait).await.ok()?;
            match PeerResponse::decode(response) {
                Ok(PeerResponse::Moved(shards)) => Some(shards),
                _ => None,
            }
        });
        let (own, others) = tokio::join!(self.balance_local(), join_all(requests));
        let mut moved: Vec<u64> = others.into_iter().flatten().flatten().chain(own).collect();
        moved.sort_unstable();
        moved.dedup();
        Ok(moved)
    }

    /// Returns the node that should take over leadership from this node: the most caught-up voter
    /// that is connected and may lead.
    pub fn successor(
        &self,
        voters: &[ReplicaId],
        matched: &BTreeMap<ReplicaId, u64>,
    ) -> Option<u64> {
        let own = self.node_id();
        let is_eligible = |id: &ReplicaId| {
            let node = node_of(*id);
            node != own && self.hub.is_connected(node) && !self.is_draining(node)
        };
        let candidates = voters.iter().copied().filter(is_eligible);
        let best = candidates.max_by_key(|id| matched.get(id).copied().unwrap_or(0));
        best.map(node_of)
    }

    /// Transfers all leaderships away if this node is draining.
    /// Returns `false` while a draining node still leads a shard.
    pub async fn transfer_all(&self) -> bool {
        if !self.is_draining(self.node_id()) {
            return true;
        }
        let mut leads_nothing = true;
        for shard in self.open_shards().iter().filter(|shard| shard.is_leader()) {
            let replica = shard.replica();
            let successor = self.successor(&replica.voters(), &replica.matched());
            leads_nothing &= match successor {
                Some(successor) => shard.transfer(Some(successor)).await.is_ok(),
                None => false,
            };
        }
        if self.is_leader() {
            let successor = self.successor(&self.replica().voters(), &self.replica().matched());
            leads_nothing &= match successor {
                Some(successor) => self.transfer(Some(successor)).await.is_ok(),
                None => false,
            };
        }
        leads_nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preferred_leaders_rotate_and_skip_draining_nodes() {
        let all = |_| true;
        let turns = [1, 2, 3, 4].map(|shard| preferred_leader(shard, &[4, 7, 9], all));
        assert_eq!(turns, [Some(4), Some(7), Some(9), Some(4)]);
        let drains = |node| node != 7;
        let turns = [1, 2, 3, 4].map(|shard| preferred_leader(shard, &[4, 7, 9], drains));
        assert_eq!(turns, [Some(4), Some(9), Some(9), Some(4)]);
        assert_eq!(preferred_leader(1, &[4, 7], |_| false), None);
        assert_eq!(preferred_leader(1, &[], all), None);
        assert_eq!(preferred_leader(0, &[4], all), None, "shard 0 has no turns");
    }
}
