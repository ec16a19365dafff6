//! Nodes that have not responded for so long that their replicas go to other nodes. Off unless the
//! operator sets that time.
//!
//! Shard 0's leader counts the time, from when it first misses the node as a leader. A new leader
//! begins again, so a change of leaders only delays.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use super::client::Cluster;
use super::members::Members;
use super::split_tries::SplitTries;
use crate::{protocol, sync};

/// Nodes that do not respond, as shard 0's leader sees them.
#[derive(Debug, Default)]
pub(super) struct SilentNodes {
    /// Time of silence after which a node is down; `None` for never.
    limit: Option<Duration>,
    since: BTreeMap<u64, Instant>,
}

impl SilentNodes {
    pub(super) fn new(limit: Option<Duration>) -> Self {
        Self { limit, since: BTreeMap::new() }
    }

    fn observe(&mut self, members: &Members, reachable: &BTreeSet<u64>, now: Instant) {
        self.since.retain(|node, _| members.get(*node).is_some() && !reachable.contains(node));
        let silent = members.iter().filter(|it| it.generation > 0).map(|it| it.node_id);
        for node in silent.filter(|node| !reachable.contains(node)) {
            self.since.entry(node).or_insert(now);
        }
    }

    fn down(&self, now: Instant) -> BTreeSet<u64> {
        let Some(limit) = self.limit else { return BTreeSet::new() };
        let is_down = |since: &Instant| now.duration_since(*since) >= limit;
        self.since.iter().filter(|(_, since)| is_down(since)).map(|(node, _)| *node).collect()
    }
}

impl Cluster {
    /// Notes which nodes respond. Returns whether no node will be down by time alone.
    pub(super) fn observe_nodes(&self, members: &Members, reachable: &BTreeSet<u64>) -> bool {
        let (mut silent, now) = (sync::lock(&self.silent), Instant::now());
        silent.observe(members, reachable, now);
        silent.limit.is_none() || silent.down(now).len() == silent.since.len()
    }

    /// Forgets what the leader of shard 0 observes: this node does not lead it.
    pub fn forget_observations(&self) {
        sync::lock(&self.silent).since.clear();
        *sync::lock(&self.split_tries) = SplitTries::default();
    }

    /// Returns the nodes whose replicas go to other nodes; none unless this node leads shard 0.
    pub(super) fn down_nodes(&self) -> BTreeSet<u64> {
        if self.protocol() < protocol::DOWN_NODES {
            return BTreeSet::new();
        }
        sync::lock(&self.silent).down(Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::InitMembers;
    use crate::raft::replica_id;

    #[tokio::test(start_paused = true)]
    async fn node_is_down_after_a_silence_without_a_break() {
        let mut members = Members::default();
        members.init(&InitMembers { replicas: (1..=3).map(|node| replica_id(node, 1)).collect() });
        let limit = Duration::from_secs(60);
        let mut silent = SilentNodes::new(Some(limit));
        let start = Instant::now();
        silent.observe(&members, &[1, 3].into(), start);
        silent.observe(&members, &[1].into(), start + limit / 2);
        assert!(silent.down(start + limit - Duration::from_millis(1)).is_empty());
        assert_eq!(silent.down(start + limit), [2].into());
        assert_eq!(silent.down(start + limit * 2), [2, 3].into());
        silent.observe(&members, &[1, 2].into(), start + limit * 2);
        assert_eq!(silent.down(start + limit * 2), [3].into());
        silent.observe(&members, &[1].into(), start + limit * 2);
        assert_eq!(silent.down(start + limit * 2), [3].into(), "node 2 has responded meanwhile");
        silent.limit = None;
        assert!(silent.down(start + limit * 9).is_empty());
    }
}
