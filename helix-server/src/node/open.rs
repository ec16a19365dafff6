//! Opens the shards of a node: shard 0 first, then the data shards. Each one gets the replica id
//! that its log records.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use helix_wal::QuarantinedLog;
use tokio_util::sync::CancellationToken;

use super::NodeStorage;
use super::formation::Formation;
use super::logs::{LogIdentity, NodeLogs, OpenLog};
use super::repair::unreplayed::{
    OpenFailure, Shard0Opening, UnreplayedLog, UnreplayedLogs, open_shard0_repaired,
};
use super::shard_slots::{ShardSlot, ShardSlots};
use crate::cluster::{Bootstrap, Cluster, ClusterMachine, FIRST_GENERATION};
use crate::error::{Error, Result};
use crate::memory;
use crate::metrics::Metrics;
use crate::peer::{HeldLog, Hub};
use crate::raft::{Replica, ReplicaId, ReplicaSettings, replica_id};
use crate::shard::{CleanerWorker, EndpointLookup, KeyMapMemory, Shard, ShardSettings};

/// A node's configuration about other nodes.
pub(super) struct StartupPeers {
    /// No peers are configured.
    pub(super) is_single_node: bool,
    /// The node has a peer port.
    pub(super) listens: bool,
    /// Configured peer addresses, by node id.
    pub(super) seeds: BTreeMap<u64, String>,
}

/// Opens shard 0. Forms a single-node cluster if no peers are configured.
pub(super) async fn open_cluster(
    logs: &NodeLogs<'_>,
    formed: &mut Formation,
    hub: &Arc<Hub>,
    peers: StartupPeers,
    shard_count: u64,
) -> Result<Cluster> {
    let StartupPeers { is_single_node, listens, seeds } = peers;
    let identity = formed.identity.clone();
    let log = match formed.take(0) {
        Some(log) => log,
        None => logs.open(identity.clone()).await?,
    };
    let machine = Arc::new(ClusterMachine::new(log.wal.clone()));
    let opening = if is_single_node { Shard0Opening::SingleNode } else { Shard0Opening::Start };
    let replica = open_shard0_repaired(logs, log, hub, &machine, opening).await?;
    let clock = logs.settings.clock.clone();
    let replace_down_after = logs.settings.replace_down_after;
    let cluster = Cluster::new(replica, machine, hub.clone(), seeds, clock, replace_down_after);
    // A node that joined an existing cluster never forms one, even if it is the only one left.
    let may_form = identity.generation == FIRST_GENERATION;
    if is_single_node && may_form {
        let formed = cluster.form_single_node(listens).await;
        formed.map_err(|error| logs.damaged(0, &error.to_string()))?;
        if cluster.is_single_node() {
            let bootstrap = Bootstrap { shard_count, topics: Vec::new() };
            cluster.bootstrap(&bootstrap).await?;
        }
    }
    Ok(cluster)
}

/// Opens this node's replica of shard 0 on its log, and serves it to other nodes.
pub(super) async fn open_shard0_replica(
    logs: &NodeLogs<'_>,
    log: OpenLog,
    hub: &Arc<Hub>,
    machine: &Arc<ClusterMachine>,
) -> Result<Replica, OpenFailure> {
    let OpenLog { wal, identity, checkpoint, reads, repair_of, truncated: _ } = log;
    let replica_id = replica_id(identity.node_id, identity.generation);
    let (in_repair, vote_lost) = repair_state(repair_of.as_ref());
    let settings = ReplicaSettings {
        shard_id: 0,
        replica_id,
        wal: wal.clone(),
        reads: reads.clone(),
        machine: machine.clone(),
        checkpoint,
        has_records: false,
        repair_of,
        timing: hub.timing().clone(),
    };
    match Replica::open(settings, hub.network(0, replica_id, wal.clone())).await {
        Ok(replica) => {
            hub.serve_replica(0, &replica);
            Ok(replica)
        }
        Err(error) => {
            let log = HeldLog { replica_id, wal, reads, in_repair, vote_lost };
            let log = UnreplayedLog { shard_id: 0, log, error };
            Err(OpenFailure::of(logs, log).await)
        }
    }
}

/// Returns whether a log is in repair, and whether its vote is lost.
fn repair_state(repair_of: Option<&QuarantinedLog>) -> (bool, bool) {
    (repair_of.is_some(), repair_of.is_some_and(|quarantined| quarantined.vote.is_none()))
}

/// Returns the data shards whose logs exist on this node.
///
/// When a cluster forms, they are created before the log of shard 0. Later ones are named in the
/// cluster's state only once their log exists. So a shard that the state names and that has no log
/// here has lost it, or was deleted since.
pub(super) async fn existing_shards(
    logs: &NodeLogs<'_>,
    formed: &Formation,
) -> Result<BTreeSet<u64>> {
    if formed.is_new {
        return Ok(formed.shards().collect());
    }
    logs.data_shards().await
}

/// Opens the data shards that have a log here or that the cluster's state names. Logs whose replay
/// met damage are held, and repaired once the node runs.
pub(super) async fn open_data_shards(
    logs: &NodeLogs<'_>,
    formed: &mut Formation,
    cluster: &Cluster,
    existing: &BTreeSet<u64>,
    context: &ShardContext<'_>,
) -> Result<(ShardSlots, UnreplayedLogs)> {
    let (slots, unreplayed) = (ShardSlots::default(), UnreplayedLogs::default());
    let named = named_shards(cluster);
    for shard_id in existing.union(&named).copied() {
        if is_being_built(cluster, shard_id) {
            // The replica is not part of a shard yet; `split_builder` continues with its log.
            continue;
        }
        let has_other_replicas = cluster.data_has_other_replicas(shard_id).await;
        let may_be_single = has_other_replicas != Some(true);
        let log = formed.take(shard_id);
        if log.is_none() && !existing.contains(&shard_id) && has_other_replicas != Some(false) {
            // This copy of the state may be old, and name a replica that was deleted since.
            let what = "its log is missing".to_owned();
            tracing::warn!(shard_id, %what, "cannot open the shard yet");
            slots.set(shard_id, ShardSlot::Stopped(what));
            continue;
        }
        let identity = identity_of(cluster, &formed.identity, shard_id);
        let opened = open_or_rebuild(logs, log, identity, context, may_be_single).await;
        let opened = match opened {
            Err(OpenFailure::Replay(log)) if has_other_replicas != Some(false) => {
                // Repaired once the node runs: `repair` reopens stopped shards.
                let what = log.damage(logs).to_string();
                unreplayed.hold(context.hub, log);
                tracing::error!(shard_id, %what, "replay of a log met damage");
                slots.set(shard_id, ShardSlot::Stopped(what));
                continue;
            }
            Err(failure) => Err(failure.into_error(context.hub, logs).await),
            Ok(shard) => Ok(shard),
        };
        let slot = match opened {
            Ok(shard) => {
                cluster.set_shard(shard_id, Some(shard.clone()));
                ShardSlot::Open(shard)
            }
            Err(Error::CorruptLog { what }) if !formed.is_new && has_other_replicas.is_none() => {
                tracing::error!(shard_id, %what, "cannot open the shard yet");
                ShardSlot::Stopped(what)
            }
            Err(Error::CorruptLog { what }) if !formed.is_new => {
                tracing::error!(shard_id, %what, "cannot serve the shard: its log is damaged");
                ShardSlot::Damaged(what)
            }
            Err(Error::DiskFull { what } | Error::Exhausted { what }) if !formed.is_new => {
                tracing::error!(shard_id, %what, "cannot open the shard yet");
                ShardSlot::Stopped(what)
            }
            Err(error) => return Err(error),
        };
        slots.set(shard_id, slot);
    }
    Ok((slots, unreplayed))
}

/// Returns the data shards that have a replica on this node by its copy of the cluster's state.
pub(super) fn named_shards(cluster: &Cluster) -> BTreeSet<u64> {
    let own = cluster.node_id();
    cluster.machine().read(|state| match state.members().placement() {
        None => state.shards().clone(),
        Some(_) => state.members().shards_with_log(own).collect(),
    })
}

/// Returns whether this node builds a replica of a shard that a split makes.
fn is_being_built(cluster: &Cluster, shard_id: u64) -> bool {
    let own = cluster.node_id();
    cluster.machine().read(|state| {
        let placed = state.members().placement().and_then(|it| it.shard(shard_id));
        placed.is_some_and(|it| it.split_replica(own).is_some())
    })
}

/// Returns the identity of this node's replica of a data shard, for a log that does not state its
/// own. `node` is the identity of the node's replica of shard 0.
pub(super) fn identity_of(cluster: &Cluster, node: &LogIdentity, shard_id: u64) -> LogIdentity {
    let placed = cluster.machine().read(|state| {
        let members = state.members();
        members.placement()?.shard(shard_id)?.generation_on(node.node_id)
    });
    let generation = placed.unwrap_or(node.generation);
    LogIdentity { shard_id, generation, ..node.clone() }
}

/// Opens a data shard. If its log does not open and other nodes have replicas, the log is
/// quarantined and a new one is opened, which the other nodes fill.
pub(super) async fn open_or_rebuild(
    logs: &NodeLogs<'_>,
    log: Option<OpenLog>,
    identity: LogIdentity,
    context: &ShardContext<'_>,
    is_single_node: bool,
) -> Result<Arc<Shard>, OpenFailure> {
    let shard_id = identity.shard_id;
    let log = match log {
        Some(log) => Ok(log),
        None => open_existing(logs, identity.clone()).await,
    };
    let opened = match log {
        Ok(log) => open_shard(logs, log, context).await,
        Err(error) => Err(error.into()),
    };
    match opened {
        Err(OpenFailure::Other(Error::CorruptLog { what })) if !is_single_node => {
            logs.quarantine(shard_id, &what, Some(&identity)).await?;
            open_shard(logs, open_existing(logs, identity).await?, context).await
        }
        opened => opened,
    }
}

async fn open_existing(logs: &NodeLogs<'_>, identity: LogIdentity) -> Result<OpenLog> {
    let LogIdentity { shard_id, cluster, .. } = identity;
    if !logs.exists(shard_id).await? {
        let what = "its log is missing, and with it its vote; restore the directory, or replace \
                    the node with: helix cluster replace-node";
        return Err(logs.damaged(shard_id, what));
    }
    let log = logs.open(identity).await?;
    if log.identity.cluster != cluster {
        let what = format!("it belongs to another cluster, {:032x}", log.identity.cluster);
        return Err(logs.unusable(shard_id, &what));
    }
    Ok(log)
}

/// Returns a lookup of client endpoints by node id in the cluster's state.
pub(super) fn directory(cluster: &Cluster) -> EndpointLookup {
    let machine = cluster.machine().clone();
    Arc::new(move |id| machine.read(|state| state.node(id).map(|node| node.endpoint.clone())))
}

/// Dependencies that all shards of a node share.
pub(super) struct ShardContext<'a> {
    /// Replicas of a newly formed shard.
    pub(super) members: BTreeSet<ReplicaId>,
    pub(super) hub: &'a Arc<Hub>,
    pub(super) directory: EndpointLookup,
    pub(super) draining: &'a CancellationToken,
    pub(super) metrics: &'a Arc<Metrics>,
    pub(super) cleaner_worker: &'a CleanerWorker,
    pub(super) key_maps: &'a KeyMapMemory,
}

pub(super) async fn open_shard(
    logs: &NodeLogs<'_>,
    log: OpenLog,
    context: &ShardContext<'_>,
) -> Result<Arc<Shard>, OpenFailure> {
    let shard_id = log.identity.shard_id;
    let own = replica_id(log.identity.node_id, log.identity.generation);
    let (wal, reads) = (log.wal.clone(), log.reads.clone());
    let (in_repair, vote_lost) = repair_state(log.repair_of.as_ref());
    let settings = ShardSettings {
        shard_id,
        replica_id: own,
        members: context.members.clone(),
        directory: context.directory.clone(),
        hub: context.hub.clone(),
        wal: log.wal,
        checkpoint: log.checkpoint,
        reads: log.reads,
        repair_of: log.repair_of,
        truncated: log.truncated,
        durable: !matches!(logs.settings.storage, NodeStorage::Memory),
        bytes_in_flight: memory::bytes_in_flight(logs.settings.tail_bytes),
        pace: logs.settings.pace,
        clock: logs.settings.clock.clone(),
        draining: context.draining.clone(),
        metrics: context.metrics.clone(),
        cleaner_worker: context.cleaner_worker.clone(),
        key_maps: context.key_maps.clone(),
        log_limits: logs.settings.log_limits,
    };
    match Shard::open(settings).await {
        Ok(shard) => Ok(shard),
        Err(error) => {
            let log = HeldLog { replica_id: own, wal, reads, in_repair, vote_lost };
            let log = UnreplayedLog { shard_id, log, error };
            Err(OpenFailure::of(logs, log).await)
        }
    }
}
