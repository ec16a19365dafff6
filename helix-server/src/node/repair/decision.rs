//! Decides the next step of a replica with damage. A pure function of what the voters reported.
//!
//! A replica gives up its log only if a majority of voters has everything without it. Otherwise it
//! keeps its votes and its log, withholds the damaged range, and repairs that range in place.
//! Voters are counted by replica id, which includes the generation: the successor of a lost
//! replica runs on the same node and has nothing. docs/decisions/0035 explains the rule.

use std::collections::{BTreeMap, BTreeSet};

use helix_wal::LogId;

use crate::limits;
use crate::raft::{ReplicaId, node_of};

/// Possible repair of a replica's damage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::node) enum DamageKind {
    /// Sealed segments can be repaired in place.
    InPlace,
    /// Only a new log helps.
    NeedsNewLog,
}

/// The replica with damage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::node) struct DamagedReplica {
    pub(in crate::node) id: ReplicaId,
    pub(in crate::node) is_leader: bool,
    pub(in crate::node) kind: DamageKind,
    /// Last entry that it may have acknowledged. Read before the other replicas are queried.
    pub(in crate::node) last: LogId,
}

/// Report of another replica about itself, under its own replica id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::node) struct VoterReport {
    /// Last durable entry.
    pub(in crate::node) last: LogId,
    /// It has damage that is not repaired.
    pub(in crate::node) is_damaged: bool,
    /// It may lack acknowledged entries, and does not vote.
    pub(in crate::node) in_repair: bool,
    /// It fetches records of a snapshot, so it lacks entries below its last one.
    pub(in crate::node) is_fetching: bool,
}

impl VoterReport {
    fn is_whole(&self) -> bool {
        !self.is_damaged && !self.in_repair && !self.is_fetching
    }

    /// Returns whether the voter has every entry that a replica with this last entry acknowledged.
    /// A log that ends in a later term has all entries of earlier terms that can be committed.
    fn has_all(&self, last: LogId) -> bool {
        self.is_whole() && self.last >= last
    }

    /// Returns whether it can take over leadership at once: the leader sends it the last entries.
    fn can_lead_after(&self, last: LogId) -> bool {
        let lag = last.index.saturating_sub(self.last.index);
        self.is_whole() && self.last.index > 0 && lag <= limits::BALANCE_LAG_MAX
    }
}

/// The next step of a replica with damage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::node) enum RepairStep {
    /// Nothing can be done now; the reason is for operators.
    Wait(String),
    /// Fetch the damaged entries from these replicas, the most promising first.
    RepairInPlace(Vec<ReplicaId>),
    /// Transfer leadership to this replica, which is whole and caught up.
    TransferTo(ReplicaId),
    /// Quarantine the log; the other replicas fill a new one.
    GiveUpLog,
}

/// Returns the next step. `configs` are the sets of voters that each need a majority. `reports`
/// contains the replicas that responded; all other voters count as lost. Any replica may send
/// entries, even a learner, because term and index identify an entry.
pub(in crate::node) fn next_step(
    own: &DamagedReplica,
    configs: &[BTreeSet<ReplicaId>],
    reports: &BTreeMap<ReplicaId, VoterReport>,
) -> RepairStep {
    let voters: BTreeSet<ReplicaId> = configs.iter().flatten().copied().collect();
    let others = || reports.iter().filter(|(id, _)| **id != own.id && voters.contains(id));
    if own.is_leader {
        let whole = others().filter(|(_, it)| it.can_lead_after(own.last));
        if let Some((id, _)) = whole.max_by_key(|(_, it)| it.last) {
            return RepairStep::TransferTo(*id);
        }
    }
    match own.kind {
        DamageKind::InPlace => {
            let mut from: Vec<(ReplicaId, &VoterReport)> =
                reports.iter().filter(|(id, _)| **id != own.id).map(|(id, it)| (*id, it)).collect();
            if from.is_empty() {
                return RepairStep::Wait("no other replica responds".to_owned());
            }
            // Also replicas that lack something have most entries: each range is tried everywhere.
            from.sort_by_key(|(id, it)| (!it.is_whole(), std::cmp::Reverse(it.last), *id));
            RepairStep::RepairInPlace(from.into_iter().map(|(id, _)| id).collect())
        }
        DamageKind::NeedsNewLog if own.is_leader => {
            RepairStep::Wait("no other voter is whole and caught up to take over".to_owned())
        }
        DamageKind::NeedsNewLog => match missing_majority(own, configs, reports) {
            None => RepairStep::GiveUpLog,
            Some(why) => RepairStep::Wait(why),
        },
    }
}

/// Returns why the other voters with every entry are not a majority; `None` if they are.
pub(in crate::node) fn missing_majority(
    own: &DamagedReplica,
    configs: &[BTreeSet<ReplicaId>],
    reports: &BTreeMap<ReplicaId, VoterReport>,
) -> Option<String> {
    if configs.is_empty() {
        return Some("the voters are unknown".to_owned());
    }
    configs.iter().find_map(|voters| {
        let has_all = |id: &&ReplicaId| {
            **id != own.id && reports.get(id).is_some_and(|it| it.has_all(own.last))
        };
        let (whole, needed) = (voters.iter().filter(has_all).count(), voters.len() / 2 + 1);
        if whole >= needed {
            return None;
        }
        let lacking = voters.iter().filter(|id| **id != own.id && !has_all(id));
        let lacking: Vec<String> = lacking
            .map(|id| format!("node {} {}", node_of(*id), state_of(reports.get(id))))
            .collect();
        let others = voters.len().saturating_sub(1);
        Some(format!(
            "{whole} of {others} other voters have everything, {needed} are needed: {}",
            lacking.join(", ")
        ))
    })
}

fn state_of(report: Option<&VoterReport>) -> &'static str {
    match report {
        None => "does not respond with the replica that votes",
        Some(it) if it.in_repair => "is in repair",
        Some(it) if it.is_fetching => "fetches records",
        Some(it) if it.is_damaged => "has damage",
        Some(_) => "is behind",
    }
}

#[cfg(test)]
mod tests;
