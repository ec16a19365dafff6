//! Reports of the replicas of a shard about themselves.

use std::collections::{BTreeMap, BTreeSet};

use helix_wal::LogId;

use super::decision::VoterReport;
use crate::cluster::ReplicaStatusReport;
use crate::node::Node;
use crate::raft::{ReplicaId, node_of};

/// Returns the reports of a shard's other replicas, by replica id. A report without a replica id is
/// left out, because it may come from the successor of a voter.
pub(super) async fn ask_others(
    node: &Node,
    shard_id: u64,
    own: ReplicaId,
    configs: &[BTreeSet<ReplicaId>],
) -> BTreeMap<ReplicaId, VoterReport> {
    let voters: BTreeSet<ReplicaId> = configs.iter().flatten().copied().collect();
    let peers = node.hub.peers().into_iter().map(|peer| peer.node_id);
    let reports = ask_replicas(node, shard_id, peers.filter(|id| *id != node_of(own))).await;
    let all = reports.values().map(|it| it.replica_id).filter(|id| *id != 0).collect();
    let mut by_id = of_voters(reports.values(), &all);
    by_id.extend(of_voters(reports.values(), &voters));
    by_id
}

/// Returns the reports of these replicas, by replica id.
pub(super) fn of_voters<'a>(
    reports: impl Iterator<Item = &'a ReplicaStatusReport>,
    voters: &BTreeSet<ReplicaId>,
) -> BTreeMap<ReplicaId, VoterReport> {
    let voter_report = |report: &ReplicaStatusReport| {
        let report_of_voter = VoterReport {
            last: LogId { term: report.synced_term, index: report.synced_index },
            is_damaged: report.is_damaged,
            in_repair: report.in_repair,
            is_fetching: report.is_fetching,
        };
        (report.replica_id, report_of_voter)
    };
    reports.filter(|report| voters.contains(&report.replica_id)).map(voter_report).collect()
}

/// Returns the reports of the replicas on these nodes, by node.
pub(super) async fn ask_replicas(
    node: &Node,
    shard_id: u64,
    nodes: impl Iterator<Item = u64>,
) -> BTreeMap<u64, ReplicaStatusReport> {
    let requests = nodes.map(|id| async move {
        Some((id, node.cluster.ask_replica_status(id, shard_id, None).await?))
    });
    futures_util::future::join_all(requests).await.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raft::replica_id;

    #[test]
    fn only_reports_of_the_voting_replicas_count() {
        let voters: BTreeSet<ReplicaId> = [1, 2, 3].map(|node| replica_id(node, 1)).into();
        let report =
            |replica_id| ReplicaStatusReport { replica_id, synced_index: 9, ..Default::default() };
        // An older node, the successor of a lost replica, and a voter.
        let reports = [report(0), report(replica_id(2, 2)), report(replica_id(3, 1))];
        let counted: Vec<ReplicaId> = of_voters(reports.iter(), &voters).into_keys().collect();
        assert_eq!(counted, [replica_id(3, 1)]);
    }
}
