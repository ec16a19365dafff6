//! Disks that fail under running nodes, files that are damaged, and what the node must make of it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, ensure};
use helix_checker::Event;
use helix_checker::payload::events;
use helix_client::{AppendOptions, NewTopic};
use helix_proto::log::v1::{ErrorReason, HealthReason, Record, TopicConfig};
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::time::{Instant, sleep};

use crate::cluster::Cluster;
use crate::direct::{Direct, FetchError};
use crate::disk::{SyncFault, Tracer};
use crate::files::{self, Damage, Shelf};
use crate::operator::until_done;
use crate::voice::Voice;
use crate::workload::{Scene, is_out_of_range};

/// How long a node whose syncs fail may go on: until the next sync, which comes with the next
/// record.
const STOP_MAX: Duration = Duration::from_secs(60);

/// How long a full disk may take to be noticed.
const FULL_MAX: Duration = Duration::from_secs(60);

/// How long a node may take to read all of its logs and to have damaged ones filled anew.
const REPAIR_MAX: Duration = Duration::from_secs(120);

/// A topic that nothing is kept of, to write until a disk is full.
const BALLAST: &str = "ballast";
const BALLAST_PARTITIONS: u32 = 6;
const BALLAST_KEPT_BYTES: u64 = 1 << 20;
const BALLAST_RECORD_BYTES: usize = 900_000;

/// Steps over damage, at most, in one partition.
const RANGES_MAX: usize = 10;

/// The exit code of a node whose disk has failed.
const DISK_FAILED: i32 = 70;

/// Lets every sync of a node fail until it has ended by itself, which it must.
pub(crate) async fn fail_syncs(cluster: &mut Cluster, node: u64) -> anyhow::Result<()> {
    let tracer = attach(cluster, node, SyncFault::Fails)?;
    let code = cluster.ends_by_itself(node, STOP_MAX).await;
    tracer.detach().await?;
    let code = code.context("its syncs fail")?;
    ensure!(code == Some(DISK_FAILED), "node {node}, whose syncs failed, ended with {code:?}");
    Ok(())
}

/// Makes every sync of a node take longer for a while.
pub(crate) async fn slow_syncs(
    cluster: &mut Cluster,
    node: u64,
    time: Duration,
    lasting: Duration,
) -> anyhow::Result<()> {
    let tracer = attach(cluster, node, SyncFault::Takes(time))?;
    sleep(lasting).await;
    tracer.detach().await
}

fn attach(cluster: &mut Cluster, node: u64, fault: SyncFault) -> anyhow::Result<Tracer> {
    let process = cluster.process_id(node).with_context(|| format!("node {node} does not run"))?;
    Tracer::attach(process, fault)
}

/// Has something else take the space of a node's disk, and writes until the node says that it is
/// full; gives the space back after a while. False if the node never said so: nobody leads there.
pub(crate) async fn fill_disk(
    cluster: &Cluster,
    scene: &Scene,
    node: u64,
    left_mib: u64,
    lasting: Duration,
) -> anyhow::Result<bool> {
    let disk = cluster.disk(node).with_context(|| format!("node {node} has no disk"))?;
    let (client, direct) = (scene.client()?, cluster.one(node)?);
    let config =
        TopicConfig { retention_bytes: Some(BALLAST_KEPT_BYTES), ..TopicConfig::default() };
    let topic = NewTopic { config, ..NewTopic::new(BALLAST, BALLAST_PARTITIONS) };
    until_done(|| async { client.admin().create_topic(&topic).await }).await?;
    disk.fill(left_mib << 20)?;
    let value = Some(vec![7; BALLAST_RECORD_BYTES].into());
    let records = [Record { value, ..Record::default() }];
    let deadline = Instant::now() + FULL_MAX;
    let mut partition = 0;
    let is_full = loop {
        let is_full = direct.health().await.is_ok_and(|health| {
            let mut issues = health.issues.iter();
            issues.any(|issue| issue.reason() == HealthReason::DiskFull)
        });
        if is_full || Instant::now() > deadline {
            break is_full;
        }
        // Refused where the disk of a leader is full, which is what is waited for.
        let options = AppendOptions::default();
        let _ = client.append(BALLAST, partition, &records[..], &options).await;
        partition = (partition + 1) % BALLAST_PARTITIONS;
    };
    sleep(lasting).await;
    disk.relieve().await?;
    Ok(is_full)
}

/// Damages files of a node: it may refuse what is damaged, but what it gives must be right, and it
/// must get over it by itself. Two of three copies are well.
///
/// No damage that is done here is beyond a replica, and so none is ever replaced: what it cannot
/// notice, and what its operator is told never to do, `files` leaves alone.
pub(crate) async fn harm(
    cluster: &mut Cluster,
    scene: &Scene,
    voice: Voice,
    (node, what): (u64, Damage),
    (is_running, seed): (bool, u64),
    lasting: Duration,
) -> anyhow::Result<()> {
    if !is_running {
        cluster.kill(&[node]).await?;
    }
    let mut rng = StdRng::seed_from_u64(seed);
    let said = files::damage(&cluster.data_dir(node), what, &mut rng).await?;
    voice.say(format_args!("  {said}"));
    if is_running {
        // What a reader meets is repaired at once, what is left by the next start.
        let (given, refused) = read_all(scene, &cluster.one(node)?).await;
        voice.say(format_args!("  it gave {given} batches, and refused {refused} ranges"));
        sleep(lasting).await;
        cluster.kill(&[node]).await?;
    }
    cluster.start_node(node)?;
    recover(cluster, scene, voice, node).await
}

/// Puts a segment of a node back as it was at an earlier time, while the node is down: it must
/// notice, and get over it. False where there was nothing to put back.
pub(crate) async fn restore(
    cluster: &mut Cluster,
    scene: &Scene,
    voice: Voice,
    shelf: &Shelf,
    (node, seed): (u64, u64),
) -> anyhow::Result<bool> {
    cluster.kill(&[node]).await?;
    let mut rng = StdRng::seed_from_u64(seed);
    let said = shelf.put_back(&cluster.data_dir(node), &mut rng).await?;
    cluster.start_node(node)?;
    let Some(said) = said else { return Ok(false) };
    voice.say(format_args!("  {said}"));
    recover(cluster, scene, voice, node).await?;
    Ok(true)
}

/// Waits until a node that has just been started has read all of its logs anew and repaired what
/// was damaged; reads meanwhile, and again when it says that it is whole.
async fn recover(
    cluster: &mut Cluster,
    scene: &Scene,
    voice: Voice,
    node: u64,
) -> anyhow::Result<()> {
    let begin = Instant::now();
    let direct = cluster.one(node)?;
    let (given, refused) = read_all(scene, &direct).await;
    let repaired = cluster.whole(node, REPAIR_MAX).await?;
    voice.say(format_args!(
        "  it gave {given} batches, and refused {refused} ranges; after {} ms all of it was whole; \
         shards {repaired:?} were in repair",
        begin.elapsed().as_millis()
    ));
    scene.stats.repairs.fetch_add(repaired.len() as u64, Ordering::Relaxed);
    let (_, refused) = read_all(scene, &direct).await;
    ensure!(
        refused == 0,
        "NOT REPAIRED: node {node} says that it is whole, and refuses {refused} ranges as damaged"
    );
    Ok(())
}

/// Reads what a damaged replica gives of each partition, from the start of its log, or from where
/// its damage ends; the checker has a look at it. Gives the batches that came, and how often the
/// replica said that bytes are damaged.
async fn read_all(scene: &Scene, direct: &Direct) -> (usize, usize) {
    let (mut given, mut refused) = (0, 0);
    for (partition, place) in scene.places() {
        let reader = scene.id();
        let mut offset = 0;
        scene.recorder.add(Event::Opened { reader, partition, offset });
        let mut skipped = 0;
        while skipped < RANGES_MAX {
            let asked = (place.topic, place.partition);
            match direct.fetch(asked, offset, Duration::ZERO).await {
                Ok(read) => {
                    let (told, end) = events(reader, partition, &read.batches, offset);
                    scene.recorder.add_all(told);
                    given += read.batches.len();
                    if end == offset {
                        break;
                    }
                    offset = end;
                    continue;
                }
                Err(FetchError::Said(error)) if is_out_of_range(&error) => {
                    let log_start = error.watermarks.unwrap_or_default().log_start_offset;
                    scene.starts_at(partition, log_start);
                    let Some(next) = scene.next_border(partition, log_start) else { break };
                    offset = next;
                }
                Err(FetchError::Said(error)) if error.is(ErrorReason::CorruptLog) => {
                    refused += 1;
                    let Some(next) = scene.next_border(partition, offset + 1) else { break };
                    offset = next;
                }
                // It is not there, or does not open this shard.
                Err(_) => break,
            }
            skipped += 1;
            scene.recorder.add(Event::Opened { reader, partition, offset });
        }
    }
    (given, refused)
}
