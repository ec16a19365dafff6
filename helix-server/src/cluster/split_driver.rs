//! Carries out splits of shards: plans them on shard 0's leader, and seals, opens and removes the
//! partitions on the parent's leader. The nodes of the new replicas build them
//! (`node/split_builder`).

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

use tokio::time::Instant;

use super::client::Cluster;
use super::peer_messages::{PeerRequest, PeerResponse};
use super::placed_split::{PlacedSplit, SplitStep};
use super::placement::ReplicaPlacement;
use super::state::ClusterState;
use crate::error::Result;
use crate::limits::SHARDS_MAX;
use crate::log::{
    CancelSplit, ClusterCommand, EndSplit, MemberCommand, PlanSplit, ShardCommand, SplitProgress,
    SplitRule,
};
use crate::records::{SplitRecords, SplitRecordsRequest};
use crate::shard::Shard;

/// Longest time for which partitions of a split are sealed. Then the split is cancelled.
const SEALED_MAX: Duration = Duration::from_secs(5);

/// Longest wait for records of a split.
const RECORDS_WAIT_MAX: Duration = Duration::from_secs(10);

/// Returns the next command for splits: plans a split, or cancels a split that cannot be built. A
/// pure function of the state, of the nodes that respond, and of the splits that may be tried now.
pub(super) fn next_split(
    state: &ClusterState,
    reachable: &BTreeSet<u64>,
    may_try: impl Fn(u64) -> bool,
) -> Option<MemberCommand> {
    let members = state.members();
    let placement = members.placement()?;
    for (shard_id, split) in placement.splits().filter(|it| it.1.is_planned()) {
        let is_gone = |node: u64, generation| {
            members.get(node).is_none_or(|it| it.leaving) || members.is_lost(node, generation)
        };
        let is_stuck = split.replicas.iter().any(|(node, it)| is_gone(*node, it.generation));
        if is_stuck && !split.is_cancelled {
            let (id, gives_up) = (split.id, false);
            return Some(MemberCommand::CancelSplit(CancelSplit { shard_id, id, gives_up }));
        }
    }
    let unplanned = || placement.splits().filter(|it| !it.1.is_planned());
    let (shard_id, _) = unplanned().find(|(shard_id, _)| may_try(*shard_id))?;
    if placement.is_paused() || placement.splits().any(|it| it.1.is_planned()) {
        return None;
    }
    let count = |id: &u64| (state.partitions_in(*id), std::cmp::Reverse(*id));
    let (most, std::cmp::Reverse(parent)) = state.shards().iter().map(count).max()?;
    let planned_at = state.version();
    if most < 2 {
        let plan = PlanSplit { shard_id, planned_at, ..PlanSplit::default() };
        return Some(MemberCommand::PlanSplit(plan));
    }
    let is_live = |node: &&u64| reachable.contains(node);
    let placed = placement.shard(parent)?;
    let replicas = &placed.replicas;
    if replicas.keys().filter(is_live).count() <= replicas.len() / 2 {
        return None;
    }
    // Partitions move only between shards with the same replication factor.
    let shards: Vec<u64> = state.shards_with(placed.replication_factor).collect();
    let total: u64 = shards.iter().map(|id| state.partitions_in(*id)).sum();
    let rule = Some(split_rule(state, parent, total, shards.len() + unplanned().count()));
    let wanted = placement.wanted_replicas(placed);
    let nodes = replica_nodes(state, placement, wanted, reachable)?;
    Some(MemberCommand::PlanSplit(PlanSplit { shard_id, parent, rule, nodes, planned_at }))
}

/// Chooses the share of a shard's partitions that a new shard gets.
///
/// The share is what each shard would have if all partitions were spread evenly over `shards`.
/// Topics with the most partitions here are preferred.
fn split_rule(state: &ClusterState, parent: u64, total: u64, shards: usize) -> SplitRule {
    let shards = shards.max(1) as u64;
    let here = state.partitions_in(parent);
    let wanted = ((total + shards / 2) / shards).clamp(1, here / 2);
    let parts = ((here + wanted / 2) / wanted).clamp(2, SHARDS_MAX);
    let topics: Vec<(u64, u64)> = state
        .all_topics()
        .map(|topic| (topic.id, topic.runs(parent).iter().map(|run| u64::from(run.count)).sum()))
        .filter(|(_, count)| *count > 0)
        .collect();
    let rule = |turn| SplitRule { parts, turn, ids_below: u64::MAX };
    let cost = |turn: &u64| {
        let (mut moved, mut weight) = (0, 0);
        for (topic_id, count) in &topics {
            // The first of its partitions that moves, then each `parts`th.
            let first = (parts - (topic_id + turn) % parts) % parts;
            let of_topic = count.saturating_sub(first).div_ceil(parts);
            moved += of_topic;
            weight += of_topic * count;
        }
        (wanted.abs_diff(moved), moved == 0, std::cmp::Reverse(weight))
    };
    rule((0..parts).min_by_key(cost).unwrap_or(0))
}

/// Returns the nodes for the replicas of a new shard. Prefers different racks, then the nodes with
/// the fewest replicas. Returns `None` while too few of the nodes that may get one respond.
fn replica_nodes(
    state: &ClusterState,
    placement: &ReplicaPlacement,
    wanted: u32,
    reachable: &BTreeSet<u64>,
) -> Option<Vec<u64>> {
    let members = state.members();
    let mut load: BTreeMap<u64, usize> = BTreeMap::new();
    for node in placement.shards().filter(|it| it.0 != 0).flat_map(|it| it.1.after().into_keys()) {
        *load.entry(node).or_default() += 1;
    }
    let may_hold: Vec<u64> =
        members.iter().map(|it| it.node_id).filter(|node| members.may_hold(*node)).collect();
    let wanted = usize::try_from(wanted).unwrap_or(usize::MAX).min(may_hold.len());
    let rack = |node: u64| members.get(node).map_or("", |member| member.rack.as_str());
    let mut chosen: Vec<u64> = Vec::new();
    while chosen.len() < wanted {
        let free = may_hold.iter().copied().filter(|it| reachable.contains(it));
        let next = free.filter(|it| !chosen.contains(it)).min_by_key(|node| {
            let in_rack = chosen.iter().filter(|other| rack(**other) == rack(*node)).count();
            (in_rack, load.get(node).copied().unwrap_or(0), *node)
        });
        chosen.push(next?);
    }
    (!chosen.is_empty()).then_some(chosen)
}

/// Tracks how long this leader has seen partitions of a shard sealed for a split.
#[derive(Debug, Default)]
pub struct SealWatch(Option<(u64, Instant)>);

impl SealWatch {
    /// Returns how long the partitions of this split have been sealed.
    fn sealed_for(&mut self, id: u64) -> Duration {
        match self.0 {
            Some((known, since)) if known == id => since.elapsed(),
            _ => {
                self.0 = Some((id, Instant::now()));
                Duration::ZERO
            }
        }
    }
}

impl Cluster {
    /// Takes the next step of a split of a shard that this node leads. Returns whether there is
    /// nothing to do until the cluster's state changes.
    ///
    /// # Errors
    /// The errors of [`Shard::command`] and [`Self::command`]. A repeated call continues.
    pub async fn drive_split(&self, shard: &Shard, seal: &mut SealWatch) -> Result<bool> {
        let sealed = shard.read_state(|state| state.split().map(|split| (split.id, split.target)));
        let Some((id, target)) = sealed else {
            *seal = SealWatch::default();
            return self.begin_split(shard).await;
        };
        // This node may lag behind on shard 0, or know more than when the split was planned.
        let found = self.machine().read(|state| {
            let placed = state.members().placement()?.shard(target)?;
            Some(placed.split.clone())
        });
        match found {
            Some(None) => {
                shard.command(ShardCommand::FinishSplit { id }).await?;
                tracing::info!(shard_id = shard.id(), target, "split the shard");
                Ok(true)
            }
            Some(Some(split)) if split.id == id && split.is_cancelled => {
                self.open_again(shard, target, id).await.map(|()| true)
            }
            Some(Some(split)) if split.id == id => {
                let sealed_for = seal.sealed_for(id);
                if sealed_for > SEALED_MAX {
                    tracing::warn!(shard_id = shard.id(), target, "cancelling a split that hangs");
                    let cancel = CancelSplit { shard_id: target, id, gives_up: false };
                    self.command_members(MemberCommand::CancelSplit(cancel)).await?;
                }
                Ok(false)
            }
            _ => {
                self.catch_up().await?;
                Ok(false)
            }
        }
    }

    /// Seals the partitions of a planned split once its replicas are ready, or ends a cancelled
    /// one.
    async fn begin_split(&self, shard: &Shard) -> Result<bool> {
        let planned = self.machine().read(|state| {
            let placement = state.members().placement()?;
            let of_shard =
                |it: &(u64, &PlacedSplit)| it.1.is_planned() && it.1.parent == shard.id();
            placement.splits().find(of_shard).map(|(target, split)| (target, split.clone()))
        });
        let Some((target, split)) = planned else { return Ok(true) };
        let is_paused = self
            .machine()
            .read(|state| state.members().placement().is_some_and(ReplicaPlacement::is_paused));
        if split.is_cancelled {
            return self.open_again(shard, target, split.id).await.map(|()| true);
        }
        if is_paused
            || !split.has_reached(SplitStep::Ready)
            || shard.read_state(|it| it.ended_split()) >= split.id
        {
            return Ok(true);
        }
        // Creates every partition that the split may move, from a state that has the split.
        self.propagate_to_shard(shard).await?;
        let (id, rule) = (split.id, split.rule);
        // A command of a leader with an older state is ignored. A partition that the parent lacks
        // now could be created neither here nor in the new shard.
        let Some(wanted) = self.split_streams(shard.id(), id) else { return Ok(false) };
        let moved = shard.read_state(|state| state.moved_by(rule));
        if wanted.len() != moved.len() || moved.iter().any(|it| !wanted.contains(&it.0)) {
            return Ok(false);
        }
        shard.command_alone(ShardCommand::Split { id, target, rule }).await?;
        tracing::info!(shard_id = shard.id(), target, "sealed the partitions that move");
        Ok(false)
    }

    /// Lets the partitions of a cancelled split take batches again, and commits its end in shard 0.
    async fn open_again(&self, shard: &Shard, target: u64, id: u64) -> Result<()> {
        if shard.read_state(|state| state.ended_split()) < id {
            shard.command(ShardCommand::CancelSplit { id }).await?;
        }
        let end = EndSplit { shard_id: target, id };
        self.command_members(MemberCommand::EndSplit(end)).await?;
        tracing::info!(shard_id = shard.id(), target, "cancelled a split");
        Ok(())
    }

    async fn command_members(&self, command: MemberCommand) -> Result<()> {
        self.command(ClusterCommand::Members(command)).await.map(drop)
    }

    /// Reports the step that this node's replica of a new shard has reached.
    ///
    /// # Errors
    /// As [`Self::command`].
    pub async fn state_split_progress(
        &self,
        shard_id: u64,
        id: u64,
        step: SplitStep,
    ) -> Result<()> {
        let (node_id, step) = (self.node_id(), step as u32);
        let progress = SplitProgress { shard_id, id, node_id, step };
        self.command_members(MemberCommand::SplitProgress(progress)).await
    }

    /// Cancels the split that creates a shard. Another split is planned in its place.
    ///
    /// # Errors
    /// As [`Self::command`].
    pub async fn cancel_split(&self, shard_id: u64, id: u64) -> Result<()> {
        let cancel = CancelSplit { shard_id, id, gives_up: false };
        self.command_members(MemberCommand::CancelSplit(cancel)).await
    }

    /// Asks a node's replica of a shard for records that a split moves.
    ///
    /// # Errors
    /// The reason why there are none now, in words.
    pub async fn split_records(
        &self,
        node: u64,
        request: SplitRecordsRequest,
    ) -> std::result::Result<SplitRecords, String> {
        let response = if node == self.node_id() {
            self.local_split_records(&request).await
        } else {
            // Charges the bytes to this node's copy rate too: its disk also serves the appends.
            self.hub.wait_to_copy().await;
            let request = PeerRequest::SplitRecords(request).encode();
            let response = self.hub.call(node, request, RECORDS_WAIT_MAX).await;
            let response = PeerResponse::decode(response.map_err(|error| error.to_string())?)?;
            if let PeerResponse::SplitRecords(records) = &response {
                self.hub.spend_copied(records.records.len() as u64);
            }
            response
        };
        match response {
            PeerResponse::SplitRecords(records) => Ok(records),
            PeerResponse::Unknown(why) => Err(why),
            _ => Err(format!("node {node} sent an unexpected kind of response")),
        }
    }

    /// Reads records that a split moves from this node's replica of the parent.
    pub(super) async fn local_split_records(&self, request: &SplitRecordsRequest) -> PeerResponse {
        match self.read_split_records(request).await {
            Ok(records) => PeerResponse::SplitRecords(records),
            Err(why) => PeerResponse::Unknown(why),
        }
    }

    async fn read_split_records(
        &self,
        request: &SplitRecordsRequest,
    ) -> std::result::Result<SplitRecords, String> {
        let shard = self.shard(request.shard_id).map_err(|error| error.to_string())?;
        let moved = shard.split_streams(request.id, || {
            let streams = self.split_streams(request.shard_id, request.id);
            streams.ok_or_else(|| format!("this node does not know split {} yet", request.id))
        })?;
        shard.split_records(request, moved).await
    }

    /// Returns whether a split of this shard is in progress, as far as this node knows.
    pub(super) fn is_splitting(&self, parent: u64) -> bool {
        self.machine().read(|state| {
            let placement = state.members().placement();
            placement.is_some_and(|it| {
                it.splits().any(|(_, split)| split.is_planned() && split.parent == parent)
            })
        })
    }

    /// Returns the streams that a split in progress moves; `None` if this node's copy of the
    /// cluster's state has no such split.
    fn split_streams(&self, parent: u64, id: u64) -> Option<HashSet<u64>> {
        let (rule, topics) = self.machine().read(|state| {
            let mut splits = state.members().placement()?.splits().map(|(_, split)| split);
            let split = splits.find(|split| (split.parent, split.id) == (parent, id))?;
            Some((split.rule, state.all_topics().cloned().collect::<Vec<_>>()))
        })?;
        let moved = topics.iter().flat_map(|topic| topic.moved_by(parent, rule));
        Some(moved.map(|id| id.0).collect())
    }
}

#[cfg(test)]
mod tests;
