//! Reasons why a node is not ready, for its probes, health and metrics.

use super::Node;
use super::shard_slots::ShardSlot;
use crate::error::Error;
use crate::raft::Replica;
use crate::shard::Shard;
use crate::sync;

/// Reason why a node is not ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unready {
    pub what: String,
    /// Only writes are rejected.
    pub reads_available: bool,
}

impl Unready {
    fn write_error(shard: u64, why: &Error) -> Self {
        let reads_available = matches!(why, Error::DiskFull { .. } | Error::Exhausted { .. });
        Self { what: format!("shard {shard}: {why}"), reads_available }
    }
}

impl From<String> for Unready {
    fn from(what: String) -> Self {
        Self { what, reads_available: false }
    }
}

/// A shard that this node does not serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClosedShard {
    pub shard_id: u64,
    pub why: String,
    /// Its log is damaged, and no other node has a replica.
    pub is_damaged: bool,
}

impl Node {
    /// Returns the shards that are not served because their logs are damaged, with the damage.
    pub fn damaged_shards(&self) -> Vec<(u64, String)> {
        let damaged_shards = self.shards.closed().into_iter().filter_map(|(id, slot)| match slot {
            ShardSlot::Damaged(what) => Some((id, what)),
            ShardSlot::Open(_) | ShardSlot::Stopped(_) => None,
        });
        damaged_shards.collect()
    }

    /// Returns the shards that this node does not serve.
    pub fn closed_shards(&self) -> Vec<ClosedShard> {
        let closed = self.shards.closed().into_iter().filter_map(|(shard_id, slot)| match slot {
            ShardSlot::Damaged(why) => {
                let own = self.settings.node_id;
                let has_others = self.cluster.machine().read(|state| {
                    let placed = state.members().placement().and_then(|it| it.shard(shard_id));
                    placed.map(|it| it.replicas.keys().any(|node| *node != own))
                });
                let is_damaged = !has_others.unwrap_or(!self.is_single_node());
                Some(ClosedShard { shard_id, why, is_damaged })
            }
            ShardSlot::Stopped(why) => Some(ClosedShard { shard_id, why, is_damaged: false }),
            ShardSlot::Open(_) => None,
        });
        closed.collect()
    }

    /// Returns the shards whose replicas have stopped and will be restarted, with the reason.
    pub fn stopped(&self) -> Vec<(u64, String)> {
        let closed = self.shards.closed().into_iter().filter_map(|(id, slot)| match slot {
            ShardSlot::Stopped(what) => Some((id, what)),
            ShardSlot::Open(_) | ShardSlot::Damaged(_) => None,
        });
        let open = self.shards().into_iter();
        let open = open.filter_map(|shard| Some((shard.id(), shard.replica().stopped()?)));
        let own = self.cluster.replica().stopped().map(|what| (0, what));
        let stopped = own.into_iter().chain(closed).chain(open);
        stopped.filter(|_| !self.draining.is_cancelled()).collect()
    }

    /// Returns the shards whose damaged logs are being rebuilt, with the damage and what the repair
    /// waits for.
    pub fn in_repair(&self) -> Vec<(u64, String)> {
        let waits = sync::lock(&self.repairs).clone();
        let why = |id: u64, replica: &Replica| {
            let why = &replica.repair_of()?.why;
            let waits = waits.get(&id).map(|it| format!("; now {it}")).unwrap_or_default();
            Some((id, format!("its log was damaged ({why}) and is being rebuilt{waits}")))
        };
        let own = why(0, &self.cluster.replica());
        let shards = self.shards().into_iter();
        own.into_iter().chain(shards.filter_map(|it| why(it.id(), it.replica()))).collect()
    }

    /// Returns the progress of a shard's repair, or what it waits for.
    pub fn repair_progress(&self, shard_id: u64) -> Option<String> {
        sync::lock(&self.repairs).get(&shard_id).cloned()
    }

    /// Returns the number of segments of each shard, including shard 0, that were repaired in
    /// place.
    pub fn repaired_segments(&self) -> Vec<(u64, u64)> {
        let repaired = sync::lock(&self.repaired).clone();
        let shards = self.shards.ids().into_iter().chain([0]);
        shards.map(|id| (id, repaired.get(&id).copied().unwrap_or(0))).collect()
    }

    pub(super) fn count_repaired(&self, shard_id: u64) {
        *sync::lock(&self.repaired).entry(shard_id).or_default() += 1;
    }

    /// Returns the number of times that each shard, including shard 0, was reopened.
    pub fn restarts(&self) -> Vec<(u64, u64)> {
        let restarts = sync::lock(&self.restarts).clone();
        let shards = self.shards.ids().into_iter().chain([0]);
        shards.map(|id| (id, restarts.get(&id).copied().unwrap_or(0))).collect()
    }

    pub(super) fn note_repair(&self, shard_id: u64, waits_for: Option<String>) {
        let mut repairs = sync::lock(&self.repairs);
        match waits_for {
            Some(why) => repairs.insert(shard_id, why),
            None => repairs.remove(&shard_id),
        };
    }

    /// Returns whether no leader of a shard is known, and this node's replica should have one.
    pub fn lacks_leader(&self, shard: &Shard) -> bool {
        let own = self.settings.node_id;
        let is_awaited = || {
            self.cluster.machine().read(|state| {
                let placed = state.members().placement().and_then(|it| it.shard(shard.id()));
                placed.is_some_and(|it| it.awaits_replica(own))
            })
        };
        shard.leader_hint().is_none() && !is_awaited()
    }

    /// Returns the reasons why this node is not ready; empty if it is.
    pub fn unready(&self) -> Vec<Unready> {
        let mut reasons = Vec::new();
        if self.draining.is_cancelled() {
            reasons.push("the node is shutting down".to_owned());
        }
        let leaderless = |shard: u64| format!("shard {shard}: no leader is known");
        if self.cluster.leader_hint().is_none() {
            reasons.push(leaderless(0));
        }
        for (shard, what) in self.damaged_shards() {
            reasons.push(format!("shard {shard} is not served, its log is damaged: {what}"));
        }
        for (shard, what) in self.stopped() {
            reasons.push(format!("shard {shard} has stopped and will be restarted: {what}"));
        }
        for (shard, what) in self.in_repair() {
            reasons.push(format!("shard {shard} is in repair and does not vote: {what}"));
        }
        let mut reasons: Vec<Unready> = reasons.into_iter().map(Unready::from).collect();
        reasons.extend(self.cluster.write_error().map(|why| Unready::write_error(0, &why)));
        for shard in self.shards() {
            if self.lacks_leader(&shard) {
                reasons.push(leaderless(shard.id()).into());
            }
            reasons.extend(shard.write_error().map(|why| Unready::write_error(shard.id(), &why)));
        }
        reasons
    }
}
