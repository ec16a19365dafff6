//! Background tasks for cluster membership. They dial the members, reconcile the replicas of the
//! shards that this node leads, drive the membership change in progress, transfer leaderships away
//! while the node drains, and detect that the node was removed.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::MissedTickBehavior;

use super::Node;
use crate::raft::LeadershipWatch;
use crate::shard::Shard;

/// Delay before an unfinished step is repeated.
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// Interval at which a node without a leader asks other nodes whether it is still a member.
const MEMBER_CHECK_INTERVAL: Duration = Duration::from_secs(1);

pub(super) fn start(node: &Arc<Node>) {
    for shard in node.shards() {
        start_shard(node, shard);
    }
    start_cluster(node);
    tokio::spawn(watch_membership(Arc::downgrade(node)));
}

/// Starts the task of an open data shard; it stops when the shard is closed.
pub(super) fn start_shard(node: &Arc<Node>, shard: Arc<Shard>) {
    tokio::spawn(run_task(Arc::downgrade(node), Task::Replicas(Some(shard))));
}

/// Starts the tasks of shard 0; they stop when it is closed.
pub(super) fn start_cluster(node: &Arc<Node>) {
    for task in [Task::Replicas(None), Task::Members] {
        tokio::spawn(run_task(Arc::downgrade(node), task));
    }
}

/// A task that runs while the node is open.
enum Task {
    /// Keeps the replicas of a shard (`None`: shard 0) at the target while this node leads it.
    Replicas(Option<Arc<Shard>>),
    /// Dials the members. On shard 0's leader it also drives the membership change and raises the
    /// protocol version. On a draining node it transfers leaderships away.
    Members,
}

impl Task {
    fn watch_leadership(&self, node: &Node) -> LeadershipWatch {
        match self {
            Self::Replicas(Some(shard)) => shard.watch_leadership(),
            Self::Replicas(None) | Self::Members => node.cluster.watch_leadership(),
        }
    }

    /// Takes all possible steps. Returns whether nothing is left to do until something changes.
    async fn run_once(&self, node: &Node) -> bool {
        match self {
            Self::Replicas(shard) => reconcile_replicas(node, shard.as_deref()).await,
            Self::Members => drive_members(node).await,
        }
    }
}

/// Runs the task whenever the cluster's state, the leadership or a connection has changed. An
/// unfinished run is repeated soon. Stops when the shard is closed or the node drains or is
/// dropped.
async fn run_task(node: Weak<Node>, task: Task) {
    let Some((mut versions, mut leadership, mut peers, draining)) = node.upgrade().map(|node| {
        let (versions, peers) = (node.cluster.machine().watch(), node.hub.watch_peers());
        (versions, task.watch_leadership(&node), peers, node.draining.clone())
    }) else {
        return;
    };
    loop {
        let Some(node) = node.upgrade() else { return };
        // Marked first, so that a change during the run triggers another one.
        versions.mark_unchanged();
        peers.mark_unchanged();
        let is_done = tokio::select! {
            biased;
            () = draining.cancelled() => return,
            is_done = task.run_once(&node) => is_done,
        };
        drop(node);
        tokio::select! {
            biased;
            () = draining.cancelled() => return,
            changed = versions.changed() => if changed.is_err() { return },
            changed = leadership.changed() => if !changed { return },
            changed = peers.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(RETRY_DELAY), if !is_done => {}
        }
    }
}

async fn reconcile_replicas(node: &Node, shard: Option<&Shard>) -> bool {
    let shard_id = shard.map_or(0, Shard::id);
    if let Some(shard) = shard {
        let target = node.cluster.machine().read(|state| state.members().shard_target(shard_id));
        shard.expect_replicas(target.voters);
    }
    let own = node.cluster.replica();
    let replica = shard.map_or(&*own, Shard::replica);
    if replica.leadership().leader == Some(replica.id()) {
        return node.cluster.reconcile(shard_id, replica).await;
    }
    node.cluster.forget_progress(shard_id);
    true
}

async fn drive_members(node: &Node) -> bool {
    node.check_protocol().await;
    node.cluster.dial_members();
    let is_recorded = node.cluster.record_own_protocol().await;
    let has_stated_rack = node.cluster.state_rack(&node.settings.rack).await;
    let leads_nothing = node.cluster.transfer_all().await;
    let is_leader = node.cluster.is_leader();
    if !is_leader {
        node.cluster.forget_observations();
    }
    let is_idle = !is_leader
        || node.cluster.drive_change().await && {
            // A member with a full disk delays the next version, but no moves.
            let is_newest = node.cluster.raise_protocol().await;
            node.cluster.drive_placement().await && is_newest
        };
    // A draining node may be elected again, so it is never done.
    leads_nothing
        && has_stated_rack
        && is_recorded
        && is_idle
        && !node.cluster.is_draining(node.settings.node_id)
}

/// Detects that this node was removed from its cluster. Raft does not tell a removed node, and the
/// other nodes refuse its connections. So a node without a leader asks them whether it is a member.
async fn watch_membership(node: Weak<Node>) {
    let mut tick = tokio::time::interval(MEMBER_CHECK_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let Some(node) = node.upgrade() else { return };
        if node.draining.is_cancelled() {
            return;
        }
        if node.is_single_node() || node.cluster.leader_hint().is_some() {
            continue;
        }
        let peers = node.hub.addresses().into_keys();
        let requests = peers.map(|peer| {
            let hub = node.hub.clone();
            async move { hub.hello(peer).await.ok() }
        });
        let responses = futures_util::future::join_all(requests).await;
        let own = node.hub.cluster();
        let same_cluster = responses.into_iter().flatten().filter(|hello| hello.cluster == own);
        if let Some(why) = same_cluster.filter_map(|hello| hello.removed).next() {
            let what = format!(
                "{why}; the cluster no longer needs its data: stop this process, and empty its \
                 data directory before the node is added again"
            );
            tracing::error!("{what}");
            // Ignored: the reason is set once.
            let _ = node.removed.set(what);
            for shard in node.shards() {
                shard.retire();
            }
            node.routes.send_modify(|count| *count += 1);
            return;
        }
    }
}
