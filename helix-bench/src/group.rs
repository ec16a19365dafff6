//! Consumer groups: reads by a member, commits, changes of members, and idle heartbeats.
//!
//! Each measurement has a reference that was measured with it, in turns.

mod commits;
mod handover;
mod reads;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use helix_client::{Client, Config, GroupConsumer, NewTopic};
use serde::Serialize;
use tokio::time::{Instant, sleep, timeout};

use crate::args::{bytes, duration};
use crate::host::cores;
use crate::load::check_count;
use crate::progress;
use crate::target;

/// Prefix of created topics and groups, before the process id.
const PREFIX: &str = "bench-group";
/// Longest wait for a step that is not measured.
const STEP_MAX: Duration = Duration::from_secs(60);

/// Time of one member while several are called in turn.
const TURN: Duration = Duration::from_millis(2);

/// Flags of `group`.
#[derive(Debug, Clone, Args)]
pub(crate) struct GroupBenchArgs {
    /// Node addresses
    #[arg(
        long,
        value_name = "HOST:PORT,..",
        value_delimiter = ',',
        default_value = "127.0.0.1:9092"
    )]
    addr: Vec<String>,
    /// Measurements to make
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = GroupPart::ALL)]
    parts: Vec<GroupPart>,
    /// Runs of each measurement; the result is their median
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Partitions of the created topic
    #[arg(long, default_value_t = 12)]
    partitions: u32,
    /// Records to read
    #[arg(long, default_value_t = 200_000)]
    records: u64,
    /// Bytes of a record value
    #[arg(long, default_value = "1KiB", value_parser = bytes)]
    size: usize,
    /// Members that commit at the same time
    #[arg(long, default_value_t = 64)]
    committers: usize,
    /// Clean leaves in a run
    #[arg(long, default_value_t = 20)]
    leaves: usize,
    /// Session timeout of a member that is killed
    #[arg(long, default_value = "2s", value_parser = duration)]
    session_timeout: Duration,
    /// Idle groups
    #[arg(long, default_value_t = 1000)]
    groups: usize,
    /// Members of an idle group
    #[arg(long, default_value_t = 10)]
    members: usize,
    /// Heartbeat interval of idle members
    #[arg(long, default_value = "3s", value_parser = duration)]
    heartbeat: Duration,
    /// Length of a measurement that is bounded by time
    #[arg(long, default_value = "5s", value_parser = duration)]
    duration: Duration,
    /// Runtime threads of this process [default: one per core]
    #[arg(long)]
    threads: Option<usize>,
    /// Write the result to this file as JSON; "-" prints JSON, not the table
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// A measurement of `group`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum GroupPart {
    Read,
    Commit,
    Handover,
    Heartbeat,
}

impl GroupPart {
    const ALL: [Self; 4] = [Self::Read, Self::Commit, Self::Handover, Self::Heartbeat];
}

/// Result of all measurements.
#[derive(Debug, Serialize)]
pub(crate) struct GroupBenchReport {
    /// Name of the mode, by which tables recognise the result.
    mode: &'static str,
    pub(crate) command: String,
    title: String,
    rows: Vec<GroupBenchRow>,
    notes: Vec<String>,
}

/// One measured value.
#[derive(Debug, Serialize)]
struct GroupBenchRow {
    name: String,
    value: f64,
    unit: &'static str,
    /// Measurement to compare with, in the same unit.
    reference_name: &'static str,
    reference: Option<f64>,
}

/// Validated flags.
#[derive(Debug)]
pub(crate) struct GroupBenchPlan {
    args: GroupBenchArgs,
    threads: usize,
}

impl GroupBenchPlan {
    /// Validates the flags.
    ///
    /// # Errors
    /// A flag is out of range.
    pub(crate) fn new(args: &GroupBenchArgs) -> Result<Self> {
        for (flag, value) in [
            ("--runs", args.runs),
            ("--partitions", args.partitions as usize),
            ("--committers", args.committers),
            ("--leaves", args.leaves),
            ("--groups", args.groups),
            ("--members", args.members),
        ] {
            check_count(flag, value)?;
        }
        ensure!(args.records > 0, "--records must be at least 1");
        ensure!(
            (Duration::from_secs(1)..=Duration::from_secs(600)).contains(&args.session_timeout),
            "--session-timeout must be from 1s to 10min"
        );
        ensure!(
            (Duration::from_millis(334)..=Duration::from_secs(200)).contains(&args.heartbeat),
            "--heartbeat must be from 334ms to 200s"
        );
        let threads = args.threads.unwrap_or_else(cores);
        check_count("--threads", threads)?;
        Ok(Self { args: args.clone(), threads })
    }

    /// Returns the runtime threads of this process.
    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    fn client(&self) -> Result<Client> {
        Ok(Client::new(Config::new(self.args.addr.iter().cloned()))?)
    }

    fn topic(&self) -> String {
        format!("{PREFIX}-{}", std::process::id())
    }

    /// Returns the name of a group that no run has used.
    fn group(&self, what: &str, number: usize) -> String {
        format!("{}-{what}-{number}", self.topic())
    }
}

/// Makes the measurements on a new topic, which is deleted afterwards.
///
/// # Errors
/// The cluster cannot be reached, or a measurement could not finish.
pub(crate) async fn run(plan: &GroupBenchPlan) -> Result<GroupBenchReport> {
    let client = plan.client()?;
    let topic = plan.topic();
    let created = client.admin().create_topic(&NewTopic::new(&topic, plan.args.partitions)).await;
    created.with_context(|| format!("create the topic {topic} at {}", plan.args.addr.join(",")))?;
    let rows = measure(plan).await;
    target::delete_topics(&client, &[&topic]).await;
    let status = client.admin().node_status(None).await.context("ask for the server's version")?;
    Ok(GroupBenchReport {
        mode: "group",
        command: String::new(),
        title: format!(
            "consumer groups: {} partitions, {} records of {} B; storage {}, server {}",
            plan.args.partitions, plan.args.records, plan.args.size, status.storage, status.version
        ),
        rows: rows?,
        notes: vec![format!("medians of {} runs, in turns with the reference", plan.args.runs)],
    })
}

async fn measure(plan: &GroupBenchPlan) -> Result<Vec<GroupBenchRow>> {
    let mut rows = Vec::new();
    for part in &plan.args.parts {
        progress::step(&format!("{part:?}").to_lowercase());
        rows.extend(match part {
            GroupPart::Read => reads::measure(plan).await?,
            GroupPart::Commit => commits::measure(plan).await?,
            GroupPart::Handover => handover::measure(plan).await?,
            GroupPart::Heartbeat => vec![idle(plan).await?],
        });
    }
    Ok(rows)
}

/// Measures the CPU of the nodes while members send nothing but heartbeats.
async fn idle(plan: &GroupBenchPlan) -> Result<GroupBenchRow> {
    let client = plan.client()?;
    let topic = plan.topic();
    let mut members = Vec::with_capacity(plan.args.groups * plan.args.members);
    for number in 0..plan.args.groups {
        for _ in 0..plan.args.members {
            let group = client.consumer_group(plan.group("idle", number)).topics([&topic]);
            // The service waits for a third of it.
            members.push(group.session_timeout(plan.args.heartbeat * 3).join());
        }
        let first = members.len() - plan.args.members;
        settle(&mut members[first..], plan.args.partitions).await?;
    }
    // Assignments of the last groups end, and heartbeats spread.
    sleep(plan.args.heartbeat).await;
    let before = cpu_time(&client).await?;
    let since = Instant::now();
    sleep(plan.args.duration.max(2 * plan.args.heartbeat)).await;
    let used = cpu_time(&client).await?.saturating_sub(before);
    let seconds = since.elapsed().as_secs_f64();
    let count = members.len();
    futures_util::future::join_all(members.into_iter().map(GroupConsumer::close)).await;
    Ok(GroupBenchRow {
        name: format!("CPU of all nodes, {} groups, {count} members", plan.args.groups),
        value: used.as_secs_f64() / seconds * 100.0,
        unit: "% of a core",
        reference_name: "",
        reference: None,
    })
}

async fn cpu_time(client: &Client) -> Result<Duration> {
    let metadata = client.admin().metadata(&[""]).await?;
    let mut used = 0;
    for node in metadata.nodes {
        used += client.admin().node_status(Some(&node.endpoint)).await?.cpu_time_us;
    }
    Ok(Duration::from_micros(used))
}

/// Calls members in turn until they have divided all partitions.
async fn settle(members: &mut [GroupConsumer], partitions: u32) -> Result<()> {
    let until = Instant::now() + STEP_MAX;
    let owned = |members: &[GroupConsumer]| members.iter().map(|it| it.assignment().len()).sum();
    loop {
        for member in &mut *members {
            if let Ok(event) = timeout(TURN, member.next()).await {
                event.context("a member has ended")??;
            }
        }
        let owned: usize = owned(members);
        if owned == partitions as usize && members.iter().all(GroupConsumer::is_settled) {
            return Ok(());
        }
        ensure!(Instant::now() < until, "{owned} of {partitions} partitions are assigned");
    }
}

/// Returns the middle of the values.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        args: GroupBenchArgs,
    }

    #[test]
    fn rejects_flags_out_of_range() {
        let plan = |line: &str| GroupBenchPlan::new(&Flags::parse_from(line.split(' ')).args);
        plan("group").unwrap();
        for line in ["group --runs 0", "group --session-timeout 1ms", "group --heartbeat 300s"] {
            assert!(plan(line).is_err(), "{line}");
        }
    }

    #[test]
    fn median_is_the_middle_value() {
        assert_eq!((median(&[3.0, 1.0, 2.0]), median(&[7.0])), (2.0, 7.0));
    }
}
