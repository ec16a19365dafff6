//! Producer performance test with the flags and the lines of Kafka's, for comparisons.
//!
//! One producer sends single records, which it batches. Latency counts from the intended send with
//! a throughput, and else from the send.

mod report;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use helix_client::ProducerOptions;
use tokio::time::{Instant, interval_at};

use crate::budget::{PhaseLimits, SendBudget};
use crate::host::cores;
use crate::interval_meter::{IntervalMeter, SharedMeter};
use crate::load::{BatchCompression, BenchLoad, LoadArgs, LoadMode};
use crate::messages::{KeyDistribution, MESSAGE_BYTES_MAX, MessagePool, POOL_BYTES_MAX};
use crate::options::{AckLevel, OutputOptions, TargetOptions, bytes, duration, parse_address};
use crate::output;
use crate::single_sends::SingleSender;
use crate::target::BenchTarget;
use crate::{exit, progress, runner};

pub(crate) use report::PerfReport;
use report::{PerfInterval, window_line};

/// Most distinct values of `--record-size`.
const VALUES_MAX: usize = 1024;
/// Highest value of `--batch-size`.
const BATCH_BYTES_MAX: usize = 64 << 20;
/// Highest value of `--buffer-memory`.
const BUFFER_BYTES_MAX: usize = 1 << 30;
/// Highest value of `--throughput`.
const THROUGHPUT_MAX: f64 = 1e9;
/// Lowest value of `--reporting-interval`.
const REPORTING_INTERVAL_MIN: Duration = Duration::from_millis(10);
/// Producer properties that have a meaning here.
const PROPERTIES: [&str; 6] =
    ["acks", "batch.size", "bootstrap.servers", "buffer.memory", "compression.type", "linger.ms"];

/// Flags of `perf`.
#[derive(Debug, Clone, Args)]
#[command(mut_arg("addr", |addr| addr.visible_alias("bootstrap-server")))]
pub(crate) struct PerfArgs {
    /// Topic to send to
    #[arg(long)]
    topic: String,
    /// Records to send
    #[arg(long, value_name = "RECORDS")]
    num_records: u64,
    /// Bytes of a record value
    #[arg(
        long,
        value_parser = bytes,
        value_name = "BYTES",
        required_unless_present = "payload_file",
        conflicts_with = "payload_file"
    )]
    record_size: Option<usize>,
    /// File with record values, which are sent in turn
    #[arg(long, value_name = "FILE")]
    payload_file: Option<PathBuf>,
    /// Text between the values of the file [default: a new line]
    #[arg(long, value_name = "TEXT", requires = "payload_file", conflicts_with = "record_size")]
    payload_delimiter: Option<String>,
    /// Records per second; -1 sends as fast as acks allow
    #[arg(
        long,
        default_value_t = -1.0,
        allow_negative_numbers = true,
        value_name = "RECORDS_PER_SEC"
    )]
    throughput: f64,
    /// Bytes at which a batch is closed [default: 256KiB]
    #[arg(long, value_parser = bytes, value_name = "BYTES")]
    batch_size: Option<usize>,
    /// Longest wait of a batch for more records [default: 1ms]
    #[arg(long, value_parser = duration)]
    linger: Option<Duration>,
    /// Bytes that wait for acks before a send waits [default: 32MiB]
    #[arg(long, value_parser = bytes, value_name = "BYTES")]
    buffer_memory: Option<usize>,
    /// Ack to wait for, as for `write` [default: all]
    #[arg(long, value_name = "all|quorum-written|1|none")]
    acks: Option<AckLevel>,
    /// Compression of the batches [default: none]
    #[arg(long)]
    compression: Option<BatchCompression>,
    /// Kafka's names of settings: acks, batch.size, bootstrap.servers, buffer.memory,
    /// compression.type, linger.ms
    #[arg(long, visible_alias = "command-property", num_args = 1.., value_name = "KEY=VALUE")]
    producer_props: Vec<String>,
    /// Milliseconds between two lines
    #[arg(long, default_value_t = 5000, value_name = "MS")]
    reporting_interval: u64,
    #[command(flatten)]
    cluster: TargetOptions,
    /// Create the topic first with this many partitions. An existing topic must have the same
    /// number
    #[arg(long, value_name = "PARTITIONS")]
    create_topic: Option<u32>,
    /// Replicas of the created topic [default: the cluster's]
    #[arg(long, requires = "create_topic", value_name = "COUNT")]
    replication_factor: Option<u32>,
    /// Seed of payloads and retries
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Runtime threads of this process [default: one per core]
    #[arg(long)]
    threads: Option<usize>,
    #[command(flatten)]
    output: OutputOptions,
}

impl PerfArgs {
    /// Applies the producer properties.
    ///
    /// # Errors
    /// A property is unknown, has a wrong value, or repeats a flag.
    fn with_properties(&self) -> Result<Self> {
        let mut args = Self { producer_props: Vec::new(), ..self.clone() };
        for property in &self.producer_props {
            let (key, value) = property
                .split_once('=')
                .with_context(|| format!("producer property {property} must be KEY=VALUE"))?;
            let wrong = || format!("producer property {key} is {value}");
            let is_new = match key {
                "acks" => {
                    let level = if value == "-1" { "all" } else { value };
                    let level = AckLevel::from_str(level, true).map_err(anyhow::Error::msg);
                    args.acks.replace(level.with_context(wrong)?).is_none()
                }
                "batch.size" => {
                    let size = bytes(value).map_err(anyhow::Error::msg).with_context(wrong)?;
                    args.batch_size.replace(size).is_none()
                }
                "bootstrap.servers" => {
                    let servers: Result<_, _> = value.split(',').map(parse_address).collect();
                    let servers = servers.map_err(anyhow::Error::msg).with_context(wrong)?;
                    std::mem::replace(&mut args.cluster.addr, servers).is_empty()
                }
                "buffer.memory" => {
                    let size = bytes(value).map_err(anyhow::Error::msg).with_context(wrong)?;
                    args.buffer_memory.replace(size).is_none()
                }
                "compression.type" => {
                    let codec = BatchCompression::from_str(value, true);
                    let codec = codec.map_err(anyhow::Error::msg).with_context(wrong)?;
                    args.compression.replace(codec).is_none()
                }
                "linger.ms" => {
                    let linger = Duration::from_millis(value.parse::<u64>().with_context(wrong)?);
                    args.linger.replace(linger).is_none()
                }
                _ => bail!(
                    "producer property {key} is not supported; the properties are {}",
                    PROPERTIES.join(", ")
                ),
            };
            ensure!(is_new, "producer property {key} is given twice, or with its flag");
        }
        Ok(args)
    }
}

/// Validated flags.
#[derive(Debug)]
struct PerfPlan {
    load: BenchLoad,
    records: u64,
    /// Records per second; `None` is a closed loop.
    throughput: Option<f64>,
    pool: MessagePool,
    options: ProducerOptions,
    reporting_interval: Duration,
    /// Standard output is for JSON.
    is_json_printed: bool,
}

impl PerfPlan {
    /// Validates the flags.
    ///
    /// # Errors
    /// A flag is out of range, or the payload file cannot be read.
    fn new(args: &PerfArgs) -> Result<Self> {
        let args = args.with_properties()?;
        ensure!(args.num_records > 0, "--num-records must be above 0");
        let throughput = match args.throughput {
            -1.0 => None,
            rate if rate > 0.0 && rate <= THROUGHPUT_MAX => Some(rate),
            _ => bail!("--throughput must be -1, or above 0 and at most {THROUGHPUT_MAX}"),
        };
        let reporting_interval = Duration::from_millis(args.reporting_interval);
        ensure!(
            reporting_interval >= REPORTING_INTERVAL_MIN,
            "--reporting-interval must be at least {}",
            REPORTING_INTERVAL_MIN.as_millis()
        );
        let defaults = ProducerOptions::default();
        let batch_bytes = args.batch_size.unwrap_or(defaults.batch_bytes);
        let buffer_bytes = args.buffer_memory.unwrap_or(defaults.buffer_bytes);
        for (flag, bytes, most) in [
            ("--batch-size", batch_bytes, BATCH_BYTES_MAX),
            ("--buffer-memory", buffer_bytes, BUFFER_BYTES_MAX),
            ("--record-size", args.record_size.unwrap_or(1), MESSAGE_BYTES_MAX),
        ] {
            ensure!((1..=most).contains(&bytes), "{flag} must be from 1 to {most} bytes");
        }
        let pool = match (&args.payload_file, args.record_size) {
            (Some(file), _) => {
                let delimiter = args.payload_delimiter.as_deref().unwrap_or("\n");
                // As the flag is written in a shell without quotes for control characters.
                let delimiter = delimiter.replace("\\n", "\n").replace("\\t", "\t");
                MessagePool::of_parts(file, &delimiter).context("--payload-file")?
            }
            (None, size) => {
                let size = size.context("--record-size is missing")?;
                let count = (POOL_BYTES_MAX / 4 / size).clamp(1, VALUES_MAX);
                MessagePool::random(size, 1.0, count, args.seed)?
            }
        };
        let load = LoadArgs {
            cluster: args.cluster,
            topic: Some(args.topic),
            partition: -1,
            records: Some(args.num_records),
            size: Some(args.record_size.unwrap_or_else(|| pool.mean_bytes())),
            batch_size: Some(1),
            clients: 1,
            in_flight: 1,
            rate: throughput,
            acks: args.acks,
            compression: args.compression,
            create_topic: args.create_topic,
            replication_factor: args.replication_factor,
            seed: args.seed,
            threads: Some(args.threads.unwrap_or_else(cores)),
            ..LoadArgs::default()
        };
        let load = BenchLoad::new(LoadMode::Write, &load)?;
        let options = ProducerOptions {
            durability: load.durability(),
            compression: load.compression.into(),
            linger: args.linger.unwrap_or(defaults.linger),
            batch_bytes,
            buffer_bytes,
            ..defaults
        };
        Ok(Self {
            load,
            records: args.num_records,
            throughput,
            pool,
            options,
            reporting_interval,
            is_json_printed: args.output.json.as_deref() == Some(Path::new("-")),
        })
    }
}

/// Runs the mode and returns its exit code.
///
/// # Errors
/// A flag is not valid, the topic cannot be reached, or the result cannot be written.
pub(crate) fn command(args: &PerfArgs) -> Result<u8> {
    let plan = PerfPlan::new(args).map_err(exit::usage)?;
    runner::run(plan.load.threads, &args.output, run(&plan))
}

/// Sends the records, and prints a line after each interval.
async fn run(plan: &PerfPlan) -> Result<PerfReport> {
    let target = BenchTarget::connect(&plan.load).await?;
    let status = target.observer.admin().node_status(None).await;
    let status = status.context("ask a node for its status")?;
    let (epoch, meter) = (Instant::now(), Arc::new(SharedMeter::new(1)));
    let mut sender = SingleSender {
        producer: target.client(0).producer(plan.options.clone()),
        topic: plan.load.topic.clone(),
        messages: plan.pool.producer(0, KeyDistribution::NoKey, plan.load.seed),
        epoch,
        meter: meter.clone(),
        task: 0,
    };
    let limits = PhaseLimits { records: Some(plan.records), duration: None };
    let (budget, pacer) = match plan.throughput {
        None => (SendBudget::closed_loop(limits), None),
        Some(rate) => {
            let (budget, pacer) = SendBudget::open_loop(limits, rate, 1);
            (budget, Some(pacer))
        }
    };
    let started = budget.start();
    let sends = budget.clone();
    let mut sending = tokio::spawn(async move { sender.run(&sends).await });
    let mut lines = interval_at(started + plan.reporting_interval, plan.reporting_interval);
    let (mut total, mut since) = (IntervalMeter::new(), started);
    let mut intervals = Vec::new();
    loop {
        tokio::select! {
            ended = &mut sending => {
                ended.context("the producer has failed")?;
                break;
            }
            _ = lines.tick() => {
                let (taken, now) = (meter.take(), Instant::now());
                if !plan.is_json_printed {
                    output::print(&window_line(&taken, now - since))?;
                }
                intervals.push(PerfInterval::new(&taken, since - started, now - since));
                since = now;
                total.merge(&taken);
            }
        }
    }
    let elapsed = started.elapsed();
    drop(pacer);
    let (taken, last) = (meter.take(), started + elapsed - since);
    // The rate of a short rest says nothing.
    if intervals.is_empty() || 2 * last >= plan.reporting_interval {
        intervals.push(PerfInterval::new(&taken, since - started, last));
    }
    total.merge(&taken);
    let mut report = PerfReport::new(plan, &total, elapsed, &meter.failures());
    report.storage = status.storage;
    report.server_version = status.version;
    report.node_count = target.addresses.len();
    report.replication = target.topic.replication_factor;
    report.sends_missed = budget.sends_missed();
    report.intervals = intervals;
    for note in report.notes() {
        progress::step(&format!("note: {note}"));
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use helix_client::Compression;
    use helix_proto::log::v1::Durability;

    use super::*;

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        args: PerfArgs,
    }

    const LEAST: [&str; 7] =
        ["perf", "--topic", "t", "--num-records", "10", "--record-size", "100"];

    pub(super) fn plan(flags: &[&str]) -> Result<PerfPlan> {
        let line = LEAST.iter().chain(flags).copied();
        PerfPlan::new(&Flags::try_parse_from(line)?.args)
    }

    #[test]
    fn flags_of_the_tool_give_a_plan() {
        let flags = "--throughput 5000 --producer-props bootstrap.servers=n1:9092,n2:9092 acks=1 \
                     batch.size=16384 linger.ms=5 compression.type=lz4 buffer.memory=67108864";
        let plan = plan(&flags.split_whitespace().collect::<Vec<_>>()).unwrap();
        assert_eq!((plan.records, plan.throughput), (10, Some(5000.0)));
        assert_eq!(plan.load.cluster.addr, ["n1:9092", "n2:9092"]);
        let ProducerOptions { durability, batch_bytes, linger, buffer_bytes, compression, .. } =
            plan.options;
        assert_eq!((durability, batch_bytes), (Durability::LeaderWritten, 16384));
        assert_eq!((linger, buffer_bytes), (Duration::from_millis(5), 64 << 20));
        assert_eq!(compression, Compression::Lz4);
    }

    #[test]
    fn defaults_are_those_of_the_client() {
        let small = plan(&["--batch-size", "16KiB"]).unwrap();
        assert_eq!(small.options.batch_bytes, 16384);
        let plan = plan(&["--throughput", "-1"]).unwrap();
        let defaults = ProducerOptions::default();
        assert_eq!((plan.throughput, plan.load.acks), (None, AckLevel::All));
        assert_eq!(plan.options.batch_bytes, defaults.batch_bytes);
        assert_eq!((plan.options.linger, plan.load.partition), (defaults.linger, None));
    }

    #[test]
    fn wrong_flags_are_rejected() {
        for flags in [
            "--throughput 0",
            "--throughput -2",
            "--throughput 1e10",
            "--batch-size 0",
            "--batch-size 65MiB",
            "--buffer-memory 2GiB",
            "--reporting-interval 1",
            "--payload-file p",
            "--payload-delimiter x",
            "--producer-props acks",
            "--producer-props acks=2",
            "--producer-props retries=5",
            "--producer-props linger.ms=soon",
            "--producer-props acks=1 acks=all",
            "--acks 1 --producer-props acks=all",
        ] {
            assert!(plan(&flags.split(' ').collect::<Vec<_>>()).is_err(), "{flags}");
        }
        for line in ["perf --topic t --num-records 1", "perf --num-records 1 --record-size 1"] {
            assert!(Flags::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
        for (records, size) in [("0", "1"), ("1", "0"), ("1", "17MiB")] {
            let line = ["perf", "--topic", "t", "--num-records", records, "--record-size", size];
            assert!(PerfPlan::new(&Flags::parse_from(line).args).is_err(), "{records} x {size}");
        }
        let error = plan(&["--producer-props", "retries=5"]).unwrap_err().to_string();
        assert!(error.contains("retries is not supported; the properties are acks,"), "{error}");
    }
}
