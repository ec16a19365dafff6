//! Workloads of the OpenMessaging Benchmark, unchanged, with results in its format.
//!
//! A subscription is a consumer group that reads one topic. Latency counts from the intended
//! send, however late the send is.

mod consumers;
mod rate;
pub(crate) mod result;
mod run;
mod workload;
mod yaml;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use futures_util::{StreamExt, TryStreamExt, stream};
use helix_client::{Client, NewTopic, ProducerOptions};
use helix_proto::log::v1::{ErrorReason, TopicConfig};
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::format::{bytes_text, grouped, replication_text};
use crate::host::cores;
use crate::interval_meter::LongHistogram;
use crate::load::{BatchCompression, BenchLoad, LoadArgs, LoadMode, check_count};
use crate::messages::MessagePool;
use crate::options::{AckLevel, OutputOptions, TargetOptions, bytes, duration};
use crate::output::{self, ReportOutput};
use crate::target::{self, BenchTarget};
use crate::{exit, interrupt, runner};
use run::{OmbOutcome, OmbRun};
use workload::{OmbPayload, OmbWorkload};

/// Name of the created topics and groups, before the process id.
const PREFIX: &str = "bench-omb";
/// Connections per node when none are stated and there are many producers and consumers.
const CONNECTIONS_DEFAULT_MAX: usize = 64;
/// Topics that are created at the same time.
const CONCURRENT_TOPICS: usize = 16;
/// Bytes that all topics keep together, unless a backlog needs all.
const RETENTION_DEFAULT: u64 = 1 << 30;
/// Least bytes that a partition keeps.
const RETENTION_MIN: u64 = 1 << 20;
/// Longest wait until the members of failed consumers have left, more than their session timeout,
/// and the interval between attempts to delete their groups.
const LEAVE_MAX: Duration = Duration::from_secs(60);
const LEAVE_CHECK: Duration = Duration::from_millis(200);
/// Highest value of `--batch-bytes`.
const BATCH_BYTES_MAX: usize = 64 << 20;

/// Flags of `omb`.
#[derive(Debug, Clone, Args)]
pub(crate) struct OmbArgs {
    /// Workload file of the OpenMessaging Benchmark
    #[arg(value_name = "WORKLOAD.yaml")]
    workload: PathBuf,
    #[command(flatten)]
    cluster: TargetOptions,
    /// Name of the system in the result, which charts show [default: version, nodes, storage and
    /// acks]
    #[arg(long, value_name = "NAME")]
    driver: Option<String>,
    /// Length of the test, in place of testDurationMinutes
    #[arg(long, value_parser = duration)]
    duration: Option<Duration>,
    /// Length of the warm-up, in place of warmupDurationMinutes
    #[arg(long, value_parser = duration)]
    warmup: Option<Duration>,
    /// Connections per node, shared by producers and consumers [default: one for each, at most 64]
    #[arg(long)]
    connections: Option<usize>,
    /// Ack to wait for, as for `write` [default: all]
    #[arg(long, value_name = "all|quorum-written|1|none")]
    acks: Option<AckLevel>,
    /// Compression of the batches
    #[arg(long, default_value = "none")]
    compression: BatchCompression,
    /// Longest wait of a batch for more messages
    #[arg(long, default_value = "1ms", value_parser = duration)]
    linger: Duration,
    /// Bytes at which a batch is closed
    #[arg(long, default_value = "256KiB", value_parser = bytes)]
    batch_bytes: usize,
    /// Bytes that the topics keep together; more must fit into what consumers lag behind [default:
    /// 1GiB; all with a backlog]
    #[arg(long, value_parser = bytes)]
    retention: Option<usize>,
    /// Replicas of the created topics [default: the cluster's]
    #[arg(long, value_name = "COUNT")]
    replication_factor: Option<u32>,
    /// Seed of payloads and retries
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Runtime threads of this process [default: one per core]
    #[arg(long)]
    threads: Option<usize>,
    /// Write the result to this file as JSON; "-" prints JSON, not the table
    #[arg(long, short = 'o', visible_alias = "output", value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write plots to this directory, as SVG, and as PNG in a build with the feature `png`
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
}

/// Validated workload and flags.
#[derive(Debug)]
struct OmbPlan {
    workload: OmbWorkload,
    pool: MessagePool,
    load: BenchLoad,
    producer_options: ProducerOptions,
    driver: Option<String>,
    /// Bytes that a partition keeps; `None` keeps all.
    retention: Option<u64>,
    replication_factor: Option<u32>,
}

/// Runs the mode and returns its exit code.
///
/// # Errors
/// The workload is not valid, the cluster cannot be reached, or the run could not finish.
pub(crate) fn command(args: &OmbArgs) -> Result<u8> {
    let plan = OmbPlan::new(args).map_err(exit::usage)?;
    // The format of the result has no place for a disk.
    let (json, plot) = (args.json.clone(), args.plot.clone());
    let options = OutputOptions { json, plot, nodes_disk: None };
    let output = ReportOutput::open(&options)?;
    let report = runner::runtime(plan.load.threads)?.block_on(run(&plan))?;
    output.write(&report.json, &report.text())?;
    let code = output::exit_code(report.exit_code(), interrupt::is_requested());
    output.draw(report.json)?;
    Ok(code)
}

impl OmbPlan {
    /// Reads the workload and validates the flags.
    ///
    /// # Errors
    /// The workload or its payload cannot be read, or a value is out of range.
    fn new(args: &OmbArgs) -> Result<Self> {
        let mut workload = OmbWorkload::read(&args.workload)?;
        workload.duration = args.duration.unwrap_or(workload.duration);
        workload.warmup = args.warmup.unwrap_or(workload.warmup);
        ensure!(!workload.duration.is_zero(), "--duration must be above 0");
        ensure!(
            (1..=BATCH_BYTES_MAX).contains(&args.batch_bytes),
            "--batch-bytes must be from 1 to {BATCH_BYTES_MAX}"
        );
        ensure!(args.retention != Some(0), "--retention must be above 0");
        let clients = workload.producers().saturating_add(workload.consumers());
        let connections = args.connections.unwrap_or(clients.min(CONNECTIONS_DEFAULT_MAX));
        check_count("--connections", connections)?;
        let load = LoadArgs {
            cluster: args.cluster.clone(),
            topic: Some(topic_name(0)),
            partition: -1,
            size: Some(workload.message_size),
            batch_size: Some(1),
            clients: workload.producers(),
            connections: Some(connections),
            in_flight: 1,
            duration: Some(workload.duration),
            warmup: Some(workload.warmup),
            acks: args.acks,
            compression: Some(args.compression),
            seed: args.seed,
            threads: Some(args.threads.unwrap_or_else(cores)),
            ..LoadArgs::default()
        };
        let load = BenchLoad::new(LoadMode::Write, &load)?;
        let producer_options = ProducerOptions {
            durability: load.durability(),
            compression: load.compression.into(),
            linger: args.linger,
            batch_bytes: args.batch_bytes,
            ..ProducerOptions::default()
        };
        let pool = match &workload.payload {
            OmbPayload::Random { ratio, pool_size } => {
                let size = workload.message_size;
                MessagePool::random(size, *ratio, *pool_size, args.seed)
                    .context("randomizedPayloadPoolSize times messageSize")?
            }
            OmbPayload::File(path) => {
                let path = payload_path(path, &args.workload);
                MessagePool::of_file(&path, workload.message_size).context("payloadFile")?
            }
        };
        Ok(Self {
            retention: retention(&workload, args.retention),
            workload,
            pool,
            load,
            producer_options,
            driver: args.driver.clone(),
            replication_factor: args.replication_factor,
        })
    }
}

/// Returns the bytes that a partition keeps; `None` keeps all.
fn retention(workload: &OmbWorkload, asked: Option<usize>) -> Option<u64> {
    let all = match asked {
        Some(bytes) => bytes as u64,
        None if workload.backlog_bytes > 0 => return None,
        None => RETENTION_DEFAULT,
    };
    let partitions = workload.topics as u64 * u64::from(workload.partitions_per_topic);
    Some((all / partitions).max(RETENTION_MIN))
}

/// Finds a payload file from the working directory, the workload's directory, or its parent, which
/// is where the format's own repository has it.
fn payload_path(path: &Path, workload: &Path) -> PathBuf {
    let workload = std::path::absolute(workload).unwrap_or_else(|_| workload.to_owned());
    let directories = workload.ancestors().skip(1).take(2);
    let candidates = directories.map(|directory| directory.join(path));
    let mut candidates = std::iter::once(path.to_owned()).chain(candidates);
    candidates.find(|candidate| candidate.is_file()).unwrap_or_else(|| path.to_owned())
}

fn prefix() -> String {
    format!("{PREFIX}-{}-", std::process::id())
}

fn topic_name(number: usize) -> String {
    format!("{}{number:04}", prefix())
}

/// Runs the workload on new topics and groups, which are deleted afterwards.
async fn run(plan: &OmbPlan) -> Result<OmbReport> {
    let admin = BenchTarget::admin(&plan.load).await?;
    let topics: Vec<String> = (0..plan.workload.topics).map(topic_name).collect();
    let measured = measure(plan, &admin, &topics).await;
    // The groups first, or the coordinator would have them forget the topics.
    let deleted = delete_groups(&admin).await;
    let names: Vec<&str> = topics.iter().map(String::as_str).collect();
    target::delete_topics(&admin, &names).await;
    match (measured, deleted) {
        (Err(error), Err(not_deleted)) => {
            Err(error.context(format!("groups {}* are left: {not_deleted:#}", prefix())))
        }
        (measured, deleted) => measured.and_then(|report| deleted.map(|()| report)),
    }
}

/// Deletes the groups of the run.
///
/// # Errors
/// A group still has members after some time, or the cluster cannot be reached.
async fn delete_groups(admin: &Client) -> Result<()> {
    let until = Instant::now() + LEAVE_MAX;
    loop {
        match target::delete_groups(admin, &prefix()).await {
            // A failed consumer leaves in the background, or its session ends.
            Err(error) if has_members(&error) && Instant::now() < until => sleep(LEAVE_CHECK).await,
            deleted => return deleted,
        }
    }
}

fn has_members(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<helix_client::Error>());
    causes.any(|error| error.is(ErrorReason::GroupNotEmpty))
}

async fn measure(plan: &OmbPlan, admin: &Client, topics: &[String]) -> Result<OmbReport> {
    create_topics(plan, admin, topics).await?;
    let system = describe_system(plan, admin).await?;
    let clients: Vec<Client> = (0..plan.load.connections)
        .map(|_| Ok(Client::new(target::config(&plan.load))?))
        .collect::<Result<_>>()?;
    let outcome = OmbRun::start(plan, &clients, topics).measure().await?;
    Ok(OmbReport::new(plan, system, outcome))
}

async fn create_topics(plan: &OmbPlan, admin: &Client, topics: &[String]) -> Result<()> {
    let create = async |name: String| {
        let topic = NewTopic {
            replication_factor: plan.replication_factor.unwrap_or_default(),
            config: TopicConfig {
                retention_bytes: Some(plan.retention.unwrap_or(u64::MAX)),
                ..TopicConfig::default()
            },
            ..NewTopic::new(&name, plan.workload.partitions_per_topic)
        };
        let created = admin.admin().create_topic(&topic).await;
        created.with_context(|| format!("create the topic {name}")).map(|_| ())
    };
    let names = topics.iter().cloned();
    stream::iter(names).map(create).buffer_unordered(CONCURRENT_TOPICS).try_collect().await
}

/// Describes the cluster and what an ack of it means.
async fn describe_system(plan: &OmbPlan, admin: &Client) -> Result<String> {
    let status = admin.admin().node_status(None).await.context("ask a node for its status")?;
    let nodes = admin.admin().metadata(&[""]).await.context("list nodes")?.nodes.len();
    let topic = admin.admin().topic(&plan.load.topic).await.context("look up a topic")?;
    Ok(format!(
        "Helix {}, {}, storage {}, acks {}",
        status.version,
        replication_text(nodes, topic.replication_factor),
        status.storage,
        plan.load.acks.name()
    ))
}

/// Result of a workload.
#[derive(Debug)]
struct OmbReport {
    /// The result as the format has it.
    json: Value,
    title: String,
    outcome: OmbOutcome,
    message_size: usize,
    notes: Vec<String>,
}

impl OmbReport {
    fn new(plan: &OmbPlan, system: String, outcome: OmbOutcome) -> Self {
        let workload = &plan.workload;
        let driver = plan.driver.as_deref().unwrap_or(&system);
        let json = result::json(workload, driver, &outcome.intervals, &outcome.total);
        let title = format!(
            "omb: {}; {} topics x {} partitions, {} a message, {} producers, {} consumers; \
             {system}",
            workload.name,
            workload.topics,
            workload.partitions_per_topic,
            bytes_text(workload.message_size),
            workload.producers(),
            workload.consumers(),
        );
        let mut report =
            Self { json, title, outcome, message_size: workload.message_size, notes: Vec::new() };
        report.notes = report.caveats(workload.rate.is_none());
        report
    }

    /// Lists what a reader of the figures must know.
    fn caveats(&self, is_rate_found: bool) -> Vec<String> {
        let OmbOutcome { rate, missed, missing, repeated, failures, .. } = &self.outcome;
        let mut notes = Vec::new();
        if let Some(early) = self.outcome.early_end {
            notes.push(format!("the test ended early: {}", early.text()));
        }
        if is_rate_found {
            notes.push(format!(
                "{} messages/s is the highest rate that the consumers kept up with in trials",
                grouped(rate.round())
            ));
        }
        if *missed > 0 {
            notes.push(format!(
                "{} sends were due and not made: the rate was not reached",
                grouped(*missed as f64)
            ));
        }
        if *missing > 0 {
            notes.push(format!(
                "{} deliveries of acked messages did not arrive",
                grouped(*missing as f64)
            ));
        }
        if *repeated > 0 {
            notes.push(format!("{} deliveries were repeated", grouped(*repeated as f64)));
        }
        if failures.count > 0 {
            notes.push(format!(
                "{} sends failed, warm-up and trials included; the first: {}",
                grouped(failures.count as f64),
                failures.first.as_deref().unwrap_or_default()
            ));
        }
        notes
    }

    /// Returns the exit code: missing deliveries come first.
    fn exit_code(&self) -> u8 {
        let OmbOutcome { missing, total, early_end, .. } = &self.outcome;
        exit_code(*missing, total.acked, early_end.is_some())
    }

    fn text(&self) -> String {
        let OmbOutcome { rate, total, elapsed, consumed, intervals, .. } = &self.outcome;
        let seconds = elapsed.as_secs_f64().max(1e-9);
        let per_sec = |count: u64| grouped((count as f64 / seconds).round());
        let mut text = format!(
            "{}\n\nrate {} messages/s; published {}/s ({:.1} MB/s), errors {}/s; consumed {}/s; \
             backlog at the end {}\n\n",
            self.title,
            grouped(rate.round()),
            per_sec(total.acked),
            (total.acked as f64 * self.message_size as f64) / seconds / 1e6,
            per_sec(total.failed),
            // Consumers that fall behind read the rest after the last ack.
            per_sec(*consumed),
            grouped(intervals.last().map_or(0.0, |interval| interval.backlog as f64)),
        );
        text += &format!("{:<14}", "latency, ms");
        for column in ["avg", "p50", "p95", "p99", "p99.9", "p99.99", "max"] {
            text += &format!("{column:>11}");
        }
        text.push('\n');
        for (name, latencies) in [
            ("publish", &total.publish),
            ("send delay", &total.delay),
            ("end to end", &total.end_to_end),
        ] {
            text += &format!("{name:<14}{}\n", latency_cells(latencies));
        }
        for note in &self.notes {
            text += &format!("note: {note}\n");
        }
        if interrupt::is_requested() {
            text += "note: interrupted: this is what was measured until then\n";
        }
        text
    }
}

fn latency_cells(latencies: &LongHistogram) -> String {
    let percentiles = [50.0, 95.0, 99.0, 99.9, 99.99].map(|it| latencies.percentile_us(it));
    let mean = std::iter::once(latencies.mean_us());
    let cells = mean.chain(percentiles).chain([latencies.max_us()]);
    cells.map(|us| format!("{:>11.3}", us / 1e3)).collect()
}

fn exit_code(missing: u64, acked: u64, ended_early: bool) -> u8 {
    match (missing, acked) {
        (0, 0) => exit::FAILED,
        (0, _) if ended_early => exit::FAILED,
        (0, _) => 0,
        _ => exit::NOT_AS_ACKED,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        args: OmbArgs,
    }

    fn shipped(name: &str) -> String {
        format!("{}/workloads/{name}", env!("CARGO_MANIFEST_DIR"))
    }

    fn plan(workload: &str, flags: &[&str]) -> Result<OmbPlan> {
        let line = ["omb", workload].into_iter().chain(flags.iter().copied());
        OmbPlan::new(&Flags::try_parse_from(line)?.args)
    }

    #[test]
    fn workload_and_flags_give_a_plan() {
        let file = shipped("10-topics-3-partitions-1kb-keyed.yaml");
        let plan = plan(&file, &["--acks", "1", "--duration", "2s"]).unwrap();
        assert_eq!((plan.load.size, plan.load.clients, plan.load.connections), (1024, 10, 20));
        assert_eq!(plan.load.acks, AckLevel::One);
        assert_eq!(plan.workload.duration, Duration::from_secs(2));
        assert_eq!(plan.workload.warmup, Duration::from_secs(60));
        assert_eq!(plan.retention, Some(RETENTION_DEFAULT / 30));
        assert_eq!(plan.producer_options.batch_bytes, 256 << 10);
    }

    #[test]
    fn backlog_keeps_everything() {
        let file = shipped("1-topic-16-partitions-1kb-backlog-8gb.yaml");
        assert_eq!(plan(&file, &[]).unwrap().retention, None);
        let limited = plan(&file, &["--retention", "32MiB"]).unwrap();
        assert_eq!(limited.retention, Some(2 << 20));
        let small = plan(&file, &["--retention", "1B"]).unwrap();
        assert_eq!(small.retention, Some(RETENTION_MIN));
    }

    #[test]
    fn flags_out_of_range_are_rejected() {
        let file = shipped("1-topic-1-partition-100b.yaml");
        for flags in [
            ["--duration", "0s"],
            ["--batch-bytes", "0"],
            ["--batch-bytes", "65MiB"],
            ["--retention", "0"],
            ["--connections", "0"],
            ["--connections", "65537"],
            ["--threads", "0"],
        ] {
            assert!(plan(&file, &flags).is_err(), "{flags:?}");
        }
        assert!(plan("none.yaml", &[]).is_err());
    }

    #[test]
    fn payload_file_is_found_beside_the_directory_of_the_workloads() {
        let dir = tempfile::tempdir().unwrap();
        let (workload, payload) = (dir.path().join("a/w.yaml"), dir.path().join("payload.data"));
        assert_eq!(payload_path(Path::new("payload.data"), &workload), Path::new("payload.data"));
        crate::figures::write_file(&payload, b"12345").unwrap();
        assert_eq!(payload_path(Path::new("payload.data"), &workload), payload);
    }

    #[test]
    fn missing_deliveries_decide_the_exit_code() {
        let complete = |missing, acked| exit_code(missing, acked, false);
        assert_eq!((complete(0, 5), complete(0, 0)), (0, exit::FAILED));
        assert_eq!((complete(1, 5), complete(1, 0)), (exit::NOT_AS_ACKED, exit::NOT_AS_ACKED));
        assert_eq!((exit_code(0, 5, true), exit_code(1, 5, true)), (1, exit::NOT_AS_ACKED));
    }
}
