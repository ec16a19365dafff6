//! Moves the replicas of one shard to the target in the cluster's state, one step at a time.
//! The shard's leader runs it repeatedly. Each step is derived from the Raft membership in effect,
//! so a new leader continues where the previous one stopped.

use std::collections::{BTreeMap, BTreeSet};

use super::obstacle::{MajorityLack, Obstacle};
use super::placement::ShardTarget;
use crate::limits;
use crate::peer::Hub;
use crate::raft::{Membership, Replica, ReplicaId, node_of};
use crate::records::{ProgressRecord, ShardProgressRecord};

/// Phase of a membership change, for one shard or as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ChangePhase {
    Pending,
    CatchingUp,
    ChangingVoters,
    Done,
    /// Abandoned for another change.
    Failed,
}

/// Progress of a membership change in one shard, as reported by the shard's leader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardProgress {
    pub shard_id: u64,
    /// Version of the cluster's state that the target comes from.
    pub version: u64,
    pub phase: ChangePhase,
    /// Entries that new replicas still lack.
    pub entries: u64,
    /// Approximate bytes of these entries.
    pub bytes: u64,
    /// Last entry of the slowest new replica; 0 if it has no entry or there is no new replica.
    pub caught_up_to: u64,
    /// Last committed entry of the shard; 0 if it is not known.
    pub commit_index: u64,
    /// Reason why it makes no progress; empty while it does.
    pub blocked: Obstacle,
}

impl ShardProgress {
    /// Returns the progress of a shard of which only phase and obstacle are known.
    pub(super) fn new(shard_id: u64, version: u64, phase: ChangePhase, blocked: Obstacle) -> Self {
        let (entries, bytes, caught_up_to, commit_index) = (0, 0, 0, 0);
        Self { shard_id, version, phase, entries, bytes, caught_up_to, commit_index, blocked }
    }
}

const PHASES: [ChangePhase; 5] = [
    ChangePhase::Pending,
    ChangePhase::CatchingUp,
    ChangePhase::ChangingVoters,
    ChangePhase::Done,
    ChangePhase::Failed,
];

impl From<&[ShardProgress]> for ProgressRecord {
    fn from(rows: &[ShardProgress]) -> Self {
        let rows = rows.iter().map(|row| ShardProgressRecord {
            shard_id: row.shard_id,
            version: row.version,
            phase: row.phase as u32 + 1,
            entries: row.entries,
            blocked: row.blocked.what.clone(),
            code: row.blocked.code.clone(),
            next_step: row.blocked.next_step.clone(),
            caught_up_to: row.caught_up_to,
            commit_index: row.commit_index,
            bytes: row.bytes,
        });
        Self { rows: rows.collect() }
    }
}

impl ProgressRecord {
    pub(super) fn into_rows(self) -> Result<Vec<ShardProgress>, String> {
        let row = |row: ShardProgressRecord| {
            let index = usize::try_from(row.phase).ok().and_then(|number| number.checked_sub(1));
            let phase = index.and_then(|index| PHASES.get(index)).copied();
            Ok(ShardProgress {
                shard_id: row.shard_id,
                version: row.version,
                phase: phase
                    .ok_or_else(|| format!("phase {} is unknown to this version", row.phase))?,
                entries: row.entries,
                bytes: row.bytes,
                caught_up_to: row.caught_up_to,
                commit_index: row.commit_index,
                blocked: Obstacle { code: row.code, what: row.blocked, next_step: row.next_step },
            })
        };
        self.rows.into_iter().map(row).collect()
    }
}

/// The facts that determine the next step.
#[derive(Debug, Clone)]
struct ReconcileInput<'a> {
    own: ReplicaId,
    membership: &'a Membership,
    /// The voters that the shard should have.
    target: &'a BTreeSet<ReplicaId>,
    /// Replicas that should follow the log without a vote.
    followers: &'a BTreeSet<ReplicaId>,
    /// Nodes that this node is connected to, and itself.
    reached: &'a BTreeSet<u64>,
    /// Entries that each of the other replicas lacks.
    lags: &'a BTreeMap<ReplicaId, u64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    Done,
    Wait {
        phase: ChangePhase,
        entries: u64,
        blocked: Obstacle,
    },
    /// Leaves the joint configuration of an unfinished change.
    LeaveJoint,
    AddLearner(ReplicaId),
    DropLearners(BTreeSet<ReplicaId>),
    SetVoters(BTreeSet<ReplicaId>),
    TransferLeadership(ReplicaId),
}

impl ReconcileInput<'_> {
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
        let wait = |phase, blocked| Step::Wait { phase, entries: 0, blocked };
        let Some(voters) = configs.first().filter(|_| *is_committed) else {
            return wait(ChangePhase::ChangingVoters, Obstacle::default());
        };
        if configs.len() > 1 {
            return Step::LeaveJoint;
        }
        if !voters.contains(&self.own) {
            // openraft makes a removed leader step down; its successor takes the next step.
            return wait(ChangePhase::ChangingVoters, Obstacle::default());
        }
        let is_unwanted =
            |id: &&ReplicaId| !self.target.contains(id) && !self.followers.contains(id);
        let unwanted: BTreeSet<ReplicaId> = learners.iter().filter(is_unwanted).copied().collect();
        if !unwanted.is_empty() {
            return Step::DropLearners(unwanted);
        }
        let is_new = |id: &&ReplicaId| !learners.contains(id) && !voters.contains(id);
        let mut new_followers = self.followers.iter().copied().filter(|id| is_new(&id));
        if let Some(id) = new_followers.clone().find(|id| self.is_reached(*id)) {
            return Step::AddLearner(id);
        }
        if voters == self.target {
            let Some(absent) = new_followers.next() else { return Step::Done };
            return wait(ChangePhase::Pending, Obstacle::unreachable(node_of(absent)));
        }
        let new: Vec<ReplicaId> = self.target.difference(voters).copied().collect();
        if let Some(&id) = new.iter().find(|id| !learners.contains(id)) {
            if self.is_reached(id) {
                return Step::AddLearner(id);
            }
            return wait(ChangePhase::Pending, Obstacle::unreachable(node_of(id)));
        }
        if let Some(wait) = self.lagging(&new) {
            return wait;
        }
        self.change_voters(voters)
    }

    /// Returns a wait for new replicas that lag too far behind to vote; `None` if there are none.
    fn lagging(&self, new: &[ReplicaId]) -> Option<Step> {
        let lagging: Vec<ReplicaId> =
            new.iter().copied().filter(|id| !self.is_caught_up(*id)).collect();
        let lost = lagging.iter().find(|id| !self.is_reached(**id));
        let blocked = lost.map(|id| Obstacle::unreachable(node_of(*id)));
        let lags = lagging.iter().filter_map(|id| self.lag(*id));
        let entries = lags.fold(0, u64::saturating_add);
        let blocked = blocked.unwrap_or_default();
        (!lagging.is_empty()).then_some(Step::Wait {
            phase: ChangePhase::CatchingUp,
            entries,
            blocked,
        })
    }

    /// Returns the step that changes the voters. A voter change needs a majority of the new voters,
    /// and all writes wait for it. So it starts only if such a majority is reachable and caught up.
    fn change_voters(&self, voters: &BTreeSet<ReplicaId>) -> Step {
        let is_healthy = |id: &&ReplicaId| self.is_reached(**id) && self.is_caught_up(**id);
        let (count, healthy) = (self.target.len(), self.target.iter().filter(is_healthy).count());
        let needed = count / 2 + 1;
        if healthy < needed {
            let nodes = |is_reached| {
                let unfit = self.target.iter().filter(|id| !is_healthy(id));
                let of = unfit.filter(move |id| self.is_reached(**id) == is_reached);
                of.map(|id| node_of(*id)).collect()
            };
            let (silent, lagging) = (nodes(false), nodes(true));
            let lack = MajorityLack { healthy, count, silent, lagging };
            let blocked = Obstacle::no_majority(&lack);
            return Step::Wait { phase: ChangePhase::ChangingVoters, entries: 0, blocked };
        }
        if self.target.contains(&self.own) {
            return Step::SetVoters(self.target.clone());
        }
        // A leader that is not in the target first transfers leadership to a voter that stays.
        let stays = self.target.intersection(voters).filter(is_healthy);
        match stays.min_by_key(|id| self.lag(**id)) {
            Some(successor) => Step::TransferLeadership(*successor),
            None if self.target.is_disjoint(voters) => {
                Step::SetVoters(self.target.iter().copied().chain([self.own]).collect())
            }
            None => {
                let blocked = Obstacle::no_successor(voters.len());
                Step::Wait { phase: ChangePhase::ChangingVoters, entries: 0, blocked }
            }
        }
    }
}

/// State of the reconciliation of a shard.
#[derive(Debug, Default)]
pub(super) struct ReconcileState {
    /// Entries that new replicas still lack.
    pub(super) entries: u64,
    pub(super) bytes: u64,
    pub(super) caught_up_to: u64,
    pub(super) commit_index: u64,
    pub(super) blocked: Obstacle,
}

impl ReconcileState {
    /// Returns the state of a shard whose new replicas lack this many entries.
    fn of(replica: &Replica, target: &ShardTarget, entries: u64, blocked: Obstacle) -> Self {
        let status = replica.status();
        let held = status.last_index.saturating_sub(status.purged).max(1);
        let voters = replica.voters();
        let is_new = |id: &ReplicaId| target.voters.contains(id) && !voters.contains(id);
        let matched = replica.matched().into_iter().filter(|(id, _)| is_new(id));
        let bytes = u128::from(status.wal.held_bytes) * u128::from(entries) / u128::from(held);
        Self {
            entries,
            bytes: u64::try_from(bytes).unwrap_or(u64::MAX),
            caught_up_to: matched.map(|(_, index)| index).min().unwrap_or(0),
            commit_index: status.committed,
            blocked,
        }
    }
}

/// Takes steps until it has to wait or is done.
///
/// # Errors
/// The reason why a step failed; the next round derives the step again.
pub(super) async fn reconcile(
    replica: &Replica,
    hub: &Hub,
    shard_id: u64,
    target: &ShardTarget,
) -> Result<(ChangePhase, ReconcileState), String> {
    loop {
        let membership = replica.membership();
        let mut reached: BTreeSet<u64> =
            hub.peers().iter().filter(|peer| peer.connected).map(|peer| peer.node_id).collect();
        reached.insert(node_of(replica.id()));
        let last = replica.status().last_index;
        let matched = replica.matched().into_iter();
        let lags = matched.map(|(id, index)| (id, last.saturating_sub(index))).collect();
        let input = ReconcileInput {
            own: replica.id(),
            membership: &membership,
            target: &target.voters,
            followers: &target.learners,
            reached: &reached,
            lags: &lags,
        };
        let step = input.next();
        if !matches!(step, Step::Wait { .. } | Step::Done) {
            tracing::info!(shard_id, ?step, "changing the shard's replicas");
        }
        let apply = async {
            match step {
                Step::Done => {
                    let state = ReconcileState::of(replica, target, 0, Obstacle::default());
                    return Ok(Some((ChangePhase::Done, state)));
                }
                Step::Wait { phase, entries, blocked } => {
                    let state = ReconcileState::of(replica, target, entries, blocked);
                    return Ok(Some((phase, state)));
                }
                Step::LeaveJoint => replica.leave_joint().await?,
                Step::AddLearner(id) => replica.add_learner(id).await?,
                Step::DropLearners(ids) => replica.drop_learners(ids).await?,
                Step::SetVoters(ids) => {
                    replica.set_voters(ids, !target.learners.is_empty()).await?;
                }
                Step::TransferLeadership(id) => {
                    let transferred = replica.transfer_leadership(Some(node_of(id)), &[]).await;
                    transferred.map_err(|error| error.to_string())?;
                    return Ok(Some((ChangePhase::ChangingVoters, ReconcileState::default())));
                }
            }
            Ok::<_, String>(None)
        };
        match tokio::time::timeout(limits::COMMIT_WAIT_MAX, apply).await {
            Ok(Ok(Some(progress))) => return Ok(progress),
            Ok(Ok(None)) => {}
            Ok(Err(why)) => return Err(why),
            Err(_) => return Err(format!("not committed within {:?}", limits::COMMIT_WAIT_MAX)),
        }
    }
}

#[cfg(test)]
mod tests;
