//! Operator actions on a cluster under load: drain, restart, add, remove and replace nodes by the
//! documented procedures, and delete topics.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use helix_checker::{BatchKey, payload};
use helix_client::{Admin, Client, Config, NewTopic, Producer, ProducerOptions, TokenSource};
use helix_proto::log::v1::{
    AddShardsRequest, ErrorReason, MembershipChange, MembershipPhase, RemoveNodeRequest,
    StoredBatch,
};
use tokio::time::{Instant, sleep};

use crate::cluster::ChaosCluster;
use crate::logger::Logger;
use crate::node_client::{NodeClient, NodeFetchError};
use crate::workload::WorkloadContext;

/// Longest time for a membership change, or for its start to be accepted.
const CHANGE_MAX: Duration = Duration::from_secs(120);

/// Longest wait for the cluster to be healthy again.
pub(crate) const HEALTHY_MAX: Duration = Duration::from_secs(60);

const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Topic that is deleted and created again.
const DELETED_TOPIC: &str = "doomed";

/// Batches written to it each time.
const DELETED_TOPIC_BATCHES: u64 = 10;

/// Topic that is created once shards were added.
const NEW_TOPIC: &str = "after-growth";
const NEW_TOPIC_PARTITIONS: u32 = 12;

/// Returns an admin client for the current nodes.
pub(crate) fn admin(cluster: &ChaosCluster) -> anyhow::Result<Admin> {
    let (token, tls) = (TokenSource::from_env()?, cluster.client_tls());
    let config = Config { seed: Some(1), token, tls, ..Config::new(cluster.endpoints()) };
    Ok(Client::new(config)?.admin())
}

/// Retries a request until it succeeds: a started node may not answer yet, and a shard may have no
/// leader.
pub(crate) async fn retry_until_ok<T, F, Fut>(ask: F) -> anyhow::Result<T>
where
    F: Fn() -> Fut,
    Fut: Future<Output = helix_client::Result<T>>,
{
    let deadline = Instant::now() + CHANGE_MAX;
    loop {
        match ask().await {
            Ok(done) => return Ok(done),
            Err(error) if Instant::now() > deadline => return Err(error.into()),
            Err(_) => sleep(POLL_INTERVAL).await,
        }
    }
}

/// Starts a membership change.
///
/// If the response was lost, finds the change by its new id; no other changes are made.
pub(crate) async fn start_change<F, Fut>(admin: &Admin, ask: F) -> anyhow::Result<MembershipChange>
where
    F: Fn() -> Fut,
    Fut: Future<Output = helix_client::Result<Option<MembershipChange>>>,
{
    let before = retry_until_ok(|| latest(admin)).await?;
    retry_until_ok(|| async {
        let error = match ask().await {
            Ok(change) => return Ok(change),
            Err(error) => error,
        };
        let is_new = |it: &MembershipChange| before.as_ref().is_none_or(|old| old.id < it.id);
        match latest(admin).await?.filter(is_new) {
            Some(change) => Ok(Some(change)),
            None => Err(error),
        }
    })
    .await?
    .context("the change was only validated")
}

/// Returns the current or last membership change.
async fn latest(admin: &Admin) -> helix_client::Result<Option<MembershipChange>> {
    match admin.membership_change(0).await {
        Ok(change) => Ok(Some(change)),
        Err(error) if error.is(ErrorReason::InvalidArgument) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Starts a node, adds it and waits for the change to finish.
pub(crate) async fn add(
    cluster: &mut ChaosCluster,
    id: u64,
    kills_leader: bool,
) -> anyhow::Result<()> {
    let peer = cluster.join(id)?.to_string();
    let admin = admin(cluster)?;
    let change = start_change(&admin, || admin.add_node(id, &peer, false)).await?;
    finish(cluster, &admin, change, &[id], kills_leader).await
}

/// Removes a running node and waits for the change to finish.
pub(crate) async fn remove(
    cluster: &mut ChaosCluster,
    id: u64,
    kills_leader: bool,
) -> anyhow::Result<()> {
    let admin = admin(cluster)?;
    // Small clusters shrink, too.
    let request = RemoveNodeRequest {
        node_id: id,
        allow_fewer_replicas: true,
        ..RemoveNodeRequest::default()
    };
    let change = start_change(&admin, || admin.remove_node_with(request)).await?;
    if kills_leader {
        kill_leader(cluster, &[id]).await?;
    }
    wait_until_done(&admin, &change).await?;
    cluster.leave(id).await?;
    cluster.wait_until_healthy(HEALTHY_MAX).await
}

/// Wipes the disk of a node and replaces it under the same id, with empty data.
pub(crate) async fn wipe(
    cluster: &mut ChaosCluster,
    id: u64,
    kills_leader: bool,
) -> anyhow::Result<()> {
    cluster.kill(&[id]).await?;
    cluster.wipe(id).await?;
    cluster.start_node(id)?;
    let admin = admin(cluster)?;
    let change = start_change(&admin, || admin.replace_node(id, id, "", false)).await?;
    finish(cluster, &admin, change, &[id], kills_leader).await
}

/// Replaces a lost node by another one.
async fn replace(
    cluster: &mut ChaosCluster,
    lost: u64,
    by: u64,
    kills_leader: bool,
) -> anyhow::Result<()> {
    cluster.kill(&[lost]).await?;
    let peer = cluster.join(by)?.to_string();
    let admin = admin(cluster)?;
    let change = start_change(&admin, || admin.replace_node(lost, by, &peer, false)).await?;
    if kills_leader {
        kill_leader(cluster, &[lost, by]).await?;
    }
    wait_until_done(&admin, &change).await?;
    cluster.leave(lost).await?;
    cluster.wait_until_healthy(HEALTHY_MAX).await
}

/// Adds one node and removes another.
pub(crate) async fn change_members(
    cluster: &mut ChaosCluster,
    (joins, leaves): (u64, u64),
    is_lost: bool,
    kills_leader: bool,
) -> anyhow::Result<()> {
    if is_lost {
        return replace(cluster, leaves, joins, kills_leader).await;
    }
    // A cluster has at most five nodes.
    if cluster.ids().len() < 5 {
        add(cluster, joins, kills_leader).await?;
        remove(cluster, leaves, false).await
    } else {
        remove(cluster, leaves, kills_leader).await?;
        add(cluster, joins, false).await
    }
}

/// Drains a node, restarts it and ends the drain.
pub(crate) async fn restart(cluster: &mut ChaosCluster, id: u64) -> anyhow::Result<()> {
    let admin = admin(cluster)?;
    retry_until_ok(|| admin.set_draining(id, true, false)).await?;
    cluster.terminate(id).await?;
    cluster.start_node(id)?;
    retry_until_ok(|| admin.set_draining(id, false, false)).await?;
    cluster.wait_until_healthy(HEALTHY_MAX).await
}

async fn finish(
    cluster: &mut ChaosCluster,
    admin: &Admin,
    change: MembershipChange,
    spared: &[u64],
    kills_leader: bool,
) -> anyhow::Result<()> {
    if kills_leader {
        kill_leader(cluster, spared).await?;
    }
    wait_until_done(admin, &change).await?;
    cluster.wait_until_healthy(HEALTHY_MAX).await
}

/// Kills the leader that drives a membership change, and restarts it.
async fn kill_leader(cluster: &mut ChaosCluster, spared: &[u64]) -> anyhow::Result<()> {
    let leader = cluster.leaders().await.get(&0).map(|(node, _)| *node);
    // A cluster of two nodes cannot lose one.
    if let Some(leader) = leader.filter(|id| !spared.contains(id) && cluster.ids().len() > 2) {
        cluster.kill(&[leader]).await?;
        cluster.start_node(leader)?;
    }
    Ok(())
}

/// Waits until a membership change is done.
pub(crate) async fn wait_until_done(
    admin: &Admin,
    change: &MembershipChange,
) -> anyhow::Result<()> {
    let deadline = Instant::now() + CHANGE_MAX;
    loop {
        let seen = admin.membership_change(change.id).await;
        match &seen {
            Ok(seen) if seen.phase() == MembershipPhase::Done => return Ok(()),
            Ok(seen) => {
                ensure!(seen.phase() != MembershipPhase::Failed, "the change failed: {seen:?}");
            }
            Err(_) => {}
        }
        if Instant::now() > deadline {
            bail!("NO PROGRESS: change {} is not done after {CHANGE_MAX:?}: {seen:?}", change.id);
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Sets the number of replicas of each data shard.
pub(crate) async fn set_replicas(cluster: &ChaosCluster, replicas: u32) -> anyhow::Result<()> {
    let admin = admin(cluster)?;
    retry_until_ok(|| admin.set_replicas(replicas)).await
}

/// Splits data shards until there are `total`, and waits until all take partitions.
pub(crate) async fn split_shards(cluster: &mut ChaosCluster, total: u32) -> anyhow::Result<()> {
    let admin = admin(cluster)?;
    let seen = retry_until_ok(|| admin.placement()).await?;
    let known = seen.shards.iter().filter(|it| it.shard_id != 0).count();
    let known = u32::try_from(known).context("count the shards")?;
    if known >= total {
        return Ok(());
    }
    let request = AddShardsRequest { current: known, total, split: true, replicas: 0 };
    retry_until_ok(|| admin.add_shards(request)).await?;
    let deadline = Instant::now() + CHANGE_MAX;
    loop {
        cluster.check_running()?;
        let seen = admin.placement().await;
        if let Ok(seen) = &seen {
            let open = seen.shards.iter().filter(|it| it.shard_id != 0 && !it.is_opening);
            if u32::try_from(open.count())? == total {
                return Ok(());
            }
        }
        if Instant::now() > deadline {
            bail!("NO PROGRESS: {total} shards are not open after {CHANGE_MAX:?}: {seen:?}");
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Creates a topic, writes to each of its partitions, and waits until this many nodes lead some.
pub(crate) async fn spread_new_topic(
    cluster: &mut ChaosCluster,
    context: &WorkloadContext,
    nodes: usize,
) -> anyhow::Result<()> {
    let client = context.client()?;
    let (admin, producer) = (client.admin(), client.producer(ProducerOptions::default()));
    let topic = NewTopic::new(NEW_TOPIC, NEW_TOPIC_PARTITIONS);
    retry_until_ok(|| admin.create_topic(&topic)).await?;
    let batch = payload::build(BatchKey { producer: context.id(), number: 0 }, 3);
    for partition in 0..NEW_TOPIC_PARTITIONS {
        retry_until_ok(|| producer.append(NEW_TOPIC, partition, batch.clone())).await?;
    }
    lead_by_all(cluster, &client, (NEW_TOPIC, NEW_TOPIC_PARTITIONS), nodes).await
}

/// Waits until this many nodes lead partitions of a topic, or as many as it has partitions.
pub(crate) async fn lead_by_all(
    cluster: &mut ChaosCluster,
    client: &Client,
    (topic, partitions): (&str, u32),
    nodes: usize,
) -> anyhow::Result<()> {
    let admin = client.admin();
    let deadline = Instant::now() + CHANGE_MAX;
    loop {
        cluster.check_running()?;
        // Not from the client's routes, which it renews only when a call fails.
        let metadata = admin.metadata(&[topic]).await.unwrap_or_default();
        let leader = |shard: &u32| {
            let shard = metadata.shards.iter().find(|it| it.shard_id == *shard)?;
            Some(shard.leader.as_ref()?.node_id)
        };
        let shards = metadata.topics.iter().filter(|it| it.topic == topic);
        let leaders: BTreeSet<u64> =
            shards.flat_map(|it| &it.shard_ids).filter_map(leader).collect();
        if leaders.len() >= nodes.min(partitions as usize) {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("NO PROGRESS: {topic} is led by {leaders:?} after {CHANGE_MAX:?}");
        }
        // Ignored: the leaders decide.
        let _ = admin.balance_leaders().await;
        sleep(POLL_INTERVAL).await;
    }
}

/// Waits until all replicas are where they should be, in equal numbers.
pub(crate) async fn wait_until_placed(cluster: &mut ChaosCluster) -> anyhow::Result<()> {
    let admin = admin(cluster)?;
    let deadline = Instant::now() + CHANGE_MAX;
    loop {
        cluster.check_running()?;
        let seen = admin.placement().await;
        if let Ok(seen) = &seen {
            let moves = seen.shards.iter().any(|it| it.r#move.is_some());
            let is_stuck = seen.shards.iter().any(|it| !it.stuck_code.is_empty());
            if !moves && !is_stuck && seen.planned.is_empty() {
                return cluster.wait_until_healthy(HEALTHY_MAX).await;
            }
        }
        if Instant::now() > deadline {
            bail!("NO PROGRESS: replicas still move after {CHANGE_MAX:?}: {seen:?}");
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Deletes a topic and creates it again while a node is down.
///
/// Afterwards every node must have the whole new topic from offset 0, and nothing of the old one.
pub(crate) async fn delete_while_down(
    cluster: &mut ChaosCluster,
    context: &WorkloadContext,
    logger: Logger,
    absent: u64,
    down: Duration,
) -> anyhow::Result<()> {
    let client = context.client()?;
    let (admin, producer) = (client.admin(), client.producer(ProducerOptions::default()));
    let topic = NewTopic::new(DELETED_TOPIC, 1);
    retry_until_ok(|| admin.create_topic(&topic)).await?;
    write(&producer, context.id(), 0..DELETED_TOPIC_BATCHES).await?;
    cluster.kill(&[absent]).await?;
    let begin = Instant::now();
    let ends = begin + down;
    delete_topic_until_ok(&admin).await?;
    logger.log_if_slow("  topic is deleted", begin);
    retry_until_ok(|| admin.create_topic(&topic)).await?;
    logger.log_if_slow("  topic is created again", begin);
    let writer = context.id();
    write(&producer, writer, 0..DELETED_TOPIC_BATCHES).await?;
    logger.log_if_slow("  topic is written", begin);
    tokio::time::sleep_until(ends).await;
    let begin = Instant::now();
    cluster.heal()?;
    cluster.wait_until_healthy(HEALTHY_MAX).await?;
    logger.log_if_slow("  cluster is healthy", begin);
    for node_client in cluster.node_clients() {
        let node = node_client.node_id;
        wait_until_only(&node_client, writer)
            .await
            .with_context(|| format!("node {node}, {DELETED_TOPIC}"))?;
    }
    delete_topic_until_ok(&admin).await?;
    for node_client in cluster.node_clients() {
        wait_until_deleted(&node_client).await?;
    }
    Ok(())
}

/// Deletes the topic. It may be gone already if the response of an earlier attempt was lost.
async fn delete_topic_until_ok(admin: &Admin) -> anyhow::Result<()> {
    retry_until_ok(|| async {
        match admin.delete_topic(DELETED_TOPIC).await {
            Err(error)
                if error.is(ErrorReason::TopicNotFound) || error.is(ErrorReason::TopicDeleted) =>
            {
                Ok(())
            }
            other => other,
        }
    })
    .await
}

async fn write(
    producer: &Producer,
    writer: u32,
    numbers: std::ops::Range<u64>,
) -> anyhow::Result<()> {
    for number in numbers {
        let batch = payload::build(BatchKey { producer: writer, number }, 3);
        let deadline = Instant::now() + CHANGE_MAX;
        // The client retries with the same sequence up to its timeout. A batch with an unknown
        // outcome is not written again.
        loop {
            match producer.append(DELETED_TOPIC, 0, batch.clone()).await {
                Ok(_) => break,
                Err(error) if error.may_have_applied || Instant::now() > deadline => {
                    return Err(error.into());
                }
                Err(_) => sleep(POLL_INTERVAL).await,
            }
        }
    }
    Ok(())
}

/// Waits until a replica has exactly the batches of the new topic. A replica that has not applied
/// the deletion yet still serves the old topic.
async fn wait_until_only(node_client: &NodeClient, writer: u32) -> anyhow::Result<()> {
    let deadline = Instant::now() + HEALTHY_MAX;
    loop {
        let wrong = match node_client.fetch((DELETED_TOPIC, 0), 0, Duration::ZERO).await {
            Ok(read) => difference(&read.batches, writer),
            Err(error) => Some(error.to_string()),
        };
        let Some(wrong) = wrong else { return Ok(()) };
        ensure!(Instant::now() < deadline, "VIOLATION: after {HEALTHY_MAX:?}: {wrong}");
        sleep(POLL_INTERVAL).await;
    }
}

/// Describes how the batches differ from those that were written.
fn difference(batches: &[StoredBatch], writer: u32) -> Option<String> {
    for (number, stored) in (0..).zip(batches) {
        let wanted = BatchKey { producer: writer, number };
        let found = payload::read(&stored.batch.clone().unwrap_or_default());
        if found != Ok((wanted, 3)) || stored.first_offset != 3 * number {
            return Some(format!("{found:?} at {}, expected {wanted}", stored.first_offset));
        }
    }
    let count = batches.len() as u64;
    (count != DELETED_TOPIC_BATCHES)
        .then(|| format!("{count} batches, expected {DELETED_TOPIC_BATCHES}"))
}

async fn wait_until_deleted(node_client: &NodeClient) -> anyhow::Result<()> {
    let deadline = Instant::now() + HEALTHY_MAX;
    loop {
        let result = node_client.fetch((DELETED_TOPIC, 0), 0, Duration::ZERO).await;
        let is_gone = |error: &helix_client::Error| {
            error.is(ErrorReason::TopicNotFound) || error.is(ErrorReason::TopicDeleted)
        };
        if let Err(NodeFetchError::Rejected(error)) = &result
            && is_gone(error)
        {
            return Ok(());
        }
        let node = node_client.node_id;
        ensure!(
            Instant::now() < deadline,
            "STUCK: node {node} still has {DELETED_TOPIC}: {result:?}"
        );
        sleep(POLL_INTERVAL).await;
    }
}
