//! Carries out the membership change in progress until it is done, also across failovers. Each
//! shard's leader moves its replicas to the target (`reconcile`). Shard 0's leader lets the new
//! node join, and ends the change when every shard has done its part.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::future::join_all;

use super::client::Cluster;
use super::member_addresses::address;
use super::members::Members;
use super::obstacle::Obstacle;
use super::peer_messages::{PeerRequest, PeerResponse};
use super::reconcile::{ChangePhase, ShardProgress, reconcile};
use crate::error::{Error, Result};
use crate::limits;
use crate::log::{ChangeKind, ClusterCommand, Joined, MemberChange, MemberCommand};
use crate::peer::{JoinCluster, PeerError};
use crate::raft::{Replica, ReplicaId, replica_id};
use crate::sync;

/// Progress of a membership change, as reported by the nodes that respond.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangeProgress {
    pub change: MemberChange,
    /// Phase of the shard that has progressed least.
    pub phase: ChangePhase,
    /// Reason why it makes no progress; empty while it does.
    pub blocked: String,
    /// All shards, sorted by id.
    pub shards: Vec<ShardProgress>,
}

impl ChangeProgress {
    fn ended(change: MemberChange, phase: ChangePhase, blocked: String) -> Self {
        Self { change, phase, blocked, shards: Vec::new() }
    }
}

impl Cluster {
    /// Runs one round of moving a shard's replicas to the target in the cluster's state.
    /// Runs on the shard's leader. Returns whether the target is reached.
    pub async fn reconcile(&self, shard_id: u64, replica: &Replica) -> bool {
        let current = || self.current_target(shard_id, replica);
        let (mut version, mut target, mut moving) = current();
        if target.voters.is_empty() || !replica.is_ready() {
            return target.voters.is_empty();
        }
        if !replica.membership().is(&target.voters, &target.learners) {
            // The shard's leader may lag behind on shard 0. An old target would revert later
            // changes.
            if let Err(error) = self.catch_up().await {
                let blocked = Obstacle::state_unknown(&error.to_string());
                let row = ShardProgress::new(shard_id, version, ChangePhase::Pending, blocked);
                self.lock_progress().insert(shard_id, row);
                return false;
            }
            (version, target, moving) = current();
            if target.voters.is_empty() {
                return true;
            }
        }
        let is_paused = self.hold_back(shard_id, replica, moving.as_ref(), &mut target);
        let waiting = if shard_id == 0 { self.deferred_leavers().await } else { BTreeSet::new() };
        target.voters.extend(&waiting);
        let row = |phase, blocked| ShardProgress::new(shard_id, version, phase, blocked);
        let mut is_done = false;
        let row = match reconcile(replica, &self.hub, shard_id, &target).await {
            Ok((ChangePhase::Done, _)) if !waiting.is_empty() => {
                row(ChangePhase::Pending, Obstacle::other_shards_first(0))
            }
            Ok((phase, state)) => {
                is_done = phase == ChangePhase::Done;
                let (phase, blocked) = match is_done && is_paused {
                    true => (ChangePhase::Pending, Obstacle::paused()),
                    false => (phase, state.blocked),
                };
                let (entries, bytes) = (state.entries, state.bytes);
                let (caught_up_to, commit_index) = (state.caught_up_to, state.commit_index);
                let row = row(phase, blocked);
                ShardProgress { entries, bytes, caught_up_to, commit_index, ..row }
            }
            Err(why) => {
                tracing::debug!(shard_id, %why, "cannot change the shard's replicas yet");
                row(ChangePhase::ChangingVoters, Obstacle::uncommitted(why))
            }
        };
        self.lock_progress().insert(shard_id, row);
        match moving.filter(|_| !is_paused) {
            Some(moving) if is_done => self.finish_move(shard_id, replica, &moving, &target).await,
            _ => is_done,
        }
    }

    /// Returns the replicas of shard 0 on leaving nodes that have to stay for now. A leaving node
    /// learns through shard 0 that it must transfer its leaderships. So its replica of shard 0
    /// stays until all other shards have removed theirs.
    async fn deferred_leavers(&self) -> BTreeSet<ReplicaId> {
        let members = self.members_now();
        let running = members.running().filter(|it| it.kind == ChangeKind::Remove);
        // With a placement, the planner moves the vote of a leaving node last.
        let Some(change) = running.filter(|_| members.placement().is_none()) else {
            return BTreeSet::new();
        };
        let rows = self.all_progress(change).await;
        if rows.iter().all(|row| row.shard_id == 0 || row.phase == ChangePhase::Done) {
            return BTreeSet::new();
        }
        let leaving = members.iter().filter(|it| it.leaving && it.generation > 0);
        leaving.map(|it| replica_id(it.node_id, it.generation)).collect()
    }

    /// Drops the progress of a shard that this node no longer leads.
    pub fn forget_progress(&self, shard_id: u64) {
        self.lock_progress().remove(&shard_id);
    }

    /// Returns the progress of the shards that this node leads.
    pub(super) fn local_progress(&self) -> Vec<ShardProgress> {
        let mut rows: Vec<ShardProgress> = self.lock_progress().values().cloned().collect();
        let join_blocked = sync::lock(&self.join_blocked).clone();
        // A node that has not joined yet blocks the change at shard 0's leader.
        if let Some(row) = rows.iter_mut().find(|row| row.shard_id == 0)
            && !join_blocked.is_empty()
        {
            let blocked = Obstacle::new(
                "NODE_NOT_JOINED",
                join_blocked,
                "see the log of the node that joins; remove-node cancels its addition",
            );
            (row.phase, row.blocked) = (ChangePhase::Pending, blocked);
        }
        rows
    }

    /// Takes one step of the change in progress. Runs on shard 0's leader.
    /// Returns `true` if no change is in progress.
    pub async fn drive_change(&self) -> bool {
        if !self.replica().is_ready() {
            return false;
        }
        let members = self.members_now();
        let running = members.running();
        let joining = running.and_then(|it| members.get(it.node_id)?.joining);
        if joining.is_none() {
            self.set_join_blocked("");
        }
        let Some(change) = running else { return true };
        let command = match joining {
            Some(generation) => match self.join_node(change.node_id, generation).await {
                Ok(()) => {
                    let node_id = change.node_id;
                    MemberCommand::Joined(Joined { node_id, generation })
                }
                Err(error) => {
                    self.set_join_blocked(&error.to_string());
                    return false;
                }
            },
            None if members.placement().is_some() => {
                if !self.is_placed(&members) {
                    self.drive_placement().await;
                    return false;
                }
                MemberCommand::Finish(change.id)
            }
            None => {
                let rows = self.all_progress(change).await;
                if rows.iter().any(|row| row.phase != ChangePhase::Done) {
                    return false;
                }
                MemberCommand::Finish(change.id)
            }
        };
        let is_end = matches!(command, MemberCommand::Finish(_));
        match self.command(ClusterCommand::Members(command)).await {
            Ok(_) if is_end => {
                tracing::info!(change = %change.describe(), "completed membership change");
            }
            Ok(_) => {}
            Err(error) => tracing::debug!(%error, "cannot advance the membership change yet"),
        }
        false
    }

    async fn join_node(&self, node_id: u64, generation: u32) -> Result<(), PeerError> {
        let cluster = self.hub.cluster().ok_or(PeerError::Closed)?;
        let (shards, peer_addrs) = self.machine().read(|state| {
            let members = state.members().iter().map(|member| member.node_id);
            let others = members.filter(|id| *id != node_id);
            let address = |id| Some((id, address(state, &self.seeds, id)?));
            // With a placement, the node creates its replicas one by one as they are moved to it.
            let is_placed = state.members().placement().is_some();
            let shards = state.shards().iter().copied().filter(|_| !is_placed);
            (shards.collect(), others.filter_map(address).collect())
        });
        self.hub.join(node_id, JoinCluster { cluster, generation, shards, peer_addrs }).await
    }

    fn set_join_blocked(&self, why: &str) {
        let before = std::mem::replace(&mut *sync::lock(&self.join_blocked), why.to_owned());
        if before != why && !why.is_empty() {
            tracing::info!("the new node has not joined yet: {why}");
        }
    }

    /// Collects the progress of a change from the connected nodes, for all shards, sorted by id.
    async fn all_progress(&self, change: &MemberChange) -> Vec<ShardProgress> {
        self.progress_since(change.version, &self.members_now()).await
    }

    /// Collects the progress of all shards since a version of the state, sorted by id.
    pub(super) async fn progress_since(
        &self,
        version: u64,
        members: &Members,
    ) -> Vec<ShardProgress> {
        let own = self.node_id();
        let others = members.iter().map(|it| it.node_id).filter(|node| *node != own);
        let requests = others.filter(|node| self.hub.is_connected(*node)).map(|node| async move {
            let wait = limits::PROGRESS_WAIT_MAX;
            let response = self.hub.call(node, PeerRequest::Progress.encode(), wait).await.ok()?;
            match PeerResponse::decode(response) {
                Ok(PeerResponse::Progress(rows)) => Some(rows),
                _ => None,
            }
        });
        let reported = join_all(requests).await.into_iter().flatten().flatten();
        let mut shards = self.machine().read(|state| state.shards().clone());
        shards.extend(members.placement().into_iter().flat_map(|it| it.shards()).map(|it| it.0));
        let pending = |id| ShardProgress::new(id, 0, ChangePhase::Pending, Obstacle::default());
        let mut rows: BTreeMap<u64, ShardProgress> =
            shards.into_iter().chain([0]).map(|id| (id, pending(id))).collect();
        for row in reported.chain(self.local_progress()).filter(|row| row.version >= version) {
            // A deposed leader may report outdated progress.
            if let Some(known) = rows.get_mut(&row.shard_id)
                && (row.version, row.phase) >= (known.version, known.phase)
            {
                *known = row;
            }
        }
        rows.into_values().collect()
    }

    /// Returns the progress of a change; id 0 stands for the one in progress, or else the last one.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown id, and the errors of [`Self::catch_up`].
    pub async fn change_progress(&self, id: u64) -> Result<ChangeProgress> {
        self.catch_up().await?;
        let members = self.members_now();
        let unknown = || Error::InvalidArgument {
            field: "id",
            what: format!("there is no membership change {id}"),
        };
        let last = members.last_change().ok_or_else(unknown)?.clone();
        if id > last.id {
            return Err(unknown());
        }
        if id != 0 && id < last.id {
            // Only the outcome of an earlier change is kept.
            let change = MemberChange { id, done: true, ..last.clone() };
            return Ok(if members.is_abandoned(id) {
                let blocked = format!("abandoned for {}", last.describe());
                ChangeProgress::ended(change, ChangePhase::Failed, blocked)
            } else {
                ChangeProgress::ended(change, ChangePhase::Done, String::new())
            });
        }
        if last.done {
            return Ok(ChangeProgress::ended(last, ChangePhase::Done, String::new()));
        }
        let shards = self.all_progress(&last).await;
        let shards = self.with_moves(&members, shards);
        let is_joining = members.get(last.node_id).is_some_and(|it| it.joining.is_some());
        let phase = shards.iter().map(|row| row.phase).min().filter(|_| !is_joining);
        let phase = phase.unwrap_or(ChangePhase::Pending);
        // Prefers the obstacle of a shard that does not only wait for other shards.
        let blocked = shards.iter().filter(|row| !row.blocked.is_none());
        let blocked = blocked.min_by_key(|row| (row.blocked.waits_for_shards(), row.shard_id));
        let blocked = blocked.map(|row| format!("shard {}: {}", row.shard_id, row.blocked));
        // The change itself is done only when shard 0's leader has finished it.
        let phase = phase.min(ChangePhase::ChangingVoters);
        Ok(ChangeProgress { change: last, phase, blocked: blocked.unwrap_or_default(), shards })
    }
}
