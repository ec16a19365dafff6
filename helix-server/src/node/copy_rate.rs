//! Steers the rate of copies by the times of this node's appends and syncs.

use std::sync::{Arc, Weak};
use std::time::Duration;

use helix_wal::SYNC_BOUNDS_US;
use tokio::time::MissedTickBehavior;

use super::Node;
use crate::peer::CopyPace;
use crate::raft::Replica;

/// Interval at which the rate is chosen: a step of the controller.
const INTERVAL: Duration = Duration::from_secs(1);

pub(super) fn start(node: &Arc<Node>) {
    node.hub.set_copy_rate_max(node.settings.copy_rate_max);
    tokio::spawn(run(Arc::downgrade(node)));
}

async fn run(node: Weak<Node>) {
    let Some(draining) = node.upgrade().map(|node| node.draining.clone()) else { return };
    let mut tick = tokio::time::interval(INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = draining.cancelled() => return,
            _ = tick.tick() => {}
        }
        let Some(node) = node.upgrade() else { return };
        // Appends without their waits for a quota or for bytes in flight, which other causes have.
        node.hub.steer_copies(&node.metrics.commit_times(), &node.sync_times());
    }
}

impl Node {
    /// Returns the rate of copies and the bytes copied.
    pub fn copy_pace(&self) -> CopyPace {
        self.hub.copy_pace()
    }

    /// Changes the largest rate of copies, in bytes per second; at least
    /// [`crate::limits::COPY_RATE_LEAST`]. It applies until the node is opened again.
    pub fn set_copy_rate_max(&self, rate_max: u64) {
        self.hub.set_copy_rate_max(rate_max);
    }

    /// Returns the histogram of the syncs of all open logs.
    fn sync_times(&self) -> [u64; SYNC_BOUNDS_US.len() + 1] {
        let mut sum = [0; SYNC_BOUNDS_US.len() + 1];
        let mut add = |replica: &Replica| {
            for (sum, count) in sum.iter_mut().zip(replica.sync_counts()) {
                *sum += count;
            }
        };
        add(&self.cluster.replica());
        self.shards().iter().for_each(|shard| add(shard.replica()));
        sum
    }
}
