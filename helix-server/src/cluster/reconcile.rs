//! Brings the replicas of one shard to those that the cluster's state asks for, one step at a
//! time. Run by the shard's leader, again and again, whoever that is: what to do next follows from
//! the membership in force, so a new leader goes on where the last one stopped.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message;

use crate::limits;
use crate::peer::Hub;
use crate::raft::{Membership, Replica, ReplicaId, node_of};

/// How far a shard, or a whole change, is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    Pending,
    CatchingUp,
    ChangingVoters,
    Done,
    /// Given up in favour of another change.
    Failed,
}

/// What a shard's leader says of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardProgress {
    pub shard_id: u64,
    /// Version of the cluster's state that this is about.
    pub version: u64,
    pub phase: Phase,
    /// Entries that new replicas lack.
    pub entries: u64,
    /// Why it does not go on; empty while it does.
    pub blocked: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ProgressRecord {
    #[prost(message, repeated, tag = "1")]
    rows: Vec<RowRecord>,
}

#[derive(Clone, PartialEq, Message)]
struct RowRecord {
    #[prost(uint64, tag = "1")]
    shard_id: u64,
    #[prost(uint64, tag = "2")]
    version: u64,
    /// 1: pending, 2: catching up, 3: changing voters, 4: done, 5: failed.
    #[prost(uint32, tag = "3")]
    phase: u32,
    #[prost(uint64, tag = "4")]
    entries: u64,
    #[prost(string, tag = "5")]
    blocked: String,
}

const PHASES: [Phase; 5] =
    [Phase::Pending, Phase::CatchingUp, Phase::ChangingVoters, Phase::Done, Phase::Failed];

impl From<&[ShardProgress]> for ProgressRecord {
    fn from(rows: &[ShardProgress]) -> Self {
        let rows = rows.iter().map(|row| RowRecord {
            shard_id: row.shard_id,
            version: row.version,
            phase: row.phase as u32 + 1,
            entries: row.entries,
            blocked: row.blocked.clone(),
        });
        Self { rows: rows.collect() }
    }
}

impl ProgressRecord {
    pub(super) fn into_rows(self) -> Result<Vec<ShardProgress>, String> {
        let row = |row: RowRecord| {
            let place = usize::try_from(row.phase).ok().and_then(|number| number.checked_sub(1));
            let phase = place.and_then(|place| PHASES.get(place)).copied();
            Ok(ShardProgress {
                shard_id: row.shard_id,
                version: row.version,
                phase: phase.ok_or_else(|| format!("phase {} is not known", row.phase))?,
                entries: row.entries,
                blocked: row.blocked,
            })
        };
        self.rows.into_iter().map(row).collect()
    }
}

/// What the next step follows from.
#[derive(Debug, Clone)]
struct Sight<'a> {
    own: ReplicaId,
    membership: &'a Membership,
    target: &'a BTreeSet<ReplicaId>,
    /// Nodes that answer, this one among them.
    reached: &'a BTreeSet<u64>,
    /// Entries that each other replica lacks.
    lags: &'a BTreeMap<ReplicaId, u64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    Done,
    Wait {
        phase: Phase,
        entries: u64,
        blocked: String,
    },
    /// Leaves the joint configuration that a change was left in.
    LeaveJoint,
    AddLearner(ReplicaId),
    DropLearners(BTreeSet<ReplicaId>),
    SetVoters(BTreeSet<ReplicaId>),
    HandOver(ReplicaId),
}

impl Sight<'_> {
    fn is_reached(&self, replica: ReplicaId) -> bool {
        self.reached.contains(&node_of(replica))
    }

    fn lag(&self, replica: ReplicaId) -> Option<u64> {
        if replica == self.own { Some(0) } else { self.lags.get(&replica).copied() }
    }

    fn is_caught_up(&self, replica: ReplicaId) -> bool {
        self.lag(replica).is_some_and(|lag| lag <= limits::LEARNER_LAG_MAX)
    }

    fn next(&self) -> Step {
        let Membership { configs, learners, is_committed } = self.membership;
        let wait = |phase, blocked: &str| {
            let blocked = blocked.to_owned();
            Step::Wait { phase, entries: 0, blocked }
        };
        let Some(voters) = configs.first().filter(|_| *is_committed) else {
            return wait(Phase::ChangingVoters, "");
        };
        if configs.len() > 1 {
            return Step::LeaveJoint;
        }
        let strangers: BTreeSet<ReplicaId> = learners.difference(self.target).copied().collect();
        if !strangers.is_empty() {
            return Step::DropLearners(strangers);
        }
        if voters == self.target {
            return Step::Done;
        }
        let new: Vec<ReplicaId> = self.target.difference(voters).copied().collect();
        if let Some(&id) = new.iter().find(|id| !learners.contains(id)) {
            if self.is_reached(id) {
                return Step::AddLearner(id);
            }
            let blocked = format!("node {} cannot be reached", node_of(id));
            return wait(Phase::Pending, &blocked);
        }
        if let Some(wait) = self.behind(&new) {
            return wait;
        }
        self.change_voters(voters)
    }

    /// Waits for new replicas that lack too much to vote.
    fn behind(&self, new: &[ReplicaId]) -> Option<Step> {
        let behind: Vec<ReplicaId> =
            new.iter().copied().filter(|id| !self.is_caught_up(*id)).collect();
        let lost = behind.iter().find(|id| !self.is_reached(**id));
        let blocked = lost.map(|id| format!("node {} cannot be reached", node_of(*id)));
        let entries = behind.iter().filter_map(|id| self.lag(*id)).sum();
        let blocked = blocked.unwrap_or_default();
        (!behind.is_empty()).then_some(Step::Wait { phase: Phase::CatchingUp, entries, blocked })
    }

    /// A change waits for a majority of those that vote after it, and so do all writes meanwhile:
    /// it is begun only if they are there.
    fn change_voters(&self, voters: &BTreeSet<ReplicaId>) -> Step {
        let is_well = |id: &&ReplicaId| self.is_reached(**id) && self.is_caught_up(**id);
        let (count, well) = (self.target.len(), self.target.iter().filter(is_well).count());
        let needed = count / 2 + 1;
        if well < needed {
            let blocked = format!(
                "it would leave {well} of {count} voters reachable and caught up, {needed} are \
                 needed"
            );
            return Step::Wait { phase: Phase::ChangingVoters, entries: 0, blocked };
        }
        if self.target.contains(&self.own) {
            return Step::SetVoters(self.target.clone());
        }
        // A leader that has to go hands over first, to one that stays.
        let stays = self.target.intersection(voters).filter(is_well);
        match stays.min_by_key(|id| self.lag(**id)) {
            Some(heir) => Step::HandOver(*heir),
            None if self.target.is_disjoint(voters) => {
                Step::SetVoters(self.target.iter().copied().chain([self.own]).collect())
            }
            None => {
                let blocked = "nobody that stays could take over".to_owned();
                Step::Wait { phase: Phase::ChangingVoters, entries: 0, blocked }
            }
        }
    }
}

/// Takes steps until there is something to wait for, or nothing to do.
///
/// # Errors
/// A step was not taken, in words; the next round looks again.
pub(super) async fn reconcile(
    replica: &Replica,
    hub: &Hub,
    shard_id: u64,
    target: &BTreeSet<ReplicaId>,
) -> Result<(Phase, u64, String), String> {
    loop {
        let membership = replica.membership();
        let mut reached: BTreeSet<u64> =
            hub.peers().iter().filter(|peer| peer.connected).map(|peer| peer.node_id).collect();
        reached.insert(node_of(replica.id()));
        let last = replica.status().last_index;
        let matched = replica.matched().into_iter();
        let lags = matched.map(|(id, index)| (id, last.saturating_sub(index))).collect();
        let sight = Sight {
            own: replica.id(),
            membership: &membership,
            target,
            reached: &reached,
            lags: &lags,
        };
        let step = sight.next();
        if !matches!(step, Step::Wait { .. } | Step::Done) {
            tracing::info!(shard_id, ?step, "the shard's replicas change");
        }
        let taking = async {
            match step {
                Step::Done => return Ok(Some((Phase::Done, 0, String::new()))),
                Step::Wait { phase, entries, blocked } => {
                    return Ok(Some((phase, entries, blocked)));
                }
                Step::LeaveJoint => replica.leave_joint().await?,
                Step::AddLearner(id) => replica.add_learner(id).await?,
                Step::DropLearners(ids) => replica.drop_learners(ids).await?,
                Step::SetVoters(ids) => replica.set_voters(ids).await?,
                Step::HandOver(id) => {
                    let handed = replica.hand_over(Some(node_of(id)), &[]).await;
                    handed.map_err(|error| error.to_string())?;
                    return Ok(Some((Phase::ChangingVoters, 0, String::new())));
                }
            }
            Ok::<_, String>(None)
        };
        match tokio::time::timeout(limits::COMMIT_WAIT_MAX, taking).await {
            Ok(Ok(Some(progress))) => return Ok(progress),
            Ok(Ok(None)) => {}
            Ok(Err(why)) => return Err(why),
            Err(_) => return Err(format!("not committed within {:?}", limits::COMMIT_WAIT_MAX)),
        }
    }
}

#[cfg(test)]
mod tests;
