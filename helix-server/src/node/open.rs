//! Opening what a node has: shard 0 first, then the data shards, each with the replica that its log
//! says it is.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::NodeStorage;
use super::forming::Formed;
use super::front::Front;
use super::logs::{Identity, Logs, OpenLog};
use crate::cluster::{Bootstrap, Cluster, ClusterMachine, FIRST_GENERATION};
use crate::error::Result;
use crate::limits;
use crate::memory;
use crate::metrics::Metrics;
use crate::peer::Hub;
use crate::raft::{Replica, ReplicaSettings, replica_id};
use crate::shard::{Directory, Shard, ShardSettings};

/// What a node knows of its place among others before it asks anybody.
pub(super) struct ClusterPlace {
    /// It was told of no others.
    pub(super) is_alone: bool,
    /// It has a peer port.
    pub(super) listens: bool,
    pub(super) seeds: BTreeMap<u64, String>,
}

/// Opens the cluster's own shard.
pub(super) async fn open_cluster(
    logs: &Logs<'_>,
    formed: &mut Formed,
    hub: &Arc<Hub>,
    place: ClusterPlace,
    shard_count: u64,
) -> Result<Cluster> {
    let identity = formed.identity.clone();
    let log = match formed.take(0) {
        Some(log) => log,
        None => logs.open(identity.clone()).await?,
    };
    let machine = Arc::new(ClusterMachine::new(log.wal.clone()));
    let replica_id = replica_id(identity.node_id, identity.generation);
    let replica = Replica::open(
        ReplicaSettings {
            shard_id: 0,
            replica_id,
            wal: log.wal.clone(),
            reads: log.reads,
            machine: machine.clone(),
            checkpoint: log.checkpoint,
            has_records: false,
        },
        hub.network(0, replica_id, log.wal.clone()),
    )
    .await
    .map_err(|error| logs.damaged(0, &error.to_string()))?;
    hub.serve_shard(0, replica_id, replica.raft(), log.wal);
    let clock = logs.settings.clock.clone();
    let ClusterPlace { is_alone, listens, seeds } = place;
    let cluster = Cluster::new(replica, machine, hub.clone(), seeds, clock);
    // A node that was called into a cluster forms none, also where nobody is left but itself.
    let may_form = identity.generation == FIRST_GENERATION;
    if is_alone && may_form {
        let formed = cluster.form_alone(listens).await;
        formed.map_err(|error| logs.damaged(0, &error.to_string()))?;
        if cluster.is_alone() {
            let bootstrap = Bootstrap { shard_count, topics: Vec::new() };
            cluster.bootstrap(&bootstrap).await?;
        }
    }
    Ok(cluster)
}

/// The data shards whose logs are here. They are made together, before shard 0's: one that is
/// named by the cluster's state and is not here has been lost.
pub(super) async fn shards_made(logs: &Logs<'_>, formed: &Formed) -> Result<BTreeSet<u64>> {
    let mut shards: BTreeSet<u64> = formed.shards().collect();
    if !formed.is_new {
        let mut next = 1;
        // In a folder any may be missing; elsewhere a look makes a disk.
        let in_folder = matches!(logs.settings.storage, NodeStorage::Folder { .. });
        while next <= limits::SHARDS_MAX {
            if logs.exists(next).await? {
                shards.insert(next);
            } else if !in_folder {
                break;
            }
            next += 1;
        }
    }
    Ok(shards)
}

pub(super) async fn open_log(
    logs: &Logs<'_>,
    formed: &mut Formed,
    shard_id: u64,
) -> Result<OpenLog> {
    let identity = Identity { shard_id, ..formed.identity.clone() };
    let cluster = identity.cluster;
    let log = match formed.take(shard_id) {
        Some(log) => log,
        None if logs.exists(shard_id).await? => logs.open(identity).await?,
        None => {
            let what = "its log is gone, and with it whom it voted for: give the folder back";
            return Err(logs.damaged(shard_id, what));
        }
    };
    if log.identity.cluster != cluster {
        let what = format!("it belongs to another cluster, {:032x}", log.identity.cluster);
        return Err(logs.unusable(shard_id, &what));
    }
    Ok(log)
}

/// What all shards of a node share.
pub(super) struct House<'a> {
    pub(super) front: &'a Front,
    pub(super) hub: &'a Arc<Hub>,
    pub(super) directory: Directory,
    pub(super) draining: &'a CancellationToken,
    pub(super) metrics: &'a Arc<Metrics>,
}

pub(super) async fn open_shard(
    logs: &Logs<'_>,
    log: OpenLog,
    house: &House<'_>,
) -> Result<Arc<Shard>> {
    let shard_id = log.identity.shard_id;
    let settings = ShardSettings {
        shard_id,
        replica_id: replica_id(log.identity.node_id, log.identity.generation),
        members: house.front.replica_ids(),
        directory: house.directory.clone(),
        hub: house.hub.clone(),
        wal: log.wal,
        checkpoint: log.checkpoint,
        reads: log.reads,
        damage: log.damage,
        durable: !matches!(logs.settings.storage, NodeStorage::Memory),
        bytes_in_flight: memory::bytes_in_flight(logs.settings.tail_bytes),
        clock: logs.settings.clock.clone(),
        draining: house.draining.clone(),
        metrics: house.metrics.clone(),
        log_limits: logs.settings.log_limits,
    };
    Shard::open(settings).await.map_err(|error| logs.damaged(shard_id, &error.to_string()))
}
