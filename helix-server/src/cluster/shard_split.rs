//! Splits of data shards: a new shard takes some partitions of another one, its parent.
//!
//! A split is a sequence of steps that shard 0 commits. [`PlanSplit`] chooses the parent, the share
//! of its partitions and the replicas of the new shard. Each replica's node creates a log, copies
//! the records that move, and reports its progress with [`SplitProgress`]. Once all replicas have
//! nearly everything, the parent's leader commits `Split` in the parent's log. That entry seals the
//! partitions and fixes the state of the new shard. The split completes when the last replica has
//! all records up to that entry. In the same step the partitions move to the new shard. Until then
//! the split can be cancelled. The parent then opens its partitions again before another split is
//! planned.
//!
//! Only one split is planned at a time, because its result decides the next one.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::members::{Members, invalid};
use super::placed_split::{PlacedSplit, SplitReplica, SplitStep};
use super::placement::{PlacedShard, ReplicaPlacement};
use super::state::ClusterState;
use crate::log::{CancelSplit, ClusterReply, EndSplit, PlanSplit, SplitProgress, SplitRule};

/// A completed split, whose partitions go to the new shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EndedSplit {
    pub(super) shard_id: u64,
    pub(super) parent: u64,
    pub(super) rule: SplitRule,
}

impl ReplicaPlacement {
    /// Returns the splits in progress by the ids of the new shards, also those not yet planned.
    pub fn splits(&self) -> impl Iterator<Item = (u64, &PlacedSplit)> {
        self.shards().filter_map(|(id, shard)| Some((id, shard.split.as_ref()?)))
    }

    pub fn split(&self, shard_id: u64) -> Option<&PlacedSplit> {
        self.shard(shard_id)?.split.as_ref()
    }
}

impl Members {
    fn split_mut(&mut self, shard_id: u64, id: u64) -> Option<&mut PlacedSplit> {
        let shard = self.placement.as_mut()?.shards.get_mut(&shard_id)?;
        shard.split.as_mut().filter(|split| split.id == id && id != 0)
    }

    /// Plans a split. A plan for another version of the state changes nothing.
    pub(super) fn plan_split(
        &mut self,
        version: u64,
        plan: &PlanSplit,
        ids_below: u64,
    ) -> Result<ClusterReply, ClusterReply> {
        let PlanSplit { shard_id, parent, rule, ref nodes, planned_at } = *plan;
        let rule = SplitRule { ids_below, ..rule.unwrap_or_default() };
        self.check_placed()?;
        let splits = || self.placement().into_iter().flat_map(ReplicaPlacement::splits);
        let other = splits().any(|(_, split)| split.is_planned());
        let is_wanted = splits().any(|(id, split)| id == shard_id && !split.is_planned());
        if planned_at + 1 != version || other || !is_wanted {
            return Ok(ClusterReply::Done);
        }
        if parent == 0 {
            // No shard has partitions to give, so this one begins empty, like other added shards.
            if let Some(shard) = self.placed_mut(shard_id) {
                shard.split = None;
            }
            return Ok(ClusterReply::Done);
        }
        if rule.parts < 2 || nodes.is_empty() || nodes.iter().any(|node| !self.may_hold(*node)) {
            return Err(invalid("request", "a split needs two parts and nodes that may hold it"));
        }
        let mut replicas = BTreeMap::new();
        for node in nodes {
            let generation = self.next_generation(*node)?;
            replicas.insert(*node, SplitReplica { generation, step: SplitStep::Planned });
        }
        let split = PlacedSplit { id: version, parent, rule, replicas, ..PlacedSplit::default() };
        let factor = self.placement().map_or(0, |it| it.replication_factor(parent));
        if let Some(shard) = self.placed_mut(shard_id) {
            shard.split = Some(split);
            shard.replication_factor = factor;
        }
        Ok(ClusterReply::Done)
    }

    fn placed_mut(&mut self, shard_id: u64) -> Option<&mut PlacedShard> {
        self.placement.as_mut()?.shards.get_mut(&shard_id)
    }

    /// Records the step of a replica. Returns the split if this step completes it.
    pub(super) fn split_progress(&mut self, progress: SplitProgress) -> Option<EndedSplit> {
        let SplitProgress { shard_id, id, node_id, step } = progress;
        let step = SplitStep::from_number(step)?;
        let split = self.split_mut(shard_id, id).filter(|split| !split.is_cancelled)?;
        let replica = split.replicas.get_mut(&node_id)?;
        replica.step = replica.step.max(step);
        if !split.has_reached(SplitStep::Built) {
            return None;
        }
        let (parent, rule, replicas) = (split.parent, split.rule, split.generations());
        let shard = self.placed_mut(shard_id)?;
        shard.replicas = replicas;
        shard.split = None;
        Some(EndedSplit { shard_id, parent, rule })
    }

    /// Cancels a split. An unplanned split that is given up is removed at once.
    pub(super) fn cancel_split(&mut self, cancel: CancelSplit) -> ClusterReply {
        let CancelSplit { shard_id, id, gives_up } = cancel;
        let is_unplanned =
            |shard: &PlacedShard| shard.split.as_ref().is_some_and(|split| !split.is_planned());
        if id == 0 && gives_up && self.placed_mut(shard_id).is_some_and(|it| is_unplanned(it)) {
            if let Some(placement) = &mut self.placement {
                placement.shards.remove(&shard_id);
            }
        } else if let Some(split) = self.split_mut(shard_id, id) {
            split.is_cancelled = true;
            split.gives_up |= gives_up;
        }
        ClusterReply::Done
    }

    /// Ends a cancelled split, once its parent takes batches again. Another split is planned in its
    /// place, unless it was given up.
    pub(super) fn end_split(&mut self, end: EndSplit) -> ClusterReply {
        let EndSplit { shard_id, id } = end;
        let split = self.split_mut(shard_id, id).filter(|split| split.is_cancelled);
        let Some(split) = split.map(std::mem::take) else { return ClusterReply::Done };
        if split.gives_up
            && let Some(placement) = &mut self.placement
        {
            placement.shards.remove(&shard_id);
        }
        ClusterReply::Done
    }
}

impl ClusterState {
    /// Plans a split of the partitions that exist now.
    pub(super) fn plan_split(&mut self, plan: &PlanSplit) -> Result<ClusterReply, ClusterReply> {
        let (version, ids_below) = (self.version + 1, self.next_partition_id);
        if plan.parent != 0 && !self.shards.contains(&plan.parent) {
            return Err(invalid("request", "the shard to split takes no partitions"));
        }
        self.members.plan_split(version, plan, ids_below)
    }

    /// Gives the partitions of a split to its new shard.
    pub(super) fn move_partitions(&mut self, ended: EndedSplit) {
        let EndedSplit { shard_id, parent, rule } = ended;
        self.shards.insert(shard_id);
        for topic in self.topics.values_mut() {
            let has_any = !topic.runs(parent).is_empty();
            if has_any {
                Arc::make_mut(topic).split_off(parent, shard_id, rule);
            }
        }
        self.count_partitions();
    }
}

#[cfg(test)]
mod tests;
