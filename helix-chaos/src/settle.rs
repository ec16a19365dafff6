//! The moments of truth: everything healed, everyone at rest, every replica read from its start,
//! and the whole history judged.

use std::time::Duration;

use anyhow::{Context, bail};
use helix_checker::payload::events;
use helix_checker::{Event, Verdict};
use tokio::time::{Instant, sleep};

use crate::cluster::Cluster;
use crate::direct::{Direct, FetchError};
use crate::voice::Voice;
use crate::workload::{Scene, TOPIC, is_out_of_range};

/// How long healed replicas may take to become equal.
const CATCH_UP_MAX: Duration = Duration::from_secs(60);

/// How long one partition of one replica may take to be read.
const READ_MAX: Duration = Duration::from_secs(120);

/// Times that a read of all replicas is begun again because a leader changed meanwhile.
const READS_MAX: u32 = 10;

/// Reads every replica and judges. Nobody writes. Gives the ends of the partitions.
///
/// # Errors
/// The replicas do not become equal, or cannot be read. What is wrong with what was read is in
/// the verdict.
pub(crate) async fn settle(
    cluster: &mut Cluster,
    scene: &Scene,
    voice: Voice,
) -> anyhow::Result<(Verdict, Vec<u64>)> {
    cluster.heal()?;
    let begin = Instant::now();
    cluster.healthy(CATCH_UP_MAX).await?;
    voice.say_if_long("  everything is well", begin);
    let round = scene.id();
    for _ in 0..READS_MAX {
        let begin = Instant::now();
        let before = cluster.caught_up(CATCH_UP_MAX).await?;
        voice.say_if_long("  replicas are level", begin);
        let begin = Instant::now();
        let (history, ends) = read_all(cluster, scene, round).await?;
        voice.say_if_long("  replicas are read", begin);
        // A change of leader adds an entry, and what was left open may come with it. Then the
        // replicas were not read at one moment.
        if cluster.level().await.is_ok_and(|after| after == before) {
            scene.recorder.add_all(history);
            return Ok((scene.recorder.check(), ends));
        }
    }
    bail!("the logs grew during each of {READS_MAX} full reads, although nobody writes")
}

async fn read_all(
    cluster: &Cluster,
    scene: &Scene,
    round: u32,
) -> anyhow::Result<(Vec<Event>, Vec<u64>)> {
    let mut history = Vec::new();
    let mut ends = Vec::new();
    for direct in cluster.direct() {
        let (reader, replica) = (scene.id(), direct.node_id);
        ends.clear();
        for partition in 0..scene.partitions {
            history.push(Event::FinalOpened { reader, partition, round, replica });
            let end = read_one(&direct, reader, partition, &mut history)
                .await
                .with_context(|| format!("read partition {partition} of node {replica}"))?;
            ends.push(end);
        }
    }
    Ok((history, ends))
}

/// Reads one partition of one replica to its high watermark, which it gives.
async fn read_one(
    direct: &Direct,
    reader: u32,
    partition: u32,
    history: &mut Vec<Event>,
) -> anyhow::Result<u64> {
    let deadline = Instant::now() + READ_MAX;
    let mut offset = 0;
    loop {
        let read = match direct.fetch((TOPIC, partition), offset, Duration::ZERO).await {
            Ok(read) => read,
            Err(FetchError::Said(error)) if is_out_of_range(&error) => {
                // The verdict says so; the log ends here for this reader.
                history.push(Event::OutOfRange { reader, partition, offset });
                history.push(Event::FinalEnded { reader, partition, high_watermark: offset });
                return Ok(offset);
            }
            Err(error) if Instant::now() > deadline => bail!("{error}"),
            Err(_) => {
                sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let high_watermark = read.watermarks.unwrap_or_default().high_watermark;
        let (told, end) = events(reader, partition, &read.batches, offset);
        let is_foreign = told.iter().any(|event| matches!(event, Event::Foreign { .. }));
        history.extend(told);
        // Nothing comes although there should be more: the checker sees the gap.
        let is_stuck = end == offset && Instant::now() > deadline;
        if end >= high_watermark || is_foreign || is_stuck {
            history.push(Event::FinalEnded { reader, partition, high_watermark });
            return Ok(end);
        }
        offset = end;
    }
}
