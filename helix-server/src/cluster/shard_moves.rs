//! Changes of the placement: a pure function of shard 0's log, like the members that it belongs to.
//!
//! A move is a sequence of committed steps. [`PlanMove`] gives the new replica a generation. Its
//! node creates an empty log under that generation and commits [`ReplicaCreated`]. Only then does
//! the shard's leader add it as a learner, and let it vote in place of the leaving one.
//! [`FinishMove`] changes the placement, and the node that lost its replica may delete its files.
//! Until then a move can be cancelled, which restores the previous replicas.

use std::collections::{BTreeMap, BTreeSet};

use super::members::{Member, Members, invalid};
use super::placement::{MoveReason, PlacedShard, ReplicaPlacement, ShardMove, ShardTarget};
use crate::limits::{MOVES_MAX, REPLICAS_MAX};
use crate::log::{
    CancelMove, ClusterReply, FinishMove, InitMembers, PlanMove, ReplicaCreated, SetCordoned,
    TakePlacement,
};
use crate::raft::replica_id;

impl Members {
    pub fn placement(&self) -> Option<&ReplicaPlacement> {
        self.placement.as_ref()
    }

    /// Returns why a node may not get a new replica; `None` if it may.
    pub fn refusal_to_hold(&self, node_id: u64) -> Option<&'static str> {
        let Some(member) = self.get(node_id) else { return Some("is not a member") };
        match member {
            Member { leaving: true, .. } => Some("is being removed"),
            Member { joining: Some(_), .. } | Member { generation: 0, .. } => {
                Some("has not joined yet")
            }
            Member { cordoned: true, .. } => Some("is cordoned"),
            _ => None,
        }
    }

    /// Returns whether a node may get a new replica.
    pub fn may_hold(&self, node_id: u64) -> bool {
        self.refusal_to_hold(node_id).is_none()
    }

    /// Returns whether a replica's data is lost: it is older than the node's data directory.
    pub fn is_lost(&self, node_id: u64, generation: u32) -> bool {
        self.get(node_id).is_none_or(|member| generation < member.generation)
    }

    /// Returns the data shards of which a node has a log. A replica has no log before it is
    /// created, or after it was lost with the node's data directory.
    pub fn shards_with_log(&self, node_id: u64) -> impl Iterator<Item = u64> {
        let has_log = move |shard: &PlacedShard| {
            let moving = shard.moving.filter(|moving| moving.to == Some(node_id));
            let generation = match moving {
                Some(moving) => Some(moving.generation).filter(|_| moving.is_created),
                None => shard.replicas.get(&node_id).copied(),
            };
            generation.is_some_and(|generation| !self.is_lost(node_id, generation))
        };
        let shards = self.placement().into_iter().flat_map(ReplicaPlacement::shards);
        shards.filter(move |(id, shard)| *id != 0 && has_log(shard)).map(|(id, _)| id)
    }

    /// Returns whether a node has a replica of a data shard or a vote in shard 0, also during a
    /// move.
    pub fn has_replicas(&self, node_id: u64) -> bool {
        let mut shards = self.placement().into_iter().flat_map(ReplicaPlacement::shards);
        shards.any(|(_, shard)| shard.involves(node_id))
    }

    /// Returns whether a node has a replica of a data shard, also during a move.
    pub fn has_data(&self, node_id: u64) -> bool {
        let mut shards = self.placement().into_iter().flat_map(ReplicaPlacement::shards);
        shards.any(|(id, shard)| id != 0 && shard.involves(node_id))
    }

    /// Returns the replicas that a shard should have.
    pub fn shard_target(&self, shard_id: u64) -> ShardTarget {
        let Some(placement) = self.placement() else {
            return ShardTarget { voters: self.target(), learners: BTreeSet::new() };
        };
        let Some(shard) = placement.shard(shard_id) else { return ShardTarget::default() };
        let voters = shard.target();
        if shard_id != 0 {
            return ShardTarget { voters, learners: BTreeSet::new() };
        }
        // A leaving node follows shard 0 until all of its replicas are moved away.
        let follows =
            |it: &&Member| it.generation > 0 && (!it.leaving || self.has_replicas(it.node_id));
        let replicas = self.iter().filter(follows);
        let replicas = replicas.map(|it| replica_id(it.node_id, it.generation));
        let learners = replicas.filter(|id| !voters.contains(id)).collect();
        ShardTarget { voters, learners }
    }

    /// Returns the generation of a node's replica of a data shard, if it has or gets one.
    pub fn replica_generation(&self, shard_id: u64, node_id: u64) -> Option<u32> {
        match self.placement() {
            Some(placement) => placement.shard(shard_id)?.generation_on(node_id),
            None => self.get(node_id).map(|member| member.generation),
        }
    }

    /// Returns whether a replica of a data shard was removed, so that its files may be deleted. An
    /// older state, which does not know the generation yet, names no replica as removed.
    pub fn is_removed(&self, shard_id: u64, node_id: u64, generation: u32) -> bool {
        let Some(placement) = self.placement() else { return false };
        let is_known = self.generations.get(&node_id).is_some_and(|last| generation <= *last);
        // A shard that was given up is no longer there.
        is_known && placement.shard(shard_id).is_none_or(|it| !it.names(node_id, generation))
    }

    /// Returns whether other nodes have replicas of a data shard of node `own`; `None` if unknown:
    /// without a placement of the shard, or while a move may change the result.
    pub(super) fn others_have_shard(&self, shard_id: u64, own: u64) -> Option<bool> {
        let shard = self.placement()?.shard(shard_id)?;
        let from = shard.moving.and_then(|it| it.from);
        let to = shard.moving.and_then(|it| it.to).filter(|to| *to != own);
        let mut others = shard.replicas.keys().filter(|node| **node != own);
        match (others.clone().any(|node| from != Some(*node)), others.next().is_some()) {
            (true, _) => Some(true),
            (false, true) => None,
            (false, false) if to.is_some() => None,
            (false, false) => Some(false),
        }
    }

    pub(super) fn take_placement(&mut self, take: &TakePlacement) -> ClusterReply {
        if self.placement.is_some() || self.running().is_some() || take.shards.is_empty() {
            return ClusterReply::Done;
        }
        self.init(&InitMembers { replicas: take.replicas.clone() });
        let replicas: BTreeMap<u64, u32> =
            self.iter().map(|it| (it.node_id, it.generation)).collect();
        let shards = take.shards.iter().copied().chain([0]);
        let placed = PlacedShard { replicas, ..PlacedShard::default() };
        let shards = shards.map(|id| (id, placed.clone())).collect();
        let replicas = u32::try_from(REPLICAS_MAX).unwrap_or(u32::MAX);
        self.placement = Some(ReplicaPlacement { replicas, shards, is_paused: false });
        ClusterReply::Done
    }

    pub(super) fn set_cordoned(&mut self, set: SetCordoned) -> Result<ClusterReply, ClusterReply> {
        let SetCordoned { node_id, cordoned } = set;
        self.check_placed()?;
        let is_other_free =
            self.iter().any(|it| it.node_id != node_id && self.may_hold(it.node_id));
        let Some(member) = self.members.get_mut(&node_id) else {
            return Err(ClusterReply::NodeNotFound { node_id });
        };
        if cordoned && !member.cordoned && !is_other_free {
            let what = format!(
                "no node could get a replica if node {node_id} were cordoned; uncordon another \
                 node first"
            );
            return Err(ClusterReply::NotEnoughNodes { what });
        }
        member.cordoned = cordoned;
        Ok(ClusterReply::Done)
    }

    /// Returns the number of nodes that may get a replica.
    pub fn holders(&self) -> usize {
        self.iter().filter(|member| self.may_hold(member.node_id)).count()
    }

    pub(super) fn set_replicas(&mut self, count: u32) -> Result<ClusterReply, ClusterReply> {
        self.check_placed()?;
        check_replicas(count)?;
        if let Some(placement) = &mut self.placement {
            placement.replicas = count;
        }
        Ok(ClusterReply::Done)
    }

    pub(super) fn pause_moves(&mut self, is_paused: bool) -> Result<ClusterReply, ClusterReply> {
        self.check_placed()?;
        if let Some(placement) = &mut self.placement {
            placement.is_paused = is_paused;
        }
        Ok(ClusterReply::Done)
    }

    pub(super) fn plan_move(
        &mut self,
        version: u64,
        plan: PlanMove,
    ) -> Result<ClusterReply, ClusterReply> {
        let PlanMove { shard_id, from, to, reason, planned_at } = plan;
        if planned_at != 0 && planned_at + 1 != version {
            // The state has changed since the move was planned, so the planner plans again.
            return Ok(ClusterReply::Done);
        }
        let node = |node: u64| Some(node).filter(|node| *node != 0);
        let is_running = |moving: &ShardMove| (moving.from, moving.to) == (node(from), node(to));
        if self.moving(shard_id).and_then(|it| it.moving.as_ref()).is_some_and(is_running) {
            // The command was repeated.
            return Ok(ClusterReply::Done);
        }
        self.check_move(&plan)?;
        let reason = MoveReason::from_number(reason)
            .ok_or_else(|| invalid("request", format!("move for an unknown reason {reason}")))?;
        let generation = match (node(to), shard_id) {
            (None, _) => 0,
            (Some(to), 0) => self.get(to).map_or(0, |member| member.generation),
            (Some(to), _) => self.next_generation(to)?,
        };
        let (is_created, is_cancelled) = (shard_id == 0, false);
        let (id, from, to) = (version, node(from), node(to));
        let moving = ShardMove { id, from, to, generation, is_created, is_cancelled, reason };
        let shard = self.placement.as_mut().and_then(|it| it.shards.get_mut(&shard_id));
        if let Some(shard) = shard {
            shard.moving = Some(moving);
        }
        Ok(ClusterReply::Done)
    }

    /// Checks that a move may begin.
    fn check_move(&self, plan: &PlanMove) -> Result<(), ClusterReply> {
        let PlanMove { shard_id, from, to, .. } = *plan;
        self.check_placed()?;
        let placement = self.placement().into_iter();
        let Some(shard) = placement.clone().find_map(|it| it.shard(shard_id)) else {
            return Err(invalid("shard_id", format!("there is no shard {shard_id}")));
        };
        if self.placement().is_some_and(ReplicaPlacement::is_paused) {
            let what = "moves of replicas are paused; resume them first".to_owned();
            return Err(ClusterReply::ChangeInProgress { what });
        }
        if shard.split.is_some() {
            let what = format!("shard {shard_id} is being made by a split");
            return Err(ClusterReply::ChangeInProgress { what });
        }
        if shard.moving.is_some() {
            let what = format!("a replica of shard {shard_id} is being moved");
            return Err(ClusterReply::ChangeInProgress { what });
        }
        if placement.map(|it| it.moves().count()).sum::<usize>() >= MOVES_MAX {
            let what = format!("{MOVES_MAX} replicas are being moved, which is the limit");
            return Err(ClusterReply::ChangeInProgress { what });
        }
        if from != 0 && !shard.replicas.contains_key(&from) {
            let what = format!("node {from} has no replica of shard {shard_id}");
            return Err(invalid("from_node_id", what));
        }
        if to == 0 {
            if from == 0 || shard.replicas.len() <= 1 {
                let what = format!("it would take the last replica of shard {shard_id} away");
                return Err(invalid("from_node_id", what));
            }
            return Ok(());
        }
        if self.get(to).is_none() {
            return Err(ClusterReply::NodeNotFound { node_id: to });
        }
        if let Some(why) = self.refusal_to_hold(to) {
            return Err(invalid("to_node_id", format!("node {to} {why}")));
        }
        let replaces = |generation| to == from && shard_id != 0 && self.is_lost(to, generation);
        if shard.replicas.get(&to).is_some_and(|generation| !replaces(*generation)) {
            let what = format!("node {to} has a replica of shard {shard_id} already");
            return Err(invalid("to_node_id", what));
        }
        Ok(())
    }

    fn moving(&mut self, shard_id: u64) -> Option<&mut PlacedShard> {
        self.placement.as_mut()?.shards.get_mut(&shard_id)
    }

    pub(super) fn replica_created(&mut self, created: ReplicaCreated) -> ClusterReply {
        let ReplicaCreated { shard_id, node_id, generation } = created;
        let moving = self.moving(shard_id).and_then(|shard| shard.moving.as_mut());
        let is_this = |it: &&mut ShardMove| it.to == Some(node_id) && it.generation == generation;
        if let Some(moving) = moving.filter(is_this) {
            moving.is_created = true;
        }
        ClusterReply::Done
    }

    pub(super) fn finish_move(&mut self, finish: FinishMove) -> ClusterReply {
        let FinishMove { shard_id, id, cancelled } = finish;
        let Some(shard) = self.moving(shard_id) else { return ClusterReply::Done };
        let is_this =
            shard.finishable().is_some_and(|it| (it.id, it.is_cancelled) == (id, cancelled));
        if is_this {
            shard.replicas = shard.after();
            shard.moving = None;
        }
        ClusterReply::Done
    }

    pub(super) fn cancel_move(&mut self, cancel: CancelMove) -> ClusterReply {
        let CancelMove { shard_id, id } = cancel;
        let Some(shard) = self.moving(shard_id) else { return ClusterReply::Done };
        let Some(moving) = shard.moving.as_mut().filter(|it| it.id == id) else {
            return ClusterReply::Done;
        };
        moving.is_cancelled = true;
        if moving.to.is_some() && !moving.is_created {
            // No shard depends on the new replica yet.
            shard.moving = None;
        } else if shard.replicas.is_empty() {
            self.give_up_new_shard(shard_id);
        }
        ClusterReply::Done
    }

    pub(super) fn check_placed(&self) -> Result<(), ClusterReply> {
        self.check_known()?;
        if self.placement.is_some() {
            return Ok(());
        }
        let what = "the cluster has no placement yet: every node has to run this release, and no \
                    node may be added or removed until then";
        Err(invalid("request", what))
    }
}

/// Checks a number of replicas: odd, since an even one tolerates no more failures.
pub(super) fn check_replicas(count: u32) -> Result<(), ClusterReply> {
    if [1, 3, 5].contains(&count) {
        return Ok(());
    }
    Err(invalid("replicas", format!("{count} is not one of 1, 3 and 5")))
}

#[cfg(test)]
mod tests;
