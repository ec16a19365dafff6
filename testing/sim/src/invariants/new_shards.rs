//! New shards that the cluster gave up, whose replicas may be deleted at any time.

use std::collections::BTreeSet;

use helix_server::node::Node;

/// Shards of the newest state of the cluster that a running node had.
#[derive(Debug, Default)]
pub(super) struct NewShards {
    version: u64,
    placed: BTreeSet<u64>,
    /// Shards that took partitions at some time.
    opened: BTreeSet<u64>,
    given_up: BTreeSet<u64>,
}

impl NewShards {
    pub(super) fn update(&mut self, node: &Node) {
        node.cluster().machine().read(|state| {
            let Some(placement) = state.members().placement() else { return };
            if state.version() <= self.version {
                return;
            }
            self.version = state.version();
            self.opened.extend(state.shards());
            let placed: BTreeSet<u64> = placement.shards().map(|(id, _)| id).collect();
            self.given_up.extend(self.placed.difference(&placed));
            self.placed = placed;
        });
    }

    /// Returns whether a shard was given up before it took a partition. A shard that took one must
    /// keep its entries.
    pub(super) fn is_given_up(&self, shard_id: u64) -> bool {
        self.given_up.contains(&shard_id) && !self.opened.contains(&shard_id)
    }
}
