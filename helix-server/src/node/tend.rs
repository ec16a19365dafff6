//! What a node does for its cluster in the background: forms its shards, brings the shards that it
//! leads to what the cluster's state says, makes itself known, spreads the lead, checkpoints.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior};

use super::Node;
use crate::error::{Error, Result};
use crate::limits;
use crate::raft::LeadershipWatch;
use crate::shard::Shard;

/// How long to wait after a step that failed, mostly for want of a leader.
const AGAIN_AFTER: Duration = Duration::from_millis(200);

/// How often the lead is looked at.
const BALANCE_INTERVAL: Duration = Duration::from_secs(1);

pub(super) fn start(node: &Arc<Node>) {
    for shard in node.shards() {
        start_shard(node, shard);
    }
    start_cluster(node);
    tokio::spawn(tend_routes(Arc::downgrade(node)));
    tokio::spawn(spread_leaders(Arc::downgrade(node)));
}

/// For a data shard that was opened: until it is closed.
pub(super) fn start_shard(node: &Arc<Node>, shard: Arc<Shard>) {
    tokio::spawn(follow_leaders(Arc::downgrade(node), shard.watch_leadership()));
    tokio::spawn(tend_shard(Arc::downgrade(node), shard));
}

/// The same for shard 0.
pub(super) fn start_cluster(node: &Arc<Node>) {
    tokio::spawn(follow_leaders(Arc::downgrade(node), node.cluster.watch_leadership()));
    tokio::spawn(tend_cluster(Arc::downgrade(node)));
}

/// Forms a shard where that is due, then keeps it at what the cluster's state says for as long as
/// it is led from here.
async fn tend_shard(node: Weak<Node>, shard: Arc<Shard>) {
    let Some((mut versions, draining)) =
        node.upgrade().map(|node| (node.cluster.machine().watch(), node.draining.clone()))
    else {
        return;
    };
    let mut leadership = shard.watch_leadership();
    let shard_id = shard.id();
    if let Err(error) = form(&node, &shard).await {
        tracing::error!(shard_id, %error, "shard cannot be formed");
    }
    loop {
        let Some(node) = node.upgrade() else { return };
        // Marked before the look: what changes during it is looked at again.
        versions.mark_unchanged();
        let settled = if shard.leads() { settle(&node, &shard).await } else { Ok(()) };
        drop(node);
        let is_settled = settled.is_ok();
        if let Err(error) = settled {
            tracing::debug!(shard_id, %error, "the shard does not follow the cluster's state yet");
        }
        tokio::select! {
            biased;
            () = draining.cancelled() => return,
            changed = versions.changed() => if changed.is_err() { return },
            changed = leadership.changed() => if !changed { return },
            () = tokio::time::sleep(AGAIN_AFTER), if !is_settled => {}
        }
    }
}

async fn settle(node: &Node, shard: &Shard) -> Result<()> {
    shard.ready().await?;
    node.cluster.settle_shard(shard).await
}

/// A shard is formed once the cluster's state names it: by then every node has its replica. The
/// node that should lead it does it at once; the others only where that one does not.
async fn form(node: &Weak<Node>, shard: &Arc<Shard>) -> std::io::Result<()> {
    // One in repair learns from the others that it exists.
    if shard.replica().repair_of().is_some() {
        return Ok(());
    }
    if shard.is_formed().await? {
        return shard.take_up().await;
    }
    // The shards of a node that was called in exist elsewhere.
    if !shard.may_form() {
        return Ok(());
    }
    let Some(mut versions) = node.upgrade().map(|node| node.cluster.machine().watch()) else {
        return Ok(());
    };
    loop {
        let Some(node) = node.upgrade() else { return Ok(()) };
        versions.mark_unchanged();
        if node.cluster.machine().read(|state| state.shards().contains(&shard.id())) {
            break;
        }
        let draining = node.draining.clone();
        drop(node);
        tokio::select! {
            biased;
            () = draining.cancelled() => return Ok(()),
            changed = versions.changed() => if changed.is_err() { return Ok(()) },
        }
    }
    if !shard.is_first_member() {
        tokio::time::sleep(limits::FORM_WAIT).await;
    }
    shard.form().await
}

/// Gives a fresh cluster what it begins with, and keeps shard 0's log short.
async fn tend_cluster(node: Weak<Node>) {
    let Some((mut leadership, draining)) =
        node.upgrade().map(|node| (node.cluster.watch_leadership(), node.draining.clone()))
    else {
        return;
    };
    let mut tick = tokio::time::interval(limits::UPKEEP_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut asked = 0;
    loop {
        tokio::select! {
            biased;
            () = draining.cancelled() => return,
            changed = leadership.changed() => if !changed { return },
            _ = tick.tick() => {}
        }
        let Some(node) = node.upgrade() else { return };
        let replica = node.cluster.replica();
        let is_fresh =
            node.cluster.machine().read(|s| s.shards().is_empty() || !s.has_had_topics());
        if is_fresh
            && !node.is_alone()
            && replica.is_ready()
            && let Err(error) = node.cluster.bootstrap(&node.bootstrap()).await
        {
            tracing::debug!(%error, "the cluster has not got its first topics yet");
        }
        let applied = replica.status().applied;
        let (checkpoint, purged) = replica.checkpointed();
        if applied.saturating_sub(checkpoint.max(asked)) >= limits::CLUSTER_CHECKPOINT_ENTRIES {
            asked = applied;
            replica.checkpoint().await;
        }
        // Whoever lacks more gets the whole state, which is small.
        let upto = checkpoint.saturating_sub(limits::CLUSTER_CHECKPOINT_ENTRIES);
        if upto > purged {
            replica.purge(upto).await;
        }
    }
}

/// Tells those who route by this node when the leader of a shard changes.
async fn follow_leaders(node: Weak<Node>, mut leadership: LeadershipWatch) {
    while leadership.changed().await {
        let Some(node) = node.upgrade() else { return };
        node.routes.send_modify(|count| *count += 1);
    }
}

/// The same for what else routes are made of.
async fn tend_routes(node: Weak<Node>) {
    let Some((mut versions, mut peers)) = node.upgrade().map(|node| {
        let versions = node.cluster.machine().watch();
        (versions, node.hub.watch_peers())
    }) else {
        return;
    };
    loop {
        let goes_on = tokio::select! {
            biased;
            changed = versions.changed() => changed.is_ok(),
            // A leader that cannot be reached is none, as far as this node knows.
            changed = peers.changed() => changed.is_ok(),
        };
        let Some(node) = node.upgrade() else { return };
        if !goes_on {
            return;
        }
        node.routes.send_modify(|count| *count += 1);
    }
}

/// Makes this node known to the cluster, as soon as there is a leader to tell it to.
pub(super) async fn register(node: Weak<Node>) {
    loop {
        let Some(node) = node.upgrade() else { return };
        match node.register().await {
            Ok(()) | Err(Error::Draining) => return,
            Err(error) => tracing::debug!(%error, "this node is not registered yet"),
        }
        tokio::select! {
            biased;
            () = node.draining.cancelled() => return,
            () = tokio::time::sleep(AGAIN_AFTER) => {}
        }
    }
}

/// Hands shards that are led from here to the nodes that should lead them: one at a time, and only
/// when that node has been there and caught up for a while.
async fn spread_leaders(node: Weak<Node>) {
    let mut tick = tokio::time::interval(BALANCE_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut well_since = Instant::now();
    loop {
        tick.tick().await;
        let Some(node) = node.upgrade() else { return };
        if node.draining.is_cancelled() {
            return;
        }
        if !node.peers().iter().all(|peer| peer.connected) {
            well_since = Instant::now();
            continue;
        }
        if well_since.elapsed() < limits::BALANCE_AFTER {
            continue;
        }
        if let Some((shard, to)) = node.cluster.misplaced() {
            let shard_id = shard.id();
            match shard.transfer(Some(to)).await {
                Ok(()) => tracing::info!(shard_id, to, "handed over to the node that should lead"),
                Err(error) => tracing::info!(shard_id, to, %error, "could not hand over"),
            }
            well_since = Instant::now();
        }
    }
}
