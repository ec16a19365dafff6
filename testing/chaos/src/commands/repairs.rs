//! `repairs`: flips single bits in sealed segments of running nodes. Measures the time until they
//! are repaired, and the waits of appends meanwhile.
//!
//! Three scenarios on one cluster, with each of the given sizes of the retained log:
//!
//! - a bit of a follower, while another voter still fetches missed entries;
//! - a bit of the leader, and one of a follower;
//! - a bit of the leader, while another voter is being replaced.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;
use helix_client::{Client, NewTopic, ProducerOptions};
use helix_proto::log::v1::Record;
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::ack_probe::{AckProbe, AckTimes, PROBE_TOPIC};
use super::test_bed::{READY_MAX, TestBed, TestBedOptions};
use super::{CommonArgs, parse_duration};
use crate::logger::Logger;
use crate::node_client::NodeClient;
use crate::operator;
use crate::segment_damage;
use crate::workload::{TOPIC, TopicPlan, WorkloadShape};

/// Partitions of the probe, one in each data shard.
const PROBE_PARTITIONS: u32 = 3;

const FILL_WRITERS: u64 = 4;

/// Bytes of each batch of the fill, which has a single record.
const BATCH_BYTES: u64 = 100 << 10;

/// Time to write before each scenario, so that connections are warm.
const WARM: Duration = Duration::from_secs(1);

const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Options of `repairs`.
#[derive(Debug, Clone, Args)]
pub struct RepairsArgs {
    /// Cluster, seed and limits; the topic has one partition.
    #[command(flatten)]
    pub common: CommonArgs,

    /// MiB of log before the last scenario
    #[arg(long, default_value_t = 1024)]
    pub mib: u64,

    /// MiB of log that nodes keep for lagging replicas; one run for each
    #[arg(long, value_delimiter = ',', default_values_t = [16, 4096])]
    pub catch_up_mib: Vec<u64>,

    /// Fail if a repair takes longer ("15s")
    #[arg(long, default_value = "15s", value_parser = parse_duration)]
    pub repair_max: Duration,

    /// Fail if a partition is without an ack for longer ("2s")
    #[arg(long, default_value = "2s", value_parser = parse_duration)]
    pub gap_max: Duration,
}

pub(super) async fn run(args: RepairsArgs, program: PathBuf) -> anyhow::Result<()> {
    let logger = Logger::new(false);
    for mib in &args.catch_up_mib {
        let keep = args.common.keep.as_ref().map(|dir| dir.join(format!("catch-up-{mib}")));
        let common = CommonArgs { topic_partitions: 1, keep, ..args.common.clone() };
        let options = TestBedOptions {
            topics: vec![TopicPlan::kept(1)],
            has_client_proxies: false,
            disk_bytes: None,
            catch_up_kib: Some(mib << 10),
        };
        let shape = WorkloadShape::default();
        logger.log(format_args!("--catch-up-bytes {mib}MiB"));
        let mut test_bed =
            TestBed::start_with(&common, program.clone(), logger, shape, options).await?;
        let result = execute(&args, *mib, &mut test_bed).await;
        test_bed.end(result).await?;
    }
    Ok(())
}

/// Roles of the nodes in the shard of the topic.
#[derive(Debug, Clone, Copy)]
struct Roles {
    shard: u32,
    leader: u64,
    follower: u64,
    other: u64,
}

async fn roles(test_bed: &TestBed, client: &Client) -> anyhow::Result<Roles> {
    let route = client.route(TOPIC, 0).await?;
    let leaders = test_bed.cluster.leaders().await;
    let leader = leaders.get(&route.shard_id).context("the shard has no leader")?.0;
    let mut others = test_bed.cluster.ids().into_iter().filter(|id| *id != leader);
    let (follower, other) = (others.next(), others.next());
    Ok(Roles {
        shard: route.shard_id,
        leader,
        follower: follower.context("no follower")?,
        other: other.context("no second follower")?,
    })
}

async fn execute(args: &RepairsArgs, catch_up: u64, test_bed: &mut TestBed) -> anyhow::Result<()> {
    ensure!(test_bed.cluster.ids().len() == 3, "the scenarios need three nodes");
    let mut rng = StdRng::seed_from_u64(args.common.seed);
    let client = test_bed.context.client()?;
    client.admin().create_topic(&NewTopic::new(PROBE_TOPIC, PROBE_PARTITIONS)).await?;
    let batches = (args.mib << 20) / BATCH_BYTES;
    fill(&client, batches / 2).await?;
    test_bed.cluster.wait_until_healthy(READY_MAX).await?;

    // A voter is away for longer than the log is kept, and fetches.
    let nodes = roles(test_bed, &client).await?;
    let had = test_bed.cluster.last_indexes(nodes.other).await?;
    test_bed.cluster.terminate(nodes.other).await?;
    fill(&client, batches - batches / 2).await?;
    if catch_up < args.mib / 4 {
        let had = had.into_iter().filter(|(shard, _)| *shard == nodes.shard).collect();
        test_bed.wait_until_purged(&had).await?;
    }
    let mut gaps = AckProbe::start(&client, PROBE_TOPIC, PROBE_PARTITIONS);
    sleep(WARM).await;
    test_bed.cluster.start_node(nodes.other)?;
    let lag = wait_until_behind(test_bed, nodes).await?;
    let flips = [(nodes.follower, 0)];
    let what = format!("while node {} fetches ({lag})", nodes.other);
    flip_and_repair(args, test_bed, &gaps, nodes.shard, &flips, &what, &mut rng).await?;

    // Two replicas are damaged, one is whole.
    let nodes = roles(test_bed, &client).await?;
    let flips = [(nodes.leader, 1), (nodes.follower, 2)];
    flip_and_repair(args, test_bed, &gaps, nodes.shard, &flips, "in two replicas", &mut rng)
        .await?;

    // Another voter is replaced.
    let nodes = roles(test_bed, &client).await?;
    let lost = nodes.other;
    test_bed.cluster.kill(&[lost]).await?;
    test_bed.cluster.wipe(lost).await?;
    test_bed.cluster.start_node(lost)?;
    let admin = operator::admin(&test_bed.cluster)?;
    let change = operator::start_change(&admin, || admin.replace_node(lost, lost, "", false));
    let change = change.await?;
    let lag = wait_until_behind(test_bed, nodes).await?;
    let flips = [(nodes.leader, 3)];
    let what = format!("while node {lost} is being replaced ({lag})");
    flip_and_repair(args, test_bed, &gaps, nodes.shard, &flips, &what, &mut rng).await?;
    operator::wait_until_done(&admin, &change).await?;
    gaps.stop().await?;
    test_bed.cluster.wait_until_healthy(READY_MAX).await?;
    for node in test_bed.cluster.node_clients() {
        let read = read(&node, u64::MAX).await?;
        ensure!(read == batches, "node {} has {read} of {batches} records", node.node_id);
    }
    test_bed.logger.log(format_args!("all {batches} records are on every replica"));
    Ok(())
}

/// Flips one bit in each of these segments (node, age), lets reads meet them, and waits until all
/// are repaired and the cluster is healthy. Fails if it takes too long or appends wait too long.
async fn flip_and_repair(
    args: &RepairsArgs,
    test_bed: &mut TestBed,
    gaps: &AckProbe,
    shard: u32,
    flips: &[(u64, usize)],
    what: &str,
    rng: &mut StdRng,
) -> anyhow::Result<()> {
    sleep(WARM).await;
    let before = test_bed.cluster.metric(REPAIRED).await;
    gaps.take();
    let begin = Instant::now();
    for (node, age) in flips {
        let data = test_bed.cluster.data_dir(*node);
        let flipped = segment_damage::flip_sealed(&data, shard, *age, rng).await?;
        test_bed.logger.log(format_args!("flipped a bit of node {node} {what}: {flipped}"));
    }
    loop {
        test_bed.cluster.check_running()?;
        for (node, _) in flips {
            // Ignored: the damage is noted, and another read may get further.
            let _ = read(&test_bed.cluster.client_of(*node)?, MET_BYTES).await;
        }
        let repaired = test_bed.cluster.metric(REPAIRED).await - before;
        let damaged = test_bed.cluster.metric("helix_shard_damaged_ranges").await;
        if repaired >= flips.len() as u64 && damaged == 0 {
            break;
        }
        if begin.elapsed() > args.repair_max {
            bail!("NOT REPAIRED: {repaired} of {} after {:?}", flips.len(), args.repair_max);
        }
        sleep(POLL_INTERVAL).await;
    }
    let took = begin.elapsed();
    test_bed.cluster.wait_until_healthy(test_bed.left()).await?;
    let AckTimes { gap, errors, .. } = gaps.take();
    test_bed.logger.log(format_args!(
        "repaired {what} in {took:.2?}, healthy after {:.2?}; longest time without an ack \
         {gap:.2?}, {errors} errors",
        begin.elapsed()
    ));
    ensure!(gap <= args.gap_max, "no ack for {gap:?}, at most {:?} are allowed", args.gap_max);
    Ok(())
}

const REPAIRED: &str = "helix_shard_repaired_segments_total";

/// Bytes that a scenario reads so that a replica meets its damage: the oldest segments.
const MET_BYTES: u64 = 80 << 20;

/// Waits until a node responds and lacks entries. Describes how many.
async fn wait_until_behind(test_bed: &mut TestBed, nodes: Roles) -> anyhow::Result<String> {
    let (leader, other) =
        (test_bed.cluster.client_of(nodes.leader)?, test_bed.cluster.client_of(nodes.other)?);
    while !test_bed.left().is_zero() {
        test_bed.cluster.check_running()?;
        if let (Ok(leader), Ok(other)) = (leader.status().await, other.status().await) {
            let leader = leader.shards.iter().find(|it| it.shard_id == nodes.shard);
            let other = other.shards.iter().find(|it| it.shard_id == nodes.shard);
            if let (Some(leader), Some(other)) = (leader, other) {
                let lag = leader.last_index.saturating_sub(other.applied_index);
                let fetched = other.fetching.as_ref().map(|it| it.fetched_bytes);
                return Ok(format!("it lacks {lag} entries, fetched bytes {fetched:?}"));
            }
        }
        sleep(POLL_INTERVAL).await;
    }
    bail!("STUCK: node {} does not respond", nodes.other)
}

/// Writes batches to the topic.
async fn fill(client: &Client, batches: u64) -> anyhow::Result<()> {
    let value = Some(vec![7; usize::try_from(BATCH_BYTES)?].into());
    let records = Arc::new(vec![Record { value, ..Record::default() }]);
    let mut writers = JoinSet::new();
    for writer in 0..FILL_WRITERS {
        let producer = client.producer(ProducerOptions::default());
        let records = records.clone();
        writers.spawn(async move {
            for _ in (writer..batches).step_by(FILL_WRITERS as usize) {
                producer.append(TOPIC, 0, &*records).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(writer) = writers.join_next().await {
        writer??;
    }
    Ok(())
}

/// Reads the topic from a replica, about as many bytes. Returns the number of records.
async fn read(node: &NodeClient, bytes: u64) -> anyhow::Result<u64> {
    let (mut offset, mut left) = (0, bytes);
    loop {
        let records = node.fetch((TOPIC, 0), offset, Duration::ZERO).await;
        let records = records.map_err(|error| anyhow::anyhow!("{error}"))?;
        let counts = records.batches.iter().filter_map(|stored| stored.batch.as_ref());
        let read: u64 = counts.map(|batch| u64::from(batch.record_count)).sum();
        offset += read;
        left = left.saturating_sub(read * BATCH_BYTES);
        if read == 0 || left == 0 {
            return Ok(offset);
        }
    }
}
