//! Majorities: of the members if each has a replica of each shard, else of a shard's voters.

use std::collections::{BTreeMap, BTreeSet};

use helix_server::raft::node_of;
use helix_wal::storage::Crash;

use super::log_rules::read_vote;
use super::{Elected, InvariantChecker};
use crate::cluster::SimulatedMachine;
use crate::damage::is_repair_file;
use crate::membership::DamageExtent;
use crate::observation::ReplicaObservation;

impl InvariantChecker {
    /// Checks that a majority has the vote for a leader on disk.
    ///
    /// A vote that a crash can undo may be given twice. The votes are read from copies of the disks
    /// after a power loss.
    pub(super) fn check_votes(
        &self,
        machines: &[SimulatedMachine],
        elected: &Elected,
    ) -> Result<(), String> {
        let (members, majority) = (self.members.all(), self.members.majority());
        let Elected { shard, term, replica, .. } = *elected;
        let may_vote = |node: u64| match self.is_placed {
            true => elected.configs.iter().flatten().any(|id| node_of(*id) == node),
            false => members.contains(&node),
        };
        let given = machines.iter().filter(|it| may_vote(it.node_id())).filter(|machine| {
            let id = machine.node_id();
            let may_lack_vote = self.members.damage_of(id) == Some(DamageExtent::AnyFile);
            if self.members.lost() == Some(id) || may_lack_vote {
                return true;
            }
            let Some(disk) = machine.disks().disk(shard) else { return false };
            let device = disk.fork();
            device.crash(Crash::LoseAll);
            // A log that is being replaced may have its vote in the note only.
            if device.files().iter().any(|name| is_repair_file(name)) {
                return true;
            }
            // Other checks report a disk that cannot be read.
            let Ok(report) = helix_wal::inspect(&device.reopen()) else { return true };
            let vote = report.vote.as_deref().and_then(read_vote);
            vote.is_some_and(|vote| vote.0 > term || (vote.0, vote.1) == (term, replica))
        });
        let given: Vec<u64> = given.map(SimulatedMachine::node_id).collect();
        let is_elected = match self.is_placed {
            true => have_majorities(&elected.configs, |id| given.contains(&node_of(id))),
            false => given.len() >= majority,
        };
        if !is_elected {
            return Err(format!(
                "shard {shard}: replica {replica} leads in term {term}, but only nodes {given:?} \
                 have that vote on disk"
            ));
        }
        Ok(())
    }

    /// Checks that committed entries are synced on a majority of nodes, running or not.
    pub(super) fn check_majorities(&self) -> Result<(), String> {
        let mut committed: BTreeMap<u64, u64> = BTreeMap::new();
        for ((_, shard), seen) in self.seen.iter().filter(|(_, seen)| seen.is_up) {
            let most = committed.entry(*shard).or_default();
            *most = (*most).max(seen.committed);
        }
        if self.is_placed {
            let mut shards = committed.into_iter().filter(|(shard, committed)| {
                *committed > 0 && !self.new_shards.is_given_up(*shard)
            });
            return shards.try_for_each(|(shard, committed)| {
                check_committed(&self.seen, self.members.lost(), shard, committed)
            });
        }
        let (members, majority) = (self.members.all(), self.members.majority());
        let lost = self.members.lost();
        for (shard, committed) in committed {
            let stable = members.iter().filter_map(|node| {
                let seen = self.seen.get(&(*node, shard))?;
                let counts_lost = lost == Some(*node) || seen.in_repair;
                let last = if counts_lost { seen.stable.max(seen.lost) } else { seen.stable };
                Some((*node, last.map_or(0, |id| id.index)))
            });
            let stable: Vec<(u64, u64)> = stable.collect();
            let count = stable.iter().filter(|(_, index)| *index >= committed).count();
            if committed > 0 && count < majority {
                return Err(format!(
                    "shard {shard}: {committed} is committed, but the nodes have synced, by node, \
                     {stable:?}"
                ));
            }
        }
        Ok(())
    }
}

/// Returns whether a majority of each set of voters satisfies a condition.
fn have_majorities(configs: &[BTreeSet<u64>], holds: impl Fn(u64) -> bool) -> bool {
    let has_majority =
        |voters: &BTreeSet<u64>| voters.iter().filter(|id| holds(**id)).count() > voters.len() / 2;
    !configs.is_empty() && configs.iter().all(has_majority)
}

/// Checks that a majority of voters has synced all committed entries, by the voters that one of the
/// replicas knows or knew before the last change. Replicas of the lost node count as they were.
fn check_committed(
    seen: &BTreeMap<(u64, u64), ReplicaObservation>,
    lost: Option<u64>,
    shard: u64,
    committed: u64,
) -> Result<(), String> {
    let last = |id: u64| {
        let seen = seen.get(&(node_of(id), shard))?;
        let counts_lost = lost == Some(node_of(id)) || seen.in_repair;
        let stable = seen.stable.filter(|_| seen.replica_id == id);
        let last = if counts_lost { stable.max(seen.lost) } else { stable };
        last.map(|last| last.index)
    };
    let of_shard = || seen.iter().filter(|((_, it), _)| *it == shard).map(|(_, it)| it);
    if of_shard().all(|it| it.configs.is_empty()) {
        return Ok(());
    }
    let mut known = of_shard().flat_map(|it| [&it.configs, &it.configs_before]);
    let has_all = |id| last(id).is_some_and(|last| last >= committed);
    if known.any(|configs| have_majorities(configs, has_all)) {
        return Ok(());
    }
    let known: BTreeSet<_> = of_shard().map(|it| &it.configs).collect();
    let ends = known.iter().flat_map(|it| it.iter()).flatten();
    let ends: BTreeMap<(u64, u64), Option<u64>> =
        ends.map(|id| ((node_of(*id), *id & 0xffff_ffff), last(*id))).collect();
    Err(format!(
        "shard {shard}: {committed} is committed, but no majority of {known:?} has synced it; by \
         (node, generation): {ends:?}"
    ))
}
