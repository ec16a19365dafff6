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
use crate::workload::{Place, Scene, is_out_of_range};

/// How long healed replicas may take to become equal.
const CATCH_UP_MAX: Duration = Duration::from_secs(60);

/// How long one partition of one replica may take to be read.
const READ_MAX: Duration = Duration::from_secs(120);

/// How long a read of all replicas is begun again because the logs have grown meanwhile.
const REST_MAX: Duration = Duration::from_secs(120);

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
    let deadline = Instant::now() + REST_MAX;
    while Instant::now() < deadline {
        let begin = Instant::now();
        let before = cluster.caught_up(CATCH_UP_MAX).await?;
        voice.say_if_long("  replicas are level", begin);
        let begin = Instant::now();
        let (history, ends) = read_all(cluster, scene, round).await?;
        voice.say_if_long("  replicas are read", begin);
        // A change of leader adds an entry, and what was left open may come with it; so does
        // retention. Then the replicas were not read at one moment.
        if cluster.level().await.is_ok_and(|after| after == before) {
            scene.at_rest();
            scene.recorder.add_all(history);
            return Ok((scene.recorder.check()?, ends));
        }
    }
    bail!("STUCK: the logs grow during each full read for {REST_MAX:?}, although nobody writes")
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
        for (partition, place) in scene.places() {
            history.push(Event::FinalOpened { reader, partition, round, replica });
            let what = FinalRead { direct: &direct, scene, reader, partition, place };
            let Place { topic, partition, .. } = place;
            let end = what.to_end(&mut history).await.with_context(|| {
                format!("read partition {partition} of {topic} of node {replica}")
            })?;
            ends.push(end);
        }
    }
    Ok((history, ends))
}

/// A read of one partition of one replica.
struct FinalRead<'a> {
    direct: &'a Direct,
    scene: &'a Scene,
    reader: u32,
    /// Its number.
    partition: u32,
    place: Place,
}

impl FinalRead<'_> {
    /// Reads from the log's start to the high watermark, which it gives.
    async fn to_end(&self, history: &mut Vec<Event>) -> anyhow::Result<u64> {
        let Self { reader, partition, place, .. } = *self;
        let deadline = Instant::now() + READ_MAX;
        let mut offset = 0;
        let mut has_begun = false;
        loop {
            let asked = (place.topic, place.partition);
            let read = match self.direct.fetch(asked, offset, Duration::ZERO).await {
                Ok(read) => read,
                Err(FetchError::Said(error)) if is_out_of_range(&error) => {
                    let log_start = error.watermarks.unwrap_or_default().log_start_offset;
                    if !has_begun && log_start > offset {
                        offset = log_start;
                        self.scene.starts_at(partition, offset);
                        history.push(Event::FinalStarts { reader, partition, offset });
                        has_begun = true;
                        continue;
                    }
                    // The verdict says so; the log ends here for this reader. If it has moved on
                    // while it was read, all of this is read again.
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
            has_begun = true;
            let high_watermark = read.watermarks.unwrap_or_default().high_watermark;
            let (told, end) = events(reader, partition, &read.batches, offset);
            let is_foreign = told.iter().any(|event| matches!(event, Event::Foreign { .. }));
            history.extend(told);
            self.scene.found(partition, &read.batches);
            // Nothing comes although there should be more: the checker sees the gap.
            let is_stuck = end == offset && Instant::now() > deadline;
            if end >= high_watermark || is_foreign || is_stuck {
                history.push(Event::FinalEnded { reader, partition, high_watermark });
                return Ok(end);
            }
            offset = end;
        }
    }
}
