//! Chooses the node to read from: the leader or any replica.
//!
//! Avoids failed replicas, and asks the leader to confirm a replica's OFFSET_OUT_OF_RANGE.

use helix_proto::log::v1::{ErrorReason, ReadSource as Wire};

use super::{ReadOptions, ReadSource};
use crate::error::{Error, Result};
use crate::routing::{Route, Routing};

/// Chooses the node for each attempt of one call or subscription.
#[derive(Debug, Clone)]
pub(super) struct ReplicaSelector {
    source: ReadSource,
    preferred_node: Option<u64>,
    turn: usize,
    /// Nodes that have failed since the last progress, in the order of their last failures.
    failed: Vec<u64>,
    /// The next attempt must use the leader, to confirm a replica's error.
    needs_leader: bool,
}

impl ReplicaSelector {
    /// Creates a selector; readers with different `turn` spread over the nodes.
    pub(super) fn new(options: ReadOptions, turn: usize) -> Self {
        let ReadOptions { source, preferred_node, .. } = options;
        Self { source, preferred_node, turn, failed: Vec::new(), needs_leader: false }
    }

    /// Returns the source to state in the request.
    pub(super) fn to_wire(&self) -> Wire {
        if self.is_leader() { Wire::Unspecified } else { Wire::AnyReplica }
    }

    /// Returns true if the leader must serve the read.
    pub(super) fn is_leader(&self) -> bool {
        self.source == ReadSource::Leader || self.needs_leader
    }

    /// Returns the route to the chosen node for a partition.
    pub(super) async fn route(
        &self,
        routing: &Routing,
        topic: &str,
        partition: u32,
    ) -> Result<Route> {
        if self.is_leader() {
            return routing.leader(topic, partition).await;
        }
        let replicas = routing.replicas(topic, partition).await?;
        let nodes: Vec<u64> = replicas.iter().map(|route| route.node_id).collect();
        let chosen = self.choose(&nodes, |node| routing.is_near(node));
        match chosen {
            Some(index) => Ok(replicas[index].clone()),
            None => routing.leader(topic, partition).await,
        }
    }

    /// Returns the index of the chosen node, or `None` if `nodes` is empty.
    ///
    /// Prefers nodes without a failure since the last progress, in this order: the preferred node,
    /// the next near node in turn, the next node in turn. If all have failed, chooses the node
    /// whose last failure is the oldest.
    fn choose(&self, nodes: &[u64], is_near: impl Fn(u64) -> bool) -> Option<usize> {
        let is_healthy = |node: &u64| !self.failed.contains(node);
        let preferred = nodes.iter().position(|node| Some(*node) == self.preferred_node);
        if let Some(index) = preferred.filter(|&index| is_healthy(&nodes[index])) {
            return Some(index);
        }
        let in_turn = || (0..nodes.len()).map(|index| (index + self.turn) % nodes.len());
        let near = in_turn().find(|&index| is_healthy(&nodes[index]) && is_near(nodes[index]));
        let failed_at = |index: &usize| self.failed.iter().position(|it| *it == nodes[*index]);
        near.or_else(|| in_turn().find(|&index| is_healthy(&nodes[index])))
            .or_else(|| (0..nodes.len()).min_by_key(failed_at))
    }

    /// Records a failure. Returns the error, and true if another node should be tried at once.
    ///
    /// An OFFSET_OUT_OF_RANGE of a replica becomes retryable, since the replica may lag.
    pub(super) fn on_failure(&mut self, route: &Route, error: Error) -> (Error, bool) {
        if self.source == ReadSource::Leader {
            return (error, false);
        }
        if self.needs_leader {
            // The leader was unreachable, or has confirmed the error.
            self.needs_leader = false;
            return (error, false);
        }
        let has_others = self.on_lag(route);
        if error.is(ErrorReason::OffsetOutOfRange) {
            self.needs_leader = true;
            return (error.retryable_elsewhere(), true);
        }
        (error, has_others)
    }

    /// Records that a replica lacks the records. Returns true if another one should be tried at
    /// once.
    pub(super) fn on_lag(&mut self, route: &Route) -> bool {
        let has_others = !self.has_failed(route);
        self.failed.retain(|node| *node != route.node_id);
        self.failed.push(route.node_id);
        has_others
    }

    /// Returns true if the node has failed since the last progress.
    pub(super) fn has_failed(&self, route: &Route) -> bool {
        self.failed.contains(&route.node_id)
    }

    pub(super) fn on_progress(&mut self) {
        self.failed.clear();
        self.needs_leader = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn any_replica(preferred_node: Option<u64>) -> ReplicaSelector {
        let source = ReadSource::AnyReplica;
        let options = ReadOptions { source, preferred_node, ..ReadOptions::default() };
        ReplicaSelector::new(options, 4)
    }

    #[test]
    fn prefers_the_preferred_node_and_avoids_failed_ones() {
        let nodes = [1, 2, 3];
        let mut selector = any_replica(Some(3));
        let choose = |selector: &ReplicaSelector| selector.choose(&nodes, |_| false);
        assert_eq!(choose(&selector), Some(2));
        selector.failed = vec![3];
        assert_eq!(choose(&selector), Some(1));
        selector.failed = vec![3, 2];
        assert_eq!(choose(&selector), Some(0));
        selector.failed = vec![2, 3, 1];
        assert_eq!(choose(&selector), Some(1), "the oldest failure");
        selector.on_progress();
        assert_eq!(choose(&selector), Some(2));
        assert_eq!(selector.choose(&[], |_| true), None);
        // Node 9 has no replica of this shard.
        assert_eq!(choose(&any_replica(Some(9))), Some(1));
    }

    #[test]
    fn prefers_near_nodes_that_have_not_failed() {
        let nodes = [1, 2, 3, 4];
        let mut selector = any_replica(None);
        let choose = |selector: &ReplicaSelector| selector.choose(&nodes, |node| node > 2);
        assert_eq!(choose(&selector), Some(2));
        selector.failed = vec![3];
        assert_eq!(choose(&selector), Some(3));
        selector.failed = vec![3, 4];
        assert_eq!(choose(&selector), Some(0), "far nodes, in turn");
        selector.failed = vec![3, 4, 1, 2];
        assert_eq!(choose(&selector), Some(2), "the oldest failure");
        // A node that the reader names comes first.
        assert_eq!(choose(&any_replica(Some(1))), Some(0));
    }
}
