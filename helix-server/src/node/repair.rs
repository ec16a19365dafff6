//! Supervises the shards of a node. A stopped shard is reopened. A damaged log is quarantined and
//! replaced with a new one, which the other replicas fill. Until the new log has all entries that
//! the old one had acknowledged, the replica does not vote and cannot be elected.
//! docs/decisions/0018 explains why that is sufficient.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::Instant;

use super::logs::{LogIdentity, NodeLogs};
use super::open::{ShardContext, directory, open_or_rebuild, open_shard0_replica};
use super::shard_slots::ShardSlot;
use super::{Node, NodeStorage};
use crate::cluster::ReplicaStatusReport;
use crate::error::{Error, Result};
use crate::raft::{Replica, node_of};
use crate::sync;

/// Interval between checks of a shard.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// Minimum time between two attempts to reopen a shard.
const REOPEN_PAUSE: Duration = Duration::from_secs(1);

pub(super) fn start(node: &Arc<Node>) {
    for shard_id in node.shards.ids().into_iter().chain([0]) {
        let supervisor =
            ShardSupervisor { shard_id, repair: None, reopened: None, last_warning: String::new() };
        tokio::spawn(supervisor.run(Arc::downgrade(node)));
    }
}

/// Supervises one shard.
struct ShardSupervisor {
    shard_id: u64,
    repair: Option<Repair>,
    reopened: Option<Instant>,
    /// The last warning; a repeated one is not logged again.
    last_warning: String,
}

impl ShardSupervisor {
    async fn run(mut self, node: Weak<Node>) {
        let Some(draining) = node.upgrade().map(|node| node.draining.clone()) else { return };
        loop {
            tokio::select! {
                biased;
                () = draining.cancelled() => return,
                () = tokio::time::sleep(CHECK_INTERVAL) => {}
            }
            let Some(node) = node.upgrade() else { return };
            if let Err(error) = self.supervise_once(&node).await {
                self.warn_once(&error.to_string());
            }
        }
    }

    fn warn_once(&mut self, what: &str) {
        if self.last_warning != what {
            tracing::warn!(shard_id = self.shard_id, "{what}");
            what.clone_into(&mut self.last_warning);
        }
    }

    async fn supervise_once(&mut self, node: &Arc<Node>) -> Result<()> {
        let shard_id = self.shard_id;
        let own = node.cluster.replica();
        let shard = node.shard(shard_id);
        let replica = match &shard {
            Some(shard) => shard.replica(),
            None if shard_id == 0 => &*own,
            None => match node.shards.get(shard_id) {
                Some(ShardSlot::Stopped(why)) => return self.reopen(node, &why, false).await,
                _ => return Ok(()),
            },
        };
        if let Some(why) = replica.stopped() {
            // A failed write stops the whole node.
            if matches!(replica.writable(), Err(helix_wal::Error::Poisoned { .. })) {
                return Ok(());
            }
            let damage = replica.damage();
            let rebuild = !damage.is_empty() && has_other_voters(replica);
            let why = if rebuild { damage.join("; ") } else { why };
            self.warn_once(&format!("restarting the stopped replica: {why}"));
            return self.reopen(node, &why, rebuild).await;
        }
        if replica.repair_of().is_some() {
            let repair = self.repair.get_or_insert_default();
            let waits_for = repair.advance(node, shard_id, replica).await?;
            node.note_repair(shard_id, waits_for.clone());
            match waits_for {
                Some(why) => self.warn_once(&format!("repair is waiting: {why}")),
                None => self.repair = None,
            }
            return Ok(());
        }
        self.repair = None;
        let damage = replica.damage();
        if damage.is_empty() || !has_other_voters(replica) {
            return Ok(());
        }
        match may_rebuild(node, shard_id, replica).await {
            Ok(()) => {
                let why = damage.join("; ");
                self.warn_once(&format!("rebuilding the damaged log: {why}"));
                self.reopen(node, &why, true).await
            }
            Err(why) => {
                self.warn_once(&format!("the log is damaged, but cannot be rebuilt yet: {why}"));
                Ok(())
            }
        }
    }

    async fn reopen(&mut self, node: &Arc<Node>, why: &str, rebuild: bool) -> Result<()> {
        if self.reopened.is_some_and(|at| at.elapsed() < REOPEN_PAUSE) {
            return Ok(());
        }
        self.repair = None;
        let opened = node.reopen(self.shard_id, why, rebuild).await;
        self.reopened = Some(Instant::now());
        if opened.is_ok() {
            let mut restarts = sync::lock(&node.restarts);
            *restarts.entry(self.shard_id).or_default() += 1;
            drop(restarts);
            self.last_warning.clear();
            tracing::info!(shard_id = self.shard_id, "reopened the shard");
        }
        opened
    }
}

fn has_other_voters(replica: &Replica) -> bool {
    replica.voters().into_iter().any(|id| id != replica.id())
}

/// Checks that a replica with a damaged log may rebuild it. The other replicas must be healthy, and
/// only one replica of a shard rebuilds at a time.
///
/// # Errors
/// The reason to wait, as text for operators.
async fn may_rebuild(node: &Node, shard_id: u64, replica: &Replica) -> Result<(), String> {
    let own = node_of(replica.id());
    let voters = replica.membership().configs.into_iter().flatten().map(node_of);
    let others: BTreeSet<u64> = voters.filter(|id| *id != own).collect();
    let reports = ask_replicas(node, shard_id, others.iter().copied()).await;
    if let Some(lost) = others.iter().find(|id| !reports.contains_key(id)) {
        return Err(format!("node {lost} does not serve the shard"));
    }
    if let Some((id, _)) = reports.iter().find(|(_, it)| it.in_repair) {
        return Err(format!("node {id} is in repair"));
    }
    if replica.is_leader() {
        let successor = reports.iter().find(|(_, it)| !it.is_damaged).map(|(id, _)| *id);
        let successor = successor.ok_or("no other replica is undamaged")?;
        tracing::info!(shard_id, successor, "transferring leadership before the log is rebuilt");
        let transferred = replica.transfer_leadership(Some(successor), &[]).await;
        transferred
            .map_err(|error| format!("leadership transfer to node {successor} failed: {error}"))?;
        return Err(format!("node {successor} has just become the leader"));
    }
    if let Some((id, _)) = reports.iter().find(|(id, it)| it.is_damaged && **id < own) {
        return Err(format!("node {id} is damaged too and rebuilds first"));
    }
    match reports.iter().find(|(_, it)| it.is_leader) {
        Some((_, leader)) if !leader.is_damaged => Ok(()),
        Some((id, _)) => Err(format!("the leader, node {id}, is damaged too")),
        None => Err("the shard has no leader".to_owned()),
    }
}

async fn ask_replicas(
    node: &Node,
    shard_id: u64,
    nodes: impl Iterator<Item = u64>,
) -> BTreeMap<u64, ReplicaStatusReport> {
    let requests = nodes.map(|id| async move {
        Some((id, node.cluster.ask_replica_status(id, shard_id, None).await?))
    });
    futures_util::future::join_all(requests).await.into_iter().flatten().collect()
}

/// Repair of one replica, which fills its new log.
#[derive(Debug, Default)]
struct Repair {
    /// Highest term that each of the other nodes has reported since this replica was opened. A
    /// candidate that this replica voted for had reached its term before it asked for the vote.
    terms: BTreeMap<u64, u64>,
    /// A leader's term, and the index up to which this replica needs the leader's log. It is the
    /// end of that log after the reset of this replica. A leader of that term cannot believe that
    /// this replica has more.
    target: Option<(u64, u64)>,
}

impl Repair {
    /// Advances the repair. Returns what it waits for, or `None` once it is done.
    async fn advance(
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
            if !report.vote_lost {
                let term = self.terms.entry(*id).or_default();
                *term = report.term.max(*term);
            }
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
        // Nodes without votes may have elected a leader together. So every majority must include a
        // node that knows its term.
        let forgetful = unreported.len() + 1;
        if !unreported.is_empty() && (!leader.is_settled || forgetful > voters.len() / 2) {
            return Err(format!(
                "its vote was lost with its log, as on the nodes {unreported:?}; too few of the voters \
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

impl Node {
    pub(super) fn logs(&self) -> NodeLogs<'_> {
        NodeLogs { settings: &self.settings, failed: self.failed.clone() }
    }

    /// Closes a shard and reopens it, on a new log if `rebuild` is set.
    async fn reopen(self: &Arc<Self>, shard_id: u64, why: &str, rebuild: bool) -> Result<()> {
        let _guard = self.reopening.lock().await;
        if self.draining.is_cancelled() {
            return Err(Error::Draining);
        }
        if matches!(self.settings.storage, NodeStorage::Memory) {
            // Its votes would be lost with its log.
            let what = format!("a replica in memory cannot be reopened: {why}");
            return Err(Error::StorageFailed { what, may_have_applied: false });
        }
        if shard_id == 0 {
            return self.reopen_shard0(rebuild.then_some(why)).await;
        }
        if let Some(shard) = self.shard(shard_id) {
            self.shards.set(shard_id, ShardSlot::Stopped(why.to_owned()));
            self.cluster.set_shard(shard_id, None);
            self.routes.send_modify(|count| *count += 1);
            shard.close().await;
        }
        let logs = self.logs();
        let identity = LogIdentity { shard_id, ..self.identity.clone() };
        if rebuild {
            logs.quarantine(shard_id, why, Some(&identity)).await?;
        }
        let context = ShardContext {
            members: self.handler.replica_ids(),
            hub: &self.hub,
            directory: directory(&self.cluster),
            draining: &self.draining,
            metrics: &self.metrics,
        };
        let is_single_node = !self.cluster.has_other_replicas().await;
        match open_or_rebuild(&logs, None, identity, &context, is_single_node).await {
            Ok(shard) => {
                self.shards.set(shard_id, ShardSlot::Open(shard.clone()));
                self.cluster.set_shard(shard_id, Some(shard.clone()));
                super::background::start_shard(self, shard.clone());
                super::member_tasks::start_shard(self, shard);
                self.routes.send_modify(|count| *count += 1);
                Ok(())
            }
            Err(Error::CorruptLog { what }) => {
                self.shards.set(shard_id, ShardSlot::Damaged(what.clone()));
                Err(Error::CorruptLog { what })
            }
            Err(error) => {
                self.shards.set(shard_id, ShardSlot::Stopped(error.to_string()));
                Err(error)
            }
        }
    }

    async fn reopen_shard0(self: &Arc<Self>, damage: Option<&str>) -> Result<()> {
        let before = self.cluster.replica();
        let is_single_node = !has_other_voters(&before);
        self.hub.stop_shard(0);
        before.close().await;
        let logs = self.logs();
        if let Some(why) = damage {
            logs.quarantine(0, why, Some(&self.identity)).await?;
        }
        let log = logs.open_or_quarantine(self.identity.clone(), is_single_node).await?;
        let machine = self.cluster.machine();
        machine.replay_from(log.wal.clone());
        let replica = open_shard0_replica(&logs, log, &self.hub, machine).await?;
        self.cluster.set_replica(replica);
        if is_single_node {
            let elected = self.cluster.replica().elect().await;
            elected.map_err(|error| logs.damaged(0, &error.to_string()))?;
        }
        super::background::start_cluster(self);
        super::member_tasks::start_cluster(self);
        self.routes.send_modify(|count| *count += 1);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raft::replica_id;

    /// Returns whether node 1 follows a leader of term 5 with these voters, after some nodes have
    /// reported their terms, and others that their votes are lost.
    fn check(voters: &[u64], terms: &[(u64, u64)], lost: &[u64], is_settled: bool) -> bool {
        let repair = Repair { terms: terms.iter().copied().collect(), target: None };
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
        repair.check_vote(1, &leader, &lost.collect()).is_ok()
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
