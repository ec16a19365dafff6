//! Placement: the nodes that have a replica of each shard, and the moves of replicas in progress.
//! Part of the members, and like them a pure function of shard 0's log.
//!
//! In shard 0 every member has a replica. There the placement says which of them vote.

use std::collections::{BTreeMap, BTreeSet};

use super::placed_split::{PlacedSplit, SplitReplica};
use crate::raft::{ReplicaId, replica_id};

/// Reason for a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MoveReason {
    /// The shard has fewer replicas than it should.
    TooFew,
    /// The shard has more replicas than it should.
    TooMany,
    /// The node is being removed.
    NodeLeaves,
    /// The node lost its data.
    ReplicaLost,
    /// The numbers of replicas on the nodes differ.
    Spread,
    /// An operator asked for it.
    Manual,
    /// A rack has more of the shard's replicas than another one, by two or more.
    Racks,
    /// The node has not responded for long.
    NodeDown,
}

impl MoveReason {
    const ALL: [Self; 8] = [
        Self::TooFew,
        Self::TooMany,
        Self::NodeLeaves,
        Self::ReplicaLost,
        Self::Spread,
        Self::Manual,
        Self::Racks,
        Self::NodeDown,
    ];

    pub(super) fn number(self) -> u32 {
        match self {
            Self::Racks => 40,
            Self::NodeDown => 41,
            other => other as u32 + 1,
        }
    }

    /// Returns whether such a move improves the placement, but is not needed.
    pub fn is_optional(self) -> bool {
        matches!(self, Self::Spread | Self::Racks | Self::Manual)
    }

    pub(super) fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.number() == number)
    }
}

/// A move of a replica of one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardMove {
    /// Version of the cluster's state that planned it.
    pub id: u64,
    /// Node that loses its replica.
    pub from: Option<u64>,
    /// Node that gets a replica. The same node replaces a lost replica.
    pub to: Option<u64>,
    /// Generation of the new replica; 0 without one.
    pub generation: u32,
    /// The new replica exists, and is never created again.
    pub is_created: bool,
    /// The move is cancelled: the shard returns to its previous replicas.
    pub is_cancelled: bool,
    pub reason: MoveReason,
}

/// Replicas of one shard: the generation by node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PlacedShard {
    pub replicas: BTreeMap<u64, u32>,
    pub moving: Option<ShardMove>,
    /// Split that creates the shard. The shard has no replicas until the split completes.
    pub split: Option<PlacedSplit>,
    /// Number of replicas that it should have; 0 for the cluster's number.
    pub replication_factor: u32,
}

impl PlacedShard {
    /// Returns the replicas after the move or the split in progress.
    pub fn after(&self) -> BTreeMap<u64, u32> {
        let mut replicas = self.replicas.clone();
        replicas.extend(self.split.iter().flat_map(PlacedSplit::generations));
        if let Some(moving) = self.moving.filter(|moving| !moving.is_cancelled) {
            if let Some(from) = moving.from {
                replicas.remove(&from);
            }
            if let Some(to) = moving.to {
                replicas.insert(to, moving.generation);
            }
        }
        replicas
    }

    /// Returns the voters that the shard's leader works towards: the new replica is among them once
    /// it exists, and the old one leaves in the same step.
    pub fn target(&self) -> BTreeSet<ReplicaId> {
        let waits = self.moving.is_some_and(|it| it.to.is_some() && !it.is_created);
        let replicas = if waits { self.replicas.clone() } else { self.after() };
        replicas.into_iter().map(|(node, generation)| replica_id(node, generation)).collect()
    }

    /// Returns the move in progress, if the shard's leader can finish it.
    pub fn finishable(&self) -> Option<&ShardMove> {
        let moving = self.moving.as_ref()?;
        (moving.is_cancelled || moving.is_created || moving.to.is_none()).then_some(moving)
    }

    /// Returns whether a node has or is about to get this replica, even if it is being moved away.
    pub fn names(&self, node_id: u64, generation: u32) -> bool {
        let moving = self.moving.filter(|it| it.to == Some(node_id));
        self.replicas.get(&node_id) == Some(&generation)
            || moving.is_some_and(|it| it.generation == generation)
            || self.split_replica(node_id).is_some_and(|it| it.generation == generation)
    }

    /// Returns the generation of the newest replica of a node.
    pub fn generation_on(&self, node_id: u64) -> Option<u32> {
        let moving = self.moving.filter(|it| it.to == Some(node_id));
        let split = self.split_replica(node_id).map(|it| it.generation);
        moving.map(|it| it.generation).or(split).or_else(|| self.replicas.get(&node_id).copied())
    }

    /// Returns whether a node's newest replica is not part of the shard yet. A paused or waiting
    /// move may leave it without a leader for long, and the shard does not need it.
    pub fn awaits_replica(&self, node_id: u64) -> bool {
        let moving = self.moving.filter(|it| it.to == Some(node_id));
        moving.is_some_and(|it| self.replicas.get(&node_id) != Some(&it.generation))
    }

    /// Returns the replica that a node gets by a split.
    pub fn split_replica(&self, node_id: u64) -> Option<SplitReplica> {
        self.split.as_ref()?.replicas.get(&node_id).copied()
    }

    /// Returns whether a node has, gets or loses a replica.
    pub(super) fn involves(&self, node_id: u64) -> bool {
        self.generation_on(node_id).is_some()
    }
}

/// Replicas of all shards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaPlacement {
    /// Replication factor of data shards without a separate one; limited by the number of nodes.
    pub(super) replicas: u32,
    /// By shard id, with shard 0.
    pub(super) shards: BTreeMap<u64, PlacedShard>,
    /// No move starts, and none in progress copies.
    pub(super) is_paused: bool,
}

/// Replicas that a shard should have.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ShardTarget {
    /// Empty if nothing is known.
    pub voters: BTreeSet<ReplicaId>,
    /// Replicas that follow the log permanently; only in shard 0.
    pub learners: BTreeSet<ReplicaId>,
}

impl ReplicaPlacement {
    /// Returns the replication factor of data shards without a separate one. The number of nodes
    /// may limit the actual number of replicas.
    pub fn replicas(&self) -> u32 {
        self.replicas
    }

    /// Returns the replication factor of a data shard. The number of nodes may limit the actual
    /// number of replicas.
    pub fn wanted_replicas(&self, shard: &PlacedShard) -> u32 {
        if shard.replication_factor == 0 { self.replicas } else { shard.replication_factor }
    }

    /// Returns a shard's separate replication factor; 0 if it follows the cluster's.
    pub fn replication_factor(&self, shard_id: u64) -> u32 {
        self.shard(shard_id).map_or(0, |shard| shard.replication_factor)
    }

    /// Returns whether an operator has paused the moves.
    pub fn is_paused(&self) -> bool {
        self.is_paused
    }

    /// Iterates over all shards, sorted by id, shard 0 first.
    pub fn shards(&self) -> impl Iterator<Item = (u64, &PlacedShard)> {
        self.shards.iter().map(|(id, shard)| (*id, shard))
    }

    pub fn shard(&self, shard_id: u64) -> Option<&PlacedShard> {
        self.shards.get(&shard_id)
    }

    /// Returns the moves in progress.
    pub fn moves(&self) -> impl Iterator<Item = (u64, &ShardMove)> {
        self.shards().filter_map(|(id, shard)| Some((id, shard.moving.as_ref()?)))
    }

    /// Gives a node's vote in shard 0 to its new replica.
    pub(super) fn renew_vote(&mut self, node_id: u64, generation: u32) {
        let Some(shard) = self.shards.get_mut(&0) else { return };
        if let Some(known) = shard.replicas.get_mut(&node_id) {
            *known = generation;
        }
        if let Some(moving) = shard.moving.as_mut().filter(|it| it.to == Some(node_id)) {
            moving.generation = generation;
        }
    }
}
