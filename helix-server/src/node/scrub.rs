//! Reads all that the node's logs hold over and over, slowly, so that damage is found while the
//! other replicas still have what is damaged.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::Instant;

use super::Node;
use crate::raft::Replica;

/// At least so long from the beginning of one round to that of the next.
const ROUND_INTERVAL: Duration = Duration::from_hours(1);

/// So often a node looks whether it is to stop, where a piece is paid for by a long pause.
const PAUSE_MAX: Duration = Duration::from_secs(1);

pub(super) fn start(node: &Arc<Node>) {
    if node.settings.scrub_rate > 0 {
        tokio::spawn(run(Arc::downgrade(node)));
    }
}

async fn run(node: Weak<Node>) {
    loop {
        let began = Instant::now();
        let Some(shards) = node.upgrade().map(|node| node.shards.ids()) else { return };
        for shard_id in shards.into_iter().chain([0]) {
            if !scrub(&node, shard_id).await {
                return;
            }
        }
        let Some(node) = node.upgrade() else { return };
        node.metrics.on_scrub_round();
        let draining = node.draining.clone();
        drop(node);
        tokio::select! {
            biased;
            () = draining.cancelled() => return,
            () = tokio::time::sleep_until(began + ROUND_INTERVAL) => {}
        }
    }
}

/// One round through the log of a shard, or until that is closed; `false` where the node is.
async fn scrub(node: &Weak<Node>, shard_id: u64) -> bool {
    let Some(log) = node.upgrade().map(|node| with_replica(&node, shard_id, Replica::scrub)) else {
        return false;
    };
    let Some((mut scrub, mut reads)) = log else { return true };
    // What was read is paid for in time, so that pieces of any size make the same rate.
    let mut free_at = Instant::now();
    loop {
        let stepping = async move {
            let step = move || {
                let scrubbed = scrub.step();
                (scrub, scrubbed)
            };
            let stepped = reads.cold(step).await;
            (reads, stepped)
        };
        let (after, stepped) = stepping.await;
        let Ok((next, scrubbed)) = stepped else { return true };
        (scrub, reads) = (next, after);
        let Some(node) = node.upgrade().filter(|node| !node.draining.is_cancelled()) else {
            return false;
        };
        node.metrics.on_scrub(scrubbed.bytes);
        if let Some(damage) = &scrubbed.damage {
            // A log that was closed meanwhile has nothing to say any more.
            if with_replica(&node, shard_id, |it| !it.wal().has_ended()).unwrap_or(false) {
                reads.note(damage);
            }
        }
        if scrubbed.is_round {
            return true;
        }
        let rate = node.settings.scrub_rate;
        drop(node);
        free_at += Duration::from_secs_f64(scrubbed.bytes as f64 / rate as f64);
        loop {
            let left = free_at.saturating_duration_since(Instant::now());
            // Asked for no pause, a clock that stands still meanwhile would never go on.
            if left.is_zero() {
                break;
            }
            tokio::time::sleep(left.min(PAUSE_MAX)).await;
        }
    }
}

/// Looks at the replica that serves a shard now, if one does.
fn with_replica<T>(node: &Node, shard_id: u64, look: impl FnOnce(&Replica) -> T) -> Option<T> {
    if shard_id == 0 {
        return Some(look(&node.cluster.replica()));
    }
    node.shard(shard_id).map(|shard| look(shard.replica()))
}
