//! A split of a shard in the placement, and its encoding. `shard_split` implements its steps.

use std::collections::BTreeMap;

use crate::log::SplitRule;
use crate::raft::{ReplicaId, replica_id};
use crate::records::{PlacedSplitRecord, SplitReplicaRecord};

/// Step of a replica of a new shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum SplitStep {
    #[default]
    Planned,
    /// Its log exists, and is never created again.
    Created,
    /// It has nearly all records.
    Ready,
    /// It has all records and the state.
    Built,
}

impl SplitStep {
    pub(super) fn from_number(number: u32) -> Option<Self> {
        [Self::Planned, Self::Created, Self::Ready, Self::Built]
            .into_iter()
            .find(|step| *step as u32 == number)
    }
}

/// A replica of a shard that a split makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SplitReplica {
    pub generation: u32,
    pub step: SplitStep,
}

/// The split that creates a shard.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PlacedSplit {
    /// Version of the cluster's state that planned it; 0 before it is planned.
    pub id: u64,
    /// Shard whose partitions are split off.
    pub parent: u64,
    pub rule: SplitRule,
    /// Replicas of the new shard by node.
    pub replicas: BTreeMap<u64, SplitReplica>,
    pub is_cancelled: bool,
    /// Once cancelled, no other split is planned in its place.
    pub gives_up: bool,
}

impl PlacedSplit {
    pub fn is_planned(&self) -> bool {
        self.id != 0
    }

    /// Returns whether the split is planned and every replica has reached this step.
    pub fn has_reached(&self, step: SplitStep) -> bool {
        self.is_planned() && self.replicas.values().all(|replica| replica.step >= step)
    }

    /// Returns the voters of the new shard.
    pub fn voters(&self) -> impl Iterator<Item = ReplicaId> {
        self.replicas.iter().map(|(node, replica)| replica_id(*node, replica.generation))
    }

    pub(super) fn generations(&self) -> BTreeMap<u64, u32> {
        self.replicas.iter().map(|(node, replica)| (*node, replica.generation)).collect()
    }
}

impl From<&PlacedSplit> for PlacedSplitRecord {
    fn from(split: &PlacedSplit) -> Self {
        let replica = |(node_id, it): (&u64, &SplitReplica)| SplitReplicaRecord {
            node_id: *node_id,
            generation: it.generation,
            step: it.step as u32,
        };
        Self {
            id: split.id,
            parent: split.parent,
            rule: Some(split.rule),
            replicas: split.replicas.iter().map(replica).collect(),
            cancelled: split.is_cancelled,
            gives_up: split.gives_up,
        }
    }
}

impl PlacedSplitRecord {
    /// Returns the split; `None` if a step is unknown to this version.
    pub(super) fn into_split(self) -> Option<PlacedSplit> {
        let replica = |it: SplitReplicaRecord| {
            let step = SplitStep::from_number(it.step)?;
            Some((it.node_id, SplitReplica { generation: it.generation, step }))
        };
        Some(PlacedSplit {
            id: self.id,
            parent: self.parent,
            rule: self.rule.unwrap_or_default(),
            replicas: self.replicas.into_iter().map(replica).collect::<Option<_>>()?,
            is_cancelled: self.cancelled,
            gives_up: self.gives_up,
        })
    }
}
