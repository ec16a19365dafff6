//! Forming a cluster. Nodes with empty data form one only if all of them answer and all are empty;
//! a node that comes late, or whose data is gone, waits and says why, until somebody has it added
//! or replaced: then the cluster's leader calls it in, with a generation that it never had.
//!
//! The node with the lowest id is the former. It makes the logs of its own replicas, then has each
//! other node make its own; only when all have is shard 0 given its first entry, and only after
//! that do the data shards get theirs. So nobody votes before all replicas exist, and from then on
//! an empty folder means that a vote was lost: such a node must not take part again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Node;
use super::front::{Call, Front};
use super::logs::{Identity, Logs, OpenLog};
use crate::cluster::FIRST_GENERATION;
use crate::error::Result;
use crate::limits;
use crate::peer::{Form, Hello, Hub, Join, PeerError};
use crate::random::Random;

/// Nodes of a new cluster: an odd number, since an even one survives no more losses than the odd
/// one below it.
const NODES: [usize; 3] = [1, 3, 5];

/// How often an empty node looks at the others.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// How long an empty node that was told of no others listens for some before it forms a cluster
/// alone. Nodes that have it as a member dial it more often than that.
const LISTEN_WAIT: Duration = Duration::from_secs(2);

/// A node's place in its cluster, and the logs that were made for it just now.
pub(super) struct Formed {
    pub(super) identity: Identity,
    /// The logs are new.
    pub(super) is_new: bool,
    /// This node has to see to it that the others make theirs.
    pub(super) is_former: bool,
    /// Peer addresses of the others, as told by who called this node in.
    pub(super) neighbours: BTreeMap<u64, String>,
    logs: BTreeMap<u64, OpenLog>,
}

impl Formed {
    pub(super) fn take(&mut self, shard_id: u64) -> Option<OpenLog> {
        self.logs.remove(&shard_id)
    }

    /// The data shards among the new logs.
    pub(super) fn shards(&self) -> impl Iterator<Item = u64> {
        self.logs.keys().copied().filter(|shard| *shard > 0)
    }
}

/// What an empty node makes of what it sees.
#[derive(Debug, PartialEq, Eq)]
enum Judgement {
    Form,
    Wait(String),
}

/// Finds out which cluster this node belongs to: its data say so, or it forms one.
pub(super) async fn form(
    logs: &Logs<'_>,
    front: &Front,
    hub: &Arc<Hub>,
    random: &Random,
    listens: bool,
) -> Result<Formed> {
    let node_id = logs.settings.node_id;
    let is_former = !front.is_alone() && front.members.first() == Some(&node_id);
    if logs.exists(0).await? {
        let unknown = Identity { cluster: 0, node_id, generation: FIRST_GENERATION, shard_id: 0 };
        // One that has others may have it filled by them.
        let log = logs.open_or_put_aside(unknown, front.is_alone()).await?;
        let identity = log.identity.clone();
        check_name(logs, front, identity.cluster)?;
        front.belong(identity.cluster, identity.generation);
        let is_former = is_former && identity.generation == FIRST_GENERATION;
        let (neighbours, logs) = (BTreeMap::new(), BTreeMap::from([(0, log)]));
        return Ok(Formed { identity, is_new: false, is_former, neighbours, logs });
    }
    let drawn = match &front.cluster_name {
        Some(name) => cluster_of(name),
        None => u128::from(random.next_u64()) << 64 | u128::from(random.next_u64()),
    };
    let shards = 1..=logs.settings.shard_count;
    if !listens {
        return create(logs, front, (drawn, FIRST_GENERATION), shards, false).await;
    }
    let listened = Instant::now() + LISTEN_WAIT;
    let mut calls = front.called.lock().await;
    let mut look = tokio::time::interval(LOOK_INTERVAL);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            Some((call, reply)) = calls.recv() => {
                let formed = match call {
                    Call::Form(form) => take_part(logs, front, form, reply).await?,
                    Call::Join(join) => join_in(logs, front, join, reply).await?,
                };
                if let Some(formed) = formed {
                    return Ok(formed);
                }
            }
            _ = look.tick() => {
                let answers = look_around(front, hub).await;
                let why = match (hub.caller(), judge(front, node_id, &answers)) {
                    (_, Judgement::Wait(why)) => why,
                    (Some(caller), Judgement::Form) => lost(node_id, caller),
                    (None, Judgement::Form) if front.is_alone() && Instant::now() < listened => {
                        "other nodes may have this one as a member".to_owned()
                    }
                    (None, Judgement::Form) => {
                        let (identity, is_former) = ((drawn, FIRST_GENERATION), !front.is_alone());
                        return create(logs, front, identity, shards, is_former).await;
                    }
                };
                if front.wait_for(&why) {
                    tracing::info!(node_id, "waiting: {why}");
                }
            }
        }
    }
}

/// A name given by people stands for the same cluster on every node. 32 hexadecimal digits are a
/// cluster's id itself, anything else is hashed (FNV-1a, 128 bits).
fn cluster_of(name: &str) -> u128 {
    if name.len() == 32
        && let Ok(id) = u128::from_str_radix(name, 16)
    {
        return id;
    }
    let (offset, prime) = (0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128, (1 << 88) + 0x13b_u128);
    name.bytes().fold(offset, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(prime))
}

fn check_name(logs: &Logs<'_>, front: &Front, cluster: u128) -> Result<()> {
    match &front.cluster_name {
        Some(name) if cluster_of(name) != cluster => {
            let what = format!(
                "it belongs to cluster {cluster:032x}, which is not {name:?}: start it without \
                 --cluster-id, or give it the folder of that cluster"
            );
            Err(logs.unusable(0, &what))
        }
        _ => Ok(()),
    }
}

async fn look_around(front: &Front, hub: &Arc<Hub>) -> BTreeMap<u64, Result<Hello, PeerError>> {
    let others = hub.peers().into_iter().map(|peer| peer.node_id);
    let asked = others.map(|node| async move { (node, hub.hello(node).await) });
    let answers = futures_util::future::join_all(asked).await;
    debug_assert_eq!(answers.len() + 1, front.members.len());
    answers.into_iter().collect()
}

/// Why an empty node that others take for a member forms no cluster.
fn lost(node_id: u64, (caller, cluster): (u64, u128)) -> String {
    format!(
        "node {caller} of cluster {cluster:032x} takes this node for a member, but the data folder \
         is empty: give it its old folder back, or have it replaced with: helix cluster \
         replace-node {node_id}; to form another cluster here, give it another --peer-addr"
    )
}

fn judge(
    front: &Front,
    node_id: u64,
    answers: &BTreeMap<u64, Result<Hello, PeerError>>,
) -> Judgement {
    let wait = |why: String| Judgement::Wait(why);
    let heard = || answers.iter().filter_map(|(id, it)| Some((id, it.as_ref().ok()?)));
    for (id, hello) in heard() {
        if hello.node_id != *id {
            return wait(format!(
                "the address given for node {id} is that of node {}: correct --peer",
                hello.node_id
            ));
        }
        let Some(cluster) = hello.cluster.filter(|_| hello.formed) else { continue };
        return wait(if hello.members.contains(&node_id) {
            format!(
                "node {id} says that cluster {cluster:032x} has this node already, but the data \
                 folder is empty: give it its old folder back, or have it replaced with: helix \
                 cluster replace-node {node_id}"
            )
        } else {
            format!(
                "cluster {cluster:032x} of node {id} does not have this node: have it added with: \
                 helix cluster add-node {node_id} HOST:PORT, its peer address"
            )
        });
    }
    if !NODES.contains(&front.members.len()) {
        return wait(format!(
            "the {} nodes {:?} do not form a cluster, 1, 3 or 5 do: give --peer for each of them, \
             or start the others first and have this one added",
            front.members.len(),
            front.members
        ));
    }
    let missing: Vec<_> =
        answers.iter().filter_map(|(id, it)| Some((id, it.as_ref().err()?))).collect();
    if let Some((_, error)) = missing.first() {
        let nodes: Vec<_> = missing.iter().map(|(id, _)| id.to_string()).collect();
        return wait(format!("all nodes must answer to form a cluster; {}: {error}", list(&nodes)));
    }
    for (id, hello) in heard() {
        let members: BTreeSet<u64> = hello.members.iter().copied().collect();
        if members != front.members {
            return wait(format!(
                "node {id} was started for the nodes {members:?}, this one for {:?}: give all of \
                 them the same --peer flags",
                front.members
            ));
        }
        let name = front.cluster_name.clone().unwrap_or_default();
        if !hello.cluster_name.is_empty() && !name.is_empty() && hello.cluster_name != name {
            return wait(format!(
                "node {id} is to be of cluster {:?}, this one of {name:?}: give all of them the \
                 same --cluster-id",
                hello.cluster_name
            ));
        }
        let is_former = front.members.first() == Some(&node_id);
        if is_former && let Some(cluster) = hello.cluster {
            return wait(format!(
                "node {id} has begun with cluster {cluster:032x}, which this node lost: empty \
                 node {id}'s data folder, there is nothing in it yet"
            ));
        }
    }
    if front.members.first() == Some(&node_id) {
        return Judgement::Form;
    }
    wait(format!("node {} is to form the cluster", front.members.first().unwrap_or(&0)))
}

fn list(nodes: &[String]) -> String {
    match nodes {
        [one] => format!("node {one} does not"),
        many => format!("nodes {} do not", many.join(", ")),
    }
}

/// Makes this node's logs as the former asks. `None` where that is refused.
async fn take_part(
    logs: &Logs<'_>,
    front: &Front,
    form: Form,
    reply: oneshot::Sender<Result<(), String>>,
) -> Result<Option<Formed>> {
    let members: BTreeSet<u64> = form.members.iter().copied().collect();
    let refusal = if members != front.members {
        Some(format!("it was started for the nodes {:?}, not {members:?}", front.members))
    } else if front.cluster_name.as_deref().is_some_and(|name| cluster_of(name) != form.cluster) {
        Some(format!("it is to be of cluster {:?}", front.cluster_name))
    } else if !(1..=limits::SHARDS_MAX).contains(&form.shards) {
        Some(format!("{} shards are out of bounds", form.shards))
    } else {
        None
    };
    if let Some(refusal) = refusal {
        // Ignored: the caller went away.
        let _ = reply.send(Err(refusal));
        return Ok(None);
    }
    let formed =
        create(logs, front, (form.cluster, FIRST_GENERATION), 1..=form.shards, false).await?;
    // Ignored: the caller asks again, and is told that it is done.
    let _ = reply.send(Ok(()));
    Ok(Some(formed))
}

/// Makes this node's logs as the leader of a cluster that exists asks. `None` where that is
/// refused.
async fn join_in(
    logs: &Logs<'_>,
    front: &Front,
    join: Join,
    reply: oneshot::Sender<Result<(), String>>,
) -> Result<Option<Formed>> {
    let is_bounded = |shard: &u64| (1..=limits::SHARDS_MAX).contains(shard);
    let refusal = if front.cluster_name.as_deref().is_some_and(|it| cluster_of(it) != join.cluster)
    {
        Some(format!("it is to be of cluster {:?}", front.cluster_name))
    } else if join.generation <= FIRST_GENERATION {
        Some(format!("generation {} is for those who form a cluster", join.generation))
    } else if !join.shards.iter().all(is_bounded) {
        Some(format!("the shards {:?} are out of bounds", join.shards))
    } else {
        None
    };
    if let Some(refusal) = refusal {
        // Ignored: the caller went away.
        let _ = reply.send(Err(refusal));
        return Ok(None);
    }
    let identity = (join.cluster, join.generation);
    let formed = create(logs, front, identity, join.shards, false).await?;
    tracing::info!(
        cluster = %format!("{:032x}", join.cluster),
        generation = join.generation,
        "called into a cluster"
    );
    // Ignored: the caller asks again, and is told that it is done.
    let _ = reply.send(Ok(()));
    Ok(Some(Formed { neighbours: join.neighbours, ..formed }))
}

/// Makes the logs of this node's replicas: of shard 0 last, whose presence says that all are there.
async fn create(
    logs: &Logs<'_>,
    front: &Front,
    (cluster, generation): (u128, u32),
    shards: impl IntoIterator<Item = u64>,
    is_former: bool,
) -> Result<Formed> {
    let node_id = logs.settings.node_id;
    let mut made = BTreeMap::new();
    for shard_id in shards.into_iter().chain([0]) {
        let identity = Identity { cluster, node_id, generation, shard_id };
        let log = logs.open(identity).await?;
        if (log.identity.cluster, log.identity.generation) != (cluster, generation) {
            let what = format!(
                "it belongs to generation {} of this node in cluster {:032x}, of which this node \
                 has lost the rest: empty the data folder, or give it the right one",
                log.identity.generation, log.identity.cluster
            );
            return Err(logs.unusable(shard_id, &what));
        }
        made.insert(shard_id, log);
    }
    front.belong(cluster, generation);
    let identity = Identity { cluster, node_id, generation, shard_id: 0 };
    let neighbours = BTreeMap::new();
    Ok(Formed { identity, is_new: true, is_former, neighbours, logs: made })
}

/// Has the other nodes make their logs, then gives shard 0 its first entry. Repeats itself until
/// it is done; without effect where the cluster exists.
pub(super) async fn call_together(node: Weak<Node>, front: Arc<Front>, identity: Identity) {
    let mut last = String::new();
    loop {
        let Some(node) = node.upgrade() else { return };
        match call_once(&node, &front, &identity).await {
            Ok(()) => return,
            Err(why) => {
                if why != last {
                    tracing::info!("the cluster is not formed yet: {why}");
                    last = why;
                }
            }
        }
        tokio::select! {
            biased;
            () = node.draining.cancelled() => return,
            () = tokio::time::sleep(LOOK_INTERVAL) => {}
        }
    }
}

async fn call_once(node: &Node, front: &Front, identity: &Identity) -> Result<(), String> {
    let replica = node.cluster.replica();
    let broken = |error: std::io::Error| error.to_string();
    if replica.is_formed().await.map_err(broken)? {
        return Ok(());
    }
    let form = Form {
        cluster: identity.cluster,
        cluster_name: front.cluster_name.clone().unwrap_or_default(),
        members: front.members.iter().copied().collect(),
        shards: node.shards.len() as u64,
    };
    for peer in node.hub.peers() {
        node.hub
            .form(peer.node_id, form.clone())
            .await
            .map_err(|error| format!("node {}: {error}", peer.node_id))?;
    }
    replica.form(front.replica_ids()).await.map_err(broken)?;
    tracing::info!(cluster = %format!("{:032x}", identity.cluster), "formed a cluster");
    Ok(())
}
