//! Logs elections and changes of leaders, as this node sees them.

use crate::raft::{LeadershipWatch, node_of};

/// Logs the leader of a shard, now and at each change, until the shard is closed.
pub(super) async fn run(shard_id: u64, own: u64, mut watch: LeadershipWatch) {
    let mut before = None;
    loop {
        let leadership = watch.leadership();
        let term = leadership.term;
        let leader = leadership.leader.map(node_of);
        // While there is no leader, each attempt at an election has a term of its own.
        let seen = leader.map(|node| (node, term));
        if before != Some(seen) {
            match leader {
                Some(node) if node == own => tracing::info!(shard_id, node, term, "became leader"),
                Some(node) => tracing::info!(shard_id, node, term, "following leader"),
                None if before.is_some() => tracing::info!(shard_id, term, "lost leader"),
                None => {}
            }
            before = Some(seen);
        }
        if !watch.changed().await {
            return;
        }
    }
}
