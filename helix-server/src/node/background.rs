//! Background tasks of a node: form its shards, propagate topics to the shards that it leads,
//! register the node, balance leaderships, transfer leaderships away from a stalled disk, and
//! checkpoint shard 0.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior};

use super::{Node, leadership_log};
use crate::cluster::{CleanupRounds, CoordinatorRound, SealWatch};
use crate::error::{Error, Result};
use crate::limits;
use crate::raft::{LeadershipWatch, node_and_generation};
use crate::shard::Shard;

/// Delay before a failed step is retried. Most steps fail because there is no leader.
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// Interval between checks of the leader placement.
const BALANCE_INTERVAL: Duration = Duration::from_secs(1);

/// Interval at which a node asks for the leaders of shards without a replica here.
const LEADERS_INTERVAL: Duration = Duration::from_millis(500);

/// Delay between a change of the cluster's state and the next request for remote leaders.
const NEW_LEADER_DELAY: Duration = Duration::from_millis(100);

pub(super) fn start(node: &Arc<Node>) {
    for shard in node.shards() {
        start_shard(node, shard);
    }
    start_cluster(node);
    tokio::spawn(watch_route_inputs(Arc::downgrade(node)));
    tokio::spawn(balance_leaders(Arc::downgrade(node)));
    tokio::spawn(learn_leaders(Arc::downgrade(node)));
}

/// Starts the tasks of an open data shard; they stop when it is closed.
pub(super) fn start_shard(node: &Arc<Node>, shard: Arc<Shard>) {
    tokio::spawn(follow_leaders(Arc::downgrade(node), shard.watch_leadership()));
    tokio::spawn(leadership_log::run(shard.id(), node.info().node_id, shard.watch_leadership()));
    tokio::spawn(watch_disk(Arc::downgrade(node), Arc::downgrade(&shard)));
    tokio::spawn(maintain_shard(Arc::downgrade(node), shard.clone()));
    tokio::spawn(coordinate_groups(Arc::downgrade(node), shard.clone()));
    tokio::spawn(drive_cleanup(Arc::downgrade(node), shard));
}

/// Drives the compaction by key of a shard while this node leads it.
async fn drive_cleanup(node: Weak<Node>, shard: Arc<Shard>) {
    let mut rounds = CleanupRounds::default();
    let mut tick = tokio::time::interval(limits::CLEANER_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = shard.closed() => return,
            _ = tick.tick() => {}
        }
        let Some(node) = node.upgrade() else { return };
        let draining = node.draining.clone();
        tokio::select! {
            biased;
            () = draining.cancelled() => return,
            step = node.cluster.drive_cleanup(&shard, &mut rounds) => {
                if let Err(error) = step {
                    tracing::debug!(shard_id = shard.id(), %error, "cannot compact by key yet");
                }
            }
        }
    }
}

/// Coordinates the groups of a shard while this node leads it.
async fn coordinate_groups(node: Weak<Node>, shard: Arc<Shard>) {
    let Some(mut versions) = node.upgrade().map(|node| node.cluster.machine().watch()) else {
        return;
    };
    let mut leadership = shard.watch_leadership();
    let mut round = CoordinatorRound::default();
    loop {
        let Some(node) = node.upgrade() else { return };
        // Marked first, so that a change during the step triggers another one.
        versions.mark_unchanged();
        let step = node.cluster.coordinate_groups(&shard, &mut round).await;
        let draining = node.draining.clone();
        drop(node);
        let next = step.unwrap_or_else(|error| {
            tracing::debug!(shard_id = shard.id(), %error, "cannot coordinate the groups yet");
            Some(Instant::now() + RETRY_DELAY)
        });
        let due = async {
            match next {
                Some(next) => tokio::time::sleep_until(next).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = draining.cancelled() => return,
            () = shard.closed() => return,
            changed = leadership.changed() => if !changed { return },
            changed = versions.changed() => if changed.is_err() { return },
            () = shard.groups_changed() => {}
            () = due => {}
        }
    }
}

/// Starts the tasks of shard 0; they stop when it is closed.
pub(super) fn start_cluster(node: &Arc<Node>) {
    tokio::spawn(follow_leaders(Arc::downgrade(node), node.cluster.watch_leadership()));
    let own = node.info().node_id;
    tokio::spawn(leadership_log::run(0, own, node.cluster.watch_leadership()));
    tokio::spawn(maintain_cluster(Arc::downgrade(node)));
}

/// Transfers leadership while a sync stalls, until the shard is closed. Runs as a separate task
/// because a transfer takes a while.
async fn watch_disk(node: Weak<Node>, shard: Weak<Shard>) {
    let Some(interval) = node.upgrade().map(|node| node.hub.timing().timeout() / 2) else {
        return;
    };
    let mut tick = tokio::time::interval(interval);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let (Some(node), Some(shard)) = (node.upgrade(), shard.upgrade()) else { return };
        if shard.is_closed() {
            return;
        }
        transfer_if_disk_stalls(&node, &shard).await;
    }
}

/// Transfers leadership while a sync stalls: another leader can commit without this disk. Prefers a
/// replica that is whole, as other transfers do.
async fn transfer_if_disk_stalls(node: &Node, shard: &Shard) {
    let limit = node.hub.timing().stalled_after();
    let Some(stalled) = shard.unsynced_for().filter(|time| *time >= limit) else { return };
    if !shard.is_leader() || shard.replicas().len() <= 1 {
        return;
    }
    let shard_id = shard.id();
    tracing::warn!(shard_id, ?stalled, "disk stalls, transferring leadership");
    // A node that does not respond must not delay the transfer.
    let choosing = node.cluster.successor(shard_id, shard.replica(), true);
    let successor = tokio::time::timeout(limit / 2, choosing).await.ok().flatten();
    if let Err(error) = shard.abandon_leadership(successor).await {
        tracing::warn!(shard_id, %error, "leadership transfer failed");
    }
}

/// Forms a shard if that is due, then propagates topics to it while this node leads it.
async fn maintain_shard(node: Weak<Node>, shard: Arc<Shard>) {
    let Some((mut versions, draining)) =
        node.upgrade().map(|node| (node.cluster.machine().watch(), node.draining.clone()))
    else {
        return;
    };
    let mut leadership = shard.watch_leadership();
    let mut seal = SealWatch::default();
    let shard_id = shard.id();
    if let Err(error) = form(&node, &shard).await
        && !shard.is_closed()
    {
        tracing::error!(shard_id, %error, "cannot form the shard");
    }
    loop {
        let Some(node) = node.upgrade() else { return };
        // Marked first, so that a change during the step triggers another one.
        versions.mark_unchanged();
        let led = match shard.is_leader() {
            true => lead(&node, &shard, &mut seal).await,
            false => Ok(true),
        };
        drop(node);
        let is_done = led.unwrap_or_else(|error| {
            tracing::debug!(shard_id, %error, "cannot bring the shard in line with the topics yet");
            false
        });
        tokio::select! {
            biased;
            () = draining.cancelled() => return,
            changed = versions.changed() => if changed.is_err() { return },
            changed = leadership.changed() => if !changed { return },
            () = tokio::time::sleep(RETRY_DELAY), if !is_done => {}
        }
    }
}

/// Propagates topics to a shard that this node leads, and takes the next step of its split.
/// Returns whether there is nothing to do until the cluster's state changes.
async fn lead(node: &Node, shard: &Shard, seal: &mut SealWatch) -> Result<bool> {
    shard.ready().await?;
    node.cluster.propagate_to_shard(shard).await?;
    node.cluster.drive_split(shard, seal).await
}

/// Forms a shard once the cluster's state names it, when every node has its replica. The preferred
/// leader does so at once, the other nodes after a delay.
async fn form(node: &Weak<Node>, shard: &Arc<Shard>) -> std::io::Result<()> {
    // A replica in repair learns from other nodes that its shard is formed.
    if shard.replica().repair_of().is_some() {
        return Ok(());
    }
    if shard.is_formed().await? {
        return shard.resume().await;
    }
    // The shards of a node that joined an existing cluster are already formed.
    if !shard.may_form() {
        return form_added(node, shard).await;
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
        tokio::select! {
            biased;
            () = shard.closed() => return Ok(()),
            () = tokio::time::sleep(limits::FORM_WAIT) => {}
        }
    }
    shard.form().await
}

/// Forms a shard that was added to the cluster, if this is its first replica. Waits until the
/// cluster's state records that the replica exists.
async fn form_added(node: &Weak<Node>, shard: &Arc<Shard>) -> std::io::Result<()> {
    let Some((mut versions, draining)) =
        node.upgrade().map(|node| (node.cluster.machine().watch(), node.draining.clone()))
    else {
        return Ok(());
    };
    let (own, generation) = node_and_generation(shard.replica().id());
    loop {
        let Some(node) = node.upgrade() else { return Ok(()) };
        versions.mark_unchanged();
        let first = node.cluster.machine().read(|state| {
            let placed = state.members().placement()?.shard(shard.id())?;
            let moving = placed.moving.filter(|_| placed.replicas.is_empty())?;
            Some(moving).filter(|it| (it.to, it.generation) == (Some(own), generation))
        });
        drop(node);
        match first {
            None => return Ok(()),
            Some(moving) if moving.is_cancelled => return Ok(()),
            Some(moving) if moving.is_created => return shard.form_alone().await,
            Some(_) => {}
        }
        tokio::select! {
            biased;
            () = draining.cancelled() => return Ok(()),
            () = shard.closed() => return Ok(()),
            changed = versions.changed() => if changed.is_err() { return Ok(()) },
        }
    }
}

/// Bootstraps a new cluster, and checkpoints and purges shard 0's log.
async fn maintain_cluster(node: Weak<Node>) {
    let Some((mut leadership, draining)) =
        node.upgrade().map(|node| (node.cluster.watch_leadership(), node.draining.clone()))
    else {
        return;
    };
    let mut tick = tokio::time::interval(limits::MAINTENANCE_INTERVAL);
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
            && !node.is_single_node()
            && replica.is_ready()
            && let Err(error) = node.cluster.bootstrap(&node.bootstrap()).await
        {
            tracing::debug!(%error, "cannot bootstrap the cluster yet");
        }
        let applied = replica.status().applied;
        let (checkpoint, purged) = replica.checkpointed();
        if applied.saturating_sub(checkpoint.max(asked)) >= limits::CLUSTER_CHECKPOINT_ENTRIES {
            asked = applied;
            replica.checkpoint().await;
        }
        // A replica that lags further behind gets a snapshot; the state is small.
        let upto = checkpoint.saturating_sub(limits::CLUSTER_CHECKPOINT_ENTRIES);
        if upto > purged {
            replica.purge(upto).await;
        }
    }
}

/// Notifies watchers of the routes when the leader of a shard changes.
async fn follow_leaders(node: Weak<Node>, mut leadership: LeadershipWatch) {
    while leadership.changed().await {
        let Some(node) = node.upgrade() else { return };
        node.routes.send_modify(|count| *count += 1);
    }
}

/// Notifies watchers of the routes when topics, nodes or peer connections change.
async fn watch_route_inputs(node: Weak<Node>) {
    let Some((mut versions, mut peers)) = node.upgrade().map(|node| {
        let versions = node.cluster.machine().watch();
        (versions, node.hub.watch_peers())
    }) else {
        return;
    };
    loop {
        let is_open = tokio::select! {
            biased;
            changed = versions.changed() => changed.is_ok(),
            // This node reports an unreachable leader as no leader.
            changed = peers.changed() => changed.is_ok(),
        };
        let Some(node) = node.upgrade() else { return };
        if !is_open {
            return;
        }
        node.routes.send_modify(|count| *count += 1);
    }
}

/// Asks for the leaders of the shards without a replica here, at an interval and soon after a
/// change of the cluster's state, which may have added a shard.
async fn learn_leaders(node: Weak<Node>) {
    let Some(mut versions) = node.upgrade().map(|node| node.cluster.machine().watch()) else {
        return;
    };
    let mut tick = tokio::time::interval(LEADERS_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            changed = versions.changed() => {
                if changed.is_err() {
                    return;
                }
                // Gives a new shard time to elect its leader.
                tokio::time::sleep(NEW_LEADER_DELAY).await;
                versions.mark_unchanged();
            }
        }
        let Some(node) = node.upgrade() else { return };
        if node.draining.is_cancelled() {
            return;
        }
        if node.cluster.learn_leaders().await {
            node.routes.send_modify(|count| *count += 1);
        }
    }
}

/// Registers this node with the cluster, and retries until there is a leader.
pub(super) async fn register(node: Weak<Node>) {
    loop {
        let Some(node) = node.upgrade() else { return };
        match node.register().await {
            Ok(()) | Err(Error::Draining) => return,
            Err(error) => tracing::debug!(%error, "cannot register this node yet"),
        }
        tokio::select! {
            biased;
            () = node.draining.cancelled() => return,
            () = tokio::time::sleep(RETRY_DELAY) => {}
        }
    }
}

/// Transfers shards to their preferred leaders, one at a time. It starts only after all peers have
/// been connected for a while.
async fn balance_leaders(node: Weak<Node>) {
    let mut tick = tokio::time::interval(BALANCE_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut connected_since = Instant::now();
    loop {
        tick.tick().await;
        let Some(node) = node.upgrade() else { return };
        if node.draining.is_cancelled() {
            return;
        }
        if !node.peers().iter().all(|peer| peer.connected) {
            connected_since = Instant::now();
            continue;
        }
        if connected_since.elapsed() < limits::BALANCE_AFTER {
            continue;
        }
        // A leader keeps its shard for at least this time, even if an operator chose it.
        let led_for = limits::BALANCE_AFTER;
        if let Some((shard, to)) = node.cluster.next_balance(&[], led_for).await {
            let shard_id = shard.id();
            match shard.transfer(Some(to)).await {
                Ok(()) => {
                    tracing::info!(shard_id, to, "transferred leadership to the preferred leader")
                }
                Err(error) => tracing::info!(shard_id, to, %error, "leadership transfer failed"),
            }
            connected_since = Instant::now();
        }
    }
}
