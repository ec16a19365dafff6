//! `failover`: a leader is killed under one client with one batch per partition under way. What is
//! measured is what an application sees: from the kill to the ack of a batch that it handed over
//! after the leader was dead. Such a batch waits for the one before it, so this is no flattery.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use helix_client::{Client, Producer, ProducerOptions};
use helix_proto::log::v1::Record;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use serde::Serialize;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::Common;
use super::stage::{READY_MAX, Stage};
use crate::voice::Voice;
use crate::workload::{Shape, TOPIC};

/// A partition without an ack for this long after a kill is a failure.
const OUTAGE_MAX: Duration = Duration::from_secs(30);

/// What the client writes between kills, so that nothing is cold.
const WARM: Duration = Duration::from_millis(500);

/// Options of `failover`.
#[derive(Debug, Clone, Args)]
pub struct FailoverArgs {
    /// Cluster, seed and bounds.
    #[command(flatten)]
    pub common: Common,

    /// Times that a leader is killed
    #[arg(long, default_value_t = 20)]
    pub kills: u32,

    /// Give the figures as JSON on standard output
    #[arg(long)]
    pub json: bool,
}

/// Figures in milliseconds.
#[derive(Debug, Serialize)]
struct Figures {
    nodes: u64,
    kills: u32,
    /// Partitions that lost their leader, over all kills.
    samples: usize,
    p50_ms: u128,
    p99_ms: u128,
    max_ms: u128,
    /// Batches of this client that failed.
    errors: u64,
    /// Partitions that had not lost their leader: longest time between two acks around a kill.
    others_max_ms: u128,
}

/// The last ack of a partition: when its batch was handed over, and when the ack came.
#[derive(Debug, Clone, Copy)]
struct Heard {
    sent: Instant,
    at: Instant,
    errors: u64,
    longest: Duration,
}

pub(super) async fn run(args: FailoverArgs, program: PathBuf) -> anyhow::Result<()> {
    let voice = Voice::new(args.json);
    let shape = Shape::default();
    let mut stage = Stage::set(&args.common, program, voice, shape, false).await?;
    let result = play(&args, &mut stage).await;
    stage.end(result).await
}

async fn play(args: &FailoverArgs, stage: &mut Stage) -> anyhow::Result<()> {
    let mut rng = StdRng::seed_from_u64(args.common.seed);
    let client = stage.scene.client()?;
    let shards = shards(stage, &client).await?;
    let producer = client.producer(ProducerOptions::default());
    let (stop, stopped) = watch::channel(false);
    let mut writers = JoinSet::new();
    let mut heard = Vec::new();
    for partition in 0..stage.scene.partitions {
        let now = Instant::now();
        let first = Heard { sent: now, at: now, errors: 0, longest: Duration::ZERO };
        let (tell, ear) = watch::channel(first);
        heard.push(ear);
        writers.spawn(write(producer.clone(), partition, tell, stopped.clone()));
    }
    let (mut outages, mut others) = (Vec::new(), Duration::ZERO);
    let mut kills = 0;
    while kills < args.kills && !stage.is_over() {
        sleep(WARM).await;
        let leaders = stage.cluster.leaders().await;
        let led: Vec<u64> = shards.iter().filter_map(|s| Some(leaders.get(s)?.0)).collect();
        let Some(victim) = led.choose(&mut rng).copied() else { continue };
        let is_hit = |shard: &u32| leaders.get(shard).is_some_and(|(node, _)| *node == victim);
        let killed = Instant::now();
        stage.cluster.kill(&[victim]).await?;
        let dead = Instant::now();
        kills += 1;
        let mut lost = Vec::new();
        for (shard, ear) in shards.iter().zip(&mut heard) {
            let next = timeout(OUTAGE_MAX, ear.wait_for(|heard| heard.sent >= dead)).await;
            let Ok(Ok(heard)) = next else {
                bail!("NO PROGRESS: no ack for {OUTAGE_MAX:?} after node {victim} was killed");
            };
            if is_hit(shard) {
                lost.push(heard.at - killed);
            } else {
                others = others.max(heard.at - heard.sent);
            }
        }
        let longest = lost.iter().max().copied().unwrap_or_default();
        stage.voice.say(format_args!(
            "{kills}: killed {victim}, {} partitions; longest without an ack {} ms",
            lost.len(),
            longest.as_millis()
        ));
        outages.extend(lost);
        stage.cluster.start_node(victim)?;
        stage.cluster.healthy(READY_MAX).await?;
    }
    stop.send_replace(true);
    while let Some(writer) = writers.join_next().await {
        writer?;
    }
    let errors = heard.iter().map(|ear| ear.borrow().errors).sum();
    say(args, stage, kills, &mut outages, errors, others)
}

/// The shard of each partition.
async fn shards(stage: &Stage, client: &Client) -> anyhow::Result<Vec<u32>> {
    let mut shards = Vec::new();
    for partition in 0..stage.scene.partitions {
        shards.push(client.route(TOPIC, partition).await?.shard_id);
    }
    Ok(shards)
}

/// One batch after the other to one partition.
async fn write(
    producer: Producer,
    partition: u32,
    tell: watch::Sender<Heard>,
    stopped: watch::Receiver<bool>,
) {
    let value = Some(vec![7; 100].into());
    let records = Arc::new(vec![Record { value, ..Record::default() }]);
    while !*stopped.borrow() {
        let sent = Instant::now();
        let result = producer.append(TOPIC, partition, &*records).await;
        tell.send_modify(|heard| match result {
            Ok(_) => {
                let at = Instant::now();
                let longest = heard.longest.max(at - heard.at);
                *heard = Heard { sent, at, longest, ..*heard };
            }
            Err(_) => heard.errors += 1,
        });
        // Without a pause one client would take both cores of a small machine.
        sleep(Duration::from_millis(1)).await;
    }
}

fn say(
    args: &FailoverArgs,
    stage: &Stage,
    kills: u32,
    outages: &mut [Duration],
    errors: u64,
    others: Duration,
) -> anyhow::Result<()> {
    outages.sort_unstable();
    let at = |part: usize| {
        let place = (outages.len() * part).div_ceil(100).saturating_sub(1);
        outages.get(place).map_or(0, Duration::as_millis)
    };
    let figures = Figures {
        nodes: args.common.nodes,
        kills,
        samples: outages.len(),
        p50_ms: at(50),
        p99_ms: at(99),
        max_ms: at(100),
        errors,
        others_max_ms: others.as_millis(),
    };
    if args.json {
        println!("{}", serde_json::to_string(&figures)?);
    } else {
        stage.voice.say(format_args!(
            "time to the next ack over {} partitions that lost their leader in {kills} kills: \
             p50 {} ms, p99 {} ms, max {} ms; {errors} errors; slowest ack of the other \
             partitions {} ms",
            figures.samples, figures.p50_ms, figures.p99_ms, figures.max_ms, figures.others_max_ms
        ));
    }
    Ok(())
}
