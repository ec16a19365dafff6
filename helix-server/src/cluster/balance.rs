//! Placement of shard leaders: spread over the nodes with replicas, except those that drain, leave
//! or are cordoned.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use super::client::Cluster;
use super::peer_messages::{PeerRequest, PeerResponse, ReplicaStatusReport};
use crate::error::{Error, Result};
use crate::limits;
use crate::raft::{Replica, ReplicaId, node_of};
use crate::shard::Shard;

/// Returns the preferred leader of each data shard.
///
/// Of the nodes with a replica that may lead, it is the one with the fewest shards so far. Ties are
/// broken in turns by shard id.
fn preferred_leaders<'a>(
    shards: impl IntoIterator<Item = (u64, &'a [u64])>,
    may_lead: impl Fn(u64) -> bool,
) -> BTreeMap<u64, u64> {
    let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
    let mut leaders = BTreeMap::new();
    for (shard_id, replicas) in shards {
        let turn = usize::try_from(shard_id).unwrap_or(0).checked_sub(1);
        let Some(turn) = turn.filter(|_| !replicas.is_empty()) else { continue };
        let first = turn % replicas.len();
        let (before, after) = replicas.split_at(first);
        let turns = after.iter().chain(before).copied().filter(|node| may_lead(*node));
        let least = turns.min_by_key(|node| counts.get(node).copied().unwrap_or(0));
        if let Some(node) = least {
            *counts.entry(node).or_default() += 1;
            leaders.insert(shard_id, node);
        }
    }
    leaders
}

/// Returns why the reporting replica should not take over leadership of a log that ends with entry
/// `last`; `None` if it is whole and caught up. `id` is the voter on that node.
fn unfit(id: ReplicaId, last: u64, report: Option<&ReplicaStatusReport>) -> Option<String> {
    let Some(report) = report else { return Some("does not report its state".to_owned()) };
    let lag = last.saturating_sub(report.last_index);
    // Nodes of older releases report no replica id; the rest of their report is valid.
    if report.replica_id != 0 && report.replica_id != id {
        return Some("is not the voting replica".to_owned());
    }
    if report.in_repair {
        return Some("is in repair and does not vote".to_owned());
    }
    if report.is_fetching {
        return Some("fetches records".to_owned());
    }
    if report.is_damaged {
        return Some("has damage that is not repaired".to_owned());
    }
    if report.blocked_partitions > 0 {
        return Some(format!(
            "has not compacted {} partitions by key as far as others",
            report.blocked_partitions
        ));
    }
    (lag > limits::BALANCE_LAG_MAX)
        .then(|| format!("lacks {lag} entries, at most {} are allowed", limits::BALANCE_LAG_MAX))
}

/// Returns the voter that should take over: the most caught-up of the fit ones. Without a fit
/// voter, it is the most caught-up one outside of repair, if `may_be_unfit`.
fn best_successor(
    last: u64,
    candidates: &[(ReplicaId, Option<ReplicaStatusReport>)],
    matched: &BTreeMap<ReplicaId, u64>,
    may_be_unfit: bool,
) -> Option<ReplicaId> {
    let is_in_repair = |report: &Option<ReplicaStatusReport>| {
        report.as_ref().is_some_and(|report| report.in_repair)
    };
    let voting = candidates.iter().filter(|(_, report)| !is_in_repair(report));
    let ranked = voting.map(|(id, report)| {
        let is_fit = unfit(*id, last, report.as_ref()).is_none();
        (is_fit, matched.get(id).copied().unwrap_or(0), *id)
    });
    let best = ranked.filter(|(is_fit, ..)| *is_fit || may_be_unfit);
    best.max_by_key(|(is_fit, matched, id)| (*is_fit, *matched, std::cmp::Reverse(*id)))
        .map(|best| best.2)
}

impl Cluster {
    /// Returns whether a node drains or leaves, and so must not lead.
    pub fn is_draining(&self, node_id: u64) -> bool {
        self.machine().read(|state| state.members().is_draining(node_id))
    }

    /// Returns the shards that this node has led for at least `led_for` but should not lead, with
    /// their preferred leaders, which are connected and caught up.
    fn misplaced_leaderships(&self, led_for: Duration) -> Vec<(Arc<Shard>, u64)> {
        let own = self.node_id();
        let leaders = self.preferred_leaders();
        let misplaced = |shard: &Arc<Shard>| {
            let to = leaders.get(&shard.id()).copied()?;
            let caught_up = |(id, lag): &(u64, u64)| *id == to && *lag <= limits::BALANCE_LAG_MAX;
            let is_due = to != own
                && shard.led_for().is_some_and(|led| led >= led_for)
                && !shard.is_isolated()
                && self.hub.is_connected(to)
                && shard.lags().iter().any(caught_up);
            is_due.then(|| (shard.clone(), to))
        };
        self.open_shards().iter().filter_map(misplaced).collect()
    }

    /// Returns the preferred leader of each data shard. All nodes with the same state agree.
    pub fn preferred_leaders(&self) -> BTreeMap<u64, u64> {
        let open = self.open_shards();
        let mut shards: BTreeMap<u64, Vec<u64>> =
            open.iter().map(|shard| (shard.id(), shard.replicas())).collect();
        let (placed, away) = self.machine().read(|state| {
            let members = state.members();
            let placed = members.placement().into_iter().flat_map(|it| it.shards());
            let placed = placed.filter(|(shard_id, _)| *shard_id != 0);
            let placed: BTreeMap<u64, Vec<u64>> =
                placed.map(|(id, it)| (id, it.replicas.keys().copied().collect())).collect();
            let away = members.iter().filter(|it| it.draining || it.leaving || it.cordoned);
            (placed, away.map(|it| it.node_id).collect::<Vec<u64>>())
        });
        shards.extend(placed);
        let may_lead = |node| !away.contains(&node);
        preferred_leaders(shards.iter().map(|(id, nodes)| (*id, nodes.as_slice())), may_lead)
    }

    /// Returns a misplaced leadership (see `misplaced_leaderships`) whose preferred leader is
    /// whole: not damaged, not in repair, and caught up. This node must have led the shard for at
    /// least `led_for`, so that a leader that was asked for stays that long.
    pub async fn next_balance(
        &self,
        except: &[u64],
        led_for: Duration,
    ) -> Option<(Arc<Shard>, u64)> {
        let misplaced = self.misplaced_leaderships(led_for).into_iter();
        for (shard, to) in misplaced.filter(|(shard, _)| !except.contains(&shard.id())) {
            let unfit = self.unfit_node(shard.id(), shard.replica(), to).await;
            match unfit {
                None => return Some((shard, to)),
                Some(why) => {
                    tracing::debug!(shard_id = shard.id(), to, why, "not transferring leadership");
                }
            }
        }
        None
    }

    /// Returns why a node should not take over leadership from this replica; `None` if its replica
    /// is whole and caught up, or is not a voter.
    async fn unfit_node(&self, shard_id: u64, replica: &Replica, node: u64) -> Option<String> {
        let id = replica.voters().into_iter().find(|id| node_of(*id) == node)?;
        let last = replica.status().last_index;
        let report = self.ask_replica_status(node, shard_id, None).await;
        unfit(id, last, report.as_ref())
    }

    /// Transfers leadership of a shard, or of shard 0, that this node leads. Without `node` it goes
    /// to a replica that is whole and caught up, if there is one.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the replica on `node` is damaged, in repair or far behind, and
    /// those of [`Shard::transfer`].
    pub async fn transfer_checked(&self, shard_id: u64, node: Option<u64>) -> Result<()> {
        let shard = (shard_id != 0).then(|| self.shard(shard_id)).transpose()?;
        let own = self.replica();
        let replica = shard.as_ref().map_or(&*own, |shard| shard.replica());
        let is_other = node.is_some_and(|node| node != self.node_id());
        let to = match node {
            Some(node) => {
                if replica.is_leader()
                    && is_other
                    && let Some(why) = self.unfit_node(shard_id, replica, node).await
                {
                    return Err(Error::InvalidArgument {
                        field: "target_node_id",
                        what: format!(
                            "leadership of shard {shard_id} is not transferred to node {node}, its \
                             replica {why}; wait until it is whole, or name another node"
                        ),
                    });
                }
                Some(node)
            }
            None => self.successor(shard_id, replica, true).await,
        };
        match &shard {
            Some(shard) => shard.transfer(to).await,
            None => self.transfer(to).await,
        }
    }

    /// Transfers the shards that this node leads to their preferred leaders. Returns the ids of the
    /// transferred shards.
    pub async fn balance_local(&self) -> Vec<u64> {
        let mut moved = Vec::new();
        while let Some((shard, to)) = self.next_balance(&moved, Duration::ZERO).await {
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
    ///
    /// # Errors
    /// As [`Self::catch_up`]. Nodes that do not respond are left out.
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

    /// Returns the node that should take over leadership from this replica: one with a voter that
    /// is whole and caught up, connected and may lead. Without such a voter, the most caught-up one
    /// if `may_be_unfit`.
    pub async fn successor(
        &self,
        shard_id: u64,
        replica: &Replica,
        may_be_unfit: bool,
    ) -> Option<u64> {
        self.successor_among(shard_id, replica, may_be_unfit, None).await
    }

    /// Like [`Self::successor`], but only among the voters in `among` if it is set.
    async fn successor_among(
        &self,
        shard_id: u64,
        replica: &Replica,
        may_be_unfit: bool,
        among: Option<BTreeSet<ReplicaId>>,
    ) -> Option<u64> {
        let own = self.node_id();
        let is_eligible = |id: &ReplicaId| {
            let node = node_of(*id);
            let is_among = among.as_ref().is_none_or(|among| among.contains(id));
            is_among && node != own && self.hub.is_connected(node) && !self.is_draining(node)
        };
        let last = replica.status().last_index;
        let candidates = replica.voters().into_iter().filter(is_eligible);
        let reports = candidates.map(|id| async move {
            (id, self.ask_replica_status(node_of(id), shard_id, None).await)
        });
        let reports = join_all(reports).await;
        best_successor(last, &reports, &replica.matched(), may_be_unfit).map(node_of)
    }

    /// Transfers all leaderships away if this node is draining, to replicas that stay after a move
    /// in progress. A replica that a cancelled move removes again would return the leadership at
    /// once.
    ///
    /// Returns `false` while a draining node still leads a shard.
    pub async fn transfer_all(&self) -> bool {
        if !self.is_draining(self.node_id()) {
            return true;
        }
        let mut leads_nothing = true;
        for shard in self.open_shards().iter().filter(|shard| shard.is_leader()) {
            let successor = self.staying_successor(shard.id(), shard.replica()).await;
            leads_nothing &= match successor {
                Some(successor) => shard.transfer(Some(successor)).await.is_ok(),
                None => false,
            };
        }
        if self.is_leader() {
            let successor = self.staying_successor(0, &self.replica()).await;
            leads_nothing &= match successor {
                Some(successor) => self.transfer(Some(successor)).await.is_ok(),
                None => false,
            };
        }
        leads_nothing
    }

    /// Returns the successor among the replicas that stay after a move in progress.
    async fn staying_successor(&self, shard_id: u64, replica: &Replica) -> Option<u64> {
        let staying = self.machine().read(|state| {
            let shard = state.members().placement()?.shard(shard_id)?;
            Some(shard.target())
        });
        self.successor_among(shard_id, replica, true, staying).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(id: ReplicaId, last_index: u64) -> ReplicaStatusReport {
        ReplicaStatusReport { replica_id: id, last_index, ..ReplicaStatusReport::default() }
    }

    #[test]
    fn only_whole_and_caught_up_replicas_take_over() {
        let id = crate::raft::replica_id(2, 1);
        let why = |report| unfit(id, 5_000, Some(&report)).unwrap_or_default();
        assert_eq!(why(report(id, 4_500)), "");
        assert_eq!(why(report(0, 4_500)), "", "an older node");
        assert!(why(report(id + 1, 4_500)).contains("not the voting replica"));
        assert!(why(report(id, 3_999)).contains("lacks 1001 entries"));
        assert!(
            why(ReplicaStatusReport { is_damaged: true, ..report(id, 5_000) }).contains("damage")
        );
        assert!(
            why(ReplicaStatusReport { in_repair: true, ..report(id, 5_000) }).contains("in repair")
        );
        assert!(
            why(ReplicaStatusReport { is_fetching: true, ..report(id, 5_000) }).contains("fetches")
        );
        let blocked = ReplicaStatusReport { blocked_partitions: 3, ..report(id, 5_000) };
        assert!(why(blocked).contains("has not compacted 3 partitions"));
        assert!(unfit(id, 5_000, None).is_some());
    }

    #[test]
    fn successor_is_whole_if_there_is_one() {
        let [a, b, c] = [2, 3, 4].map(|node| crate::raft::replica_id(node, 1));
        let matched = BTreeMap::from([(a, 100), (b, 90), (c, 80)]);
        let damaged = ReplicaStatusReport { is_damaged: true, ..report(a, 100) };
        let in_repair = ReplicaStatusReport { in_repair: true, ..report(c, 80) };
        let all =
            [(a, Some(damaged.clone())), (b, Some(report(b, 90))), (c, Some(in_repair.clone()))];
        assert_eq!(best_successor(100, &all, &matched, false), Some(b));
        let unfit = [(a, Some(damaged)), (c, Some(in_repair))];
        assert_eq!(best_successor(100, &unfit, &matched, false), None);
        assert_eq!(best_successor(100, &unfit, &matched, true), Some(a), "it votes at least");
        assert_eq!(best_successor(100, &unfit[1..], &matched, true), None, "it could not lead");
        assert_eq!(best_successor(100, &[(a, None)], &matched, true), Some(a));
    }

    #[test]
    fn preferred_leaders_rotate_and_skip_draining_nodes() {
        let of = |nodes: &[u64], drains: u64| {
            let shards = [0, 1, 2, 3, 4].map(|shard| (shard, nodes));
            preferred_leaders(shards, |node| node != drains).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(of(&[4, 7, 9], 0), [(1, 4), (2, 7), (3, 9), (4, 4)], "shard 0 has no turns");
        assert_eq!(of(&[4, 7, 9], 7), [(1, 4), (2, 9), (3, 9), (4, 4)]);
        assert_eq!(of(&[4], 4), []);
        assert_eq!(of(&[], 0), []);
    }

    #[test]
    fn leaders_spread_over_the_nodes_with_replicas() {
        // Six nodes with two replicas each, of four shards.
        let shards: [(u64, &[u64]); 4] =
            [(1, &[1, 2, 3]), (2, &[4, 5, 6]), (3, &[1, 2, 3]), (4, &[4, 5, 6])];
        let leaders: Vec<u64> = preferred_leaders(shards, |_| true).into_values().collect();
        assert_eq!(leaders, [1, 5, 3, 4]);
    }
}
