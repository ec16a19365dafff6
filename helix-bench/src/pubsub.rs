//! Publish/subscribe over payload sizes: producers and subscribers on topics of one partition.
//!
//! Each subscriber receives everything of its topic. A message counts when it was acked and
//! delivered to each of them; lost and doubled messages end the run with code 11.

mod fan_out;

use std::fmt::Write as _;

use anyhow::{Context, Error, Result, ensure};
use clap::Args;
use schemars::JsonSchema;
use serde::Serialize;

use self::fan_out::PubsubCeiling;
use crate::ceiling::CeilingProcess;
use crate::delivery::PublishedTopic;
use crate::e2e::{self, MeasuredDelivery};
use crate::format::{bytes_text, replication_text};
use crate::load::{BenchLoad, LoadArgs, LoadMode, check_count};
use crate::options::{RowOptions, bytes};
use crate::output::ModeResult;
use crate::report::BenchReport;
use crate::target::{self, BenchTarget};
use crate::{exit, interrupt, progress, runner};

/// Name of the created topics, before the process id.
const TOPIC_PREFIX: &str = "bench-pubsub";

/// Flags of `pubsub`.
#[derive(Debug, Clone, Args)]
pub(crate) struct PubsubArgs {
    /// Topics of one partition, created for the run and deleted after it
    #[arg(long, default_value_t = 1)]
    topics: usize,
    /// Producers, divided among the topics
    #[arg(long, default_value_t = 1)]
    producers: usize,
    /// Subscribers, divided among the topics; each receives all messages of its topic
    #[arg(long, default_value_t = 1)]
    consumers: usize,
    /// Bytes of a message, one row each
    #[arg(long, value_delimiter = ',', value_parser = bytes,
        default_value = "256B,512B,1KiB,4KiB,8KiB,16KiB,32KiB,64KiB,128KiB")]
    payload: Vec<usize>,
    /// Open loop: messages per second over all producers. Latency counts from the scheduled send
    /// time, however late the send is
    #[arg(long, value_name = "MESSAGES_PER_SEC")]
    rate: Option<f64>,
    /// Messages per batch [default: as many as fit --batch-bytes]
    #[arg(long)]
    batch_size: Option<u32>,
    /// Payload bytes per batch; a batch has at least one message
    #[arg(long, default_value = "128KiB", value_parser = bytes, conflicts_with = "batch_size")]
    batch_bytes: usize,
    /// Batches in flight per producer
    #[arg(long, default_value_t = 4)]
    in_flight: usize,
    /// Bytes that a topic keeps; more must fit into what the slowest subscriber lags behind
    #[arg(long, default_value = "512MiB", value_parser = bytes)]
    retention: usize,
    /// Skip the ceiling: a service that only passes messages on, measured after each row
    #[arg(long)]
    no_ceiling: bool,
    #[command(flatten)]
    rows: RowOptions,
}

/// Result of all payload sizes.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct PubsubReport {
    title: String,
    producers: usize,
    consumers: usize,
    topics: usize,
    rows: Vec<PubsubRow>,
    notes: Vec<String>,
    /// A payload size could not be measured.
    #[serde(skip)]
    has_failed_row: bool,
}

/// Result of one payload size. Latencies are from the intended send.
#[derive(Debug, Serialize, JsonSchema)]
struct PubsubRow {
    payload_bytes: usize,
    /// Messages that were acked and delivered to each subscriber of their topic, per second up to
    /// the last delivery.
    messages_per_sec: f64,
    /// Bytes of those messages, without any framing.
    payload_bytes_per_sec: f64,
    /// Deliveries per second over all subscribers.
    deliveries_per_sec: f64,
    messages: u64,
    lost: u64,
    doubled: u64,
    /// Upper limit; `None` in an open loop, and if it was skipped or could not be measured.
    ceiling: Option<PubsubCeiling>,
    /// Latency, durability, resources and errors of the row.
    run: BenchReport,
}

/// Loads of one payload size: that of all producers, and that of each topic.
type RowLoads = (BenchLoad, Vec<BenchLoad>);

/// Validated rows of a run.
#[derive(Debug)]
struct PubsubPlan {
    args: PubsubArgs,
    rows: Vec<RowLoads>,
}

impl PubsubPlan {
    /// Validates the flags.
    fn new(args: &PubsubArgs) -> Result<Self> {
        check_count("--topics", args.topics)?;
        check_count("--producers", args.producers)?;
        check_count("--consumers", args.consumers)?;
        ensure!(args.producers >= args.topics, "--producers must be at least --topics");
        ensure!(args.consumers >= args.topics, "--consumers must be at least --topics");
        ensure!(args.retention > 0, "--retention must be above 0");
        let row = |payload: &usize| {
            let load = |topic: String, clients, subscribers| {
                BenchLoad::new(
                    LoadMode::E2e,
                    &load_args(args, *payload, topic, clients, subscribers),
                )
                .with_context(|| format!("--payload {}", bytes_text(*payload)))
            };
            let whole = load(format!("{TOPIC_PREFIX}-*"), args.producers, args.consumers)?;
            let share = |all: usize, topic: usize| (topic..all).step_by(args.topics).count();
            let topics = (0..args.topics)
                .map(|topic| {
                    let name = format!("{TOPIC_PREFIX}-{}-{topic}", std::process::id());
                    load(name, share(args.producers, topic), share(args.consumers, topic))
                })
                .collect::<Result<_>>()?;
            Ok((whole, topics))
        };
        let rows = args.payload.iter().map(row).collect::<Result<_>>()?;
        Ok(Self { args: args.clone(), rows })
    }

    /// Returns the runtime threads of this process.
    fn threads(&self) -> usize {
        self.rows[0].0.threads
    }
}

fn load_args(
    args: &PubsubArgs,
    payload: usize,
    topic: String,
    clients: usize,
    subscribers: usize,
) -> LoadArgs {
    let fitting = u32::try_from(args.batch_bytes / payload.max(1)).unwrap_or(u32::MAX);
    LoadArgs {
        topic: Some(topic),
        partition: -1,
        size: Some(payload),
        batch_size: Some(args.batch_size.unwrap_or(fitting.max(1))),
        clients,
        subscribers: Some(subscribers),
        in_flight: args.in_flight,
        stream: true,
        rate: args.rate,
        ..LoadArgs::of_row(&args.rows)
    }
}

/// Runs the mode and returns its exit code.
///
/// # Errors
/// A flag is out of range, the cluster cannot be reached, a row could not start, or the result
/// could not be written.
pub(crate) fn command(args: &PubsubArgs) -> Result<u8> {
    let plan = PubsubPlan::new(args).map_err(exit::usage)?;
    runner::run(plan.threads(), &args.rows.output, run(&plan))
}

/// Runs all rows on new topics, which are deleted afterwards.
async fn run(plan: &PubsubPlan) -> Result<PubsubReport> {
    let PubsubPlan { args, rows } = plan;
    let (whole, topics) = &rows[0];
    let admin = BenchTarget::admin(&topics[0]).await?;
    // In an open loop the rate is the limit.
    let ceiling = match args.no_ceiling || args.rate.is_some() {
        true => None,
        false => Some(CeilingProcess::start(whole, None).await?),
    };
    let names: Vec<&str> = topics.iter().map(|load| load.topic.as_str()).collect();
    let result = async {
        target::create_topics(&admin, &names, args.retention, args.rows.replication_factor).await?;
        let mut done = Vec::with_capacity(rows.len());
        let mut failed = Vec::new();
        for (number, row) in rows.iter().enumerate() {
            if interrupt::is_requested() {
                break;
            }
            let payload = bytes_text(args.payload[number]);
            progress::step(&format!("payload {payload}, {} of {}", number + 1, rows.len()));
            match measure(row, args.payload[number], ceiling.as_ref()).await {
                Ok(row) => done.push(row),
                Err(error) => failed.push((payload, error)),
            }
        }
        // Measured rows are not lost with a failed one.
        if done.is_empty()
            && let Some((payload, error)) = failed.pop()
        {
            return Err(error.context(format!("payload {payload}")));
        }
        anyhow::Ok(PubsubReport::new(args, done, &failed))
    }
    .await;
    target::delete_topics(&admin, &names).await;
    result
}

/// Measures a row, and its ceiling right after it.
async fn measure(
    loads: &RowLoads,
    payload: usize,
    ceiling: Option<&CeilingProcess>,
) -> Result<PubsubRow> {
    let mut row = measure_row(&loads.0, &loads.1, payload).await?;
    if let Some(ceiling) = ceiling
        && !interrupt::is_requested()
    {
        match fan_out::measure(ceiling, loads, payload).await {
            Ok(measured) => row.ceiling = Some(measured),
            Err(error) => row.run.notes.push(format!("its ceiling was not measured: {error:#}")),
        }
    }
    Ok(row)
}

async fn measure_row(whole: &BenchLoad, loads: &[BenchLoad], payload: usize) -> Result<PubsubRow> {
    let mut topics = Vec::with_capacity(loads.len());
    for load in loads {
        let target = BenchTarget::connect(load).await?;
        topics.push(PublishedTopic { load: load.clone(), target });
    }
    let measured = e2e::measure(&topics, whole).await?;
    Ok(PubsubRow::new(payload, measured))
}

impl PubsubRow {
    fn new(payload_bytes: usize, measured: MeasuredDelivery) -> Self {
        let MeasuredDelivery { report, lost, doubled, seconds } = measured;
        // A message that one subscriber lost was not delivered to each.
        let messages = report.records.saturating_sub(lost);
        let seconds = seconds.max(1e-9);
        let messages_per_sec = messages as f64 / seconds;
        let deliveries = report.latency_us.map_or(0, |latency| latency.count);
        Self {
            payload_bytes,
            messages_per_sec,
            payload_bytes_per_sec: messages_per_sec * payload_bytes as f64,
            deliveries_per_sec: deliveries as f64 / seconds,
            messages,
            lost,
            doubled,
            ceiling: None,
            run: report,
        }
    }
}

impl PubsubReport {
    fn new(args: &PubsubArgs, rows: Vec<PubsubRow>, failed: &[(String, Error)]) -> Self {
        let PubsubArgs { producers, consumers, topics, in_flight, .. } = args;
        let mut notes: Vec<String> = Vec::new();
        for row in &rows {
            let payload = bytes_text(row.payload_bytes);
            notes.extend(row.run.notes.iter().map(|note| format!("{payload}: {note}")));
        }
        for (payload, error) in failed {
            notes.push(format!("{payload}: not measured: {error:#}"));
        }
        let mut title = format!(
            "pubsub: {producers} producers, {consumers} subscribers, {topics} topics, {in_flight} \
             batches in flight per producer"
        );
        if let Some(run) = rows.first().map(|row| &row.run) {
            // Ignored: writing to a string does not fail.
            let _ = write!(
                title,
                ", {}; storage {}, {}, acks {}, server {}",
                run.load.rate.map_or_else(
                    || "closed loop".to_owned(),
                    |rate| format!("open loop at {rate} messages/s")
                ),
                run.storage,
                replication_text(run.node_count, run.replication),
                run.durability,
                run.server_version,
            );
        }
        let (producers, consumers, topics) = (*producers, *consumers, *topics);
        let has_failed_row = !failed.is_empty();
        Self { title, producers, consumers, topics, rows, notes, has_failed_row }
    }
}

impl ModeResult for PubsubReport {
    fn mode(&self) -> &'static str {
        "pubsub"
    }

    /// Lost and doubled messages come first.
    fn exit_code(&self) -> u8 {
        let of_row = |row: &PubsubRow| row_code(row.lost, row.doubled, row.run.exit_code());
        let failed = self.has_failed_row.then_some(exit::FAILED);
        self.rows.iter().map(of_row).chain(failed).max().unwrap_or(exit::FAILED)
    }
}

fn row_code(lost: u64, doubled: u64, run: u8) -> u8 {
    if lost + doubled > 0 { exit::NOT_AS_ACKED } else { run }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        args: PubsubArgs,
    }

    fn plan(flags: &[&str]) -> Result<PubsubPlan> {
        let line = ["pubsub"].iter().chain(flags);
        PubsubPlan::new(&Flags::try_parse_from(line)?.args)
    }

    #[test]
    fn lost_and_doubled_messages_decide_the_exit_code() {
        assert_eq!((row_code(0, 0, 0), row_code(0, 0, exit::FAILED)), (0, exit::FAILED));
        for (lost, doubled) in [(1, 0), (0, 1), (2, 3)] {
            assert_eq!(row_code(lost, doubled, 0), exit::NOT_AS_ACKED);
            assert_eq!(row_code(lost, doubled, exit::FAILED), exit::NOT_AS_ACKED);
        }
    }

    #[test]
    fn producers_and_consumers_are_divided_among_the_topics() {
        let flags = ["--topics", "2", "--producers", "3", "--consumers", "5", "--payload", "1KiB"];
        let plan = plan(&flags).unwrap();
        let (whole, topics) = &plan.rows[0];
        let shares = topics.iter().map(|load| (load.clients, load.subscribers));
        assert_eq!(shares.collect::<Vec<_>>(), [(2, 3), (1, 2)]);
        assert_eq!((whole.clients, whole.subscribers, whole.batch_size), (3, 5, 128));
        assert_ne!(topics[0].topic, topics[1].topic);
    }

    #[test]
    fn batch_has_at_least_one_message() {
        let plan = plan(&[]).unwrap();
        let batches: Vec<u32> = plan.rows.iter().map(|(load, _)| load.batch_size).collect();
        assert_eq!(batches, [512, 256, 128, 32, 16, 8, 4, 2, 1]);
    }

    #[test]
    fn topics_without_producer_or_subscriber_are_rejected() {
        assert!(plan(&["--topics", "2", "--consumers", "2"]).is_err());
        assert!(plan(&["--topics", "2", "--producers", "2"]).is_err());
        assert!(plan(&["--payload", "8B"]).is_err());
    }
}
