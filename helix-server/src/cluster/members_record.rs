//! Encoding of the members, in checkpoints and in responses between nodes.
//! Unknown fields are errors.

use std::collections::BTreeMap;

use super::members::{Member, Members};
use super::placement::{MoveReason, PlacedShard, ReplicaPlacement, ShardMove};
use crate::log::{ChangeKind, CheckpointError, MemberChange};
use crate::records::{
    ChangeRecord, GenerationRecord, MemberRecord, MembersRecord, MoveRecord, PlacedShardRecord,
    PlacedSplitRecord, PlacementRecord,
};

impl From<&MemberChange> for ChangeRecord {
    fn from(change: &MemberChange) -> Self {
        Self {
            id: change.id,
            kind: match change.kind {
                ChangeKind::Add => 1,
                ChangeKind::Remove => 2,
                ChangeKind::Replace => 3,
            },
            node_id: change.node_id,
            lost_node_id: change.lost_node_id,
            version: change.version,
            done: change.done,
        }
    }
}

impl ChangeRecord {
    pub(super) fn into_change(self) -> Result<MemberChange, CheckpointError> {
        let kind = match self.kind {
            1 => ChangeKind::Add,
            2 => ChangeKind::Remove,
            3 => ChangeKind::Replace,
            other => {
                return Err(CheckpointError::new(format!(
                    "membership change of unknown kind {other}"
                )));
            }
        };
        let Self { id, node_id, lost_node_id, version, done, .. } = self;
        Ok(MemberChange { id, kind, node_id, lost_node_id, version, done })
    }
}

impl From<&Members> for MembersRecord {
    fn from(members: &Members) -> Self {
        let row = |member: &Member| MemberRecord {
            node_id: member.node_id,
            generation: member.generation,
            joining: member.joining,
            peer_addr: member.peer_addr.clone(),
            draining: member.draining,
            leaving: member.leaving,
            cordoned: member.cordoned,
            rack: member.rack.clone(),
        };
        let generations = members.generations.iter();
        Self {
            members: members.iter().map(row).collect(),
            generations: generations
                .map(|(&node_id, &generation)| GenerationRecord { node_id, generation })
                .collect(),
            change: members.change.as_ref().map(ChangeRecord::from),
            abandoned: members.abandoned,
            placement: members.placement.as_ref().map(PlacementRecord::from),
        }
    }
}

fn generation_row((&node_id, &generation): (&u64, &u32)) -> GenerationRecord {
    GenerationRecord { node_id, generation }
}

impl From<&ReplicaPlacement> for PlacementRecord {
    fn from(placement: &ReplicaPlacement) -> Self {
        let shards = placement.shards.iter().map(|(&shard_id, shard)| PlacedShardRecord {
            shard_id,
            replicas: shard.replicas.iter().map(generation_row).collect(),
            moving: shard.moving.as_ref().map(MoveRecord::from),
            split: shard.split.as_ref().map(PlacedSplitRecord::from),
            replication_factor: shard.replication_factor,
        });
        let (replicas, paused) = (placement.replicas, placement.is_paused);
        Self { replicas, shards: shards.collect(), paused }
    }
}

impl From<&ShardMove> for MoveRecord {
    fn from(moving: &ShardMove) -> Self {
        Self {
            id: moving.id,
            from: moving.from.unwrap_or(0),
            to: moving.to.unwrap_or(0),
            generation: moving.generation,
            created: moving.is_created,
            cancelled: moving.is_cancelled,
            reason: moving.reason.number(),
        }
    }
}

impl MoveRecord {
    fn into_move(self) -> Result<ShardMove, CheckpointError> {
        let Self { id, from, to, generation, created, cancelled, reason } = self;
        let reason = MoveReason::from_number(reason);
        let reason = reason.ok_or_else(|| CheckpointError::new("move for an unknown reason"))?;
        let node = |node: u64| Some(node).filter(|node| *node != 0);
        let (from, to, is_created, is_cancelled) = (node(from), node(to), created, cancelled);
        Ok(ShardMove { id, from, to, generation, is_created, is_cancelled, reason })
    }
}

impl PlacementRecord {
    fn into_placement(self) -> Result<ReplicaPlacement, CheckpointError> {
        let broken = |what: String| CheckpointError::new(format!("placement: {what}"));
        let mut shards = BTreeMap::new();
        for record in self.shards {
            let PlacedShardRecord { shard_id, replicas, moving, split, replication_factor } =
                record;
            let count = replicas.len();
            let replicas: BTreeMap<u64, u32> =
                replicas.into_iter().map(|it| (it.node_id, it.generation)).collect();
            if replicas.len() != count || (replicas.is_empty() && shard_id == 0) {
                return Err(broken(format!("shard {shard_id} has wrong replicas")));
            }
            let moving = moving.map(MoveRecord::into_move).transpose()?;
            let unknown = || broken(format!("the split to shard {shard_id} has an unknown step"));
            let split = split.map(|it| it.into_split().ok_or_else(unknown)).transpose()?;
            let shard = PlacedShard { replicas, moving, split, replication_factor };
            if shards.insert(shard_id, shard).is_some() {
                return Err(broken(format!("shard {shard_id} appears twice")));
            }
        }
        let (replicas, is_paused) = (self.replicas, self.paused);
        Ok(ReplicaPlacement { replicas, shards, is_paused })
    }
}

impl MembersRecord {
    pub(super) fn into_members(self) -> Result<Members, CheckpointError> {
        let broken = |what: String| CheckpointError::new(format!("members: {what}"));
        let mut members = Members { abandoned: self.abandoned, ..Members::default() };
        for GenerationRecord { node_id, generation } in self.generations {
            if members.generations.insert(node_id, generation).is_some() {
                return Err(broken(format!("node {node_id} has two latest generations")));
            }
        }
        for it in self.members {
            let node_id = it.node_id;
            let last = members.generations.get(&node_id).copied().unwrap_or(0);
            if it.generation.max(it.joining.unwrap_or(0)) > last {
                return Err(broken(format!("node {node_id} has a generation beyond its latest")));
            }
            let member = Member {
                node_id,
                generation: it.generation,
                joining: it.joining,
                peer_addr: it.peer_addr,
                draining: it.draining,
                leaving: it.leaving,
                cordoned: it.cordoned,
                rack: it.rack,
            };
            if members.members.insert(node_id, member).is_some() {
                return Err(broken(format!("node {node_id} appears twice")));
            }
        }
        members.change = self.change.map(ChangeRecord::into_change).transpose()?;
        members.placement = self.placement.map(PlacementRecord::into_placement).transpose()?;
        Ok(members)
    }
}
