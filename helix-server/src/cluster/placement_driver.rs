//! Runs the planner on shard 0's leader, and finishes the moves that the shards' leaders have
//! carried out. Also reports the placement to operators and takes their requests.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::future::join_all;

use super::client::{Cluster, unexpected};
use super::members::Members;
use super::node_changes::refusal;
use super::obstacle::Obstacle;
use super::peer_messages::{PeerResponse, ReplicaStatusRequest};
use super::placed_split::PlacedSplit;
use super::placement::{MoveReason, ReplicaPlacement, ShardMove, ShardTarget};
use super::planner::{Plan, PlanStep, needs_no_move, plan, rack_objection};
use super::reconcile::{ChangePhase, ShardProgress};
use super::split_driver::next_split;
use crate::error::{Error, Result};
use crate::limits;
use crate::log::{
    AddShards, CancelMove, CancelSplit, ClusterCommand, ClusterReply, FinishMove, MemberCommand,
    PlanMove, SetCordoned, SetRack, TakePlacement,
};
use crate::protocol;
use crate::raft::{Replica, ReplicaId, node_and_generation};

/// Longest wait for the placement and the protocol version of a new cluster.
const PLACEMENT_WAIT_MAX: Duration = Duration::from_secs(1);

/// Placement of all shards, with the plan for them.
#[derive(Debug, Clone)]
pub struct PlacementReport {
    pub members: Members,
    /// Data shards that take partitions.
    pub open: BTreeSet<u64>,
    pub plan: Plan,
    /// Progress of the moves, by the shards' leaders.
    pub progress: Vec<ShardProgress>,
    /// Nodes that respond.
    pub reachable: BTreeSet<u64>,
    /// Why the new replica of a shard accepts no entries, by shard.
    pub unwritable: BTreeMap<u64, String>,
    /// Times until the next tries of splits, by the shard that is to come from the split.
    pub split_pauses: BTreeMap<u64, Duration>,
}

impl PlacementReport {
    /// Returns the progress of a shard's move, with the reason if it is blocked.
    pub fn progress_of(&self, shard_id: u64) -> Option<ShardProgress> {
        let shard = self.members.placement()?.shard(shard_id)?;
        let moving = shard.moving.as_ref()?;
        let row = self.progress.iter().find(|row| row.shard_id == shard_id);
        let row = row.filter(|row| row.version > 0).cloned();
        let pending = || {
            let blocked = Obstacle::no_leader(shard_id);
            ShardProgress::new(shard_id, 0, ChangePhase::Pending, blocked)
        };
        let mut row = row.unwrap_or_else(pending);
        if let Some(to) = moving.to.filter(|_| !moving.is_created && !moving.is_cancelled) {
            row.blocked = Obstacle::not_created(to, self.reachable.contains(&to));
        } else if let Some(to) = moving.to.filter(|to| {
            let is_working = row.blocked.is_none() && row.phase != ChangePhase::Done;
            is_working && !moving.is_cancelled && !self.reachable.contains(to)
        }) {
            row.blocked = Obstacle::unreachable(to);
        }
        if let (Some(to), Some(why)) = (moving.to, self.unwritable.get(&shard_id)) {
            row.blocked = Obstacle::no_space(to, why, row.bytes);
        }
        Some(row)
    }
}

impl PlacementReport {
    /// Returns why the split that creates a shard makes no progress.
    pub fn split_obstacle(&self, shard_id: u64, split: &PlacedSplit) -> Obstacle {
        if let Some(pause) = self.split_pauses.get(&shard_id).filter(|_| !split.is_planned()) {
            return Obstacle::split_hung(*pause);
        }
        let silent = split.replicas.keys().find(|node| !self.reachable.contains(node));
        silent.map_or_else(Obstacle::default, |node| Obstacle::unreachable(*node))
    }
}

impl Cluster {
    /// Returns the version of this node's copy of the state, the replicas that a shard should have
    /// according to it, and the move that these replicas finish.
    pub(super) fn current_target(
        &self,
        shard_id: u64,
        replica: &Replica,
    ) -> (u64, ShardTarget, Option<ShardMove>) {
        let membership = replica.membership();
        self.machine().read(|state| {
            let members = state.members();
            let mut target = members.shard_target(shard_id);
            let (node_id, generation) = node_and_generation(replica.id());
            if shard_id != 0 && !members.names_replica(shard_id, node_id, generation) {
                return (state.version(), ShardTarget::default(), None);
            }
            let shard = members.placement().and_then(|it| it.shard(shard_id));
            if shard.is_some() && shard_id != 0 {
                // A lost replica stays until another one takes its place, but never returns.
                let is_lost = |id: ReplicaId| {
                    let (node_id, generation) = node_and_generation(id);
                    members.is_lost(node_id, generation)
                };
                target.voters.retain(|id| membership.has_voter(*id) || !is_lost(*id));
            }
            (state.version(), target, shard.and_then(|it| it.finishable()).copied())
        })
    }

    /// Keeps a shard's current voters as its target while moves are paused.
    ///
    /// A shard whose voters have already changed finishes its move, and a cancelled move restores
    /// the previous replicas. Returns whether the shard waits.
    pub(super) fn hold_back(
        &self,
        shard_id: u64,
        replica: &Replica,
        moving: Option<&ShardMove>,
        target: &mut ShardTarget,
    ) -> bool {
        let is_paused = self
            .machine()
            .read(|state| state.members().placement().is_some_and(ReplicaPlacement::is_paused));
        let is_running = moving.is_some_and(|it| !it.is_cancelled);
        let membership = replica.membership();
        let [voters] = membership.configs.as_slice() else { return false };
        if shard_id == 0 || !is_paused || !is_running || *voters == target.voters {
            return false;
        }
        target.voters.clone_from(voters);
        true
    }

    /// Commits that a move is finished, or that a cancelled one has restored the old replicas. Runs
    /// on the shard's leader, whose membership is the target.
    pub(super) async fn finish_move(
        &self,
        shard_id: u64,
        replica: &Replica,
        moving: &ShardMove,
        target: &ShardTarget,
    ) -> bool {
        // Another leader may have changed the replicas since.
        let confirmed = tokio::time::timeout(limits::READ_INDEX_WAIT_MAX, replica.read_index());
        let is_leader = matches!(confirmed.await, Ok(Ok(())));
        if !is_leader || !replica.membership().is(&target.voters, &target.learners) {
            return false;
        }
        let finish = FinishMove { shard_id, id: moving.id, cancelled: moving.is_cancelled };
        match self.command(ClusterCommand::Members(MemberCommand::FinishMove(finish))).await {
            Ok(_) => {
                tracing::info!(
                    shard_id,
                    from = moving.from,
                    to = moving.to,
                    cancelled = moving.is_cancelled,
                    "moved a replica"
                );
                true
            }
            Err(error) => {
                tracing::debug!(shard_id, %error, "cannot finish the move yet");
                false
            }
        }
    }

    /// Takes over the placement of a cluster that has none, or starts the next moves. Runs on shard
    /// 0's leader. Returns whether there is nothing to do until something changes.
    pub async fn drive_placement(&self) -> bool {
        if !self.replica().is_ready() || self.protocol() < protocol::PLACEMENT {
            return true;
        }
        let (version, members, shards) = self.machine().read(|state| {
            let shards: Vec<u64> = state.shards().iter().copied().collect();
            (state.version(), state.members().clone(), shards)
        });
        let reachable = self.reachable();
        let is_settled =
            self.observe_nodes(&members, &reachable) & self.observe_splits(members.placement());
        let may_try = |shard_id: u64| self.split_pause(shard_id).is_none();
        let split = self.machine().read(|state| next_split(state, &reachable, may_try));
        let step = if let Some(split) = split {
            split
        } else if members.placement().is_some() {
            let steps = plan(&members, &reachable, &self.down_nodes()).steps;
            let Some(step) = steps.into_iter().next() else { return is_settled };
            step.command(version)
        } else if members.running().is_none() && !shards.is_empty() {
            let replicas = self.replica().voters();
            MemberCommand::TakePlacement(TakePlacement { replicas, shards })
        } else {
            return true;
        };
        match self.command(ClusterCommand::Members(step)).await {
            Ok(ClusterReply::Done) => {}
            Ok(other) => tracing::debug!(reply = ?other, "the cluster refused a planned move"),
            Err(error) => tracing::debug!(%error, "cannot change the placement yet"),
        }
        false
    }

    fn reachable(&self) -> BTreeSet<u64> {
        self.hub.connected().into_iter().chain([self.node_id()]).collect()
    }

    /// Returns whether the membership change in progress has nothing left to do: all replicas are
    /// where they should be, except for moves that only spread them.
    pub(super) fn is_placed(&self, members: &Members) -> bool {
        let target = members.shard_target(0);
        needs_no_move(members) && self.replica().membership().is(&target.voters, &target.learners)
    }

    /// Adds to the progress of a change the moves that it still needs.
    pub(super) fn with_moves(
        &self,
        members: &Members,
        mut rows: Vec<ShardProgress>,
    ) -> Vec<ShardProgress> {
        let Some(placement) = members.placement() else { return rows };
        let reachable = self.reachable();
        let plan = plan(members, &reachable, &self.down_nodes());
        let has_leaver = members.iter().any(|it| it.leaving && members.has_data(it.node_id));
        for row in &mut rows {
            if row.shard_id == 0 && has_leaver && row.phase == ChangePhase::Done {
                row.phase = ChangePhase::Pending;
                row.blocked = Obstacle::other_shards_first(plan.waiting_shards());
                continue;
            }
            let moving = placement.shard(row.shard_id).and_then(|it| it.moving.as_ref());
            let stuck = plan.stuck.iter().find(|it| it.shard_id == row.shard_id);
            let is_planned = plan.steps.iter().any(|step| match step {
                PlanStep::Move(it) => it.shard_id == row.shard_id && !it.reason.is_optional(),
                PlanStep::Cancel { shard_id, .. } => *shard_id == row.shard_id,
            });
            let waits = moving.is_some_and(|it| !it.reason.is_optional()) || is_planned;
            if (waits || stuck.is_some_and(|it| !it.reason.is_lack_of_nodes()))
                && row.phase == ChangePhase::Done
            {
                row.phase = ChangePhase::Pending;
                if let Some(stuck) = stuck {
                    row.blocked = stuck.reason.obstacle();
                } else if let Some(to) = moving.filter(|it| !it.is_created).and_then(|it| it.to) {
                    row.blocked = Obstacle::not_created(to, reachable.contains(&to));
                }
            }
        }
        rows
    }

    /// Returns the placement of all shards, and the plan for them.
    ///
    /// # Errors
    /// [`Error::Unimplemented`] before every node runs a release with placement, and the errors of
    /// [`Self::catch_up`].
    pub async fn placement(&self) -> Result<PlacementReport> {
        self.wait_placed().await?;
        self.catch_up().await?;
        let (members, open) =
            self.machine().read(|state| (state.members().clone(), state.shards().clone()));
        let reachable = self.reachable();
        let plan = plan(&members, &reachable, &self.down_nodes());
        let progress = self.progress_since(0, &members).await;
        let unwritable = self.unwritable_targets(&members, &reachable).await;
        let splits = members.placement().into_iter().flat_map(ReplicaPlacement::splits);
        let split_pauses =
            splits.filter_map(|(shard, _)| Some((shard, self.split_pause(shard)?))).collect();
        Ok(PlacementReport { members, open, plan, progress, reachable, unwritable, split_pauses })
    }

    /// Asks the nodes that get replicas whether their logs accept entries. Returns why not, by
    /// shard.
    async fn unwritable_targets(
        &self,
        members: &Members,
        reachable: &BTreeSet<u64>,
    ) -> BTreeMap<u64, String> {
        let moves = members.placement().into_iter().flat_map(ReplicaPlacement::moves);
        let targets = moves.filter_map(|(shard_id, it)| {
            let to = it.to.filter(|to| reachable.contains(to) && !it.is_cancelled)?;
            // Before the replica exists, the log of shard 0 tells whether the disk is full.
            Some((shard_id, to, if it.is_created { shard_id } else { 0 }))
        });
        let asked = join_all(targets.map(|(shard_id, to, log)| async move {
            let report = match to == self.node_id() {
                true => {
                    let request = ReplicaStatusRequest { shard_id: log, resetting_replica: 0 };
                    match self.local_replica_status(&request).await {
                        PeerResponse::ReplicaStatus(report) => Some(report),
                        _ => None,
                    }
                }
                false => self.ask_replica_status(to, log, None).await,
            };
            Some((shard_id, report?.unwritable))
        }));
        asked.await.into_iter().flatten().filter(|(_, why)| !why.is_empty()).collect()
    }

    /// Cordons a node, so that it gets no new replicas, or uncordons it.
    ///
    /// # Errors
    /// [`Error::NodeNotFound`] for an unknown node, [`Error::NotEnoughNodes`] if no other node may
    /// get replicas, and the errors of [`Self::catch_up`] and [`Self::command`].
    pub async fn set_cordoned(&self, node_id: u64, cordoned: bool) -> Result<()> {
        let command = MemberCommand::SetCordoned(SetCordoned { node_id, cordoned });
        self.change_placement(command).await
    }

    /// Updates the rack of this node in the cluster's state. Returns whether it is up to date, or
    /// cannot be set yet.
    pub async fn state_rack(&self, rack: &str) -> bool {
        let node_id = self.node_id();
        let is_other = self.machine().read(|state| {
            let member = state.members().get(node_id);
            member.is_some_and(|member| member.rack != rack)
        });
        if !is_other || self.protocol() < protocol::RACKS {
            return true;
        }
        let set = SetRack { node_id, rack: rack.to_owned() };
        match self.command(ClusterCommand::Members(MemberCommand::SetRack(set))).await {
            Ok(_) => true,
            Err(error) => {
                tracing::debug!(%error, "cannot state the rack yet");
                false
            }
        }
    }

    /// Pauses all moves of replicas, or resumes them.
    ///
    /// # Errors
    /// [`Error::Unimplemented`] before every node runs this release, and the errors of
    /// [`Self::catch_up`] and [`Self::command`].
    pub async fn pause_moves(&self, paused: bool) -> Result<()> {
        if self.protocol() < protocol::PAUSED_MOVES {
            let what = "pausing moves before every node is upgraded";
            return Err(Error::Unimplemented { what });
        }
        self.change_placement(MemberCommand::PauseMoves(paused)).await
    }

    /// Cancels and returns the move of a shard's replica, or cancels the split that creates the
    /// shard. A move can be cancelled until it is finished.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown shard, [`Error::ChangeRefused`] if nothing moves,
    /// and the errors of [`Self::catch_up`] and [`Self::command`].
    pub async fn cancel_move(&self, shard_id: u64) -> Result<Option<ShardMove>> {
        self.wait_placed().await?;
        self.catch_up().await?;
        let shard = self
            .machine()
            .read(|state| state.members().placement().and_then(|it| it.shard(shard_id)).cloned());
        let Some(shard) = shard else {
            let what = format!("there is no shard {shard_id}");
            return Err(Error::InvalidArgument { field: "shard_id", what });
        };
        if let Some(split) = shard.split {
            let cancel = CancelSplit { shard_id, id: split.id, gives_up: true };
            self.change_placement(MemberCommand::CancelSplit(cancel)).await?;
            return Ok(None);
        }
        let Some(moving) = shard.moving else {
            let what = format!(
                "no replica of shard {shard_id} is being moved; a finished move is undone by \
                 another one"
            );
            return Err(Error::ChangeRefused { what });
        };
        let cancel = CancelMove { shard_id, id: moving.id };
        self.change_placement(MemberCommand::CancelMove(cancel)).await?;
        Ok(Some(ShardMove { is_cancelled: true, ..moving }))
    }

    /// Sets the number of replicas that each data shard should have.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another number than 1, 3 and 5, and the errors of
    /// [`Self::catch_up`] and [`Self::command`].
    pub async fn set_replicas(&self, replicas: u32) -> Result<()> {
        self.change_placement(MemberCommand::SetReplicas(replicas)).await
    }

    /// Starts to move a replica of a data shard to another node.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], [`Error::NodeNotFound`] and [`Error::ChangeInProgress`] with
    /// what is in the way, [`Error::ChangeRefused`] if the node cannot be reached, and the errors
    /// of [`Self::catch_up`] and [`Self::command`].
    pub async fn move_shard(&self, shard_id: u64, from: u64, to: u64) -> Result<()> {
        if shard_id == 0 {
            let what = "shard 0 has a replica on every node".to_owned();
            return Err(Error::InvalidArgument { field: "shard_id", what });
        }
        for (field, node) in [("from_node_id", from), ("to_node_id", to)] {
            if node == 0 {
                let what = "must be at least 1".to_owned();
                return Err(Error::InvalidArgument { field, what });
            }
        }
        self.catch_up().await?;
        let (is_member, is_paused) = self.machine().read(|state| {
            let members = state.members();
            let is_paused = members.placement().is_some_and(ReplicaPlacement::is_paused);
            (members.get(to).is_some(), is_paused)
        });
        if is_paused {
            let what = "moves of replicas are paused; resume them first".to_owned();
            return Err(Error::ChangeRefused { what });
        }
        if is_member && !self.reachable().contains(&to) {
            let what = format!("node {to} cannot be reached; start it first");
            return Err(Error::ChangeRefused { what });
        }
        let members = self.machine().read(|state| state.members().clone());
        if let Some(what) = rack_objection(&members, shard_id, from, to) {
            return Err(Error::ChangeRefused { what });
        }
        let reason = MoveReason::Manual.number();
        let plan = PlanMove { shard_id, from, to, reason, planned_at: 0 };
        self.change_placement(MemberCommand::PlanMove(plan)).await
    }

    /// Waits for the placement, which a new cluster takes over soon after it has formed.
    async fn wait_placed(&self) -> Result<()> {
        let is_placed = || self.machine().read(|state| state.members().placement().is_some());
        if is_placed() {
            return Ok(());
        }
        self.catch_up().await?;
        let mut changes = self.machine().watch();
        let placed = async { while !is_placed() && changes.changed().await.is_ok() {} };
        // Ignored: the state is checked again below.
        let _ = tokio::time::timeout(PLACEMENT_WAIT_MAX, placed).await;
        match is_placed() {
            true => Ok(()),
            false => Err(Error::Unimplemented {
                what: "the placement of a cluster before every node is upgraded",
            }),
        }
    }

    /// Adds data shards, up to `total`, if the cluster has `current` ones. Succeeds if it has
    /// `total` already.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a number out of range, [`Error::ChangeInProgress`] if the
    /// cluster has another number of shards than `current`, [`Error::Unimplemented`] before every
    /// node is upgraded, and the errors of [`Self::catch_up`] and [`Self::command`].
    pub async fn add_shards(&self, add: AddShards) -> Result<()> {
        self.catch_up().await?;
        if !self.wait_protocol(protocol::MORE_SHARDS, PLACEMENT_WAIT_MAX).await {
            let what = "more shards before every node runs a release with protocol version 10";
            return Err(Error::Unimplemented { what });
        }
        if add.split && !self.wait_protocol(protocol::SHARD_SPLITS, PLACEMENT_WAIT_MAX).await {
            let what = "splits of shards before every node runs a release with protocol version 11";
            return Err(Error::Unimplemented { what });
        }
        if add.replicas != 0
            && !self.wait_protocol(protocol::REPLICATION_FACTORS, PLACEMENT_WAIT_MAX).await
        {
            let what = "a replication factor of shards before every node runs a release with \
                        protocol version 11";
            return Err(Error::Unimplemented { what });
        }
        self.change_placement(MemberCommand::AddShards(add)).await
    }

    pub(super) async fn change_placement(&self, command: MemberCommand) -> Result<()> {
        self.wait_placed().await?;
        match self.command(ClusterCommand::Members(command)).await? {
            ClusterReply::Done => Ok(()),
            reply @ (ClusterReply::Invalid { .. }
            | ClusterReply::NodeNotFound { .. }
            | ClusterReply::ChangeInProgress { .. }
            | ClusterReply::NotEnoughNodes { .. }) => Err(refusal(reply)),
            other => Err(unexpected(&other)),
        }
    }
}

#[cfg(test)]
mod tests;
