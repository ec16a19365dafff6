//! What a node does about who is a member: dials the members, brings the replicas of the shards
//! that it leads to what the cluster's state says, drives the change that runs, hands over what it
//! is not to lead, and notices that it has been removed.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::MissedTickBehavior;

use super::Node;
use crate::raft::LeadershipWatch;
use crate::shard::Shard;

/// How long to wait before the next look at what is not done.
const AGAIN_AFTER: Duration = Duration::from_millis(200);

/// How often a node without a leader asks the others whether it still is a member.
const MEMBER_LOOK_INTERVAL: Duration = Duration::from_secs(1);

pub(super) fn start(node: &Arc<Node>) {
    for shard in node.shards() {
        start_shard(node, shard);
    }
    start_cluster(node);
    tokio::spawn(watch_membership(Arc::downgrade(node)));
}

/// For a data shard that was opened: until it is closed.
pub(super) fn start_shard(node: &Arc<Node>, shard: Arc<Shard>) {
    tokio::spawn(tend(Arc::downgrade(node), Task::Replicas(Some(shard))));
}

/// The same for shard 0.
pub(super) fn start_cluster(node: &Arc<Node>) {
    for task in [Task::Replicas(None), Task::Members] {
        tokio::spawn(tend(Arc::downgrade(node), task));
    }
}

/// What is looked after for as long as the node is there.
enum Task {
    /// Keeps the replicas of a shard (none: shard 0) at what the cluster's state says for as long
    /// as it is led from here.
    Replicas(Option<Arc<Shard>>),
    /// Dials the members as the cluster's state names them; as shard 0's leader drives the change
    /// that runs, and raises the protocol; and leads nothing where this node is not to.
    Members,
}

impl Task {
    fn watch_leadership(&self, node: &Node) -> LeadershipWatch {
        match self {
            Self::Replicas(Some(shard)) => shard.watch_leadership(),
            Self::Replicas(None) | Self::Members => node.cluster.watch_leadership(),
        }
    }

    /// Does what can be done now; whether there is nothing left to do before something changes.
    async fn look(&self, node: &Node) -> bool {
        match self {
            Self::Replicas(shard) => tend_replicas(node, shard.as_deref()).await,
            Self::Members => tend_members(node).await,
        }
    }
}

/// Looks whenever the cluster's state, the lead or a connection has changed, and again soon where a
/// look says that not all is done; until the node drains or is gone.
async fn tend(node: Weak<Node>, task: Task) {
    let Some((mut versions, mut leadership, mut peers, draining)) = node.upgrade().map(|node| {
        let (versions, peers) = (node.cluster.machine().watch(), node.hub.watch_peers());
        (versions, task.watch_leadership(&node), peers, node.draining.clone())
    }) else {
        return;
    };
    loop {
        let Some(node) = node.upgrade() else { return };
        // Marked before the look: what changes during it is looked at again.
        versions.mark_unchanged();
        peers.mark_unchanged();
        let is_done = tokio::select! {
            biased;
            () = draining.cancelled() => return,
            is_done = task.look(&node) => is_done,
        };
        drop(node);
        tokio::select! {
            biased;
            () = draining.cancelled() => return,
            changed = versions.changed() => if changed.is_err() { return },
            changed = leadership.changed() => if !changed { return },
            changed = peers.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(AGAIN_AFTER), if !is_done => {}
        }
    }
}

async fn tend_replicas(node: &Node, shard: Option<&Shard>) -> bool {
    let shard_id = shard.map_or(0, Shard::id);
    if let Some(shard) = shard {
        shard.expect_replicas(node.cluster.machine().read(|state| state.members().target()));
    }
    let own = node.cluster.replica();
    let replica = shard.map_or(&*own, Shard::replica);
    if replica.leadership().leader == Some(replica.id()) {
        return node.cluster.reconcile(shard_id, replica).await;
    }
    node.cluster.forget_progress(shard_id);
    true
}

async fn tend_members(node: &Node) -> bool {
    node.check_protocol().await;
    node.cluster.dial_members();
    let is_free = node.cluster.shed().await;
    let is_quiet = !node.cluster.leads()
        || (node.cluster.drive_change().await && node.cluster.raise_protocol().await);
    // Who drains may be elected again.
    is_free && is_quiet && !node.cluster.is_draining(node.settings.node_id)
}

/// A removed node gets no word of it from Raft, which has forgotten it; the others refuse its
/// connections. So a node that knows no leader asks whether it is still one of them.
async fn watch_membership(node: Weak<Node>) {
    let mut tick = tokio::time::interval(MEMBER_LOOK_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let Some(node) = node.upgrade() else { return };
        if node.draining.is_cancelled() {
            return;
        }
        if node.is_alone() || node.cluster.leader_hint().is_some() {
            continue;
        }
        let peers = node.hub.addresses().into_keys();
        let asked = peers.map(|peer| {
            let hub = node.hub.clone();
            async move { hub.hello(peer).await.ok() }
        });
        let answers = futures_util::future::join_all(asked).await;
        let own = node.hub.cluster();
        let fellows = answers.into_iter().flatten().filter(|hello| hello.cluster == own);
        if let Some(why) = fellows.filter_map(|hello| hello.removed).next() {
            let what = format!(
                "{why}; its data is of no use to the cluster any more: stop this process, and \
                 empty its data folder before it is added again"
            );
            tracing::error!("{what}");
            // Ignored: it is said once.
            let _ = node.removed.set(what);
            for shard in node.shards() {
                shard.retire();
            }
            node.routes.send_modify(|count| *count += 1);
            return;
        }
    }
}
