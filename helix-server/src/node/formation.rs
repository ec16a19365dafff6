//! Formation of a cluster. Nodes with empty data directories form a cluster only if all of them
//! respond and all are empty. A node that comes late or has lost its data waits and logs the
//! reason. When an operator has it added or replaced, the cluster's leader lets it join with a
//! generation that it never had.
//!
//! The node with the lowest id is the initiator. It creates the logs of its own replicas, then asks
//! each of the other nodes to create theirs. Only when all logs exist does shard 0 get its first
//! entry, and only after that do the data shards get theirs. So no replica votes before all
//! replicas exist. From then on an empty data directory means a lost vote, and such a node must not
//! take part again.

pub(in crate::node) mod bootstrap_handler;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Node;
use super::logs::{LogIdentity, NodeLogs, OpenLog};
use crate::cluster::FIRST_GENERATION;
use crate::error::Result;
use crate::limits;
use crate::peer::{FormCluster, Hello, Hub, JoinCluster, PeerError};
use crate::random::Random;
use bootstrap_handler::{BootstrapHandler, BootstrapRequest};

/// Allowed sizes of a new cluster. An even number of nodes tolerates no more failures than the odd
/// number below it.
const CLUSTER_SIZES: [usize; 5] = [1, 3, 5, 7, 9];

/// Interval at which an empty node asks the other nodes.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Time for which an empty node without peers waits before it forms a single-node cluster. Nodes of
/// a cluster that has it as a member dial it more often than that.
const LISTEN_WAIT: Duration = Duration::from_secs(2);

/// A node's identity in its cluster, and the logs that were just created or opened for it.
pub(super) struct Formation {
    pub(super) identity: LogIdentity,
    /// The logs are new.
    pub(super) is_new: bool,
    /// This node is the initiator: it makes the other nodes create their logs.
    pub(super) is_initiator: bool,
    /// Peer addresses of the other nodes, from the leader that let this node join.
    pub(super) peer_addrs: BTreeMap<u64, String>,
    logs: BTreeMap<u64, OpenLog>,
}

impl Formation {
    pub(super) fn take(&mut self, shard_id: u64) -> Option<OpenLog> {
        self.logs.remove(&shard_id)
    }

    /// Iterates over the data shards among the logs.
    pub(super) fn shards(&self) -> impl Iterator<Item = u64> {
        self.logs.keys().copied().filter(|shard| *shard > 0)
    }
}

/// Decision of an empty node after it has asked the other nodes.
#[derive(Debug, PartialEq, Eq)]
enum FormDecision {
    Form,
    Wait(String),
}

/// Opens the cluster on this node's disk, or forms or joins a cluster.
pub(super) async fn form(
    logs: &NodeLogs<'_>,
    handler: &BootstrapHandler,
    hub: &Arc<Hub>,
    random: &Random,
    listens: bool,
) -> Result<Formation> {
    let node_id = logs.settings.node_id;
    let is_initiator = !handler.is_single_node() && handler.members.first() == Some(&node_id);
    if logs.exists(0).await? {
        let unknown = LogIdentity::of_node(0, node_id, FIRST_GENERATION);
        // In a cluster of several nodes, other nodes can rebuild a damaged log.
        let log = logs.open_shard0(unknown, handler.is_single_node()).await?;
        let identity = log.identity.clone();
        check_name(logs, handler, identity.cluster)?;
        handler.set_identity(identity.cluster, identity.generation);
        let is_initiator = is_initiator && identity.generation == FIRST_GENERATION;
        let (peer_addrs, logs) = (BTreeMap::new(), BTreeMap::from([(0, log)]));
        return Ok(Formation { identity, is_new: false, is_initiator, peer_addrs, logs });
    }
    let drawn = match &handler.cluster_name {
        Some(name) => cluster_of(name),
        None => u128::from(random.next_u64()) << 64 | u128::from(random.next_u64()),
    };
    let shards = 1..=logs.settings.shard_count;
    if !listens {
        return create(logs, handler, (drawn, FIRST_GENERATION), shards, false).await;
    }
    let listen_until = Instant::now() + LISTEN_WAIT;
    let mut requests = handler.bootstrap_requests.lock().await;
    let mut poll = tokio::time::interval(POLL_INTERVAL);
    poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            Some((request, reply)) = requests.recv() => {
                let formed = match request {
                    BootstrapRequest::Form(form) => handle_form(logs, handler, form, reply).await?,
                    BootstrapRequest::Join(join) => handle_join(logs, handler, join, reply).await?,
                };
                if let Some(formed) = formed {
                    return Ok(formed);
                }
            }
            _ = poll.tick() => {
                let responses = ask_peers(handler, hub).await;
                let why = match (hub.caller(), decide(handler, node_id, &responses)) {
                    (_, FormDecision::Wait(why)) => why,
                    (Some(caller), FormDecision::Form) => lost_data(node_id, caller),
                    (None, FormDecision::Form)
                        if handler.is_single_node() && Instant::now() < listen_until =>
                    {
                        "waiting for nodes that may have this node as a member".to_owned()
                    }
                    (None, FormDecision::Form) => {
                        let identity = (drawn, FIRST_GENERATION);
                        let is_initiator = !handler.is_single_node();
                        return create(logs, handler, identity, shards, is_initiator).await;
                    }
                };
                if handler.set_wait_reason(&why) {
                    tracing::info!(node_id, "cannot form or join a cluster yet: {why}");
                }
            }
        }
    }
}

/// Returns the cluster id of a name, equal on every node. 32 hexadecimal digits are the id itself;
/// any other name is hashed (FNV-1a, 128 bits).
fn cluster_of(name: &str) -> u128 {
    if name.len() == 32
        && let Ok(id) = u128::from_str_radix(name, 16)
    {
        return id;
    }
    let (offset, prime) = (0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128, (1 << 88) + 0x13b_u128);
    name.bytes().fold(offset, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(prime))
}

fn check_name(logs: &NodeLogs<'_>, handler: &BootstrapHandler, cluster: u128) -> Result<()> {
    match &handler.cluster_name {
        Some(name) if cluster_of(name) != cluster => {
            let what = format!(
                "it belongs to cluster {cluster:032x}, which is not {name:?}; start without \
                 --cluster-id, or with the data directory of that cluster"
            );
            Err(logs.unusable(0, &what))
        }
        _ => Ok(()),
    }
}

async fn ask_peers(
    handler: &BootstrapHandler,
    hub: &Arc<Hub>,
) -> BTreeMap<u64, Result<Hello, PeerError>> {
    let others = hub.peers().into_iter().map(|peer| peer.node_id);
    let requests = others.map(|node| async move { (node, hub.hello(node).await) });
    let responses = futures_util::future::join_all(requests).await;
    debug_assert_eq!(responses.len() + 1, handler.members.len());
    responses.into_iter().collect()
}

/// Returns the reason why an empty node that is a member of an existing cluster does not form one.
fn lost_data(node_id: u64, (caller, cluster): (u64, u128)) -> String {
    format!(
        "node {caller} of cluster {cluster:032x} takes this node for a member, but the data \
         directory \
         is empty: restore its data directory, or replace it with: helix cluster replace-node \
         {node_id}; to form another cluster here, use another --peer-addr"
    )
}

fn decide(
    handler: &BootstrapHandler,
    node_id: u64,
    responses: &BTreeMap<u64, Result<Hello, PeerError>>,
) -> FormDecision {
    let wait = |why: String| FormDecision::Wait(why);
    let responded = || responses.iter().filter_map(|(id, it)| Some((id, it.as_ref().ok()?)));
    for (id, hello) in responded() {
        if hello.node_id != *id {
            return wait(format!(
                "the address given for node {id} is that of node {}; correct --peer",
                hello.node_id
            ));
        }
        let Some(cluster) = hello.cluster.filter(|_| hello.formed) else { continue };
        return wait(if hello.members.contains(&node_id) {
            format!(
                "node {id} reports that cluster {cluster:032x} has this node already, but the data \
                 directory is empty: restore its data directory, or replace it with: helix \
                 cluster replace-node {node_id}"
            )
        } else {
            format!(
                "cluster {cluster:032x} of node {id} does not have this node: have it added with: \
                 helix cluster add-node {node_id} HOST:PORT, its peer address"
            )
        });
    }
    if !CLUSTER_SIZES.contains(&handler.members.len()) {
        return wait(format!(
            "{} nodes {:?} cannot form a cluster, only 1, 3, 5, 7 or 9 can; give --peer for each \
             of them, or start the other nodes first and have this one added",
            handler.members.len(),
            handler.members
        ));
    }
    let missing: Vec<_> =
        responses.iter().filter_map(|(id, it)| Some((id, it.as_ref().err()?))).collect();
    if let Some((_, error)) = missing.first() {
        let nodes: Vec<_> = missing.iter().map(|(id, _)| id.to_string()).collect();
        return wait(format!("all nodes must answer to form a cluster; {}: {error}", list(&nodes)));
    }
    for (id, hello) in responded() {
        let members: BTreeSet<u64> = hello.members.iter().copied().collect();
        if members != handler.members {
            return wait(format!(
                "node {id} was started with the nodes {members:?}, this one with {:?}; give all of \
                 them the same --peer flags",
                handler.members
            ));
        }
        let name = handler.cluster_name.clone().unwrap_or_default();
        if !hello.cluster_name.is_empty() && !name.is_empty() && hello.cluster_name != name {
            return wait(format!(
                "node {id} has the cluster id {:?}, this one {name:?}; give all of them the same \
                 --cluster-id",
                hello.cluster_name
            ));
        }
        let is_initiator = handler.members.first() == Some(&node_id);
        if is_initiator && let Some(cluster) = hello.cluster {
            return wait(format!(
                "node {id} has started to form cluster {cluster:032x}, whose data this node lost; \
                 empty node {id}'s data directory, which has no records yet"
            ));
        }
    }
    if handler.members.first() == Some(&node_id) {
        return FormDecision::Form;
    }
    wait(format!("waiting for node {} to form the cluster", handler.members.first().unwrap_or(&0)))
}

fn list(nodes: &[String]) -> String {
    match nodes {
        [one] => format!("node {one} does not"),
        many => format!("nodes {} do not", many.join(", ")),
    }
}

/// Creates this node's logs at the initiator's request. Returns `None` if the request is rejected.
async fn handle_form(
    logs: &NodeLogs<'_>,
    handler: &BootstrapHandler,
    form: FormCluster,
    reply: oneshot::Sender<Result<(), String>>,
) -> Result<Option<Formation>> {
    let members: BTreeSet<u64> = form.members.iter().copied().collect();
    let refusal = if members != handler.members {
        Some(format!("the node was started with the nodes {:?}, not {members:?}", handler.members))
    } else if handler.cluster_name.as_deref().is_some_and(|name| cluster_of(name) != form.cluster) {
        Some(format!("the node has the cluster id {:?}", handler.cluster_name))
    } else if !(1..=limits::SHARDS_MAX).contains(&form.shards) {
        Some(format!("{} shards are out of range 1..={}", form.shards, limits::SHARDS_MAX))
    } else {
        None
    };
    if let Some(refusal) = refusal {
        // Ignored: the caller is gone.
        let _ = reply.send(Err(refusal));
        return Ok(None);
    }
    let formed =
        create(logs, handler, (form.cluster, FIRST_GENERATION), 1..=form.shards, false).await?;
    // Ignored: the caller repeats the request, which then succeeds.
    let _ = reply.send(Ok(()));
    Ok(Some(formed))
}

/// Creates this node's logs at the request of an existing cluster's leader. Returns `None` if the
/// request is rejected.
async fn handle_join(
    logs: &NodeLogs<'_>,
    handler: &BootstrapHandler,
    join: JoinCluster,
    reply: oneshot::Sender<Result<(), String>>,
) -> Result<Option<Formation>> {
    let is_bounded = |shard: &u64| (1..=limits::SHARDS_MAX).contains(shard);
    let refusal = if handler
        .cluster_name
        .as_deref()
        .is_some_and(|it| cluster_of(it) != join.cluster)
    {
        Some(format!("the node has the cluster id {:?}", handler.cluster_name))
    } else if join.generation <= FIRST_GENERATION {
        Some(format!("generation {} is reserved for nodes that form a cluster", join.generation))
    } else if !join.shards.iter().all(is_bounded) {
        Some(format!("the shards {:?} are not all in 1..={}", join.shards, limits::SHARDS_MAX))
    } else {
        None
    };
    if let Some(refusal) = refusal {
        // Ignored: the caller is gone.
        let _ = reply.send(Err(refusal));
        return Ok(None);
    }
    let identity = (join.cluster, join.generation);
    let formed = create(logs, handler, identity, join.shards, false).await?;
    tracing::info!(
        cluster = %format!("{:032x}", join.cluster),
        generation = join.generation,
        "joined a cluster"
    );
    // Ignored: the caller repeats the request, which then succeeds.
    let _ = reply.send(Ok(()));
    Ok(Some(Formation { peer_addrs: join.peer_addrs, ..formed }))
}

/// Creates the logs of this node's replicas. Shard 0's log is the last, so it exists only if all
/// logs do.
async fn create(
    logs: &NodeLogs<'_>,
    handler: &BootstrapHandler,
    (cluster, generation): (u128, u32),
    shards: impl IntoIterator<Item = u64>,
    is_initiator: bool,
) -> Result<Formation> {
    let node_id = logs.settings.node_id;
    let mut created = BTreeMap::new();
    for shard_id in shards.into_iter().chain([0]) {
        let identity =
            LogIdentity { shard_id, ..LogIdentity::of_node(cluster, node_id, generation) };
        let log = logs.open(identity).await?;
        if (log.identity.cluster, log.identity.generation) != (cluster, generation) {
            let what = format!(
                "it belongs to generation {} of this node in cluster {:032x}, whose other logs are \
                 missing; empty the data directory, or use the right one",
                log.identity.generation, log.identity.cluster
            );
            return Err(logs.unusable(shard_id, &what));
        }
        created.insert(shard_id, log);
    }
    handler.set_identity(cluster, generation);
    let identity = LogIdentity::of_node(cluster, node_id, generation);
    let peer_addrs = BTreeMap::new();
    Ok(Formation { identity, is_new: true, is_initiator, peer_addrs, logs: created })
}

/// Makes the other nodes create their logs, then gives shard 0 its first entry. Retries until it is
/// done. Has no effect if the cluster exists.
pub(super) async fn lead_formation(
    node: Weak<Node>,
    handler: Arc<BootstrapHandler>,
    identity: LogIdentity,
) {
    let mut last = String::new();
    loop {
        let Some(node) = node.upgrade() else { return };
        match try_form(&node, &handler, &identity).await {
            Ok(()) => return,
            Err(why) => {
                if why != last {
                    tracing::info!("cannot form the cluster yet: {why}");
                    last = why;
                }
            }
        }
        tokio::select! {
            biased;
            () = node.draining.cancelled() => return,
            () = tokio::time::sleep(POLL_INTERVAL) => {}
        }
    }
}

async fn try_form(
    node: &Node,
    handler: &BootstrapHandler,
    identity: &LogIdentity,
) -> Result<(), String> {
    let replica = node.cluster.replica();
    let broken = |error: std::io::Error| error.to_string();
    if replica.is_formed().await.map_err(broken)? {
        return Ok(());
    }
    let form = FormCluster {
        cluster: identity.cluster,
        cluster_name: handler.cluster_name.clone().unwrap_or_default(),
        members: handler.members.iter().copied().collect(),
        shards: node.shards.len() as u64,
    };
    for peer in node.hub.peers() {
        node.hub
            .form(peer.node_id, form.clone())
            .await
            .map_err(|error| format!("node {}: {error}", peer.node_id))?;
    }
    replica.form(handler.replica_ids()).await.map_err(broken)?;
    tracing::info!(cluster = %format!("{:032x}", identity.cluster), "formed a cluster");
    Ok(())
}
