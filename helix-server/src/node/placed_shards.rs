//! Creates the replicas that the placement gives this node, and deletes removed ones.
//!
//! A new replica begins with an empty log. The shard may count on it only once shard 0 has
//! committed that it exists. From then on it is never created again. Files are deleted only once
//! shard 0 has committed that the replica is no longer part of its shard.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::logs::LogIdentity;
use super::open::open_shard;
use super::{Node, NodeStorage, repair};
use crate::error::{Error, Result};
use crate::log::{ClusterCommand, MemberCommand, ReplicaCreated};
use crate::raft::ReplicaId;

/// Delay before a failed step is repeated.
const RETRY_DELAY: Duration = Duration::from_millis(200);

pub(super) fn start(node: &Arc<Node>) {
    tokio::spawn(run(Arc::downgrade(node)));
}

/// Follows the placement whenever the cluster's state has changed, until the node drains.
async fn run(node: Weak<Node>) {
    let Some((mut versions, draining)) =
        node.upgrade().map(|node| (node.cluster.machine().watch(), node.draining.clone()))
    else {
        return;
    };
    let mut last = String::new();
    loop {
        let Some(node) = node.upgrade() else { return };
        // Marked first, so that a change during the step triggers another one.
        versions.mark_unchanged();
        let followed = tokio::select! {
            biased;
            () = draining.cancelled() => return,
            followed = follow(&node) => followed,
        };
        drop(node);
        let is_done = followed.is_ok();
        if let Err(error) = followed {
            let what = error.to_string();
            if what != last {
                tracing::info!("cannot create or delete a replica yet: {what}");
                last = what;
            }
        }
        tokio::select! {
            biased;
            () = draining.cancelled() => return,
            changed = versions.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(RETRY_DELAY), if !is_done => {}
        }
    }
}

/// A replica that this node creates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NewReplica {
    shard_id: u64,
    generation: u32,
}

/// Returns the replicas that this node still has to create.
fn new_replicas(node: &Node) -> Vec<NewReplica> {
    let own = node.settings.node_id;
    node.cluster.machine().read(|state| {
        let moves = state.members().placement().into_iter().flat_map(|it| it.moves());
        let is_new = moves.filter(|(shard_id, it)| {
            *shard_id != 0 && it.to == Some(own) && !it.is_created && !it.is_cancelled
        });
        is_new.map(|(shard_id, it)| NewReplica { shard_id, generation: it.generation }).collect()
    })
}

async fn follow(node: &Arc<Node>) -> Result<()> {
    if node.cluster.machine().read(|state| state.members().placement().is_none()) {
        return Ok(());
    }
    let mut outcome = Ok(());
    for shard_id in node.shards.ids() {
        if let Err(error) = delete_if_removed(node, shard_id).await {
            outcome = Err(error);
        }
    }
    for new in new_replicas(node) {
        if let Err(error) = create(node, new).await {
            outcome = Err(error);
        }
    }
    outcome
}

fn generation_of(replica: ReplicaId) -> u32 {
    u32::try_from(replica & u64::from(u32::MAX)).unwrap_or(0)
}

/// Closes and deletes this node's replica of a shard if the placement has taken it away.
async fn delete_if_removed(node: &Arc<Node>, shard_id: u64) -> Result<()> {
    let own = node.settings.node_id;
    let logs = node.logs();
    let shard = node.shard(shard_id);
    let generation = match &shard {
        Some(shard) => Some(generation_of(shard.replica().id())),
        None => {
            let names_none = || {
                node.cluster.machine().read(|state| {
                    let placed = state.members().placement().and_then(|it| it.shard(shard_id));
                    placed.is_some_and(|it| it.generation_on(own).is_none())
                })
            };
            if !names_none() {
                return Ok(());
            }
            let generation = logs.generation(shard_id).await?;
            if generation.is_none() {
                // The damaged log does not state its generation. An old copy of the state may not
                // name its replica yet.
                node.cluster.catch_up().await?;
                if !names_none() {
                    return Ok(());
                }
            }
            generation
        }
    };
    let is_removed = |generation| {
        let machine = node.cluster.machine();
        machine.read(|state| state.members().is_removed(shard_id, own, generation))
    };
    if generation.is_some_and(|generation| !is_removed(generation)) {
        return Ok(());
    }
    let _guard = node.reopening.lock().await;
    if node.draining.is_cancelled() {
        return Err(Error::Draining);
    }
    // The shard may have been reopened since, as another object on the same log.
    let shard = node.shard(shard_id);
    node.shards.remove(shard_id);
    node.cluster.set_shard(shard_id, None);
    node.note_repair(shard_id, None);
    node.routes.send_modify(|count| *count += 1);
    if let Some(shard) = shard {
        shard.close().await;
    }
    if let Some(log) = node.unreplayed.take(shard_id) {
        log.close(&node.hub, &logs).await;
    }
    logs.delete(shard_id).await?;
    tracing::info!(shard_id, generation, "deleted the replica: it was moved to another node");
    Ok(())
}

/// Creates a replica on an empty log, and commits that it exists.
async fn create(node: &Arc<Node>, new: NewReplica) -> Result<()> {
    let NewReplica { shard_id, generation } = new;
    let existing = node.shard(shard_id).map(|shard| generation_of(shard.replica().id()));
    match existing {
        Some(existing) if existing == generation => {}
        Some(existing) => {
            let what = format!("its replica of generation {existing} is not deleted yet");
            return Err(Error::ShardClosed { shard: shard_id, what });
        }
        None => {
            // An old copy of the state could name a replica that has existed and was lost.
            node.cluster.catch_up().await?;
            if !new_replicas(node).contains(&new) {
                return Ok(());
            }
            open_new(node, new).await?;
        }
    }
    let node_id = node.settings.node_id;
    let created = ReplicaCreated { shard_id, node_id, generation };
    let command = ClusterCommand::Members(MemberCommand::ReplicaCreated(created));
    node.cluster.command(command).await.map(drop)
}

async fn open_new(node: &Arc<Node>, new: NewReplica) -> Result<()> {
    let NewReplica { shard_id, generation } = new;
    let logs = node.logs();
    let _guard = node.reopening.lock().await;
    if node.draining.is_cancelled() {
        return Err(Error::Draining);
    }
    if let Some(log) = node.unreplayed.take(shard_id) {
        // The log of an earlier replica.
        log.close(&node.hub, &logs).await;
    }
    let identity = LogIdentity { shard_id, generation, ..node.identity.clone() };
    let log = logs.open(identity).await?;
    if log.identity.generation != generation {
        let what = format!("its log of generation {} is in the way", log.identity.generation);
        let error = std::io::Error::other(what.clone());
        logs.close_unopened(shard_id, &log.wal, &log.reads, &error).await;
        if !matches!(node.settings.storage, NodeStorage::Memory) {
            delete_older(node, shard_id, log.identity.generation).await?;
        }
        return Err(Error::ShardClosed { shard: shard_id, what });
    }
    let shard = match open_shard(&logs, log, &node.shard_context()).await {
        Ok(shard) => shard,
        Err(failure) => return Err(failure.into_error(&node.hub, &logs).await),
    };
    tracing::info!(shard_id, generation, "created a replica");
    node.begin_shard(shard);
    repair::start_shard(node, shard_id);
    Ok(())
}

/// Deletes a log that is in the way of a new replica, if it was removed.
async fn delete_older(node: &Node, shard_id: u64, generation: u32) -> Result<()> {
    let own = node.settings.node_id;
    let machine = node.cluster.machine();
    if machine.read(|state| state.members().is_removed(shard_id, own, generation)) {
        node.logs().delete(shard_id).await?;
    }
    Ok(())
}
