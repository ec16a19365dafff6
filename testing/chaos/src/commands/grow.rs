//! `grow`: grows one node to three and five, replaces a lost disk, and shrinks to three without
//! the first node, all under load. With more than five nodes, shards get three replicas, which
//! spread, with `--kill` while nodes are killed. Then the shards are split, six nodes lead
//! partitions of the topic from before and every node some of a new one, and the added nodes are
//! removed again.
//!
//! Every log is purged before a node joins, so each new node has to fetch a snapshot and the
//! records. A client with one batch in flight in each partition measures ack times and the longest
//! time of a partition without an ack, step by step. Another program may run beside all of it.
//! Finally every replica is read and the history is checked.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use clap::Args;
use helix_client::{Client, NewTopic};
use tokio::time::sleep;

use super::ack_probe::{AckProbe, PROBE_TOPIC};
use super::beside::ProgramBeside;
use super::test_bed::TestBed;
use super::{CommonArgs, parse_duration};
use crate::cluster::NODES_MAX;
use crate::logger::Logger;
use crate::operator;
use crate::workload::{TOPIC, WorkloadShape};

/// Log that nodes keep; the load writes this much within seconds.
const LOG_KIB: u64 = 512;

/// Time of the first measurement.
const QUIET: Duration = Duration::from_secs(5);

/// Data shards after the splits.
const SHARDS: u32 = 12;

/// Nodes that lead partitions of the topic from before the splits, at least. Other topics share the
/// shards, so not each of nine nodes leads a shard with one of its twelve partitions.
const OLD_TOPIC_LEADERS: usize = 6;

/// Options of `grow`.
#[derive(Debug, Clone, Args)]
pub struct GrowArgs {
    /// Seed and limits; `--nodes` is ignored.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Kill the leader of the metadata shard during each change
    #[arg(long)]
    pub kill: bool,

    /// Nodes of the cluster at its largest
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(5..=NODES_MAX))]
    pub most: u64,

    /// Fail if a partition is without an ack for longer in a step ("1s")
    #[arg(long, value_parser = parse_duration)]
    pub pause_max: Option<Duration>,

    /// Command of the shell to run beside it; HELIX_ADDR has the nodes. It runs until its standard
    /// input is closed, and must then exit with 0. It is started again after replicas were compared
    #[arg(long)]
    pub beside: Option<String>,
}

/// Ack times of a client through the steps of a run, and the program beside it.
struct StepProbe {
    beside: Option<ProgramBeside>,
    client: Client,
    partitions: u32,
    probe: AckProbe,
    logger: Logger,
    /// p99 while nothing changed.
    quiet_p99: Duration,
    /// Longest time of a partition without an ack, and the step.
    longest: (Duration, String),
    errors: u64,
}

impl StepProbe {
    /// Starts to write, and measures a cluster in which nothing changes.
    async fn start(test_bed: &TestBed, args: &GrowArgs) -> anyhow::Result<Self> {
        let (client, logger) = (test_bed.context.client()?, test_bed.logger);
        let partitions = test_bed.context.partitions;
        client.admin().create_topic(&NewTopic::new(PROBE_TOPIC, partitions)).await?;
        let probe = AckProbe::start(&client, PROBE_TOPIC, partitions);
        // The first appends pay for connection setup.
        sleep(Duration::from_secs(1)).await;
        probe.take();
        sleep(QUIET).await;
        let quiet_p99 = probe.take().percentile(99);
        logger.log(format_args!("time to an ack before changes: p99 {quiet_p99:?}"));
        let longest = (Duration::ZERO, String::new());
        let beside = None;
        let mut probe =
            Self { beside, client, partitions, probe, logger, quiet_p99, longest, errors: 0 };
        probe.start_beside(test_bed, args)?;
        Ok(probe)
    }

    fn start_beside(&mut self, test_bed: &TestBed, args: &GrowArgs) -> anyhow::Result<()> {
        if let Some(command) = &args.beside {
            let addresses = test_bed.cluster.endpoints();
            self.beside = Some(ProgramBeside::start(command, &addresses)?);
        }
        Ok(())
    }

    /// Stops all writes, so that replicas can be compared.
    async fn pause(&mut self) -> anyhow::Result<()> {
        self.probe.stop().await?;
        match self.beside.take() {
            Some(beside) => beside.end().await,
            None => Ok(()),
        }
    }

    fn resume(&mut self, test_bed: &TestBed, args: &GrowArgs) -> anyhow::Result<()> {
        self.probe = AckProbe::start(&self.client, PROBE_TOPIC, self.partitions);
        self.start_beside(test_bed, args)
    }

    /// Ends a step and logs its ack times.
    fn step(&mut self, what: &str) {
        let mut acks = self.probe.take();
        let p99 = acks.percentile(99);
        let factor = p99.as_secs_f64() / self.quiet_p99.as_secs_f64().max(1e-6);
        self.logger.log(format_args!(
            "{what}: {} acks, p50 {:?}, p99 {p99:?} ({factor:.2} times the quiet one), longest \
             time without an ack {:?}, {} errors",
            acks.count(),
            acks.percentile(50),
            acks.gap,
            acks.errors
        ));
        self.errors += acks.errors;
        if acks.gap > self.longest.0 {
            self.longest = (acks.gap, what.to_owned());
        }
    }

    async fn end(&mut self, pause_max: Option<Duration>) -> anyhow::Result<()> {
        self.pause().await?;
        let (longest, step) = &self.longest;
        self.logger.log(format_args!("longest time without an ack: {longest:?} ({step})"));
        ensure!(self.errors == 0, "{} appends failed at the client", self.errors);
        if let Some(most) = pause_max {
            ensure!(*longest <= most, "no ack for {longest:?}, more than {most:?}: {step}");
        }
        Ok(())
    }
}

pub(super) async fn run(args: GrowArgs, program: PathBuf) -> anyhow::Result<()> {
    let logger = Logger::new(false);
    let log_kib = args.common.log_kib.or(Some(LOG_KIB));
    let common = CommonArgs { nodes: 1, log_kib, ..args.common.clone() };
    let mut test_bed =
        TestBed::start(&common, program, logger, WorkloadShape::default(), false).await?;
    let result = execute(&args, &mut test_bed).await;
    test_bed.end(result).await
}

async fn execute(args: &GrowArgs, test_bed: &mut TestBed) -> anyhow::Result<()> {
    test_bed.start_workload()?;
    test_bed.progress().await?;
    let mut probe = StepProbe::start(test_bed, args).await?;
    let beginning = test_bed.shards().await?.into_iter().map(|shard| (shard, 0)).collect();
    for id in 2..=5 {
        test_bed.wait_until_purged(&beginning).await?;
        operator::add(&mut test_bed.cluster, id, args.kill && id > 2).await?;
        // Its logs must begin where the snapshots ended.
        ensure!(test_bed.cluster.has_purged(&beginning).await, "node {id} received whole logs");
        probe.step(&format!("added node {id}"));
    }
    let wiped = 5;
    operator::wipe(&mut test_bed.cluster, wiped, args.kill).await?;
    probe.step(&format!("replaced node {wiped} after it lost its disk"));
    if args.most > 5 {
        spread(args, test_bed, &mut probe).await?;
    }
    for id in [1, 3] {
        operator::remove(&mut test_bed.cluster, id, false).await?;
        probe.step(&format!("removed node {id}"));
    }
    probe.end(args.pause_max).await?;
    test_bed.progress().await?;
    test_bed.check_replicas().await?;
    test_bed.log_stats();
    Ok(())
}

/// Grows beyond five nodes with three replicas of each shard, kills nodes during moves, and shrinks
/// to five again.
async fn spread(
    args: &GrowArgs,
    test_bed: &mut TestBed,
    probe: &mut StepProbe,
) -> anyhow::Result<()> {
    operator::set_replicas(&test_bed.cluster, 3).await?;
    for id in 6..=args.most {
        operator::add(&mut test_bed.cluster, id, args.kill).await?;
        probe.step(&format!("added node {id}"));
        if args.kill {
            // Its first replicas are being moved.
            test_bed.cluster.kill(&[id]).await?;
            test_bed.cluster.start_node(id)?;
        }
    }
    operator::wait_until_placed(&mut test_bed.cluster).await?;
    probe.step("moved replicas to the added nodes");
    operator::split_shards(&mut test_bed.cluster, SHARDS).await?;
    probe.step(&format!("split the shards into {SHARDS}"));
    operator::wait_until_placed(&mut test_bed.cluster).await?;
    probe.step("placed the new shards");
    let nodes = usize::try_from(args.most)?;
    let client = test_bed.context.client()?;
    let topic = (TOPIC, args.common.topic_partitions);
    let leaders = nodes.min(OLD_TOPIC_LEADERS);
    operator::lead_by_all(&mut test_bed.cluster, &client, topic, leaders).await?;
    probe.step(&format!("{leaders} nodes lead partitions of the topic from before"));
    operator::spread_new_topic(&mut test_bed.cluster, &test_bed.context, nodes).await?;
    probe.step(&format!("all {nodes} nodes lead partitions of a new topic"));
    test_bed.progress().await?;
    probe.pause().await?;
    test_bed.check_replicas().await?;
    test_bed.start_workload()?;
    probe.resume(test_bed, args)?;
    for id in (6..=args.most).rev() {
        operator::remove(&mut test_bed.cluster, id, args.kill).await?;
        probe.step(&format!("removed node {id}"));
    }
    operator::wait_until_placed(&mut test_bed.cluster).await?;
    Ok(())
}
