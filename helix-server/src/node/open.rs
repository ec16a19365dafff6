//! Opening what a node has: shard 0 first, then the data shards, each with the replica that its log
//! says it is.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::NodeStorage;
use super::forming::Formed;
use super::logs::{Identity, Logs, OpenLog};
use crate::cluster::{Bootstrap, Cluster, ClusterMachine, FIRST_GENERATION};
use crate::error::{Error, Result};
use crate::memory;
use crate::metrics::Metrics;
use crate::peer::Hub;
use crate::raft::{Replica, ReplicaId, ReplicaSettings, replica_id};
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
    let ClusterPlace { is_alone, listens, seeds } = place;
    let identity = formed.identity.clone();
    let log = match formed.take(0) {
        Some(log) => log,
        None => logs.open(identity.clone()).await?,
    };
    let machine = Arc::new(ClusterMachine::new(log.wal.clone()));
    let replica = match open_own(logs, log, hub, &machine).await {
        Err(Error::CorruptLog { what }) if !is_alone => {
            logs.put_aside(0, &what, Some(&identity)).await?;
            let log = logs.open(identity.clone()).await?;
            machine.begin_anew(log.wal.clone());
            open_own(logs, log, hub, &machine).await?
        }
        opened => opened?,
    };
    let clock = logs.settings.clock.clone();
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

/// Opens this node's replica of shard 0 on its log, and answers for it.
pub(super) async fn open_own(
    logs: &Logs<'_>,
    log: OpenLog,
    hub: &Arc<Hub>,
    machine: &Arc<ClusterMachine>,
) -> Result<Replica> {
    let OpenLog { wal, identity, checkpoint, reads, repair_of } = log;
    let replica_id = replica_id(identity.node_id, identity.generation);
    let settings = ReplicaSettings {
        shard_id: 0,
        replica_id,
        wal: wal.clone(),
        reads: reads.clone(),
        machine: machine.clone(),
        checkpoint,
        has_records: false,
        repair_of,
    };
    match Replica::open(settings, hub.network(0, replica_id, wal.clone())).await {
        Ok(replica) => {
            hub.serve_replica(0, &replica, wal);
            Ok(replica)
        }
        Err(error) => Err(logs.unopened(0, &wal, &reads, &error).await),
    }
}

/// The data shards whose logs are here. They are made together, before shard 0's: one that is
/// named by the cluster's state and is not here has been lost.
pub(super) async fn shards_made(logs: &Logs<'_>, formed: &Formed) -> Result<BTreeSet<u64>> {
    if formed.is_new {
        return Ok(formed.shards().collect());
    }
    logs.data_shards().await
}

/// Opens a data shard. Where its log is damaged and this node is not alone, a new one takes its
/// place, to be filled by the others.
pub(super) async fn open_or_rebuild(
    logs: &Logs<'_>,
    made: Option<OpenLog>,
    identity: Identity,
    house: &House<'_>,
    is_alone: bool,
) -> Result<Arc<Shard>> {
    let shard_id = identity.shard_id;
    let log = match made {
        Some(log) => Ok(log),
        None => open_existing(logs, identity.clone()).await,
    };
    let opened = match log {
        Ok(log) => open_shard(logs, log, house).await,
        Err(error) => Err(error),
    };
    match opened {
        Err(Error::CorruptLog { what }) if !is_alone => {
            logs.put_aside(shard_id, &what, Some(&identity)).await?;
            open_shard(logs, open_existing(logs, identity).await?, house).await
        }
        opened => opened,
    }
}

async fn open_existing(logs: &Logs<'_>, identity: Identity) -> Result<OpenLog> {
    let Identity { shard_id, cluster, .. } = identity;
    if !logs.exists(shard_id).await? {
        let what = "its log is gone, and with it whom it voted for: give the folder back, or have \
                    the node replaced with: helix cluster replace-node";
        return Err(logs.damaged(shard_id, what));
    }
    let log = logs.open(identity).await?;
    if log.identity.cluster != cluster {
        let what = format!("it belongs to another cluster, {:032x}", log.identity.cluster);
        return Err(logs.unusable(shard_id, &what));
    }
    Ok(log)
}

/// Where nodes are reached, as the cluster's state says.
pub(super) fn directory(cluster: &Cluster) -> Directory {
    let machine = cluster.machine().clone();
    Arc::new(move |id| machine.read(|state| state.node(id).map(|node| node.endpoint.clone())))
}

/// What all shards of a node share.
pub(super) struct House<'a> {
    /// Replicas that a new shard is formed of.
    pub(super) members: BTreeSet<ReplicaId>,
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
    let (wal, reads) = (log.wal.clone(), log.reads.clone());
    let settings = ShardSettings {
        shard_id,
        replica_id: replica_id(log.identity.node_id, log.identity.generation),
        members: house.members.clone(),
        directory: house.directory.clone(),
        hub: house.hub.clone(),
        wal: log.wal,
        checkpoint: log.checkpoint,
        reads: log.reads,
        repair_of: log.repair_of,
        durable: !matches!(logs.settings.storage, NodeStorage::Memory),
        bytes_in_flight: memory::bytes_in_flight(logs.settings.tail_bytes),
        pace: logs.settings.pace,
        clock: logs.settings.clock.clone(),
        draining: house.draining.clone(),
        metrics: house.metrics.clone(),
        log_limits: logs.settings.log_limits,
    };
    match Shard::open(settings).await {
        Ok(shard) => Ok(shard),
        Err(error) => Err(logs.unopened(shard_id, &wal, &reads, &error).await),
    }
}
