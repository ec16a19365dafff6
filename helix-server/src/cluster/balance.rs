//! Who should lead which shard: leaders are spread over the nodes, and a node that drains or leaves
//! leads nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::join_all;

use super::calls::{Answer, Question};
use super::door::Cluster;
use crate::error::Result;
use crate::limits;
use crate::raft::{ReplicaId, node_of};
use crate::shard::Shard;

/// The node whose turn it is; whoever must not lead is passed over.
fn preferred(shard_id: u64, replicas: &[u64], may_lead: impl Fn(u64) -> bool) -> Option<u64> {
    let first = usize::try_from(shard_id).ok()?.checked_sub(1)?;
    let count = replicas.len();
    let turns = (0..count).filter_map(|more| replicas.get((first + more) % count));
    turns.copied().find(|node| may_lead(*node))
}

impl Cluster {
    /// Whether a node is not to lead.
    pub fn is_draining(&self, node_id: u64) -> bool {
        self.machine().read(|state| state.members().is_draining(node_id))
    }

    /// A shard that is led from here, and the node that should lead it and could at once.
    pub fn misplaced(&self) -> Option<(Arc<Shard>, u64)> {
        let own = self.node_id();
        self.open_shards().iter().find_map(|shard| {
            let may_lead = |node| !self.is_draining(node);
            let to = preferred(shard.id(), &shard.replicas(), may_lead)?;
            let caught_up = |(id, lag): &(u64, u64)| *id == to && *lag <= limits::BALANCE_LAG_MAX;
            let is_due = to != own
                && shard.leads()
                && !shard.is_cut_off()
                && self.hub.is_connected(to)
                && shard.lags().iter().any(caught_up);
            is_due.then(|| (shard.clone(), to))
        })
    }

    /// Hands every shard that is led from here to the node that should lead it, if that is
    /// another one; says which were.
    pub async fn balance_own(&self) -> Vec<u64> {
        let mut moved = Vec::new();
        while let Some((shard, to)) = self.misplaced().filter(|it| !moved.contains(&it.0.id())) {
            let shard_id = shard.id();
            match shard.transfer(Some(to)).await {
                Ok(()) => moved.push(shard_id),
                Err(error) => {
                    tracing::info!(shard_id, to, %error, "could not hand over");
                    break;
                }
            }
        }
        moved
    }

    /// Has all nodes do that.
    pub async fn balance(&self) -> Result<Vec<u64>> {
        self.catch_up().await?;
        let peers = self.hub.peers().into_iter().filter(|peer| peer.connected);
        let asked = peers.map(|peer| async move {
            let wait = limits::COMMIT_WAIT_MAX;
            let answer =
                self.hub.call(peer.node_id, Question::Balance.encode(), wait).await.ok()?;
            match Answer::decode(answer) {
                Ok(Answer::Moved(shards)) => Some(shards),
                _ => None,
            }
        });
        let (own, others) = tokio::join!(self.balance_own(), join_all(asked));
        let mut moved: Vec<u64> = others.into_iter().flatten().flatten().chain(own).collect();
        moved.sort_unstable();
        moved.dedup();
        Ok(moved)
    }

    /// The node that should take over from this one: it answers, may lead, and lacks least.
    pub fn heir(&self, voters: &[ReplicaId], matched: &BTreeMap<ReplicaId, u64>) -> Option<u64> {
        let own = self.node_id();
        let could = |id: &ReplicaId| {
            let node = node_of(*id);
            node != own && self.hub.is_connected(node) && !self.is_draining(node)
        };
        let heirs = voters.iter().copied().filter(could);
        let best = heirs.max_by_key(|id| matched.get(id).copied().unwrap_or(0));
        best.map(node_of)
    }

    /// Hands over everything that is led from here, where this node is not to lead. Whether it
    /// leads nothing now.
    pub async fn shed(&self) -> bool {
        if !self.is_draining(self.node_id()) {
            return true;
        }
        let mut is_free = true;
        for shard in self.open_shards().iter().filter(|shard| shard.leads()) {
            let replica = shard.replica();
            let heir = self.heir(&replica.voters(), &replica.matched());
            is_free &= match heir {
                Some(heir) => shard.transfer(Some(heir)).await.is_ok(),
                None => false,
            };
        }
        if self.leads() {
            let heir = self.heir(&self.replica().voters(), &self.replica().matched());
            is_free &= match heir {
                Some(heir) => self.transfer(Some(heir)).await.is_ok(),
                None => false,
            };
        }
        is_free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_go_round_and_pass_over_who_must_not_lead() {
        let all = |_| true;
        let turns = [1, 2, 3, 4].map(|shard| preferred(shard, &[4, 7, 9], all));
        assert_eq!(turns, [Some(4), Some(7), Some(9), Some(4)]);
        let drains = |node| node != 7;
        let turns = [1, 2, 3, 4].map(|shard| preferred(shard, &[4, 7, 9], drains));
        assert_eq!(turns, [Some(4), Some(9), Some(9), Some(4)]);
        assert_eq!(preferred(1, &[4, 7], |_| false), None);
        assert_eq!(preferred(1, &[], all), None);
        assert_eq!(preferred(0, &[4], all), None, "shard 0 has no turns");
    }
}
