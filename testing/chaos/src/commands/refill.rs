//! `refill`: keeps a node away while the others write and purge what it lacks.
//!
//! It measures how fast the node then fetches the records, and the ack times of writers meanwhile
//! compared with before.

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

use super::CommonArgs;
use super::test_bed::{READY_MAX, TestBed};
use crate::logger::Logger;
use crate::workload::{TOPIC, WorkloadShape};

const LOG_KIB: u64 = 64 << 10;

const FILL_WRITERS: u64 = 4;

/// Batch of the measured writers.
const LIVE_RECORDS: usize = 100;
const LIVE_RECORD_BYTES: usize = 1024;

/// Time for which the writers are measured before the node returns.
const ALONE: Duration = Duration::from_secs(10);

const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Options of `refill`.
#[derive(Debug, Clone, Args)]
pub struct RefillArgs {
    /// Cluster, seed and limits.
    #[command(flatten)]
    pub common: CommonArgs,

    /// GiB that the node lacks
    #[arg(long, default_value_t = 2)]
    pub gib: u64,

    /// KiB of each missing batch, which has a single record
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub batch_kib: u64,

    /// Concurrent writers with one batch of 100 KiB in flight each
    #[arg(long, default_value_t = 2)]
    pub writers: u64,

    /// Batches per second of each writer
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    pub pace: u64,

    /// Kill the node when it has fetched half; it must resume there
    #[arg(long)]
    pub kill: bool,
}

/// Bytes that a kill may lose per shard: a segment and what is not in it yet.
const LOST_BYTES_MAX: u64 = 24 << 20;

pub(super) async fn run(mut args: RefillArgs, program: PathBuf) -> anyhow::Result<()> {
    args.common.log_kib.get_or_insert(LOG_KIB);
    let logger = Logger::new(false);
    let mut test_bed =
        TestBed::start(&args.common, program, logger, WorkloadShape::default(), false).await?;
    let result = execute(&args, &mut test_bed).await;
    test_bed.end(result).await
}

async fn execute(args: &RefillArgs, test_bed: &mut TestBed) -> anyhow::Result<()> {
    ensure!(test_bed.cluster.minority() > 0, "a single node has no peer to fetch records from");
    let client = test_bed.context.client()?;
    let leader = client.route(TOPIC, 0).await?.node_id;
    let ids = test_bed.cluster.ids();
    let away = ids.into_iter().find(|id| *id != leader).context("no other node")?;
    let had = test_bed.cluster.last_indexes(away).await?;
    test_bed.cluster.terminate(away).await?;
    let begin = Instant::now();
    let shards = fill(args, test_bed, &client.producer(ProducerOptions::default())).await?;
    test_bed.logger.log(format_args!("wrote {} GiB in {:?}", args.gib, begin.elapsed()));
    let had = had.into_iter().filter(|(shard, _)| shards.contains(shard)).collect();
    test_bed.wait_until_purged(&had).await?;

    let (stop, stopped) = watch::channel(false);
    let (times, mut received) = mpsc::unbounded_channel();
    let mut writers = JoinSet::new();
    for writer in 0..args.writers {
        let producer = client.producer(ProducerOptions::default());
        let partition = u32::try_from(writer % u64::from(test_bed.context.partitions))?;
        writers.spawn(live(producer, partition, args.pace, times.clone(), stopped.clone()));
    }
    sleep(ALONE).await;
    log(test_bed.logger, "alone", take_times(&mut received));
    test_bed.cluster.start_node(away)?;
    if args.kill {
        kill(args, test_bed, away).await?;
    }
    let fetched = follow(test_bed, away).await?;
    log(test_bed.logger, "meanwhile", take_times(&mut received));
    stop.send_replace(true);
    while let Some(writer) = writers.join_next().await {
        writer??;
    }
    test_bed.cluster.wait_until_healthy(READY_MAX).await?;
    let (bytes, took) = fetched;
    test_bed.logger.log(format_args!(
        "node {away} fetched {bytes} bytes in {:.1} s: {:.0} MB/s",
        took.as_secs_f64(),
        bytes as f64 / took.as_secs_f64() / 1e6
    ));
    Ok(())
}

/// Writes what the node will lack and returns the shards.
async fn fill(
    args: &RefillArgs,
    test_bed: &TestBed,
    producer: &Producer,
) -> anyhow::Result<Vec<u32>> {
    let partitions = test_bed.context.partitions;
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
    test_bed.shards().await
}

fn batch(count: usize, bytes: usize) -> Arc<Vec<Record>> {
    let record = Record { value: Some(vec![7; bytes].into()), ..Record::default() };
    Arc::new(vec![record; count])
}

/// Writes batches at a fixed rate, and reports how long each took from its scheduled time.
async fn live(
    producer: Producer,
    partition: u32,
    pace: u64,
    times: mpsc::UnboundedSender<Duration>,
    stopped: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let records = batch(LIVE_RECORDS, LIVE_RECORD_BYTES);
    let mut tick = interval(Duration::from_nanos(1_000_000_000 / pace));
    tick.set_missed_tick_behavior(MissedTickBehavior::Burst);
    while !*stopped.borrow() {
        let due = tick.tick().await;
        producer.append(TOPIC, partition, &*records).await?;
        // Ignored: the receiver is gone when the measurement is over.
        let _ = times.send(due.elapsed());
    }
    Ok(())
}

/// Bytes fetched by one shard, over several snapshots: while it fetches for one, the others may
/// purge the entries after it.
#[derive(Default)]
struct FetchedBytes {
    earlier: u64,
    now: u64,
}

impl FetchedBytes {
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

/// Follows a node until it has caught up. Returns the bytes fetched and the time taken.
async fn follow(test_bed: &mut TestBed, node: u64) -> anyhow::Result<(u64, Duration)> {
    let node_client =
        test_bed.cluster.node_clients().into_iter().find(|node_client| node_client.node_id == node);
    let node_client = node_client.context("the node is not in the cluster")?;
    let (mut begun, mut fetched_by_shard) = (None, BTreeMap::<u32, FetchedBytes>::new());
    while !test_bed.left().is_zero() {
        test_bed.cluster.check_running()?;
        if let Ok(status) = node_client.status().await {
            let now = Instant::now();
            let mut is_fetching = false;
            for shard in status.shards {
                if let Some(fetching) = shard.fetching {
                    is_fetching = true;
                    fetched_by_shard
                        .entry(shard.shard_id)
                        .or_default()
                        .note(fetching.fetched_bytes);
                }
            }
            match begun {
                None if is_fetching => begun = Some(now),
                Some(begun) if !is_fetching => {
                    return Ok((
                        fetched_by_shard.values().map(FetchedBytes::bytes).sum(),
                        now - begun,
                    ));
                }
                _ => {}
            }
        }
        sleep(POLL_INTERVAL).await;
    }
    let bytes: u64 = fetched_by_shard.values().map(FetchedBytes::bytes).sum();
    bail!("STUCK: node {node} has fetched {bytes} bytes")
}

/// Kills a node that has fetched half of what it lacks, and checks what it has after the restart.
async fn kill(args: &RefillArgs, test_bed: &mut TestBed, node: u64) -> anyhow::Result<()> {
    let before = fetched(test_bed, node, (args.gib << 30) / 2).await?;
    test_bed.cluster.kill(&[node]).await?;
    test_bed.cluster.start_node(node)?;
    let after = fetched(test_bed, node, 1).await?;
    test_bed.logger.log(format_args!("killed at {before} bytes; it resumes at {after}"));
    let shards = test_bed.shards().await?.len() as u64;
    ensure!(after + shards * LOST_BYTES_MAX >= before, "LOST: {after} of {before} bytes are left");
    Ok(())
}

/// Waits until a node has fetched at least this many bytes, and returns the number.
async fn fetched(test_bed: &mut TestBed, node: u64, least: u64) -> anyhow::Result<u64> {
    let node_client =
        test_bed.cluster.node_clients().into_iter().find(|node_client| node_client.node_id == node);
    let node_client = node_client.context("the node is not in the cluster")?;
    while !test_bed.left().is_zero() {
        test_bed.cluster.check_running()?;
        if let Ok(status) = node_client.status().await {
            let fetching = status.shards.into_iter().filter_map(|shard| shard.fetching);
            let bytes: u64 = fetching.map(|fetching| fetching.fetched_bytes).sum();
            if bytes >= least {
                return Ok(bytes);
            }
        }
        sleep(POLL_INTERVAL).await;
    }
    bail!("STUCK: node {node} did not fetch {least} bytes")
}

fn take_times(received: &mut mpsc::UnboundedReceiver<Duration>) -> Vec<Duration> {
    let mut times = Vec::new();
    while let Ok(time) = received.try_recv() {
        times.push(time);
    }
    times.sort_unstable();
    times
}

fn log(logger: Logger, when: &str, times: Vec<Duration>) {
    let at = |part: usize| {
        let index = (times.len() * part).div_ceil(1000).saturating_sub(1);
        times.get(index).map_or(0.0, |time| time.as_secs_f64() * 1e3)
    };
    logger.log(format_args!(
        "writers {when}: {} batches, p50 {:.2} ms, p99 {:.2} ms, p99.9 {:.2} ms",
        times.len(),
        at(500),
        at(990),
        at(999)
    ));
}
