//! Sequencer: one partition is the event stream, and each node publishes to it and waits until it
//! sees its own messages.
//!
//! Measures latency with one message in flight, throughput of several nodes, and checks that all
//! subscribers see one order without gaps. A lost or doubled message ends the run with code 11.

mod check;
mod cut;
mod embedded;
mod local;
mod node;
mod order;

use anyhow::{Context, Error, Result, ensure};
use clap::Args;
use schemars::JsonSchema;
use serde::Serialize;

use self::check::{CheckOutcome, CheckStep};
use self::local::LocalRowArgs;
use self::node::{LatencyOutcome, ThroughputOutcome};
use self::order::OrderFindings;
use crate::ceiling::CeilingProcess;
use crate::format::{bytes_text, replication_text};
use crate::host::cores;
use crate::load::{BenchLoad, LoadArgs, LoadMode, check_count};
use crate::meter::{PercentileStep, Percentiles, weakest};
use crate::nodes::{NodeUsage, nodes};
use crate::options::{RowOptions, bytes};
use crate::output::{ModeResult, ReportOutput};
use crate::target::{self, BenchTarget};
use crate::{exit, interrupt, progress, runner, write};

/// Name of the created topics, before the process id.
const TOPIC_PREFIX: &str = "bench-sequencer";

/// Name of the throughput rows of the cluster.
const OVER_GRPC: &str = "gRPC";

/// Shares for which mean and maximum are reported.
const PERCENTS: [f64; 6] = [75.0, 90.0, 99.0, 99.9, 99.99, 99.999];

/// Bytes and messages of a batch in the check.
const CHECK_SIZE: usize = 256;
const CHECK_BATCH: u32 = 10;

/// Flags of `sequencer`.
#[derive(Debug, Clone, Args)]
#[command(mut_arg("duration", |duration| duration.default_value("5s")))]
pub(crate) struct SequencerArgs {
    /// Check order, rewind, late join, cut connections and a change of leader; measure nothing
    #[arg(long)]
    check: bool,
    /// check: messages over all nodes
    #[arg(long, default_value_t = 30_000, requires = "check")]
    records: u64,
    /// Nodes that publish to the stream in the throughput rows and the check
    #[arg(long, default_value_t = 3)]
    nodes: usize,
    /// Bytes of a message in the latency row
    #[arg(long, default_value = "1024", value_parser = bytes)]
    latency_size: usize,
    #[command(flatten)]
    local: LocalRowArgs,
    /// Bytes of a message in the throughput rows, batched and one message a batch
    #[arg(long, value_delimiter = ',', value_parser = bytes, default_value = "64,256,1400")]
    size: Vec<usize>,
    /// Bytes of a batch in the batched rows
    #[arg(long, default_value = "16KiB", value_parser = bytes)]
    batch_bytes: usize,
    /// Batches that a node publishes before it sees them in the stream
    #[arg(long, default_value_t = 16)]
    in_flight: usize,
    /// Throughput rows as an open loop: messages per second over all nodes
    #[arg(long, value_name = "MESSAGES_PER_SEC")]
    rate: Option<f64>,
    /// Bytes that the stream keeps
    #[arg(long, default_value = "512MiB", value_parser = bytes)]
    retention: usize,
    #[command(flatten)]
    rows: RowOptions,
}

/// Result of all rows, or of the check.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct SequencerReport {
    title: String,
    latency: Vec<SequencerLatency>,
    throughput: Vec<SequencerThroughput>,
    check: Vec<CheckStep>,
    /// Status of the nodes of the cluster after the last part.
    nodes: Vec<NodeUsage>,
    notes: Vec<String>,
    /// Rows that could not be measured, with their names.
    #[serde(skip)]
    failed: Vec<(String, Error)>,
}

/// Latency with one message in flight.
#[derive(Debug, Serialize, JsonSchema)]
struct SequencerLatency {
    name: &'static str,
    /// From the send until the node sees its message; for the echo, until the ack.
    latency_us: Option<Percentiles>,
    /// Until the ack of the same messages.
    ack_us: Option<Percentiles>,
    /// Mean and maximum of the lowest times.
    steps: Vec<PercentileStep>,
    durability: String,
    errors: u64,
    first_error: Option<String>,
    #[serde(flatten)]
    findings: OrderFindings,
}

impl SequencerLatency {
    fn new(name: &'static str, outcome: LatencyOutcome) -> Self {
        let LatencyOutcome { seen, meter, findings } = outcome;
        Self {
            name,
            latency_us: seen.percentiles(),
            ack_us: meter.latency.percentiles(),
            steps: seen.steps(&PERCENTS),
            durability: meter.durability().unwrap_or("unknown").to_owned(),
            errors: meter.failures.count,
            first_error: meter.failures.first,
            findings,
        }
    }
}

/// Throughput of all nodes.
#[derive(Debug, Serialize, JsonSchema)]
struct SequencerThroughput {
    name: &'static str,
    size: usize,
    batch_size: u32,
    /// Messages per second of the stream, as the slowest node saw it.
    messages_per_sec: f64,
    /// Own messages per second of each node.
    node_messages_per_sec: Vec<f64>,
    /// From the intended send of a batch until its node sees it.
    latency_us: Option<Percentiles>,
    durability: String,
    is_order_equal: bool,
    errors: u64,
    first_error: Option<String>,
    #[serde(flatten)]
    findings: OrderFindings,
}

impl SequencerThroughput {
    fn new(name: &'static str, load: &BenchLoad, outcome: ThroughputOutcome) -> Self {
        let seen = outcome.rates.iter().map(|(seen, _)| *seen);
        Self {
            name,
            size: load.size,
            batch_size: load.batch_size,
            messages_per_sec: seen.reduce(f64::min).unwrap_or_default(),
            node_messages_per_sec: outcome.rates.iter().map(|(_, own)| *own).collect(),
            latency_us: outcome.seen.percentiles(),
            durability: weakest(outcome.acks.keys().copied()).unwrap_or("unknown").to_owned(),
            is_order_equal: outcome.is_order_equal,
            errors: outcome.failures.count,
            first_error: outcome.failures.first,
            findings: outcome.findings,
        }
    }
}

/// Validated parts of a run.
#[derive(Debug)]
struct SequencerPlan {
    args: SequencerArgs,
    latency: BenchLoad,
    throughput: Vec<BenchLoad>,
    check: BenchLoad,
}

impl SequencerPlan {
    /// Validates the flags.
    fn new(args: &SequencerArgs) -> Result<Self> {
        check_count("--nodes", args.nodes)?;
        ensure!(!args.check || args.nodes >= 2, "--check needs at least two --nodes");
        ensure!(!args.check || args.rows.output.plot.is_none(), "--check has nothing to plot");
        let latency = load(args, args.latency_size, 1)?;
        let latency = BenchLoad { clients: 1, in_flight: 1, rate: None, ..latency };
        let mut throughput = Vec::new();
        for size in &args.size {
            let fitting = u32::try_from(args.batch_bytes / (*size).max(1)).unwrap_or(u32::MAX);
            for batch_size in [fitting.max(1), 1] {
                throughput.push(load(args, *size, batch_size)?);
            }
        }
        let mut check = load(args, CHECK_SIZE, CHECK_BATCH)?;
        check.run.records = Some(args.records);
        check.run.duration = None;
        Ok(Self { args: args.clone(), latency, throughput, check })
    }

    /// Returns the runtime threads of the throughput rows.
    fn threads(&self) -> usize {
        self.args.rows.threads.unwrap_or_else(cores)
    }
}

fn load(args: &SequencerArgs, size: usize, batch_size: u32) -> Result<BenchLoad> {
    let load = LoadArgs {
        topic: Some(format!("{TOPIC_PREFIX}-{}", std::process::id())),
        size: Some(size),
        batch_size: Some(batch_size),
        clients: args.nodes,
        in_flight: args.in_flight,
        stream: true,
        rate: args.rate,
        ..LoadArgs::of_row(&args.rows)
    };
    BenchLoad::new(LoadMode::E2e, &load).with_context(|| format!("--size {}", bytes_text(size)))
}

/// Runs the mode and returns its exit code.
///
/// # Errors
/// A flag is out of range, the cluster cannot be reached, a part could not start, or the result
/// could not be written.
pub(crate) fn command(args: &SequencerArgs) -> Result<u8> {
    let plan = SequencerPlan::new(args).map_err(exit::usage)?;
    let output = ReportOutput::open(&args.rows.output)?;
    let mut report = SequencerReport::new();
    if args.check {
        runner::runtime(plan.threads())?.block_on(check(&plan, &mut report))?;
    } else {
        // One message in flight keeps one thread busy; more of them only move the task.
        runner::runtime(1)?.block_on(latency(&plan, &mut report))?;
        runner::runtime(plan.threads())?.block_on(throughput(&plan, &mut report));
    }
    // The first latency is that of the echo, which needs no node.
    let has_none = report.latency.len() < 2 && report.throughput.is_empty();
    if has_none && let Some((name, error)) = report.failed.pop() {
        return Err(error.context(name));
    }
    report.add_notes();
    output.deliver(&report)
}

/// Measures latency: first that of an echo of streamed messages, then that of the stream.
async fn latency(plan: &SequencerPlan, report: &mut SequencerReport) -> Result<()> {
    let load = &plan.latency;
    // Fails before any row if the cluster cannot be reached.
    BenchTarget::admin(load).await?;
    let ceiling = CeilingProcess::start(load, None).await?;
    let echo = BenchLoad { mode: LoadMode::Write, ..ceiling.load(load) };
    progress::step("latency of a stream echo without storage");
    let echo = write::run(&echo).await?;
    report.latency.push(SequencerLatency {
        name: "stream echo, no storage",
        latency_us: echo.latency_us,
        ack_us: None,
        steps: Vec::new(),
        durability: "none".to_owned(),
        errors: echo.errors,
        first_error: echo.first_error,
        findings: OrderFindings::default(),
    });
    drop(ceiling);
    let local = &plan.args.local;
    for (name, load) in local.cluster_rows(load) {
        if interrupt::is_requested() {
            return Ok(());
        }
        progress::step(&format!("latency of the stream, one message in flight, {name}"));
        let outcome =
            on_stream(plan, &load, report, async |target| node::latency(&load, target).await);
        match outcome.await {
            Ok(outcome) => report.latency.push(SequencerLatency::new(name, outcome)),
            Err(error) => report.failed.push((format!("latency, {name}"), error)),
        }
    }
    if interrupt::is_requested() {
        return Ok(());
    }
    match local.run_embedded(load).await {
        Ok(outcomes) => {
            let rows = outcomes.into_iter().map(|(name, it)| SequencerLatency::new(name, it));
            report.latency.extend(rows);
        }
        Err(error) => report.failed.push(("latency, embedded".to_owned(), error)),
    }
    Ok(())
}

/// Measures throughput, one row for each size, batched and not.
async fn throughput(plan: &SequencerPlan, report: &mut SequencerReport) {
    for (number, load) in plan.throughput.iter().enumerate() {
        if interrupt::is_requested() {
            break;
        }
        let name =
            format!("throughput of {} in batches of {}", bytes_text(load.size), load.batch_size);
        progress::step(&format!("{name}, {} of {}", number + 1, plan.throughput.len()));
        let outcome =
            on_stream(plan, load, report, async |target| node::throughput(load, target).await);
        match outcome.await {
            Ok(outcome) => {
                report.throughput.push(SequencerThroughput::new(OVER_GRPC, load, outcome));
            }
            Err(error) => report.failed.push((name, error)),
        }
    }
    let batched = plan.throughput.iter().filter(|load| load.batch_size > 1 && load.rate.is_none());
    for load in batched {
        if interrupt::is_requested() {
            break;
        }
        match plan.args.local.run_embedded_throughput(load).await {
            Ok(outcomes) => {
                let row = |(name, outcome)| SequencerThroughput::new(name, load, outcome);
                report.throughput.extend(outcomes.into_iter().map(row));
            }
            Err(error) => {
                let name = format!("throughput of {}, embedded", bytes_text(load.size));
                report.failed.push((name, error));
            }
        }
    }
}

/// Checks the promises of the stream.
async fn check(plan: &SequencerPlan, report: &mut SequencerReport) -> Result<()> {
    let load = &plan.check;
    progress::step("checking the stream");
    let steps = on_stream(plan, load, report, async |target| check::run(load, target).await);
    report.check = steps.await?;
    Ok(())
}

/// Runs a part on a new topic, which is deleted afterwards, and notes the state of the nodes.
async fn on_stream<T>(
    plan: &SequencerPlan,
    load: &BenchLoad,
    report: &mut SequencerReport,
    part: impl AsyncFnOnce(&BenchTarget) -> Result<T>,
) -> Result<T> {
    let admin = BenchTarget::admin(load).await?;
    let topics = [load.topic.as_str()];
    let SequencerArgs { retention, rows, .. } = &plan.args;
    target::create_topics(&admin, &topics, *retention, rows.replication_factor).await?;
    let result = async {
        let target = BenchTarget::connect(load).await?;
        let before = target.observe().await;
        let result = part(&target).await?;
        report.nodes = nodes(&before, &target.observe().await);
        report.title = report.title(plan, target.addresses.len(), target.topic.replication_factor);
        anyhow::Ok(result)
    }
    .await;
    target::delete_topics(&admin, &topics).await;
    result
}

impl SequencerReport {
    fn new() -> Self {
        Self {
            title: String::new(),
            latency: Vec::new(),
            throughput: Vec::new(),
            check: Vec::new(),
            nodes: Vec::new(),
            notes: Vec::new(),
            failed: Vec::new(),
        }
    }

    fn title(&self, plan: &SequencerPlan, node_count: usize, replication: u32) -> String {
        let first = self.nodes.first();
        format!(
            "sequencer: {} publishers, {} batches in flight each, storage {}, {}, server {}",
            plan.args.nodes,
            plan.args.in_flight,
            first.map_or("unknown", |node| node.storage.as_str()),
            replication_text(node_count, replication),
            first.map_or("unknown", |node| node.version.as_str()),
        )
    }

    /// Adds the notes, once all parts are done.
    fn add_notes(&mut self) {
        let failed =
            self.latency.iter().map(|row| (row.name.to_owned(), row.errors, &row.first_error));
        let rows = self.throughput.iter().map(|row| {
            let name = format!("{}, {} x {}", row.name, bytes_text(row.size), row.batch_size);
            (name, row.errors, &row.first_error)
        });
        let notes = failed.chain(rows).filter(|(_, errors, _)| *errors > 0);
        let mut notes: Vec<String> = notes
            .map(|(name, errors, first)| {
                let first = first.as_deref().unwrap_or_default();
                format!("{name}: {errors} errors, not counted in other results; first: {first}")
            })
            .collect();
        for (name, error) in &self.failed {
            notes.push(format!("{name}: not measured: {error:#}"));
        }
        if !self.latency.is_empty() {
            notes.push(
                "latency is from the send of a message until its node sees it in the stream; of \
                 the echo, until the response"
                    .to_owned(),
            );
        }
        self.notes = notes;
    }
}

impl ModeResult for SequencerReport {
    fn mode(&self) -> &'static str {
        "sequencer"
    }

    /// Lost and doubled messages come first.
    fn exit_code(&self) -> u8 {
        let findings = self.latency.iter().map(|row| row.findings);
        let mut findings = findings.chain(self.throughput.iter().map(|row| row.findings));
        let is_broken = findings.any(|findings| !findings.is_clean())
            || self.throughput.iter().any(|row| !row.is_order_equal && row.errors == 0)
            || self.check.iter().any(|step| step.outcome == CheckOutcome::Failed);
        let has_failed = !self.failed.is_empty()
            || self.latency.iter().any(|row| row.latency_us.is_none())
            || self.throughput.iter().any(|row| row.latency_us.is_none());
        match (is_broken, has_failed) {
            (true, _) => exit::NOT_AS_ACKED,
            (false, true) => exit::FAILED,
            (false, false) => 0,
        }
    }
}
