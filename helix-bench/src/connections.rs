//! Many connections at once: some of them send one small request at a time, the others are idle.
//!
//! A request appends one record, so a response means that the record was stored. Latency is from
//! the scheduled send time.

use anyhow::{Context, Error, Result, ensure};
use clap::Args;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use schemars::JsonSchema;
use serde::Serialize;
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

use crate::format::{grouped, replication_text};
use crate::load::{BenchLoad, LoadArgs, LoadMode, check_count};
use crate::meter::Failures;
use crate::nodes::{NodeUsage, nodes, rss_bytes};
use crate::options::{RowOptions, bytes};
use crate::output::ModeResult;
use crate::payload::BatchPool;
use crate::phase::{self, RunPhase};
use crate::report::BenchReport;
use crate::target::{self, BenchTarget};
use crate::weak_acks;
use crate::write::{self, BatchSource};
use crate::{exit, interrupt, progress, runner};

/// Name of the created topic, before the process id.
const TOPIC_PREFIX: &str = "bench-connections";
/// Connections that are opened at the same time.
const OPENING_MAX: usize = 64;
/// Files of this process beside its connections.
const OTHER_FILES: u64 = 64;
/// Bytes that the topic keeps.
const RETENTION: usize = 256 << 20;

/// Flags of `connections`.
#[derive(Debug, Clone, Args)]
pub(crate) struct ConnectionsArgs {
    /// Connections at once, one row each
    #[arg(long, value_delimiter = ',', default_value = "100,1000,10000")]
    count: Vec<usize>,
    /// Share of the connections that send requests, in percent
    #[arg(long, default_value_t = 10)]
    active_percent: usize,
    /// Requests per second over all connections
    #[arg(long, default_value_t = 1000.0, value_name = "REQUESTS_PER_SEC")]
    rate: f64,
    /// Bytes of a record value
    #[arg(long, default_value = "64", value_parser = bytes)]
    size: usize,
    #[command(flatten)]
    rows: RowOptions,
}

/// Result of all rows.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ConnectionsReport {
    title: String,
    rows: Vec<ConnectionsRow>,
    notes: Vec<String>,
    /// A number of connections could not be measured.
    #[serde(skip)]
    has_failed_row: bool,
}

/// Result of one number of connections.
#[derive(Debug, Serialize, JsonSchema)]
struct ConnectionsRow {
    /// Connections that were asked for, and those that the nodes accepted.
    count: usize,
    opened: usize,
    active: usize,
    /// Connections opened per second, each with its first request; with TLS, a full handshake each.
    opened_per_sec: f64,
    /// Responses divided by requests, in percent.
    delivered_percent: f64,
    /// Growth of the nodes' resident memory by the idle connections, divided by their number.
    bytes_per_connection: Option<f64>,
    /// Records that were acked and are not in the log.
    lost: u64,
    first_refusal: Option<String>,
    /// Latency, durability, resources and errors of the row.
    run: BenchReport,
}

/// Validated rows of a run.
#[derive(Debug)]
struct ConnectionsPlan {
    args: ConnectionsArgs,
    rows: Vec<BenchLoad>,
}

impl ConnectionsPlan {
    /// Validates the flags, and raises the limit of open files where that is allowed.
    fn new(args: &ConnectionsArgs) -> Result<Self> {
        ensure!((1..=100).contains(&args.active_percent), "--active-percent must be from 1 to 100");
        for count in &args.count {
            check_count("--count", *count)?;
        }
        let most = args.count.iter().copied().max().context("--count is empty")?;
        allow_open_files(most as u64 + OTHER_FILES)?;
        let rows = args.count.iter().map(|count| load(args, *count)).collect::<Result<_>>()?;
        Ok(Self { args: args.clone(), rows })
    }

    /// Returns the runtime threads of this process.
    fn threads(&self) -> usize {
        self.rows[0].threads
    }
}

fn load(args: &ConnectionsArgs, count: usize) -> Result<BenchLoad> {
    let load = LoadArgs {
        topic: Some(format!("{TOPIC_PREFIX}-{}", std::process::id())),
        size: Some(args.size),
        batch_size: Some(1),
        clients: active(count, args.active_percent),
        connections: Some(count),
        in_flight: 1,
        rate: Some(args.rate),
        ..LoadArgs::of_row(&args.rows)
    };
    BenchLoad::new(LoadMode::Write, &load).with_context(|| format!("--count {count}"))
}

fn active(count: usize, percent: usize) -> usize {
    (count * percent).div_ceil(100)
}

fn allow_open_files(files: u64) -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= files) {
        return Ok(());
    }
    let maximum = limit.maximum;
    ensure!(
        maximum.is_none_or(|maximum| maximum >= files),
        "{files} open files are needed and {} are allowed; raise the limit (ulimit -n) or lower \
         --count",
        maximum.unwrap_or_default()
    );
    setrlimit(Resource::Nofile, Rlimit { current: Some(files), maximum })
        .context("raise the limit of open files")
}

/// Runs the mode and returns its exit code.
///
/// # Errors
/// A flag is out of range, the cluster cannot be reached, a row could not start, or the result
/// could not be written.
pub(crate) fn command(args: &ConnectionsArgs) -> Result<u8> {
    let plan = ConnectionsPlan::new(args).map_err(exit::usage)?;
    runner::run(plan.threads(), &args.rows.output, run(&plan))
}

/// Runs all rows on a new topic, which is deleted afterwards.
async fn run(plan: &ConnectionsPlan) -> Result<ConnectionsReport> {
    let ConnectionsPlan { args, rows } = plan;
    let admin = BenchTarget::admin(&rows[0]).await?;
    let topics = [rows[0].topic.as_str()];
    target::create_topics(&admin, &topics, RETENTION, args.rows.replication_factor).await?;
    let result = async {
        let mut done = Vec::with_capacity(rows.len());
        let mut failed = Vec::new();
        for (load, count) in rows.iter().zip(&args.count) {
            let name = format!("{} connections", grouped(*count as f64));
            progress::step(&name);
            match measure(load, *count).await {
                // Without any request, the row says nothing of the connections.
                Ok(row) if interrupt::is_requested() && row.run.requests == 0 => {}
                Ok(row) => done.push(row),
                Err(error) => failed.push((name, error)),
            }
            if interrupt::is_requested() {
                break;
            }
        }
        // Measured rows are not lost with a failed one.
        if done.is_empty()
            && let Some((name, error)) = failed.pop()
        {
            return Err(error.context(name));
        }
        anyhow::Ok(ConnectionsReport::new(args, done, &failed))
    }
    .await;
    target::delete_topics(&admin, &topics).await;
    result
}

async fn measure(load: &BenchLoad, count: usize) -> Result<ConnectionsRow> {
    let target = BenchTarget::connect(load).await?;
    let ends = target.ends().await?;
    let closed = target.observe().await;
    let opening_from = Instant::now();
    let refused = open_all(&target, count).await?;
    let opening_secs = opening_from.elapsed().as_secs_f64().max(1e-9);
    let open = target.observe().await;
    let pool = BatchPool::new(load.payload, load.size, 1, load.seed, load.clients);
    let lanes = write::lanes(load, &target, |lane| BatchSource::BatchPool(pool.lane(lane)));
    let (lanes, warmup) = phase::run(lanes, load, RunPhase::Warmup).await?;
    let before = target.observe().await;
    let (_, outcome) = phase::run(lanes, load, RunPhase::Measured).await?;
    let after = target.observe().await;
    let mut all = warmup.meter.clone();
    all.merge(&outcome.meter);
    let lost = weak_acks::count_missing(&target, &ends, &all.acked).await?;
    let rss = |nodes: &[NodeUsage]| rss_bytes(nodes).map(|bytes| bytes as f64);
    let grown = rss(&nodes(&closed, &open)).zip(rss(&nodes(&closed, &closed)));
    let opened = count - usize::try_from(refused.count).unwrap_or(count).min(count);
    let sent = outcome.meter.requests + outcome.meter.failures.count;
    Ok(ConnectionsRow {
        count,
        opened,
        active: load.clients,
        opened_per_sec: opened as f64 / opening_secs,
        delivered_percent: 100.0 * outcome.meter.requests as f64 / sent.max(1) as f64,
        bytes_per_connection: grown
            .filter(|_| opened > 0)
            .map(|(open, closed)| (open - closed).max(0.0) / opened as f64),
        lost,
        first_refusal: refused.first,
        run: BenchReport::new(load, &target, &before, &after, &warmup, &outcome),
    })
}

/// Makes one request on each connection, which opens it. Returns those that were refused.
async fn open_all(target: &BenchTarget, count: usize) -> Result<Failures> {
    let mut opening = JoinSet::new();
    let mut refused = Failures::default();
    let mut note = |opened: std::result::Result<helix_client::Result<()>, JoinError>| {
        if let Err(error) = opened.context("a connection has failed")? {
            refused.add(format!("{:?}", error.code), 1, error.to_string());
        }
        anyhow::Ok(())
    };
    for number in 0..count {
        if interrupt::is_requested() {
            break;
        }
        if opening.len() >= OPENING_MAX
            && let Some(opened) = opening.join_next().await
        {
            note(opened)?;
        }
        let (client, topic) = (target.client(number).clone(), target.topic.name.clone());
        // Looking up the topic also gives the active connections their leader.
        opening.spawn(async move { client.admin().topic(&topic).await.map(|_| ()) });
    }
    while let Some(opened) = opening.join_next().await {
        note(opened)?;
    }
    Ok(refused)
}

impl ConnectionsReport {
    fn new(args: &ConnectionsArgs, rows: Vec<ConnectionsRow>, failed: &[(String, Error)]) -> Self {
        let mut notes = Vec::new();
        for row in &rows {
            let count = grouped(row.count as f64);
            if let Some(why) = &row.first_refusal {
                notes.push(format!(
                    "{count}: {} connections were not opened, the first: {why}; a node's \
                     --memory-limit bounds its connections",
                    row.count - row.opened
                ));
            }
            notes.extend(row.run.notes.iter().map(|note| format!("{count}: {note}")));
        }
        for (name, error) in failed {
            notes.push(format!("{name}: not measured: {error:#}"));
        }
        let mut title = format!(
            "connections: {} requests/s, one record of {} B each, {} % of the connections active",
            args.rate, args.size, args.active_percent
        );
        if let Some(run) = rows.first().map(|row| &row.run) {
            title += &format!(
                "; {}, storage {}, {}, acks {}, server {}",
                if run.tls { "TLS" } else { "no TLS" },
                run.storage,
                replication_text(run.node_count, run.replication),
                run.durability,
                run.server_version
            );
        }
        Self { title, rows, notes, has_failed_row: !failed.is_empty() }
    }
}

impl ModeResult for ConnectionsReport {
    fn mode(&self) -> &'static str {
        "connections"
    }

    /// Lost records come first, then connections that were not opened.
    fn exit_code(&self) -> u8 {
        let of_row = |row: &ConnectionsRow| match row {
            row if row.lost > 0 => exit::NOT_AS_ACKED,
            row if row.opened < row.count => exit::FAILED,
            row => row.run.exit_code(),
        };
        let failed = self.has_failed_row.then_some(exit::FAILED);
        self.rows.iter().map(of_row).chain(failed).max().unwrap_or(exit::FAILED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_least_one_connection_is_active() {
        assert_eq!((active(100, 10), active(1, 1), active(1000, 100)), (10, 1, 1000));
    }

    #[test]
    fn more_open_files_than_allowed_are_rejected() {
        assert!(allow_open_files(1).is_ok());
        if getrlimit(Resource::Nofile).maximum.is_some() {
            let error = allow_open_files(u64::MAX - 1).unwrap_err().to_string();
            assert!(error.contains("ulimit -n"), "{error}");
        }
    }
}
