//! Whom to read from: the leader, or any node that has a copy. Remembers who has failed, and whose
//! word needs the leader's confirmation.

use helix_proto::log::v1::{ErrorReason, ReadSource as Wire};

use super::{ReadOptions, ReadSource};
use crate::error::{Error, Result};
use crate::routing::{Route, Routing};

/// The choice of one call or subscription, from attempt to attempt.
#[derive(Debug, Clone)]
pub(super) struct Source {
    source: ReadSource,
    preferred_node: Option<u64>,
    turn: usize,
    /// Nodes that have failed since the last progress.
    failed: Vec<u64>,
    /// Only the leader can settle what a copy has said.
    asks_leader: bool,
}

impl Source {
    /// Readers with different turns spread over the nodes.
    pub(super) fn new(options: ReadOptions, turn: usize) -> Self {
        let ReadOptions { source, preferred_node, .. } = options;
        Self { source, preferred_node, turn, failed: Vec::new(), asks_leader: false }
    }

    /// What to say to the node that is asked.
    pub(super) fn to_wire(&self) -> Wire {
        if self.is_leader() { Wire::Unspecified } else { Wire::AnyReplica }
    }

    /// Whether only the leader will do.
    pub(super) fn is_leader(&self) -> bool {
        self.source == ReadSource::Leader || self.asks_leader
    }

    /// The way to the node to ask about a partition.
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
        let place = self.choose(&replicas.iter().map(|route| route.node_id).collect::<Vec<_>>());
        match place {
            Some(place) => Ok(replicas[place].clone()),
            None => routing.leader(topic, partition).await,
        }
    }

    /// The place of the node to ask: the preferred one, else the next in turn that has not failed,
    /// else the next in turn. None of none.
    fn choose(&self, nodes: &[u64]) -> Option<usize> {
        let is_well = |node: &u64| !self.failed.contains(node);
        let preferred = nodes.iter().position(|node| Some(*node) == self.preferred_node);
        if let Some(place) = preferred.filter(|&place| is_well(&nodes[place])) {
            return Some(place);
        }
        let in_turn = || (0..nodes.len()).map(|place| (place + self.turn) % nodes.len());
        in_turn().find(|&place| is_well(&nodes[place])).or_else(|| in_turn().next())
    }

    /// Takes a failure in, and says whether another node may do better at once. The error comes
    /// back as what it means here: a copy that lags may call an offset unreadable that is not.
    pub(super) fn on_failure(&mut self, route: &Route, error: Error) -> (Error, bool) {
        if self.source == ReadSource::Leader {
            return (error, false);
        }
        if self.asks_leader {
            // The leader could not be had, or has spoken.
            self.asks_leader = false;
            return (error, false);
        }
        let has_others = !self.failed.contains(&route.node_id);
        self.failed.push(route.node_id);
        if error.is(ErrorReason::OffsetOutOfRange) {
            self.asks_leader = true;
            return (error.in_doubt(), true);
        }
        (error, has_others)
    }

    pub(super) fn on_progress(&mut self) {
        self.failed.clear();
        self.asks_leader = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn anywhere(preferred_node: Option<u64>) -> Source {
        let source = ReadSource::AnyReplica;
        Source::new(ReadOptions { source, preferred_node, clamp: false }, 4)
    }

    #[test]
    fn the_preferred_node_comes_first_and_the_failed_ones_last() {
        let nodes = [1, 2, 3];
        let mut source = anywhere(Some(3));
        assert_eq!(source.choose(&nodes), Some(2));
        source.failed = vec![3];
        assert_eq!(source.choose(&nodes), Some(1));
        source.failed = vec![3, 2];
        assert_eq!(source.choose(&nodes), Some(0));
        source.failed = vec![3, 2, 1];
        assert_eq!(source.choose(&nodes), Some(1));
        source.on_progress();
        assert_eq!(source.choose(&nodes), Some(2));
        assert_eq!(source.choose(&[]), None);
        // It has no copy of this shard.
        assert_eq!(anywhere(Some(9)).choose(&nodes), Some(1));
    }
}
