//! What people do to a cluster that is written to and read: they drain, restart, add, remove and
//! replace nodes, by the documented procedures, and delete topics.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use helix_checker::{BatchKey, payload};
use helix_client::{Admin, Client, Config, NewTopic, Producer, ProducerOptions};
use helix_proto::log::v1::{ErrorReason, MembershipChange, MembershipPhase, StoredBatch};
use tokio::time::{Instant, sleep};

use crate::cluster::Cluster;
use crate::direct::{Direct, FetchError};
use crate::voice::Voice;
use crate::workload::Scene;

/// How long a change may take, and how long its begin may be refused.
const CHANGE_MAX: Duration = Duration::from_secs(120);

/// How long everything may take to be well after it.
pub(crate) const WELL_MAX: Duration = Duration::from_secs(60);

const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The topic that is deleted and made again.
const DOOMED: &str = "doomed";

/// Batches that are written to it each time.
const DOOMED_BATCHES: u64 = 10;

/// The nodes of a cluster as an operator's next command finds them.
pub(crate) fn admin(cluster: &Cluster) -> anyhow::Result<Admin> {
    let config = Config { seed: Some(1), ..Config::new(cluster.endpoints()) };
    Ok(Client::new(config)?.admin())
}

/// Asks until it is done: a node that has just been started may not answer yet, and a shard may be
/// between two leaders.
pub(crate) async fn until_done<T, F, Fut>(ask: F) -> anyhow::Result<T>
where
    F: Fn() -> Fut,
    Fut: Future<Output = helix_client::Result<T>>,
{
    let deadline = Instant::now() + CHANGE_MAX;
    loop {
        match ask().await {
            Ok(done) => return Ok(done),
            Err(error) if Instant::now() > deadline => return Err(error.into()),
            Err(_) => sleep(LOOK_EVERY).await,
        }
    }
}

/// Has a change begun. Where the answer was lost, it is the one that there was not before: nobody
/// else makes any.
async fn begun<F, Fut>(admin: &Admin, ask: F) -> anyhow::Result<MembershipChange>
where
    F: Fn() -> Fut,
    Fut: Future<Output = helix_client::Result<Option<MembershipChange>>>,
{
    let before = until_done(|| latest(admin)).await?;
    until_done(|| async {
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
    .context("a change that was only checked")
}

/// The change that runs, or was the last.
async fn latest(admin: &Admin) -> helix_client::Result<Option<MembershipChange>> {
    match admin.membership_change(0).await {
        Ok(change) => Ok(Some(change)),
        Err(error) if error.is(ErrorReason::InvalidArgument) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Adds a node that has been started and waits, and follows that to its end.
pub(crate) async fn add(cluster: &mut Cluster, id: u64, kills_leader: bool) -> anyhow::Result<()> {
    let peer = cluster.join(id)?.to_string();
    let admin = admin(cluster)?;
    let change = begun(&admin, || admin.add_node(id, &peer, false)).await?;
    finish(cluster, &admin, change, &[id], kills_leader).await
}

/// Removes a node that runs, and follows that to its end.
pub(crate) async fn remove(
    cluster: &mut Cluster,
    id: u64,
    kills_leader: bool,
) -> anyhow::Result<()> {
    let admin = admin(cluster)?;
    let change = begun(&admin, || admin.remove_node(id, false, false)).await?;
    if kills_leader {
        kill_leader(cluster, &[id]).await?;
    }
    watch(&admin, &change).await?;
    cluster.leave(id).await?;
    cluster.healthy(WELL_MAX).await
}

/// A node loses its disk and comes back with an empty one, as a new generation.
pub(crate) async fn wipe(cluster: &mut Cluster, id: u64, kills_leader: bool) -> anyhow::Result<()> {
    cluster.kill(&[id]).await?;
    cluster.wipe(id).await?;
    cluster.start_node(id)?;
    let admin = admin(cluster)?;
    let change = begun(&admin, || admin.replace_node(id, id, "", false)).await?;
    finish(cluster, &admin, change, &[id], kills_leader).await
}

/// A node is lost, and another one takes its place.
async fn replace(
    cluster: &mut Cluster,
    lost: u64,
    by: u64,
    kills_leader: bool,
) -> anyhow::Result<()> {
    cluster.kill(&[lost]).await?;
    let peer = cluster.join(by)?.to_string();
    let admin = admin(cluster)?;
    let change = begun(&admin, || admin.replace_node(lost, by, &peer, false)).await?;
    if kills_leader {
        kill_leader(cluster, &[lost, by]).await?;
    }
    watch(&admin, &change).await?;
    cluster.leave(lost).await?;
    cluster.healthy(WELL_MAX).await
}

/// One node comes, another one goes.
pub(crate) async fn exchange(
    cluster: &mut Cluster,
    (joins, leaves): (u64, u64),
    is_lost: bool,
    kills_leader: bool,
) -> anyhow::Result<()> {
    if is_lost {
        return replace(cluster, leaves, joins, kills_leader).await;
    }
    // More than five are refused.
    if cluster.ids().len() < 5 {
        add(cluster, joins, kills_leader).await?;
        remove(cluster, leaves, false).await
    } else {
        remove(cluster, leaves, kills_leader).await?;
        add(cluster, joins, false).await
    }
}

/// Drained, stopped, started, taken back.
pub(crate) async fn restart(cluster: &mut Cluster, id: u64) -> anyhow::Result<()> {
    let admin = admin(cluster)?;
    until_done(|| admin.set_draining(id, true, false)).await?;
    cluster.terminate(id).await?;
    cluster.start_node(id)?;
    until_done(|| admin.set_draining(id, false, false)).await?;
    cluster.healthy(WELL_MAX).await
}

async fn finish(
    cluster: &mut Cluster,
    admin: &Admin,
    change: MembershipChange,
    spared: &[u64],
    kills_leader: bool,
) -> anyhow::Result<()> {
    if kills_leader {
        kill_leader(cluster, spared).await?;
    }
    watch(admin, &change).await?;
    cluster.healthy(WELL_MAX).await
}

/// Kills whoever drives a change, and starts it again.
async fn kill_leader(cluster: &mut Cluster, spared: &[u64]) -> anyhow::Result<()> {
    let leader = cluster.leaders().await.get(&0).map(|(node, _)| *node);
    // Of two, none can be missed.
    if let Some(leader) = leader.filter(|id| !spared.contains(id) && cluster.ids().len() > 2) {
        cluster.kill(&[leader]).await?;
        cluster.start_node(leader)?;
    }
    Ok(())
}

/// Waits until a change is done.
async fn watch(admin: &Admin, change: &MembershipChange) -> anyhow::Result<()> {
    let deadline = Instant::now() + CHANGE_MAX;
    loop {
        let seen = admin.membership_change(change.id).await;
        match &seen {
            Ok(seen) if seen.phase() == MembershipPhase::Done => return Ok(()),
            Ok(seen) => {
                ensure!(seen.phase() != MembershipPhase::Failed, "given up: {seen:?}");
            }
            Err(_) => {}
        }
        if Instant::now() > deadline {
            bail!("NO PROGRESS: change {} is not done after {CHANGE_MAX:?}: {seen:?}", change.id);
        }
        sleep(LOOK_EVERY).await;
    }
}

/// A topic is deleted and made again while a node is down. When it is back, each node must have
/// the new one, whole and from offset 0, and nothing of the old one.
pub(crate) async fn delete_behind(
    cluster: &mut Cluster,
    scene: &Scene,
    voice: Voice,
    absent: u64,
    down: Duration,
) -> anyhow::Result<()> {
    let client = scene.client()?;
    let (admin, producer) = (client.admin(), client.producer(ProducerOptions::default()));
    let topic = NewTopic::new(DOOMED, 1);
    until_done(|| admin.create_topic(&topic)).await?;
    write(&producer, scene.id(), 0..DOOMED_BATCHES).await?;
    cluster.kill(&[absent]).await?;
    let begin = Instant::now();
    let ends = begin + down;
    until_gone(&admin).await?;
    voice.say_if_long("  it is gone", begin);
    until_done(|| admin.create_topic(&topic)).await?;
    voice.say_if_long("  it is made again", begin);
    let writer = scene.id();
    write(&producer, writer, 0..DOOMED_BATCHES).await?;
    voice.say_if_long("  it is written to", begin);
    tokio::time::sleep_until(ends).await;
    let begin = Instant::now();
    cluster.heal()?;
    cluster.healthy(WELL_MAX).await?;
    voice.say_if_long("  everything is well", begin);
    for direct in cluster.direct() {
        let node = direct.node_id;
        has_only(&direct, writer).await.with_context(|| format!("node {node}, {DOOMED}"))?;
    }
    until_gone(&admin).await?;
    for direct in cluster.direct() {
        is_without(&direct).await?;
    }
    Ok(())
}

/// Deletes the topic. One that is gone was deleted by an attempt whose answer was lost.
async fn until_gone(admin: &Admin) -> anyhow::Result<()> {
    until_done(|| async {
        match admin.delete_topic(DOOMED).await {
            Err(error) if error.is(ErrorReason::TopicNotFound) => Ok(()),
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
        // Sent again with the same sequence by the client, which gives up after some time; what
        // has an open outcome then may be there, and is not written twice.
        loop {
            match producer.append(DOOMED, 0, batch.clone()).await {
                Ok(_) => break,
                Err(error) if error.may_have_applied || Instant::now() > deadline => {
                    return Err(error.into());
                }
                Err(_) => sleep(LOOK_EVERY).await,
            }
        }
    }
    Ok(())
}

/// Waits until a replica has what was written to the new topic, and nothing else. One that has not
/// heard of the deletion yet still gives the old one.
async fn has_only(direct: &Direct, writer: u32) -> anyhow::Result<()> {
    let deadline = Instant::now() + WELL_MAX;
    loop {
        let wrong = match direct.fetch((DOOMED, 0), 0, Duration::ZERO).await {
            Ok(read) => difference(&read.batches, writer),
            Err(error) => Some(error.to_string()),
        };
        let Some(wrong) = wrong else { return Ok(()) };
        ensure!(Instant::now() < deadline, "VIOLATION: after {WELL_MAX:?}: {wrong}");
        sleep(LOOK_EVERY).await;
    }
}

/// In what this is not all that was written.
fn difference(batches: &[StoredBatch], writer: u32) -> Option<String> {
    for (number, stored) in (0..).zip(batches) {
        let wanted = BatchKey { producer: writer, number };
        let found = payload::read(&stored.batch.clone().unwrap_or_default());
        if found != Ok((wanted, 3)) || stored.first_offset != 3 * number {
            return Some(format!("at {} stands {found:?}, not {wanted}", stored.first_offset));
        }
    }
    let count = batches.len() as u64;
    (count != DOOMED_BATCHES).then(|| format!("{count} batches of {DOOMED_BATCHES}"))
}

async fn is_without(direct: &Direct) -> anyhow::Result<()> {
    let deadline = Instant::now() + WELL_MAX;
    loop {
        let said = direct.fetch((DOOMED, 0), 0, Duration::ZERO).await;
        let is_gone = |error: &helix_client::Error| error.is(ErrorReason::TopicNotFound);
        if let Err(FetchError::Said(error)) = &said
            && is_gone(error)
        {
            return Ok(());
        }
        let node = direct.node_id;
        ensure!(Instant::now() < deadline, "STUCK: node {node} still has {DOOMED}: {said:?}");
        sleep(LOOK_EVERY).await;
    }
}
