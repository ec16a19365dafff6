//! Background scrub: repeatedly reads all logs of the node at a low rate. It finds damage while
//! other replicas still have the damaged entries.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::Instant;

use super::Node;
use crate::raft::Replica;

/// Minimum interval between the starts of two rounds.
const ROUND_INTERVAL: Duration = Duration::from_hours(1);

/// Interval at which a long pause between two reads checks whether the node is closing.
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

/// Scrubs the log of a shard once, or until it is closed. Returns `false` if the node is closing.
async fn scrub(node: &Weak<Node>, shard_id: u64) -> bool {
    let Some(log) = node.upgrade().map(|node| with_replica(&node, shard_id, Replica::scrub)) else {
        return false;
    };
    let Some((mut scrub, mut reads)) = log else { return true };
    // Each read is followed by a pause in proportion to its size, so that the rate is constant.
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
        if let Some(shortage) = &scrubbed.shortage {
            tracing::debug!(shard_id, %shortage, "cannot scrub yet");
            free_at = Instant::now() + PAUSE_MAX;
        }
        if let Some(damage) = &scrubbed.damage {
            // Damage is ignored if the log was closed during the read.
            if with_replica(&node, shard_id, |it| !it.has_ended()).unwrap_or(false) {
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
            // A zero sleep would never return on a simulated clock that does not advance.
            if left.is_zero() {
                break;
            }
            tokio::time::sleep(left.min(PAUSE_MAX)).await;
        }
    }
}

/// Calls `look` with the current replica of a shard; returns `None` if the shard is not open.
fn with_replica<T>(node: &Node, shard_id: u64, look: impl FnOnce(&Replica) -> T) -> Option<T> {
    if shard_id == 0 {
        return Some(look(&node.cluster.replica()));
    }
    node.shard(shard_id).map(|shard| look(shard.replica()))
}
