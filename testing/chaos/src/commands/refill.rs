//! `refill`: a node is away while the others write and purge what it lacks. What is measured is how
//! fast it then gets the records, and the acks of writers beside it, compared with those before.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;
use helix_client::{Producer, ProducerOptions};
use helix_proto::log::v1::Record;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

use super::Common;
use super::stage::{READY_MAX, Stage};
use crate::voice::Voice;
use crate::workload::{Shape, TOPIC};

const LOG_KIB: u64 = 64 << 10;

const FILL_WRITERS: u64 = 4;

/// Batches of the writers that are measured.
const LIVE_RECORDS: usize = 100;
const LIVE_RECORD_BYTES: usize = 1024;

/// How long the writers are measured alone.
const ALONE: Duration = Duration::from_secs(10);

const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Options of `refill`.
#[derive(Debug, Clone, Args)]
pub struct RefillArgs {
    /// Cluster, seed and bounds.
    #[command(flatten)]
    pub common: Common,

    /// GiB that the node lacks
    #[arg(long, default_value_t = 2)]
    pub gib: u64,

    /// KiB of each batch that it lacks, of a single record
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub batch_kib: u64,

    /// Writers beside it, each with one batch of 100 KiB under way
    #[arg(long, default_value_t = 2)]
    pub writers: u64,

    /// Batches that each of them writes in a second
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    pub pace: u64,

    /// Kill the node when it has half of what it lacks: it has to go on from there
    #[arg(long)]
    pub kill: bool,
}

/// What a kill may cost of each shard: a segment, and what is not in it yet.
const LOST_BYTES_MAX: u64 = 24 << 20;

pub(super) async fn run(mut args: RefillArgs, program: PathBuf) -> anyhow::Result<()> {
    args.common.log_kib.get_or_insert(LOG_KIB);
    let voice = Voice::new(false);
    let mut stage = Stage::set(&args.common, program, voice, Shape::default(), false).await?;
    let result = play(&args, &mut stage).await;
    stage.end(result).await
}

async fn play(args: &RefillArgs, stage: &mut Stage) -> anyhow::Result<()> {
    ensure!(stage.cluster.minority() > 0, "a single node has nobody to get records from");
    let client = stage.scene.client()?;
    let leader = client.route(TOPIC, 0).await?.node_id;
    let ids = stage.cluster.ids();
    let away = ids.into_iter().find(|id| *id != leader).context("no other node")?;
    let had = stage.cluster.last_indexes(away).await?;
    stage.cluster.terminate(away).await?;
    let begin = Instant::now();
    let shards = fill(args, stage, &client.producer(ProducerOptions::default())).await?;
    stage.voice.say(format_args!("{} GiB written in {:?}", args.gib, begin.elapsed()));
    let had = had.into_iter().filter(|(shard, _)| shards.contains(shard)).collect();
    stage.purged(&had).await?;

    let (stop, stopped) = watch::channel(false);
    let (tell, mut told) = mpsc::unbounded_channel();
    let mut writers = JoinSet::new();
    for writer in 0..args.writers {
        let producer = client.producer(ProducerOptions::default());
        let partition = u32::try_from(writer % u64::from(stage.scene.partitions))?;
        writers.spawn(live(producer, partition, args.pace, tell.clone(), stopped.clone()));
    }
    sleep(ALONE).await;
    say(stage.voice, "alone", drain(&mut told));
    stage.cluster.start_node(away)?;
    if args.kill {
        kill(args, stage, away).await?;
    }
    let fetched = follow(stage, away).await?;
    say(stage.voice, "meanwhile", drain(&mut told));
    stop.send_replace(true);
    while let Some(writer) = writers.join_next().await {
        writer??;
    }
    stage.cluster.healthy(READY_MAX).await?;
    let (bytes, took) = fetched;
    stage.voice.say(format_args!(
        "node {away} got {bytes} bytes in {:.1} s: {:.0} MB/s",
        took.as_secs_f64(),
        bytes as f64 / took.as_secs_f64() / 1e6
    ));
    Ok(())
}

/// Writes what the node will lack; the shards that it went to.
async fn fill(args: &RefillArgs, stage: &Stage, producer: &Producer) -> anyhow::Result<Vec<u32>> {
    let partitions = stage.scene.partitions;
    let batches = (args.gib << 30) / (args.batch_kib << 10);
    let records = batch(1, usize::try_from(args.batch_kib << 10)?);
    let mut writers = JoinSet::new();
    for writer in 0..FILL_WRITERS {
        let (producer, records) = (producer.clone(), records.clone());
        writers.spawn(async move {
            for number in (writer..batches).step_by(FILL_WRITERS as usize) {
                let partition = u32::try_from(number % u64::from(partitions))?;
                producer.append(TOPIC, partition, &*records).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(writer) = writers.join_next().await {
        writer??;
    }
    stage.shards().await
}

fn batch(count: usize, bytes: usize) -> Arc<Vec<Record>> {
    let record = Record { value: Some(vec![7; bytes].into()), ..Record::default() };
    Arc::new(vec![record; count])
}

/// One batch after the other, at a pace; tells how long each took from when it was due.
async fn live(
    producer: Producer,
    partition: u32,
    pace: u64,
    tell: mpsc::UnboundedSender<Duration>,
    stopped: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let records = batch(LIVE_RECORDS, LIVE_RECORD_BYTES);
    let mut tick = interval(Duration::from_nanos(1_000_000_000 / pace));
    tick.set_missed_tick_behavior(MissedTickBehavior::Burst);
    while !*stopped.borrow() {
        let due = tick.tick().await;
        producer.append(TOPIC, partition, &*records).await?;
        // Ignored: nobody measures any more.
        let _ = tell.send(due.elapsed());
    }
    Ok(())
}

/// What one shard has fetched, over all the snapshots that it takes until it has everything: while
/// it fetches for one of them the others may purge what comes behind that.
#[derive(Default)]
struct Got {
    earlier: u64,
    now: u64,
}

impl Got {
    fn note(&mut self, bytes: u64) {
        if bytes < self.now {
            self.earlier += self.now;
        }
        self.now = bytes;
    }

    fn bytes(&self) -> u64 {
        self.earlier + self.now
    }
}

/// Follows a node until it has what it lacked: how many bytes that was, and how long it took.
async fn follow(stage: &mut Stage, node: u64) -> anyhow::Result<(u64, Duration)> {
    let direct = stage.cluster.direct().into_iter().find(|direct| direct.node_id == node);
    let direct = direct.context("only nodes of the cluster are named")?;
    let (mut begun, mut got) = (None, BTreeMap::<u32, Got>::new());
    while !stage.left().is_zero() {
        stage.cluster.none_has_ended()?;
        if let Ok(status) = direct.status().await {
            let now = Instant::now();
            let mut is_fetching = false;
            for shard in status.shards {
                if let Some(fetching) = shard.fetching {
                    is_fetching = true;
                    got.entry(shard.shard_id).or_default().note(fetching.fetched_bytes);
                }
            }
            match begun {
                None if is_fetching => begun = Some(now),
                Some(begun) if !is_fetching => {
                    return Ok((got.values().map(Got::bytes).sum(), now - begun));
                }
                _ => {}
            }
        }
        sleep(LOOK_EVERY).await;
    }
    let bytes: u64 = got.values().map(Got::bytes).sum();
    bail!("STUCK: node {node} has fetched {bytes} bytes")
}

/// Kills a node that has fetched half of what it lacks, and looks at what it has when it is back.
async fn kill(args: &RefillArgs, stage: &mut Stage, node: u64) -> anyhow::Result<()> {
    let before = fetched(stage, node, (args.gib << 30) / 2).await?;
    stage.cluster.kill(&[node]).await?;
    stage.cluster.start_node(node)?;
    let after = fetched(stage, node, 1).await?;
    stage.voice.say(format_args!("killed with {before} bytes; it goes on with {after}"));
    let shards = stage.shards().await?.len() as u64;
    ensure!(after + shards * LOST_BYTES_MAX >= before, "LOST: it has {after} of {before} bytes");
    Ok(())
}

/// Waits until a node has fetched so many bytes; how many they are.
async fn fetched(stage: &mut Stage, node: u64, least: u64) -> anyhow::Result<u64> {
    let direct = stage.cluster.direct().into_iter().find(|direct| direct.node_id == node);
    let direct = direct.context("only nodes of the cluster are named")?;
    while !stage.left().is_zero() {
        stage.cluster.none_has_ended()?;
        if let Ok(status) = direct.status().await {
            let fetching = status.shards.into_iter().filter_map(|shard| shard.fetching);
            let bytes: u64 = fetching.map(|fetching| fetching.fetched_bytes).sum();
            if bytes >= least {
                return Ok(bytes);
            }
        }
        sleep(LOOK_EVERY).await;
    }
    bail!("STUCK: node {node} does not fetch {least} bytes")
}

fn drain(told: &mut mpsc::UnboundedReceiver<Duration>) -> Vec<Duration> {
    let mut times = Vec::new();
    while let Ok(time) = told.try_recv() {
        times.push(time);
    }
    times.sort_unstable();
    times
}

fn say(voice: Voice, when: &str, times: Vec<Duration>) {
    let at = |part: usize| {
        let place = (times.len() * part).div_ceil(1000).saturating_sub(1);
        times.get(place).map_or(0.0, |time| time.as_secs_f64() * 1e3)
    };
    voice.say(format_args!(
        "writers {when}: {} batches, p50 {:.2} ms, p99 {:.2} ms, p99.9 {:.2} ms",
        times.len(),
        at(500),
        at(990),
        at(999)
    ));
}
