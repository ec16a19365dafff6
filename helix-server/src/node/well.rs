//! What is not well with a node, in words: for its probes, its health and its figures.

use super::Node;
use super::slots::Slot;
use crate::error::Error;
use crate::raft::Replica;

/// Something that a node does not serve as it should.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unready {
    pub what: String,
    /// Only what has to be written is refused because of it.
    pub reads_go_on: bool,
}

impl Unready {
    fn unwell(shard: u64, why: &Error) -> Self {
        let reads_go_on = matches!(why, Error::DiskFull { .. });
        Self { what: format!("shard {shard}: {why}"), reads_go_on }
    }
}

impl From<String> for Unready {
    fn from(what: String) -> Self {
        Self { what, reads_go_on: false }
    }
}

impl Node {
    /// The shards that are not served because their logs are damaged, and how.
    pub fn withheld(&self) -> Vec<(u64, String)> {
        let withheld = self.shards.closed().into_iter().filter_map(|(id, slot)| match slot {
            Slot::Withheld(what) => Some((id, what)),
            Slot::Open(_) | Slot::Stopped(_) => None,
        });
        withheld.collect()
    }

    /// The shards whose replicas here have stopped and will be started again, and why.
    pub fn stopped(&self) -> Vec<(u64, String)> {
        let closed = self.shards.closed().into_iter().filter_map(|(id, slot)| match slot {
            Slot::Stopped(what) => Some((id, what)),
            Slot::Open(_) | Slot::Withheld(_) => None,
        });
        let open = self.shards().into_iter();
        let open = open.filter_map(|shard| Some((shard.id(), shard.replica().stopped()?)));
        let own = self.cluster.replica().stopped().map(|what| (0, what));
        let stopped = own.into_iter().chain(closed).chain(open);
        stopped.filter(|_| !self.draining.is_cancelled()).collect()
    }

    /// The shards whose logs here were damaged and are being filled anew: how they were, and what
    /// they wait for.
    pub fn in_repair(&self) -> Vec<(u64, String)> {
        let waits = self.repairs.lock().expect("no panic while it is held").clone();
        let why = |id: u64, replica: &Replica| {
            let why = &replica.repair_of()?.why;
            let waits = waits.get(&id).map(|it| format!("; now {it}")).unwrap_or_default();
            Some((id, format!("its log was damaged ({why}), and is fetched anew{waits}")))
        };
        let own = why(0, &self.cluster.replica());
        let shards = self.shards().into_iter();
        own.into_iter().chain(shards.filter_map(|it| why(it.id(), it.replica()))).collect()
    }

    /// How often each shard, shard 0 among them, was closed and opened again.
    pub fn restarts(&self) -> Vec<(u64, u64)> {
        let restarts = self.restarts.lock().expect("no panic while it is held").clone();
        let shards = self.shards.ids().into_iter().chain([0]);
        shards.map(|id| (id, restarts.get(&id).copied().unwrap_or(0))).collect()
    }

    pub(super) fn note_repair(&self, shard_id: u64, waits_for: Option<String>) {
        let mut repairs = self.repairs.lock().expect("no panic while it is held");
        match waits_for {
            Some(why) => repairs.insert(shard_id, why),
            None => repairs.remove(&shard_id),
        };
    }

    /// Why this node does not serve all that it should; nothing: it is ready.
    pub fn unready(&self) -> Vec<Unready> {
        let mut reasons = Vec::new();
        if self.draining.is_cancelled() {
            reasons.push("the node is shutting down".to_owned());
        }
        let leaderless = |shard: u64| format!("shard {shard}: no leader is known");
        if self.cluster.leader_hint().is_none() {
            reasons.push(leaderless(0));
        }
        for (shard, what) in self.withheld() {
            reasons.push(format!("shard {shard} is withheld: {what}"));
        }
        for (shard, what) in self.stopped() {
            reasons.push(format!("shard {shard} has stopped, and will be started again: {what}"));
        }
        for (shard, what) in self.in_repair() {
            reasons.push(format!("shard {shard} is in repair and does not vote: {what}"));
        }
        let mut reasons: Vec<Unready> = reasons.into_iter().map(Unready::from).collect();
        reasons.extend(self.cluster.unwell().map(|why| Unready::unwell(0, &why)));
        for shard in self.shards() {
            if shard.leader_hint().is_none() {
                reasons.push(leaderless(shard.id()).into());
            }
            reasons.extend(shard.unwell().map(|why| Unready::unwell(shard.id(), &why)));
        }
        reasons
    }
}
