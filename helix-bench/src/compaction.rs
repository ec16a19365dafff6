//! Compaction by key: updates of keys in a compacted topic, beside the same updates in a topic that
//! keeps all of them.
//!
//! It compares the latencies of both, waits until the table is compacted, and reads it back: the
//! latest update of each key must be there.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use helix_client::{Client, FetchOptions, NewTopic, Position, ReadStart};
use helix_proto::log::v1::{CleanupPolicy, PartitionInfo, TopicConfig};
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::Instant;

use crate::format::{grouped, replication_text};
use crate::keyed_updates::{KeyedUpdates, LatestUpdates, NUMBER_BYTES, record_bytes};
use crate::load::{BenchLoad, LoadArgs, LoadMode, check_count};
use crate::options::{OutputOptions, TargetOptions, bytes, duration};
use crate::output::ModeResult;
use crate::phase::{self, RunPhase};
use crate::progress::{self, LiveLine};
use crate::report::BenchReport;
use crate::target::{self, BenchTarget};
use crate::write::{self, BatchSource, WriteLane};
use crate::{exit, interrupt, runner};

/// Prefix of created topics, before the process id.
const PREFIX: &str = "bench-compaction";
/// Length of the warm-up, whose updates count as those of the run.
const WARMUP: Duration = Duration::from_secs(1);
/// Pause between two polls of the table.
const POLL: Duration = Duration::from_millis(500);
/// Most keys, whose latest updates are kept in memory.
const KEYS_MAX: usize = 100_000_000;

/// Flags of `compaction`.
#[derive(Debug, Clone, Args)]
pub(crate) struct CompactionBenchArgs {
    #[command(flatten)]
    cluster: TargetOptions,
    /// Updates of each run
    #[arg(long, default_value_t = 10_000_000)]
    updates: u64,
    /// Keys that are updated, in random order
    #[arg(long, default_value_t = 100_000)]
    keys: usize,
    /// Bytes of a record value
    #[arg(long, default_value = "100", value_parser = bytes)]
    size: usize,
    /// Updates per batch
    #[arg(long, default_value_t = 100)]
    batch_size: u32,
    /// Concurrent clients, each with keys of its own
    #[arg(long, default_value_t = 4)]
    clients: usize,
    /// Updates per second over all clients
    #[arg(long, default_value_t = 100_000.0, value_name = "RECORDS_PER_SEC")]
    rate: f64,
    /// Longest wait until every update is compacted
    #[arg(long, default_value = "5m", value_parser = duration)]
    settle: Duration,
    /// Pairs of runs; the result is their median
    #[arg(long, default_value_t = 1)]
    runs: usize,
    /// Replicas of the created topics [default: the cluster's]
    #[arg(long, value_name = "COUNT")]
    replication_factor: Option<u32>,
    /// Seed of keys, values and retries
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Runtime threads of this process [default: one per core]
    #[arg(long)]
    threads: Option<usize>,
    #[command(flatten)]
    output: OutputOptions,
}

/// Result of all pairs.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct CompactionBenchReport {
    title: String,
    /// Median of the pairs' ratios.
    p99_ratio: Option<f64>,
    /// Median of the pairs.
    amplification: Option<f64>,
    rows: Vec<CompactionBenchRow>,
    notes: Vec<String>,
}

/// One pair: the table, and the topic that keeps all updates.
#[derive(Debug, Serialize, JsonSchema)]
struct CompactionBenchRow {
    /// Updates of the table, with those of the warm-up.
    updates: u64,
    /// Keys that were updated.
    keys: usize,
    /// Bytes of the latest update of each key.
    live_bytes: u64,
    /// Bytes of the table on the node that answered, with what its batches add: after the last ack,
    /// and once it was compacted.
    held_bytes_at_last_ack: u64,
    held_bytes: u64,
    /// `held_bytes` divided by `live_bytes`.
    amplification: f64,
    /// Share of the offsets that were compacted at the last ack, in percent.
    clean_percent_at_last_ack: f64,
    /// Time from the last ack until every update was compacted; `None` if it was not in time.
    clean_after_secs: Option<f64>,
    /// Records of the table at the end.
    records_left: u64,
    /// Keys whose latest update is not in the table; `None` if an append failed, after which the
    /// latest one is not known.
    lost_keys: Option<u64>,
    /// p99 of the appends to the table, divided by that of the other topic.
    p99_ratio: Option<f64>,
    table: BenchReport,
    /// The same updates in the topic that keeps all of them, before those of the table.
    reference: BenchReport,
}

/// Validated flags, and the load of each run.
#[derive(Debug)]
struct CompactionBenchPlan {
    args: CompactionBenchArgs,
    load: BenchLoad,
}

impl CompactionBenchPlan {
    /// Validates the flags.
    fn new(args: &CompactionBenchArgs) -> Result<Self> {
        ensure!(args.updates > 0, "--updates must be at least 1");
        ensure!(
            (args.clients..=KEYS_MAX).contains(&args.keys),
            "--keys must be from the number of --clients to {KEYS_MAX}"
        );
        ensure!(
            args.size >= NUMBER_BYTES,
            "--size must be at least {NUMBER_BYTES}: values have the number of their update"
        );
        check_count("--runs", args.runs)?;
        let load = LoadArgs {
            cluster: args.cluster.clone(),
            topic: Some(PREFIX.to_owned()),
            records: Some(args.updates),
            warmup: Some(WARMUP),
            size: Some(args.size),
            batch_size: Some(args.batch_size),
            clients: args.clients,
            in_flight: 1,
            rate: Some(args.rate),
            seed: args.seed,
            threads: args.threads,
            ..LoadArgs::default()
        };
        Ok(Self { args: args.clone(), load: BenchLoad::new(LoadMode::Write, &load)? })
    }

    /// Returns the name of a topic of a pair.
    fn topic(what: &str, pair: usize) -> String {
        format!("{PREFIX}-{}-{what}-{pair}", std::process::id())
    }
}

/// Runs the mode and returns its exit code.
///
/// # Errors
/// A flag is out of range, the cluster cannot be reached, a run could not start, the table could
/// not be read, or the result could not be written.
pub(crate) fn command(args: &CompactionBenchArgs) -> Result<u8> {
    let plan = CompactionBenchPlan::new(args).map_err(exit::usage)?;
    runner::run(plan.load.threads, &args.output, run(&plan))
}

/// Measures the pairs on new topics, which are deleted afterwards.
async fn run(plan: &CompactionBenchPlan) -> Result<CompactionBenchReport> {
    let admin = BenchTarget::admin(&plan.load).await?;
    let mut rows = Vec::new();
    for pair in 0..plan.args.runs {
        let topics = ["log", "table"].map(|what| CompactionBenchPlan::topic(what, pair));
        let row = measure(plan, &admin, &topics).await;
        target::delete_topics(&admin, &topics.each_ref().map(String::as_str)).await;
        rows.extend(row?);
        if interrupt::is_requested() {
            break;
        }
    }
    Ok(CompactionBenchReport::new(&plan.args, rows))
}

/// Measures one pair. `None` if it was interrupted.
async fn measure(
    plan: &CompactionBenchPlan,
    admin: &Client,
    [log, table]: &[String; 2],
) -> Result<Option<CompactionBenchRow>> {
    // Otherwise the cluster's retention may delete updates of the first topic meanwhile.
    let keeps_all = TopicConfig { retention_bytes: Some(u64::MAX), ..TopicConfig::default() };
    let compacted =
        TopicConfig { cleanup: CleanupPolicy::Compact.into(), ..TopicConfig::default() };
    let mut runs = Vec::new();
    for (topic, config) in [(log, keeps_all), (table, compacted)] {
        let replication_factor = plan.args.replication_factor.unwrap_or_default();
        let new = NewTopic { config, replication_factor, ..NewTopic::new(topic, 1) };
        let created = admin.admin().create_topic(&new).await;
        created.with_context(|| format!("create the topic {topic}"))?;
        progress::step(&format!("updating keys in {topic}"));
        runs.push(update(plan, topic).await?);
        if interrupt::is_requested() {
            return Ok(None);
        }
    }
    let [(reference, _), (report, sent)] =
        <[_; 2]>::try_from(runs).ok().context("two runs were made")?;
    let at_last_ack = describe(admin, table).await?;
    let settled = settle(admin, table, plan.args.settle).await?;
    if interrupt::is_requested() {
        return Ok(None);
    }
    progress::step("reading the table back");
    let (found, records_left) = read_latest(admin, table, plan.args.keys).await?;
    let live_bytes = sent.key_count() as u64 * record_bytes(plan.args.size);
    let held = |info: &PartitionInfo| {
        info.held_bytes.context("no node serves the table, so its size is unknown")
    };
    let held_bytes = held(&settled.info)?;
    let p99 = |report: &BenchReport| report.latency_us.map(|latency| latency.p99);
    let p99_ratio = p99(&report).zip(p99(&reference)).map(|(table, log)| table / log);
    Ok(Some(CompactionBenchRow {
        updates: end_offset(&settled.info),
        keys: sent.key_count(),
        live_bytes,
        held_bytes_at_last_ack: held(&at_last_ack)?,
        held_bytes,
        amplification: held_bytes as f64 / live_bytes.max(1) as f64,
        clean_percent_at_last_ack: clean_percent(&at_last_ack),
        clean_after_secs: settled.after.map(|after| after.as_secs_f64()),
        records_left,
        lost_keys: sent.count_lost(&found),
        p99_ratio,
        table: report,
        reference,
    }))
}

/// Updates the keys in one topic.
async fn update(plan: &CompactionBenchPlan, topic: &str) -> Result<(BenchReport, LatestUpdates)> {
    let load = &BenchLoad { topic: topic.to_owned(), ..plan.load.clone() };
    let (keys, lane_count) = (plan.args.keys, load.lanes());
    let target = BenchTarget::connect(load).await?;
    let source = |lane| {
        let updates = KeyedUpdates::new(load.seed, lane, lane_count, keys, load.size);
        BatchSource::Keyed(Box::new(updates))
    };
    let lanes = write::lanes(load, &target, source);
    let (lanes, warmup) = phase::run(lanes, load, RunPhase::Warmup).await?;
    let before = target.observe().await;
    let (lanes, outcome) = phase::run(lanes, load, RunPhase::Measured).await?;
    let after = target.observe().await;
    let report = BenchReport::new(load, &target, &before, &after, &warmup, &outcome);
    let lanes: Vec<KeyedUpdates> = lanes.into_iter().filter_map(WriteLane::into_updates).collect();
    Ok((report, LatestUpdates::of(keys, &lanes)))
}

/// State of the table once it is compacted, or at the end of the wait.
struct SettledTable {
    info: PartitionInfo,
    /// `None` if it is not compacted.
    after: Option<Duration>,
}

/// Waits until every update is compacted on the node that answers.
async fn settle(admin: &Client, topic: &str, wait_max: Duration) -> Result<SettledTable> {
    progress::step("waiting for compaction");
    let _line =
        LiveLine::show(|elapsed| format!("waiting for compaction: {:.0} s", elapsed.as_secs_f64()));
    let begin = Instant::now();
    loop {
        let info = describe(admin, topic).await?;
        let is_clean = info.clean_offset.is_some_and(|clean| clean >= end_offset(&info));
        if is_clean || begin.elapsed() >= wait_max || interrupt::is_requested() {
            return Ok(SettledTable { info, after: is_clean.then(|| begin.elapsed()) });
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Returns the state of the topic's partition.
async fn describe(admin: &Client, topic: &str) -> Result<PartitionInfo> {
    let found = admin.admin().topic(topic).await;
    let found = found.with_context(|| format!("describe the topic {topic}"))?;
    found.partitions.into_iter().next().context("the topic has no partition")
}

fn end_offset(info: &PartitionInfo) -> u64 {
    info.watermarks.map_or(0, |watermarks| watermarks.high_watermark)
}

fn clean_percent(info: &PartitionInfo) -> f64 {
    let end = end_offset(info).max(1) as f64;
    100.0 * info.clean_offset.unwrap_or(0) as f64 / end
}

/// Reads the table from the leader: the latest update of each key, and the number of records.
async fn read_latest(admin: &Client, topic: &str, keys: usize) -> Result<(LatestUpdates, u64)> {
    let mut found = LatestUpdates { of_key: vec![0; keys], failed: 0 };
    let (consumer, mut next, mut records_left) = (admin.consumer(), 0, 0);
    loop {
        let start = [ReadStart::new(topic, 0, Position::Offset(next))];
        let fetched = consumer.fetch(&start, &FetchOptions::default()).await;
        let fetched = fetched.with_context(|| format!("read the table {topic} at {next}"))?;
        let read = fetched.into_iter().next().context("the fetch response has no partition")?;
        for record in &read.records {
            let is_update = found.take(record.key.as_deref(), record.value.as_deref());
            ensure!(is_update, "the record at offset {} is no update of this run", record.offset);
            records_left += 1;
        }
        if read.next_offset >= read.watermarks.high_watermark {
            return Ok((found, records_left));
        }
        ensure!(read.next_offset > next, "no progress at offset {next} of {topic}");
        next = read.next_offset;
    }
}

impl CompactionBenchReport {
    fn new(args: &CompactionBenchArgs, rows: Vec<CompactionBenchRow>) -> Self {
        let mut notes = Vec::new();
        for (pair, row) in (1..).zip(&rows) {
            if row.clean_after_secs.is_none() {
                notes.push(format!(
                    "pair {pair}: not every update was compacted within {:.0} s: start the nodes \
                     with a shorter --cleaner-lag, or use --settle",
                    args.settle.as_secs_f64()
                ));
            }
            match row.lost_keys {
                Some(0) => {}
                Some(lost) => notes.push(format!(
                    "pair {pair}: the latest update of {} keys is not in the table",
                    grouped(lost as f64)
                )),
                None => notes.push(format!(
                    "pair {pair}: appends failed, so the latest updates are not known"
                )),
            }
            for (what, run) in [("table", &row.table), ("reference", &row.reference)] {
                notes.extend(run.notes.iter().map(|note| format!("pair {pair}, {what}: {note}")));
            }
        }
        let [updates, keys, rate] = [args.updates as f64, args.keys as f64, args.rate].map(grouped);
        let mut title = format!(
            "compaction by key: {updates} updates of {keys} keys, {} B each in batches of {}, at \
             {rate} updates/s",
            args.size, args.batch_size
        );
        if let Some(run) = rows.first().map(|row| &row.table) {
            let nodes = replication_text(run.node_count, run.replication);
            title += &format!("; storage {}, {nodes}, server {}", run.storage, run.server_version);
        }
        let p99_ratio = median(rows.iter().filter_map(|row| row.p99_ratio));
        let amplification = median(rows.iter().map(|row| row.amplification));
        Self { title, p99_ratio, amplification, rows, notes }
    }
}

/// Returns the middle of the values: the upper one of two.
fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

impl ModeResult for CompactionBenchReport {
    fn mode(&self) -> &'static str {
        "compaction"
    }

    /// Lost updates come first, then a table that was not compacted.
    fn exit_code(&self) -> u8 {
        let of_row = |row: &CompactionBenchRow| match row {
            row if row.lost_keys.is_some_and(|lost| lost > 0) => exit::NOT_AS_ACKED,
            row if row.clean_after_secs.is_none() => exit::FAILED,
            row => row.table.exit_code().max(row.reference.exit_code()),
        };
        self.rows.iter().map(of_row).max().unwrap_or(exit::FAILED)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        args: CompactionBenchArgs,
    }

    #[test]
    fn rejects_flags_out_of_range() {
        let plan = |line: &str| {
            CompactionBenchPlan::new(&Flags::parse_from(line.split(' ')).args).map(drop)
        };
        plan("compaction --addr n1").unwrap();
        for line in [
            "compaction --updates 0",
            "compaction --keys 3",
            "compaction --keys 1000000000",
            "compaction --size 7",
            "compaction --runs 0",
            "compaction --rate 0",
            "compaction --batch-size 0",
        ] {
            assert!(plan(&format!("{line} --addr n1")).is_err(), "{line}");
        }
    }

    #[test]
    fn median_of_two_is_the_upper_one() {
        assert_eq!(median([3.0, 1.0].into_iter()), Some(3.0));
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), Some(2.0));
        assert_eq!(median(std::iter::empty()), None);
    }
}
