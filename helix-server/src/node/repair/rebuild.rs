//! Rebuild of a replica on a new log, which the shard's leader fills. The replica votes and serves
//! again once it has everything that the quarantined log had acknowledged. docs/decisions/0018
//! explains why that is sufficient.

use std::collections::{BTreeMap, BTreeSet};

use super::reports::ask_replicas;
use crate::cluster::ReplicaStatusReport;
use crate::error::Result;
use crate::node::Node;
use crate::raft::{Replica, node_of};

/// Rebuild of one replica.
#[derive(Debug, Default)]
pub(in crate::node) struct Rebuild {
    /// Highest term reported by each node that still has its vote, since this replica was opened. A
    /// candidate that this replica voted for had reached its term before it requested the vote.
    terms: BTreeMap<u64, u64>,
    /// Term of a leader, and the index up to which this replica needs the leader's log. The index
    /// is the end of that log after the leader has reset its progress of this replica. So a leader
    /// of that term cannot assume that this replica has a later entry.
    target: Option<(u64, u64)>,
}

impl Rebuild {
    /// Advances the rebuild. Returns what it waits for, or `None` once it is done.
    pub(in crate::node) async fn advance(
        &mut self,
        node: &Node,
        shard_id: u64,
        replica: &Replica,
    ) -> Result<Option<String>> {
        let peers = node.hub.peers().into_iter().map(|peer| peer.node_id);
        let reports = ask_replicas(node, shard_id, peers).await;
        for (id, report) in &reports {
            if let Some(addresses) = &report.addresses {
                node.cluster.merge_addresses(addresses);
            }
            self.note_term(*id, report);
        }
        let leaders = reports.iter().filter(|(_, it)| it.is_leader);
        let Some((leader, report)) = leaders.max_by_key(|(_, it)| it.term) else {
            return Ok(Some("no reachable node leads the shard".to_owned()));
        };
        let (leader, term) = (*leader, report.term);
        if replica.repair_of().is_some_and(|quarantined| quarantined.vote.is_none())
            && let Err(why) = self.check_vote(node_of(replica.id()), report, &reports)
        {
            return Ok(Some(why));
        }
        let target = match self.target.filter(|(of, _)| *of == term) {
            Some((_, target)) => target,
            None => {
                let resetting_replica = Some(replica.id());
                let response =
                    node.cluster.ask_replica_status(leader, shard_id, resetting_replica).await;
                let Some(report) = response.filter(|it| it.is_leader && it.term == term) else {
                    return Ok(Some(format!("node {leader} does not respond as the leader")));
                };
                self.target = Some((term, report.last_index));
                replica.accept_leader_of(term);
                report.last_index
            }
        };
        let status = replica.status();
        let follows = replica.follows().is_some_and(|(_, of)| of == term);
        if !follows || status.applied < target || status.synced < target {
            let has = status.applied.min(status.synced);
            return Ok(Some(format!(
                "the replica has entries up to {has} of {target} on node {leader}"
            )));
        }
        node.logs().end_repair(shard_id).await?;
        replica.rejoin();
        tracing::info!(
            shard_id,
            "repaired the replica: it has all acknowledged entries and votes again"
        );
        Ok(None)
    }

    /// Records the term that a node reports, or forgets it if the node has lost its vote.
    fn note_term(&mut self, id: u64, report: &ReplicaStatusReport) {
        if report.vote_lost {
            self.terms.remove(&id);
        } else {
            let term = self.terms.entry(id).or_default();
            *term = report.term.max(*term);
        }
    }

    /// Checks that this replica may follow a leader although its own vote is lost. It must be
    /// certain that no candidate that it voted for in a later term leads or may still win.
    ///
    /// Only the leader's current voters count. A removed node may be gone permanently, and its
    /// report is outdated.
    fn check_vote(
        &self,
        own: u64,
        leader: &ReplicaStatusReport,
        reports: &BTreeMap<u64, ReplicaStatusReport>,
    ) -> Result<(), String> {
        let voters: BTreeSet<u64> = leader.voters.iter().map(|id| node_of(*id)).collect();
        let others = || voters.iter().copied().filter(|id| *id != own);
        let unreported: Vec<u64> = others().filter(|id| !self.terms.contains_key(id)).collect();
        // A node that has lost its own vote does not lead, and its candidacies are over.
        let is_lost = |id: &u64| reports.get(id).is_some_and(|it| it.vote_lost);
        if let Some(silent) = unreported.iter().find(|id| !is_lost(id)) {
            return Err(format!(
                "its vote was lost with its log; it waits for node {silent} to report its term"
            ));
        }
        // Nodes that lost their votes may have elected a leader together. So every majority must
        // include a node that knows its term.
        let forgetful = unreported.len() + 1;
        if !unreported.is_empty() && (!leader.is_settled || forgetful > voters.len() / 2) {
            return Err(format!(
                "its vote was lost with its log, as on the nodes {unreported:?}; too few of the \
                 voters \
                 {voters:?} know their terms"
            ));
        }
        let reported = others().filter_map(|id| Some((id, *self.terms.get(&id)?)));
        match reported.max_by_key(|(_, of)| *of).filter(|(_, of)| *of > leader.term) {
            Some((id, of)) => Err(format!("node {id} is in term {of}, which has no leader yet")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raft::replica_id;

    /// Returns whether node 1 follows a leader of term 5 with these voters, after some nodes have
    /// reported their terms, and others that their votes are lost.
    fn check(voters: &[u64], terms: &[(u64, u64)], lost: &[u64], is_settled: bool) -> bool {
        let rebuild = Rebuild { terms: terms.iter().copied().collect(), target: None };
        let voters = voters.iter().map(|node| replica_id(*node, 1)).collect();
        let leader = ReplicaStatusReport {
            term: 5,
            is_leader: true,
            voters,
            is_settled,
            ..ReplicaStatusReport::default()
        };
        let lost = lost.iter().map(|id| {
            (*id, ReplicaStatusReport { vote_lost: true, ..ReplicaStatusReport::default() })
        });
        rebuild.check_vote(1, &leader, &lost.collect()).is_ok()
    }

    #[test]
    fn replica_without_its_vote_rejects_leaders_that_it_may_have_voted_against() {
        let check = |terms: &[(u64, u64)]| check(&[1, 2, 3], terms, &[], true);
        assert!(!check(&[(2, 5)]), "node 3 has not reported its term");
        assert!(!check(&[(2, 5), (3, 6)]), "it may have voted for 3");
        assert!(check(&[(2, 5), (3, 5)]));
        assert!(check(&[(2, 5), (3, 4)]));
        assert!(check(&[(2, 5), (3, 4), (4, 6)]), "node 4 was removed");
    }

    #[test]
    fn node_that_loses_its_vote_no_longer_knows_its_term() {
        let mut rebuild = Rebuild::default();
        let report =
            |term, vote_lost| ReplicaStatusReport { term, vote_lost, ..Default::default() };
        rebuild.note_term(2, &report(5, false));
        rebuild.note_term(2, &report(4, false));
        assert_eq!(rebuild.terms, BTreeMap::from([(2, 5)]));
        rebuild.note_term(2, &report(0, true));
        assert!(rebuild.terms.is_empty());
    }

    #[test]
    fn replicas_without_votes_wait_for_each_other_only_if_they_form_a_majority() {
        assert!(!check(&[1, 2, 3], &[(2, 5)], &[3], true), "they are a majority");
        assert!(!check(&[1, 2, 3, 4, 5], &[(2, 5), (3, 5)], &[4], true), "node 5 is silent");
        assert!(!check(&[1, 2, 3, 4, 5], &[(2, 5), (3, 6), (4, 5)], &[5], true), "3 knows more");
        assert!(!check(&[1, 2, 3, 4, 5], &[(2, 5), (3, 5)], &[4, 5], true), "three of five");
        assert!(
            !check(&[1, 2, 3, 4, 5], &[(2, 5), (3, 5), (4, 5)], &[5], false),
            "or of fewer voters"
        );
        assert!(check(&[1, 2, 3, 4, 5], &[(2, 5), (3, 5), (4, 5)], &[5], true));
    }
}
